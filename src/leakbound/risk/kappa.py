"""The prior-only success kappa: of a data set, and under a prior taken from it.

kappa is the probability that the prior-only baseline meets the criterion. No noise brings any
attacker's success below it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from leakbound.assess.criterion import Criterion
from leakbound.bounds import identification, record_priors
from leakbound.bounds.distances import ColumnMisses, Distance, GivenMetric, SquaredError
from leakbound.bounds.language import BigramText
from leakbound.bounds.law import positive, single
from leakbound.bounds.record_priors import Baseline, flat_images, largest_match_rate
from leakbound.core import Batch, NotApplicable
from leakbound.domains import Domain
from leakbound.risk.target import Target

TIE = 1e-12
"""Errors that exceed eta by at most this part count as matched: rounding."""


@dataclass(frozen=True)
class BaselineMatches:
    """Shares of a data set's examples within an MSE of eta of prior-only baselines.

    Attributes:
        examples: number of examples checked.
        constant: the largest share that one constant image matches, and
        value: that constant.
        mean: the share that the mean image matches.
        example: the largest share of the other examples that one example matches. An attacker who
            does not have this example cannot use it, so it rejects no target.
    """

    examples: int
    constant: float
    value: float
    mean: float
    example: float = 0.0

    @property
    def most(self) -> float:
        """The largest of the shares."""
        return max(self.constant, self.mean, self.example)


def distance_of(domain: Domain) -> Distance:
    """How bounds measure the distance of a domain, for examples as rows (n, values).

    Example:
        >>> from leakbound.domains import of_shape
        >>> type(distance_of(of_shape((1, 8, 8)))).__name__
        'SquaredError'
    """
    if domain.parts is not None:
        return ColumnMisses(
            lambda rows: domain.coded(_tensor(rows)).numpy(),
            domain.parts,
            domain.noun,
            domain.metric,
        )
    if domain.distance_is_rmse:
        return SquaredError()

    def of(*rows: NDArray[Any]) -> NDArray[Any]:
        a, b = (_tensor(own) for own in np.broadcast_arrays(*rows))
        one, two = (own.reshape(-1, *domain.shape) for own in (a, b))
        return np.asarray(domain.distance(one, two)).reshape(a.shape[:-1])

    return GivenMetric(of, domain.noun)


def _tensor(rows: NDArray[Any]) -> torch.Tensor:
    return torch.tensor(np.ascontiguousarray(rows))


def level_of(criterion: Criterion) -> float:
    """The largest distance, as bounds measure it, that meets a criterion."""
    return criterion.error if criterion.domain.distance_is_rmse else criterion.within


def baseline_matches(images: ArrayLike, eta: float) -> BaselineMatches:
    """Count what the best constant image, the mean image and the best example match.

    Shapes: `images` (n, ...); the trailing sizes are one example's values.

    Raises:
        ValueError: there are no images, values are not finite, or eta is 0 or less.

    Example:
        >>> found = baseline_matches([[0.0, 0.0], [0.05, 0.05], [1.0, 0.0]], 0.0025)
        >>> round(found.constant, 3), found.value, found.mean, found.example
        (0.667, 0.025, 0.0, 0.5)
    """
    flat = flat_images(images)
    level = float(single("eta", positive("eta", eta))) * (1 + TIE)
    middle = flat.mean(1)
    variance = flat.var(1)
    mean = float((np.square(flat - flat.mean(0)).mean(1) <= level).mean())
    example = largest_match_rate(flat, level)
    inside = variance <= level
    if not inside.any():
        return BaselineMatches(len(flat), 0.0, float(middle.mean()), mean, example)
    half = np.sqrt(level - variance[inside])
    low = middle[inside] - half
    high = middle[inside] + half
    starts = np.sort(low)
    covered = np.searchsorted(starts, starts, "right") - np.searchsorted(np.sort(high), starts)
    best = int(np.argmax(covered))
    holds = (low <= starts[best]) & (high >= starts[best])
    value = float((starts[best] + high[holds].min()) / 2)
    return BaselineMatches(len(flat), float(covered[best]) / len(flat), value, mean, example)


def row_matches(rows: ArrayLike, domain: Domain, level: float) -> BaselineMatches:
    """Count what the domain's own prior-only baseline and the best of the first examples match.

    For rows (n, values) of a table or a series; `mean` is the share of the baseline.
    """
    flat = flat_images(rows)
    distance = distance_of(domain)
    public = torch.tensor(flat, dtype=domain.dtype).reshape(-1, *domain.shape)
    blind = domain.blind(public).flatten().double().numpy()
    mean = float((distance.paired(np.broadcast_to(blind, flat.shape), flat) <= level).mean())
    few = flat[: record_priors.MOST]
    reached = (distance.apart(few, few) <= level).sum(1).max() - 1
    return BaselineMatches(len(flat), 0.0, 0.0, mean, float(reached) / max(1, len(few) - 1))


def refuse_matched(found: BaselineMatches, target: Target) -> None:
    """Reject a target that a prior-only baseline meets more often than is accepted."""
    typical = "the mean image of the data" if target.goal is None else "the most typical example"
    what, share = max(
        (f"the constant image {found.value:.3g}", found.constant),
        (typical, found.mean),
        key=lambda pair: pair[1],
    )
    if share > target.gamma:
        raise ValueError(
            f"target is {target}, but {what} matches {share:.2%} of the {found.examples} examples "
            f"without any update: no amount of noise helps; {target.harder} or accept a larger "
            "probability"
        )


def of_public(
    public: Batch | None,
    kind: str,
    components: int,
    labels_known: bool,
    eta: float,
    domain: Domain | None = None,
) -> tuple[Baseline, float]:
    """A prior taken from public examples, and log kappa under it at an MSE of eta, or a level.

    Of text, it is the bigram model, whatever the kind.

    A known label is not part of the release, so candidates may differ by class. A model of images
    may have a much smaller kappa than real images. The share of the others (of its class) that one
    public example matches has no such error, and the largest such share errs upwards.
    """
    if public is None or public.size < record_priors.MIN_EXAMPLES:
        raise NotApplicable(
            f"the probability needs at least {record_priors.MIN_EXAMPLES} public examples for a "
            "prior"
        )
    if domain is not None and domain.vocabulary is not None:
        text = BigramText.from_sequences(public.inputs.cpu().numpy(), domain.vocabulary)
        return text, float(text.log_kappa(eta))
    flat = public.inputs.flatten(1).double().cpu().numpy()
    labels = public.labels.cpu().numpy()
    by_class = kind == "gaussian" and labels_known  # one Gaussian per class
    try:
        prior = _fitted("mixture" if by_class else kind, flat, labels, components)
    except ValueError as error:  # such as a class with one public example
        raise NotApplicable(f"no prior can be taken from the public examples: {error}") from None
    groups = [flat[labels == y] for y in np.unique(labels)] if labels_known else [flat]
    known = float(
        np.asarray(
            record_priors.EmpiricallyBoundedPrior(prior, [*groups]).log_kappa(np.array([eta]))
        )[0]
    )
    if isinstance(prior, record_priors.Gallery) and labels_known:
        shares = [len(group) / len(flat) for group in groups]
        each = [np.asarray(record_priors.Gallery(g).log_kappa(np.array([eta])))[0] for g in groups]
        known = max(known, float(np.log(np.dot(shares, np.exp(each)))))
    return prior, min(0.0, known)


def _fitted(kind: str, flat: NDArray[Any], labels: NDArray[Any], components: int) -> Baseline:
    if kind == "gaussian":
        return record_priors.GaussianImages.from_samples(flat, components=components)
    if kind == "mixture":
        return record_priors.Mixture.from_samples(flat, labels=labels, components=components)
    return record_priors.Gallery(flat)


def after_copy(noise_std: float, prior: Baseline, *, eta: float, baseline: float) -> float:
    """Log of the largest probability that one candidate from x + w comes within eta of x.

    Gaussians: given the copy and its part, x is Gaussian with a covariance that does not depend on
    the copy, so the largest mass of a ball is known. Gallery: no image is farther from the middle
    than the farthest, in units of noise.
    """
    levels = np.array([eta])
    if isinstance(prior, record_priors.Mixture):
        square = noise_std**2
        left: Callable[[Any], Any] = lambda v: v * (square / (v + square))  # noqa: E731
        parts = [
            replace(part, variances=left(part.variances), rest=left(part.rest))
            for part in prior.parts
        ]
        return float(np.asarray(record_priors.Mixture(parts, prior.weights).log_kappa(levels))[0])
    assert isinstance(prior, record_priors.Gallery)  # there is no other kind
    farthest = float(np.linalg.norm(prior.images - prior.images.mean(0), axis=1).max())
    return float(identification.gaussian.log(noise_std / farthest, log_kappa=baseline))
