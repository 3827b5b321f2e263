"""Feature attacks: what entered a linear layer, read off its gradient."""

from leakbound.attacks.features.base import FeatureMethod, FoundFeatures
from leakbound.attacks.features.errors import feature_errors, subspace_error
from leakbound.attacks.features.head import layer_inputs, special_head
from leakbound.attacks.features.tensor import TensorMethod

__all__ = [
    "FeatureMethod",
    "FoundFeatures",
    "TensorMethod",
    "feature_errors",
    "layer_inputs",
    "special_head",
    "subspace_error",
]
