"""Questions of two guidelines, in our words, and what a run answers.

NIST SP 800-226 (2025) asks what a claim of differential privacy means. EDPB Opinion 28/2024 asks
whether a model that was trained on personal data is anonymous. What leakbound does not look at says
so: a question without an answer never looks like a good sign.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from leakbound._util.groups import grouped
from leakbound.report.evidence.parts import (
    NOT_STATED,
    Answered,
    AuxiliaryLine,
    Item,
    MeasuredPart,
    Part,
    PrivacyClaim,
    QuestionLine,
    SignOff,
)
from leakbound.report.template import listing, plural

NIST: Final = "NIST SP 800-226"
EDPB: Final = "EDPB Opinion 28/2024"
NO: Final = "Not answered by leakbound."
NO_CLAIM: Final = "No defense here claims differential privacy."
CLAIMED: Final = {
    "unit_of_privacy": "What is the unit of privacy: a record, a person, a client?",
    "parameters": "What are epsilon and delta?",
    "neighboring_relation": "Which data sets count as neighbors?",
    "trust_model": "What is the trust and threat model: who adds the noise, who is trusted?",
    "mechanism": "Which mechanism is used?",
    "sensitivity": "What is the sensitivity, and how is it enforced?",
    "floating_point": "How does the implementation handle floating point?",
    "randomness": "Where does the randomness come from?",
    "side_channels": "Which side channels exist, such as timing?",
    "composition": "How do several releases compose?",
    "privacy_budget": "What privacy budget is spent and kept over later releases?",
    "hyperparameters": "Which parameters were chosen on private data?",
    "data_collection": "How exposed are the data at collection, before any noise?",
    "data_security": "Who can access the data without the noise?",
    "utility": "What does privacy cost in utility?",
    "bias": "How does the noise affect different groups of people?",
}
"""What NIST's guideline asks of a claim: the items that answer it, by name."""
Row = tuple[str, Answered, str, tuple[Part, ...]]
"""A question, how far it is answered, the answer, and parts of the annex."""
SHOWN = 3
"""How many different answers one line gives."""


def of_nist(
    claims: Sequence[PrivacyClaim],
    declared: Sequence[Item],
    measured: MeasuredPart,
) -> Iterable[QuestionLine]:
    said = {item.name: item for item in declared}
    for name, question in CLAIMED.items():
        yield _claimed(name, question, claims, said.get(name))
    tested = (
        f"{plural(measured.experiments.ok, 'attack run')} tried to reconstruct examples. "
        "Membership, which the guarantee is about, was not attacked."
    )
    question = "Which empirical tests were made?"
    yield QuestionLine(NIST, question, "in part", tested, ("measured",))


def _claimed(
    name: str,
    question: str,
    claims: Sequence[PrivacyClaim],
    declared: Item | None,
) -> QuestionLine:
    if not claims and declared is None:
        return QuestionLine(NIST, question, "not answered", NO_CLAIM)
    if not claims and declared is not None:
        status: Answered = NOT_STATED if declared.value is None else "answered"
        answer = declared.value or f"{NO_CLAIM} Nobody stated it for the deployment either."
        return QuestionLine(NIST, question, status, answer, ("declared",))
    items = [(claim.claim, item) for claim in claims for item in claim.items if item.name == name]
    values = grouped((item.value, claim) for claim, item in items)
    silent = len(values.get(None, ()))
    if silent == len(items):
        end = f"--declare {name}=..." if declared is not None else "the settings do not say it"
        return QuestionLine(NIST, question, NOT_STATED, f"Nobody stated it ({end}).", ("privacy",))
    texts = [value for value in values if value is not None]
    if len(texts) > 1:
        more = len(texts) - SHOWN
        texts = [f"{listing(values[text][:SHOWN])}: {text}" for text in texts[:SHOWN]]
        texts += [f"and {more} more"] * (more > 0)
    return QuestionLine(
        NIST, question, "in part" if silent else "answered", "; ".join(texts), ("privacy",)
    )


def of_edpb(
    sign_off: SignOff,
    measured: MeasuredPart,
    claims: Sequence[PrivacyClaim],
    known: Sequence[AuxiliaryLine],
    declared: Sequence[Item],
) -> Iterable[QuestionLine]:
    attacks = list(dict.fromkeys(row.attack for row in measured.attacks))
    rows = [
        *_on_extraction(sign_off, known),
        *_on_tests(attacks, claims, columns=bool(measured.columns)),
        *_on_documents(sign_off, attacks, claims, declared),
    ]
    for row in rows:
        yield QuestionLine(EDPB, *row)


def _on_extraction(
    sign_off: SignOff,
    known: Sequence[AuxiliaryLine],
) -> Iterable[Row]:
    # The words begin cells of a table elsewhere.
    facts = [line.words[0].lower() + line.words[1:] for line in known if line.answer == "yes"]
    yield (
        "Is the likelihood insignificant that personal data are extracted directly from the "
        "model, including by probabilistic means?",
        "in part",
        f"For one way only: reconstruction from a client’s update during training. "
        f"{sign_off.answer} The finished model was not attacked.",
        ("measured", "bounded"),
    )
    yield (
        "Is the likelihood insignificant that queries to the model return personal data, "
        "intentionally or not?",
        "not answered",
        f"{NO} No query to a finished model was made.",
        (),
    )
    yield (
        "Are all means considered that the controller or another person is reasonably likely to "
        "use?",
        "in part",
        f"The attacker here knew: {listing(facts)}. Bounds cover every attacker under their "
        "assumptions. Which means are reasonably likely: not answered by leakbound.",
        ("auxiliary", "bounded"),
    )


def _on_tests(
    attacks: Sequence[str],
    claims: Sequence[PrivacyClaim],
    *,
    columns: bool,
) -> Iterable[Row]:
    """One line for each kind of attack that the opinion names."""
    ran = f"Attacks that ran: {listing(attacks[:20])}." if attacks else "No attack was run."
    in_part: Answered = "in part" if attacks else "not answered"
    member = f"{NO} No membership attack was run."
    if claims:
        member += " Differential privacy limits it, as far as its claims hold."
    yield (
        "Tests of reconstruction attacks?",
        "answered" if attacks else "not answered",
        f"{ran} They reconstruct examples from updates." if attacks else ran,
        ("measured", "pictures"),
    )
    yield (
        "Tests of model inversion?",
        in_part,
        "Inversion of updates only. Inversion of the finished model: not answered by leakbound."
        if attacks
        else NO,
        ("measured",) if attacks else (),
    )
    yield "Tests of membership inference?", "not answered", member, ("privacy",) if claims else ()
    yield (
        "Tests of attribute inference?",
        "in part" if columns else "not answered",
        "For updates only: the share of each column that an attack has right, beside that of the "
        "prior-only baseline."
        if columns
        else f"{NO} A reconstructed example reveals all its attributes. Inference of single "
        "attributes was not tested.",
        ("measured",) if columns else (),
    )
    yield "Tests of exfiltration?", "not answered", NO, ()
    yield "Tests of regurgitation of training data?", "not answered", NO, ()
    yield (
        "Are the attacks the state of the art?",
        in_part,
        "Their settings are listed. Whether better attacks exist is for the reader to judge."
        if attacks
        else ran,
        ("provenance",),
    )


def _on_documents(
    sign_off: SignOff,
    attacks: Sequence[str],
    claims: Sequence[PrivacyClaim],
    declared: Sequence[Item],
) -> Iterable[Row]:
    """Design and measures, and what an authority expects in writing."""
    yield (
        "Does the design reduce personal data: selection of sources, minimization, "
        "privacy-preserving training?",
        "in part",
        f"{sign_off.advice} Selection and minimization of data: not answered by leakbound.",
        ("utility", "privacy"),
    )
    yield "Which measures limit the model’s outputs?", "not answered", NO, ()
    yield (
        "Is it verified that what runs is what was designed and tested?",
        *_declared(("deployment",), declared),
        ("declared", "provenance"),
    )
    yield (
        "Is there a data protection impact assessment, with the advice of the data protection "
        "officer?",
        "not answered",
        f"{NO} The sign-off page and this annex can be attached to it.",
        (),
    )
    yield (
        "Are technical and organizational measures documented?",
        *_declared(("data_collection", "data_security"), declared),
        ("declared",),
    )
    yield (
        "Is theoretical protection documented, such as differential privacy?",
        "answered" if claims else "in part",
        f"{plural(len(claims), 'defense')} with such a claim."
        if claims
        else f"{NO_CLAIM} Bounds on reconstruction are listed where there are any.",
        ("bounded", "privacy"),
    )
    yield (
        "Are tests documented: what, how, with which result?",
        "answered" if attacks else "not answered",
        "Plan, versions, seeds, data fingerprint and the command that repeats the run."
        if attacks
        else "No attack was run.",
        ("provenance", "rerun"),
    )
    yield (
        "Is there documentation for those who deploy the model, and for data subjects?",
        "not answered",
        NO,
        (),
    )


def _declared(
    names: Sequence[str],
    declared: Sequence[Item],
) -> tuple[Answered, str]:
    """How far statements answer a question, and what they say."""
    stated: Mapping[str, str | None] = {i.name: i.value for i in declared if i.name in names}
    said = [
        f"declared, not checked: {value}"
        if value
        else f"{name.replace('_', ' ')}: nobody stated it (--declare {name}=...)"
        for name, value in stated.items()
    ]
    silent = sum(value is None for value in stated.values())
    answered: Answered = "in part" if silent else "answered"
    return NOT_STATED if silent == len(stated) else answered, "; ".join(said)
