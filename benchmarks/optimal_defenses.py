"""What optimal defenses cost a training step, and what the full bound gains over the trace bound.

    python benchmarks/optimal_defenses.py                # ratios of a round's time, about 4 minutes
    python benchmarks/optimal_defenses.py --part sizes   # ResNet-18 on color images, 8 minutes

Ratios are inside one interleaved run on SimpleConvNet and real MNIST, one thread, with a GEMM
control. In the part `sizes` every measurement is a process of its own, whose peak memory the
operating system counts (Linux). Writes docs/results/optimal_defenses_cost.json unless called with
--print.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from figures.table import machine

from leakbound.audit import PlanContext
from leakbound.audit.plan import DataSpec, ModelSpec
from leakbound.bounds import (
    GaussianPrior,
    full_bound_from_samples,
    trace_bound_from_samples,
)
from leakbound.channel.fisher import Channel, fisher_matrix
from leakbound.core import Batch
from leakbound.defenses import (
    Defense,
    DpSgd,
    GaussianNoise,
    LocalOptimalNoise,
    LocalOptimalPruning,
    NoDefense,
    OptimalNoise,
    OptimalPruning,
    WhitenedDpSgd,
)
from leakbound.protocol import resolve, send, step
from leakbound.randomness import stream

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import stored

CLIENTS, SIZE, ROUNDS = 4, 16, 7
REFRESH = (1, 10, 50)
LAYERS = {"rule": "energy", "correlation": "layers"}
DEFENSES: list[tuple[str, Callable[[int], Defense]]] = [
    ("gaussian_noise", lambda _: GaussianNoise(0.01)),
    ("optimal_noise", lambda r: OptimalNoise(0.01, refresh=r)),
    ("optimal_noise, layers", lambda r: OptimalNoise(0.01, refresh=r, **LAYERS)),
    ("local_optimal_noise", lambda r: LocalOptimalNoise(0.01, refresh=r)),
    ("optimal_pruning", lambda r: OptimalPruning(0.7, refresh=r)),
    ("local_optimal_pruning", lambda r: LocalOptimalPruning(0.7, refresh=r)),
    ("dp_sgd", lambda _: DpSgd(1.0, 0.1)),
    ("whitened_dp_sgd, layers", lambda r: WhitenedDpSgd(1.0, 0.1, refresh=r, **LAYERS)),
]

TITLE = "What optimal defenses cost, and what the full bound gains"
LARGE_HEADING = "Large models and color images"
WIDTHS, COLOR_SIDE = (16, 32, 64), 32
COLOR = DataSpec("photos", size=COLOR_SIDE)
LARGE: list[tuple[str, Callable[[], Defense]]] = [
    ("none", NoDefense),
    ("optimal_noise", lambda: OptimalNoise(0.01)),
    ("optimal_noise, layers", lambda: OptimalNoise(0.01, **LAYERS)),
    ("optimal_pruning", lambda: OptimalPruning(0.7)),
    ("local_optimal_noise", lambda: LocalOptimalNoise(0.01)),
    ("local_optimal_pruning", lambda: LocalOptimalPruning(0.7)),
]


def seconds(bench: PlanContext, defense: Defense, count: int) -> float:
    """Seconds of `count` rounds of all clients; each round has new weights, as in training."""
    task = bench.task(ModelSpec("simple_convnet"), 0)
    clients = bench.batches(SIZE, CLIENTS, 0)
    states: list[object] = [None] * CLIENTS
    ready = None
    began = time.perf_counter()
    for at in range(count):
        now = task.with_parameters(task.parameters + 1e-4 * at)
        ready = resolve(defense, now, SIZE, ready)
        for i, batch in enumerate(clients):
            _, states[i] = step(now, batch, ready, stream(at, i), states[i])
    return time.perf_counter() - began


def control() -> float:
    """Seconds of a fixed matrix product: the control for load on the machine."""
    a = torch.ones(1024, 1024)
    began = time.perf_counter()
    for _ in range(5):
        a @ a
    return time.perf_counter() - began


def cost(bench: PlanContext) -> list[str]:
    """Median ratio to the undefended step for every defense and refresh."""
    lines = ["| defense | " + " | ".join(f"R = {r}" for r in REFRESH) + " |"]
    lines.append("|---|" + "--:|" * len(REFRESH))
    found: dict[tuple[str, int], list[float]] = {}
    controls = []
    for around in range(ROUNDS + 1):
        for r in REFRESH:
            plain = seconds(bench, NoDefense(), r)
            for name, make in DEFENSES:
                ratio = seconds(bench, make(r), r) / plain
                if around:  # the first time around warms up
                    found.setdefault((name, r), []).append(ratio)
        controls.append(control())
        print(f"cost: {around} of {ROUNDS}", file=sys.stderr, flush=True)
    for name, _ in DEFENSES:
        cells = [f"{np.median(found[name, r]):.2f} ({np.min(found[name, r]):.2f})" for r in REFRESH]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    spread = max(controls) / min(controls)
    lines += ["", f"Control: slowest over fastest matrix product {spread:.2f}.", ""]
    return lines


def bounds(bench: PlanContext) -> list[str]:
    """Full bound relative to the trace bound, from the same Fisher information of prior images."""
    public = bench.public
    assert public is not None
    pixels = public.inputs.flatten(1).double().numpy()
    lines = [
        "| defense | directions | trace (2) | tight | full | full / trace | full / tight |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    cases = [
        ("gaussian_noise 0.01", GaussianNoise(0.01)),
        ("gaussian_noise 0.1", GaussianNoise(0.1)),
        ("optimal_noise 0.1", OptimalNoise(0.1)),
        ("optimal_noise 0.1, layers", OptimalNoise(0.1, **LAYERS)),
    ]
    task = bench.task(ModelSpec("simple_convnet"), 0)
    for components in (32, 128):
        prior = GaussianPrior.from_samples(pixels, components=components)
        drawn = prior.draw(48, np.random.default_rng(0))
        images = torch.as_tensor(drawn).float().reshape(-1, *public.inputs.shape[1:])
        basis = torch.as_tensor(np.ascontiguousarray(prior.basis))
        for name, defense in cases:
            ready = resolve(defense, task, 1)
            batch = Batch(public.inputs[:1], public.labels[:1])
            channel = Channel(task, ready, send(task, batch, ready, stream(0)).law)
            fishers = [
                fisher_matrix(channel, Batch(images[i : i + 1], public.labels[i : i + 1]), basis)
                for i in range(len(images))
            ]
            traces = [float(np.trace(one)) for one in fishers]
            plain = trace_bound_from_samples(traces, prior, tight=False).value
            tight = trace_bound_from_samples(traces, prior).value
            full = full_bound_from_samples(fishers, prior).value
            lines.append(
                f"| {name} | {components} | {plain:.3g} | {tight:.3g} | {full:.3g} | "
                f"{full / plain:.2f} | {full / tight:.2f} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return [*lines, ""]


def measured(name: str, width: int) -> None:
    """Print millions of weights, CPU seconds of one round, and the process's peak in MB."""
    bench = PlanContext(COLOR)
    task = bench.task(ModelSpec("resnet18", (("width", width),)), 0)
    (batch,) = bench.batches(SIZE, 1, 0)
    send(task, batch, NoDefense(), stream(0))  # warms up
    began = time.process_time()
    ready = resolve(dict(LARGE)[name](), task, SIZE)
    send(task, batch, ready, stream(0))
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([len(task.parameters) / 1e6, seconds, peak]))


def child(name: str, width: int) -> list[float]:
    """What `measured` prints, in a process of its own."""
    line = [sys.executable, __file__, "--measure", name, str(width)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    print(name, width, found, file=sys.stderr, flush=True)
    return found


def sizes() -> str:
    """Seconds and memory by number of weights."""
    found = {(name, width): child(name, width) for width in WIDTHS for name, _ in LARGE}
    millions = [found["none", width][0] for width in WIDTHS]
    heads = [f"{count:.2f} million weights" for count in millions]
    lines = [
        "| defense | " + " | ".join(heads) + " | for each million more |",
        "|---|" + "--:|" * (len(WIDTHS) + 1),
    ]
    for name, _ in LARGE:
        own = [found[name, width][1:] for width in WIDTHS]
        more = [
            (b - a) / (millions[-1] - millions[0]) for a, b in zip(own[0], own[-1], strict=True)
        ]
        cells = [f"{seconds:.1f} s, {peak:,.0f} MB" for seconds, peak in (*own, more)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    inputs = SIZE * 3 * COLOR_SIDE**2
    return "\n\n".join(
        [
            f"## {LARGE_HEADING}",
            f"ResNet-18 of three widths on `photos` (3 x {COLOR_SIDE} x {COLOR_SIDE}), a client of "
            f"{SIZE} images, 64 public ones, one thread, on {machine()}. One round, with what the "
            "defense decides for it: CPU seconds, and the peak memory of the whole process, as the "
            "operating system counts it; n = 1 process each. The row `none` is the round without "
            "a defense. Written by `benchmarks/optimal_defenses.py --part sizes`.",
            "\n".join(lines),
            "The information matrix is never formed. For the largest model the Jacobian would take "
            f"{4e-6 * millions[-1] * inputs:.1f} TB, and the matrix over the {inputs:,} inputs "
            f"{4e-9 * inputs**2:.1f} GB.",
        ]
    )


def main() -> None:
    """Print the tables and write the page."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=("rounds", "sizes"), default="rounds")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--print", action="store_true", help="store nothing")
    given = parser.parse_args()
    if given.measure:
        measured(given.measure[0], int(given.measure[1]))
        return
    text = sizes() if given.part == "sizes" else rounds()
    print(text)
    if not given.print:
        stored.keep("optimal_defenses_cost", f"# {TITLE}\n\n{text}")


def rounds() -> str:
    """Both tables of the small model."""
    bench = PlanContext(replace(DataSpec()))
    lines = [
        f"SimpleConvNet, real MNIST, {CLIENTS} clients with {SIZE} images, one thread. The table "
        f"gives a round's time relative to an undefended round, median (minimum) of {ROUNDS} "
        "interleaved runs. What public data decide is renewed every R rounds. Written by "
        "`benchmarks/optimal_defenses.py`.",
        "",
        *cost(bench),
        "The second table gives lower bounds on the mean squared error per pixel. They are "
        "estimated from 48 images drawn from the prior (Gaussian, from public images, in its "
        "leading directions). Estimates are [not proved](error_bounds.md); they compare kinds "
        "and costs.",
        "",
        *bounds(bench),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
