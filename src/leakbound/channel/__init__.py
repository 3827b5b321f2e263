"""One client's release as a noisy channel: the inputs of the bounds in `leakbound.bounds`.

These are Fisher information, overlaps of releases one step apart, products of clipped gradients,
and priors from public examples. Tensors in, numbers out.
"""

from leakbound.channel.class_priors import ClassPriors
from leakbound.channel.fisher import (
    Channel,
    fisher_matrix,
    fisher_trace,
    overlaps,
    strange_power,
)
from leakbound.channel.gram import clipped_gram, most_examples

__all__ = [
    "Channel",
    "ClassPriors",
    "clipped_gram",
    "fisher_matrix",
    "fisher_trace",
    "most_examples",
    "overlaps",
    "strange_power",
]
