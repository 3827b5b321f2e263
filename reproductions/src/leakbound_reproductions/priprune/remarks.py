"""Remarks on the verdicts of paper D's claims."""

from __future__ import annotations

from collections.abc import Sequence

from leakbound_reproductions.paired import gain
from leakbound_reproductions.priprune.comparisons import late, spoken
from leakbound_reproductions.priprune.measured import (
    BySeed,
    Measured,
    average,
    difference,
    less,
)


def strongest(name: str, base: Measured, own: Measured) -> list[str]:
    """How much more `own` hides than `base` from each best attacker, after round 1; or none."""
    each = [
        difference(base.strongest(round_)[1], own.strongest(round_)[1])
        for round_ in late(own)
        if base.pairs and own.pairs
    ]
    values = list(average(each).values()) if each else []
    if len(values) < 2:
        return []
    found = gain(values)
    return [f"{name} {found.mean:+.1f} [{found.low:+.1f}, {found.high:+.1f}] dB"]


def remark(texts: Sequence[str]) -> str:
    """PSNR that the strongest attackers lose, as a sentence; empty without texts."""
    if not texts:
        return ""
    return f"PSNR that the strongest attackers here lose, who know the defense: {', '.join(texts)}"


def lost(right: Sequence[str]) -> str:
    """The accuracy that schemes lose, as a sentence; empty without texts."""
    return f"Accuracy lost, in points: {', '.join(right)}" if right else ""


def told(ours: BySeed, theirs: BySeed) -> str:
    """Ours minus theirs with its interval; empty if fewer than two seeds have both."""
    values = less(ours, theirs)
    return spoken(gain(values)) if len(values) > 1 else ""
