"""What updates reveal for certain, as pages list it: before all reconstructions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from leakbound._util.results import Fact
from leakbound.assess.record import Assessment
from leakbound.assess.sentences import of_fact, ordered
from leakbound.assess.verdict import counted
from leakbound.report.tables import Names, ReportPart, grouped
from leakbound.report.template import listing, plural

SHOWN = 40
"""Most items of one fact on a page; the records list more."""
KINDS = {
    "words": ("word", "words"),
    "levels": ("column’s levels", "columns’ levels"),
    "zero values": ("set of zero values", "sets of zero values"),
    "classes": ("set of classes", "sets of classes"),
    "batch statistics": ("layer’s batch statistics", "layers’ batch statistics"),
}


class RevealedFacts(ReportPart, frozen=True):
    """What one update reveals, a sentence for each fact.

    `update`: the captured update, or the configuration whose first update it is.
    """

    update: str
    facts: tuple[str, ...]


def revealed(assessments: Iterable[Assessment], names: Names) -> list[RevealedFacts]:
    """The facts of every captured update; of an audit, those of each configuration's first seed."""
    found = grouped((_label(a, names), a) for a in assessments if counted(a.facts))
    lines = []
    for label, own in found.items():
        first = [a for a in own if a.seed == own[0].seed]
        facts = {(fact.kind, fact.subject): fact for a in first for fact in counted(a.facts)}
        said = tuple(of_fact(fact, shown=SHOWN) for fact in ordered(facts.values()))
        lines.append(RevealedFacts(label, said))
    return lines


def summary(assessments: Iterable[Assessment]) -> str:
    """One sentence on what the updates of a run reveal; empty if there is nothing."""
    facts = {(fact.kind, fact.subject): fact for a in assessments for fact in counted(a.facts)}
    if not facts:
        return ""
    counts = [
        plural(_number(own), *KINDS[kind])
        for kind, own in grouped((fact.kind, fact) for fact in ordered(facts.values())).items()
    ]
    sensitive = [fact.subject for fact in facts.values() if fact.sensitive]
    which = f", {listing(sensitive)} among them," if sensitive else ""
    return f"Updates reveal for certain{which} {listing(counts)}."


def _number(facts: Sequence[Fact]) -> int:
    """How many words, or how many columns and layers."""
    words = [fact.count for fact in facts if fact.kind == "words"]
    return sum(words) or len(facts)


def _label(a: Assessment, names: Names) -> str:
    if a.capture is not None:
        return a.capture.name
    model, size, defense = names.key(a)
    return f"{model}, batch {size}, {defense}"
