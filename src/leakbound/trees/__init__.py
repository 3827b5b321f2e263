"""Federated trees: what a client's XGBoost update reveals."""

from leakbound.trees.measure import Share, TreeMeasure, load_rows, measured
from leakbound.trees.model import Tree, TreeModel, read
from leakbound.trees.reveal import LeafCount, Revealed, revealed

__all__ = [
    "LeafCount",
    "Revealed",
    "Share",
    "Tree",
    "TreeMeasure",
    "TreeModel",
    "load_rows",
    "measured",
    "read",
    "revealed",
]
