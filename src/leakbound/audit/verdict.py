"""Exposed, protected or undecided: what a cell shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

EXPOSED = "exposed"
CERTIFIED = "exposed (certified)"
PROTECTED = "protected"
ON_AVERAGE = "protected on average"
UNDECIDED = "undecided"


def verdict(
    psnr: Sequence[float | None],
    blind: Sequence[float | None],
    threshold: float,
    bounds: Sequence[dict[str, Any]] = (),
    *,
    certified: bool = False,
) -> str:
    """Join an attack's result and the bounds of one cell.

    exposed: some example reached the threshold (dB), and is closer to the truth than the guess that
    sees no update. exposed (certified): the truth is not known, but the update proves that the
    reconstruction is the input. protected: a bound that covers all attackers excludes the
    threshold, or lets it be reached with no more than the accepted probability under its prior.
    protected on average: a floor on the mean error of all attackers lies above the threshold's; a
    lucky image is not excluded. undecided: none of these; attacks failed, but that proves nothing.

    Args:
        psnr: of each example, in dB; empty where the truth is not known.
        blind: the same of the guess that sees no update.
        threshold: in dB.
        bounds: as records hold them.
        certified: a certificate says that the reconstruction is the input.

    Raises:
        RuntimeError: exposed although a bound that covers all attackers excludes it for certain
            (not only with a probability), or certified although the truth is another: one is wrong.

    Example:
        >>> verdict([31.0, 12.0], [11.0, 10.0], 20.0), verdict([12.0], [11.0], 20.0)
        ('exposed', 'undecided')
        >>> verdict([], [], 20.0, certified=True)
        'exposed (certified)'
    """
    reached = any(
        value is not None and value >= threshold and (other is None or value > other)
        for value, other in zip(psnr, blind, strict=True)
    )
    if certified and psnr and not reached:
        raise RuntimeError(
            "a certificate says that the reconstruction is the input, and the truth that it is "
            "not: one is wrong (is this truth the batch behind the update, as the model was fed?)"
        )
    excluding = [b for b in bounds if b["covers"] == "all" and b["excludes_threshold"]]
    excluded = bool(excluding)
    if (reached or certified) and any(b.get("probability") is None for b in excluding):
        raise RuntimeError("an attack reached a threshold that a bound excludes: one is wrong")
    if reached or certified:
        return EXPOSED if reached else CERTIFIED
    if excluded:
        return PROTECTED
    average = any(b["covers"] == "all" and b.get("on_average", False) for b in bounds)
    return ON_AVERAGE if average else UNDECIDED
