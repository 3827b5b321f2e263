"""Numbers, intervals and regions of findings as text for readers."""

from __future__ import annotations

import math

from leakbound_reproductions.claim import Claim, Finding, Interval


def number(value: float) -> str:
    """Four digits; small and large ones with an exponent.

    Example:
        >>> number(0.123456), number(1e-9), number(-2.0), number(float("inf"))
        ('0.1235', '1e-09', '-2', '∞')
    """
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.4g}"


def interval(ends: Interval) -> str:
    """Both ends in brackets.

    Example:
        >>> interval((0.5, 1.0))
        '[0.5, 1]'
    """
    return f"[{number(ends[0])}, {number(ends[1])}]"


def region(ends: Interval) -> str:
    """The values for which the statement is true.

    An end that is the next number after a round one leaves that one out.

    Example:
        >>> region((0.0, math.inf)), region((-math.inf, 0.05)), region((0.9, 1.1))
        ('at least 0', 'at most 0.05', '0.9 to 1.1')
        >>> region((math.nextafter(1, 2), math.inf)), region((0.0, math.nextafter(0.1, 0)))
        ('above 1', '0 to below 0.1')
    """
    low, high = ends
    least = _end(low, "above", low > _round(low))
    most = _end(high, "below", high < _round(high))
    if math.isinf(high) and math.isinf(low):
        return "any"
    if math.isinf(high):
        return least if "above" in least else f"at least {least}"
    if math.isinf(low):
        return most if "below" in most else f"at most {most}"
    return f"{least} to {most}"


def _round(value: float) -> float:
    if math.isinf(value) or abs(value) < 1e-300:
        return value if math.isinf(value) else 0.0
    return float(f"{value:.4g}")


def _end(value: float, word: str, open_: bool) -> str:
    near = _round(value)
    apart = open_ and math.isclose(value, near, rel_tol=1e-12, abs_tol=1e-300)
    return f"{word} {number(near)}" if apart else number(value)


def measured(finding: Finding) -> str:
    """The estimate with its unit.

    Example:
        >>> measured(Finding("a", 2.0, (1, 3), (0, 4), (0, math.inf), 9, "dB"))
        '2 dB'
    """
    return f"{number(finding.estimate)} {finding.unit}".strip()


def verdict(claim: Claim) -> str:
    """The verdict with its marks.

    Example:
        >>> from leakbound_reproductions.claim import Mark
        >>> verdict(Claim("1", "a", "b", "c", (), "no data", (Mark.CORRECTED,)))
        'cannot be tested here (as corrected)'
    """
    return f"{claim.verdict} ({'; '.join(claim.marks)})" if claim.marks else str(claim.verdict)


def basis(claim: Claim) -> str:
    """What the verdict rests on: how many findings hold, and the marks.

    Example:
        >>> from leakbound_reproductions.claim import Mark
        >>> found = Finding("a", 2.0, (1, 3), (0, 4), (0, math.inf), 9)
        >>> basis(Claim("1", "a", "b", "c", (found,), marks=(Mark.CORRECTED,)))
        '1 of 1 finding holds; as corrected'
    """
    verdicts = [str(finding.verdict) for finding in claim.findings]
    held = verdicts.count("holds")
    plural = "finding holds" if len(verdicts) == 1 else "findings hold"
    return "; ".join((f"{held} of {len(verdicts)} {plural}", *claim.marks))
