"""Figures of single results, as the five verbs return them: `.plot()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from leakbound._util import pictures
from leakbound.assess.record import Assessment
from leakbound.report import charts

MOST_EXAMPLES = 8
MOST_ROWS = 40


def examples(
    truth: Tensor, guess: Tensor, captions: Sequence[str], input_range: tuple[float, float]
) -> Figure:
    """True examples (B, *S) above reconstructed ones: pictures, or lines where they are none."""
    shown = min(len(truth), MOST_EXAMPLES)
    drawn = Figure(figsize=(1.6 * shown + 0.6, 3.6), layout="constrained")
    grid = drawn.subplots(2, shown, squeeze=False)
    for row, (word, batch) in enumerate((("true", truth), ("reconstructed", guess))):
        for place in range(shown):
            axes, own = grid[row][place], batch[place].detach().cpu().double()
            if pictures.is_image(own[None]):
                (low, high), level = input_range, own.permute(1, 2, 0).numpy()
                color = level.shape[2] > 1
                level = np.clip((level - low) / (high - low), 0, 1) if color else level.squeeze(-1)
                axes.imshow(level, cmap="gray", vmin=low, vmax=high)
                axes.set(xticks=[], yticks=[])
            else:
                axes.plot(own.flatten().numpy(), marker=".", lw=0.8)
                axes.set(ylim=input_range, xticks=[])
            axes.grid(False)
            if place == 0:
                axes.set_ylabel(word)
            if row == 1:
                axes.set_xlabel(captions[place])
    return drawn


def assessments(own: Sequence[Assessment]) -> Figure:
    """By attack and defense every example's score, or how much of an update is explained."""
    ran = [one for one in own if one.status == "ok"]
    measured = any(one.scores for one in ran)
    rows: dict[str, list[float]] = {}
    for one in ran:
        values = [v for v in one.scores if v is not None] if measured else _explained(one)
        label = f"{one.defense.name} · {one.attack.name}"
        rows.setdefault(label, []).extend(values)
    kept = dict(sorted(rows.items(), key=lambda row: max(row[1], default=0.0))[-MOST_ROWS:])

    def draw(axes: Axes) -> None:
        for place, values in enumerate(kept.values()):
            axes.plot(values, [place] * len(values), "o", color=charts.COLORS[0], alpha=0.6)
        axes.set_yticks(range(len(kept)), [*kept])
        if measured:
            for limit in sorted({one.criterion.value for one in ran}):
                axes.axvline(limit, color=charts.GRAY, ls=":")
            score = ran[0].criterion
            axes.set_xlabel(f"{score.axis} in {score.unit} (dotted: criterion)")
            if score.of is not None:
                axes.set_xlim(-2, 102)
        else:
            axes.set_xlabel("share explained")

    return _drawn(draw, (7.0, 1.2 + 0.28 * max(1, len(kept))))


def corridor(
    thresholds: Sequence[float],
    attained: NDArray[Any],
    bound: NDArray[Any],
    accepted: float,
    label: str = charts.THRESHOLD,
) -> Figure:
    draw = partial(charts.draw_corridor, thresholds, attained, bound, accepted, label)
    return _drawn(draw, charts.CORRIDOR)


def leak_map(known: Tensor) -> Figure:
    """How much of each value is given away, (B, *S) in [0, 1]: pictures, or bars by value."""
    first = known[0].detach().cpu().double()

    def draw(axes: Axes) -> None:
        if first.ndim == 3 and min(first.shape[1:]) >= 2:
            mesh = axes.imshow(first.mean(0).numpy(), vmin=0, vmax=1, cmap="cividis")
            axes.set(xticks=[], yticks=[])
            axes.figure.colorbar(mesh, ax=axes, label="share of uncertainty taken away")
        else:
            axes.bar(range(first.numel()), first.flatten().numpy(), color=charts.COLORS[0])
            axes.set(ylim=(0, 1), xlabel="value", ylabel="share of uncertainty taken away")
        axes.grid(False)

    return _drawn(draw, (4.4, 3.6))


def _explained(own: Assessment) -> list[float]:
    found = None if own.capture is None else own.capture.explained
    return [] if found is None or found.direction is None else [found.direction]


def _drawn(draw: Callable[[Axes], None], size: tuple[float, float]) -> Figure:
    with matplotlib.rc_context():
        return charts.drawing(draw, size)
