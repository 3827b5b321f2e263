"""People with several examples, and batches of near-copies: a matched filter on what is sent."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from leakbound.risk import TrainingSetting
from leakbound.risk.corridor import success_bound

NOISE, TRIALS = 2.0, 20_000


def matched(examples, candidates, trials=TRIALS):
    """How often the likeliest of orthogonal candidates is right, if each example is one of a person
    or a near-copy, and moves the update by the clip norm: at least, with 99.9 % confidence.
    """
    draw = np.random.default_rng(2)
    own = examples / NOISE + draw.standard_normal(trials)
    # The largest of the others has a known law, so one draw stands for all of them.
    others = stats.norm.ppf(draw.random(trials) ** (1 / (candidates - 1)))
    return stats.binomtest(int((own > others).sum()), trials).proportion_ci(0.998).low


@pytest.mark.parametrize("candidates", [20, 1000])
@pytest.mark.parametrize("examples", [1, 2, 8])
def test_no_person_is_found_more_often_than_stated(examples, candidates):
    setting = TrainingSetting(NOISE, dim=784, people=examples)
    bound = float(success_bound(setting, np.log([1 / candidates]))[0])
    found = matched(examples, candidates)
    assert found <= bound
    assert found > 0.5 * bound  # the adversary is real


def test_a_statement_per_example_is_beaten():
    """Eight near-identical images at noise 2: .0862 was stated; a matched filter reaches .729."""
    alone = float(success_bound(TrainingSetting(NOISE, dim=784), np.log([1 / 20]))[0])
    assert matched(8, 20) > 2 * alone
