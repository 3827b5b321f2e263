"""Parts of an example that an attacker knows: names, places, and what is left."""

import pytest
import torch

from leakbound.domains import Column, NumberDomain, SeriesDomain, TableDomain, TokenDomain, of_shape
from leakbound.domains.known import known_parts
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
]


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
