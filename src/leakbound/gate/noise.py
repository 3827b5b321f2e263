"""Tests of a client's releases against the noise and the clip that were declared.

What leaves is a signal of bounded norm plus independent N(0, std^2) in every entry. A test breaks a
true declaration with probability `level` at most, whatever the signal is. `ratio` is the bound over
std, or 0 if the signal is the same at every call.

- Energy of contrasts: a signal only adds to it (Anderson 1955), so below the lower tail of
  chi-square; above the upper tail of noncentral chi-square (Birge 2001, lemma 8.1).
- Entries: the same lower tail for the entry with the least energy.
- Shape: Dvoretzky, Kiefer and Wolfowitz for variables of different laws (Bretagnolle 1980).
- Reuse: the same lower tail for the two releases that differ least.
- Copies: given one tensor's noise, its scaled product with another's is normal.
- Norm of the mean: the upper tail of noncentral chi-square.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

Array = NDArray[np.float64]
Spans = dict[str, slice]
"""Where each tensor's entries are in a release."""


def count_of(spans: Spans) -> int:
    """How many tests `faults_of` makes."""
    return 5 * len(spans) + math.comb(len(spans), 2)


def contrasts(rows: Array) -> Array:
    """Each release (n, P) against the mean of those before it, (n - 1, P): Helmert's contrasts.

    They are orthonormal, so independent noise of one variance stays so; a signal that is the same
    in all is gone.
    """
    before = np.arange(1.0, len(rows))[:, None]
    means = np.cumsum(rows, axis=0)[:-1] / before
    return np.asarray((rows[1:] - means) * np.sqrt(before / (before + 1)))


def faults_of(
    rows: Array,
    spans: Spans,
    *,
    ratio: float,
    level: float,
) -> Iterator[str]:
    """What is wrong with the noise of releases (n, P), over std."""
    # the most energy that signals add
    whole = contrasts(rows)
    # every call may carry its whole bound
    signal = len(rows) * ratio**2
    count = len(whole)
    for name, span in spans.items():
        entries = whole[:, span]
        energy = float(np.square(entries).sum())
        number = entries.size
        low = stats.chi2.cdf(energy, number) < level
        if low or energy > _upper(number, signal, level):
            share = math.sqrt(energy / number)
            yield f"{name} has noise of {share:.3g} times the stated std"
            continue
        # one entry without noise would be lost in the sum over all
        least = float(np.square(entries).sum(0).min())
        if stats.chi2.cdf(least, count) * entries.shape[1] < level:
            yield f"an entry of {name} has {math.sqrt(least / count):.3g} times the stated std"
        moved = min(1.0, math.sqrt(signal / (2 * math.pi * number)))
        if _distance(entries) - moved > math.sqrt(math.log(2 * math.e / level) / (2 * number)):
            yield f"the noise of {name} is not Gaussian"
        # a generator that is seeded anew at each call gives two equal draws
        near, pair = _nearest(rows[:, span])
        if stats.chi2.cdf(near, entries.shape[1]) * math.comb(len(rows), 2) < level:
            yield f"calls {pair[0] + 1} and {pair[1] + 1} have the same noise in {name}"
    limit = math.sqrt(signal) - float(special.ndtri(level / 2))
    for (name, span), (other, at) in combinations(spans.items(), 2):
        size = min(span.stop - span.start, at.stop - at.start)
        one = whole[:, span][:, :size]
        two = whole[:, at][:, :size]
        if abs(float((one * two).sum())) > limit * float(np.linalg.norm(two)):
            yield f"{name} and {other} have the same noise"


@dataclass(frozen=True)
class NormTest:
    """A norm, in words; whether it is above its bound; and from where on an estimate breaks it."""

    words: str
    broken: bool
    estimate: float
    critical: float


def norm_of(
    mean: Array,
    variance: float,
    bound: float,
    level: float,
) -> NormTest:
    """Test the norm of the signal behind a mean (P,) with noise of this variance."""
    energy = float(np.square(mean).sum())
    if not variance:
        norm = math.sqrt(energy)
        # a norm that is not a number breaks the bound, too
        return NormTest(f"{norm:.3g}", not energy <= bound**2 * (1 + 1e-5), norm, bound)
    noise = mean.size * variance
    critical = _upper(mean.size, bound**2 / variance, level) * variance
    estimate = math.sqrt(max(0.0, energy - noise))
    seen = math.sqrt(max(0.0, critical - noise))
    words = f"about {estimate:.3g} (over {seen:.3g} breaks it)"
    return NormTest(words, energy > critical, estimate, seen)


def _upper(
    size: int,
    central: float,
    level: float,
) -> float:
    """What a noncentral chi-square variable exceeds with probability `level` at most."""
    log = math.log(1 / level)
    return size + central + 2 * math.sqrt((size + 2 * central) * log) + 2 * log


def _nearest(rows: Array) -> tuple[float, tuple[int, int]]:
    """The least energy of a difference of two rows over sqrt(2), and which rows."""
    rest = rows - rows.mean(0)
    sizes = np.square(rest).sum(1) / 2
    energy = sizes[:, None] + sizes - rest @ rest.T
    np.fill_diagonal(energy, np.inf)
    one, two = divmod(int(energy.argmin()), len(rows))
    return max(0.0, float(energy[one, two])), (one, two)


def _distance(values: Array) -> float:
    """The largest difference from the normal distribution function."""
    below = special.ndtr(np.sort(values, None))
    steps = np.arange(values.size + 1) / values.size
    return float(max((steps[1:] - below).max(), (below - steps[:-1]).max()))
