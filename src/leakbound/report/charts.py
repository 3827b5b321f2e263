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
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median_high
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import AbstractPathEffect, withStroke
from numpy.typing import NDArray

from leakbound.assess.record import Training
from leakbound.report import tables
from leakbound.report.tables import NO_DEFENSE, AttackSummary, DefenseSetting, Names, grouped

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
TOP = 60.0
"""PSNR in dB above which no eye sees a difference: higher values are drawn here."""
STRENGTHS = 40
"""How many settings of one defense a panel shows: of more, some at even distances."""
EARLY = 5
"""The round whose loss shows how fast a model learns at first."""
LINES = 10
"""How many lines one plot of losses can hold and still be read."""
POINTS = 400
"""How many points of one line are drawn."""
FAINTEST = 1e-9
"""Probabilities below this are drawn at it."""
CORRIDOR = (5.4, 3.6)
"""Inches of the corridor's plot."""
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
class PanelGroup:
    model: str
    batch_size: int
    panels: tuple[Panel, ...]


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


@dataclass(frozen=True)
class _Frame:
    """What surrounds a panel's lines: a prefix for its ids, the y axis, level lines, bounds."""

    prefix: str
    limits: tuple[float, float]
    threshold: float | None
    undefended: float | None
    bounds: Mapping[str, float] = field(default_factory=dict)


def keys(labels: Sequence[str], prefix: str) -> list[tuple[str, str]]:
    """A legend: each label with a small SVG of its line and marker; `prefix` starts their ids."""
    found = []
    for index, label in enumerate(labels):
        with _key_axes(f"{prefix}{index}") as (axes, output):
            axes.plot([0.2, 1, 1.8], [0, 0, 0], color=color(index))
            axes.plot([1], [0], marker(index), color=color(index))
        found.append((label, output[0]))
    return found


def bound_key(prefix: str) -> str:
    with _key_axes(prefix) as (axes, output):
        _draw_bound(axes, [0.2, 1, 1.8], [0, 0, 0], size=7)
    return output[0]


@contextmanager
def _key_axes(prefix: str) -> Iterator[tuple[Axes, list[str]]]:
    with figure(prefix, (0.42, 0.2), bare=True) as (axes, output):
        axes.axis("off")
        axes.set(xlim=(0, 2), ylim=(-1, 1))
        yield axes, output


@contextmanager
def figure(
    prefix: str, size: tuple[float, float] = (4.3, 3.0), *, bare: bool = False
) -> Iterator[tuple[Axes, list[str]]]:
    """Axes to draw on, `bare` without room for labels; after the block, the list holds the SVG."""
    output: list[str] = []
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has other fonts
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        drawn = Figure(figsize=size)
        drawn.patch.set_alpha(0)
        left, bottom, end = (0, 0, 1) if bare else (0.56 / size[0], 0.5 / size[1], 0.97)
        axes = drawn.add_axes((left, bottom, end - left, end - bottom))
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


def curves(
    rows: Sequence[AttackSummary],
    settings: Mapping[str, DefenseSetting],
    attacks: Sequence[str],
    threshold: float | None,
    bounds: Mapping[tables.ConfigurationKey, float] | None = None,
) -> list[PanelGroup]:
    """PSNR over defense strength: one group a model and batch size, one panel a defense.

    Defenses that were tested with one choice of parameters share a panel. `bounds`: the PSNR of the
    mean error that no attacker exceeds.
    """
    known = {key: min(value, TOP) for key, value in (bounds or {}).items()}
    limits = _limits([row for row in rows if row.psnr], threshold, [*known.values()])
    groups: list[PanelGroup] = []
    for model, size in dict.fromkeys((row.model, row.batch_size) for row in rows):
        own = [r for r in rows if (r.model, r.batch_size) == (model, size) and r.psnr]
        panels: list[Panel] = []
        for name, all_labels in _shared_axes(own, settings):
            labels = _thinned(all_labels, settings)
            drawn = [row for row in own if row.defense in labels]
            over = {d: known[model, size, d] for d in labels if (model, size, d) in known}
            undefended = [_median(row) for row in own if row.defense == "no defense"]
            prefix, level = f"c{len(groups)}-{len(panels)}", max(undefended, default=None)
            frame = _Frame(prefix, limits, threshold, level, over)
            panel = _curve(name, labels, drawn, settings, attacks, frame)
            panels.append(_with_count(panel, len(labels), len(all_labels)))
        groups.append(PanelGroup(model, size, tuple(panels)))
    return [group for group in groups if group.panels]


def tradeoffs(
    rows: Sequence[AttackSummary],
    settings: Mapping[str, DefenseSetting],
    accuracies: Mapping[tuple[str, str], tables.Accuracy],
    names: Sequence[str],
    threshold: float | None,
) -> list[Panel]:
    limits = _limits([row for row in rows if row.psnr], threshold)
    own = grouped(((row.model, row.batch_size, row.defense), row) for row in rows if row.psnr)
    by_name = grouped((settings[d].name, d) for d in dict.fromkeys(row.defense for row in rows))
    labels = [label for some in by_name.values() for label in _thinned(some, settings)]
    panels: list[Panel] = []
    for model, size in dict.fromkeys((row.model, row.batch_size) for row in rows):
        points = []
        for label in labels:
            best = max(own.get((model, size, label), ()), key=_highest, default=None)
            cost = accuracies.get((model, label))
            if best and cost and cost.mean is not None:
                points.append((settings[label], cost, best))
        if points:
            frame = _Frame(f"t{len(panels)}", limits, threshold, None)
            panel = _tradeoff(f"{model}, batch size {size}", points, names, frame)
            panels.append(_with_count(panel, len(labels), sum(map(len, by_name.values()))))
    return panels


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


def _shared_axes(
    rows: Sequence[AttackSummary], settings: Mapping[str, DefenseSetting]
) -> list[tuple[str, list[str]]]:
    labels = dict.fromkeys(row.defense for row in rows)
    by_name = grouped((settings[d].name, d) for d in labels if settings[d].name != NO_DEFENSE)
    axes = [(name, own) for name, own in by_name.items() if len(own) > 1]
    single = [own[0] for own in by_name.values() if len(own) == 1]
    if single:
        words = settings[single[0]].name if len(single) == 1 else "defenses with one setting"
        axes.append((words, single))
    return axes


def _curve(
    name: str,
    labels: list[str],
    rows: Sequence[AttackSummary],
    settings: Mapping[str, DefenseSetting],
    attacks: Sequence[str],
    frame: _Frame,
) -> Panel:
    numbers = {label: settings[label].number for label in labels}
    known = {label: number for label, number in numbers.items() if number is not None}
    numeric = len(known) == len(labels) and len(labels) > 1
    places = known if numeric else {label: float(i) for i, label in enumerate(labels, 1)}
    lines = {
        index: sorted(
            ((places[r.defense], r) for r in rows if r.attack == attack), key=lambda point: point[0]
        )
        for index, attack in enumerate(attacks)
    }
    lines = {index: line for index, line in lines.items() if line}
    with figure(frame.prefix) as (axes, output):
        _levels(axes, frame, rows)
        move = _nudge([*known.values()] if numeric else None, len(lines))
        for order, (index, line) in enumerate(lines.items()):
            _draw_line(axes, [(move(x, order), row) for x, row in line], index, joined=numeric)
        ordered = sorted(places, key=lambda label: places[label])
        if frame.bounds:
            ys = [frame.bounds.get(label, math.nan) for label in ordered]
            _draw_bound(axes, [places[label] for label in ordered], ys, joined=numeric)
        _strength_axis(axes, [places[label] for label in ordered], numeric)
        axes.set_xlabel(_short(settings[labels[0]].strength[0][0]) if numeric else "setting")
    notes = [] if numeric else [f"#{i} {label}" for i, label in enumerate(labels, 1)]
    described = f"PSNR in dB by strength of {name}; the numbers are in the results table"
    return Panel(name, output[0], (*notes, _count(rows)), described)


def _tradeoff(
    name: str,
    points: Sequence[tuple[DefenseSetting, tables.Accuracy, AttackSummary]],
    names: Sequence[str],
    frame: _Frame,
) -> Panel:
    rows = [row for *_, row in points]
    with figure(frame.prefix, (4.9, 3.4)) as (axes, output):
        _levels(axes, frame, rows)
        for index, defense in enumerate(names):
            own = [point for point in points if point[0].name == defense]
            own.sort(key=lambda point: point[0].number or 0.0)
            xs = [100 * (cost.mean or 0.0) for _, cost, _ in own]
            ys = [_median(row) for *_, row in own]
            for (_, cost, row), x, y in zip(own, xs, ys, strict=True):
                low, high = 100 * (cost.low or 0.0), 100 * (cost.high or 0.0)
                axes.plot([low, high], [y, y], color=color(index), lw=0.9, alpha=0.7)
                axes.plot([x, x], _bar(row), color=color(index), lw=0.9, alpha=0.7)
            axes.plot(xs, ys, color=color(index), lw=0.8, alpha=0.6)
            axes.plot(xs, ys, marker(index), color=color(index))
            for i in sorted({0, len(own) - 1}) if len(own) > 1 else []:
                number, place = own[i][0].number, (xs[i], ys[i])
                if number is not None:
                    where = "offset points"
                    axes.annotate(f"{number:g}", place, (4, 4), textcoords=where, fontsize=8)
        axes.margins(x=0.1)
        axes.set(xlabel="test accuracy in %", ylabel="PSNR of the strongest attack in dB")
    counts = span([cost.n for _, cost, _ in points], "training seed")
    described = "Privacy and utility: PSNR of the strongest attack against test accuracy"
    return Panel(name, output[0], (_count(rows), f"{counts} a point"), described)


def _draw_bound(
    axes: Axes, xs: Sequence[float], ys: Sequence[float], *, joined: bool = True, size: float = 13
) -> None:
    """An upper bound: bars in the color of the text, joined by a thin broken line."""
    line = (0, (6, 2, 1, 2)) if joined else "none"
    axes.plot(xs, ys, "_", color=INK, ls=line, lw=0.9, ms=size, mew=2.2)


def _draw_line(
    axes: Axes, line: Sequence[tuple[float, AttackSummary]], index: int, *, joined: bool
) -> None:
    """One attack: medians and their intervals, hollow marks where it often did not converge."""
    own = color(index)
    xs, ys = [x for x, _ in line], [_median(row) for _, row in line]
    for x, row in line:
        axes.plot([x, x], _bar(row), color=own, lw=1.2, alpha=0.75)
    if joined:
        axes.plot(xs, ys, color=own)
    for x, y, (_, row) in zip(xs, ys, line, strict=True):
        hollow = 2 * row.did_not_converge >= row.ran
        axes.plot([x], [y], marker(index), color=own, fillstyle="none" if hollow else "full")


def _levels(axes: Axes, frame: _Frame, rows: Sequence[AttackSummary]) -> None:
    axes.set_ylim(*frame.limits)
    axes.set_ylabel("PSNR in dB")
    baselines = tables.defined(row.baseline_psnr for row in rows)
    baseline = median_high(baselines) if baselines else None
    styles: list[tuple[float | None, Any]] = [
        (frame.undefended, "-"), (frame.threshold, (0, (5, 3))), (baseline, (0, (1, 2)))
    ]  # fmt: skip
    for level, style in styles:
        if level is not None:
            axes.axhline(level, color=GRAY, lw=1.2, ls=style)


def _strength_axis(axes: Axes, values: Sequence[float], numeric: bool) -> None:
    if not numeric:
        axes.set_xlim(0.5, len(values) + 0.5)
        axes.set_xticks(values, [f"#{value:g}" for value in values])
        return
    if _wide(values):
        axes.set_xscale("log")
    few = -(-len(values) // 7)
    digits = 6 if few == 1 else 2
    named = [f"{v:.{digits}g}" if i % few == 0 else "" for i, v in enumerate(values)]
    axes.set_xticks(values, named)
    axes.set_xticks([], minor=True)
    axes.margins(x=0.08)


def _wide(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) / min(values) > 10


def _nudge(numbers: Sequence[float] | None, lines: int) -> Callable[[float, int], float]:
    """How far to move a line sideways, so that intervals at one strength do not hide each other."""
    ordered = sorted(numbers or [])

    def move(x: float, order: int) -> float:
        shift = order - (lines - 1) / 2
        if numbers is None:
            return x + shift * min(0.12, 0.6 / max(lines, 1))
        if _wide(ordered):
            return float(x * (ordered[-1] / ordered[0]) ** (0.012 * shift))
        return x + shift * 0.012 * (ordered[-1] - ordered[0])

    return move


def _thinned(labels: Sequence[str], settings: Mapping[str, DefenseSetting]) -> list[str]:
    """At most `STRENGTHS` of a defense's settings, the weakest and the strongest among them."""
    ordered = sorted(labels, key=lambda label: settings[label].number or 0.0)
    steps = min(len(ordered), STRENGTHS)
    kept = {ordered[i * (len(ordered) - 1) // max(1, steps - 1)] for i in range(steps)}
    return [label for label in labels if label in kept]


def _with_count(panel: Panel, shown: int, count: int) -> Panel:
    if shown == count:
        return panel
    return replace(panel, notes=(*panel.notes, f"{shown} of {count} settings"))


def _limits(
    rows: Sequence[AttackSummary], threshold: float | None, bounds: Sequence[float] = ()
) -> tuple[float, float]:
    values = [*bounds, *(end for row in rows for end in _bar(row))]
    values += tables.defined([threshold, *(row.baseline_psnr for row in rows)])
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.06 * (high - low) or 1.0
    return min(0.0, low) if low - room < 0 <= low else low - room, high + room


def _count(rows: Sequence[AttackSummary]) -> str:
    text = span([row.ran for row in rows], "batch") + " a point"
    over = any(row.psnr and row.psnr.high > TOP for row in rows)
    return f"{text}; values over {TOP:g} dB are drawn at {TOP:g}" if over else text


def _bar(row: AttackSummary) -> tuple[float, float]:
    low, high = (row.psnr.low, row.psnr.high) if row.psnr else (math.nan, math.nan)
    return min(low, TOP), min(high, TOP)


def _median(row: AttackSummary) -> float:
    return min(row.psnr.median, TOP) if row.psnr else -math.inf


def _highest(row: AttackSummary) -> float:
    return row.psnr.median if row.psnr else -math.inf


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"


def corridor_png(
    thresholds: Sequence[float], attained: NDArray[Any], bound: NDArray[Any], accepted: float
) -> bytes:
    """Attained success and upper bound over rising thresholds, with the accepted probability."""
    return _png(partial(draw_corridor, thresholds, attained, bound, accepted), CORRIDOR)


def draw_corridor(
    thresholds: Sequence[float],
    attained: NDArray[Any],
    bound: NDArray[Any],
    accepted: float,
    axes: Axes,
) -> None:
    low, high = np.maximum(attained, FAINTEST), np.maximum(bound, FAINTEST)
    axes.fill_between(thresholds, low, high, color=COLORS[4], alpha=0.35, lw=0)
    axes.plot(thresholds, high, color=COLORS[0], label="upper bound: no attacker exceeds it")
    axes.plot(thresholds, low, color=COLORS[1], ls="--", label="attained on a linear trap")
    axes.axhline(accepted, color=GRAY, ls=":", label=f"accepted: {accepted:g}")
    axes.set(yscale="log", ylim=(FAINTEST, 1.5), xlabel=THRESHOLD, ylabel="probability")
    axes.legend(frameon=False, loc="best")


def surface_png(
    noises: Sequence[float],
    thresholds: Sequence[float],
    bound: NDArray[Any],
    attained: NDArray[Any],
    accepted: float,
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
        axes.set(xscale="log", xlabel="noise multiplier", ylabel=THRESHOLD)
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
