"""Weiss-Weinstein bounds: they hold for every release function, smooth or not.

The Cramer-Rao bounds need a noise-free release g(x) without discontinuities; gradients of ReLU and
max-pool networks have some. Here y = g(x) + N(0, Sigma), x ~ N(mean, C), g any measurable function.

Derivation. Let p be the density of (y, x), L(h) = sqrt(p(y, x + h u) / p(y, x)) for a unit vector u
and psi = L(h) - L(-h), e = u^T (R(y) - x). Shift x by half a step, with a(h) = exp(-h^2 u^T C^-1 u
/ 8) since sqrt(p(x - h u / 2) p(x + h u / 2)) = a(h) p(x) for a Gaussian prior:

    mu(h) = E L(h) = a(h) E_x exp(-|Sigma^-1/2 (g(x + h u / 2) - g(x - h u / 2))|^2 / 8).

The same shift gives E R(y) psi = 0 and E u^T x psi = -h mu(h), so E e psi = h mu(h); and E psi^2 =
2 (1 - mu(2h)). From E (e - c psi)^2 >= 0: E e^2 >= 2 c h mu(h) - 2 c^2 (1 - mu(2h)) for every c;
the best c gives h^2 mu(h)^2 / (2 (1 - mu(2h))), Weiss and Weinstein's bound at s = 1/2. Bounds for
orthonormal directions add up. For a given c the form is linear in overlaps in [0, 1] and at least
-2 c^2 for every image, so its mean has a lower confidence limit that holds for every release
(`bounded_mean`). Small steps tend to van Trees' 1 / u^T (J_D + C^-1) u if g is smooth.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from leakbound import check
from leakbound.bounds.bounded_mean import lower_limit
from leakbound.bounds.cramer_rao import ASSUMPTIONS, ErrorBound
from leakbound.bounds.priors import SMOOTH, Array, Prior, real, symmetric

EQUATION = (
    "Weiss and Weinstein, IEEE Trans. IT 31(5), 1985, s = 1/2: sum_j h_j^2 mu_j(h_j)^2 / (2 (1 - "
    "mu_j(2 h_j))) >= sum_j 2 c_j h_j mu_j(h_j) - 2 c_j^2 (1 - mu_j(2 h_j))"
)
NEEDS = (
    *ASSUMPTIONS[:2],
    "the noise is Gaussian; its covariance is public and does not depend on the images",
    "the overlaps are those of all that the attacker sees, at images drawn from this prior",
    "the images are Gaussian, as the prior says; the release need not be smooth or continuous",
)
_SCALES = (1.0, 0.7, 0.4, 0.2, 0.1)


def weiss_weinstein_bound(
    overlaps: Any,
    steps: Any,
    prior: Prior,
    *,
    directions: Any = None,
    confidence: float = 0.99,
) -> ErrorBound:
    """The Weiss-Weinstein bound from overlaps at sampled images, as a lower confidence limit.

    The limit is proven for every release and every n. The first images choose a step and a factor c
    for each direction. The next ones evaluate the bound, which is linear in the overlaps and so
    without bias. Blocks double: all images seen so far choose for as many new ones. For a linear
    release this costs 29 % of the bound at n = 64, 20 % at 96, 17 % at 128 and 11 % at 256.

    Args:
        overlaps: (n, r, S) in [0, 1], n >= 4 independent images x of the prior:
            exp(-|Sigma^-1/2 (g(x + h u / 2) - g(x - h u / 2))|^2 / 8) for direction u and step h.
        steps: (r, S), S >= 2, input units, each twice the one before.
        prior: a Gaussian one, or `repeat` of one.
        directions: (k, r) orthonormal columns in the prior's coordinates, chosen without these
            images; None for the coordinates themselves (r = k). Omitted ones count as error 0.
        confidence: one-sided, over the images.
    """
    known = _known(prior, directions)
    grid = _grid(steps, len(known))
    shares = _checked(overlaps, grid)
    lost = 1 - (1 - confidence) ** (1 / len(shares))
    # An eighth chooses first; each next block is as large as all before it.
    first = max(2, len(shares) // 8)
    gains = []
    ends = []
    while first < len(shares):
        choice = _choose(shares[:first], grid, known, lost)
        gains.append(_gains(shares[first : 2 * first], choice, grid, known))
        # The least gain that overlaps in [0, 1] allow, a little lower for rounding.
        ends.append(np.full(len(gains[-1]), -2 * (1 + 1e-9) * float((choice[1] ** 2).sum())))
        first *= 2
    limit = lower_limit(
        np.concatenate(gains),
        np.concatenate(ends),
        confidence=confidence,
    )
    return _bound(max(0.0, min(limit, prior.variance)) / prior.dimension, prior, confidence)


def default_steps(
    prior: Prior,
    count: int,
    *,
    largest: float = 2.8,
    directions: Any = None,
    information: Any = None,
) -> Array:
    """A grid of steps (r, count), each twice the one before, up to `largest` deviations.

    `information` (r,) estimates the whole u^T (J_D + C^-1) u from other images; a deviation is
    1 / sqrt of it. None takes the prior's. If the release is informative, the best step is near 1.4
    deviations; discontinuities need smaller ones. Each step costs two releases per image.
    """
    check.count(count=count)
    check.positive(largest=largest)
    if count < 2:
        raise ValueError(f"count is {count}; give at least 2")
    known = _known(prior, directions)
    whole = known if information is None else real("information", information, 1)
    if whole.shape != known.shape or whole.min() <= 0:
        raise ValueError(f"information is wrong; give {known.shape} numbers above 0")
    powers = 2.0 ** np.arange(1 - count, 1)
    return largest / np.sqrt(whole)[:, None] * powers


def least_informed(
    fisher: Any,
    prior: Prior,
    count: int,
) -> tuple[Array, Array]:
    """The directions (k, r) with the least information in a pilot J_D, and that information (r,).

    These are the eigenvectors of J_D + C^-1 with the smallest eigenvalues. They carry most of the
    error, and correlations between them do not weaken the sum of their scalar bounds. Any choice is
    valid if the images behind `fisher` are not those of the overlaps.
    """
    check.count(count=count)
    values, vectors = np.linalg.eigh(symmetric("fisher", fisher, prior.rank) + prior.matrix)
    if values[0] <= 0:
        raise ValueError(
            f"fisher plus the prior's has the eigenvalue {values[0]:.4g}; give one above 0"
        )
    return vectors[:, :count], values[:count]


def _values(
    means: Array,
    steps: Array,
    known: Array,
) -> tuple[Array, Array]:
    """The bound and its best c at every step with a successor, (r, S - 1) each."""
    first, rest = _moments(means, steps, known)
    step = steps[:, :-1]
    return (step * first) ** 2 / (2 * rest), step * first / (2 * rest)


def _moments(
    shares: Array,
    steps: Array,
    known: Array,
) -> tuple[Array, Array]:
    """mu(h) and 1 - mu(2h), (..., r, S - 1), without cancellation."""
    power = -known[:, None] * steps**2 / 8
    weight = np.exp(power)
    first = weight[:, :-1] * shares[..., :-1]
    rest = -np.expm1(power[:, 1:]) + weight[:, 1:] * (1 - shares[..., 1:])
    return first, rest


def _choose(
    fit: Array,
    steps: Array,
    known: Array,
    lost: float,
) -> tuple[Array, Array]:
    """The step's index and the factor c for each direction (r,), from a lower limit on the bound.

    Any choice is valid. A limit of equal values lies the share `lost` nearer to their low end, at
    which all overlaps are 0. Their spread costs about sqrt(2 lost) of the limit, as if all
    directions erred together. One image with overlaps 0 is added, for discontinuities that the
    images may not show.
    """
    joined = np.concatenate([fit, np.zeros_like(fit[:1])])
    values, factors = _values((1 - lost) * joined.mean(0), steps, known)
    first, rest = _moments(joined, steps, known)
    rows = np.arange(len(steps))
    best = np.full(len(steps), -np.inf)
    number = np.zeros(len(steps), dtype=int)
    factor = np.zeros(len(steps))
    for scale in _SCALES:
        c = scale * factors
        spread = (2 * c * steps[:, :-1] * first - 2 * c**2 * rest).std(0)
        score = values * scale * (2 - scale) - np.sqrt(2 * lost) * spread
        at = score.argmax(1)
        better = score[rows, at] > best
        best = np.where(better, score[rows, at], best)
        number = np.where(better, at, number)
        factor = np.where(better, c[rows, at], factor)
    return number, factor


def _gains(
    test: Array,
    choice: tuple[Array, Array],
    steps: Array,
    known: Array,
) -> Array:
    """Per image (n,), the linear form at the chosen steps and factors."""
    number, factor = choice
    rows = np.arange(len(steps))
    first, rest = _moments(test, steps, known)
    mine = (slice(None), rows, number)
    gain = 2 * factor * steps[rows, number] * first[mine] - 2 * factor**2 * rest[mine]
    return gain.sum(1)


def _known(prior: Prior, directions: Any) -> Array:
    """u^T C^-1 u along each direction; a prior that is not Gaussian is rejected.

    tr Cov >= tr J_P^-1 with equality only for Gaussians, so the two numbers identify them.
    """
    values = np.linalg.eigvalsh(prior.matrix)
    if values[0] <= 0 or abs((1 / values).sum() / prior.variance - 1) > 1e-6:
        raise ValueError(f"the prior {prior.name!r} is not Gaussian; take a GaussianPrior")
    if directions is None:
        return np.array(np.diagonal(prior.matrix))
    frame = real("directions", directions, 2)
    fits = len(frame) == prior.rank
    if not fits or np.abs(frame.T @ frame - np.eye(frame.shape[1])).max() > 1e-6:
        raise ValueError(f"directions {frame.shape} is wrong; give orthonormal ({prior.rank}, r)")
    return np.einsum("ir,ij,jr->r", frame, prior.matrix, frame)


def _grid(steps: Any, directions: int) -> Array:
    grid = real("steps", steps, 2)
    if len(grid) != directions or grid.shape[1] < 2:
        raise ValueError(f"steps has shape {grid.shape}; give ({directions}, S), S at least 2")
    if grid.min() <= 0 or np.abs(grid[:, 1:] / grid[:, :-1] - 2).max() > 1e-9:
        raise ValueError("steps must be above 0 and each twice the one before; see default_steps")
    return grid


def _checked(overlaps: Any, grid: Array) -> Array:
    shares = real("overlaps", overlaps, 3)
    if shares.shape[1:] != grid.shape:
        raise ValueError(f"overlaps {shares.shape} and steps {grid.shape} do not fit")
    if shares.min() < 0 or shares.max() > 1:
        raise ValueError(f"overlaps has {shares.min():.6g} to {shares.max():.6g}; give [0, 1]")
    if len(shares) < 4:
        raise ValueError(f"overlaps holds {len(shares)} images; give at least 4")
    return shares


def _bound(
    value: float,
    prior: Prior,
    confidence: float,
) -> ErrorBound:
    sentence = f"it holds with a confidence of {confidence:.4g} over the images drawn"
    assumptions = tuple(one for one in prior.assumptions if one != SMOOTH)
    return ErrorBound(
        name="weiss_weinstein",
        value=value,
        prior=prior.name,
        rests_on_prior=True,
        assumptions=(*NEEDS, *assumptions, sentence),
        equation=EQUATION,
        confidence=confidence,
    )
