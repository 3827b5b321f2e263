"""Synthetic electrocardiograms, and masks of photographs."""

import numpy as np
import pytest
import torch

from leakbound.data.packaged import PHOTOS, photo_masks
from leakbound.data.raw import LUMA, Options
from leakbound.data.series import HIGHEST, LOWEST, SECONDS, ecg


def test_electrocardiograms_have_their_waves():
    """Peaks at the rate that was drawn; abnormal ones are wider and have an inverted T wave."""
    raw = ecg(Options(size=600))
    assert raw.inputs.shape == (1000, 1, 600)
    assert raw.inputs.dtype == torch.float32
    assert bool(((raw.inputs > 0) & (raw.inputs < 1)).all())
    assert raw.class_names == ("normal", "abnormal")
    assert raw.labels.bincount().tolist() == [500, 500]
    volts = (LOWEST + (HIGHEST - LOWEST) * raw.inputs[:, 0]).numpy()
    widths, rates, waves = [[], []], [], [[], []]
    for row, label in zip(volts[:100], raw.labels[:100].tolist(), strict=True):
        high = row > 0.45
        edges = np.flatnonzero(np.diff(high.astype(int)))
        starts = [a for a in edges if not high[a]]
        ends = [a for a in edges if high[a]]
        widths[label] += [b - a for a in starts for b in ends if 0 < b - a < 60]
        rates += list(np.diff(starts) / 600 * SECONDS)
        at = 0.24 if label == 0 else 0.3
        places = [a + int(at / SECONDS * 600) for a in starts]
        waves[label] += [row[p] for p in places if p < 600]
    assert min(rates) > 0.6
    assert max(rates) < 1.2
    assert np.mean(widths[1]) > 1.5 * np.mean(widths[0])
    assert np.mean(waves[0]) > 0.15
    assert np.mean(waves[1]) < -0.1


def test_the_same_every_time_and_of_any_length():
    assert torch.equal(ecg(Options()).inputs, ecg(Options()).inputs)
    short = ecg(Options(size=48)).inputs
    assert short.shape == (1000, 1, 48)
    assert len(short.flatten(1).unique(dim=0)) == 1000
    with pytest.raises(ValueError, match="channels is 3"):
        ecg(Options(channels=3))


def test_masks_are_the_bright_parts():
    raw = photo_masks(Options(size=64))
    count = len(raw.inputs)
    assert raw.inputs.shape == (count, 3, 64, 64)
    assert raw.labels.shape == (count, 64, 64)
    assert raw.labels.dtype == torch.int64
    assert raw.person_names == tuple(PHOTOS)
    luma = (raw.inputs.float() * torch.tensor(LUMA)[:, None, None]).sum(1)
    for photo in range(len(PHOTOS)):
        own = raw.persons == photo
        bright = raw.labels[own] == 1
        assert 0.02 < float(bright.float().mean()) < 0.9
        assert float(luma[own][bright].min()) >= float(luma[own][~bright].max()) - 1e-3
