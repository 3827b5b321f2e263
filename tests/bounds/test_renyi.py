"""Floors of unbiased attackers hold in simulation; Renyi gammas lie above the exact bound."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leakbound.bounds.composition import visible
from leakbound.bounds.identification import gaussian
from leakbound.bounds.renyi import (
    balle_gamma,
    dfil,
    fisher_bound,
    guo_bound,
    hannun_loss,
    renyi_gamma,
)

SAMPLES = 200_000


@pytest.mark.parametrize("noise", [0.5, 1.0, 2.0, 10.0])
def test_guo_floor_holds(noise):
    """Records in a box, sent centered at clip norm 1 in the corners: rescaling is unbiased."""
    draw = np.random.default_rng(0)
    wide = np.array([1.0, 2.0, 0.5])
    radius = np.linalg.norm(wide / 2)
    record = draw.random(3) * wide
    sent = (record - wide / 2) / radius
    guess = wide / 2 + radius * (sent + noise * draw.standard_normal((SAMPLES, 3)))
    squares = ((guess - record) ** 2).mean(1)
    np.testing.assert_allclose(guess.mean(0), record, atol=5 * noise * radius / np.sqrt(SAMPLES))
    floor = guo_bound(noise, dim=3, diameters=wide)
    assert floor <= squares.mean() + 4 * squares.std() / np.sqrt(SAMPLES)


def test_guo_epsilon_is_that_of_replacing():
    """E_Q (P/Q)^2 of two normals that are two clip norms apart is e^(4 / noise^2)."""
    noise, n = 2.0, 4_000_000
    x = np.random.default_rng(1).standard_normal(n)
    shift = 2 / noise
    ratio = np.exp(2 * (shift * x - shift**2 / 2))
    assert ratio.mean() == pytest.approx(np.exp(4 / noise**2), rel=0.02)
    floor = guo_bound(noise, dim=5, diameters=3.0)
    assert floor == pytest.approx(9 / 4 / (np.exp(4 / noise**2) - 1), rel=1e-12)
    assert guo_bound(noise, dim=5, diameters=3.0, steps=4) == guo_bound(1.0, dim=5, diameters=3.0)


def test_guo_says_nothing_of_biased_attackers():
    """A constant guess in the middle of the box beats the floor at large noise."""
    record = np.random.default_rng(2).random((SAMPLES, 4))
    assert ((record - 0.5) ** 2).mean() < guo_bound(5.0, dim=4, diameters=1.0)


def test_guo_limits():
    assert guo_bound([0.0, 1e-3, np.inf], dim=2, diameters=1.0).tolist() == [0.0, 0.0, np.inf]
    assert guo_bound([0.0, np.inf], dim=2, diameters=0.0).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="diameters"):
        guo_bound(1.0, dim=2, diameters=[1.0, 1.0, 1.0])


def test_fisher_floor_is_reached_by_least_squares():
    draw = np.random.default_rng(3)
    jacobian, noise = draw.standard_normal((7, 4)), 0.3
    information = jacobian.T @ jacobian / noise**2
    record = draw.standard_normal(4)
    sent = record @ jacobian.T + noise * draw.standard_normal((SAMPLES, 7))
    squares = ((sent @ np.linalg.pinv(jacobian).T - record) ** 2).mean(1)
    error = squares.std() / np.sqrt(SAMPLES)
    assert squares.mean() == pytest.approx(fisher_bound(information), abs=4 * error)
    worse = np.linalg.pinv(jacobian[:5])  # unbiased, but with two answers thrown away
    assert ((sent[:, :5] @ worse.T - record) ** 2).mean() > fisher_bound(information) + 4 * error
    assert 1 / dfil(information) ** 2 <= fisher_bound(information)


def test_equality_of_both_floors():
    """One direction as good as the other: 1 / dfil^2 = N / tr(I) is reached as well."""
    information = 9.0 * np.eye(5)
    assert fisher_bound(information) == pytest.approx(1 / 9)
    assert 1 / dfil(information) ** 2 == pytest.approx(5 / np.trace(information))
    assert hannun_loss(information) == pytest.approx(3.0)


def test_clipped_trap_on_its_tangent_space():
    """The answer u + noise xi tells the direction alone; small noise reaches the floor."""
    draw = np.random.default_rng(4)
    n, noise = 6, 1e-3
    record = draw.standard_normal(n)
    radius = np.linalg.norm(record)
    u = record / radius
    information = (np.eye(n) - np.outer(u, u)) / (noise * radius) ** 2
    sent = u + noise * draw.standard_normal((SAMPLES, n))
    guess = radius * (sent - (sent @ u)[:, None] * u)  # the part along the tangent
    squares = (guess**2).sum(1) / n
    floor = fisher_bound(information)
    assert floor == pytest.approx((n - 1) / n * (noise * radius) ** 2, rel=1e-9)
    assert squares.mean() == pytest.approx(floor, rel=0.01)
    assert 1 / dfil(information) ** 2 == pytest.approx(floor, rel=1e-9)


def test_information_adds_over_steps():
    draw = np.random.default_rng(5)
    jacobians = draw.standard_normal((3, 4, 4))
    parts = jacobians.swapaxes(1, 2) @ jacobians
    stacked = jacobians.reshape(12, 4)
    assert fisher_bound(parts.sum(0)) == pytest.approx(fisher_bound(stacked.T @ stacked))
    assert fisher_bound(parts).shape == (3,)
    assert np.all(fisher_bound(parts.sum(0)) <= fisher_bound(parts))
    assert hannun_loss(parts.sum(0)) <= np.sqrt((hannun_loss(parts) ** 2).sum())


def test_no_information():
    assert fisher_bound(np.zeros((3, 3))) == 0  # no direction is released: nothing to floor
    assert dfil(np.zeros((3, 3))) == hannun_loss(np.zeros((3, 3))) == 0


@pytest.mark.parametrize(
    "wrong", [[1.0, 2.0], [[1.0, 2.0]], [[1.0, 2.0], [0.0, 1.0]], [[-1.0, 0], [0, 1]], [[np.nan]]]
)
def test_refuses_what_is_no_information(wrong):
    with pytest.raises(ValueError, match="information"):
        fisher_bound(wrong)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.1, 50), st.floats(1e-9, 0.99), st.integers(1, 50))
def test_renyi_gamma_is_above_the_exact_bound(noise, kappa, steps):
    found = renyi_gamma(noise, kappa=kappa, steps=steps)
    assert found >= gaussian(noise, kappa=kappa, steps=steps) * (1 - 1e-12)
    assert found >= visible(noise, kappa=kappa, steps=steps, sampling_rate=0.3) * (1 - 1e-12)


def test_renyi_gamma_is_the_best_order():
    noise, kappa, steps = 2.0, 1e-3, 3
    orders = np.exp(np.linspace(1e-3, 5, 20001))
    tried = balle_gamma(orders * steps / (2 * noise**2), order=orders, kappa=kappa)
    assert renyi_gamma(noise, kappa=kappa, steps=steps) == pytest.approx(tried.min(), rel=1e-6)


def test_balle_gamma_of_randomized_response():
    """Pure privacy, one bit told with odds of e^epsilon: kappa e^epsilon is reached."""
    e = 1.2
    keep = np.exp(e) / (1 + np.exp(e))
    # the goal "the answer is 1" has a blind success of 1 - keep without the record, keep with it
    assert balle_gamma(e, kappa=1 - keep) == pytest.approx(keep, rel=1e-12)
    assert balle_gamma(0.0, kappa=0.2) == pytest.approx(0.2)
    assert balle_gamma([np.inf, 1e3], kappa=0.2).tolist() == [1.0, 1.0]
    assert balle_gamma(1.0, log_kappa=-1e6) == 0
    assert balle_gamma(np.log(3), order=2.0, kappa=0.03) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="order"):
        balle_gamma(1.0, order=1.0, kappa=0.1)


def test_renyi_limits():
    assert renyi_gamma([0.0, np.inf], kappa=0.1).tolist() == pytest.approx([1.0, 0.1])
    assert renyi_gamma(1.0, kappa=1.0) == 1


def test_scopes():
    for law in (guo_bound, fisher_bound, hannun_loss, dfil):
        assert "unbiased" in law.scope.attackers
        assert "zero image" in law.scope.not_said
    assert balle_gamma.scope.covers == renyi_gamma.scope.covers == "all"
