"""Infer the inputs of a linear layer from an update: features first, then images."""

from leakbound.attacks.features.base import FeatureMethod, FoundFeatures
from leakbound.attacks.features.cocktail_party import CocktailParty
from leakbound.attacks.features.errors import feature_errors, subspace_error

__all__ = [
    "CocktailParty",
    "FeatureMethod",
    "FoundFeatures",
    "feature_errors",
    "subspace_error",
]
