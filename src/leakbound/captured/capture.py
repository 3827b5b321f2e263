"""A captured update: its tensors, its metadata, and its place on disk."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leakbound import check, tensors
from leakbound._util import files
from leakbound.captured import trainer
from leakbound.tensors import Named

BEFORE = "before.safetensors"
PREFIX = "leakbound."
KINDS = ("gradient", "delta", "weights")
TREES = "xgboost"
"""The kind of a file of bytes, which `leakbound.trees` reads."""
_ROUND = re.compile(r"round-(\d{4,9})")
_CLIENT = re.compile(r"client-(\d{1,20})\.safetensors")
Given = Path | str | Mapping[str, Any] | Sequence[Any]
"""A file, tensors (or arrays) by name, or a list of them in the model's order; a Flower
`ArrayRecord` is a mapping of arrays by name."""

MOST = 2**16
"""The largest count that is accepted from a file's metadata: untrusted files could cost time."""
LISTED = 3
"""The most updates that an error about all of them names."""
ALIKE = 0.5
"""With at least this cosine with the weights before, at a length within a factor of 2, an update
counts as weights.
"""


@dataclass(frozen=True, eq=False)
class Capture:
    """One client's update of one round, as a server or an eavesdropper holds it.

    Its `kind` is "gradient", "delta" (after - before) or "weights" (after). `before` are the
    weights that the client received, if they are not the model's own. `about` is the file's
    metadata. `notes` state in sentences what was assumed.
    """

    name: str
    kind: str
    update: Named
    before: Named | None = None
    about: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Its name among the updates of several rounds."""
        number = self.about.get("round", "")
        client = self.about.get("client", "")
        known = number.isdecimal() and client.isdecimal()
        return _place(number, client) if known else self.name

    @property
    def source(self) -> str:
        """Where `about` is from."""
        return self.about.get(trainer.SOURCE, "the file's metadata")

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits of the tensors and the kind."""
        total = hashlib.sha256(self.kind.encode())
        for named in (self.update, self.before or {}):
            # The order of the names in a file must not change the digest.
            for key, value in sorted(named.items()):
                total.update(f"{key}:{value.dtype}:{tuple(value.shape)}".encode())
                if value.numel():  # a tensor without entries may have strides that no view has
                    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                    total.update(flat.numpy().data)
        return total.hexdigest()[:16]

    def number(self, name: str, *, or_zero: bool = False) -> float | None:
        """A number above 0 from the metadata; None if it is missing."""
        text = self.about.get(name)
        if text is None:
            return None
        with suppress(ValueError):
            value = float(text)
            if 0 < value < math.inf or (or_zero and value == 0):
                return value
        raise ValueError(
            f"{self.name}: the metadata give {name} as {text[:60]!r}; give {name} as an option, a "
            f"number {'from' if or_zero else 'above'} 0"
        )

    def whole(self, name: str) -> int | None:
        """A whole number from the metadata; None if it is missing."""
        value = self.number(name)
        if value is None:
            return None
        stated = f"{self.name}: the metadata give {name} as {value:g}"
        if value != int(value):
            raise ValueError(f"{stated}, which is no count")
        if not 1 <= value <= MOST:
            raise ValueError(
                f"{stated}, but only 1 to {MOST} are accepted from a file; give {name} as an option"
            )
        return int(value)


@dataclass(frozen=True)
class Skipped:
    """An update of a round that is not attacked, and why."""

    name: str
    reason: str

    @staticmethod
    def of(name: str, error: Exception) -> Skipped:
        """As its error says."""
        short = name.rpartition("/")[2]
        return Skipped(name, str(error).removeprefix(f"{short}: "))

    def __str__(self) -> str:
        return f"{self.name} is not attacked: {self.reason}"


def none_left(skipped: Sequence[Skipped]) -> ValueError:
    """The error if no update of a round can be attacked."""
    why = "; ".join(f"{one.name}: {one.reason}" for one in skipped[:LISTED])
    more = f"; and {len(skipped) - LISTED} more" if len(skipped) > LISTED else ""
    return ValueError(f"none of {len(skipped)} updates can be attacked: {why}{more}")


def load(
    update: Given,
    before: Given | None = None,
    *,
    kind: str = "auto",
) -> Capture:
    """An update from a file or from memory, with the weights that the client received.

    `update` is a .safetensors or .npz file, a folder of `save_pretrained`, tensors by name
    (including a Flower `ArrayRecord`), or a list of arrays in the order of the model's state dict.
    `before` is found next to a file that `leakbound capture` wrote; None uses the model's own
    weights later. `kind` is "gradient" (at the weights before), "delta" (after - before),
    "weights" (after), or "auto": the kind in the file's metadata, otherwise weights if the update
    is close to the weights before.

    Example:
        >>> before = {"w": torch.ones(3)}
        >>> load({"w": torch.tensor([0.9, 1.0, 1.1])}, before).kind
        'weights'
    """
    check.one_of(("auto", *KINDS), kind=kind)
    named, about, name = _tensors(update, "update")
    if before is None and isinstance(update, Path | str):
        # Only beside a file of our own: elsewhere a file of that name may be anything.
        beside = Path(update).parent / BEFORE
        before = beside if PREFIX + "kind" in about and beside.is_file() else None
    start = None if before is None else _tensors(before, "before")[0]
    known = {k.removeprefix(PREFIX): v for k, v in about.items() if k.startswith(PREFIX)}
    notes: list[str] = []
    if not known and isinstance(update, Path | str):
        known = trainer.stated(update, before if isinstance(before, Path | str) else None)
        notes += trainer.note(known)
    if kind == "auto":
        kind = _kind(known, named, start, name, notes)
    return Capture(name, kind, named, start, known, tuple(notes))


def load_all(
    folder: Path,
    before: Given | None = None,
    *,
    kind: str = "auto",
    round: int | None = None,
    skipped: list[Skipped] | None = None,
) -> list[Capture]:
    """Every update of a folder that `leakbound capture` wrote, or of one of its rounds.

    Updates that cannot be read are added to `skipped`. Without that list, or if none is left, they
    are an error.
    """
    places = updates_in(Path(folder))
    if round is not None:
        rounds = sorted({number for number, *_ in places})
        places = [row for row in places if row[0] == round]
        if not places:
            raise ValueError(f"round is {round}; {str(folder)!r} holds the rounds {rounds}")
    captures: list[Capture] = []
    lost: list[Skipped] = []
    for number, client, path in places:
        try:
            captures.append(load(path, before, kind=kind))
        except ValueError as error:
            if skipped is None or len(places) == 1:
                raise
            lost.append(Skipped.of(_place(number, client), error))
    if not captures:
        raise none_left(lost)
    if skipped is not None:
        skipped += lost
    return captures


def _place(number: int | str, client: int | str) -> str:
    return f"round-{int(number):04d}/client-{int(client)}.safetensors"


def _tensors(
    source: Given,
    what: str,
) -> tuple[dict[str, Tensor], dict[str, str], str]:
    if isinstance(source, Path | str):
        path = Path(source)
        if path.is_dir() and tensors.weights_in(path) is None:
            raise ValueError(f"{what} is {str(path)!r}, a folder; give one file of it")
        named, about = tensors.read(path)
        return named, about, path.name
    single = isinstance(source, Tensor | nn.Module | bytes) or hasattr(source, "__array__")
    if single or not isinstance(source, Mapping | Iterable):
        raise ValueError(
            f"{what} is a {type(source).__name__}; give a file, tensors by name (such as "
            "model.state_dict()), or a list of tensors in the model's order"
        )
    rows = source.items() if isinstance(source, Mapping) else enumerate(source)
    named = {str(key): _tensor(value, f"{what}[{key!r}]") for key, value in rows}
    if not named:
        raise ValueError(f"{what} holds no tensor; give the model's tensors by name")
    return named, {}, what


def _tensor(value: Any, what: str) -> Tensor:
    """A dense tensor of real numbers."""
    if isinstance(value, Tensor):
        if value.is_meta:
            raise ValueError(f"{what} is on the meta device, without values; load its values")
        if value.is_quantized or value.is_complex():
            raise ValueError(
                f"{what} holds values of type {value.dtype}; give floats or whole numbers"
            )
        tensor: Tensor = value.detach()
        return tensor if tensor.layout == torch.strided else tensor.to_dense()
    import numpy as np

    flower = getattr(value, "stype", None) == "numpy.ndarray"  # of an `ArrayRecord`
    try:
        array = tensors.of_bytes(what, value.data) if flower else np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{what} is no array of numbers ({error})") from error
    if array.dtype.kind not in "uifb":
        raise ValueError(f"{what} holds values of type {array.dtype}; give numbers")
    # PyTorch takes only the machine's own byte order.
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))


def _kind(
    about: Mapping[str, str],
    update: Named,
    before: Named | None,
    name: str,
    notes: list[str],
) -> str:
    if about.get("kind") == TREES:
        raise ValueError(f"{name} holds no weights but bytes, as of trees; add --kind {TREES}")
    if "kind" in about:
        check.one_of(KINDS, kind=about["kind"])
        return about["kind"]
    if before is None:
        raise ValueError(
            f"kind is 'auto', and {name} does not state its kind; give kind (gradient, delta or "
            "weights) and the weights before"
        )
    update = _finite(update, name)
    pairs = _paired(update, before)
    if pairs:
        # The others may be gigabytes of an adapter's base.
        compared = {id(b) for _, b in pairs}
        compared_before = {key: b for key, b in before.items() if id(b) in compared}
        finite = {id(b) for b in _finite(compared_before, "before").values()}
        pairs = [pair for pair in pairs if id(pair[1]) in finite]
    else:
        raise ValueError(
            f"kind is 'auto', and {name} ({_first(update)}) has no tensor of one name and shape in "
            f"common with the weights before ({_first(before)}); give the weights before that "
            "belong to it, or kind: gradient, delta or weights"
        )
    products = torch.zeros(3, dtype=torch.float64)
    for a, b in pairs:  # one tensor at a time: files may have gigabytes
        if a.is_floating_point() and b.is_floating_point():
            one = a.double().flatten()
            two = b.double().flatten()
            products += torch.stack([one @ one, two @ two, one @ two]).cpu()
    *squares, both = products.tolist()
    size, start = map(math.sqrt, squares)
    cosine = both / max(size * start, 1e-300)
    if cosine > ALIKE and size < 2 * start < 4 * size:
        notes.append(
            f"taken as the weights after training: cosine {cosine:.4f} with the weights before"
        )
        return "weights"
    raise ValueError(
        f"kind is 'auto', and {name} is not close to the weights before: it may be a gradient or "
        "a change of the weights; give kind: gradient or delta (or weights, if they moved far)"
    )


def _paired(update: Named, before: Named) -> list[tuple[Tensor, Tensor]]:
    """Tensors of equal name and shape in both; without names, each with the closest of its shape.

    Names lose wrappers' prefixes, if none is equal with them: a part of the tensors may share a
    prefix that is no wrapper's.
    """
    for one, other in ((update, before), (tensors.bare(update), tensors.bare(before))):
        pairs = [(v, other[k]) for k, v in one.items() if k in other and other[k].shape == v.shape]
        if pairs:
            return pairs
    if not all(map(tensors.unnamed, update)):
        return []
    left = list(before.values())
    for value in update.values():
        same = [at for at, other in enumerate(left) if other.shape == value.shape]
        if same and value.is_floating_point():
            apart = {at: float((left[at].double() - value.double()).norm()) for at in same}
            pairs.append((value, left.pop(min(same, key=apart.__getitem__))))
    return pairs


def _finite(named: Named, name: str) -> dict[str, Tensor]:
    """The tensors whose values are all finite. Weights are floats; scalars may be counters."""
    for key, value in named.items():
        if value.ndim and not value.is_floating_point():
            raise ValueError(
                f"{name}: {key} holds values of type {value.dtype}; give floats of 16, 32 or "
                "64 bits (undo a quantization first)"
            )
    kept = {key: value for key, value in named.items() if check.is_finite(value)}
    if not kept:
        raise ValueError(
            f"{name} has NaN or infinite values in every tensor ({_first(named)}), so no value is "
            "left to attack; give a file that is whole"
        )
    return kept


def _first(named: Named) -> str:
    words = [f"{key} {tuple(value.shape)}" for key, value in list(named.items())[:3]]
    return ", ".join([*words, "..."] if len(named) > 3 else words)


def write(
    folder: Path,
    before: Named,
    update: Named,
    about: Mapping[str, str | int | float],
) -> Path:
    """Write one client's update of one round, as a server sees it; returns its file.

    Writes `round-0001/before.safetensors`, once per round, and `client-<number>.safetensors` next
    to it. Only their owner can read the files.

    `about` is what the server knows: `round` (from 1), `client` and `kind` ("gradient", "delta" or
    "weights"), and, if known, `examples`, `steps`, `learning_rate`, `batch_size` and others, kept
    as text.
    """
    text = {k.removeprefix(PREFIX): str(value) for k, value in about.items()}
    for name in ("round", "client"):
        # Both become a part of the path, which must not leave the folder.
        if not re.fullmatch(r"\d{1,20}", text.get(name, "")):
            raise ValueError(f"about[{name!r}] is {text.get(name)!r}; give a whole number")
    check.one_of((*KINDS, TREES), kind=text.get("kind", ""))
    with files.writing(folder):
        path = Path(folder) / _place(text["round"], text["client"])
        start = files.folder(Path(folder), path.parent.name) / BEFORE
        if start.exists():
            held, _ = tensors.read(start)
            if held.keys() != before.keys() or not all(
                torch.equal(held[key], value.detach().cpu()) for key, value in before.items()
            ):  # otherwise an update would be combined with the wrong weights
                raise ValueError(
                    f"{str(start)!r} holds other weights than the client received; use another "
                    "folder"
                )
        else:
            known = {PREFIX + "kind": "before", PREFIX + "round": text["round"]}
            tensors.write(start, before, known)
        tensors.write(path, update, {PREFIX + key: value for key, value in text.items()})
    return path


def updates_in(folder: Path) -> list[tuple[int, int, Path]]:
    """(round, client, file) of every update in a folder of rounds, or of one round."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"update is {str(folder)!r}, which is neither a file nor a folder")
    rounds = [(m, path) for path in folder.iterdir() if (m := _ROUND.fullmatch(path.name))]
    # A path such as `.` has no name of its own.
    if number := _ROUND.fullmatch(folder.resolve().name):
        rounds = [(number, folder)]
    updates = [
        (int(m[1]), int(client[1]), path)
        for m, place in rounds
        if place.is_dir()
        for path in place.iterdir()
        if (client := _CLIENT.fullmatch(path.name))
    ]
    if not updates:
        raise ValueError(
            f"update is {str(folder)!r}, which holds no captured update (round-0001/"
            "client-1.safetensors); give a file, or a folder that `leakbound capture` wrote"
        )
    return sorted(updates)
