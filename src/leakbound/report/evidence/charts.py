"""Attacks and bounds in one picture: what attacks reached and what theorems exclude."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from leakbound.report.tables import Configuration, defined

WIDTH = 480
TOP = 60.0
BOTTOM = 0.0
"""PSNRs outside are drawn at these."""
FAINTEST = 1e-12


@dataclass(frozen=True)
class CorridorStrip:
    """A configuration's strip: solid up to what attacks reached, hatched from what is excluded.

    Places are in pixels from the left; `spread`: the interval of what was measured.
    """

    row: Configuration
    reached: float | None
    excluded: float | None
    accepted: float | None
    baseline: float | None = None
    spread: tuple[float, float] | None = None


@dataclass(frozen=True)
class CorridorStrips:
    """A figure in a table: the ticks of its axis, and a strip for each row."""

    ticks: tuple[tuple[float, str], ...]
    rows: tuple[CorridorStrip, ...]
    width: int = WIDTH


def mean_errors(
    rows: Sequence[Configuration],
    threshold: float | None,
) -> CorridorStrips | None:
    """For each row, the PSNR of the attacks' mean error and the upper bound of every attacker's."""
    bounds = [row.error_bound.psnr if row.error_bound else None for row in rows]
    values = defined([*bounds, *(v for row in rows for v in (row.mean_error, row.baseline))])
    if not values:
        return None
    values += defined([threshold])
    low = min(max(BOTTOM, 5 * math.floor(min(values) / 5) - 5), TOP - 10)
    high = max(min(TOP, 5 * math.ceil(max(values) / 5) + 5), low + 10)

    def at(value: float | None) -> float | None:
        if value is None:
            return None
        return float(WIDTH * (min(max(value, low), high) - low) / (high - low))

    step = 5 if high - low <= 35 else 10
    ticks = range(step * math.ceil(low / step), math.floor(high) + 1, step)
    return CorridorStrips(
        tuple((at(tick) or 0.0, f"{tick:g}") for tick in ticks),
        tuple(
            CorridorStrip(
                row, at(row.mean_error), at(bound), at(threshold), baseline=at(row.baseline)
            )
            for row, bound in zip(rows, bounds, strict=True)
        ),
    )


def probabilities(rows: Sequence[Configuration]) -> CorridorStrips | None:
    """For each bounded row, the share of examples matched and what no attacker exceeds."""
    pairs = [(row, row.success_bound) for row in rows if row.success_bound]
    if not pairs:
        return None
    known = [p for _, bound in pairs for p in (bound.probability, bound.accepted) if p]
    known += [r.reconstructed.value for r, _ in pairs if r.reconstructed and r.reconstructed.hits]
    # Below this the digits rest on no assumption about data.
    least = math.floor(math.log10(max(FAINTEST, min([1e-3, *known]))))
    low = max(-12, least - 1)

    def at(value: float) -> float:
        return WIDTH * (1 - max(math.log10(max(value, 1e-300)), low) / low)

    strips = []
    for row, bound in pairs:
        share = row.reconstructed
        strip = CorridorStrip(
            row,
            reached=at(share.value) if share and share.hits else None,
            excluded=at(bound.probability),
            accepted=None if bound.accepted is None else at(bound.accepted),
            spread=(at(share.low), at(share.high)) if share else None,
        )
        strips.append(strip)
    decades = range(0, low - 1, -1 if low >= -6 else -2)
    ticks = [(at(10.0**p), f"1e{p}".replace("-", "−") if p else "1") for p in decades]
    return CorridorStrips(tuple(ticks), tuple(strips))
