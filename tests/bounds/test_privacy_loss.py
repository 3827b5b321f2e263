"""The composed privacy loss: never below the truth, and close above it."""

import mpmath
import numpy as np
import pytest
from scipy import integrate, stats

from leakbound.bounds import privacy_loss
from leakbound.bounds.identification import gaussian
from leakbound.bounds.privacy_loss import CACHE, curve

LOG_KAPPA = np.log([1e-8, 1e-6, 1e-3, 0.1, 0.5, 0.9])


@pytest.mark.parametrize("noise", [0.05, 0.3, 1.0, 5.0, 100.0])
@pytest.mark.parametrize("steps", [1, 10, 1000])
def test_full_batch(noise, steps):
    """At a rate of 1 the curve itself is the closed form: above it, by 1e-4 at the most."""
    found = curve(noise, 1.0, steps)
    truth = gaussian(noise, log_kappa=LOG_KAPPA, steps=steps)
    over = found.gamma(LOG_KAPPA) - truth
    assert np.all(over >= 0)
    assert np.all(over <= 1e-4)
    assert np.all(over <= 1e-3 * truth + found.slack)


@pytest.mark.parametrize("pair", ["remove", "add", "replace"])
@pytest.mark.parametrize(("noise", "q"), [(1.0, 0.1), (0.5, 0.01), (3.0, 0.7), (0.2, 0.3)])
def test_one_step_against_an_integral(noise, q, pair):
    """delta = integral of (P - e^epsilon Q)+ over the output."""
    found = curve(noise, q, 1, pair)
    levels = np.array([-0.1, 0.0, 0.01, 0.5, 2.0])

    def gap(x, level):
        out = stats.norm.pdf(x)
        record = (1 - q) * out + q * stats.norm.pdf(x - 1 / noise)
        opposite = (1 - q) * out + q * stats.norm.pdf(x + 1 / noise)
        both = {"remove": (record, out), "add": (out, record), "replace": (record, opposite)}
        p, other = both[pair]
        return max(0.0, p - np.exp(level) * other)

    for level, value in zip(levels, found.at(levels), strict=True):
        truth = integrate.quad(
            *(gap, -12 - 1 / noise, 12 + 1 / noise),
            **{"args": (level,), "limit": 2000, "epsabs": 1e-12, "points": [0, 1 / noise]},
        )[0]
        assert truth - 1e-10 <= value <= truth + 2e-5


@pytest.mark.parametrize("q", [0.05, 0.5, 0.95])
def test_no_two_clipped_gradients_are_easier_to_tell_apart_than_opposite_ones(q):
    """By sums over a plane; the noise is 1 and the clip norm s."""
    s, step, levels = 1.5, 0.05, np.array([-1.0, 0.0, 0.05, 1.0, 2.0])
    x = np.stack(np.meshgrid(*[np.arange(-7, 7, step)] * 2))

    def law(*center):
        at = [((x - np.reshape(c, (2, 1, 1))) ** 2).sum(0) / 2 for c in ((0, 0), center)]
        return ((1 - q) * np.exp(-at[0]) + q * np.exp(-at[1])) / (2 * np.pi)

    def apart(u, v):
        gap = law(*u) - np.exp(levels)[:, None, None] * law(*v)
        return np.maximum(0, gap).sum((1, 2)) * step**2

    whole = apart((s, 0), (-s, 0))
    assert whole == pytest.approx(curve(1 / s, q, 1, "replace").at(levels), abs=3e-4)
    draw = np.random.default_rng(1)
    for pair in draw.normal(size=(30, 2, 2)):
        u, v = (s * draw.random() ** 0.25 * one / np.linalg.norm(one) for one in pair)
        assert np.all(apart(u, v) <= whole + 1e-6)
    for other in ((0, s), (-0.9 * s, 0), (0, 0)):
        assert apart((s, 0), other)[1] < whole[1] - 1e-4


def test_two_steps_against_an_integral():
    noise, q, level = 0.8, 0.2, 0.3
    x = np.linspace(-11, 13, 4001)
    out = stats.norm.pdf(x)
    record = (1 - q) * out + q * stats.norm.pdf(x - 1 / noise)
    gap = np.maximum(0, np.outer(record, record) - np.exp(level) * np.outer(out, out))
    truth = gap.sum() * (x[1] - x[0]) ** 2
    value = float(curve(noise, q, 2).at(np.array(level)))
    assert truth - 1e-6 <= value <= truth + 1e-5


def test_slack_covers_the_transform():
    """The error of the Fourier power, against repeated exact-order sums in long double."""
    draw = np.random.default_rng(0)
    mass = draw.random(40)
    mass /= mass.sum()
    for steps in (7, 64, 500):
        exact = np.ones(1, np.longdouble)
        for _ in range(steps):
            exact = np.convolve(exact, mass.astype(np.longdouble))
        found, slack = privacy_loss._power([(mass, -5)], [steps], -5 * steps, 34 * steps)
        error = float(np.abs(found - exact).sum())
        assert error <= slack <= 1e-9


def test_kinds_of_steps_are_convolved():
    """Two kinds together, against repeated sums in long double; the window holds all of it."""
    draw = np.random.default_rng(1)
    laws, counts, exact = [], [6, 11], np.ones(1, np.longdouble)
    for count, (length, lowest) in zip(counts, ((30, -5), (17, 3)), strict=True):
        mass = draw.random(length)
        mass /= mass.sum()
        laws.append((mass, lowest))
        for _ in range(count):
            exact = np.convolve(exact, mass.astype(np.longdouble))
    first = 6 * -5 + 11 * 3
    found, slack = privacy_loss._power(laws, counts, first, first + len(exact) - 1)
    assert float(np.abs(found - exact).sum()) <= slack <= 1e-9
    low, high = privacy_loss._window(laws, counts, 0.5)
    most = 1.01 * np.exp(-privacy_loss.TAIL)
    assert exact[: max(0, low - first)].sum() <= most
    assert exact[high - first + 1 :].sum() <= most


def test_wraps_only_what_is_negligible():
    """A window that cuts the ends keeps the mass inside it in its place."""
    mass = stats.binom.pmf(np.arange(11), 10, 0.3)
    found, _ = privacy_loss._power([(mass, 2)], [50], 50 * 2 + 60, 50 * 2 + 240)
    np.testing.assert_allclose(found, stats.binom.pmf(np.arange(60, 241), 500, 0.3), atol=1e-14)


@pytest.mark.parametrize("steps", [1, 30, 3000])
def test_window_holds_the_mass(steps):
    mass = stats.binom.pmf(np.arange(11), 10, 0.3)
    first, last = privacy_loss._window([(mass, -4)], [steps], 0.5)
    law = stats.binom(10 * steps, 0.3)
    low, high = first + 4 * steps, last + 4 * steps
    most = 1.01 * np.exp(-privacy_loss.TAIL)
    assert law.cdf(low - 1) <= most
    assert law.sf(high) <= most
    assert last - first <= 30 * law.std() + 70


def test_finer_grids_only_lower_it(monkeypatch):
    coarse, fine = [], []
    for resolution, kept in ((1e-3, coarse), (1e-5, fine)):
        monkeypatch.setattr(privacy_loss, "RESOLUTION", resolution)
        CACHE.clear()
        for noise in (0.5, 1.0, 2.0):
            kept.append(curve(noise, 0.02, 100).gamma(LOG_KAPPA))
    CACHE.clear()
    assert np.all(np.array(fine) <= np.array(coarse) * (1 + 1e-9))
    np.testing.assert_allclose(fine, coarse, rtol=5e-3, atol=1e-9)


def test_too_coarse_is_refused(monkeypatch):
    assert curve(1e-4, 0.1, 1000) is None
    monkeypatch.setattr(privacy_loss, "POINTS", 100)
    CACHE.clear()
    assert curve(0.5, 0.1, 10**6) is None
    CACHE.clear()


def test_beyond_the_grid():
    found = curve(1.0, 0.1, 10)
    assert found.at(np.array([-1e9]))[0] == 1
    assert 0 < found.at(np.array([1e9]))[0] < 1e-10


@pytest.mark.parametrize("tail", [3.0, 8.0])
def test_cut_tails_are_added(monkeypatch, tail):
    """Cut far too early, it stays above the truth: what is cut counts as an infinite loss."""
    monkeypatch.setattr(privacy_loss, "TAIL", tail)
    CACHE.clear()
    for steps in (1, 10):
        over = curve(1.0, 1.0, steps).gamma(LOG_KAPPA) - gaussian(
            1.0, log_kappa=LOG_KAPPA, steps=steps
        )
        assert np.all(over >= 0)
        assert np.all(over <= 2 * np.exp(-tail))
    CACHE.clear()


@pytest.mark.parametrize(("noise", "q"), [(1.0, 0.1), (0.3, 1.0), (20.0, 0.5)])
def test_grid_of_one_step(noise, q):
    """No mass is lost, and at a grid point delta is the true one or, by rounding, a little more."""
    interval, edges = 0.05 / noise, (-60, 400)
    mass, beyond = privacy_loss.one_step(1 / noise, q, interval, edges, "remove")
    assert mass.sum() + beyond == pytest.approx(1, abs=1e-13)
    short, cut = privacy_loss.one_step(1 / noise, q, interval, (-60, 40), "remove")
    assert short.sum() + cut == pytest.approx(1, abs=1e-13)
    assert cut > 1e-8
    delta = privacy_loss.hockey_stick(mass, beyond, interval)
    for place in range(0, 160, 7):
        with mpmath.workdps(50):
            m, rate = 1 / mpmath.mpf(noise), mpmath.mpf(q)
            odds = (mpmath.exp((place - 60) * mpmath.mpf(interval)) - 1 + rate) / rate
            if odds <= 0:
                continue
            x = mpmath.log(odds) / m + m / 2
            truth = float(rate * (mpmath.ncdf(m - x) - odds * mpmath.ncdf(-x)))
        assert truth <= delta[place] <= truth * (1 + 1e-9)


def test_coarser_laws_err_upwards():
    """The mass and the mean stay; every moment generating function rises, by little."""
    mass = stats.binom.pmf(np.arange(80_001), 80_000, 0.5)
    places, weights = privacy_loss._coarser(mass, -7)
    assert len(places) <= 40_001
    assert weights.sum() == pytest.approx(mass.sum(), rel=1e-12)
    true = np.arange(80_001) - 7
    assert places @ weights == pytest.approx(true @ mass, rel=1e-12)
    for tilt in (-0.015, 0.01, 0.015):
        found, exact = (np.exp(tilt * (p - 4e4)) @ w for p, w in ((places, weights), (true, mass)))
        assert exact * (1 - 1e-10) <= found <= exact * 1.01
