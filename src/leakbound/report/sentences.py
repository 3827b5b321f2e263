"""What pages say of a run in sentences: the answer, the advice, what updates reveal, the rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from leakbound._util.formats import format_upper
from leakbound._util.groups import grouped
from leakbound._util.results import Fact
from leakbound.assess.record import (
    CERTIFIED,
    DISCLOSURES,
    EXPOSURES,
    NOT_RUN,
    PROTECTS,
    UNSETTLED,
    VERDICTS,
    Assessment,
    CriterionInfo,
)
from leakbound.assess.sentences import of_fact, ordered
from leakbound.assess.verdict import counted
from leakbound.report.folder import Run
from leakbound.report.settings import DeclaredTraining, SettingRow, safety
from leakbound.report.tables import SHOWN, Configuration, Names, ReportPart
from leakbound.report.template import (
    brief,
    decimal,
    interval,
    listing,
    percent,
    plural,
    score,
    upper_bound,
)

ENOUGH: Final = tuple(word for word in PROTECTS.values() if word not in UNSETTLED)
"""Verdicts that a defense may be recommended for: a theorem excludes the threshold."""
WHO: Final = {
    "honest": "A server that follows the protocol",
    "malicious": "A server that changes the model",
}
LABEL = 80
"""How many letters of a name a sentence or a cell shows."""
NAME = 40
"""The same where what follows must be on the page, too."""
LISTED = 40
"""Most items of one fact on a page; the records list more."""
KINDS = {
    "attribute": ("attribute", "attributes"),
    "words": ("word", "words"),
    "levels": ("column’s levels", "columns’ levels"),
    "zero values": ("set of values that are 0", "sets of values that are 0"),
    "classes": ("set of classes", "sets of classes"),
    "batch statistics": ("layer’s batch statistics", "layers’ batch statistics"),
}


class RevealedFacts(ReportPart, frozen=True):
    """What one update reveals, a sentence for each fact.

    `update`: the captured update, or the configuration whose first update it is.
    """

    update: str
    facts: tuple[str, ...]


def revealed(
    assessments: Iterable[Assessment],
    names: Names,
) -> list[RevealedFacts]:
    """The facts of every captured update; of an audit, those of each configuration's first seed."""

    def update(a: Assessment) -> str:
        if a.capture is not None:
            return a.capture.name
        model, size, defense = names.key(a)
        return f"{model}, batch {size}, {defense}"

    lines = []
    by_update = grouped((update(a), a) for a in assessments if counted(a.facts))
    for label, some in by_update.items():
        # Another seed is another batch, which reveals other facts.
        facts = _distinct(a for a in some if a.seed == some[0].seed)
        lines.append(RevealedFacts(label, tuple(of_fact(fact, shown=LISTED) for fact in facts)))
    return lines


def revealed_in_short(assessments: Iterable[Assessment]) -> str:
    """One sentence on what the updates of a run reveal; empty if there is nothing."""
    facts = _distinct(assessments)
    read = [fact for fact in facts if fact.kind == "attribute"]
    said = [f"{_read_in_short(fact)}." for fact in read]
    rest = [fact for fact in facts if fact.kind != "attribute"]
    certain = [fact for fact in rest if fact.level is None]
    likely = [fact for fact in rest if fact.level is not None]
    if certain:
        said.append(f"Updates reveal for certain{_counted_in_short(certain)}.")
    if likely:
        level = max(fact.level or 0.0 for fact in likely)
        said.append(
            f"Updates reveal{_counted_in_short(likely)}; what one of them reveals is wrong with "
            f"probability {format_upper(level)} at most."
        )
    return " ".join(said)


def _counted_in_short(facts: Sequence[Fact]) -> str:
    """How many facts of each kind, after the names of what is sensitive."""
    counts = []
    for kind, of_kind in grouped((fact.kind, fact) for fact in facts).items():
        words = sum(fact.count for fact in of_kind if fact.kind == "words")
        counts.append(plural(words or len(of_kind), *KINDS[kind]))
    sensitive = [fact.subject for fact in facts if fact.sensitive]
    which = f", {listing(sensitive)} among them," if sensitive else ""
    return f"{which} {listing(counts)}"


def _read_in_short(fact: Fact) -> str:
    """What an update reveals of somebody of whom all else is known."""
    people = "a person" if fact.count == 1 else f"{fact.count} people"
    level = 1.0 if fact.level is None else fact.level
    return (
        f"An update reveals {fact.subject} of {people} of whom all else is known (wrong with "
        f"probability {format_upper(level)} at most, if {fact.assumes})"
    )


def is_it_this_person(
    rows: Iterable[Configuration],
    criterion: CriterionInfo,
) -> list[str]:
    """For each configuration, how often reconstructions name the right one of M candidates."""
    matched = [(row, row.identified) for row in rows if row.identified is not None]
    matched.sort(key=lambda one: -one[1].share.value)
    said = []
    for row, hits in matched:
        share = hits.share
        limit = "no bound on other attackers is known"
        if hits.bound is not None:
            limit = f"no attacker is right more often than {upper_bound(hits.bound)}"
        if hits.bound == 1:
            limit = "the bound on other attackers is 1 and excludes nothing"
        at = "" if hits.score is None else f" at a median of {score(hits.score, criterion)}"
        said.append(
            f"{shortened(row.defense, NAME)}, {shortened(row.model, NAME)}, batch "
            f"{row.batch_size}: {share.hits} of {share.n} named right among {hits.candidates} "
            "candidates "
            f"({interval(share.low, share.high)}; chance {percent(hits.chance, 1)}), by "
            f"{shortened(hits.attack)}{at} and the matcher {shortened(hits.matcher)}; {limit}"
            + f"; near copies in {hits.near} of {share.n} galleries"
            * bool(hits.near)
        )
    return said


def named_in_short(rows: Sequence[Configuration]) -> str:
    """One sentence on how often chance does not explain who is named; empty if it always does."""
    beyond = [row.identified for row in rows if row.identified and row.identified.beyond_chance]
    if not beyond:
        return ""
    most = max(one.candidates for one in beyond)
    return (
        f"Reconstructions name the right one of {most} candidates more often than chance under "
        f"{len(beyond)} of {plural(len(rows), 'configuration')}."
    )


def _distinct(assessments: Iterable[Assessment]) -> list[Fact]:
    def key(fact: Fact) -> tuple[object, ...]:
        # Every batch has zeros of its own; words and levels of several batches count once.
        own = fact.items if fact.kind == "zero values" else ()
        return fact.kind, fact.subject, own

    return ordered({key(fact): fact for a in assessments for fact in counted(a.facts)}.values())


def attacked_rounds(run: Run, names: Names) -> list[str]:
    """One sentence for each defense that was attacked in a later round than the first.

    Of one that had no effect in the attacked round, the sentence says so.
    """
    chosen = run.info.plan.get("rounds", [None]) != [None]
    releases = grouped(
        (names.defense(a), a.release)
        for a in run.assessments
        if a.release is not None and a.release.round is not None
    )
    said = []
    for defense, attacked in releases.items():
        rounds = sorted({release.round for release in attacked if release.round is not None})
        idle = sum(not release.effective for release in attacked)
        if rounds == [1] and not idle:
            continue
        first = rounds[0]
        last = rounds[-1]
        where = f"round {first}" if first == last else f"rounds {first} to {last}"
        if chosen and first != last:
            where = f"rounds {', '.join(map(str, rounds))}"
        text = f"{brief(defense)} was attacked in {where} of a training"
        if not chosen:
            text += (
                ", the first in which it has an effect. Earlier rounds have no protection. Other "
                f"defenses were attacked in round 1; `rounds = {last}` in the plan attacks this "
                "round of all."
            )
        elif idle:
            text += f". It had no effect yet in {idle} of {plural(len(attacked), 'experiment')}."
        else:
            text += ". No other round was tested."
        said.append(text)
    more = [f"{plural(len(said) - SHOWN, 'more defense')}: see the records."]
    return said[:SHOWN] + more * (len(said) > SHOWN)


def answer(
    assessments: Sequence[Assessment],
    rows: Sequence[Configuration],
    one: str,
    many: str,
) -> str:
    """Who reconstructs what, under how many of the configurations."""
    idle = sum(row.verdict == NOT_RUN for row in rows)
    ran = [row for row in rows if row.verdict != NOT_RUN]
    rest = f" {plural(idle, 'configuration')} {'was' if idle == 1 else 'were'} not run."
    if not ran:
        return f"Nothing is known:{rest}"
    known = revealed_in_short(assessments)
    alone = all(assessment.criterion.label_alone for assessment in assessments)
    named = named_in_short(ran)
    exposed = [row for row in ran if row.verdict in EXPOSURES]
    if exposed:
        servers = {a.threat.server for a in assessments}
        who = WHO[servers.pop()] if len(servers) == 1 else "A server"
        place = plural(len(ran), "tested configuration")
        proof = " The update itself proves it." * all(r.verdict == CERTIFIED for r in exposed)
        said = f"{who} reconstructed {many} under {len(exposed)} of {place}.{proof} {known}"
        said = f"{said.strip()} {named}"
    else:
        said = f"{named} {known}".strip() + f" {_unexposed(ran, one, alone)}"
    return said.strip() + rest * bool(idle)


def _unexposed(rows: Sequence[Configuration], one: str, alone: bool) -> str:
    place = plural(len(rows), "tested configuration")
    said = f"No attack reconstructed {'an' if one[0] in 'aeiou' else 'a'} {one} in {place}."
    if alone:
        said = f"Only the label was not known in {place}."
    elif all(row.reconstructed is None for row in rows):
        said = f"No reconstruction could be checked in {place}: the true data are not known."
    open_ = grouped((row.verdict, row) for row in rows if row.verdict not in ENOUGH)
    if not open_:
        return f"{said} Theorems keep every covered attacker to the accepted probability."
    counts = listing([f"{len(open_[word])} {word}" for word in VERDICTS if word in open_])
    number = sum(map(len, open_.values()))
    what = "remain open"
    if any(word in DISCLOSURES for word in open_):
        what = "is not protected" if number == 1 else "are not protected"
    return f"{said} {number} of {len(rows)} {what} ({counts}): this is no evidence of safety."


def undefended(assessments: Sequence[Assessment]) -> str:
    """Why no defense is in a run: an audit tests some, a captured update may come with one."""
    captured = [a.capture for a in assessments if a.capture is not None]
    if not captured:
        return "No defense was tested."
    seen = dict.fromkeys(one.undeclared for one in captured if one.undeclared)
    why = f" ({'; '.join(seen)})" if seen else ""
    return f"No defense was declared for the captured updates{why}."


def advice(
    settings: Sequence[SettingRow],
    pairs: int,
    none: str,
    training: DeclaredTraining | None = None,
    covered: Sequence[str] = (),
) -> str:
    """The defense to take and its cost, or that none tested is enough; `none`: see `undefended`.

    A run attacks one update. So a defense is enough for one update, and enough for a training only
    if this is declared, its bound over all rounds holds, and the defense has the training's noise
    or more (`covered`).
    """
    defended = [row for row in settings if not row.undefended]
    tested = [row for row in defended if row.verdict != NOT_RUN]
    if defended and not tested:
        names = listing([shortened(row.defense) for row in defended])
        return f"No defense was tested: {names} did not run."
    if not tested:
        return none
    enough = [row for row in tested if row.verdict in ENOUGH and row.configurations == pairs]
    if not enough:
        best = max(tested, key=safety)
        name = f"The strongest is {shortened(best.defense)} ({best.verdict})."
        count = plural(len(tested), "defense setting")
        none = f"None of the {count} tested is" if len(tested) > 1 else "The defense tested is not"
        return f"{none} enough for every model and batch size tested. {name} {_price(best)}"
    extent = "one update"
    against = ""
    if training is not None:
        # One update is less than the training: only its own noise, or more, carries over.
        whole = [row for row in enough if row.defense in covered]
        if training.holds and whole:
            enough = whole
            extent = f"all {training.rounds} declared rounds"
            if training.rounds == 1:
                extent = "the declared round"
        else:
            noise = training.noise_multiplier
            why = training.why or (
                f"no defense that is enough here has its noise multiplier ({noise})"
            )
            against = f"It is not enough for the declared training: {why}. "
    # A cost is at most 1, so an unknown one stands last.
    best = min(enough, key=lambda row: (row.cost.mean if row.cost else 2.0, safety(row)))
    cheapest = "" if best.cost is None else " at the lowest cost"
    name = f"{shortened(best.defense)} ({best.verdict})"
    said = f"Of the defenses tested, {name} is enough for {extent}{cheapest}."
    return f"{said} {against}{_price(best)}"


def shortened(text: str, most: int = LABEL) -> str:
    """A text for a sentence, a cell or a few lines of a page."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _price(row: SettingRow) -> str:
    if row.unskilled:
        said = "The undefended training did not beat the majority class: the cost is unknown."
        if row.auc_cost is None:
            return said
        return f"{said} It cost {decimal(100 * row.auc_cost.mean)} points of AUC."
    if row.cost is None:
        return "Its cost in accuracy was not measured."
    if row.cost.mean <= 0:
        return "In a short training it cost no accuracy."
    cost = decimal(100 * row.cost.mean)
    return f"In a short training it cost up to {cost} points of test accuracy."
