"""Claim 0-6: the paper's theorems, checked by draws and by other solvers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import optimize
from torch import nn

from leakbound.bounds import GaussianPrior, trace_bound
from leakbound.core import Task
from leakbound.defenses.allocation import keep_by_utility, prune_order, shape, with_utility
from leakbound.engines.sensitivity import sensitivity
from leakbound.randomness import stream

Array = NDArray[np.float64]
INPUTS = 6
WEIGHTS = 15
VARIANCE = 3.0
SHARE = 0.8
DIRECTIONS = 10
OFF = 0.5
"""k and epsilon of lemma 3.8."""


def measured(models: int, draws: int) -> dict[str, Any]:
    """The measurements that the findings of the claim need.

    Args:
        models: random linear models.
        draws: in each Monte Carlo.
    """
    return {
        "floor": [_floor(seed, draws // 10) for seed in range(models)],
        "fisher": _fisher(draws),
        "utility": _utility(draws),
        "noise": _noise(models, draws // 10),
        "algorithm": _algorithm(10 * models),
        "pruning": max(_pruning(seed) for seed in range(models)),
        "estimate": _estimate(draws // 5),
    }


def _linear(seed: int, weights: int = WEIGHTS) -> tuple[Array, Array]:
    """A Jacobian (P, m) and a gradient (P,) of a random linear model."""
    source = np.random.default_rng([6, seed])
    scale = source.lognormal(0, 0.7, (weights, 1))
    return source.standard_normal((weights, INPUTS)) * scale, source.standard_normal(weights)


def _floor(seed: int, draws: int) -> dict[str, float]:
    """The best attacker's error / theorem 3.2's lower bound: x ~ N(0, I), y = J x + noise."""
    jacobian, _ = _linear(seed)
    source = np.random.default_rng([7, seed])
    x = source.standard_normal((draws, INPUTS))
    y = x @ jacobian.T + VARIANCE**0.5 * source.standard_normal((draws, WEIGHTS))
    precision = jacobian.T @ jacobian / VARIANCE + np.eye(INPUTS)
    guess = np.linalg.solve(precision, jacobian.T @ y.T / VARIANCE).T
    floor = trace_bound(
        float((jacobian**2).sum() / VARIANCE), GaussianPrior(np.zeros(INPUTS), np.ones(INPUTS))
    ).value
    ratio = ((guess - x) ** 2).mean(1) / floor
    return {"mean": float(ratio.mean()), "deviation": float(ratio.std(ddof=1)), "n": draws}


def _fisher(draws: int) -> dict[str, float]:
    """Squared length of the score relative to tr J_F = sum |grad g_i|^2 / Sigma_ii (eq. 6)."""
    jacobian, gradient = _linear(0)
    variance = np.abs(gradient) + 0.5
    noise = np.random.default_rng(8).standard_normal((draws, WEIGHTS)) * variance**0.5
    score = noise / variance @ jacobian
    ratio = (score**2).sum(1) / ((jacobian**2).sum(1) / variance).sum()
    return {"mean": float(ratio.mean()), "deviation": float(ratio.std(ddof=1)), "n": draws}


def _utility(draws: int) -> dict[str, float]:
    """Squared deviation of <g, y> relative to sum g_i^2 Sigma_ii, the cost of eq. 5."""
    _, gradient = _linear(0)
    variance = np.abs(gradient) + 0.5
    noise = np.random.default_rng(9).standard_normal((draws, WEIGHTS)) * variance**0.5
    ratio = (noise @ gradient) ** 2 / (gradient**2 * variance).sum()
    return {"mean": float(ratio.mean()), "deviation": float(ratio.std(ddof=1)), "n": draws}


def _noise(models: int, draws: int) -> dict[str, int]:
    """How often another covariance of the same cost leaks less than theorem 3.5's."""
    hits = n = 0
    for seed in range(models):
        jacobian, gradient = _linear(seed)
        s = (jacobian**2).sum(1)
        g2 = gradient**2
        best = _optimal(s, g2, "utility")
        source = np.random.default_rng([10, seed])
        for spread in (0.01, 0.1, 1.0):
            count = draws // (3 * models)
            other = best * np.exp(spread * source.standard_normal((count, WEIGHTS)))
            other *= (g2 * best).sum() / (g2 * other).sum(1, keepdims=True)
            hits = hits + int(((s / other).sum(1) < (s / best).sum()).sum())
            n = n + count
    return {"hits": hits, "n": n}


def _optimal(s: Array, g2: Array, rule: str) -> Array:
    ours = torch.from_numpy(s), torch.from_numpy(g2)
    found: Array = with_utility(shape(*ours, rule), ours[1], 1.0).numpy()
    return found


def _algorithm(models: int) -> dict[str, int]:
    """In how many models eq. 7 leaks less than algorithm 1 as printed, at the same cost."""
    hits = 0
    for seed in range(models):
        jacobian, gradient = _linear(seed)
        s = (jacobian**2).sum(1)
        g2 = gradient**2
        told = [(s / _optimal(s, g2, rule)).sum() for rule in ("utility", "algorithm_1")]
        hits += bool(told[0] < told[1])
    return {"hits": hits, "n": models}


def _pruning(seed: int) -> float:
    """How far theorem 3.6 is from the optimum of the linear program, relatively."""
    jacobian, gradient = _linear(seed, 60)
    s = (jacobian**2).sum(1)
    g2 = gradient**2
    ours = torch.from_numpy(s), torch.from_numpy(g2)
    keep, between, chance = keep_by_utility(prune_order(*ours), ours[1], SHARE)
    told = float(ours[0][keep].sum() + chance * ours[0][between])
    cost = [-g2], [-SHARE * g2.sum()]
    best = float(optimize.linprog(s, *cost, bounds=(0, 1)).fun)
    return abs(told - best) / best


class _Projection(nn.Module):
    """<w, x>: each weight's gradient has its own unit vector as slope."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) @ self.weight


def _estimate(draws: int) -> dict[str, int]:
    """How often the estimate of lemma 3.8 is off by more than half, at 10 directions."""
    task = Task.of(_Projection(draws), loss=lambda output, labels: output.mean())
    x = torch.zeros(1, 1, 1, draws, dtype=torch.float64)
    found = sensitivity(
        task,
        x,
        torch.zeros(1, dtype=torch.long),
        stream(6, "estimate"),
        estimator="batch",
        directions=DIRECTIONS,
    )
    off = (found.values - 1).abs() > OFF
    return {"hits": int(off.sum()), "n": draws}
