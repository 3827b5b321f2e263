"""What do withholding defenses cost per round? Prints times relative to an undefended round.

Conv-2 of PriPrune, one client, 20 images, one local step; paper scale (28x28, 62 classes, 6.6
million weights) and a small one. A round is the client's turn and the server's mean. Rounds of all
federations are interleaved in one process, with a matrix product as control. About one minute.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
from collections.abc import Callable

import torch
from figures.rounds import turns

from leakbound import models
from leakbound.core import Batch, Task
from leakbound.defenses import Defense, NoDefense, PriPrune, Withhold
from leakbound.randomness import stream
from leakbound_reproductions.federation import FederatedPlan, train

ROUNDS, CONTROL = 15, "GEMM 512, four times"
DEFENSES: dict[str, Defense] = {
    "none": NoDefense(),
    "largest": Withhold("largest"),
    "random": Withhold("random"),
    "mix": Withhold("mix"),
    "largest of all": Withhold("largest", scope="global"),
    "priprune": PriPrune(),
    "none, again": NoDefense(),
}


def setting(side: int, classes: int, width: float, hidden: int | None) -> tuple[Task, Batch]:
    """A fresh network and 20 images of noise; the cost does not depend on the content."""
    shape = (1, side, side)
    build = stream(0, "benchmark", "model")
    model = models.conv(
        input_shape=shape, classes=classes, generator=build, width=width, hidden=hidden
    )
    draw = stream(0, "benchmark", "batch")
    images = torch.rand(20, *shape, generator=draw)
    labels = torch.randint(classes, (20,), generator=draw)
    return Task.of(model, classes=classes), Batch(images, labels)


def cost(name: str, task: Task, batch: Batch, rounds: int) -> None:
    """One line per defense; the first two turns warm up (PriPrune's first composes nothing)."""
    left = torch.randn(512, 512, generator=stream(0, "benchmark", "control"))
    jobs: dict[str, Callable[[], object]] = {CONTROL: lambda: [left @ left for _ in range(4)]}
    for defense, link in DEFENSES.items():
        plan = FederatedPlan(defense=link)
        played = train(task, [batch], plan, rounds=rounds + 2, seed=0)
        jobs[defense] = played.__next__
    times = turns(jobs, rounds, warm=2)
    one = times["none"]
    print(f"\n{name}, {len(task.parameters)} weights: {rounds} interleaved rounds")
    print("| round with | ms, median | ms, least | ratio of medians | of minima |")
    print("|---|--:|--:|--:|--:|")
    for job in DEFENSES:
        middle, least = statistics.median(times[job]), min(times[job])
        ratios = f"{middle / statistics.median(one):.2f} | {least / min(one):.2f}"
        print(f"| {job} | {1e3 * middle:.1f} | {1e3 * least:.1f} | {ratios} |")
    speeds = [4 * 2 * 512**3 / took / 1e9 for took in times[CONTROL]]
    print(f"control: {min(speeds):.0f} to {max(speeds):.0f} GFLOP/s")


def main() -> None:
    """Both scales on one thread."""
    torch.set_num_threads(1)
    cost("paper scale", *setting(28, 62, 1.0, None), ROUNDS)
    cost("small", *setting(14, 10, 0.25, 32), 20 * ROUNDS)


if __name__ == "__main__":
    main()
