"""Rows of a table: errors in the columns' own units, in place of pictures."""

import numpy as np
import pytest
import torch

from leakbound.assess.record import encode
from leakbound.audit import parse, run
from leakbound.data import load
from leakbound.domains import Column, column_errors, of_shape
from leakbound.random import stream

COLUMNS = (Column("age", 20.0, 60.0, whole=True), Column("weight", 50.0, 100.0))


@pytest.mark.parametrize("shape", [(7, 3), (7, 1, 1, 3), (1, 3)])
def test_errors_are_those_of_numpy_in_the_columns_units(shape):
    truth, guess = (torch.rand(shape, generator=stream(i)) for i in range(2))
    columns = [
        Column(n, 1.0, high, w) for n, high, w in (("a", 4.0, 1), ("b", 9.5, 0), ("c", 2, 1))
    ]
    limits = (0.49 / 3, 0.01, 0.49)
    off = np.abs(truth.double().numpy() - guess.double().numpy()).reshape(-1, 3)
    for k, error in enumerate(column_errors(columns, truth, guess)):
        width = columns[k].width
        assert error.name == "abc"[k]
        assert error.mean == pytest.approx(width * off[:, k].mean(), rel=1e-5)
        assert error.worst == pytest.approx(width * off[:, k].max(), rel=1e-5)
        assert error.matched == pytest.approx(np.mean(off[:, k] <= limits[k]), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"guess": torch.zeros(2, 3)}, "give both as"),
        ({"truth": torch.zeros(0, 2), "guess": torch.zeros(0, 2)}, "at least one example"),
        ({"columns": COLUMNS[:1]}, "columns holds 1"),
        ({"guess": torch.full((2, 2), float("nan"))}, "guess holds 4"),
    ],
)
def test_odd_input(change, words):
    given = {"columns": COLUMNS, "truth": torch.zeros(2, 2), "guess": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match=words):
        column_errors(**{**given, **change})


def test_whole_numbers_are_known_once_rounded():
    truth, guess = torch.tensor([[0.5, 0.2], [0.0, 1.0]]), torch.tensor([[0.51, 0.2], [0.02, 0.9]])
    age, weight = column_errors(COLUMNS, truth, guess)
    assert (age.mean, age.worst, age.matched) == (0.6, 0.8, 0.5)
    assert (age.truth, age.reconstruction) == ((40.0, 20.0), (40.4, 20.8))
    assert (weight.mean, weight.worst, weight.matched) == (2.5, 5.0, 0.5)


def test_equal_rows_may_be_different_peoples():
    assert not of_shape((1, 1, 2), columns=COLUMNS).copies_count_once
    assert of_shape((1, 4, 4)).copies_count_once


PLAN = {
    "data": {"source": "wine"},
    "models": [{"name": "mlp", "hidden": [64]}],
    "attacks": [{"name": "linear_inversion"}],
    "batch_sizes": [1],
}


@pytest.mark.parametrize("images", [True, False])
def test_an_audit_of_a_table_holds_columns_and_no_pictures(images):
    (found,) = [r for r in run(parse(PLAN), pictures=images) if not hasattr(r.record, "training")]
    assert found.record.status == "ok", found.record.reason
    assert found.pictures == {}
    columns = found.record.columns
    assert [c.name for c in columns] == [c.name for c in load("wine").columns]
    assert all(c.matched == 1 for c in columns)
    assert (columns[0].truth is not None) is images
    encode(found.record)
