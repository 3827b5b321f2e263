"""What an update reveals, as a sentence: pages and the command line say the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from leakbound._util.formats import format_upper
from leakbound._util.results import VALUES, Fact, FactKind

DOUBTED: Final = "a test found"
GUESS: Final = "guess without an update"
ORDER: tuple[FactKind, ...] = (
    "attribute",
    "words",
    "levels",
    "zero values",
    "classes",
    "batch statistics",
)
"""The kinds of facts, those that say most about a person first."""


def of_fact(fact: Fact, *, shown: int = 8) -> str:
    """What an update reveals, how sure that is, and under which assumption.

    Example:
        >>> fact = Fact(
        ...     kind="levels", subject="city", items=("Bern", "Ulm"), count=2, assumes="it is SGD")
        >>> of_fact(fact, shown=1)
        'of the column city 2 levels occur: Bern and 1 more (certain, if it is SGD)'
    """
    each = fact.items
    if fact.kind == "attribute":
        pairs = zip(fact.items, fact.examples, strict=False)
        each = tuple(f"{item} of example {place + 1}" for item, place in pairs)
    items = ", ".join(each[:shown])
    left = fact.count - min(shown, len(fact.items))
    named = f"{items} and {left:,} more" if left else items
    if not fact.items and fact.kind in VALUES:
        named = "(withheld)"
    count = f"{fact.count:,}"
    many = fact.count != 1
    layers = len(fact.items) - shown  # the count is that of channels
    where = f"{items} and {layers:,} more" if layers > 0 else items
    words = {
        "attribute": f"{fact.subject} is read: {named}",
        "words": f"{count} words occur: {named}" if many else f"the word {named} occurs",
        "levels": f"of the column {fact.subject} {count} levels occur: {named}"
        if many
        else f"of the column {fact.subject} only the level {named} is seen",
        "zero values": f"{count} values are 0 in every example"
        if many
        else f"the value {named} is 0 in every example",
        "classes": f"{count} classes occur: {named}" if many else f"the class {named} occurs",
        "batch statistics": (
            f"mean and variance of {count} channels over the batch, in layers: {where}"
        ),
    }[fact.kind]
    sure = (
        "certain"
        if fact.level is None
        else f"wrong with probability {format_upper(fact.level)} at most"
    )
    return f"{words} ({sure}, if {fact.assumes})"


def ordered(facts: Iterable[Fact]) -> list[Fact]:
    """Those that matter most first: sensitive ones, then in the order of `ORDER`."""
    rank = {kind: place for place, kind in enumerate(ORDER)}
    return sorted(facts, key=lambda fact: (not fact.sensitive, rank[fact.kind], fact.subject))


def unit_of(people: int) -> str:
    """Whose reconstruction a bound is about.

    Example:
        >>> unit_of(1), unit_of(3)
        ('one example', 'one person with at most 3 examples')
    """
    return "one example" if people == 1 else f"one person with at most {people} examples"


def rare(
    alone: int,
    count: int,
    rows: Iterable[str] = (),
) -> str:
    """What a bound that averages over examples leaves open; `rows` are numbers of rare ones."""
    such = ", ".join(rows)
    return (
        "bounds average over examples and state nothing of one given example: "
        f"{alone / count:.1%} of {count} public examples are rare, as no candidate matches one of "
        "them and another" + (f" (such as numbers {such})" if such else "")
    )
