"""Captured updates on disk: a folder a round, the weights before, and a file a client."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from leakbound import check, tensors
from leakbound._util import files
from leakbound.tensors import Named

BEFORE = "before.safetensors"
PREFIX = "leakbound."
KINDS = ("gradient", "delta", "weights")
_ROUND = re.compile(r"round-(\d{4,9})")
_CLIENT = re.compile(r"client-(\d{1,20})\.safetensors")


def write(
    folder: Path, before: Named, update: Named, about: Mapping[str, str | int | float]
) -> Path:
    """Write one client's update of one round, as a server sees it; returns its file.

    Leaves `round-0001/before.safetensors`, written once a round, and beside it
    `client-<number>.safetensors`. Files are readable by their owner only.

    Args:
        folder: where the rounds lie; made if it is not there.
        before: the weights that the client was sent, by name.
        update: what it sent back, by name.
        about: what the server knows: `round` (from 1), `client` and `kind` ("gradient", "delta" or
            "weights"), and where it knows them `examples`, `steps`, `learning_rate`, `batch_size`
            and others, kept as text.

    Raises:
        ValueError: a round or client that is no whole number, another kind; a round that holds
            other weights before, or a file that leakbound did not write.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as place:
        ...     about = {"round": 1, "client": 3, "kind": "weights", "examples": 8}
        ...     start, sent = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
        ...     write(Path(place), start, sent, about).relative_to(place).as_posix()
        'round-0001/client-3.safetensors'
    """
    text = {k.removeprefix(PREFIX): str(value) for k, value in about.items()}
    for name in ("round", "client"):
        if not re.fullmatch(r"\d{1,20}", text.get(name, "")):
            raise ValueError(f"about[{name!r}] is {text.get(name)!r}; give a whole number")
    check.one_of(KINDS, kind=text.get("kind", ""))
    with files.writing(folder):
        place = files.folder(Path(folder), f"round-{int(text['round']):04d}")
        if (place / BEFORE).exists():
            _check_before(place / BEFORE, before)
        else:
            known = {PREFIX + "kind": "before", PREFIX + "round": text["round"]}
            tensors.write(place / BEFORE, before, known)
        path = place / f"client-{int(text['client'])}.safetensors"
        tensors.write(path, update, {PREFIX + key: value for key, value in text.items()})
    return path


def _check_before(path: Path, before: Named) -> None:
    """Else an update would be read as one of the other weights."""
    held, _ = tensors.read(path)
    same = held.keys() == before.keys() and all(
        torch.equal(held[key], value.detach().cpu()) for key, value in before.items()
    )
    if not same:
        raise ValueError(
            f"{str(path)!r} holds other weights than the client was sent; take another folder"
        )


def updates_in(folder: Path) -> list[tuple[int, int, Path]]:
    """(round, client, file) of every update in a folder of rounds, or in the folder of one round.

    Raises:
        ValueError: no folder, or no update in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"update is {str(folder)!r}, which is neither a file nor a folder")
    rounds = [(m, path) for path in folder.iterdir() if (m := _ROUND.fullmatch(path.name))]
    if own := _ROUND.fullmatch(folder.resolve().name):
        rounds = [(own, folder)]
    found = [
        (int(m[1]), int(client[1]), path)
        for m, place in rounds
        if place.is_dir()
        for path in place.iterdir()
        if (client := _CLIENT.fullmatch(path.name))
    ]
    if not found:
        raise ValueError(
            f"update is {str(folder)!r}, which holds no captured update (round-0001/"
            "client-1.safetensors); give a file, or a folder that `leakbound capture` wrote"
        )
    return sorted(found)
