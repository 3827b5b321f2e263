"""Bounds on all attackers from a sample of public examples, without a model of the data.

kappa is the largest probability that an example of the data distribution lies within the
criterion's level of one candidate, the center of a ball: a radius, or the columns of a row that may
differ. K* is the largest number of the n independent public examples in one such ball, with any
center. The distribution, not the sample, fixes the ball with
probability kappa. That ball holds Binomial(n, kappa) <= K* examples of the sample. So a confidence
limit on a binomial share for a count of K* is a limit on kappa, without a union over balls. The
profile bound is tighter if most examples have few neighbors: it spreads the attacker's candidates
over all examples.

Both bounds hold on average over private examples from the same distribution as the public ones.
They hold for any model, for malicious servers and for attackers who know all public examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special

from leakbound._util.formats import format_upper
from leakbound._util.intervals import clopper_pearson
from leakbound.bounds import identification
from leakbound.bounds.balls import BallCounts, Neighbors, counts_of, neighbors
from leakbound.bounds.distances import ROUNDING, ColumnMisses, Distance, SquaredError
from leakbound.bounds.law import Array, one, positive, probability, single, whole
from leakbound.bounds.record_priors import Baseline, Basis, flat_images

__all__ = [
    "PublicSample",
    "TheseExamples",
    "count_least",
    "count_limit",
    "examples_needed",
    "same_law",
    "self_bounding_limit",
]

CONFIDENCE = 0.95
MOST = 20_000
"""Number of examples that are counted; from a larger sample, a random part of this size."""
LOOKED = 1000
PERMUTATIONS = 999
"""Number of examples of each sample in the test, and number of permutations."""
FINEST = math.log(1e-12)
STEP = 0.004
"""Logarithms of the prior-only successes at which a lift is evaluated."""
Lift = Callable[[Array], Array]
ANCHORS = 12
"""Number of thresholds of a curve at which balls are counted."""


def count_limit(
    count: int,
    n: int,
    *,
    confidence: float = CONFIDENCE,
) -> float:
    """Upper confidence limit on a share for which n independent draws show `count`.

    Clopper and Pearson 1934, one-sided: for every share, the limit is too small with probability
    at most 1 - confidence.

    Example:
        >>> round(count_limit(1, 5000), 7)
        0.0009484
    """
    single(whole, n=n)
    held = single(partial(whole, least=0), count=count)
    tail = 1 - single(probability, confidence=confidence)
    return clopper_pearson(int(held), n, tail)[1]


def count_least(
    count: int,
    n: int,
    *,
    confidence: float = CONFIDENCE,
) -> float:
    """Lower confidence limit on a share for which n independent draws show `count`.

    Clopper and Pearson 1934, one-sided.

    Example:
        >>> round(count_least(10, 5000), 7)
        0.0010855
    """
    tail = 1 - single(probability, confidence=confidence)
    return clopper_pearson(count, n, tail)[0]


LABELS = "labels"


@dataclass(frozen=True, eq=False)
class PublicSample(Baseline):
    """What n public examples show about kappa, for any distribution.

    Args:
        examples: (n, ...), independent draws from the private examples' distribution. Tiles of one
            photograph or rows of one person are one draw: give one of each, or `sources`.
        labels: (n,), if the attacker knows the label and may choose candidates by class.
        guesses: number of the attacker's candidates, of which one has to match: the batch or the
            cohort.
        confidence: of the limit, over the draw of the public examples.
        sources: (n,) who or what each example comes from; one random example of each is taken.
            Sources that are drawn independently give independent examples. The statement is then
            for a random example of a random source, such as a person: a source with many examples
            counts once.
        source_sizes: (m, mu), declared: the largest and the mean number of examples of a source
            among private ones. The statement is then for a random example, and the bounds are
            multiplied by m / mu. No sample shows m: a larger source may not be in it.
        classes: number of labels, seen or not; it gives a tighter limit if no two examples of a
            class match.
        distance: which candidates match; by default those up to a mean squared error. For others,
            read the levels `eta` below in its units, such as a number of columns.
        knows: what the labels stand for, if the attacker knows more than a label (`informed`).

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
    distance: Distance = field(default_factory=SquaredError)
    source_sizes: tuple[float, float] | None = None
    knows: str = LABELS

    places: Array = field(init=False)
    """(n,) which of the given examples were taken."""

    def __post_init__(self) -> None:
        rows = flat_images(self.examples)
        # Random order: data are often sorted by class, and the first of each source would be too.
        order = np.random.default_rng(0).permutation(len(rows))
        if self.sources is not None:
            _, first = np.unique(np.asarray(self.sources)[order], return_index=True)
            order = np.random.default_rng(1).permutation(order[first])
        if self.source_sizes is not None:
            largest, mean = self.source_sizes
            if self.sources is None or not 1 <= mean <= largest:
                raise ValueError(
                    f"source_sizes is {self.source_sizes}; give the largest and the mean number of "
                    "examples of a source, both at least 1, beside sources"
                )
        # In the given order again, so that labels and sources keep their places.
        keep = np.sort(order[:MOST])
        object.__setattr__(self, "examples", rows[keep])
        object.__setattr__(self, "_coded", self.distance.coded(rows[keep]))
        object.__setattr__(self, "places", keep)
        if self.labels is not None:
            labels = np.asarray(self.labels)
            if len(labels) != len(rows):
                raise ValueError(f"labels holds {len(labels)}; give one for each of {len(rows)}")
            if labels.ndim > 1:  # such as masks: examples of one class have the same
                labels = np.unique(
                    labels.reshape(len(rows), -1),
                    axis=0,
                    return_inverse=True,
                )[1]
            labels = labels.reshape(-1)
            object.__setattr__(self, "labels", labels[keep])
        single(whole, guesses=self.guesses)
        single(probability, confidence=self.confidence)
        object.__setattr__(self, "_kept", {})
        object.__setattr__(self, "_near", {})
        object.__setattr__(self, "_asked", [])

    @property
    def basis(self) -> Basis:  # type: ignore[override]
        """Whether the attacker has nothing of the example, or parts of it."""
        return "sample" if self.knows == LABELS else "known parts"

    @property
    def n(self) -> int:
        """Number of independent public examples."""
        return len(self.examples)

    @property
    def dim(self) -> int:  # type: ignore[override]
        """N."""
        return int(self.examples.shape[1])

    @property
    def name(self) -> str:  # type: ignore[override]
        """What the bound rests on, as text."""
        sure = f"{self.confidence:.0%} confidence"
        return f"{self.n} public {self._noun} without a model, {sure}, {self._known}{self._target}"

    @property
    def _target(self) -> str:
        """For whom the statement is, if examples come from sources."""
        if self.sources is None:
            return ""
        if self.source_sizes is None:
            return ", for a random example of a random source"
        return f", sources of up to {format_upper(self.density)} times the mean size, as declared"

    @property
    def density(self) -> float:
        """How much denser private examples may be than those taken: m / mu."""
        return 1.0 if self.source_sizes is None else self.source_sizes[0] / self.source_sizes[1]

    @property
    def thinness(self) -> float:
        """How much thinner they may be: 1 / mu, as a source has an example or more."""
        return 1.0 if self.source_sizes is None else 1 / self.source_sizes[1]

    @property
    def _noun(self) -> str:
        return self.distance.noun.removesuffix("s") + "s"

    @property
    def _known(self) -> str:
        return f"{self.knows} known" if self.labels is not None else "labels not known"

    @cached_property
    def _groups(self) -> list[Array]:
        if self.labels is None:
            return [np.arange(self.n)]
        return [np.flatnonzero(self.labels == y) for y in np.unique(self.labels)]

    def counts(self, eta: float) -> list[BallCounts]:
        """The counts of balls at a level of eta, by class if labels are known."""
        kept: dict[float, list[BallCounts]] = self._kept  # type: ignore[attr-defined]
        if eta not in kept and self._open(eta):
            kept[eta] = [BallCounts(np.full(n, n), n, "all") for n in map(len, self._groups)]
        elif eta not in kept:
            kept[eta] = [self._counts(place, rows, eta) for place, rows in enumerate(self._rows)]
        return kept[eta]

    def _counts(self, place: int, rows: Array, eta: float) -> BallCounts:
        if len(rows) == 1:  # as in most classes where an attacker knows much
            return BallCounts(np.ones(1, int), 1, "neighbors")
        return counts_of(rows, eta, self._nearby(place, rows, eta), self.distance)

    @property
    def _rows(self) -> list[Array]:
        """The coded examples, by class if labels are known."""
        return [self._coded[group] for group in self._groups]  # type: ignore[attr-defined]

    def _open(self, eta: float) -> bool:
        """Whether two rows that one candidate matches may differ in every column."""
        return 2 * eta >= (self.distance.columns or math.inf)

    def alone(self, eta: float) -> Array:
        """Places of the examples that no candidate matches together with another example.

        The others of the class, if labels are known.

        Example:
            >>> PublicSample([[0.0], [0.1], [0.9]]).alone(0.01).tolist()
            [2]
        """
        alone = [
            group[balls.each == 1]
            for group, balls in zip(self._groups, self.counts(eta), strict=True)
        ]
        return np.sort(self.places[np.concatenate(alone)])

    def _nearby(self, place: int, rows: Array, eta: float) -> Neighbors:
        """The neighbors of a class at a level, and at all levels that are asked with it."""
        known: dict[int, Neighbors] = self._near  # type: ignore[attr-defined]
        reach = self.distance.reach(eta)
        if place not in known or not known[place].holds(reach):
            asked: Array = self._asked  # type: ignore[attr-defined]
            reaches = {self.distance.reach(level) for level in asked if not self._open(level)}
            known[place] = neighbors(self.distance.among(rows), *reaches | {reach})
        return known[place]

    def largest(self, eta: float) -> int:
        """K*: the most public examples that one candidate matches (one per class for labels)."""
        return sum(balls.most for balls in self.counts(eta))

    def log_kappa(self, eta: ArrayLike, *, parts: int = 1) -> Any:
        """Upper confidence limits on the logarithm of kappa; for several eta they hold jointly.

        With `parts`, this limit uses one of that many parts of the failure probability. kappa rises
        with eta, so a limit at a larger eta holds at all smaller ones: at most ANCHORS are made.
        """
        levels = self.distance.levels(eta)
        places = anchors(levels)
        object.__setattr__(self, "_asked", places)
        tail = (1 - self.confidence) / (len(places) * parts)
        # The largest first: its pairs of neighbors contain those of all others.
        limits = [self._limit(float(level), tail) for level in places[::-1]]
        logs = np.log(np.array(limits[::-1])[np.searchsorted(places, levels)])
        return one(logs.reshape(np.shape(eta)))

    def success_bound(
        self,
        lift: Lift | float,
        eta: ArrayLike,
    ) -> tuple[Array, Array]:
        """Upper bound on any attacker's success, and the log kappa behind it.

        It is the better of the limit on kappa and the profile bound. Each uses half of the failure
        probability; for several eta they hold jointly.

        Args:
            lift: F, concave and rising: from the logarithm of a prior-only success to an upper
                bound on the success with the update, such as the trade-off function of a whole
                training. A number is the noise multiplier of one full-batch release.
            eta: mean squared errors, or levels of another distance.

        Example:
            >>> rows = np.random.default_rng(0).random((400, 16))
            >>> round(float(PublicSample(rows).success_bound(1.0, 0.001)[0][0]), 2)
            0.07
        """
        levels = self.distance.levels(eta)
        law = lift if callable(lift) else gaussian_lift(lift)
        known = np.atleast_1d(np.asarray(self.log_kappa(levels, parts=2)))
        places = anchors(levels)
        envelope = _envelope(law)
        tail = (1 - self.confidence) / (2 * len(places))
        made = [self._profile(envelope, float(e), 1 - tail) for e in places[::-1]]
        profiles = np.array(made[::-1])[np.searchsorted(places, levels)]
        return np.minimum(np.minimum(1.0, law(known)), profiles), known

    def _limit(self, eta: float, tail: float) -> float:
        if not math.isfinite(eta):
            return 1.0
        return min(1.0, (self._by_column if self._open(eta) else self._by_ball)(eta, tail))

    def _by_ball(self, eta: float, tail: float) -> float:
        """A limit from the examples that one candidate matches, or one of each class."""
        counts = self.counts(eta)
        held = sum(
            min(self.guesses * balls.most, len(group))
            for balls, group in zip(counts, self._groups, strict=True)
        )
        limit = count_limit(held, self.n, confidence=1 - tail)
        # No two of a class match: a birthday bound. Examples of a class not seen may match, too.
        classes = 0 if self.classes is None else max(self.classes, len(counts))
        if classes > 1 and held == len(counts):
            met = lambda x: classes * math.log1p(x / classes) - x - math.log(tail)  # noqa: E731
            far = 10 * (classes + 1) * (1 - math.log(tail))
            limit = min(limit, float(optimize.brentq(met, 0.0, far)) / self.n)
        return limit * self.density

    def _by_column(self, eta: float, tail: float) -> float:
        """Markov: with the probability kappa_j that a value of column j matches, a candidate
        matches k of the columns with a probability of at most the sum of kappa_j over k.
        """
        assert isinstance(self.distance, ColumnMisses)  # no other distance is open
        count = self.distance.columns
        if eta >= count:
            return 1.0
        held = np.sum([self.distance.widest(rows) for rows in self._rows], 0)
        total = sum(self._share(int(most), tail / count) for most in held)
        return self.guesses * self.density * total / (count - math.floor(eta))

    def _share(self, count: int, tail: float) -> float:
        """Upper limit on the share of new examples that one candidate matches, from a count."""
        return count_limit(count, self.n, confidence=1 - tail)

    def mean_error(self, lift: Lift | float, etas: ArrayLike) -> float:
        """Lower bound on any attacker's mean squared error.

        The mean of an error is the integral of the probability that it exceeds eta. The success
        bound limits this probability from below: sum (eta_j - eta_(j-1)) (1 - bound(eta_j)). It
        needs no smoothness and no model of the data, and it holds for malicious servers too.

        Args:
            lift: as in `success_bound`.
            etas: MSEs at which the bound is evaluated, at most ANCHORS, fixed beforehand.

        Source: this project; docs/errata.md, "Ours".

        Example:
            >>> rows = np.random.default_rng(0).random((400, 16))
            >>> round(PublicSample(rows).mean_error(3.0, [0.0002, 0.002, 0.01]), 4)
            0.0097
        """
        levels = np.unique(positive("etas", etas))
        bound = self.success_bound(lift, levels)[0]
        return float((np.diff(levels, prepend=0.0) * (1 - bound)).sum())

    def _profile(
        self,
        envelope: tuple[Array, Array],
        eta: float,
        confidence: float,
    ) -> float:
        """The profile bound of this sample at one eta."""
        if not math.isfinite(eta):
            return 1.0
        each = [balls.each for balls in self.counts(eta)]
        return min(1.0, self.density * _profile_limit(each, envelope, self.guesses, confidence))

    def needed(self, gamma: float, *, parts: int = 1) -> int:
        """`examples_needed` for a limit that uses one part of the failure probability."""
        return examples_needed(gamma, confidence=1 - (1 - self.confidence) / parts)


class TheseExamples(PublicSample):
    """Upper bound on any attacker's average success over these very examples.

    For auditors who hold the private examples. The target is one of them, each equally likely, and
    the attacker may know all of them. A batch has `guesses` examples; all but the target may be
    known. The bound is exact: it needs no confidence and no assumption on how the
    examples are drawn. It says nothing about new examples. It depends on private data: keep it
    local.

    Args are those of `PublicSample`, without `sources`: every example is its own target.

    Source: this project; docs/errata.md, "Ours".

    Example:
        >>> rows = np.random.default_rng(0).random((400, 16))
        >>> round(float(TheseExamples(rows).success_bound(1.0, 0.001)[0][0]), 4)
        0.0354
    """

    basis = "examples"

    def __post_init__(self) -> None:
        if self.sources is not None:
            raise ValueError(
                "sources is given, but each of these examples is a target; leave it out"
            )
        count = len(flat_images(self.examples))
        if count > MOST:
            raise ValueError(f"examples holds {count}; give at most {MOST}")
        super().__post_init__()

    @property
    def name(self) -> str:  # type: ignore[override]
        """What the bound rests on, as text."""
        return f"these {self.n} {self._noun}, {self._known}"

    def _by_ball(self, eta: float, tail: float) -> float:
        return self.guesses * self.largest(eta) / self._left

    def _share(self, count: int, tail: float) -> float:
        return count / self._left

    def _profile(
        self,
        envelope: tuple[Array, Array],
        eta: float,
        confidence: float,
    ) -> float:
        """The largest mean success over all candidates; exact at every confidence."""
        each = [np.asarray(balls.each, float) for balls in self.counts(eta)]
        seen = sum(_most_success(sizes, envelope, self.guesses) for sizes in each)
        return min(1.0, seen / self._left)

    @property
    def _left(self) -> int:
        """Examples that the target may be if all others of the batch are known."""
        return max(1, self.n - self.guesses + 1)


def examples_needed(gamma: float, *, confidence: float = CONFIDENCE) -> int:
    """Number of public examples below which no noise meets a probability of gamma.

    This many suffice with strong noise if no two of them match, that is at K* = 1.

    Example:
        >>> examples_needed(0.001)
        4742
    """
    wanted = single(probability, gamma=gamma)
    count: int = math.ceil(special.gammaincinv(2, confidence) / wanted)  # Poisson, for rare events
    while 2 < count < 1_000_000 and count_limit(1, count - 1, confidence=confidence) <= wanted:
        count -= 1
    return count


def anchors(levels: Array) -> Array:
    """At most ANCHORS of the levels, rising, with the largest among them."""
    rising = np.unique(levels)
    places = np.unique(np.linspace(0, len(rising) - 1, ANCHORS).round().astype(int))
    return rising if len(rising) <= ANCHORS else rising[places]


def _profile_limit(
    each: list[Array],
    envelope: tuple[Array, Array],
    guesses: int,
    confidence: float,
) -> float:
    """Upper limit on every attacker's success, with d_i = `each`, one array per class.

    A candidate chosen without the update matches example i with a probability q_i, with
    sum q_i / d_i <= `guesses`, because the ball around it holds at most d_i examples. The update
    lifts q_i to F(q_i). The largest mean of F(q_i) is a function of the sample that changes little
    with one example (it is self-bounding), which gives the limit for the distribution.

    Source: this project; Boucheron, Lugosi and Massart 2000 for self-bounding functions.
    """
    seen = _all_success(each, envelope, guesses)
    n = sum(map(len, each))
    return min(1.0, self_bounding_limit(seen, confidence=confidence) / n)


def self_bounding_limit(
    seen: float,
    *,
    confidence: float = CONFIDENCE,
) -> float:
    """Upper confidence limit on the mean of a self-bounding function from one observed value.

    A self-bounding function of independent examples changes by 0 to 1 when one of them is left
    out, and all these changes sum to at most its value. The limit is the root v above z = `seen` of
    v - z - z ln(v / z) = ln(1 / (1 - confidence)).

    Source: Boucheron, Lugosi and Massart 2000.

    Example:
        >>> [round(self_bounding_limit(seen), 2) for seen in (0.0, 1.0, 10.0)]
        [3.0, 5.74, 19.85]
    """
    log = -math.log1p(-single(probability, confidence=confidence))
    if seen <= 0:
        return log
    missed = lambda v: v - seen - seen * math.log(v / seen) - log  # noqa: E731
    far = seen + 2 * log + 4 * math.sqrt(seen * log) + 4
    return float(optimize.brentq(missed, seen, far))


def gaussian_lift(noise_multiplier: float) -> Lift:
    """The lift of one release of the Gaussian mechanism: Phi(Phi^-1(q) + 1 / s)."""
    return lambda log: np.asarray(identification.gaussian(noise_multiplier, log_kappa=log))


def _envelope(lift: Lift | float) -> tuple[Array, Array]:
    """Points (q, F) of a concave polyline above the lift, with q rising from 0 to 1.

    In each interval the lift counts with its value at the right end.
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


def _below(
    q: Array,
    above: Array,
    first: int,
    middle: int,
    last: int,
) -> bool:
    rise = above[last] - above[first]
    run = q[last] - q[first]
    return bool((above[middle] - above[first]) * run <= rise * (q[middle] - q[first]))


def _all_success(
    each: list[Array],
    envelope: tuple[Array, Array],
    guesses: int,
) -> float:
    """The sum of `_most_success` over classes. Many have equal counts: computed once."""
    known: dict[bytes, float] = {}
    total = 0.0
    for sizes in each:
        rising = np.sort(np.asarray(sizes, float))
        key = rising.tobytes()
        if key not in known:
            known[key] = _most_success(rising, envelope, guesses)
        total += known[key]
    return total


def _most_success(
    each: Array,
    envelope: tuple[Array, Array],
    guesses: int,
) -> float:
    """An upper bound on the largest sum of F(q_i) with sum q_i / d_i <= `guesses`.

    By duality: any multiplier l > 0 gives the limit l `guesses` + sum max_q (F(q) - l q / d_i).
    """
    values, number = np.unique(each, return_counts=True)
    q, above = envelope
    slopes = np.diff(above) / np.diff(q)

    def dual(log: float) -> float:
        price = math.exp(log) / values
        at = np.searchsorted(-slopes, -price)  # points up to which the line rises faster
        return float(math.exp(log) * guesses + number @ (above[at] - price * q[at]))

    # Every multiplier gives a valid limit, so an inexact minimum errs upwards only.
    optimum = optimize.minimize_scalar(
        dual,
        bounds=(-40.0, 60.0),
        options={"xatol": 1e-6},
    )
    return min(float(len(each)), float(optimum.fun) * (1 + ROUNDING))


def same_law(
    first: ArrayLike,
    second: ArrayLike,
    source: np.random.Generator,
) -> float:
    """The p-value of a test whether two samples can have one distribution.

    The statistic is how often an example's nearest neighbor is from its own sample, compared with
    permutations. A small value shows that private examples are not distributed like public ones, so
    no bound from the public ones covers them. A large value proves nothing.

    Shapes: (n, N) and (m, N); at most 1,000 rows of each are compared.

    Source: Schilling 1986, nearest-neighbor test.

    Example:
        >>> draw = np.random.default_rng(0)
        >>> same_law(draw.random((200, 4)), draw.random((200, 4)) ** 3, draw) < 0.01
        True
    """
    # Random order: data are often sorted, and the first rows would be similar.
    a, b = (source.permutation(flat_images(rows))[:LOOKED] for rows in (first, second))
    if len(a) < 2 or len(b) < 2:
        return 1.0
    rows = np.concatenate([a, b])
    square = np.square(rows).sum(1)
    apart = square[:, None] + square - 2 * rows @ rows.T
    np.fill_diagonal(apart, np.inf)
    nearest = apart.argmin(1)
    in_first = np.arange(len(rows)) < len(a)
    met = (in_first == in_first[nearest]).mean()
    drawn = [source.permutation(in_first) for _ in range(PERMUTATIONS)]
    more = sum((mixed == mixed[nearest]).mean() >= met for mixed in drawn)
    # The observed order counts as one permutation, so that the p-value is valid and never 0.
    return float((1 + more) / (PERMUTATIONS + 1))
