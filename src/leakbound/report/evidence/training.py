"""Evidence from a training configuration: the bounded part alone, as no attack was run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leakbound.assess.record import Verdict
from leakbound.report.evidence import auxiliary, privacy
from leakbound.report.evidence.run import BOUNDED, DECLARED, PROBABILITY
from leakbound.report.evidence.schema import (
    Answer,
    AttackerPart,
    AuxiliaryLine,
    BoundedPart,
    BoundLine,
    CorridorCurve,
    DeclaredPart,
    Epsilons,
    Item,
    MeasuredPart,
    Provenance,
    RunAgain,
    Subject,
    cleaned,
)
from leakbound.report.tables import Theorem

NO_ATTACK = "No attack was run: nothing here is measured."
DEFENSE = "DP-SGD with these settings"
SEES = {
    "visible": "the attacker sees which steps hold an example",
    "hidden": "nobody sees which steps hold an example",
}
NAMES = ("upper bound", "attained success")
KINDS = (PROBABILITY, "attained by an attack that nobody ran here")


@dataclass(frozen=True)
class ThresholdBounds:
    """What holds at one threshold; `matched`: the share of the data that one fixed image matches.

    `attained` and `bound` are probabilities, of the best attack on a linear trap and of any.
    """

    psnr: float
    attained: float
    bound: float
    matched: float | None
    verdict: Verdict


@dataclass(frozen=True)
class TrainingBounds:
    """A training configuration with the bounds on it.

    Attributes:
        given: the settings, by the names of `--training`, and
        stated: those that were given and are no defaults.
        epsilons: of the whole training.
        accepted: the probability of a reconstructed example that is accepted.
        prior: of the upper bound.
        notices: what stands on top.
        thresholds: one row each.
        bound_scope, attained_scope: `attackers`, `prior`, `known`, `not_said` and `equation`.
        examples: where they come from, how many values each has, their norms and their number.
        curve: over the threshold.
        versions: of what computed it.
        command: that computes it again.
    """

    given: Mapping[str, Any]
    stated: Sequence[str]
    epsilons: Epsilons
    accepted: float
    prior: str
    notices: tuple[str, ...]
    thresholds: tuple[ThresholdBounds, ...]
    bound_scope: Mapping[str, str]
    attained_scope: Mapping[str, str]
    examples: dict[str, Any]
    curve: CorridorCurve
    versions: dict[str, str]
    command: str


def of_training(found: TrainingBounds, statements: Mapping[str, str]) -> Subject:
    """A training configuration as a subject of the report; `statements` as for `of_run`."""
    sees, who = SEES[found.given["participation"]], statements.get("accepted_by")

    def origin(name: str) -> str:
        return "--training" if name in found.stated else "the default of `leakbound evidence`"

    limits = [
        auxiliary.threshold("reconstructed", row.psnr, origin("psnr"), who)
        for row in found.thresholds
    ]
    limits.append(auxiliary.threshold("accepted", found.accepted, origin("accept"), who))
    claim = privacy.of_training(found.given, found.epsilons, sees, statements)
    subject = Subject(
        kind="training",
        name="training configuration",
        notices=(NO_ATTACK, *found.notices),
        measured=MeasuredPart(NO_ATTACK),
        bounded=BoundedPart(BOUNDED, _bounds(found), _theorems(found), ()),
        declared=DeclaredPart(DECLARED, auxiliary.declared(statements, _stated(found))),
        attacker=AttackerPart(_attacker(found), ()),
        thresholds=tuple(limits),
        curve=found.curve,
        differential_privacy=(claim,),
        provenance=Provenance(dict(found.given), found.examples, found.versions),
        rerun=RunAgain(
            found.command,
            ("the versions under Provenance", "the same data, where --training names any"),
            why_not="a training configuration has no records; the command computes its bounds "
            "again",
        ),
    )
    return cleaned(subject)


def _bounds(found: TrainingBounds) -> tuple[BoundLine, ...]:
    """At every threshold the upper bound, which is number 1, and the attained success."""
    lines = []
    for row in found.thresholds:
        for number, (value, scope) in enumerate(
            ((row.bound, found.bound_scope), (row.attained, found.attained_scope)), 1
        ):
            upper = number == 1
            lines.append(
                BoundLine(
                    "any model that a server may send",
                    None,
                    DEFENSE,
                    f"{NAMES[number - 1]} at {row.psnr:g} dB",
                    KINDS[number - 1],
                    value=value,
                    least=value,
                    most=value,
                    psnr=row.psnr,
                    standard_error=None,
                    accepted=found.accepted if upper else None,
                    prior=scope["prior"],
                    covers_all=upper,
                    theorem=number,
                    experiments=None,
                    of_experiments=None,
                    verdict=row.verdict if upper else None,
                )
            )
    return tuple(lines)


def _theorems(found: TrainingBounds) -> tuple[Theorem, ...]:
    matched = [
        f"one fixed image matches {row.matched:.2%} of the data given to {row.psnr:g} dB, without "
        "any update"
        for row in found.thresholds
        if row.matched is not None
    ]
    return tuple(
        Theorem(
            number,
            NAMES[number - 1],
            scope["prior"],
            True,
            scope["attackers"],
            number == 1,
            scope["equation"],
            (
                f"known to the attacker: {scope['known']}",
                f"it does not say: {scope['not_said']}",
                *more,
            ),
            None,
        )
        for number, scope, more in ((1, found.bound_scope, matched), (2, found.attained_scope, []))
    )


def _stated(found: TrainingBounds) -> list[Item]:
    words = {
        "noise_multiplier": "Noise standard deviation over the clip norm",
        "clip_norm": "Clip norm",
        "steps": "Steps",
        "sampling_rate": "Sampling rate (Poisson)",
        "participation": "Which steps hold an example",
        "dim": "Values of one example",
        "norm": "Least norm of an example",
        "accept": "Accepted probability of a reconstructed example",
        "prior": "Prior of the upper bound",
        "data": "Data that norms and priors are taken from",
    }
    rows = []
    for name, text in words.items():
        value = found.given.get(name)
        shown = None if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        if name == "participation":
            shown = f"{value}: {SEES[str(value)]}"
        source = "--training" if name in found.stated else "default, or taken from the data"
        rows.append(auxiliary.item(f"training_{name}", shown, "declared", source, text))
    return rows


def _attacker(found: TrainingBounds) -> tuple[AuxiliaryLine, ...]:
    """What the attackers of upper bound and attained success are taken to know."""
    sees: Answer = "yes" if found.given["participation"] == "visible" else "no"
    law = "the theorem of the upper bound"
    rows: list[tuple[str, str, Answer, str, str]] = [
        ("labels", "The true labels", "yes", "any knowledge besides the example", law),
        ("defense", "Noise multiplier and clip norm", "yes", "", law),
        ("mask", "Which weights a mask withheld", "no", "nothing is withheld", "DP-SGD"),
        ("statistics", "The batch's statistics in batch norms", "no",
         "if they leave the client, neither number holds", law),
        ("norms", "The norm of the example", "yes", "the attack that attains its success uses it",
         "the theorem of the attained success"),
        ("batch_size", "The batch size", "yes", "the expected one", law),
        ("model", "The model and its weights in every step", "yes", "or chosen by the server", law),
        ("others", "All other examples", "yes", "", law),
        ("auxiliary", "The prior of the examples", "yes", found.prior, law),
        ("participation", "Which steps hold the example", sees, "", "--training participation"),
        ("noise", "The noise that was drawn, or its seed", "no",
         "who has it, subtracts it", law),
    ]  # fmt: skip
    return tuple(AuxiliaryLine(*row) for row in rows)
