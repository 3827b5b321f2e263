"""What do the clients of examples/quickstart leak in round 1? The figures of its README.

    python benchmarks/quickstart_leak.py [--case one_image|private|ordinary] [--clients N] [--fast]

The app runs in this process. A server stores what it sees, and the attack gets only that, not the
true images. Shares have Wilson 95 % intervals.
"""

from __future__ import annotations

import argparse
import logging
import math
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from leakbound import Batch, captured, defenses
from leakbound.flower import capture_app
from leakbound.registry import Spec

APP = Path(__file__).parent.parent / "examples" / "quickstart"
ONE_IMAGE = {"images-per-client": 1, "batch-size": 1}
THOROUGH = Spec("inverting_gradients_large_steps")
TUNED_ON = 6
"""The first clients, whose updates the attack's settings were tuned on, are left out."""
NOISE = 0.078
SEED = 0


def changed_copy(folder: Path, heading: str) -> Path:
    """The app after the diffs of its README below a heading."""
    copy = folder / "quickstart"
    shutil.copytree(APP, copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (APP / "README.md").read_text("utf-8")
    below = text.partition(heading)[2].partition("\n## ")[0]
    for block in re.findall(r"```diff\n(.*?)```", below, re.S):
        name, _, body = block.partition("\n")
        lines = body.splitlines()
        before = "\n".join(line[1:] for line in lines if line[:1] in ("", " ", "-"))
        after = "\n".join(line[1:] for line in lines if line[:1] in ("", " ", "+"))
        path = copy / name.removeprefix("# ")
        text = path.read_text("utf-8")
        if text.count(before) != 1:
            raise ValueError(f"the diff of {name} does not apply")
        path.write_text(text.replace(before, after), "utf-8")
    return copy


def truth_of(number: int, clients: int, count: int) -> Batch:
    """What client `number` trained on."""
    from quickstart.task import load_images

    (images, labels), _ = load_images()
    own = slice(number, None, clients)
    return Batch(images[own][:count], labels[own][:count])


def wilson(hits: int, n: int) -> tuple[float, float]:
    z, p = 1.96, hits / n
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def measure(name, app, clients, attacked, config, specs, *, told, defense=None, skipped=0) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "quickstart"]:
        del sys.modules[module]  # else a changed copy of the app would not be imported
    torch.manual_seed(SEED)
    with tempfile.TemporaryDirectory() as folder:
        capture_app(app, Path(folder), clients=clients, run_config=config)
        found = captured.load_all(Path(folder))
    from quickstart.task import Net

    found.sort(key=lambda capture: int(capture.about["client"]))
    for spec in specs:
        values, blind, explained, began = [], [], [], time.perf_counter()
        for capture in found[skipped : skipped + attacked]:
            number, count = int(capture.about["client"]) - 2, int(capture.about["examples"])
            outcome = captured.attack_update(
                capture,
                Net(),
                captured.Settings((1, 28, 28), attacks=[spec]),
                captured.TrainingInfo(defense=defense, **told),
                truth=truth_of(number, clients, count),
            )
            (record,) = outcome.records
            if record.status != "ok":
                print(f"{name}: {spec.name}: {record.status}: {record.reason}")
                continue
            values += record.scores
            blind += record.baseline
            explained.append(record.capture.explained and record.capture.explained.direction)
        if not values:
            continue
        hits = sum(value >= 20 for value in values)
        low, high = wilson(hits, len(values))
        print(
            f"{name}: {spec.name}: {len(values)} images of {attacked} clients; "
            f"PSNR mean {statistics.mean(values):.1f}, median {statistics.median(values):.1f}, "
            f"least {min(values):.1f}, most {max(values):.1f} dB "
            f"(without the update {statistics.mean(blind):.1f}); at least 20 dB: {hits} "
            f"({hits / len(values):.1%}, {low:.1%} to {high:.1%}); explained "
            f"{min(filter(None, explained), default=float('nan')):.3f} or more; "
            f"{(time.perf_counter() - began) / attacked:.0f} s a client",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=["one_image", "private", "ordinary"])
    parser.add_argument("--clients", type=int, help="how many are attacked")
    parser.add_argument("--fast", action="store_true", help="few steps: does it run?")
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    sys.path.insert(0, str(APP))
    thorough = Spec("inverting_gradients", (("steps", 5),)) if given.fast else THOROUGH
    long = 2 if given.fast else 60
    if given.case in (None, "one_image"):
        n = given.clients or 12
        told = {"steps": 1}
        measure("one image", APP, 24, n, ONE_IMAGE, [thorough], told=told, skipped=TUNED_ON)
    if given.case in (None, "private"):
        n = given.clients or 12
        with tempfile.TemporaryDirectory() as folder:
            noisy = defenses.DpSgd(clip_norm=1.0, noise_multiplier=NOISE)
            copy = changed_copy(Path(folder), "## With DP-SGD")
            told = {"steps": 1}
            measure("private", copy, 24, n, ONE_IMAGE, [thorough], told=told, defense=noisy)
    if given.case in (None, "ordinary"):
        specs = [
            Spec("inverting_gradients", (("steps", long),)),
            Spec("fed_avg_matching", (("steps", long), ("local_steps", 10), ("deals", 1))),
        ]
        told = {"steps": 10, "batch_size": 32}  # as the app's pyproject.toml says
        measure("ordinary", APP, 10, given.clients or 2, {}, specs, told=told)


if __name__ == "__main__":
    main()
