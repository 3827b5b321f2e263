"""The only rule that says exposed, protected or undecided, and what these words mean."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace
from scipy import special

from leakbound._util.groups import grouped
from leakbound._util.results import Fact
from leakbound.assess.record import (
    ABSENT,
    ATTRIBUTE,
    CERTIFIED,
    EXPOSED,
    FACTS,
    GUESSABLE,
    HONEST,
    INTRUDERS,
    NAMED,
    NOT_RUN,
    ON_AVERAGE,
    PRESENT,
    PROTECTED,
    PROTECTS,
    RECOVERABLE,
    THESE,
    UNDECIDED,
    UNDER_MODEL,
    UNKNOWN,
    VERDICTS,
    WORDS,
    Assessment,
    Attained,
    Basis,
    Bound,
    Reidentification,
    Verdict,
    Why,
)

MEANINGS: Final[dict[Verdict, str]] = {
    EXPOSED: "An attack reconstructed at least one example, and chance does not explain it.",
    CERTIFIED: "The update itself proves that a reconstruction is the client's input. The truth "
    "was not given and is not needed.",
    NAMED: "Reconstructions name the right person among others of the same label more often than "
    "chance explains, if the others are drawn like them. No example meets the threshold.",
    ATTRIBUTE: "The update reveals the one column, or the label, of a person that the attacker "
    "does not know: hardly any training with another value looks like it. It holds for this "
    "person, if the attacker knows what is stated, and is no probability over people.",
    WORDS: "The update reveals words of the client's texts, for certain or at the stated level. No "
    "whole text is reconstructed.",
    FACTS: "The update reveals facts about the client's examples, such as which levels of a column "
    "occur. No whole example is reconstructed.",
    RECOVERABLE: "No attack here reconstructed this example. A malicious server's attack, counted "
    "on examples like the public ones, does it more often than is accepted, and more often than a "
    "guess without the update.",
    GUESSABLE: "A guess without any update meets the threshold more often than is accepted. No "
    "amount of noise protects at this threshold: ask for a smaller error or accept more.",
    NOT_RUN: "Nothing ran: the model refuses the defense, no attack applies, or all experiments "
    "failed. Nothing is known.",
    UNDECIDED: "No attack here succeeded and no bound protects. This is no proof of safety.",
    ON_AVERAGE: "No attack here succeeded, and on average over examples like the public ones no "
    "attacker's mean error is below the threshold's, with the stated confidence. A single example "
    "can still leak.",
    UNDER_MODEL: "If the client's examples followed a model of the data that was fitted to public "
    "examples, no attacker would do it with more than the accepted probability. Real "
    "examples may differ from the model.",
    HONEST: "From one update of this model no attacker does it with more than the accepted "
    "probability. A server that sends another model is not covered, nor is an attacker who knows a "
    "part of the example. It holds with the stated confidence if private examples are drawn like "
    "the public ones.",
    THESE: "From one update no attacker who knows nothing of the example does it with more than "
    "the accepted probability, whatever the model is, averaged over these very examples. Other "
    "examples are not covered.",
    PROTECTED: "From one update no attacker who knows the population, and nothing of the example, "
    "does it with more than the accepted probability, whatever the model is. This rests on a count "
    "of public examples and on no model of the data; it holds with the stated confidence if "
    "private examples are drawn like the public ones. Who knows a part of the example starts from "
    "more: the rows on attackers say what the update adds for them.",
    INTRUDERS: "From one update no attacker who has the stated parts of the example, and knows the "
    "population, reconstructs the rest with more than the accepted probability, whatever the model "
    "is. It rests on the same count of public examples, and holds on average over them.",
}
"""The meaning of each verdict, for pages."""


DIAGNOSES: Final[dict[Why, str]] = {
    PRESENT: "A search that starts near the true example comes closer to it and meets the "
    "threshold. The update holds the information; the attacks do not find it from far away. A "
    "stronger search may.",
    ABSENT: "The update does not determine the example to the threshold: another example has the "
    "same update, or too few directions are known to that precision, also with a Gaussian prior "
    "of public examples. More knowledge about the data could still fill the gap, so this is no "
    "proof of safety.",
    UNKNOWN: "The tests do not agree, or some did not apply.",
}
"""The meaning of each diagnosis of an undecided configuration, for pages. The auditor knows the
truth for it, so it is no verdict.
"""


def meanings(*, truth_known: bool) -> dict[Verdict, str]:
    """MEANINGS for a known or an unknown truth behind the updates."""
    if truth_known:
        return MEANINGS
    return MEANINGS | {
        UNDECIDED: "The truth is not known and no bound protects: see what the reconstructions "
        "explain. This is no proof of safety."
    }


LEVEL = 0.01
"""The largest probability of an error at which a fact or a named person counts."""


def counted(facts: Iterable[Fact]) -> tuple[Fact, ...]:
    """Those with an error probability of at most LEVEL."""
    return tuple(fact for fact in facts if fact.level is None or fact.level <= LEVEL)


def decide(
    *,
    exposed: bool = False,
    certified: bool = False,
    named: bool = False,
    facts: Collection[Fact] = (),
    recoverable: bool = False,
    guessable: bool = False,
    excluded: Collection[Basis] = (),
    on_average: bool = False,
) -> Verdict:
    """The verdict from the evidence; the first that applies.

    First comes what an attack did, then what an attack would do, then what no attacker does.
    `excluded` says what each bound that excludes the threshold rests on.
    """
    shown = {
        EXPOSED: exposed,
        CERTIFIED: certified,
        NAMED: named,
        ATTRIBUTE: any(fact.kind == "attribute" for fact in facts),
        WORDS: any(fact.kind == "words" for fact in facts),
        FACTS: bool(facts),
        RECOVERABLE: recoverable,
        GUESSABLE: guessable,
        **{word: basis in excluded for basis, word in PROTECTS.items()},
        ON_AVERAGE: on_average,
    }
    return next((word for word, holds in shown.items() if holds), UNDECIDED)


def verdict(
    matched: Sequence[bool],
    bounds: Iterable[Bound] = (),
    *,
    certified: bool = False,
    attained: Attained | None = None,
    facts: Sequence[Fact] = (),
    reidentified: Sequence[Reidentification] = (),
) -> Verdict:
    """The verdict on one attack on one update.

    `matched` is empty if the truth is not known. `attained` is the success of a known attack.
    `facts`, and names of persons, count up to their LEVEL.
    """
    exposed = any(matched)
    general = [bound for bound in bounds if bound.covers == "all"]
    by_lot = named_by_chance([one] for one in reidentified)
    return decide(
        exposed=exposed,
        certified=certified,
        named=by_lot is not None and by_lot <= LEVEL,
        facts=counted(facts),
        recoverable=attained is not None and attained.recoverable,
        guessable=attained is not None and attained.guessable,
        excluded={bound.basis for bound in general if bound.excludes_threshold},
        on_average=any(bound.on_average and bound.model_free for bound in general),
    )


def together(verdicts: Iterable[Verdict | None]) -> Verdict:
    """The verdict on a configuration: exposed if one experiment is, protected only if all are.

    What was not run leaves the rest undecided.
    """
    # One exposure outweighs a proof of safety elsewhere; the other words are ordered.
    known = {one for one in verdicts if one is not None}
    if EXPOSED in known:
        return EXPOSED
    if NOT_RUN in known and len(known) > 1:
        known = (known - {NOT_RUN}) | {UNDECIDED}
    return min(known, key=VERDICTS.index, default=UNDECIDED)


def of_configuration(records: Iterable[Assessment]) -> Verdict:
    """The verdict on all experiments of one configuration.

    Some of many experiments match by chance. So without a certificate, or a match that is far
    closer than any fixed guess, they are exposed only if all permutation tests together exclude
    chance (`by_chance`), at the level of each.
    """
    experiments = list(records)
    if experiments and not any(one.status == "ok" for one in experiments):
        facts = counted(fact for one in experiments for fact in one.facts)
        return decide(facts=facts) if facts else NOT_RUN
    experiments = _beyond_tries(experiments)
    # Matches of many experiments are many tries: single levels do not add up to that of all.
    tests = [one.chance for one in experiments if one.chance is not None]
    proved = any(one.certificate is not None for one in experiments) or any(t.closer for t in tests)
    together_p = by_chance(experiments)
    exposed = together_p is None or proved or together_p <= tests[0].level
    words = [_unnamed(one) for one in experiments]
    if not exposed:
        words = [UNDECIDED if word == EXPOSED else word for word in words]
    if names_persons(experiments):
        words.append(NAMED)
    return together(words)


def _unnamed(record: Assessment) -> Verdict | None:
    """The verdict on an experiment but for who is named, which all experiments decide together."""
    if record.verdict != NAMED:
        return record.verdict
    return verdict(
        record.matched,
        record.bounds,
        certified=record.certificate is not None,
        attained=record.attained,
        facts=record.facts,
    )


def names_persons(records: Iterable[Assessment]) -> bool:
    """Whether the reconstructions of a configuration name more persons than chance explains."""
    ways = grouped(((one.attack.hash, f.how), f) for one in records for f in one.reidentified)
    by_lot = named_by_chance(ways.values())
    return by_lot is not None and by_lot <= LEVEL


def named_by_chance(ways: Iterable[Sequence[Reidentification]]) -> float | None:
    """The p-value of the hypothesis that every name is drawn by lot.

    Each way, an attack with a matcher, has its answers on all experiments. They are independent: no
    gallery of an update shares a candidate, and experiments draw theirs apart. So the right ones
    are a sum of draws with probability 1 / M each. Several ways depend on each other, and share the
    error (Bonferroni). None if nothing was named.

    Example:
        >>> found = Reidentification(matcher="edges", right=(True, True, False), candidates=10)
        >>> round(named_by_chance([[found], [found]]), 6)
        0.056
    """
    each = [_by_lot(some) for some in ways]
    return min(1.0, len(each) * min(each)) if each else None


def _by_lot(found: Sequence[Reidentification]) -> float:
    """The probability of at least so many right names by lot."""
    tries = grouped((1 / one.candidates, one.answers) for one in found)
    counts = {chance: sum(map(len, answers)) for chance, answers in tries.items()}
    hits = sum(sum(one.answers) for one in found)
    return _tail(hits, counts)


def _tail(hits: int, counts: Mapping[float, int]) -> float:
    """The probability of at least so many hits, of so many tries with each chance."""
    law = np.ones(1)
    for chance, count in counts.items():
        # Try by try: logarithms would put one hit with a chance of 1 % above a level of 1 %.
        for _ in range(count):
            law = np.convolve(law, [1 - chance, chance])
    return min(1.0, float(law[hits:].sum()))


def _beyond_tries(experiments: list[Assessment]) -> list[Assessment]:
    """The experiments; attributes and words that too few of many tries show count for nothing."""
    read = [
        1.0 if fact.level is None else fact.level
        for one in experiments
        for fact in one.facts
        if fact.kind == "attribute"
    ]
    by_lot = set[str]()
    if simes(read) > LEVEL:
        by_lot.add("attribute")
    if _words_by_chance(experiments) > LEVEL:
        by_lot.add("words")

    def judged(one: Assessment) -> Assessment:
        facts = counted(one.facts)
        kept = [fact for fact in facts if fact.kind not in by_lot or fact.level is None]
        if one.verdict not in (ATTRIBUTE, WORDS, FACTS) or len(kept) == len(facts):
            return one
        return replace(one, verdict=decide(facts=kept))

    return [judged(one) for one in experiments]


def _words_by_chance(experiments: Iterable[Assessment]) -> float:
    """The p-value of the hypothesis that no update holds the words that have a level.

    Each list has its level, so as many lists of one attack are a binomial tail. Several settings
    of an attack share the error (Bonferroni). 1 if there is no list.
    """
    settings = grouped(((one.attack.name, one.attack.hash), one.facts) for one in experiments)
    alike = Counter(name for name, _ in settings)
    tails = [1.0]
    for (name, _), updates in settings.items():
        levels = [
            fact.level
            for facts in updates
            for fact in counted(facts)
            if fact.kind == "words" and fact.level is not None
        ]
        if levels:
            tail = _tail(len(levels), {max(levels): len(updates)})
            tails.append(alike[name] * tail)
    return min(tails)


def by_chance(records: Iterable[Assessment]) -> float | None:
    """The p-value of the hypothesis that chance explains every match of a configuration.

    Two rules are joined, each with half of the level. The tests of one attack on several draws of
    victims are independent, so Fisher 1932 adds up weak ones; those of several attacks depend on
    each other (Simes 1986, for positive dependence). Simes over all tests finds the one strong test
    among many. None if nothing was tested.
    """
    tests = grouped(
        (one.attack.hash, one.chance.p_value)
        for one in records
        if one.chance is not None and one.chance.p_value is not None
    )
    if not tests:
        return None
    each = simes([p for some in tests.values() for p in some])
    if all(len(some) == 1 for some in tests.values()):
        return each
    return min(1.0, 2 * min(each, simes([fisher(some) for some in tests.values()])))


def fisher(p_values: Sequence[float]) -> float:
    """The p-value of independent tests together: -2 sum log p is chi-squared (Fisher 1932).

    Example:
        >>> round(fisher([0.05, 0.05]), 4)
        0.0175
    """
    if len(p_values) == 1:
        return p_values[0]
    total = -2 * sum(math.log(max(p, 1e-300)) for p in p_values)
    return float(special.gammaincc(len(p_values), total / 2))


def of_run(records: Iterable[Assessment]) -> Verdict:
    """The verdict on a run: exposed if one configuration is, protected only if all are."""
    groups: dict[tuple[object, ...], list[Assessment]] = {}
    for one in records:
        # As text, because a dictionary cannot be part of a key.
        model = one.model.name, str(one.model.parameters), one.model.train_steps
        groups.setdefault((*model, one.defense.settings, one.batch_size), []).append(one)
    return together(of_configuration(some) for some in groups.values())


def simes(p_values: Sequence[float]) -> float:
    """The p-value of the hypothesis that all hypotheses hold (Simes 1986).

    Example:
        >>> simes([0.01, 0.02, 0.5])
        0.03
    """
    rising = sorted(p_values)
    return min((len(rising) * p / place for place, p in enumerate(rising, 1)), default=1.0)
