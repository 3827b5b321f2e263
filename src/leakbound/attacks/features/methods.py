"""The feature methods by the name that settings use."""

from __future__ import annotations

from leakbound.attacks.features.base import FeatureMethod
from leakbound.attacks.features.cocktail_party import CocktailParty

METHODS: dict[str, FeatureMethod] = {"cocktail_party": CocktailParty()}
