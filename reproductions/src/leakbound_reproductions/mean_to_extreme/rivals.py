"""Claims 3-9 and IV.3: the linear trap's unbiased estimator, other attacks and the zero image."""

from __future__ import annotations

import math

import torch

from leakbound import audit, metrics
from leakbound.attacks import LinearTrap, dlg, inverting_gradients
from leakbound.attacks.base import Attack
from leakbound.audit.plan import DataSpec, ModelSpec
from leakbound.core import Batch, Reconstruction, Server, ThreatModel
from leakbound.defenses import DpSgd
from leakbound.pairing import pair
from leakbound.protocol import Round, play
from leakbound.randomness import stream
from leakbound_reproductions.mean_to_extreme.settings import Setting

NOISES = (0.005, 0.02, 0.1, 1.0)
"""Noise of the authors' experiment with earlier attacks."""
OURS = "the linear trap"
ZERO = "the zero image"
RIVALS = ("division", "DLG", "Inverting Gradients")
DLG_STEPS = 300
TOGETHER = 10


def bench_of(setting: Setting, color: str) -> audit.PlanContext:
    """MNIST, or color images of 32 x 32 as in the paper's code."""
    if setting.color_attacked:
        return audit.PlanContext(DataSpec(color, size=32, channels=3))
    return audit.PlanContext(DataSpec())


def errors(
    name: str, noise: float, setting: Setting, bench: audit.PlanContext
) -> list[float | None]:
    """Mean squared errors on the attacked images, in their order; None where the attack failed.

    Args:
        name: `OURS`, `ZERO` or one of `RIVALS`.
        noise: the noise multiplier; the clip norm is the mean norm of the private images.
        setting: how many images, and steps.
        bench: the data.
    """
    images = bench.dataset.inputs[bench.splits["private"]].flatten(1).double()
    clip = float(images.norm(dim=1).mean())
    found: list[float | None] = []
    for first in range(0, setting.attacked, TOGETHER):
        numbers = range(first, min(first + TOGETHER, setting.attacked))
        found += _some(name, noise, clip, list(numbers), setting, bench)
    return found


def _some(
    name: str,
    noise: float,
    clip: float,
    numbers: list[int],
    setting: Setting,
    bench: audit.PlanContext,
) -> list[float | None]:
    if name == ZERO:
        return [float(bench.batches(1, 1, n)[0].inputs.square().mean()) for n in numbers]
    if name == OURS:
        return [_ours(noise, clip, n, bench) for n in numbers]
    attack = {
        "division": LinearTrap("division", rows=400),
        "DLG": dlg(steps=DLG_STEPS),
        "Inverting Gradients": inverting_gradients(steps=setting.steps, restarts=setting.restarts),
    }[name]
    played = [_play(attack, noise, clip, n, bench) for n in numbers]
    sources = [stream(n, "claim 3-9", "attack") for n in numbers]
    answers = attack.many([one.observation for one in played], sources)
    return [_error(one.truth, answer) for one, answer in zip(played, answers, strict=True)]


def _error(truth: Batch, answer: Reconstruction) -> float | None:
    """None if the reconstruction or its error is not finite: the attack failed."""
    if not bool(answer.inputs.isfinite().all()):
        return None
    value = metrics.mse(pair(truth, answer), data_range=1.0)[0]
    return value if value is not None and math.isfinite(value) else None


def _ours(noise: float, clip: float, number: int, bench: audit.PlanContext) -> float:
    """Errors of the estimator as in paper C, not clamped to the range of the images."""
    (batch,) = bench.batches(1, 1, number)
    norm = float(batch.inputs.double().norm())
    rows = max(1, math.ceil((clip / norm) ** 2))
    attack = LinearTrap("unbiased", rows=rows, norm=norm)
    guess = attack.estimate(_play(attack, noise, clip, number, bench).observation)[0]
    return float((guess - batch.inputs.flatten().double()).square().mean())


def _play(
    attack: Attack, noise: float, clip: float, number: int, bench: audit.PlanContext
) -> Round:
    planted = isinstance(attack, LinearTrap)
    sources: list[torch.Generator] = [stream(number, "claim 3-9", i) for i in range(2)]
    return play(
        bench.task(ModelSpec("mlp"), number),
        bench.batches(1, 1, number),
        DpSgd(clip_norm=clip, noise_multiplier=noise),
        sources,
        threat=ThreatModel(server=Server.MALICIOUS if planted else Server.HONEST),
        attack=attack,
        auxiliary=bench.public,
    )
