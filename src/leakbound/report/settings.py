"""What a defense setting shows over all models and batch sizes: the worst of everything.

The first screen of the report and the sign-off page both say the answer and choose the defense by
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from leakbound.assess.record import (
    CERTIFIED,
    DISCLOSURES,
    EXPOSURES,
    NOT_RUN,
    PROTECTS,
    UNSETTLED,
    VERDICTS,
    Assessment,
    Basis,
    Verdict,
)
from leakbound.assess.verdict import together
from leakbound.report.facts import summary
from leakbound.report.tables import (
    NO_DEFENSE,
    Accuracy,
    Configuration,
    MeanInterval,
    Names,
    ReportPart,
    ShareInterval,
    defined,
    grouped,
    largest_share,
    title,
)
from leakbound.report.template import decimal, listing, plural

ENOUGH: Final = tuple(word for word in PROTECTS.values() if word not in UNSETTLED)
"""Verdicts that a defense may be recommended for: a theorem excludes the threshold."""
WHO: Final = {
    "honest": "A server that follows the protocol",
    "malicious": "A server that changes the model",
}
LABEL = 80
"""How many letters of a name a sentence or a cell shows."""
CONDITIONS: Final[dict[Basis, str]] = {
    "sample": "",
    "examples": "for these very examples",
    "known model": "from this model’s updates",
    "fitted model": "under a model",
}
"""Under what else a limit holds, by what it rests on."""


class Limit(ReportPart, frozen=True):
    """A probability of reconstruction that no attacker exceeds, under a condition or none ("")."""

    probability: float
    condition: str


class DeclaredTraining(ReportPart, frozen=True):
    """What a deployment file says of all rounds of a training, at the run's threshold.

    `noise_multiplier`: that of the training. `holds`: whether every bound of `says` is at most what
    the run accepts. `why`: what is against it; empty if it holds.
    """

    file: str
    rounds: int | None
    noise_multiplier: float | None
    holds: bool
    says: str
    why: str


class SettingRow(ReportPart, frozen=True):
    """One defense setting over all models and batch sizes: the worst of everything.

    `reconstructed`: by the attack with the largest share, on any configuration. `limits`: empty
    where some configuration has none. `attained`: a malicious server's attack succeeds at least so
    often. `cost`: test accuracy lost against no defense; null where a model was not trained, or
    where the training without a defense did not beat the majority class (`unskilled`). `auc_cost`:
    the same of the area under the ROC curve.
    """

    defense: str
    verdict: Verdict
    configurations: int
    reconstructed: ShareInterval | None = None
    proved: int = 0
    attained: float | None = None
    limits: tuple[Limit, ...] = ()
    cost: MeanInterval | None = None
    auc_cost: MeanInterval | None = None
    unskilled: bool = False


def by_setting(
    assessments: Iterable[Assessment],
    names: Names,
    rows: Sequence[Configuration],
    accuracies: Mapping[tuple[str, str], Accuracy],
) -> list[SettingRow]:
    """Every defense setting, in the order of the records."""
    by_defense = grouped((names.defense(a), a) for a in assessments if a.status == "ok")
    found = []
    for label, own in grouped((row.defense, row) for row in rows).items():
        matched = grouped(
            ("\n".join(map(str, (*names.key(a), names.attack(a)))), hit)
            for a in by_defense.get(label, ())
            for hit in a.matched
        )
        trained = [accuracies.get((row.model, label)) for row in own]
        found.append(
            SettingRow(
                label,
                together(row.verdict for row in own),
                len(own),
                reconstructed=largest_share(matched)[1],
                proved=sum(row.proved for row in own),
                attained=max(
                    defined(r.success_bound.attained for r in own if r.success_bound), default=None
                ),
                limits=limits(own),
                cost=_highest([None if one is None else one.lost for one in trained]),
                auc_cost=_highest([None if one is None else one.auc_lost for one in trained]),
                unskilled=any(one is not None and one.unskilled for one in trained),
            )
        )
    return found


def _highest(costs: Sequence[MeanInterval | None]) -> MeanInterval | None:
    """The highest cost; None unless all are known."""
    known = [one for one in costs if one is not None]
    if len(known) < len(costs):
        return None
    return max(known, key=lambda one: one.mean, default=None)


def limits(own: Sequence[Configuration]) -> tuple[Limit, ...]:
    """What no attacker exceeds on any of the configurations: unknown unless known on all.

    Sorted by what they need, the fewest conditions first; each is lower than those before it.
    """
    bounds = [row.success_bound for row in own]
    known: list[dict[Basis, float]] = [
        dict([(one.basis, one.probability), *one.others])
        if one is not None and one.experiments == one.of_experiments
        else {}
        for one in bounds
    ]
    found = [
        Limit(max(one[basis] for one in known), words)
        for basis, words in CONDITIONS.items()
        if all(basis in one for one in known)
    ]
    below = [one for one in found if one.probability < 1]
    return tuple(one for place, one in enumerate(below) if _adds(one, below[:place]))


def telling(own: Sequence[Limit], verdict: Verdict) -> tuple[Limit, ...]:
    """Two limits at most: that with the fewest conditions, and that of the verdict or the lowest.

    Example:
        >>> conditions = ("", "from this model’s updates", "under a model")
        >>> every = list(map(Limit, (0.2, 0.04, 0.03), conditions))
        >>> [one.probability for one in telling(every, "protected from an honest server")]
        [0.2, 0.04]
        >>> [one.probability for one in telling(every, "undecided")]
        [0.2, 0.03]
    """
    words = {CONDITIONS[basis]: word for basis, word in PROTECTS.items()}
    behind = [one for one in own if words.get(one.condition) == verdict]
    return tuple(dict.fromkeys([*own[:1], *(behind or own[-1:])]))


def _adds(one: Limit, stronger: Sequence[Limit]) -> bool:
    """Whether a limit with more conditions is lower than those with fewer."""
    return all(one.probability < other.probability for other in stronger)


def safety(row: SettingRow) -> tuple[float, ...]:
    """Rises with how safe a setting is, then with how cheap."""
    share = row.reconstructed.value if row.reconstructed else 0.0
    limit = min((one.probability for one in row.limits), default=1.0)
    return VERDICTS.index(row.verdict), -share, -limit, -(row.cost.mean if row.cost else 2.0)


def answer(own: Sequence[Assessment], rows: Sequence[Configuration], one: str, many: str) -> str:
    """Who reconstructs what, under how many of the configurations."""
    servers = {a.threat.server for a in own}
    who = WHO[servers.pop()] if len(servers) == 1 else "A server"
    idle = [row for row in rows if row.verdict == NOT_RUN]
    rows = [row for row in rows if row.verdict != NOT_RUN]
    rest = f" {plural(len(idle), 'configuration')} {'was' if len(idle) == 1 else 'were'} not run."
    if not rows:
        return f"Nothing is known:{rest}"
    return _answer(rows, summary(own), who, one, many) + rest * bool(idle)


def _answer(rows: Sequence[Configuration], known: str, who: str, one: str, many: str) -> str:
    exposed = [row for row in rows if row.verdict in EXPOSURES]
    place = plural(len(rows), "tested configuration")
    if exposed:
        proof = " The update itself proves it." * all(r.verdict == CERTIFIED for r in exposed)
        found = f"reconstructed {many} under {len(exposed)} of {place}"
        return f"{who} {found}.{proof} {known}".strip()
    said = f"No attack reconstructed {'an' if one[0] in 'aeiou' else 'a'} {one} in {place}."
    if all(row.reconstructed is None for row in rows):
        said = f"No reconstruction could be checked in {place}: the true data are not known."
    said = f"{known} {said}".strip()
    open_ = grouped((row.verdict, row) for row in rows if row.verdict not in ENOUGH)
    if not open_:
        return f"{said} Theorems keep every covered attacker to the accepted probability."
    counts = listing([f"{len(open_[word])} {word}" for word in VERDICTS if word in open_])
    number = sum(map(len, open_.values()))
    what = "remain open"
    if any(word in DISCLOSURES for word in open_):
        what = "is not protected" if number == 1 else "are not protected"
    return f"{said} {number} of {len(rows)} {what} ({counts}): this is no evidence of safety."


def undefended(own: Sequence[Assessment]) -> str:
    """Why no defense is in a run: an audit tests some, a captured update may come with one."""
    captured = [a.capture for a in own if a.capture is not None]
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
    defended = [row for row in settings if row.defense != title(NO_DEFENSE)]
    tested = [row for row in defended if row.verdict != NOT_RUN]
    if defended and not tested:
        names = listing([shortened(row.defense) for row in defended])
        return f"No defense was tested: {names} did not run."
    if not tested:
        return none
    enough = [row for row in tested if row.verdict in ENOUGH and row.configurations == pairs]
    if enough:
        whole = [row for row in enough if row.defense in covered]
        holds = training is not None and training.holds and bool(whole)
        some = whole if holds else enough
        best = min(some, key=lambda row: (row.cost.mean if row.cost else 2.0, safety(row)))
        cheapest = "" if best.cost is None else " at the lowest cost"
        name = f"{shortened(best.defense)} ({best.verdict})"
        said = f"Of the defenses tested, {name} is enough for {_extent(training, holds)}{cheapest}."
        return f"{said} {_against(training, holds)}{_price(best)}"
    best = max(tested, key=safety)
    name = f"The strongest is {shortened(best.defense)} ({best.verdict})."
    count = plural(len(tested), "defense setting")
    none = f"None of the {count} tested is" if len(tested) > 1 else "The defense tested is not"
    return f"{none} enough for every model and batch size tested. {name} {_price(best)}"


def _extent(training: DeclaredTraining | None, holds: bool) -> str:
    if training is None or not holds:
        return "one update"
    return (
        f"all {training.rounds} declared rounds" if training.rounds != 1 else "the declared round"
    )


def _against(training: DeclaredTraining | None, holds: bool) -> str:
    """Why it is not enough for the declared training; empty if it is, or if none is declared."""
    if training is None or holds:
        return ""
    noise = f"no defense that is enough here has its noise multiplier ({training.noise_multiplier})"
    return f"It is not enough for the declared training: {training.why or noise}. "


def shortened(name: str) -> str:
    """A name for a sentence or a cell."""
    return name if len(name) <= LABEL else f"{name[: LABEL - 1]}…"


def _price(row: SettingRow) -> str:
    cost = row.cost
    if row.unskilled:
        said = "The undefended training did not beat the majority class: the cost is unknown."
        if row.auc_cost is None:
            return said
        return f"{said} It cost {decimal(100 * row.auc_cost.mean)} points of AUC."
    if cost is None:
        return "Its cost in accuracy was not measured."
    if cost.mean <= 0:
        return "In a short training it cost no accuracy."
    return f"In a short training it cost up to {decimal(100 * cost.mean)} points of test accuracy."
