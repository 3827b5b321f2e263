"""Captured updates of a federated run: what do they leak?

`load` takes an update from a file or from memory, `observe` makes it what an attacker observes, and
`attack_update` runs attacks on it. `write` is what a server-side recorder leaves.
"""

from leakbound.captured.capture import Capture, load, load_all
from leakbound.captured.findings import Finding
from leakbound.captured.folder import updates_in, write
from leakbound.captured.observe import TrainingInfo, observe
from leakbound.captured.run import Settings, UpdateResult, attack_all, attack_update

__all__ = [
    "Capture",
    "Finding",
    "Settings",
    "TrainingInfo",
    "UpdateResult",
    "attack_all",
    "attack_update",
    "load",
    "load_all",
    "observe",
    "updates_in",
    "write",
]
