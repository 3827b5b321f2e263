"""Families of defenses at equal loss, on made-up curves whose difference is known."""

import numpy as np
import pytest

from leakbound._util.intervals import student_reach
from leakbound.report.equal_loss import at_equal_loss, at_loss, both_at_equal_loss

LOSSES = (1.0, 2.0, 3.0, 4.0)


def _family(errors, *, losses=LOSSES, seeds=6, spread=0.0, stream=0):
    noise = np.random.default_rng(stream).normal(size=(len(losses), seeds)) * spread
    return [
        (dict.fromkeys(range(seeds), loss), {s: error + row[s] for s in range(seeds)})
        for loss, error, row in zip(losses, errors, noise, strict=True)
    ]


def test_curves_are_compared_where_both_have_losses():
    ours = _family((0.0, 1.0, 2.0, 3.0))
    theirs = _family((0.0, 0.5, 1.0, 1.5), losses=(3.0, 4.0, 5.0, 6.0))
    # from 3 to 4 ours rises from 2 to 3, theirs from 0 to 0.5
    assert at_equal_loss(ours, theirs) == pytest.approx([2.25] * 6)


def test_a_level_that_costs_more_than_a_better_one_counts_for_nothing():
    useless = _family((0.0, 3.0, 1.0, 3.0))
    assert at_equal_loss(useless, _family((0.0, 3.0, 3.0, 3.0))) == pytest.approx([0.0] * 6)


@pytest.mark.parametrize(
    "theirs",
    [
        _family((0.0, 1.0, 2.0, 3.0), losses=(5.0, 6.0, 7.0, 8.0)),
        _family((0.0, 1.0, 2.0, 3.0), losses=(4.0, 6.0, 7.0, 8.0)),
        _family((1.0,), losses=(2.0,)),
        _family((0.0, 1.0, 2.0, 3.0), seeds=1),
        [],
    ],
    ids=["apart", "one loss", "one level", "one seed", "nothing"],
)
def test_what_does_not_meet_is_not_compared(theirs):
    assert at_equal_loss(_family((0.0, 1.0, 2.0, 3.0)), theirs) == []


def test_too_little_in_common_is_not_compared():
    ours, theirs = _family((0.0, 1.0, 2.0, 3.0)), _family((0.0, 1.0), losses=(1.0, 1.5))
    assert at_equal_loss(ours, theirs, least=0.4)
    assert at_equal_loss(ours, theirs, least=0.5) == []


def _excludes(values, truth):
    """Whether the 95 % interval lies above a value, and whether below."""
    mean, reach = np.mean(values), student_reach(values, 0.025)
    return mean - reach > truth, mean + reach < truth


def test_a_noisier_family_is_not_favored():
    """Both have one true curve, flat, the worst case: the largest of seeds' errors says 57 %."""
    above = below = 0
    for run in range(300):
        ours = _family((1.0,) * 4, seeds=24, spread=2.0, stream=(1, run))
        theirs = _family((1.0,) * 4, seeds=24, spread=1.0, stream=(2, run))
        one, other = _excludes(at_equal_loss(ours, theirs), 0.0)
        above += one
        below += other
    assert above / 300 < 0.15
    assert below / 300 < 0.10


def test_a_true_difference_is_found():
    found = 0
    for run in range(50):
        ours = _family((1.0, 2.0, 3.0, 4.0), seeds=24, spread=1.0, stream=(3, run))
        theirs = _family((0.0, 1.0, 2.0, 3.0), seeds=24, spread=1.0, stream=(4, run))
        found += _excludes(at_equal_loss(ours, theirs), 0.0)[0]
    assert found >= 45


def _largest(points, at):
    """By definition: at a level the largest error of those that cost no more, linear in between."""

    def best(loss):
        return max(error for other, error in points if other <= loss)

    below = max(loss for loss, _ in points if loss <= at)
    above = min(loss for loss, _ in points if loss >= at)
    share = (at - below) / (above - below) if above > below else 0.0
    return best(below) + share * (best(above) - best(below))


def test_interpolation_is_the_largest_error_at_no_higher_cost():
    for run in range(40):
        rng = np.random.default_rng(run)
        drawn = [rng.permutation(np.arange(1.0, 10.0))[:4] for _ in range(2)]
        errors = [rng.permutation(np.arange(20.0))[:4] for _ in range(2)]
        both = [sorted(zip(*pair, strict=True)) for pair in zip(drawn, errors, strict=True)]
        low = max(points[0][0] for points in both)
        high = min(points[-1][0] for points in both)
        if low >= high:
            continue
        families = [
            [(dict.fromkeys(range(3), a), dict.fromkeys(range(3), b)) for a, b in points]
            for points in both
        ]
        grid = np.linspace(low, high, 20)
        wanted = [np.mean([_largest(points, at) for at in grid]) for points in both]
        got = both_at_equal_loss(*families)
        assert np.mean(got, 1) == pytest.approx(wanted)
        at = (low + high) / 2
        assert at_loss(families[0], at) == pytest.approx([_largest(both[0], at)] * 3)


def test_nothing_is_read_beyond_the_levels():
    family = _family((0.0, 1.0, 2.0, 3.0))
    assert at_loss(family, 0.9) == at_loss(family, 4.1) == []
    assert at_loss(family[:1], 1.0) == at_loss(_family((0.0, 1.0), losses=(1, 2), seeds=1), 1) == []


def test_equal_families_with_levels_that_buy_nothing_are_seldom_told_apart():
    """Noise decides which of them raises the error: a curve through those alone says 43 %."""
    told = 0
    for run in range(200):
        rng = np.random.default_rng([11, run])
        errors = (1.0, 1.0, 1.0, 10.0)
        both = [
            [
                (dict.fromkeys(range(10), loss), dict(enumerate(error * (1 + 0.1 * draws))))
                for loss, error, draws in zip(
                    (0, 2, 10, 30), errors, rng.normal(size=(4, 10)), strict=True
                )
            ]
            for _ in range(2)
        ]
        told += any(_excludes(at_equal_loss(*both), 0.0))
    # 5 % of 200 is 10; more than 20 has a probability of 0.1 %
    assert told <= 20


COSTS = (0.0, 4.0, 15.0, 40.0)
OURS = (0.02, 0.06, 0.12, 0.2)
THEIRS = (0.02, 0.03, 0.08, 0.15)


def _noisy(costs, errors, seeds, rng):
    """Costs with normal, errors with skewed scatter that depends on it; both grow with the cost."""
    levels = []
    for cost, error in zip(costs, errors, strict=True):
        shift = rng.normal(size=seeds)
        skew = np.exp(0.3 * (0.5 * shift + 0.75**0.5 * rng.normal(size=seeds)) - 0.045)
        paid = cost + (cost > 0) * (0.3 + cost / 20) * shift
        levels.append((dict(enumerate(paid)), dict(enumerate(error * skew))))
    return levels


@pytest.mark.parametrize("seeds", [3, 10])
def test_intervals_cover_and_reject_a_wrong_curve(seeds):
    """95 % of 300 runs is 285; that below 274 has a probability of 0.4 %."""
    grid = np.linspace(0, 40, 20)
    ours, theirs = (np.interp(grid, COSTS, errors).mean() for errors in (OURS, THEIRS))
    at_ten = float(np.interp(10, COSTS, OURS))
    right = [0, 0]
    wrong = [0, 0]
    for run in range(300):
        rng = np.random.default_rng([seeds, run])
        own = _noisy(COSTS, OURS, seeds, rng)
        gap = at_equal_loss(own, _noisy(COSTS, THEIRS, seeds, rng))
        for place, (values, truth) in enumerate(((gap, ours - theirs), (at_loss(own, 10), at_ten))):
            right[place] += not any(_excludes(values, truth))
            # A curve that is twice as high
            wrong[place] += not any(_excludes(values, 2 * truth + 0.02))
    assert min(right) >= 274
    assert max(wrong) < {3: 240, 10: 60}[seeds]
