"""The AUC of matching two answers, and the cost of separating several, against drawn ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from leakbound_reproductions.mean_to_extreme.corrected import auc, separation


def pairs(rng, dim, noise, cosine, count):
    """Inner products of two answers of one record, and of two records at an angle."""
    u = np.zeros(dim)
    u[0] = 1.0
    v = np.zeros(dim)
    v[0], v[1] = cosine, np.sqrt(1 - cosine**2)
    found = []
    for other in (u, v):
        first = u + noise * rng.standard_normal((count, dim))
        second = other + noise * rng.standard_normal((count, dim))
        found.append((first * second).sum(1))
    return found


def counted(same, different):
    return stats.mannwhitneyu(same, different).statistic / len(same) / len(different)


@pytest.mark.parametrize(("noise", "value"), [(0.1, 0.892), (0.13, 0.771), (0.2, 0.624)])
def test_auc_of_color_images(noise, value):
    """beyond.md F4: .892, .771, .624 by formula; .889, .774, .620 in its simulation."""
    assert auc(noise, dim=3072) == pytest.approx(value, abs=6e-4)
    same, different = pairs(np.random.default_rng(1), 3072, noise, 0.0, 1500)
    assert counted(same, different) == pytest.approx(value, abs=0.025)


@pytest.mark.parametrize("cosine", [-0.5, 0.0, 0.6, 0.95])
def test_variance_holds_for_correlated_records(cosine):
    """noise^2 (2 + noise^2 N) at any angle: the vectors have length 1, whatever lies between."""
    dim, noise, count = 12, 0.3, 20_000
    same, different = pairs(np.random.default_rng(2), dim, noise, cosine, count)
    variance = noise**2 * (2 + noise**2 * dim)
    for found, mean in ((same, 1.0), (different, cosine)):
        assert found.mean() == pytest.approx(mean, abs=5 * np.sqrt(variance / count))
        assert found.var() == pytest.approx(variance, rel=0.06)
    assert counted(same, different) == pytest.approx(auc(noise, dim=dim, cosine=cosine), abs=0.012)


@settings(max_examples=80, deadline=None)
@given(st.floats(1e-3, 1e3), st.integers(1, 10**6), st.floats(-1, 1))
def test_order(noise, dim, cosine):
    start = auc(noise, dim=dim, cosine=cosine)
    assert 0.5 <= start <= 1
    assert auc(noise * 1.3, dim=dim, cosine=cosine) <= start
    assert auc(noise, dim=dim + 1, cosine=cosine) <= start
    assert auc(noise, dim=dim, cosine=min(1.0, cosine + 0.1)) <= start


def test_limits():
    assert auc([0.0, 1e-300, 1e300, np.inf], dim=9).tolist() == [1.0, 1.0, 0.5, 0.5]
    assert auc([0.0, 0.5, np.inf], dim=9, cosine=1.0).tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise_multiplier", -1.0),
        ("noise_multiplier", np.nan),
        ("dim", 0),
        ("dim", 1.5),
        ("cosine", 1.1),
        ("cosine", np.nan),
        ("cosine", "0"),
    ],
)
def test_bad_input_is_named(name, value):
    arguments = {"noise_multiplier": 0.1, "dim": 4, "cosine": 0.0, name: value}
    with pytest.raises(ValueError, match=rf"^{name} is .*; give"):
        auc(arguments.pop("noise_multiplier"), **arguments)


def test_separation_is_that_of_least_squares():
    rng, batch, rows, dim = np.random.default_rng(3), 3, 7, 200
    mixing = rng.standard_normal((batch, rows))
    records = rng.standard_normal((batch, dim))
    errors = np.zeros(batch)
    for _ in range(200):
        sent = mixing.T @ records + rng.standard_normal((rows, dim))
        found = np.linalg.lstsq(mixing.T, sent, rcond=None)[0]
        errors += ((found - records) ** 2).mean(1) / 200
    expected = separation(mixing) / (mixing**2).sum(1)
    np.testing.assert_allclose(errors, expected, rtol=5 * np.sqrt(2 / 200 / dim))


def test_mean_separation_of_gaussian_mixing():
    """beyond.md section 5: (M - 2) / (M - B - 1), 1.6 at M = 10, B = 4."""
    rng = np.random.default_rng(4)
    found = np.concatenate([separation(rng.standard_normal((4, 10))) for _ in range(8000)])
    error = found.reshape(-1, 4).mean(1).std() / np.sqrt(8000)
    assert found.mean() == pytest.approx(8 / 5, abs=4 * error)
    assert abs(found.mean() - 10 / 5) > 10 * error  # M / (M - B - 1) takes both for independent


@pytest.mark.parametrize(
    "mixing", [[[1.0, 2.0], [2.0, 4.0]], [[1.0], [2.0]], [1.0, 2.0], [[np.nan]], "ab", [[]]]
)
def test_separation_refuses(mixing):
    with pytest.raises(ValueError, match=r"^mixing .*; give"):
        separation(mixing)


def test_separation_alone_costs_nothing():
    assert separation([[0.3, 0.4, -2.0]]).tolist() == [1.0]
    assert separation(np.eye(3) * 7).tolist() == [1.0, 1.0, 1.0]
