"""The audit: a plan of experiments, run, recorded, resumed and judged."""

from leakbound.audit.context import PlanContext
from leakbound.audit.engine import run
from leakbound.audit.experiment import Result, run_experiment
from leakbound.audit.folder import Outcome, Progress, audit
from leakbound.audit.plan import Experiment, Plan
from leakbound.audit.plan_file import load, parse

__all__ = [
    "Experiment",
    "Outcome",
    "Plan",
    "PlanContext",
    "Progress",
    "Result",
    "audit",
    "load",
    "parse",
    "run",
    "run_experiment",
]
