"""The sign-off page: the answer, the settings that were tested, and what none of it covers.

A setting is a defense with its parameters over all models and batch sizes: its verdict is the worst
one, its share of reconstructed examples the largest of any attack, its cost the highest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from leakbound._util.formats import format_upper
from leakbound._util.groups import grouped
from leakbound.assess.record import Verdict
from leakbound.report import tables
from leakbound.report.attackers import attacker_sentences, audience
from leakbound.report.evidence.parts import (
    NOT_STATED,
    Answer,
    AuxiliaryLine,
    EpsilonPart,
    SignOff,
    ThresholdLine,
)
from leakbound.report.evidence.privacy import mechanism
from leakbound.report.folder import Run
from leakbound.report.overview import nouns
from leakbound.report.sentences import (
    advice,
    answer,
    attacked_rounds,
    is_it_this_person,
    revealed,
    shortened,
    undefended,
)
from leakbound.report.settings import DeclaredTraining, SettingRow, by_setting, safety
from leakbound.report.tables import RunSummary
from leakbound.report.template import brief, listing, percent, plural, typeset

MOST = 8
"""How many settings the page shows."""
LINES = 46
"""How many lines of text one A4 page holds besides its headings and boxes."""
WIDE = 85
NARROW = 110
CELL = 20
"""How many letters a line holds: of the answer, of other text and of a cell of the table."""
GAP = 0.4
"""Between two rows, in lines."""
REVEALED = 4
"""How many facts that updates reveal the page names."""
CLOSE = 1e-9
"""Relative difference of noise multipliers that count as the same."""
NAMES = 3
"""How many names a sentence lists."""
UNSOUND = "No defense is recommended: the records are incomplete or do not belong together."
OTHERS = "Other models, weights, batch sizes, data or settings than those tested."
ROUNDS = "More than one round. A training sends many updates, and what they leak adds up."
DECLARED = (
    "Another training than the declared one: the bound over all its rounds rests on the deployment "
    "file, which nothing here tests. Attacks were run on one round."
)
PERSONS = (
    "Membership (whether a person’s data took part), other inference about a person, and the "
    "finished model."
)
STRONGER = (
    "Attackers who know more than is named above. Undecided is no evidence of safety: a better "
    "attack may succeed."
)


def of_run(
    summary: RunSummary,
    known: Sequence[AuxiliaryLine],
    thresholds: Sequence[ThresholdLine],
    *,
    silent: int,
    sound: bool,
    training: DeclaredTraining | None = None,
) -> SignOff:
    """What the page says of a run.

    `silent` facts about the deployment are not stated; `sound`: the folder is whole and consistent.
    `training`: what a deployment file says of all rounds.
    """
    assessments = summary.assessments
    names = summary.names
    rows = summary.configurations
    settings = by_setting(summary)
    advised = UNSOUND
    if sound:
        covered = _covered(summary, training)
        advised = advice(settings, len(summary.pairs), undefended(assessments), training, covered)
    rounds = [ROUNDS if training is None else DECLARED]
    rounds += attacked_rounds(summary.run, names)[:NAMES]
    facts = [text for one in revealed(assessments, names) for text in one.facts]
    shown = [shortened(text, 2 * NARROW - 1) for text in facts[:REVEALED]]
    average = (
        "One named example. The limit in the table is an average over examples; rare ones may be "
        "reconstructed more often"
    )
    rare = tables.rare_share(rows)
    if rare is not None:
        average += (
            f" ({percent(rare)} of the public examples are rare: no candidate matches them "
            "together with another one)"
        )
    deployment = "Facts about the deployment, which were declared and not checked"
    if silent:
        deployment = f"The deployment: {plural(silent, 'fact')} about it not stated"
    if len(facts) > REVEALED:
        shown.append(f"{plural(len(facts) - REVEALED, 'more fact')}: see the report.")
    return SignOff(
        date=_date(summary.run),
        answer=answer(assessments, rows, *nouns(assessments)),
        advice=advised,
        tested=_tested(summary),
        attacker=_attacker(
            {line.name: line.answer for line in known}, captured=any(a.capture for a in assessments)
        ),
        criterion=_criterion(thresholds),
        revealed=tuple(shown),
        rows=tuple(_by_importance(settings, summary)),
        who=audience(assessments),
        attackers=tuple(
            # Names in it are short, so that its last words, on anyone, are there.
            shortened(text, 5 * NARROW - 1)
            for text in attacker_sentences(summary)[:1]
        ),
        persons=tuple(
            shortened(text, 2 * NARROW - 1)
            for text in is_it_this_person(rows, assessments[0].criterion)[:1]
        ),
        not_covered=(
            OTHERS,
            " ".join(rounds),
            f"{average}.",
            PERSONS,
            STRONGER,
            f"{deployment} (annex, part 3).",
        ),
    )


def _covered(
    summary: RunSummary,
    training: DeclaredTraining | None,
) -> list[str]:
    """The settings with a training's noise or more on clipped gradients of examples."""
    if training is None or training.noise_multiplier is None:
        return []
    least = training.noise_multiplier * (1 - CLOSE)
    defenses = {summary.names.defense(a): a.defense for a in summary.assessments}
    known = {label: mechanism(defense.settings) for label, defense in defenses.items()}
    return [label for label, pair in known.items() if pair is not None and pair[0] >= least]


def training_line(training: DeclaredTraining) -> str:
    """A declared training in a few lines of the page."""
    return shortened(training.says, 3 * NARROW - 1)


def epsilon_line(audit: EpsilonPart) -> str:
    """Epsilon as declared, bounded and found, in a few lines of the page."""
    known = "; ".join(f"{one.name} {one.value or NOT_STATED}" for one in audit.items)
    text = f"{shortened(audit.client)}: {known} (delta {audit.delta:g}): {audit.verdict}"
    return shortened(text, 3 * NARROW - 1)


def fitting(
    page: SignOff,
    warnings: Sequence[str],
    files: int,
    meanings: Mapping[Verdict, str],
) -> list[SettingRow]:
    """The most important rows that fit on one page, with what their verdicts mean.

    `warnings`: and all other lines of the page that `page` does not hold.
    """
    wide = [page.answer, page.advice]
    narrow = [page.tested, page.attacker, page.criterion]
    narrow += [*page.revealed, *page.attackers, *page.persons, *page.not_covered, *warnings]
    # The page prints on one A4: what is always there comes first, rows fill the rest.
    room = LINES - sum(_lines(text, WIDE) for text in wide) - (files + 1) // 2
    room -= sum(_lines(text, NARROW) for text in narrow) + bool(warnings)
    shown: list[SettingRow] = []
    for row in page.rows[:MOST]:
        some = [*shown, row]
        words = " ".join(meanings[word] for word in {one.verdict for one in some})
        # At least one row, even if the page then runs over.
        if shown and sum(map(_height, some)) + _lines(words, NARROW) > room:
            break
        shown.append(row)
    return shown


def chance(value: float) -> str:
    """A probability for everyone: in percent, rounded up."""
    if value < 1e-9:
        return "1 in a billion"
    return typeset(f"{format_upper(100 * value)}%")


def _height(row: SettingRow) -> float:
    """Lines of a row of the table, with the space between rows."""
    limited = sum(1 + bool(one.condition) for one in row.named_limits)
    return GAP + max(2, _lines(row.defense, CELL), limited)


def _lines(text: str, letters: int) -> int:
    return 1 + len(text) // letters


def _date(run: Run) -> str | None:
    """When the records were last written, in UTC, by the time of the file."""
    try:
        time = (run.folder / "records.jsonl").stat().st_mtime
    except OSError:
        return None
    return datetime.fromtimestamp(time, UTC).date().isoformat()


def _by_importance(
    settings: Sequence[SettingRow],
    summary: RunSummary,
) -> Iterable[SettingRow]:
    """No defense, then the safest of every family, then the second of every family and so on."""
    families = {label: setting.name for label, setting in summary.names.settings.items()}
    turns = {
        row.defense: turn
        for some in grouped((families[row.defense], row) for row in settings).values()
        for turn, row in enumerate(sorted(some, key=safety, reverse=True))
    }
    return sorted(
        settings,
        key=lambda row: (not row.undefended, turns[row.defense], *(-v for v in safety(row))),
    )


def _tested(summary: RunSummary) -> str:
    assessments = summary.assessments
    names = summary.names
    captured = {a.capture.digest for a in assessments if a.capture}
    sizes = [str(size) for size in sorted({a.batch_size for a in assessments})]
    defenses = {row.defense for row in summary.configurations}
    what = [plural(len(captured), "captured update")] if captured else []
    what += [
        f"model{'s' * (len(names.models) > 1)} {_named(names.models)}",
        f"batch size{'s' * (len(sizes) > 1)} {brief(sizes)}",
        plural(len(defenses), "defense setting"),
        plural(len(names.attacks), "attack"),
        plural(sum(a.status == "ok" for a in assessments), "attack run"),
    ]
    source = "" if captured else f" on {shortened(summary.run.info.data.source)}"
    return "; ".join(what) + source


def _named(names: Iterable[str]) -> str:
    labels = list(names)
    more = [f"{len(labels) - NAMES} more"] if len(labels) > NAMES else []
    return listing([*map(shortened, labels[:NAMES]), *more])


def _attacker(known: Mapping[str, Answer], *, captured: bool) -> str:
    sees = "a captured update" if captured else "what one client sends in one round"
    words = {
        "labels": "the true labels",
        "defense": "the defense",
        "statistics": "the batch’s statistics",
        "known": "parts of every example, from elsewhere",
    }
    knows = ["the model", *(text for name, text in words.items() if known[name] == "yes")]
    some = [text for name, text in words.items() if known[name] == "in some experiments"]
    also = f" In some experiments they also know {listing(some)}." if some else ""
    changes: dict[Answer, str] = {
        "no": "They do not change the model that the server sends.",
        "yes": "They also choose the model that the server sends.",
        "in some experiments": "In some experiments they also choose the model that the server "
        "sends.",
    }
    end = changes.get(known["malicious"], "")
    return f"The attacker sees {sees}, as the server does. They know {listing(knows)}.{also} {end}"


def _criterion(thresholds: Sequence[ThresholdLine]) -> str:
    limits = [t for t in thresholds if t.name == "reconstructed" and t.value]
    levels = listing([f"{t.value:g}" for t in limits])
    unit = limits[0].unit if limits else ""
    meaning = "each within its tolerance" if "columns" in unit else "a measure of similarity"
    meaning = "each in its place" if "tokens" in unit else meaning
    accepted = [t.value for t in thresholds if t.name == "accepted" and t.value is not None]
    said = f"An example counts as reconstructed at {levels} {unit} or more ({meaning})."
    if not limits:
        said = "No reconstruction was compared with an example."
    if accepted:
        said += f" Accepted probability: {chance(accepted[0])}."
    who = {t.accepted_by for t in thresholds}
    by = "not stated" if who == {NOT_STATED} else f"“{shortened(listing(sorted(who)))}”"
    return f"{said} Who accepted these values: {by}."
