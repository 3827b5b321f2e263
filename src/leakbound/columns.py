"""How near rebuilt records of a table are to the true ones, column by column, in its own units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakbound import check


@dataclass(frozen=True)
class ColumnError:
    """One column over all records.

    Attributes:
        mean: mean absolute error, in the column's units.
        worst: the largest.
        matched: share of records whose error is at most the tolerance.
    """

    name: str
    mean: float
    worst: float
    matched: float


def column_errors(
    truth: Tensor,
    guess: Tensor,
    names: Sequence[str],
    scale: Sequence[float],
    *,
    tolerance: float | Sequence[float] = 0.01,
) -> tuple[ColumnError, ...]:
    """Errors of each column of paired records; records may have any shape of n values.

    Args:
        truth: (N, *S) with n values a record, in scaled units.
        guess: the same shape and order, as `pairing` gives it.
        names: of the n columns.
        scale: what 1 in scaled units is in each column's own.
        tolerance: in scaled units, for all columns or one each: up to there a value counts as
            known. Half of 1 / scale says that a whole number is known when rounded.

    Raises:
        ValueError: shapes that do not fit, no record, or entries that are not finite.

    Example:
        >>> truth, guess = torch.tensor([[0.5, 0.1]]), torch.tensor([[0.5, 0.2]])
        >>> [(e.name, round(e.mean, 3), e.matched) for e in
        ...  column_errors(truth, guess, ("age", "weight"), (100.0, 50.0))]
        [('age', 0.0, 1.0), ('weight', 5.0, 0.0)]
    """
    if truth.shape != guess.shape or truth.ndim < 2 or len(truth) == 0:
        raise ValueError(
            f"truth has shape {tuple(truth.shape)} and guess {tuple(guess.shape)}; give both as "
            "(N, n), with at least one record"
        )
    count = truth[0].numel()
    allowed = [tolerance] * count if isinstance(tolerance, int | float) else list(tolerance)
    for name, values in (("names", names), ("scale", scale), ("tolerance", allowed)):
        if len(values) != count:
            raise ValueError(f"{name} holds {len(values)} entries; give one for each of {count}")
    for width, slack in zip(scale, allowed, strict=True):
        check.positive(scale=width)
        check.non_negative(tolerance=slack)
    check.finite("truth", truth)
    check.finite("guess", guess)
    off = (guess.detach().cpu().double() - truth.detach().cpu().double()).abs().flatten(1)
    known = (off <= torch.tensor(allowed, dtype=torch.float64)).double().mean(0)
    units = off * torch.tensor(list(scale), dtype=torch.float64)
    rows = zip(names, units.mean(0).tolist(), units.amax(0).tolist(), known.tolist(), strict=True)
    return tuple(ColumnError(*row) for row in rows)


def table(errors: Sequence[ColumnError]) -> str:
    """The errors as lines of text, the columns told best first.

    Example:
        >>> print(table([ColumnError("age", 2.0, 5.0, 0.5)]))
        column  mean error  worst  matched
        age              2      5      50%
    """
    ranked = sorted(errors, key=lambda error: -error.matched)
    heads = ("column", "mean error", "worst", "matched")
    body = [(e.name, f"{e.mean:.3g}", f"{e.worst:.3g}", f"{e.matched:.0%}") for e in ranked]
    wide = [max(map(len, part)) for part in zip(heads, *body, strict=True)]
    lines = []
    for first, *rest in (heads, *body):
        cells = [cell.rjust(width) for cell, width in zip(rest, wide[1:], strict=True)]
        lines.append("  ".join([first.ljust(wide[0]), *cells]))
    return "\n".join(lines)
