"""What a record holds in place of pictures where the data is a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from leakbound.columns import column_errors
from leakbound.data.raw import Column
from leakbound.pairing import Paired

TOLERANCE = 0.01


def records_of_a_table(
    columns: Sequence[Column], paired: Paired, *, values: bool
) -> list[dict[str, Any]]:
    """One entry a column, in its own units: name, mean and largest error, share known.

    A value is known if it is off by at most 1 % of the column's range, and a whole number if
    rounding gives it. With `values` the true and the rebuilt ones are there, one for each record.
    """
    widths = [column.width for column in columns]
    known = [min(0.5, 0.49 / c.width) if c.whole else TOLERANCE for c in columns]
    names = [column.name for column in columns]
    truth, guess = paired.truth.inputs, paired.inputs
    found = []
    for place, error in enumerate(column_errors(truth, guess, names, widths, tolerance=known)):
        entry: dict[str, Any] = {
            "name": error.name,
            "mean": _short(error.mean),
            "worst": _short(error.worst),
            "matched": _short(error.matched),
        }
        if values:
            column = columns[place]
            entry["truth"] = _own(column, truth, place)
            entry["reconstruction"] = _own(column, guess, place)
        found.append(entry)
    return found


def _own(column: Column, records: Tensor, place: int) -> list[float]:
    part = records.detach().cpu().double().flatten(1)[:, place]
    return [_short(column.low + column.width * value) for value in part.tolist()]


def _short(value: float) -> float:
    return float(f"{value:.6g}")
