"""Bounds on all attackers from a sample of public examples, without a model of the data.

kappa is the largest probability that an example of the data's distribution lies within the
criterion's radius of one point. Of n independent public examples K* is the most that one ball of
this radius holds, wherever its center is. The distribution, not the sample, fixes the ball that
carries kappa, and that ball holds Binomial(n, kappa) <= K* of the sample: so a confidence limit on
a binomial share for a count of K* is one on kappa, without a union over balls. The profile bound is
sharper where most examples have few neighbors: it spreads the attacker's guesses over all examples.

Both hold for private examples that are drawn like the public ones, on average over them. They hold
for any model, for malicious servers and for attackers who know all public examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, stats

from leakbound._util.rounding import most
from leakbound.bounds import identification
from leakbound.bounds.balls import MOST_PAIRS, ROUNDING, BallCounts, counts_of, neighbors
from leakbound.bounds.law import Array, one, positive, probability, single, whole
from leakbound.bounds.record_priors import Baseline, flat_images

__all__ = [
    "PublicSample",
    "TheseExamples",
    "count_least",
    "count_limit",
    "examples_needed",
    "profile_limit",
    "same_law",
    "self_bounding_limit",
]

CONFIDENCE = 0.95
MOST = 20_000
"""Examples of a sample that are counted; of more, a random part of this size, with its own n."""
LOOKED, PERMUTATIONS = 1000, 999
"""Examples of each sample in the test, and permutations."""
FINEST, STEP = math.log(1e-12), 0.004
"""Successes without the update at which a lift is taken: their logarithms."""
Lift = Callable[[Array], Array]
ANCHORS = 12
"""Thresholds of a curve at which balls are counted."""


def count_limit(count: int, n: int, *, confidence: float = CONFIDENCE) -> float:
    """Upper confidence limit on a share of which n independent draws show `count`.

    Clopper and Pearson 1934, one-sided: it is too small with a probability of at most
    1 - confidence, for every share.

    Example:
        >>> round(count_limit(1, 5000), 7)
        0.0009484
    """
    single("n", whole("n", n))
    held = single("count", whole("count", count, 0))
    tail = 1 - single("confidence", probability("confidence", confidence))
    return 1.0 if held >= n else float(stats.beta.isf(tail, held + 1, n - held))


def count_least(count: int, n: int, *, confidence: float = CONFIDENCE) -> float:
    """Lower confidence limit on a share of which n independent draws show `count`.

    Clopper and Pearson 1934, one-sided.

    Example:
        >>> round(count_least(10, 5000), 7)
        0.0010855
    """
    tail = 1 - single("confidence", probability("confidence", confidence))
    return 0.0 if count == 0 else float(stats.beta.ppf(tail, count, n - count + 1))


@dataclass(frozen=True, eq=False)
class PublicSample(Baseline):
    """What n public examples show of kappa, whatever their distribution is.

    Args:
        examples: (n, ...), drawn independently and like the private ones. Tiles of one photograph
            or rows of one person are one draw: give one of each, or `sources`.
        labels: (n,), where the attacker knows the label and may guess by class.
        guesses: of the attacker, of which one has to match: the batch or the cohort.
        confidence: with which the limit holds, over the draw of the public examples.
        sources: (n,) who or what each example comes from; one of each is taken, at random. Where
            some sources have more examples than others, private examples lie more densely there,
            and the bounds are multiplied (`density`).
        classes: how many labels there are, seen or not; with it, a sharper limit where no two
            examples of a class are alike.

    Example:
        >>> digits = np.random.default_rng(0).random((400, 16))
        >>> sample = PublicSample(digits)
        >>> sample.n, round(float(np.exp(sample.log_kappa(0.001))), 4)
        (400, 0.0118)
    """

    examples: Array
    labels: Array | None = None
    guesses: int = 1
    confidence: float = CONFIDENCE
    sources: Array | None = None
    classes: int | None = None

    basis = "sample"
    places: Array = field(init=False)
    """(n,) which of the given examples were taken."""
    density: float = field(init=False, default=1.0)
    """The size of the largest source over the mean size, at least 1: private examples, drawn from
    all, lie at most so many times as densely as the examples taken."""
    thinness: float = field(init=False, default=1.0)
    """The size of the smallest source over the mean size."""

    def __post_init__(self) -> None:
        rows = flat_images(self.examples)
        # At random: data are often sorted by class, and the first of each source would be alike.
        order = np.random.default_rng(0).permutation(len(rows))
        if self.sources is not None:
            _, first, sizes = np.unique(
                np.asarray(self.sources)[order], return_index=True, return_counts=True
            )
            order = np.random.default_rng(1).permutation(order[first])
            object.__setattr__(self, "density", float(sizes.max() / sizes.mean()))
            object.__setattr__(self, "thinness", float(sizes.min() / sizes.mean()))
        keep = np.sort(order[:MOST])
        object.__setattr__(self, "examples", rows[keep])
        object.__setattr__(self, "places", keep)
        if self.labels is not None:
            labels = np.asarray(self.labels).reshape(-1)
            if len(labels) != len(rows):
                raise ValueError(f"labels holds {len(labels)}; give one for each of {len(rows)}")
            object.__setattr__(self, "labels", labels[keep])
        single("guesses", whole("guesses", self.guesses))
        single("confidence", probability("confidence", self.confidence))
        object.__setattr__(self, "_kept", {})
        object.__setattr__(self, "_near", {})

    @property
    def n(self) -> int:
        """Independent public examples."""
        return len(self.examples)

    @property
    def dim(self) -> int:  # type: ignore[override]
        """N."""
        return int(self.examples.shape[1])

    @property
    def name(self) -> str:  # type: ignore[override]
        """What it rests on, for people."""
        known = "labels known" if self.labels is not None else "labels not known"
        sure = f"{self.confidence:.0%} confidence"
        uneven = f", sources of up to {most(self.density)} times the mean size"
        return f"{self.n} public examples without a model, {sure}, {known}" + (
            uneven if self.density > 1 else ""
        )

    @cached_property
    def _groups(self) -> list[Array]:
        if self.labels is None:
            return [np.arange(self.n)]
        return [np.flatnonzero(self.labels == y) for y in np.unique(self.labels)]

    def counts(self, eta: float) -> list[BallCounts]:
        """The counts of balls at an MSE of eta, by class where labels are known."""
        kept: dict[float, list[BallCounts]] = self._kept  # type: ignore[attr-defined]
        if eta not in kept:
            rows = [self.examples[own] for own in self._groups]
            pairs = [self._pairs(place, own, 4 * eta) for place, own in enumerate(rows)]
            kept[eta] = [counts_of(own, eta, *two) for own, two in zip(rows, pairs, strict=True)]
        return kept[eta]

    def _pairs(self, place: int, rows: Array, reach: float) -> tuple[list[Array], list[Array]]:
        """As `neighbors`, from those of a larger reach where they are known."""
        known: dict[int, tuple[float, list[Array], list[Array]]] = self._near  # type: ignore[attr-defined]
        far, near, apart = known.get(place, (0.0, [], []))
        if far < reach:
            near, apart = neighbors(rows, reach)
            if sum(map(len, near)) > MOST_PAIRS:
                return near, apart
            known[place] = (reach, near, apart)
        cut = [int(np.searchsorted(own, reach, "right")) for own in apart]
        both = zip(near, apart, cut, strict=True)
        pairs = [(own[:most], line[:most]) for own, line, most in both]
        return [own for own, _ in pairs], [line for _, line in pairs]

    def largest(self, eta: float) -> int:
        """K*: the most public examples that one guess matches (one a class, with labels known)."""
        return sum(found.most for found in self.counts(eta))

    def log_kappa(self, eta: ArrayLike, *, parts: int = 1) -> Any:
        """Upper confidence limits on the logarithm of kappa; for several eta they hold jointly.

        `parts`: this limit gets one part of so many of what the confidence leaves. kappa rises
        with eta, so a limit at a larger eta is one at all smaller ones: at most ANCHORS are made.
        """
        levels = np.atleast_1d(positive("eta", eta, infinite=True))
        places = anchors(levels)
        tail = (1 - self.confidence) / (len(places) * parts)
        # The largest first: its pairs of neighbors hold those of all others.
        limits = [self._limit(float(level), tail) for level in places[::-1]]
        found = np.log(np.array(limits[::-1])[np.searchsorted(places, levels)])
        return one(found.reshape(np.shape(eta)))

    def success_bound(self, lift: Lift | float, eta: ArrayLike) -> tuple[Array, Array]:
        """No attacker exceeds it, and log kappa behind it.

        The better one of the limit on kappa and the profile bound, each at half of what the
        confidence leaves; for several eta they hold jointly.

        Args:
            lift: as in `profile_limit`: a noise multiplier, for one full-batch release, or what a
                whole training makes of a success without it.
            eta: mean squared errors.

        Example:
            >>> rows = np.random.default_rng(0).random((400, 16))
            >>> round(float(PublicSample(rows).success_bound(1.0, 0.001)[0][0]), 2)
            0.07
        """
        levels = np.atleast_1d(positive("eta", eta, infinite=True))
        law = lift if callable(lift) else gaussian_lift(lift)
        known = np.atleast_1d(np.asarray(self.log_kappa(levels, parts=2)))
        places, envelope = anchors(levels), _envelope(law)
        tail = (1 - self.confidence) / (2 * len(places))
        made = [self._profile(envelope, float(e), 1 - tail) for e in places[::-1]]
        profiles = np.array(made[::-1])[np.searchsorted(places, levels)]
        return np.minimum(np.minimum(1.0, law(known)), profiles), known

    def _limit(self, eta: float, tail: float) -> float:
        if not math.isfinite(eta):
            return 1.0
        found = self.counts(eta)
        held = sum(
            min(self.guesses * own.most, len(group))
            for own, group in zip(found, self._groups, strict=True)
        )
        limit = count_limit(held, self.n, confidence=1 - tail)
        # No two of a class alike: a birthday bound. A class that was not seen may collide, too.
        classes = 0 if self.classes is None else max(self.classes, len(found))
        if classes > 1 and held == len(found):
            met = lambda x: classes * math.log1p(x / classes) - x - math.log(tail)  # noqa: E731
            far = 10 * (classes + 1) * (1 - math.log(tail))
            limit = min(limit, float(optimize.brentq(met, 0.0, far)) / self.n)
        return min(1.0, limit * self.density)

    def mean_error(self, lift: Lift | float, etas: ArrayLike) -> float:
        """No attacker's mean squared error is below it.

        The mean of an error is the integral of the probability that it exceeds eta, and the
        success bound says from below how large that is: sum (eta_j - eta_(j-1)) (1 - bound(eta_j)).
        No smoothness and no model of the data are needed; it holds for malicious servers too.

        Args:
            lift: as in `success_bound`.
            etas: MSEs at which the bound is taken, at most ANCHORS, fixed beforehand.

        Source: this project; docs/errata.md, "Ours".

        Example:
            >>> rows = np.random.default_rng(0).random((400, 16))
            >>> round(PublicSample(rows).mean_error(3.0, [0.0002, 0.002, 0.01]), 4)
            0.0097
        """
        levels = np.unique(positive("etas", etas))
        bound = self.success_bound(lift, levels)[0]
        return float((np.diff(levels, prepend=0.0) * (1 - bound)).sum())

    def _profile(self, envelope: tuple[Array, Array], eta: float, confidence: float) -> float:
        """The profile bound of this sample at one eta."""
        if not math.isfinite(eta):
            return 1.0
        each = [found.each for found in self.counts(eta)]
        return min(1.0, self.density * _profile_limit(each, envelope, self.guesses, confidence))

    def needed(self, gamma: float, *, parts: int = 1) -> int:
        """`examples_needed` for a limit that gets one part of what the confidence leaves."""
        return examples_needed(gamma, confidence=1 - (1 - self.confidence) / parts)


class TheseExamples(PublicSample):
    """What no attacker exceeds on average over these very examples, for who holds them.

    For auditors with the private examples: the target is one of them, each as likely, and the
    attacker may know all of them. As many as there are guesses are sent together, and all but the
    target may be known. It is exact: no confidence is needed, and no assumption on how
    they are drawn. It says nothing about new examples. It depends on private data: keep it local.

    Args are those of `PublicSample`; every example is a target of its own, so there are no sources.

    Source: this project; docs/errata.md, "Ours".

    Example:
        >>> rows = np.random.default_rng(0).random((400, 16))
        >>> round(float(TheseExamples(rows).success_bound(1.0, 0.001)[0][0]), 4)
        0.0354
    """

    basis = "examples"  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.sources is not None:
            raise ValueError("sources is given, but each of these examples is a target of its own")
        count = len(flat_images(self.examples))
        if count > MOST:
            raise ValueError(f"examples holds {count}; give at most {MOST}")
        super().__post_init__()

    @property
    def name(self) -> str:  # type: ignore[override]
        """What it rests on, for people."""
        known = "labels known" if self.labels is not None else "labels not known"
        return f"these {self.n} examples, {known}"

    def _limit(self, eta: float, tail: float) -> float:
        if not math.isfinite(eta):
            return 1.0
        return min(1.0, self.guesses * self.largest(eta) / self._left)

    def _profile(self, envelope: tuple[Array, Array], eta: float, confidence: float) -> float:
        """The largest mean success over all guesses; exact, whatever the confidence."""
        each = [np.asarray(found.each, float) for found in self.counts(eta)]
        seen = sum(_most_success(own, envelope, self.guesses) for own in each)
        return min(1.0, seen / self._left)

    @property
    def _left(self) -> int:
        """Examples that the target may be where all others of the batch are known."""
        return max(1, self.n - self.guesses + 1)


def examples_needed(gamma: float, *, confidence: float = CONFIDENCE) -> int:
    """Public examples without which no noise meets a probability of gamma.

    So many suffice with much noise where no two of them are alike, at K* = 1.

    Example:
        >>> examples_needed(0.001)
        4742
    """
    wanted = single("gamma", probability("gamma", gamma))
    found = math.ceil(float(stats.chi2.ppf(confidence, 4) / 2) / wanted)  # Poisson, for rare events
    while 2 < found < 1_000_000 and count_limit(1, found - 1, confidence=confidence) <= wanted:
        found -= 1
    return found


def anchors(levels: Array) -> Array:
    """At most ANCHORS of the levels, rising, the largest among them."""
    rising = np.unique(levels)
    places = np.unique(np.linspace(0, len(rising) - 1, ANCHORS).round().astype(int))
    return rising if len(rising) <= ANCHORS else rising[places]


def profile_limit(
    each: list[Array], lift: Lift | float, *, guesses: int = 1, confidence: float = CONFIDENCE
) -> float:
    """Upper limit on every attacker's success from how many neighbors each public example has.

    A guess made without the update matches example i with a probability q_i, with
    sum q_i / d_i <= `guesses`, as the ball around it holds d_i examples at most; the update lifts
    q_i to F(q_i). The largest mean of F(q_i) is a function of the sample that changes little with
    one example (it is self-bounding), which gives the limit for the distribution.

    Args:
        each: d_i of the examples, an array for each class where labels are known (else one).
        lift: F, from the logarithm of a success without the update to what no attacker exceeds with
            it, concave and rising: the trade-off function of a whole training. A number is the
            noise multiplier of one release of the Gaussian mechanism.
        guesses: of which one has to match.
        confidence: over the draw of the examples.

    Source: this project; Boucheron, Lugosi and Massart 2000 for self-bounding functions.

    Example:
        >>> round(profile_limit([np.ones(5000)], 0.94), 4)
        0.0099
    """
    return _profile_limit(each, _envelope(lift), guesses, confidence)


def _profile_limit(
    each: list[Array], envelope: tuple[Array, Array], guesses: int, confidence: float
) -> float:
    seen = sum(_most_success(np.asarray(own, float), envelope, guesses) for own in each)
    n = sum(map(len, each))
    return min(1.0, self_bounding_limit(seen, confidence=confidence) / n)


def self_bounding_limit(seen: float, *, confidence: float = CONFIDENCE) -> float:
    """Upper confidence limit on the mean of a self-bounding function that was seen once.

    Such a function of independent examples changes by 0 to 1 when one of them is left out, and all
    these changes sum to its value at most. The limit is the root v above z = `seen` of
    v - z - z ln(v / z) = ln(1 / (1 - confidence)).

    Source: Boucheron, Lugosi and Massart 2000.

    Example:
        >>> [round(self_bounding_limit(seen), 2) for seen in (0.0, 1.0, 10.0)]
        [3.0, 5.74, 19.85]
    """
    log = -math.log1p(-float(single("confidence", probability("confidence", confidence))))
    if seen <= 0:
        return log
    missed = lambda v: v - seen - seen * math.log(v / seen) - log  # noqa: E731
    far = seen + 2 * log + 4 * math.sqrt(seen * log) + 4
    return float(optimize.brentq(missed, seen, far))


def gaussian_lift(noise_multiplier: float) -> Lift:
    """The lift of one release of the Gaussian mechanism: Phi(Phi^-1(q) + 1 / s)."""
    return lambda log: np.asarray(identification.gaussian(noise_multiplier, log_kappa=log))


def _envelope(lift: Lift | float) -> tuple[Array, Array]:
    """Points (q, F) of a concave line that lies above the lift everywhere, q rising from 0 to 1.

    Above: in each cell the lift counts as at the cell's right end.
    """
    law = lift if callable(lift) else gaussian_lift(lift)
    logs = np.arange(0.0, FINEST, -STEP)[::-1]
    q = np.append(0.0, np.exp(logs))
    above = np.append(np.minimum(1.0, law(logs)) * (1 + ROUNDING), 1.0)
    kept: list[int] = []
    for at in range(len(q)):
        while len(kept) > 1 and _below(q, above, kept[-2], kept[-1], at):
            kept.pop()
        kept.append(at)
    return q[kept], above[kept]


def _below(q: Array, above: Array, first: int, middle: int, last: int) -> bool:
    rise, run = above[last] - above[first], q[last] - q[first]
    return bool((above[middle] - above[first]) * run <= rise * (q[middle] - q[first]))


def _most_success(each: Array, envelope: tuple[Array, Array], guesses: int) -> float:
    """The largest sum of F(q_i) with sum q_i / d_i <= guesses, from above.

    By the dual: any multiplier l > 0 gives the limit l guesses + sum max_q (F(q) - l q / d_i).
    """
    values, number = np.unique(each, return_counts=True)
    q, above = envelope
    slopes = np.diff(above) / np.diff(q)

    def dual(log: float) -> float:
        price = math.exp(log) / values
        at = np.searchsorted(-slopes, -price)  # points up to which the line rises faster
        return float(math.exp(log) * guesses + number @ (above[at] - price * q[at]))

    found = optimize.minimize_scalar(dual, bounds=(-40.0, 60.0), options={"xatol": 1e-6})
    return min(float(len(each)), float(found.fun) * (1 + ROUNDING))


def same_law(first: ArrayLike, second: ArrayLike, source: np.random.Generator) -> float:
    """The p-value of a test whether two samples may have one distribution.

    How often an example's nearest neighbor is of its own sample, against permutations. A small
    value shows that private examples are not drawn like public ones: no bound from the public ones
    then covers them. A large value proves nothing.

    Shapes: (n, N) and (m, N), of which 1,000 each are compared.

    Source: Schilling 1986, nearest-neighbor test.

    Example:
        >>> draw = np.random.default_rng(0)
        >>> same_law(draw.random((200, 4)), draw.random((200, 4)) ** 3, draw) < 0.01
        True
    """
    # At random: data are often sorted, and the first would be alike.
    a, b = (source.permutation(flat_images(rows))[:LOOKED] for rows in (first, second))
    if len(a) < 2 or len(b) < 2:
        return 1.0
    rows = np.concatenate([a, b])
    square = np.square(rows).sum(1)
    apart = square[:, None] + square - 2 * rows @ rows.T
    np.fill_diagonal(apart, np.inf)
    nearest = apart.argmin(1)
    own = np.arange(len(rows)) < len(a)
    met = (own == own[nearest]).mean()
    drawn = [source.permutation(own) for _ in range(PERMUTATIONS)]
    more = sum((mixed == mixed[nearest]).mean() >= met for mixed in drawn)
    return float((1 + more) / (PERMUTATIONS + 1))
