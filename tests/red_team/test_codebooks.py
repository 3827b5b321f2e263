"""The adversary's own law: an adversary with a wrong one would be weak, and prove nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from .codebooks import choose, success

SKEW = 1 / np.arange(1, 51)


def named(noise, weights, draws, rule):
    """How often the rule with these weights names the codeword, drawn with the true weights."""
    source, share = np.random.default_rng(0), weights / weights.sum()
    right = source.choice(len(share), draws, p=share)
    seen = noise * source.standard_normal((draws, len(share)))
    seen[np.arange(draws), right] += 1
    return int(((seen + noise**2 * np.log(rule)).argmax(1) == right).sum())


@pytest.mark.parametrize("noise", [0.3, 1.0])
@pytest.mark.parametrize("weights", [np.ones(50), SKEW], ids=["equal", "skewed"])
def test_against_monte_carlo(noise, weights):
    draws, share = 100_000, weights / weights.sum()
    hits = named(noise, weights, draws, weights)

    def away(law):
        return abs(hits - draws * law) / math.sqrt(draws * law * (1 - law))

    assert away(success(noise, share, weights)) < 3
    assert away(success(1.1 * noise, share, weights)) > 6


def test_more_noise_takes_fewer_codewords():
    source = np.random.default_rng(1)
    errors = source.uniform(1, 2, (4000, 60))
    first = source.choice(60, 4000, p=(1 / np.arange(1, 61)) / (1 / np.arange(1, 61)).sum())
    errors[np.arange(4000), first] = 0.5
    sizes = [choose(s, errors, 1.0, np.ones(60))[0] for s in (0.05, 0.5, 5.0)]
    assert sizes[0] == 60
    assert sizes[0] > sizes[1] > sizes[2] == 1
