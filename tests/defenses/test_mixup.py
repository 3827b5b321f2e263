"""Mixing by hand, the law of the draw, and what an attacker who knows it expects."""

import copy
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn

from leakbound import data
from leakbound.client import gradient, pure_gradient, simulate
from leakbound.core import Batch, Guarantee, LocalPlan, Task, Unknown
from leakbound.defenses import (
    DpSgd,
    GaussianNoise,
    LocalAggregation,
    NoDefense,
    SecureAggregation,
    chain,
)
from leakbound.defenses.mixup import Mixup, mixed
from leakbound.protocol import play, resolve, send
from leakbound.randomness import normal, stream, uniform
from leakbound.testing import check_defense


def _by_hand(model, batch, share, order):
    """The gradient of cross-entropy on mixed images and mixed one-hot labels."""
    hot = nn.functional.one_hot(batch.labels, 3).double()
    images = share * batch.inputs + (1 - share) * batch.inputs[order]
    targets = share * hot + (1 - share) * hot[order]
    model.zero_grad()
    (-(targets * model(images).log_softmax(1)).sum(1).mean()).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def _fed(task, images):
    """What the model behind a task's mixing is fed."""
    caught = []
    model = copy.deepcopy(task.model)
    model[0].register_forward_pre_hook(lambda module, given: caught.append(given[0]))
    model(images)
    return caught[0].flatten(1)


def _matrix(defense, task, seed, size=6):
    """(size, size) what a round makes of unit images."""
    ready = resolve(defense, task, size).prepare(task, stream(seed))
    return _fed(ready, torch.eye(size, 12, dtype=torch.float64).reshape(size, 1, 3, 4))[:, :size]


@pytest.mark.parametrize("net", ["mlp", "convnet"])
@pytest.mark.parametrize("seed", range(3))
def test_the_client_trains_on_the_mix(request, batch, net, seed):
    model = request.getfixturevalue(net)
    task, keys = Task.of(model, classes=3), uniform((6,), stream(seed, "keys"))
    order = np.argsort(keys.numpy())
    assert list(order) != list(range(6))
    wanted = _by_hand(model, batch, 0.7, order)
    ready = mixed(task, 0.7, keys)
    torch.testing.assert_close(gradient(ready, batch.inputs, batch.labels), wanted)
    torch.testing.assert_close(pure_gradient(ready, batch.inputs, batch.labels), wanted)
    hot = nn.functional.one_hot(batch.labels, 3).double()
    torch.testing.assert_close(gradient(ready, batch.inputs, hot), wanted)  # soft labels


@pytest.mark.parametrize("defense", [Mixup(), Mixup(share=0.6), Mixup(alpha=0.2)], ids=repr)
def test_a_round_is_some_mix(mlp, task, batch, defense):
    for seed in range(4):
        mix = _matrix(defense, task, seed)
        order = (mix - 2 * torch.diag(mix.diagonal() < 1)).argmax(1).numpy()
        share = float(mix.diagonal().min())
        assert (order != np.arange(6)).any()
        sent = send(task, batch, defense, stream(seed))
        torch.testing.assert_close(sent.rows[0], _by_hand(mlp, batch, share, order))
        assert isinstance(sent.law, Unknown)
        assert "not seen" in sent.law.reason


@pytest.mark.parametrize("alpha", [0.3, 1.0, 4.0])
def test_the_share_is_the_larger_part_of_a_beta_draw(task, alpha):
    shares = []
    for seed in range(150):
        mix = _matrix(Mixup(alpha), task, seed)
        torch.testing.assert_close(mix.sum(0), torch.ones(6).double())
        torch.testing.assert_close(mix.sum(1), torch.ones(6).double())
        moved = mix.diagonal()[mix.diagonal() < 1]
        shares += moved[:1].tolist()

    def folded(beta):
        return lambda s: stats.beta.cdf(s, beta, beta) - stats.beta.cdf(1 - s, beta, beta)

    assert stats.kstest(shares, folded(alpha)).pvalue > 1e-3
    assert stats.kstest(shares, folded(2 * alpha)).pvalue < 1e-2


def test_all_orders_are_equally_likely(task):
    counts = dict.fromkeys(permutations(range(3)), 0)
    for seed in range(240):
        mix = _matrix(Mixup(share=0.8), task, seed, 3)
        counts[tuple((mix - 0.8 * torch.eye(3)).argmax(1).tolist())] += 1
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_moments_by_quadrature(alpha):
    own, squares = Mixup(alpha).moments
    density = stats.beta(alpha, alpha).pdf

    def mean(of):
        return 2 * integrate.quad(lambda s: of(s) * density(s), 0.5, 1)[0]

    assert own == pytest.approx(mean(lambda s: s), rel=1e-4)
    assert squares == pytest.approx(mean(lambda s: s**2 + (1 - s) ** 2), rel=1e-4)
    assert Mixup(alpha, share=0.9).moments == (0.9, pytest.approx(0.82))


@pytest.mark.parametrize("settings", [{"share": 0.6}, {"share": 0.9}, {"alpha": 1.0}])
def test_the_attacker_expects_the_best_linear_guess(settings):
    """Least squares from mixes of real digits to the digits, over draws, is undone by `infer`."""
    images = data.load("mnist5k").inputs[:8].double().flatten(1).numpy()
    source, defense = np.random.default_rng(0), Mixup(**settings)
    mixes, wanted = [], []
    for _ in range(1000):
        share = settings.get("share") or source.beta(1.0, 1.0)
        share = max(share, 1 - share)
        mixes.append(share * images + (1 - share) * images[source.permutation(8)])
        wanted.append(images)
    mixes, wanted = (np.stack(v) - images.mean(0) for v in (mixes, wanted))
    factor = float((mixes * wanted).sum() / (mixes * mixes).sum())  # guess = mean + factor · mix
    task = Task.of(nn.Sequential(nn.Flatten(), nn.Linear(784, 3)).double())
    known = defense.resolve(task, 8).infer(task, None)
    guess = torch.tensor(images.mean(0) + factor * mixes[5]).reshape(8, 1, 28, 28)
    explained = _fed(known, guess).numpy() - images.mean(0)
    np.testing.assert_allclose(explained, mixes[5], atol=0.02)


def test_knowing_the_law_exposes_more_digits():
    """Were the mixes rebuilt exactly: who knows the law is at 20 dB for 72 of 100, else 45."""
    images = data.load("mnist5k").inputs.flatten(1).double().numpy()
    source, shown, (own, squares) = np.random.default_rng(0), [], Mixup(share=0.7).moments
    for _ in range(500):
        truth = images[source.choice(len(images), 4, replace=False)]
        mixes = 0.7 * truth + 0.3 * truth[source.permutation(4)]
        told = mixes.mean(0) + (mixes - mixes.mean(0)) * own / squares
        errors = [((guess.clip(0, 1) - truth) ** 2).mean(1) for guess in (mixes, told)]
        shown.append([(error <= 0.01).mean() for error in errors])
    naive, knowing = np.mean(shown, 0)
    assert naive == pytest.approx(0.45, abs=0.04)
    assert knowing == pytest.approx(0.72, abs=0.04)


def test_the_expected_labels_are_the_mean_over_orders(task, batch):
    known = Mixup(share=0.7).resolve(task, 6).infer(task, None)
    outputs = normal((6, 3), stream(0)).double()
    labels = batch.labels
    cross = nn.functional.cross_entropy
    source = np.random.default_rng(0)
    orders = [source.permutation(6) for _ in range(20_000)]
    other = np.mean([float(cross(outputs, labels[order])) for order in orders])
    wanted = 0.7 * float(cross(outputs, labels)) + 0.3 * other
    assert float(known.loss(outputs, labels)) == pytest.approx(wanted, rel=3e-3)
    hot = nn.functional.one_hot(labels, 3).double()
    torch.testing.assert_close(known.loss(outputs, hot), known.loss(outputs, labels))


def test_an_attacker_with_the_right_draw_simulates_the_update(task, batch):
    """Differentiable in the inputs, so that the mixing is undone by the match itself."""
    defense = resolve(Mixup(), task, 6)
    sent = send(task, batch, defense, stream(5))
    right, wrong = (defense.prepare(task, stream(i)) for i in (5, 6))
    inputs = batch.inputs.clone().requires_grad_()
    rows = [simulate(t, inputs, batch.labels, cohort=(6,), defense=defense) for t in (right, wrong)]
    torch.testing.assert_close(rows[0].detach(), sent.rows)
    assert not torch.allclose(rows[1].detach(), sent.rows, rtol=1e-2)
    (slope,) = torch.autograd.grad((rows[1] - sent.rows).square().sum(), inputs)
    assert bool((slope.flatten(1).norm(dim=1) > 0).all())


def test_every_minibatch_is_mixed(task, batch):
    """Each step of a local plan mixes its own slice, by the same keys."""
    keys, rate = uniform((6,), stream(1)), 0.1
    ready = mixed(replace(task, plan=LocalPlan(3, rate, 2)), 0.7, keys)
    order = np.argsort(keys[:2].numpy())
    sent = simulate(ready, batch.inputs, batch.labels, cohort=(6,), defense=NoDefense())[0]
    total = torch.zeros_like(task.parameters)
    for a in (0, 2, 4):
        part = Batch(batch.inputs[a : a + 2], batch.labels[a : a + 2])
        moved = task.with_parameters(task.parameters - rate * total)
        images = 0.7 * part.inputs + 0.3 * part.inputs[order]
        hot = nn.functional.one_hot(part.labels, 3).double()
        total = total + gradient(moved, images, 0.7 * hot + 0.3 * hot[order])
    torch.testing.assert_close(sent, total)


def test_nothing_to_mix_is_refused(task, batch):
    one = Batch(batch.inputs[:1], batch.labels[:1])
    with pytest.raises(ValueError, match="a batch of 1, which leaves an example alone"):
        send(task, one, Mixup(), stream(0))
    some = Batch(batch.inputs[:3], batch.labels[:3])
    halves = replace(task, plan=LocalPlan(2, 0.1, 2))
    with pytest.raises(ValueError, match="a batch of 3 in parts of 2"):
        send(halves, some, Mixup(), stream(0))
    streams = [stream(i) for i in range(3)]
    with pytest.raises(ValueError, match="a batch of 1"):  # one client of two
        play(task, [some, one], chain(Mixup(), SecureAggregation(2)), streams)
    both = play(task, [some, batch], chain(Mixup(), SecureAggregation(2)), streams)
    assert both.update.examples == (9,)
    with pytest.raises(ValueError, match="keys holds 2"):
        gradient(mixed(task, 0.7, torch.rand(2)), some.inputs, some.labels)
    with pytest.raises(ValueError, match="resolve"):
        Mixup().prepare(task, stream(0))


def test_the_servers_task_is_left_alone(task, batch):
    before = gradient(task, batch.inputs, batch.labels)
    resolve(Mixup(), task, 6).prepare(task, stream(0))
    resolve(Mixup(), task, 6).infer(task, None)
    assert torch.equal(before, gradient(task, batch.inputs, batch.labels))


def test_guarantees():
    with pytest.raises(ValueError, match="Mixup"):
        chain(Mixup(), DpSgd())
    assert chain(Mixup(), GaussianNoise(0.1)).guarantee is Guarantee.NONE
    assert not Mixup().data_dependent_law


@pytest.mark.parametrize(
    "settings",
    [{"alpha": 0.0}, {"alpha": -1.0}, {"share": 0.4}, {"share": 1.1}, {"share": float("nan")}],
)
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Mixup(**settings)


@pytest.mark.parametrize(
    "defense",
    [
        Mixup(),
        Mixup(share=0.7),
        chain(LocalAggregation(2, 0.1), Mixup(), GaussianNoise(0.1)),
        chain(Mixup(), SecureAggregation(2)),
    ],
    ids=repr,
)
def test_contract(defense):
    check_defense(defense)
