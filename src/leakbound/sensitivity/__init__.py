"""How much every coordinate of a client's gradient tells of its inputs.

`sensitivity` estimates s_i = ||d g_i / d x||^2 for all parameters at once; `along` gives the
changes of the gradient along given directions, differentiable for an attack that plans with them.
"""

from leakbound.sensitivity.estimate import ESTIMATORS, Sensitivity, along, sensitivity

__all__ = ["ESTIMATORS", "Sensitivity", "along", "sensitivity"]
