"""Penalties on unlikely candidates: smoothness, statistics, features, size.

A term is a penalty on the images and on the inputs of some layers of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from leakbound._util import user_code
from leakbound.attacks.blind import public_examples
from leakbound.attacks.features.base import FoundFeatures
from leakbound.attacks.matching.distances import TINY, total_variation
from leakbound.attacks.matching.settings import MatchingSettings
from leakbound.client import batch_norms, batch_statistics, statistics_of
from leakbound.core import NotApplicable, Observation, Statistics, Task

# Up to this many examples, features are matched one by one; see `feature_form`.
FEW = 8
# Public images that give the statistics of batch norms.
PUBLIC = 512


class Term(Protocol):
    """One term of the objective."""

    @property
    def weight(self) -> float: ...

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers whose inputs it uses."""
        ...

    def __call__(self, images: Tensor, inside: Mapping[str, Tensor]) -> Tensor:
        """The penalty for images (N, *S); `inside` holds the inputs of `layers` for them."""
        ...


@dataclass(eq=False)
class Smooth:
    """Total variation; its weight falls from stage to stage if the search has stages."""

    weight: float
    layers: tuple[str, ...] = ()

    def __call__(self, images: Tensor, inside: Mapping[str, Tensor]) -> Tensor:
        return total_variation(images)


@dataclass(frozen=True, eq=False)
class Penalty:
    """A function of the images alone, such as the distance to the user's denoiser's answer."""

    weight: float
    penalty: Callable[[Tensor], Tensor]
    layers: tuple[str, ...] = ()

    def __call__(self, images: Tensor, inside: Mapping[str, Tensor]) -> Tensor:
        value = self.penalty(images)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError("the prior returned no single number; return a tensor of shape ()")
        return value.reshape(())


@dataclass(frozen=True, eq=False)
class SameStatistics:
    """Sum over batch norms of the distances between means and between variances, with the factor
    `first` on the first (Yin et al. 2021, eq. 8; paper B, section 4.2). For several clients, the
    statistics are the mean of each client's own, as are the given ones.
    """

    weight: float
    known: Mapping[str, Statistics]
    first: float = 1.0
    cohort: tuple[int, ...] = ()

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(self.known)

    def __call__(self, images: Tensor, inside: Mapping[str, Tensor]) -> Tensor:
        total = images.new_zeros(())
        factor = self.first
        for name, (mean, variance) in self.known.items():
            parts = torch.split(inside[name], list(self.cohort)) if self.cohort else (inside[name],)
            means, variances = zip(*map(statistics_of, parts), strict=True)
            off_mean = torch.stack(means).mean(0) - mean
            off_variance = torch.stack(variances).mean(0) - variance
            total = total + factor * (_length(off_mean) + _length(off_variance))
            factor = 1.0
        return total


@dataclass(frozen=True, eq=False)
class SameFeatures:
    """Distance of the candidate's features from those that another method found (paper B, 4.2).

    "cosine": the mean over examples of 1 - cos² (1 - cos if the signs are known), with found
    features assigned to candidates one to one. "span": the mean share of a candidate's feature
    vector that lies outside the span of the found ones.
    """

    weight: float
    features: FoundFeatures
    form: str = "cosine"

    @property
    def layers(self) -> tuple[str, ...]:
        return (self.features.layer,)

    def __call__(self, images: Tensor, inside: Mapping[str, Tensor]) -> Tensor:
        vectors = inside[self.features.layer].flatten(1)
        square = vectors.square().sum(1, keepdim=True)
        vectors = vectors / square.clamp_min(TINY**2).sqrt()
        if self.form == "span":
            basis = self.features.basis.to(vectors)
            return 1 - (vectors @ basis).square().sum(1).mean()
        cosines = vectors @ self.features.vectors.to(vectors).T
        likeness = cosines if self.features.signed else cosines.square()
        rows, columns = linear_sum_assignment(
            # NaN counts as worse than every cosine.
            -likeness.detach().nan_to_num(-9.0).cpu().double().numpy()
        )
        return 1 - likeness[torch.as_tensor(rows), torch.as_tensor(columns)].mean()


def statistics(
    kind: str,
    observation: Observation,
    task: Task,
) -> Mapping[str, Statistics]:
    """The assumed statistics of the batch in every batch norm: "exact" (as given), "proxy" (of
    public images), "running" (of the model as sent), or "best" (the first of these three that is
    available, otherwise none).
    """
    norms = batch_norms(task)
    if not norms:
        return {}
    if kind in ("exact", "best") and observation.statistics is not None:
        return observation.statistics
    if kind == "exact":
        raise NotApplicable("the statistics of the batch are not known: statistics_known is false")
    public = public_examples(observation)
    if kind in ("proxy", "best") and public is not None:
        with torch.no_grad():
            return batch_statistics(task, public.inputs[:PUBLIC].to(task.parameters))
    if kind == "proxy":
        raise NotApplicable("there are no public images to take the statistics from")
    running = {name: _running(task, name) for name in norms}
    known = {name: pair for name, pair in running.items() if pair is not None}
    if len(known) == len(norms):
        return known
    if kind == "best":
        return {}
    raise NotApplicable("no data has passed the batch norms: there are no running statistics")


def terms_for(
    settings: MatchingSettings,
    observation: Observation,
    task: Task,
    features: FoundFeatures | None,
    generator: torch.Generator,
) -> list[Term]:
    """The terms other than the total variation whose weights are not zero."""
    terms = list[Term]()
    if settings.size:
        middle = sum(task.input_range) / 2
        # Yin et al. 2021, the l2 prior.
        terms.append(Penalty(settings.size, lambda images: (images - middle).square().mean()))
    if settings.batch_norm:
        known = statistics(settings.statistics, observation, task)
        if known:
            first = settings.first_norm
            cohort = observation.cohort
            terms.append(SameStatistics(settings.batch_norm, known, first, cohort))
    if settings.prior and settings.prior_weight:
        build = user_code.find("prior", settings.prior)
        with user_code.seeded(generator):
            penalty = build(input_shape=observation.input_shape)
        terms.append(Penalty(settings.prior_weight, penalty))
    if features is not None:
        form = settings.feature_form
        if form == "best":  # a span of as many directions as the layer has is uninformative
            form = "cosine" if observation.examples <= FEW else "span"
        terms.append(SameFeatures(settings.feature_weight, features, form))
    return terms


def _running(task: Task, name: str) -> Statistics | None:
    """The running statistics of a norm; None if there are none, or only the initial ones."""
    mean = task.buffers.get(f"{name}.running_mean")
    variance = task.buffers.get(f"{name}.running_var")
    if mean is None or variance is None or not bool(mean.any() | (variance != 1).any()):
        return None
    return mean, variance


def _length(x: Tensor) -> Tensor:
    return x.square().sum().clamp_min(TINY**2).sqrt()
