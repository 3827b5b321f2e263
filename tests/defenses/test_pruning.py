"""Which coordinates are withheld, and how many."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from leakbound.core import Exact, Task, Unit, Update
from leakbound.defenses import GradientDropout, MagnitudePruning
from leakbound.defenses.sparsification import smallest
from leakbound.randomness import normal, stream


def _task():
    return Task.of(nn.Sequential(nn.Flatten(), nn.Linear(11, 7), nn.Linear(7, 3)))


def _prune(defense, rows, task=None):
    state = defense.init(task or _task())
    update = Update(rows, Unit.CLIENT, (1,) * len(rows), bound=1.0)
    return defense.transform(update, state, None, stream(0))[0]


def _withheld(values, rate):
    """By hand: a full sort of (magnitude, index)."""
    gone = int(Fraction(str(rate)) * len(values))  # exact decimal arithmetic, rounded down
    order = sorted(range(len(values)), key=lambda i: (abs(values[i]), i))
    return {int(i) for i in order[:gone]}


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.29, 0.3, 0.5, 0.57, 0.7, 0.99, 1.0])
@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_exactly_the_smallest_go(scope, rate):
    task = _task()
    rows = normal((3, len(task.parameters)), stream(1))
    sent = _prune(MagnitudePruning(rate, scope), rows, task)
    whole = [(0, len(task.parameters))]
    spans = [(a, b) for _, _, a, b in task.layout] if scope == "tensor" else whole
    for row, mask, values in zip(rows.numpy(), sent.mask.numpy(), sent.rows.numpy(), strict=True):
        for a, b in spans:
            assert set(np.flatnonzero(~mask[a:b])) == _withheld(row[a:b], rate)
        assert np.array_equal(values, np.where(mask, row, 0))


def test_scope_matters():
    task = _task()
    rows = torch.ones(1, len(task.parameters))
    rows[0, 77:84] = 1e-3  # the first bias is small
    by_tensor = _prune(MagnitudePruning(0.5, "tensor"), rows, task).mask
    overall = _prune(MagnitudePruning(0.05, "global"), rows, task).mask
    assert int(by_tensor[0, 77:84].sum()) == 4
    assert not overall[0, 77:82].any()
    assert int((~overall).sum()) == int(0.05 * len(task.parameters)) == 5


def test_equal_magnitudes_go_by_index():
    rows = torch.tensor([[1.0, -1.0, 1.0, 0.5, -1.0, 1.0]])
    for _ in range(3):
        sent = _prune(MagnitudePruning(0.5, "global"), rows)
        assert sent.mask.tolist() == [[False, False, True, False, True, True]]


def test_less_than_one_coordinate_is_none():
    rows = torch.ones(1, 9)
    assert _prune(MagnitudePruning(0.11, "global"), rows).mask.all()  # 0.99
    assert int((~_prune(MagnitudePruning(0.12, "global"), rows).mask).sum()) == 1  # 1.08


@pytest.mark.parametrize(("rate", "count"), [(0.29, 29), (0.57, 57), (0.58, 58), (0.07, 7)])
def test_decimal_rates_are_meant_as_written(rate, count):
    mask = _prune(MagnitudePruning(rate, "global"), torch.arange(100.0)[None]).mask
    assert int((~mask).sum()) == count


def test_pruning_is_a_private_choice_and_bounds_nothing():
    sent = _prune(MagnitudePruning(0.5, "global"), torch.arange(4.0)[None])
    assert isinstance(sent.law, Exact)
    assert sent.law.private
    assert sent.bound is None
    assert not sent.drawn


def test_pruning_by_tensor_needs_its_state():
    update = Update(torch.ones(1, 4), Unit.CLIENT, (1,))
    with pytest.raises(ValueError, match="init"):
        MagnitudePruning(0.5).transform(update, None, None, stream(0))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_has_its_frequency(rate):
    count = 200_000
    rows = torch.ones(2, count // 2)
    sent = _prune(GradientDropout(rate), rows)
    gone = int((~sent.mask).sum())
    assert stats.binomtest(gone, count, rate).pvalue > 1e-3
    for wrong in (rate - 0.01, rate + 0.01):
        assert stats.binomtest(gone, count, wrong).pvalue < 1e-9
    assert torch.equal(sent.rows, sent.mask.float())
    assert not torch.equal(sent.mask[0], sent.mask[1])
    assert sent.drawn


def test_dropout_does_not_look_at_the_data():
    a, b = (_prune(GradientDropout(0.5), normal((1, 50), stream(i))) for i in range(2))
    assert torch.equal(a.mask, b.mask)


@pytest.mark.parametrize(("rate", "kept"), [(0.0, 50), (1.0, 0)])
def test_dropout_at_the_ends(rate, kept):
    assert int(_prune(GradientDropout(rate), torch.ones(1, 50)).mask.sum()) == kept


@pytest.mark.parametrize("kind", [GradientDropout, MagnitudePruning])
@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_rates_are_checked(kind, rate):
    with pytest.raises(ValueError, match="rate"):
        kind(rate)


def test_of_equal_values_the_first_go_and_nan_is_above_all():
    """As a stable sort has it."""
    source = np.random.default_rng(0)
    for _ in range(500):
        values = source.integers(0, 5, source.integers(1, 30)).astype(np.float32)
        values[source.random(len(values)) < 0.2] = source.choice([np.nan, np.inf])
        rate = float(source.random())
        count = int(rate * len(values) + 1e-9)
        wanted = np.zeros(len(values), bool)
        wanted[np.argsort(values, kind="stable")[:count]] = True
        assert smallest(torch.from_numpy(values), rate).tolist() == wanted.tolist()
