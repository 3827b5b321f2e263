"""The sweep over sizes and defenses: experiments, trials, medians with intervals, slopes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from leakbound.randomness import stream
from leakbound_reproductions.systematic_evaluation import two_layer
from leakbound_reproductions.systematic_evaluation.trial import (
    Cell,
    Trial,
    draw,
    pruned,
    release,
)
from leakbound_reproductions.systematic_evaluation.two_layer import (
    OrderSetting,
    lower_order,
    upper_order,
)

WIDTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
FIRST = 1000
"""The first seed of all trials. An earlier run with seeds 0 to 99 was known when the rules were
written, so its draws confirm nothing."""
AGAIN = 2000
"""The first seed of what is measured again because a first run from `FIRST` on was undecided."""
LOUD_WIDTH = 65_536
"""Width of the experiments with large noise, so that errors are linear before they saturate."""
INPUTS = (10, 20, 40, 80)
BATCHES = (1, 2, 3, 4)
NOISES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
LOUD = (4.0, 8.0, 16.0)
CLIP_FACTOR = 4.0
"""|G| / C of the DP-SGD experiments."""
RATES = (0.3, 0.5, 0.7, 0.9, 0.99)
RATES_OF_MODEL = (0.5, 0.9, 0.95, 0.97, 0.99)
LEARNING = (0.01, 0.1, 0.5)
CLIPS = (2.0, 10.0, 1000.0)
TABLE = {
    "dropout_units": "dropout",
    "dropout_entries": "dropout",
    "prune_layer": "pruning",
    "prune_global": "pruning",
    "local_steps": "local_aggregation",
    "mean_field_steps": "local_aggregation",
}
"""Names of the defenses in paper B's Table 1, if they differ."""


@dataclass(frozen=True)
class Row:
    """One experiment and the results of its seeds.

    Attributes:
        errors, spans: by seed.
        floors: lower bounds, by seed; empty without noise.
        median, low, high: of the errors, with an interval of at least 95 % for the median.
        upper, lower: the orders of Table 1; None if not known or without noise.
        meets: whether both conditions of the upper order hold, with constants of one.
    """

    cell: Cell
    errors: tuple[float, ...]
    spans: tuple[float, ...]
    floors: tuple[float, ...]
    median: float
    low: float
    high: float
    upper: float | None
    lower: float | None
    meets: bool

    @property
    def span(self) -> float:
        """The median share outside the span."""
        return float(np.median(self.spans))

    @property
    def logs(self) -> NDArray[Any]:
        """(seeds,) logarithms of the errors."""
        return np.asarray(np.log(self.errors))

    @property
    def over_floor(self) -> float | None:
        """Root of (mean squared error / mean squared lower bound); None without a lower bound."""
        if not self.floors:
            return None
        return float(np.sqrt(np.mean(np.square(self.errors)) / np.mean(np.square(self.floors))))


def over_inputs() -> list[Cell]:
    """The experiments of claim 2-1's slope in n."""
    return [Cell(inputs=n, width=WIDTHS[-1], batch=1, method="printed") for n in INPUTS]


def loud(batch: int) -> list[Cell]:
    """The experiments of claim 2-3's slope in noise_std."""
    return [Cell(width=LOUD_WIDTH, batch=batch, noise_std=s) for s in LOUD]


@dataclass(frozen=True)
class Slope:
    """A slope in log-log, its mean over seeds with a 95 % t interval."""

    value: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}] (n = {self.seeds})"


def fresh(count: int) -> range:
    """This many seeds, none of which was known when the rules were made.

    Example:
        >>> fresh(3)
        range(1000, 1003)
    """
    return range(FIRST, FIRST + count)


def cells(quick: bool = False) -> list[Cell]:
    """All experiments, without repeats."""
    widths = WIDTHS[::3] if quick else WIDTHS
    series = [("relu", 1), ("relu", 2), ("cubic", 2)]
    found = [Cell(a, width=m, batch=b, method="printed") for a, b in series for m in widths]
    found += [Cell(a, width=m, batch=b) for a, b in [*series, ("tanh", 1)] for m in widths]
    found += [Cell(batch=b, method=m) for b in (1, 2) for m in ("library", "printed")]
    found += [Cell(inputs=n, width=WIDTHS[-1]) for n in INPUTS]
    found += over_inputs()
    found += [Cell(width=WIDTHS[-1], batch=b) for b in BATCHES]
    found += [Cell(width=WIDTHS[-1], batch=b, noise_std=s) for b in (1, 2) for s in NOISES]
    found += [*loud(1), *loud(2)]
    clipped = Cell(width=WIDTHS[-1], defense="clipping", level=CLIP_FACTOR)
    found += [replace(clipped, noise_std=s / CLIP_FACTOR) for s in NOISES[::2]]
    found += [Cell(defense="clipping", level=c) for c in CLIPS]
    for rate in RATES:
        found += [Cell(defense=d, level=rate) for d in ("dropout_units", "dropout_entries")]
        found += [Cell(width=round((1 - rate) * Cell().width))]
        found += [Cell(defense="prune_layer", level=rate, batch=b) for b in (1, 2)]
        found += [Cell(defense="prune_layer", level=rate, method="left_out")]
        found += [
            Cell(defense="prune_layer", level=rate, batch=b, method="printed") for b in (1, 2)
        ]
    for defense in ("dropout_units", "dropout_entries", "prune_layer"):
        found += [
            Cell(defense=defense, level=p, noise_std=s) for p in (0.5, 0.9) for s in (1.0, 4.0)
        ]
    found += [Cell(defense="prune_global", level=rate) for rate in RATES_OF_MODEL]
    for defense in ("local_steps", "mean_field_steps"):
        found += [Cell(defense=defense, level=lr, steps=k) for k in (3, 5) for lr in LEARNING]
    return list(dict.fromkeys(found))


def precise(cell: Cell) -> bool:
    """Whether a claim needs the experiment's error to a few percent: dropout, and large noise."""
    narrow = [Cell(width=round((1 - rate) * Cell().width)) for rate in RATES]
    dropped = cell.defense.startswith("dropout") and not cell.noise_std
    return dropped or cell.width == LOUD_WIDTH or cell in narrow


def row(cell: Cell, trials: Sequence[Trial]) -> Row:
    """Trials of one experiment, summarized, with the orders."""
    errors = tuple(t.error for t in trials)
    spans = tuple(t.span for t in trials)
    floors = tuple(t.floor for t in trials if t.floor is not None)
    low, high = median_interval(errors)
    upper, lower, meets = _orders(cell)
    middle = float(np.median(errors))
    return Row(cell, errors, spans, floors, middle, low, high, upper, lower, meets)


def _orders(cell: Cell) -> tuple[float | None, float | None, bool]:
    """Upper order, lower order and the upper order's conditions, for the first seed's batch."""
    problem = draw(cell, FIRST)
    norm = float(np.linalg.norm(problem.gradient))
    name = TABLE.get(cell.defense, cell.defense)
    if cell.noise_std and name in ("none", "clipping"):
        name = "noise" if name == "none" else "dp_sgd"
    setting = OrderSetting(
        inputs=cell.inputs,
        width=cell.width,
        batch=cell.batch,
        noise_std=cell.noise_std,
        gradient_norm=norm,
        clip_norm=norm / max(1.0, cell.level),
        rate=cell.level if name == "dropout" else 0.0,
        activation=cell.activation,
        smallest_singular_value=float(np.linalg.svd(problem.inputs)[1].min()),
    )
    if cell.noise_std and name == "pruning":
        mask = release(problem, cell, stream(FIRST, "orders")).mask
        data = (problem.network, problem.inputs, problem.targets)
        setting = replace(setting, withheld_share=two_layer.withheld_share(*data, mask))
    lower = lower_order(name, setting).value if cell.noise_std else None
    if cell.noise_std and name not in ("noise", "dp_sgd"):
        return None, lower, False  # table 1 has the defense only, without noise
    upper = upper_order(name, setting)
    return upper.value, lower, bool(upper.conditions) and all(c.holds for c in upper.conditions)


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Order statistics that contain the median with at least the level; the ends if too few.

    Example:
        >>> median_interval(range(10))
        (1.0, 8.0)
    """
    ordered = sorted(values)
    size = len(values)
    skip = int(stats.binom.ppf((1 - level) / 2, size, 0.5)) - 1
    skip = max(skip, 0)
    return float(ordered[skip]), float(ordered[size - 1 - skip])


def slope(rows: Sequence[Row], value: Callable[[Cell], float]) -> Slope:
    """The slope of log error in log of an experiment's value, fitted for each seed.

    NaN if there are fewer than two rows; then nothing is decided.
    """
    if len(rows) < 2:
        return Slope(np.nan, np.nan, np.nan, 0)
    return interval(slopes([value(r.cell) for r in rows], [r.logs for r in rows]))


def slopes(levels: Sequence[float], logs: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """(seeds,) the slope of each seed: logs, one array per level, in the level's logarithm.

    Uses the seeds that all levels have, which are the first ones.
    """
    seeds = min(map(len, logs))
    x = np.log(levels)
    y = np.array([own[:seeds] for own in logs])
    x = x - x.mean()
    return np.asarray(x @ (y - y.mean(0)) / (x @ x))


def interval(values: NDArray[Any]) -> Slope:
    """Mean with a 95 % t interval."""
    size = len(values)
    margin = float(stats.t.ppf(0.975, size - 1) * values.std(ddof=1) / size**0.5)
    return Slope(
        float(values.mean()), float(values.mean() - margin), float(values.mean() + margin), size
    )


@dataclass(frozen=True)
class Withheld:
    """p_hat at one global pruning rate, by seed."""

    rate: float
    inputs: int
    shares: tuple[float, ...]


def withheld(rates: Sequence[float], inputs: int, seeds: int, width: int = 512) -> list[Withheld]:
    """p_hat by the share of all gradient entries that global pruning drops (claim 2-9)."""
    found = []
    for rate in rates:
        shares = []
        for seed in fresh(seeds):
            problem = draw(Cell(inputs=inputs, width=width), seed)
            mask = pruned(problem.gradient, rate, whole_model=True)
            data = (problem.network, problem.inputs, problem.targets)
            shares.append(two_layer.withheld_share(*data, mask))
        found.append(Withheld(rate, inputs, tuple(shares)))
    return found
