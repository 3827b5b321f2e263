"""Inputs read and searched from noise patterns alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from leakbound.attacks import GradientMatching, LawEvolution, LawMatching, VarianceReadout
from leakbound.attacks.data_dependent_law import (
    _log_power,
    monotone_fit,
    negative_log_likelihood,
)
from leakbound.attacks.matching.loop import unexplained
from leakbound.client import local_update, simulate
from leakbound.core import Batch, NotApplicable, Task
from leakbound.covariance import Structured
from leakbound.defenses import (
    GaussianNoise,
    LocalOptimalNoise,
    NoDefense,
    OptimalNoise,
    OptimalPruning,
    SecureAggregation,
    chain,
)
from leakbound.models import lenet, mlp
from leakbound.protocol import play
from leakbound.randomness import stream, uniform
from leakbound.testing.common import same_bits, small_batch, small_task

LOUD = 1e6


def images(count, seed=0):
    """Bright squares on dark ground, 12 x 12."""
    corner = (uniform((count, 2), stream(seed, "corner")) * 6).long()
    found = torch.full((count, 1, 12, 12), 0.05)
    for i, (a, b) in enumerate(corner.tolist()):
        found[i, 0, a : a + 6, b : b + 6] = 0.9
    found = found * (0.8 + 0.2 * uniform(found.shape, stream(seed, "grain")))
    return Batch(found, torch.arange(count) % 3)


def wide_task(hidden=64, activation="relu"):
    model = mlp(
        input_shape=(1, 12, 12),
        classes=3,
        generator=stream(0, "wide"),
        hidden=(hidden,),
        activation=activation,
    )
    return Task.of(model, classes=3, public=images(32, 1))


def seen(defense, batch=None, task=None, seed=0):
    batch, task = batch or images(1, 5), task or wide_task()
    clients = [batch] * chain(defense).cohort_size
    sources = [stream(seed, "seen", i) for i in range(len(clients) + 1)]
    return play(task, clients, defense, sources, auxiliary=images(32, 1)).observation


def correlation(answer, batch=None):
    truth = (batch or images(1, 5)).inputs
    return float(torch.corrcoef(torch.stack([truth.flatten(), answer.inputs.flatten()]))[0, 1])


def test_pixels_are_read_off_noise_of_any_level():
    found = []
    for level in (1e2, LOUD):
        observation = seen(LocalOptimalNoise(level))
        answer, again = (VarianceReadout()(observation, stream(1)) for _ in range(2))
        assert same_bits(answer.inputs, again.inputs)
        assert answer.problem is None
        found.append(correlation(answer))
    assert min(found) > 0.8
    assert found[0] == pytest.approx(found[1], abs=0.1)


def test_other_noise_in_its_place_reads_as_nothing():
    observation = seen(LocalOptimalNoise(LOUD))
    public = seen(GaussianNoise(LOUD)).update.rows
    spoiled = replace(observation, update=replace(observation.update, rows=public))
    assert abs(correlation(VarianceReadout()(spoiled, stream(1)))) < 0.35


@pytest.mark.parametrize(
    ("observation", "reason"),
    [
        (lambda: seen(GaussianNoise(1.0)), "does not depend"),
        (lambda: seen(OptimalNoise(1.0)), "does not depend"),
        (lambda: seen(LocalOptimalNoise(1.0), images(2)), "batch has 2"),
        (lambda: replace(seen(LocalOptimalNoise(1.0)), auxiliary=None), "there are none"),
        (lambda: replace(seen(LocalOptimalNoise(1.0)), defense=None), "not known"),
        (lambda: seen(LocalOptimalNoise(1.0), task=convolutional()), "no linear layer"),
    ],
)
def test_the_read_out_says_what_it_cannot_attack(observation, reason):
    with pytest.raises(NotApplicable, match=reason):
        VarianceReadout()(observation(), stream(0))


def convolutional():
    model = lenet(input_shape=(1, 12, 12), classes=3, generator=stream(0))
    return Task.of(model, classes=3)


def test_silent_rows_are_left_out_of_the_power():
    task = wide_task(4)
    row = torch.zeros(1, len(task.parameters))
    matrix = torch.rand(4, 144, generator=stream(0))
    matrix[2] = 0
    row[0, : 4 * 144] = matrix.flatten()
    found = _log_power(task, row, "1")
    logs = matrix[[0, 1, 3]].double().square().log()
    expected = (logs - logs.median(1, keepdim=True).values).mean(0)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.equal(_log_power(task, 0 * row, "1"), torch.zeros(144).double())


def test_the_curve_is_that_of_an_isotonic_regression():
    from sklearn.isotonic import IsotonicRegression

    x = torch.rand(60, generator=stream(0)).double()
    y = (-x + 0.5 * torch.randn(60, generator=stream(1))).double()
    curve = monotone_fit(x, y, 60)
    expected = IsotonicRegression(increasing=False).fit(x.numpy(), y.numpy())
    np.testing.assert_allclose(curve(x).numpy(), expected.predict(x.numpy()), atol=1e-9)
    ends = curve(torch.tensor([-9.0, 9.0]).double())
    assert ends.tolist() == curve(x.sort().values)[[0, -1]].tolist()
    assert monotone_fit(x, y, 1)(x).unique().tolist() == pytest.approx([float(y.mean())])


def test_law_matching_finds_the_image_behind_loud_noise():
    task = wide_task(32, "tanh")
    observation = seen(LocalOptimalNoise(1e3), task=task)
    attack = LawMatching(steps=60)
    answer = attack(observation, stream(1))
    first, *_, last = answer.trace
    assert last < first
    assert correlation(answer) > 0.6
    assert same_bits(answer.inputs, attack(observation, stream(1)).inputs)
    spoiled = replace(observation, update=seen(GaussianNoise(1e3), task=task).update)
    assert abs(correlation(attack(spoiled, stream(1)))) < 0.4


def test_law_evolution_finds_the_image_behind_loud_noise():
    task = wide_task(32, "tanh")
    observation = seen(LocalOptimalNoise(1e3), task=task)
    attack = LawEvolution(components=10, population=24, generations=8)
    answer = attack(observation, stream(1))
    assert answer.problem is None
    assert answer.objective < answer.trace[0]
    assert correlation(answer) > 0.6
    assert same_bits(answer.inputs, attack(observation, stream(1)).inputs)


@pytest.mark.parametrize("start", ["candidate", "readout"])
def test_law_matching_starts_from_other_attacks(start):
    observation = seen(LocalOptimalNoise(1e3))
    answer = LawMatching(steps=3, learning_rate=1e-4, start=start)(observation, stream(1))
    assert correlation(answer) > 0.5


@pytest.mark.parametrize("attack", [LawMatching(steps=4), LawEvolution(5, 4, 2)], ids=repr)
def test_searches_take_batches_and_infer_labels(attack):
    observation = replace(seen(LocalOptimalNoise(0.01), images(2, 5)), labels=None)
    answer = attack(observation, stream(0))
    assert answer.inputs.shape == (2, 1, 12, 12)
    assert answer.labels.shape == (2,)
    zero = replace(observation.update, rows=torch.zeros_like(observation.update.rows))
    told = replace(observation, update=zero, labels=torch.tensor([0, 1]))
    assert "zero everywhere" in attack(told, stream(0)).problem


@pytest.mark.parametrize("attack", [LawMatching(steps=4), LawEvolution(5, 4, 2)], ids=repr)
@pytest.mark.parametrize(
    ("observation", "reason"),
    [
        (lambda: seen(NoDefense()), "does not depend|no Gaussian noise"),
        (lambda: seen(chain(LocalOptimalNoise(1.0), SecureAggregation(2))), "2 clients"),
        (lambda: replace(seen(LocalOptimalNoise(1.0)), defense=None), "not known"),
    ],
)
def test_searches_say_what_they_cannot_attack(attack, observation, reason):
    with pytest.raises(NotApplicable, match=reason):
        attack(observation(), stream(0))


def test_evolution_can_leave_public_laws_alone():
    attack = LawEvolution(5, 4, 2, public_laws=False)
    with pytest.raises(NotApplicable, match="does not depend"):
        attack(seen(GaussianNoise(1.0)), stream(0))
    assert attack(seen(LocalOptimalNoise(1.0)), stream(0)).inputs.shape == (1, 1, 12, 12)


def test_evolution_needs_public_images():
    observation = replace(seen(LocalOptimalNoise(1.0)), auxiliary=None)
    with pytest.raises(NotApplicable, match="public images"):
        LawEvolution()(observation, stream(0))


@pytest.mark.parametrize("correlation", ["layers", "low_rank"])
def test_matching_whitens_correlated_noise(correlation):
    task, batch = small_task(), small_batch(small_task())
    defense = OptimalNoise(0.1, rule="energy", correlation=correlation, rank=3)
    sources = [stream(0, i) for i in range(2)]
    observation = play(task, [batch], defense, sources).observation
    attack = GradientMatching(distance="euclidean", steps=3)
    search = attack.search(observation, stream(1))
    objective, (images, labels) = search.objective, search.candidate()
    rows = simulate(task, images, batch.labels, cohort=(2,), defense=observation.defense).detach()
    left = (rows - observation.update.rows)[0]
    dense = observation.update.law.covariance.dense().double()
    expected = float(left @ torch.linalg.solve(dense, left))
    assert float(objective.value(images, labels).total.detach()) == pytest.approx(
        expected, rel=1e-6
    )
    assert expected != pytest.approx(float((left.square() / dense.diagonal()).sum()), rel=1e-3)
    assert objective.weights is None
    mine, own = (
        observation.correlation.whiten(r).flatten() for r in (rows, observation.update.rows)
    )
    share = 1 - float((mine @ own) ** 2 / (mine @ mine) / (own @ own))
    assert unexplained(objective, images, labels) == pytest.approx(share, rel=1e-6)
    assert bool(attack(observation, stream(1)).inputs.isfinite().all())


@pytest.mark.parametrize(
    "defense",
    [
        GaussianNoise(0.05),
        OptimalNoise(0.05, rule="energy", correlation="layers"),
        chain(OptimalPruning(0.3), OptimalNoise(0.05)),
    ],
    ids=["equal", "correlated", "masked"],
)
def test_a_public_law_is_weighed_as_its_density_says(defense):
    """Against scipy's density of the whole row, up to a constant that no guess changes."""
    task = small_task()
    truth, other = small_batch(task), small_batch(task, seed=1)
    seen = play(task, [truth], defense, [stream(0, "a"), stream(0, "b")]).observation
    law, shown = seen.update.law, seen.update.mask
    matrix = law.covariance.dense() if isinstance(law.covariance, Structured) else None
    if matrix is None:
        wide = torch.as_tensor(law.covariance).double().expand_as(seen.update.rows)[0]
        matrix = torch.diag(wide)
    some = torch.ones(len(matrix), dtype=torch.bool) if shown is None else shown[0]
    density = stats.multivariate_normal(cov=matrix[some][:, some].numpy())
    found, wanted = [], []
    for batch in (truth, other):
        value, _ = negative_log_likelihood(seen, task, batch.inputs, truth.labels, floor=1e-9)
        found.append(float(value) * len(matrix))
        mean = local_update(task, batch.inputs, truth.labels).detach()
        wanted.append(-density.logpdf((seen.update.rows[0] - mean)[some].numpy()))
    assert found[1] - found[0] == pytest.approx(wanted[1] - wanted[0], rel=1e-6)
    assert found[1] > found[0]


@pytest.mark.parametrize("size", [1, 2])
def test_values_alone_are_those_that_have_slopes(size):
    task = wide_task().to("cpu", torch.float64)
    batch = Batch(images(size, 5).inputs.double(), images(size, 5).labels)
    observation = seen(LocalOptimalNoise(0.1), batch, task)
    x = batch.inputs * 0.9
    given = {"floor": 1e-6, "freedom": 3.0}
    with torch.no_grad():
        quick = negative_log_likelihood(observation, task, x, batch.labels, **given)
    leaf = x.clone().requires_grad_()
    plain = negative_log_likelihood(observation, task, leaf, batch.labels, **given)
    assert plain[0].requires_grad
    torch.testing.assert_close(quick, (plain[0].detach(), plain[1]), rtol=1e-10, atol=1e-12)


def test_the_span_of_public_images_is_found_once(monkeypatch):
    observations = [seen(LocalOptimalNoise(LOUD), seed=seed) for seed in (0, 1)]
    public = observations[0].auxiliary
    observations[1] = replace(observations[1], auxiliary=public)
    attack = LawEvolution(components=4, population=4, generations=1)
    first = attack(observations[1], stream(0))
    calls, real = [], torch.linalg.svd
    monkeypatch.setattr(torch.linalg, "svd", lambda *a, **k: calls.append(1) or real(*a, **k))
    assert same_bits(attack(observations[1], stream(0)).inputs, first.inputs)
    attack(observations[0], stream(0))
    assert not calls
    other = replace(observations[0], auxiliary=Batch(public.inputs.clone(), public.labels))
    attack(other, stream(0))
    assert len(calls) == 1
