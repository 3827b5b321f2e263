"""Bits leaked by masked updates, against exact mutual information, quadrature and brute force."""

import math
from math import comb, log

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from leakbound_reproductions.priprune.information import (
    MASK_TERMS,
    binary_entropy,
    corrected,
    finite_precision,
    gaussian_channel,
    gradient_entropy,
    mask_entropy,
    printed,
)

SPECTRA = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


def half_log_det(matrix):
    """In bits."""
    return np.linalg.slogdet(matrix)[1] / (2 * log(2))


def told(joint, first):
    """Exact mutual information (bits) of a Gaussian's first coordinates and its others."""
    parts = joint[:first, :first], joint[first:, first:]
    return sum(map(half_log_det, parts)) - half_log_det(joint)


# --- masks ---


@pytest.mark.parametrize(
    ("d", "k"), [(10, 3), (1, 0), (7, 7), (6_603_710, 4_622_597), (10**9, 12345), (10**12, 1)]
)
def test_mask_entropy_is_the_logarithm_of_the_binomial(d, k):
    with mpmath.workdps(60):
        exact = mpmath.log(mpmath.binomial(d, k)) / mpmath.log(2)
        exact = float(exact) if k < d else 0.0
    assert mask_entropy(d, k) == pytest.approx(exact, rel=1e-9, abs=1e-12)


def test_mask_entropy_of_arrays_and_its_upper_bound():
    d = np.array([1, 2, 30, 1000])
    k = np.array([1, 1, 9, 300])
    expected = [math.log2(comb(*pair)) for pair in zip(d.tolist(), k.tolist(), strict=True)]
    np.testing.assert_allclose(mask_entropy(d, k), expected, rtol=1e-12, atol=1e-12)
    assert (mask_entropy(d, k) <= d * binary_entropy(k / d)).all()
    with pytest.raises(ValueError, match="kept is 4 and coordinates 3"):
        mask_entropy(3, 4)


def test_binary_entropy():
    assert binary_entropy([0.0, 0.5, 1.0]).tolist() == [0.0, 1.0, 0.0]
    assert binary_entropy(0.3) == pytest.approx(stats.entropy([0.3, 0.7], base=2))


@settings(max_examples=50, deadline=None)
@given(st.floats(0.001, 0.999))
def test_the_printed_mask_term_is_the_first_of_the_entropy_s_series(p):
    """H_b(p) = 1 - sum (1 - 2p)^(2n) / (n (2n - 1)) / (2 ln 2): one term is an upper bound."""
    first = printed(p, [1.0], batch_size=1).mask
    assert binary_entropy(p) <= first + 1e-12
    series = 1 - sum(
        (1 - 2 * p) ** (2 * n) / (n * (2 * n - 1)) / (2 * log(2)) for n in range(1, 4000)
    )
    assert series == pytest.approx(binary_entropy(p), abs=3e-4)
    if abs(p - 0.5) < 0.01:
        assert first == pytest.approx(binary_entropy(p), abs=1e-7)


def test_other_readings_of_the_mask_term_are_more_than_a_coin_can_tell():
    assert printed(0.3, [1.0], batch_size=1, mask_term="linear").mask == pytest.approx(
        1.505, abs=1e-3
    )
    for term in MASK_TERMS[1:]:
        for p in (0.01, 0.3, 0.9):
            assert printed(p, [1.0], batch_size=1, mask_term=term).mask > 1


# --- the printed formula and its repair ---


@settings(max_examples=50, deadline=None)
@given(st.floats(0.01, 0.99), SPECTRA, st.integers(1, 100), st.integers(1, 9))
def test_printed_and_corrected_differ_by_the_errata(p, spectrum, batch, rounds):
    """Nats: 4.2 h(aX) counts d* times; 4.3 the sign of log det; 4.4 the sum's covariance is B I."""
    n, determinant = len(spectrum), float(np.log(spectrum).sum())
    wrong = printed(p, spectrum, batch_size=batch, rounds=rounds)
    right = corrected(p, spectrum, coordinates=n, batch_size=batch, rounds=rounds)
    e42 = -2 * (n - 1) * log(batch)
    e43 = 2 * determinant
    e44 = n * log(batch)
    difference = (right.value - right.mask) * log(2) - (wrong.value - wrong.mask)
    assert difference == pytest.approx(rounds * (e42 + e43 + e44), rel=1e-9, abs=1e-9)
    assert right.mask == pytest.approx(rounds * n * binary_entropy(p))
    assert wrong.covers == right.covers == "none"
    assert wrong.unit == "bits and nats mixed"
    one = printed(p, spectrum, batch_size=batch)
    assert wrong.value == pytest.approx(rounds * one.value)


@pytest.mark.parametrize("batch", [1, 4, 32])
def test_the_corrected_entropy_is_exact_for_gaussians(batch):
    rng = np.random.default_rng(0)
    root = rng.standard_normal((4, 4))
    sigma = root @ root.T
    values = np.linalg.eigvalsh(sigma)
    exact = stats.multivariate_normal(cov=sigma / batch).entropy() / log(2)
    assert gradient_entropy(values, batch_size=batch) == pytest.approx(exact)
    sample = rng.standard_normal((20_000, batch, 4)).mean(1) @ root.T
    counted = stats.multivariate_normal(cov=np.cov(sample.T)).entropy() / log(2)
    assert gradient_entropy(values, batch_size=batch) == pytest.approx(counted, abs=0.05)


def test_the_corrected_formula_is_no_bound():
    """Another unit for the gradient puts it below what is leaked; nothing else changes."""
    big = corrected(0.3, [1.0], coordinates=1, batch_size=1).value
    small = corrected(0.3, [1e-8], coordinates=1, batch_size=1).value
    assert small < 0 < big
    assert big - small == pytest.approx(math.log2(1e8))


# --- what a message can hold ---


def test_finite_precision_counts_messages():
    """All messages of 2 bits a number in 2 of 5 coordinates: 10 masks, 16 contents."""
    bound = finite_precision(5, 2, precision=2)
    assert bound.value == pytest.approx(math.log2(10 * 16))
    assert bound.covers == "all"
    assert finite_precision(5, 2, precision=2, rounds=3).value == pytest.approx(3 * bound.value)
    assert finite_precision(5, 2, precision=2, mask="public").value == 4
    assert finite_precision(5, 2, precision=2, data_bits=3.5).value == 3.5
    assert finite_precision(5, 2, precision=2, data_bits=3.5).mask == pytest.approx(math.log2(10))
    assert finite_precision(6_603_710, 0.7 * 6_603_710, mask="fixed share").value == pytest.approx(
        6_603_710 * (0.7 * 32 + binary_entropy(0.3))
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_a_fixed_share_covers_masks_of_any_law(seed):
    """The entropy of a random law over all 16 masks of 4, and the mean number sent."""
    rng = np.random.default_rng(seed)
    law = rng.dirichlet(np.full(16, 0.5))
    sent = np.array([bin(m).count("1") for m in range(16)])
    kept = float(law @ sent)
    exact = stats.entropy(law, base=2) + 3 * kept  # and 3 uniform bits a number
    bound = finite_precision(4, kept, precision=3, mask="fixed share").value
    assert exact <= bound + 1e-9


# --- the Gaussian channel ---


@pytest.mark.parametrize("rate", [1.0, 0.25])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_channel_is_exact_for_gaussian_gradients(rate, batch):
    rng = np.random.default_rng(1)
    maps = rng.standard_normal((5, 2))  # gradient = maps @ record, so Sigma has rank 2
    noise = 0.7
    mean = np.hstack([rate * maps / batch] * batch)
    size = 2 * batch
    joint = np.block([[np.eye(size), mean.T], [mean, mean @ mean.T + noise**2 * np.eye(5)]])
    values = np.clip(np.linalg.eigvalsh(maps @ maps.T), 0, None)
    bound = gaussian_channel(values, noise_std=noise, batch_size=batch, learning_rate=rate)
    assert bound.value == pytest.approx(told(joint, size))
    assert bound.covers == "all"
    same = gaussian_channel(values[-2:], noise_std=noise, batch_size=batch, learning_rate=rate)
    assert same.value == pytest.approx(bound.value)


def test_rounds_add_up_to_a_bound():
    """The same record seen in three rounds: less than three times one round's bits, and more."""
    rng = np.random.default_rng(2)
    maps, noise = rng.standard_normal((4, 3)), 0.5
    values = np.linalg.eigvalsh(maps @ maps.T).clip(0)
    stacked = np.vstack([maps] * 3)
    joint = np.block([[np.eye(3), stacked.T], [stacked, stacked @ stacked.T + 0.25 * np.eye(12)]])
    exact = told(joint, 3)
    three = gaussian_channel(values, noise_std=noise, rounds=3).value
    one = gaussian_channel(values, noise_std=noise).value
    assert one < exact < three == pytest.approx(3 * one)


@settings(max_examples=50, deadline=None)
@given(SPECTRA, st.integers(0, 5), st.floats(0.1, 10), st.integers(1, 50))
def test_trace_and_rank_bound_every_spectrum(spectrum, spare, noise, batch):
    given = {"noise_std": noise, "batch_size": batch}
    exact = gaussian_channel(spectrum, **given).value
    rank = len(spectrum) + spare
    upper = gaussian_channel(trace=sum(spectrum), rank=rank, **given).value
    assert exact <= upper * (1 + 1e-12)
    flat = gaussian_channel([2.0] * 5, **given).value
    assert gaussian_channel(trace=10.0, rank=5, **given).value == pytest.approx(flat)
    assert gaussian_channel(trace=11.0, rank=6, **given).value > flat


def masked_coin(variance, noise, threshold):
    """Exact bits in 1-D: x ~ N(0, variance) is sent with noise only where |x| > threshold."""
    spread = math.sqrt(variance)
    often = 2 * stats.norm.sf(threshold / spread)
    wide = math.sqrt(variance + noise**2)
    y = np.linspace(-12 * wide, 12 * wide, 200_001)
    share, left = variance / wide**2, spread * noise / wide
    beyond = stats.norm.sf((threshold - share * y) / left) + stats.norm.cdf(
        (-threshold - share * y) / left
    )
    density = stats.norm.pdf(y, scale=wide) * beyond / often
    surprise = -density * np.log2(np.maximum(density, 1e-300))
    entropy = np.trapezoid(surprise, y)
    content = entropy - stats.norm(scale=noise).entropy() / log(2)
    return binary_entropy(often) + often * content, often


@pytest.mark.parametrize("threshold", [0.1, 0.7, 1.5])
@pytest.mark.parametrize("noise", [0.05, 0.5, 3.0, 30.0])
def test_a_mask_that_depends_on_the_data_tells_more_than_the_determinant(noise, threshold):
    exact, often = masked_coin(1.0, noise, threshold)
    bare = gaussian_channel([1.0], noise_std=noise).value
    total = gaussian_channel(
        [1.0], noise_std=noise, coordinates=1, kept=often, mask="fixed share"
    ).value
    assert exact <= total
    if noise >= 3:
        assert exact > bare  # so the determinant alone is no bound
    assert total == pytest.approx(bare + binary_entropy(often))


def test_the_quadrature_agrees_with_monte_carlo():
    """By the log ratio of p(sent | x) to p(sent), the latter counted in bins."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal(2_000_000)
    y = x + 0.5 * rng.standard_normal(len(x))
    sent = np.abs(x) > 0.7
    counts, edges = np.histogram(y[sent], bins=400, range=(-8, 8))
    density = counts / len(x) / np.diff(edges)
    inside = density[np.clip(np.searchsorted(edges, y[sent]) - 1, 0, 399)]
    gain = np.log2(stats.norm.pdf(y[sent], x[sent], 0.5) / inside).sum() / len(x)
    counted = gain - (~sent).mean() * np.log2((~sent).mean())
    assert masked_coin(1.0, 0.5, 0.7)[0] == pytest.approx(counted, abs=0.004)


def test_a_mask_alone_can_tell_all():
    """A coin chooses which of two coordinates is sent: one bit, however large the noise."""
    bound = gaussian_channel(
        [1e-12], noise_std=1.0, coordinates=2, kept=1, mask="fixed count", rounds=4
    )
    assert bound.value == pytest.approx(4.0)
    assert bound.mask == pytest.approx(4.0)
    assert gaussian_channel([1e-12], noise_std=1.0, rounds=4).value < 1e-10


# --- bad input ---


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: printed(1.2, [1.0], batch_size=1), r"rate is 1\.2"),
        (lambda: printed(0.3, [0.0], batch_size=1), "eigenvalues is 0; give"),
        (lambda: printed(0.3, [], batch_size=1), r"eigenvalues has shape \(0,\)"),
        (lambda: printed(0.3, [1.0], batch_size=0), "batch_size is 0"),
        (lambda: printed(0.3, [1.0], batch_size=1, mask_term="square"), "did you mean 'squared'"),
        (lambda: corrected(0.3, [1.0, 2.0], coordinates=1, batch_size=1), "coordinates is 1 and"),
        (lambda: gradient_entropy([np.inf], batch_size=1), "eigenvalues is inf"),
        (lambda: finite_precision(3, 4), "kept is 4 and coordinates 3"),
        (lambda: finite_precision(3, 1.5), r"kept is 1\.5; give a whole number"),
        (lambda: finite_precision(3, -1, mask="public"), "kept is -1"),
        (lambda: finite_precision(3, 1, mask="secret"), "mask is 'secret'"),
        (lambda: finite_precision(3, 1, data_bits=-1.0), "data_bits is -1"),
        (lambda: gaussian_channel([1.0], noise_std=0.0), r"noise_std is 0\.0"),
        (lambda: gaussian_channel([-1.0], noise_std=1.0), "eigenvalues is -1"),
        (lambda: gaussian_channel([np.nan], noise_std=1.0), "eigenvalues is nan"),
        (lambda: gaussian_channel(noise_std=1.0), "give eigenvalues, or trace and rank"),
        (lambda: gaussian_channel(noise_std=1.0, trace=1.0), "give eigenvalues, or trace and rank"),
        (lambda: gaussian_channel([1.0], noise_std=1.0, rank=2), "give eigenvalues, or trace and"),
        (lambda: gaussian_channel([1.0], noise_std=1.0, mask="fixed count"), "give both counts"),
        (lambda: gaussian_channel([1.0], noise_std=1.0, rounds=0), "rounds is 0"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
