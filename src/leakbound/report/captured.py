"""Captured updates in a report: what was read off each, and how much of it the guesses explain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from leakbound.assess.record import Record


@dataclass(frozen=True)
class Capture:
    """What a record says of the captured update.

    Attributes:
        label: its file, and where they are known round and client.
        truth: whether the truth was given, so that PSNRs are measured.
        explained: the share of the update that the guess explains; None where that is not known.
        scaled: that share is the best over all lengths of the update.
        certificate: why the guess is right for certain, where the update proves it.
        values: of each reconstruction that is no picture.
    """

    label: str
    kind: str
    truth: bool
    findings: tuple[Record, ...]
    notes: tuple[str, ...]
    explained: float | None
    scaled: bool
    certificate: str | None
    values: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class Row:
    """One captured update with the attacks on it: (attack, capture, status, reason)."""

    capture: Capture
    attacks: tuple[tuple[str, Capture, str, str], ...]


def proof(record: Record) -> str | None:
    """Why the reconstruction is the input for certain; None where nothing proves it."""
    found = (record.get("capture") or {}).get("certificate")
    return found if isinstance(found, str) else None


def capture_of(record: Record) -> Capture | None:
    """What a record says of its captured update; None in a record of an audit."""
    found = record.get("capture")
    if found is None:
        return None
    where = [f"{k} {found[k]}" for k in ("round", "client") if found.get(k)]
    share = found.get("explained") or {}
    scaled = share.get("share") is None
    return Capture(
        label=", ".join([found["name"], *where]),
        kind=found["kind"],
        truth=bool(found["truth"]),
        findings=tuple(found.get("findings") or ()),
        notes=tuple(found.get("notes") or ()),
        explained=share.get("direction") if scaled else share["share"],
        scaled=scaled,
        certificate=found.get("certificate"),
        values=tuple(map(tuple, found.get("values") or ())),
    )


def rows(cells: Iterable[Record], attack: Callable[[Record], str]) -> list[Row]:
    """One row for each captured update, in the order of the records."""
    found: dict[tuple[int, str], list[Record]] = {}
    for cell in cells:
        if cell.get("capture") is not None:
            found.setdefault((cell["seed"], cell["capture"]["digest"]), []).append(cell)
    return [
        Row(_known(own[0]), tuple((attack(c), _known(c), c["status"], _reason(c)) for c in own))
        for own in found.values()
    ]


def _known(cell: Record) -> Capture:
    capture = capture_of(cell)
    assert capture is not None  # asked in `rows`
    return capture


def _reason(cell: Record) -> str:
    return str((cell.get("problem") if cell["status"] == "ok" else cell.get("reason")) or "")


def share(value: float | None) -> str:
    r"""A share of an update for reading, with digits for what is left.

    Example:
        >>> share(0.99999), share(-0.3), share(None)
        ('99.999\xa0%', '0.0\xa0%', '–')
    """
    if value is None:
        return "–"
    left = 1 - value
    digits = 1 if left >= 1e-3 else 3 if left >= 1e-6 else 5
    return f"{100 * max(value, 0.0):.{digits}f}\N{NO-BREAK SPACE}%"
