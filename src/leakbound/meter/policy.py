"""What a client wants done about what it gives away, and what was decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leakbound import check
from leakbound.assess.record import EXPOSED, UNDECIDED, Verdict
from leakbound.attacks.base import Attack
from leakbound.inspection import KINDS, LayerFinding
from leakbound.types import ThreatModel

ACTIONS = ("ignore", "warn", "refuse")
WHEN = ("needed", "always", "never")
REFUSALS = ("error", "send nothing useful")
SEND, WARN, REFUSE = "send", "warn", "refuse"

BLIND_TO_LABELS = ThreatModel(labels_known=False)


@dataclass(frozen=True)
class Policy:
    """The client's own rules. They stay on the client.

    Args:
        psnr: in dB, from which an image counts as reconstructed.
        on_leak: what to do where an attack reached the PSNR: "ignore", "warn" or "refuse".
        on_planted: the same where the server's model has the marks of a planted one.
        accepted: kinds of marks (`inspection.KINDS`) that are no reason to do anything, such as
            "zeroed paths" where the agreed model is pruned.
        on_undecided: the same where no attack reached the PSNR and no bound excludes it.
        on_refuse: "error" answers that the client refuses, and nothing else; "send nothing useful"
            answers with the weights that came, which hides in a sum of many clients and nowhere
            else. For mods alone.
        probability: how often an attacker may reach the PSNR under differential privacy; None: asks
            for no such bound. It holds for images like the task's public ones, 64 at least: one
            Gaussian a class is fitted to these. With fewer there is no such bound.
        error_bound: when to compute a Cramér-Rao bound on the error: "needed" (where it can change
            the verdict), "always" (where there is one) or "never".
        draws: of the prior, over which the bound's information is averaged.
        directions: random directions for each draw; fewer are cheaper and loosen the bound.
        attacks: attacks to run besides the closed-form ones, at their own cost.
        threat: what the attacker knows.

    Example:
        >>> Policy(on_leak="refuse").psnr
        20.0
        >>> Policy(on_leak="refused")
        Traceback (most recent call last):
        ...
        ValueError: on_leak is 'refused'; did you mean 'refuse'? (known: ignore, refuse, warn)
    """

    psnr: float = 20.0
    on_leak: str = "warn"
    on_planted: str = "refuse"
    accepted: tuple[str, ...] = ()
    on_undecided: str = "ignore"
    on_refuse: str = "error"
    probability: float | None = 0.001
    error_bound: str = "needed"
    draws: int = 4
    directions: int = 2
    attacks: tuple[Attack, ...] = ()
    threat: ThreatModel = BLIND_TO_LABELS

    def __post_init__(self) -> None:
        check.positive(psnr=self.psnr)
        check.one_of(ACTIONS, on_leak=self.on_leak)
        check.one_of(ACTIONS, on_planted=self.on_planted)
        check.one_of(ACTIONS, on_undecided=self.on_undecided)
        check.one_of(REFUSALS, on_refuse=self.on_refuse)
        check.one_of(WHEN, error_bound=self.error_bound)
        for kind in self.accepted:
            check.one_of(KINDS, accepted=kind)
        check.count(draws=self.draws, directions=self.directions)
        if self.draws < 2:
            raise ValueError("draws is 1; give 2 at least, for a confidence limit")
        if self.probability is not None and not 0 < self.probability < 1:
            raise ValueError(f"probability is {self.probability!r}; give one between 0 and 1")
        if not isinstance(self.attacks, tuple):
            raise ValueError(f"attacks is a {type(self.attacks).__name__}; give a tuple of attacks")

    def before(self, findings: Sequence[LayerFinding]) -> Decision:
        """What to do about the model that the server sent, before anything is trained."""
        return _strictest(self._rules(findings))

    def decide(
        self,
        verdict: Verdict,
        findings: Sequence[LayerFinding],
        words: str,
        doubt: str | None = None,
    ) -> Decision:
        """What to do about an update; `words` say what the verdict rests on, `doubt` against it."""
        rules = self._rules(findings)
        if doubt is not None:
            rules.append((WARN, doubt))
        if verdict == EXPOSED:
            rules.append((self.on_leak, f"exposed: {words}"))
        if verdict == UNDECIDED:
            rules.append((self.on_undecided, f"undecided: {words}"))
        return _strictest(rules)

    def _rules(self, findings: Sequence[LayerFinding]) -> list[tuple[str, str]]:
        marks = [finding for finding in findings if finding.kind not in self.accepted]
        return [(self.on_planted, _of(finding)) for finding in marks]


@dataclass(frozen=True)
class Decision:
    """Whether the update leaves ("send", "warn", "refuse"), and why in words for the client."""

    action: str
    reasons: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        """Whether nothing may leave."""
        return self.action == REFUSE


def _of(finding: LayerFinding) -> str:
    return f"the server's model looks malicious ({finding.kind}): {finding.words}"


def _strictest(rules: list[tuple[str, str]]) -> Decision:
    """The strictest of the actions that apply, with the reasons for it and for warnings."""
    named = [(action, words) for action, words in rules if action != "ignore"]
    if not named:
        return Decision(SEND)
    refused = any(action == "refuse" for action, _ in named)
    return Decision(REFUSE if refused else WARN, tuple(words for _, words in named))
