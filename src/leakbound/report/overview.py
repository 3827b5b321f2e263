"""The first screen of a report: what is exposed, to whom, what the best defense costs, what next.

One line a defense setting: how often the best attack reconstructs an example (a dot with its
interval) and what a theorem excludes (hatched). Between the two nothing is known.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leakbound.assess.record import (
    EXPOSURES,
    VERDICTS,
    Assessment,
    CriterionInfo,
    Threat,
    Verdict,
)
from leakbound.assess.verdict import together
from leakbound.report.columns import RowTable, row_of
from leakbound.report.folder import Run, Strip
from leakbound.report.settings import (
    Limit,
    SettingRow,
    advice,
    answer,
    by_setting,
    limits,
    telling,
    undefended,
)
from leakbound.report.tables import (
    NO_DEFENSE,
    Accuracy,
    Configuration,
    MeanInterval,
    Names,
    ShareInterval,
    grouped,
    title,
)
from leakbound.report.template import interval, listing, upper_bound

VIEWS = 12
"""Of how many models and batch sizes the first screen shows a chart."""
LINES = 16
"""How many settings a chart shows unfolded."""
STRICTER = (0, 5, 10, 15, 20)
"""What a stricter threshold adds, in dB."""
FAMILIES = 9
"""Of how many families of defenses the strip shows the worst example."""
COLUMNS = 6
"""How many columns of a table's row the strip shows."""
NOUNS = {
    "images": ("image", "images"),
    "table": ("row", "rows of a table"),
    "tokens": ("sequence", "sequences of tokens"),
    "series": ("series", "series"),
}
MEAN = "the mean of public examples, that of its class, and constants"
BASELINES = {
    "table": "the medians and most frequent levels of public rows, and those of its class",
    "tokens": "the most frequent token of each place, and the closest public sequence",
}
"""By domain what the prior-only baseline is the closest of."""
_NUMBERED = 7  # colors of lines on the page


@dataclass(frozen=True)
class Line:
    """One defense setting on one model and batch size.

    Attributes:
        family: the color of its defense on the whole page; None for no defense.
        shade: of 0 to 1, how strong it is among the settings of its defense.
        reconstructed, by: the share of the best attack, and this attack.
        attained: an attack on examples like the public ones succeeds at least so often.
        limits: what no attacker exceeds; the first needs the fewest conditions.
        bounded: a bound was computed, though it may exclude nothing.
        cost: the test accuracy lost against no defense, as a share; None if it is not known.
        unskilled: it is not known because the training without a defense learned nothing.
    """

    label: str
    family: int | None
    shade: float
    verdict: Verdict
    reconstructed: ShareInterval | None
    by: str | None
    proved: int
    attained: float | None
    limits: tuple[Limit, ...]
    bounded: bool
    cost: MeanInterval | None
    unskilled: bool = False

    @property
    def excluded(self) -> float:
        """From where on a theorem excludes every attacker without a condition; 1: nowhere."""
        return min((one.probability for one in self.limits if not one.condition), default=1.0)

    @property
    def excluded_if(self) -> float:
        """The same under the condition that the line names, if it names one."""
        return min((one.probability for one in self.named), default=1.0)

    @property
    def named(self) -> tuple[Limit, ...]:
        """The limits that the line names."""
        return telling(self.limits, self.verdict)


@dataclass(frozen=True)
class View:
    """The chart of one model and batch size, the most exposed setting first."""

    model: str
    batch_size: int
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Shot:
    """The best reconstructed example of one defense family, cut out of its strips.

    `place`: the example's place among `count`; `row`: of a table, its first columns, those that are
    right after sensitive ones. Without pictures only the numbers remain.
    """

    family: str
    defense: str
    verdict: Verdict
    attack: str
    score: float
    truth: Strip | None
    picture: Strip | None
    place: int
    count: int
    row: RowTable | None
    link: str | None


@dataclass(frozen=True)
class Overview:
    answer: str
    best: str
    threat: str
    shots: tuple[Shot, ...]
    more_shots: int
    views: tuple[View, ...]
    command: str
    reason: str


def overview(
    run: Run,
    names: Names,
    rows: Sequence[Configuration],
    accuracies: Mapping[tuple[str, str], Accuracy],
    best: Mapping[tuple[str, int, str, str], str],
    *,
    images: bool,
    inline: bool,
) -> Overview:
    """The first screen; `best` links configurations and attacks to their best example.

    `inline`: pictures are data of the page, else files beside it.
    """
    known = families(names)
    every = [*_shots(run, names, rows, best, images=images, inline=inline)]
    settings = by_setting(run.assessments, names, rows, accuracies)
    pairs = {(row.model, row.batch_size) for row in rows}
    guessed = _guessed(run.assessments)
    return Overview(
        answer=answer(run.assessments, rows, *nouns(run.assessments)),
        best=advice(settings, len(pairs), undefended(run.assessments)),
        threat=threat_line(run, names),
        shots=tuple(every[:FAMILIES]),
        more_shots=max(0, len(every) - FAMILIES),
        views=tuple(_views(rows, names, accuracies, known)),
        command=next_command(
            run.info.plan,
            min((a.criterion for a in run.assessments), key=lambda one: one.value),
            guessed=guessed is not None,
        ),
        reason=guessed or _reason(rows),
    )


def families(names: Names) -> dict[str, int | None]:
    """The color of every defense, the same on the whole page; no defense has none."""
    own = dict.fromkeys(setting.name for setting in names.settings.values())
    defended = [name for name in own if name != NO_DEFENSE]
    colors: dict[str, int | None] = {name: i % _NUMBERED for i, name in enumerate(defended)}
    return {name: colors.get(name) for name in own}


def threat_line(run: Run, names: Names) -> str:
    """The threat model and what was tested, in one line."""
    own = run.assessments
    threats = list(dict.fromkeys(a.threat for a in own))
    said = {
        "labels": _either(threats, "labels_known", "labels known", "labels not known"),
        "defense": _either(threats, "defense_known", "defense known", "defense not known"),
        "server": listing([f"{word} server" for word in dict.fromkeys(t.server for t in threats)]),
    }
    if any(t.statistics_known for t in threats):
        said["statistics"] = "batch norm statistics sent"
    sizes = listing(sorted({a.batch_size for a in own}))
    steps = sorted({model.train_steps for model in names.models.values()})
    loaded = any(model.weights for model in names.models.values())
    weights = "weights from a file" if loaded else ""
    if not loaded:
        trained = listing([f"{n:,} training steps" for n in steps if n])
        weights = f"weights after {trained}" if trained else "untrained weights"
    captured = sum(a.capture is not None for a in own) > 0
    tested = [f"batch size {sizes}", "one round", weights, run.info.data.source]
    criteria = sorted({a.criterion.value: a.criterion for a in own}.items())
    ends = [f"reconstructed: {listing([one.text for _, one in criteria])}"]
    accepted = {b.accepted for a in own for b in a.bounds if b.accepted is not None}
    if accepted:
        shares = listing([f"{100 * p:g} %" for p in sorted(accepted)])
        ends.append(f"accepted probability: {shares}")
    return " · ".join([*said.values(), *(["captured updates"] if captured else tested), *ends])


def next_command(
    plan: Mapping[str, Any], criterion: CriterionInfo, *, guessed: bool = False
) -> str:
    """The `calibrate` command for this run's data, its criterion and its accepted risk.

    `guessed`: no noise meets this risk, so it is `bound`, which shows a threshold that can be met.
    """
    risk = plan.get("risk")
    data = plan.get("data")
    accepted = risk.get("probability") if isinstance(risk, dict) else None
    source = data.get("source") if isinstance(data, dict) else plan.get("public")
    if not isinstance(source, str) or not source or len(source) > 200:
        source = "YOUR_PUBLIC_DATA"
    end = f"--data {shlex.quote(source)}"
    schema = data.get("schema") if isinstance(data, dict) else plan.get("schema")
    if isinstance(schema, str) and schema:
        end += f" --schema {shlex.quote(schema)}"
    level = f"{criterion.value:g}"
    if criterion.of is not None:  # a share, rounded so that as many columns follow from it
        level = _number(plan.get("share"), math.floor(100 * criterion.value) / 1e4)
    if guessed:
        levels = f"--psnr {' '.join(f'{criterion.value + more:g}' for more in STRICTER)}"
        if criterion.of is not None:
            levels = f"--share {level} 1"
        accept = f"--accept {_number(accepted, 0.01)}"
        return f"leakbound bound --noise-multiplier 1 {accept} {levels} {end}"
    target = f"{criterion.metric}>={level} with probability<={_number(accepted, 0.01)}"
    return f'leakbound calibrate --target "{target}" {end}'


def nouns(own: Sequence[Assessment]) -> tuple[str, str]:
    """What one example is called, and several."""
    domains = {a.data.domain for a in own}
    return NOUNS.get(domains.pop(), _EXAMPLE) if len(domains) == 1 else _EXAMPLE


_EXAMPLE = ("example", "examples")


def _guessed(own: Sequence[Assessment]) -> str | None:
    """Why `calibrate` finds no noise: the prior-only baseline meets the threshold; None: it fails.

    This depends on the data and the threshold alone, so one assessment says it of all.
    """
    known = [a.attained for a in own if a.attained is not None]
    if any(one.guessable for one in known):
        return (
            "A fixed guess, without any update, meets this threshold more often than is accepted, "
            "so no amount of noise helps. Find a threshold that it seldom meets:"
        )
    if any(one.baseline[1] > one.accepted for one in known):
        return (
            "The public examples do not show that a fixed guess seldom meets this threshold. Find "
            "one that it seldom meets:"
        )
    return None


def _reason(rows: Sequence[Configuration]) -> str:
    if any(row.verdict in EXPOSURES for row in rows):
        return "Find the noise that keeps this from every attacker:"
    return "Find the least noise for a risk that you can state:"


def _number(value: Any, default: float) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value if number else default:g}"


def _either(threats: Sequence[Threat], name: str, yes: str, no: str) -> str:
    return listing([yes if known else no for known in {getattr(t, name): 0 for t in threats}])


def _views(
    rows: Sequence[Configuration],
    names: Names,
    accuracies: Mapping[tuple[str, str], Accuracy],
    known: Mapping[str, int | None],
) -> Iterable[View]:
    shades = _shades(names)
    found = grouped(((row.model, row.batch_size), row) for row in rows)
    for (model, size), own in found.items():
        lines = [
            _line(
                row,
                names.settings[row.defense].name,
                shades,
                known,
                accuracies.get((row.model, row.defense)),
            )
            for row in own
        ]
        yield View(model, size, tuple(sorted(lines, key=_risk)))


def _risk(line: Line) -> tuple[float, ...]:
    share = line.reconstructed.value if line.reconstructed else 0.0
    return VERDICTS.index(line.verdict), -share, -line.excluded_if


def _line(
    row: Configuration,
    name: str,
    shades: Mapping[str, float],
    known: Mapping[str, int | None],
    accuracy: Accuracy | None,
) -> Line:
    bound = row.success_bound
    return Line(
        label=row.defense,
        family=known[name],
        shade=shades[row.defense],
        verdict=row.verdict,
        reconstructed=row.reconstructed,
        by=row.reconstructed_by,
        proved=row.proved,
        attained=bound.attained if bound else None,
        limits=limits([row]),
        bounded=bound is not None,
        cost=accuracy.lost if accuracy else None,
        unskilled=accuracy is not None and accuracy.unskilled and row.defense != title(NO_DEFENSE),
    )


def _shades(names: Names) -> dict[str, float]:
    """How strong each setting is among those of its defense, 0 the weakest."""
    found = grouped((setting.name, setting) for setting in names.settings.values())
    shades = {}
    for own in found.values():
        ordered = sorted(own, key=lambda setting: setting.number or 0.0)
        for place, setting in enumerate(ordered):
            shades[setting.label] = place / max(1, len(ordered) - 1)
    return shades


def _shots(
    run: Run,
    names: Names,
    rows: Sequence[Configuration],
    best: Mapping[tuple[str, int, str, str], str],
    *,
    images: bool,
    inline: bool,
) -> Iterable[Shot]:
    verdicts = grouped((row.defense, row.verdict) for row in rows)
    found: dict[str, tuple[float, int, Assessment]] = {}
    for a in run.assessments:
        for place, score in enumerate(a.scores):
            if score is not None and (
                a.defense.name not in found or score > found[a.defense.name][0]
            ):
                found[a.defense.name] = score, place, a
    for name, (score, place, a) in found.items():
        strips = {
            kind: run.picture(file, inline=inline)
            for kind, file in a.pictures.items()
            if images and kind in ("truth", "reconstruction")
        }
        row = row_of(a) if images else None
        yield Shot(
            family=title(name),
            defense=names.defense(a),
            verdict=together(verdicts[names.defense(a)]),
            attack=names.attack(a),
            score=score,
            truth=strips.get("truth"),
            picture=strips.get("reconstruction"),
            place=place,
            count=len(a.scores),
            row=row and row.first(COLUMNS),
            link=best.get((*names.key(a), names.attack(a))),
        )


def measured(line: Line | SettingRow) -> str:
    """What was measured, as text: the share, its interval and n."""
    own = line.reconstructed
    if own is None:
        return "proved by the update" if line.proved else "not measured"
    return f"{own.hits} of {own.n} ({interval(own.low, own.high)})"


def limit(line: Line) -> str:
    """What no attacker exceeds, as text."""
    words = [f"≤ {upper_bound(one.probability)} {one.condition}".strip() for one in line.named]
    return "; ".join(words) or (
        "the bound is 1: it excludes nothing" if line.bounded else "not known"
    )
