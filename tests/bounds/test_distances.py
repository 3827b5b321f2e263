"""Counts of rows that one candidate matches: the sheet's numbers, brute force, coverage."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from scipy import stats

from leakbound import data
from leakbound.assess.criterion import distance_of
from leakbound.bounds import balls, distances
from leakbound.bounds.balls import counts_of, neighbors
from leakbound.bounds.counting import PublicSample, TheseExamples, count_limit
from leakbound.bounds.distances import ColumnMisses, GivenMetric, SquaredError
from leakbound.domains import Column, SeriesDomain, TableDomain


def sheet(name):
    """Codes by the rule of the sheet's numbers: 0.49 for whole numbers of at most 60 values, else
    0.05 standard deviations; and the labels."""
    found = data.load(name)
    columns = []
    for column, start, stop in found.domain.placed:
        own = found.inputs[:, start:stop].double().numpy()
        if column.categorical:
            columns.append(10.0 * own.argmax(1))
            continue
        values = column.origin + column.unit_length * own[:, 0]
        few = column.kind == "integer" and len(np.unique(values)) <= 60
        columns.append(values / (0.49 if few else 0.05 * values.std()))
    return np.stack(columns, 1), found.labels.numpy()


def plain(count):
    return ColumnMisses(lambda rows: rows, count)


GERMAN = {20: (1, 0.0066, 1), 19: (3, 0.010, 2), 18: (13, 0.024, 3), 17: (61, 0.081, 4)}
GERMAN |= {16: (281, 0.315, 11)}


@pytest.mark.parametrize("k", GERMAN)
def test_counts_of_german_credit(k):
    codes, _ = sheet("german")
    assert codes.shape == (1000, 20)
    most, kappa, center = GERMAN[k]
    near = neighbors(plain(20).among(codes), 2 * (20 - k)).near
    assert max(map(len, near)) == most
    assert count_limit(most, 1000, confidence=0.99) == pytest.approx(kappa, rel=0.05)
    reached = (plain(20).apart(codes, codes) <= 20 - k).sum(1).max()
    assert reached == center
    sample = PublicSample(codes, confidence=0.99, distance=plain(20))
    assert center <= sample.largest(20 - k) <= most
    assert np.exp(sample.log_kappa(20 - k)) <= kappa * 1.05
    if k == 18:
        assert len(sample.alone(2)) == pytest.approx(760, abs=5)


def test_counts_of_tumors():
    codes, _ = sheet("breast_cancer")
    sample = PublicSample(codes, confidence=0.99, distance=plain(30))
    assert [sample.largest(r) for r in (0, 3, 5)] == [1, 1, 1]
    assert np.exp(sample.log_kappa(5)) == pytest.approx(0.0116, abs=5e-5)
    limits = [count_limit(int(m), 569, confidence=1 - 0.01 / 30) for m in plain(30).widest(codes)]
    assert sum(limits) / 15 == pytest.approx(np.exp(sample.log_kappa(15)))  # Markov
    assert 0.93 * 2.51 < plain(30).widest(codes).sum() / 569 < 1.07 * 2.51  # the sheet: .093 x 27


def test_counting_a_thousand_rows_takes_under_two_seconds():
    codes, _ = sheet("german")
    began = time.process_time()
    assert PublicSample(codes, distance=plain(20)).largest(2) == 3
    assert time.process_time() - began < 2


def best(codes, level):
    """The most rows that one candidate matches, over all that can differ: brute force."""
    each = [np.unique(np.concatenate([own - 1, own + 1, own])) for own in codes.T]
    every = np.array(list(itertools.product(*each)))
    misses = sum(
        (np.abs(every[:, None, k] - codes[:, k]) > 1 + 1e-9) for k in range(codes.shape[1])
    )
    hit = misses <= level
    return hit.sum(1).max(), np.array([hit[hit[:, i]].sum(1).max() for i in range(len(codes))])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("level", [0, 1])
def test_no_candidate_matches_more_rows_than_counted(seed, level):
    draw = np.random.default_rng([seed, level])
    numbers, levels = draw.uniform(0, 6, (9, 2)), 10.0 * draw.integers(0, 3, (9, 1))
    codes = np.concatenate([numbers, levels], 1)
    distance = plain(3)
    near = neighbors(distance.among(codes), distance.reach(level))
    found = counts_of(codes, level, near, distance)
    most, each = best(codes, level)
    assert found.most >= most
    assert (found.each >= each).all()
    assert found.how == "exact" or found.most == 1
    assert most >= found.most - 2 * level  # and not far above


@pytest.mark.parametrize("seed", range(12))
def test_a_search_that_is_cut_off_leaves_a_bound(seed, monkeypatch):
    monkeypatch.setattr(balls, "CALLS", 2)
    codes = np.random.default_rng(seed).uniform(0, 4, (10, 3))
    distance = plain(3)
    found = counts_of(codes, 1, neighbors(distance.among(codes), 2), distance)
    most, each = best(codes, 1)
    assert found.most >= most
    assert (found.each >= each).all()


@pytest.mark.parametrize("most", [10**6, 900, 300, 0])
def test_neighbors_at_several_reaches_from_one_pass(most, monkeypatch):
    monkeypatch.setattr(balls, "MOST_PAIRS", most)
    codes = np.random.default_rng(0).integers(0, 3, (60, 5)).astype(float)
    apart = plain(5).apart(10 * codes, 10 * codes)
    found = neighbors(plain(5).among(10 * codes), 0, 1, 2, 3)
    counts = {reach: (apart <= reach).sum(1) for reach in range(4)}
    kept = [reach for reach in counts if counts[reach].sum() <= most]
    assert sorted(found.many) == [reach for reach in counts if reach not in kept]
    for reach, count in counts.items():
        assert found.holds(reach)
        assert found.degrees(reach).tolist() == count.tolist()
    for reach in kept:
        near, distances = found.within(reach)
        for row, (own, line) in enumerate(zip(near, distances, strict=True)):
            assert set(own) == set(np.flatnonzero(apart[row] <= reach))
            assert line.tolist() == sorted(apart[row][own])


@pytest.mark.parametrize("level", [1, 2])
def test_graphs_of_neighbors_alone_give_the_counts_of_the_whole_graph(level, monkeypatch):
    codes, _ = sheet("german")
    distance = plain(20)
    nearby = neighbors(distance.among(codes), distance.reach(level))
    whole = counts_of(codes, level, nearby, distance)
    monkeypatch.setattr(balls, "SHORT", 0)
    apart = counts_of(codes, level, nearby, distance)
    assert (whole.most, whole.how) == (apart.most, apart.how)
    assert whole.each.tolist() == apart.each.tolist()


@pytest.mark.parametrize("seed", range(8))
def test_rows_around_a_candidate_always_fit(seed):
    """Rows that differ from a candidate in exactly r columns: no limit may exclude them."""
    draw = np.random.default_rng(seed)
    count, level = int(draw.integers(2, 30)), int(draw.integers(0, 5))
    rows = np.broadcast_to(10.0 * draw.integers(0, 4, 12), (count, 12)).copy()
    rows += 0.999 * draw.uniform(-1, 1, rows.shape)
    for row in rows:
        row[draw.permutation(12)[:level]] += 100 * draw.random(level) + 3
    distance = plain(12)
    assert distance.fits(rows, level)(list(range(len(rows))))
    nearby = neighbors(distance.among(rows), distance.reach(level))
    assert {len(own) for own in nearby.near} == {count}
    assert min(line.mean() for line in nearby.apart) <= distance.mean(level)
    assert counts_of(rows, level, nearby, distance).most == count


def test_the_widest_window_of_each_column():
    draw = np.random.default_rng(0)
    for count in (3, 39, 41, 200):
        rows = np.round(draw.uniform(0, 30, (count, 5)), 1)
        wanted = [max(((own >= a) & (own <= a + 2)).sum() for a in own) for own in rows.T]
        assert plain(5).widest(rows).tolist() == wanted


COLUMNS = (
    Column("age", "integer", 0, 100),
    Column("pay", low=0, high=50, tolerance=2.0, missing=True),
    Column("work", "categorical", levels=("a", "b", "c"), missing=True),
)


def test_bounds_and_domain_count_the_same_columns():
    domain = TableDomain(COLUMNS)
    draw = torch.Generator().manual_seed(0)
    a, b = (domain.hard(torch.rand(60, *domain.shape, generator=draw)) for _ in range(2))
    distance, double = distance_of(domain), lambda x: x.double().numpy()
    assert (distance.paired(double(a), double(b)) == domain.distance(a, b).numpy()).all()
    assert (distance.apart(double(a), double(b)) == domain.distances(a, b).numpy()).all()
    twice = np.concatenate(list(distance.among(distance.coded(double(a)))))
    assert (twice == domain.distances(a, a, 2.0).numpy()).all()
    gone = torch.tensor([[0.5, 0.1, 1, 0, 0, 0, 1.0], [0.5, 0.9, 1, 0, 0, 0, 1.0]])
    assert distance.paired(double(gone[:1]), double(gone[1:])).tolist() == [0]  # both missing
    assert distance.paired(double(gone[:1]), np.full((1, 7), np.nan)).tolist() >= [2]


# --- coverage: laws of which kappa is known


SHARES = (0.5, 0.3, 0.2)


def drawn(count, columns, source):
    """Independent columns, each with the levels 0, 1, 2 in the shares above; labels: two."""
    return 10.0 * source.choice(3, (count, columns), p=SHARES), source.integers(0, 2, count)


@pytest.mark.parametrize(
    ("level", "labeled", "guesses"), [(0, False, 1), (1, False, 1), (1, True, 1), (1, False, 3)]
)
def test_limits_cover_kappa(level, labeled, guesses):
    """In at most 5 % of samples a limit is below the success of the best known candidates."""
    columns, missed, trials, limits = 6, 0, 120, []
    kappa = stats.binom.cdf(level, columns, 1 - SHARES[0])
    if guesses == 3:  # three rows that differ from the most frequent levels in one column
        kappa = max(kappa, stats.binom.cdf(level + 1, columns, 0.5) * 0.5)
    for trial in range(trials):
        rows, labels = drawn(60, columns, np.random.default_rng([trial, level]))
        sample = PublicSample(
            rows, labels if labeled else None, guesses=guesses, distance=plain(columns)
        )
        limits.append(float(np.exp(sample.log_kappa(level))))
        missed += limits[-1] < kappa
    assert missed <= stats.binom.isf(1e-3, trials, 0.05)
    assert np.mean(limits) < 1


def test_markov_covers_kappa_where_rows_may_differ_everywhere():
    columns, level, trials = 8, 4, 60
    kappa = stats.binom.cdf(level, columns, 0.5)
    limits = []
    for trial in range(trials):
        rows, _ = drawn(2000, columns, np.random.default_rng(trial))
        limits.append(float(np.exp(PublicSample(rows, distance=plain(columns)).log_kappa(level))))
    assert (np.array(limits) >= kappa).all()
    varied = np.random.default_rng(0).uniform(0, 300, (2000, columns))
    assert np.exp(PublicSample(varied, distance=plain(columns)).log_kappa(level)) < 0.1
    assert np.exp(PublicSample(varied, distance=plain(columns)).log_kappa(columns)) == 1
    assert PublicSample(varied, distance=plain(columns)).largest(level) == 2000


def test_these_rows_are_counted_exactly():
    """Every row three times: a third of the pairs' best guess, at any number of noise draws."""
    codes = np.repeat(100.0 * np.arange(40)[:, None] * np.ones((1, 5)), 3, axis=0)
    own = TheseExamples(codes, distance=plain(5))
    assert np.exp(own.log_kappa(1)) == pytest.approx(3 / 120)
    draw = np.random.default_rng(0)
    noise, trials = 0.4, 20_000
    seen = noise * draw.standard_normal((trials, 40))
    true = draw.integers(0, 40, trials)
    seen[np.arange(trials), true] += 1
    reached = (seen.argmax(1) == true).mean()
    bound = float(own.success_bound(noise, 1)[0][0])
    assert 0.5 * bound < reached < bound
    assert own.name == "these 120 rows, labels not known"
    assert np.exp(own.log_kappa(3)) == pytest.approx(5 * 3 / 120 / 2)  # Markov: five of the columns


def test_masks_are_labels_too():
    rows = np.random.default_rng(0).random((30, 4)) * 100
    masks = np.random.default_rng(1).integers(0, 2, (30, 2, 1))
    flat = masks[:, 0, 0] + 2 * masks[:, 1, 0]
    one, two = (PublicSample(rows, labels, distance=plain(4)) for labels in (masks, flat))
    assert one.log_kappa(1) == two.log_kappa(1)


def test_rare_rows_are_those_without_a_joint_candidate():
    rows = 10.0 * np.array([[0, 0, 0, 0, 0], [0, 0, 0, 0, 1], [5, 6, 7, 8, 9], [5, 6, 1, 2, 3.0]])
    sample = PublicSample(rows, distance=plain(5))
    assert sample.alone(0).tolist() == [0, 1, 2, 3]
    assert sample.alone(1).tolist() == [2, 3]
    assert sample.alone(2).tolist() == []  # three columns apart: one candidate matches both
    labeled = PublicSample(rows, np.array([0, 1, 0, 1]), distance=plain(5))
    assert labeled.alone(1).tolist() == [0, 1, 2, 3]


# --- other distances


def test_series_are_counted_by_their_metric():
    domain = SeriesDomain((2, 8), scales=(1.0, 3.0))
    distance = distance_of(domain)
    assert isinstance(distance, GivenMetric)
    draw = np.random.default_rng(0)
    centers = draw.standard_normal((30, 16))
    rows = np.repeat(centers, 10, axis=0) + 0.1 * draw.standard_normal((300, 16))
    shaped = rows.reshape(-1, 2, 8) / np.array([1.0, 3.0])[:, None]
    apart = np.sqrt(np.square(shaped[:, None] - shaped).mean(-1)).max(-1)
    assert np.allclose(distance.apart(rows, rows), apart)
    assert np.allclose(distance.paired(rows, rows[::-1]), np.diagonal(apart[:, ::-1]))
    sample = PublicSample(rows, distance=distance)
    near = (apart <= 2 * 0.15).sum(1).max()
    reached = (apart <= 0.15).sum(1).max()
    assert reached <= sample.largest(0.15) <= near
    assert sample.name.startswith("300 public series without")


def test_the_mean_squared_error_is_as_before():
    rows = np.random.default_rng(0).random((50, 6))
    distance = SquaredError()
    wanted = np.square(rows[:, None] - rows).mean(2)
    assert np.allclose(distance.apart(rows, rows), wanted)
    assert np.allclose(np.concatenate(list(distance.among(rows))), wanted, atol=1e-8)
    assert np.allclose(distance.paired(rows, rows[::-1]), np.diagonal(wanted[:, ::-1]))
    assert distance.squared
    assert not plain(2).squared
    with pytest.raises(ValueError, match="eta"):
        distance.levels(0.0)
    assert plain(2).levels(0).tolist() == [0]


@pytest.mark.parametrize("count", [40, 300])
@pytest.mark.parametrize("scale", [0.0, 0.1, 0.2, 1.0, 1e15])
def test_columns_that_differ_are_those_of_a_comparison_of_floats(count, scale):
    """Also at differences that rounding puts on either side of the scale, and of no numbers."""
    draw = np.random.default_rng(0)
    rows = 0.1 * draw.integers(-30, 30, (count, 6))
    rows[:, 5] *= 1e16
    rows[::7, 1] = np.nan
    rows[::5, 2] = np.inf
    rows[::6, 2] = -np.inf
    with np.errstate(invalid="ignore"):
        found = np.concatenate(list(distances._misses(rows, rows[::2], scale)))
        assert (found == (~(np.abs(rows[:, None] - rows[::2]) <= scale)).sum(-1)).all()


@pytest.mark.parametrize("flags", [1, 8, 9, 300])
def test_columns_of_two_values_are_compared_as_all_others(flags):
    """More than a byte can count, beside a column that never differs and one that always does."""
    draw = np.random.default_rng(flags)
    rows = 3.0 * draw.integers(0, 2, (90, flags + 3))
    rows[:, 1] = 3.0
    rows[:, 2] = np.nan
    others = 3.0 - rows[:70]  # its own row differs in all columns of two values
    others[:, 0] = 1.4  # near no value of the other side
    with np.errstate(invalid="ignore"):
        found = np.concatenate(list(distances._misses(others, rows, 1.0)))
        assert (found == (~(np.abs(others[:, None] - rows) <= 1.0)).sum(-1)).all()
    assert found.max() > flags


def test_large_samples_are_compared_within_seconds():
    """20,000 rows of 20 columns took 11 s as differences of floats."""
    draw = np.random.default_rng(0)
    rows = np.hstack([1e15 * draw.integers(0, 9, (6000, 10)), draw.normal(0, 9, (6000, 10))])
    start = time.process_time()
    lines = np.concatenate(list(plain(20).among(rows)))
    assert time.process_time() - start < 3
    some = draw.integers(0, 6000, 50)
    assert (lines[some] == (np.abs(rows[some, None] - rows) > 2 * (1 + 1e-9)).sum(-1)).all()
