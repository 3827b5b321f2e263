"""Priors: their Fisher information, their variance, and what they refuse."""

import numpy as np
import pytest

from leakbound import bounds
from leakbound.bounds import FlatPrior, GaussianPrior


@pytest.mark.parametrize("components", [None, 2])
def test_draws_of_a_gaussian_have_its_covariance(components):
    generator = np.random.default_rng(2)
    root = generator.standard_normal((4, 4))
    prior = GaussianPrior(np.arange(4.0), root @ root.T, components)
    draws = prior.draw(200_000, generator)
    kept = np.eye(4) if prior.basis is None else prior.basis @ prior.basis.T
    assert np.cov(draws.T) == pytest.approx(kept @ root @ root.T @ kept, abs=0.1)
    assert draws.mean(0) == pytest.approx(np.arange(4.0), abs=0.05)


def test_constant_pixels_are_handed_over():
    generator = np.random.default_rng(3)
    images = np.zeros((50, 9))
    images[:, 2:6] = generator.standard_normal((50, 4)) * [1, 2, 3, 4]
    prior = GaussianPrior.from_samples(images)
    assert (prior.rank, prior.dimension) == (4, 9)
    assert prior.variance == pytest.approx(images.var(0, ddof=1).sum())
    assert np.abs(prior.basis[[0, 1, 6, 7, 8]]).max() < 1e-12
    assert GaussianPrior.from_samples(images, components=1).rank == 1
    assert GaussianPrior.from_samples(images[:3]).rank == 2


@pytest.mark.parametrize(
    "prior",
    [
        GaussianPrior.isotropic(np.zeros(3), 2.0),
        GaussianPrior(np.zeros(3), np.diag([1.0, 2.0, 3.0]) + 0.1),
        GaussianPrior(np.zeros(3), np.diag([1.0, 2.0, 0.0])),
        FlatPrior(3, 6.0),
    ],
)
def test_a_batch_is_made_of_blocks(prior):
    batch = prior.repeat(2)
    assert (batch.dimension, batch.rank) == (6, 2 * prior.rank)
    assert batch.variance == pytest.approx(2 * prior.variance)
    assert batch.matrix[: prior.rank, : prior.rank] == pytest.approx(prior.matrix)
    assert not batch.matrix[: prior.rank, prior.rank :].any()
    assert batch.covers == prior.covers
    if prior.basis is not None:
        assert batch.basis.T @ batch.basis == pytest.approx(np.eye(batch.rank))


def test_an_isotropic_prior_keeps_a_diagonal():
    assert GaussianPrior.isotropic(np.zeros(5), 0.25).information.tolist() == [4.0] * 5
    assert GaussianPrior(np.zeros(2), [1.0, 4.0]).information.tolist() == [1.0, 0.25]


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: FlatPrior(0, 1.0), "dimension is 0"),
        (lambda: FlatPrior(2, 0.0), "variance is 0.0"),
        (lambda: GaussianPrior.isotropic([0.0], -1.0), "variance is -1.0"),
        (lambda: GaussianPrior([0.0, np.nan], np.eye(2)), "mean holds 1"),
        (lambda: GaussianPrior([], []), "mean has shape"),
        (lambda: GaussianPrior([0.0], np.eye(2)), r"covariance has shape \(2, 2\)"),
        (lambda: GaussianPrior([0.0], [1.0, 1.0]), r"covariance has shape \(2,\)"),
        (lambda: GaussianPrior([0.0, 0.0], [[1, 2], [2, 1]]), "covariance has the eigenvalue -1"),
        (lambda: GaussianPrior([0.0, 0.0], [[1, 1], [0, 1]]), "covariance is not symmetric"),
        (lambda: GaussianPrior([0.0, 0.0], np.zeros((2, 2))), "covariance is zero"),
        (lambda: GaussianPrior([0.0], [[1.0]], components=0), "components is 0"),
        (lambda: GaussianPrior.from_samples([[1.0]]), "samples holds 1 image"),
        (lambda: GaussianPrior.from_samples([[1.0], [1.0]]), "covariance is zero"),
        (lambda: GaussianPrior([0.0], [[1.0]]).repeat(0), "batch is 0"),
    ],
)
def test_bad_input_is_named(call, word):
    with pytest.raises(ValueError, match=word):
        call()


def test_public_names():
    assert bounds.__all__ == sorted(bounds.__all__)
    for name in bounds.__all__:
        assert getattr(bounds, name).__doc__
