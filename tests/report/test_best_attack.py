"""S_D against its definition and by Monte Carlo: coverage, and that choosing counts."""

import math

import numpy as np
import pytest
from scipy import stats

from leakbound.report.best_attack import BASELINE, best_attack_error, rounds_of, squared_errors


def _rounds(roots):
    return {seed: [root**2] for seed, root in enumerate(roots)}


def test_the_smallest_mean_is_taken_not_the_smallest_of_each_round():
    a, b, blind = [0.1, 0.5, 0.1], [0.3, 0.2, 0.3], [0.6, 0.6, 0.6]
    found = best_attack_error({"a": _rounds(a), "b": _rounds(b)}, _rounds(blind))
    assert found.attack == "a"
    assert found.rmse == pytest.approx(0.7 / 3)
    assert found.oracle == pytest.approx((0.1 + 0.2 + 0.1) / 3)
    assert found.means == pytest.approx({BASELINE: 0.6, "a": 0.7 / 3, "b": 0.8 / 3})
    assert found.baseline == pytest.approx(0.6)


def test_roots_are_of_batches_and_the_oracle_of_examples():
    """The error of a round is the root of its mean squared error, as the sheet's erratum 2.6."""
    found = best_attack_error(
        {"a": {0: [0.0, 0.08]}, "b": {0: [0.08, 0.02]}},
        {0: [0.5, 0.5]},
    )
    assert found.attack == "a"
    assert found.rmse == pytest.approx(0.2)
    assert found.oracle == pytest.approx(0.1)


def test_an_attack_that_does_not_apply_leaves_the_baseline():
    found = best_attack_error({"a": {0: [0.0001]}}, _rounds([0.3, 0.3, 0.3]))
    assert found.means["a"] == pytest.approx((0.01 + 0.3 + 0.3) / 3)
    found = best_attack_error({"a": _rounds([0.9, 0.9])}, _rounds([0.3, 0.3]))
    assert (found.attack, found.rmse) == (BASELINE, pytest.approx(0.3))


def test_held_out_choices_do_not_see_their_own_round():
    a, b = [0.1, 0.4, 0.4], [0.3, 0.3, 0.3]
    found = best_attack_error({"a": _rounds(a), "b": _rounds(b)}, _rounds([1.0] * 3))
    # round 0: a .8 and b .6 on the others, so b; rounds 1 and 2: a .5 and b .6, so a
    assert found.held_out == pytest.approx({0: 0.3, 1: 0.4, 2: 0.4})


def _covered(means, n, draws, spread, seed):
    """How often the interval covers the smallest mean, and how often that of the winner alone."""
    source = np.random.default_rng(seed)
    hits, naive, bias = 0, 0, 0.0
    for _ in range(draws):
        own = {
            str(i): _rounds(np.abs(source.normal(mean, spread, n))) for i, mean in enumerate(means)
        }
        found = best_attack_error(own, _rounds([9.0] * n))
        hits += found.low <= min(means) <= found.high
        values = np.sqrt([x[0] for x in own[found.attack].values()])
        half = stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / math.sqrt(n)
        naive += abs(values.mean() - min(means)) <= half
        bias += found.rmse - min(means)
    return hits / draws, naive / draws, bias / draws


def test_the_interval_covers_whichever_attack_is_best():
    """Twelve equal attacks: the winner's own interval is too low too often, ours is not."""
    ours, naive, bias = _covered([1.0] * 12, n=5, draws=400, spread=0.1, seed=1)
    assert bias < -0.05 * 0.1, "the smallest of many means lies below the truth"
    assert ours >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 400)
    assert naive < 0.9
    ours, _, _ = _covered([1.0, 1.3, 2.0], n=5, draws=400, spread=0.1, seed=2)
    assert ours >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 400)


def test_one_round_has_no_interval():
    found = best_attack_error({"a": _rounds([0.1])}, _rounds([0.3]))
    assert (found.low, found.high) == (0.0, math.inf)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="baseline has no round"):
        best_attack_error({}, {})
    with pytest.raises(ValueError, match="attack 'a' has 1 examples in round 0, the baseline 2"):
        best_attack_error({"a": {0: [0.1]}}, {0: [0.1, 0.2]})


@pytest.fixture
def one(make_assessment):
    def make(seed, psnr, status="ok"):
        return make_assessment(seed=seed, psnr=[psnr], baseline=[10.0], status=status)

    return make


def test_records_become_rounds(one):
    """A crash leaves its round out; an attack that does not apply leaves the baseline."""
    found = rounds_of(
        {
            "a": [one(0, 20.0), one(1, 20.0), one(2, 30.0)],
            "b": [one(0, 30.0), one(1, 0.0, status="failed"), one(2, 40.0)],
            "c": [one(0, 0.0, status="not_applicable"), one(1, 10.0), one(2, 10.0)],
            "never": [one(seed, 0.0, status="not_applicable") for seed in range(3)],
            "crashed": [one(seed, 0.0, status="failed") for seed in range(3)],
        }
    )
    assert found.left_out == 1
    assert found.missing == ("crashed",), "else a defense looks stronger than it is"
    assert found.baseline == {0: [0.1], 2: [0.1]}
    assert found.attacks == {
        "a": {0: [0.01], 2: [pytest.approx(0.001)]},
        "b": {0: [pytest.approx(0.001)], 2: [pytest.approx(0.0001)]},
        "c": {2: [0.1]},
    }
    assert squared_errors((150.0, None)) == [pytest.approx(1e-15)]
    assert not rounds_of({"a": [one(0, 0.0, status="failed")]}).baseline


def test_the_oracle_is_never_above():
    source = np.random.default_rng(0)
    for _ in range(50):
        tables = {
            name: {seed: list(source.exponential(size=3)) for seed in range(4)} for name in "abc"
        }
        found = best_attack_error(tables, {seed: [9.0] * 3 for seed in range(4)})
        assert found.oracle <= found.rmse
