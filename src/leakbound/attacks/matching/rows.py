"""Gradient matching for rows of a table: mixed relaxation, and several searches pooled."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from leakbound import check
from leakbound.attacks.base import Attack, boxed, domain_of, rank
from leakbound.attacks.knowing import OTHER_LABEL
from leakbound.attacks.matching.attack import GradientMatching
from leakbound.attacks.matching.objective import Objective
from leakbound.core import Observation, Reconstruction
from leakbound.domains import TableDomain
from leakbound.domains.known import KnownValues

LOOSE = 6.0
"""Tolerances within which values of different searches count as the same row's, for pairing."""


@dataclass(frozen=True)
class TabLeak(Attack):
    """Search the rows whose update matches, with a softmax per category, and pool several searches.

    Every search is `GradientMatching` with `image="mixed"`. The rows of the other searches are
    paired with those of the one with the lowest objective. A pooled row has the mean shares of a
    category and the median of a number. The answer is the pooled rows or the best search's, by the
    lower distance to the update. `agreement` counts, for every value of the answer, the searches
    that agree: values on which they agree are more often right.

    Args:
        steps: search steps.
        restarts: number of searches; they share their computation where an engine allows it.
        learning_rate: Adam's, at the start of a cosine schedule.
        distance: as in `GradientMatching`.
        labels: as in `GradientMatching`.

    Raises:
        NotApplicable: no table's columns are known (`Task.domain`).

    Source: Vero et al. 2023 (TabLeak), with free numbers in place of a sigmoid (docs/attacks.md).

    Example:
        >>> import leakbound as lb
        >>> from leakbound.domains import Column, TableDomain
        >>> sex = Column("sex", "categorical", levels=("f", "m"))
        >>> domain = TableDomain((Column("age", "integer", 0, 100), sex))
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(),
        ...     torch.nn.Linear(16, 2))
        >>> batch = lb.Batch(torch.tensor([[0.31, 0.0, 1.0]]), torch.tensor([1]))
        >>> attack = TabLeak(steps=600, restarts=2)
        >>> result = lb.simulate(model, batch, attack=attack, domain=domain)
        >>> [(age, sex)] = domain.rows(result.reconstruction)
        >>> abs(int(age) - 31) <= 3, sex
        (True, 'm')
    """

    steps: int = 1500
    restarts: int = 8
    learning_rate: float = 0.06
    distance: str = "cosine"
    labels: str = "told"

    def __post_init__(self) -> None:
        check.count(restarts=self.restarts)
        self._search()

    @property
    def step_trainings(self) -> int:
        """All searches take a step together."""
        return self.restarts

    def _search(self) -> GradientMatching:
        return GradientMatching(
            distance=self.distance,
            steps=self.steps,
            learning_rate=self.learning_rate,
            signed=False,
            schedule="cosine",
            image="mixed",
            labels=self.labels,
        )

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        domain = domain_of(observation.task, TableDomain)
        search = self._search()
        # All searches draw from one generator in turn, when they begin.
        answers = search.many([observation] * self.restarts, [generator] * self.restarts)
        best = min(answers, key=rank)
        aligned = [_aligned(domain, best, one, observation.known) for one in answers]
        rows = torch.stack([one.inputs for one in aligned])
        pooled = replace(best, inputs=boxed(_pooled(domain, rows), observation.task))
        answer = best
        if best.labels is not None and not best.labels.is_floating_point():
            objective = Objective.of(search, observation)
            apart = [
                float(objective.match(objective.rows(one.inputs, best.labels)).detach())
                for one in (best, pooled)
            ]
            answer = pooled if apart[1] < apart[0] else best
        agree = ~domain.misses(rows, answer.inputs[None])
        return replace(answer, agreement=agree.double().mean(0))


def _aligned(
    domain: TableDomain,
    best: Reconstruction,
    other: Reconstruction,
    known: KnownValues | None,
) -> Reconstruction:
    """Another search's rows in the order of the best one's."""
    costs = domain.distances(domain.hard(best.inputs), domain.hard(other.inputs), LOOSE)
    if known is not None:
        # Both searches hold the known values in their order: only equal ones may change places.
        values = known.values.flatten(1).cpu()
        costs += OTHER_LABEL * (values[:, None] != values).any(-1)
    order = torch.as_tensor(linear_sum_assignment(costs.numpy())[1])
    return replace(other, inputs=other.inputs[order.to(other.inputs.device)])


def _pooled(domain: TableDomain, rows: Tensor) -> Tensor:
    """The mean shares of categories and the median of numbers, over searches (R, N, n)."""
    pooled = rows.median(0).values
    for start, stop in domain.groups:
        pooled[:, start:stop] = rows[:, :, start:stop].mean(0)
    return pooled
