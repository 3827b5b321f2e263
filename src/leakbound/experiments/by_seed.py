"""A claim from comparisons that were made seed by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from leakbound.experiments.claim import Claim, Interval, finding, student


@dataclass(frozen=True)
class Part:
    """One comparison of a claim, before its interval: a number for each seed.

    Attributes:
        statement: what should be so.
        values: one a seed; logarithms where `ratio`.
        region: the values for which it is true, of the ratio itself where `ratio`.
        ratio: the mean of `values` and its interval are shown as powers of e.
        unit, paper: as in a finding.
    """

    statement: str
    values: Sequence[float] | NDArray[np.float64]
    region: Interval
    ratio: bool = False
    unit: str = ""
    paper: str = ""


def claimed(
    number: str,
    statement: str,
    source: str,
    scale: str,
    parts: Sequence[Part],
    why: str = "",
) -> Claim:
    """A claim from comparisons seed by seed, each with Student's interval.

    Where a comparison has fewer than two seeds, or a value that is no number, none is made: the
    claim cannot be tested.
    """
    lacking = [part.statement for part in parts if len(part.values) < 2]
    if lacking or not parts:
        return Claim(number, statement, source, scale, (), _lacking(lacking))
    if wrong := [part.statement for part in parts if not np.isfinite(part.values).all()]:
        return Claim(number, statement, source, scale, (), f"not finite: {'; '.join(wrong)}")
    findings = []
    for part in parts:
        mean, interval = student([float(value) for value in part.values])
        shown = (math.exp(mean), _exponential(interval)) if part.ratio else (mean, interval)
        findings.append(
            finding(
                part.statement,
                *shown,
                part.region,
                n=len(part.values),
                among=len(parts),
                unit=part.unit,
                paper=part.paper,
            )
        )
    return Claim(number, statement, source, scale, tuple(findings), why)


def looked(what: str, first: Sequence[str]) -> str:
    """What an earlier run gave that left this undecided."""
    if not first:
        return ""
    return (
        f"A first run left this undecided ({', '.join(first)}{' ' * bool(what)}{what}); it is "
        "judged on seeds that the first run did not have"
    )


def _lacking(statements: Sequence[str]) -> str:
    what = "; ".join(statements) or "every comparison"
    return f"fewer than two seeds at this scale for: {what}"


def _exponential(interval: Callable[[float], Interval]) -> Callable[[float], Interval]:
    def given(level: float) -> Interval:
        low, high = interval(level)
        return math.exp(low), math.exp(high)

    return given
