"""How much is measured at each scale, and the plans that measure it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from leakbound import audit
from leakbound.audit.plan import Plan

PAPER = "published_inverting_gradients"
OURS = "local_optimal_noise"
PRUNED = "local_optimal_pruning"
EQUAL = "gaussian_noise"
MAGNITUDE = "magnitude_pruning"
FRESH = 1000
"""The first seed of what is measured again; the first run had those from 0 on."""
COLOR_SOURCE = "photos"
LOUD = 0.1
KEPT = 0.8
CUT = 0.9
"""The noise of figure 9, and the rates of optimal and of magnitude pruning in figure 6."""
MODEL = "simple_convnet"
FIGURES = ((0.7, "section 4.1, figure 2"), (0.8, "figure 3"))
"""Rates of optimal pruning that the paper compares with magnitude pruning at `CUT`, on CIFAR-10."""
NOISE_RATE = 1e-3
PRUNING_RATE = 5e-4
"""Adam's, as in appendix C.1."""


@dataclass(frozen=True)
class Setting:
    """Counts of one scale.

    Attributes:
        batch_size: images that are attacked together.
        steps: of the attacks.
        seeds: for errors under the paper's attack, and for losses after 5 steps.
        aware: seeds for errors under attacks that know the defense; 0 leaves them out.
        trained, rounds: training runs with changing batches.
        again: seeds for the errors of claim 0-3 and the noise of claim 0-5, which were undecided in
            a first run; 0: as `seeds`.
        noises, rates: levels of the defenses.
        color_noises: the same on color images, whose attack fails under less noise.
        models: random linear models for the theory; draws: in thousands.
    """

    batch_size: int
    steps: int
    seeds: int
    aware: int
    trained: int
    rounds: int
    again: int = 0
    noises: tuple[float, ...] = (0.002, 0.005, 0.02, 0.05, 0.1)
    rates: tuple[float, ...] = (0.5, 0.7, 0.8, 0.9)
    color_noises: tuple[float, ...] = (0.0002, 0.001, 0.005, 0.02, 0.1)
    models: int = 40
    draws: int = 100


SETTINGS = {
    "minutes": Setting(
        4,
        100,
        3,
        0,
        3,
        10,
        noises=(0.02, 0.1),
        rates=(0.7, 0.8, 0.9),
        color_noises=(0.001, 0.1),
        models=10,
        draws=50,
    ),
    "cpu": Setting(4, 300, 24, 12, 16, 40, again=256),
    "paper": Setting(16, 2000, 24, 12, 16, 640),
}


def plans(setting: Setting, color: str = COLOR_SOURCE) -> dict[str, Plan]:
    """The audits: the paper's attack, aware attackers, and training under noise and pruning.

    `color`: a data source of color images, for what the paper shows on CIFAR-10.
    """
    known = [{"name": "inverting_gradients", "steps": setting.steps}]
    known += [{"name": "law_evolution", "components": 30, "population": 40, "generations": 12}]
    paper = [{"name": PAPER, "source": "chen", "steps": setting.steps}]
    every = _noises(setting.noises) + _rates({MAGNITUDE: setting.rates, PRUNED: setting.rates})
    found = {"naive": _plan(setting, every, setting.seeds, paper, known=False)}
    if setting.aware:
        found["aware"] = _plan(setting, every, setting.aware, known)
    few = _rates({MAGNITUDE: (CUT,), PRUNED: tuple(level for level, _ in FIGURES)})
    own = {"source": color, "size": 32, "limit": 5000}
    colored = _noises(setting.color_noises) + few
    found["color"] = _plan(setting, colored, setting.seeds, paper, known=False, data=own)
    pair = _rates({MAGNITUDE: (CUT,), PRUNED: (KEPT,)})
    if setting.again:
        found["again"] = _plan(setting, pair, setting.again, paper, known=False, first=FRESH)
    for name, defenses, rate in (
        ("noise training", _noises((LOUD,)), NOISE_RATE),
        ("pruning training", pair, PRUNING_RATE),
    ):
        found[name] = _plan(setting, defenses, setting.trained, paper, rate=rate)
    return found


def _noises(levels: tuple[float, ...]) -> list[dict[str, Any]]:
    return [{"name": name, "noise_std": list(levels)} for name in (EQUAL, OURS)]


def _rates(levels: dict[str, tuple[float, ...]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"name": n, "rate": list(own)} for n, own in levels.items()]
    return [one | ({"scope": "global"} if one["name"] == MAGNITUDE else {}) for one in found]


def _plan(
    setting: Setting,
    defenses: list[dict[str, Any]],
    seeds: int,
    attacks: list[dict[str, Any]],
    *,
    known: bool = True,
    rate: float | None = None,
    first: int = 0,
    data: Mapping[str, Any] = MappingProxyType({"source": "mnist5k"}),
) -> Plan:
    rounds = 0 if rate is None else setting.rounds
    utility = {"rounds": rounds, "clients": 4, "batch_size": 16, "repeats": seeds}
    return audit.parse(
        {
            "name": "optimal_defenses",
            "data": dict(data),
            "models": [{"name": MODEL}],
            "attacks": attacks,
            "defenses": defenses,
            "seeds": list(range(first, first + seeds)),
            "batch_sizes": [setting.batch_size],
            "threat": {"defense_known": known},
            "error_bound": {"kind": "none"},
            "utility": utility | ({} if rate is None else {"learning_rate": rate}),
        }
    )
