"""Time of whole attacks until the same objective value, including set-up."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from peers.breaching_attack import Breaching
from peers.recipe import Recipe
from torch import Tensor

from figures.ours import settings
from figures.rounds import Spread, Times, interleave
from figures.setting import Setting, attack_stream, setting
from figures.table import Figure
from leakbound import metrics
from leakbound.core import Reconstruction
from leakbound.pairing import pair

SIZE = 4
TARGET = 0.3


class Run(NamedTuple):
    """One whole attack: its result, and the objective with the seconds since the call."""

    answer: Tensor
    values: Sequence[float]
    times: Sequence[float]
    whole: float

    def reached(self, value: float) -> float:
        """Seconds until the objective was at most this."""
        for own, when in zip(self.values, self.times, strict=True):
            if own <= value:
                return when
        return math.inf


class Compared(NamedTuple):
    """For one seed: seconds of both to one value, and of both to the end."""

    mine: float
    theirs: float
    whole: float
    final: tuple[float, float]
    psnr: tuple[float, float]


def run(seeds: int, steps: int) -> tuple[list[Figure], str]:
    """Both peers on every seed, alternating which runs first."""
    found: dict[str, list[Compared]] = {"breaching": [], "recipe": []}
    for seed in range(seeds):
        given = setting("simple_convnet", SIZE, seed)
        peers: dict[str, Callable[[], Run]] = {
            "breaching": lambda g=given: _timed(Breaching(g, steps).run),
            "recipe": lambda g=given: _timed(lambda: Recipe(g).run(steps)),
        }
        for name, peer in peers.items():
            found[name].append(_compare(given, seed, steps, peer))
    control = interleave({}, 3)
    return _figures(found, steps), _note(found, steps, control)


def _timed(attack: Callable[[], tuple[Tensor, list[float], list[float]]]) -> Run:
    began = time.perf_counter()
    answer, values, times = attack()
    return Run(answer, values, times, time.perf_counter() - began)


def _compare(given: Setting, seed: int, steps: int, peer: Callable[[], Run]) -> Compared:
    """Compare the times to the worse of the two final values, which both reach."""
    if seed % 2:
        theirs, (whole, answer) = peer(), _ours(given, seed, steps)
    else:
        (whole, answer), theirs = _ours(given, seed, steps), peer()
    final = min(theirs.values)
    value = max(final, answer.objective)
    mine = whole if value == answer.objective else _ours(given, seed, steps, value)[0]
    return Compared(
        mine,
        theirs.reached(value),
        whole / theirs.whole,
        (answer.objective, final),
        (_psnr(given, answer), _psnr(given, Reconstruction(theirs.answer, given.labels))),
    )


def _ours(
    given: Setting, seed: int, steps: int, enough: float = 0.0
) -> tuple[float, Reconstruction]:
    """Seconds of one call of the public attack, and its result."""
    began = time.perf_counter()
    answer = settings(steps, enough)(given.observation, attack_stream(seed))
    return time.perf_counter() - began, answer


def _psnr(given: Setting, answer: Reconstruction) -> float:
    low, high = given.task.input_range
    values = metrics.psnr(pair(given.truth, answer), data_range=high - low)
    return statistics.mean(float(value) for value in values if value is not None)


def _figures(found: dict[str, list[Compared]], steps: int) -> list[Figure]:
    lines = []
    for name, runs in found.items():
        ratio = Spread.of([one.mine / one.theirs for one in runs])
        whole = Spread.of([one.whole for one in runs])
        title = f"whole attack, MNIST, B = {SIZE}"
        what = f"wall time to the worse of the two final objectives, {steps} steps at most, 5 seeds"
        aim = f"≤ {TARGET}"
        lines.append(
            Figure(f"{title}: time to one value / {name}", ratio.text(), ratio.n, what, aim)
        )
        what = f"{steps} steps each, set-up and all"
        lines.append(Figure(f"{title}: whole / {name}", whole.text(), whole.n, what))
    return lines


def _note(found: dict[str, list[Compared]], steps: int, control: Times) -> str:
    lines = [
        "| peer | seed | ours to the value, s | peer, s | final: ours, peer | dB: ours, peer |"
    ]
    lines.append("|---|--:|--:|--:|--:|--:|")
    for name, runs in found.items():
        for seed, one in enumerate(runs):
            ends = f"{one.final[0]:.2e}, {one.final[1]:.2e}"
            quality = f"{one.psnr[0]:.1f}, {one.psnr[1]:.1f}"
            taken = f"{one.mine:.2f} | {one.theirs:.2f}"
            lines.append(f"| {name} | {seed} | {taken} | {ends} | {quality} |")
    lines.append(f"\nControl at the end: {control.speed().text(0)} GFLOP/s. {steps} steps.")
    return "\n".join(lines)
