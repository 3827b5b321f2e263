"""Training under each defense: loss by round as a plot a model, and the numbers as a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from leakbound.assess.record import Record
from leakbound.report.drawing import MARKERS, Panel, color, figure, span
from leakbound.report.tables import NO_DEFENSE, Names

EARLY = 5
"""The round whose loss tells how fast a model learns at first."""
LINES = 10
"""How many lines one plot can hold and still be read."""
POINTS = 400
"""How many points of one line are drawn."""
_BEYOND = 1e6


@dataclass(frozen=True)
class Progress:
    """One model's training under one defense: means over the seeds that ran.

    `losses` holds the rounds that all seeds have, with None where a loss is no number.
    """

    model: str
    defense: str
    optimizer: str
    losses: dict[int, float | None]
    n: int

    @property
    def early(self) -> float | None:
        """The loss after five rounds; None where the curve holds no such round."""
        return self.losses.get(EARLY)

    @property
    def rounds(self) -> int:
        """The last round of the curve."""
        return max(self.losses)

    @property
    def last(self) -> float | None:
        """The loss after the last round."""
        return self.losses[self.rounds]


def progress(trainings: Iterable[Record], names: Names) -> list[Progress]:
    """One row for each model, optimizer and defense whose trainings keep a curve."""
    found: dict[tuple[str, str, str], list[dict[int, float | None]]] = {}
    for unit in trainings:
        if unit["status"] == "ok" and unit.get("curve"):
            optimizer = str(unit.get("optimizer") or "unknown")
            key = (names.model(unit), names.defense(unit), optimizer)
            found.setdefault(key, []).append(dict(unit["curve"]))
    rows = [Progress(*key, _mean(curves), len(curves)) for key, curves in found.items()]
    return [row for row in rows if row.losses]


def drawn(rows: Sequence[Progress], names: Names) -> list[str]:
    """Up to ten defenses to draw: none first, then the two ends of every defense's strengths."""
    by_name: dict[str, list[str]] = {}
    labels = {row.defense for row in rows}
    for label, setting in names.settings.items():
        if label in labels:
            by_name.setdefault(setting.name, []).append(label)
    by_name = {k: sorted(v, key=lambda d: _strength(names, d)) for k, v in by_name.items()}
    order, end = by_name.pop(NO_DEFENSE, []), 0
    while any(by_name.values()):
        order += [own.pop(end) for own in by_name.values() if own]
        end = 0 if end else -1
    kept = set(order[:LINES])
    return [label for label in names.settings if label in kept]


def panels(rows: Sequence[Progress], labels: Sequence[str]) -> list[Panel]:
    """Training loss by round: one panel a model and optimizer, one line a defense in `labels`."""
    found: list[Panel] = []
    for model, optimizer in dict.fromkeys((row.model, row.optimizer) for row in rows):
        own = {r.defense: r for r in rows if (r.model, r.optimizer) == (model, optimizer)}
        lines = {label: own[label] for label in labels if label in own}
        if lines:
            found.append(_panel(f"{model}, {optimizer}", lines, labels, f"l{len(found)}"))
    return found


def _panel(title: str, lines: Mapping[str, Progress], labels: Sequence[str], prefix: str) -> Panel:
    top = _top(lines.values())
    over = any(v is not None and v > top for row in lines.values() for v in row.losses.values())
    with figure(prefix, (4.9, 3.4)) as (axes, output):
        for index, label in enumerate(labels):
            if label not in lines:
                continue
            points = _thin(sorted(lines[label].losses.items()))
            xs = [min(point, 1e9) for point, _ in points]
            ys = [math.nan if v is None else max(min(v, top), -top) for _, v in points]
            axes.plot(xs, ys, color=color(index), lw=1.3)
            every = max(1, len(xs) // 12)
            axes.plot(xs[::every], ys[::every], MARKERS[index % len(MARKERS)], color=color(index))
        axes.set_xlabel("round")
        axes.set_ylabel("training loss")
        axes.margins(x=0.03)
    notes = [f"mean over {span([row.n for row in lines.values()], 'training seed')} a line"]
    notes += [f"losses over {top:.3g} are drawn at {top:.3g}"] if over else []
    return Panel(title, output[0], tuple(notes), "Training loss by round, one line a defense")


def _top(rows: Iterable[Progress]) -> float:
    """Twice the largest loss before training: what diverges must not flatten the rest."""
    starts = [abs(row.losses[min(row.losses)] or 0.0) for row in rows]
    return min(2 * max(starts), _BEYOND) or 1.0


def _mean(curves: Sequence[Mapping[int, float | None]]) -> dict[int, float | None]:
    shared = sorted(set(curves[0]).intersection(*curves))
    rows = {point: [curve[point] for curve in curves] for point in shared}
    return {
        point: None if None in values else fmean(v for v in values if v is not None)
        for point, values in rows.items()
    }


def _thin(points: list[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    step = -(-len(points) // POINTS)
    return points[::step] if points[-1] in points[::step] else [*points[::step], points[-1]]


def _strength(names: Names, label: str) -> float:
    number = names.settings[label].number
    return 0.0 if number is None else number
