"""One trial of paper B's theory: a random two-layer network, a batch, a defense, the attack."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from leakbound.attacks.features.base import feature_errors, subspace_error
from leakbound.randomness import bernoulli, normal, stream, uniform
from leakbound_reproductions.systematic_evaluation import two_layer
from leakbound_reproductions.systematic_evaluation.tensor_attack import METHODS

WIDE = torch.zeros((), dtype=torch.float64)
PRUNING = ("prune_layer", "prune_global")


@dataclass(frozen=True)
class Cell:
    """One setting of the sweep.

    Attributes:
        activation, inputs, width, batch: the network's s, n and M, and B.
        defense: "none", "clipping", "dropout_units", "dropout_entries", one of `PRUNING`,
            "local_steps" or "mean_field_steps".
        level: what it is set to: |G| / C, a rate, or learning rate x M.
        noise_std: of Gaussian noise on the whole update.
        steps: of local aggregation.
        method: "library", the attack that leakbound has; "printed", as in the paper; "left_out",
            the library's, with pruned coordinates treated as unknown instead of zero.
    """

    activation: str = "relu"
    inputs: int = 20
    width: int = 8192
    batch: int = 2
    defense: str = "none"
    level: float = 0.0
    noise_std: float = 0.0
    steps: int = 1
    method: str = "library"


@dataclass(frozen=True, eq=False)
class Problem:
    """A network with its batch: inputs (B, n) of unit length and targets (B,) of +-1."""

    network: two_layer.TwoLayer
    inputs: NDArray[Any]
    targets: NDArray[Any]

    @property
    def gradient(self) -> NDArray[Any]:
        """(M, 1 + n)."""
        return two_layer.gradient(self.network, self.inputs, self.targets)


@dataclass(frozen=True, eq=False)
class Sent:
    """What the attacker sees: the weights of the units sent and their d loss / d a_j.

    Attributes:
        problem: the one whose gradient was sent (dropout changes the network).
        outer: (M,) as sent.
        mask: (M, 1 + n) True if a coordinate of the gradient is part of it; None for all.
        clip_norm: None if nothing was clipped.
    """

    problem: Problem
    outer: NDArray[Any]
    mask: NDArray[Any] | None = None
    clip_norm: float | None = None


@dataclass(frozen=True)
class Trial:
    """The results of one seed.

    Attributes:
        error: root mean squared distance of unit inputs and matched estimates, R.
        span: mean share of the inputs outside the estimates' span.
        floor: the Cramér-Rao lower bound on R for known norms; None without noise or if there is
            none.
    """

    error: float
    span: float
    floor: float | None


def draw(cell: Cell, seed: int) -> Problem:
    """The network and batch of a seed: the same for every defense."""
    path = (cell.activation, cell.inputs, cell.width, cell.batch)
    source = stream(seed, "two-layer", *path)
    inner = normal((cell.width, cell.inputs), source, like=WIDE)
    outer = normal((cell.width,), source, like=WIDE) / cell.width
    x = torch.nn.functional.normalize(normal((cell.batch, cell.inputs), source, like=WIDE), dim=1)
    signs = 2 * bernoulli((cell.batch,), 0.5, source).double() - 1
    network = two_layer.TwoLayer(inner.numpy(), outer.numpy(), cell.activation)
    return Problem(network, x.numpy(), signs.numpy())


def release(problem: Problem, cell: Cell, source: torch.Generator) -> Sent:
    """What the client sends under the experiment's defense."""
    sent = _defended(problem, cell, source)
    if cell.noise_std == 0:
        return sent
    noise = normal(sent.outer.shape, source, like=WIDE).numpy()
    return replace(sent, outer=sent.outer + cell.noise_std * noise)


def _defended(problem: Problem, cell: Cell, source: torch.Generator) -> Sent:
    if cell.defense == "dropout_units":
        keep = uniform((cell.width,), source).numpy() >= cell.level
        small = replace(problem, network=problem.network.kept(np.flatnonzero(keep)))
        return Sent(small, small.gradient[:, 0])
    if cell.defense in ("local_steps", "mean_field_steps"):
        moving = cell.width**2 if cell.defense == "mean_field_steps" else 1
        rates = cell.level / cell.width, cell.level / cell.width * moving
        return Sent(problem, local_update(problem, cell.steps, *rates)[:, 0])
    whole = problem.gradient
    if cell.defense == "clipping":
        clip_norm = float(np.linalg.norm(whole)) / cell.level
        return Sent(problem, whole[:, 0] / max(1.0, cell.level), None, clip_norm)
    mask = None
    if cell.defense == "dropout_entries":
        mask = uniform(whole.shape, source).numpy() >= cell.level
    if cell.defense in PRUNING:
        mask = pruned(whole, cell.level, whole_model=cell.defense == "prune_global")
    return Sent(problem, whole[:, 0] * (1 if mask is None else mask[:, 0]), mask)


def pruned(whole: NDArray[Any], rate: float, *, whole_model: bool) -> NDArray[Any]:
    """(M, 1 + n) True if kept: the smallest |entries| of each tensor or of the model are pruned."""
    size = np.abs(whole)
    if whole_model:
        return np.asarray(_largest(size, rate))
    return np.concatenate([_largest(size[:, :1], rate), _largest(size[:, 1:], rate)], 1)


def _largest(size: NDArray[Any], rate: float) -> NDArray[Any]:
    dropped = math.floor(rate * size.size)
    keep = np.ones(size.size, dtype=bool)
    keep[np.argsort(size, axis=None, kind="stable")[:dropped]] = False
    return keep.reshape(size.shape)


def local_update(
    problem: Problem, steps: int, outer_rate: float, inner_rate: float
) -> NDArray[Any]:
    """(M, 1 + n): (weights before - weights after) / (learning rate x steps) of gradient descent.

    The paper's learning rates differ between the layers. Equal ones hardly change the w_j;
    `inner_rate` = M^2 x `outer_rate` changes both at the same pace (mean-field).
    """
    network = problem.network
    total = np.zeros_like(problem.gradient)
    for _ in range(steps):
        step = two_layer.gradient(network, problem.inputs, problem.targets)
        total += step
        inner = network.inner - inner_rate * step[:, 1:]
        outer = network.outer - outer_rate * step[:, 0]
        network = two_layer.TwoLayer(inner, outer, network.activation)
    return np.asarray(total / steps)


def attack(sent: Sent, cell: Cell, source: torch.Generator) -> tuple[float, float]:
    """The tensor attack's error and the part of the inputs outside its span.

    Entries dropped at random are left out. Pruned ones count as the zeros that are sent, so that
    the sent value is still a function of the w_j . x_i, to which Stein's lemma applies.
    """
    problem = sent.problem
    outer = torch.from_numpy(sent.outer)
    units = torch.from_numpy(problem.network.inner)
    seen = torch.ones(len(outer), dtype=torch.bool)
    unknown = cell.defense == "dropout_entries" or cell.method == "left_out"
    if sent.mask is not None and unknown:
        seen = torch.from_numpy(sent.mask[:, 0].copy())
    find = METHODS["printed" if cell.method == "printed" else "library"]
    found = find(outer, seen, units, problem.network.activation, len(problem.inputs), source)
    truth = torch.from_numpy(problem.inputs)
    signed = found.signed and cell.method != "printed"  # theorem B.1 leaves the signs open
    errors = feature_errors(found.vectors, truth, signed=signed)
    return float(errors.square().mean().sqrt()), subspace_error(found.basis, truth)


def floor(sent: Sent, cell: Cell) -> float | None:
    """The lower bound on R for estimators that know the norms and are unbiased near the inputs."""
    if cell.noise_std == 0 or "steps" in cell.defense:
        return None
    problem = sent.problem
    found = two_layer.local_bound(
        problem.network,
        problem.inputs,
        problem.targets,
        noise_std=cell.noise_std,
        clip_norm=sent.clip_norm,
        mask=sent.mask,
        norm_known=True,
    )
    return math.sqrt(cell.inputs * found.value)


def run(cell: Cell, seed: int) -> Trial:
    """One seed of one experiment."""
    source = stream(seed, "trial", cell.defense, repr(cell.level), repr(cell.noise_std), cell.steps)
    sent = release(draw(cell, seed), cell, source)
    return Trial(*attack(sent, cell, source), floor(sent, cell))
