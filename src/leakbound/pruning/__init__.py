"""Pruning: which weights a federated model has, chosen once or during training.

Every scheme exported here is one of the audit, under its snake_case name. A scheme gives masks (P,)
of weights for `Task.pruned`; the federation decides when to ask. Only weights of layers are pruned:
biases and the scales of a norm always stay. Pruning is no defense: the masks of `FedDST` and the
reports of `PruneFL` leak the clients' data.
"""

from leakbound.pruning.adaptive import FedDST, PruneFL
from leakbound.pruning.base import (
    LayerCount,
    Pruning,
    density,
    layer_counts,
    named_masks,
    prunable,
)
from leakbound.pruning.one_shot import (
    Grasp,
    Magnitude,
    OneShot,
    Random,
    Snip,
    Synflow,
)
from leakbound.pruning.rounds import (
    PrunedTurn,
    bytes_sent,
    client_task,
    existing,
    next_task,
    turn_of,
    withheld,
)

__all__ = [
    "FedDST",
    "Grasp",
    "LayerCount",
    "Magnitude",
    "OneShot",
    "PruneFL",
    "PrunedTurn",
    "Pruning",
    "Random",
    "Snip",
    "Synflow",
    "bytes_sent",
    "client_task",
    "density",
    "existing",
    "layer_counts",
    "named_masks",
    "next_task",
    "prunable",
    "turn_of",
    "withheld",
]
