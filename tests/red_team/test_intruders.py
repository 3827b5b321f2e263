"""Intruders on real data, with the truth among their candidates, against the stated limits."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from leakbound import data
from leakbound.assess.criterion import Criterion
from leakbound.bounds.knowledge import largest_gain
from leakbound.domains.known import known_parts

from .intruders import DOMAINS, Population, by_codeword, by_gradient, stated, statements

SEEDS = {"columns": 120, "halves": 60, "texts": 60, "people": 60}
"""Statements of the slow test: 300."""
QUICK = {"columns": 10, "halves": 6, "texts": 8, "people": 4}


def counts(domain, seeds, **more):
    """How many statements intruders beat, how many limits of strangers they exceed, and how many
    limits of their own say something.
    """
    made = statements(domain, seeds, **more)
    return (
        sum(one.beaten for one in made),
        sum(one.reached.exceeds(one.stranger.bound) for one in made),
        sum(one.intruder.bound < 0.9 for one in made),
    )


@pytest.mark.parametrize("domain", DOMAINS)
def test_limits_of_intruders_hold_and_those_of_strangers_do_not(domain):
    of_intruder, of_stranger, informative = counts(domain, range(QUICK[domain]))
    assert of_intruder == 0
    # Knowing a part beats a limit that ignores it: a verdict must name its attacker.
    assert of_stranger >= 1
    assert informative >= 1


@pytest.mark.slow
@pytest.mark.parametrize("domain", DOMAINS)
def test_many_statements_on_real_data(domain):
    number = SEEDS[domain]
    of_intruder, of_stranger, informative = counts(domain, range(number))
    # Each holds with 95 % confidence over the draw of public examples.
    assert of_intruder <= stats.binom.ppf(0.999, number, 0.05)
    assert of_stranger >= number / 5
    assert informative >= number / 8


def test_a_limit_for_one_example_of_a_person_is_beaten():
    """Borrowers with eight equal rows, of whom one column is known and another of two values not"""
    german = data.load("german")
    names = ("personal_status_and_sex", "telephone")
    kept = known_parts(german.domain, ",".join(names))
    criterion = Criterion.of(kept.part, known=names[0])
    rows = kept.values(german.inputs)
    own = Population("german", rows, criterion, np.full(len(rows), 8))
    right = stated(own, 8.0, np.random.default_rng(0))
    wrong = stated(own, 8.0, np.random.default_rng(0), people=1)
    assert wrong.intruder.bound < right.intruder.bound
    assert wrong.beaten
    assert not right.beaten


@pytest.mark.parametrize(("attack", "least"), [(by_codeword, 0.995), (by_gradient, 0.9)])
def test_two_equally_likely_answers_are_told_apart_as_well_as_any_attacker_can(attack, least):
    """Opposite gradients attain F(1 / 2) = Phi(1 / s); orthogonal ones are a little below."""
    draw = np.random.default_rng(0)
    for noise in (0.5, 1.0, 2.0):
        true = draw.integers(0, 2, 100_000)
        hits = attack(np.eye(2, dtype=bool), np.ones(2), true, noise, draw)
        exact = stats.norm.cdf(1 / noise)
        assert least * exact < hits / len(true) < exact + 0.005


@pytest.mark.parametrize("noise", [0.5, 1.0, 2.0, 5.0])
def test_the_gain_holds_for_any_prior(noise):
    """Two candidates at distance 2 / noise: the largest gain is the total variation."""
    draw = np.random.default_rng(int(10 * noise))
    gain, _ = largest_gain(noise)
    for prior in (0.1, 0.3, 0.5, 0.8):
        own = draw.random(200_000) < prior
        # Opposite gradients would be two units apart; one against none is what a bound allows.
        seen = own + noise * draw.standard_normal(len(own))
        answer = (seen - 0.5) / noise**2 + np.log(prior / (1 - prior)) > 0
        success = float((answer == own).mean())
        assert success - max(prior, 1 - prior) <= gain + 0.005
