"""Build a claim from comparisons made seed by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from leakbound_reproductions import words
from leakbound_reproductions.claim import Claim, Finding, Interval, Verdict, finding, student


@dataclass(frozen=True)
class Part:
    """One comparison of a claim, before its interval: one number per seed.

    Attributes:
        statement: what should hold.
        values: one per seed; logarithms if `ratio`.
        region: the values for which it is true; values of the ratio itself if `ratio`.
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

    If a comparison has fewer than two seeds, or a value that is not finite, the claim cannot be
    tested.
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


@dataclass(frozen=True)
class Repeated:
    """The basis of a verdict: comparisons, a remark, and whether a second run decides."""

    parts: list[Part]
    told: str = ""
    second: bool = False


def repeated(first: Sequence[Part], second: Sequence[Part]) -> Repeated:
    """The comparisons to judge a claim by if some were measured again, with a remark.

    Those of `second` replace those of the same statement if the first measurement as a whole was
    undecided. Otherwise the first stays, because a second look must not change a verdict.

    Args:
        first: all comparisons of the claim.
        second: some of them, on seeds that the first did not have; may be empty.
    """
    whole = _judged(first)
    fresh = {part.statement: part for part in second}
    if not (whole.findings and fresh):
        return Repeated(list(first))
    earlier = [in_words(one) for one in whole.findings if one.statement in fresh]
    if whole.verdict is not Verdict.UNDECIDED:
        later = [in_words(one) for one in _judged(second).findings]
        remark = "Measured again on other seeds, which do not change the verdict"
        return Repeated(list(first), remarks(*(f"{remark}: {one}" for one in later)))
    return Repeated(
        [fresh.get(part.statement, part) for part in first],
        remarks(
            "A first run was undecided, so the verdict uses new seeds",
            *(f"First run, {one}" for one in earlier),
        ),
        second=True,
    )


def remarks(*texts: str) -> str:
    r"""Remarks on a claim, one a line; empty ones are left out.

    Example:
        >>> remarks("a", "", "b")
        'a\nb'
    """
    return "\n".join(filter(None, texts))


def _judged(parts: Sequence[Part]) -> Claim:
    return claimed("", "", "", "", parts)


def in_words(found: Finding) -> str:
    """A finding as text, with its interval, n and verdict."""
    ends = words.interval(found.interval)
    return f"{found.statement}: {words.measured(found)} {ends}, n = {found.n}, {found.verdict}"


def _lacking(statements: Sequence[str]) -> str:
    what = "; ".join(statements) or "every comparison"
    return f"fewer than two seeds at this scale for: {what}"


def _exponential(interval: Callable[[float], Interval]) -> Callable[[float], Interval]:
    def given(level: float) -> Interval:
        low, high = interval(level)
        return math.exp(low), math.exp(high)

    return given
