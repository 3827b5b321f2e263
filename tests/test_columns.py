"""Errors of rebuilt records, column by column."""

import numpy as np
import pytest
import torch

from leakbound.columns import ColumnError, column_errors, table
from leakbound.random import stream


@pytest.mark.parametrize("shape", [(7, 3), (7, 1, 1, 3), (1, 3)])
def test_errors_are_those_of_numpy_in_the_columns_units(shape):
    truth, guess = (torch.rand(shape, generator=stream(i)) for i in range(2))
    scale, limits = (10.0, 0.5, 3.0), (0.2, 0.4, 0.1)
    found = column_errors(truth, guess, "abc", scale, tolerance=limits)
    off = np.abs(truth.double().numpy() - guess.double().numpy()).reshape(-1, 3)
    for k, error in enumerate(found):
        assert error.name == "abc"[k]
        assert error.mean == pytest.approx(scale[k] * off[:, k].mean())
        assert error.worst == pytest.approx(scale[k] * off[:, k].max())
        assert error.matched == pytest.approx(np.mean(off[:, k] <= limits[k]))


def test_the_table_ranks_by_what_is_known():
    errors = [ColumnError("a", 1.0, 2.0, 0.1), ColumnError("bb", 0.1, 0.2, 1.0)]
    lines = table(errors).splitlines()
    assert [line.split()[0] for line in lines] == ["column", "bb", "a"]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"guess": torch.zeros(2, 2)}, "give both as"),
        ({"truth": torch.zeros(0, 3), "guess": torch.zeros(0, 3)}, "at least one record"),
        ({"names": "ab"}, "names holds 2"),
        ({"scale": (1.0, 2.0)}, "scale holds 2"),
        ({"scale": (1.0, 2.0, 0.0)}, "scale is 0.0"),
        ({"tolerance": (0.1,)}, "tolerance holds 1"),
        ({"tolerance": -1.0}, "tolerance is -1.0"),
        ({"guess": torch.full((2, 3), float("nan"))}, "guess holds 6"),
    ],
)
def test_odd_input(change, words):
    given = {
        "truth": torch.zeros(2, 3),
        "guess": torch.zeros(2, 3),
        "names": "abc",
        "scale": (1.0, 2.0, 3.0),
        "tolerance": 0.1,
    }
    with pytest.raises(ValueError, match=words):
        column_errors(**{**given, **change})
