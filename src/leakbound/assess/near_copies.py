"""Near-copies in a batch: a group of them moves the update as one unit of their number."""

from __future__ import annotations

from scipy import stats

from leakbound.assess.criterion import distance_of
from leakbound.assess.released import Released

NOT_LOOKED = (
    "no near-copy of an example is in the same update: assumed, as the batch is not known here"
)


def count(released: Released, people: int = 1) -> int:
    """The most examples of the update that count as one: those of one person, and all near them.

    Near is within the distance of two examples that one candidate matches. Where the batch is not
    known, nobody looks for near ones. Near ones may be of other people, so the numbers multiply.
    """
    return min(people * _near(released), released.examples)


def crowding(released: Released, limit: float) -> float:
    """The p-value of so many examples of the batch that one of them matches, if the examples are
    independent and no candidate matches more than a share `limit` of all examples.

    A small value shows that the private examples are not like the public ones behind the limit. Any
    example of the batch may be the one, so its binomial tail counts once for each.
    """
    return crowding_of(_largest(released, matched=True), released.examples, limit)


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
    # Of the others: sf(k - 2) is the probability that k - 1 or more match.
    return min(1.0, count * float(stats.binom.sf(alike - 2, count - 1, limit)))


def _near(released: Released) -> int:
    """The most examples of the batch that are near one of them, itself included."""
    return _largest(released, matched=False)


def _largest(released: Released, *, matched: bool) -> int:
    """The most examples of the batch that one of them matches, or is near to; itself included."""
    batch = released.batch
    if batch is None or not released.truth_known or released.examples < 2:
        return 1
    criterion = released.criterion
    eta = criterion.level

    def make() -> int:
        distance = distance_of(criterion.domain)
        rows = distance.coded(
            criterion.counted(batch.inputs.detach()).flatten(1).double().cpu().numpy()
        )
        radius = eta if matched else distance.reach(eta)
        most = 1
        for block in distance.among(rows):
            most = max(most, int((block <= radius).sum(1).max()))
        return most

    return released.cached("near copies", (eta, criterion, matched), make)


def words(released: Released, people: int = 1) -> tuple[str, ...]:
    """What a bound on several examples says of people and near-copies."""
    if released.examples < 2:
        return ()
    said = "one example" if people == 1 else f"up to {people} examples"
    most = _near(released)
    near = "none of the examples in this update is near another one (it was looked at)"
    if released.batch is None or not released.truth_known:
        near = NOT_LOOKED
    elif most > 1:
        near = (
            f"up to {most} of the examples in this update are near one of them and count as one "
            f"unit: the noise of one is divided by {most}"
        )
        near += f", and by {people} for a person" if people > 1 else ""
    return f"each person has {said} in the update, as declared", near
