"""How many bits an update leaks about the data: paper D's theorem 4.1, and two bounds for it.

Bounds for all attackers: `finite_precision` and `gaussian_channel`; what so many bits can achieve
is in `distortion`. `printed` and `corrected` are paper D's formula and its
repair; they bound nothing, as they add the entropy of a mask to differential entropies. All in
bits, but for `printed`. Sigma is the covariance of one example's gradient given what was sent
before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from leakbound import check

Array = NDArray[Any]  # of float64
MASKS = {
    "fixed count": "every round sends exactly `kept` coordinates, whichever",
    "fixed share": "every round sends `kept` coordinates on average, whichever",
    "public": "which coordinates are sent does not depend on the data given the past",
}
"""Kinds of masks, with the assumption that each makes."""
MASK_TERMS = ("squared", "linear", "ceiling")
PROXY = "it depends on the gradient's unit and may be negative: it bounds nothing"
FORMAL = (
    PROXY,
    "Sigma is regular on the d* coordinates counted, and a sample's estimate is the true one",
    "examples are independent draws; the rate is the same in every round",
    "differential entropies may be added to and dropped like those of a mask (they may not)",
)
BLIND = "attackers see nothing of the data but what is sent"
CHANNEL = (
    BLIND,
    "Sigma is that of the population, not a sample's estimate",
    "given the earlier rounds, the examples of a batch are independent draws, or batch_size is 1",
    "Sigma, or its trace and rank, is an upper bound on the true one, on average over the past",
    "the noise is Gaussian, independent of all else, fresh in each round, at least noise_std",
)
_2_PI_E = 2 * math.pi * math.e


@dataclass(frozen=True)
class Leakage:
    """An amount of information, with what may be said with it.

    Attributes:
        value: in `unit`.
        mask: the part of it that the mask leaks.
        covers: "all" attackers for a bound on the mean over the population, "none" for a proxy.
        assumptions: checkable sentences.
    """

    value: float
    unit: str
    mask: float
    covers: str
    assumptions: tuple[str, ...]


def binary_entropy(rate: ArrayLike) -> Any:
    """Bits of one coin of this probability.

    Example:
        >>> round(binary_entropy(0.3), 4)
        0.8813
    """
    p = np.asarray(rate, float)
    bits = (special.entr(p) + special.entr(1 - p)) / math.log(2)
    return float(bits) if p.ndim == 0 else bits


def mask_entropy(coordinates: ArrayLike, kept: ArrayLike) -> Any:
    """log2 C(coordinates, kept): the most that a mask with a fixed number of ones leaks, in bits.

    Raises:
        ValueError: more kept than there are.

    Example:
        >>> round(mask_entropy(10, 3), 4)  # 120 masks
        6.9069
    """
    d = np.asarray(coordinates, float)
    k = np.asarray(kept, float)
    _fewer(d, k)
    if np.any(k != np.floor(k)):
        raise ValueError(f"kept is {k[k != np.floor(k)].flat[0]:g}; give a whole number")
    nats = -np.log1p(d) - special.betaln(k + 1, d - k + 1)
    bits = np.maximum(nats, 0.0) / math.log(2)
    return float(bits) if bits.ndim == 0 else bits


def gradient_entropy(eigenvalues: ArrayLike, *, batch_size: int) -> float:
    """Most differential entropy of a mean of `batch_size` gradients: 1/2 log2 det(2 pi e Sigma/B).

    Bits; exact for Gaussian gradients. It depends on the gradient's unit and may be negative.

    Args:
        eigenvalues: (d*,) of Sigma, all above 0.
        batch_size: examples, independent draws.

    Source: paper D, eq. (24) with errata 4.2 to 4.4.
    """
    check.count(batch_size=batch_size)
    values = _spectrum(eigenvalues, regular=True)
    return float(np.log2(_2_PI_E * values / batch_size).sum()) / 2


def printed(
    rate: float,
    eigenvalues: ArrayLike,
    *,
    batch_size: int,
    rounds: int = 1,
    mask_term: str = "squared",
) -> Leakage:
    """Theorem 4.1 (Corollary 4.2 for more rounds) as it stands in paper D. It bounds nothing.

    rounds * (mask term + 2 log(1/B) - log det Sigma + d* log(2 pi e)), the mask term in bits and
    the logarithms natural.

    Args:
        rate: p, the share of coordinates pruned.
        eigenvalues: (d*,) of Sigma, all above 0.
        batch_size: B.
        rounds: T.
        mask_term: "squared" 1 - (1 - 2p)^2 / (2 ln 2), the first term of the entropy's series;
            "linear" 1 - (p - 1) / (2 ln 2), as the print may be read; `"ceiling"` 1 + 1 / (2 ln 2),
            its value at p = 0, as (25) in the appendix may be read.

    Raises:
        ValueError: an unknown mask term, eigenvalues that are not above 0.

    Source: Chu et al. 2024 (paper D), eq. (6), (15) and (25).

    Example:
        >>> round(printed(0.3, [1.0, 1.0], batch_size=1).value, 3)
        6.56
    """
    check.one_of(MASK_TERMS, mask_term=mask_term)
    check.count(batch_size=batch_size, rounds=rounds)
    check.fraction(rate=rate)
    values = _spectrum(eigenvalues, regular=True)
    share = {"squared": (1 - 2 * rate) ** 2, "linear": rate - 1, "ceiling": -1.0}[mask_term]
    mask = 1 - share / (2 * math.log(2))
    log_det = float(np.log(values).sum())
    rest = -2 * math.log(batch_size) - log_det + len(values) * math.log(_2_PI_E)
    assumptions = (*FORMAL, "the paper's algebra, which errs in four places (errata 4.1 to 4.4)")
    value = rounds * (mask + rest)
    return Leakage(value, "bits and nats mixed", rounds * mask, "none", assumptions)


def corrected(
    rate: float, eigenvalues: ArrayLike, *, coordinates: int, batch_size: int, rounds: int = 1
) -> Leakage:
    """The same with its algebra repaired, in bits: rounds * (d H(p) + 2 h). Still no bound.

    H is the binary entropy and h `gradient_entropy`. It mixes entropies of a mask with differential
    ones, changes with the gradient's unit, and may be negative; the information of a gradient sent
    without noise and rounding has no bound.

    Args:
        rate: p, the share of coordinates pruned.
        eigenvalues: (d*,) of Sigma, all above 0.
        coordinates: d, at least d*.
        batch_size: B.
        rounds: T.

    Raises:
        ValueError: fewer coordinates than eigenvalues, or eigenvalues that are not above 0.

    Source: paper D, theorem 4.1, with errata 4.1 to 4.4.

    Example:
        >>> round(corrected(0.5, [1e-4], coordinates=1, batch_size=1).value, 2)
        -8.19
    """
    check.count(coordinates=coordinates, rounds=rounds)
    check.fraction(rate=rate)
    values = _spectrum(eigenvalues, regular=True)
    if coordinates < len(values):
        raise ValueError(
            f"coordinates is {coordinates} and there are {len(values)} eigenvalues; "
            "give at least as many coordinates"
        )
    mask = coordinates * binary_entropy(rate)
    value = rounds * (mask + 2 * gradient_entropy(values, batch_size=batch_size))
    return Leakage(value, "bits", rounds * mask, "none", FORMAL)


def finite_precision(
    coordinates: int,
    kept: float,
    *,
    data_bits: float = math.inf,
    precision: float = 32.0,
    rounds: int = 1,
    mask: str = "fixed count",
) -> Leakage:
    """All that messages can hold: min(data_bits, rounds * (precision * kept + bits of the mask)).

    Args:
        coordinates: d of the model.
        kept: coordinates sent in a round; with "fixed share" their mean.
        data_bits: entropy of the client's data; 8 bits a gray value is never too little.
        precision: bits a number that is sent.
        rounds: in which the client sends.
        mask: "fixed count": exactly `kept` are sent, anyhow chosen: log2 C(d, kept) bits;
            "fixed share": `kept` are sent on average, anyhow chosen: d H(kept / d) bits;
            "public": which ones is independent of the data given the past: 0 bits.

    Raises:
        ValueError: more kept than there are, or an unknown kind of mask.

    Source: errata 4.5 (iii) of paper D.

    Example:
        >>> finite_precision(20_000, 14_000, data_bits=8 * 784).value
        6272
    """
    check.positive(precision=precision)
    check.count(rounds=rounds)
    secret = _mask_bits(coordinates, kept, mask)
    if not data_bits >= 0:
        raise ValueError(f"data_bits is {data_bits:g}; give a number of at least 0, or infinity")
    assumptions = (BLIND, MASKS[mask], f"every number is sent in at most {precision:g} bits")
    value = min(data_bits, rounds * (precision * kept + secret))
    return Leakage(value, "bits", min(value, rounds * secret), "all", assumptions)


def gaussian_channel(
    eigenvalues: ArrayLike | None = None,
    *,
    noise_std: float,
    batch_size: int = 1,
    trace: float | None = None,
    rank: int | None = None,
    coordinates: int | None = None,
    kept: float | None = None,
    mask: str = "public",
    learning_rate: float = 1.0,
    rounds: int = 1,
) -> Leakage:
    """Updates sent with noise: rounds * (bits of the mask + 1/2 log2 det(I + Sigma / (B s^2))).

    The data determine the mask and the whole noisy gradient, and what is sent follows from these
    two. The determinant alone is no bound where the mask depends on the data.

    Args:
        eigenvalues: (n,) of Sigma, those that are 0 may be left out; or trace and rank.
        noise_std: of the Gaussian noise on each coordinate of what is sent.
        batch_size: B, of whose gradients the mean is taken; 1 with the covariance of that mean
            itself for Sigma, where examples depend on each other.
        trace: at least Sigma's. Gradients clipped to a norm C have at most C^2.
        rank: at least Sigma's, such as the number of coordinates.
        coordinates: d of the model; needed unless the mask is "public".
        kept: as in `finite_precision`; needed unless the mask is "public".
        mask: as in `finite_precision`.
        learning_rate: what is sent is learning_rate * gradient + noise.
        rounds: with fresh noise and this Sigma at most, on average over the past.

    Raises:
        ValueError: both or neither of eigenvalues and trace with rank; a secret mask without its
            counts.

    Source: errata 4.5 (iv) of paper D.

    Example:
        >>> gaussian_channel([3.0], noise_std=1.0).value
        1.0
        >>> gaussian_channel(trace=1.0, rank=1000, noise_std=0.1, batch_size=4).value < 36.1
        True
    """
    check.positive(noise_std=noise_std, learning_rate=learning_rate)
    check.count(batch_size=batch_size, rounds=rounds)
    signal = (learning_rate / noise_std) ** 2 / batch_size
    secret = 0.0
    if mask != "public" or coordinates is not None or kept is not None:
        if coordinates is None or kept is None:
            raise ValueError(
                f"mask is {mask!r}, coordinates {coordinates!r} and kept {kept!r}; "
                "give both counts, or neither with a public mask"
            )
        secret = _mask_bits(coordinates, kept, mask)
    if eigenvalues is not None and trace is None and rank is None:
        values = _spectrum(eigenvalues)
        sent = float(np.log1p(signal * values).sum()) / (2 * math.log(2))
    elif eigenvalues is not None or trace is None or rank is None:
        raise ValueError(
            f"trace is {trace!r} and rank {rank!r}; give eigenvalues, or trace and rank"
        )
    else:  # the most that it can be: all eigenvalues equal
        check.non_negative(trace=trace)
        check.count(rank=rank)
        sent = rank * math.log1p(signal * trace / rank) / (2 * math.log(2))
    value = rounds * (secret + sent)
    return Leakage(value, "bits", rounds * secret, "all", (MASKS[mask], *CHANNEL))


def _mask_bits(coordinates: int, kept: float, mask: str) -> float:
    check.one_of(MASKS, mask=mask)
    check.count(coordinates=coordinates)
    check.non_negative(kept=kept)
    _fewer(np.asarray(coordinates), np.asarray(kept))
    if mask == "public":
        return 0.0
    if mask == "fixed count":
        return float(mask_entropy(coordinates, kept))
    return coordinates * float(binary_entropy(kept / coordinates))


def _spectrum(eigenvalues: ArrayLike, *, regular: bool = False) -> Array:
    values = np.asarray(eigenvalues, float)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"eigenvalues has shape {values.shape}; give a list of finite numbers")
    good = np.isfinite(values) & ((values > 0) if regular else (values >= 0))
    if not good.all():
        least = "above 0" if regular else "of at least 0"
        raise ValueError(f"eigenvalues is {values[~good][0]:g}; give finite numbers {least}")
    return values


def _fewer(coordinates: Array, kept: Array) -> None:
    if np.any(kept > coordinates):
        raise ValueError(
            f"kept is {np.max(kept):g} and coordinates {np.min(coordinates):g}; "
            "give at most as many kept as there are"
        )
