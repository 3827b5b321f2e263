"""The two edges: their order, their slopes, the numbers of the sheets, and their words."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from leakbound.bounds import conversions
from leakbound.risk.corridor import SPHERE, TrainingSetting, corridor, epsilon

from ..bounds.prior_attacks import KnownNorm

DIMS = (1, 2, 4, 16, 64, 784, 3072)
NOISES = np.logspace(-2, np.log10(5), 7)
ERRORS = np.array([1e-3, 0.05, 0.3, 0.5, 0.8, 0.99, 1.5])
CLOSE = 1 + 1e-7


def edges(noise, dim, errors=ERRORS, **settings):
    return corridor(TrainingSetting(float(noise), dim=dim, **settings), np.asarray(errors) / dim)


@pytest.mark.parametrize("dim", DIMS)
def test_order_and_slopes_of_full_batches(dim):
    for steps, seen in itertools.product((1, 10, 1000), ("hidden", "visible")):
        grid = [edges(n, dim, steps=steps, participation=seen) for n in NOISES]
        lower, upper = (np.stack([getattr(g, e) for g in grid]) for e in ("attained", "bound"))
        assert (lower <= upper).all()
        for edge in (lower, upper):
            assert (edge[1:] <= edge[:-1] * CLOSE).all()  # more noise
            assert (edge[:, 1:] * CLOSE >= edge[:, :-1]).all()  # larger errors
            assert (edge[:, -1] == 1).all()  # the zero image reaches it


@pytest.mark.parametrize("dim", [1, 2, 16, 784, pytest.param(3072, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seen", ["hidden", "visible"])
def test_order_and_slopes_of_sampled_steps(dim, seen):
    shape = (3, 2, 3)  # noise, rate, steps
    found = {"attained": [], "bound": []}
    for noise, q, steps in itertools.product((0.2, 1.0, 5.0), (0.01, 0.1), (1, 10, 1000)):
        got = edges(noise, dim, steps=steps, sampling_rate=q, participation=seen)
        assert (got.attained <= got.bound).all(), (noise, q, steps)
        found["attained"].append(got.attained)
        found["bound"].append(got.bound)
    for name, values in found.items():
        grid = np.reshape(values, (*shape, len(ERRORS)))
        loose = 1 + 1e-3 if name == "bound" and seen == "hidden" else CLOSE  # a grid of losses
        assert (grid[1:] <= grid[:-1] * loose).all(), name
        assert (grid[:, 1:] * loose >= grid[:, :-1]).all(), name
        if (name, seen) != ("attained", "hidden"):  # adding up all steps also adds up empty ones
            assert (grid[:, :, 1:] * loose >= grid[:, :, :-1]).all(), name


@settings(max_examples=40, deadline=None)
@given(
    st.floats(0.05, 5),
    st.sampled_from(DIMS[:5]),
    st.floats(0.01, 0.99),
    st.floats(0.02, 1),
    st.integers(1, 30),
)
def test_visible_is_above_hidden(noise, dim, error, q, steps):
    given_ = {"sampling_rate": q, "steps": steps}
    hidden = edges(noise, dim, [error], participation="hidden", **given_)
    seen = edges(noise, dim, [error], participation="visible", **given_)
    assert hidden.bound <= seen.bound * CLOSE
    assert hidden.attained <= seen.attained * CLOSE
    assert hidden.attained <= hidden.bound
    assert seen.attained <= seen.bound


def test_numbers_of_the_sheet():
    found = edges(0.5, 16, [0.5, 0.9])
    assert found.bound.round(3).tolist() == [0.120, 0.777]
    assert found.attained.round(3).tolist() == [0.068, 0.762]
    unseen = {"participation": "hidden"}
    hidden = edges(0.3, 16, [0.6], steps=10, sampling_rate=0.05, **unseen)
    assert (hidden.attained[0], hidden.bound[0]) == pytest.approx((0.034, 0.219), abs=6e-4)
    hidden = edges(0.4, 2, [0.5], steps=20, sampling_rate=0.02, **unseen)
    assert (hidden.attained[0], hidden.bound[0]) == pytest.approx((0.321, 0.418), abs=6e-4)
    seen = edges(0.4, 2, [0.5], steps=20, sampling_rate=0.02, participation="visible")
    assert seen.attained[0] == pytest.approx(0.478, abs=6e-4)  # not to be mixed with hidden edges
    assert seen.bound[0] >= seen.attained[0] > hidden.bound[0]


def test_width_of_full_batches():
    """Where the upper edge is from .01 to .5; the figure of docs/risk.md."""
    found = np.concatenate(
        [_within(edges(n, dim, np.linspace(0.05, 0.99, 20))) for dim in DIMS for n in NOISES]
    )
    assert len(found) > 30
    assert (found >= 1).all()


def _within(found):
    inside = (found.bound >= 0.01) & (found.bound <= 0.5)
    return found.bound[inside] / found.attained[inside]


def test_scopes_say_who_and_whose():
    hidden, seen = (edges(1, 4, participation=p) for p in ("hidden", "visible"))
    assert "do not see which steps" in hidden.bound_scope.attackers
    assert "who see which steps" in seen.bound_scope.attackers
    for found in (hidden, seen):
        assert found.bound_scope.covers == "all"
        assert found.attained_scope.covers == "attained"
        assert SPHERE in found.bound_scope.prior
        assert "sphere" in found.attained_scope.prior
    other = corridor(TrainingSetting(1.0, dim=4), 0.1, prior=KnownNorm(4))
    assert KnownNorm(4).name in other.bound_scope.prior
    assert other.bound == corridor(TrainingSetting(1.0, dim=4), 0.1).bound


def test_few_rows_attain_less_and_bound_the_same():
    plain = edges(0.5, 16, [0.5])
    few = edges(0.5, 16, [0.5], clip_norm=5.0, rows=1)
    assert few.attained < plain.attained
    assert few.bound == plain.bound


@pytest.mark.parametrize("noise", [0.0, np.inf])
@pytest.mark.parametrize("seen", ["hidden", "visible"])
def test_limits(noise, seen):
    found = edges(noise, 4, [0.5], steps=3, sampling_rate=0.5, participation=seen)
    blind = float(np.exp(found.log_kappa[0]))
    expected = blind if noise else 1 - 0.5**3 * (1 - blind)
    assert found.bound == pytest.approx(expected, rel=1e-9)
    assert found.attained <= found.bound
    assert edges(1.0, 4, [1e-300]).attained.tolist() == [0.0]


def test_epsilon_of_visible_steps():
    """Against a sum written out with other functions; and above the one for hidden steps."""
    noise, q, steps, delta = 0.8, 0.1, 12, 1e-5
    seen = TrainingSetting(noise, dim=4, steps=steps, sampling_rate=q, participation="visible")
    hits = stats.binom(steps, q)

    def excess(level):
        total = 0.0
        for k in range(1, steps + 1):
            mu = k**0.5 / noise
            lost = stats.norm.cdf(mu / 2 - level / mu)
            kept = np.exp(level + stats.norm.logcdf(-mu / 2 - level / mu))
            total += hits.pmf(k) * (lost - kept)
        return total - delta

    assert epsilon(seen, delta) == pytest.approx(optimize.brentq(excess, 0, 200), rel=1e-6)
    hidden = TrainingSetting(noise, dim=4, steps=steps, sampling_rate=q, participation="hidden")
    assert epsilon(hidden, delta) < epsilon(seen, delta)
    full = TrainingSetting(noise, dim=4, steps=steps, participation="visible")
    assert epsilon(full, delta) == conversions.epsilon(noise, delta=delta, steps=steps)
    bare = TrainingSetting(0.0, dim=4, steps=2, sampling_rate=1e-4, participation="visible")
    assert (epsilon(bare, 1e-5), epsilon(bare, 1e-3)) == (np.inf, 0.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise_multiplier", -1.0),
        ("noise_multiplier", float("nan")),
        ("noise_multiplier", [1.0, 2.0]),
        ("dim", 0),
        ("dim", 2.5),
        ("dim", 10**400),
        ("norm", 0.0),
        ("norm", float("inf")),
        ("steps", 0),
        ("steps", 2**31),
        ("sampling_rate", 0.0),
        ("sampling_rate", 1.1),
        ("participation", "seen"),
        ("rows", 3),
    ],
)
def test_bad_settings(name, value):
    good = {"noise_multiplier": 1.0, "dim": 4}
    with pytest.raises(ValueError, match=name) as caught:
        TrainingSetting(**(good | {name: value}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("eta", [0.0, -1.0, float("nan"), "0.1"])
def test_bad_eta(eta):
    with pytest.raises(ValueError, match="eta is"):
        corridor(TrainingSetting(1.0, dim=4), eta)
