"""Attacks: functions of an observation that rebuild the inputs behind it.

Every attack class and preset exported here is an attack of the audit, under its snake_case name.
"""

from leakbound.attacks.analytic import LinearInversion
from leakbound.attacks.base import Attack, BestOf
from leakbound.attacks.blind import ConstantImage, MeanImage
from leakbound.attacks.gias import Gias
from leakbound.attacks.grad_inversion import GradInversion
from leakbound.attacks.labels import infer_labels
from leakbound.attacks.matching import GradientMatching
from leakbound.attacks.presets import (
    dlg,
    idlg,
    inverting_gradients,
    inverting_gradients_breaching,
    inverting_gradients_chen,
    inverting_gradients_geiping_cli,
    inverting_gradients_geiping_library,
    inverting_gradients_gradattack,
    settings_hash,
)
from leakbound.attacks.private_law import CandidateLikelihood
from leakbound.attacks.trap import LinearTrap
from leakbound.attacks.variance import LawEvolution, LawMatching, VarianceReadout

__all__ = [
    "Attack",
    "BestOf",
    "CandidateLikelihood",
    "ConstantImage",
    "Gias",
    "GradInversion",
    "GradientMatching",
    "LawEvolution",
    "LawMatching",
    "LinearInversion",
    "LinearTrap",
    "MeanImage",
    "VarianceReadout",
    "dlg",
    "idlg",
    "infer_labels",
    "inverting_gradients",
    "inverting_gradients_breaching",
    "inverting_gradients_chen",
    "inverting_gradients_geiping_cli",
    "inverting_gradients_geiping_library",
    "inverting_gradients_gradattack",
    "settings_hash",
]
