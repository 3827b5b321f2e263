"""The word on a corridor alone, where no attack was run: exposed, protected or undecided."""

from __future__ import annotations

import numpy as np

from leakbound.audit.corridor import Corridor
from leakbound.bounds.identification import log_kappa_sphere

UNINFORMED = (
    "The prior is a uniform direction, which knows nothing about the data. An attacker who knows "
    "similar data exceeds these numbers, so nothing here is called protected"
)


def verdict_of(edges: Corridor, index: int, alike: float | None, accepted: float) -> str:
    """Exposed first: under a prior other than the lower edge's, the upper one may lie below it.

    Exposed is what the update reveals beyond a blind guess, under either edge's prior. Not
    protected where such a guess reaches more of the data than is accepted (`alike`), nor under a
    prior that knows nothing about the data (`Corridor.informed`).
    """
    lower, upper = float(edges.lower[index]), float(edges.upper[index])
    own = edges.setting
    direction = log_kappa_sphere(dim=own.dim, eta=float(edges.eta[index]), norm=own.norm)
    guess = max(float(np.exp(edges.log_kappa[index])), alike or 0.0)
    if lower > accepted and lower > max(guess, float(np.exp(direction))) * (1 + 1e-9):
        return "exposed"
    safe = edges.informed and upper <= accepted and guess <= accepted
    return "protected" if safe else "undecided"
