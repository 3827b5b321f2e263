"""Defenses: what a client (or the server on its behalf) does to an update before it is seen.

Every name exported here is a defense of the audit, under its snake_case name.
"""

from leakbound.defenses.base import Chain, Defense, chain
from leakbound.defenses.dpsgd import dp_sgd
from leakbound.defenses.mixup import Mixup
from leakbound.defenses.noise import GaussianMechanism, GaussianNoise, LaplaceNoise
from leakbound.defenses.noisy_copy import NoisyCopy
from leakbound.defenses.optimal import LocalOptimalNoise, OptimalNoise, optimal_dp_sgd
from leakbound.defenses.optimal_pruning import LocalOptimalPruning, OptimalPruning
from leakbound.defenses.priprune import PriPrune
from leakbound.defenses.pruning import GradientDropout, MagnitudePruning
from leakbound.defenses.quantization import Quantization
from leakbound.defenses.rows import Clip, ClipExamples, Mean, Sign
from leakbound.defenses.secure import SecureAggregation
from leakbound.defenses.soteria import Soteria
from leakbound.defenses.top_k import TopK
from leakbound.defenses.training import HiddenDropout, LocalAggregation
from leakbound.defenses.whitening import Color, Whiten, whitened_dp_sgd
from leakbound.defenses.withhold import Withhold

__all__ = [
    "Chain",
    "Clip",
    "ClipExamples",
    "Color",
    "Defense",
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
    "NoisyCopy",
    "OptimalNoise",
    "OptimalPruning",
    "PriPrune",
    "Quantization",
    "SecureAggregation",
    "Sign",
    "Soteria",
    "TopK",
    "Whiten",
    "Withhold",
    "chain",
    "dp_sgd",
    "optimal_dp_sgd",
    "whitened_dp_sgd",
]
