"""One step: objective and its gradient in the candidate, compared with the peers' optimizers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from peers.breaching_attack import Breaching
from peers.recipe import Recipe
from torch import Tensor

from figures.counting import count, peak
from figures.ours import Ours
from figures.rounds import Times, interleave, products_alone
from figures.setting import Setting, setting
from figures.table import Figure
from leakbound import client

STEPS = 10**6
AGREE = 1e-5
MINIMUM = 7


@dataclass(frozen=True)
class Case:
    """A model, a batch size, and the target ratio of its step to breaching's."""

    row: str
    title: str
    model: str
    size: int
    target: float
    options: dict[str, str] = field(default_factory=dict)


CASES = (
    Case("convnet", "ConvNet 2.9 M, B = 2", "convnet64", 2, 0.65, {"norm": "batch"}),
    Case("simple1", "SimpleConvNet, B = 1", "simple_convnet", 1, 0.55),
    Case("simple16", "SimpleConvNet, B = 16", "simple_convnet", 16, 0.75),
    Case("resnet_batch", "ResNet-18 (batch norm), B = 1", "resnet18", 1, 0.60, {"norm": "batch"}),
    Case("resnet_group", "ResNet-18 (group norm), B = 1", "resnet18", 1, 0.60, {"norm": "group"}),
)


def run(case: Case, rounds: int, least: float) -> tuple[list[Figure], str]:
    """The figures of one case, and its times."""
    given = setting(case.model, case.size, **case.options)
    agreement = check_agreement(given)
    theirs, _ = Breaching(given, STEPS).closure()
    recipe, _ = Recipe(given).closure()
    ours = Ours(given, STEPS)
    forward = count(lambda: client.forward(given.task, given.start)).operations
    counts = count(ours.step)
    jobs = {
        "forward": lambda: client.forward(given.task, given.start),
        "gradient": lambda: client.gradient(given.task, given.start, given.labels),
        "breaching": theirs,
        "recipe": recipe,
        "ours": ours.step,
        "its matrix products alone": products_alone(counts.counts),
    }
    times = interleave(jobs, rounds, least)
    used = {name: count(jobs[name]).operations / forward for name in ("breaching", "recipe")}
    used["ours"] = counts.operations / forward
    weights = 4 * given.task.parameters.numel()
    memory = {name: peak(jobs[name]) / weights for name in ("breaching", "recipe", "ours")}
    return _figures(case, times, used), _times(times, used, memory) + f"\n\n{agreement.text}"


class Agreement(NamedTuple):
    """Distance of value and gradient from those in float64: breaching's and ours."""

    theirs: tuple[float, float]
    ours: tuple[float, float]

    @property
    def text(self) -> str:
        """For a note."""
        (a, b), (c, d) = self.theirs, self.ours
        return (
            f"Distance from float64 (value, gradient): breaching {a:.1e}, {b:.1e}; ours "
            f"{c:.1e}, {d:.1e}."
        )


def check_agreement(given: Setting) -> Agreement:
    """Both sides compute one objective and its gradient, as well as float32 can.

    Raises:
        RuntimeError: ours is farther from float64 than 1e-5 and twice breaching's distance, so that
            comparing times would be meaningless.
    """
    value, slope = _in_float64(given)

    def off(found: tuple[float, Tensor]) -> tuple[float, float]:
        own, gradient = found
        return abs(own - value), float((gradient.double() - slope).norm() / slope.norm())

    found = Agreement(off(Breaching(given, STEPS).compare()), off(Ours(given, STEPS).compare()))
    for theirs, ours in zip(found.theirs, found.ours, strict=True):
        if ours > max(AGREE, 2 * theirs):
            raise RuntimeError(f"not the same objective. {found.text}")
    return found


def _in_float64(given: Setting) -> tuple[float, Tensor]:
    """1 - cosine and its gradient at the start, by double backward."""
    task = given.task.to(given.start.device, torch.float64)
    guess = given.start.double().requires_grad_()
    own, seen = client.gradient(task, guess, given.labels), given.observation.update.rows[0]
    value = 1 - own @ seen.double() / (own.norm() * seen.double().norm())
    return float(value.detach()), torch.autograd.grad(value, guess)[0]


def _figures(case: Case, times: Times, used: dict[str, float]) -> list[Figure]:
    against, recipe = times.ratio("ours", "breaching"), times.ratio("ours", "recipe")
    alone = times.ratio("its matrix products alone", "breaching")
    minimum = f"{alone.median:.2f}"
    title = f"step, {case.title}"
    return [
        Figure(
            f"{title}: operations / forward",
            f"{used['ours']:.2f}",
            1,
            f"counted; breaching {used['breaching']:.2f}, recipe {used['recipe']:.2f}",
            f"≤ {MINIMUM:.1f}",
            f"{MINIMUM}",
        ),
        Figure(
            f"{title}: time / breaching",
            against.text(),
            against.n,
            "public attack's step against breaching 0.1.2's closure",
            f"≤ {case.target:.2f}",
            minimum,
        ),
        Figure(
            f"{title}: time / invertinggradients recipe",
            recipe.text(),
            recipe.n,
            "the same against double backward with all leaf gradients",
        ),
    ]


def _times(times: Times, used: dict[str, float], memory: dict[str, float]) -> str:
    """A table of the times behind the ratios."""
    lines = ["| job | ms, median (range) | operations / forward | peak bytes / gradient |"]
    lines.append("|---|--:|--:|--:|")
    for job, seconds in times.seconds.items():
        own = [1e3 * s for s in seconds]
        middle = 1e3 * times.of(job).median
        fixed = (f"{used[job]:.2f}" if job in used else "", _short(memory.get(job)))
        lines.append(
            f"| {job} | {middle:.2f} ({min(own):.2f} to {max(own):.2f}) | {' | '.join(fixed)} |"
        )
    lines.append(f"\nControl: {times.speed().text(0)} GFLOP/s. n = {times.speed().n} rounds.")
    return "\n".join(lines)


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
