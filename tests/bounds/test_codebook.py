"""The codebook's law against quadrature, Monte Carlo and the bound on every attacker."""

import math

import numpy as np
import pytest
from scipy import integrate, special, stats

from leakbound.bounds.codebook import identified
from leakbound.bounds.identification import gaussian


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


def named(noise, codewords, draws, seed=0):
    """How often the largest coordinate is that of the codeword, drawn with equal weights."""
    source = np.random.default_rng(seed)
    right = source.integers(codewords, size=draws)
    seen = noise * source.standard_normal((draws, codewords))
    seen[np.arange(draws), right] += 1
    return int((seen.argmax(1) == right).sum())


def away(hits, draws, law):
    return abs(hits - draws * law) / math.sqrt(draws * law * (1 - law))


@pytest.mark.parametrize("noise", [0.3, 1.0])
def test_against_monte_carlo(noise):
    draws = 100_000
    hits = named(noise, 50, draws)
    assert away(hits, draws, identified(noise, codewords=50)) < 3
    assert away(hits, draws, identified(1.1 * noise, codewords=50)) > 6


def test_no_codebook_beats_the_bound_on_every_attacker():
    noise, sizes = np.geomspace(0.05, 20, 15)[:, None], np.array([1, 2, 10, 1000, 10**5])
    attained = identified(noise, codewords=sizes)
    assert attained.shape == (15, 5)
    assert np.all(attained <= gaussian(noise, kappa=1 / sizes) + 1e-12)
    assert np.all(np.diff(attained, axis=0) <= 1e-12)
    assert np.all(attained >= 1 / sizes - 1e-12)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: identified(0.0, codewords=3), "noise_multiplier"),
        (lambda: identified(1.0, codewords=2.5), "codewords"),
    ],
)
def test_what_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
