"""What attackers knew besides the update, what is declared, and where thresholds come from.

A statement is a text under one of the names in `STATEMENTS`. Whoever asks for the evidence gives
it; nothing here can check it. What nobody states is "not stated", and never looks like a good sign.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from leakbound.assess.record import Assessment, RunInfo
from leakbound.report.evidence import parts
from leakbound.report.evidence.parts import NOT_STATED, Answer, Item, Status
from leakbound.report.gallery import captured_updates
from leakbound.report.rerun import CRITERION
from leakbound.report.tables import Names

STATEMENTS = {
    "accepted_by": "Who accepted these thresholds, and when",
    "data_holder": "Who holds the data that are to be protected",
    "data_collection": "How the data are collected, stored and accessed before any noise",
    "data_security": "Who can access data, models and logs without the noise, and what prevents "
    "others",
    "unit_of_privacy": "Whose records count as one: an example, a person, a client",
    "neighboring_relation": "Which data sets count as neighbors: one unit added or removed, or "
    "replaced",
    "participation": "How often a unit takes part in the training that is meant",
    "privacy_budget": "What else was and will be released from the same data, and which epsilon "
    "and delta all of it may spend",
    "trust_model": "Who is trusted with what: central, local or distributed noise",
    "randomness": "Where the noise of the real release comes from",
    "side_channels": "What else leaves: timing, message sizes, errors, logs, earlier releases",
    "hyperparameters": "How clip norm, noise and the rest were chosen, and whether on private data",
    "bias": "Whether accuracy was compared between groups of people",
    "deployment": "Whether model, weights, batch size and defense are those that will run",
}
DEFAULT_RISK = 0.001
MATCHED = "An example counts as reconstructed from"
ACCEPTED = "Probability of a reconstructed example that counts as protected up to"


def item(
    name: str,
    value: str | None,
    status: Status,
    source: str,
    words: str = "",
) -> Item:
    """One line of what is known: without a value it is not stated, whatever its source."""
    # Nobody may read a missing value as a good one.
    status = NOT_STATED if value is None else status
    return Item(name, words or name.replace("_", " "), value, status, source)


def declared(
    statements: Mapping[str, str],
    plan: Sequence[Item] = (),
) -> tuple[Item, ...]:
    return (*plan, *(asked(name, statements, words) for name, words in STATEMENTS.items()))


def silent(items: Iterable[Item]) -> int:
    """How many statements nobody made."""
    return sum(one.value is None and one.name in STATEMENTS for one in items)


def asked(
    name: str,
    statements: Mapping[str, str],
    words: str = "",
) -> Item:
    statement = statements.get(name) or None
    source = "--declare" if statement else f"nobody: give --declare {name}=..."
    return item(name, statement, "declared", source, words)


def of_plan(info: RunInfo, assessments: Iterable[Assessment]) -> list[Item]:
    bound = _table(info, "error_bound")
    risk = _table(info, "risk")
    servers = dict.fromkeys(a.threat.server for a in assessments)
    accepted = _number(risk.get("probability"))
    prior = risk.get("prior") if accepted is not None else None
    bounded = bound.get("kind", "none") != "none" and "prior" in bound
    rows = [
        ("server", " and ".join(servers), "plan: threat.server", "Server"),
        ("accepted_probability", None if accepted is None else f"{accepted:g}",
         "plan: risk.probability", "Accepted probability of a reconstructed example"),
        ("prior_of_probabilities", prior if isinstance(prior, str) else None,
         "plan: risk.prior; that private examples are like the public ones was not checked",
         "Prior of the probabilities"),
        ("prior_of_error_bounds", str(bound["prior"]) if bounded else None,
         "plan: error_bound.prior; that private examples are like it was not checked",
         "Prior of the lower bounds on the error"),
    ]  # fmt: skip
    return [item(name, value, "declared", source, words) for name, value, source, words in rows]


def attacker(
    info: RunInfo,
    assessments: Sequence[Assessment],
    names: Names,
) -> parts.AttackerPart:
    captured = any(a.capture for a in assessments)
    threats = [a.threat for a in assessments]
    masked = [a for a in assessments if a.release is not None and (a.release.withheld or 0) > 0]
    protocol = "the captured update" if captured else "the simulated round"
    sizes = sorted({a.batch_size for a in assessments})
    size_words = "batch size " + ", ".join(map(str, sizes[:20])) + (" ..." * (len(sizes) > 20))
    mask: tuple[Answer, str, str] = ("no", "no release here has a mask", "the records")
    if masked:
        known = answer([a.threat.defense_known for a in masked])
        mask = (known, "where a release has one", "plan: threat.defense_known")
    lines: list[tuple[str, str, Answer, str, str]] = [
        ("labels", "The true labels", answer([t.labels_known for t in threats]), "",
         "plan: threat.labels_known"),
        ("defense", "The defense and the distribution of its noise",
         answer([t.defense_known for t in threats]), "", "plan: threat.defense_known"),
        ("mask", "Which weights a mask withheld", *mask),
        ("statistics", "The batch's statistics in batch norms",
         answer([t.statistics_known for t in threats]),
         "no bound and no guarantee of a defense covers them", "plan: threat.statistics_known"),
        ("known", "Parts of the examples, from elsewhere", answer([bool(t.known) for t in threats]),
         "; ".join(dict.fromkeys(t.known for t in threats if t.known)), "plan: threat.known"),
        ("norms", "Norms of examples or of single gradients", "no", "no field holds them",
         "leakbound's Observation"),
        ("batch_size", "The batch size and the number of clients", "yes",
         "inferred: see below" if captured else size_words, protocol),
        ("model", "The model, its weights and the loss", "yes", "as the server sent them",
         "the simulated round"),
        ("shape", "Shape and range of an input", "yes", "", "the simulated round"),
        ("auxiliary", "Public data of the same kind", *_public(info, captured)),
        ("local_plan", "The local plan: steps, learning rate, batches", "yes",
         "as far as inferred below" if captured else "", protocol),
        ("malicious", "Changes of the model that the server sends (a malicious server)",
         answer([t.server == "malicious" for t in threats]), "", "plan: threat.server"),
        ("history", "What the same clients sent in other rounds", "no", "one round alone",
         "the simulated round"),
        ("noise", "The noise that was drawn, or the seed", "no", "", "the simulated round"),
    ]  # fmt: skip
    inferred = [
        parts.InferredLine(update.label, one.name, one.value, one.how, one.sure)
        for (_, update, _), *_ in captured_updates(assessments, names)
        for one in update.own.findings
    ]
    return parts.AttackerPart(tuple(parts.AuxiliaryLine(*line) for line in lines), tuple(inferred))


def thresholds(
    info: RunInfo,
    assessments: Iterable[Assessment],
    who: str | None,
) -> tuple[parts.ThresholdLine, ...]:
    kept = "; it is the default, and the stored plan does not tell a chosen value from the default"
    lines = []
    for one in dict.fromkeys(a.criterion for a in assessments):
        source = "the records; the plan names none"
        key = "psnr" if one.of is None else "share"
        # A plan may name a share of columns, of which the record keeps the number.
        stored = _number(info.plan.get(key))
        if stored is not None and (one.of is not None or stored == one.value):
            source = f"plan: criterion.{key}" + kept * (stored == CRITERION[key])
        value = one.value if one.of is None else one.of - round(one.within)
        unit = one.text.removesuffix(" or more").partition(" ")[2]
        lines.append(threshold("reconstructed", value, source, who, unit))
    accepted = _number(_table(info, "risk").get("probability"))
    source = "plan: risk.probability" + kept * (accepted == DEFAULT_RISK)
    return (*lines, threshold("accepted", accepted, source, who))


def threshold(
    name: Literal["reconstructed", "accepted"],
    value: float | None,
    source: str,
    who: str | None,
    unit: str = "dB PSNR",
) -> parts.ThresholdLine:
    """A score from which an example is "reconstructed", or the probability that is "accepted"."""
    words, unit = (ACCEPTED, "") if name == "accepted" else (MATCHED, unit)
    origin = NOT_STATED if value is None else source
    return parts.ThresholdLine(name, words, value, unit, origin, who or NOT_STATED)


def answer(known: Sequence[bool]) -> Answer:
    if all(known):
        return "yes"
    return "in some experiments" if any(known) else "no"


def _public(info: RunInfo, captured: bool) -> tuple[Answer, str, str]:
    if captured:
        public = str(info.plan.get("public") or "")
        return "yes" if public else "no", public, "--public"
    if info.data.examples < 10:
        return "no", "fewer than 10 examples: all are private", "data split"
    return "yes", "a fifth of the data set, never the victims' examples", "data split"


def _table(info: RunInfo, name: str) -> dict[str, Any]:
    value = info.plan.get(name)
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    # A stranger's plan may hold a whole number that no float holds.
    whole = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if whole and abs(value) < 1e300 else None
