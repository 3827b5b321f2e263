"""Draws for claims 3-2, 3-4, 3-5, 3-7 and 3-8: through client, DP-SGD and linear trap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leakbound import audit, data
from leakbound.attacks import LinearTrap
from leakbound.attacks.trap import max_success_estimate, unbiased
from leakbound.audit.plan import DataSpec, ModelSpec
from leakbound.bounds import identification
from leakbound.core import Batch, Server, Task, ThreatModel
from leakbound.defenses import DpSgd
from leakbound.protocol import play
from leakbound.randomness import normal, permutation, stream
from leakbound_reproductions.mean_to_extreme import trap
from leakbound_reproductions.mean_to_extreme.unbiased import unbiased_error, unbiased_success

SPREAD = 5.0
"""C / |X| of claim 3-2, so that 25 rows are enough and eq. 16 asks for 5."""
ROWS = (5, 24, 25, 100)
SIGHTINGS = (4, 16, 64)
BATCHES = (2, 8, 32)
BATCH_NOISES = (0.0, 0.01, 0.1, 0.5)
"""Without noise as in section III-A, and the noise of the authors' experiment on batches."""
SMALL = 0.1
FAR = 10.0
NEAR = 1e-4
"""Noise for the vanishing error and for the vanishing risk; N eta / |X|^2 of the first."""
HALF = 0.5
CANDIDATES = 10
BLIND = 1e6
ETAS = (0.1, 10.0)
KAPPAS = (11, 13)
GAMMA = 0.1
Law = Callable[[float], tuple[float, float]]
"""The interval of an estimate at any level."""


@dataclass(frozen=True)
class Share:
    """Hits of n draws."""

    hits: int
    n: int


def digit(number: int, bench: audit.PlanContext) -> tuple[Batch, float]:
    """A real digit, and its norm."""
    (batch,) = bench.batches(1, 1, number)
    return batch, float(batch.inputs.double().norm())


def reading(task: Task, batch: Batch, attack: LinearTrap, privacy: Any, *path: Any) -> Tensor:
    """The linear trap's estimate from one defended update of an example, (N,), float64."""
    played = play(
        task,
        [batch],
        privacy,
        [stream(7, *path, side) for side in ("client", "cohort")],
        threat=ThreatModel(server=Server.MALICIOUS),
        attack=attack,
    )
    return attack.estimate(played.observation)[0]


def rows(draws: int) -> dict[str, list[float]]:
    """Squared errors / (N sigma^2 |X|^2), the minimum by theorem IV.1, by rows of the linear trap.

    Args:
        draws: digits, one draw of noise each.
    """
    bench = audit.PlanContext(DataSpec())
    noise = 0.1
    task = bench.task(ModelSpec("mlp"), 0)
    found = {}
    for count in ROWS:
        own = []
        for number in range(draws):
            batch, norm = digit(number, bench)
            attack = LinearTrap("unbiased", rows=count, norm=norm, features=784)
            privacy = DpSgd(clip_norm=SPREAD * norm, noise_multiplier=noise)
            guess = reading(task, batch, attack, privacy, "rows", count, number)
            error = float((guess - batch.inputs.flatten().double()).square().sum())
            own.append(error / (784 * (noise * norm) ** 2))
        found[str(count)] = own
    return found


def sightings(records: int) -> dict[str, list[float]]:
    """Squared errors of the mean of k estimates, divided by N sigma^2 |X|^2 / k.

    Args:
        records: how many digits are sent, each k times.
    """
    bench = audit.PlanContext(DataSpec())
    noise = 0.1
    task = bench.task(ModelSpec("mlp"), 0)
    found = {}
    for times in SIGHTINGS:
        own = []
        for number in range(records):
            batch, norm = digit(number, bench)
            attack = LinearTrap("unbiased", rows=1, norm=norm, features=784)
            privacy = DpSgd(clip_norm=1.0, noise_multiplier=noise)
            seen = [
                reading(task, batch, attack, privacy, "sightings", times, number, i)
                for i in range(times)
            ]
            off = torch.stack(seen).mean(0) - batch.inputs.flatten().double()
            own.append(float(off.square().sum()) * times / (784 * (noise * norm) ** 2))
        found[str(times)] = own
    return found


def limits(draws: int) -> dict[str, Any]:
    """How often errors are small if the noise is large or the required error is tiny (3-4)."""
    found: dict[str, Any] = {}
    for dim in trap.DIMS:
        for name, noise, e in (("far", FAR, HALF), ("near", SMALL, NEAR)):
            found[f"{name} {dim}"] = vars(_share(dim, noise, e, draws))
    found["named"] = vars(_named(1e3, CANDIDATES, draws))
    eta = HALF * trap.NORM**2 / 4
    found["blind"] = vars(_share(4, BLIND, HALF, draws, lambda r: max_success_estimate(r, eta)))
    found["blind law"] = float(
        unbiased_success(BLIND, dim=4, eta=eta, norm=trap.NORM),
    )
    return found


def _share(dim: int, noise: float, e: float, draws: int, estimator: Any = unbiased) -> Share:
    """Errors of at most e |X|^2 / N, for examples with random directions."""
    source = stream(8, "limits", dim, repr(noise), repr(e))
    hits = 0
    n = 0
    while n < draws:
        records = trap.directions(dim, min(500, draws - n), source)
        errors = trap.errors(records, noise, estimator, source)
        hits = hits + int((errors <= e * trap.NORM**2 / dim).sum())
        n = n + len(errors)
    return Share(hits, n)


def _named(noise: float, candidates: int, draws: int) -> Share:
    """How often the true candidate among orthogonal ones fits the update best."""
    source = stream(8, "named", candidates)
    like = torch.zeros(1, dtype=torch.float64)
    fits = noise * normal((draws, candidates), source, like=like)
    fits[:, 0] += 1
    return Share(int((fits.argmax(1) == 0).sum()), draws)


def crossing(draws: int) -> dict[str, Any]:
    """How often the error at N = 1 is at most eta, if noise keeps identification at 10 % (3-5)."""
    found: dict[str, Any] = {}
    for over in KAPPAS:
        noise = float(identification.gaussian.noise_for(GAMMA, kappa=1 / over))
        source = stream(9, "crossing", over)
        like = torch.zeros(1, dtype=torch.float64)
        errors = (noise * normal((draws,), source, like=like)).square()
        at = float(unbiased_error(noise, dim=1, gamma=GAMMA))
        found[str(over)] = {
            "noise": noise,
            "crosses": at,
            **{repr(eta): vars(Share(int((errors <= eta).sum()), draws)) for eta in ETAS},
        }
    return found


def batches(color: str, trials: int) -> dict[str, list[float]]:
    """Mean squared error of the plain estimate in a batch, minus that of the images alone (3-8).

    As in the authors' experiment: examples with natural norms are clipped to the median, summed,
    get noise of C sigma, and are divided by B. The estimate is compared with each image. "NOISE B"
    -> one per trial.
    """
    source = data.load(color, size=32, channels=3, limit=max(BATCHES) * trials)
    flat = source.inputs.flatten(1).double()
    clip = float(flat.norm(dim=1).median())
    found = {}
    for noise in BATCH_NOISES:
        for size in BATCHES:
            drawn = stream(10, "batches", repr(noise), size)
            own = [_company(flat, clip, noise, size, drawn) for _ in range(trials)]
            found[f"{noise} {size}"] = own
    return found


def _company(flat: Tensor, clip: float, noise: float, size: int, source: torch.Generator) -> float:
    x = flat[permutation(len(flat), source)[:size]]
    sent = x * (clip / x.norm(dim=1, keepdim=True)).clamp_max(1)
    together = (sent.sum(0) + noise * clip * normal(x.shape[1:], source, like=x)) / size
    alone = sent + noise * clip * normal(x.shape, source, like=x)
    return float((together - x).square().mean() - (alone - x).square().mean())


def chi_square(ratios: Sequence[float], dim: int) -> tuple[float, Any]:
    """A variance over its stated value, from sums of squares of dim Gaussians, and its interval."""
    from scipy import stats

    freedom = dim * len(ratios)
    mean = float(np.mean(ratios))

    def interval(level: float) -> tuple[float, float]:
        ends = stats.chi2.ppf([0.5 + level / 2, 0.5 - level / 2], freedom)
        return mean * freedom / float(ends[0]), mean * freedom / float(ends[1])

    return mean, interval


def kolmogorov(distance: float, draws: int, tests: int = 1) -> tuple[float, Any]:
    """A distance between distributions, and its Dvoretzky-Kiefer-Wolfowitz interval.

    With `tests` > 1, it is the largest of several tests.
    """

    def interval(level: float) -> tuple[float, float]:
        slack = math.sqrt(math.log(2 * tests / (1 - level)) / (2 * draws))
        return max(0.0, distance - slack), distance + slack

    return distance, interval
