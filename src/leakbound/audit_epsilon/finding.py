"""What an audit of a client's epsilon compares and concludes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from leakbound import check
from leakbound._util import files
from leakbound._util.formats import format_lower, format_upper
from leakbound.bounds import conversions
from leakbound.bounds.law import probability

CONSISTENT = 0
LEAKS = 1
UNKNOWN = 2
"""Exit codes."""
MOST_BYTES = 1 << 20
"""Of a result's file."""


@dataclass(frozen=True)
class Claims:
    """What a program says about its privacy, for neighbors that differ by one added example.

    Attributes:
        delta: of every epsilon here.
        declared: the epsilon that it states.
        noise_multiplier, sampling_rate, steps: its training, for the accountant.
        replace: neighbors differ by a replaced example, which moves a sum twice as far.
        rounds: how many updates, each of so many steps, every epsilon covers. The audit sees all.

    Example:
        >>> round(Claims(noise_multiplier=1.0).bounded, 3)
        4.377
    """

    delta: float = 1e-5
    declared: float | None = None
    noise_multiplier: float | None = None
    sampling_rate: float = 1.0
    steps: int = 1
    replace: bool = False
    rounds: int = 1

    def __post_init__(self) -> None:
        probability("delta", self.delta)
        check.given(check.non_negative, declared=self.declared)
        check.given(check.positive, noise_multiplier=self.noise_multiplier)
        check.positive(sampling_rate=self.sampling_rate)
        check.fraction(sampling_rate=self.sampling_rate)
        check.count(steps=self.steps, rounds=self.rounds)
        if self.sampling_rate < 1 and self.noise_multiplier is None:
            raise ValueError(
                f"sampling_rate is {self.sampling_rate:g}; give a noise multiplier too"
            )

    @property
    def bounded(self) -> float | None:
        """The accountant's upper bound on epsilon; None without a noise multiplier."""
        if self.noise_multiplier is None:
            return None
        return float(conversions.epsilon(self.noise_multiplier, delta=self.delta, **self.training))

    @property
    def training(self) -> dict[str, Any]:
        """Steps of all rounds, sampling rate and neighbors, for the accountant."""
        steps = self.steps * self.rounds
        return {"steps": steps, "sampling_rate": self.sampling_rate, "replace": self.replace}

    @property
    def schedule(self) -> str:
        """Rounds, steps, sampling rate and neighbors as text."""
        neighbors = ", one example replaced" if self.replace else ""
        steps = f"rounds: {self.rounds}, steps: {self.steps}"
        return f"{steps}, sampling rate: {self.sampling_rate:g}{neighbors}"

    @property
    def least(self) -> float | None:
        """The smaller of the declared and the bounded epsilon."""
        return min((v for v in (self.declared, self.bounded) if v is not None), default=None)


@dataclass(frozen=True)
class LowerEpsilon:
    """A lower confidence limit on epsilon: what it assumes, and what the runs showed."""

    method: str
    epsilon: float
    assumes: str
    shown: str


@dataclass(frozen=True)
class EpsilonAudit:
    """What an audit of a client found.

    Attributes:
        lower: limits that hold together with probability `confidence`.
        runs: runs of the client, each of all rounds.
        power: the largest limit that so many runs can give.
        client: what was audited, for display.
    """

    claims: Claims
    lower: tuple[LowerEpsilon, ...]
    confidence: float
    runs: int
    power: float
    client: str = ""

    @property
    def best(self) -> LowerEpsilon:
        """The largest limit."""
        return max(self.lower, key=lambda one: one.epsilon)

    @property
    def code(self) -> int:
        """1: it leaks more than it claims; 0: consistent; 2: the audit cannot tell."""
        claim = self.claims.least
        # The slack is for rounding in the accountant.
        if claim is not None and self.best.epsilon > claim * (1 + 1e-9):
            return LEAKS
        # Runs that could not show the claimed epsilon cannot confirm it either.
        blind = claim is None or self.best.epsilon == 0 or self.power < claim
        return UNKNOWN if blind else CONSISTENT

    @property
    def lines(self) -> Iterator[tuple[str, str | None, str]]:
        """What is declared, bounded and found: which of them, the epsilon, and where from."""
        claims = self.claims
        said = None if claims.declared is None else f"{claims.declared:g}"
        yield "declared", said, "the program's claim"
        if claims.bounded is not None:
            known = f"noise multiplier {claims.noise_multiplier:g}, {claims.schedule}"
            yield "bounded", format_upper(claims.bounded), known
        for one in self.lower:
            shown = f"{one.method}: {one.shown}; assumes: {one.assumes}"
            yield "found, at least", format_lower(one.epsilon), shown

    @property
    def sentence(self) -> str:
        """The verdict as text."""
        claim = self.claims.least
        best = self.best
        measured = f"epsilon is at least {format_lower(best.epsilon)} (assumes: {best.assumes})"
        if claim is None:
            return f"cannot tell: {measured}, and nothing is claimed; give --declared"
        claimed = f"the claim is {format_upper(claim)}"
        if self.code == LEAKS:
            return f"the program leaks more than it claims: {measured}, and {claimed}"
        if self.code == CONSISTENT:
            return f"consistent: {measured}, and {claimed}. This does not prove it"
        seen = f"so many runs show {format_lower(self.power)} at most, and {claimed}"
        return f"cannot tell: {seen if best.epsilon else 'the canary is not seen'}; give more runs"


def read(path: Path) -> EpsilonAudit:
    """A result as `leakbound audit-epsilon --json` prints it; its verdict is computed again.

    Raises:
        ValueError: it cannot be read, is too large, or is no such result.
    """
    what = f"audited {str(path)!r}"
    mend = "give what leakbound audit-epsilon --json printed"
    try:
        with files.opened(path) as stream:
            content = stream.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"it is over {MOST_BYTES} bytes")
        audit = msgspec.json.decode(content, type=EpsilonAudit)
        probability("confidence", audit.confidence)
        check.non_negative(power=audit.power)
        for one in audit.lower:
            check.non_negative(epsilon=one.epsilon)
        if not audit.lower:
            raise ValueError("it holds no limit")
    except (ValueError, OSError, RecursionError) as error:
        words = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{what}: {words}; {mend}") from None
    return audit
