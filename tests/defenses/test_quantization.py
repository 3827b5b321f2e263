"""Levels by brute force; stochastic rounding by its mean, variance and support."""

import numpy as np
import pytest
import torch
from scipy import stats

from leakbound.client import gradient, pure_simulate, simulate
from leakbound.core import Exact, Guarantee, Unit, Unknown, Update
from leakbound.defenses import GaussianNoise, MagnitudePruning, SecureAggregation, chain
from leakbound.defenses.quantization import Quantization
from leakbound.protocol import play, resolve, send
from leakbound.randomness import normal, stream
from leakbound.testing import check_defense


def _rows(task, count=2, seed=0):
    rows = normal((count, len(task.parameters)), stream(seed, "rows"), like=task.parameters)
    return rows * torch.logspace(-3, 0, count).to(rows)[:, None]


def _send(defense, task, rows, seed=0):
    update = Update(rows, Unit.CLIENT, (1,) * len(rows))
    return defense.resolve(task, 1).transform(update, None, None, stream(seed))[0]


def _levels(values, bits):
    """All code words by hand: symmetric whole numbers times max / the largest."""
    most = 2 ** (bits - 1) - 1
    return np.arange(-most, most + 1) * (np.abs(values).max() / most)


@pytest.mark.parametrize("bits", [2, 3, 5, 8])
@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_every_value_becomes_the_nearest_level(task, bits, scope):
    rows = _rows(task)
    sent = _send(Quantization(bits, scope=scope), task, rows)
    spans = [(a, b) for *_, a, b in task.layout] if scope == "tensor" else [(0, rows.shape[1])]
    for row, values in zip(rows.numpy(), sent.rows.numpy(), strict=True):
        for a, b in spans:
            levels = _levels(row[a:b], bits)
            nearest = levels[np.abs(row[a:b, None] - levels).argmin(1)]
            np.testing.assert_allclose(values[a:b], nearest, rtol=1e-12, atol=1e-300)
            assert len(levels) == 2**bits - 1
            assert np.abs(values[a:b]).max() == pytest.approx(np.abs(row[a:b]).max(), rel=1e-14)
    assert isinstance(sent.law, Exact)
    assert not sent.law.private
    assert sent.bound is None


def test_stochastic_rounding_is_unbiased_with_two_neighbors(task):
    rows, bits, count = _rows(task, 1), 3, 2000
    defense = Quantization(bits, stochastic=True, scope="global")
    draws = torch.cat([_send(defense, task, rows, seed).rows for seed in range(count)]).numpy()
    values, levels = rows[0].numpy(), _levels(rows[0].numpy(), bits)
    step = levels[1] - levels[0]
    below = levels[np.clip(np.searchsorted(levels, values, "right") - 1, 0, len(levels) - 2)]
    near = [np.isclose(draws, below + k * step, atol=1e-9 * step) for k in (0, 1)]
    assert (near[0] | near[1]).all()
    chance = (values - below) / step
    ups = near[1].sum(0)
    worst = min(stats.binomtest(int(k), count, p).pvalue for k, p in zip(ups, chance, strict=True))
    assert worst > 1e-3 / len(values)
    nearest = levels[np.abs(values[:, None] - levels).argmin(1)]
    assert stats.chi2.sf(_deviation(draws, values, chance, step), len(values)) > 1e-3
    assert stats.chi2.sf(_deviation(draws, nearest, chance, step), len(values)) < 1e-9
    law = _send(defense, task, rows).law
    assert isinstance(law, Unknown)
    assert "at random" in law.reason


def _deviation(draws, wanted, chance, step):
    variance = np.maximum(chance * (1 - chance) * step**2 / len(draws), 1e-12)
    return float(((draws.mean(0) - wanted) ** 2 / variance).sum())


@pytest.mark.parametrize("bits", [2, 6])
def test_the_variance_of_a_guess_is_that_of_its_rounding(task, batch, bits):
    ready = Quantization(bits, stochastic=True).resolve(task, 6)
    inputs = batch.inputs.clone().requires_grad_()
    variance = ready.noise_variance(task, inputs, batch.labels)
    rows = gradient(task, batch.inputs, batch.labels).detach()[None]
    wide = Update(rows.expand(20_000, -1), Unit.CLIENT, (6,) * 20_000)
    sent = ready.transform(wide, None, None, stream(3))[0].rows
    found, step = sent.var(0, correction=0), ready.steps(rows)[0]
    torch.testing.assert_close(
        variance.detach(), found, rtol=0.1, atol=3e-3 * float(step.max()) ** 2
    )
    assert not torch.allclose(found, step.square() / 12, rtol=0.2)
    (slope,) = torch.autograd.grad(variance.sum(), inputs)
    assert bool((slope != 0).any())
    assert Quantization(bits).resolve(task, 6).noise_variance(task, inputs, batch.labels) is None


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("bits", [2, 8])
def test_zeros_and_withheld_coordinates_stay_zero(task, batch, bits, stochastic):
    rows = _rows(task, 1)
    rows[0, 5:90] = 0
    sent = _send(Quantization(bits, stochastic), task, rows)
    assert not sent.rows[0, 5:90].any()
    assert not _send(Quantization(bits, stochastic), task, 0 * rows).rows.any()
    pruned = send(
        task, batch, chain(MagnitudePruning(0.5), Quantization(bits, stochastic)), stream(0)
    )
    assert not pruned.rows[~pruned.mask].any()
    assert pruned.rows[pruned.mask].any()


@pytest.mark.parametrize("bits", [5, 8, 12])
def test_the_true_input_matches_without_a_rest(task, batch, bits):
    defense = resolve(Quantization(bits), task, 6)
    sent = send(task, batch, defense, stream(0))
    inputs = batch.inputs.clone().requires_grad_()
    guess = simulate(task, inputs, batch.labels, cohort=(6,), defense=defense)
    torch.testing.assert_close(guess.detach(), sent.rows, rtol=1e-12, atol=1e-15)
    plain = gradient(task, inputs, batch.labels)
    toward = normal(plain.shape, stream(1), like=plain)
    slopes = [torch.autograd.grad(g.flatten() @ toward, inputs)[0] for g in (guess, plain)]
    torch.testing.assert_close(*slopes)  # straight-through: the slope of the plain gradient
    pushed = torch.func.jvp(
        lambda x: pure_simulate(task, x, batch.labels, defense), (inputs,), (inputs.detach(),)
    )[1]
    assert bool(pushed.isfinite().all())
    assert bool(pushed.any())


@pytest.mark.parametrize("defense", [Quantization(4, stochastic=True), Quantization(4)], ids=repr)
def test_stochastic_and_coarse_rounding_are_compared_with_the_plain_gradient(task, batch, defense):
    defense = resolve(defense, task, 6)
    guess = simulate(task, batch.inputs, batch.labels, cohort=(6,), defense=defense)
    assert torch.equal(guess[0], gradient(task, batch.inputs, batch.labels))


def test_many_bits_are_the_gradient_and_few_are_not(task):
    rows = _rows(task, 1).float()
    errors = [
        float((_send(Quantization(b), task, rows).rows - rows).norm()) for b in (2, 4, 8, 16, 24)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-6 * float(rows.norm())
    assert errors[0] > 0.3 * float(rows.norm())
    assert _send(Quantization(8, True), task, rows).rows.dtype == torch.float32


def test_laws_and_guarantees(task, batch):
    assert chain(Quantization(8), GaussianNoise(0.1)).guarantee is Guarantee.KNOWN_NOISE
    assert chain(Quantization(8, True), GaussianNoise(0.1)).guarantee is Guarantee.NONE
    assert chain(GaussianNoise(0.1), Quantization(8)).guarantee is Guarantee.NONE
    late = send(task, batch, chain(GaussianNoise(0.1), Quantization(8)), stream(0))
    assert isinstance(late.law, Unknown)
    clients, streams = [batch] * 2, [stream(i) for i in range(3)]
    summed = play(task, clients, chain(Quantization(3), SecureAggregation(2)), streams).update
    alone = send(task, batch, Quantization(3), stream(0))
    torch.testing.assert_close(summed.rows, 2 * alone.rows)


@pytest.mark.parametrize(
    "settings", [{"bits": 1}, {"bits": 25}, {"bits": 0}, {"bits": True}, {"scope": "per_tensor"}]
)
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Quantization(**settings)


def test_it_must_be_resolved(task):
    with pytest.raises(ValueError, match="resolve"):
        Quantization().transform(Update(_rows(task), Unit.CLIENT, (1, 1)), None, None, stream(0))


@pytest.mark.parametrize(
    "defense",
    [
        Quantization(8),
        Quantization(2),
        Quantization(4, scope="global"),
        Quantization(4, stochastic=True),
        chain(SecureAggregation(2), Quantization(4)),
        chain(MagnitudePruning(0.5), Quantization(3)),
    ],
    ids=repr,
)
def test_contract(defense):
    check_defense(defense)
