"""What one client sends, as a noisy channel: the numbers that bounds in `leakbound.bounds` take.

Fisher information, overlaps of releases a step apart, and priors from public examples: tensors in,
numbers out.
"""

from leakbound.channel.class_priors import ClassPriors
from leakbound.channel.fisher import (
    Channel,
    fisher_matrix,
    fisher_trace,
    overlaps,
    strange_power,
)

__all__ = [
    "Channel",
    "ClassPriors",
    "fisher_matrix",
    "fisher_trace",
    "overlaps",
    "strange_power",
]
