"""Metrics against closed forms and an independent implementation."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from leakbound import metrics
from leakbound.core import Batch
from leakbound.metrics import evaluate
from leakbound.pairing import Paired


def _paired(truth, guess, labels=None, true_labels=None):
    true_labels = torch.arange(len(truth)) if true_labels is None else true_labels
    return Paired(Batch(truth, true_labels), guess, labels, tuple(range(len(truth))))


def _random(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(st.floats(-3, 3), st.floats(0.1, 10))
def test_error_metrics_of_a_constant_shift(shift, data_range):
    truth = _random(2, 1, 5, 5).double()
    paired = _paired(truth, truth + shift)
    expected = pytest.approx([shift**2] * 2, abs=1e-12)
    assert metrics.mse(paired, data_range=data_range) == expected
    assert metrics.rmse(paired, data_range=data_range) == pytest.approx([abs(shift)] * 2, abs=1e-9)
    if abs(shift) > 1e-3:
        decibels = 20 * math.log10(data_range / abs(shift))
        found = metrics.psnr(paired, data_range=data_range)
        assert found == pytest.approx([decibels] * 2, abs=1e-6)


@given(st.floats(-140, 140), st.floats(0.1, 300))
def test_psnr_and_mean_squared_error_are_inverses(decibels, data_range):
    error = metrics.mse_of_psnr(decibels, data_range)
    assert math.log10(error) == pytest.approx(2 * math.log10(data_range) - decibels / 10)
    assert metrics.psnr_of_mse(error, data_range) == pytest.approx(decibels, abs=1e-9)
    rows = metrics.mse_of_psnr(np.array([decibels, math.inf]), data_range)
    assert rows == pytest.approx([error, 0.0])
    assert metrics.psnr_of_mse(rows, data_range) == pytest.approx([decibels, math.inf], abs=1e-9)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 14), (1, 28, 28), (3, 32, 32)])
@pytest.mark.parametrize("data_range", [1.0, 4.0])
def test_psnr_and_ssim_equal_scikit_image(shape, data_range):
    skimage = pytest.importorskip("skimage.metrics")
    truth = _random(3, *shape)
    guess = truth + 0.2 * torch.randn(truth.shape, generator=torch.Generator().manual_seed(1))
    paired = _paired(truth, guess)
    window = min(11, (min(shape[1:]) - 1) // 2 * 2 + 1)
    settings = {
        "data_range": data_range,
        "channel_axis": 0,
        "gaussian_weights": True,
        "sigma": 1.5 * window / 11,
        "use_sample_covariance": False,
    }
    pairs = list(zip(truth.double().numpy(), guess.double().numpy(), strict=True))
    psnr = [skimage.peak_signal_noise_ratio(a, b, data_range=data_range) for a, b in pairs]
    ssim = [skimage.structural_similarity(a, b, **settings) for a, b in pairs]
    assert metrics.psnr(paired, data_range=data_range) == pytest.approx(psnr)
    assert metrics.ssim(paired, data_range=data_range) == pytest.approx(ssim)


def test_identical_images():
    truth = _random(2, 3, 176, 176)
    found = evaluate(_paired(truth, truth.clone(), torch.arange(2)), data_range=1.0)
    expected = {"mse": 0, "rmse": 0, "psnr": 150.0, "ssim": 1, "ms_ssim": 1, "ncc": 1}
    expected |= {"label_accuracy": 1}
    assert list(found) == [metric.name for metric in metrics.METRICS]
    for name, value in expected.items():
        assert found[name] == pytest.approx([value] * 2), name
    json.dumps(found, allow_nan=False)


def test_what_is_not_defined_is_none():
    truth = _random(2, 1, 8, 8)
    found = evaluate(_paired(truth, torch.zeros_like(truth)), data_range=1.0)
    for name in ("ms_ssim", "ncc", "label_accuracy"):
        assert found[name] == [None, None], name
    assert None not in found["mse"] + found["psnr"] + found["ssim"]
    small = evaluate(_paired(truth[..., :2], truth[..., :2]), data_range=1.0)
    assert small["ssim"] == [None, None]
    flat = evaluate(_paired(torch.eye(3), torch.eye(3)), data_range=1.0)
    assert flat["ssim"] == [None] * 3
    assert flat["psnr"] == [150.0] * 3


def _five_scales(a, b):
    """Wang, Simoncelli and Bovik 2003, eq. 7, by filters of scipy."""
    found = 1.0
    for power in (0.0448, 0.2856, 0.3001, 0.2363, 0.1333):
        blur = lambda x: ndimage.gaussian_filter(x, 1.5, truncate=3.5)[5:-5, 5:-5]  # noqa: E731
        x, y = a.numpy(), b.numpy()
        mean = blur(x), blur(y)
        spread = blur(x * x) - mean[0] ** 2 + blur(y * y) - mean[1] ** 2 + 0.03**2
        contrast = (2 * (blur(x * y) - mean[0] * mean[1]) + 0.03**2) / spread
        light = (2 * mean[0] * mean[1] + 0.01**2) / (mean[0] ** 2 + mean[1] ** 2 + 0.01**2)
        found *= (contrast * (light if power == 0.1333 else 1)).mean() ** power
        a, b = (t.unfold(0, 2, 2).unfold(1, 2, 2).mean((2, 3)) for t in (a, b))
    return found


def test_ms_ssim_starts_at_176_pixels():
    truth = _random(1, 1, 176, 180)
    guess = (truth + 0.1 * _random(1, 1, 176, 180, seed=1)).clamp(0, 1)
    value = metrics.ms_ssim(_paired(truth, guess), data_range=1.0)[0]
    assert 0 < value < 1
    assert value == pytest.approx(_five_scales(guess[0, 0].double(), truth[0, 0].double()))
    cut = _paired(truth[..., :175, :], guess[..., :175, :])
    assert metrics.ms_ssim(cut, data_range=1.0) == [None]


def test_every_image_has_its_own_number():
    truth, guess = _random(4, 1, 12, 12), _random(4, 1, 12, 12, seed=1)
    whole = evaluate(_paired(truth, guess), data_range=1.0)
    for i in range(4):
        alone = evaluate(_paired(truth[i : i + 1], guess[i : i + 1]), data_range=1.0)
        for name in ("mse", "psnr", "ssim", "ncc"):
            assert alone[name] == pytest.approx(whole[name][i : i + 1]), name


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 100), st.floats(-10, 10))
def test_ncc_bounds_and_invariance(seed, gain, shift):
    truth, guess = _random(3, 1, 4, 4, seed=seed).double(), _random(3, 1, 4, 4, seed=seed + 1)
    values = metrics.ncc(_paired(truth, guess), data_range=1.0)
    assert all(-1 <= value <= 1 for value in values)
    moved = metrics.ncc(_paired(truth, guess.double() * gain + shift), data_range=1.0)
    assert moved == pytest.approx(values, abs=1e-6)
    negative = metrics.ncc(_paired(truth, shift - gain * truth), data_range=1.0)
    assert negative == pytest.approx([-1] * 3)


def test_label_accuracy():
    truth = _random(3, 1, 4, 4)
    paired = _paired(truth, truth, torch.tensor([0, 2, 2]))
    assert metrics.label_accuracy(paired, data_range=1.0) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("data_range", [0.0, -1.0, float("nan")])
def test_data_range_must_be_positive(data_range):
    truth = _random(1, 1, 8, 8)
    with pytest.raises(ValueError, match="data_range is"):
        evaluate(_paired(truth, truth), data_range=data_range)
