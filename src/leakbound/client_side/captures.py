"""A server's view of a client in one round, as `leakbound capture` keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from leakbound import captured, check
from leakbound._util import files
from leakbound.captured import declared
from leakbound.captured.capture import Capture
from leakbound.defenses import Defense


def checked_rounds(rounds: Sequence[int]) -> tuple[int, ...]:
    """The rounds to keep, from 1, in order and each once."""
    for number in rounds:
        check.count(rounds=number)
    if not rounds:
        raise ValueError("rounds is empty; give the rounds to keep, from 1: (1,)")
    return tuple(sorted(set(rounds)))


def ready_folder(folder: Path | str) -> Path:
    """The folder, made if it is missing: a long run must not fail when it wants to write."""
    with files.writing(Path(folder)):
        return files.folder(Path(folder))


def declares(links: Sequence[Defense], how: str) -> dict[str, str]:
    """Metadata that declare a defense in units of the weights; `how` says how it is known."""
    return {declared.KEY: declared.text_of(links), declared.FROM: how}


def undeclared(words: str) -> dict[str, str]:
    """Metadata that say why no defense is declared, though one may have run."""
    return {declared.NOTE: f"{words}: nothing is declared"}


def view(
    number: int,
    client: int,
    kind: str,
    update: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    **about: Any,
) -> Capture:
    """What a server holds of a client; `about` is what else it knows, None where it does not."""
    # a reader must be able to tell "not known" from a value
    known = {"round": number, "client": client, "kind": kind, **about}
    texts = {key: str(value) for key, value in known.items() if value is not None}
    return Capture(f"round {number}, client {client}", kind, update, before, texts)


def keep(folder: Path | str, capture: Capture) -> Path:
    """Write a view into a folder of rounds."""
    return captured.write(Path(folder), capture.before or {}, capture.update, capture.about)
