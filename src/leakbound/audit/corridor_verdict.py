"""The word on a corridor alone, where no attack was run: exposed, protected or undecided."""

from __future__ import annotations

import numpy as np

from leakbound.audit.corridor import Corridor
from leakbound.bounds.identification import log_kappa_sphere

IGNORANT = (
    "A uniform direction knows nothing of what these records look like: against an attacker who "
    "does, this noise protects less, and nothing here is called protected"
)


def verdict_of(
    edges: Corridor, index: int, alike: float | None, accepted: float, known: bool
) -> str:
    """Exposed first: under a prior other than the lower edge's, the upper one may lie below it.

    Exposed is what the update tells beyond a blind guess, under either edge's prior. Not protected
    where such a guess reaches more of the data than is accepted, nor under a prior that knows
    nothing of the data that are there (`known`).
    """
    lower, upper = float(edges.lower[index]), float(edges.upper[index])
    own = edges.setting
    direction = log_kappa_sphere(dim=own.dim, eta=float(edges.eta[index]), norm=own.norm)
    guess = max(float(np.exp(edges.log_kappa[index])), alike or 0.0)
    if lower > accepted and lower > max(guess, float(np.exp(direction))) * (1 + 1e-9):
        return "exposed"
    return "protected" if known and upper <= accepted and guess <= accepted else "undecided"
