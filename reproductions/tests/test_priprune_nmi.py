"""Leakage measures against scikit-learn, brute force and closed forms."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leakbound import metrics
from leakbound.core import Batch
from leakbound.metrics import (
    INFORMATION,
    NORMALIZERS,
    adjusted_mi,
    binned_nmi,
    gray_levels,
    nmi,
)
from leakbound.pairing import Paired
from leakbound.randomness import stream
from leakbound_reproductions.priprune.nmi import Chance, chance

NMI, BINNED, ADJUSTED = INFORMATION


def _paired(truth, guess):
    labels = torch.zeros(len(truth), dtype=torch.long)
    return Paired(Batch(truth, labels), guess, None, tuple(range(len(truth))))


def _levels(*rows):
    """Images (1, 1, 1, n) of these gray levels."""
    return [torch.tensor(row).reshape(1, 1, 1, -1) / 255 for row in rows]


def _noisy(shape, seed=0):
    source = torch.Generator().manual_seed(seed)
    truth = torch.rand(shape, generator=source).square()
    truth[..., : shape[-1] // 2] = 0.0  # a background: counts far apart
    return truth, truth + 0.1 * torch.randn(shape, generator=source)


def test_gray_levels_clamp_and_round():
    values = torch.tensor([[-9.0, 0.0, 0.49 / 255, 0.51 / 255, 254.6 / 255, 1.0, 7.0]])
    assert gray_levels(values, data_range=1.0).tolist() == [[0, 0, 0, 1, 255, 255, 255]]
    moved = gray_levels(values * 4 - 3, data_range=4.0, low=-3.0)
    assert moved.tolist() == [[0, 0, 0, 1, 255, 255, 255]]


@pytest.mark.parametrize("shape", [(3, 1, 8, 8), (2, 1, 28, 28), (2, 3, 32, 32)])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_scikit_learn_agrees(shape, normalizer):
    cluster = pytest.importorskip("sklearn.metrics.cluster")
    truth, guess = _noisy(shape)
    u, v = (
        np.round(255 * images.double().clamp(0, 1).flatten(1).numpy()).astype(int)
        for images in (truth, guess)
    )
    cases = (
        (nmi, cluster.normalized_mutual_info_score, 1),
        (binned_nmi, cluster.normalized_mutual_info_score, 16),
        (adjusted_mi, cluster.adjusted_mutual_info_score, 1),
    )
    for measure, reference, width in cases:
        found = measure(_paired(truth, guess), data_range=1.0, normalizer=normalizer)
        expected = [
            reference(a // width, b // width, average_method=normalizer)
            for a, b in zip(u, v, strict=True)
        ]
        assert found == pytest.approx(expected, abs=1e-9), measure.__name__


def test_the_chance_level_of_adjusted_mi_is_the_mean_over_all_orders():
    u, v = [0, 0, 0, 9, 9, 200], [5, 5, 5, 5, 80, 81]

    def mutual(a, b):
        joint = {}
        for pair in zip(a, b, strict=True):
            joint[pair] = joint.get(pair, 0) + 1
        return sum(n / 6 * np.log(6 * n / (a.count(i) * b.count(j))) for (i, j), n in joint.items())

    expected = np.mean([mutual(u, list(order)) for order in permutations(v)])
    entropies = [mutual(a, a) for a in (u, v)]
    value = (mutual(u, v) - expected) / (np.mean(entropies) - expected)
    truth, guess = _levels(u, v)
    assert adjusted_mi(_paired(truth, guess), data_range=1.0) == pytest.approx([value])


def test_a_large_image_s_tails_do_not_matter():
    """Counts of thousands, where far cells are left out: two levels against all cells."""
    from scipy.stats import hypergeom

    truth, guess = torch.zeros(1, 1, 100, 100), torch.zeros(1, 1, 100, 100)
    truth[..., :37], guess[..., :50, :] = 1.0, 1.0
    n = np.arange(1, 10_001)
    expected = 0.0
    for a in (3700, 6300):
        law = hypergeom(10_000, a, 5000).pmf(n)
        expected += 2 * (law * n / 10_000 * np.log(10_000 * n / (a * 5000))).sum()
    half = np.mean([-(0.37 * np.log(0.37) + 0.63 * np.log(0.63)), np.log(2)])
    value = (0.0 - expected) / (half - expected)  # the two cuts are independent
    assert adjusted_mi(_paired(truth, guess), data_range=1.0) == pytest.approx([value], rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_symmetry_range_and_blindness_to_places(seed):
    """Exchanged images, a common order of pixels and renamed levels change nothing."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 6, (2, 1, 1, 4, 5)) * 50
    order, names = rng.permutation(20), rng.permutation(256)
    for metric in (NMI, ADJUSTED):

        def of(u, v, metric=metric):
            u, v = (torch.tensor(x.reshape(1, 1, 4, 5) / 255) for x in (u, v))
            return metric.function(_paired(u, v), data_range=1.0)

        value = of(a, b)
        assert value == pytest.approx(of(b, a))
        assert value == pytest.approx(of(a.reshape(-1)[order], b.reshape(-1)[order]))
        assert value == pytest.approx(of(a, names[b]))
        assert value[0] <= 1
        assert metric is ADJUSTED or value[0] >= 0
        assert of(a, a) == pytest.approx([1.0])


def test_what_is_not_defined_is_none():
    flat, steps = _levels([7, 7, 7, 7], [1, 2, 3, 4])
    for metric in INFORMATION:
        assert metric.function(_paired(flat, flat), data_range=1.0) == [None]
        if metric is not BINNED:
            assert metric.function(_paired(steps, flat), data_range=1.0) == pytest.approx([0.0])
    assert nmi(_paired(steps, flat), data_range=1.0, normalizer="min") == [None]
    assert adjusted_mi(_paired(steps, steps), data_range=1.0) == [None]  # all pixels differ
    assert nmi(_paired(steps, steps), data_range=1.0) == [1.0]


def test_bins_are_sixteen_levels_wide():
    low, high = _levels([0, 15, 16, 31], [15, 0, 31, 16])
    assert binned_nmi(_paired(low, high), data_range=1.0) == [1.0]
    crossed = _levels([15, 16, 15, 16], [15, 15, 16, 16])
    assert binned_nmi(_paired(*crossed), data_range=1.0) == pytest.approx([0.0])


def test_evaluate_takes_them():
    truth, guess = _noisy((2, 1, 16, 16))
    found = metrics.evaluate(_paired(truth, guess), data_range=1.0, more=INFORMATION)
    assert [*found][-3:] == ["nmi", "binned_nmi", "adjusted_mi"]
    assert found["nmi"] == nmi(_paired(truth, guess), data_range=1.0)
    assert found["adjusted_mi"][0] < found["nmi"][0]


# --- the chance level ---


def test_corrected_nmi_is_adjusted_mi_on_average():
    """An order of the pixels keeps both entropies, so the two corrections are one in the mean."""
    truth, guess = _noisy((2, 1, 12, 12))
    paired = _paired(truth, guess)
    levels = chance(NMI, paired, stream(0), data_range=1.0, others=truth.flip(-1), permutations=300)
    for level, adjusted in zip(levels, adjusted_mi(paired, data_range=1.0), strict=True):
        slack = 5 * level.permuted_error
        assert 1e-6 < slack < 0.01
        assert level.corrected == pytest.approx(adjusted, abs=2 * slack)
        assert level.permuted < level.value


def test_unrelated_is_the_mean_over_the_other_images():
    truth, guess = _noisy((2, 1, 9, 9))
    others = torch.rand(3, 1, 9, 9, generator=torch.Generator().manual_seed(5))
    levels = chance(NMI, _paired(truth, guess), stream(0), data_range=1.0, others=others)
    for i, level in enumerate(levels):
        alone = [nmi(_paired(truth[i : i + 1], other[None]), data_range=1.0)[0] for other in others]
        assert level.unrelated == pytest.approx(np.mean(alone))
        assert level.unrelated_error == pytest.approx(np.std(alone, ddof=1) / np.sqrt(3))
    (none, _) = chance(NMI, _paired(truth, guess), stream(0), data_range=1.0, others=others[:0])
    assert none.unrelated is none.unrelated_error is None


def test_chance_of_what_is_not_defined():
    flat, steps = _levels([7, 7, 7, 7], [1, 2, 3, 4])
    (level,) = chance(NMI, _paired(flat, flat), stream(0), data_range=1.0, others=flat)
    assert level == Chance(None, None, None, None, None)
    assert level.corrected is None
    (level,) = chance(
        NMI, _paired(steps, steps), stream(0), data_range=1.0, others=flat, permutations=1
    )
    assert (level.permuted, level.permuted_error, level.corrected) == (1.0, None, None)


def test_psnr_has_a_chance_level_too():
    psnr = next(m for m in metrics.METRICS if m.name == "psnr")
    truth, guess = _noisy((1, 1, 12, 12))
    (level,) = chance(psnr, _paired(truth, guess), stream(0), data_range=1.0, others=guess)
    assert level.permuted < level.value - 5
    assert level.unrelated == level.value


def test_bad_input_is_named():
    truth, guess = _noisy((1, 1, 4, 4))
    paired = _paired(truth, guess)
    with pytest.raises(ValueError, match=r"low is 0 and data_range 0\.5, but the true images run"):
        nmi(paired, data_range=0.5)
    with pytest.raises(ValueError, match="low is 0 and data_range 1, but"):
        nmi(_paired(truth - 0.5, guess), data_range=1.0)
    assert nmi(_paired(truth - 0.5, guess - 0.5), data_range=1.0, low=-0.5) == pytest.approx(
        nmi(paired, data_range=1.0), abs=0.02
    )
    with pytest.raises(ValueError, match="normalizer is 'mean'; "):
        nmi(paired, data_range=1.0, normalizer="mean")
    with pytest.raises(ValueError, match=r"data_range is 0\.0"):
        adjusted_mi(paired, data_range=0.0)
    broken = guess.clone()
    broken[0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="images holds 1 of 16 entries that are NaN"):
        nmi(_paired(truth, broken), data_range=1.0)
    with pytest.raises(ValueError, match="others holds images"):
        chance(NMI, paired, stream(0), data_range=1.0, others=truth[..., :2])
    with pytest.raises(ValueError, match="permutations is 0"):
        chance(NMI, paired, stream(0), data_range=1.0, others=truth, permutations=0)
