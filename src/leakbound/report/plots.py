"""PSNR by strength, and against utility: small SVG plots; the page adds words and legends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from matplotlib.axes import Axes

from leakbound.report.drawing import GRAY, MARKERS, Panel, color, draw_ceiling, figure, span
from leakbound.report.tables import NO_DEFENSE, Group, Setting, Utility

TOP = 60.0
"""PSNR in dB above which no eye sees a difference: higher values are drawn here."""
STRENGTHS = 40
"""How many settings of one defense a panel shows: of more, some at even distances."""
Line = list[tuple[float, Group]]


@dataclass(frozen=True)
class Section:
    """The panels of one model and batch size."""

    model: str
    batch_size: int
    panels: tuple[Panel, ...]


def curves(
    groups: Sequence[Group],
    settings: Mapping[str, Setting],
    attacks: Sequence[str],
    threshold: float | None,
    ceilings: Mapping[tuple[str, int, str], float] | None = None,
) -> list[Section]:
    """PSNR over defense strength: one section a model and batch size, one panel a defense.

    Defenses that were tested with one choice of parameters share a panel. `ceilings`: by model,
    batch size and defense, the PSNR of the mean error that no attacker exceeds.
    """
    known = {key: min(value, TOP) for key, value in (ceilings or {}).items()}
    limits = _limits([group for group in groups if group.psnr], threshold, [*known.values()])
    sections: list[Section] = []
    for model, size in dict.fromkeys((g.model, g.batch_size) for g in groups):
        own = [g for g in groups if (g.model, g.batch_size) == (model, size) and g.psnr]
        panels: list[Panel] = []
        for title, all_labels in _shared_axes(own, settings):
            labels = _thinned(all_labels, settings)
            drawn = [g for g in own if g.defense in labels]
            over = {d: known[model, size, d] for d in labels if (model, size, d) in known}
            prefix, level = f"c{len(sections)}-{len(panels)}", _undefended(own)
            frame = _Frame(prefix, limits, threshold, level, over)
            panel = _curve(title, labels, drawn, settings, attacks, frame)
            panels.append(_with_count(panel, len(labels), len(all_labels)))
        sections.append(Section(model, size, tuple(panels)))
    return [section for section in sections if section.panels]


def tradeoffs(
    groups: Sequence[Group],
    settings: Mapping[str, Setting],
    utility: Mapping[tuple[str, str], Utility],
    names: Sequence[str],
    threshold: float | None,
) -> list[Panel]:
    """Test accuracy against the PSNR of the strongest attack: one panel a model and batch size."""
    limits = _limits([group for group in groups if group.psnr], threshold)
    panels: list[Panel] = []
    own: dict[tuple[str, int, str], list[Group]] = {}
    for group in groups:
        own.setdefault((group.model, group.batch_size, group.defense), []).append(group)
    by_name: dict[str, list[str]] = {}
    for label in dict.fromkeys(g.defense for g in groups):
        by_name.setdefault(settings[label].name, []).append(label)
    labels = [label for some in by_name.values() for label in _thinned(some, settings)]
    for model, size in dict.fromkeys((g.model, g.batch_size) for g in groups):
        points = []
        for label in labels:
            best = _strongest(own.get((model, size, label), ()))
            cost = utility.get((model, label))
            if best and cost and cost.mean is not None:
                points.append((settings[label], cost, best))
        if points:
            frame = _Frame(f"t{len(panels)}", limits, threshold, None)
            title = f"{model}, batch size {size}"
            panel = _tradeoff(title, points, names, frame)
            panels.append(_with_count(panel, len(labels), sum(map(len, by_name.values()))))
    return panels


def _strongest(groups: Sequence[Group]) -> Group | None:
    """The attack with the highest median PSNR."""
    own = [group for group in groups if group.psnr]
    return max(own, key=lambda g: g.psnr.median if g.psnr else -math.inf, default=None)


def _thinned(labels: Sequence[str], settings: Mapping[str, Setting]) -> list[str]:
    """At most `STRENGTHS` of a defense's settings, the weakest and the strongest among them."""
    ordered = sorted(labels, key=lambda label: settings[label].number or 0.0)
    steps = min(len(ordered), STRENGTHS)
    kept = {ordered[i * (len(ordered) - 1) // max(1, steps - 1)] for i in range(steps)}
    return [label for label in labels if label in kept]


def _with_count(panel: Panel, shown: int, count: int) -> Panel:
    if shown == count:
        return panel
    return replace(panel, notes=(*panel.notes, f"{shown} of {count} settings"))


@dataclass(frozen=True)
class _Frame:
    """What surrounds a panel's lines: a prefix for its ids, the y axis, level lines, ceilings."""

    prefix: str
    limits: tuple[float, float]
    threshold: float | None
    undefended: float | None
    ceilings: Mapping[str, float] = field(default_factory=dict)


def _shared_axes(
    groups: Sequence[Group], settings: Mapping[str, Setting]
) -> list[tuple[str, list[str]]]:
    by_name: dict[str, list[str]] = {}
    for label in dict.fromkeys(g.defense for g in groups):
        if settings[label].name != NO_DEFENSE:
            by_name.setdefault(settings[label].name, []).append(label)
    axes = [(name, labels) for name, labels in by_name.items() if len(labels) > 1]
    single = [labels[0] for labels in by_name.values() if len(labels) == 1]
    if len(single) == 1:
        return [*axes, (settings[single[0]].name, single)]
    return [*axes, ("defenses with one setting", single)] if single else axes


def _curve(
    title: str,
    labels: list[str],
    groups: Sequence[Group],
    settings: Mapping[str, Setting],
    attacks: Sequence[str],
    frame: _Frame,
) -> Panel:
    numbers = {label: settings[label].number for label in labels}
    known = [number for number in numbers.values() if number is not None]
    numeric = len(known) == len(labels) and len(labels) > 1
    spots = {label: float(i) for i, label in enumerate(labels, 1)}
    places = {k: v for k, v in numbers.items() if v is not None} if numeric else spots
    lines = {
        attack: sorted(((places[g.defense], g) for g in groups if g.attack == attack), key=_first)
        for attack in attacks
    }
    with figure(frame.prefix) as (axes, output):
        _levels(axes, frame, _blind(groups))
        spread = _nudge(known if numeric else None, len([a for a in lines if lines[a]]))
        shown = [index for index, attack in enumerate(attacks) if lines[attack]]
        for order, index in enumerate(shown):
            moved = [(spread(x, order), g) for x, g in lines[attacks[index]]]
            _draw(axes, moved, index, joined=numeric)
        if frame.ceilings:
            ordered = sorted(places, key=lambda label: places[label])
            ys = [frame.ceilings.get(label, math.nan) for label in ordered]
            draw_ceiling(axes, [places[label] for label in ordered], ys, joined=numeric)
        _strength_axis(axes, sorted(places.values()), numeric)
        axes.set_xlabel(_short(settings[labels[0]].strength[0][0]) if numeric else "setting")
    notes = [] if numeric else [f"#{i} {label}" for i, label in enumerate(labels, 1)]
    described = f"PSNR in dB by strength of {title}; the numbers are in the results table"
    return Panel(title, output[0], (*notes, _count(groups)), described)


def _tradeoff(
    title: str,
    points: Sequence[tuple[Setting, Utility, Group]],
    names: Sequence[str],
    frame: _Frame,
) -> Panel:
    with figure(frame.prefix, (4.9, 3.4)) as (axes, output):
        _levels(axes, frame, _blind([group for _, _, group in points]))
        for index, name in enumerate(names):
            own = [point for point in points if point[0].name == name]
            own.sort(key=lambda point: point[0].number or 0.0)
            xs = [100 * (cost.mean or 0.0) for _, cost, _ in own]
            ys = [_median(group) for *_, group in own]
            for (_, cost, group), x, y in zip(own, xs, ys, strict=True):
                low, high = 100 * (cost.low or 0.0), 100 * (cost.high or 0.0)
                axes.plot([low, high], [y, y], color=color(index), lw=0.9, alpha=0.7)
                axes.plot([x, x], _bar(group), color=color(index), lw=0.9, alpha=0.7)
            axes.plot(xs, ys, color=color(index), lw=0.8, alpha=0.6)
            axes.plot(xs, ys, MARKERS[index % len(MARKERS)], color=color(index))
            for i in sorted({0, len(own) - 1}) if len(own) > 1 else []:
                number = own[i][0].number
                if number is not None:
                    axes.annotate(
                        f"{number:g}",
                        (xs[i], ys[i]),
                        (4, 4),
                        fontsize=8,
                        textcoords="offset points",
                    )
        axes.margins(x=0.1)
        axes.set_xlabel("test accuracy in %")
        axes.set_ylabel("PSNR of the strongest attack in dB")
    counts = span([cost.n for _, cost, _ in points], "training seed")
    groups = [group for *_, group in points]
    described = "Privacy and utility: PSNR of the strongest attack against test accuracy"
    return Panel(title, output[0], (_count(groups), f"{counts} a point"), described)


def _draw(axes: Axes, line: Line, index: int, *, joined: bool) -> None:
    """One attack: its medians, their intervals, and hollow marks where it had trouble."""
    own, marker = color(index), MARKERS[index % len(MARKERS)]
    xs, ys = [x for x, _ in line], [_median(group) for _, group in line]
    for x, group in line:
        axes.plot([x, x], _bar(group), color=own, lw=1.2, alpha=0.75)
    if joined:
        axes.plot(xs, ys, color=own)
    for x, y, (_, group) in zip(xs, ys, line, strict=True):
        hollow = 2 * group.problems >= group.ok
        axes.plot([x], [y], marker, color=own, fillstyle="none" if hollow else "full")


def _levels(axes: Axes, frame: _Frame, blind: float | None) -> None:
    axes.set_ylim(*frame.limits)
    axes.set_ylabel("PSNR in dB")
    if frame.undefended is not None:
        axes.axhline(frame.undefended, color=GRAY, lw=1.2)
    if frame.threshold is not None:
        axes.axhline(frame.threshold, color=GRAY, lw=1.2, ls=(0, (5, 3)))
    if blind is not None:
        axes.axhline(blind, color=GRAY, lw=1.2, ls=(0, (1, 2)))


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


def _nudge(numbers: Sequence[float] | None, lines: int) -> Any:
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


def _limits(
    groups: Sequence[Group], threshold: float | None, ceilings: Sequence[float] = ()
) -> tuple[float, float]:
    values = [*ceilings]
    values += [end for g in groups for end in _bar(g)]
    values += [g.blind for g in groups if g.blind is not None]
    values += [] if threshold is None else [threshold]
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.06 * (high - low) or 1.0
    return min(0.0, low) if low - room < 0 <= low else low - room, high + room


def _undefended(groups: Sequence[Group]) -> float | None:
    return max((_median(g) for g in groups if g.defense == "no defense"), default=None)


def _blind(groups: Sequence[Group]) -> float | None:
    levels = sorted(g.blind for g in groups if g.blind is not None)
    return levels[len(levels) // 2] if levels else None


def _count(groups: Sequence[Group]) -> str:
    text = span([group.ok for group in groups], "batch") + " a point"
    over = any(group.psnr and group.psnr.high > TOP for group in groups)
    return f"{text}; values over {TOP:g} dB are drawn at {TOP:g}" if over else text


def _bar(group: Group) -> tuple[float, float]:
    low, high = (group.psnr.low, group.psnr.high) if group.psnr else (math.nan, math.nan)
    return min(low, TOP), min(high, TOP)


def _median(group: Group) -> float:
    return min(group.psnr.median, TOP) if group.psnr else -math.inf


def _first(point: tuple[float, Group]) -> float:
    return point[0]


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"
