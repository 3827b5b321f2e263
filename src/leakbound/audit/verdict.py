"""Exposed, protected or undecided: what a cell shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

EXPOSED = "exposed"
PROTECTED = "protected"
ON_AVERAGE = "protected on average"
UNDECIDED = "undecided"


def verdict(
    psnr: Sequence[float | None],
    blind: Sequence[float | None],
    threshold: float,
    bounds: Sequence[dict[str, Any]] = (),
) -> str:
    """Join an attack's result and the bounds of one cell.

    exposed: some image reached the threshold (dB), and is closer to the truth than the guess that
    sees no update. protected: a bound that covers all attackers excludes the threshold, or lets it
    be reached with no more than the accepted probability under its prior. protected on average: a
    floor on the mean error of all attackers lies above the threshold's; a lucky image is not
    excluded. undecided: neither; attacks failed, but that proves nothing.

    Raises:
        RuntimeError: exposed although a bound that covers all attackers excludes it for certain
            (not only with a probability): one is wrong.

    Example:
        >>> verdict([31.0, 12.0], [11.0, 10.0], 20.0), verdict([12.0], [11.0], 20.0)
        ('exposed', 'undecided')
    """
    reached = any(
        value is not None and value >= threshold and (other is None or value > other)
        for value, other in zip(psnr, blind, strict=True)
    )
    excluding = [b for b in bounds if b["covers"] == "all" and b["excludes_threshold"]]
    excluded = bool(excluding)
    if reached and any(b.get("probability") is None for b in excluding):
        raise RuntimeError("an attack reached a threshold that a bound excludes: one is wrong")
    if reached:
        return EXPOSED
    if excluded:
        return PROTECTED
    average = any(b["covers"] == "all" and b.get("on_average", False) for b in bounds)
    return ON_AVERAGE if average else UNDECIDED
