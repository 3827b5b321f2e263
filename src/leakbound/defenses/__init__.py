"""Defenses: what a client, or the server on its behalf, does to an update before it is seen.

Every class exported here is a defense of the audit, under its snake_case name; `NoDefense` is
"none".
"""

from leakbound.defenses.base import Chain, Defense, NoDefense, chain
from leakbound.defenses.correlated_noise import CorrelatedNoise
from leakbound.defenses.dp_sgd import (
    Clip,
    ClipCoordinates,
    ClipExamples,
    DpSgd,
    GaussianMechanism,
    Mean,
)
from leakbound.defenses.mixup import Mixup
from leakbound.defenses.noise import GaussianNoise, LaplaceNoise
from leakbound.defenses.noisy_copy import NoisyCopy
from leakbound.defenses.optimal import (
    LocalOptimalNoise,
    LocalOptimalPruning,
    OptimalDpSgd,
    OptimalNoise,
    OptimalPruning,
)
from leakbound.defenses.priprune import PriPrune
from leakbound.defenses.quantization import Quantization, Sign
from leakbound.defenses.secure_aggregation import SecureAggregation
from leakbound.defenses.soteria import Soteria
from leakbound.defenses.sparsification import GradientDropout, MagnitudePruning, TopK
from leakbound.defenses.training import HiddenDropout, LocalAggregation
from leakbound.defenses.whitening import Color, Whiten, WhitenedDpSgd
from leakbound.defenses.withhold import Withhold

__all__ = [
    "Chain",
    "Clip",
    "ClipCoordinates",
    "ClipExamples",
    "Color",
    "CorrelatedNoise",
    "Defense",
    "DpSgd",
    "GaussianMechanism",
    "GaussianNoise",
    "GradientDropout",
    "HiddenDropout",
    "LaplaceNoise",
    "LocalAggregation",
    "LocalOptimalNoise",
    "LocalOptimalPruning",
    "MagnitudePruning",
    "Mean",
    "Mixup",
    "NoDefense",
    "NoisyCopy",
    "OptimalDpSgd",
    "OptimalNoise",
    "OptimalPruning",
    "PriPrune",
    "Quantization",
    "SecureAggregation",
    "Sign",
    "Soteria",
    "TopK",
    "Whiten",
    "WhitenedDpSgd",
    "Withhold",
    "chain",
]
