"""Figures of single results, as the five verbs return them (`.plot()`) and `bound` writes them."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import AbstractPathEffect, withStroke
from numpy.typing import NDArray
from torch import Tensor

from leakbound._util import pictures
from leakbound.assess.record import Assessment

COLORS = ("#1e78b4", "#ff4b0f", "#4b1e3c", "#c37878", "#9600ff", "#780f00", "#2d0f87")
"""Of lines on a light ground, as in report.css."""
GRAY = "#808080"
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": GRAY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRAY,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "xtick.color": GRAY,
    "ytick.color": GRAY,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
}
FAINTEST = 1e-9
"""Probabilities below this are drawn at it."""
LEAST_DRAWN = 1e-4
"""Where the axis of probabilities starts, unless what is accepted is near it."""
MOST_EXAMPLES = 8
MOST_ROWS = 40


def examples(
    truth: Tensor,
    guess: Tensor,
    captions: Sequence[str],
    input_range: tuple[float, float],
) -> Figure:
    """True examples (B, *S) above reconstructed ones: pictures, or lines where they are none."""
    shown = min(len(truth), MOST_EXAMPLES)
    drawn = Figure(figsize=(1.6 * shown + 0.6, 3.6), layout="constrained")
    grid = drawn.subplots(2, shown, squeeze=False)
    for row, (word, batch) in enumerate((("true", truth), ("reconstructed", guess))):
        for place in range(shown):
            axes = grid[row][place]
            example = batch[place].detach().cpu().double()
            if pictures.is_image(example[None]):
                (low, high) = input_range
                level = example.permute(1, 2, 0).numpy()
                color = level.shape[2] > 1
                # For colors, `imshow` ignores vmin and vmax.
                level = np.clip((level - low) / (high - low), 0, 1) if color else level.squeeze(-1)
                axes.imshow(level, cmap="gray", vmin=low, vmax=high)
                axes.set(xticks=[], yticks=[])
            else:
                axes.plot(example.flatten().numpy(), marker=".", lw=0.8)
                axes.set(ylim=input_range, xticks=[])
            axes.grid(False)
            if place == 0:
                axes.set_ylabel(word)
            if row == 1:
                axes.set_xlabel(captions[place])
    return drawn


def assessments(records: Sequence[Assessment]) -> Figure:
    """By attack and defense every example's score, or how much of an update is explained."""
    ran = [one for one in records if one.status == "ok"]
    measured = any(one.scores for one in ran)
    rows: dict[str, list[float]] = {}
    for one in ran:
        values = [v for v in one.scores if v is not None] if measured else _explained(one)
        label = f"{one.defense.name} · {one.attack.name}"
        rows.setdefault(label, []).extend(values)
    kept = dict(sorted(rows.items(), key=lambda row: max(row[1], default=0.0))[-MOST_ROWS:])

    def draw(axes: Axes) -> None:
        for place, values in enumerate(kept.values()):
            axes.plot(
                values,
                [place] * len(values),
                "o",
                color=COLORS[0],
                alpha=0.6,
            )
        axes.set_yticks(range(len(kept)), [*kept])
        if measured:
            for limit in sorted({one.criterion.value for one in ran}):
                axes.axvline(limit, color=GRAY, ls=":")
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
    label: str = "PSNR threshold (dB)",
) -> Figure:
    """Attained success and upper bound over rising thresholds, with the accepted probability."""

    def draw(axes: Axes) -> None:
        # The accepted probability must lie inside the axis.
        least = min(LEAST_DRAWN, 10.0 ** math.floor(math.log10(max(accepted, FAINTEST)) - 1))
        low = np.maximum(attained, least)
        high = np.maximum(bound, least)
        axes.fill_between(
            thresholds,
            low,
            high,
            color=COLORS[4],
            alpha=0.35,
            lw=0,
        )
        axes.plot(thresholds, high, color=COLORS[0])
        axes.plot(thresholds, low, color=COLORS[1], ls="--")
        axes.axhline(accepted, color=GRAY, ls=":")
        axes.set(
            yscale="log",
            ylim=(least, 2),
            xlabel=label,
            ylabel="probability",
        )
        halo: list[AbstractPathEffect] = [withStroke(linewidth=2.5, foreground="w")]
        words: dict[str, Any] = {"fontsize": 8, "path_effects": halo}
        at = len(thresholds) // 3
        for values, text, side, shade in (
            (high, "no attacker exceeds this", 6, COLORS[0]),
            (low, "an attack attains this", -12, COLORS[1]),
        ):
            place = (thresholds[at], float(values[at]))
            axes.annotate(
                text,
                place,
                (2, side),
                textcoords="offset points",
                color=shade,
                **words,
            )
        end = (thresholds[-1], accepted)
        text = f"accepted: {accepted:g}"
        axes.annotate(
            text,
            end,
            (0, 3),
            textcoords="offset points",
            ha="right",
            **words,
        )

    return _drawn(draw, (5.4, 3.6))


def over_rounds(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    label: str,
) -> Figure:
    """A line for each name, through (round, probability)."""

    def draw(axes: Axes) -> None:
        for color, (name, points) in zip(itertools.cycle(COLORS), curves.items(), strict=False):
            rounds, values = zip(*points, strict=True)
            axes.plot(rounds, values, color=color, label=name)
        axes.set(ylim=(0, 1.02), xlabel="round", ylabel=label)
        axes.legend(frameon=False)

    return _drawn(draw, (5.4, 3.6))


def png(drawn: Figure) -> bytes:
    buffer = io.BytesIO()
    # matplotlib would write its version into the file: equal results have equal bytes.
    drawn.savefig(
        buffer,
        format="png",
        dpi=150,
        metadata={"Software": None},
    )
    return buffer.getvalue()


def leak_map(known: Tensor) -> Figure:
    """How much of each value is given away, (B, *S) in [0, 1]: pictures, or bars by value."""
    first = known[0].detach().cpu().double()

    def draw(axes: Axes) -> None:
        if first.ndim == 3 and min(first.shape[1:]) >= 2:
            mesh = axes.imshow(
                first.mean(0).numpy(),
                vmin=0,
                vmax=1,
                cmap="cividis",
            )
            axes.set(xticks=[], yticks=[])
            axes.figure.colorbar(
                mesh,
                ax=axes,
                label="share of uncertainty taken away",
            )
        else:
            axes.bar(
                range(first.numel()),
                first.flatten().numpy(),
                color=COLORS[0],
            )
            axes.set(
                ylim=(0, 1),
                xlabel="value",
                ylabel="share of uncertainty taken away",
            )
        axes.grid(False)

    return _drawn(draw, (4.4, 3.6))


def _explained(record: Assessment) -> list[float]:
    explained = None if record.capture is None else record.capture.explained
    return [] if explained is None or explained.direction is None else [explained.direction]


def _drawn(draw: Callable[[Axes], None], size: tuple[float, float]) -> Figure:
    """A figure in the house style, on whose axes `draw` draws."""
    # A caller's own matplotlib settings must neither change our figures nor be changed.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        drawn = Figure(figsize=size, layout="constrained")
        draw(drawn.add_subplot())
        return drawn
