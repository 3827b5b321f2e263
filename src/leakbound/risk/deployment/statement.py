"""What a deployment protects: a row for each audience and unit, with both sides of the risk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from leakbound.assess.record import PROTECTS, Verdict
from leakbound.assess.verdict import decide
from leakbound.bounds import from_scratch, identification
from leakbound.bounds.attainable import Attainable
from leakbound.bounds.counting import PublicSample
from leakbound.bounds.record_priors import Baseline
from leakbound.risk.deployment.facts import Deployment
from leakbound.risk.deployment.laws import AUDIENCES, Audience, AudienceLaw, Unit, laws_of

KAPPAS = (1e-3, 1e-6)
"""Prior-only success probabilities for which a row answers without data."""
WHO = {"server": "server", "clients": "others"}
OF = {
    "client": "a client",
    "example": "one example",
    "any example": "any of its examples",
    "person": "a person's examples",
}


@dataclass(frozen=True)
class Row:
    """What one audience can do to one unit over all rounds.

    Attributes:
        audience, unit: who, and what of whom.
        reason: the rules that give the numbers.
        missing: keys that are not stated and count as their worst case.
        mu: of all rounds, if the number of participations is certain.
        epsilon, delta: for the unit's membership (adding or removing it); None: infinite.
        rises: (a, b): what is known with probability a without the training is reconstructed with
            probability b at most.
        thresholds: (words, attained, bound, verdict) for data.
    """

    audience: Audience
    unit: Unit
    reason: str
    missing: tuple[str, ...]
    mu: float | None
    epsilon: float | None
    delta: float
    rises: tuple[tuple[float, float], ...]
    thresholds: tuple[tuple[str, float, float, Verdict], ...] = ()

    @property
    def protected(self) -> bool:
        """Whether every threshold's verdict is one that a bound gives."""
        words = set(PROTECTS.values())
        return bool(self.thresholds) and all(row[3] in words for row in self.thresholds)

    def plain(self) -> dict[str, Any]:
        """The row as JSON values."""
        names = ("reached", "attained", "bound", "verdict")
        values = asdict(self) | {"protected": self.protected, "rises": list(map(list, self.rises))}
        values["thresholds"] = [dict(zip(names, row, strict=True)) for row in self.thresholds]
        return values


@dataclass(frozen=True, eq=False)
class RiskCriteria:
    """What thresholds are for.

    Attributes:
        thresholds: the words and eta of each.
        prior: of the examples; None is a uniform direction, under which nothing is protected.
        attacks: counted on data; None is the linear trap.
        accepted: probability.
        matched: for each threshold, the share of the data that a fixed candidate matches.
        dim: number of values of an example.
        norm: the least of the examples.
    """

    thresholds: Sequence[tuple[str, float]]
    prior: Baseline | None
    attacks: Attainable | None
    accepted: float
    matched: Sequence[float]
    dim: int
    norm: float


def state(
    given: Deployment,
    *,
    delta: float = 1e-5,
    audiences: Sequence[Audience] = AUDIENCES,
    against: RiskCriteria | None = None,
) -> tuple[Row, ...]:
    """All rows of a deployment.

    Example:
        >>> from leakbound.risk.deployment.file import parse
        >>> facts = {"clip": {"norm": 1.0, "kind": "l2", "at": "client"}, "rounds": 1,
        ...     "noise": {"multiplier": 1.0, "at": "client", "seeded": False}, "unit": "client",
        ...     "participation": {"law": "all"}, "correlation": "none"}
        >>> [(row.audience, round(row.epsilon, 5)) for row in state(parse(facts))]
        [('server', 4.37718), ('clients', 4.37718)]
    """
    kappa = given.record.kappa
    kappas = (*KAPPAS, kappa) if kappa else KAPPAS
    known: dict[Any, Any] = {}
    rows = []
    for law in laws_of(given):
        if law.audience not in audiences:
            continue
        epsilon = law.epsilon(delta)
        rises = law.bound(np.log(np.array(kappas)))
        row = Row(
            law.audience,
            law.unit,
            law.reason,
            law.missing,
            law.mu,
            epsilon if math.isfinite(epsilon) else None,
            delta,
            tuple(zip(kappas, rises.tolist(), strict=True)),
            () if against is None else _thresholds(law, against, known),
        )
        rows.append(row)
    return tuple(rows)


def _thresholds(
    law: AudienceLaw,
    against: RiskCriteria,
    known: dict[Any, Any],
) -> tuple[tuple[str, float, float, Verdict], ...]:
    eta = np.array([level for _, level in against.thresholds])
    # Several audiences often have one law: it is computed once.
    same = law.setting, law.pure, law.copies, law.summed, law.beyond, law.exact, law.sites
    key = *same, law.attack_noise, law.special is None
    # a special bound is a closure, which no key identifies
    if key not in known or law.special is not None:
        if against.prior is not None:
            pair = bounds(law, against.prior, eta)
        else:
            sphere = identification.log_kappa_sphere(
                dim=against.dim,
                eta=eta,
                norm=against.norm,
            )
            pair = law.bound(sphere), np.atleast_1d(np.asarray(sphere))
        known[key] = *pair, _attained(law, against, eta)
    bound, blind, attained = known[key]
    basis = None if against.prior is None else against.prior.basis
    rows = []
    for i, (words, _) in enumerate(against.thresholds):
        # what a fixed candidate attains, for one of several examples or on the data themselves
        base = min(1.0, max(float(np.exp(blind[i])) * law.copies, against.matched[i]))
        below = bound[i] <= against.accepted and base <= against.accepted
        verdict = decide(
            recoverable=law.exact or (attained[i] > against.accepted and attained[i] > base),
            excluded={basis} if below and basis is not None else (),
        )
        rows.append((words, float(attained[i]), float(bound[i]), verdict))
    return tuple(rows)


def bounds(
    law: AudienceLaw,
    prior: Baseline,
    eta: ArrayLike,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Upper bounds on success at each eta, and the log kappa of one example behind them."""
    if isinstance(prior, PublicSample):
        return prior.success_bound(law.bound, eta)
    blind = np.atleast_1d(np.asarray(prior.log_kappa(eta)))
    return law.bound(blind), blind


def _attained(
    law: AudienceLaw,
    against: RiskCriteria,
    eta: NDArray[Any],
) -> NDArray[Any]:
    """The success of working attacks; those that get the update itself need no count."""
    if law.exact:
        return np.ones(len(eta))
    if against.attacks is not None:
        return against.attacks.success(law.hits(), eta, parts=2).success
    success = np.zeros(len(eta))
    for weight, noise in law.hits():
        each = from_scratch.exact(
            noise,
            dim=against.dim,
            eta=eta,
            norm=against.norm,
        )
        success += weight * np.atleast_1d(each)
    return success
