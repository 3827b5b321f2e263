"""The feature methods by the name that settings use."""

from __future__ import annotations

from leakbound.attacks.features.base import FeatureMethod

METHODS: dict[str, FeatureMethod] = {}
