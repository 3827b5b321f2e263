"""What an audit of a client's epsilon compares and concludes."""

from __future__ import annotations

from dataclasses import dataclass

from leakbound import check
from leakbound._util.rounding import least, most
from leakbound.bounds import conversions
from leakbound.bounds.law import probability

CONSISTENT, LEAKS, UNKNOWN = 0, 1, 2
"""Exit codes."""


@dataclass(frozen=True)
class Claims:
    """What a program says about its privacy, for neighbors that differ by one added example.

    Attributes:
        delta: of every epsilon here.
        declared: the epsilon that it states.
        noise_multiplier, sampling_rate, steps: its training, for the accountant.
        replace: neighbors differ by a replaced example, which moves a sum twice as far. There is no
            tight accountant here if batches are sampled.

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

    def __post_init__(self) -> None:
        probability("delta", self.delta)
        check.given(check.non_negative, declared=self.declared)
        check.given(check.positive, noise_multiplier=self.noise_multiplier)
        check.positive(sampling_rate=self.sampling_rate)
        check.fraction(sampling_rate=self.sampling_rate)
        check.count(steps=self.steps)
        if self.sampling_rate < 1 and (self.replace or self.noise_multiplier is None):
            raise ValueError(
                f"sampling_rate is {self.sampling_rate:g}; give a noise multiplier too, and "
                "neighbors that add or remove an example"
            )

    @property
    def bounded(self) -> float | None:
        """The accountant's upper bound on epsilon; None without a noise multiplier."""
        if self.noise_multiplier is None:
            return None
        noise, how = self.noise_multiplier / (1 + self.replace), self.training
        return float(conversions.epsilon(noise, delta=self.delta, **how))

    @property
    def training(self) -> dict[str, float]:
        """Steps and sampling rate, for the accountant."""
        return {"steps": self.steps, "sampling_rate": self.sampling_rate}

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
        runs: calls of the client.
        power: the largest limit that so many runs can give.
    """

    claims: Claims
    lower: tuple[LowerEpsilon, ...]
    confidence: float
    runs: int
    power: float

    @property
    def best(self) -> LowerEpsilon:
        """The largest limit."""
        return max(self.lower, key=lambda one: one.epsilon)

    @property
    def code(self) -> int:
        """1: it leaks more than it claims; 0: consistent; 2: the audit cannot tell."""
        claim = self.claims.least
        if claim is not None and self.best.epsilon > claim * (1 + 1e-9):
            return LEAKS
        blind = claim is None or self.best.epsilon == 0 or self.power < claim
        return UNKNOWN if blind else CONSISTENT

    @property
    def sentence(self) -> str:
        """The verdict as text."""
        claim, best = self.claims.least, self.best
        found = f"epsilon is at least {least(best.epsilon)} (assumes: {best.assumes})"
        if claim is None:
            return f"cannot tell: {found}, and nothing is claimed; give --declared"
        if self.code == LEAKS:
            return f"the program leaks more than it claims: {found}, and the claim is {most(claim)}"
        if self.code == CONSISTENT:
            return f"consistent: {found}, and the claim is {most(claim)}. This does not prove it"
        seen = f"so many runs show {least(self.power)} at most, and the claim is {most(claim)}"
        return f"cannot tell: {seen if best.epsilon else 'the canary is not seen'}; give more runs"
