"""Low-rank fits against the singular value decomposition, Monte Carlo and exact data."""

import numpy as np
import pytest
import torch

from leakbound.attacks.features.separation import NotSeparable, fit_column, row_space
from leakbound.randomness import normal, stream, uniform

WIDE = torch.zeros((), dtype=torch.float64)


def draws(*shape, seed=0):
    return normal(shape, stream(seed, "lowrank", *shape), like=WIDE)


def factors(rows=64, columns=300, rank=5):
    return draws(rows, rank), draws(rank, columns)


@pytest.mark.parametrize("shape", [(40, 90), (90, 40)])
def test_without_weights_it_is_the_truncated_decomposition(shape):
    matrix = draws(*shape)
    u, s, v = np.linalg.svd(matrix.numpy(), full_matrices=False)
    fit = row_space(matrix, 6)
    np.testing.assert_allclose(fit.left @ fit.inner, (u[:, :6] * s[:6]) @ v[:6], atol=1e-9)
    across = fit.inner @ fit.inner.T
    assert float((across - across.diagonal().diag()).abs().max()) < 1e-8 * float(across.max())


@pytest.mark.parametrize("by_size", [False, True])
def test_withheld_entries_are_filled_in(by_size):
    left, right = factors()
    matrix = left @ right
    known = uniform(matrix.shape, stream(0, "known")) > 0.5
    if by_size:
        known = matrix.abs() > matrix.abs().median()
    known[7] = False
    fit = row_space(torch.where(known, matrix, 7.0), 5, known.double())
    filled = fit.left @ fit.inner
    told = (known.sum(0) >= 12)[None] & (known.sum(1) >= 12)[:, None]
    assert float(told.double().mean()) > 0.9
    assert float((filled - matrix)[told].abs().max()) < 1e-4
    assert float(fit.left[7].abs().max()) == 0
    assert fit.clear == 5


@pytest.mark.parametrize("by_row", [False, True])
def test_level_and_covariance_of_the_noise(by_row):
    left, right = factors()
    spread = 0.2 + uniform((64, 1 if by_row else 300), stream(0, "spread"), like=WIDE)
    spread = spread.expand(64, 300)
    noisy = left @ right + 0.3 * spread * draws(64, 300, seed=1)
    fit = row_space(noisy, 5, 1 / spread)
    assert fit.level == pytest.approx(0.09, rel=0.05)
    error = fit.inner - torch.linalg.lstsq(fit.left, left).solution @ right
    seen = (error @ error.T / 300).diagonal()
    np.testing.assert_allclose(seen, fit.noise.diagonal(), rtol=0.3)
    worse = row_space(noisy, 5)
    truth = left @ right

    def distance(found):
        return float((found.left @ found.inner - truth).square().mean())

    assert distance(fit) < 0.8 * distance(worse)


def test_directions_lost_in_noise_are_counted():
    left, right = factors()
    noise = draws(64, 300, seed=1)
    assert row_space(left @ right + 0.1 * noise, 5).clear == 5
    assert row_space(left[:, :3] @ right[:3] + 0.1 * noise, 5).clear == 3
    assert row_space(noise, 5).clear == 0


def test_a_column_of_its_own():
    left, _ = factors()
    spread = 0.1 + uniform((64,), stream(0, "own"), like=WIDE)
    truth = draws(5)
    found = []
    for seed in range(400):
        column = left @ truth + spread * draws(64, seed=seed + 1)
        value, covariance = fit_column(left, column, 1 / spread)
        found.append(value - truth)
    seen = torch.stack(found)
    np.testing.assert_allclose(seen.T @ seen / 400, covariance, atol=0.2 * covariance.max())


def test_too_low_a_rank_is_refused():
    left, right = factors()
    with pytest.raises(NotSeparable, match="rank below 6"):
        row_space((left @ right).float(), 6)
    with pytest.raises(NotSeparable, match="as many mixtures"):
        row_space(left[:4] @ right, 5)
    known = torch.ones(64, 300)
    known[4:] = 0
    with pytest.raises(NotSeparable, match="4 mixtures of 300"):
        row_space(left @ right, 5, known)
