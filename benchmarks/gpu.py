"""How fast is the attack on a GPU, compared with the GPU's peak? Prints a table.

Measures a step of `inverting_gradients` and of the plain recipe (autograd) in turns, for ResNet-18
(batch of 8 at 32 x 32, one image at 224 x 224) and, with torchvision, ResNet-50 (batch
of 8 at 224 x 224). Then attack steps per second, and the counted operations as a share of the
measured peak of float32 matrix products. With `--plan` it estimates the time of a plan: each kind
of experiment runs for a few steps, and the rest is extrapolated. Without a GPU it says so and
measures nothing.

    python benchmarks/gpu.py [--rounds 7] [--plan PLAN] [--rehearse]

`--rehearse` runs the same lines on the CPU at small sizes, to check that they run; its numbers mean
nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from figures.counting import count
from figures.ours import Ours, settings
from figures.rounds import interleave
from figures.setting import attack_stream, setting
from peers.recipe import Recipe
from torch import Tensor

from leakbound import audit, client
from leakbound.audit import Plan, PlanContext
from leakbound.registry import Spec

CASES = (("batch of 8 at 32 x 32", 8, 32), ("one image at 224 x 224", 1, 224))
RATIOS = (("resnet18", 8, 32), ("resnet18", 1, 224), ("resnet50", 8, 224))
LENGTHS, BRIEF = (30, 130), (1, 3)


def seconds(run: Callable[[], object], device: str, rounds: int) -> list[float]:
    """Seconds of several calls, after one to warm up; the device is idle before and after each."""
    taken = []
    for number in range(rounds + 1):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        if number:
            taken.append(time.perf_counter() - began)
    return taken


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_speed(device: str, side: int, rounds: int) -> float:
    """Operations a second of a large float32 product, as the median of its rounds."""
    left = torch.ones(side, side, device=device)
    return 2.0 * side**3 / statistics.median(seconds(lambda: left @ left, device, rounds))


def ratios(device: str, rounds: int) -> None:
    """One line per case: our step and the recipe's in turns; agreement of their gradients."""
    print("| model, batch, side | ours, ms | recipe, ms | ratio | gradients differ by | engine |")
    print("|---|--:|--:|--:|--:|---|")
    for name, size, side in RATIOS if device == "cuda" else RATIOS[:1]:
        try:
            given = setting(name, size, side=side, device=device)
        except ImportError:
            print(f"| {name}, {size}, {side} | torchvision is not installed | | | | |")
            continue
        ours, recipe = Ours(given, 10**6), Recipe(given)
        closure, candidate = recipe.closure()
        found, mine = closure(), ours.compare()[1]
        theirs = candidate.grad if isinstance(candidate, Tensor) else None
        apart = float("nan") if theirs is None else float((mine - theirs).norm() / theirs.norm())
        del found
        jobs = {"ours": _synced(ours.step, device), "recipe": _synced(closure, device)}
        times = interleave(jobs, rounds)
        cells = [f"{1e3 * times.of(job).median:.2f}" for job in jobs]
        engine = type(ours.evaluator.engine).__name__ if hasattr(ours.evaluator, "engine") else ""
        line = [f"{name}, {size}, {side}", *cells, times.ratio("ours", "recipe").text(2)]
        print(f"| {' | '.join([*line, f'{apart:.1e}', engine])} |", flush=True)


def _synced(job: Callable[[], object], device: str) -> Callable[[], object]:
    def run() -> None:
        job()
        _wait(device)

    return run


def steps(device: str, rounds: int, peak: float, lengths: tuple[int, int]) -> None:
    """One line per case: whole attacks at two lengths, so that the set-up time cancels."""
    few, more = lengths
    print("| ResNet-18 | steps a second | range | operations / forward | share of the peak |")
    print("|---|--:|--:|--:|--:|")
    for title, size, side in CASES if device == "cuda" else CASES[:1]:
        given = setting("resnet18", size, side=side, device=device)
        forward = count(lambda g=given: client.forward(g.task, g.start)).operations
        operations = count(Ours(given, more).step).operations

        def attack(length: int, g=given) -> object:  # type: ignore[no-untyped-def]
            return settings(length)(g.observation, attack_stream(0))

        short = seconds(lambda run=attack: run(few), device, rounds)
        long = seconds(lambda run=attack: run(more), device, rounds)
        rates = [(more - few) / (b - a) for a, b in zip(short, long, strict=True)]
        middle = statistics.median(rates)
        shown = f"{middle:.1f} | {min(rates):.1f} to {max(rates):.1f}"
        share = f"{middle * operations / peak:.1%}"
        print(f"| {title} | {shown} | {operations / forward:.2f} | {share} |", flush=True)


def plan_time(device: str, plan: Plan, few: int, more: int) -> None:
    """Experiments per minute of the plan: each attack and batch size runs briefly, undefended."""
    context = PlanContext(plan.data, device)
    cells = Counter((cell.attack, cell.batch_size) for cell in plan.experiments())
    print("| attack | batch | ms a step | s an experiment | experiments |")
    print("|---|--:|--:|--:|--:|")
    total = 0.0
    for (attack, size), number in cells.items():
        brief, longer = (_cell(plan, context, attack, size, length) for length in (few, more))
        step = (longer - brief) / (more - few)
        one = brief + step * (dict(attack.settings).get("steps", 1000) - few)
        total += number * one
        print(f"| {attack.name} | {size} | {1e3 * step:.2f} | {one:.0f} | {number} |", flush=True)
    rate = 60 * cells.total() / total
    print(f"\n{cells.total()} experiments in {total / 3600:.1f} h: {rate:.1f} per minute")


def _cell(plan: Plan, context: PlanContext, attack: Spec, size: int, length: int) -> float:
    """Seconds of one experiment with this many steps."""
    short = Spec(attack.name, tuple(sorted({**dict(attack.settings), "steps": length}.items())))
    one = dataclasses.replace(
        plan, attacks=(short,), batch_sizes=(size,), seeds=plan.seeds[:1], defenses=((),)
    )
    (cell,) = one.experiments()
    began = time.perf_counter()
    result = audit.run_experiment(cell, context, pictures=False)
    _wait(context.device.type)
    if result.record.status == "failed":
        raise RuntimeError(f"an experiment failed: {result.record.reason}")
    return time.perf_counter() - began


def main() -> None:
    """Print the table, or say that there is no GPU."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--plan", type=Path)
    options.add_argument("--rehearse", action="store_true", help="small sizes on the CPU")
    given = options.parse_args()
    if not torch.cuda.is_available() and not given.rehearse:
        print("There is no GPU here: nothing was measured.")
        return
    device = "cpu" if given.rehearse else "cuda"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU, a rehearsal"
    rounds = 1 if given.rehearse else given.rounds
    peak = peak_speed(device, 256 if given.rehearse else 8192, rounds)
    print(f"{name}, torch {torch.__version__}, float32 products: {peak / 1e12:.2f} TFLOP/s\n")
    lengths = BRIEF if given.rehearse else LENGTHS
    ratios(device, rounds)
    print()
    steps(device, rounds, peak, lengths)
    if given.plan is None:
        return
    plan = audit.load(given.plan)
    if given.rehearse:
        plan = dataclasses.replace(plan, batch_sizes=plan.batch_sizes[:1])
    print()
    plan_time(device, plan, *lengths)


if __name__ == "__main__":
    main()
