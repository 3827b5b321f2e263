"""A paper's claim, its measurements, and the verdict that follows by one rule.

A finding is an estimate with an interval, and the region of values for which the claim is true. The
region is stated by the code that measures. The finding *holds* if the interval lies inside the
region, *does not hold* if it lies outside, and is *undecided* if it overlaps the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from scipy import special, stats

LEVEL = 0.95
POSITIVE = (math.nextafter(0.0, 1.0), math.inf)
"""The region of "higher" and "falls": above 0; equality does not count."""
TIE = 1e-12
"""How near to a limit a value without any spread counts as on it."""
Interval = tuple[float, float]


class Verdict(StrEnum):
    """The verdict of an interval on a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    UNDECIDED = "undecided"
    UNTESTED = "cannot be tested here"


class Mark(StrEnum):
    """A condition on a verdict that a reader must see at a glance.

    `LATE`: a rule that the verdict may rest on changed after numbers of a `cpu` run of the claim
    were known, whether the claim was then measured again or not.
    """

    CORRECTED = "as corrected"
    THEOREM = "theorem or identity, checked numerically"
    LATE = "rule changed after numbers were known"


@dataclass(frozen=True)
class Finding:
    """One comparison that a claim depends on.

    Attributes:
        statement: what should hold.
        unit: of the values; empty for a plain number.
        estimate, interval: what was measured, with its two-sided interval of 95 %.
        strict: the interval that allows for all findings of the claim (Bonferroni).
        region: the values for which the statement is true; ends may be infinite.
        n: how many independent draws (seeds, images, tests) the interval rests on.
        paper: the paper's own value, with table or figure; empty if it prints none.
    """

    statement: str
    estimate: float
    interval: Interval
    strict: Interval
    region: Interval
    n: int
    unit: str = ""
    paper: str = ""

    @property
    def verdict(self) -> Verdict:
        """By the interval of 95 %."""
        return decide(self.interval, self.region)

    @property
    def needed(self) -> int | None:
        """About how many draws would decide it, if the estimate were the true value.

        An interval shrinks with the root of their number. None: it is decided, or its estimate is
        on the limit.

        Example:
            >>> ends = (-1.0, 2.0)
            >>> Finding("a > 0", 0.5, ends, ends, (0.0, math.inf), n=8).needed
            72
        """
        low, high = self.interval
        near = min(self.region, key=lambda limit: abs(self.estimate - limit))
        away = abs(self.estimate - near)
        reach = self.estimate - low if near < self.estimate else high - self.estimate
        if self.verdict is not Verdict.UNDECIDED or away <= TIE:
            return None
        return math.ceil(self.n * (reach / away) ** 2)

    @property
    def refutes(self) -> bool:
        """Whether the claim is excluded even after allowing for its other findings."""
        return decide(self.strict, self.region) is Verdict.FAILS

    @property
    def against(self) -> bool:
        """Whether it speaks against the claim, alone or after allowing for the others."""
        return self.refutes or self.verdict is Verdict.FAILS


@dataclass(frozen=True)
class Claim:
    """One claim of a paper.

    Attributes:
        number: the claim's number in the project's list, such as "2-1".
        statement: what the paper says.
        source: section, table or figure, with its page.
        scale: the setting in which it was tested, in words.
        findings: all must hold for the claim to hold; one that is excluded refutes it.
        why: why it cannot be tested here, if there are no findings; else remarks, one a line.
        marks: conditions shown with its verdict.
    """

    number: str
    statement: str
    source: str
    scale: str
    findings: tuple[Finding, ...]
    why: str = ""
    marks: tuple[Mark, ...] = ()

    def __post_init__(self) -> None:
        if not self.findings and not self.why:
            raise ValueError(f"claim {self.number} has no findings; say why")

    @property
    def verdict(self) -> Verdict:
        """Holds if every finding holds; does not hold if one refutes it; otherwise undecided.

        All findings must hold at 95 %, so the claim's own level is no worse (intersection-union).
        One finding is enough to refute it, so each gets its share of 5 %.

        Source: Berger, R. L. (1982). "Multiparameter hypothesis testing and acceptance sampling",
        Technometrics 24(4).
        """
        if not self.findings:
            return Verdict.UNTESTED
        if any(finding.refutes for finding in self.findings):
            return Verdict.FAILS
        held = all(finding.verdict is Verdict.HOLDS for finding in self.findings)
        return Verdict.HOLDS if held else Verdict.UNDECIDED


def left_open(claim: Claim, why: str) -> Claim:
    """The claim without its findings, which do not suffice to judge it for the reason `why`."""
    return replace(claim, findings=(), why=why)


def decide(interval: Interval, region: Interval) -> Verdict:
    """Whether an interval lies in a region, outside, or on its limit.

    If all seeds tie, the interval has no width. On a limit of the region it is undecided, whether
    the limit belongs to the region or not.

    Example:
        >>> str(decide((0.1, 0.4), (0.0, math.inf))), str(decide((-0.1, 0.4), (0.0, math.inf)))
        ('holds', 'undecided')
    """
    low, high = interval
    least, most = region
    if not low <= high or not least <= most:
        raise ValueError(f"interval {interval} in region {region}: give (low, high) without nan")
    if high - low <= TIE and least < most and min(abs(low - least), abs(high - most)) <= TIE:
        return Verdict.UNDECIDED
    if least <= low and high <= most:
        return Verdict.HOLDS
    return Verdict.FAILS if high < least or low > most else Verdict.UNDECIDED


def finding(
    statement: str,
    estimate: float,
    interval: Callable[[float], Interval],
    region: Interval,
    *,
    n: int,
    among: int,
    unit: str = "",
    paper: str = "",
) -> Finding:
    """A finding from a function that gives its two-sided interval at any level.

    `interval` goes from a level, such as 0.95, to (low, high); `among` is how many findings the
    claim has; the other arguments are those of `Finding`.
    """
    strict = interval(1 - (1 - LEVEL) / among)
    return Finding(statement, estimate, interval(LEVEL), strict, region, n, unit, paper)


def student(values: Sequence[float]) -> tuple[float, Callable[[float], Interval]]:
    """The mean of independent values, and Student's interval for it at any level.

    Example:
        >>> mean, interval = student([1.0, 2.0, 3.0])
        >>> mean, [round(end, 2) for end in interval(0.95)]
        (2.0, [-0.48, 4.48])
    """
    n = len(values)
    if n < 2:
        raise ValueError(f"there are {n} values; an interval needs at least 2")
    if not np.isfinite(values).all():
        raise ValueError(f"values {list(values)} are not all finite; an interval needs that")
    mean = float(np.mean(values))
    error = float(np.std(values, ddof=1)) / math.sqrt(n)

    def interval(level: float) -> Interval:
        half = float(special.stdtrit(n - 1, 0.5 + level / 2)) * error
        return mean - half, mean + half

    return mean, interval


def proportion(hits: int, n: int) -> tuple[float, Callable[[float], Interval]]:
    """A share, and its exact (Clopper-Pearson) interval at any level.

    Example:
        >>> share, interval = proportion(0, 10)
        >>> share, [round(end, 3) for end in interval(0.95)]
        (0.0, [0.0, 0.308])
    """
    test = stats.binomtest(hits, n)

    def interval(level: float) -> Interval:
        found = test.proportion_ci(level, "exact")
        return float(found.low), float(found.high)

    return hits / n, interval


def exact(value: float, error: float = 0.0) -> tuple[float, Callable[[float], Interval]]:
    """A number that is computed and not sampled, with its largest numerical error."""
    return value, lambda level: (value - error, value + error)
