"""Candidates named by their noise law and mask, and the likelihood of a law that has a slope."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats

from leakbound.attacks import CandidateLikelihood
from leakbound.attacks.data_dependent_law import (
    Replay,
    negative_log_likelihood,
    replay,
    score,
)
from leakbound.core import Batch, Gaussian, NotApplicable, Task, ThreatModel
from leakbound.defenses import (
    Clip,
    GaussianNoise,
    LaplaceNoise,
    LocalOptimalNoise,
    LocalOptimalPruning,
    MagnitudePruning,
    NoDefense,
    OptimalNoise,
    SecureAggregation,
    chain,
)
from leakbound.models import mlp
from leakbound.protocol import play
from leakbound.randomness import normal, stream, uniform
from leakbound.testing.common import same_bits, small_task

LOUD, GALLERY, TRIALS = 1e4, 20, 24


def gallery(seed=0, count=GALLERY):
    images = 0.05 + 0.9 * uniform((count, 1, 6, 6), stream(seed, "gallery"))
    return Batch(images.double(), torch.arange(count) % 3)


def seen(defense, seed=0, batch=None, task=None, **threat):
    batch = batch or Batch(gallery().inputs[:1], gallery().labels[:1])
    clients = [batch] * chain(defense).cohort_size
    sources = [stream(seed, "seen", i) for i in range(len(clients) + 1)]
    task = task or small_task()
    return play(
        task, clients, defense, sources, threat=ThreatModel(**threat), auxiliary=gallery()
    ).observation


@cache
def wide_task():
    """Wide enough that its noise pattern names one of 20: 1,723 weights."""
    model = mlp(
        input_shape=(1, 6, 6),
        classes=3,
        generator=stream(0, "wide"),
        hidden=(43,),
        activation="tanh",
    )
    return Task.of(model, classes=3, public=gallery(9)).to("cpu", torch.float64)


def hits(defense, spoil=lambda found: found, **settings):
    """How often the true one of 20 candidates is the likeliest, in 24 trials."""
    images, replays, count = gallery(), None, 0
    for k in range(TRIALS):
        i = k % GALLERY
        own = Batch(images.inputs[i : i + 1], images.labels[i : i + 1])
        observation = seen(defense, k, own, wide_task())
        replays = replays or [spoil(r) for r in replay(observation, images, stream(0, "replay"))]
        count += int(score(observation, replays, **settings).argmax()) == i
    return count


@pytest.mark.parametrize(
    "defense", [GaussianNoise(0.1), LocalOptimalNoise(0.1), LaplaceNoise(0.2)], ids=repr
)
def test_the_likelihood_is_that_of_scipy(defense):
    observation, images = seen(defense), gallery()
    replays = replay(observation, images, stream(7))
    for one, value in zip(replays, score(observation, replays), strict=True):
        left = (observation.update.rows - one.mean).numpy()
        if isinstance(one.law, Gaussian):
            spread = np.sqrt(np.asarray(one.law.covariance))
            expected = stats.norm.logpdf(left, scale=spread).sum()
        else:
            expected = stats.laplace.logpdf(left, scale=one.law.scale).sum()
        assert float(value) == pytest.approx(expected, rel=1e-9)


def test_correlated_noise_is_whitened():
    observation = seen(OptimalNoise(0.1, rule="energy", correlation="layers"))
    replays = replay(observation, gallery(), stream(0))
    dense = torch.linalg.inv(replays[0].law.covariance.dense().double())
    left = [(observation.update.rows - r.mean)[0].double() for r in replays]
    expected = torch.stack([-0.5 * d @ dense @ d for d in left])
    assert torch.allclose(score(observation, replays), expected, rtol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"use_mean": False}], ids=repr)
@pytest.mark.parametrize("level", [1.0, LOUD])
def test_noise_chosen_by_the_batch_names_the_record_at_any_level(level, settings):
    assert hits(LocalOptimalNoise(level), **settings) >= 20


@pytest.mark.parametrize("defense", [GaussianNoise(LOUD), OptimalNoise(LOUD)], ids=repr)
def test_public_noise_of_the_same_size_does_not(defense):
    assert stats.binom.sf(hits(defense) - 1, TRIALS, 1 / GALLERY) > 1e-3


def test_the_wrong_variances_name_nobody():
    def shuffled(found):
        order = torch.randperm(found.mean.numel(), generator=stream(3))
        return replace(found, law=Gaussian(found.law.covariance[..., order], private=True))

    assert stats.binom.sf(hits(LocalOptimalNoise(LOUD), shuffled) - 1, TRIALS, 0.05) > 1e-3


def test_masks_name_the_record_too():
    assert hits(chain(LocalOptimalPruning(0.5), LocalOptimalNoise(LOUD))) >= 20

    def blank(found):
        return replace(found, mean=torch.ones_like(found.mean))

    assert hits(LocalOptimalPruning(0.5), blank) >= 20
    assert hits(LocalOptimalPruning(0.5), lambda r: replace(blank(r), kept=None)) <= 5


def test_more_draws_average_variances_and_masks():
    observation = seen(chain(LocalOptimalPruning(0.5), LocalOptimalNoise(1.0)))
    (one,) = replay(observation, gallery(count=1), stream(0), draws=5)
    assert isinstance(one, Replay)
    assert bool(((one.kept > 0) & (one.kept < 1)).any())
    parts = [replay(observation, gallery(count=1), s)[0] for s in [stream(0)] * 5]
    total = torch.stack([p.law.covariance for p in parts]).sum(0)
    sent = torch.stack([p.kept for p in parts]).sum(0)
    assert torch.allclose(one.law.covariance, total / sent.clamp_min(1e-9))


def test_the_attack_names_its_candidate_and_says_when_it_cannot():
    images = gallery()
    observation = seen(LocalOptimalNoise(LOUD))
    before = observation.update.rows.clone()
    answer, again = (CandidateLikelihood()(observation, stream(1)) for _ in range(2))
    assert torch.equal(answer.inputs, images.inputs[:1])
    assert same_bits(answer.inputs, again.inputs)
    assert answer.objective == again.objective
    assert torch.equal(before, observation.update.rows)
    assert answer.problem is None
    assert answer.labels.tolist() == [0]
    assert (
        "almost equally likely"
        in CandidateLikelihood()(seen(GaussianNoise(LOUD)), stream(1)).problem
    )
    alone = CandidateLikelihood(limit=1)(observation, stream(1))
    assert "one candidate" in alone.problem
    zero = replace(observation.update, rows=torch.zeros_like(observation.update.rows))
    assert "zero" in CandidateLikelihood()(replace(observation, update=zero), stream(1)).problem


def test_without_labels_it_names_the_label():
    observation = seen(LocalOptimalNoise(LOUD), labels_known=False)
    assert CandidateLikelihood()(observation, stream(1)).labels.tolist() == [0]
    other = replace(observation, labels=torch.tensor([7]))
    assert torch.equal(CandidateLikelihood()(other, stream(1)).inputs, gallery().inputs[:1])


def test_a_plain_update_is_named_by_its_direction():
    answer = CandidateLikelihood()(seen(NoDefense()), stream(0))
    assert torch.equal(answer.inputs, gallery().inputs[:1])


@pytest.mark.parametrize(
    ("observation", "reason"),
    [
        (lambda: seen(LocalOptimalNoise(1.0), batch=gallery(count=2)), "batch has 2"),
        (lambda: seen(chain(LocalOptimalNoise(1.0), SecureAggregation(2))), "2 clients"),
        (lambda: replace(seen(LocalOptimalNoise(1.0)), auxiliary=None), "there are none"),
        (lambda: seen(LocalOptimalNoise(1.0), defense_known=False), "not known"),
        (lambda: seen(chain(GaussianNoise(1.0), Clip(1.0))), "is not known"),
        (lambda: seen(chain(GaussianNoise(1.0), MagnitudePruning(0.5))), "is not known"),
    ],
)
def test_what_it_cannot_attack_it_says(observation, reason):
    with pytest.raises(NotApplicable, match=reason):
        CandidateLikelihood()(observation(), stream(0))


@pytest.mark.parametrize("freedom", [3.0, float("inf")])
def test_the_slope_of_the_likelihood_is_right(freedom):
    task = small_task()
    observation = seen(LocalOptimalNoise(0.1))
    labels = observation.labels
    inputs = gallery(1, 1).inputs.requires_grad_()

    def value(x):
        return negative_log_likelihood(observation, task, x, labels, floor=1e-6, freedom=freedom)[0]

    (slope,) = torch.autograd.grad(value(inputs), inputs)
    way = normal(inputs.shape, stream(5), like=inputs)
    step = 1e-7
    # the floor is held where it is: it follows the variances, but has no slope by design
    ahead, behind = (value(inputs.detach() + sign * step * way) for sign in (1, -1))
    assert float((slope * way).sum()) == pytest.approx(
        float((ahead - behind).detach()) / (2 * step), rel=1e-3
    )


def test_the_likelihood_is_gaussian_and_falls_towards_the_truth():
    task, observation = small_task(), seen(LocalOptimalNoise(0.1, directions=50))
    truth, labels = gallery().inputs[:1], observation.labels
    found, _ = negative_log_likelihood(observation, task, truth, labels, floor=1e-9)
    variance = observation.defense.noise_variance(task, truth, labels)
    (own,) = replay(observation, gallery(count=1), stream(0))
    left = (observation.update.rows - own.mean)[0]
    expected = stats.norm.logpdf(left.numpy(), scale=variance.sqrt().numpy()).mean()
    assert float(found) == pytest.approx(-expected - 0.5 * np.log(2 * np.pi), rel=1e-4)
    other = gallery(2, 1).inputs
    assert negative_log_likelihood(observation, task, other, labels, floor=1e-9)[0] > found


def test_silent_coordinates_of_a_rectifier_leave_the_slope_finite():
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(36, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    )
    generator = stream(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * normal(parameter.shape, generator))
    task = Task.of(model, classes=3).to("cpu", torch.float64)
    black = Batch(torch.zeros(1, 1, 6, 6).double(), torch.tensor([0]))
    black.inputs[..., 2:4] = 0.7
    observation = seen(LocalOptimalNoise(1.0), batch=black, task=task)
    x = black.inputs.clone().requires_grad_()
    loss, _ = negative_log_likelihood(observation, task, x, black.labels, floor=1e-6)
    (slope,) = torch.autograd.grad(loss, x)
    assert bool(slope.isfinite().all())
    assert bool(slope.any())
