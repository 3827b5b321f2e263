"""Overlaps of releases, against one evaluation after the other and dense covariances."""

import numpy as np
import pytest
import torch

from leakbound.bounds import GaussianPrior, full_bound
from leakbound.bounds.weiss_weinstein import default_steps, least_informed, weiss_weinstein_bound
from leakbound.channel import fisher as module
from leakbound.channel.fisher import Channel, fisher_matrix, overlaps
from leakbound.client import simulate
from leakbound.core import Batch, NotApplicable, Task
from leakbound.defenses import GaussianNoise, LocalOptimalNoise, OptimalNoise, OptimalPruning, chain
from leakbound.models import mlp
from leakbound.protocol import resolve, send
from leakbound.randomness import stream
from leakbound.testing.common import small_batch, small_task


@pytest.fixture(scope="module")
def task():
    return small_task()


def channel_of(task, batch, defense):
    ready = resolve(defense, task, batch.size)
    update = send(task, batch, ready, stream(0, "overlap"))
    return Channel(task, ready, update.law, update.mask), update, ready


def frame_of(total, count):
    basis = torch.linalg.qr(torch.randn(total, count, generator=stream(0, "frame")))[0]
    return basis.double()


PUBLIC = [
    GaussianNoise(0.1),
    OptimalNoise(0.1, rule="energy", correlation="layers"),
    chain(OptimalPruning(0.5), OptimalNoise(0.1)),
]


@pytest.mark.parametrize("defense", PUBLIC, ids=lambda d: repr(d)[:50])
def test_against_direct_evaluation(task, defense, monkeypatch):
    drawn = [small_batch(task, seed=seed) for seed in range(2)]
    channel, update, ready = channel_of(task, drawn[0], defense)
    covariance = update.law.covariance
    if hasattr(covariance, "dense"):
        matrix = covariance.dense()
    else:
        matrix = torch.diag(torch.as_tensor(covariance).double().expand_as(update.rows)[0])
    inverse = torch.linalg.pinv(matrix)
    basis = frame_of(72, 3)
    steps = np.array([[0.1, 0.2, 0.4], [0.5, 1.0, 2.0], [1.0, 2.0, 4.0]])

    def of(x, labels):
        rows = simulate(task, x, labels, cohort=(2,), defense=ready)[0].detach()
        return rows if update.mask is None else rows * update.mask[0]

    wanted = np.empty((2, 3, 3))
    for n, j, s in np.ndindex(2, 3, 3):
        x, labels = drawn[n].inputs, drawn[n].labels
        half = (basis[:, j] * steps[j, s] / 2).reshape(x.shape)
        change = of(x + half, labels) - of(x - half, labels)
        wanted[n, j, s] = float(torch.exp(-(change @ inverse @ change) / 8))
    found = overlaps(channel, drawn, basis, steps)
    np.testing.assert_allclose(found, wanted, rtol=1e-7, atol=1e-12)
    assert found.min() >= 0
    assert found.max() <= 1
    assert wanted.min() < 0.9
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    np.testing.assert_allclose(overlaps(channel, drawn, basis, steps), found, rtol=1e-10)


def test_all_inputs_and_small_steps(task):
    """Without a basis every input is a direction, and -8 log / h^2 is the Fisher information."""
    batch = small_batch(task)
    channel, _, _ = channel_of(task, batch, GaussianNoise(0.1))
    found = overlaps(channel, [batch], None, np.tile([1e-3, 2e-3], (72, 1)))
    assert found.shape == (1, 72, 2)
    fisher = np.diag(fisher_matrix(channel, batch))
    np.testing.assert_allclose(-8 * np.log(found[0, :, 0]) / 1e-6, fisher, rtol=1e-3, atol=1e-6)


def test_what_does_not_fit_is_refused(task):
    batch = small_batch(task)
    private, _, _ = channel_of(task, batch, LocalOptimalNoise(0.1))
    steps = np.tile([0.1, 0.2], (72, 1))
    with pytest.raises(NotApplicable, match="depends on the batch"):
        overlaps(private, [batch], None, steps)
    public, _, _ = channel_of(task, batch, GaussianNoise(0.1))
    with pytest.raises(ValueError, match="do not fit"):
        overlaps(public, [batch], frame_of(72, 2), steps)
    with pytest.raises(ValueError, match="no batch"):
        overlaps(public, [], None, steps)


def drawn_from(prior, count, shape, name):
    images = prior.draw(count, np.random.default_rng(name))
    labels = torch.zeros(1).long()
    return [Batch(torch.as_tensor(x).reshape(1, *shape), labels) for x in images]


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_floor_of_a_network(activation):
    """Smooth: close to van Trees at this noise. ReLU: a floor all the same, below the variance."""
    model = mlp(
        input_shape=(1, 3, 3),
        classes=3,
        generator=stream(0, "net"),
        hidden=(8,),
        activation=activation,
    )
    public = Batch(torch.rand(6, 1, 3, 3, generator=stream(1)), torch.arange(6) % 3)
    task = Task.of(model, classes=3, public=public).to("cpu", torch.float64)
    prior = GaussianPrior.isotropic(np.full(9, 0.5), 0.01)
    pilot = drawn_from(prior, 8, (1, 3, 3), 1)
    channel, _, _ = channel_of(task, pilot[0], GaussianNoise(0.1))
    fisher = np.mean([fisher_matrix(channel, one) for one in pilot], 0)
    directions, information = least_informed(fisher, prior, 9)
    steps = default_steps(prior, 4, directions=directions, information=information)
    drawn = drawn_from(prior, 96, (1, 3, 3), 2)
    seen = overlaps(channel, drawn, torch.as_tensor(directions), steps)
    floor = weiss_weinstein_bound(seen, steps, prior, directions=directions)
    assert 0 < floor.value < prior.variance / 9
    if activation == "tanh":
        smooth = full_bound(fisher, prior).value
        assert 0.75 * smooth < floor.value < smooth
