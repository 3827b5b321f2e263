"""Attacks and bounds in one picture: what attacks reached and what theorems exclude."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from leakbound.report.tables import Configuration, defined

WIDTH = 480
HEIGHT = 22
TOP = 60.0
BOTTOM = 0.0
"""PSNRs outside are drawn at these."""
FAINTEST = 1e-12


@dataclass(frozen=True)
class CorridorStrips:
    """A figure in a table: the SVG of its axis, and of each configuration that has a row."""

    axis: str
    rows: tuple[tuple[Configuration, str], ...]


def mean_errors(rows: Sequence[Configuration], threshold: float | None) -> CorridorStrips | None:
    """For each row, the PSNR of the attacks' mean error and the upper bound of every attacker's."""
    excluded = [None if row.error_bound is None else row.error_bound.psnr for row in rows]
    values = defined([*(v for row in rows for v in (row.mean_error, row.baseline)), *excluded])
    if not values:
        return None
    values += defined([threshold])
    low = max(BOTTOM, 5 * math.floor(min(values) / 5) - 5)
    high = min(TOP, 5 * math.ceil(max(values) / 5) + 5)
    low, high = min(low, TOP - 10), max(high, low + 10)

    def at(value: float | None) -> float | None:
        if value is None:
            return None
        return float(WIDTH * (min(max(value, low), high) - low) / (high - low))

    step = 5 if high - low <= 35 else 10
    ticks = range(step * math.ceil(low / step), math.floor(high) + 1, step)
    strips = [
        _strip(
            at(row.mean_error),
            at(bound),
            [(at(threshold), "accepted"), (at(row.baseline), "baseline")],
        )
        for row, bound in zip(rows, excluded, strict=True)
    ]
    axis = _axis([(at(t) or 0.0, f"{t:g}") for t in ticks])
    return CorridorStrips(axis, tuple(zip(rows, strips, strict=True)))


def probabilities(rows: Sequence[Configuration]) -> CorridorStrips | None:
    """For each bounded row, the share of examples matched and what no attacker exceeds."""
    pairs = [(row, row.success_bound) for row in rows if row.success_bound]
    if not pairs:
        return None
    known = [p for _, bound in pairs for p in (bound.probability, bound.accepted) if p]
    known += [r.reconstructed.value for r, _ in pairs if r.reconstructed and r.reconstructed.hits]
    least = math.floor(math.log10(max(FAINTEST, min([1e-3, *known]))))
    low = max(-12, least - 1)

    def at(value: float) -> float:
        return WIDTH * (1 - max(math.log10(max(value, 1e-300)), low) / low)

    step = 1 if low >= -6 else 2
    ticks = [
        (at(10.0**p), f"1e{p}".replace("-", "−") if p else "1") for p in range(0, low - 1, -step)
    ]
    strips = []
    for row, bound in pairs:
        accepted = None if bound.accepted is None else at(bound.accepted)
        share = row.reconstructed
        reached = at(share.value) if share and share.hits else None
        spread = (at(share.low), at(share.high)) if share else None
        strips.append(
            (row, _strip(reached, at(bound.probability), [(accepted, "accepted")], spread))
        )
    return CorridorStrips(_axis(ticks), tuple(strips))


def _strip(
    reached: float | None,
    excluded: float | None,
    marks: Sequence[tuple[float | None, str]],
    spread: tuple[float, float] | None = None,
) -> str:
    """One row: solid up to what attacks reached, hatched from what theorems exclude."""
    parts = [f'<rect class="track" x="0" y="4" width="{WIDTH}" height="14"/>']
    if reached is not None:
        parts.append(f'<rect class="reached" x="0" y="4" width="{reached:.1f}" height="14"/>')
    if excluded is not None:
        width = WIDTH - excluded
        parts.append(
            f'<rect class="excluded" x="{excluded:.1f}" y="4" width="{width:.1f}" height="14"/>'
            f'<path class="edge" d="M{excluded:.1f} 1V21"/>'
        )
    if spread is not None:
        parts.append(f'<path class="spread" d="M{spread[0]:.1f} 11H{spread[1]:.1f}"/>')
    parts += [
        f'<path class="{kind}" d="M{x:.1f} 0V{HEIGHT}"/>' for x, kind in marks if x is not None
    ]
    return _svg(parts)


def _axis(ticks: Sequence[tuple[float, str]]) -> str:
    parts = []
    for x, label in ticks:
        anchor = "start" if x < 8 else "end" if x > WIDTH - 8 else "middle"
        parts.append(
            f'<path class="tick" d="M{x:.1f} 16V{HEIGHT}"/>'
            f'<text x="{x:.1f}" y="12" text-anchor="{anchor}">{label}</text>'
        )
    return _svg(parts)


def _svg(parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return f'<svg {size} aria-hidden="true">{"".join(parts)}</svg>'
