"""What attacks attain, against attacks that are run, laws that are known, and the bound."""

from __future__ import annotations

import numpy as np
import pytest

from leakbound import data
from leakbound.bounds import codebook, from_scratch
from leakbound.bounds.attainable import Attainable
from leakbound.bounds.counting import PublicSample


@pytest.fixture(scope="module")
def digits():
    order = np.random.default_rng(5).permutation(5000)
    return data.load("mnist5k").inputs.flatten(1).double().numpy()[order][:2000]


def atoms(kinds, count, seed=0):
    """Examples that are one of so many points, far apart."""
    points = np.random.default_rng(99).random((kinds, 40)) * 10
    return points[np.random.default_rng(seed).integers(0, kinds, count)]


@pytest.mark.parametrize("noise", [0.3, 0.5, 1.0])
def test_of_equal_atoms_it_is_the_law_of_orthogonal_signals(noise):
    """64 atoms, all in the codebook: the best decoder's success is known."""
    exact = float(codebook.identified(noise, codewords=64))
    found = Attainable(atoms(64, 20_000)).success([(1.0, noise)], 1e-3)
    assert found.attack == ("codebook",)
    assert 0.97 * exact < found.success[0] <= exact
    assert 0.5 / 64 < found.baseline[0] <= 1 / 64


@pytest.mark.parametrize("guesses", [2, 8, 64])
def test_several_guesses_name_as_many_of_equal_atoms(guesses):
    found = Attainable(atoms(64, 20_000), guesses=guesses).success([(1.0, 1e9)], 1e-3)
    assert 0.8 * guesses / 64 < found.baseline[0] <= guesses / 64
    assert found.success[0] >= found.baseline[0]


def test_limits_are_seldom_above_the_law():
    """64 unequal atoms: what the codebook covers of the law is known; the limit stays below."""
    shares = np.arange(1, 65) / np.arange(1, 65).sum()
    points = np.random.default_rng(99).random((64, 40)) * 10
    above = 0
    for seed in range(100):
        rows = points[np.random.default_rng(seed).choice(64, 300, p=shares)]
        found = Attainable(rows, confidence=0.8).success([(1.0, 1e9)], 1e-3)
        above += found.baseline[0] > shares.max()
    assert above <= 10


def test_the_linear_attack_is_the_one_that_is_run(digits):
    """Success that is counted here is that of the attack on other digits and other noise."""
    kept = Attainable(digits)
    others = data.load("mnist5k").inputs.flatten(1).double().numpy()
    others = others[np.random.default_rng(5).permutation(5000)][2000:]
    for noise, psnr in ((0.03, 20.0), (0.01, 25.0)):
        eta = 10 ** (-psnr / 10)
        found = kept.success([(1.0, noise)], eta)
        assert found.attack == ("linear estimator",)
        draw = np.random.default_rng(8)
        shares = [
            (np.square(layer.answers(others, np.full(3000, noise), draw) - others).mean(1) <= eta)
            for layer in kept._layers
        ]
        assert (
            0.9 * max(s.mean() for s in shares) < found.success[0] <= max(s.mean() for s in shares)
        )


def test_sightings_are_averaged_and_summed(digits):
    """Four visible steps at noise s are one at s / 2; without a sighting a guess is left."""
    kept, eta = Attainable(digits), 0.01
    one = kept.success([(1.0, 0.25)], eta).success
    mass, factor = from_scratch.sightings(4, sampling_rate=1.0, participation="visible")
    hits = [(float(m), 0.5 * float(f)) for m, f in zip(mass.ravel(), factor.ravel(), strict=True)]
    np.testing.assert_allclose(kept.success(hits, eta).success, one)
    none = kept.success([(1.0, float("inf"))], eta)
    assert none.success == none.baseline
    half = kept.success([(0.5, 0.25), (0.5, float("inf"))], eta).success
    assert none.success < half < one


def test_without_noise_nearly_all_is_reconstructed(digits):
    found = Attainable(digits).success([(1.0, 0.0)], 10**-2.0)
    assert found.success[0] > 0.96


def test_it_is_below_the_bound_on_the_same_data(digits):
    """Both edges of the corridor, at thresholds and noise where the bound says something."""
    attacks, sample = Attainable(digits), PublicSample(digits)
    eta = 10 ** (-np.array([18.0, 20.0, 22.0, 25.5, 30.0]) / 10)
    for noise in (0.3, 0.5, 1.0, 3.0):
        low, high = attacks.success([(1.0, noise)], eta), sample.success_bound(noise, eta)[0]
        assert (low.success <= high).all()
        assert (low.baseline <= low.success).all()


def test_it_rises_with_the_threshold_and_falls_with_noise(digits):
    kept, eta = Attainable(digits), 10 ** (-np.arange(30.0, 16.0, -1) / 10)
    rows = [kept.success([(1.0, noise)], eta).success for noise in (0.1, 0.3, 1.0, 3.0)]
    assert (np.diff(rows, axis=1) >= 0).all()
    assert (np.diff(rows, axis=0) <= 1e-12).all()


@pytest.mark.parametrize(
    ("rows", "hits", "words"),
    [
        (np.zeros((7, 3)), [(1.0, 1.0)], "examples holds 7; give at least 8"),
        (np.zeros((9, 3)), [(1.0, -1.0)], "hits holds"),
        (np.zeros((9, 3)), [(0.7, 1.0), (0.7, 2.0)], "hits holds"),
    ],
)
def test_bad_input(rows, hits, words):
    with pytest.raises(ValueError, match=words):
        Attainable(rows).success(hits, 0.1)


def test_equal_examples_are_no_trouble():
    found = Attainable(np.ones((20, 3))).success([(1.0, 0.5)], 0.1)
    assert found.success[0] == found.baseline[0] > 0.5
