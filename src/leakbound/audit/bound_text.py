"""A record's bound in one sentence, for screens and notebooks: no more than what is proved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leakbound.audit.floors import UNPROVED


def floor_sentence(bound: Mapping[str, Any]) -> str:
    """What a floor says, whom it covers, and where it is not proved, why.

    Args:
        bound: of a record, with a mean squared error as its value.

    Example:
        >>> told = {"name": "trace", "value": 0.0123, "psnr": 19.1, "prior": "flat"}
        >>> floor_sentence(told | {"covers": "unbiased", "assumptions": []})
        'floor (trace): no unbiased attacker has a mean squared error below 0.0123 (19.1 dB)'
    """
    error = f"{bound['value']:.3g}"
    if bound["psnr"] is not None:
        error += f" ({bound['psnr']:.1f} dB)"
    name = f"floor ({bound['name']})"
    if bound["covers"] == UNPROVED:
        why = bound["assumptions"][0].removesuffix(": the floor is not proved")
        return (
            f"{name}, not proved here: a mean squared error of {error} on average over the prior "
            f"{bound['prior']}, by the formula alone; {why}"
        )
    if bound["covers"] == "unbiased":
        return f"{name}: no unbiased attacker has a mean squared error below {error}"
    return (
        f"{name}: no attacker has a mean squared error below {error} on average over the prior "
        f"{bound['prior']}"
    )
