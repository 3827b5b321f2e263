"""Lower bounds on epsilon against published values, closed forms, mpmath and simulated programs."""

import math

import mpmath
import numpy as np
import pytest
from scipy import special, stats

from leakbound.bounds import conversions
from leakbound.bounds.empirical import (
    count_limits,
    epsilon_of_guesses,
    epsilon_of_rates,
    epsilon_of_steps,
    guess_p_value,
    most_power,
)

TRIALS, LEVEL = 1000, 0.05
ALLOWED = int(stats.binom.ppf(0.975, TRIALS, LEVEL))
"""So often may 1,000 trials of a test of level 5 % be wrong."""


def test_limits_are_those_at_which_a_binomial_tail_is_the_level():
    limits = count_limits(40, 0.975)
    for count in (0, 7, 39):
        assert stats.binom.cdf(count, 40, limits[count]) == pytest.approx(0.025, rel=1e-9)
    assert limits[40] == 1


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_rates_of_randomized_response_give_its_epsilon(epsilon):
    with mpmath.workdps(30):
        right = float(mpmath.e**epsilon / (1 + mpmath.e**epsilon))
    assert epsilon_of_rates(right, 1 - right, 0.0) == pytest.approx(epsilon, rel=1e-12)
    assert epsilon_of_rates(right, 1 - right, 0.01) < epsilon
    assert epsilon_of_rates(1 - right, right, 0.0) == 0
    assert epsilon_of_rates(0.01, 0.5, 0.1) == 0


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("steps", [1, 4])
def test_power_of_full_batches_is_that_of_the_gaussian_test(noise, steps):
    low = np.array([1e-4, 0.02, 0.3, 0.8])
    exact = stats.norm.cdf(stats.norm.ppf(low) + math.sqrt(steps) / noise)
    found = most_power(noise, low, steps=steps, sampling_rate=1.0)
    assert (found >= exact - 1e-12).all()
    np.testing.assert_allclose(found, exact, atol=2e-3)


@pytest.mark.parametrize(("noise", "rate"), [(0.5, 0.25), (1.0, 0.5)])
def test_power_of_a_sampled_step_is_no_less_than_neyman_and_pearsons(noise, rate):
    cuts = np.linspace(-1, 4, 30)
    without = stats.norm.sf(cuts / noise)
    held = (1 - rate) * without + rate * stats.norm.sf((cuts - 1) / noise)
    there = most_power(noise, without, steps=1, sampling_rate=rate)
    back = most_power(noise, 1 - held, steps=1, sampling_rate=rate)
    assert (there >= held - 1e-9).all()
    assert (back >= 1 - without - 1e-9).all()
    assert there.max() <= 1
    # a little less noise than the claimed is refuted by exact rates
    assert (most_power(noise * 1.3, without, steps=1, sampling_rate=rate) < held).any()


def test_a_gaussian_program_gets_its_own_epsilon():
    for noise in (0.5, 1.0, 2.0):
        with mpmath.workdps(40):  # Balle and Wang 2018, theorem 8, solved anew
            mu = 1 / mpmath.mpf(noise)
            phi = mpmath.ncdf

            def excess(e, mu=mu, phi=phi):
                return phi(mu / 2 - e / mu) - mpmath.e**e * phi(-mu / 2 - e / mu) - 1e-5

            exact = float(
                mpmath.findroot(excess, (0.1, 60), solver="illinois", tol=1e-24, maxsteps=200)
            )
        half = stats.norm.cdf(-0.5 / noise)
        found = epsilon_of_steps(1 - half, half, 1e-5, steps=1, sampling_rate=1.0)
        assert found <= exact * (1 + 1e-6)
        assert found == pytest.approx(exact, rel=0.01)
    assert epsilon_of_steps(0.5, 0.5, 1e-5, steps=1, sampling_rate=1.0) == 0


def test_a_sampled_program_gets_no_more_than_its_epsilon():
    noise, rate, cut = 0.5, 0.25, 1.2
    low = stats.norm.sf(cut / noise)
    high = (1 - rate) * low + rate * stats.norm.sf((cut - 1) / noise)
    own = conversions.epsilon(noise, delta=1e-5, sampling_rate=rate)
    found = epsilon_of_steps(high, low, 1e-5, steps=1, sampling_rate=rate)
    assert 0.6 * own < found <= own
    # as if there were no sampling, the same rates show far less
    assert epsilon_of_steps(high, low, 1e-5, steps=1, sampling_rate=1.0) < found


def test_guesses_give_the_numbers_of_the_paper():
    """Steinke, Nasr and Jagielski 2023: appendix D and figure 11."""
    assert guess_p_value(math.log(3), 75, 100, 100, 0.0) == pytest.approx(0.553, abs=5e-4)
    for counts, delta, printed in (
        ((75, 100, 1000), 1e-4, 0.673),
        ((1439, 1510, 10**5), 1e-5, 2.675),
    ):
        assert abs(epsilon_of_guesses(*counts, delta=delta, confidence=0.95) - printed) < 1e-3


@pytest.mark.parametrize(
    ("right", "guesses", "delta"), [(0, 5, 0.1), (9, 12, 0.01), (30, 30, 1e-3)]
)
def test_the_p_value_is_the_theorems(right, guesses, delta):
    m, epsilon = 40, 0.7
    with mpmath.workdps(40):
        q = 1 / (1 + mpmath.e ** (-mpmath.mpf(epsilon)))

        def tail(v):
            most = range(max(v, 0), guesses + 1)
            return mpmath.fsum(
                mpmath.binomial(guesses, k) * q**k * (1 - q) ** (guesses - k) for k in most
            )

        more = max((tail(right - i) - tail(right)) / i for i in range(1, m + 1))
        exact = min(1, tail(right) + 2 * m * delta * more)
    assert guess_p_value(epsilon, right, guesses, m, delta) == pytest.approx(float(exact), rel=1e-9)


def _above(true, draws, delta, trials=TRIALS, canaries=200, guesses=60, given=None):
    """How often the bound of one run is above `true`: draws gives coins and scores."""
    known, count = {}, 0
    for _ in range(trials):
        coins, scores = draws(canaries)
        order = scores.argsort()
        half = guesses // 2
        right = int(coins[order[-half:]].sum() + (~coins[order[:half]]).sum())
        if right not in known:
            known[right] = epsilon_of_guesses(
                right, guesses, canaries, delta=delta if given is None else given, confidence=0.95
            )
        count += known[right] > true
    return count


def _response(epsilon, source):
    def draws(canaries):
        coins = source.random(canaries) < 0.5
        right = source.random(canaries) < special.expit(epsilon)
        return coins, np.where(coins == right, 1.0, -1.0) + 1e-3 * source.random(canaries)

    return draws


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_one_run_of_randomized_response_keeps_its_level(epsilon):
    count = _above(epsilon, _response(epsilon, np.random.default_rng(1)), 0.0)
    assert 0 < count <= ALLOWED  # close to its level: the theorem is tight here


def test_one_run_shows_a_program_that_leaks_more():
    assert _above(1.0, _response(2.5, np.random.default_rng(2)), 0.0, trials=200) > 190


def test_one_run_of_gaussian_noise_keeps_its_level():
    source, noise, delta = np.random.default_rng(3), 0.7, 1e-5

    def draws(canaries):
        coins = source.random(canaries) < 0.5
        return coins, coins + noise * source.standard_normal(canaries)

    assert _above(conversions.epsilon(noise, delta=delta), draws, delta) <= ALLOWED
    assert _above(0.5, draws, delta, trials=200) > 190


def test_delta_counts():
    """A program that shows everything with probability delta is (0, delta)-private."""
    source, delta = np.random.default_rng(4), 0.15

    def draws(canaries):
        coins = source.random(canaries) < 0.5
        return coins, coins * (source.random() < delta) + 1e-3 * source.random(canaries)

    assert _above(0.0, draws, delta) <= ALLOWED
    assert _above(0.0, draws, delta, given=1e-9) > 2 * ALLOWED  # a wrong, too small delta
