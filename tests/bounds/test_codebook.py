"""The codebook's law against quadrature, Monte Carlo and the bound on every attacker."""

import math

import numpy as np
import pytest
from scipy import integrate, special, stats

from leakbound.bounds.codebook import choose, identified, success
from leakbound.bounds.identification import gaussian

SKEW = np.array([40.0, 20.0, 20.0, 5.0, 5.0, 5.0, 3.0, 1.0, 1.0])


@pytest.mark.parametrize(("noise", "printed"), [(0.3, "0.311"), (1.0, "0.0030")])
def test_the_figures_of_the_specification(noise, printed):
    found = identified(noise, codewords=10_000)
    assert f"{found:.{len(printed) - 2}f}" == printed


@pytest.mark.parametrize("noise", [0.1, 0.5, 3.0])
@pytest.mark.parametrize("codewords", [1, 2, 100, 10**6])
def test_against_quadrature(noise, codewords):
    def density(z):
        return stats.norm.pdf(z) * math.exp((codewords - 1) * special.log_ndtr(z + 1 / noise))

    wanted, _ = integrate.quad(density, -12, 12, limit=500, epsabs=1e-15, epsrel=1e-11)
    assert identified(noise, codewords=codewords) == pytest.approx(wanted, rel=1e-8)


def named(noise, weights, draws, rule, seed=0):
    """How often the rule with these weights names the codeword, drawn with the true weights."""
    source = np.random.default_rng(seed)
    share = weights / weights.sum()
    right = source.choice(len(share), draws, p=share)
    seen = noise * source.standard_normal((draws, len(share)))
    seen[np.arange(draws), right] += 1
    return int(((seen + noise**2 * np.log(rule)).argmax(1) == right).sum())


def away(hits, draws, law):
    return abs(hits - draws * law) / math.sqrt(draws * law * (1 - law))


@pytest.mark.parametrize("noise", [0.3, 1.0])
@pytest.mark.parametrize("weights", [np.ones(50), SKEW], ids=["equal", "skewed"])
def test_against_monte_carlo(noise, weights):
    draws, share = 100_000, weights / weights.sum()
    hits = named(noise, weights, draws, weights)
    assert away(hits, draws, success(noise, covered=share, weights=weights)) < 3
    assert away(hits, draws, success(1.1 * noise, covered=share, weights=weights)) > 6


def test_the_rule_of_equal_weights_has_a_law_of_its_own():
    draws, share = 100_000, SKEW / SKEW.sum()
    hits = named(1.0, SKEW, draws, np.ones(len(SKEW)))
    equal = success(1.0, covered=share)
    assert away(hits, draws, equal) < 3
    assert away(hits, draws, success(1.0, covered=share, weights=SKEW)) > 6
    assert success(1.0, covered=share, weights=SKEW) > equal
    assert success(1.0, covered=share / 2) == pytest.approx(equal / 2)


def test_no_codebook_beats_the_bound_on_every_attacker():
    noise, sizes = np.geomspace(0.05, 20, 15)[:, None], np.array([1, 2, 10, 1000, 10**5])
    attained = identified(noise, codewords=sizes)
    assert attained.shape == (15, 5)
    assert np.all(attained <= gaussian(noise, kappa=1 / sizes) + 1e-12)
    assert np.all(np.diff(attained, axis=0) <= 1e-12)
    assert np.all(attained >= 1 / sizes - 1e-12)


def test_more_noise_takes_fewer_codewords():
    source = np.random.default_rng(1)
    errors = source.uniform(1, 2, (4000, 60))
    first = source.choice(60, 4000, p=(1 / np.arange(1, 61)) / (1 / np.arange(1, 61)).sum())
    errors[np.arange(4000), first] = 0.5
    weights = 1 / np.arange(1, 61)
    found = [choose(s, errors=errors, within=1.0, weights=weights) for s in (0.05, 0.5, 5.0)]
    assert found[0][0] == 60
    assert found[0][1] == pytest.approx(1, abs=1e-6)
    alike = [choose(s, errors=errors, within=1.0)[0] for s in (0.05, 0.5, 5.0)]
    assert alike[0] == 60
    assert alike[0] > alike[1] > alike[2] == 1
    size, value = choose(0.5, errors=errors, within=1.0, sizes=[alike[1]])
    covered = np.bincount(first[first < size], minlength=size) / 4000
    assert value == pytest.approx(success(0.5, covered=covered))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: identified(0.0, codewords=3), "noise_multiplier"),
        (lambda: identified(1.0, codewords=2.5), "codewords"),
        (lambda: success(1.0, covered=[0.7, 0.7]), "covered sums to 1.4"),
        (lambda: success(1.0, covered=[-0.1]), "covered"),
        (lambda: success(1.0, covered=[0.1, 0.1], weights=[1.0]), r"shape \(2,\) and weights"),
        (lambda: success(1.0, covered=[0.1], weights=[0.0]), "weights"),
        (lambda: choose(1.0, errors=[1.0], within=1.0), r"shape \(1,\)"),
        (lambda: choose(1.0, errors=[[1.0]], within=1.0, sizes=[2]), "sizes holds 2"),
    ],
)
def test_what_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
