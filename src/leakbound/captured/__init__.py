"""Captured updates of a federated run: what do they leak?

`load` takes an update from a file or from memory, `observe` makes it what an attacker observes, and
`attack` runs attacks on it. `write` is what a server-side recorder leaves.
"""

from leakbound.captured.capture import Capture, load, load_all
from leakbound.captured.findings import Finding
from leakbound.captured.folder import updates_in, write
from leakbound.captured.observe import TrainingInfo, observe
from leakbound.captured.run import Outcome, Settings, attack, attack_all

__all__ = [
    "Capture",
    "Finding",
    "Outcome",
    "Settings",
    "TrainingInfo",
    "attack",
    "attack_all",
    "load",
    "load_all",
    "observe",
    "updates_in",
    "write",
]
