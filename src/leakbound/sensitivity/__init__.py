"""How much every coordinate of a client's gradient tells of its inputs.

`sensitivity` estimates s_i = ||d g_i / d x||^2 for all parameters at once; `along` gives the
changes of the gradient along given directions, differentiable for an attack that plans with them,
and `moved` the gradient too, faster where nothing is to be differentiated;
`example_changes` those of every example's own gradient along its own direction, and
`example_gradients` these gradients themselves, without slopes.
"""

from leakbound.sensitivity.estimate import (
    ESTIMATORS,
    Sensitivity,
    along,
    default_directions,
    moved,
    sensitivity,
)
from leakbound.sensitivity.examples import changes as example_changes
from leakbound.sensitivity.examples import gradients as example_gradients

__all__ = [
    "ESTIMATORS",
    "Sensitivity",
    "along",
    "default_directions",
    "example_changes",
    "example_gradients",
    "moved",
    "sensitivity",
]
