"""Random SIGKILLs of an audit's main process and workers: is anything lost or doubled?

    python tests/audit/kills.py --kills 1000 --seed 0      # some seconds for each kill

Each audit is killed and started again until it ends; then records, trainings and pictures must be
byte for byte those of an audit that nobody killed, and no unit may have run twice to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from test_processes import all_gone, group, outcome, reference, start

WORKERS = 2
"""Kills of workers in one process: a unit whose worker died three times counts as failed."""


RATE = 0.8
"""Mean kills a second; the waits have no memory. Most kills hit a start, some a running audit."""


def doubled(out: Path) -> int:
    ends = Counter(json.loads(t)["id"] for t in (out / "timings.jsonl").read_bytes().splitlines())
    return sum(count - 1 for count in ends.values())


def shoot(process: subprocess.Popen[str], draw: random.Random, left: int) -> Counter[str]:
    """Kill workers, and then perhaps the main process, at random moments."""
    killed: Counter[str] = Counter()
    while draw.random() < 0.99 and process.poll() is None and len(group(process)) < 4:
        time.sleep(0.1)  # mostly until the workers are there
    for _ in range(draw.randrange(WORKERS + 1)):
        time.sleep(draw.expovariate(RATE))
        workers = [pid for pid in group(process) if int(pid) != process.pid]
        if process.poll() is not None or not workers or sum(killed.values()) >= left:
            return killed
        try:
            os.kill(int(draw.choice(workers)), signal.SIGKILL)
            killed["worker"] += 1
        except ProcessLookupError:
            pass
    time.sleep(draw.expovariate(RATE))
    if process.poll() is None and sum(killed.values()) < left:
        process.kill()
        killed["main"] += 1
    return killed


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--kills", type=int, default=1000)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    draw, killed, wrong, ended = random.Random(given.seed), Counter[str](), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        plan, wanted = reference(Path(folder))
        out = Path(folder) / "run"
        while sum(killed.values()) < given.kills or out.exists():
            process = start(plan, out)  # its summary goes to our stdout
            killed += shoot(process, draw, given.kills - sum(killed.values()))
            process.communicate()
            assert all_gone(process), "processes outlive their parent"
            if process.returncode == 0:
                ended += 1
                bad = outcome(out) != wanted or doubled(out) > 0
                wrong += bad
                if bad:
                    shutil.copytree(out, Path("runs") / f"kills-{given.seed}-{ended}")
                shutil.rmtree(out)
                print(f"{dict(killed)} kills, {ended} audits ended, {wrong} wrong", flush=True)
            elif process.returncode != -signal.SIGKILL:
                raise RuntimeError(f"exit code {process.returncode}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
