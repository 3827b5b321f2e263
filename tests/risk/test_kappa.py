"""Blind guesses, against brute force over constants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leakbound.bounds import record_priors
from leakbound.risk.kappa import BaselineMatches, baseline_matches, matches_at, refuse_matched
from leakbound.risk.target import Target


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 5), st.floats(0.001, 0.3))
def test_brute_force(seed, count, dim, eta):
    images = np.random.default_rng(seed).random((count, dim)) ** 2
    found = baseline_matches(images, eta)
    grid = np.linspace(-0.6, 1.6, 4401)
    shares = (((images[:, None] - grid[:, None]) ** 2).mean(2) <= eta).mean(0)
    hit = ((images - found.value) ** 2).mean(1) <= eta * (1 + 1e-9)
    assert found.constant >= shares.max()
    assert found.constant == pytest.approx(hit.mean()) or found.constant == 0
    assert found.mean == (((images - images.mean(0)) ** 2).mean(1) <= eta).mean()
    assert found.examples == count


def test_ties_count():
    """Two constants whose intervals touch in one point are both reached there."""
    for low in (0.0, 0.1, 0.3, 0.7):
        found = baseline_matches([[low] * 3, [low + 0.2] * 3], 0.01)
        assert found.constant == 1.0
        assert found.value == pytest.approx(low + 0.1)
        assert found.mean == 1.0
    assert baseline_matches([[0.0], [0.0], [0.0], [9.0]], 1e-9) == BaselineMatches(
        4, 0.75, pytest.approx(0, abs=1), 0.0, 2 / 3
    )
    assert baseline_matches(np.zeros((2, 1, 2, 2)), 1e-3).constant == 1.0


def test_no_constant_reaches():
    found = baseline_matches([[0.0, 1.0], [1.0, 0.0]], 0.01)
    assert (found.constant, found.mean) == (0.0, 0.0)


@pytest.mark.parametrize("eta", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_eta(eta):
    with pytest.raises(ValueError, match="eta is"):
        baseline_matches([[0.0, 1.0]], eta)


@pytest.mark.parametrize("images", [[], [1.0], np.zeros((0, 3)), [[np.nan, 1.0]], [["a"]]])
def test_bad_images(images):
    with pytest.raises(ValueError, match="images"):
        baseline_matches(images, 0.1)


def test_refusal():
    target = Target.of_psnr(20.0, 0.001)
    with pytest.raises(
        ValueError, match=r"target is PSNR >= 20 dB .* constant image 0\.25 .*2\.00%"
    ):
        refuse_matched(BaselineMatches(100, 0.02, 0.25, 0.01), target)
    with pytest.raises(ValueError, match=r"the mean image of the data matches 3\.00% of the 100"):
        refuse_matched(BaselineMatches(100, 0.02, 0.25, 0.03), target)
    refuse_matched(BaselineMatches(1000, 0.001, 0.25, 0.0), target)  # just what is accepted


def test_records_that_reach_each_other_are_counted(monkeypatch):
    rng = np.random.default_rng(5)
    flat = rng.normal(size=(60, 5))
    apart = np.square(flat[:, None] - flat).mean(2)
    np.fill_diagonal(apart, np.inf)
    for eta in (0.2, 0.8, 2.0):
        wanted = (apart <= eta).sum(1).max() / 59
        monkeypatch.setattr(record_priors, "TOGETHER", 7)
        assert baseline_matches(flat, eta).example == pytest.approx(wanted)
    assert baseline_matches([[0.3, 0.1]], 0.1).example == 0.0
    monkeypatch.setattr(record_priors, "MOST", 20)
    few = flat[::3]
    near = np.square(few[:, None] - few).mean(2) <= 0.8
    assert baseline_matches(flat, 0.8).example == pytest.approx((near.sum(1).max() - 1) / 19)


def test_several_levels_compare_the_images_once(monkeypatch):
    images = np.random.default_rng(0).random((30, 4))
    wanted = [baseline_matches(images, eta) for eta in (0.01, 0.05)]
    compared = []
    apart = record_priors._apart
    monkeypatch.setattr(record_priors, "_apart", lambda *a: compared.append(a) or apart(*a))
    assert matches_at(images, [0.01, 0.05]) == wanted
    assert len(compared) == 1
