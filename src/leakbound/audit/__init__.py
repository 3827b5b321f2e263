"""The audit: a plan of experiments, run, recorded, resumed and judged."""

from leakbound.audit.context import PlanContext
from leakbound.audit.engine import run
from leakbound.audit.experiment import Result, run_experiment
from leakbound.audit.folder import AuditResult, Progress, audit
from leakbound.audit.plan import Experiment, Plan
from leakbound.audit.plan_file import load, parse
from leakbound.audit.run_audit import run_audit
from leakbound.audit.simulate import Simulation, error_bound, simulate

__all__ = [
    "AuditResult",
    "Experiment",
    "Plan",
    "PlanContext",
    "Progress",
    "Result",
    "Simulation",
    "audit",
    "error_bound",
    "load",
    "parse",
    "run",
    "run_audit",
    "run_experiment",
    "simulate",
]
