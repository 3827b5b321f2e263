"""Risk of reconstruction: kappa, bounds on all attackers, attained success, calibration."""

from leakbound.assess.limits import ErrorBoundSpec
from leakbound.assess.record import AttackerRow
from leakbound.assess.success import RiskSpec
from leakbound.risk.attackers import three_attackers
from leakbound.risk.calibrate import Calibration, calibrate, calibrate_setting
from leakbound.risk.corridor import Corridor, TrainingSetting, corridor
from leakbound.risk.gain import GainCalibration, calibrate_gain, fixed_answer
from leakbound.risk.kappa import BaselineMatches, baseline_matches
from leakbound.risk.release_bounds import ReleaseBounds
from leakbound.risk.target import GainTarget, Target

__all__ = [
    "AttackerRow",
    "BaselineMatches",
    "Calibration",
    "Corridor",
    "ErrorBoundSpec",
    "GainCalibration",
    "GainTarget",
    "ReleaseBounds",
    "RiskSpec",
    "Target",
    "TrainingSetting",
    "baseline_matches",
    "calibrate",
    "calibrate_gain",
    "calibrate_setting",
    "corridor",
    "fixed_answer",
    "three_attackers",
]
