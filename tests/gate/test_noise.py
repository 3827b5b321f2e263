"""The tests of a client's noise and norm: their level under the declared law, and their power."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from leakbound.gate import noise

SPANS = {"weight": slice(0, 60), "bias": slice(60, 68), "other": slice(68, 128)}
CALLS, WIDTH = 64, 128


def rows(seed, signal=None):
    """Releases (CALLS, WIDTH) of standard normal noise and a signal."""
    own = np.random.default_rng(seed).standard_normal((CALLS, WIDTH))
    return own if signal is None else own + signal


def faults(own, *, ratio=0.0, level=1e-6):
    return list(noise.faults_of(own, SPANS, ratio=ratio, level=level))


def test_contrasts_are_orthonormal_and_blind_to_a_constant():
    turned = noise.contrasts(np.eye(5))
    assert np.allclose(turned @ turned.T, np.eye(4))
    assert np.allclose(turned.sum(1), 0)


def test_true_declarations_break_no_more_often_than_the_level():
    """At a level of 1 % for each of 18 tests, the bound on all is 18 %; measured: fewer."""
    runs, tests = 300, noise.count_of(SPANS)
    assert tests == 18
    found = sum(bool(faults(rows(seed, 3.0), level=0.01)) for seed in range(runs))
    assert stats.binomtest(found, runs, 0.18, alternative="greater").pvalue > 0.01
    assert found > 0  # the level is not far below what it says


def moving(seed, ratio):
    """A signal of norm `ratio` in another direction at every call."""
    own = np.random.default_rng([seed, 1]).standard_normal((CALLS, WIDTH))
    return ratio * own / np.linalg.norm(own, axis=1, keepdims=True)


@pytest.mark.parametrize("ratio", [0.5, 3.0, 8.0])
def test_a_signal_that_moves_within_its_bound_breaks_nothing(ratio):
    for seed in range(20):
        signal = moving(seed, ratio)
        assert not faults(rows(seed, signal), ratio=ratio)
    few = np.random.default_rng(2).standard_normal((CALLS, WIDTH))
    few[:, :60] = few[:, 68:] = 0  # all of it in one small tensor, whose shape it changes
    few *= ratio / np.linalg.norm(few, axis=1, keepdims=True)
    assert not faults(rows(0, few), ratio=ratio)
    same = moving(3, ratio)
    same[:, 68:] = same[:, :60]  # the same in two tensors
    same *= ratio / np.linalg.norm(same, axis=1, keepdims=True)
    assert not faults(rows(0, same), ratio=ratio)
    spike = np.zeros((CALLS, WIDTH))
    spike[::2, 0], spike[1::2, 0] = ratio, -ratio  # all of it in one entry
    assert not faults(rows(0, spike), ratio=ratio)


def test_a_signal_that_moves_is_seen_where_it_may_not():
    assert any("times" in words for words in faults(rows(0, moving(0, 9.0))))


def _seen(own, word, **more):
    found = faults(own, **more)
    assert any(word in words for words in found), found


def test_wrong_laws_are_seen():
    draws = np.random.default_rng(3)
    own = rows(1)
    _seen(own * 0.8, "weight has noise of 0.")
    _seen(own * 1.3, "times the stated std")
    _seen(np.zeros_like(own), "weight has noise of 0 times")
    dead = own.copy()
    dead[:, 5] = 2.0
    _seen(dead, "an entry of weight has 0 times")
    quiet = own.copy()
    quiet[:, 60:68] *= 0.5
    _seen(quiet, "bias has noise of 0.")
    copy = own.copy()
    copy[:, 68:] = copy[:, :60]
    _seen(copy, "weight and other have the same noise")
    _seen(copy, "weight and other have the same noise", ratio=0.5)
    _seen(np.sign(own), "weight is not Gaussian")
    _seen(np.sign(own), "weight is not Gaussian", ratio=0.5)
    _seen((draws.random((CALLS, WIDTH)) - 0.5) * 12**0.5, "is not Gaussian")
    _seen(np.concatenate([own[:32], own[:32]]), "have the same noise in weight")
    again = own.copy()
    again[40, 60:68] = again[7, 60:68]
    _seen(again, "calls 8 and 41 have the same noise in bias")


def test_the_upper_tail_is_one():
    """Birge's bound against the exact distribution."""
    for size, central in ((8, 0.0), (650, 4.0), (5000, 900.0)):
        for level in (1e-2, 1e-6, 1e-9):
            exact = stats.ncx2.sf if central else lambda x, k, _: stats.chi2.sf(x, k)
            own = float(exact(noise._upper(size, central, level), size, central))
            assert own <= level
            assert own > level**2.5  # and not far from it


def test_a_norm():
    variance, bound = 1 / 400, 0.5
    draws = np.random.default_rng(0)

    def mean(norm):
        signal = np.zeros(200)
        signal[:4] = norm / 2
        return signal + variance**0.5 * draws.standard_normal(200)

    broken = [noise.norm_of(mean(0.5), variance, bound, 0.01).broken for _ in range(300)]
    assert stats.binomtest(sum(broken), 300, 0.01, alternative="greater").pvalue > 0.01
    large = noise.norm_of(mean(2.0), variance, bound, 1e-7)
    words = large.words
    assert large.broken
    assert 1.5 < float(words.split()[1]) < 2.5
    limit = float(words.split("over ")[1].split()[0])
    stated = (float(words.split()[1]), limit)
    assert (large.estimate, large.critical) == pytest.approx(stated, rel=0.01)
    half = [noise.norm_of(mean(limit), variance, bound, 1e-7).broken for _ in range(200)]
    assert 0.35 < np.mean(half) < 0.65  # what the words promise
    assert noise.norm_of(np.array([0.3, 0.4]), 0.0, 0.5, 1e-7) == noise.NormTest(
        "0.5", False, 0.5, 0.5
    )
    assert noise.norm_of(np.array([0.3, 0.41]), 0.0, 0.5, 1e-7).broken
    assert noise.norm_of(np.array([np.nan, 0.4]), 0.0, 0.5, 1e-7).broken
