"""Records of a table: errors in the columns' own units, in place of pictures."""

import json

import pytest
import torch

from leakbound.audit import parse, run
from leakbound.audit.tables import records_of_a_table
from leakbound.data import load
from leakbound.data.raw import Column
from leakbound.pairing import pair
from leakbound.types import Batch, Reconstruction

COLUMNS = (Column("age", 20.0, 60.0, whole=True), Column("weight", 50.0, 100.0))


def _paired(truth, guess):
    truth, guess = (torch.tensor(part)[:, None, None, :] for part in (truth, guess))
    return pair(Batch(truth, torch.zeros(len(truth), dtype=torch.long)), Reconstruction(guess))


def test_errors_are_in_the_columns_units_and_whole_numbers_are_rounded():
    paired = _paired([[0.5, 0.2], [0.0, 1.0]], [[0.51, 0.2], [0.02, 0.9]])
    age, weight = records_of_a_table(COLUMNS, paired, values=True)
    assert age == {
        "name": "age", "mean": 0.6, "worst": 0.8, "matched": 0.5,
        "truth": [40.0, 20.0], "reconstruction": [40.4, 20.8],
    }  # fmt: skip
    assert (weight.mean, weight.worst, weight.matched) == (2.5, 5.0, 0.5)
    bare = records_of_a_table(COLUMNS, paired, values=False)
    assert set(bare[0]) == {"name", "mean", "worst", "matched"}


PLAN = {
    "data": {"source": "wine"},
    "models": [{"name": "mlp", "hidden": [64]}],
    "attacks": [{"name": "linear_inversion"}],
    "batch_sizes": [1],
}


@pytest.mark.parametrize("images", [True, False])
def test_an_audit_of_a_table_holds_columns_and_no_pictures(images):
    (found,) = [r for r in run(parse(PLAN), pictures=images) if "cell" in r.record]
    assert found.record.status == "ok", found.record.reason
    assert found.pictures == {}
    columns = found.record.columns
    assert [c.name for c in columns] == [c.name for c in load("wine").columns]
    assert all(c.matched == 1 for c in columns)
    assert ("truth" in columns[0]) is images
    json.dumps(found.record, allow_nan=False)
