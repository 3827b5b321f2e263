"""The rounds of a training that were attacked: what each leaks, and the model that clients got."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import UnsetType

from leakbound._util.groups import grouped
from leakbound.assess.record import Assessment, ReleaseInfo, RoundInfo
from leakbound.report.tables import (
    MeanInterval,
    MedianInterval,
    Names,
    defined,
    mean_of,
    mean_value,
    middle,
)

LINES = 7
"""How many lines a panel draws: as many as there are colors."""
WIDTH = 300
HEIGHT = 150


@dataclass(frozen=True)
class RoundRow:
    """One attack on one configuration, in the rounds that it attacked.

    Attributes:
        rounds: the first and the last; they differ where each experiment chose its own.
        measures: the median over experiments by measure, each the mean over examples.
        accuracy: of the model that clients got, as a mean over experiments.
        kept, withheld: shares of weights, as means.
        sent, dense: bytes of a client's message, and of one without pruning or withholding.
    """

    model: str
    batch_size: int
    defense: str
    attack: str
    rounds: tuple[int, int]
    measures: dict[str, MedianInterval | None]
    accuracy: MeanInterval | None
    kept: float
    withheld: float
    sent: float
    dense: int
    n: int


@dataclass(frozen=True)
class Point:
    """A value over a round in a panel's units of length, with its interval's ends."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class PanelLine:
    """The values of one configuration and attack, over rounds; `color` is that of all panels."""

    label: str
    color: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Panel:
    """One measure over rounds: lines, and the values at the axes' ends. `more`: lines left out."""

    title: str
    lines: tuple[PanelLine, ...]
    lowest: float
    highest: float
    first: int
    last: int
    more: int


def round_rows(assessments: Iterable[Assessment], names: Names) -> list[RoundRow]:
    """A row for each attack and configuration whose records describe a training."""
    known = grouped((names.attack_key(a), a) for a in assessments if _training(a) is not None)
    return [
        _row((*names.key(some[0]), names.attack(some[0], of_round=False)), some)
        for some in known.values()
    ]


def _row(key: tuple[str, int, str, str], experiments: Sequence[Assessment]) -> RoundRow:
    releases = [a.release for a in experiments if a.release is not None]
    trainings = [one for one in map(_training, experiments) if one is not None]
    numbers = [release.round or 1 for release in releases]
    measures = {
        "score": middle(defined(mean_value(a) for a in experiments)),
        "nmi": middle(defined(mean_value(a, "nmi") for a in experiments)),
        "adjusted_mi": middle(defined(mean_value(a, "adjusted_mi") for a in experiments)),
        "loss": middle(defined(a.objective.end for a in experiments if a.objective is not None)),
    }
    count = len(trainings)
    return RoundRow(
        *key,
        rounds=(min(numbers), max(numbers)),
        measures=measures,
        accuracy=mean_of(defined(one.accuracy for one in trainings)),
        kept=sum(one.kept for one in trainings) / count,
        withheld=sum(release.withheld or 0.0 for release in releases) / count,
        sent=sum(one.sent for one in trainings) / count,
        dense=trainings[0].dense,
        n=count,
    )


def panels(
    assessments: Iterable[Assessment],
    names: Names,
    axis: str,
) -> list[Panel]:
    """Panels of the leak and of the accuracy over the named rounds; none for a single round."""
    lines = grouped(
        ((*names.key(a), names.attack(a, of_round=False)), a)
        for a in assessments
        if _training(a) is not None and not isinstance(a.attack.round, UnsetType)
    )
    by_line = {
        key: [_row(key, some) for some in by_round(experiments)]
        for key, experiments in lines.items()
    }
    kept = {key: rows for key, rows in by_line.items() if len(rows) > 1}
    models = {model for model, *_ in kept}
    sizes = {size for _, size, *_ in kept}
    attacks = {attack for *_, attack in kept}
    made = []
    for name, title in (
        ("score", axis),
        ("nmi", "NMI"),
        ("loss", "attack loss"),
        ("accuracy", "test accuracy of the model"),
    ):
        values: dict[str, list[tuple[int, float, float, float]]] = {}
        for (model, size, defense, attack), rows in [*kept.items()][:LINES]:
            words = [defense, *[attack] * (len(attacks) > 1), *[model] * (len(models) > 1)]
            label = ", ".join([*words, *[f"batch size {size}"] * (len(sizes) > 1)])
            values[label] = [(row.rounds[0], *one) for row in rows if (one := _value(row, name))]
        if panel := _panel(title, values, more=max(0, len(kept) - LINES)):
            made.append(panel)
    return made


def by_round(experiments: Iterable[Assessment]) -> list[list[Assessment]]:
    """The experiments of each attacked round, in the order of the rounds."""
    groups = grouped((a.release.round or 1, a) for a in experiments if a.release is not None)
    return [groups[number] for number in sorted(groups)]


def _value(row: RoundRow, name: str) -> tuple[float, float, float] | None:
    if name == "accuracy":
        mean = row.accuracy
        if mean is None:
            return None
        low = mean.mean if mean.low is None else max(0.0, mean.low)
        high = mean.mean if mean.high is None else min(1.0, mean.high)
        return mean.mean, low, high
    found = row.measures[name]
    return None if found is None else (found.median, found.low, found.high)


def _panel(
    title: str,
    values: dict[str, list[tuple[int, float, float, float]]],
    more: int,
) -> Panel | None:
    """The values by line, (round, value, low, high), at their places; None without a line."""
    drawn = {label: points for label, points in values.items() if len(points) > 1}
    every = [point for points in drawn.values() for point in points]
    if not every:
        return None
    first = min(point[0] for point in every)
    last = max(point[0] for point in every)
    lowest = min(point[2] for point in every)
    highest = max(point[3] for point in every)

    def height(value: float) -> float:
        share = 0.5 if highest == lowest else (value - lowest) / (highest - lowest)
        return round(HEIGHT * (1 - share), 1)

    colors = [*values]
    lines = tuple(
        PanelLine(
            label,
            colors.index(label),
            tuple(
                Point(
                    round(WIDTH * (number - first) / (last - first), 1),
                    height(value),
                    height(low),
                    height(high),
                )
                for number, value, low, high in points
            ),
        )
        for label, points in drawn.items()
    )
    return Panel(title, lines, lowest, highest, first, last, more)


def _training(assessment: Assessment) -> RoundInfo | None:
    release: ReleaseInfo | None = assessment.release
    if assessment.status != "ok" or release is None or isinstance(release.training, UnsetType):
        return None
    return release.training
