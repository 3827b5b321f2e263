"""Which links may follow which: the checks of a chain when it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leakbound.types import Unit

if TYPE_CHECKING:
    from leakbound.defenses.base import Defense


def _first(links: tuple[Defense, ...]) -> str:
    """Who decided what the client's rows are, for a message."""
    wants = next((repr(link) for link in links if Unit.CLIENT not in link.accepts), None)
    return f"{wants} later in the chain asks for" if wants else "the client gives"


def check_order(links: tuple[Defense, ...], start: Unit) -> None:
    """Refuse a chain whose links undo or forbid one another.

    Raises:
        ValueError: naming the links and the order that works.
    """
    _check_training(links, start)
    _check_units(links, start)
    _check_bounds(links)
    _check_records(links)


def _check_training(links: tuple[Defense, ...], start: Unit) -> None:
    plain = next((link for link in links if link.plain_gradient), None)
    starts = [link for link in links if link.changes_start]
    if len(starts) > 1:
        raise ValueError(
            f"{starts[0]!r} and {starts[1]!r} both decide which weights the client keeps; leave "
            "one out"
        )
    if starts and plain is not None:
        raise ValueError(
            f"{starts[0]!r} lets the client start from weights of its own, but what {plain!r} "
            "promises holds for the weights that were sent; set its level in another way "
            "(noise_std)"
        )
    for link in links:
        if not link.changes_training:
            continue
        if start not in link.accepts:
            raise ValueError(
                f"{link!r} changes the local training of a whole client, but {_first(links)} one "
                f"row per {start.noun}; they cannot be combined"
            )
        if plain is not None:
            raise ValueError(
                f"{link!r} changes the local training, but what {plain!r} promises holds for the "
                "plain gradient alone; set its level in another way (noise_std)"
            )


def _check_units(links: tuple[Defense, ...], unit: Unit) -> None:
    before: Defense | None = None
    for link in links:
        if unit not in link.accepts:
            wanted = " or ".join(u.noun for u in sorted(link.accepts))
            source = f"{before!r} before it returns" if before else _first(links)
            advice = (
                f"put {link!r} first"
                if min(link.accepts) < unit
                else f"put a link that makes {wanted} rows before it"
            )
            raise ValueError(
                f"{link!r} takes one row per {wanted}, but {source} one row per {unit.noun}; "
                f"{advice}"
            )
        unit, before = link.returns(unit), link


def _check_bounds(links: tuple[Defense, ...]) -> None:
    bounded = False
    before: Defense | None = None  # where nothing bounds: who undid it, or the last link
    for link in links:
        if link.needs_bound and not bounded:
            source = f"{before!r} before it" if before else "the plain gradient"
            raise ValueError(
                f"{link!r} needs rows to which one example adds a bounded amount, but {source} "
                "bounds nothing; put ClipExamples before it"
            )
        if link.gives_bound:
            bounded = True
        elif not (link.keeps_law and link.keeps_bound) or link.uses_context:
            bounded, before = False, link
        elif not bounded and before is None:
            before = link


def check_pairs(links: tuple[Defense, ...]) -> None:
    """Every link that changes the coordinates is undone by a later one, innermost first."""
    waiting: list[Defense] = []
    for link in links:
        if link.unmaps_basis is not None and waiting:
            opener = waiting.pop()
            if opener.maps_basis != link.unmaps_basis:
                raise ValueError(
                    f"{link!r} does not undo {opener!r} before it; give both the same settings"
                )
        if link.maps_basis is not None:
            waiting.append(link)
    if waiting:
        raise ValueError(
            f"{waiting[-1]!r} leaves rows in other coordinates, and nothing undoes it; put Color "
            "of the same settings after it"
        )


def _check_records(links: tuple[Defense, ...]) -> None:
    """Nothing changes the rows before a link that computes them anew, or reads the true records."""
    at = next((i for i, link in enumerate(links) if link.replaces_examples), None)
    if at is None:
        return
    anew = links[at]
    for link in links[:at]:
        if not link.changes_training:
            raise ValueError(
                f"{anew!r} computes the rows anew and would undo {link!r}; put {anew!r} first"
            )
    for link in links[at + 1 :]:
        if link.uses_context:
            raise ValueError(
                f"{link!r} reads the client's records, which {anew!r} is to hide; leave one out"
            )
