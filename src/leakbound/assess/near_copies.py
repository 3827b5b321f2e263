"""People and near-copies in a batch: k examples of one unit move the update k times as far."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import bdtrc

from leakbound.assess.criterion import distance_of
from leakbound.assess.released import Released
from leakbound.assess.sentences import unit_of

NOT_LOOKED = (
    "no near-copy of an example is in the same update: assumed, as the batch is not known here"
)


def count(released: Released, people: int | None = None) -> int:
    """The most examples of the update that count as one: those of one person, and all near them.

    Near is within the distance of two examples that one candidate matches. Where the batch is not
    known, nobody looks for near ones. If it is only declared how many examples a person has, near
    ones may be of other people, so the numbers multiply.
    """
    known = released.persons is not None and released.batch is not None
    if people is None and known and released.examples > 1:
        return _counted(released)
    return min(most_of_person(released, people) * _near(released), released.examples)


def most_of_person(released: Released, people: int | None = None) -> int:
    """The largest number of one person's examples in the update: as declared, else as counted.

    Raises:
        ValueError: fewer are declared than the update holds.
    """
    persons = released.persons
    held = 1 if persons is None else int(torch.unique(persons, return_counts=True)[1].max())
    if people is None:
        return held
    if people < held:
        raise ValueError(
            f"people is {people}, but the update holds {held} examples of one person; give "
            f"people = {held} or more, or leave it out: they are then counted"
        )
    return min(people, released.examples)


def crowding(released: Released, limit: float) -> float:
    """The p-value of so many examples of the batch that one of them matches, if the examples are
    independent and no candidate matches more than a share `limit` of all examples.

    A small value shows that the private examples are not like the public ones behind the limit. Any
    example of the batch may be the one, so its binomial tail counts once for each.
    """
    persons = released.persons
    # A person's own examples are similar: one of each person is independent of the others.
    count = released.examples if persons is None else len(torch.unique(persons))
    return crowding_of(_largest(released, matched=True), count, limit)


def crowding_of(
    alike: int,
    count: int,
    limit: float,
) -> float:
    """That p-value for `alike` of `count` examples, the matching one included.

    Example:
        >>> crowding_of(1, 8, 0.01), round(crowding_of(3, 8, 0.01), 4)
        (1.0, 0.0162)
    """
    # Of the others: bdtrc(k - 2) is the probability that k - 1 or more match.
    return min(1.0, count * float(bdtrc(alike - 2, count - 1, limit)))


def _counted(released: Released) -> int:
    """The most examples of the batch that are of one person or near an example of theirs."""
    persons = released.persons
    assert persons is not None  # the caller asks
    criterion = released.criterion

    def make() -> int:
        owner = torch.unique(persons, return_inverse=True)[1].cpu().numpy()
        reached = owner == np.arange(owner.max() + 1)[:, None]  # (people, B)
        distance = distance_of(criterion.domain)
        start = 0
        for block in distance.among(_rows(released)):
            of_block = owner[start : start + len(block)]
            np.logical_or.at(reached, of_block, block <= distance.reach(criterion.level))
            start += len(block)
        return int(reached.sum(1).max())

    return released.cached("one person's", (criterion.level, criterion), make)


def _rows(released: Released) -> NDArray[Any]:
    """The coded examples of the batch: what counts of them."""
    assert released.batch is not None  # the callers ask
    criterion = released.criterion
    inputs = criterion.counted(released.batch.inputs.detach())
    return distance_of(criterion.domain).coded(inputs.flatten(1).double().cpu().numpy())


def _near(released: Released) -> int:
    """The most examples of the batch that are near one of them, itself included."""
    return _largest(released, matched=False)


def _largest(released: Released, *, matched: bool) -> int:
    """The most examples of the batch that one of them matches, or is near to; itself included."""
    if released.batch is None or not released.truth_known or released.examples < 2:
        return 1
    criterion = released.criterion
    eta = criterion.level

    def make() -> int:
        distance = distance_of(criterion.domain)
        rows = _rows(released)
        if matched and released.persons is not None:
            rows = rows[np.unique(released.persons.cpu().numpy(), return_index=True)[1]]
        radius = eta if matched else distance.reach(eta)
        most = 1
        for block in distance.among(rows):
            most = max(most, int((block <= radius).sum(1).max()))
        return most

    return released.cached("near copies", (eta, criterion, matched), make)


def words(released: Released, people: int | None = None) -> tuple[str, ...]:
    """What a bound says of its unit and of near-copies."""
    if released.examples < 2:
        return (f"unit: {unit_of(1)}, the only one in the update",)
    of_person = most_of_person(released, people)
    counted = people is None and released.persons is not None
    how = "as declared"
    if people is None:
        how = "as counted" if counted else "as nobody said who is who"
    unit = f"unit: {unit_of(of_person)} in this update, {how}"
    if released.batch is None or not released.truth_known:
        return unit, NOT_LOOKED
    alike = _near(released)
    near = f"up to {alike} of the examples in this update are near one of them"
    if alike == 1:
        near = "none of the examples in this update is near another one (it was looked at)"
    most = count(released, people)
    if most == 1:
        return unit, near
    together = "those of a person and all near them" if counted or of_person > 1 else "they"
    return unit, f"{near}; {together} count as one unit: the noise of one is divided by {most}"
