"""leakbound: how much training data do federated updates leak, and what bounds it?

The names below are the public interface; they are imported when they are first used, so that
`import leakbound` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leakbound import (
        attacks,
        audit,
        bounds,
        captured,
        client,
        data,
        defenses,
        federation,
        information,
        inspection,
        meter,
        metrics,
        models,
        pruning,
        tensors,
    )
    from leakbound.metrics import evaluate
    from leakbound.pairing import pair
    from leakbound.protocol import play, send
    from leakbound.random import secure, stream
    from leakbound.types import (
        Batch,
        LocalPlan,
        NotApplicable,
        Observation,
        Reconstruction,
        Task,
        ThreatModel,
        Update,
    )

_WHERE = {
    "evaluate": "metrics",
    "pair": "pairing",
    "play": "protocol",
    "send": "protocol",
    "secure": "random",
    "stream": "random",
    "Batch": "types",
    "LocalPlan": "types",
    "NotApplicable": "types",
    "Observation": "types",
    "Reconstruction": "types",
    "Task": "types",
    "ThreatModel": "types",
    "Update": "types",
}
_PACKAGES = (
    *("attacks", "audit", "bounds", "captured", "client", "data", "defenses", "federation"),
    *("information", "inspection", "meter", "metrics", "models", "pruning", "tensors"),
)

__all__ = [
    "Batch",
    "LocalPlan",
    "NotApplicable",
    "Observation",
    "Reconstruction",
    "Task",
    "ThreatModel",
    "Update",
    "attacks",
    "audit",
    "bounds",
    "captured",
    "client",
    "data",
    "defenses",
    "evaluate",
    "federation",
    "information",
    "inspection",
    "meter",
    "metrics",
    "models",
    "pair",
    "play",
    "pruning",
    "secure",
    "send",
    "stream",
    "tensors",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"leakbound.{name}")
    if name in _WHERE:
        return getattr(import_module(f"leakbound.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'leakbound' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
