"""The tensor method: infer features from the gradient of a head with random hidden units."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakbound import check
from leakbound.attacks.base import seen_task, summed
from leakbound.attacks.features.base import FoundFeatures
from leakbound.core import Exact, NotApplicable, Observation, Task
from leakbound.randomness import stream
from leakbound_reproductions.attacks.diagonalize import decompose
from leakbound_reproductions.attacks.fit import fit_features, noise_share
from leakbound_reproductions.attacks.head import (
    Head,
    find_head,
    head_layers,
    random_units,
    special_head,
)
from leakbound_reproductions.attacks.hermite import hermite_means, tensor_orders, usable_orders
from leakbound_reproductions.attacks.moments import Moments, Responses, moments, resolve_signs

GAPS = (1.25, 2.0)
CLOSE = 0.99
LEFT = 0.5
FITTED = 1.5
EXACT = 1e-8
MISFIT = 0.01
UNEXPLAINED = 0.5
CHANCE = 3


@dataclass(frozen=True)
class TensorMethod:
    """Decompose Hermite moments of the last layer's gradient into the features behind it.

    In a head A s(W z) with standard normal W, dL/dA_kj = sum_i r_ki s(w_j . z_i). Its moments with
    the Hermite tensors of w_j are sums of powers of the features z_i. Every class (and every row of
    the update) is a source. Sources are mixed to equal errors and decomposed jointly, over all
    orders up to 4 that the activation has. Clipping, local steps, pooling of several clients and
    other scalings change only r. Withheld coordinates are left out, and known noise sets the
    weights of the rest.

    Args:
        random: how many hidden units have random weights, the last ones. None: a malicious server
            makes all units random, and the attack uses those that it recognizes as such.
        restarts: random starts of the decomposition.
        fit: steps of a least-squares fit of the features to the responses, from the result of the
            moments; 0 is paper B's method.
        seed: the seed of the malicious weights.

    Assumptions: a malicious server sent the head, or the model has one with Gaussian weights and no
        biases; features of nearly collinear directions are not separated.

    Raises:
        NotApplicable: there is no such head, or too few random units, or too many examples for it.

    Source: Wang et al. 2023; Liu et al. 2025 (paper B), Sections 4 and B.4.
    """

    random: int | None = None
    restarts: int = 10
    fit: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.random is not None:
            check.count(random=self.random)
        check.count(restarts=self.restarts)
        check.non_negative(fit=self.fit)

    def plant(self, task: Task) -> Task:
        """The task with a head of random hidden units; unchanged if it has no head to change."""
        try:
            first, _ = head_layers(task)
        except NotApplicable:
            return task
        layer = task.model.get_submodule(first)
        assert isinstance(layer, nn.Linear)  # checked by head_layers
        random = min(self.random or layer.out_features, layer.out_features)
        return special_head(task, random, stream(self.seed, "tensor", "head"))

    def find(self, observation: Observation, generator: torch.Generator) -> FoundFeatures:
        """The features behind the update; NotApplicable if the update does not allow it."""
        observation = summed(observation)
        task = seen_task(observation)
        public = task.public if observation.auxiliary is None else observation.auxiliary
        head = find_head(task, observation.input_shape, None if public is None else public.inputs)
        chosen, spread = random_units(task, head, self.random)
        responses = _responses(observation, task, head, chosen, spread)
        whole = responses
        if observation.update.mask_private:
            # An entry sent as 0 for its size is still a function only of the unit's products with
            # the features, as Stein's lemma requires; the remaining entries are not a fair draw.
            whole = _responses(observation, task, head, chosen, spread, zeros=True)
        examples = observation.examples
        features = responses.units.shape[1]
        units = int((whole.weights > 0).any(0).sum())
        if examples > features:
            raise NotApplicable(f"{examples} examples in {features} features: they span them all")
        if units <= features:
            raise NotApplicable(
                f"the update shows {units} random hidden units; more than the {features} "
                "features are needed"
            )
        scale = spread * head.scale
        means = hermite_means(head.activation, scale)
        orders = usable_orders(means, scale)
        if examples > 1:
            tensor_orders(means, scale)
        elif not orders:
            raise NotApplicable("the activation is constant")
        seen = moments(whole, examples, orders)
        stacks = [t for t in seen.tensors if t.numel()]
        components, left = decompose(stacks, generator, restarts=self.restarts)
        components, signed = resolve_signs(seen, components, means, orders)
        vectors = (seen.span @ components).T
        fitted, rest = fit_features(responses, head.activation, scale * vectors, self.fit)
        problem = _problem(seen, vectors, left)
        if self.fit:
            vectors = nn.functional.normalize(fitted)
            if rest < FITTED * noise_share(responses) + EXACT:
                problem = None
        if problem is None:
            problem = _unexplained(observation, responses, rest, examples, bool(self.fit))
        if not signed:
            vectors = vectors * torch.where(vectors.sum(1, keepdim=True) < 0, -1.0, 1.0)
        if not bool(vectors.isfinite().all()):
            raise NotApplicable("the head's gradient has no finite moments")
        return FoundFeatures(vectors.to(task.parameters), head.first, signed, problem)


def fitted() -> TensorMethod:
    """The method with a fit: `features = "leakbound_reproductions.attacks.tensor:fitted"`.

    Example:
        >>> fitted().fit
        40
    """
    return TensorMethod(fit=40)


def partly_random() -> TensorMethod:
    """Paper B's method on paper B's head: 14,336 of 16,384 hidden units are random, without a fit.

    Example:
        >>> partly_random().random, partly_random().fit
        (14336, 0)
    """
    return TensorMethod(random=16_384 - 2_048)


def _responses(
    observation: Observation,
    task: Task,
    head: Head,
    chosen: Tensor,
    spread: float,
    *,
    zeros: bool = False,
) -> Responses:
    """The head's part of the update, a source for every class of every row. Withheld entries are
    left out, or count as the zeros that were sent.
    """
    update = observation.update

    def part(rows: Tensor) -> Tensor:
        each = [task.unflatten(row)[f"{head.second}.weight"][:, chosen] for row in rows]
        return torch.cat(each)

    factors = head.kept[chosen].to(update.rows.device)
    alive = factors != 0
    values = part(update.rows) / torch.where(alive, factors, 1.0).to(update.rows)
    seen = alive.expand_as(values)
    if update.mask is not None and observation.threat.defense_known and not zeros:
        seen = seen & part(update.mask)
    noise = observation.noise_variance
    if noise is not None:
        noise = part(noise) / torch.where(alive, factors, 1.0).square()
    if not bool(values.isfinite().all()):
        raise NotApplicable("the head's gradient is not finite")
    used = (values * seen).abs().amax(1) > 0
    if not bool(used.any()):
        raise NotApplicable("the head's gradient is zero")
    weight = task.tensors()[f"{head.first}.weight"][chosen].double()
    noise = None if noise is None else noise[used]
    return Responses.of(values[used], weight / spread, seen=seen[used], noise=noise)


def _problem(seen: Moments, vectors: Tensor, left: float) -> str | None:
    count = len(vectors)
    if any(gap < least for gap, least in zip(seen.gaps, GAPS, strict=True)):
        return f"fewer than {count} features exceed the sampling error of the moments"
    cosine = (vectors @ vectors.T).abs()
    if count > 1 and float((cosine - torch.eye(count).to(cosine)).max()) > CLOSE:
        return "two features are nearly collinear: they cannot be separated"
    if left > LEFT:
        return "the moments are not a sum of powers of so few features"
    return None


def _unexplained(
    observation: Observation, responses: Responses, rest: float, examples: int, fitted: bool
) -> str | None:
    """Why the features are not to be trusted, from the share of the responses that they leave:
    features of pure noise explain about one part of it for each of their numbers.
    """
    units = int((responses.weights > 0).sum())
    numbers = examples * (responses.units.shape[1] + len(responses.values))
    most = (MISFIT if fitted else UNEXPLAINED) + noise_share(responses)
    exact = isinstance(observation.update.law, Exact) and observation.task.plan.steps == 1
    if rest > 1 - CHANCE * numbers / units or (exact and rest > most):
        return "the features found do not explain the head's gradient"
    return None
