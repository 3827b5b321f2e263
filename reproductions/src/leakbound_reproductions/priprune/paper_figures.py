"""The figures of paper D in their own form: NMI against settings and against accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean, stdev

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from leakbound_reproductions import kept
from leakbound_reproductions.priprune.claims import in_depth
from leakbound_reproductions.priprune.comparisons import arm, arms, at_rate, by_scheme
from leakbound_reproductions.priprune.figures import COLORS
from leakbound_reproductions.priprune.measured import BySeed, Measured, rate_of

MARKS = "osD^vP"
FIXED = 0.1, 0.3, 0.6
"""Fixed rates that figures 8a to 8d show."""
Points = Mapping[float, BySeed]


def draw(found: Measured, folder: Path) -> None:
    """All for which there are experiments, as PNG files."""
    with matplotlib.rc_context():
        for name, parts, make in (
            ("rates", ("rate",), _rates),
            ("attacks", ("rate",), _attacks),
            ("parameters", ("rate", "batch", "size", "rounds"), _parameters),
            ("defense_rounds", ("defended",), _over_rounds),
            ("accuracy_nmi", ("defended", "table"), _accuracy),
        ):
            if all(found.where(part=part).pairs for part in parts):
                kept.figure(make(found), folder / f"{name}.png", 100)


def _rates(found: Measured) -> Figure:
    """Figure 2: NMI and PSNR of SGI by rate."""
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    own = found.where(part="rate", dense_server=False)
    rates = sorted({rate_of(cell) for cell, _ in own.pairs})
    panels = figure.subplots(1, 2)
    for axes, measure, label in zip(panels, ("nmi", "psnr"), ("NMI", "PSNR (dB)"), strict=True):

        def of(one: Measured, measure: str = measure) -> Points:
            return {rate: at_rate(one, rate).leak("sgi", measure) for rate in rates}

        _lines(axes, own, of)
        axes.set(xlabel="pruning rate p", ylabel=label)
    panels[0].legend(fontsize=6, frameon=False)
    return figure


def _attacks(found: Measured) -> Figure:
    """Figure 3: NMI of SGI and of GI by rate, if the client prunes a dense model."""
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    own = found.where(part="rate", dense_server=True)
    rates = sorted({rate_of(cell) for cell, _ in own.pairs})
    panels = figure.subplots(1, 2, sharey=True)
    for axes, attack, title in zip(panels, ("sgi_pruned", "gi"), ("SGI", "GI"), strict=True):
        _lines(axes, own, lambda one, a=attack: {r: at_rate(one, r).leak(a, "nmi") for r in rates})  # type: ignore[misc]
        axes.set(
            title=f"({'a' if title == 'SGI' else 'b'}) {title} attack", xlabel="pruning rate p"
        )
    panels[0].set_ylabel("NMI")
    panels[0].legend(fontsize=6, frameon=False)
    return figure


def _parameters(found: Measured) -> Figure:
    """Figures 4a, 4b, 5a and 5b: NMI of SGI by rate, batch, model and round."""
    figure = Figure(figsize=(14, 3.2), layout="constrained")
    panels = figure.subplots(1, 4, sharey=True)
    rate = found.where(part="rate", dense_server=False)
    rates = sorted({rate_of(cell) for cell, _ in rate.pairs})
    _lines(panels[0], rate, lambda own: {r: at_rate(own, r).leak("sgi", "nmi") for r in rates})
    panels[0].set(xlabel="pruning rate p", ylabel="NMI", title="figure 4a")
    batch = found.where(part="batch")
    sizes = sorted(batch.values("target"))
    _lines(panels[1], batch, lambda own: {b: own.where(target=b).leak("sgi", "nmi") for b in sizes})
    panels[1].set(xlabel="batch size B", title="figure 4b", xscale="log")
    size = found.where(part="size")
    weights = in_depth({cell.model: record["weights"] for cell, record in size.pairs})
    _lines(
        panels[2],
        size,
        lambda own: {w: own.where(model=m).leak("sgi", "nmi") for m, w in weights.items()},
    )
    panels[2].set(xlabel="weights d", title="figure 5a", xscale="log")
    rounds = found.where(part="rounds")
    marks = sorted({mark for cell, _ in rounds.pairs for mark in cell.marks})
    _lines(panels[3], rounds, lambda own: {t: own.leak("sgi", "nmi", t) for t in marks})
    panels[3].set(xlabel="round T", title="figure 5b", xscale="log")
    panels[0].legend(fontsize=6, frameon=False)
    return figure


def _over_rounds(found: Measured) -> Figure:
    """Figures 8a, 8b and 8d: accuracy, NMI of SGI and the rate of withholding, by round."""
    figure = Figure(figsize=(12.6, 3.4), layout="constrained")
    own = found.where(part="defended")
    some = {"PruneFL": own.where(defense="none")}
    for rate in FIXED:
        some[f"largest (pseudo) {rate:g}"] = arm(own, "largest", rate, True)
    some["PriPrune"] = own.where(defense=_ours(own))
    some = {name: part for name, part in some.items() if part.pairs}
    marks = sorted({mark for cell, _ in own.pairs for mark in cell.marks})

    def accuracy(one: Measured) -> Points:
        return {mark: one.noted("accuracy", mark) for mark in marks}

    def leak(one: Measured) -> Points:
        return {mark: one.leak("sgi", "nmi", mark) for mark in marks}

    def withheld(one: Measured) -> Points:
        return {mark: one.noted("rate", mark) for mark in marks}

    panels = figure.subplots(1, 3)
    of = accuracy, leak, withheld
    words = ("figure 8a", "accuracy"), ("figure 8b", "NMI"), ("figure 8d", "withheld share")
    for axes, make, (title, label) in zip(panels, of, words, strict=True):
        _each_line(axes, some, make)
        axes.set(xlabel="round", ylabel=label, title=title)
    panels[0].legend(fontsize=6, frameon=False)
    return figure


def _ours(own: Measured) -> str:
    """PriPrune's settings; "" if it has not run."""
    return next((d for d in own.values("defense") if d.startswith("pri_prune")), "")


def _lines(axes: Axes, found: Measured, of: Callable[[Measured], Points]) -> None:
    """One line per scheme: means over seeds with their standard deviations."""
    _each_line(axes, by_scheme(found), of)


def _each_line(
    axes: Axes,
    some: Mapping[str, Measured],
    of: Callable[[Measured], Points],
) -> None:
    for color, mark, (name, own) in zip(COLORS, MARKS, some.items(), strict=False):
        points = {x: list(values.values()) for x, values in sorted(of(own).items()) if values}
        means = [fmean(values) for values in points.values()]
        spread = [stdev(v) if len(v) > 1 else 0.0 for v in points.values()]
        axes.errorbar(
            list(points), means, spread, color=color, marker=mark, ms=3, lw=1, elinewidth=0.5,
            capsize=1.5, label=name,
        )  # fmt: skip


def _accuracy(found: Measured) -> Figure:
    """Figures 6, 8c and 9: NMI of SGI against accuracy."""
    figure = Figure(figsize=(12.6, 3.8), layout="constrained")
    rules, fixed, schemes = figure.subplots(1, 3)
    own = found.where(part="defended")
    _point(rules, own.where(defense="none"), "PruneFL", COLORS[0], "o")
    for color, rule in zip(COLORS[1:], ("largest", "random", "mix"), strict=False):
        for pseudo, mark in ((False, "s"), (True, "D")):
            label = f"{rule} ({'pseudo' if pseudo else 'real'})"
            _point(rules, arm(own, rule, 0.3, pseudo), label, color, mark)
    _point(fixed, own.where(defense="none"), "PruneFL", COLORS[0], "o")
    for color, rate in zip(COLORS[1:], FIXED, strict=False):
        label = f"largest (pseudo) {rate:g}"
        _point(fixed, arm(own, "largest", rate, True), label, color, "D")
    _point(fixed, own.where(defense=_ours(own)), "PriPrune", COLORS[4], "*")
    for color, (name, some) in zip(
        COLORS, by_scheme(found.where(part="table")).items(), strict=False
    ):
        both = arms(some)
        if both:
            _point(schemes, both[0], name, color, "o")
            _point(schemes, both[1], f"{name} + PriPrune", color, "*")
    titles = ("figure 6: fixed rules at 0.3", "figure 8c: rates and PriPrune", "figure 9: schemes")
    for axes, title in zip((rules, fixed, schemes), titles, strict=True):
        axes.set(title=title, xlabel="accuracy (%)", ylabel="NMI")
        axes.legend(fontsize=6, frameon=False)
    return figure


def _point(axes: Axes, own: Measured, label: str, color: str, mark: str) -> None:
    nmi = own.leak("sgi", "nmi")
    right = own.accuracy()
    if nmi:
        x = fmean(right.values())
        y = fmean(nmi.values())
        axes.plot([x], [y], mark, color=color, ms=9 if mark == "*" else 5, label=label)
