"""What a statement about risk rests on: kappa, bounds on all attackers, corridor, calibration."""

from leakbound.risk.calibrate import Calibration, calibrate
from leakbound.risk.corridor import Corridor, TrainingSetting, corridor
from leakbound.risk.kappa import BaselineMatches, baseline_matches
from leakbound.risk.limits import ErrorBoundSpec, RiskSpec
from leakbound.risk.target import Target

__all__ = [
    "BaselineMatches",
    "Calibration",
    "Corridor",
    "ErrorBoundSpec",
    "RiskSpec",
    "Target",
    "TrainingSetting",
    "baseline_matches",
    "calibrate",
    "corridor",
]
