"""Parts of an example that an attacker knows: names, places, and what is left."""

import numpy
import pytest
import torch
from PIL import Image

from leakbound import tensors
from leakbound.domains import Column, NumberDomain, SeriesDomain, TableDomain, TokenDomain, of_shape
from leakbound.domains.known import as_marked, known_parts, names_in
from leakbound.randomness import stream

TABLE = TableDomain(
    (
        Column("age", "integer", 0, 100),
        Column("sex", "categorical", levels=("f", "m")),
        Column("dose", low=0.0, high=2.0, missing=True),
    )
)
IMAGE, SERIES = of_shape((2, 6, 4)), SeriesDomain((3, 5), scales=(1.0, 2.0, 3.0))
CASES = [
    (IMAGE, "region:top", 24),
    (IMAGE, "region:left", 24),
    (IMAGE, "region:1-2,0-3", 16),
    (IMAGE, "region:5,3", 2),
    (NumberDomain((7,)), "places:0-2,5", 4),
    (SERIES, "channels:0,2", 10),
    (SERIES, "past:2", 6),
    (TokenDomain(9, 12), "prefix:4", 4),
    (TokenDomain(9, 12), "places:0,11", 2),
    (TABLE, "sex", 2),
    (TABLE, "age, dose", 3),
    (TABLE, "all", 5),
]


@pytest.fixture
def mask(tmp_path, monkeypatch):
    """Masks of 6 x 4 pixels, of which three are known, in every format."""
    known = numpy.zeros((6, 4))
    known[1, 2] = known[5, 0] = known[5, 3] = 7
    numpy.savez(tmp_path / "m.npz", known)
    tensors.write(tmp_path / "m.safetensors", {"mask": torch.from_numpy(known)})
    Image.fromarray(known.astype(numpy.uint8)).save(tmp_path / "m.png")
    numpy.savez(tmp_path / "empty.npz", 0 * known)
    numpy.savez(tmp_path / "full.npz", 1 + known)
    numpy.savez(tmp_path / "two.npz", known, known)
    (tmp_path / "bad.png").write_bytes(b"no picture")
    (tmp_path / "bad.npz").write_bytes(b"no archive")
    monkeypatch.chdir(tmp_path)
    return torch.from_numpy(known) != 0


@pytest.mark.parametrize("name", ["m.npz", "m.safetensors", "m.png"])
def test_a_mask_names_pixels_of_all_channels(mask, name):
    known = known_parts(IMAGE, f"mask:{name}")
    assert torch.equal(known.places.reshape(2, 6, 4), mask.expand(2, 6, 4))
    assert known.rest.shape == (42,)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.npz", "does not exist"),
        ("empty.npz", "0 everywhere"),
        ("full.npz", "nothing is left"),
        ("two.npz", "holds 2 arrays"),
        ("bad.png", "no .npz, .safetensors or .png file"),
        ("bad.npz", "no .npz, .safetensors or .png file"),
        ("m.txt", "does not exist"),
    ],
)
def test_what_is_no_mask_is_refused(mask, name, message):
    with pytest.raises(ValueError, match=message):
        known_parts(IMAGE, f"mask:{name}")


def test_a_mask_of_other_images_is_refused(mask):
    with pytest.raises(ValueError, match=r"shape \(6, 4\).*\(4, 6\) pixels"):
        known_parts(of_shape((1, 4, 6)), "mask:m.npz")


def test_a_name_with_a_comma_is_in_quotes():
    names = ("dose, mg", 'the "old" one', "plain")
    table = TableDomain(tuple(Column(name, known=True) for name in names))
    assert known_parts(table, 'plain, "dose, mg"').places.tolist() == [True, False, True]
    assert known_parts(table, 'all but "dose, mg"').places.tolist() == [False, True, True]
    assert names_in(as_marked(table, "")) == [*names]
    with pytest.raises(ValueError, match='the columns are "dose, mg", "the ""old"" one", plain'):
        known_parts(table, "dose, mg")


@pytest.mark.parametrize(("domain", "text", "count"), CASES, ids=lambda value: str(value)[:25])
def test_both_parts_are_domains_of_their_own(domain, text, count):
    known = known_parts(domain, text)
    assert int(known.places.sum()) == count
    x = domain.start(5, stream(0, "known"))
    values, unknown = known.values(x), known.unknown(x)
    assert torch.equal(known.part.project(values), values)
    assert torch.equal(known.rest.project(unknown), unknown)
    assert torch.equal(known.joined(values, unknown), x)
    other = domain.start(5, stream(1, "known"))
    mixed = known.joined(values, known.unknown(other))
    assert torch.equal(known.values(mixed), values)
    assert known.rest.distance(known.unknown(mixed), known.unknown(other)).tolist() == [0.0] * 5


def test_the_right_pixels_are_known():
    known = known_parts(of_shape((1, 4, 4)), "region:bottom")
    assert known.places.reshape(4, 4)[:, 0].tolist() == [False, False, True, True]
    channels = known_parts(SERIES, "channels:1")
    assert channels.rest.scales == (1.0, 3.0)
    assert [column.name for column in known_parts(TABLE, "sex").rest.columns] == ["age", "dose"]


def test_a_criterion_counts_the_unknown_columns_only():
    """With 18 of 20 columns known, 90 % right means both of the others."""
    domain = TokenDomain(50, 20)
    assert domain.within(psnr=20, share=0.9) == 2
    assert known_parts(domain, "prefix:18").rest.within(psnr=20, share=0.9) == 0


@pytest.mark.parametrize(
    ("domain", "text", "message"),
    [
        (IMAGE, "top", "give region:"),
        (IMAGE, "region:0-6,0-3", "from 0 to 5"),
        (IMAGE, "region:0-5,0-3", "nothing is left"),
        (IMAGE, "region:2-1,0-3", "from 0 to 5"),
        (SERIES, "channels:x", "no number"),
        (SERIES, "past:5", "from 1 to 4"),
        (TokenDomain(9, 12), "prefix:0", "from 1 to 11"),
        (TokenDomain(9, 12), "places:", "give places:"),
        (TABLE, "age,zip", "the columns are age, sex, dose"),
        (TABLE, "age,sex,dose", "nothing is left"),
        (NumberDomain((3,)), "places:99999999999", "no number"),
    ],
)
def test_what_cannot_be_known_is_refused(domain, text, message):
    with pytest.raises(ValueError, match=message):
        known_parts(domain, text)
