"""Is the chosen engine ever slower or less accurate than autograd?

Writes docs/results/engine_choice.json. Every model of `leakbound list`, one attack step (gradient,
and its product with a fixed direction, differentiated in the images) by the chosen engine and by
autograd's double backward, interleaved in one process with one thread, with a matrix product as
control. Each instruction set has its own section, which a run with that set replaces. A machine
with AVX-512 can measure the narrower sets too, which the section's title says:

    python benchmarks/engine_choice.py
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/engine_choice.py

Prints each row when it is measured; about twenty minutes. Times are those of the one thread's
processor, so that other programs matter less. `--rounds 2` checks that it runs and writes nothing.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import suppress

import torch
from figures.table import machine, stored

from leakbound import client, registry
from leakbound.core import Task
from leakbound.engines.base import kernels
from leakbound.engines.choose import choose
from leakbound.randomness import normal, stream

PAGE = "engine_choice"
SIZES = (1, 2, 8)
SHAPES = ((3, 32, 32), (3, 32))
"""Of images, and of series for models that take no images."""
MORE = {"convnet64": ("batch_training",), "resnet18": ("batch_training", "group")}
"""Norms other than the default."""
INPUTS = 5
"""Batches over which distances from float64 are compared."""
LEAST = 0.15
"""Seconds of one timed stretch."""
INTRO = """# The chosen engine against autograd

Written by `python benchmarks/engine_choice.py`: one attack step of every model of `leakbound list`
at 3 x 32 x 32, or 3 x 32 for series, at random weights. Time: ratio to autograd's double backward,
median (least to most) over interleaved rounds of processor time, in one process with one thread.
Models of tokens are left out: no step is taken in their inputs. Distance: how far gradient and step
are from the same in float64, in the distance of autograd's, the median over five batches and the
most. A target is at most 1.0 in time and at most 2 in distance."""


def main() -> None:
    """Measure, print, and replace this instruction set's section."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--only", action="append", help="a model; repeatable; writes nothing")
    given = options.parse_args()
    torch.set_num_threads(1)
    capability = torch.backends.cpu.get_cpu_capability()
    rows = ["| model | weights | batch | engine | time / autograd | control | gradient | step |"]
    rows += ["|---|--:|--:|---|--:|--:|--:|--:|"]
    for name in given.only or sorted(registry.entries("model")):
        for norm in ("", *MORE.get(name, ())):
            for size in SIZES if model_of(name, norm) else ():
                if norm != "batch_training" or size > 1:
                    rows.append(row(name, norm, size, given.rounds))
                    print(rows[-1], flush=True)
    if given.rounds < 7 or given.only:
        return
    where = f"Machine: {machine()}. Convolutions: {kernels()}. n = {given.rounds} rounds."
    forced = "ATEN_CPU_CAPABILITY" in os.environ
    title = f"{capability}, emulated by the environment" if forced else capability
    stored.keep(PAGE, f"{INTRO}\n\n## {title}\n\n{where}\n\n" + "\n".join(rows))


def model_of(name: str, norm: str = "") -> tuple[torch.nn.Module, tuple[int, ...]] | None:
    """A model at random weights and its inputs' shape; None if it takes tokens."""
    for shape in SHAPES:
        source = stream(0, "engine choice", name)
        options = {"norm": norm} if norm else {}
        given = {"input_shape": shape, "classes": 10, "generator": source}
        with suppress(ValueError):
            return registry.build("model", name, options, **given), shape
    return None


def row(name: str, norm: str, size: int, rounds: int) -> str:
    """One line of the table."""
    found = model_of(name, norm)
    assert found is not None
    model, shape = found
    task = Task.of(model)
    x = batch(size, 0, shape)
    output = client.forward(task, x).shape
    labels = (torch.arange(output.numel() // 10) % 10).view(size, *output[2:])
    along = normal((len(task.parameters),), stream(0, "along"), like=task.parameters)
    choice = choose(task, 1, (size, *shape))
    name = f"{name} ({norm})" if norm else name
    first = f"| {name} | {len(task.parameters):,} | {size} |"
    if choice is None:
        return f"{first} autograd | 1 | | 1 | 1 |"
    engine = choice.engine([task], 1)

    def ours(x: torch.Tensor) -> list[torch.Tensor]:
        gradient = engine.gradient(x[None], labels[None])[0].clone()
        return [gradient, engine.pull(along[None]).inputs[0].clone()]

    distances = [compared(task, ours, batch(size, i, shape), labels, along) for i in range(INPUTS)]
    matrix = torch.rand(512, 512, generator=stream(0, "control"))
    jobs: dict[str, Callable[[], object]] = {
        "autograd": lambda: double_backward(task, x, labels, along),
        "ours": lambda: (engine.gradient(x[None], labels[None]), engine.pull(along[None])),
        "control": lambda: matrix @ matrix,
    }
    counts = {job: max(1, int(LEAST / timed(call, 2))) for job, call in jobs.items()}
    taken = [{job: timed(call, counts[job]) for job, call in jobs.items()} for _ in range(rounds)]
    ratios = [each["ours"] / each["autograd"] for each in taken]
    control = [each["control"] for each in taken]
    spread = f"{max(control) / min(control):.2f}"
    off = [
        f"{statistics.median(column):.2f} (to {max(column):.2f})"
        for column in zip(*distances, strict=True)
    ]
    kind = "bundle" if choice.chain else "single"
    return f"{first} {kind} | {said(ratios)} | {spread} | {off[0]} | {off[1]} |"


def batch(size: int, number: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Inputs."""
    return torch.rand(size, *shape, generator=stream(number, "engine choice"))


def double_backward(
    task: Task, x: torch.Tensor, labels: torch.Tensor, along: torch.Tensor
) -> list[torch.Tensor]:
    """Gradient, and the slope of its product with `along` in the images."""
    free = x.clone().requires_grad_()
    gradient = client.gradient(task, free, labels)
    return [gradient.detach(), torch.autograd.grad(gradient, free, along)[0]]


def compared(
    task: Task,
    ours: Callable[[torch.Tensor], list[torch.Tensor]],
    x: torch.Tensor,
    labels: torch.Tensor,
    along: torch.Tensor,
) -> tuple[float, ...]:
    """Distances from float64, relative to autograd's: for the gradient and for the step."""
    exact = double_backward(task.to("cpu", torch.float64), x.double(), labels, along.double())
    theirs = double_backward(task, x, labels, along)
    pairs = zip(exact, ours(x), theirs, strict=True)
    return tuple(
        float((mine.double() - e).norm()) / max(float((auto.double() - e).norm()), 1e-300)
        for e, mine, auto in pairs
    )


def timed(call: Callable[[], object], count: int) -> float:
    """Seconds for one call, averaged over several."""
    began = time.thread_time()
    for _ in range(count):
        call()
    return (time.thread_time() - began) / count


def said(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
