"""How often a codebook attack identifies the right codeword: an attained success, not a bound.

A malicious server's model answers with the codeword nearest to an example. Its gradient is
C onehot(k), and the update shows y = onehot(k) + s z in units of the clip norm C, where z is
standard normal and s is the noise multiplier. An example is reconstructed if its nearest codeword
lies within the threshold and is identified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from leakbound.bounds.law import Array, Scope, non_negative, one, positive, scoped, whole

__all__ = ["choose", "identified", "success"]

_NODES = np.linspace(-12.0, 12.0, 481)
# The trapezoidal rule: its relative error is below 1e-9 at M = 10^6; 256 Gauss-Hermite nodes give
# 2e-4.
_SHARES = np.exp(-(_NODES**2) / 2) / np.exp(-(_NODES**2) / 2).sum()
ATTAINED = Scope(
    covers="attained",
    attackers="one working attack: a malicious server that sends a codebook",
    prior="examples that fall on the codewords with the given shares",
    known="the clip norm and the noise multiplier; one example per update, one update",
    not_said="a bound: other attackers may do better; nor the result for one given example",
    equation="this project; Fano-style codebook",
)


@scoped(ATTAINED)
def identified(noise_multiplier: ArrayLike, *, codewords: ArrayLike) -> Any:
    """Probability that the largest of M coordinates is the right one: E Phi(z + 1/s)^(M - 1).

    This decoder is the best if all codewords are equally likely. Arguments broadcast.

    Args:
        noise_multiplier: s, noise standard deviation / clip norm, above 0 and finite.
        codewords: M, the number of codewords that the server sent.

    Raises:
        ValueError: an argument is outside its range.

    Source: this project; Fano-style codebook (the law of orthogonal signals).

    Example:
        >>> np.round(identified([0.3, 1.0], codewords=10_000), 4)
        array([0.3108, 0.003 ])
    """
    sigma, count = positive("noise_multiplier", noise_multiplier), whole("codewords", codewords)
    reach = _NODES + 1 / sigma[..., None]
    return one(np.exp((count[..., None] - 1) * special.log_ndtr(reach)) @ _SHARES)


@scoped(ATTAINED)
def success(
    noise_multiplier: float, *, covered: ArrayLike, weights: ArrayLike | None = None
) -> float:
    """Probability that the codebook reconstructs an example, with the MAP rule.

    The rule is argmax y_k + s^2 ln w_k. A wrong codeword may also lie within the threshold; this is
    not counted, so the result is a lower bound.

    Args:
        noise_multiplier: s, noise standard deviation / clip norm, above 0 and finite.
        covered: (M,) share of all examples whose nearest codeword is k and within the threshold.
        weights: (M,) above 0, the rule's share of codeword k, up to a common factor. None: equal
            weights, for which the success is sum(covered) * identified(s, codewords=M).

    Raises:
        ValueError: shares are negative or sum to more than 1, or the shape of weights differs.

    Source: this project; Fano-style codebook.

    Example:
        >>> round(success(0.5, covered=[0.1, 0.05, 0.05]), 4)
        0.1732
        >>> round(success(0.5, covered=[0.1, 0.05, 0.05], weights=[2, 1, 1]), 4)
        0.1746
    """
    mass = np.atleast_1d(non_negative("covered", covered))
    if mass.sum() > 1 + 1e-9:
        raise ValueError(f"covered sums to {mass.sum():.6g}; shares sum to 1 at most")
    if weights is None:
        return float(mass.sum() * identified(noise_multiplier, codewords=len(mass)))
    taken = np.atleast_1d(positive("weights", weights))
    if mass.shape != taken.shape or mass.ndim != 1:
        raise ValueError(
            f"covered has shape {mass.shape} and weights {taken.shape}; give equal shapes (M,)"
        )
    return float(mass @ _named(float(positive("noise_multiplier", noise_multiplier)), taken))


def _named(noise: float, weights: Array) -> Array:
    """(M,) probability that codeword k is identified if it is right; equal for equal weights."""
    values, place, counts = np.unique(weights, return_inverse=True, return_counts=True)
    logs, found = np.log(values), np.empty(len(values))
    for i, own in enumerate(logs):
        others = counts - (np.arange(len(counts)) == i)
        reach = _NODES[:, None] + 1 / noise + noise * (own - logs)
        found[i] = np.exp(special.log_ndtr(reach) @ others) @ _SHARES
    return found[place]


def choose(
    noise_multiplier: float,
    *,
    errors: ArrayLike,
    within: float,
    weights: ArrayLike | None = None,
    sizes: Sequence[int] | None = None,
) -> tuple[int, float]:
    """The number of codewords to send, and their success on the given public examples.

    More codewords cover more examples, but noise confuses more codewords. The choice needs public
    examples only. They must not be those that made the codewords, which cover themselves.

    Args:
        noise_multiplier: s, noise standard deviation / clip norm, above 0 and finite.
        errors: (n, M) mean squared error of each codeword, best first, for each public example.
        within: the criterion's largest mean squared error, in the units of `errors`.
        weights: (M,) as in `success`.
        sizes: the numbers of codewords to try; None: 24 from 1 to M, in geometric steps.

    Returns:
        The number of codewords and its success. As the largest of several, this success is
        slightly too high: state a limit from examples that took no part in the choice.

    Raises:
        ValueError: errors is not a matrix, or a size is not between 1 and M.

    Source: this project; Fano-style codebook.

    Example:
        >>> public = np.array([[0.0, 0.9, 0.9], [0.9, 0.0, 0.9], [0.0, 0.9, 0.9], [0.9, 0.9, 0.5]])
        >>> choose(0.3, errors=public, within=0.1)[0], choose(3.0, errors=public, within=0.1)[0]
        (2, 1)
    """
    table = np.asarray(errors, float)
    if table.ndim != 2 or 0 in table.shape:
        raise ValueError(f"errors has shape {table.shape}; give (examples, codewords)")
    most = table.shape[1]
    taken = np.ones(most) if weights is None else np.asarray(weights, float)
    if sizes is None:
        sizes = sorted({round(size) for size in np.geomspace(1, most, 24)})
    best = (0, -1.0)
    for size in sizes:
        if not 1 <= size <= most:
            raise ValueError(f"sizes holds {size}; give numbers from 1 to {most}")
        nearest, reached = table[:, :size].argmin(1), table[:, :size].min(1) <= within
        covered = np.bincount(nearest[reached], minlength=size) / len(table)
        found = success(noise_multiplier, covered=covered, weights=taken[:size])
        best = max(best, (size, found), key=lambda pair: pair[1])
    return best
