"""Bounds on identification and on any goal, against attacks and against tables."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from leakbound.bounds.identification import gaussian, kappa_sphere, log_kappa_sphere

CHANCES = st.floats(1e-12, 0.99)
NOISES = st.floats(0.05, 1e3)


def test_gaussian_is_the_power_of_the_best_test():
    """Neyman and Pearson by counting: the threshold test of N(0, 1) against N(1 / noise, 1)."""
    rng, kappa, noise, steps = np.random.default_rng(0), 0.05, 1.7, 3
    out = rng.standard_normal((200_000, steps)).sum(1)
    there = (1 / noise + rng.standard_normal((200_000, steps))).sum(1)
    power = (there > np.quantile(out, 1 - kappa)).mean()
    assert gaussian(noise, kappa=kappa, steps=steps) == pytest.approx(power, abs=0.006)


def orthonormal_attack(noise, count=10):
    """Success of naming the largest of `count` coordinates, of which one is raised by 1 / noise."""
    return integrate.quad(
        lambda x: stats.norm.pdf(x - 1 / noise) * stats.norm.cdf(x) ** (count - 1), -12, 40
    )[0]


@pytest.mark.parametrize(
    ("noise", "attack", "bound"),
    [(0.5, 0.674, 0.764), (1, 0.341, 0.389), (2, 0.199, 0.217), (5, 0.134, 0.140)],
)
def test_the_attack_on_ten_candidates_stays_below(noise, attack, bound):
    """conventions.md 0.2."""
    assert orthonormal_attack(noise) == pytest.approx(attack, abs=6e-4)
    assert gaussian(noise, kappa=0.1) == pytest.approx(bound, abs=6e-4)
    rng = np.random.default_rng(1)
    seen = rng.standard_normal((20_000, 10))
    seen[:, 0] += 1 / noise
    assert (seen.argmax(1) == 0).mean() == pytest.approx(attack, abs=0.015)


@settings(max_examples=60, deadline=None)
@given(NOISES, CHANCES, st.integers(1, 1000), st.floats(1.0001, 2))
def test_gaussian_order(noise, kappa, steps, factor):
    start = gaussian(noise, kappa=kappa, steps=steps)
    slack = 1 + 1e-9
    assert start >= kappa / slack
    assert gaussian(noise * factor, kappa=kappa, steps=steps) <= start * slack
    assert gaussian(noise, kappa=kappa, steps=steps + 1) >= start / slack
    assert gaussian(noise, kappa=kappa / factor, steps=steps) <= start * slack
    assert gaussian.log(noise, kappa, None, steps) == pytest.approx(np.log(start), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(CHANCES, st.floats(1e-6, 0.999), st.integers(1, 1000))
def test_gaussian_inverses(gamma, part, steps):
    kappa = gamma * part
    noise = gaussian.noise_for(gamma, kappa=kappa, steps=steps)
    assert gaussian(noise, kappa=kappa, steps=steps) == pytest.approx(gamma, rel=1e-8)


def test_gaussian_limits():
    assert gaussian([0.0, np.inf], kappa=0.1).tolist() == [1.0, pytest.approx(0.1)]
    assert gaussian([1e-300, 1e300], kappa=0.1).tolist() == [1.0, pytest.approx(0.1)]
    assert gaussian(1.0, kappa=[0.0, 1.0]).tolist() == [0.0, 1.0]
    assert gaussian(0.0, kappa=0.0) == 1.0  # a release without noise may tell all
    deep = gaussian.log(0.01, log_kappa=-1e6)
    assert deep == pytest.approx(-((np.sqrt(2e6) - 100) ** 2) / 2, rel=1e-4)
    same = np.concatenate([np.geomspace(1e-200, 0.5, 400), np.linspace(0.01, 0.99, 400)])
    assert (gaussian.noise_for(same, kappa=same) == np.inf).all()
    assert gaussian.noise_for(0.1, kappa=0.0) == 0.0
    with pytest.raises(
        ValueError, match=r"gamma is 0\.1, below the prior-only success kappa = 0\.2"
    ):
        gaussian.noise_for([0.5, 0.1], kappa=0.2)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("noise_multiplier", {"noise_multiplier": -1.0, "kappa": 0.1}),
        ("kappa", {"kappa": 1.5}),
        ("kappa", {"kappa": np.nan}),
        ("kappa", {"kappa": "0.1"}),
        ("log_kappa", {"log_kappa": 0.1}),
        ("log_kappa", {"log_kappa": np.nan}),
        ("log_kappa", {"log_kappa": "-1"}),
        ("steps", {"kappa": 0.1, "steps": 1.5}),
        ("steps", {"kappa": 0.1, "steps": 0}),
    ],
)
def test_gaussian_names_bad_input(name, arguments):
    given = {"noise_multiplier": 1.0, **arguments}
    with pytest.raises(ValueError, match=rf"^{name} is .*; give"):
        gaussian(given.pop("noise_multiplier"), **given)


def test_gaussian_takes_one_of_two():
    for both in ({}, {"kappa": 0.1, "log_kappa": -1.0}):
        with pytest.raises(ValueError, match="kappa and log_kappa: give exactly one"):
            gaussian(1.0, **both)
    for gamma in (0.0, 1.0, np.nan):
        with pytest.raises(ValueError, match=r"^gamma is .*; give"):
            gaussian.noise_for(gamma, kappa=0.1)


# --- the prior-only success on the sphere ---


@pytest.mark.parametrize("dim", [2, 3, 16, 784, 3072])
def test_kappa_is_the_cap_s_share(dim):
    error = np.array([1e-6, 0.01, 0.3, 0.9, 0.999])
    share = 0.5 * special.betainc((dim - 1) / 2, 0.5, error)
    found = kappa_sphere(dim=dim, eta=error / dim)
    np.testing.assert_allclose(found, share, rtol=1e-8, atol=1e-300)
    scaled = kappa_sphere(dim=dim, eta=error * 9 / dim, norm=3.0)
    np.testing.assert_allclose(scaled, share, rtol=1e-6, atol=1e-300)


def test_kappa_is_counted_and_no_other_center_does_better():
    rng, dim, error = np.random.default_rng(3), 5, 0.4
    u = rng.standard_normal((200_000, dim))
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    kappa = kappa_sphere(dim=dim, eta=error / dim)
    rates = []
    for radius in (0.0, 0.3, 0.6, np.sqrt(1 - error), 0.9, 1.0, 1.3):
        rates.append(((u - radius * np.eye(dim)[0]) ** 2).sum(1) <= error)
    rates = np.mean(rates, 1)
    assert rates.argmax() == 3
    assert rates[3] == pytest.approx(kappa, abs=4 * np.sqrt(kappa / 200_000))


def test_kappa_jumps_at_one():
    assert kappa_sphere(dim=9, eta=(1 - 1e-15) / 9) == pytest.approx(0.5, rel=1e-6)
    assert kappa_sphere(dim=9, eta=1.0 / 9) == 1.0
    assert kappa_sphere(dim=1, eta=[0.2, 0.999, 1.0, 2.0]).tolist() == [0.5, 0.5, 1.0, 1.0]


def test_log_kappa_goes_below_floats():
    """For small errors a cap is a flat ball: its share of the sphere, to first order."""
    dim, error = 3072, 1e-6
    k = dim - 1
    log = k / 2 * np.log(error) - np.log(k) - special.betaln(k / 2, 0.5)
    found = log_kappa_sphere(dim=dim, eta=error / dim)
    assert found == pytest.approx(log, rel=1e-6)
    assert kappa_sphere(dim=dim, eta=error / dim) == 0.0
    assert log_kappa_sphere(dim=3072, eta=0.037 / 3072) == pytest.approx(-5067.2, abs=0.05)
    with pytest.raises(ValueError, match=r"^eta is 0; give"):
        kappa_sphere(dim=3, eta=0.0)


def test_scopes_say_whom_they_cover():
    assert gaussian.scope.covers == "all"
    assert "a bound for one given example" in gaussian.scope.not_said
