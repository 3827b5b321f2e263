"""Sparsification with a memory, against a loop in numpy; what several rounds give away."""

import numpy as np
import pytest
import torch

from leakbound import data
from leakbound.client import gradient
from leakbound.core import Batch, Exact, Guarantee, Task, Unit, Unknown, Update
from leakbound.defenses import (
    DpSgd,
    GaussianNoise,
    GradientDropout,
    MagnitudePruning,
    SecureAggregation,
    TopK,
    chain,
)
from leakbound.protocol import resolve, step
from leakbound.randomness import bernoulli, normal, stream
from leakbound.testing import check_defense


def _rounds(defense, gradients):
    """What one client sends round after round, and its memory in the end."""
    sent, state = [], None
    for row in gradients:
        update, state = defense.transform(
            Update(row[None], Unit.CLIENT, (1,)), state, None, stream(0)
        )
        sent.append(update)
    return sent, state


def _gradients(count, width=101):
    scale = torch.logspace(-2, 0, width, dtype=torch.float64)
    return normal((count, width), stream(0, "gradients"), like=scale) * scale


def test_the_first_round_is_magnitude_pruning():
    (row,) = _gradients(1)
    (sent,), memory = _rounds(TopK(0.7), [row])
    update = Update(row[None], Unit.CLIENT, (1,))
    pruned, _ = MagnitudePruning(0.7, "global").transform(update, None, None, stream(0))
    assert torch.equal(sent.rows, pruned.rows)
    assert torch.equal(sent.mask, pruned.mask)
    assert isinstance(sent.law, Exact)
    assert sent.law.private
    assert sent.mask_private
    assert torch.equal(memory + sent.rows, row[None])


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("feedback", [True, False])
def test_rounds_are_those_of_the_algorithm(rate, feedback):
    gradients = _gradients(7)
    sent, _ = _rounds(TopK(rate, feedback), gradients)
    memory = np.zeros(101)
    for row, update in zip(gradients.numpy(), sent, strict=True):
        total = row + (memory if feedback else 0)
        kept = np.argsort(-np.abs(total))[: 101 - int(rate * 101)]
        wanted = np.zeros(101)
        wanted[kept] = total[kept]
        memory = total - wanted
        np.testing.assert_allclose(update.rows[0].numpy(), wanted, rtol=1e-12)
        assert set(np.flatnonzero(update.mask[0].numpy())) == set(kept)


def test_nothing_is_lost_but_the_memory():
    gradients = _gradients(9)
    sent, memory = _rounds(TopK(0.8), gradients)
    torch.testing.assert_close(sum(u.rows for u in sent)[0] + memory[0], gradients.sum(0))


@pytest.mark.parametrize("rate", [0.5, 0.9])
def test_the_memory_stays_below_its_bound(rate):
    gradients = _gradients(60)
    largest = float(gradients.norm(dim=1).max())
    state, longest = None, 0.0
    for row in gradients:
        update = Update(row[None], Unit.CLIENT, (1,))
        _, state = TopK(rate).transform(update, state, None, stream(0))
        longest = max(longest, float(state.norm()))
    assert 0.01 * largest < longest <= 2 * rate**0.5 / (1 - rate) * largest


def test_the_same_weights_again_and_again_give_the_picture():
    batch = data.load("mnist5k").batch(torch.tensor([17]))
    batch = Batch(batch.inputs.double(), batch.labels)
    task = Task.of(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)).double())
    task = task.with_parameters(0.05 * normal((7850,), stream(0, "weights"), like=task.parameters))
    truth = gradient(task, batch.inputs, batch.labels)
    defense, state, total = resolve(TopK(0.995), task, 1), None, torch.zeros_like(truth)
    errors, pictures = {}, {}
    for number in range(1, 401):
        update, state = step(task, batch, defense, stream(0), state)
        total = total + update.rows[0]
        errors[number] = float((total / number - truth).norm() / truth.norm())
        parts = task.unflatten(total)
        row = parts["1.weight"][batch.labels] / parts["1.bias"][batch.labels].clamp_max(-1e-12)
        pictures[number] = float((row.clamp(0, 1) - batch.inputs.flatten(1)).square().mean())
    assert errors[1] > 0.5
    assert errors[400] < 0.05
    assert pictures[1] > 1e-2  # below 20 dB
    assert pictures[400] < 1e-4  # above 40 dB


def test_later_rounds_have_no_law_but_without_memory():
    gradients = _gradients(3)
    sent, _ = _rounds(TopK(0.5), gradients)
    assert [type(u.law) for u in sent] == [Exact, Unknown, Unknown]
    assert "earlier rounds" in sent[1].law.reason
    sent, memory = _rounds(TopK(0.5, False), gradients)
    assert [type(u.law) for u in sent] == [Exact] * 3
    assert memory is None
    sent, _ = _rounds(TopK(0.0), gradients)
    assert [type(u.law) for u in sent] == [Exact] * 3


def test_what_an_earlier_link_withheld_is_kept_for_later():
    gradients = normal((5, 39), stream(1)).double()
    whole, state = chain(GradientDropout(0.5), TopK(0.7)), None
    for i, row in enumerate(gradients):
        before = torch.zeros(1, 39) if state is None else state[1]
        update = Update(row[None], Unit.CLIENT, (1,))
        update, state = whole.transform(update, state, None, stream(i))
        assert not update.rows[~update.mask].any()
        given = bernoulli((1, 39), 0.5, stream(i))
        assert not update.mask[~given].any()
        torch.testing.assert_close(update.rows + state[1], row * given + before)


def test_guarantees():
    assert chain(TopK(0.5), GaussianNoise(0.1)).guarantee is Guarantee.NONE
    assert chain(TopK(0.5, False), GaussianNoise(0.1)).guarantee is Guarantee.KNOWN_NOISE
    assert chain(DpSgd(1.0, 1.0), TopK(0.5)).guarantee is Guarantee.DIFFERENTIAL_PRIVACY
    with pytest.raises(ValueError, match="TopK"):
        chain(SecureAggregation(2), TopK(0.5))


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_the_rate_is_checked(rate):
    with pytest.raises(ValueError, match="rate"):
        TopK(rate)


@pytest.mark.parametrize(
    "defense",
    [
        TopK(0.9),
        TopK(0.5, False),
        chain(GaussianNoise(0.1), TopK(0.5), SecureAggregation(2)),
        chain(GradientDropout(0.5), TopK(0.5)),
        chain(TopK(0.5), GaussianNoise(0.1)),
    ],
    ids=repr,
)
def test_contract(defense):
    check_defense(defense)
