"""Joint decompositions against tensors of known components and against scipy's optimizer."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares

from leakbound.attacks.features.base import feature_errors
from leakbound.randomness import normal, stream
from leakbound_reproductions.attacks.diagonalize import (
    coefficients,
    decompose,
    joint_diagonalize,
    polish,
    unit_columns,
)

WIDE = torch.zeros((), dtype=torch.float64)
INDEX = {2: "li,ai,bi->lab", 3: "li,ai,bi,ci->labc"}


def draw(shape, *name):
    return normal(shape, stream(0, "diagonalize", *name), like=WIDE)


def stack(components, count, order, *name):
    c = draw((count, components.shape[1]), "coefficients", order, *name)
    return torch.einsum(INDEX[order], c, *[components] * order)


def symmetric_noise(like, *name):
    noise, order = draw(like.shape, "noise", *name), like.ndim - 1
    turns = {2: [(0, 1, 2), (0, 2, 1)], 3: [(0, *[i + 1 for i in p]) for p in PERMUTATIONS]}
    return sum(noise.permute(turn) for turn in turns[order]) / len(turns[order])


PERMUTATIONS = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]


def lost(found, true):
    return float(feature_errors(found.T, true.T, signed=False).max())


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("orders", [((3, 1),), ((2, 3), (3, 1)), ((2, 3),)])
@pytest.mark.parametrize("seed", range(2))
def test_exact_tensors_are_recovered(size, orders, seed):
    true = unit_columns(draw((size, size), size, seed))
    given = [stack(true, count, order, size, seed) for order, count in orders]
    found, left = decompose(given, stream(seed, "starts"))
    assert lost(found, true) < 1e-8
    assert left < 1e-12


@pytest.mark.parametrize("size", [2, 5])
def test_joint_diagonalization_needs_no_orthogonality(size):
    true = unit_columns(torch.eye(size).to(WIDE) + 0.4 * draw((size, size), "near", size))
    matrices = stack(true, 4, 2, "joint", size)
    found = joint_diagonalize(matrices, torch.eye(size))
    assert lost(found, true) < 1e-8
    unmixed = torch.linalg.inv(found) @ matrices @ torch.linalg.inv(found).T
    off = unmixed - torch.diag_embed(unmixed.diagonal(dim1=1, dim2=2))
    assert off.abs().max() < 1e-8
    vectors = torch.linalg.eigh(matrices[0])[1]  # orthogonal ones cannot do it
    assert lost(vectors, true) > 1e-2


def residuals(flat, given, size):
    """What components and free coefficients leave of all tensors, in the polish's weights."""
    u, at, parts = torch.from_numpy(flat[: size * size]).view(size, size), size * size, []
    for t in given:
        c = torch.from_numpy(flat[at : at + len(t) * size]).view(len(t), size)
        at += len(t) * size
        order = t.ndim - 1
        fit = torch.einsum(INDEX[order], c, *[u] * order)
        parts.append((t - fit).flatten() / math.sqrt(math.factorial(order)))
    return torch.cat(parts).numpy()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("orders", [((3, 2),), ((2, 2), (3, 2))])
def test_noisy_tensors_come_close_to_the_optimum(seed, orders):
    size = 3
    true = unit_columns(draw((size, size), "noisy", seed))
    given = [stack(true, count, order, seed) for order, count in orders]
    given = [t + 0.01 * symmetric_noise(t, seed, i) for i, t in enumerate(given)]
    found, left = decompose(given, stream(seed, "starts"))
    start = [true.numpy().ravel(), *[coefficients(t, true).numpy().ravel() for t in given]]
    best = least_squares(residuals, np.concatenate(start), args=(given, size), xtol=1e-14)
    total = sum(float(t.square().sum()) / math.factorial(t.ndim - 1) for t in given)
    assert left <= 2 * best.cost / total * (1 + 1e-3)
    optimum = unit_columns(torch.from_numpy(best.x[: size * size]).view(size, size))
    assert lost(found, optimum) < 0.1 * lost(optimum, true) + 1e-6


def test_polish_reports_what_is_left():
    true = unit_columns(draw((3, 3), "left"))
    given = [stack(true, 2, 3, "left") + 0.1 * symmetric_noise(stack(true, 2, 3, "left"))]
    found, left = polish(given, true, sweeps=5)
    c = coefficients(given[0], found)
    rest = given[0] - torch.einsum(INDEX[3], c, *[found] * 3)
    assert left == pytest.approx(float(rest.square().sum() / given[0].square().sum()), rel=1e-6)


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"\(2, 3, 4\)"):
        joint_diagonalize(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="restarts is 0"):
        decompose([torch.eye(2)[None]], stream(0), restarts=0)
