"""What a node accepts to spend."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from leakbound import check
from leakbound.bounds.law import probability
from leakbound.ledger.lines import Standing


@dataclass(frozen=True)
class Budget:
    """The most that all rounds of a ledger may cost.

    Args:
        max_epsilon: of differential privacy at `delta`, for the unit's membership.
        max_probability: of a success that is `prior` without the rounds.
        max_gain: added to anyone's success, whatever they know.
        unit: whose protection counts: "client", "example", "any example" or "person".
        audience: who must not learn more: "server", "clients" (and outsiders), or "both".
        delta: of `max_epsilon`.
        prior: of `max_probability`.
        on_excess: "withhold" refuses the round; "warn" counts it and says so.

    Example:
        >>> Budget(max_gain=0.5).unit
        'client'
    """

    max_epsilon: float | None = None
    max_probability: float | None = None
    max_gain: float | None = None
    unit: Literal["client", "example", "any example", "person"] = "client"
    audience: Literal["server", "clients", "both"] = "both"
    delta: float = 1e-5
    prior: float = 1e-3
    on_excess: Literal["withhold", "warn"] = "withhold"

    def __post_init__(self) -> None:
        limits = {
            "max_epsilon": self.max_epsilon,
            "max_probability": self.max_probability,
            "max_gain": self.max_gain,
        }
        if all(limit is None for limit in limits.values()):
            raise ValueError(
                "max_epsilon, max_probability and max_gain are None; give one of them a number"
            )
        check.given(check.non_negative, max_epsilon=self.max_epsilon)
        check.given(
            check.fraction,
            max_probability=self.max_probability,
            max_gain=self.max_gain,
        )
        probability("delta", self.delta)
        probability("prior", self.prior)
        check.one_of(("client", "example", "any example", "person"), unit=self.unit)
        check.one_of(("server", "clients", "both"), audience=self.audience)
        check.one_of(("withhold", "warn"), on_excess=self.on_excess)

    def exceeded(self, standings: Iterable[Standing]) -> tuple[str, ...]:
        """Each limit that these standings exceed, in words; a missing bound exceeds every limit."""
        rows = [
            row
            for row in standings
            if row.unit == self.unit and self.audience in ("both", row.audience)
        ]
        if not rows:
            return (f"nothing is known of the unit {self.unit!r}",)
        reasons = []
        for row in rows:
            measured = (
                ("epsilon", row.epsilon, self.max_epsilon),
                (f"a success of {row.prior:g}", row.success, self.max_probability),
                ("the gain", row.gain, self.max_gain),
            )
            for name, value, limit in measured:
                if limit is None:
                    continue
                if value is None:  # infinite, whatever the limit
                    reasons.append(f"{row.audience}: {name} has no bound (limit {limit:g})")
                elif value > limit:
                    reasons.append(f"{row.audience}: {name} would be {value:.4g}, above {limit:g}")
        return tuple(reasons)
