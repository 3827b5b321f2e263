"""leakbound measures how much training data federated updates leak, and what bounds it.

It has five verbs. Each returns an object with `.verdict`, its numbers, `.plot()`, `.to_html(path)`
and a display for notebooks:

    simulate(model, batch, defense=..., attack=...)     attack one simulated update
    run_audit(model, data, attacks=..., defenses=...)   compare defenses under many attacks
    calibrate("psnr>=30 with probability<=0.01", ...)  the noise that meets an accepted risk
    attack_update(captured.load(...), model, ...)       attack a captured update
    error_bound(model, batch, defense, public=...)      what bounds every attacker

The verbs use the core types (`Batch`, `Task`, `Update`, `Observation`, ...), the functions of one
round (`play`, `send`, `pair`, `evaluate`) and the packages (`leakbound.attacks`,
`leakbound.defenses`, ...). All are imported on first use, so `import leakbound` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leakbound import (
        assess,
        attacks,
        audit,
        bounds,
        captured,
        client,
        data,
        defenses,
        domains,
        inspection,
        losses,
        meter,
        metrics,
        models,
        risk,
        tensors,
        trees,
    )
    from leakbound.audit.folder import run_audit
    from leakbound.audit.simulate import error_bound, simulate
    from leakbound.captured.run import attack_update
    from leakbound.core import (
        Batch,
        LocalPlan,
        NotApplicable,
        Observation,
        Reconstruction,
        Task,
        ThreatModel,
        Update,
    )
    from leakbound.metrics import evaluate
    from leakbound.pairing import pair
    from leakbound.protocol import play, send
    from leakbound.randomness import secure, stream
    from leakbound.risk.calibrate import calibrate

__all__ = [
    "simulate",
    "run_audit",
    "calibrate",
    "attack_update",
    "error_bound",
    "Batch",
    "LocalPlan",
    "NotApplicable",
    "Observation",
    "Reconstruction",
    "Task",
    "ThreatModel",
    "Update",
    "evaluate",
    "pair",
    "play",
    "secure",
    "send",
    "stream",
    "assess",
    "attacks",
    "audit",
    "bounds",
    "captured",
    "client",
    "data",
    "defenses",
    "domains",
    "inspection",
    "losses",
    "meter",
    "metrics",
    "models",
    "risk",
    "tensors",
    "trees",
]


_WHERE = {
    "simulate": "audit.simulate",
    "run_audit": "audit.folder",
    "calibrate": "risk.calibrate",
    "attack_update": "captured.run",
    "error_bound": "audit.simulate",
    "evaluate": "metrics",
    "pair": "pairing",
    **dict.fromkeys(("play", "send"), "protocol"),
    **dict.fromkeys(("secure", "stream"), "randomness"),
    **dict.fromkeys((name for name in __all__ if name[0].isupper()), "core"),
}
_PACKAGES = tuple(name for name in __all__ if name not in _WHERE)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"leakbound.{name}")
    if name == "__version__":
        return import_module("leakbound._util.text").version("leakbound")
    if name in _WHERE:
        return getattr(import_module(f"leakbound.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'leakbound' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
