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

from leakbound._util.groups import grouped
from leakbound.assess.record import (
    EXPOSURES,
    NAMED,
    VERDICTS,
    Assessment,
    CriterionInfo,
    Verdict,
)
from leakbound.assess.verdict import together
from leakbound.report.attackers import MOST as ATTACKERS
from leakbound.report.attackers import attacker_sentences, audience
from leakbound.report.columns import RowTable, row_of
from leakbound.report.folder import Strip
from leakbound.report.sentences import advice, answer, shortened, undefended
from leakbound.report.settings import CONDITIONS, SettingRow, by_setting, setting_row
from leakbound.report.tables import NO_DEFENSE, AttackKey, Names, RunSummary, title
from leakbound.report.template import listing, upper_bound

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
    "volumes": ("volume", "volumes"),
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
    """One defense setting on one model and batch size, as the chart draws it.

    Attributes:
        family: the color of its defense on the whole page; None for no defense.
        shade: of 0 to 1, how strong it is among the settings of its defense.
        by: the attack with the largest share of reconstructed examples.
        bounded: a bound was computed, though it may exclude nothing.
    """

    row: SettingRow
    family: int | None
    shade: float
    by: str | None
    bounded: bool

    @property
    def excluded(self) -> float:
        """From where on a theorem excludes every stranger, or intruder, on any model; 1: nowhere.

        Who has the known parts is an intruder: for them these are no further condition.
        """
        free = ("", CONDITIONS["known parts"])
        some = (one.probability for one in self.row.limits if one.condition in free)
        return min(some, default=1.0)

    @property
    def excluded_if(self) -> float:
        """The same under the condition that the line names, if it names one."""
        return min((one.probability for one in self.row.named_limits), default=1.0)

    @property
    def limit(self) -> str:
        """What no attacker exceeds, as text."""
        words = [
            f"≤ {upper_bound(one.probability)} {one.condition}".strip()
            for one in self.row.named_limits
        ]
        if words:
            return "; ".join(words)
        return "the bound is 1: it excludes nothing" if self.bounded else "not known"


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
    right after sensitive ones. Without pictures only the numbers remain. `person`: which matchers
    name the example among others.
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
    person: str


@dataclass(frozen=True)
class Overview:
    answer: str
    best: str
    threat: str
    shots: tuple[Shot, ...]
    more_shots: int
    views: tuple[View, ...]
    more_views: int
    unfolded: int
    command: str
    reason: str
    attackers: tuple[str, ...] = ()


def overview(
    summary: RunSummary,
    best: Mapping[AttackKey, str],
    *,
    images: bool,
    inline: bool,
) -> Overview:
    """The first screen; `best` links configurations and attacks to their best example.

    `inline`: pictures are data of the page, else files beside it.
    """
    assessments = summary.assessments
    rows = summary.configurations
    shots = [*_shots(summary, best, images=images, inline=inline)]
    views = [*_views(summary)]
    guessed = _guessed(assessments)
    reason = "Find the least noise for a risk that you can state:"
    if any(row.verdict in (*EXPOSURES, NAMED) for row in rows):
        reason = f"Find the noise that keeps this from every {audience(assessments)}:"
    lowest = min((a.criterion for a in assessments), key=lambda one: one.value)
    return Overview(
        answer=answer(assessments, rows, *nouns(assessments)),
        best=advice(by_setting(summary), len(summary.pairs), undefended(assessments)),
        threat=threat_line(summary),
        shots=tuple(shots[:FAMILIES]),
        more_shots=max(0, len(shots) - FAMILIES),
        views=tuple(views[:VIEWS]),
        more_views=max(0, len(views) - VIEWS),
        attackers=attacker_sentences(summary)[:ATTACKERS],
        unfolded=LINES,
        command=next_command(
            summary.run.info.plan,
            lowest,
            guessed=guessed is not None,
        ),
        reason=guessed or reason,
    )


def families(names: Names) -> dict[str, int | None]:
    """The color of every defense, the same on the whole page; no defense has none."""
    settings = dict.fromkeys(setting.name for setting in names.settings.values())
    defended = [name for name in settings if name != NO_DEFENSE]
    # More families than colors: then two share one.
    colors: dict[str, int | None] = {name: i % _NUMBERED for i, name in enumerate(defended)}
    return {name: colors.get(name) for name in settings}


def threat_line(summary: RunSummary) -> str:
    """The threat model and what was tested, in one line."""
    assessments = summary.assessments
    threats = dict.fromkeys(a.threat for a in assessments)
    known = {
        "labels": [t.labels_known for t in threats],
        "defense": [t.defense_known for t in threats],
    }
    words = [
        listing(dict.fromkeys(f"{name} {'known' if yes else 'not known'}" for yes in values))
        for name, values in known.items()
    ]
    words.append(listing(dict.fromkeys(f"{t.server} server" for t in threats)))
    parts = dict.fromkeys(t.known for t in threats if t.known)
    if parts:
        words.append(f"{listing(parts)} known from elsewhere")
    if any(t.statistics_known for t in threats):
        words.append("batch norm statistics sent")
    if any(a.capture is not None for a in assessments):
        words.append("captured updates")
    else:
        sizes = listing(sorted({a.batch_size for a in assessments}))
        models = summary.names.models.values()
        steps = sorted({model.train_steps for model in models if model.train_steps})
        weights = "untrained weights"
        if any(model.weights for model in models):
            weights = "weights from a file"
        elif steps:
            weights = f"weights after {listing(f'{n:,} training steps' for n in steps)}"
        words += [f"batch size {sizes}", "one round", weights, summary.run.info.data.source]
    criteria = {a.criterion.value: a.criterion.text for a in assessments}
    words.append(f"reconstructed: {listing(criteria[value] for value in sorted(criteria))}")
    accepted = {b.accepted for a in assessments for b in a.bounds if b.accepted is not None}
    if accepted:
        shares = listing(f"{100 * p:g} %" for p in sorted(accepted))
        words.append(f"accepted probability: {shares}")
    return " · ".join(words)


def next_command(
    plan: Mapping[str, Any],
    criterion: CriterionInfo,
    *,
    guessed: bool = False,
) -> str:
    """The `calibrate` command for this run's data, its criterion and its accepted risk.

    `guessed`: no noise meets this risk, so it is `bound`, which shows a threshold that can be met;
    for who has parts of the examples, a limit on what an update adds.
    """
    risk = plan.get("risk")
    data = plan.get("data")
    accepted = risk.get("probability") if isinstance(risk, dict) else None
    source = data.get("source") if isinstance(data, dict) else plan.get("public")
    # Whoever made the run wrote its plan: it may be anything.
    if not isinstance(source, str) or not source or len(source) > 200:
        source = "YOUR_PUBLIC_DATA"
    end = f"--data {shlex.quote(source)}"
    if criterion.label_alone:
        return f'leakbound calibrate --target "gain<=0.1 for {criterion.goal}" {end}'
    schema = data.get("schema") if isinstance(data, dict) else plan.get("schema")
    if isinstance(schema, str) and schema:
        end += f" --schema {shlex.quote(schema)}"
    if criterion.known:
        end += f" --known {shlex.quote(criterion.known)}"
    level = f"{criterion.value:g}"
    if criterion.of is not None:  # a share, rounded so that as many columns follow from it
        level = _number(plan.get("share"), math.floor(100 * criterion.value) / 1e4)
    if guessed and criterion.known:
        # Who knows so much may succeed without the update: what it adds can be limited.
        return 'leakbound calibrate --target "gain<=0.1"'
    if guessed:
        levels = f"--psnr {' '.join(f'{criterion.value + more:g}' for more in STRICTER)}"
        if criterion.of is not None:
            levels = f"--share {level} 1"
        accept = f"--accept {_number(accepted, 0.01)}"
        return f"leakbound bound --noise-multiplier 1 {accept} {levels} {end}"
    target = f"{criterion.metric}>={level} with probability<={_number(accepted, 0.01)}"
    return f'leakbound calibrate --target "{target}" {end}'


def nouns(assessments: Sequence[Assessment]) -> tuple[str, str]:
    """What one example is called, and several."""
    domains = {a.data.domain for a in assessments}
    domain = domains.pop() if len(domains) == 1 else ""
    return NOUNS.get(domain, ("example", "examples"))


def _guessed(assessments: Sequence[Assessment]) -> str | None:
    """Why `calibrate` finds no noise: the prior-only baseline meets the threshold; None: it fails.

    This depends on the data and the threshold alone, so one assessment says it of all.
    """
    known = [a.attained for a in assessments if a.attained is not None]
    mend = "Find a threshold that it seldom meets:"
    if any(a.criterion.known for a in assessments):
        mend = "Limit what an update adds to it:"
    if any(one.guessable for one in known):
        return (
            "A fixed guess, without any update, meets this threshold more often than is accepted, "
            f"so no amount of noise helps. {mend}"
        )
    if any(one.baseline[1] > one.accepted for one in known):
        return (
            "The public examples do not show that a fixed guess seldom meets this threshold. "
            f"{mend}"
        )
    return None


def _number(value: Any, default: float) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value if number else default:g}"


def _views(summary: RunSummary) -> Iterable[View]:
    settings = summary.names.settings
    shades = _shades(summary.names)
    colors = families(summary.names)
    by_view = grouped(((row.model, row.batch_size), row) for row in summary.configurations)
    for (model, size), rows in by_view.items():
        lines = []
        for row in rows:
            cost = summary.costs.get((row.model, row.defense))
            lines.append(
                Line(
                    setting_row(row.defense, [row], row.reconstructed, [cost]),
                    family=colors[settings[row.defense].name],
                    shade=shades[row.defense],
                    by=row.reconstructed_by,
                    bounded=row.success_bound is not None,
                )
            )
        yield View(model, size, tuple(sorted(lines, key=_risk)))


def _risk(line: Line) -> tuple[float, ...]:
    row = line.row
    share = row.reconstructed.value if row.reconstructed else 0.0
    return VERDICTS.index(row.verdict), -share, -line.excluded_if


def _shades(names: Names) -> dict[str, float]:
    """How strong each setting is among those of its defense, 0 the weakest."""
    by_defense = grouped((setting.name, setting) for setting in names.settings.values())
    shades = {}
    for some in by_defense.values():
        ordered = sorted(some, key=lambda setting: setting.number)
        for place, setting in enumerate(ordered):
            shades[setting.label] = place / max(1, len(ordered) - 1)
    return shades


def _person(assessment: Assessment, place: int) -> str:
    """Whether one example was named among others, and by which matchers; empty if not tested."""
    if not assessment.reidentified:
        return ""
    among = listing(dict.fromkeys(str(one.candidates) for one in assessment.reidentified))
    by = [shortened(one.how) for one in assessment.reidentified if one.right[place]]
    named = f"named by {listing(by)}" if by else "not named"
    return f"{named} among {among} candidates"


def _shots(
    summary: RunSummary,
    best: Mapping[AttackKey, str],
    *,
    images: bool,
    inline: bool,
) -> Iterable[Shot]:
    names = summary.names
    verdicts = grouped((row.defense, row.verdict) for row in summary.configurations)
    strongest: dict[str, tuple[float, int, Assessment]] = {}
    for a in summary.assessments:
        for place, score in enumerate(a.scores):
            family = a.defense.name
            if score is not None and (family not in strongest or score > strongest[family][0]):
                strongest[family] = score, place, a
    for family, (score, place, a) in strongest.items():
        defense = names.defense(a)
        files = a.pictures if images else {}
        truth, picture = (
            summary.run.picture(files[kind], inline=inline) if kind in files else None
            for kind in ("truth", "reconstruction")
        )
        row = row_of(a) if images else None
        yield Shot(
            family=title(family),
            defense=defense,
            verdict=together(verdicts[defense]),
            score=score,
            attack=names.attack(a),
            truth=truth,
            picture=picture,
            place=place,
            count=len(a.scores),
            row=row and row.first(COLUMNS),
            link=best.get(names.attack_key(a)),
            person=_person(a, place),
        )
