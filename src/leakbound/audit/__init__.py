"""The audit: a plan of experiments that is run, recorded, resumed and judged."""

from leakbound.assess.header import defense_name
from leakbound.assess.reidentification import embedded, reidentify
from leakbound.audit.context import PlanContext, one_thread
from leakbound.audit.diagnosis import diagnose, diagnose_undecided
from leakbound.audit.engine import run
from leakbound.audit.estimate import predicted_seconds
from leakbound.audit.experiment import Result, run_experiment, run_training
from leakbound.audit.folder import TIMES, AuditResult, Progress, audit, run_audit
from leakbound.audit.noise_at_utility import (
    NoiseAtUtility,
    NoisesAtUtility,
    UtilityTarget,
    noise_at_utility,
)
from leakbound.audit.plan import (
    DataSpec,
    Experiment,
    ModelSpec,
    Plan,
    TrainingUnit,
    UtilitySpec,
    attack_info,
    build_defense,
)
from leakbound.audit.plan_file import load, parse
from leakbound.audit.reidentification import reidentify_run
from leakbound.audit.simulate import Simulation, error_bound, simulate
from leakbound.registry import Spec

__all__ = [
    "AuditResult",
    "DataSpec",
    "Experiment",
    "ModelSpec",
    "NoiseAtUtility",
    "NoisesAtUtility",
    "Plan",
    "PlanContext",
    "Progress",
    "Result",
    "Simulation",
    "Spec",
    "TIMES",
    "TrainingUnit",
    "UtilitySpec",
    "UtilityTarget",
    "attack_info",
    "audit",
    "build_defense",
    "defense_name",
    "diagnose",
    "diagnose_undecided",
    "embedded",
    "error_bound",
    "load",
    "noise_at_utility",
    "one_thread",
    "parse",
    "predicted_seconds",
    "reidentify",
    "reidentify_run",
    "run",
    "run_audit",
    "run_experiment",
    "run_training",
    "simulate",
]
