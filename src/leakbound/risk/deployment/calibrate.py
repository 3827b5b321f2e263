"""The least noise of a deployment that meets a target risk."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from leakbound.bounds.record_priors import Baseline
from leakbound.risk.deployment.facts import Deployment
from leakbound.risk.deployment.laws import AUDIENCES, Audience, Unit, laws_of
from leakbound.risk.deployment.statement import bounds
from leakbound.risk.target import Target

LARGEST = 2.0**36
CLOSE = 1e-3
"""Relative step at which the search for the noise ends; the answer is on the safe side."""


def least_noise(
    given: Deployment,
    target: Target,
    prior: Baseline,
    *,
    audiences: Sequence[Audience] = AUDIENCES,
    unit: Unit | None = None,
) -> Deployment:
    """The same deployment with the least noise multiplier that meets a target, to 0.1 %.

    Args:
        given: its noise level is not used.
        target: the error that counts as a reconstruction, and the accepted probability.
        prior: of the examples, taken from public ones.
        audiences: who must not exceed it.
        unit: "client", "example", "any example" or "person"; by default the deployment's, or
            "example".

    Raises:
        ValueError: no amount of noise helps, such as against a server that sees every update.

    Example:
        >>> import numpy as np
        >>> from leakbound.bounds.counting import PublicSample
        >>> from leakbound.risk.deployment.file import parse
        >>> rows = PublicSample(np.random.default_rng(0).random((4000, 16)))
        >>> facts = parse({"clip": {"norm": 1.0, "kind": "l2"}, "rounds": 16, "unit": "example",
        ...     "noise": {"at": "server", "on": "sum", "seeded": False}, "weights": "uniform",
        ...     "participation": {"law": "server-picks", "min_separation": 4},
        ...     "correlation": "band:4"})
        >>> target = Target.parse("mse<=0.001 with probability<=0.02", input_range=1.0)
        >>> found = least_noise(facts, target, rows, audiences=["clients"])
        >>> independent = msgspec.structs.replace(facts, correlation="none")
        >>> other = least_noise(independent, target, rows, audiences=["clients"])
        >>> round(found.noise.multiplier / other.noise.multiplier, 2)
        1.22
    """
    asked = unit or given.unit or "example"
    if asked == "person" and given.record.people is None:
        raise ValueError("record.people is not stated; give the most examples of one person")
    if not audiences:
        raise ValueError("audiences is empty; give server, clients, or both")

    def at(level: float) -> Deployment:
        fresh = {"multiplier": level, "std": None, "epsilon": None, "pure_epsilon": None}
        noise = msgspec.structs.replace(given.noise, **fresh)
        return msgspec.structs.replace(given, noise=noise, unit=None)

    def met(level: float) -> bool:
        success = {}
        for law in laws_of(at(level)):
            if law.unit != asked or law.audience not in audiences:
                continue
            # several audiences and units share a law, and a bound can take seconds
            key = law.setting, law.special, law.copies, law.summed, law.beyond
            if key not in success:
                success[key] = float(bounds(law, prior, [target.eta])[0][0])
        return max(success.values()) <= target.gamma

    largest = _largest(given)
    high = min(1.0, largest)
    # success falls with the noise, so doubling twice brackets the answer quickly
    while not met(high):
        if high == largest:
            raise ValueError(_why(at(high), asked, audiences, target))
        high = min(4 * high, largest)
    low = high / 4
    while low > 1 / LARGEST and met(low):
        low, high = low / 4, low
    while high / low > 1 + CLOSE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if met(middle) else (middle, high)
    return msgspec.structs.replace(at(high), unit=given.unit)


def _largest(deployment: Deployment) -> float:
    """The largest multiplier that is tried; an adaptive clip needs one below twice `bit_noise`."""
    adaptive = deployment.clip.adaptive
    if deployment.clip.kind != "adaptive" or adaptive is None or adaptive.bit_noise is None:
        return LARGEST
    return min(LARGEST, 2 * adaptive.bit_noise * (1 - CLOSE))


def _why(
    deployment: Deployment,
    unit: Unit,
    audiences: Sequence[Audience],
    target: Target,
) -> str:
    rows = [e for e in laws_of(deployment) if e.unit == unit and e.audience in audiences]
    for law in rows:
        if law.setting is None:
            missing = f" (not stated: {', '.join(law.missing)})" if law.missing else ""
            return (
                f"no noise multiplier meets {target} for {law.audience}: {law.reason}{missing}; "
                "state what is missing, or give the audiences that count (--audience)"
            )
    return (
        f"no noise multiplier meets {target}: without the training an attacker already succeeds as "
        "often; ask for a smaller error or accept more"
    )
