"""The feature methods by the name that settings use."""

from __future__ import annotations

from leakbound.attacks.features.base import FeatureMethod
from leakbound.attacks.features.cocktail_party import CocktailParty
from leakbound.attacks.features.tensor import TensorMethod

METHODS: dict[str, FeatureMethod] = {
    "cocktail_party": CocktailParty(),
    "tensor": TensorMethod(),
    "tensor_fit": TensorMethod(fit=40),
}
