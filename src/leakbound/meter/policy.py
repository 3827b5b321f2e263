"""What a client wants done about what it gives away, and what was decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leakbound import check
from leakbound.attacks.base import Attack
from leakbound.inspection import KINDS, LayerFinding
from leakbound.types import ThreatModel

ACTIONS = ("ignore", "warn", "refuse")
FLOORS = ("needed", "always", "never")
REFUSALS = ("error", "send nothing useful")
SEND, WARN, REFUSE = "send", "warn", "refuse"

BLIND_TO_LABELS = ThreatModel(labels_known=False)

EXPOSED = "exposed"
PROTECTED = "protected"
ON_AVERAGE = "protected on average"
UNDECIDED = "undecided"
"""The verdicts, in the words of an audit."""


@dataclass(frozen=True)
class Policy:
    """The client's own rules. They stay on the client.

    Args:
        threshold_db: PSNR in dB from which on an image counts as given away.
        on_leak: what to do where an attack reached the threshold: "ignore", "warn" or "refuse".
        on_planted: the same where the server's model has the marks of a planted one.
        accepted: kinds of marks (`inspection.KINDS`) that are no reason to do anything, such as
            "zeroed paths" where the agreed model is pruned.
        on_undecided: the same where no attack reached the threshold and no bound excludes it.
        on_refuse: "error" answers that the client refuses, and nothing else; "send nothing useful"
            answers with the weights that came, which hides in a sum of many clients and nowhere
            else. For mods alone.
        probability: how often the threshold may be reached under differential privacy; None: never
            by that law. It holds for images like the task's public ones, 64 at least: one Gaussian
            a class is fitted to these. With fewer there is no such bound.
        floor: when to compute a Cramér-Rao floor: "needed" (where it can change the verdict),
            "always" (where there is one) or "never".
        floor_images: how many draws of the prior the floor's information is averaged over.
        floor_directions: random directions for each; fewer are cheaper and loosen the floor.
        attacks: attacks to run beside the closed-form ones, at their own cost.
        threat: what the attacker is told.

    Example:
        >>> Policy(on_leak="refuse").threshold_db
        20.0
        >>> Policy(on_leak="refused")
        Traceback (most recent call last):
        ...
        ValueError: on_leak is 'refused'; did you mean 'refuse'? (known: ignore, refuse, warn)
    """

    threshold_db: float = 20.0
    on_leak: str = "warn"
    on_planted: str = "refuse"
    accepted: tuple[str, ...] = ()
    on_undecided: str = "ignore"
    on_refuse: str = "error"
    probability: float | None = 0.001
    floor: str = "needed"
    floor_images: int = 4
    floor_directions: int = 2
    attacks: tuple[Attack, ...] = ()
    threat: ThreatModel = BLIND_TO_LABELS

    def __post_init__(self) -> None:
        check.positive(threshold_db=self.threshold_db)
        check.one_of(ACTIONS, on_leak=self.on_leak)
        check.one_of(ACTIONS, on_planted=self.on_planted)
        check.one_of(ACTIONS, on_undecided=self.on_undecided)
        check.one_of(REFUSALS, on_refuse=self.on_refuse)
        check.one_of(FLOORS, floor=self.floor)
        for kind in self.accepted:
            check.one_of(KINDS, accepted=kind)
        check.count(floor_images=self.floor_images, floor_directions=self.floor_directions)
        if self.floor_images < 2:
            raise ValueError("floor_images is 1; give 2 at least, for a confidence limit")
        if self.probability is not None and not 0 < self.probability < 1:
            raise ValueError(f"probability is {self.probability!r}; give one between 0 and 1")
        if not isinstance(self.attacks, tuple):
            raise ValueError(f"attacks is a {type(self.attacks).__name__}; give a tuple of attacks")

    def before(self, findings: Sequence[LayerFinding]) -> Decision:
        """What to do about the model that the server sent, before anything is trained."""
        return _strictest(self._rules(findings))

    def decide(
        self, verdict: str, findings: Sequence[LayerFinding], words: str, doubt: str | None = None
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
    return f"the server's model looks planted ({finding.kind}): {finding.words}"


def _strictest(rules: list[tuple[str, str]]) -> Decision:
    """The strictest of the actions that apply, with the reasons for it and for warnings."""
    named = [(action, words) for action, words in rules if action != "ignore"]
    if not named:
        return Decision(SEND)
    refused = any(action == "refuse" for action, _ in named)
    return Decision(REFUSE if refused else WARN, tuple(words for _, words in named))


def judge(
    psnr: Sequence[float | None],
    blind: Sequence[float | None],
    threshold: float,
    *,
    excluded: bool,
    on_average: bool,
) -> str:
    """Exposed, protected, protected on average or undecided, as an audit says it.

    exposed: some image reached the threshold and is closer to the truth than the guess that sees
    no update. A bound that covers all attackers protects otherwise; failed attacks do not.

    Example:
        >>> judge([31.0], [11.0], 20.0, excluded=False, on_average=False)
        'exposed'
        >>> judge([12.0], [11.0], 20.0, excluded=False, on_average=False)
        'undecided'
    """
    for value, other in zip(psnr, blind, strict=True):
        if value is not None and value >= threshold and (other is None or value > other):
            return EXPOSED
    if excluded:
        return PROTECTED
    return ON_AVERAGE if on_average else UNDECIDED
