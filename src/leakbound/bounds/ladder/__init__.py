"""The prior ladder: what an attacker reaches, and what none exceeds, the more it knows of images.

Each rung is a prior of the records. `success` is attained by that prior's posterior attack on the
linear trap's answer y = X / |X| + noise_multiplier * xi, so a lower edge; `log_kappa` bounds the
blind success from above and makes the upper edge, `corridor(..., log_kappa=rung.log_kappa)`. In
both, records come from the rung's prior, which names no norm to the attacker but that it holds.
"""

from leakbound.bounds.ladder.blend import GaussianImages, Mixture
from leakbound.bounds.ladder.gallery import Gallery
from leakbound.bounds.ladder.rung import Estimate, KnownNorm, Rung
from leakbound.bounds.ladder.seen import FEWEST, KINDS, Seen, alike, from_images

__all__ = [
    "FEWEST",
    "KINDS",
    "Estimate",
    "Gallery",
    "GaussianImages",
    "KnownNorm",
    "Mixture",
    "Rung",
    "Seen",
    "alike",
    "from_images",
]
