"""How much noise each coordinate gets, and which ones are withheld: paper A's optima.

s is the sensitivity ||dg_i/dx||² of every coordinate (P,), g² its squared gradient, or the
expectations of both over public data. Under noise of variances v the attacker's Fisher information
has the trace Σ s/v, and the loss grows by Σ g² v to second order (U2, for a step of 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from leakbound import check

__all__ = [
    "keep_by_rate",
    "keep_by_utility",
    "prune_order",
    "shape",
    "with_floor",
    "with_rms",
    "with_utility",
]

SMALLEST = 1e-8
LARGEST = 1e6
RULES = ("utility", "energy", "algorithm_1")
Spans = list[tuple[int, int]]


def shape(
    s: Tensor,
    g2: Tensor,
    rule: str,
    spans: Spans | None = None,
) -> Tensor:
    """Variances (P,) up to a factor.

    If g is near 0 the ratio is capped: |g| counts as at least 1e-8, the ratio as at most 1e6. If no
    coordinate is sensitive, for instance because a clamp saturates all, all get the same variance.

    Args:
        s: sensitivity, (P,).
        g2: squared gradient, (P,).
        rule: "utility" is sqrt(s / g²), with the least information at equal U2 (eq. 7). "energy" is
            sqrt(s), with the least information at equal RMS noise. "algorithm_1" is s / |g|, as
            that algorithm is printed: optimal for neither, included for comparison.
        spans: (start, stop) of every tensor, for one variance per tensor from the norms within it.

    Source: Chen, Gursoy and Lei, theorem 3.5, eq. 7 and appendix B; the energy rule is
    Cauchy-Schwarz at a fixed trace.

    Example:
        >>> shape(torch.tensor([4.0, 4.0]), torch.tensor([1.0, 4.0]), "utility").tolist()
        [2.0, 1.0]
    """
    check.one_of(RULES, rule=rule)
    if spans is not None:
        s, g2 = (torch.cat([v[a:b].sum().expand(b - a) for a, b in spans]) for v in (s, g2))
    slope = root(g2).clamp_min(SMALLEST)
    if rule == "utility":
        ratio = (root(s) / slope).clamp_max(LARGEST)
    elif rule == "energy":
        ratio = root(s)
    else:
        ratio = (s / slope).clamp_max(LARGEST)
    return ratio if bool((ratio > 0).any()) else torch.ones_like(ratio)


def root(values: Tensor) -> Tensor:
    """Square roots whose slope at 0 is 0, not infinite; attackers need the slope."""
    some = values > 0
    # Also inside: the slope of the branch not taken must be finite, as it is multiplied by 0.
    return torch.where(some, torch.where(some, values, 1.0).sqrt(), 0.0)


def with_rms(ratio: Tensor, noise_std: float) -> Tensor:
    """Variances in proportion to `ratio` with mean noise_std²: paper A's noise scale.

    Source: the paper's released code (docs/errata.md, A9).
    """
    return ratio * (noise_std**2 / ratio.mean())


def with_utility(
    ratio: Tensor,
    g2: Tensor,
    utility_std: float,
) -> Tensor:
    """Variances in proportion to `ratio` whose U2 is that of equal noise, utility_std² Σ g².

    If the gradient is zero no noise costs anything, and the RMS noise is `utility_std`.

    Source: Chen, Gursoy and Lei, definition of U2 and theorem 3.5.
    """
    cost = (ratio * g2).sum()
    total = g2.sum()
    if not float(cost) > 0:
        return with_rms(ratio, utility_std)
    return ratio * (utility_std**2 * total / cost)


def with_floor(
    ratio: Tensor,
    s: Tensor,
    error_floor: float,
    *,
    coordinates: int,
    prior_variance: float,
) -> Tensor:
    """Variances in proportion to `ratio` that give every attacker at least a mean squared error.

    The mean is over images drawn from a Gaussian prior with `prior_variance` per pixel, and over
    noise.

    Args:
        ratio: variances up to a factor, (P,).
        s: expected sensitivity, (P,).
        error_floor: the mean squared error per pixel to guarantee; it must be below
            `prior_variance`, the error of the prior-only baseline.
        coordinates: number of hidden pixels, over all images of the batch.
        prior_variance: the mean variance of a pixel in public data.

    Source: Chen, Gursoy and Lei, theorem 3.2, corrected (docs/errata.md, A1). The lower bound per
    pixel is 1 / (tr J_D / coordinates + 1 / prior_variance), with tr J_D = Σ s / v.
    """
    if not 0 < error_floor < prior_variance:
        raise ValueError(
            f"error_floor is {error_floor!r}; give a value that noise can reach, above 0 and below "
            f"{prior_variance:.4g}, the error of the prior-only baseline"
        )
    allowed = coordinates * (1 / error_floor - 1 / prior_variance)
    active = ratio > 0
    information = (s[active] / ratio[active]).sum()
    if not float(information) > 0:
        return ratio
    return ratio * (information / allowed)


def prune_order(s: Tensor, g2: Tensor) -> Tensor:
    """K = s / g² (P,): the largest is withheld first; infinite if g is 0.

    Source: Chen, Gursoy and Lei, theorem 3.6 (the long version's "smallest" is an error).
    """
    least = 1e-300 if g2.dtype == torch.float64 else 1e-37
    return torch.where(g2 > 0, s / g2.clamp_min(least), torch.inf)


def keep_by_rate(order: Tensor, rate: float) -> Tensor:
    """All but the floor(rate · P) coordinates of largest order (P,); of ties, the last go."""
    gone = int(rate * len(order) + 1e-9)  # 0.29 * 100 < 29 in floats
    keep = torch.ones_like(order, dtype=torch.bool)
    keep[torch.sort(order, stable=True).indices[len(order) - gone :]] = False
    return keep


def keep_by_utility(
    order: Tensor,
    g2: Tensor,
    share: float,
) -> tuple[Tensor, int, float]:
    """The kept coordinates for a `share` of first-order utility Σ g²: a fractional knapsack.

    Returns:
        The kept coordinates (P,), the index of the coordinate in between, and the probability that
        this one is kept.

    Source: Chen, Gursoy and Lei, theorem 3.6 (mixed defense).

    Example:
        >>> order, g2 = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 2.0, 2.0])
        >>> keep_by_utility(order, g2, 0.5)
        (tensor([ True, False, False]), 1, 0.5)
    """
    ranked = torch.sort(order, stable=True).indices
    # In float64: a running sum of many small terms loses digits in float32.
    worth = g2.double()[ranked]
    total = worth.cumsum(0)
    target = share * float(total[-1])
    keep = torch.zeros_like(order, dtype=torch.bool)
    place = min(int((total < target).sum()), len(order) - 1)
    keep[ranked[:place]] = True
    before = float(total[place - 1]) if place else 0.0
    utility = float(worth[place])
    chance = min(1.0, (target - before) / utility) if utility > 0 else 0.0
    return keep, int(ranked[place]), chance
