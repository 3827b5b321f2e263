"""Captured updates of a federated run: read them, observe them as an attacker does, attack them."""

from leakbound.captured.adapters import read_adapter, sent_tensors
from leakbound.captured.capture import Capture, Skipped, load, load_all, updates_in, write
from leakbound.captured.findings import Finding
from leakbound.captured.observe import TrainingInfo, observe
from leakbound.captured.run import (
    Listener,
    Output,
    Settings,
    UpdateResult,
    attack_all,
    attack_update,
)

__all__ = [
    "Capture",
    "Finding",
    "Listener",
    "Output",
    "Settings",
    "Skipped",
    "TrainingInfo",
    "UpdateResult",
    "attack_all",
    "attack_update",
    "load",
    "load_all",
    "observe",
    "read_adapter",
    "sent_tensors",
    "updates_in",
    "write",
]
