"""How well updates that hold the same record are told from those that do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from leakbound.bounds.law import Law, Scope, between, non_negative, one, whole

__all__ = ["auc"]


@dataclass(frozen=True)
class Auc(Law):
    """Area under the curve of the inner product of two noisy unit vectors."""

    def __call__(
        self, noise_multiplier: ArrayLike, *, dim: ArrayLike, cosine: ArrayLike = 0.0
    ) -> Any:
        """Phi((1 - cosine) / (noise sqrt(2 (2 + noise^2 N)))).

        The inner product of two answers y of one record has mean 1, of two records whose directions
        have the given cosine that cosine; its variance is noise^2 (2 + noise^2 N) for equal ones.

        Shapes: all broadcast.

        Args:
            noise_multiplier: as everywhere.
            dim: N.
            cosine: of the angle between the two records, in [-1, 1]; 0 for orthogonal ones.

        Source: docs/errata.md, "matching"; normal approximation of the inner product's law.

        Example:
            >>> round(auc(0.1, dim=3072), 3)
            0.892
        """
        sigma, n = non_negative("noise_multiplier", noise_multiplier), whole("dim", dim)
        near = between("cosine", cosine, -1, 1)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            z = (1 - near) / (sigma * np.sqrt(2 * (2 + sigma**2 * n)))
        return one(np.where(near == 1, 0.5, special.ndtr(np.nan_to_num(z, nan=0.0, posinf=np.inf))))


auc = Auc(
    Scope(
        covers="one",
        attackers="the inner product of two answers of the linear trap",
        prior="two records of equal norm at the given angle",
        known="the noise multiplier",
        not_said="that no other statistic tells more",
        equation="docs/errata.md, matching",
    )
)
