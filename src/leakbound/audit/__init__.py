"""The audit: a plan of cells, run, recorded, resumed and judged."""

from leakbound.audit.bench import Bench
from leakbound.audit.calibrate import Calibration, calibrate
from leakbound.audit.cells import Result, run_cell
from leakbound.audit.corridor import Corridor, Setting, corridor
from leakbound.audit.engine import run
from leakbound.audit.folder import Outcome, Progress, audit
from leakbound.audit.plan import Cell, Plan
from leakbound.audit.plan_file import load, parse
from leakbound.audit.target import Target
from leakbound.audit.verdict import EXPOSED, PROTECTED, UNDECIDED, verdict

__all__ = [
    "EXPOSED",
    "PROTECTED",
    "UNDECIDED",
    "Bench",
    "Calibration",
    "Cell",
    "Corridor",
    "Outcome",
    "Plan",
    "Progress",
    "Result",
    "Setting",
    "Target",
    "audit",
    "calibrate",
    "corridor",
    "load",
    "parse",
    "run",
    "run_cell",
    "verdict",
]
