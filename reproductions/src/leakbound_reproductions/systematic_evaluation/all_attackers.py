"""The van Trees lower bound for all attackers and the attack, on inputs from the bound's prior."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from leakbound.randomness import bernoulli, normal, stream
from leakbound_reproductions.systematic_evaluation import two_layer
from leakbound_reproductions.systematic_evaluation.sweep import Slope, fresh, interval
from leakbound_reproductions.systematic_evaluation.tensor_attack import library
from leakbound_reproductions.systematic_evaluation.trial import WIDE

NOISES = (0.5, 2.0, 8.0)
INPUTS = 10
WIDTH = 2048
DRAWS = 16


@dataclass(frozen=True)
class Compared:
    """One noise level: roots of mean squares over seeds, in units of R.

    Attributes:
        error: of the attack, which returns unit vectors.
        floor: the estimated lower bound for all attackers.
        gap: the mean of squared error minus squared lower bound; below 0 if the attack is better
            than the bound.
    """

    activation: str
    noise_std: float
    error: float
    floor: float
    gap: Slope


def compared(seeds: int) -> list[Compared]:
    """Softplus networks, one Gaussian input of mean squared norm 1."""
    return [_one("softplus", noise_std, seeds) for noise_std in NOISES]


def _one(activation: str, noise_std: float, seeds: int) -> Compared:
    errors = []
    floors = []
    for seed in fresh(seeds):
        source = stream(seed, "all attackers", repr(noise_std))
        inner = normal((WIDTH, INPUTS), source, like=WIDE)
        outer = normal((WIDTH,), source, like=WIDE) / WIDTH
        network = two_layer.TwoLayer(inner.numpy(), outer.numpy(), activation)
        x = normal((1, INPUTS), source, like=WIDE) / INPUTS**0.5
        y = 2 * bernoulli((1,), 0.5, source).double().numpy() - 1
        sent = torch.from_numpy(two_layer.gradient(network, x.numpy(), y)[:, 0].copy())
        sent = sent + noise_std * normal(sent.shape, source, like=WIDE)
        seen = torch.ones(WIDTH, dtype=torch.bool)
        guess = library(sent, seen, inner, activation, 1, source).vectors
        errors.append(float((guess - x).square().sum()))
        draws = np.random.default_rng(stream(seed, "floor", repr(noise_std)).initial_seed())
        bound = two_layer.bayes_bound(network, y, draws, noise_std=noise_std, draws=DRAWS)
        floors.append(INPUTS * bound.value)
    gap = interval(np.array(errors) - np.array(floors))
    error = float(np.mean(errors)) ** 0.5
    floor = float(np.mean(floors)) ** 0.5
    return Compared(activation, noise_std, error, floor, gap)
