"""Distances against closed forms; weights that restrict and whiten; total variation by hand."""

import numpy as np
import pytest
import torch

from leakbound.attacks.matching import distances
from leakbound.attacks.matching.distances import (
    DISTANCES,
    Cosine,
    total_variation,
    variation_gradients,
)
from leakbound.randomness import bernoulli, normal, stream

SPANS = [(0, 4), (4, 10)]
WIDE = torch.zeros((), dtype=torch.float64)
GUESS = normal((2, 10), stream(0, "guess"), like=WIDE)
SEEN = normal((2, 10), stream(0, "seen"), like=WIDE)
WEIGHTS = normal((2, 10), stream(0, "weights"), like=WIDE).abs()


def _cosine(a, b):
    return np.mean(
        [1 - x @ y / np.linalg.norm(x) / np.linalg.norm(y) for x, y in zip(a, b, strict=True)]
    )


def _above_noise(b):
    """The shares of energy above 1; without weights, or if nothing is above, all count the same."""
    energy = [np.mean(b[:, i:j] ** 2) for i, j in SPANS]
    share = [max(0.0, 1 - 1 / e) for e in energy]
    return share if any(share) and not np.array_equal(b, SEEN.numpy()) else [1.0] * len(share)


CLOSED = {
    "cosine": _cosine,
    "cosine_layers": lambda a, b: np.mean([_cosine(a[:, i:j], b[:, i:j]) for i, j in SPANS]),
    "cosine_signal": lambda a, b: np.average(
        [_cosine(a[:, i:j], b[:, i:j]) for i, j in SPANS], weights=_above_noise(b)
    ),
    "cosine_weighted": lambda a, b: np.average(
        [_cosine(a[:, i:j], b[:, i:j]) for i, j in SPANS],
        weights=[np.count_nonzero(b[:, i:j]) for i, j in SPANS],
    ),
    "euclidean": lambda a, b: ((a - b) ** 2).sum(),
    "manhattan": lambda a, b: np.abs(a - b).sum(),
}
every = pytest.mark.parametrize("name", DISTANCES)


@every
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "whitened"])
def test_closed_form(name, weights):
    scale = 1.0 if weights is None else weights.numpy()
    wanted = CLOSED[name](GUESS.numpy() * scale, SEEN.numpy() * scale)
    assert float(DISTANCES[name](GUESS, SEEN, weights, SPANS)) == pytest.approx(wanted)


@pytest.mark.parametrize("apart", [1e-3, 1e-5, 1e-6])
@pytest.mark.parametrize("form", ["traced", "closed"])
def test_a_small_angle_keeps_its_digits_in_float32(apart, form):
    """1 - cosine would round to 0 or below, which ended searches that could still improve."""
    seen = normal((1, 10_000), stream(0, "seen"), like=torch.zeros(()))
    guess = 3 * (seen + apart * normal(seen.shape, stream(1, "guess"), like=seen))
    wanted = float(DISTANCES["cosine"](guess.double(), seen.double(), None, []))
    if form == "traced":
        found = DISTANCES["cosine"](guess, seen, None, [])
    else:
        found = Cosine(seen, None).at(guess, torch.empty_like(guess))[0]
    assert float(found) == pytest.approx(wanted, rel=0.1)


@every
def test_withheld_coordinates_have_no_say(name):
    mask = bernoulli((2, 10), 0.6, stream(1)).double()
    other = SEEN + (1 - mask) * 100
    guess = GUESS.clone().requires_grad_()
    found = DISTANCES[name](guess, other, mask, SPANS)
    torch.testing.assert_close(found, DISTANCES[name](GUESS, SEEN, mask, SPANS))
    (slope,) = torch.autograd.grad(found, guess)
    assert not bool((slope * (1 - mask)).any())
    assert bool(slope.any())


@every
def test_equal_rows_have_distance_zero_and_no_slope(name):
    guess = SEEN.clone().requires_grad_()
    found = DISTANCES[name](guess, SEEN, WEIGHTS, SPANS)
    (slope,) = torch.autograd.grad(found, guess)
    assert found.item() == pytest.approx(0, abs=1e-12)
    assert float(slope.abs().max()) < 1e-9


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_checks_out_and_zero_rows_stay_finite(name, dtype):
    zero = torch.zeros(2, 10, dtype=dtype, requires_grad=True)
    for seen in (SEEN.to(dtype), torch.zeros(2, 10, dtype=dtype)):
        found = DISTANCES[name](zero, seen, None, SPANS)
        (slope,) = torch.autograd.grad(found, zero)
        assert bool(torch.isfinite(found) & torch.isfinite(slope).all())
    assert torch.autograd.gradcheck(
        lambda g: DISTANCES[name](g, SEEN, WEIGHTS, SPANS), GUESS.clone().requires_grad_()
    )


@pytest.mark.parametrize("name", ["cosine", "cosine_layers"])
@pytest.mark.parametrize("factor", [1e-8, 1e8])
def test_cosine_is_blind_to_scale_in_single_precision(name, factor):
    guess, seen = GUESS.float(), SEEN.float()
    near = DISTANCES[name](guess * factor, seen / factor, None, SPANS)
    torch.testing.assert_close(near, DISTANCES[name](guess, seen, None, SPANS))


def test_total_variation_by_hand():
    images = normal((2, 3, 5, 4), stream(0), like=WIDE)
    down = across = 0.0
    for image in images.reshape(-1, 5, 4).numpy():
        for y in range(5):
            for x in range(4):
                down += abs(image[y + 1, x] - image[y, x]) if y < 4 else 0
                across += abs(image[y, x + 1] - image[y, x]) if x < 3 else 0
    wanted = down / (6 * 4 * 4) + across / (6 * 5 * 3)
    assert float(total_variation(images)) == pytest.approx(wanted)
    assert float(total_variation(torch.ones(1, 1, 4, 4))) == 0
    series = images.flatten(2)
    along = abs(series[..., 1:] - series[..., :-1]).mean()
    assert float(total_variation(series)) == pytest.approx(float(along))
    for batches in (torch.stack([images, 2 * images]), torch.stack([series, 2 * series])):
        leaf = batches.clone().requires_grad_()
        wanted = [total_variation(own) for own in leaf]
        slopes = torch.autograd.grad(sum(wanted), leaf)[0]
        found = variation_gradients(batches)
        for (value, slope), right, own in zip(found, wanted, slopes, strict=True):
            assert float(value) == pytest.approx(float(right.detach()))
            torch.testing.assert_close(slope, own)
    assert float(total_variation(torch.rand(1, 1, 1, 1))) == 0


@pytest.mark.parametrize("block", [2**18, 64])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_together_have_the_cosines_of_each_alone(block, weighted, monkeypatch):
    """Bit by bit if a row is one block."""
    monkeypatch.setattr(distances, "BLOCK", block)
    like = torch.zeros(())
    draws = [normal((3, 1000), stream(number, "rows"), like=like) for number in range(3)]
    guess, seen, weights = draws[0], draws[1], draws[2].abs() if weighted else None
    into = torch.empty_like(guess)
    found, factors = Cosine(seen, weights).at(guess, into)
    for row in range(3):
        part = slice(row, row + 1)
        own = torch.empty_like(guess[part])
        trust = None if weights is None else weights[part]
        alone, factor = Cosine(seen[part], trust).at(guess[part], own)
        if block > 1000:
            assert torch.equal(found[part], alone)
            assert torch.equal(factors[row] * into[part], factor * own)
        leaf = guess[part].double().requires_grad_()
        exact = None if trust is None else trust.double()
        wanted = DISTANCES["cosine"](leaf, seen[part].double(), exact, [])
        assert float(alone) == pytest.approx(float(wanted.detach()), rel=1e-5)
        slope = torch.autograd.grad(wanted, leaf)[0]
        torch.testing.assert_close((factor * own).double(), slope, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("seen_scale", [1e-11, 1e-6, 1.0, 1e10])
@pytest.mark.parametrize("guess_scale", [1e-11, 1e-6, 1.0, 1e10])
@pytest.mark.parametrize("weighted", [False, True])
def test_closed_forms_hold_at_every_scale(guess_scale, seen_scale, weighted):
    guess = (GUESS[:1] * guess_scale).float().requires_grad_()
    seen, weights = (SEEN[:1] * seen_scale).float(), WEIGHTS[:1].float() if weighted else None
    wanted = DISTANCES["cosine"](guess, seen, weights, SPANS)
    (slope,), wanted = torch.autograd.grad(wanted, guess), wanted.detach()
    into = torch.empty_like(seen)
    found, factor = Cosine(seen, weights).at(guess.detach(), into)
    assert abs(float(found - wanted)) < 2e-6
    assert torch.allclose(factor * into, slope, rtol=1e-4, atol=2e-6 / guess_scale)
