"""Infer the inputs of a linear layer from an update: features first, then images."""

from leakbound.attacks.features.base import (
    FeatureMethod,
    FoundFeatures,
    feature_errors,
    subspace_error,
)
from leakbound.attacks.features.cocktail_party import CocktailParty

__all__ = [
    "CocktailParty",
    "FeatureMethod",
    "FoundFeatures",
    "feature_errors",
    "subspace_error",
]
