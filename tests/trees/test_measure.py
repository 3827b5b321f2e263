"""Shares that are computed by hand, or one entry at a time."""

import json

import numpy as np
import pytest
from scipy import stats

from leakbound import trees
from leakbound.trees.measure import GLOBAL, PRIOR, UPDATE


def tree(*nodes):
    """A tree from (feature, threshold, left, right), or None for a leaf."""
    own = [node or (0, 0.0, -1, -1) for node in nodes]
    named = ("split_indices", "split_conditions", "left_children", "right_children")
    found = {name: [node[k] for node in own] for k, name in enumerate(named)}
    return found | {name: [1.0] * len(own) for name in ("base_weights", "sum_hessian")}


def read(*made):
    return trees.read(json.dumps(list(made)).encode())


STUMP = tree((0, 3.0, 1, 2), None, None)
DEEP = tree((1, 0.5, 1, 2), (0, 2.0, 3, 4), None, None, None)
ROWS = np.array([[1, 0.1], [3, 0.4], [5, 0.5], [9, 0.9]])
PUBLIC = np.array([[1, 0.1], [1, 0.2], [3, 0.3], [4, 0.6], [4, 0.7], [7, 0.8]])


@pytest.mark.parametrize(("hits", "n"), [(0, 7), (3, 7), (7, 7), (1, 1), (531, 6000)])
def test_the_interval_is_wilsons(hits, n):
    wanted = stats.binomtest(hits, n).proportion_ci(method="wilson")
    assert trees.Share(hits, n).interval == pytest.approx((wanted.low, wanted.high), abs=1e-6)
    assert trees.Share(0, 0).interval == (0, 1)


def test_shares_by_hand():
    seen = trees.revealed(read(STUMP, DEEP))
    found = trees.measured(seen, ROWS, PUBLIC, tolerance=[0.49, 0.11])
    assert {j: t.tolist() for j, t in seen.thresholds.items()} == {0: [2.0, 3.0], 1: [0.5]}
    assert found.thresholds == trees.Share(2, 3)  # 3.0 and 0.5, not 2.0
    assert found.distinct == {UPDATE: trees.Share(2, 8)}
    assert found.alone == trees.Share(2, 4)  # below 3, and x1 < 0.5 with x0 >= 2
    # prior: mode 1 and median 0.45; then 1 | 4 | 4 | 4 and 0.2 | 0.2 | 0.7 | 0.7
    assert found.entries == {PRIOR: trees.Share(3, 8), UPDATE: trees.Share(2, 8)}
    assert found.rows == {PRIOR: trees.Share(0, 4), UPDATE: trees.Share(1, 4)}
    assert found.pinned == trees.Share(1, 8)  # only 1 is below 2
    low, high = seen.brackets(ROWS)
    inf = np.inf
    assert low.tolist() == [[-inf, -inf], [3, -inf], [3, 0.5], [3, 0.5]]
    assert high.tolist() == [[2, 0.5], [inf, 0.5], [inf, inf], [inf, inf]]


def guess(values, low, high, whole):
    """One entry, in plain Python."""
    inside = sorted(v for v in values if low <= v < high)
    if not inside:
        edges = [x for x in (low, high) if np.isfinite(x)]
        middle = sum(edges) / len(edges)
        return min(max(round(middle), np.ceil(low)), np.ceil(high) - 1) if whole else middle
    return min(set(inside), key=lambda v: (-inside.count(v), v)) if whole else np.median(inside)


def test_cells_are_those_of_a_plain_loop():
    source = np.random.default_rng(0)
    rows, public = (
        np.stack([source.integers(0, 12, n), source.normal(size=n), source.integers(0, 3, n)], 1)
        for n in (40, 60)
    )
    made = []
    for _ in range(8):
        cuts = source.integers(1, 12), source.normal(), source.integers(1, 3)
        at, other = source.permutation(3)[:2]
        nodes = (int(at), float(cuts[at]), 1, 2), (int(other), float(cuts[other]), 3, 4)
        made.append(tree(*nodes, None, None, None))
    seen = trees.revealed(read(*made[3:]), read(*made[:3]))
    found = trees.measured(seen, rows, public)
    low, high = seen.brackets(rows)
    spread = np.subtract(*np.percentile(public[:, 1].astype(np.float32), (75, 25))) / 1.349
    tau = [0.49, 0.05 * spread, 0.49]
    right = np.zeros((40, 3), bool)
    pinned = np.zeros((40, 3), bool)
    for i in range(40):
        for j in range(3):
            values = [float(np.float32(v)) for v in public[:, j]]
            edges = float(low[i, j]), float(high[i, j])
            right[i, j] = abs(guess(values, *edges, j != 1) - rows[i, j]) <= tau[j]
            inside = {v for v in values if edges[0] <= v < edges[1]}
            width = min(edges[1], max(values)) - max(edges[0], min(values))
            pinned[i, j] = width <= 2 * tau[j] if j == 1 else len(inside) <= 1
    assert found.entries[UPDATE] == trees.Share(int(right.sum()), 120)
    assert found.rows[UPDATE] == trees.Share(int((right.mean(1) >= 0.9).sum()), 40)
    assert found.pinned == trees.Share(int(pinned.sum()), 120)
    prior = np.array(
        [guess([float(v) for v in public[:, j]], -np.inf, np.inf, j != 1) for j in range(3)]
    )
    assert found.entries[PRIOR].hits == int((abs(rows - prior) <= tau).sum())
    assert found.entries[PRIOR].hits < found.entries[GLOBAL].hits < found.entries[UPDATE].hits
    cuts = [
        {(t["split_indices"][k], np.float32(t["split_conditions"][k])) for t in m for k in (0, 1)}
        for m in (made[3:], made[:3], made)
    ]
    values = {(j, v) for j in range(3) for v in rows[:, j].astype(np.float32)}
    assert found.thresholds == trees.Share(len(cuts[0] & values), len(cuts[0]))
    assert found.distinct == {
        name: trees.Share(len(own & values), len(values))
        for name, own in ((GLOBAL, cuts[1]), (UPDATE, cuts[2]))
    }
    alone = trees.measured(trees.revealed(read(*made[:3])), rows, public)
    assert alone.entries[UPDATE] == found.entries[GLOBAL]


def test_default_tolerances_and_pins_at_their_edges():
    spread = np.array([0.0, 0.25, 0.25, 0.5, 0.75, 0.75, 1.0])  # IQR 0.5
    equal = np.array([0.5] * 6 + [1.5])  # IQR 0: its standard deviation is 0.35
    whole = np.array([1, 2, 2, 3, 5, 6, 7])
    public = np.stack([spread, equal, whole], 1)
    tau = np.array([0.05 * 0.5 / 1.349, 0.05 * np.std(equal), 0.49])
    stump = tree((2, 3.0, 1, 2), None, None)
    middle = np.array([0.5, 0.5, 2.0])
    for far in (0.98, 1.02):
        found = trees.measured(trees.revealed(read(stump)), [middle + far * tau], public)
        assert found.entries[PRIOR] == trees.Share(3 if far < 1 else 0, 3)
    for low, high, pins in ((4.0, 6.0, 1), (4.0, 6.5, 0), (1.5, 3.0, 1), (3.5, 4.5, 1)):
        boxed = tree((2, low, 1, 2), None, (2, high, 3, 4), None, None)
        found = trees.measured(trees.revealed(read(boxed)), [[0.5, 0.5, (low + high) / 2]], public)
        assert found.pinned == trees.Share(pins, 3)
    for width, pins in ((1.9, 1), (2.1, 0)):
        edges = float(np.float32(0.4)), float(np.float32(0.4 + width * tau[0]))
        boxed = tree((0, edges[0], 1, 2), None, (0, edges[1], 3, 4), None, None)
        found = trees.measured(trees.revealed(read(boxed, stump)), [[0.41, 0.5, 2.0]], public)
        assert found.pinned == trees.Share(pins, 3)


def test_a_bracket_without_public_values_gives_its_middle_or_its_last_whole_number():
    boxed = tree((0, 7.0, 1, 2), None, (0, 8.0, 3, 4), None, None)
    for rows, public in (([[7.0], [9.0]], [[1.0], [2.0]]), ([[7.5], [8.1]], [[1.5], [2.0]])):
        found = trees.measured(
            trees.revealed(read(boxed)), rows, public, tolerance=[0.3 if rows[0][0] > 7 else 0.0]
        )
        assert found.entries[UPDATE].hits == (2 if rows[0][0] > 7 else 1)  # 7, then 8 and not 9


def test_missing_values_are_never_known():
    rows = np.where(np.eye(4, 2) > 0, np.nan, ROWS)
    found = trees.measured(trees.revealed(read(DEEP)), rows, ROWS, tolerance=[100, 100])
    assert found.entries[UPDATE] == trees.Share(6, 8)
    bare = trees.measured(trees.revealed(read(DEEP)), rows)
    assert (bare.entries, bare.rows, bare.pinned) == (None, None, None)
    assert [*bare.shares] == [*found.shares][:3]


@pytest.mark.parametrize(
    ("public", "tolerance", "words"),
    [
        (PUBLIC, [1.0], r"tolerance has shape \(1,\); give 2"),
        (PUBLIC, [1.0, -1.0], "give 2 finite numbers of at least 0"),
        (np.full((3, 2), np.nan), None, "public has a column without values"),
        (PUBLIC[:, :1], None, r"rows have shape \(6, 1\); give \(n, 2\)"),
    ],
)
def test_what_cannot_be_measured_is_named(public, tolerance, words):
    with pytest.raises(ValueError, match=words):
        trees.measured(trees.revealed(read(DEEP)), ROWS, public, tolerance=tolerance)


NAMED = trees.TreeModel((), 2, ("age", "sex"))
PLAIN = trees.TreeModel((), 2)


@pytest.mark.parametrize(
    ("text", "model", "wanted"),
    [
        ("a,b\n1,2\n3,4\n", PLAIN, [[1, 2], [3, 4]]),
        ("\ufeffsex;other;age\n1;x;30\n0;y,z;?\n\n", NAMED, [[30, 1], [np.nan, 0]]),
        ('"age"\t"sex"\n"41.5"\tNA\n', NAMED, [[41.5, np.nan]]),
        ("age,sex\n7,\n", NAMED, [[7, np.nan]]),
    ],
)
def test_a_table_is_read(tmp_path, text, model, wanted):
    path = tmp_path / "rows.csv"
    path.write_text(text, encoding="utf-8")
    assert np.array_equal(trees.load_rows(path, model), wanted, equal_nan=True)
    np.savez(tmp_path / "rows.npz", rows=np.array(wanted), labels=np.zeros(len(wanted)))
    assert np.array_equal(trees.load_rows(tmp_path / "rows.npz", model), wanted, equal_nan=True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"age\n1\n", "it has age; give age, sex"),
        (b"age,sex\n", "no row"),
        (b"age,sex\n1,male\n", "line 2, column 'sex': 'male' is no number"),
        (b"age,sex\n1\n", "line 2 has 1 values"),
        (b"age,sex\n\xff\xfe,1\n", "not UTF-8"),
    ],
)
def test_a_damaged_table_is_named(tmp_path, content, words):
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        trees.load_rows(path, NAMED)
    with pytest.raises(ValueError, match="does not exist"):
        trees.load_rows(tmp_path / "none.csv", NAMED)
    np.savez(tmp_path / "rows.npz", a=np.ones(3))
    with pytest.raises(ValueError, match="give one matrix `rows`"):
        trees.load_rows(tmp_path / "rows.npz", NAMED)
