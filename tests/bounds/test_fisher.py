"""The Fisher information of a release, against Jacobians by finite differences and densities."""

import numpy as np
import pytest
import torch

from leakbound.bounds.fisher import Channel, batches, fisher_matrix, fisher_operator, fisher_trace
from leakbound.client import pure_simulate, simulate
from leakbound.defenses import (
    Clip,
    GaussianNoise,
    LaplaceNoise,
    LocalOptimalNoise,
    LocalOptimalPruning,
    OptimalNoise,
    OptimalPruning,
    chain,
    dp_sgd,
    whitened_dp_sgd,
)
from leakbound.protocol import resolve, send
from leakbound.random import stream
from leakbound.testing.common import small_batch, small_task
from leakbound.types import Batch, NotApplicable

STEP = 1e-6


@pytest.fixture(scope="module")
def task():
    return small_task()


@pytest.fixture(scope="module")
def batch(task):
    return small_batch(task)


def channel_of(task, batch, defense):
    ready = resolve(defense, task, batch.size)
    update = send(task, batch, ready, stream(0, "fisher"))
    return Channel(task, ready, update.law, update.mask), update, ready


def by_differences(of, inputs):
    """The Jacobian (P, m) by central differences: shares no code with jvp."""
    columns = []
    for i in range(inputs.numel()):
        moved = torch.zeros(inputs.numel(), dtype=inputs.dtype)
        moved[i] = STEP
        moved = moved.reshape(inputs.shape)
        columns.append((of(inputs + moved) - of(inputs - moved)).flatten() / (2 * STEP))
    return torch.stack(columns, 1).detach()


PUBLIC = [
    GaussianNoise(0.1),
    OptimalNoise(0.1),
    OptimalNoise(0.1, rule="energy", correlation="layers"),
    OptimalNoise(0.1, rule="energy", correlation="low_rank", rank=3),
    dp_sgd(0.2, 1.0),
    whitened_dp_sgd(0.2, 1.0, correlation="layers"),
    chain(OptimalPruning(0.5), OptimalNoise(0.1)),
    chain(Clip(0.1), GaussianNoise(0.1)),
]


@pytest.mark.parametrize("defense", PUBLIC, ids=lambda d: repr(d)[:50])
def test_public_laws(task, batch, defense):
    """J^T Sigma^-1 J with the dense covariance, J by finite differences of what attackers use."""
    channel, update, ready = channel_of(task, batch, defense)

    def of(inputs):
        rows = simulate(task, inputs, batch.labels, cohort=(batch.size,), defense=ready)
        return rows if update.mask is None else rows * update.mask

    jacobian = by_differences(of, batch.inputs)
    covariance = update.law.covariance
    if hasattr(covariance, "dense"):
        matrix = covariance.dense()
    else:
        matrix = torch.diag(torch.as_tensor(covariance).double().expand_as(update.rows)[0])
    wanted = (jacobian.T @ torch.linalg.pinv(matrix) @ jacobian).numpy()
    found = fisher_matrix(channel, batch)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    # along a basis, by products, and by its trace
    basis = torch.linalg.qr(torch.randn(72, 5, generator=torch.Generator().manual_seed(0)))[0]
    basis = basis.double()
    part = fisher_matrix(channel, batch, basis)
    np.testing.assert_allclose(part, basis.T.numpy() @ found @ basis.numpy(), rtol=1e-6, atol=1e-6)
    block = basis.numpy()
    np.testing.assert_allclose(
        fisher_operator(channel, batch)(block), found @ block, rtol=1e-6, atol=1e-6
    )
    trace = fisher_trace(channel, batch, stream(1), directions=400)
    spread = (2 * (found**2).sum() / 400) ** 0.5
    assert abs(trace - np.trace(found)) < 4 * spread
    trace = fisher_trace(channel, batch, stream(1), directions=400, basis=basis)
    spread = (2 * (part**2).sum() / 400) ** 0.5
    assert abs(trace - np.trace(part)) < 4 * spread


@pytest.mark.parametrize("rule", ["utility", "energy"])
def test_a_private_law_informs_through_its_pattern(task, batch, rule):
    """Against the covariance of the score of the density, by Monte Carlo, at two noise levels."""
    matrices = []
    for level in (1e-2, 1e3):
        defense = LocalOptimalNoise(level, rule=rule)
        channel, _, ready = channel_of(task, batch, defense)
        matrices.append(fisher_matrix(channel, batch))

        def parts(inputs, ready=ready):
            mean = pure_simulate(task, inputs, batch.labels, ready)[0]
            return mean, ready.noise_variance(task, inputs, batch.labels)

        mean, variance = (value.detach() for value in parts(batch.inputs))
        slope = by_differences(lambda x, p=parts: p(x)[0], batch.inputs)
        pattern = by_differences(lambda x, p=parts: p(x)[1].log(), batch.inputs)
        draws = torch.randn(40000, len(mean), generator=torch.Generator().manual_seed(0)).double()
        score = (draws / variance.sqrt()) @ slope + 0.5 * (draws**2 - 1) @ pattern
        wanted = (score.T @ score / len(draws)).numpy()
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(matrices[-1], wanted, atol=0.05 * scale)
    low, high = np.trace(matrices[0]), np.trace(matrices[1])
    assert high > 1.0, "the pattern informs however much noise there is"
    assert low > high
    block = np.eye(72)[:, :3]
    np.testing.assert_allclose(
        fisher_operator(channel, batch)(block), matrices[1] @ block, rtol=1e-5, atol=1e-8 * high
    )


def test_what_has_no_gaussian_law_is_refused(task, batch):
    cases = {
        "no Gaussian noise": chain(),
        "no Gaussian noise ": chain(LocalOptimalPruning(0.5)),
        "no Gaussian": LaplaceNoise(0.1),
        "came after the noise": chain(GaussianNoise(0.1), Clip(1.0)),
    }
    for reason, defense in cases.items():
        with pytest.raises(NotApplicable, match=reason.strip()):
            channel_of(task, batch, defense)


def test_batches_of_public_images(task):
    found = list(batches(task.public, 5, 10))
    assert [b.size for b in found] == [5, 5]
    assert isinstance(found[0], Batch)


def test_one_example_rows_match_the_client(task, batch):
    ready = resolve(dp_sgd(0.2, 1.0), task, 2)
    for defense in (None, ready):
        ours = pure_simulate(task, batch.inputs, batch.labels, defense)
        theirs = simulate(task, batch.inputs, batch.labels, cohort=(2,), defense=defense)
        torch.testing.assert_close(ours, theirs)
