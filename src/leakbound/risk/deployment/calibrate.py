"""The least noise of a deployment that meets a target risk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from leakbound.bounds.record_priors import Baseline
from leakbound.risk.deployment.facts import Deployment
from leakbound.risk.deployment.laws import AUDIENCES, Audience, AudienceLaw, Unit, laws_of
from leakbound.risk.deployment.statement import bounds
from leakbound.risk.target import GainTarget, Target

LARGEST = 2.0**36
CLOSE = 1e-3
"""Relative step at which the search for the noise ends; the answer is on the safe side."""


def least_noise(
    given: Deployment,
    target: Target | GainTarget,
    prior: Baseline | None = None,
    *,
    audiences: Sequence[Audience] = AUDIENCES,
    unit: Unit | None = None,
) -> Deployment:
    """The same deployment with the least noise multiplier that meets a target, to 0.1 %.

    Args:
        given: its noise level is not used.
        target: the error that counts as a reconstruction, and the accepted probability; or what all
            rounds together add to the success of anyone.
        prior: of the examples, taken from public ones; for a gain there is none.
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

    def risk(law: AudienceLaw) -> float:
        if isinstance(target, GainTarget):
            return gain_of(law, target)
        assert prior is not None  # of every other target
        return float(bounds(law, prior, [target.eta])[0][0])

    accepted = target.most if isinstance(target, GainTarget) else target.gamma

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
            key = law.setting, law.special, law.copies, law.summed, law.beyond, law.sites
            if key not in success:
                success[key] = risk(law)
        return max(success.values()) <= accepted

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


ANYTHING = GainTarget(0.5)
"""Any goal; how much is accepted does not matter."""


def gain_of(law: AudienceLaw, target: GainTarget = ANYTHING) -> float:
    """What all rounds add at most to the success of anyone; 1 if no bound is known.

    Args:
        law: of the audience and the unit. Of "any example", a goal is met if it is met for one.
        target: what the gain is of. Of one column of a person whose other columns are known, what
            is hidden is the value, and not whether a round holds the example: participation counts
            as seen. Of words, it is the success and not what is added.

    Example:
        >>> from leakbound.risk.deployment.file import parse
        >>> facts = {"clip": {"norm": 1.0, "kind": "l2", "at": "client"}, "rounds": 4,
        ...     "noise": {"multiplier": 8.0, "at": "client", "seeded": False}, "unit": "client",
        ...     "participation": {"law": "all"}, "correlation": "none"}
        >>> round(gain_of(laws_of(parse(facts))[0]), 3)  # 2 Phi(1 / 8) - 1
        0.099
    """
    if math.isinf(law.copies):
        return 1.0
    if target.column is not None and law.setting is not None:
        seen = replace(law.setting, participation="visible")
        law = replace(law, setting=seen, special=None)
    if law.summed:
        # The success of any is at least that of one: only q is subtracted.
        return target.limited(law.bound)[0]
    # One release hides all examples of a client together: q is that of any of them.
    return target.limited(replace(law, copies=1.0).bound)[0]


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
    target: Target | GainTarget,
) -> str:
    rows = [e for e in laws_of(deployment) if e.unit == unit and e.audience in audiences]
    for law in rows:
        if law.setting is None:
            missing = f" (not stated: {', '.join(law.missing)})" if law.missing else ""
            return (
                f"no noise multiplier meets {target} for {law.audience}: {law.reason}{missing}; "
                "state what is missing, or give the audiences that count (--audience)"
            )
    if isinstance(target, GainTarget):
        return f"no noise multiplier that was tried meets {target}; accept more"
    return (
        f"no noise multiplier meets {target}: without the training an attacker already succeeds as "
        "often; ask for a smaller error or accept more"
    )
