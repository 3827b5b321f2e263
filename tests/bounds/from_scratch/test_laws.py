"""The laws of a linear trap, against draws of the trap itself and against other routes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from leakbound.bounds.from_scratch import exact
from leakbound_reproductions.mean_to_extreme.unbiased import (
    unbiased_error,
    unbiased_noise,
    unbiased_success,
)

NOISES = st.floats(1e-3, 30)
DIMS = st.sampled_from([1, 2, 3, 16, 784, 3072, 150_528])
ERRORS = st.floats(1e-6, 0.999)
CHANCES = st.floats(1e-9, 0.999)
INF = np.inf


def directions(rng, count, dim):
    drawn = rng.standard_normal((count, dim))
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


# --- the unbiased estimator ---


@pytest.mark.parametrize(("dim", "count"), [(4, 20_000), (784, 4_000), (3072, 1_500)])
def test_unbiased_law_is_that_of_drawn_estimates(dim, count):
    rng, noise, norm = np.random.default_rng(dim), 0.3, 2.5
    record = norm * directions(rng, 1, dim)
    guesses = norm * (record / norm + noise * rng.standard_normal((count, dim)))
    errors = ((guesses - record) ** 2).mean(1)

    def law(factor):
        return lambda eta: unbiased_success(noise, dim=dim, eta=eta * factor, norm=norm)

    assert stats.kstest(errors, law(1.0)).pvalue > 0.01
    assert stats.kstest(errors, law(1.05)).pvalue < 1e-4
    assert stats.kstest(errors, law(0.95)).pvalue < 1e-4


# --- the best estimator ---


def hit_rates(rng, dim, noise, error, count):
    """Share of draws of u and xi whose answer lies within the angle of u."""
    hits = 0
    for start in range(0, count, 500):
        size = min(500, count - start)
        u = directions(rng, size, dim)
        y = u + noise * rng.standard_normal((size, dim))
        cosine = (u * y).sum(1) / np.linalg.norm(y, axis=1)
        hits += int((cosine >= np.sqrt(1 - error)).sum())
    return hits / count


def standard_scores(dims, count):
    rng, found = np.random.default_rng(7), []
    for dim in dims:
        for error in (0.01, 0.04, 0.1, 0.25, 0.5, 0.7, 0.85, 0.97):
            for place in (0.8, 0.9, 0.95, 1.0, 1.05, 1.15, 1.4, 2.0):
                noise = place * np.sqrt(error / (1 - error) / dim)
                gamma = exact(noise, dim=dim, eta=error / dim)
                draws = max(400, min(20_000, count // dim))
                if draws * gamma * (1 - gamma) < 9:
                    continue  # so few hits or misses are not normal
                rate = hit_rates(rng, dim, noise, error, draws)
                found.append((rate - gamma) / np.sqrt(gamma * (1 - gamma) / draws))
    return np.array(found)


def within_chance(scores):
    """No more beyond 3 standard errors than 1 in 10,000 runs would have, nor any far out."""
    beyond = int((abs(scores) > 3).sum())
    assert stats.binom.sf(beyond - 1, len(scores), 0.0027) > 1e-4, beyond
    assert abs(scores).max() < stats.norm.isf(0.5e-4 / len(scores))
    assert 1e-4 < stats.chi2.sf((scores**2).sum(), len(scores)) < 1 - 1e-4


def test_exact_counts_as_drawn_in_some_cells():
    scores = standard_scores((3, 8, 40), 100_000)
    assert len(scores) > 80
    within_chance(scores)


@pytest.mark.slow
def test_exact_counts_as_drawn_in_two_hundred_cells():
    scores = standard_scores((3, 4, 10, 30, 100, 784, 3072), 4_000_000)
    print(
        f"{len(scores)} cells, worst {abs(scores).max():.2f}, beyond 3: {(abs(scores) > 3).sum()}"
    )
    assert len(scores) >= 200
    within_chance(scores)


def test_the_best_guess_is_found_by_no_search_to_succeed_more_often_on_the_circle():
    """All guesses on a grid of the plane, given each length of the answer, by numeric posterior."""
    _bayes(_circle(2000), 2, 0.7, 0.2)
    _bayes(_circle(2000), 2, 1.5, 0.6)


def test_the_best_guess_is_found_by_no_search_to_succeed_more_often_on_the_sphere():
    _bayes(_sphere(4000), 3, 0.5, 0.3)


def _circle(count):
    angle = (np.arange(count) + 0.5) * 2 * np.pi / count
    return np.stack([np.cos(angle), np.sin(angle)], 1)


def _sphere(count):
    turn = np.arange(count) * np.pi * (3 - np.sqrt(5))
    height = 1 - (2 * np.arange(count) + 1) / count
    flat = np.sqrt(1 - height**2)
    return np.stack([height, flat * np.cos(turn), flat * np.sin(turn)], 1)


def _bayes(points, dim, noise, error):
    """Expected mass of the best ball of radius^2 `error`; guesses in a plane, by symmetry."""
    axis = np.linspace(-1.1, 1.1, 45)
    plane = np.stack(np.meshgrid(axis, axis[axis >= 0]), -1).reshape(-1, 2)
    guesses = np.pad(plane, ((0, 0), (0, dim - 2)))
    inside = ((guesses[:, None] - points) ** 2).sum(2) <= error
    lengths = noise * np.sqrt(stats.ncx2.ppf((np.arange(60) + 0.5) / 60, dim, noise**-2))
    posterior = special.softmax(lengths[:, None] * points[:, 0] / noise**2, 1)
    best = (posterior @ inside.T).max(1).mean()
    gamma = exact(noise, dim=dim, eta=error / dim)
    assert best <= gamma + 0.004  # the rounding of the grid of points and lengths
    assert best >= gamma - 0.02  # and that of the grid of guesses: it is no loose bound


# --- limits, order and inverses ---


@pytest.mark.parametrize("law", [exact, unbiased_success])
@pytest.mark.parametrize("dim", [1, 2, 3, 3072, 1_000_000])
def test_extreme_arguments_give_limits(law, dim):
    noise = np.array([0, 1e-300, 1e-160, 1e-9, 1e-3, 1, 1e9, 1e300, INF])[:, None]
    errors = np.array([1e-300, 1e-100, 1e-16, 1e-3, 0.5, 1 - 1e-15, 1, 3, 1e300, INF])
    for norm in (1e-150, 1.0, 1e150):
        gamma = law(noise, dim=dim, eta=errors / dim, norm=norm)
        assert not np.isnan(gamma).any()
        assert ((gamma >= 0) & (gamma <= 1)).all()
    gamma = law(noise, dim=dim, eta=errors / dim)
    assert (np.diff(gamma, axis=0) <= 1e-8).all()
    assert (np.diff(gamma, axis=1) >= -1e-8).all()
    np.testing.assert_array_equal(gamma[0], 1.0)
    np.testing.assert_array_equal(gamma[:, -1], 1.0)


def test_the_zero_image_takes_over_at_one():
    below = exact(2.0, dim=16, eta=(1 - 1e-15) / 16)
    assert below == pytest.approx(stats.norm.cdf(0.5), rel=1e-6)
    assert exact(2.0, dim=16, eta=1.0 / 16) == 1.0
    assert exact(0.7, dim=1, eta=0.5) == pytest.approx(stats.norm.cdf(1 / 0.7))


def test_tail_below_floats_has_its_logarithm():
    assert exact(1.0, dim=3072, eta=1e-300) == 0.0
    assert np.isfinite(exact.log(1.0, dim=3072, eta=1e-300))


@settings(max_examples=40, deadline=None)
@given(NOISES, DIMS, ERRORS, st.floats(1.0001, 3))
def test_more_noise_and_less_tolerance_lower_both(noise, dim, error, factor):
    for law in (exact, unbiased_success):
        start = law(noise, dim=dim, eta=error / dim)
        assert law(noise * factor, dim=dim, eta=error / dim) <= start * (1 + 1e-8)
        assert law(noise, dim=dim, eta=error / dim / factor) <= start * (1 + 1e-8)


@settings(max_examples=40, deadline=None)
@given(NOISES, DIMS, ERRORS, st.floats(1e-3, 1e3))
def test_only_the_ratio_of_error_and_norm_counts_and_exact_is_the_larger(noise, dim, error, norm):
    for law in (exact, unbiased_success):
        scaled = law(noise, dim=dim, eta=error * norm**2 / dim, norm=norm)
        assert scaled == pytest.approx(law(noise, dim=dim, eta=error / dim), rel=1e-6, abs=1e-300)
    best = exact(noise, dim=dim, eta=error / dim)
    assert best >= unbiased_success(noise, dim=dim, eta=error / dim) * (1 - 1e-8)


@settings(max_examples=40, deadline=None)
@given(CHANCES, DIMS, ERRORS)
def test_noise_for_is_safe_and_the_least(gamma, dim, error):
    eta = error / dim
    if exact(INF, dim=dim, eta=eta) > gamma * (1 - 1e-6):
        return
    noise = exact.noise_for(gamma, dim=dim, eta=eta)
    assert exact(noise, dim=dim, eta=eta) <= gamma
    assert exact(noise * (1 - 1e-8), dim=dim, eta=eta) >= gamma * (1 - 1e-8)


@settings(max_examples=40, deadline=None)
@given(CHANCES, DIMS, st.floats(1e-9, 1e9), st.floats(0.01, 100))
def test_the_unbiased_inverses_come_back(gamma, dim, eta, norm):
    noise = unbiased_noise(gamma, dim=dim, eta=eta, norm=norm)
    assert unbiased_success(noise, dim=dim, eta=eta, norm=norm) == pytest.approx(gamma, rel=1e-6)
    assert unbiased_error(noise, dim=dim, gamma=gamma, norm=norm) == pytest.approx(eta, rel=1e-9)


def test_inverses_at_their_limits():
    assert exact.noise_for(1e-3, dim=784, eta=1e-300) < 1e-140
    with pytest.raises(ValueError, match=r"gamma is 0\.2.*no finite noise helps"):
        exact.noise_for(0.2, dim=3, eta=0.3)
    with pytest.raises(ValueError, match="no finite noise helps"):
        exact.noise_for([0.2, 0.5], dim=1, eta=0.3)
    with pytest.raises(ValueError, match="no finite noise helps"):
        exact.noise_for(0.999, dim=4, eta=0.25)


BAD = [
    ("noise_multiplier", -1.0),
    ("noise_multiplier", np.nan),
    ("noise_multiplier", "0.1"),
    ("noise_multiplier", None),
    ("eta", 0.0),
    ("eta", -1.0),
    ("eta", np.nan),
    ("norm", 0.0),
    ("norm", INF),
    ("dim", 0),
    ("dim", 2.5),
    ("dim", True),
    ("dim", [4, 2.5]),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_input_is_named(name, value):
    arguments = {"noise_multiplier": 0.1, "dim": 4, "eta": 0.1, "norm": 1.0, name: value}
    with pytest.raises(ValueError, match=rf"^{name} is .*; give"):
        exact(arguments.pop("noise_multiplier"), **arguments)


@pytest.mark.parametrize("gamma", [0.0, 1.0, -0.1, 1.5, np.nan, "1"])
def test_bad_probability_is_named(gamma):
    with pytest.raises(ValueError, match=r"^gamma is .*; give"):
        exact.noise_for(gamma, dim=4, eta=0.1)


def test_scopes_say_whom_they_cover():
    assert exact.scope.covers == "trap"
    assert "does not say: a bound for one given image" in str(exact.scope)
