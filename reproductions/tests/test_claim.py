"""The one rule by which a claim's word follows from intervals."""

import math

import numpy as np
import pytest

from leakbound_reproductions.by_seed import Part, claimed
from leakbound_reproductions.claim import (
    POSITIVE,
    Claim,
    Finding,
    Verdict,
    decide,
    exact,
    finding,
    proportion,
    student,
)

ABOVE = (0.0, math.inf)


def _finding(low, high, *, wider=0.0):
    return Finding("", (low + high) / 2, (low, high), (low - wider, high + wider), ABOVE, 5)


def _claim(*findings, why=""):
    return Claim("9-1", "words", "page 1", "small", findings, why)


@pytest.mark.parametrize(
    ("interval", "word"),
    [
        ((0, 1), "holds"),
        ((-2, -1), "does not hold"),
        ((-1, 1), "undecided"),
        ((-1, 0), "undecided"),
    ],
)
def test_decide(interval, word):
    assert decide(interval, ABOVE) == word


def test_a_region_of_two_ends():
    assert decide((0.9, 1.1), (0.8, 1.2)) == "holds"
    assert decide((0.7, 1.1), (0.8, 1.2)) == "undecided"
    assert decide((1.3, 1.4), (0.8, 1.2)) == "does not hold"
    assert decide((0.5, 1.5), (0.8, 1.2)) == "undecided"


@pytest.mark.parametrize("region", [ABOVE, POSITIVE, (-1.0, 0.0), (-math.inf, 0.0)])
def test_seeds_that_all_tie_say_nothing_of_an_edge(region):
    _, interval = student([0.0, 0.0, 0.0])
    assert decide(interval(0.95), region) == "undecided"
    assert decide((1e-13, 1e-13), region) == "undecided"
    assert decide((0.0, 0.0), (-1.0, 1.0)) == "holds", "equality in a region of both sides"
    assert decide((0.5, 0.5), ABOVE) == "holds"
    assert decide((-0.5, -0.5), ABOVE) == "does not hold"


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_no_number_is_not_averaged(value):
    with pytest.raises(ValueError, match="finite"):
        student([1.0, value])
    parts = [Part("well", [1.0, 2.0], ABOVE), Part("broken", [1.0, value], ABOVE)]
    found = claimed("9-1", "words", "page 1", "small", parts)
    assert found.verdict is Verdict.UNTESTED
    assert found.why == "not finite: broken"


@pytest.mark.parametrize("interval", [(1.0, 0.0), (math.nan, 1.0)])
def test_no_interval_is_refused(interval):
    with pytest.raises(ValueError, match="low, high"):
        decide(interval, ABOVE)


def test_a_claim_needs_every_finding_to_hold_and_one_to_fail():
    assert _claim(_finding(1, 2), _finding(1, 2)).verdict is Verdict.HOLDS
    assert _claim(_finding(1, 2), _finding(-1, 2)).verdict is Verdict.UNDECIDED
    assert _claim(_finding(1, 2), _finding(-2, -1)).verdict is Verdict.FAILS


def test_one_of_many_refutes_only_after_allowing_for_the_others():
    assert _claim(_finding(1, 2), _finding(-2, -0.1, wider=0.5)).verdict is Verdict.UNDECIDED


def test_a_claim_without_findings_says_why():
    assert _claim(why="there is no such data").verdict is Verdict.UNTESTED
    with pytest.raises(ValueError, match="say why"):
        _claim()


def test_true_claims_of_many_findings_are_rarely_refuted():
    """Ten findings at the region's edge, the worst case: 5 % at most, and not nearly never."""
    source = np.random.default_rng(0)
    claims = 2000
    draws = source.standard_normal((claims, 10, 6))
    naive = refuted = 0
    for each in draws:
        made = [
            finding("", *student(list(values)), (0.0, math.inf), n=6, among=10) for values in each
        ]
        refuted += _claim(*made).verdict is Verdict.FAILS
        naive += any(one.verdict is Verdict.FAILS for one in made)
    assert 0.015 < refuted / claims < 0.035  # one side of a two-sided interval: half of 5 %
    assert naive / claims > 0.15


def test_intervals_cover():
    source = np.random.default_rng(1)
    times = np.bincount(source.binomial(40, 0.3, 2000))
    limits = [proportion(hits, 40)[1](0.95) for hits in range(len(times))]
    inside = [low <= 0.3 <= high for low, high in limits]
    assert 0.95 <= np.average(inside, weights=times) < 0.99
    means = source.normal(2.0, 3.0, (2000, 5))
    covered = [low <= 2 <= high for low, high in (student(list(v))[1](0.95) for v in means)]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)
    assert exact(1.0, 0.1)[1](0.5) == (0.9, 1.1)
    with pytest.raises(ValueError, match="at least 2"):
        student([1.0])


@pytest.mark.parametrize("n", [20, 80])
def test_as_many_draws_as_it_needs_decide_it(n):
    """Against draws: with so many, half of the intervals of a mean exclude the limit."""
    values = np.random.default_rng(0).normal(0.5, 2.0, n)
    mean, interval = student((values - values.mean() + 0.5).tolist())
    found = finding("a > 0.4", mean, interval, (0.4, math.inf), n=n, among=1)
    assert found.verdict is Verdict.UNDECIDED
    draws = np.random.default_rng(1).normal(0.5, values.std(ddof=1), (400, found.needed))
    ends = draws.mean(1) - 1.96 * draws.std(1, ddof=1) / found.needed**0.5
    assert 0.4 < (ends > 0.4).mean() < 0.65
    small = np.random.default_rng(1).normal(0.5, values.std(ddof=1), (400, found.needed // 4))
    ends = small.mean(1) - 1.96 * small.std(1, ddof=1) / (found.needed // 4) ** 0.5
    assert (ends > 0.4).mean() < 0.3


def test_what_is_decided_or_on_its_limit_needs_no_number():
    held = Finding("a > 0", 1.0, (0.5, 1.5), (0.4, 1.6), (0.0, math.inf), n=4)
    assert held.needed is None
    tied = Finding("a > 0", 0.0, (-1.0, 1.0), (-1.0, 1.0), (0.0, math.inf), n=4)
    assert tied.needed is None
    below = Finding("0 < a < 1", 0.8, (-0.2, 1.4), (-0.2, 1.4), (0.0, 1.0), n=4)
    assert below.needed == 36
