"""The audit: a plan of cells, run, recorded, resumed and judged."""

from leakbound.audit.bench import Bench
from leakbound.audit.cells import Result, run_cell
from leakbound.audit.engine import run
from leakbound.audit.folder import Outcome, Progress, audit
from leakbound.audit.plan import Cell, Plan
from leakbound.audit.plan_file import load, parse
from leakbound.audit.verdict import EXPOSED, PROTECTED, UNDECIDED, verdict

__all__ = [
    "EXPOSED",
    "PROTECTED",
    "UNDECIDED",
    "Bench",
    "Cell",
    "Outcome",
    "Plan",
    "Progress",
    "Result",
    "audit",
    "load",
    "parse",
    "run",
    "run_cell",
    "verdict",
]
