"""Blind success that is no rarer than what images reach of one another: against brute force."""

import numpy as np
import pytest
from scipy import stats

from leakbound import data
from leakbound.bounds.record_priors import (
    EmpiricallyBoundedPrior,
    GaussianImages,
    from_images,
    largest_match_rates,
)

from .prior_attacks import KnownNorm


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
    assert largest_match_rates([[1.0, 2.0]], [0.5]) == [0.0]
    with pytest.raises(ValueError, match="eta"):
        EmpiricallyBoundedPrior(KnownNorm(2), [np.eye(2)]).log_kappa(0.0)


def candidates(public, labels, draw):
    """Without our climb: images, means of classes and of neighbors, and k-means."""
    near = np.square(public[:, None, ::7] - public[None, :, ::7]).mean(2).argsort(1)
    made = [public, np.stack([public[labels == y].mean(0) for y in range(10)])]
    made += [public[near[:, :k]].mean(1) for k in (2, 5, 10, 20, 40)]
    for count in (10, 40, 100):
        centers = public[draw.choice(len(public), count, replace=False)]
        for _ in range(10):
            own = (np.square(centers).sum(1) - 2 * public @ centers.T).argmin(1)
            centers = np.stack(
                [public[own == k].mean(0) if (own == k).any() else centers[k] for k in range(count)]
            )
        made.append(centers)
    return np.concatenate(made)


@pytest.mark.parametrize("kind", ["gaussian", "mixture"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_no_candidate_made_of_public_images_is_above_it_on_held_out_ones(kind, seed):
    found = data.load("mnist5k")
    rows, labels = found.inputs.flatten(1).double().numpy(), found.labels.numpy()
    draw = np.random.default_rng(seed)
    order = draw.permutation(len(rows))
    public, held = rows[order[:1000]], rows[order[1000:]]
    made = candidates(public, labels[order[:1000]], draw)
    apart = np.square(made).mean(1)[:, None] + np.square(held).mean(1) - 2 * made @ held.T / 784
    prior, old = from_images(public, kind), 0
    for psnr in (12, 14, 16, 18, 20):  # above, few images match and the model alone counts
        eta = 10 ** (-psnr / 10)
        hits = (apart <= eta).sum(1)
        share = stats.beta.ppf(1e-3 / len(made), hits, len(held) - hits + 1)  # the best of many
        share[hits == 0] = 0
        assert share.max() <= np.exp(prior.log_kappa(eta)), psnr
        (seen,) = largest_match_rates(public, [eta])
        images = max(seen, float(np.exp(prior.prior.log_kappa(eta))))
        old += hits.max() / len(held) > images
    assert old or kind == "mixture"  # images alone are beaten
