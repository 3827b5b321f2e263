"""Shapes of noise and orders of pruning against closed forms, optimizers and linear programs."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import optimize

from leakbound.bounds import GaussianPrior, tight_trace_bound
from leakbound.defenses.allocation import (
    RULES,
    keep_by_rate,
    keep_by_utility,
    prune_order,
    shape,
    with_floor,
    with_rms,
    with_utility,
)

close = torch.testing.assert_close


def _problem(seed, size=40):
    """Sensitivities and squared gradients over some orders of magnitude."""
    draw = np.random.default_rng([7, seed])
    s, g = draw.lognormal(0, 1.2, size), draw.standard_normal(size)
    return torch.from_numpy(s), torch.from_numpy(g**2)


def _trace(s, variance):
    return float((s / variance).sum())


def _optimum(s, price, budget):
    """min Σ s/v at Σ price v = budget, by a general optimizer over log v."""
    s, price = s.numpy(), price.numpy()

    def of(logs):
        v = np.exp(logs - logs.mean())
        v *= budget / (price * v).sum()
        return math.log((s / v).sum())

    start = np.zeros(len(s))
    found = optimize.minimize(of, start, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-9})
    return math.exp(found.fun)


@pytest.mark.parametrize("seed", range(3))
def test_the_utility_rule_leaves_the_least_information_at_equal_u2(seed):
    s, g2 = _problem(seed, 8)
    budget = 0.3**2 * float(g2.sum())
    found = {r: _trace(s, with_utility(shape(s, g2, r), g2, 0.3)) for r in RULES}
    found["isotropic"] = _trace(s, torch.full_like(s, 0.3**2))
    least = float((s * g2).sqrt().sum()) ** 2 / budget
    assert found["utility"] == pytest.approx(least, rel=1e-12)
    assert found["utility"] == pytest.approx(_optimum(s, g2, budget), rel=1e-6)
    for worse in ("energy", "algorithm_1", "isotropic"):
        assert found[worse] > 1.001 * least


@pytest.mark.parametrize("seed", range(3))
def test_the_energy_rule_leaves_the_least_information_at_equal_rms(seed):
    s, g2 = _problem(seed, 8)
    budget = 0.3**2 * len(s)
    found = {r: _trace(s, with_rms(shape(s, g2, r), 0.3)) for r in RULES}
    least = float(s.sqrt().sum()) ** 2 / budget
    assert found["energy"] == pytest.approx(least, rel=1e-12)
    assert found["energy"] == pytest.approx(_optimum(s, torch.ones_like(s), budget), rel=1e-6)
    for worse in (found["utility"], found["algorithm_1"], _trace(s, torch.full_like(s, 0.09))):
        assert worse > 1.001 * least


def _best_neighbor(s, price, variance):
    """The least change of the trace among small steps along random directions at equal cost."""
    draw = torch.from_numpy(np.random.default_rng(3).standard_normal((300, len(s))))
    before, cost = _trace(s, variance), (price * variance).sum()
    moved = variance * torch.exp(1e-3 * draw)
    moved = moved * (cost / (moved * price).sum(1, keepdim=True))
    return float((s / moved).sum(1).min()) / before - 1


def test_no_small_change_improves_what_is_optimal():
    s, g2 = _problem(1)
    ones = torch.ones_like(s)
    assert _best_neighbor(s, g2, shape(s, g2, "utility")) > 0
    assert _best_neighbor(s, ones, shape(s, g2, "energy")) > 0
    for rule, price in (("algorithm_1", g2), ("algorithm_1", ones), ("utility", ones)):
        assert _best_neighbor(s, price, shape(s, g2, rule)) < -1e-5
    assert _best_neighbor(s, g2, shape(s, g2, "energy")) < -1e-5


def test_levels_are_met_exactly():
    s, g2 = _problem(2)
    for rule in RULES:
        assert float(with_rms(shape(s, g2, rule), 0.07).mean()) == pytest.approx(0.07**2, rel=1e-12)
        cost = float((with_utility(shape(s, g2, rule), g2, 0.07) * g2).sum())
        assert cost == pytest.approx(0.07**2 * float(g2.sum()), rel=1e-12)


def test_one_variance_a_tensor_is_the_ratio_of_the_norms():
    s, g2 = _problem(3, 9)
    spans = [(0, 4), (4, 5), (5, 9)]
    for rule, of in {
        "utility": lambda s, g: math.sqrt(s) / math.sqrt(g),
        "energy": lambda s, g: math.sqrt(s),
        "algorithm_1": lambda s, g: s / math.sqrt(g),
    }.items():
        wanted = [of(float(s[a:b].sum()), float(g2[a:b].sum())) for a, b in spans]
        wide = torch.tensor(
            [w for w, (a, b) in zip(wanted, spans, strict=True) for _ in range(a, b)]
        )
        close(shape(s, g2, rule, spans), wide.double())


def test_ratios_are_capped_where_the_gradient_vanishes():
    s = torch.tensor([4.0, 4.0, 1e-6, 4.0, 0.0], dtype=torch.float64)
    g2 = torch.tensor([1.0, 0.0, 0.0, 1e-14, 0.0], dtype=torch.float64)
    close(shape(s, g2, "utility"), torch.tensor([2.0, 1e6, 1e5, 1e6, 0.0]).double())
    close(shape(s, g2, "algorithm_1"), torch.tensor([4.0, 1e6, 1e2, 1e6, 0.0]).double())
    close(shape(s, g2, "energy"), torch.tensor([2.0, 2.0, 1e-3, 2.0, 0.0]).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RULES)
def test_dead_models_get_the_level_that_was_asked_for(rule, dtype):
    some, none = torch.tensor([1.0, 2.0, 3.0], dtype=dtype), torch.zeros(3, dtype=dtype)
    for s, g2 in ((some, none), (none, some), (none, none)):
        ratio = shape(s, g2, rule)
        for variance in (with_rms(ratio, 0.1), with_utility(ratio, g2, 0.1)):
            assert bool(variance.isfinite().all())
        assert float(with_rms(ratio, 0.1).mean()) == pytest.approx(0.01, rel=1e-6)
        cost = float((with_utility(ratio, g2, 0.1) * g2).sum())
        assert cost == pytest.approx(0.01 * float(g2.sum()), rel=1e-6)
    floor = with_floor(shape(none, some, rule), none, 0.1, coordinates=4, prior_variance=1.0)
    assert bool(floor.isfinite().all())


def test_an_unknown_rule_is_named_with_the_closest():
    with pytest.raises(ValueError, match="utility"):
        shape(*_problem(0), "utilty")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("floor", [0.001, 0.05, 0.099])
def test_the_floor_is_reached_exactly(rule, floor):
    s, g2 = _problem(4)
    variance = with_floor(shape(s, g2, rule), s, floor, coordinates=12, prior_variance=0.1)
    prior = GaussianPrior.isotropic(np.zeros(12), 0.1)
    found = tight_trace_bound(_trace(s, variance), prior).value
    assert found == pytest.approx(floor, rel=1e-9)
    # and by hand: the harmonic sum of both informations a pixel
    assert 1 / (_trace(s, variance) / 12 + 10) == pytest.approx(floor, rel=1e-9)
    assert 1 / (_trace(s, 1.1 * variance) / 12 + 10) != pytest.approx(floor, rel=1e-4)


@pytest.mark.parametrize("floor", [0.1, 0.2, 0.0, -1.0, math.nan])
def test_a_floor_out_of_reach_is_refused_with_the_range(floor):
    s, g2 = _problem(4)
    with pytest.raises(ValueError, match=r"above 0 and below 0\.1\b"):
        with_floor(shape(s, g2, "utility"), s, floor, coordinates=12, prior_variance=0.1)


def _knapsack(seed):
    """Random problems: plain, with ties, with zero gradients and zero sensitivities."""
    draw = np.random.default_rng([11, seed])
    size = int(draw.integers(1, 30))
    if seed % 3 == 0:
        s, g2 = draw.lognormal(0, 1, size), draw.standard_normal(size) ** 2
    else:
        s, g2 = draw.integers(0, 4, size).astype(float), draw.integers(0, 4, size).astype(float)
    if seed % 3 == 1:
        g2 = g2 + 1
    return torch.from_numpy(s), torch.from_numpy(g2), float(draw.choice([0.1, 0.5, 0.8, 0.93, 1]))


def _least(s, g2, share):
    found = optimize.linprog(
        s.numpy(), A_ub=-g2.numpy()[None], b_ub=[-share * float(g2.sum())], bounds=(0, 1)
    )
    return found.fun


@pytest.mark.parametrize("seed", range(50))
def test_keeping_by_utility_solves_the_linear_program(seed):
    s, g2, share = _knapsack(seed)
    keep, between, chance = keep_by_utility(prune_order(s, g2), g2, share)
    assert not bool(keep[between])
    assert 0 <= chance <= 1
    part = keep.double()
    part[between] = chance
    assert float((part * g2).sum()) == pytest.approx(share * float(g2.sum()), rel=1e-12, abs=1e-12)
    assert float((part * s).sum()) == pytest.approx(_least(s, g2, share), rel=1e-9, abs=1e-9)


def _kept_trace(s, g2, order, share):
    keep, between, chance = keep_by_utility(order, g2, share)
    return float(s[keep].sum() + chance * s[between])


def test_pruning_the_smallest_first_or_by_magnitude_is_not_optimal():
    """The sheet's example (F7): 27.2 < 29.0 < 63.8, here of other random numbers."""
    for seed in range(20):
        s, g2 = _problem(seed, 100)
        k = prune_order(s, g2)
        best, magnitude, smallest = (_kept_trace(s, g2, o, 0.8) for o in (k, -g2, -k))
        assert best == pytest.approx(_least(s, g2, 0.8), rel=1e-9)
        assert 1.005 * best < magnitude < 0.9 * smallest


def test_zero_gradients_go_first_and_zero_sensitivities_last():
    s, g2 = torch.tensor([1.0, 0.0, 5.0, 0.0]), torch.tensor([2.0, 3.0, 0.0, 0.0])
    assert prune_order(s, g2).tolist() == [0.5, 0.0, math.inf, math.inf]
    tiny = torch.tensor([1e-30], dtype=torch.float64)
    assert float(prune_order(tiny, tiny)) == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exactly_the_floor_of_rate_times_p_goes(dtype):
    for size in (1, 3, 10, 100, 119):
        for percent in range(101):
            order = torch.zeros(size, dtype=dtype)  # all equal: ties must not prune more
            keep = keep_by_rate(order, percent / 100)
            assert int((~keep).sum()) == percent * size // 100
    assert keep_by_rate(torch.tensor([1.0, 1.0, 1.0, 0.0]), 0.5).tolist() == [
        True,
        False,
        False,
        True,
    ]


def test_no_other_mask_keeps_as_much_utility_with_less_sensitivity():
    """What is optimal of a rate: its own point on the frontier, over masks of every size."""
    for seed in range(5):
        s, g2 = _problem(seed, 11)
        masks = torch.tensor(list(itertools.product([False, True], repeat=11))).double()
        utility, trace = masks @ g2, masks @ s
        for rate in (0.2, 0.5, 0.7):
            keep = keep_by_rate(prune_order(s, g2), rate)
            assert int(keep.sum()) == 11 - int(rate * 11)
            own = float(g2[keep].sum())
            least = float(trace[utility >= own * (1 - 1e-12)].min())
            assert float(s[keep].sum()) == pytest.approx(least, rel=1e-12)
            wrong = keep_by_rate(-prune_order(s, g2), rate)
            beaten = trace[utility >= float(g2[wrong].sum()) * (1 - 1e-12)].min()
            assert float(s[wrong].sum()) > 1.01 * float(beaten)


@pytest.mark.parametrize("spans", [None, [(0, 1), (1, 3)]])
@pytest.mark.parametrize("rule", RULES)
def test_slopes_are_finite_and_right(rule, spans):
    """An attacker differentiates the variances, with dead coordinates among them."""
    s = torch.tensor([0.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    g2 = torch.tensor([0.0, 0.5, 4.0], dtype=torch.float64, requires_grad=True)

    def of(s, g2):
        return with_rms(shape(s, g2, rule, spans), 0.1)[1].log()

    slopes = torch.autograd.grad(of(s, g2), (s, g2), materialize_grads=True)
    for which, slope in enumerate(slopes):
        assert bool(slope.isfinite().all())
        for i in (1, 2):
            moved = []
            for sign in (1, -1):
                values = [s.detach().clone(), g2.detach().clone()]
                values[which][i] += sign * 1e-6
                moved.append(float(of(*values)))
            assert float(slope[i]) == pytest.approx((moved[0] - moved[1]) / 2e-6, abs=1e-7)
