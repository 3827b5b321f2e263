"""Charts of reports: SVG that can stand on one page, and PNG for `leakbound bound`.

Names stay out of the SVG where they can: only parameter names and numbers are drawn. Text keeps to
currentColor. Marks differ by shape as well as by color, and the colors also under each of the three
kinds of color blindness (a test simulates them); the page gives lighter ones on dark.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import AbstractPathEffect, withStroke
from numpy.typing import NDArray

from leakbound.assess.record import CriterionInfo, Training
from leakbound.report import tables
from leakbound.report.tables import NO_DEFENSE, AttackSummary, DefenseSetting, Names, grouped
from leakbound.report.template import top_of

COLORS = ("#1e78b4", "#ff4b0f", "#4b1e3c", "#c37878", "#9600ff", "#780f00", "#2d0f87")
"""Of lines on a light ground; a page may set others as --line-0 to --line-6."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
GRAY = "#808080"
INK = "#010203"
"""Stands for currentColor, which matplotlib does not know."""
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "leakbound",
    "text.parse_math": False,
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
LANE = 65.0
"""The height at which PSNRs are drawn from which no eye sees a difference."""
LABELS, LETTERS = 24, 34
"""How many marks of a plot are labeled, and how many letters a label has."""
NO_DEFENSE_LABEL = tables.title(NO_DEFENSE)
EARLY = 5
"""The round whose loss shows how fast a model learns at first."""
LINES = 10
"""How many lines one plot of losses can hold and still be read."""
POINTS = 400
"""How many points of one line are drawn."""
FAINTEST = 1e-9
"""Probabilities below this are drawn at it."""
LEAST_DRAWN = 1e-4
"""Where the axis of probabilities starts, unless what is accepted is near it."""
CORRIDOR = (5.4, 3.6)
"""Inches of the plot of attained success and upper bound."""
THRESHOLD = "PSNR threshold (dB)"
_BEYOND = 1e6


@dataclass(frozen=True)
class Panel:
    """One plot with the words that stand around it."""

    title: str
    svg: str
    notes: tuple[str, ...]
    description: str


@dataclass(frozen=True)
class TrainingCurve:
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
        return self.losses.get(EARLY)

    @property
    def rounds(self) -> int:
        return max(self.losses)

    @property
    def last(self) -> float | None:
        return self.losses[self.rounds]


def keys(labels: Sequence[str], prefix: str) -> list[tuple[str, str]]:
    """A legend: each label with a small SVG of its line and marker; `prefix` starts their ids."""
    found = []
    for index, label in enumerate(labels):
        with _key_axes(f"{prefix}{index}") as (axes, output):
            axes.plot([0.2, 1, 1.8], [0, 0, 0], color=color(index))
            axes.plot([1], [0], marker(index), color=color(index))
        found.append((label, output[0]))
    return found


@contextmanager
def _key_axes(prefix: str) -> Iterator[tuple[Axes, list[str]]]:
    with figure(prefix, (0.42, 0.2), bare=True) as (axes, output):
        axes.axis("off")
        axes.set(xlim=(0, 2), ylim=(-1, 1))
        yield axes, output


@contextmanager
def figure(
    prefix: str, size: tuple[float, float] = (4.3, 3.0), *, bare: bool = False, right: float = 0.97
) -> Iterator[tuple[Axes, list[str]]]:
    """Axes to draw on; after the block, the list holds the SVG.

    `bare`: no room for labels; `right`: where the axes end, as a share of the width.
    """
    output: list[str] = []
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has other fonts
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        drawn = Figure(figsize=size)
        drawn.patch.set_alpha(0)
        left, bottom, end = (0, 0, 1) if bare else (0.56 / size[0], 0.5 / size[1], right)
        top = 1 if bare else 0.97
        axes = drawn.add_axes((left, bottom, end - left, top - bottom))
        axes.patch.set_alpha(0)
        yield axes, output
        output.append(_svg(drawn, prefix))


def _svg(drawn: Figure, prefix: str) -> str:
    """The figure as an <svg> element whose ids are unlike those of any other on the page."""
    buffer = io.StringIO()
    drawn.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg ") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)

    def rename(tag: re.Match[str]) -> str:
        own = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}-", tag.group())
        return re.sub(": (#[0-9a-f]{6})", paint, own)

    def paint(found: re.Match[str]) -> str:
        drawn = found.group(1)
        if drawn == INK:
            return ": currentColor"
        return f": var(--line-{COLORS.index(drawn)}, {drawn})" if drawn in COLORS else found.group()

    return re.sub(r"<[^>]+>", rename, text).strip()


def color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def marker(index: int) -> str:
    return MARKERS[index % len(MARKERS)]


def span(counts: Sequence[int], word: str) -> str:
    """The range of some counts with their noun."""
    low, high = min(counts), max(counts)
    ending = "" if high == 1 else ("es" if word.endswith("ch") else "s")
    return f"{low} {word}{ending}" if low == high else f"{low} to {high} {word}{ending}"


def loss_curves(trainings: Iterable[Training], names: Names) -> list[TrainingCurve]:
    found = grouped(
        ((names.model(t), names.defense(t), t.optimizer), dict(t.curve))
        for t in trainings
        if t.status == "ok" and t.curve
    )
    rows = []
    for key, own in found.items():
        by_round = {r: [curve[r] for curve in own] for r in sorted(set(own[0]).intersection(*own))}
        losses = {
            r: None if None in values else fmean(v for v in values if v is not None)
            for r, values in by_round.items()
        }
        rows.append(TrainingCurve(*key, losses, len(own)))
    return [row for row in rows if row.losses]


def drawn_losses(rows: Sequence[TrainingCurve], names: Names) -> list[str]:
    """Up to ten defenses to draw: none first, then the two ends of every defense's strengths."""
    labels = {row.defense for row in rows}
    by_name = grouped((s.name, label) for label, s in names.settings.items() if label in labels)
    by_name = {
        name: sorted(own, key=lambda label: names.settings[label].number or 0.0)
        for name, own in by_name.items()
    }
    order, end = by_name.pop(NO_DEFENSE, []), 0
    while any(by_name.values()):
        order += [own.pop(end) for own in by_name.values() if own]
        end = 0 if end else -1
    kept = set(order[:LINES])
    return [label for label in names.settings if label in kept]


def loss_panels(rows: Sequence[TrainingCurve], labels: Sequence[str]) -> list[Panel]:
    found: list[Panel] = []
    for model, optimizer in dict.fromkeys((row.model, row.optimizer) for row in rows):
        own = {r.defense: r for r in rows if (r.model, r.optimizer) == (model, optimizer)}
        lines = {index: own[label] for index, label in enumerate(labels) if label in own}
        if lines:
            found.append(_losses(f"{model}, {optimizer}", lines, f"l{len(found)}"))
    return found


def _losses(name: str, lines: Mapping[int, TrainingCurve], prefix: str) -> Panel:
    # Twice the largest loss before training: what diverges must not flatten the rest.
    starts = [abs(row.losses[min(row.losses)] or 0.0) for row in lines.values()]
    top = min(2 * max(starts), _BEYOND) or 1.0
    with figure(prefix, (4.9, 3.4)) as (axes, output):
        for index, row in lines.items():
            points = sorted(row.losses.items())
            step = -(-len(points) // POINTS)
            points = points[::step] + (points[-1:] if (len(points) - 1) % step else [])
            xs = [min(point, 1e9) for point, _ in points]
            ys = [math.nan if v is None else max(min(v, top), -top) for _, v in points]
            axes.plot(xs, ys, color=color(index), lw=1.3)
            every = max(1, len(xs) // 12)
            axes.plot(xs[::every], ys[::every], marker(index), color=color(index))
        axes.set(xlabel="round", ylabel="training loss")
        axes.margins(x=0.03)
    notes = [f"mean over {span([row.n for row in lines.values()], 'training seed')} a line"]
    if any(v is not None and v > top for row in lines.values() for v in row.losses.values()):
        notes.append(f"losses over {top:.3g} are drawn at {top:.3g}")
    return Panel(name, output[0], tuple(notes), "Training loss by round, one line a defense")


def tradeoffs(
    rows: Sequence[AttackSummary],
    settings: Mapping[str, DefenseSetting],
    accuracies: Mapping[tuple[str, str], tables.Accuracy],
    families: Mapping[str, int | None],
    axis: CriterionInfo,
    threshold: float | None,
) -> list[Panel]:
    """One panel a model: accuracy lost against the score of the strongest attack at any batch size.

    Every setting has its label at the right, joined to its mark by a thin line.
    """
    found = grouped((row.model, row) for row in rows if row.score)
    panels = []
    for place, (model, own) in enumerate(found.items()):
        points = []
        for label, some in grouped((row.defense, row) for row in own).items():
            cost = accuracies.get((model, label))
            before = cost.lost if cost else None
            if label == NO_DEFENSE_LABEL and cost and cost.mean is not None:
                before = tables.MeanInterval(0.0, None, None, cost.n, tables.LEVEL)
            if before is not None:
                highest = max(row.score.median for row in some if row.score)
                height = _lane(axis) if highest >= top_of(axis) else highest
                points.append(_Point(settings[label], before, height))
        if len(points) > 1:
            panels.append(_tradeoff(model, points, families, axis, threshold, f"t{place}"))
    return panels


def _lane(axis: CriterionInfo) -> float:
    """Where the best scores are drawn."""
    return max(LANE, top_of(axis))


@dataclass(frozen=True)
class _Point:
    setting: DefenseSetting
    cost: tables.MeanInterval
    height: float


def _tradeoff(
    model: str,
    points: Sequence[_Point],
    families: Mapping[str, int | None],
    axis: CriterionInfo,
    threshold: float | None,
    prefix: str,
) -> Panel:
    lowest, top, lane = min(0.0, *(p.height for p in points)), top_of(axis), _lane(axis)
    with figure(prefix, (6.6, 4.4), right=0.6) as (axes, output):
        if lane > top:
            axes.axhspan(top, lane + 4, color=GRAY, alpha=0.12, lw=0)
        for point in points:
            place = families.get(point.setting.name)
            shade = GRAY if place is None else color(place)
            shape = "x" if place is None else marker(place)
            x = 100 * point.cost.mean
            if point.cost.low is not None and point.cost.high is not None:
                ends = [100 * point.cost.low, 100 * point.cost.high]
                axes.plot(ends, [point.height] * 2, color=shade, lw=0.8, alpha=0.5)
            axes.plot([x], [point.height], shape, color=shade)
        if threshold is not None and threshold <= top:
            axes.axhline(threshold, color=GRAY, lw=1, ls=(0, (5, 3)))
        xs = [100 * point.cost.mean for point in points]
        room = 0.05 * (max(xs) - min(xs)) or 1.0
        axes.set(xlim=(min(xs) - room, max(xs) + room), ylim=(lowest, lane + 4))
        ticks = [*range(0, int(top), 10 if lane > top else 20)]
        axes.set_yticks([*ticks, lane], [*map(str, ticks), f"{'≥ ' * (lane > top)}{top:g}"])
        label = f"{axis.axis} of the strongest attack ({axis.unit})"
        axes.set(xlabel="points of test accuracy lost", ylabel=label)
        _label(axes, points, families)
    notes = [f"{span([point.cost.n for point in points], 'training seed')} a mark"]
    if threshold is not None:
        notes.append(f"broken line: the threshold, {axis.goal}")
    if len(points) > LABELS:
        notes.append(f"{LABELS} of {len(points)} marks have their names")
    if lane > top:
        notes.append(f"lane on top: {top:g} {axis.unit} and more, as good as exact")
    described = f"{model}: {axis.axis} of the strongest attack against the test accuracy lost"
    return Panel(model, output[0], tuple(notes), described)


def _label(axes: Axes, points: Sequence[_Point], families: Mapping[str, int | None]) -> None:
    """Names at the right in the order of the marks, at even distances, so that none overlap."""
    shown = sorted(points, key=lambda point: (point.height, -point.cost.mean))[-LABELS:]
    (left, end), (low, high) = axes.get_xlim(), axes.get_ylim()
    for rank, point in enumerate(shown):
        y = low + (high - low) * (rank + 0.5) / len(shown)
        place = families.get(point.setting.name)
        shade = GRAY if place is None else color(place)
        xs = [100 * point.cost.mean, end, end + 0.06 * (end - left)]
        axes.plot(xs, [point.height, y, y], color=shade, lw=0.5, alpha=0.5, clip_on=False)
        text = point.setting.label
        text = text if len(text) <= LETTERS else f"{text[: LETTERS - 1]}…"
        axes.text(xs[2], y, f" {text}", va="center", fontsize=7.5)


def corridor_png(
    thresholds: Sequence[float],
    attained: NDArray[Any],
    bound: NDArray[Any],
    accepted: float,
    label: str = THRESHOLD,
) -> bytes:
    """Attained success and upper bound over rising thresholds, with the accepted probability."""
    return _png(partial(draw_corridor, thresholds, attained, bound, accepted, label), CORRIDOR)


def draw_corridor(
    thresholds: Sequence[float],
    attained: NDArray[Any],
    bound: NDArray[Any],
    accepted: float,
    label: str,
    axes: Axes,
) -> None:
    least = min(LEAST_DRAWN, 10.0 ** math.floor(math.log10(max(accepted, FAINTEST)) - 1))
    low, high = np.maximum(attained, least), np.maximum(bound, least)
    axes.fill_between(thresholds, low, high, color=COLORS[4], alpha=0.35, lw=0)
    axes.plot(thresholds, high, color=COLORS[0])
    axes.plot(thresholds, low, color=COLORS[1], ls="--")
    axes.axhline(accepted, color=GRAY, ls=":")
    axes.set(yscale="log", ylim=(least, 2), xlabel=label, ylabel="probability")
    halo: list[AbstractPathEffect] = [withStroke(linewidth=2.5, foreground="w")]
    words: dict[str, Any] = {"fontsize": 8, "path_effects": halo}
    at = len(thresholds) // 3
    for values, text, side, shade in (
        (high, "no attacker exceeds this", 6, COLORS[0]),
        (low, "an attack attains this", -12, COLORS[1]),
    ):
        place = (thresholds[at], float(values[at]))
        axes.annotate(text, place, (2, side), textcoords="offset points", color=shade, **words)
    end = (thresholds[-1], accepted)
    text = f"accepted: {accepted:g}"
    axes.annotate(text, end, (0, 3), textcoords="offset points", ha="right", **words)


def surface_png(
    noises: Sequence[float],
    thresholds: Sequence[float],
    bound: NDArray[Any],
    attained: NDArray[Any],
    accepted: float,
    label: str = THRESHOLD,
) -> bytes:
    """The upper bound (thresholds, noises) in color; lines where each is the accepted risk."""

    def draw(axes: Axes) -> None:
        shown = np.maximum(bound, FAINTEST)
        mesh = axes.pcolormesh(
            noises, thresholds, shown, norm=LogNorm(FAINTEST, 1), cmap="cividis", shading="gouraud"
        )
        edge: list[AbstractPathEffect] = [withStroke(linewidth=3.5, foreground="k")]
        for values, style, words in ((bound, "-", "upper bound"), (attained, "--", "attained")):
            axes.plot([], [], color="w", ls=style, path_effects=edge, label=words)
            if values.min() < accepted < values.max():
                shade = np.log(np.maximum(values, 1e-300))
                lines = axes.contour(
                    noises, thresholds, shade, [np.log(accepted)], colors="w", linestyles=style
                )
                lines.set_path_effects(edge)
        axes.legend(title=f"risk of {accepted:g}", loc="upper right", framealpha=0.85)
        axes.set(xscale="log", xlabel="noise multiplier", ylabel=label)
        axes.grid(False)
        bar = axes.figure.colorbar(mesh, ax=axes)
        bar.set_label("probability that no attacker exceeds")

    return _png(draw, (5.8, 3.8))


def _png(draw: Callable[[Axes], None], size: tuple[float, float]) -> bytes:
    with matplotlib.rc_context():
        drawn = drawing(draw, size)
        buffer = io.BytesIO()
        drawn.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
        return buffer.getvalue()


def drawing(draw: Callable[[Axes], None], size: tuple[float, float]) -> Figure:
    """A figure in the house style, on whose axes `draw` draws; changes matplotlib's settings."""
    matplotlib.rcdefaults()
    matplotlib.rcParams.update(STYLE | {"text.parse_math": True})
    drawn = Figure(figsize=size, layout="constrained")
    draw(drawn.add_subplot())
    return drawn
