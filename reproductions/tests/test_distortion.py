"""What few bits leave unknown, against channels whose answer is known."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from leakbound_reproductions.priprune.distortion import (
    fano,
    gaussian_distortion,
    shannon_lower_bound,
)

# --- fano ---


@pytest.mark.parametrize("count", [2, 10, 193])
@pytest.mark.parametrize("right", [0.3, 0.6, 0.99])
def test_fano_is_attained_by_uniform_mistakes(count, right):
    """Who errs to every other candidate alike has exactly these bits."""
    if right < 1 / count:
        right = 1 - right
    wrong = (1 - right) / (count - 1)
    bits = math.log2(count) + right * math.log2(right) + (1 - right) * math.log2(wrong)
    found = fano(bits, kappa=1 / count)
    assert found == pytest.approx(right, abs=1e-7)
    assert found >= right - 1e-12


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6), st.floats(0.1, 3))
def test_no_guess_from_a_random_channel_exceeds_it(seed, count, sharpness):
    rng = np.random.default_rng(seed)
    prior = rng.dirichlet(np.ones(count))
    channel = rng.dirichlet(np.full(5, sharpness), count)
    joint = prior[:, None] * channel
    bits = stats.entropy(joint.ravel(), np.outer(prior, joint.sum(0)).ravel(), base=2)
    best = joint.max(0).sum()
    assert best <= fano(bits, kappa=prior.max()) + 1e-12


def test_fano_limits():
    assert fano(0.0, kappa=0.25) == pytest.approx(0.25, abs=1e-6)
    assert fano([2.0, 2.1, np.inf], kappa=0.25).tolist() == [1.0, 1.0, 1.0]
    assert fano(1.999, kappa=0.25) < 1
    weak = fano(1.0, kappa=1e-6)  # the familiar form of Fano: (I + 1) / log2 M
    assert weak < 2 / math.log2(1e6)
    for bad in ({"kappa": 0.0}, {"kappa": 1.0}):
        with pytest.raises(ValueError, match="kappa is"):
            fano(1.0, **bad)
    with pytest.raises(ValueError, match="information is -1"):
        fano(-1.0, kappa=0.5)


# --- the mean squared error ---


def entropy(variances):
    return 0.5 * np.log2(2 * np.pi * np.e * np.asarray(variances)).sum()


@pytest.mark.parametrize("noise", [0.01, 0.3, 1.0])
def test_tight_for_gaussians_seen_through_noise(noise):
    """The best estimate's error, v s^2 / (v + s^2), at the bits that the observation tells."""
    variance, n = 4.0, 7
    scale = noise * 2.0
    bits = n * 0.5 * math.log2(1 + variance / scale**2)
    error = variance * scale**2 / (variance + scale**2)
    floor = shannon_lower_bound(bits, entropy=entropy([variance] * n), dimension=n)
    assert floor == pytest.approx(error, rel=1e-12)
    assert gaussian_distortion(bits, [variance] * n) == pytest.approx(error, rel=1e-12)


@pytest.mark.parametrize("cells", [1, 2, 7, 256])
def test_a_quantizer_of_a_uniform_number_stays_above(cells):
    """Its error 1 / (12 K^2) at log2 K bits is 2 pi e / 12 of the floor."""
    floor = shannon_lower_bound(math.log2(cells), entropy=0.0, dimension=1)
    assert 1 / (12 * cells**2) / floor == pytest.approx(2 * math.pi * math.e / 12)


def test_the_best_estimate_of_a_uniform_number_stays_above():
    """By quadrature: y = x + noise, x uniform on [0, 1]."""
    x, noise = (np.arange(2000) + 0.5) / 2000, 0.1
    y = np.linspace(-0.8, 1.8, 4001)
    likely = stats.norm.pdf(y[:, None], x, noise)
    density = likely.mean(1)
    guess = (likely * x).mean(1) / density
    error = np.trapezoid(((x - guess[:, None]) ** 2 * likely).mean(1), y)
    bits = -np.trapezoid(density * np.log2(density), y) - entropy([noise**2])
    floor = shannon_lower_bound(bits, entropy=0.0, dimension=1)
    assert floor < error < 1.2 * floor


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.floats(0, 20))
def test_reverse_water_filling(variances, bits):
    """The level by a root of the rate; the other bound where no variance is below it."""
    values = np.array(variances)

    def rate(log_level):
        return np.maximum(0, 0.5 * (np.log2(values) - log_level)).sum() - bits

    level = 2 ** optimize.brentq(
        rate, math.log2(values.min()) - 2 * bits - 1, math.log2(values.max())
    )
    if bits == 0:
        level = values.max()
    found = gaussian_distortion(bits, values)
    assert found == pytest.approx(np.minimum(values, level).mean(), rel=1e-6)
    other = shannon_lower_bound(bits, entropy=entropy(values), dimension=len(values))
    assert other <= found * (1 + 1e-9)
    if level < values.min():
        assert other == pytest.approx(found, rel=1e-6)


def test_limits():
    assert gaussian_distortion(0.0, [3.0, 1.0, 0.0]) == pytest.approx(4 / 3)
    assert gaussian_distortion(5.0, [0.0, 0.0]) == 0.0
    assert gaussian_distortion(5.0, [0.0, 8.0]) == pytest.approx(4 * 2.0**-10)
    assert gaussian_distortion(1e5, [1.0]) == 0.0
    assert shannon_lower_bound(np.inf, entropy=0.0, dimension=1) == 0.0
    assert shannon_lower_bound(1.0, entropy=-np.inf, dimension=1) == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shannon_lower_bound(-1.0, entropy=0.0, dimension=1), "information is -1"),
        (lambda: shannon_lower_bound(1.0, entropy=np.inf, dimension=1), "entropy is inf"),
        (lambda: shannon_lower_bound(1.0, entropy=0.0, dimension=0), "dimension is 0"),
        (lambda: gaussian_distortion(-1.0, [1.0]), "information is -1"),
        (lambda: gaussian_distortion(1.0, [-1.0]), "variances is -1"),
        (lambda: gaussian_distortion(1.0, []), r"variances has shape \(0,\)"),
        (lambda: gaussian_distortion(1.0, [[1.0]]), r"variances has shape \(1, 1\)"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
