"""A language model as a prior of sequences, and the prior-only success under it; and how often
words are found under noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
from numpy.typing import ArrayLike

from leakbound._util.intervals import clopper_pearson
from leakbound.bounds.distances import ColumnMisses
from leakbound.bounds.law import Array, one, positive, probability, rate, single, whole
from leakbound.bounds.record_priors import MIN_EXAMPLES, MOST, TOGETHER, Baseline

__all__ = ["BIGRAM", "BigramText", "pursuit_power"]

BIGRAM = "bigram"
"""The name of this prior."""
CONFIDENCE = 0.95
STARTS = 32
"""Number of common public sequences from which a candidate climbs."""
ROUNDING = 1e-9
"""Relative rounding of sums of products; added, to keep an upper bound."""


def pursuit_power(
    noise_multiplier: ArrayLike,
    rows: int,
    *,
    level: float = 0.01,
    share: float = 1.0,
) -> Any:
    """Probability that a pursuit in noisy changes of adapters (`adapter_words`) finds a word.

    The word's input meets the `rows` rows of the changes of all adapters at once. The square of
    what it meets is chi-square without the word and noncentral with it. This is far below F(level),
    the most of any attacker, if there are many rows: nobody knows how the word spreads over them.

    Args:
        noise_multiplier: noise standard deviation / clip norm, of one release.
        rows: ranks of all adapters that read the embedding, together.
        level: how often a word that does not occur is named. For lists of `adapter_words` it is
            their level over the number of tokens in the vocabulary.
        share: length of the word's part of the clipped change / clip norm.

    Assumptions: the noise is known, and nothing else covers the word: the pursuit has found and
        removed what the others leave.

    Source: this project; the statistic of `adapter_words` under Gaussian noise.

    Example:
        >>> [round(pursuit_power(0.5, rows), 3) for rows in (1, 32)]
        [0.282, 0.037]
    """
    noise = positive("noise_multiplier", noise_multiplier)
    limit = scipy.stats.chi2.isf(single(probability, level=level), single(whole, rows=rows))
    return one(scipy.stats.ncx2.sf(limit, rows, (single(rate, share=share) / noise) ** 2))


@dataclass(frozen=True, eq=False)
class BigramText(Baseline):
    """Sequences (n,) of tokens in which each depends on the one before: a smoothed bigram model.

    P(v | u) = (1 - w_u) count(u, v) / count(u) + w_u P(v), with w_u = t_u / (t_u + count(u)), where
    t_u is the number of different tokens that follow u. P(v) is their share of all tokens, with one
    more of each token of the vocabulary.

    `log_kappa` bounds how often any one sequence differs from a random one in at most eta places.
    It is exact for eta = 0. For more, it lets every token of the candidate depend on the random
    sequence's tokens before, which can only raise the probability. The model treats repeated
    sentences, and sentences of one pattern, as far rarer than they are. So the bound is at least
    the upper limit (95 %) on how often the best candidate matches that is found from public text.

    Args:
        first: (V,) probabilities of the first token.
        shared: (V,) the P(v).
        mixed: (V,) the weights w_u of P(v) after each token.
        follows: (V, V) sparse, (1 - w_u) count(u, v) / count(u).
        length: n.
        seen: (N, n) public sequences that one candidate may match as often as counted.

    Source: Witten and Bell 1991 for the smoothing; the bound is this project's.

    Example:
        >>> rows = np.tile([[1, 2, 1], [2, 1, 2]], (50, 1))
        >>> model = BigramText.from_sequences(rows, vocabulary=3)
        >>> round(float(np.exp(model.log_kappa(0))), 3)
        0.586
    """

    first: Array
    shared: Array
    mixed: Array
    follows: scipy.sparse.csr_array
    length: int
    seen: Array

    name = "bigram model of the public text, no rarer than seen"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", self.length)
        # Times 4, so that different tokens also differ at twice the tolerance, which is 2.
        object.__setattr__(
            self, "distance", ColumnMisses(lambda rows: 4 * rows, self.length, "sequence", "tokens")
        )

    @classmethod
    def from_sequences(
        cls,
        sequences: ArrayLike,
        vocabulary: int,
    ) -> BigramText:
        """Count the tokens of sequences (N, n), padding included.

        Raises:
            ValueError: there are fewer than 64 sequences, or tokens outside of the vocabulary.
        """
        rows = np.asarray(sequences).astype(np.int64)
        if rows.ndim != 2 or len(rows) < MIN_EXAMPLES:
            raise ValueError(
                f"sequences has shape {rows.shape}; give (N, n) with N of {MIN_EXAMPLES} or more"
            )
        if rows.min() < 0 or rows.max() >= vocabulary:
            raise ValueError(
                f"sequences run from {rows.min()} to {rows.max()}; the vocabulary has the tokens 0 "
                f"to {vocabulary - 1}"
            )
        # One more of each, so that no token is impossible.
        shared = np.bincount(rows.ravel(), minlength=vocabulary) + 1.0
        shared /= shared.sum()
        starts = np.bincount(rows[:, 0], minlength=vocabulary).astype(float)
        share = _weight(np.count_nonzero(starts), starts.sum())
        before = rows[:, :-1].ravel()
        after = rows[:, 1:].ravel()
        size = vocabulary, vocabulary
        counts = scipy.sparse.csr_array((np.ones(len(before)), (before, after)), shape=size)
        counts.sum_duplicates()
        total = counts.sum(1)
        kinds = np.diff(counts.indptr)
        mixed = _weight(kinds, total)
        scale = scipy.sparse.diags_array((1 - mixed) / np.maximum(total, 1))
        return cls(
            (1 - share) * starts / starts.sum() + share * shared,
            shared,
            mixed,
            scipy.sparse.csr_array(scale @ counts),
            rows.shape[1],
            # A regular sample: comparisons grow with the square.
            rows[:: -(-len(rows) // MOST)],
        )

    def log_kappa(self, eta: ArrayLike) -> Any:
        levels = self.distance.levels(eta)
        most = int(min(np.floor(levels.max()), self.length))
        best = self._best(most)
        model = np.array([best[min(int(level), most)] for level in np.floor(levels)])
        bound = np.maximum(model * (1 + ROUNDING), [self._matched(level) for level in levels])
        return one(np.minimum(0.0, np.log(bound)).reshape(np.shape(eta)))

    def _matched(self, level: float) -> float:
        """Upper limit (95 %, Clopper-Pearson) on how often the best candidate matches that a climb
        from common public sequences finds.
        """
        rows = self.seen
        most = 0
        counts = []
        for at in range(0, len(rows), TOGETHER):
            apart = self.distance.apart(rows[at : at + TOGETHER], rows)
            most = max(most, int((apart <= level).sum(1).max()))
            counts.append((apart <= 2 * level).sum(1))
        # A candidate matches many only near sequences with many neighbors.
        for at in np.concatenate(counts).argsort()[-STARTS:]:
            close = rows[(rows != rows[at]).sum(1) <= 2 * level]
            middle = np.array([np.bincount(column).argmax() for column in close.T])
            most = max(most, self._climbed(middle, level), self._climbed(rows[at], level))
        return clopper_pearson(most, len(rows), 1 - CONFIDENCE)[1]

    def _climbed(self, candidate: Array, level: float) -> int:
        """How many public sequences a candidate (n,) matches after changes of one token that raise
        this number.
        """
        candidate = candidate.copy()
        while True:
            apart = self.seen != candidate
            far = apart.sum(1) - int(level)
            entering = self.seen[far == 1]
            leaving = (~apart[far == 0]).sum(0)
            gains = []
            for place, column in enumerate(entering.T):
                tokens, number = np.unique(column[column != candidate[place]], return_counts=True)
                gains += [
                    (int(k - leaving[place]), place, v) for v, k in zip(tokens, number, strict=True)
                ]
            gain, place, token = max(gains, default=(0, 0, 0))
            if gain <= 0:
                return int((far <= 0).sum())
            candidate[place] = token

    def _best(self, most: int) -> Array:
        """(most + 1,) largest probability that at most 0, 1, ... places of a sequence differ."""
        value = np.ones((len(self.shared), most + 1))  # of what follows each token
        for _ in range(self.length - 1):
            fewer = np.concatenate([np.zeros((len(value), 1)), value[:, :-1]], 1)
            gain = value - fewer  # of a right token
            mean = self.follows @ fewer + np.outer(self.mixed, self.shared @ fewer)
            value = mean + self._largest(gain)
        fewer = np.concatenate([np.zeros((len(value), 1)), value[:, :-1]], 1)
        return np.asarray(self.first @ fewer + (self.first[:, None] * (value - fewer)).max(0))

    def _largest(self, gain: Array) -> Array:
        """(V, K) the largest P(v | u) gain (V, K) over v, for each u."""
        largest = np.outer(self.mixed, (self.shared[:, None] * gain).max(0))
        rows, columns = self.follows.nonzero()
        if not len(rows):
            return largest
        chances = self.follows.data + self.mixed[rows] * self.shared[columns]
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        for k in range(gain.shape[1]):
            best = np.maximum.reduceat(chances * gain[columns, k], starts)
            largest[rows[starts], k] = np.maximum(largest[rows[starts], k], best)
        return largest


def _weight(kinds: Any, total: Any) -> Any:
    """The weight of what all tokens share, from how many followed and of how many kinds."""
    return np.where(total > 0, kinds / np.maximum(kinds + total, 1), 1.0)
