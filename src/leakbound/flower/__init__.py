"""Flower: defenses and a leak meter as client mods, the server's view, apps in one process.

Only this package imports flwr; install it with `pip install leakbound[flower]`.

A defense of a training with any optimizer and number of steps (DP-SGD: see `DefenseMod`):

    defense = chain(Clip(5.0), GaussianNoise(0.02))  # of the whole update
    app = ClientApp(mods=[DefenseMod(defense, Setup(Net))])
"""

from leakbound.client_side import Setup, tap
from leakbound.flower import compat as _compat  # before all else of flwr: it keeps imports silent
from leakbound.flower.budget import BudgetMod
from leakbound.flower.facts import describe
from leakbound.flower.grid import InProcessGrid, run
from leakbound.flower.meter import LeakMeter
from leakbound.flower.mods import DefenseMod, check_mods, protected
from leakbound.flower.server import Watched, WatchedSum, capture_app

__all__ = [
    "BudgetMod",
    "DefenseMod",
    "InProcessGrid",
    "LeakMeter",
    "Setup",
    "Watched",
    "WatchedSum",
    "capture_app",
    "check_mods",
    "describe",
    "protected",
    "run",
    "tap",
]

del _compat
