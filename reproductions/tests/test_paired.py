"""Paired comparisons of errors, seed by seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from leakbound_reproductions.paired import gain, logs, paired


def test_an_exact_reconstruction_counts_and_does_not_decide():
    """An error of exactly 0 was a traceback; with -inf a mean would be it alone."""
    exact = paired(logs({0: 0.0, 1: 0.01, 2: 0.02}), logs({0: 0.1, 1: 0.01, 2: 0.01}))
    assert exact.mean == pytest.approx((-140 + 0 + 10 * math.log10(2)) / 3)
    assert exact.word == "undecided"
    both = paired(logs({0: 0.0, 1: 0.01}), logs({0: 1e-17, 1: 0.01}))
    assert both.mean == both.low == both.high == 0


def test_errors_that_single_precision_resolves_keep_their_decibels():
    values = {seed: 10.0 ** -(seed / 2) for seed in range(29)}
    assert list(logs(values).values()) == pytest.approx([-5 * seed for seed in values])


def test_the_interval_is_students():
    drawn = np.random.default_rng(0).normal(0.3, 1, 12)
    found, other = gain(drawn.tolist()), stats.ttest_1samp(drawn, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((other.low, other.high))
    with pytest.raises(ValueError, match="give at least 2"):
        paired({0: 1.0, 1: 2.0}, {1: 1.0, 2: 1.0})
