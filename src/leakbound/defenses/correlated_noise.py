"""Noise that is correlated over a client's rounds: DP-FTRL and matrix factorization."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from torch import Tensor

from leakbound import check
from leakbound.core import Gaussian, Unit, Update
from leakbound.correlation import Array, Factor, Pattern, Scheme
from leakbound.defenses.base import Context, Sent, State
from leakbound.defenses.dp_sgd import GaussianMechanism
from leakbound.randomness import Source

FAINT = 1e-13
"""Smaller entries of a factor or its inverse, relative to the largest, are rounding."""


@dataclass(frozen=True, eq=False)
class NoiseMemory:
    """A client's state: how many rounds it released, and the last noise vectors (1, P).

    They are in units of the bound on one example: C^-1 Z, or Z where C^-1 has the narrower band.
    """

    round: int = 0
    kept: tuple[Tensor, ...] = ()


@dataclass(frozen=True, repr=False)
class CorrelatedNoise(GaussianMechanism):
    """Add row t of sigma C^-1 Z in the client's round t: later noise cancels part of earlier noise.

    C is a public factor and Z is white noise, in units of `bound`: what one example can add to a
    row. Sums of rounds get less noise than with independent noise, and single rounds the same or
    more. It needs an earlier link that bounds every example's contribution (`ClipExamples`).

    The client keeps its noise between rounds: one vector for each diagonal of C or of C^-1, of
    whichever has fewer. A client that loses this state starts a second mechanism; both count.

    Args:
        noise_multiplier: the least noise standard deviation of any single round / the most that
            one example adds. It is sigma for all mechanisms but trees and files.
        mechanism: "none", "root", "tree", "tree_prefixes", "band:4", "bisr:4",
            "blt:0.9,0.5/0.1,0.2" (decays / weights), or the path of a .npy file with C.
        rounds: T, the largest number of rounds of one client.

    Guarantees: each release alone is a Gaussian mechanism with at least this noise multiplier, and
    every release has the Gaussian noise that it declares. All rounds together are a Gaussian
    mechanism with mu = Delta / sigma (`mu`), which is more than one release leaks: Delta is the
    sensitivity of C for the rounds that hold the example.

    Raises:
        ValueError: a round after the last, or an update without a bound.

    Source: Kairouz et al. 2021 (DP-FTRL); Denisov et al. 2022; docs/correlated_noise.md.

    Example:
        >>> from leakbound.defenses import ClipExamples, Mean, chain
        >>> noise = CorrelatedNoise(2.0, mechanism="band:4", rounds=16)
        >>> chain(ClipExamples(1.0), Mean(), noise).guarantee.value
        'differential privacy'
        >>> round(noise.mu([0]), 4), round(noise.mu([0, 4, 8, 12]), 4)
        (0.61, 1.22)
    """

    accepts = frozenset({Unit.CLIENT})

    mechanism: str = "band:4"
    rounds: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check.count(rounds=self.rounds)
        _recipe(self.mechanism, self.rounds)

    @property
    def factor(self) -> Factor:
        """C."""
        return _recipe(self.mechanism, self.rounds)[0]

    @property
    def sigma(self) -> float:
        """Standard deviation of the white noise on C G, over the bound on one example."""
        return self.noise_multiplier / float(np.linalg.norm(self.factor.inverse, axis=1).min())

    def mu(self, participation: Pattern | Scheme) -> float:
        """The mu of Gaussian differential privacy of an example in these rounds (0 is the first).

        Example:
            >>> CorrelatedNoise(3.0, mechanism="tree").mu([0, 4, 8, 12]) > 1
            True
        """
        return self.factor.sensitivity(participation) / self.sigma

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        past: NoiseMemory = NoiseMemory() if state is None else state
        bound = self._bound(update)
        at = past.round
        if at >= self.rounds:
            raise ValueError(
                f"rounds is {self.rounds}, and this client has released as many; give the number "
                "of rounds before the first, or start a new mechanism and count both"
            )
        if past.kept and past.kept[0].shape != update.rows.shape:
            raise ValueError(
                f"state holds noise of shape {tuple(past.kept[0].shape)}, and the update has "
                f"{tuple(update.rows.shape)}; start with the state None for a new model"
            )
        factor, weights, memory = _recipe(self.mechanism, self.rounds)
        scales = self.sigma * factor.inverse[at] * bound  # the part of every round's white noise
        fresh = float(scales[at] ** 2)
        all_of_it = float(scales @ scales)
        begun = update.rows.new_zeros(())
        for weight, noise in zip(
            weights[at, at - len(past.kept) : at],
            past.kept,
            strict=True,
        ):
            begun = begun + float(weight) * noise
        moved = replace(update, rows=update.rows + bound * begun)
        sent = moved.noised(Gaussian(fresh), source)
        new = (sent.rows - update.rows) / bound
        if weights is factor.inverse:
            # Here Z is kept, not C^-1 Z: the part of earlier rounds is taken out.
            new = (new - begun) / float(factor.inverse[at, at])
        kept = (*past.kept, new)[max(0, len(past.kept) + 1 - memory) :]
        if isinstance(sent.law, Gaussian):
            # Seen alone, the release has the noise of earlier rounds, too.
            covariance = sent.law.covariance + (all_of_it - fresh)  # type: ignore[operator]
            sent = replace(sent, law=replace(sent.law, covariance=covariance))
        return sent, NoiseMemory(at + 1, kept)


@lru_cache(maxsize=32)
def _recipe(mechanism: str, rounds: int) -> tuple[Factor, Array, int]:
    """The factor, the weights of kept noise in each round (T, T), and how much is kept."""
    factor = Factor.parse(mechanism, rounds)
    bands = _band(factor.inverse), _band(factor.triangular)
    if bands[0] <= bands[1]:
        return factor, factor.inverse, bands[0] - 1
    diagonal = np.diag(factor.triangular)[:, None]
    return factor, np.asarray(-factor.triangular / diagonal), bands[1] - 1


def _band(lower: Array) -> int:
    rows, columns = np.nonzero(np.abs(lower) > FAINT * np.abs(lower).max())
    return int((rows - columns).max()) + 1
