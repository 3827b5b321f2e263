"""Matching a FedAvg update without knowing its local steps or the minibatches' order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from leakbound import check
from leakbound.attacks.base import boxed, expected_rows, seen_task
from leakbound.attacks.labels import infer_labels
from leakbound.attacks.matching import GradientMatching
from leakbound.attacks.objectives import euclidean
from leakbound.attacks.search import Search
from leakbound.random import permutation
from leakbound.types import LocalPlan, NotApplicable, Observation, Reconstruction

UNLIKE = 1e9


@dataclass(frozen=True, repr=False)
class FedAvgMatching(GradientMatching):
    """Gradient matching through simulated local training whose plan is not told.

    The number of local steps is the candidate whose short search leaves the least of the update's
    energy unexplained (unlike the cosine, that sees its length). The order of the examples, and so
    who shares a minibatch, is not told either: labels are dealt to the minibatches at random, and
    of several deals the one is kept whose short search leaves the least. The epochs share one
    order, or every epoch has images and an order of its own; a term that does not depend on the
    order then pulls the epochs together, and in the end they are matched and averaged.

    The local learning rate and the minibatches' size are the task's, which the server sets. Steps
    that a known defense sets are told.

    Args:
        local_steps: how many the client took; None to find out among `candidates`.
        candidates: the numbers of local steps that are tried.
        trial: steps of the search for each candidate and each deal.
        deals: how many deals of the labels are tried.
        epochs: "shared" (one order for all of them; that of a client who does not shuffle) or "own"
            (images for every epoch). With no minibatches the order does not matter.
        together: what pulls the epochs together: "moments" (mean and largest value of every pixel
            over an epoch's images) or "matched" (the images, once matched one to one).
        together_weight: its weight.

    Source: Dimitrov et al. 2022; the choice of the number of steps, and "matched", are ours.

    Example:
        >>> import leakbound as lb
        >>> model = lb.models.mlp(input_shape=(1, 4, 4), classes=3, generator=lb.stream(0, "model"))
        >>> batch = lb.Batch(torch.linspace(0, 1, 16).reshape(1, 1, 4, 4), torch.tensor([2]))
        >>> task, sources = lb.Task.of(model, plan=lb.LocalPlan(5, 0.1)), [lb.stream(0)] * 2
        >>> seen = lb.play(task, [batch], lb.defenses.NoDefense(), sources).observation
        >>> attack = FedAvgMatching(candidates=(1, 5), trial=10)
        >>> attack.find_steps(seen, lb.stream(0, "attack"))
        5
    """

    local_steps: int | None = None
    candidates: tuple[int, ...] = (1, 2, 5, 10, 20)
    trial: int = 100
    deals: int = 4
    epochs: str = "shared"
    together: str = "matched"
    together_weight: float = 1e-2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local_steps is not None:
            check.count(local_steps=self.local_steps)
        if not self.candidates:
            raise ValueError("candidates is empty; give at least one number of local steps")
        for steps in self.candidates:
            check.count(candidates=steps)
        check.count(trial=self.trial, deals=self.deals)
        check.one_of(["shared", "own"], epochs=self.epochs)
        check.one_of(["moments", "matched"], together=self.together)
        check.non_negative(together_weight=self.together_weight)

    def __call__(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        """Find the number of steps, then search once with it."""
        if not bool((observation.update.rows != 0).any()):
            middle = torch.full(observation.batch_shape, float("nan")).to(observation.update.rows)
            reason = "gradient vanished: the update is zero everywhere"
            return Reconstruction(boxed(middle, observation.task), problem=reason)
        steps = self.find_steps(observation, generator)
        guess = self._deal(observation, generator, steps)
        search = _LocalSearch(self, observation, generator, guess)
        search.run()
        return search.answer()

    def find_steps(self, observation: Observation, generator: torch.Generator) -> int:
        """The number of local steps: told, set by a known defense, or the best candidate."""
        told = seen_task(observation).plan
        if told != observation.task.plan:
            return told.steps
        if self.local_steps is not None:
            return self.local_steps
        if len(self.candidates) == 1:
            return self.candidates[0]
        guesses = [_guess(self, observation, generator, steps) for steps in self.candidates]
        return self._best(observation, generator, guesses).steps

    def _deal(self, observation: Observation, generator: torch.Generator, steps: int) -> _Guess:
        """The deal of the labels to the minibatches whose short search leaves the least."""
        first = _guess(self, observation, generator, steps)
        size = seen_task(observation).plan.batch_size
        if self.labels == "joint" or size is None or size >= max(observation.cohort):
            return first
        more = [_guess(self, observation, generator, steps) for _ in range(self.deals - 1)]
        return self._best(observation, generator, [first, *more])

    def _best(
        self, observation: Observation, generator: torch.Generator, guesses: list[_Guess]
    ) -> _Guess:
        if len(guesses) == 1:
            return guesses[0]
        short, left = replace(self, steps=self.trial), []
        for guess in guesses:
            search = _LocalSearch(short, observation, generator, guess)
            search.run()
            left.append(search.misfit())
        return guesses[left.index(min(left))]


@dataclass(frozen=True, eq=False)
class _Guess:
    """What the attacker supposes of the local training.

    Attributes:
        copies: epochs with images of their own.
        labels: of all copies, client by client; None where they are searched with the images.
    """

    steps: int
    copies: int
    labels: Tensor | None


class _LocalSearch(Search):
    """A search whose guess is trained on for a number of local steps, epoch after epoch."""

    settings: FedAvgMatching

    def __init__(
        self,
        settings: FedAvgMatching,
        observation: Observation,
        generator: torch.Generator,
        guess: _Guess,
    ) -> None:
        self.copies, self.sizes = guess.copies, observation.cohort
        planned = _planned(observation, guess.steps)
        if guess.labels is not None:
            planned = replace(planned, labels=guess.labels)
            settings = replace(settings, labels="told")
        cohort = tuple(self.copies * size for size in self.sizes)
        super().__init__(settings, replace(planned, cohort=cohort), generator)
        if self.copies > 1 and settings.together_weight:
            moments = settings.together == "moments"
            apart = self.moments_apart if moments else self.matched_apart
            self.terms.append(_Together(settings.together_weight, apart))

    def run(self) -> None:
        """Descend with the settings' optimizer."""
        if self.settings.optimizer == "lbfgs":
            self._lbfgs()
        else:
            self.adam()

    def misfit(self) -> float:
        """Share of the (weighted) update's energy that the best guess leaves, its length counted.

        Infinite where it is not a number.
        """
        self.recall()
        labels = self.labels.softmax(-1) if self.joint else self.labels
        rows = expected_rows(self.observation, self.task, self.inputs, labels).detach()
        if self.whitener is not None:
            rows = self.whitener.whiten(rows)
        off, all_of_it = (
            float(euclidean(part, self.seen, self.weights, []))
            for part in (rows, torch.zeros_like(rows))
        )
        share = off / all_of_it if all_of_it else math.inf
        return share if math.isfinite(share) else math.inf

    def blocks(self, values: Tensor) -> list[Tensor]:
        """What belongs to each client's epochs: (E, n, ...) for every client."""
        parts = torch.split(values, [self.copies * size for size in self.sizes])
        return [part.view(self.copies, -1, *part.shape[1:]) for part in parts]

    def orders(self, images: Tensor, labels: Tensor) -> list[Tensor]:
        """For each client (E, n): which image of every epoch is which of its first epoch's."""
        found = []
        for block, named in zip(self.blocks(images), self.blocks(labels), strict=True):
            flat = block.detach().double().flatten(2)
            rows = [torch.arange(block.shape[1])]
            for epoch in range(1, self.copies):
                costs = torch.cdist(flat[0], flat[epoch]).square()
                costs = torch.nan_to_num(costs, nan=UNLIKE, posinf=UNLIKE)
                if named.ndim == 2:  # class numbers; soft labels are left to the images
                    costs = costs + UNLIKE * (named[0][:, None] != named[epoch])
                rows.append(torch.from_numpy(linear_sum_assignment(costs.cpu().numpy())[1]))
            found.append(torch.stack(rows).to(images.device))
        return found

    def matched_apart(self, images: Tensor) -> Tensor:
        """Mean squared distance of matched images from their mean over the epochs."""
        orders, parts = self.orders(images, self.labels), []
        for block, order in zip(self.blocks(images), orders, strict=True):
            alike = torch.stack([epoch[row] for epoch, row in zip(block, order, strict=True)])
            parts.append((alike - alike.mean(0)).square().mean())
        return torch.stack(parts).mean()

    def moments_apart(self, images: Tensor) -> Tensor:
        """Mean squared distance of every epoch's mean and largest pixels from all epochs' mean."""
        parts = []
        for block in self.blocks(images):
            moments = torch.stack([block.mean(1), block.amax(1)])
            parts.append((moments - moments.mean(1, keepdim=True)).square().mean())
        return torch.stack(parts).mean()

    def answer(self) -> Reconstruction:
        """The best iterate, averaged over the epochs in which an image was trained on."""
        found = super().answer()
        if self.copies == 1:
            return found
        assert found.labels is not None
        images, labels = [], []
        plan, named = self.task.plan, self.blocks(found.labels)
        orders = self.orders(self.inputs, self.labels)
        for block, order, own in zip(self.blocks(self.inputs), orders, named, strict=True):
            size = block.shape[1]
            at = torch.arange(self.copies * size, device=block.device).view(self.copies, size)
            trained = at < plan.steps * (plan.batch_size or size)
            share = trained.gather(1, order).to(block)
            share = (share / share.sum(0))[(...,) + (None,) * (block.ndim - 2)]
            alike = torch.stack([epoch[row] for epoch, row in zip(block, order, strict=True)])
            images.append((share * alike).sum(0))
            labels.append(own[0])
        inputs = boxed(torch.cat(images).detach(), self.task)
        return replace(found, inputs=inputs, labels=torch.cat(labels))


@dataclass(frozen=True, eq=False)
class _Together:
    """The summand that keeps the epochs' images alike, whatever the order within each."""

    weight: float
    apart: Callable[[Tensor], Tensor]
    layers: tuple[str, ...] = ()

    def __call__(self, images: Tensor, inside: Mapping[str, Tensor]) -> Tensor:
        """How far the epochs are apart."""
        return self.apart(images)


def _planned(observation: Observation, steps: int) -> Observation:
    """The observation of a task with so many local steps."""
    given = seen_task(observation).plan
    plan = LocalPlan(steps, given.learning_rate, given.batch_size)
    return replace(observation, task=replace(observation.task, plan=plan))


def _guess(
    settings: FedAvgMatching, observation: Observation, generator: torch.Generator, steps: int
) -> _Guess:
    planned = _planned(observation, steps)
    copies = _epochs(settings, planned)
    if settings.labels == "joint":
        return _Guess(steps, copies, None)
    return _Guess(steps, copies, _deal(settings, planned, copies, generator))


def _epochs(settings: FedAvgMatching, observation: Observation) -> int:
    """How many epochs have images of their own."""
    plan = observation.task.plan
    size = plan.batch_size
    if size is None or settings.epochs == "shared" or size >= max(observation.cohort):
        return 1
    if any(examples % size for examples in observation.cohort):
        raise NotApplicable(
            f"minibatches of {size} do not divide {observation.cohort} examples: give the attack "
            'epochs = "shared"'
        )
    return math.ceil(plan.steps * size / min(observation.cohort))


def _deal(
    settings: FedAvgMatching, observation: Observation, copies: int, generator: torch.Generator
) -> Tensor:
    """Labels of all epochs, each client's in an order of their own in every one."""
    labels = observation.labels
    if labels is None or settings.labels == "inferred":
        labels = infer_labels(observation, generator)
        labels = labels[permutation(len(labels), generator).to(labels.device)]
    dealt = []
    for own in torch.split(labels, list(observation.cohort)):
        multiset = own.sort().values
        for _ in range(copies):
            dealt.append(multiset[permutation(len(own), generator).to(own.device)])
    return torch.cat(dealt)
