"""Blind success that is no rarer than what images reach of one another: against brute force."""

import numpy as np
import pytest

from leakbound.bounds.record_priors import (
    EmpiricallyBoundedPrior,
    GaussianImages,
    KnownNorm,
    largest_match_rate,
)


def brute(images, eta):
    apart = np.square(images[:, None] - images).mean(2)
    np.fill_diagonal(apart, np.inf)
    return (apart <= eta).sum(1).max() / (len(images) - 1)


def test_the_larger_of_model_and_images_counts():
    rng = np.random.default_rng(0)
    pairs = np.repeat(rng.normal(size=(100, 12)), 2, axis=0)
    images = pairs + 1e-3 * rng.normal(size=pairs.shape)  # each has a twin that no model sees
    model = GaussianImages.from_samples(images, components=4)
    rung = EmpiricallyBoundedPrior(model, [images])
    for eta in (1e-4, 0.1, 3.0):
        found = np.exp(rung.log_kappa(eta))
        assert found == pytest.approx(max(brute(images, eta), np.exp(model.log_kappa(eta))))
    assert np.exp(model.log_kappa(1e-4)) < 1e-9 < np.exp(rung.log_kappa(1e-4))
    assert rung.log_kappa([1e-4, 0.1]).shape == (2,)
    assert (rung.dim, rung.name) == (12, "Gaussian images, no rarer than seen")


def test_groups_weigh_by_their_size():
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(30, 3)), 0.2 * rng.normal(size=(10, 3))
    found = np.exp(EmpiricallyBoundedPrior(KnownNorm(3, 50.0), [a, b]).log_kappa(0.05))
    assert found == pytest.approx(0.75 * brute(a, 0.05) + 0.25 * brute(b, 0.05))


def test_one_image_alone_reaches_nothing():
    assert largest_match_rate([[1.0, 2.0]], 0.5) == 0.0
    with pytest.raises(ValueError, match="eta"):
        EmpiricallyBoundedPrior(KnownNorm(2), [np.eye(2)]).log_kappa(0.0)
