"""Whole programs, as a user starts them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures.rounds import Spread
from figures.table import Figure

LIMITS = {"": 240.0, "--quick": 15.0}


def demo(repetitions: int, quick_only: bool = False) -> tuple[list[Figure], str]:
    """Wall seconds of the built-in audit in its own process, report included."""
    figures = []
    for flag, limit in LIMITS.items():
        if quick_only and not flag:
            continue
        taken = Spread.of([_audit(flag) for _ in range(repetitions)])
        name = f"`leakbound audit{' ' + flag if flag else ''}`, s"
        target = f"< {limit:.0f}"
        what = "wall time, interpreter's start and report included"
        figures.append(Figure(name, taken.text(1), taken.n, what, target))
    return figures, ""


def _audit(flag: str) -> float:
    program = Path(sys.executable).with_name("leakbound")
    with tempfile.TemporaryDirectory() as folder:
        command = [str(program), "audit", *([flag] if flag else []), "--out", f"{folder}/run"]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        taken = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"the audit ended with {done.returncode}: {done.stderr[-400:]}")
    return taken
