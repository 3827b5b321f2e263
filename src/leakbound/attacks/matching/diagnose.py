"""Why a search failed, by what the attacker sees."""

from __future__ import annotations

from torch import Tensor

from leakbound.attacks.matching.objective import Objective, hides
from leakbound.attacks.matching.search import Search
from leakbound.types import Exact

VANISHED = "gradient vanished: the update is zero everywhere"
STUCK = 0.9
UNEXPLAINED = 0.1
MASKED = 1e-3
"""What an answer may leave of an exact update of which a known mask withholds a part: the fewer
coordinates are seen, the better wrong images match them (at 90 % pruned, to half a percent)."""
MOSTLY = 0.99


def diagnose(search: Search, final: float, images: Tensor, labels: Tensor) -> str | None:
    """Why the search whose best iterate this is has failed; None where nothing shows."""
    if search.vanished:
        return "gradient vanished: the objective does not change with the inputs"
    if not final < float("inf"):
        return "not finite: the objective was never a number"
    objective, noise = search.objective, search.objective.noise_share
    if noise > MOSTLY:
        return f"too much noise: it is {noise:.0%} of the update, and a match says little"
    lowest = min((v for v in search.trace if v == v), default=float("nan"))
    if not lowest <= STUCK * search.trace[0]:
        start = search.trace[0]
        return f"objective did not fall: {start:.3g} at the start, {lowest:.3g} at best"
    left = unexplained(objective, images, labels)
    if left < noise / 2:
        return (
            f"noise was fitted: the answer leaves {left:.0%} of the update unexplained, though "
            f"{noise:.0%} of it is noise"
        )
    masked = hides(objective.observation) and isinstance(objective.observation.update.law, Exact)
    if not left <= (MASKED if masked else UNEXPLAINED) + noise:
        return (
            f"objective did not fall far enough: the answer leaves {100 * left:.2g}% of the "
            f"update unexplained, of which noise would be {noise:.0%}"
        )
    return None


def unexplained(objective: Objective, images: Tensor, labels: Tensor) -> float:
    """Share of the (weighted) update's energy that no multiple of the guess's update has."""
    rows = objective.seen_of(objective.rows(images, labels)).detach()
    scale = 1.0 if objective.weights is None else objective.weights
    mine, seen = (rows * scale).double().flatten(), (objective.seen * scale).double().flatten()
    both = (mine.square().sum() * seen.square().sum()).clamp_min(1e-300)
    return float(1 - (mine @ seen).square() / both)
