"""The law of the correlation, against correlations of drawn estimates."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from leakbound.bounds.from_scratch import ncc


def drawn(rng, dim, noise, mean, count):
    """Correlations of unbiased estimates with one record of the given mean; and its spread."""
    record = rng.standard_normal(dim)
    record = record - record.mean() + mean
    guesses = record + noise * np.linalg.norm(record) * rng.standard_normal((count, dim))
    spread = np.linalg.norm(record - record.mean()) / np.linalg.norm(record)
    centered = record - record.mean()
    guesses = guesses - guesses.mean(1, keepdims=True)
    norms = np.linalg.norm(guesses, axis=1) * np.linalg.norm(centered)
    return guesses @ centered / norms, spread


@pytest.mark.parametrize(
    ("dim", "noise", "mean"), [(2, 0.8, 0.0), (3, 0.4, 1.0), (25, 0.2, 0.5), (784, 0.05, 1.0)]
)
def test_law_is_that_of_drawn_estimates(dim, noise, mean):
    rng = np.random.default_rng(dim)
    found, spread = drawn(rng, dim, noise, mean, 4000)
    for level in (-0.5, 0.0, *np.quantile(found, [0.1, 0.5, 0.9]).clip(-0.99, 0.99)):
        gamma = ncc(noise, dim=dim, ncc=level, spread=spread)
        error = np.sqrt(gamma * (1 - gamma) / 4000)
        assert (found >= level).mean() == pytest.approx(gamma, abs=4 * error + 1e-12)


def test_population_value_is_what_many_pixels_approach():
    """Sheet H12: sqrt(Var / (Var + noise^2 |X|^2)), Var the variance over pixels."""
    rng, noise, dim = np.random.default_rng(0), 0.005, 200_000
    found, spread = drawn(rng, dim, noise, 0.7, 1)
    limit = ncc.population(noise, dim=dim, spread=spread)
    assert found[0] == pytest.approx(limit, abs=0.01)
    variance = spread**2 / dim
    assert limit == pytest.approx(np.sqrt(variance / (variance + noise**2)), rel=1e-12)
    assert limit <= 1 / np.sqrt(1 + dim * noise**2)
    assert ncc.ncc_at(noise, dim=dim, gamma=0.5, spread=spread) == pytest.approx(limit, abs=1e-4)


@settings(max_examples=25, deadline=None)
@given(
    st.floats(1e-3, 5),
    st.integers(3, 5000),
    st.floats(0.05, 0.95),
    st.floats(0.1, 1),
    st.floats(1.001, 3),
)
def test_order(noise, dim, level, spread, factor):
    start = ncc(noise, dim=dim, ncc=level, spread=spread)
    assert ncc(noise * factor, dim=dim, ncc=level, spread=spread) <= start * (1 + 1e-8)
    assert ncc(noise, dim=dim, ncc=1 - (1 - level) / factor, spread=spread) <= start * (1 + 1e-8)
    assert ncc(noise, dim=dim, ncc=level, spread=spread / factor) <= start * (1 + 1e-8)


@settings(max_examples=25, deadline=None)
@given(st.floats(1e-6, 0.99), st.integers(3, 5000), st.floats(0.05, 0.95), st.floats(0.1, 1))
def test_inverses(gamma, dim, level, spread):
    if ncc(np.inf, dim=dim, ncc=level) < gamma * (1 - 1e-6):
        noise = ncc.noise_for(gamma, dim=dim, ncc=level, spread=spread)
        assert ncc(noise, dim=dim, ncc=level, spread=spread) <= gamma
        assert ncc(noise, dim=dim, ncc=level, spread=spread) == pytest.approx(gamma, rel=1e-6)
        found = ncc.ncc_at(noise, dim=dim, gamma=gamma, spread=spread)
        assert found == pytest.approx(level, abs=1e-6)


def test_limits():
    assert ncc(0.0, dim=9, ncc=0.999) == 1.0
    chance = stats.t.sf(0.5 / np.sqrt(0.75) * np.sqrt(7), 7)  # of a sample correlation under none
    assert ncc(np.inf, dim=9, ncc=0.5) == pytest.approx(chance, rel=1e-8)
    assert ncc(0.5, dim=2, ncc=0.9) == pytest.approx(stats.norm.cdf(2.0), rel=1e-12)
    assert ncc(1e-300, dim=9, ncc=0.999) == 1.0
    assert ncc.ncc_at(0.0, dim=9, gamma=0.5) == 1.0
    assert ncc.ncc_at(np.inf, dim=9, gamma=0.5) == pytest.approx(0.0, abs=1e-9)
    assert ncc.population([0.0, np.inf, 1e300], dim=9).tolist() == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="no finite noise helps"):
        ncc.noise_for(0.01, dim=5, ncc=0.2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise_multiplier", -0.1),
        ("dim", 1),
        ("dim", 3.5),
        ("ncc", 1.0),
        ("ncc", -1.0),
        ("ncc", "0.5"),
        ("ncc", np.nan),
        ("spread", 0.0),
        ("spread", 1.1),
        ("spread", np.nan),
    ],
)
def test_bad_input_is_named(name, value):
    arguments = {"noise_multiplier": 0.1, "dim": 9, "ncc": 0.5, "spread": 0.9, name: value}
    with pytest.raises(ValueError, match=rf"^{name} is .*; give"):
        ncc(arguments.pop("noise_multiplier"), **arguments)
