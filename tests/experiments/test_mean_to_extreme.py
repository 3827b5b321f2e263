"""The study of paper C: its parts on few images, against laws that they do not use."""

import numpy as np
import pytest
import torch

from leakbound.attacks.trap_estimators import unbiased
from leakbound.experiments.mean_to_extreme import claims, copies, figures, grid, trap
from leakbound.random import stream


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(trap, "IMAGES", 40)
    monkeypatch.setattr(trap, "TILES", 200)
    monkeypatch.setattr(grid, "REPEATS", 1)


@pytest.mark.parametrize(("dim", "shape"), [(4, (1, 2, 2)), (3072, (3, 32, 32))])
def test_records_are_real_images_of_one_norm(few, dim, shape):
    found = trap.records(dim, "optimal")
    assert found.inputs.shape == (40, *shape)
    torch.testing.assert_close(found.flat.norm(dim=1), torch.full((40,), 1.01).double())
    assert not found.rest.any()
    assert len(torch.unique(found.flat, dim=0)) > 30


def test_a_sink_takes_its_share_of_the_clip_norm(few):
    found = trap.records(4, "linear layer of 1M")
    assert (found.rest > 0.1).all()
    whole = torch.hypot(found.rest, found.flat.norm(dim=1))
    torch.testing.assert_close(found.beta * whole, torch.ones(40).double())
    near = trap.errors(found, 1e-6, unbiased, stream(0, "sink"))
    forgotten = trap.errors(found, 1e-6, unbiased, stream(0, "sink"), scale_known=False)
    assert float(near.max()) < 1e-8 < 1e-4 < float(forgotten.min())


def test_the_error_is_that_of_the_clipped_noise(few):
    found = trap.directions(3072, 400, stream(1, "directions"))
    mean = float(trap.errors(found, 0.1, unbiased, stream(1, "noise")).mean())
    assert mean == pytest.approx((0.1 * 1.01) ** 2, rel=0.01)


def test_boxes_follow_the_law_and_reject_another(few, monkeypatch):
    monkeypatch.setattr(trap, "NOISES", (0.1,))
    found = {(4, "optimal"): trap.records(4, "optimal")}
    (row,) = grid.boxes(found)
    assert row.fits > 0.001
    real = trap.release
    monkeypatch.setattr(
        trap, "release", lambda r, n, s: real(r, 3 * n, s)
    )  # three times the noise that is stated
    (row,) = grid.boxes(found)
    assert row.fits < 1e-6


def test_certificates_are_beaten_as_often_as_the_exact_law_says(few, monkeypatch):
    monkeypatch.setattr(grid, "PROMISED_AT", {4: (0.3,), 3072: (0.006,)})
    monkeypatch.setattr(trap, "IMAGES", 400)
    for row in grid.certificates():
        spread = np.sqrt(row.exact * (1 - row.exact) / row.n)
        assert abs(row.hits / row.n - row.exact) < 4 * spread + 1e-9
        assert row.exact <= row.upper * (1 + 1e-9)
        assert row.exact > row.promised


def test_no_estimator_beats_its_edge_and_a_cheat_is_seen(few, monkeypatch):
    monkeypatch.setattr(trap, "NOISES", (0.3,))
    found = {(4, "optimal"): trap.records(4, "optimal")}
    assert grid.beaten(found).above == ()
    monkeypatch.setattr(trap, "errors", lambda *_, **__: torch.zeros(400).double() + 1e-9)
    assert grid.beaten(found).above


def test_claims_of_the_laws(few):
    by = {claim.number: claim for claim in [*claims.limits(), claims.sightings()]}
    assert "0.756" in by["3-5"].measured
    assert "5.491" in by["3-5"].measured
    assert by["3-7"].word == claims.rows_of_trap().word == "holds"


def test_a_batch_can_help_among_like_images(few):
    claim = claims.batches(trap.records(3072, "optimal"))
    assert "B = 32" in claim.measured


def test_tables_and_pictures(few, tmp_path):
    rows = [copies.Copied("none", (1.0, 1.0, 1.0), (0.5, 0.7, 0.6))]
    assert copies.table(rows)[-1] == "| none | 1 | 1 | 1 | 0.600 (0.500 to 0.700) |"
    figures.calibration(tmp_path)
    figures.surface(tmp_path)
    for name in ("noise_over_eta.png", "risk_surface.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
