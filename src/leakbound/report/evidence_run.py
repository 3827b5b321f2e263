"""Evidence from a run: measured, bounded and declared risk of its records, kept apart."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from leakbound._util import files
from leakbound.assess.record import ON_AVERAGE, PROVED, Record, is_picture, told
from leakbound.report import evidence_dp, evidence_told, tables
from leakbound.report.evidence_bounds import bounds_of, corridor_of
from leakbound.report.evidence_measured import (
    combinations,
    explained,
    inspected,
    strongest,
    trainings,
)
from leakbound.report.evidence_plan import command_of, hash_of, toml_of
from leakbound.report.evidence_text import NOT_STATED, clean, finite
from leakbound.report.folder import Run

Accountant = Callable[[float], Mapping[str, Any]]
"""Epsilons of one release with a noise multiplier: `delta`, `add_remove`, `replace`."""
MEASURED = (
    "What the attacks of this run did on real examples, counted. A failed attack proves nothing: "
    "another one may succeed."
)
BOUNDED = (
    "What theorems say of every attacker that they cover, under the assumptions and the prior "
    "named with each. No attack was needed for it, and no attack can refute it within them."
)
DECLARED = (
    "What was stated and not checked here. Everything above holds only as far as these statements "
    "do."
)


def of_run(
    run: Run,
    statements: Mapping[str, str],
    accountant: Accountant,
    *,
    images: bool,
    plan: str = "evidence.toml",
) -> dict[str, Any]:
    """One run as a JSON value of the schema `leakbound-report/1`.

    Args:
        run: what `folder.read` gave.
        statements: what somebody declares, by the names in `evidence_told.STATEMENTS`.
        accountant: epsilons of one Gaussian mechanism.
        images: name the pictures of the strongest attacks.
        plan: the file that holds the plan, for the command that runs it again.
    """
    names = tables.Names(run.cells, run.trainings)
    rows = tables.verdicts(run.cells, names)
    told = {
        "ledger": evidence_told.ledger(run.header, run.cells),
        "findings": evidence_told.findings(run.cells, names.attack),
    }
    who = statements.get("accepted_by")
    subject = {
        "kind": "run",
        "name": str(run.header["plan"].get("name") or "audit"),
        "notices": _notices(run),
        "checks": _checks(run),
        "measured": {
            "says": MEASURED,
            "cells": _counts(run),
            "combinations": combinations(run, names, rows),
            "attacks": inspected(run.cells, names),
            "captured": explained(run.cells, names),
        },
        "bounded": {"says": BOUNDED, **bounds_of(run.cells, names)},
        "declared": {
            "says": DECLARED,
            "items": evidence_told.declared(
                statements, evidence_told.of_plan(run.header, run.cells)
            ),
        },
        "attacker": told,
        "thresholds": evidence_told.thresholds(run.header, run.cells, who),
        "corridor": corridor_of(rows, run.cells),
        "strongest": strongest(run, names, rows, images=images),
        "utility": trainings(run.trainings, names),
        "differential_privacy": _private(run, names, statements, accountant),
        "provenance": _provenance(run),
    }
    # a plan is text that must stay as it is; its own form escapes what nobody sees
    return {**clean(subject), "rerun": rerun(run, plan)}


def rerun(run: Run, plan: str) -> dict[str, Any]:
    """How to make the records again: the plan, the command, and what has to be the same."""
    needs = [
        "the versions under Provenance, and a machine of that kind",
        "the same data under the same name: their fingerprint is compared",
    ]
    if run.header.get("code"):
        needs.append("the Python code that the plan names: it runs, so read it first")
    known: dict[str, Any] = {
        "command": command_of(run.header, plan),
        "plan": None,
        "plan_hash": clean(run.header["plan_hash"]),
        "records_sha256": _digest(run, "records.jsonl"),
        "utility_sha256": _digest(run, "utility.jsonl") if run.trainings else None,
        "needs": needs,
        "why_not": None,
    }
    if any(isinstance(cell.get("capture"), dict) for cell in run.cells):
        known["command"] = "leakbound attack --update FILE --out DIR"
        known["why_not"] = "the captured updates themselves are not part of the run folder"
        return known
    try:
        return known | {"plan": toml_of(run.header["plan"])}
    except ValueError as error:
        return known | {"why_not": str(error)}


def _notices(run: Run) -> list[str]:
    """What stands on top: that something is missing, failed, or cannot be known."""
    counts, found = _counts(run), []
    if counts["planned"] is not None and counts["present"] < counts["planned"]:
        found.append(
            f"The run is not finished: {counts['present']} of {counts['planned']} cells are here."
        )
    if counts["failed"]:
        found.append(f"{counts['failed']} of {counts['present']} cells failed: they show nothing.")
    failed = sum(unit["status"] == "failed" for unit in run.trainings)
    if failed:
        found.append(f"{failed} of {len(run.trainings)} trainings failed and enter no mean.")
    if any(not told(cell) for cell in run.cells):
        found.append(
            "The true examples of captured updates are not known: nothing is measured there."
        )
    if not run.trainings:
        found.append("No training was run: what the defenses cost in accuracy is not measured.")
    return found


def _counts(run: Run) -> dict[str, Any]:
    status = Counter(cell["status"] for cell in run.cells)
    planned = run.header.get("cells")
    whole = isinstance(planned, int) and not isinstance(planned, bool) and 0 <= planned < 1 << 53
    return {
        "planned": planned if whole else None,
        "present": len(run.cells),
        **{name: status[name] for name in ("ok", "not_applicable", "failed")},
    }


def _checks(run: Run) -> list[dict[str, Any]]:
    """What could be computed again from the folder alone."""
    own = _counts(run)
    wrong = sum(not _follows(cell) for cell in run.cells)
    pictures = {
        name for cell in run.cells for name in (cell.get("pictures") or {}).values() if name
    }
    other = sum(not is_picture(run.folder / "pictures" / name) for name in sorted(pictures))
    plan = _hash(run.header["plan"])
    return [
        _check("The plan belongs to its hash", plan == run.header["plan_hash"], plan or ""),
        _check(
            "Every verdict follows from its own record",
            wrong == 0,
            f"{own['present'] - wrong} of {own['present']}",
        ),
        _check(
            "All planned cells are here",
            None if own["planned"] is None else own["present"] == own["planned"],
            f"{own['present']} of {NOT_STATED if own['planned'] is None else own['planned']}",
        ),
        _check(
            "Every picture has the name of its content",
            other == 0 if pictures else None,
            f"{len(pictures) - other} of {len(pictures)}",
        ),
    ]


def _check(words: str, holds: bool | None, detail: str) -> dict[str, Any]:
    return {"words": words, "holds": holds, "detail": detail}


def _hash(plan: Record) -> str | None:
    try:
        return hash_of(plan)
    except (ValueError, RecursionError):
        return None


def _follows(cell: Record) -> bool:
    """Whether a record's verdict is what its own numbers and bounds give."""
    if cell["status"] != "ok":
        return cell.get("verdict") in (None, "undecided")
    covering = [b for b in cell.get("bounds") or [] if b["covers"] == "all"]
    for bound in covering:
        chance, accepted = bound.get("probability"), bound.get("accepted")
        known = chance is not None and accepted is not None
        if known and bool(bound.get("excludes_threshold")) != (chance <= accepted):
            return False
    word = "undecided"
    if any(bound.get("on_average") for bound in covering):
        word = ON_AVERAGE
    if any(bound.get("excludes_threshold") for bound in covering):
        word = "protected"
    if tables.proved(cell):
        word = PROVED
    if any(tables.reaches(cell)):
        word = "exposed"
    return cell.get("verdict") == word


def _private(
    run: Run, names: tables.Names, statements: Mapping[str, str], accountant: Accountant
) -> list[dict[str, Any]]:
    """The questions for every defense that claims differential privacy."""
    defenses: dict[str, Record] = {}
    for cell in run.cells:
        defense = cell["defense"]
        if str(defense["guarantee"]).lower() == "differential privacy":
            defenses.setdefault(names.defense(cell), defense)
    statistics = any(cell["threat"].get("statistics_known") is True for cell in run.cells)
    costs = trainings(run.trainings, names)
    found = []
    for label, defense in defenses.items():
        known = evidence_dp.mechanism(str(defense["settings"]))
        private = accountant(known[0]) if known else None
        own = [row for row in costs if row["defense"] == label and row["accuracy"] is not None]
        items = evidence_dp.of_defense(
            defense, private, statements, utility=_utility(own), statistics=statistics
        )
        found.append(
            {
                "claim": label,
                "epsilons": None if private is None else dict(private),
                "unanswered": evidence_dp.unanswered(items),
                "items": items,
            }
        )
    return found


def _utility(rows: Sequence[Mapping[str, Any]]) -> str | None:
    parts = [
        f"test accuracy {row['accuracy']['mean']:.1%} over {row['accuracy']['n']} seeds "
        f"({row['model']})"
        for row in rows
    ]
    return "; ".join(parts) or None


def _provenance(run: Run) -> dict[str, Any]:
    header = run.header
    own = header.get("own_data")
    return {
        "plan_hash": header["plan_hash"],
        "plan": header["plan"],
        "seeds": sorted({cell["seed"] for cell in run.cells}),
        "data": header["data"],
        "own_data": own if isinstance(own, bool) else None,
        "code": header["code"] if isinstance(header.get("code"), dict) else {},
        "versions": header["versions"],
        "machine": header["machine"],
        "models": [
            {"name": label, "weights": finite(model.get("size"))}
            for label, model in names_of(run).items()
        ],
        "attacks": [
            {"name": label, "hash": attack["hash"], "settings": attack["settings"]}
            for label, attack in tables.Names(run.cells).attacks.items()
        ],
        "defenses": sorted({str(cell["defense"]["settings"]) for cell in run.cells}),
    }


def names_of(run: Run) -> dict[str, Record]:
    """The models of a run by the names that its page gives them."""
    return tables.Names(run.cells, run.trainings).models


def _digest(run: Run, name: str) -> str | None:
    try:
        return hashlib.sha256(files.read(run.folder / name)).hexdigest()
    except OSError:
        return None
