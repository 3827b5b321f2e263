"""The one rule: what was measured, what a bound excludes, and what both together say."""

import io

import pytest
import torch
from PIL import Image

from leakbound.assess.criterion import Criterion
from leakbound.assess.measure import GAP, guesses, strip
from leakbound.assess.record import (
    CERTIFIED,
    EXPOSED,
    GUESSABLE,
    HONEST,
    PROTECTED,
    RECOVERABLE,
    THESE,
    UNDECIDED,
    UNDER_MODEL,
    Attained,
    Bound,
)
from leakbound.assess.verdict import together, verdict
from leakbound.core import Batch
from leakbound.domains import of_shape


def bound(**changes):
    known = {"name": "b", "value": 0.1, "psnr": 10.0, "prior": "p", "covers": "all"}
    known |= {"rests_on_prior": True, "excludes_threshold": True, "on_average": False}
    return Bound(**known | changes)


EXCLUDES = bound(basis="sample")
MODEL = bound()
CRITERION = Criterion.of(of_shape((1, 2, 2)), psnr=20.0)


def matched(psnr, baseline):
    """What the criterion says of constant images that are so far from black."""
    truth = torch.zeros(len(psnr), 1, 2, 2)

    def at(levels):
        errors = [10 ** (-level / 20) for level in levels]
        return torch.tensor(errors, dtype=torch.float64)[:, None, None, None].expand_as(truth)

    return CRITERION.met(truth, at(psnr), at(baseline))


@pytest.mark.parametrize(
    ("psnr", "baseline", "bounds", "wanted"),
    [
        ([20.0], [11.0], [], EXPOSED),
        ([19.999], [11.0], [], UNDECIDED),
        ([5.0, 25.0], [11.0, 11.0], [], EXPOSED),
        ([25.0], [25.0], [], UNDECIDED),  # no closer than without the update
        ([25.0], [26.0], [], UNDECIDED),
        ([12.0], [11.0], [EXCLUDES], PROTECTED),
        ([12.0], [11.0], [bound(covers="unbiased")], UNDECIDED),
        ([12.0], [11.0], [bound(excludes_threshold=False)], UNDECIDED),
        ([30.0], [11.0], [bound(covers="unbiased")], EXPOSED),
        ([30.0], [11.0], [bound(probability=0.001)], EXPOSED),
        ([12.0], [11.0], [bound(probability=0.001, basis="sample")], PROTECTED),
        ([12.0], [11.0], [bound(probability=0.001)], UNDER_MODEL),
        ([12.0], [11.0], [MODEL, EXCLUDES], PROTECTED),
        ([12.0], [11.0], [MODEL, bound(basis="known model")], HONEST),
        ([12.0], [11.0], [bound(basis="examples"), bound(basis="known model")], THESE),
        ([12.0], [11.0], [EXCLUDES, bound(basis="examples")], PROTECTED),
    ],
)
def test_verdict(psnr, baseline, bounds, wanted):
    assert verdict(matched(psnr, baseline), bounds) == wanted


def attained(success, low, high, accepted=0.01):
    return Attained(
        attack="codebook",
        success=success,
        baseline=(low, high),
        accepted=accepted,
        confidence=0.95,
        public_examples=100,
    )


@pytest.mark.parametrize(
    ("known", "bounds", "wanted"),
    [
        (attained(0.02, 0.0, 0.005), [], RECOVERABLE),
        (attained(0.02, 0.0, 0.02), [], UNDECIDED),  # a guess may do as much
        (attained(0.01, 0.0, 0.005), [], UNDECIDED),
        (attained(0.02, 0.015, 0.03), [], GUESSABLE),
        (attained(0.2, 0.015, 0.03), [], RECOVERABLE),
        (attained(0.02, 0.015, 0.03), [MODEL], GUESSABLE),
        (attained(0.002, 0.001, 0.005), [MODEL], UNDER_MODEL),
        (attained(0.002, 0.001, 0.005), [EXCLUDES], PROTECTED),
    ],
)
def test_what_attacks_attain_comes_before_bounds(known, bounds, wanted):
    assert verdict([False], bounds, attained=known) == wanted
    assert verdict([True], [], attained=known) == EXPOSED


def test_a_certificate_is_an_exposure_without_the_truth():
    assert verdict([], certified=True) == CERTIFIED == "exposed (certified)"
    assert verdict([True], certified=True) == EXPOSED


def test_a_lucky_image_is_exposed_whatever_the_mean():
    average = bound(excludes_threshold=False, on_average=True, basis="sample")
    assert verdict([True, False], [average]) == "exposed"
    assert verdict([False, False], [average]) == "protected on average"
    assert verdict([False], [bound(excludes_threshold=False)]) == "undecided"
    unbiased = bound(excludes_threshold=False, on_average=True, covers="unbiased")
    assert verdict([False], [unbiased]) == "undecided"
    assert verdict([False], [EXCLUDES, average]) == "protected from strangers"
    fitted = bound(excludes_threshold=False, on_average=True)  # real examples are no Gaussians
    assert verdict([False], [fitted]) == "undecided"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["protected from strangers", "exposed"], "exposed"),
        (["protected from strangers", CERTIFIED], CERTIFIED),
        (["protected from strangers", "undecided"], "undecided"),
        (["protected from strangers", "protected on average"], "protected on average"),
        (["protected from strangers", "protected under a model"], "protected under a model"),
        (["protected on average", "protected under a model"], "protected on average"),
        (["protected under a model", "undecided"], "undecided"),
        ([CERTIFIED, "exposed"], "exposed"),
        (["protected from strangers", None], "protected from strangers"),
        ([None], "undecided"),
        ([], "undecided"),
    ],
)
def test_together(given, wanted):
    assert together(given) == wanted


@pytest.mark.parametrize("psnr", [0.0, -3.0, 300.0, float("nan")])
def test_a_criterion_is_a_positive_number_of_decibels(psnr):
    with pytest.raises(ValueError, match="psnr is"):
        Criterion.of(of_shape((1, 2, 2)), psnr=psnr)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (2, "L"), (3, "RGB")])
def test_strips(channels, mode):
    """Clamped, side by side, named by their content."""
    images = torch.stack([torch.full((channels, 4, 5), value) for value in (-9.0, 9.0)])
    name, content = strip(images, (-1.0, 1.0))
    picture = Image.open(io.BytesIO(content))
    assert (picture.mode, picture.size) == (mode, (2 * 5 + GAP, 4))
    assert picture.convert("L").getpixel((0, 0)) == 0
    assert picture.convert("L").getpixel((11, 3)) == 255
    assert strip(images, (-1.0, 1.0)) == (name, content)
    assert strip(images.flip(0), (-1.0, 1.0))[0] != name


def test_an_attack_has_to_beat_every_guess_without_an_update():
    """A class mean is closer to its class than the mean of all; a dark example is nearly black."""
    domain = of_shape((1, 2, 2))
    public = Batch(
        torch.tensor([0.2, 0.2, 0.9, 0.9])[:, None, None, None].expand(4, 1, 2, 2), DOZEN
    )
    truth = Batch(torch.tensor([0.9, 0.02, 0.6])[:, None, None, None].expand(3, 1, 2, 2), ASKED)
    found = guesses(domain, truth, public)[:, 0, 0, 0]
    torch.testing.assert_close(found, torch.tensor([0.9, 0.0, 0.55]))
    alone = guesses(domain, truth, None)[:, 0, 0, 0]
    torch.testing.assert_close(alone, torch.tensor([1.0, 0.0, 0.5]))


DOZEN, ASKED = torch.tensor([0, 0, 1, 1]), torch.tensor([1, 0, 7])
