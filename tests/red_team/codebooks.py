"""How many codewords an adversary sends: the law of the MAP rule, by quadrature."""

from __future__ import annotations

import numpy as np
from scipy import special

_NODES = np.linspace(-12.0, 12.0, 481)
_SHARES = np.exp(-(_NODES**2) / 2) / np.exp(-(_NODES**2) / 2).sum()


def success(noise, covered, weights):
    """Probability that argmax y_k + s² ln w_k is right and within the threshold.

    `covered` (M,) is the share of examples whose nearest codeword is k and within the threshold,
    `weights` (M,) the rule's share of codeword k.
    """
    values, place, counts = np.unique(weights, return_inverse=True, return_counts=True)
    logs, found = np.log(values), np.empty(len(values))
    for i, own in enumerate(logs):
        others = counts - (np.arange(len(counts)) == i)
        reach = _NODES[:, None] + 1 / noise + noise * (own - logs)
        found[i] = np.exp(special.log_ndtr(reach) @ others) @ _SHARES
    return float(covered @ found[place])


def choose(noise, errors, within, weights, sizes=None):
    """The number of codewords of the highest success on public examples: errors (n, M)."""
    most, best = errors.shape[1], (0, -1.0)
    for size in sizes or sorted({round(size) for size in np.geomspace(1, most, 24)}):
        nearest, reached = errors[:, :size].argmin(1), errors[:, :size].min(1) <= within
        covered = np.bincount(nearest[reached], minlength=size) / len(errors)
        found = success(noise, covered, weights[:size])
        best = max(best, (size, found), key=lambda pair: pair[1])
    return best
