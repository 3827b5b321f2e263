"""Claims 5-1 to 5-8 of paper E, from the study's rounds.

A round is one seed of one configuration. Modes, dropout and knowledge are compared on the same
weights and batch. Designs are compared at the same other choices, each on its own draws. So every
difference is one independent draw, and its interval includes how the effect varies between
configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leakbound_reproductions import words
from leakbound_reproductions.by_seed import Part, claimed
from leakbound_reproductions.claim import POSITIVE, Claim, Finding, finding, proportion, student
from leakbound_reproductions.practical_feasibility.networks import Design
from leakbound_reproductions.practical_feasibility.study import (
    BASE,
    CHOICES,
    DROPPED,
    MATCHED,
    MODERN,
    Cell,
    name,
)

DRAMATIC = 3.0
"""Decibels from which a gain counts as "dramatic" (ours): half of the squared error."""
RARE = 0.1
"""Largest share of rounds with a success that still counts as resisting (ours)."""
REMOVED = {
    "deep": "3 blocks instead of 1",
    "narrow": "8 channels instead of 32",
    "plain": "without skip connections",
    "post": "norm and activation after each convolution",
}
FIRST = "abstract of version 1"
SECOND = "abstract of version 2"


@dataclass(frozen=True)
class Scores:
    """Of one configuration, by seed: mean PSNR of the batch in dB, and its share of successes."""

    psnr: Sequence[float]
    matched: Sequence[float]


Found = Mapping[Cell, Scores]


def all_claims(found: Found) -> tuple[Claim, ...]:
    """Every claim, in the order of their numbers."""
    own = (_mode, _possible, _only, _before, _others, _dropout, _modern)
    return (*(judge(found) for judge in own), _untested())


def _residual(found: Found, keep: Callable[[Cell], bool]) -> list[Cell]:
    """Configurations of the full factorial: no dropout, nothing known but labels."""
    return [
        cell
        for cell in found
        if cell.design.family == "residual"
        and not cell.design.dropout
        and not cell.known
        and keep(cell)
    ]


def _gains(found: Found, cells: Sequence[Cell], other: Callable[[Cell], Cell]) -> list[float]:
    """PSNR of each round of these configurations minus that of the same seed of the other one.

    The other one may have more or fewer seeds; the first ones are the same.
    """
    return [
        mine - theirs
        for cell in cells
        for mine, theirs in zip(found[cell].psnr, found[other(cell)].psnr, strict=False)
    ]


def _mode(found: Found) -> Claim:
    parts = []
    for kind, trained in (("random", False), ("trained", True)):
        cells = _residual(found, lambda cell: cell.training and cell.trained is trained)  # noqa: B023
        gains = [-g for g in _gains(found, cells, lambda cell: replace(cell, training=False))]
        text = f"{kind} weights: PSNR in inference mode minus that in training mode"
        parts.append(Part(text, gains, (DRAMATIC, float("inf")), unit="dB"))
    return claimed(
        "5-1",
        "A client in inference mode dramatically simplifies inversion.",
        FIRST,
        f"16 residual networks with batch norm, batches of 1 and 4. Tolerance: {DRAMATIC:g} dB",
        parts,
    )


def _hits(found: Found, cells: Sequence[Cell]) -> list[bool]:
    return [share > 0 for cell in cells for share in found[cell].matched]


def _share(text: str, hits: Sequence[bool], region: tuple[float, float], among: int) -> Finding:
    share, interval = proportion(sum(hits), len(hits))
    return finding(text, share, interval, region, n=len(hits), among=among)


def _of(design: Design, found: Found) -> list[Cell]:
    return [c for c in found if c.design == design and c.training and not c.known]


def _possible(found: Found) -> Claim:
    text = "share of rounds with a success, if all four conditions are met"
    own = _share(text, _hits(found, _of(BASE, found)), (RARE, 1.0), 1)
    return Claim(
        "5-2",
        "In training mode, attacks succeed on a shallow and wide network with skip connections "
        "and pre-activation norms.",
        FIRST,
        f"one design, both batch sizes and kinds of weights. Tolerance: {RARE:g} of the rounds",
        (own,),
    )


def _lacking(key: str, found: Found) -> list[Cell]:
    """Configurations in training mode whose designs have this choice, whatever the others."""
    ((field, value),) = CHOICES[key].items()
    return _residual(found, lambda c: c.training and getattr(c.design, field) == value)


def _with(cell: Cell, key: str) -> Cell:
    """The same configuration with the condition met."""
    own: dict[str, Any] = {field: getattr(BASE, field) for field in CHOICES[key]}
    return replace(cell, design=replace(cell.design, **own))


def _only(found: Found) -> Claim:
    findings = tuple(
        _share(
            f"{REMOVED[key]}: share of rounds with a success",
            _hits(found, _lacking(key, found)),
            (0.0, RARE),
            len(REMOVED),
        )
        for key in REMOVED
    )
    return Claim(
        "5-3",
        "In training mode, attacks succeed only if all four conditions are met.",
        FIRST,
        "8 residual networks for each missing condition, batches of 1 and 4, random and trained "
        f"weights. Tolerance: {RARE:g} of the rounds",
        findings,
    )


def _effect(found: Found, key: str) -> Part:
    cells = _lacking(key, found)
    gains = [-gain for gain in _gains(found, cells, lambda cell: _with(cell, key))]
    return Part(f"{REMOVED[key]}: loss of PSNR", gains, POSITIVE, unit="dB")


def _before(found: Found) -> Claim:
    return claimed(
        "5-4",
        "Pre-activation norm is critical: without it, less is reconstructed in training mode.",
        FIRST,
        "8 pairs of residual networks, batches of 1 and 4, random and trained weights",
        [_effect(found, "post")],
    )


def _others(found: Found) -> Claim:
    return claimed(
        "5-5",
        "In training mode, deeper, narrower networks and networks without skip connections leak "
        "less.",
        FIRST,
        "8 pairs of residual networks each, batches of 1 and 4, random and trained weights",
        [_effect(found, key) for key in REMOVED if key != "post"],
    )


def _dropout(found: Found) -> Claim:
    cells = [c for c in found if c.design.dropout == DROPPED[0] and not c.known]

    def without(cell: Cell) -> Cell:
        return replace(cell, design=replace(cell.design, dropout=0.0))

    losses = [-gain for gain in _gains(found, cells, without)]
    known = [-gain for gain in _gains(found, cells, lambda cell: replace(cell, known="draws"))]
    return claimed(
        "5-6",
        "Dropout in training mode makes inversion harder (implied: inference mode, where it is "
        "disabled, is called lenient).",
        FIRST,
        f"dropout {DROPPED[0]:g} in each block of 5 residual networks in training mode, drawn for "
        "every unit of every example; the attacker simulates none, and searches for no draws",
        [
            Part("loss of PSNR to an attacker without the draws", losses, POSITIVE, unit="dB"),
            Part("gain of an attacker who knows the draws", known, POSITIVE, unit="dB"),
        ],
    )


def _modern(found: Found) -> Claim:
    cells = [cell for design in MODERN for cell in _of(design, found)]
    return Claim(
        "5-7",
        "Modern, performance-optimized models consistently resist meaningful reconstruction in "
        "training mode.",
        SECOND,
        "small forms of a ConvNeXt, a transformer and a ResNet with batch norm in training mode, 3 "
        f"blocks of 32 channels each. Tolerance: {RARE:g} of the rounds",
        (_share("share of rounds with a success", _hits(found, cells), (0.0, RARE), 1),),
    )


def _untested() -> Claim:
    return Claim(
        "5-8",
        "Object detectors leak visibly only in inference mode and after several changes of their "
        "architecture; two new attacks on training mode are the strongest.",
        FIRST,
        "not measured",
        (),
        "the detectors, data and new attacks of the paper are not in leakbound",
    )


def table(found: Found) -> Iterator[str]:
    """All configurations in Markdown."""
    yield "# All configurations\n"
    yield f"PSNR in dB, mean over seeds with 95 % interval. Success: at least {MATCHED:g} dB.\n"
    yield "| configuration | n | PSNR | images with success |"
    yield "|---|--:|--:|--:|"
    for cell, own in found.items():
        mean, interval = student(own.psnr)
        share = sum(own.matched) / len(own.matched)
        ends = words.interval(interval(0.95))
        yield f"| {name(cell)} | {len(own.psnr)} | {mean:.1f} {ends} | {share:.2f} |"
