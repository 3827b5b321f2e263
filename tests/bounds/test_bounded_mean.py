"""Limits on means of bounded values: they cover for laws on which a normal limit does not."""

import numpy as np
import pytest
from scipy import stats

from leakbound.bounds.bounded_mean import lower_limit, upper_limit

LAWS = {
    "Bernoulli .1": (stats.bernoulli(0.1), 0.1),
    "Bernoulli .5": (stats.bernoulli(0.5), 0.5),
    "Bernoulli .97": (stats.bernoulli(0.97), 0.97),
    "beta 10, 10": (stats.beta(10, 10), 0.5),
    "beta .1, .3": (stats.beta(0.1, 0.3), 0.25),
}


def misses(law, mean, number, confidence, limit=lower_limit, repeats=400):
    """In how many of the repeats the limit is above the mean, and the mean limit."""
    values = law.rvs((repeats, number), random_state=np.random.default_rng(number)).astype(float)
    found = np.array([limit(row, 0.0, confidence=confidence) for row in values])
    return int((found > mean).sum()), found.mean()


def rejected(count, level, repeats=400):
    """Whether so many misses contradict a limit that misses at `level` at most."""
    return stats.binom.sf(count - 1, repeats, level) < 1e-4


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("number", [8, 64])
def test_the_limit_covers_and_is_near(name, number):
    law, mean = LAWS[name]
    count, limit = misses(law, mean, number, 0.9)
    assert not rejected(count, 0.1)
    assert 0 <= limit < mean
    if number == 64:
        assert mean - limit < 3.2 * law.std() / 8 + 0.06


def test_a_limit_that_takes_the_mean_as_normal_does_not_cover():
    """The test rejects what misses too often: values of which few draws show the low ones."""

    def normal(values, low, confidence):
        reach = stats.t.ppf(confidence, len(values) - 1) * values.std(ddof=1)
        return values.mean() - reach / len(values) ** 0.5

    law = stats.bernoulli(0.97)
    count, _ = misses(law, 0.97, 64, 0.99, normal)
    assert rejected(count, 0.01)
    count, _ = misses(law, 0.97, 64, 0.99)
    assert not rejected(count, 0.01)
    count, _ = misses(stats.bernoulli(0.5), 0.5, 64, 0.5)
    assert not rejected(count, 0.5)
    assert rejected(count, 0.01)  # a wrong level: 50 % taken for 99 %


def test_two_values_far_apart():
    """One value in 200 is -10 and takes the mean from 0.5 to 0.4475."""
    generator, mean = np.random.default_rng(0), 0.995 * 0.5 - 0.05
    values = np.where(generator.random((400, 100)) < 0.005, -10.0, 0.5)
    found = np.array([lower_limit(row, -10.0, confidence=0.95) for row in values])
    assert not rejected((found > mean).sum(), 0.05)
    higher = np.array([lower_limit(row, -1.0) for row in values if row.min() > 0])
    assert (higher > mean).sum() == 0


def test_ends_that_differ_from_value_to_value():
    """Each value's stake is set by its own end, chosen from the values before it."""
    generator, over = np.random.default_rng(1), 0
    for _ in range(400):
        end, values, ends = -1.0, [], []
        for _ in range(40):
            values.append(end * (1 if generator.random() < 0.5 else -1))  # mean 0 whatever `end`
            ends.append(end)
            end = -0.3 if values[-1] > 0 else -1.0
        over += lower_limit(values, ends, confidence=0.9) > 0
    assert not rejected(over, 0.1)
    assert over > 0


def test_closed_forms():
    """n equal values lie 1 - (share of the level) of their distance to the end below."""
    assert lower_limit([0.3], 0.0) == pytest.approx(0.003)
    assert lower_limit([0.0, 0.0], 0.0) == 0
    sure = lower_limit([0.5] * 64, 0.0)
    assert 0.5 * (0.01 / 4) ** (1 / 64) < sure < 0.5 * 0.01 ** (1 / 64)
    assert lower_limit([2.5] * 64, 2.0) == pytest.approx(2 + sure)
    assert lower_limit([5.0] * 64, 0.0) == pytest.approx(10 * sure)
    assert upper_limit([0.5] * 64, 1.0) == pytest.approx(1 - sure)
    assert lower_limit([0.2, 0.9, 0.4], 0.0) == lower_limit([0.9, 0.4, 0.2], 0.0)


@pytest.mark.parametrize(
    ("match", "call"),
    [
        ("below its end", lambda: lower_limit([0.5, -0.1], 0.0)),
        ("below its end", lambda: upper_limit([1.5], 1.0)),
        ("confidence is 1", lambda: lower_limit([0.5], 0.0, confidence=1)),
        ("NaN", lambda: lower_limit([np.nan], 0.0)),
        ("not empty", lambda: lower_limit([], 0.0)),
    ],
)
def test_wrong_arguments(match, call):
    with pytest.raises(ValueError, match=match):
        call()
