"""How many bits an update leaks about the data, and what so few bits leave unknown.

Bounds for all attackers: `finite_precision` and `gaussian_channel` on the bits; `fano`,
`shannon_lower_bound` and `gaussian_distortion` on what so many bits can achieve, on average over
the prior of examples. `printed` and `corrected` are paper D's formula and its repair; they bound
nothing, as they add the entropy of a mask to differential entropies. All in bits, but for
`printed`. Sigma is the covariance of one example's gradient given what was sent before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from leakbound import check
from leakbound.bounds.law import (
    Array,
    Scope,
    between,
    non_negative,
    one,
    positive,
    probability,
    whole,
)
from leakbound.bounds.roots import inward, least_where

__all__ = [
    "MASKS",
    "MASK_TERMS",
    "Leakage",
    "binary_entropy",
    "corrected",
    "fano",
    "finite_precision",
    "gaussian_channel",
    "gaussian_distortion",
    "gradient_entropy",
    "mask_entropy",
    "printed",
    "shannon_lower_bound",
]

MASKS = {
    "fixed count": "every round sends exactly `kept` coordinates, whichever",
    "fixed share": "every round sends `kept` coordinates on average, whichever",
    "public": "which coordinates are sent does not depend on the data given the past",
}
"""Kinds of masks, with the assumption that each makes."""
MASK_TERMS = ("squared", "linear", "ceiling")
FORMAL = (
    "Sigma is regular on the d* coordinates counted, and a sample's estimate is the true one",
    "examples are independent draws; the rate is the same in every round",
    "differential entropies may be added to and dropped like those of a mask (they may not)",
)
CHANNEL = (
    "given the earlier rounds, the examples of a batch are independent draws, or batch_size is 1",
    "Sigma, or its trace and rank, is an upper bound on the true one, on average over the past",
    "the noise is Gaussian, independent of all else, fresh in each round, at least noise_std",
)
ROUNDED = Scope(
    covers="all",
    attackers="all attackers who see nothing of the data but what is sent",
    prior="any",
    known="the model, the earlier rounds and how the client computes",
    not_said="that an attacker can extract so much; nor a bound for one given example",
    equation="errata 4.5 (iii) of paper D",
)
NOISY = Scope(
    covers="all",
    attackers="all attackers who see nothing of the data but what is sent",
    prior="examples drawn from any population with this Sigma",
    known="the model, the earlier rounds, the population and the noise's law",
    not_said="a bound for one given example; anything where Sigma is a sample's estimate",
    equation="errata 4.5 (iv) of paper D",
)
_2_PI_E = 2 * math.pi * math.e


@dataclass(frozen=True)
class Leakage:
    """An amount of information, with what may be said with it.

    Attributes:
        value: in `unit`.
        mask: the part of it that the mask leaks.
        assumptions: checkable sentences.
    """

    value: float
    unit: str
    mask: float
    scope: Scope
    assumptions: tuple[str, ...]

    @property
    def covers(self) -> str:
        """As in `Scope`: "all" for a bound, "none" for what bounds nothing."""
        return self.scope.covers


def binary_entropy(rate: ArrayLike) -> Any:
    """Bits of one coin of this probability.

    Example:
        >>> round(binary_entropy(0.3), 4)
        0.8813
    """
    p = probability("rate", rate, closed=True)
    return one(np.asarray((special.entr(p) + special.entr(1 - p)) / math.log(2)))


def mask_entropy(coordinates: ArrayLike, kept: ArrayLike) -> Any:
    """log2 C(coordinates, kept): the most that a mask with a fixed number of ones leaks, in bits.

    Raises:
        ValueError: more kept than there are.

    Example:
        >>> round(mask_entropy(10, 3), 4)  # 120 masks
        6.9069
    """
    d, k = whole("coordinates", coordinates), whole("kept", kept, 0)
    _fewer(d, k)
    nats = -np.log1p(d) - special.betaln(k + 1, d - k + 1)
    return one(np.asarray(np.maximum(nats, 0.0) / math.log(2)))


def gradient_entropy(eigenvalues: ArrayLike, *, batch_size: int) -> float:
    """Most differential entropy of a mean of `batch_size` gradients: 1/2 log2 det(2 pi e Sigma/B).

    Bits; exact for Gaussian gradients. It depends on the gradient's unit and may be negative.

    Args:
        eigenvalues: (d*,) of Sigma, all above 0.
        batch_size: examples, independent draws.

    Source: paper D, eq. (24) with errata 4.2 to 4.4.
    """
    check.count(batch_size=batch_size)
    values = _spectrum(positive("eigenvalues", eigenvalues))
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
            "linear" 1 - (p - 1) / (2 ln 2), as the print may be read; "ceiling" 1 + 1 / (2 ln 2),
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
    values = _spectrum(positive("eigenvalues", eigenvalues))
    share = {"squared": (1 - 2 * rate) ** 2, "linear": rate - 1, "ceiling": -1.0}[mask_term]
    mask = 1 - share / (2 * math.log(2))
    log_det = float(np.log(values).sum())
    rest = -2 * math.log(batch_size) - log_det + len(values) * math.log(_2_PI_E)
    assumptions = (*FORMAL, "the paper's algebra, which errs in four places (errata 4.1 to 4.4)")
    scope = _formal("paper D, eq. (6) and (15) as printed")
    return Leakage(rounds * (mask + rest), "bits and nats mixed", rounds * mask, scope, assumptions)


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
    values = _spectrum(positive("eigenvalues", eigenvalues))
    if coordinates < len(values):
        raise ValueError(
            f"coordinates is {coordinates} and there are {len(values)} eigenvalues; "
            "give at least as many coordinates"
        )
    mask = coordinates * binary_entropy(rate)
    value = rounds * (mask + 2 * gradient_entropy(values, batch_size=batch_size))
    scope = _formal("paper D, eq. (6) and (15) with errata 4.1 to 4.4")
    return Leakage(value, "bits", rounds * mask, scope, FORMAL)


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
        6272.0
    """
    check.positive(precision=precision)
    check.count(rounds=rounds)
    secret = _mask_bits(coordinates, kept, mask)
    data = float(non_negative("data_bits", data_bits))
    assumptions = (MASKS[mask], f"every number is sent in at most {precision:g} bits")
    value = min(data, rounds * (precision * kept + secret))
    return Leakage(value, "bits", min(value, rounds * secret), ROUNDED, assumptions)


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
        values = _spectrum(non_negative("eigenvalues", eigenvalues))
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
    return Leakage(value, "bits", rounds * secret, NOISY, (MASKS[mask], *CHANNEL))


def fano(information: ArrayLike, *, kappa: ArrayLike) -> Any:
    """Most probability of a goal of prior-only success kappa, from so many bits (Fano).

    The largest p with p log2(p / kappa) + (1 - p) log2((1 - p) / (1 - kappa)) <= information. For
    one of M equally likely candidates kappa is 1 / M.

    Shapes: broadcast.

    Args:
        information: mutual information in bits of the example and all that was sent, such as
            `Leakage.value`.
        kappa: in (0, 1).

    Raises:
        ValueError: kappa outside (0, 1), information below 0.

    Source: Cover and Thomas, "Elements of Information Theory", section 2.10.

    Example:
        >>> round(fano(1.0, kappa=0.01), 3)
        0.277
    """
    bits, blind = np.broadcast_arrays(
        non_negative("information", information), probability("kappa", kappa)
    )

    def enough(p: Array) -> Array:
        nats = np.asarray(special.kl_div(p, blind) + special.kl_div(1 - p, 1 - blind))
        return nats >= (bits * math.log(2))

    full = -np.log2(blind) <= bits
    found = least_where(lambda p: enough(p) | (p >= 1), blind, np.ones_like(blind))
    found = inward(lambda p: enough(np.minimum(p, 1)) | (p >= 1) | full, found, 1.0)
    return one(np.asarray(np.where(full, 1.0, np.minimum(found, 1.0))))


def shannon_lower_bound(information: ArrayLike, *, entropy: ArrayLike, dimension: ArrayLike) -> Any:
    """Least mean squared error per coordinate from so many bits: 2^(2 (h - I) / N) / (2 pi e).

    Shapes: broadcast.

    Args:
        information: I, bits about the whole example.
        entropy: h, the example's differential entropy in bits, in input units; may be negative.
        dimension: N, coordinates of an example.

    Assumptions: the prior has a density. Images of 256 levels have none: h is minus infinity and
        the bound 0.

    Source: Cover and Thomas, "Elements of Information Theory", sections 8.6 and 10.3.

    Example:
        >>> h = 0.5 * np.log2(2 * np.pi * np.e * 9)  # N(0, 9)
        >>> round(shannon_lower_bound(1.0, entropy=h, dimension=1), 6)
        2.25
    """
    bits, n = non_negative("information", information), whole("dimension", dimension)
    h = between("entropy", entropy, -np.inf, np.finfo(float).max)
    with np.errstate(over="ignore"):
        return one(np.asarray(np.exp2(2 * (h - bits) / n) / _2_PI_E))


def gaussian_distortion(information: ArrayLike, variances: ArrayLike) -> Any:
    """The same for a Gaussian example, exactly: its distortion-rate function.

    By reverse water-filling: mean of min(variance, level), with the level where the sum of
    1/2 log2(variance / level) over those above it is the information. It is `shannon_lower_bound`
    where the level is below every variance, and above it elsewhere.

    Shapes: information any; the answer the same.

    Args:
        information: bits about the whole example.
        variances: (N,) of the example, or the eigenvalues of its covariance; 0 is allowed.

    Source: Cover and Thomas, "Elements of Information Theory", theorem 10.3.3.

    Example:
        >>> gaussian_distortion(1.0, [4.0, 1.0])
        1.0
    """
    bits = non_negative("information", information)
    values = np.sort(_spectrum(non_negative("variances", variances), "variances"))[::-1]
    some = values[values > 0]
    if not len(some):
        return one(np.zeros(bits.shape))
    logs = np.log2(some)
    total, count = np.cumsum(logs), np.arange(1, len(some) + 1)
    levels = (total - 2 * bits[..., None]) / count
    below = np.append(logs[1:], -np.inf)
    at = np.argmax(levels >= below, -1)
    level = np.exp2(np.take_along_axis(levels, at[..., None], -1))[..., 0]
    rest = np.append(np.cumsum(some[::-1])[::-1], 0.0)[at + 1]  # variances below the level
    return one(np.asarray((level * count[at] + rest) / len(values)))


def _formal(equation: str) -> Scope:
    return Scope(
        covers="none",
        attackers="nobody: a proxy to compare settings with",
        prior="examples drawn from a population with this Sigma",
        known="nothing",
        not_said="a bound on anything: it depends on the gradient's unit and may be negative",
        equation=equation,
    )


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


def _spectrum(values: Array, name: str = "eigenvalues") -> Array:
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"{name} has shape {values.shape}; give a list of finite numbers")
    return values


def _fewer(coordinates: Array, kept: Array) -> None:
    if np.any(kept > coordinates):
        raise ValueError(
            f"kept is {np.max(kept):g} and coordinates {np.min(coordinates):g}; "
            "give at most as many kept as there are"
        )
