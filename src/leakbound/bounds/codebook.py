"""How often a codebook attack identifies the right codeword: an attained success, not a bound.

A malicious server's model answers with the codeword nearest to an example. Its gradient is
C onehot(k), and the update shows y = onehot(k) + s z in units of the clip norm C, where z is
standard normal and s is the noise multiplier. An example is reconstructed if its nearest codeword
lies within the threshold and is identified.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from leakbound.bounds.law import one, positive, whole

__all__ = ["identified"]

_NODES = np.linspace(-12.0, 12.0, 481)
# The trapezoidal rule: its relative error is below 1e-9 at M = 10^6; 256 Gauss-Hermite nodes give
# 2e-4.
_SHARES = np.exp(-(_NODES**2) / 2) / np.exp(-(_NODES**2) / 2).sum()


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
    sigma = positive("noise_multiplier", noise_multiplier)
    count = whole("codewords", codewords)
    reach = _NODES + 1 / sigma[..., None]
    return one(np.exp((count[..., None] - 1) * special.log_ndtr(reach)) @ _SHARES)
