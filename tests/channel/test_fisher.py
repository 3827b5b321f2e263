"""The Fisher information of a release, against Jacobians by finite differences and densities."""

import numpy as np
import pytest
import torch

from leakbound.bounds import GaussianPrior, full_bound, tight_trace_bound, trace_bound
from leakbound.channel import fisher
from leakbound.channel.fisher import Channel, fisher_matrix, fisher_trace
from leakbound.client import gradient, pure_simulate, simulate
from leakbound.core import Batch, Gaussian, NotApplicable, Task
from leakbound.defenses import (
    Clip,
    DpSgd,
    GaussianNoise,
    LaplaceNoise,
    LocalAggregation,
    LocalOptimalNoise,
    LocalOptimalPruning,
    NoDefense,
    OptimalNoise,
    OptimalPruning,
    WhitenedDpSgd,
    chain,
)
from leakbound.protocol import resolve, send
from leakbound.randomness import normal, stream
from leakbound.testing.common import small_batch, small_task

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
    DpSgd(0.2, 1.0),
    WhitenedDpSgd(0.2, 1.0, correlation="layers"),
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
        draws = torch.randn(10000, len(mean), generator=torch.Generator().manual_seed(0)).double()
        score = (draws / variance.sqrt()) @ slope + 0.5 * (draws**2 - 1) @ pattern
        wanted = (score.T @ score / len(draws)).numpy()
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(matrices[-1], wanted, atol=0.1 * scale)
    low, high = np.trace(matrices[0]), np.trace(matrices[1])
    assert high > 1.0, "the pattern informs however much noise there is"
    assert low > high


def test_what_has_no_gaussian_law_is_refused(task, batch):
    cases = {
        "no Gaussian noise": NoDefense(),
        "no Gaussian noise ": chain(LocalOptimalPruning(0.5)),
        "no Gaussian": LaplaceNoise(0.1),
        "came after the noise": chain(GaussianNoise(0.1), Clip(1.0)),
    }
    for reason, defense in cases.items():
        with pytest.raises(NotApplicable, match=reason.strip()):
            channel_of(task, batch, defense)


def test_one_example_rows_match_the_client(task, batch):
    ready = resolve(DpSgd(0.2, 1.0), task, 2)
    for defense in (None, ready):
        ours = pure_simulate(task, batch.inputs, batch.labels, defense)
        theirs = simulate(task, batch.inputs, batch.labels, cohort=(2,), defense=defense)
        torch.testing.assert_close(ours, theirs)


class Summed(torch.nn.Module):
    """A linear model whose gradient of the mean output is a fixed mixture of its input."""

    def __init__(self, mixing):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(mixing.shape[0]).double())
        self.register_buffer("mixing", mixing)

    def forward(self, x):
        return x.flatten(1) @ self.mixing.T @ self.weight[:, None]


@pytest.mark.parametrize("noise", ["equal", "uneven"])
def test_a_linear_gaussian_release_end_to_end(noise):
    """Model, defense, release, Fisher information and floor against the posterior's error."""
    draw = torch.Generator().manual_seed(3)
    mixing = torch.randn(15, 6, generator=draw).double()
    public = Batch(torch.rand(12, 1, 2, 3, generator=draw).double(), torch.zeros(12).long())
    task = Task.of(
        Summed(mixing), loss=lambda out, _: out.mean(), public=public, input_range=(-9.0, 9.0)
    )
    plain = gradient(task, public.inputs[:1], public.labels[:1])
    assert torch.allclose(plain, mixing @ public.inputs[0].flatten())
    # its gradient is linear in x, so its sensitivity is the same for every x
    defense = GaussianNoise(0.7) if noise == "equal" else OptimalNoise(0.7, rule="energy")
    batch = Batch(public.inputs[:1], public.labels[:1])
    channel, update, _ = channel_of(task, batch, defense)
    variance = torch.as_tensor(update.law.covariance).double().expand(15)
    root = torch.randn(6, 6, generator=draw).double()
    prior = (root @ root.T + 0.1 * torch.eye(6)).numpy()
    known = GaussianPrior(np.zeros(6), prior)
    information = fisher_matrix(channel, batch)
    # the posterior of x given A x + noise, by the formula of linear regression
    a, s = mixing.numpy(), np.diag(variance.numpy())
    posterior = prior - prior @ a.T @ np.linalg.inv(a @ prior @ a.T + s) @ a @ prior
    exact = np.trace(posterior) / 6
    floor = full_bound(information, known)
    assert floor.value == pytest.approx(exact, rel=1e-6)
    np.testing.assert_allclose(floor.per_pixel, np.diag(posterior), rtol=1e-6)
    trace = fisher_trace(channel, batch, stream(5), directions=4000)
    assert trace == pytest.approx(np.trace(information), rel=0.05)
    assert trace_bound(np.trace(information), known).value <= exact
    assert tight_trace_bound(np.trace(information), known).value <= exact
    # the best attacker, played on the defense's own releases
    rng = np.random.default_rng(0)
    truth = rng.multivariate_normal(np.zeros(6), prior, 4000)
    gain = prior @ a.T @ np.linalg.inv(a @ prior @ a.T + s)
    ready = resolve(defense, task, 1)
    errors = []
    for i, x in enumerate(truth[:1000]):
        one = Batch(torch.as_tensor(x).reshape(1, 1, 2, 3).clamp(-9, 9), torch.zeros(1).long())
        seen = send(task, one, ready, stream(7, i)).rows[0].numpy()
        errors.append(np.mean((gain @ seen - x) ** 2))
    error = np.std(errors) / len(errors) ** 0.5
    assert abs(np.mean(errors) - exact) < 4 * error
    assert np.mean(errors) > 0.5 * exact


MOVING = [
    GaussianNoise(0.1),
    LocalOptimalNoise(0.1),
    chain(Clip(0.3), GaussianNoise(0.1)),
    chain(LocalAggregation(2), GaussianNoise(0.1)),
    DpSgd(noise_multiplier=0.1, clip_norm=0.3),
    DpSgd(noise_multiplier=0.1, clip_norm=30.0),
    None,
]


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("defense", MOVING, ids=str)
def test_engines_move_what_is_sent_as_derivatives_do(task, batch, defense, pruned):
    if pruned:
        task = task.pruned(torch.arange(len(task.parameters)) % 3 > 0)
    if defense is None:
        channel = Channel(task, None, Gaussian(0.01))
    else:
        channel, _, _ = channel_of(task, batch, defense)
    ways = normal((3, *batch.inputs.shape), stream(0, "ways"), like=batch.inputs)
    found = fisher._mean_moved(channel, batch, ways)
    for way, own in zip(ways, found, strict=True):
        sent = lambda x: channel.expected(x, batch.labels)  # noqa: E731
        wanted = torch.func.jvp(sent, (batch.inputs,), (way,))[1]
        torch.testing.assert_close(own, wanted, rtol=1e-9, atol=1e-12)


def test_a_mask_stays_on_what_moves(task, batch):
    mask = (torch.arange(len(task.parameters)) % 2 > 0)[None]
    masked = Channel(task, None, Gaussian(0.01), mask)
    found = fisher._mean_moved(masked, batch, torch.ones_like(batch.inputs)[None])
    assert bool((found[:, ~mask[0]] == 0).all())
    assert bool((found != 0).any())
