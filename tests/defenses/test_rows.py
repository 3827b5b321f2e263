"""Clipping, averaging and signs, against numpy."""

import numpy as np
import pytest
import torch

from leakbound.core import Unit, Update
from leakbound.defenses import Clip, ClipExamples, Mean, SecureAggregation, Sign
from leakbound.randomness import stream


def _rows(count=5, width=40):
    return (
        np.random.default_rng(0).normal(size=(count, width)) * np.geomspace(0.01, 3, count)[:, None]
    )


def _update(rows, unit=Unit.CLIENT):
    return Update(torch.tensor(rows), unit, (1,) * len(rows))


def _send(defense, update):
    return defense.transform(update, None, None, stream(0))[0]


@pytest.mark.parametrize(
    ("defense", "unit"),
    [(Clip(1.5), Unit.CLIENT), (Clip(1.5), Unit.COHORT), (ClipExamples(1.5), Unit.EXAMPLE)],
)
def test_clipping_divides_by_the_norm_where_it_is_larger(defense, unit):
    rows = _rows()
    norms = np.linalg.norm(rows, axis=1)
    assert 0 < (norms > 1.5).sum() < len(rows)
    wanted = np.where((norms > 1.5)[:, None], rows * 1.5 / norms[:, None], rows)
    sent = _send(defense, _update(rows, unit))
    np.testing.assert_allclose(sent.rows.numpy(), wanted, rtol=1e-12)
    np.testing.assert_allclose(defense.imitate(torch.tensor(rows)).numpy(), wanted, rtol=1e-12)
    assert np.array_equal(sent.rows.numpy()[norms <= 1.5], rows[norms <= 1.5])
    assert sent.bound == (1.5 if unit is Unit.EXAMPLE else None)


def test_clipping_a_zero_row_has_a_finite_slope():
    rows = torch.zeros(1, 4, requires_grad=True)
    Clip(1.0).imitate(rows).sum().backward()
    assert torch.equal(rows.grad, torch.ones(1, 4))


def test_the_slope_of_clipping():
    rows = torch.tensor(_rows(), requires_grad=True)
    assert torch.autograd.gradcheck(Clip(1.5).imitate, rows)


def test_mean():
    rows = _rows()
    sent = _send(Mean(), _update(rows, Unit.EXAMPLE))
    np.testing.assert_allclose(sent.rows.numpy(), rows.mean(0, keepdims=True), rtol=1e-12)
    assert torch.equal(Mean().imitate(torch.tensor(rows)), torch.tensor(rows).mean(0, keepdim=True))
    assert (sent.unit, sent.examples) == (Unit.CLIENT, (5,))


def test_sum_of_a_cohort():
    rows = _rows()
    sent = _send(SecureAggregation(5), _update(rows))
    np.testing.assert_allclose(sent.rows.numpy(), rows.sum(0, keepdims=True), rtol=1e-12)
    assert torch.equal(SecureAggregation(5).imitate(torch.tensor(rows)), sent.rows)
    assert (sent.unit, sent.examples) == (Unit.COHORT, (5,))


def test_sign():
    rows = _rows()
    rows[0, :3] = 0.0
    sent = _send(Sign(), _update(rows)).rows.numpy()
    assert np.array_equal(sent, np.sign(rows))
    assert set(np.unique(sent)) == {-1.0, 0.0, 1.0}


def test_the_imitated_sign_is_smooth_and_has_the_signs():
    rows = torch.tensor(_rows(), requires_grad=True)
    smooth = Sign().imitate(rows)
    assert torch.equal(smooth.sign(), rows.sign())
    assert bool((smooth.abs() < 1).all())
    scale = rows.detach().abs().mean(1, keepdim=True)
    by_hand = torch.sin(torch.atan(rows.detach() / scale))  # x / sqrt(x² + s²)
    torch.testing.assert_close(smooth.detach(), by_hand)
    (slope,) = torch.autograd.grad(smooth.sum(), rows)
    assert bool((slope > 0).all())


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [Clip, ClipExamples])
def test_clip_norm_is_checked(kind, value):
    with pytest.raises(ValueError, match="clip_norm"):
        kind(value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_example_that_is_not_finite_adds_nothing_and_large_ones_stay(bad):
    rows = torch.tensor([[3.0, 4.0], [1.0, bad], [3e38, 3e38]], dtype=torch.float64)
    given = Update(rows, Unit.EXAMPLE, (1, 1, 1))
    found = ClipExamples(1.0).transform(given, None, None, stream(0))[0].rows
    wanted = torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.5**0.5, 0.5**0.5]], dtype=torch.float64)
    torch.testing.assert_close(found, wanted)
    single = torch.full((1, 2), 3e38)  # its sum overflows, its entries do not
    kept = ClipExamples(1e38).transform(Update(single, Unit.EXAMPLE, (1,)), None, None, stream(0))
    assert kept[0].rows.isfinite().all()
