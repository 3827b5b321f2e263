"""Numbers that were computed with other code before this library had the bounds."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from leakbound import data
from leakbound.bounds import codebook, counting, identification
from leakbound.bounds.attainable import Attainable
from leakbound.bounds.counting import PublicSample, count_limit


def lifted(kappa, noise):
    """F(kappa) of one full step."""
    return stats.norm.cdf(stats.norm.ppf(kappa) + 1 / noise)


def profile_limit(each, noise):
    return counting._profile_limit(each, counting._envelope(noise), 1, counting.CONFIDENCE)


def eta(psnr):
    return 10 ** (-psnr / 10)


@pytest.fixture(scope="module")
def digits():
    return data.load("mnist5k").inputs.flatten(1).double().numpy()


@pytest.mark.parametrize(
    ("gamma", "needed"),
    [(0.05, (95, 297, 1161, 35_464)), (0.01, (475, 2016, 10_783, 625_850)),
     (0.001, (4745, 28_719, 220_170, 2.7e7))],
)  # fmt: skip
def test_public_examples_that_the_limit_on_kappa_needs(gamma, needed):
    """At K* = 1, at any noise and at 2, 1 and 0.5; the law of rare events, 4.744 / n."""
    for noise, n in zip((1e9, 2.0, 1.0, 0.5), needed, strict=True):
        assert lifted(4.744 / n, noise) == pytest.approx(gamma, rel=0.02)
        limit = count_limit(1, int(n))
        assert limit == pytest.approx(4.744 / n, rel=0.03)


@pytest.mark.parametrize(
    ("n", "first", "second"),
    [(5000, (0.68, 1.28, 63.7), (0.55, 0.94, None)),
     (60_000, (0.47, 0.69, 1.45), (0.40, 0.56, 1.05))],
)  # fmt: skip
def test_noise_for_isolated_examples(n, first, second):
    """By the limit on kappa and by the profile bound, for 0.05, 0.01 and 0.001."""
    for gamma, one, two in zip((0.05, 0.01, 0.001), first, second, strict=True):
        assert lifted(count_limit(1, n), one) == pytest.approx(gamma, rel=0.02)
        if two is None:
            assert profile_limit([np.ones(n)], 1e6) > gamma
        else:
            assert profile_limit([np.ones(n)], two) == pytest.approx(gamma, rel=0.06)


@pytest.mark.parametrize(
    ("psnr", "gamma", "first", "second"),
    [(25.5, 0.05, 0.87, 0.58), (25.5, 0.01, 2.15, 1.30), (30, 0.05, 0.76, 0.55),
     (30, 0.01, 1.58, 0.94)],
)  # fmt: skip
def test_noise_for_digits(digits, psnr, gamma, first, second):
    sample = PublicSample(digits)
    kappa = float(np.exp(sample.log_kappa(eta(psnr))))
    assert lifted(kappa, first) == pytest.approx(gamma, rel=0.02)
    each = [found.each for found in sample.counts(eta(psnr))]
    assert profile_limit(each, second) == pytest.approx(gamma, rel=0.03)


def test_the_density_margin_of_digits(digits):
    """At 30 dB, noise 2 and 0.05 private digits may lie 10.3 times as densely."""
    kappa = float(np.exp(PublicSample(digits).log_kappa(eta(30))))
    margin = stats.norm.cdf(stats.norm.ppf(0.05) - 1 / 2.0) / kappa
    assert margin == pytest.approx(10.3, rel=0.01)


def test_two_thousand_equal_atoms():
    """Attained, the exact optimum, and what 5,000 draws show of it, at noise 0.5."""
    atoms = np.random.default_rng(0).random((2000, 60)) * 10
    rows = atoms[np.random.default_rng(1).integers(0, 2000, 5000)]
    assert lifted(1 / 2000, 0.5) == pytest.approx(0.098, abs=0.001)
    assert codebook.identified(0.5, codewords=2000) == pytest.approx(0.086, abs=0.002)
    sample = PublicSample(rows)
    each = [found.each for found in sample.counts(1e-3)]
    assert profile_limit(each, 0.5) == pytest.approx(0.127, abs=0.004)
    kappa = float(np.exp(sample.log_kappa(1e-3)))
    assert lifted(kappa, 0.5) == pytest.approx(0.240, abs=0.03)  # as K* of the draw is


@pytest.mark.parametrize(("psnr", "found"), [(20, 0.0271), (22, 0.0110), (25.5, 0.0011)])
def test_the_codebook_of_digits(digits, psnr, found):
    """The best of nine sizes from 2,500 digits on 2,500 others was so high; the limit is lower."""
    order = np.random.default_rng(0).permutation(5000)
    reached = Attainable(digits[order]).success([(1.0, 0.5)], eta(psnr)).success[0]
    assert 0.2 * found < reached < found
    upper = PublicSample(digits[order[:2500]]).success_bound(0.5, eta(psnr))[0][0]
    assert reached < upper


@pytest.mark.parametrize(
    ("noise", "trap", "wanted"),
    [(0.02, 0.239, 0.039), (0.03, 0.414, 0.241), (0.05, 0.662, 0.599), (0.1, 0.887, 0.878),
     (0.3, 0.986, 0.984)],
)  # fmt: skip
def test_the_mean_error_of_a_uniform_direction(noise, trap, wanted):
    """The integral of 1 - F(kappa) over eta, as a share of the error without an update.

    784 values, kappa exact; the linear trap's own mean error is above it.
    """
    share = np.linspace(0, 1, 4001)[1:]  # error / squared norm; from 1 on the zero vector is enough
    log_kappa = identification.log_kappa_sphere(dim=784, eta=share / 784, norm=1.0)
    upper = np.asarray(identification.gaussian(noise, log_kappa=log_kappa))
    found = float(np.mean(1 - upper))
    assert found == pytest.approx(wanted, abs=0.003)
    assert found == pytest.approx(float(np.exp(-1 / (noise**2 * 784))), abs=0.05)
    assert found < trap
