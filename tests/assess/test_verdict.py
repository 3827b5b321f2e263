import io

import pytest
import torch
from PIL import Image

from leakbound.audit import EXPOSED, PROTECTED, UNDECIDED, verdict
from leakbound.audit.pictures import GAP, strip
from leakbound.assess.verdict import CERTIFIED

EXCLUDES = {"covers": "all", "excludes_threshold": True}


@pytest.mark.parametrize(
    ("psnr", "blind", "bounds", "wanted"),
    [
        ([20.0], [11.0], [], EXPOSED),
        ([19.999], [11.0], [], UNDECIDED),
        ([5.0, 25.0], [11.0, 11.0], [], EXPOSED),
        ([25.0], [25.0], [], UNDECIDED),  # no closer than without the update
        ([25.0], [None], [], EXPOSED),
        ([None], [11.0], [], UNDECIDED),
        ([float("nan")], [11.0], [], UNDECIDED),
        ([12.0], [11.0], [EXCLUDES], PROTECTED),
        ([12.0], [11.0], [EXCLUDES | {"covers": "unbiased"}], UNDECIDED),
        ([12.0], [11.0], [EXCLUDES | {"excludes_threshold": False}], UNDECIDED),
        ([30.0], [11.0], [EXCLUDES | {"covers": "unbiased"}], EXPOSED),
    ],
)
def test_verdict(psnr, blind, bounds, wanted):
    assert verdict(psnr, blind, 20.0, bounds) == wanted


def test_a_certificate_is_an_exposure_without_the_truth():
    assert verdict([], [], 20.0, certified=True) == CERTIFIED == "exposed (certified)"
    assert verdict([90.0], [11.0], 20.0, certified=True) == EXPOSED
    with pytest.raises(RuntimeError, match="one is wrong"):
        verdict([12.0], [11.0], 20.0, certified=True)
    with pytest.raises(RuntimeError, match="one is wrong"):
        verdict([], [], 20.0, [EXCLUDES], certified=True)


def test_an_attack_beyond_a_bound_is_a_bug():
    with pytest.raises(RuntimeError, match="one is wrong"):
        verdict([30.0], [11.0], 20.0, [EXCLUDES])


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
