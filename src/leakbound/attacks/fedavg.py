"""FedAvg matching without knowledge of the local steps, optimizer or minibatch order."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from leakbound import check
from leakbound.attacks.base import boxed, seen_task
from leakbound.attacks.blind import gray
from leakbound.attacks.labels import infer_labels
from leakbound.attacks.matching.distances import euclidean
from leakbound.attacks.matching.loop import answer, begin, run
from leakbound.attacks.matching.objective import Objective
from leakbound.attacks.matching.settings import MatchingSettings, unlisted
from leakbound.attacks.matching.terms import Penalty
from leakbound.attacks.pace import is_over
from leakbound.core import LocalPlan, NotApplicable, Observation, Reconstruction, Unit
from leakbound.randomness import permutation

# The cost of pairing images of different labels: no pixels cost as much.
UNLIKE = 1e9
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "momentum": 0.0},
    "momentum": {"optimizer": "sgd", "momentum": 0.9},
    "adam": {"optimizer": "adam", "momentum": 0.0},
}
"""The local optimizers that the attack can try, as settings of `LocalPlan`."""


@dataclass(frozen=True, repr=False)
class FedAvgMatching(MatchingSettings):
    """Match a FedAvg update by simulated local training of unknown steps, optimizer and order.

    For each candidate number of local steps with each optimizer to try, the attack runs a short
    search. It keeps the pair whose update is nearest to the seen one. It deals the labels to the
    minibatches at random several times, and keeps the deal whose short search ends nearest.

    Either all epochs share one order, or every epoch has its own images and order. In the second
    case, a term that does not depend on the order pulls the epochs together; at the end, the attack
    matches and averages them. The learning rate and the minibatch size are the task's, and without
    `optimizers` the optimizer is, too. A local plan that a known defense sets is known.

    Args:
        local_steps: how many steps the client took; None to select among `candidates`.
        candidates: the numbers of local steps to try.
        optimizers: the local optimizers to try: "sgd", "momentum" (SGD with 0.9), "adam". Empty:
            the optimizer is known.
        trial: search steps for each candidate and each deal.
        deals: how many deals of the labels to try.
        epochs: "shared" (one order for all epochs, as for a client that does not shuffle) or "own"
            (separate images for every epoch). Without minibatches the order does not matter.
        together: the term that pulls the epochs together: "moments" (mean and largest value of
            every pixel over an epoch's images) or "matched" (the images, matched one to one).
        together_weight: the weight of that term.

    Source: Dimitrov et al. 2022; the choice of steps and optimizer and "matched" are from this
        project.

    Example:
        >>> import leakbound as lb
        >>> model = lb.models.mlp(input_shape=(1, 4, 4), classes=3, generator=lb.stream(0, "model"))
        >>> batch = torch.linspace(0, 1, 16).reshape(1, 1, 4, 4), torch.tensor([2])
        >>> attack, plan = FedAvgMatching(candidates=(1, 5), trial=10), lb.LocalPlan(5, 0.1)
        >>> seen = lb.simulate(model, batch, attack="linear_inversion", plan=plan).round.observation
        >>> attack.find_plan(seen, lb.stream(0, "attack")).steps
        5
    """

    local_steps: int | None = None
    candidates: tuple[int, ...] = (1, 2, 5, 10, 20)
    optimizers: tuple[str, ...] = unlisted(())
    trial: int = 100
    deals: int = 4
    epochs: str = "shared"
    together: str = "matched"
    together_weight: float = 1e-2

    def __post_init__(self) -> None:
        super().__post_init__()
        check.given(check.count, local_steps=self.local_steps)
        if not self.candidates:
            raise ValueError("candidates is empty; give at least one number of local steps")
        for steps in self.candidates:
            check.count(candidates=steps)
        for name in self.optimizers:
            check.one_of(OPTIMIZERS, optimizers=name)
        check.count(trial=self.trial, deals=self.deals)
        check.one_of(["shared", "own"], epochs=self.epochs)
        check.one_of(["moments", "matched"], together=self.together)
        check.non_negative(together_weight=self.together_weight)

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        if not observation.update.rows.any():
            return gray(observation)
        plan = self.find_plan(observation, generator)
        assumed = self._deal(observation, generator, plan)
        search = LocalSearch(self, observation, generator, assumed)
        run(search.settings, [search.search])
        return search.answer()

    def find_plan(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> LocalPlan:
        """The local training: set by a known defense, or the best of the candidates."""
        stated = seen_task(observation).plan
        if stated != observation.task.plan:
            return stated
        counts = self.candidates if self.local_steps is None else (self.local_steps,)
        rules = [OPTIMIZERS[name] for name in self.optimizers] or [{}]
        if observation.defense is not None and observation.defense.starts is Unit.EXAMPLE:
            # a defense on per-example gradients implies one step
            counts = (1,)
            rules = [{}]
        plans = [replace(stated, steps=count, **rule) for count, rule in product(counts, rules)]
        if len(plans) == 1:
            return plans[0]
        options = [self._assumed(observation, generator, plan) for plan in plans]
        return self._best(observation, generator, options).plan

    def _deal(
        self,
        observation: Observation,
        generator: torch.Generator,
        plan: LocalPlan,
    ) -> _Assumed:
        """The deal of the labels to the minibatches whose short search ends nearest."""
        first = self._assumed(observation, generator, plan)
        size = plan.batch_size
        # Nothing to deal: labels are searched, or one minibatch has all examples.
        if self.labels == "joint" or size is None or size >= max(observation.cohort):
            return first
        more = [self._assumed(observation, generator, plan) for _ in range(self.deals - 1)]
        return self._best(observation, generator, [first, *more])

    def _assumed(
        self,
        observation: Observation,
        generator: torch.Generator,
        plan: LocalPlan,
    ) -> _Assumed:
        """The plan, and the labels dealt in a separate order for each client and epoch."""
        planned = _planned(observation, plan)
        copies = self._epochs(planned)
        if self.labels == "joint":
            return _Assumed(plan, copies, None)
        labels = observation.labels
        if labels is None or self.labels == "inferred":
            labels = infer_labels(planned, generator)
            labels = labels[permutation(len(labels), generator).to(labels.device)]
        dealt = []
        for of_client in torch.split(labels, list(observation.cohort)):
            multiset = of_client.sort().values
            for _ in range(copies):
                dealt.append(multiset[permutation(len(multiset), generator).to(labels.device)])
        return _Assumed(plan, copies, torch.cat(dealt))

    def _epochs(self, observation: Observation) -> int:
        """How many epochs have separate images."""
        plan = observation.task.plan
        size = plan.batch_size
        if size is None or self.epochs == "shared" or size >= max(observation.cohort):
            return 1
        if any(examples % size for examples in observation.cohort):
            raise NotApplicable(
                f"minibatches of {size} do not divide {observation.cohort} examples: give the "
                'attack epochs = "shared"'
            )
        return math.ceil(plan.steps * size / min(observation.cohort))

    def _best(
        self,
        observation: Observation,
        generator: torch.Generator,
        options: list[_Assumed],
    ) -> _Assumed:
        if len(options) == 1:
            return options[0]
        short = replace(self, steps=self.trial)
        left = list[float]()
        for assumed in options:
            if left and is_over():
                break
            search = LocalSearch(short, observation, generator, assumed)
            run(search.settings, [search.search])
            left.append(search.misfit())
        return options[left.index(min(left))]


@dataclass(frozen=True, eq=False)
class _Assumed:
    """What the attacker assumes of the local training: the plan, how many epochs have their own
    images, and the labels of all copies, client by client (None: searched with the images).
    """

    plan: LocalPlan
    copies: int
    labels: Tensor | None


class LocalSearch:
    """A search that trains on its candidate for a number of local steps, epoch after epoch."""

    def __init__(
        self,
        settings: FedAvgMatching,
        observation: Observation,
        generator: torch.Generator,
        assumed: _Assumed,
    ) -> None:
        self.copies = assumed.copies
        self.sizes = observation.cohort
        planned = _planned(observation, assumed.plan)
        if assumed.labels is not None:
            planned = replace(planned, labels=assumed.labels)
            settings = replace(settings, labels="told")
        cohort = tuple(self.copies * size for size in self.sizes)
        self.settings = settings
        objective = Objective.of(settings, replace(planned, cohort=cohort))
        self.search = begin(settings, objective, generator)
        if self.copies > 1 and settings.together_weight:
            moments = settings.together == "moments"
            apart = self.moments_apart if moments else self.matched_apart
            objective = self.search.objective
            terms = (*objective.terms, Penalty(settings.together_weight, apart))
            self.search.objective = replace(objective, terms=terms)

    def answer(self) -> Reconstruction:
        reconstruction = answer(self.search)
        return reconstruction if self.copies == 1 else self._averaged(reconstruction)

    def misfit(self) -> float:
        """Squared distance of the best candidate's (weighted) update from the seen one, relative to
        the product of their lengths, so that a wrong direction does not favor short updates.
        """
        self.search.recall()
        objective = self.search.objective
        images, labels = self.search.candidate()
        rows = objective.seen_of(objective.rows(images, labels)).detach()
        nothing = torch.zeros_like(rows)
        seen = objective.seen
        off, sent, length = (
            float(euclidean(*pair, objective.weights, []))
            for pair in ((rows, seen), (rows, nothing), (nothing, seen))
        )
        share = off / math.sqrt(sent * length) if sent * length else math.inf
        return share if math.isfinite(share) else math.inf

    def blocks(self, values: Tensor) -> list[Tensor]:
        """The part of each client's epochs: (E, n, ...) for every client."""
        parts = torch.split(values, [self.copies * size for size in self.sizes])
        return [part.view(self.copies, -1, *part.shape[1:]) for part in parts]

    def orders(self, images: Tensor) -> list[Tensor]:
        """For each client (E, n): the index in the first epoch of each epoch's images."""
        matched = []
        for block, named in zip(
            self.blocks(images),
            self.blocks(self.search.labels),
            strict=True,
        ):
            flat = block.detach().double().flatten(2)
            rows = [torch.arange(block.shape[1])]
            for epoch in range(1, self.copies):
                costs = torch.cdist(flat[0], flat[epoch]).square()
                costs = torch.nan_to_num(costs, nan=UNLIKE, posinf=UNLIKE)
                if named.ndim == 2 and not named.is_floating_point():  # class numbers alone
                    costs = costs + UNLIKE * (named[0][:, None] != named[epoch])
                rows.append(torch.from_numpy(linear_sum_assignment(costs.cpu().numpy())[1]))
            matched.append(torch.stack(rows).to(images.device))
        return matched

    def matched_apart(self, images: Tensor) -> Tensor:
        """Mean squared distance of matched images from their mean over the epochs."""
        parts = []
        for block, order in zip(self.blocks(images), self.orders(images), strict=True):
            matched = torch.stack([epoch[row] for epoch, row in zip(block, order, strict=True)])
            parts.append((matched - matched.mean(0)).square().mean())
        return torch.stack(parts).mean()

    def moments_apart(self, images: Tensor) -> Tensor:
        """Mean squared distance of every epoch's mean and largest pixels from all epochs' mean."""
        parts = []
        for block in self.blocks(images):
            moments = torch.stack([block.mean(1), block.amax(1)])
            parts.append((moments - moments.mean(1, keepdim=True)).square().mean())
        return torch.stack(parts).mean()

    def _averaged(self, answer: Reconstruction) -> Reconstruction:
        assert answer.labels is not None
        images = []
        labels = []
        task = self.search.objective.task
        last = self.search.images().detach()
        plan = task.plan
        named = self.blocks(answer.labels)
        for block, order, names in zip(self.blocks(last), self.orders(last), named, strict=True):
            size = block.shape[1]
            at = torch.arange(self.copies * size, device=block.device).view(self.copies, size)
            # Images behind the last step were never trained on, so they do not count.
            trained = at < plan.steps * (plan.batch_size or size)
            share = trained.gather(1, order).to(block)
            share = (share / share.sum(0))[(...,) + (None,) * (block.ndim - 2)]
            alike = torch.stack([epoch[row] for epoch, row in zip(block, order, strict=True)])
            images.append((share * alike).sum(0))
            labels.append(names[0])
        inputs = boxed(torch.cat(images).detach(), task)
        return replace(answer, inputs=inputs, labels=torch.cat(labels))


def _planned(observation: Observation, plan: LocalPlan) -> Observation:
    return replace(observation, task=replace(observation.task, plan=plan))
