"""Ten thousand experiments in one folder: what they take on the disk, in memory and on the page.

Runs them (a matrix product that inverts a layer, and searches of 10 to 40 steps, on digits), then
the same audit again on the complete folder, and the report. Each is a process of its own. Prints
a section of docs/results/speed_against_peers.json. Takes five to ten minutes on two cores.

    python benchmarks/scale.py [--seeds 50] [--workers 2] [--out DIR]
    python benchmarks/scale.py --seeds 6 --data photos --batch-sizes 16    # larger pictures
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures.table import machine

from leakbound import audit

STEP = """
import json, re, resource, sys, time
from pathlib import Path
from leakbound import {0}
out, workers, plan = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
began = time.perf_counter()
{1}
seconds = time.perf_counter() - began
peak = re.search("VmHWM:[^0-9]*([0-9]+)", Path("/proc/self/status").read_text())
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps([seconds, int(peak[1]) / 1024, children / 1024]))
"""
AUDIT = STEP.format("audit", "audit.audit(audit.parse(plan), out, workers=workers)")
REPORT = STEP.format("report", "report.write(out)")


def plan_of(seeds: int, source: str, sizes: Sequence[int]) -> dict[str, Any]:
    """100 experiments for each seed and batch size."""
    return {
        "name": "scale",
        "seeds": list(range(seeds)),
        "batch_sizes": list(sizes),
        "data": {"source": source},
        "models": [{"name": "mlp", "hidden": [16]}, {"name": "mlp", "hidden": [32]}],
        "attacks": [
            {"name": "linear_inversion"},
            {"name": "inverting_gradients", "steps": [10, 20, 30, 40]},
        ],
        "defenses": [
            {"name": "none"},
            {"name": "gaussian_noise", "noise_std": [0.0001, 0.001, 0.01, 0.1]},
            {"name": "magnitude_pruning", "rate": [0.5, 0.9]},
            {"name": "dp_sgd", "noise_multiplier": [0.1, 0.5, 1.0]},
        ],
    }


def measured(code: str, out: Path, workers: int, plan: dict[str, Any]) -> list[float]:
    """Seconds after the imports, and the peak memory of the process and of its workers in MB."""
    line = [sys.executable, "-c", code, str(out), str(workers), json.dumps(plan)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def size(paths: Sequence[Path]) -> str:
    """Bytes of files, as text."""
    return f"{sum(path.stat().st_size for path in paths) / 1e6:.1f} MB"


def main() -> None:
    """Run, measure, print."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--seeds", type=int, default=50)
    options.add_argument("--data", default="digits")
    options.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2])
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    plan = plan_of(given.seeds, given.data, given.batch_sizes)
    count = len(audit.parse(plan).experiments())
    with tempfile.TemporaryDirectory() as spare:
        out = given.out or Path(spare) / "run"
        first = measured(AUDIT, out, given.workers, plan)
        again = measured(AUDIT, out, given.workers, plan)
        page = measured(REPORT, out, given.workers, plan)
        files = [path for path in out.rglob("*") if path.is_file()]
        pages = [path for path in files if path.suffix == ".html"]
        pictures = [path for path in files if path.suffix == ".png"]
        largest = max(pages, key=lambda path: path.stat().st_size)
        rows = {
            "experiments": f"{count:,}",
            f"the audit, {given.workers} workers": f"{first[0]:.0f} s",
            "its peak memory": f"{first[1]:.0f} MB, a worker's {first[2]:.0f} MB",
            "folder": f"{size(files)} in {len(files):,} files",
            "for each experiment": f"{sum(p.stat().st_size for p in files) / count / 1e3:.1f} kB",
            "of this records": size([out / "records.jsonl"]),
            "of this pictures": f"{size(pictures)} in {len(pictures):,} files",
            "pages": f"{size(pages)} in {len(pages)} files",
            "largest page; report.html": f"{size([largest])}; {size([out / 'report.html'])}",
            "the same audit again, nothing to run": f"{again[0]:.1f} s, {again[1]:.0f} MB",
            "the report": f"{page[0]:.1f} s, {page[1]:.0f} MB",
        }
    print(f"Machine: {machine()}. n = 1 run; seconds after the imports.\n")
    print("| figure | measured |\n|---|--:|")
    print("\n".join(f"| {name} | {value} |" for name, value in rows.items()))


if __name__ == "__main__":
    main()
