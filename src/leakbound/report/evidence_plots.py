"""The corridor as pictures: what attacks reached from below, what theorems exclude from above."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leakbound.report.drawing import COLORS, GRAY, figure

WIDTH, HEIGHT = 480, 22
TOP, BOTTOM = 60.0, 0.0
"""PSNRs outside are drawn at these."""
FAINTEST = 1e-12


@dataclass(frozen=True)
class Strips:
    """A figure in a table: the SVG of its axis, and one of each row."""

    axis: str
    rows: tuple[str, ...]


def mean_errors(rows: Sequence[Mapping[str, Any]], threshold: float | None) -> Strips | None:
    """For each row, the PSNR of the attacks' mean error and the ceiling of every attacker's."""
    values = [
        row[key]
        for row in rows
        for key in ("attack", "ceiling", "without_update")
        if row[key] is not None
    ]
    if not values:
        return None
    values += [] if threshold is None else [threshold]
    low = max(BOTTOM, 5 * math.floor(min(values) / 5) - 5)
    high = min(TOP, 5 * math.ceil(max(values) / 5) + 5)
    low, high = min(low, TOP - 10), max(high, low + 10)

    def at(value: float) -> float:
        return float(WIDTH * (min(max(value, low), high) - low) / (high - low))

    step = 5 if high - low <= 35 else 10
    ticks = range(step * math.ceil(low / step), math.floor(high) + 1, step)
    lines = [] if threshold is None else [(at(threshold), "accepted")]
    drawn = []
    for row in rows:
        blind = row["without_update"]
        marks = lines + ([] if blind is None else [(at(blind), "blind")])
        reached = None if row["attack"] is None else at(row["attack"])
        excluded = None if row["ceiling"] is None else at(row["ceiling"])
        drawn.append(_strip(reached, excluded, marks))
    return Strips(_axis([(at(t), f"{t:g}") for t in ticks]), tuple(drawn))


def probabilities(rows: Sequence[Mapping[str, Any]]) -> Strips | None:
    """For each row, the share of images rebuilt with its interval, and what no attacker exceeds."""
    if not rows:
        return None
    known = [row[key] for row in rows for key in ("bound", "accepted") if row[key]]
    known += [row["rebuilt"]["value"] for row in rows if row["rebuilt"] and row["rebuilt"]["hits"]]
    least = math.floor(math.log10(max(FAINTEST, min([1e-3, *known]))))
    low = max(-12, least - 1)

    def at(value: float) -> float:
        return WIDTH * (1 - max(math.log10(max(value, 1e-300)), low) / low)

    step = 1 if low >= -6 else 2
    ticks = [
        (at(10.0**p), f"1e{p}".replace("-", "−") if p else "1") for p in range(0, low - 1, -step)
    ]
    drawn = []
    for row in rows:
        marks = [] if row["accepted"] is None else [(at(row["accepted"]), "accepted")]
        share = row["rebuilt"]
        reached = at(share["value"]) if share and share["hits"] else None
        spread = (at(share["low"]), at(share["high"])) if share else None
        drawn.append(_strip(reached, at(row["bound"]), marks, spread))
    return Strips(_axis(ticks), tuple(drawn))


def curve(found: Mapping[str, Any], prefix: str) -> str:
    """Both edges of a training over the threshold, as SVG; smaller values are drawn at 1e-12."""
    with figure(prefix, (6.4, 3.2)) as (axes, output):
        low = [max(value, FAINTEST) for value in found["lower"]]
        high = [max(value, FAINTEST) for value in found["upper"]]
        axes.fill_between(found["psnr"], low, high, color=GRAY, alpha=0.18, lw=0)
        axes.plot(found["psnr"], high, color=COLORS[0])
        axes.plot(found["psnr"], low, color=COLORS[1], ls="--")
        axes.axhline(found["accepted"], color=GRAY, ls=":")
        axes.set(yscale="log", ylim=(FAINTEST / 2, 2), xlabel="PSNR threshold in dB")
        axes.set_ylabel("probability")
        powers = range(0, -13, -3)
        axes.set_yticks([10.0**p for p in powers], [f"1e−{-p}" if p else "1" for p in powers])
        axes.set_yticks([], minor=True)
    return output[0]


def _strip(
    reached: float | None,
    excluded: float | None,
    marks: Sequence[tuple[float, str]],
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
    parts += [f'<path class="{kind}" d="M{x:.1f} 0V{HEIGHT}"/>' for x, kind in marks]
    return _svg("".join(parts), HEIGHT)


def _axis(ticks: Sequence[tuple[float, str]]) -> str:
    parts = []
    for x, label in ticks:
        anchor = "start" if x < 8 else "end" if x > WIDTH - 8 else "middle"
        parts.append(
            f'<path class="tick" d="M{x:.1f} 16V{HEIGHT}"/>'
            f'<text x="{x:.1f}" y="12" text-anchor="{anchor}">{label}</text>'
        )
    return _svg("".join(parts), HEIGHT)


def _svg(parts: str, height: int) -> str:
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg {size} aria-hidden="true">{parts}</svg>'
