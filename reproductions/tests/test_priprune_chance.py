"""Claim 4-0 on few images: the guesses, the counts and the picture."""

import numpy as np
import pytest
import torch

from leakbound_reproductions.priprune import chance


@pytest.fixture(scope="module")
def measured():
    return chance.rows(24)


def test_partial_reconstructions_are_near_the_truth_and_the_others_know_nothing():
    truth, made = chance.guesses("photographs", 24)
    assert truth.shape == made[chance.OTHER].shape == (24, 3, 32, 32)
    assert not (made[chance.OTHER] == truth).flatten(1).all(1).any()
    for decibels in (15, 20):
        error = (made[f"shading at {decibels} dB"] - truth).square().flatten(1).mean(1)
        assert (error <= 10 ** (-decibels / 10) * (1 + 1e-4)).all()
    shuffled = made["its pixels shuffled"]
    torch.testing.assert_close(shuffled.flatten(1).sort().values, truth.flatten(1).sort().values)
    noise = made[chance.NOISE].flatten(1)
    assert abs(np.corrcoef(noise.ravel(), truth.ravel())[0, 1]) < 0.02


def test_clear_photographs_have_contrast():
    truth, others = chance.images("clear photographs", 24)
    assert (torch.cat([truth, others]).flatten(1).std(1) >= chance.CONTRAST).all()


def test_raw_nmi_ranks_noise_above_true_photographs_and_others_do_not(measured):
    by = {(row.data, row.guess): row for row in measured}
    for name in ("photographs", "clear photographs"):
        row = by[name, "washed out, noise"]
        assert row.below_noise["nmi"] > 0.7 * row.n
        for measure in ("binned_nmi", "adjusted_mi", "psnr", "ssim"):
            assert row.below_noise[measure] <= 0.1 * row.n, measure
        assert row.means["nmi"].mean < by[name, chance.NOISE].means["nmi"].mean


def test_on_digits_it_does_not(measured):
    for row in measured:
        if row.knows and row.data.startswith("digits"):
            assert row.below_noise["nmi"] <= 0.1 * row.n


def test_intervals():
    assert chance.share(0, 200) == pytest.approx((0.0, 1 - 0.025 ** (1 / 200)))
    assert chance.share(200, 200)[1] == 1.0


def test_table_and_picture(measured, tmp_path):
    lines = chance.table(measured)
    assert len(lines) == 2 + len(chance.SETS) * 12
    assert len({line.count("|") for line in lines}) == 1
    path = tmp_path / "chance.png"
    chance.draw([row for row in measured if row.data == "clear photographs"], path)
    assert path.read_bytes().startswith(b"\x89PNG")
