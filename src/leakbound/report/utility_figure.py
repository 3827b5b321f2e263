"""What a point of accuracy buys: the figure of a report, and what it shows in a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from leakbound._util.groups import grouped
from leakbound.report.equal_loss import best_so_far
from leakbound.report.equal_utility import (
    EqualCost,
    EqualUtility,
    FamilyPair,
    UtilityLevel,
)
from leakbound.report.tables import LEVEL, NO_DEFENSE, MeanInterval, title
from leakbound.report.template import decimal, listing, percent, plural

WIDTH = 460
HEIGHT = 240
LINES = 7
"""How many families are drawn: as many as there are colors and shapes."""
SAID = 3
"""How many pairs a sentence names."""
TICKS = 5
LETTER = 6.2
LINE = 12
"""About how wide and high a letter of a label is, in the units of the figure."""
RADIUS = 4
ROOM = 1.08
"""How far the axes go beyond the largest mean."""
SHAPES: Final = (
    "M-4 0A4 4 0 1 1 4 0A4 4 0 1 1 -4 0Z",
    "M-4 -4H4V4H-4Z",
    "M0 -5L5 4H-5Z",
    "M0 -5.5L5.5 0L0 5.5L-5.5 0Z",
    "M0 5L5 -4H-5Z",
    "M-5 -2H-2V-5H2V-2H5V2H2V5H-2V2H-5Z",
    "M-4 -4L0 -1.5L4 -4L1.5 0L4 4L0 1.5L-4 4L-1.5 0Z",
)
"""A mark for each family, around its place: colors alone do not tell lines apart for everyone."""
COSTS: Final = {
    "training loss": "training loss",
    "points of test accuracy lost": "test accuracy",
    "points of test error": "test accuracy",
}
"""What is equal, by the measure of cost."""
Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""


@dataclass(frozen=True)
class Mark:
    """A level at its place: the ends of both intervals within the figure, and its label.

    `text` is the label where there is room for it, at (`text_x`, `text_y`).
    """

    x: float
    y: float
    left: float
    right: float
    low: float
    high: float
    about: str
    text: str
    text_x: float
    text_y: float
    anchor: str


@dataclass(frozen=True)
class FigureLine:
    """A family: its color, its mark, the curve that is compared, and its levels."""

    label: str
    color: int
    shape: str
    curve: tuple[tuple[float, float], ...]
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class UtilityFigure:
    """The figure of one model and batch size, with what it shows in words.

    `number`: of the view on the page that it belongs to. `shown`: the comparison that is drawn.
    `undefended`: the place of no defense. `baseline`: the height of the prior-only baseline.
    """

    number: int
    title: str
    sentence: str
    result: EqualUtility
    shown: EqualCost
    lines: tuple[FigureLine, ...]
    more: int
    undefended: tuple[float, float] | None
    baseline: float
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def points(self) -> tuple[float, ...]:
        """The costs at which some family is read."""
        return tuple(sorted({one.cost for family in self.shown.families for one in family.at}))

    @property
    def not_compared(self) -> dict[str, list[str]]:
        """By reason, what neither comparison has."""
        every = [one for own in self.result.comparisons for one in own.not_compared]
        reasons = grouped((one.why, one.what) for one in every)
        return {why: list(dict.fromkeys(some)) for why, some in reasons.items()}

    @property
    def model(self) -> str:
        return f"{self.result.model}, batch {self.result.batch_size}"


def utility_figures(
    results: Iterable[EqualUtility],
    views: Sequence[tuple[str, int]],
    labels: Mapping[str, str],
    colors: Mapping[str, int | None],
) -> tuple[UtilityFigure, ...]:
    """The figures of the models and batch sizes that the page shows, if they have a family.

    `labels`: the strength of each defense setting in short; `colors`: of each defense.
    """
    made = []
    for result in results:
        drawn = next((one for one in reversed(result.comparisons) if one.families), None)
        if drawn is None or (result.model, result.batch_size) not in views:
            continue
        number = views.index((result.model, result.batch_size)) + 1
        made.append(_figure(result, drawn, number, labels, colors))
    return tuple(sorted(made, key=lambda one: one.number))


def _figure(
    result: EqualUtility,
    drawn: EqualCost,
    number: int,
    labels: Mapping[str, str],
    colors: Mapping[str, int | None],
) -> UtilityFigure:
    families = drawn.families[:LINES]
    levels = [level for family in families for level in family.levels]
    costs = [level.cost.mean for level in levels]
    low = min(costs) if drawn.cost == "training loss" else min(0.0, *costs)
    x_ticks = ticks(low, low + ROOM * (max(costs) - low))
    y_ticks = ticks(0.0, ROOM * max(result.baseline, *(level.error.mean for level in levels)))

    def across(cost: float) -> float:
        return _place(cost, x_ticks, WIDTH)

    def up(error: float) -> float:
        return HEIGHT - _place(error, y_ticks, HEIGHT)

    plain = next((one for one in levels if one.defense == title(NO_DEFENSE)), None)
    start = None if plain is None else (across(plain.cost.mean), up(plain.error.mean))
    places = [(across(one.cost.mean), up(one.error.mean)) for one in levels]
    taken = [_box(*place, RADIUS, RADIUS) for place in places]
    lines = []
    for place, family in enumerate(families):
        points = [(one.cost.mean, one.error.mean) for one in family.levels]
        own = [one for one in family.levels if one.defense != title(NO_DEFENSE)]
        marks = tuple(_mark(one, across, up, labels, taken) for one in own)
        curve = tuple((across(x), up(y)) for x, y in best_so_far(points))
        color = colors.get(family.defense) or 0
        lines.append(FigureLine(family.defense, color, SHAPES[place], curve, marks))
    return UtilityFigure(
        number,
        _title(drawn),
        sentence(result, drawn),
        result,
        drawn,
        tuple(lines),
        len(drawn.families) - len(families),
        start,
        up(result.baseline),
        tuple((across(value), _number(value)) for value in x_ticks),
        tuple((up(value), _number(value)) for value in y_ticks),
    )


def _title(drawn: EqualCost) -> str:
    if drawn.cost == "training loss":
        return "Defenses at equal training loss"
    return "What a point of accuracy buys"


def _mark(
    level: UtilityLevel,
    across: Callable[[float], float],
    up: Callable[[float], float],
    labels: Mapping[str, str],
    taken: list[Box],
) -> Mark:
    x = across(level.cost.mean)
    y = up(level.error.mean)
    words = labels.get(level.defense, "")
    text, at_x, at_y, anchor = _label(words, x, y, taken)
    return Mark(
        x,
        y,
        left=across(level.cost.low or 0.0),
        right=across(level.cost.high or 0.0),
        low=up(level.error.low or 0.0),
        high=up(level.error.high or 0.0),
        about=f"{level.defense}: cost {spread(level.cost)}, error {spread(level.error)}",
        text=text,
        text_x=at_x,
        text_y=at_y,
        anchor=anchor,
    )


def _label(words: str, x: float, y: float, taken: list[Box]) -> tuple[str, float, float, str]:
    """The first place beside a mark that holds the label; no label where none does."""
    wide = LETTER * len(words)
    for above, right in product((True, False), (True, False)):
        left = x + RADIUS + 2 if right else x - RADIUS - 2 - wide
        top = y - LINE - RADIUS if above else y + RADIUS
        box = left, top, left + wide, top + LINE
        inside = left >= 0 and box[2] <= WIDTH + 20 and top >= -8 and box[3] <= HEIGHT
        if words and inside and not any(_meet(box, other) for other in taken):
            taken.append(box)
            anchor = "start" if right else "end"
            return words, left if right else left + wide, top + LINE - 3, anchor
    return "", x, y, "start"


def _box(x: float, y: float, wide: float, high: float) -> Box:
    return x - wide, y - high, x + wide, y + high


def _meet(one: Box, other: Box) -> bool:
    across = one[0] < other[2] and other[0] < one[2]
    return across and one[1] < other[3] and other[1] < one[3]


def _place(value: float, marks: Sequence[float], length: float) -> float:
    share = (value - marks[0]) / (marks[-1] - marks[0])
    return round(length * min(1.0, max(0.0, share)), 1)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers around a range, about five of them.

    Example:
        >>> ticks(0.0, 0.14), ticks(-3.0, 49.0)
        ([0.0, 0.05, 0.1, 0.15], [-20.0, 0.0, 20.0, 40.0, 60.0])
    """
    wide = max(high - low, 1e-9)
    power = 10.0 ** math.floor(math.log10(wide / (TICKS - 1)))
    step = next(power * n for n in (1, 2, 5, 10) if power * n * (TICKS - 1) >= wide * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    return [round(number * step, 12) for number in range(first, last + 1)]


def sentence(result: EqualUtility, drawn: EqualCost) -> str:
    """What a comparison shows, with its uncertainty.

    It names the pairs whose difference excludes 0, then how many do not.
    """
    equal = COSTS[drawn.cost]
    measure = result.error.removesuffix(", %")
    if not drawn.pairs:
        return _alone(drawn, measure, equal)
    seen = [pair for pair in drawn.pairs if pair.seen]
    seeds = plural(drawn.pairs[0].difference.n, "seed")
    jointly = " for all pairs jointly" if len(drawn.pairs) > 1 else ""
    sure = f"{percent(LEVEL)} intervals{jointly}, {seeds}"
    if len(drawn.pairs) == 1:
        return _of_one(drawn.pairs[0], drawn, measure, sure.replace("intervals", "interval"))
    if not seen:
        return (
            f"At equal {equal}, no difference between defenses can be seen: each of the "
            f"{len(drawn.pairs)} intervals of a difference includes 0 ({sure})."
        )
    seen.sort(key=lambda pair: -pair.difference.mean)
    said = [
        f"{pair.first} leaves the best attack a larger error than {pair.second}, by "
        f"{spread(pair.difference)} on average"
        for pair in seen[:SAID]
    ]
    more = len(seen) - len(said)
    rest = len(drawn.pairs) - len(seen)
    end = f" {plural(more, 'more difference')} can be seen." if more else ""
    if rest:
        end += f" In {rest} of {len(drawn.pairs)} pairs no difference can be seen."
    return f"At equal {equal}, {listing(said)} ({measure}; {sure}).{end}"


def _of_one(pair: FamilyPair, drawn: EqualCost, measure: str, sure: str) -> str:
    equal = COSTS[drawn.cost]
    unit = "points lost" if drawn.cost.endswith("lost") else drawn.cost
    over = f"{_number(pair.low)} to {_number(pair.high)} {unit}"
    means = f"{short(pair.first_error.mean)} and {short(pair.second_error.mean)}"
    gap = spread(pair.difference)
    if pair.seen:
        return (
            f"At equal {equal}, {pair.first} leaves the best attack a larger error ({measure}) "
            f"than {pair.second}: {means} on average over {over}, a difference of {gap} ({sure})."
        )
    return (
        f"At equal {equal}, no difference between {pair.first} and {pair.second} can be seen: "
        f"the best attack’s error ({measure}) is {means} on average over {over}, and the interval "
        f"of the difference, {gap}, includes 0 ({sure})."
    )


def _alone(drawn: EqualCost, measure: str, equal: str) -> str:
    """What is left to say where no two families are compared."""
    said = []
    for family in drawn.families[:SAID]:
        first = next((one for one in family.at if one.cost), None)
        if first is None:
            continue
        cost = plural(round(first.cost), "point")
        start = next((one for one in family.levels if one.defense == title(NO_DEFENSE)), None)
        before = "" if start is None else f"; no defense leaves {short(start.error.mean)}"
        said.append(
            f"For {cost} of {equal}, {family.defense} leaves the best attack an error ({measure}) "
            f"of {spread(first.error)} ({percent(LEVEL)} interval, "
            f"{plural(first.error.n, 'seed')}){before}."
        )
    said.append(f"No two defenses can be compared at equal {equal}.")
    return " ".join(said)


def spread(found: MeanInterval) -> str:
    """A mean with the ends of its interval as text."""
    if found.low is None or found.high is None:
        return short(found.mean)
    return f"{short(found.mean)} ({short(found.low)} to {short(found.high)})"


def short(value: float) -> str:
    """A number with digits by its size, the same for all numbers of a size."""
    return decimal(value, 1) if abs(value) >= 10 else decimal(value, 3 if abs(value) < 1 else 2)


def _number(value: float) -> str:
    return f"{value:.3g}".replace("-", "−")
