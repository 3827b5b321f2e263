"""What was told and by whom: the oracle ledger, what is declared, and where thresholds come from.

A statement is a text under one of the names in `STATEMENTS`. Whoever asks for the evidence gives
it; nothing here can check it. What nobody states is "not stated", and never looks like a good sign.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from leakbound.assess.record import Record
from leakbound.report import captured
from leakbound.report.evidence_text import NOT_STATED, finite

Item = dict[str, Any]

STATEMENTS = {
    "accepted_by": "Who accepted these thresholds, and when",
    "data_holder": "Who holds the data that are to be protected",
    "data_collection": "How the data are collected, stored and reached before any noise",
    "data_security": "Who can reach data, models and logs without the noise, and what keeps others "
    "out",
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
DEFAULT_PSNR, DEFAULT_RISK = 20.0, 0.001
_KEPT = "the stored plan does not tell a chosen value from the default"


def declared(statements: Mapping[str, str], plan: Sequence[Item] = ()) -> list[Item]:
    """What was stated and not checked: first what a plan says, then every statement."""
    return [*plan, *(_stated(name, words, statements) for name, words in STATEMENTS.items())]


def item(name: str, value: str | None, status: str, source: str, words: str = "") -> Item:
    """One line of what is known: without a value it is not stated, whatever its source."""
    return {
        "name": name,
        "words": words or name.replace("_", " "),
        "value": value,
        "status": NOT_STATED if value is None else status,
        "from": source,
    }


def _stated(name: str, words: str, statements: Mapping[str, str]) -> Item:
    given = statements.get(name)
    source = "--declare" if given else f"nobody: give --declare {name}=..."
    return item(name, given or None, "declared", source, words)


def of_plan(header: Record, cells: Sequence[Record]) -> list[Item]:
    """What the plan of a run declares: how far the server goes, priors, what is accepted."""
    plan = header["plan"]
    floor, risk = _table(plan, "floor"), _table(plan, "risk")
    servers = dict.fromkeys(str(c["threat"].get("server", "honest")) for c in cells)
    accepted = finite(risk.get("probability"))
    prior = risk.get("prior") if accepted is not None else None
    return [
        item("server", " and ".join(servers), "declared", "plan: threat.server", "Server"),
        item(
            "accepted_probability",
            None if accepted is None else f"{accepted:g}",
            "declared",
            "plan: risk.probability",
            "Accepted probability of a rebuilt example",
        ),
        item(
            "prior_of_probabilities",
            prior if isinstance(prior, str) else None,
            "declared",
            "plan: risk.prior; that private examples are like the public ones was not checked",
            "Prior of the probabilities",
        ),
        item(
            "prior_of_floors",
            str(floor["prior"]) if floor.get("kind", "none") != "none" and "prior" in floor
            else None,
            "declared",
            "plan: floor.prior; that private examples are like it was not checked",
            "Prior of the floors",
        ),
    ]  # fmt: skip


def ledger(header: Record, cells: Sequence[Record]) -> list[Item]:
    """What the attackers were told: each thing with yes or no, and where that comes from."""
    protocol = "the simulated round"
    taken = any(isinstance(c.get("capture"), dict) for c in cells)
    return [
        _told(cells, "labels", "The true labels", "labels_known", True),
        _told(cells, "defense", "The defense and the law of its noise", "defense_known", True),
        _mask(cells),
        _told(cells, "statistics", "The batch's statistics in batch norms", "statistics_known"),
        _line("norms", "Norms of examples or of single gradients", "no", "no field holds them",
              "leakbound's Observation"),
        _line("batch_size", "The batch size and the number of clients", "yes",
              "findings below" if taken else _sizes(cells),
              "the captured update" if taken else protocol),
        _line("model", "The model, its weights and the loss", "yes", "as the server sent them",
              protocol),
        _line("shape", "Shape and range of an input", "yes", "", protocol),
        _auxiliary(header, taken),
        _line("local_plan", "The local plan: steps, learning rate, batches", "yes",
              "as far as the findings below say" if taken else "", "the captured update"
              if taken else protocol),
        _line("plant", "Changes of the model that the server sends (a malicious server)",
              _answer([c["threat"].get("server") == "malicious" for c in cells]), "",
              "plan: threat.server"),
        _line("history", "What the same clients sent in other rounds", "no", "one round alone",
              protocol),
        _line("noise", "The noise that was drawn, or the seed", "no", "", protocol),
    ]  # fmt: skip


def findings(cells: Iterable[Record], attack: Any) -> list[Item]:
    """What was read off captured updates instead of told."""
    return [
        {
            "update": row.capture.label,
            "name": finding["name"],
            "value": finding["value"],
            "how": finding["how"],
            "certain": bool(finding.get("sure")),
        }
        for row in captured.rows(cells, attack)
        for finding in row.capture.findings
    ]


def thresholds(header: Record, cells: Sequence[Record], who: str | None) -> list[Item]:
    """Every threshold with its origin and who accepted it."""
    plan = header["plan"]
    limits = {(c["threshold"]["metric"], c["threshold"]["value"]): None for c in cells}
    stored = finite(plan.get("threshold"))
    found = []
    for metric, value in limits:
        source = "the records; the plan names none"
        if stored is not None and stored == value:
            source = "plan: thresholds.psnr"
            source += f"; it is the default, and {_KEPT}" if stored == DEFAULT_PSNR else ""
        unit = {"psnr": "dB PSNR"}.get(metric, metric)
        words = "An example counts as rebuilt from"
        found.append(_threshold("rebuilt", words, value, unit, source, who))
    accepted = finite(_table(plan, "risk").get("probability"))
    source = "plan: risk.probability"
    source += f"; it is the default, and {_KEPT}" if accepted == DEFAULT_RISK else ""
    words = "Probability of a rebuilt example that counts as protected up to"
    found.append(_threshold("accepted", words, accepted, "", source, who))
    return found


def _threshold(
    name: str, words: str, value: float | None, unit: str, source: str, who: str | None
) -> Item:
    origin = NOT_STATED if value is None else source
    known = {"name": name, "words": words, "value": finite(value), "unit": unit}
    return {**known, "origin": origin, "accepted_by": who or NOT_STATED}


def _told(
    cells: Sequence[Record], name: str, words: str, key: str, default: bool | None = None
) -> Item:
    known = [cell["threat"].get(key, default) for cell in cells]
    missing = any(not isinstance(value, bool) for value in known)
    if name == "statistics" and missing:  # earlier versions could not tell them
        known, missing = [value is True for value in known], False
    answer = NOT_STATED if missing else _answer([bool(value) for value in known])
    detail = "no bound and no guarantee of a defense covers them" if name == "statistics" else ""
    return _line(name, words, answer, detail, f"plan: threat.{key}")


def _mask(cells: Sequence[Record]) -> Item:
    """Which weights were withheld: seen by whoever knows the defense."""
    shares = [finite((cell.get("release") or {}).get("withheld")) or 0.0 for cell in cells]
    masked = [cell for cell, share in zip(cells, shares, strict=True) if share > 0]
    words, source = "Which weights a mask withheld", "plan: threat.defense_known"
    if not masked:
        return _line("mask", words, "no", "no release here has a mask", "the records")
    known = [cell["threat"].get("defense_known", True) is True for cell in masked]
    return _line("mask", words, _answer(known), "where a release has one", source)


def _auxiliary(header: Record, taken: bool) -> Item:
    words, examples = "Public data of the same kind", finite(header["data"].get("examples"))
    if taken:
        public = header["plan"].get("public")
        given = isinstance(public, str) and bool(public)
        detail = str(public) if given else ""
        return _line("auxiliary", words, "yes" if given else "no", detail, "--public")
    if examples is None:
        return _line("auxiliary", words, NOT_STATED, "", "the data's size is not stored")
    if examples < 10:
        return _line(
            "auxiliary", words, "no", "fewer than 10 examples: all are private", "data split"
        )
    detail = "a fifth of the data set, never the victims' examples"
    return _line("auxiliary", words, "yes", detail, "data split")


def _sizes(cells: Sequence[Record]) -> str:
    sizes = sorted({cell["batch_size"] for cell in cells})
    return "batch size " + ", ".join(map(str, sizes[:20])) + (" ..." if len(sizes) > 20 else "")


def _answer(known: Sequence[bool]) -> str:
    if not known:
        return NOT_STATED
    return "yes" if all(known) else "in some cells" if any(known) else "no"


def _line(name: str, words: str, answer: str, detail: str, source: str) -> Item:
    return {"name": name, "words": words, "answer": answer, "detail": detail, "from": source}


def _table(plan: Record, name: str) -> Record:
    value = plan.get(name)
    return value if isinstance(value, dict) else {}
