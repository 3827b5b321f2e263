"""Rows of a table against plain Python on the values themselves, and exhaustive search."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leakbound.domains import Column, TableDomain
from leakbound.randomness import stream
from leakbound.report.template import environment_of

COLUMNS = (
    Column("age", "integer", 18, 90, unit="years", typical=40, spread=15),
    Column("weight", low=40.0, high=160.0, missing=True, spread=12.0),
    Column("dose", low=0.0, high=2.0, center=1.0, scale=0.25, tolerance=0.3),
    Column("visits", "integer", 0, 7, tolerance=1.5, missing=True),
    Column("sex", "categorical", levels=("f", "m"), sensitive=True),
    Column("region", "categorical", levels=("n", "e", "s", "w"), missing=True),
)
DOMAIN = TableDomain(COLUMNS)
TOLERANCES = (0.49, 0.05 * 12.0, 0.3, 1.5)
PLACES = {"age": 0, "weight": 1, "dose": 3, "visits": 4, "sex": 6, "region": 8}


def encoded(row):
    """A row of values (None is missing) as inputs, written out by hand."""
    age, weight, dose, visits, sex, region = row
    out = [(age - 18) / 72]
    out += [0.0, 1.0] if weight is None else [(weight - 40) / 120, 0.0]
    out += [(dose - 1) / 0.25]
    out += [0.0, 1.0] if visits is None else [visits / 7, 0.0]
    out += [float(sex == level) for level in ("f", "m")]
    out += [float(region == level) for level in ("n", "e", "s", "w", None)]
    return out


def differ(x, y, scale=1.0):
    """Which columns of two rows of values differ, by the definition."""
    found = []
    for k, (a, b) in enumerate(zip(x, y, strict=True)):
        if k >= len(TOLERANCES) or a is None or b is None:
            found.append(a != b)
        else:
            found.append(abs(a - b) > scale * TOLERANCES[k])
    return found


def values(count, seed):
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        row = [int(draw.integers(18, 91)), float(draw.uniform(40, 160)), float(draw.uniform(0, 2))]
        row += [int(draw.integers(0, 8)), "fm"[draw.integers(2)], "nesw"[draw.integers(4)]]
        near = [
            max(18, row[0] - 1),
            min(160.0, row[1] + 1),
            row[2] * 0.8,
            row[3] ^ 1,
            row[4],
            row[5],
        ]
        for one in (row, near):  # pairs that are close in some columns
            for k in (1, 3, 5):
                one[k] = None if draw.random() < 0.2 else one[k]
            rows.append(tuple(one))
    return rows


def inputs(rows):
    return torch.tensor([encoded(row) for row in rows], dtype=torch.float64).float()


def test_inputs_have_their_places():
    assert DOMAIN.shape == (13,)
    assert [start for _, start, _ in DOMAIN.placed] == list(PLACES.values())
    assert DOMAIN.groups == ((6, 8), (8, 13))
    low, high = DOMAIN.box
    assert low.tolist() == [0.0] * 3 + [-4.0] + [0.0] * 9
    assert high.tolist() == [1.0] * 3 + [4.0] + [1.0] * 9


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_misses_distance_counts_and_costs_are_counted_by_hand(scale):
    rows = values(20, 0)
    x = inputs(rows)
    wanted = torch.tensor([[differ(a, b, scale) for b in rows] for a in rows])
    assert 0 < wanted.double().mean() < 0.95
    assert torch.equal(DOMAIN.misses(x[:, None], x[None], scale), wanted)
    assert torch.equal(DOMAIN.distances(x, x, scale), wanted.sum(-1))
    for k in range(len(rows)):
        found = DOMAIN.misses(x, x[k : k + 1].expand_as(x), scale)
        assert torch.equal(found, wanted[:, k])
    if scale == 1:
        assert torch.equal(DOMAIN.distance(x, x[:1].expand_as(x)), wanted[:, 0].sum(-1).double())
        costs = DOMAIN.costs(x, x)
        assert torch.equal(costs.floor(), wanted.sum(-1).double())
        assert bool((costs - costs.floor() < 0.5).all())
        share = 1 - wanted[:, 0].double().mean(-1)
        assert torch.allclose(DOMAIN.score(x, x[:1].expand_as(x)), 100 * share)


def test_ties_of_the_pairing_go_to_the_smaller_error():
    truth = inputs([(40, 80.0, 1.0, 3, "f", "n")])
    near, far = (inputs([(50, w, 1.0, 3, "f", "n")]) for w in (80.1, 80.5))
    one, other = DOMAIN.costs(truth, torch.cat([near, far]))[0].tolist()
    assert 1 < one < other < 1.5


@settings(deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([(1, 1), (0.5, 2), (0.25, 0.25), (3, 1)]))
def test_the_triangle_inequality_of_scaled_tolerances(seed, scales):
    s, t = scales
    x, y, z = (
        torch.cat([inputs(values(4, seed + k)), DOMAIN.start(8, stream(seed, k))]) for k in range(3)
    )
    sides = DOMAIN.misses(x, z, s).sum(-1) + DOMAIN.misses(z, y, t).sum(-1)
    assert bool((DOMAIN.misses(x, y, s + t).sum(-1) <= sides).all())
    two = (DOMAIN.distance(x, z) <= 1) & (DOMAIN.distance(y, z) <= 1)
    assert bool((DOMAIN.misses(x, y, 2.0)[two].sum(-1) <= 2).all())


def test_errors_at_the_tolerance_are_within_it():
    one = Column("x", low=0.0, high=10.0, tolerance=0.5)
    domain, x = TableDomain((one,)), torch.tensor([[0.3]])
    assert domain.distance(x, torch.tensor([[0.35]])).tolist() == [0]
    assert domain.distance(x, torch.tensor([[0.3501]])).tolist() == [1]
    assert domain.misses(x, torch.tensor([[0.4001]]), 2.0).tolist() == [[True]]
    assert domain.distance(x, torch.tensor([[math.nan]])).tolist() == [1]


def closest(x):
    """The closest point of the simplex: the best over all sets of coordinates above 0."""
    best, least = None, math.inf
    for size in range(1, len(x) + 1):
        for kept in map(list, combinations(range(len(x)), size)):
            p = np.zeros(len(x))
            p[kept] = x[kept] + (1 - x[kept].sum()) / size  # the closest with this sum
            if p.min() >= 0 and (off := ((p - x) ** 2).sum()) < least:
                best, least = p, off
    return best


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_the_projection_is_the_closest_valid_row(scale):
    x = scale * torch.randn(12, 13, generator=stream(0, "x"), dtype=torch.float64)
    found = DOMAIN.project(x.clone())
    low, high = (edge.double() for edge in DOMAIN.box)
    assert torch.equal(found[:, :6], x[:, :6].clamp(low[:6], high[:6]))
    for start, stop in DOMAIN.groups:
        wanted = np.stack([closest(row) for row in x[:, start:stop].numpy()])
        assert np.abs(found[:, start:stop].numpy() - wanted).max() < 1e-12


@pytest.mark.parametrize("value", [1e8, 3e38, -1e8, math.inf, -math.inf, math.nan])
def test_extreme_inputs_become_valid(value):
    for place in range(13):
        x = DOMAIN.start(1, stream(0))
        x[0, place] = value
        found = DOMAIN.hard(x)
        low, high = DOMAIN.box
        assert bool(((found >= low) & (found <= high)).all())
        for start, stop in DOMAIN.groups:
            assert sorted(found[0, start:stop].tolist()) == [0.0] * (stop - start - 1) + [1.0]
        if place in (7, 10) and value > 0:
            assert found[0, place] == 1


def test_valid_rows_stay_to_the_bit():
    x = inputs(values(20, 1))
    assert torch.equal(DOMAIN.project(x), x)
    assert torch.equal(
        DOMAIN.hard(x)[:, [0, 1, 2, 3, *range(6, 13)]], x[:, [0, 1, 2, 3, *range(6, 13)]]
    )


@pytest.mark.parametrize("high", [90, 10_000, 4_000_000])
def test_hard_rows_hold_whole_numbers_and_one_level(high):
    domain = TableDomain((Column("n", "integer", 18, high), *COLUMNS[1:]))
    x = domain.start(200, stream(0, high))
    found = domain.hard(x)
    assert torch.equal(domain.hard(found), found)
    number = 18 + (high - 18) * found[:, 0].double()
    assert bool(((number - number.round()).abs() <= 2.0**-24 * high).all())
    soft = 18 + (high - 18) * x[:, 0].double()
    assert bool(((number - soft).abs() <= 0.5 + 1e-6 * high).all())
    assert set(found[:, [2, 5, *range(6, 13)]].unique().tolist()) <= {0.0, 1.0}
    for start, stop in domain.groups:
        assert torch.equal(found[:, start:stop].argmax(1), x[:, start:stop].argmax(1))


def test_the_blind_guess_is_the_median_and_the_mode():
    rows = values(51, 2)
    found = DOMAIN.rows(DOMAIN.blind(inputs(rows))[None])[0]
    columns = list(zip(*rows, strict=True))
    known = [sorted(v for v in column if v is not None) for column in columns[:4]]
    lower = [column[(len(column) - 1) // 2] for column in known]
    assert found[:4] == (f"{lower[0]} years", *(f"{v:.4g}" for v in lower[1:3]), str(lower[3]))
    for text, column in zip(found[4:], columns[4:], strict=True):
        assert column.count(None if text == "(missing)" else text) == max(map(column.count, column))
    gone = [(30, None, 1.0, None, "f", None)] * 3 + rows[:1]
    assert DOMAIN.rows(DOMAIN.blind(inputs(gone))[None])[0][1::2] == ("(missing)",) * 3
    assert DOMAIN.blind(inputs(gone)[:0]).shape == (13,)


def test_fitted_columns_have_the_median_and_the_quartiles_of_present_values():
    rows = values(301, 3)
    found = DOMAIN.fitted(inputs(rows))
    for k, column in enumerate(found.columns[:4]):
        own = np.array([row[k] for row in rows if row[k] is not None], dtype=float)
        low, middle, high = np.quantile(own, (0.25, 0.5, 0.75))
        assert column.typical == pytest.approx(middle, rel=1e-5)
        assert column.spread == pytest.approx((high - low) / 1.349, rel=1e-5)
    assert found.columns[4:] == COLUMNS[4:]
    assert found.columns[1].allowed == pytest.approx(0.05 * found.columns[1].spread)
    assert DOMAIN.fitted(inputs(rows)[:0]) == DOMAIN
    rare = inputs([(20, 60.0, 0.5, 1, "f", "n")] * 9 + [(80, 60.0, 0.5, 1, "f", "n")])
    age, weight = DOMAIN.fitted(rare).columns[:2]
    assert (age.typical, age.spread) == (pytest.approx(20), pytest.approx(18))  # the deviation
    assert weight.spread is None
    assert weight.allowed == 0.05 * 120 / 4


def test_starts_follow_the_public_spread():
    x = DOMAIN.start(4000, stream(0))
    age = 18 + 72 * x[:, 0].double()
    assert abs(float(age.median()) - 40) < 1
    assert abs(float(age.quantile(0.75) - age.quantile(0.25)) / 1.349 - 15) < 1
    shares = x[:, 8:13].mean(0)
    assert bool(((shares - 0.2).abs() < 0.01).all())


def test_fields_are_texts_in_units_and_say_what_matches():
    truth, guess = inputs([(40, None, 1.0, 3, "f", None)]), inputs([(41, None, 1.2, 3, "m", None)])
    shown = {c.name: c for c in DOMAIN.fields(truth, guess, guess).columns}
    assert [shown[c.name].matched for c in COLUMNS] == [(not d,) for d in (1, 0, 0, 0, 1, 0)]
    assert all(c.baseline == c.matched for c in shown.values())
    assert (shown["age"].truth, shown["age"].reconstruction) == (("40 years",), ("41 years",))
    assert shown["region"].truth == ("(missing)",)
    assert shown["sex"].sensitive
    alone = {c.name: c for c in DOMAIN.fields(None, guess).columns}
    assert (alone["sex"].reconstruction, alone["sex"].truth, alone["sex"].matched) == (
        ("m",),
        (),
        (),
    )
    with pytest.raises(ValueError, match="truth holds 1"):
        DOMAIN.fields(torch.full((1, 13), 0.5).index_fill(1, torch.tensor([0]), math.nan), guess)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "real"}, "kind 'real'"),
        ({"low": 2.0}, "runs from 2.0 to 1.0"),
        ({"high": math.inf}, "two finite values"),
        ({"low": -1e308, "high": 1e308}, "float32"),
        ({"center": 0.0, "scale": 1e-40}, "give a larger scale"),
        ({"kind": "integer", "high": 1.5}, "whole numbers"),
        ({"tolerance": 0.0}, "tolerance 0.0"),
        ({"scale": -1.0}, "scale -1.0"),
        ({"spread": math.nan}, "spread nan"),
        ({"kind": "categorical"}, r"levels \(none\)"),
        ({"kind": "categorical", "levels": ("a", "a")}, "levels a, a"),
        ({"kind": "categorical", "levels": ("a", "(missing)"), "missing": True}, "levels a"),
        ({"kind": "categorical", "levels": ("a", "b"), "encoding": "x"}, "encoding 'x'"),
    ],
)
def test_a_column_refuses_what_is_none(change, words):
    with pytest.raises(ValueError, match=words):
        Column("x", **change)


def test_a_table_needs_columns_of_different_names():
    with pytest.raises(ValueError, match="columns are named"):
        TableDomain((COLUMNS[0], COLUMNS[0]))


def test_names_and_levels_are_escaped_in_pages():
    """A spreadsheet formula is only text; markup of a stranger does not reach the page."""
    bad = '=HYPERLINK("http://x","<img src=x onerror=alert(1)>")'
    domain = TableDomain((Column(bad, "categorical", levels=("@SUM(A1)", "<script>")),))
    (column,) = domain.fields(torch.eye(2), torch.eye(2)).columns
    page = environment_of().from_string("{{ c.name }} {{ c.truth | join(' ') }}").render(c=column)
    assert "<" not in page
    assert "&lt;script&gt;" in page
    assert "@SUM(A1)" in page
