"""What many rounds of several mechanisms add up to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec.structs import replace as replaced
from numpy.typing import NDArray

from leakbound.bounds.knowledge import largest_gain
from leakbound.ledger.lines import Standing
from leakbound.risk.deployment.contradictions import STEADY
from leakbound.risk.deployment.facts import Deployment
from leakbound.risk.deployment.laws import AudienceLaw, laws_of

Array = NDArray[Any]


def standings(
    spent: Sequence[tuple[Deployment, int]],
    *,
    delta: float = 1e-5,
    prior: float = 1e-3,
) -> tuple[Standing, ...]:
    """What a node's rounds of these deployments together let each audience do to each unit.

    Rounds of one deployment compose by its own law, and Gaussian mechanisms by the sum of their
    mu^2. For others, what one lets an attacker reach is where the next begins, and their epsilons
    add up, each with its part of `delta`. Rounds may be chosen after what was seen before.

    A node counts the rounds in which it took part. So no law of participation makes them fewer, and
    a person's examples count at this node alone. Noise that is correlated across rounds has no
    bound here: what one round reveals then depends on the noise of all rounds of its training.

    Args:
        spent: how many rounds each deployment ran; its own number of rounds does not count.
        delta: of the epsilons.
        prior: the success without the rounds whose rise is stated.

    Source: this project; docs/federated_privacy.md. F is concave, so an attacker whose success
        after the first rounds is q on average reaches F(q) at most after the next.

    Example:
        >>> from leakbound.risk.deployment import parse
        >>> facts = {"clip": {"norm": 1.0, "kind": "l2", "at": "client"}, "unit": "client",
        ...     "noise": {"multiplier": 2.0, "at": "client", "seeded": False},
        ...     "participation": {"law": "all"}, "correlation": "none"}
        >>> [row.mu for row in standings([(parse(facts), 16)])]
        [2.0, 2.0]
    """
    every = [laws_of(_of_node(deployment, count)) for deployment, count in spent]
    alone = all(deployment.correlation in (None, "none") for deployment, _ in spent)
    rounds = sum(count for _, count in spent)
    costs: dict[Any, tuple[float, float, float]] = {}
    pairs = dict.fromkeys((law.audience, law.unit) for laws in every for law in laws)
    found = []
    for pair in pairs:
        own = [law for laws in every for law in laws if (law.audience, law.unit) == pair]
        # A mechanism that says nothing of this unit bounds nothing.
        joined = _joined(own) if alone and len(own) == len(every) else []
        # Both audiences often see the same.
        same = tuple(map(_identity, joined))
        if same not in costs:
            costs[same] = _cost(joined, delta, prior)
        epsilon, gain, success = costs[same]
        row = Standing(
            *pair,
            rounds,
            joined[0].mu if len(joined) == 1 else None,
            epsilon if math.isfinite(epsilon) else None,
            delta,
            gain,
            success,
            prior,
            tuple(dict.fromkeys(key for law in own for key in law.missing)),
        )
        found.append(row)
    return tuple(found)


def _of_node(deployment: Deployment, rounds: int) -> Deployment:
    """The same of one node that took part in so many rounds."""
    who = deployment.participation
    hidden = deployment.secure_aggregation
    if hidden is not None and who.law not in STEADY:
        # A cohort of random size has no fewest number of senders.
        hidden = replaced(hidden, dropouts=None)
    law = None if who.law is None else "all"
    sites = None if deployment.record.people is None else 1
    taken = replaced(who, law=law, rate=None, bins=None, min_separation=None, hidden=None)
    return replaced(
        deployment,
        rounds=rounds,
        participation=taken,
        secure_aggregation=hidden,
        record=replaced(deployment.record, sites=sites),
    )


def _cost(
    joined: Sequence[AudienceLaw],
    delta: float,
    prior: float,
) -> tuple[float, float, float]:
    """Epsilon, the largest gain, and what a success of `prior` becomes; without laws, no bound."""
    if not joined:  # certainty, which no law contradicts
        return math.inf, 1.0, 1.0

    def lift(blind: Array | float) -> Array:
        success: Array = np.exp(np.atleast_1d(np.asarray(blind, float)))
        for law in joined:
            with np.errstate(divide="ignore"):
                success = law.bound(np.log(success))
        return success

    epsilon = math.fsum(law.epsilon(delta / len(joined)) for law in joined)
    gain, _ = largest_gain(lift)
    return epsilon, gain, float(lift(math.log(prior))[0])


def _identity(law: AudienceLaw) -> Any:
    """Equal for laws of equal cost."""
    special = None if law.special is None else id(law)
    own = law.setting, law.pure, law.copies, law.summed, law.beyond, law.sites, law.attack_noise
    return *own, special, law.unit == "client"


def _joined(laws: Sequence[AudienceLaw]) -> list[AudienceLaw]:
    """The same with one law for all Gaussian mechanisms of full participation."""
    # A sum of independent Gaussian releases shows no more than one of their joint mu.
    plain = [law for law in laws if _is_plain(law)]
    others = [law for law in laws if not _is_plain(law)]
    if len(plain) < 2:
        return [*plain, *others]
    mu = math.hypot(*(law.mu or 0.0 for law in plain))
    setting = plain[0].setting
    assert setting is not None  # it is plain
    together = replace(setting, noise_multiplier=1 / mu, steps=1, people=1)
    return [replace(plain[0], setting=together), *others]


def _is_plain(law: AudienceLaw) -> bool:
    usual = law.copies == 1 and law.sites == 1 and law.beyond == 0 and not law.summed
    return usual and law.mu is not None and law.pure is None and law.special is None
