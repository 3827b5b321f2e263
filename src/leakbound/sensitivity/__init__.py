"""How much every coordinate of a client's gradient tells of its inputs.

`sensitivity` estimates s_i = ||d g_i / d x||^2 for all parameters at once; `along` gives the
changes of the gradient along given directions, differentiable for an attack that plans with them;
`example_changes` those of every example's own gradient along its own direction.
"""

from leakbound.sensitivity.estimate import ESTIMATORS, Sensitivity, along, sensitivity
from leakbound.sensitivity.lanes import changes as example_changes

__all__ = ["ESTIMATORS", "Sensitivity", "along", "example_changes", "sensitivity"]
