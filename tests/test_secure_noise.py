"""Noise of the system's entropy: its law, and what the floating-point numbers tell through it."""

import pytest
import torch
from scipy import stats

import leakbound.randomness
from leakbound.core import Gaussian, Laplace, Unit, Update
from leakbound.covariance import Structured
from leakbound.randomness import on_grid, secure, stream

STD, COUNT = 1.3, 4000


def noised(value, noise, count=COUNT, dtype=torch.float64, source=None):
    rows = torch.full((1, count), value, dtype=dtype)
    return Update(rows, Unit.CLIENT, (1,)).noised(noise, source or secure()).rows[0]


def impossible(released, std):
    """Which values no 52-bit draw times std can be, for a sum of 0."""
    uniform = (torch.special.ndtr(released / std) * 2.0**52).floor()
    missing = torch.ones_like(released).bool()
    for offset in range(-12, 13):
        place = (uniform + offset).clamp(0, 2**52 - 1)
        missing &= torch.special.ndtri((place + 0.5) / 2.0**52) * std != released
    return missing


def test_without_the_grid_nine_of_ten_numbers_give_the_sum_away(monkeypatch):
    sent = noised(0.3, Gaussian(STD**2))
    assert torch.equal(sent * 2**24, (sent * 2**24).round())
    monkeypatch.setattr(leakbound.randomness, "GRID", -300)
    assert float(impossible(noised(0.3, Gaussian(STD**2)), STD).double().mean()) > 0.8
    assert not bool(impossible(noised(0.0, Gaussian(STD**2)), STD).any())


def test_every_number_has_many_draws_behind_it():
    sent = noised(0.3, Gaussian(STD**2))
    cell = 2.0**-24
    high, low = (sent + cell / 2) / STD, (sent - cell / 2) / STD
    ways = (torch.special.ndtr(high) - torch.special.ndtr(low)) * 2.0**52
    assert float(ways.median()) > 1e6
    assert float(ways.min()) > 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("kind", ["gaussian", "laplace", "structured"])
def test_the_law_is_the_declared_one(kind, dtype):
    scale = torch.tensor([0.5, 2.0], dtype=dtype).repeat(COUNT)
    if kind == "gaussian":
        noise, law = Gaussian(scale**2), stats.norm
    elif kind == "laplace":
        noise, law = Laplace(scale), stats.laplace
    else:
        noise, law = Gaussian(Structured(scale)), stats.norm
    draws = ((noised(0.25, noise, 2 * COUNT, dtype) - 0.25) / scale).numpy()
    for part in (draws[::2], draws[1::2]):
        assert stats.kstest(part, law().cdf).pvalue > 1e-6
        assert stats.kstest(part * 1.35, law().cdf).pvalue < 1e-4


def test_coordinates_have_grids_of_their_own():
    values = torch.tensor([1 / 3, 1 / 3, 1 / 3, 1 / 3], dtype=torch.float64)
    spread = torch.tensor([1.0, 1.99, 2.0, 0.0], dtype=torch.float64)
    cells = torch.tensor([2.0**-24, 2.0**-24, 2.0**-23], dtype=torch.float64)
    found = on_grid(values, spread)
    assert torch.equal(found[:3] / cells, (values[:3] / cells).round())
    assert found[3] == values[3]


def test_withheld_coordinates_stay_as_they_are():
    rows = torch.full((1, 6), 1 / 3, dtype=torch.float64)
    mask = torch.tensor([[True, False] * 3])
    update = Update(rows, Unit.CLIENT, (1,)).masked(mask, by_value=True)
    sent = update.noised(Gaussian(1.0), secure(), keep_mask=True)
    assert torch.equal(sent.rows[~mask], torch.zeros(3, dtype=torch.float64))
    assert bool((sent.rows[mask] != 1 / 3).all())


def test_seeded_noise_is_left_as_it_is_drawn():
    draw = torch.randn(1, 5, generator=stream(0, "noise"), dtype=torch.float64)[0]
    sent = noised(0.25, Gaussian(4.0), 5, source=stream(0, "noise"))
    assert torch.equal(sent, 0.25 + draw * 2)
