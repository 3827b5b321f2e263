"""A linear trap over several rounds whose noise may be correlated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakbound.attacks.trap import LinearTrap
from leakbound.core import Gaussian, NotApplicable, Observation, Reconstruction
from leakbound.correlation import Factor


@dataclass(frozen=True)
class CorrelatedTrap(LinearTrap):
    """Send the linear trap in every round and combine all releases into one estimate.

    The example adds the same vector u in the rounds of its pattern p. Releases of `CorrelatedNoise`
    have the noise sigma C^-1 Z, which the weights C^T C p / |C p|^2 average best: the result is u
    with noise sigma / |C p|, and holds all that the releases say about u. Rounds without the
    example count too, because their noise cancels. A mean over the example's own rounds is weaker.

    Without correlated noise the weights are equal. Without a history it is `linear_trap`.

    Args:
        pattern: the rounds of the history that hold the example, from 0 on; empty: all.

    The other settings are those of `LinearTrap`.

    Assumptions: the history has every release of the client, all with the same bound on an example.
        In rounds outside the pattern the malicious layer's gradient is zero, or known and
        subtracted.

    Raises:
        NotApplicable: as `LinearTrap`; the rounds differ in shape or bound; the pattern names
            rounds that were not seen.

    Source: docs/correlated_noise.md; the linear trap: Riess et al. (paper C), section IV.

    Example:
        >>> CorrelatedTrap("gamma", eta=0.01, pattern=(0, 4, 8, 12)).pattern
        (0, 4, 8, 12)
    """

    pattern: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = all(type(at) is int and at >= 0 for at in self.pattern)
        if not whole or len({*self.pattern}) < len(self.pattern):
            raise ValueError(f"pattern is {self.pattern}; give different rounds from 0 on")

    def __call__(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        return super().__call__(self._together(observation), generator)

    def estimate(self, observation: Observation) -> Tensor:
        return super().estimate(self._together(observation))

    def _together(self, observation: Observation) -> Observation:
        """One observation, without a history, of the weighted sum of all rounds."""
        if not observation.history:
            return observation
        seen = [each.update for each in (*observation.history, observation)]
        last = seen[-1]
        count = len(seen)
        pattern = self.pattern or tuple(range(count))
        if max(pattern) >= count:
            raise NotApplicable(f"pattern is {pattern}, but only {count} rounds were seen")
        if any(each.rows.shape != last.rows.shape or each.bound != last.bound for each in seen):
            raise NotApplicable("the rounds differ in shape, or in the bound on an example")
        found = (getattr(k, "factor", None) for k in getattr(observation.defense, "links", ()))
        own = next((one for one in found if isinstance(one, Factor)), None)
        factor = Factor.parse("none", count) if own is None else own.first(count)
        weights = factor.weights(pattern)
        none = torch.zeros_like(last.rows)
        rows = sum((float(w) * u.rows for w, u in zip(weights, seen, strict=True)), none)
        law = last.law
        if isinstance(law, Gaussian):
            last_noise = float(factor.inverse[-1] @ factor.inverse[-1])
            least = 1 / factor.attained(pattern) ** 2
            law = replace(law, covariance=law.covariance * (least / last_noise))
        return replace(observation, update=replace(last, rows=rows, law=law), history=())
