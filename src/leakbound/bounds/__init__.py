"""Bounds: what no attacker can beat, each with its law, its assumptions and whom it covers.

Numpy and scipy only, float64: numbers in, numbers out. A floor on the error of a reconstruction
is a lower bound; every estimate behind it errs downwards, so that a floor is never flattered. The
laws of the risk, a probability for each error threshold, stand in modules of their own.
"""

from leakbound.bounds import (
    composition,
    conversions,
    edgeworth,
    from_scratch,
    identification,
    information,
    ladder,
    matching,
    rate_distortion,
    renyi,
    two_layer,
    two_layer_orders,
)
from leakbound.bounds.cramer_rao import (
    Floor,
    full_floor,
    full_floor_from_samples,
    matrix_free_floor,
    tight_trace_floor,
    trace_floor,
    trace_floor_from_samples,
)
from leakbound.bounds.priors import FlatPrior, GaussianPrior, MixturePrior, Prior, UserPrior

__all__ = [
    "FlatPrior",
    "Floor",
    "GaussianPrior",
    "MixturePrior",
    "Prior",
    "UserPrior",
    "composition",
    "conversions",
    "edgeworth",
    "from_scratch",
    "full_floor",
    "full_floor_from_samples",
    "identification",
    "information",
    "ladder",
    "matching",
    "matrix_free_floor",
    "rate_distortion",
    "renyi",
    "tight_trace_floor",
    "trace_floor",
    "trace_floor_from_samples",
    "two_layer",
    "two_layer_orders",
]
