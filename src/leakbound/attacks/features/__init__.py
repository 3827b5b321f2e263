"""Infer the inputs of a linear layer from an update: features first, then images."""

from leakbound.attacks.features.base import FeatureMethod, FoundFeatures
from leakbound.attacks.features.cocktail_party import CocktailParty
from leakbound.attacks.features.errors import feature_errors, subspace_error
from leakbound.attacks.features.head import layer_inputs, special_head
from leakbound.attacks.features.tensor import TensorMethod

__all__ = [
    "CocktailParty",
    "FeatureMethod",
    "FoundFeatures",
    "TensorMethod",
    "feature_errors",
    "layer_inputs",
    "special_head",
    "subspace_error",
]
