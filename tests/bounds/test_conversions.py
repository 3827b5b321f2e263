"""Epsilon, delta and mu: against dp_accounting, opacus, mpmath and their own inverses."""

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from leakbound.bounds.conversions import delta, epsilon, log_delta, mu


def exact_delta(noise, level, digits=80):
    """Balle and Wang's formula as it stands, with enough digits for its cancellation."""
    with mpmath.workdps(digits):
        m, e = 1 / mpmath.mpf(float(noise)), mpmath.mpf(float(level))
        lower = mpmath.ncdf(-e / m - m / 2)
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * lower


@pytest.mark.parametrize(
    ("noise", "level"),
    [(1.0, 1.0), (0.2, 0.0), (5.0, 7.0), (30.0, 1.0), (0.01, 6000.0), (1e3, 0.03), (1e6, 1e-5)],
)
def test_against_mpmath(noise, level):
    truth = float(mpmath.log(exact_delta(noise, level)))
    assert float(log_delta(1 / noise, level)) == pytest.approx(truth, rel=1e-9, abs=1e-9)
    found = delta(noise, epsilon=level)
    assert found == pytest.approx(float(exact_delta(noise, level)), rel=1e-7)


def noise_for(level, most, steps=1):
    """The noise of full batches, as the inverse of `log_delta`."""
    excess = lambda x: float(log_delta(np.exp(-x), level)) - np.log(most)  # noqa: E731
    return np.exp(optimize.brentq(excess, -60, 60, xtol=1e-300, rtol=1e-15)) * np.sqrt(steps)


def far_delta(noise, level):
    """As phi(u) times a difference of Mills ratios in 60 digits: e^1e9 needs no digits so."""
    with mpmath.workdps(60):
        m, e = 1 / mpmath.mpf(float(noise)), mpmath.mpf(float(level))
        u, v = e / m - m / 2, e / m + m / 2
        ratio = mpmath.erfc(v / mpmath.sqrt(2)) * mpmath.exp(v * v / 2)
        return mpmath.erfc(u / mpmath.sqrt(2)) / 2 - mpmath.exp(-u * u / 2) * ratio / 2


@pytest.mark.parametrize("most", [1e-5, 1e-100, 1e-300])
@pytest.mark.parametrize("level", [1e-3, 1.0, 1e3, 1e6, 1e9])
def test_extremes(level, most):
    """The noise for (epsilon, delta) gives that delta in 60 digits, up to rounding of u."""
    noise = noise_for(level, most)
    assert float(mpmath.log(far_delta(noise, level))) == pytest.approx(np.log(most), rel=1e-9)
    assert epsilon(noise, delta=most) == pytest.approx(level, rel=1e-9)


def test_against_dp_accounting_closed_form():
    module = pytest.importorskip("dp_accounting.pld.privacy_loss_mechanism")
    for noise in (0.3, 1.0, 8.0):
        other = module.GaussianPrivacyLoss(noise)
        for level in (0.0, 0.5, 3.0):
            truth = other.get_delta_for_epsilon(level)
            assert delta(noise, epsilon=level) == pytest.approx(truth, rel=1e-9, abs=1e-15)


def test_against_dp_accounting_noise():
    module = pytest.importorskip("dp_accounting.mechanism_calibration", reason="older release")
    gaussian = pytest.importorskip("dp_accounting.dp_event")
    pld = pytest.importorskip("dp_accounting.pld.pld_privacy_accountant")
    truth = module.calibrate_dp_mechanism(
        pld.PLDAccountant,
        lambda s: gaussian.SelfComposedDpEvent(gaussian.GaussianDpEvent(s), 9),
        2.0,
        1e-6,
        tol=2e-3,
    )
    assert noise_for(2.0, 1e-6, steps=9) == pytest.approx(truth, rel=1e-3)


@pytest.mark.parametrize("neighbors", ["ADD_OR_REMOVE_ONE", "REPLACE_ONE"])
@pytest.mark.parametrize(
    ("noise", "q", "steps"), [(1.0, 0.01, 1000), (0.6, 0.1, 20), (3.0, 0.5, 8), (1.5, 1.0, 3)]
)
def test_sampled_against_dp_accounting(noise, q, steps, neighbors):
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    relation = pytest.importorskip("dp_accounting").NeighboringRelation[neighbors]
    one = pld.from_gaussian_mechanism(
        noise,
        sampling_prob=q,
        value_discretization_interval=3e-4,
        neighboring_relation=relation,
    )
    other = one.self_compose(steps)
    at = {"steps": steps, "sampling_rate": q, "replace": neighbors == "REPLACE_ONE"}
    for level in (0.1, 1.0, 2.0):
        truth = other.get_delta_for_epsilon(level)
        assert delta(noise, epsilon=level, **at) == pytest.approx(truth, rel=1e-3, abs=1e-9)
    for most in (1e-2, 1e-5):
        truth = other.get_epsilon_for_delta(most)
        assert epsilon(noise, delta=most, **at) == pytest.approx(truth, rel=1e-3)


def test_sampled_below_opacus():
    """Renyi accounting is looser, and not by much."""
    rdp = pytest.importorskip("opacus.accountants.analysis.rdp")
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
    spent = rdp.compute_rdp(q=0.01, noise_multiplier=1.0, steps=1000, orders=orders)
    loose, _ = rdp.get_privacy_spent(orders=orders, rdp=spent, delta=1e-5)
    found = epsilon(1.0, delta=1e-5, steps=1000, sampling_rate=0.01)
    assert 0.8 * loose <= found <= loose


def test_limits():
    assert mu(0.0) == np.inf
    assert mu(np.inf) == 0
    assert mu([1.0, 2.0], steps=[4, 9]).tolist() == [2.0, 1.5]
    assert delta([0.0, np.inf], epsilon=1.0).tolist() == [1.0, 0.0]
    assert delta(1.0, epsilon=np.inf) == 0
    assert epsilon([0.0, np.inf, 1e9], delta=1e-5).tolist() == [np.inf, 0.0, 0.0]
    for q in (1.0, 0.1):
        at = {"steps": 10, "sampling_rate": q}
        assert delta([1e-9, 1e9], epsilon=1.0, **at) == pytest.approx([1.0, 0.0], abs=1e-6)
        assert epsilon(1e9, delta=1e-5, **at) == 0
    assert epsilon(1e-5, delta=1e-300) == pytest.approx(5e9, rel=1e-2)


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-2, 1e3), st.floats(0, 1e4), st.floats(1.001, 3))
def test_monotone(noise, level, more):
    at = log_delta(1 / noise, level)
    slack = 1e-9 * (1 + abs(float(at)))
    assert log_delta(1 / (noise * more), level) <= at + slack
    assert log_delta(1 / noise, level * more) <= at + slack


@settings(max_examples=20, deadline=None)
@given(st.floats(0.4, 10), st.floats(1e-3, 0.5), st.integers(1, 60), st.floats(1e-7, 1e-2))
def test_inverses(noise, q, steps, most):
    """Epsilon meets its delta, and sampling never costs more."""
    at = {"steps": steps, "sampling_rate": q}
    found = epsilon(noise, delta=most, **at)
    assert delta(noise, epsilon=found, **at) <= most * (1 + 1e-9)
    assert found <= epsilon(noise, delta=most, steps=steps)
    if found > 1e-3:
        assert delta(noise, epsilon=found * 0.99, **at) > most


def test_refusals():
    with pytest.raises(ValueError, match="delta"):
        epsilon(1.0, delta=0.0)
    with pytest.raises(ValueError, match="epsilon"):
        delta(1.0, epsilon=-1.0)
    with pytest.raises(ValueError, match="sampling_rate"):
        epsilon(1.0, delta=1e-5, sampling_rate=0.0)
    with pytest.raises(ValueError, match="steps"):
        mu(1.0, steps=0)
