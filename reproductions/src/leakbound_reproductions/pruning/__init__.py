"""Pruning: which weights a federated model has, chosen once or during training.

A scheme gives masks (P,) of weights for `Task.pruned`; the federation decides when to ask. Only
weights of layers are pruned: biases and the scales of a norm always stay. Pruning is no defense:
the masks of `FedDST` and the reports of `PruneFL` leak the clients' data.
"""

from leakbound_reproductions.pruning.adaptive import FedDST, PruneFL
from leakbound_reproductions.pruning.base import (
    LayerCount,
    Pruning,
    density,
    layer_counts,
    named_masks,
    prunable,
)
from leakbound_reproductions.pruning.one_shot import (
    Grasp,
    Magnitude,
    OneShot,
    Random,
    Snip,
    Synflow,
)

__all__ = [
    "SCHEMES",
    "FedDST",
    "Grasp",
    "LayerCount",
    "Magnitude",
    "OneShot",
    "PruneFL",
    "Pruning",
    "Random",
    "Snip",
    "Synflow",
    "density",
    "layer_counts",
    "named_masks",
    "prunable",
]

SCHEMES = {
    "fed_dst": FedDST,
    "grasp": Grasp,
    "magnitude": Magnitude,
    "prune_fl": PruneFL,
    "random": Random,
    "snip": Snip,
    "synflow": Synflow,
}
"""Every scheme, by its name in a study."""
