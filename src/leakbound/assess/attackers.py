"""Three attackers, one release: who knows the population, who knows a part, and anyone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from leakbound.assess.criterion import Criterion, distance_of
from leakbound.assess.imputers import prior_of_intruder
from leakbound.assess.record import AttackerRow, Completed
from leakbound.assess.released import nine
from leakbound.attacks.imputers import FEWEST
from leakbound.bounds.counting import PublicSample
from leakbound.bounds.knowledge import informed, largest_gain
from leakbound.domains.known import Known

Lift = Callable[..., Any]
Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Intruder:
    """Who has parts of the example.

    Attributes:
        criterion: what counts as reconstructed of the rest.
        sample: public examples as a sample, by the values of the known parts.
        completed: what the best imputer completes without the update; None: not counted.
    """

    criterion: Criterion
    sample: PublicSample
    completed: Completed | None


def rows_of(
    lift: Lift,
    whole: Criterion,
    stranger: PublicSample,
    intruder: Intruder | None = None,
) -> tuple[AttackerRow, ...]:
    """What stranger, intruder and anyone reach.

    Args:
        lift: F as in `PublicSample.success_bound`: from the logarithm of a prior success.
        whole: what counts for the stranger.
        stranger: public examples as a sample, for who knows the population.
        intruder: who has parts of the example; None if nobody does.

    Source: this project; docs/risk.md, "What the attacker already knows".
    """
    rows = [_bounded(whole, stranger, lift)]
    if intruder is not None:
        rows.append(_bounded(intruder.criterion, intruder.sample, lift, intruder.completed))
    return (*rows, *only_anyone(lift))


def only_anyone(lift: Lift) -> tuple[AttackerRow, ...]:
    """The row that needs no public examples."""
    gain = nine(largest_gain(lift)[0], up=True)
    return (AttackerRow(attacker="anyone", knows="anything", goal="any goal", gain=gain),)


def with_known_parts(sample: PublicSample, known: Known | None) -> PublicSample:
    """The sample for an attacker who has the known parts; the same if there are none."""
    if known is None:
        return sample
    places = np.flatnonzero(known.places.numpy()).tolist()
    return informed(sample, places, distance=distance_of(known.rest), words=known.text)


def best_completion(
    public: Tensor,
    criterion: Criterion,
    labels: Tensor | None = None,
    say: Say = lambda line: None,
) -> Completed | None:
    """The best imputer's share; None if there are too few examples to fit and to count.

    `labels` are those of the public examples if the attacker knows labels.
    """
    assert criterion.known is not None
    if len(public) < FEWEST:
        return None
    best, *_ = prior_of_intruder(public, criterion.known, criterion.within, labels=labels, say=say)
    return best


def _bounded(
    criterion: Criterion,
    sample: PublicSample,
    lift: Lift,
    measured: Completed | None = None,
) -> AttackerRow:
    bounds, logs = sample.success_bound(lift, criterion.level)
    without = float(np.exp(logs[0]))
    bound = float(bounds[0])
    gain, _ = largest_gain(lift, most=without)
    from_measured = None
    if measured is not None:
        # Nothing was completed: the limit on that is what is known.
        share = max(measured.share, 1 / measured.total)
        from_measured = nine(float(np.ravel(lift(math.log(share)))[0]), up=True)
    return AttackerRow(
        attacker="stranger" if criterion.known is None else "intruder",
        knows="" if criterion.known is None else criterion.known.text,
        goal=criterion.info.goal,
        without=nine(without, up=True),
        bound=nine(bound, up=True),
        gain=nine(min(gain, bound), up=True),
        measured=measured,
        from_measured=from_measured,
    )
