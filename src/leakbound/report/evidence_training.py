"""Evidence from a training configuration: the bounded part alone, as no attack was run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leakbound.report import evidence_dp, evidence_told
from leakbound.report.evidence_run import BOUNDED, DECLARED
from leakbound.report.evidence_text import NOT_STATED, clean
from leakbound.report.evidence_told import Item, item

NO_ATTACK = "No attack was run: nothing here is measured."
SEES = {
    "visible": "the attacker sees which steps hold a record",
    "hidden": "nobody sees which steps hold a record",
}
DEFENSE = "DP-SGD with these settings"
EDGES = ("upper", "lower")
KINDS = {
    "upper": "probability of a rebuilt example",
    "lower": "attained by an attack on paper",
}


def of_training(found: Mapping[str, Any], statements: Mapping[str, str]) -> dict[str, Any]:
    """A training configuration as a JSON value of the schema `leakbound-report/1`.

    Args:
        found: `given` (the settings as they were stated), `epsilons` (delta, add_remove, replace),
            `accepted`, `prior`, `thresholds` (rows of psnr, mse, blind, lower, upper, alike,
            verdict), `notices` (more to say on top), `lower_scope`, `upper_scope`, `records`,
            `curve` (psnr, lower, upper) and `versions`.
        statements: what somebody declares.
    """
    who = statements.get("accepted_by")
    subject: dict[str, Any] = {
        "kind": "training",
        "name": "training configuration",
        "notices": [NO_ATTACK, *found.get("notices", ())],
        "checks": [],
        "measured": {
            "says": NO_ATTACK,
            "cells": None,
            "combinations": [],
            "attacks": [],
            "captured": [],
        },
        "bounded": {
            "says": BOUNDED,
            "bounds": _bounds(found),
            "theorems": _theorems(found),
            "missing": [],
        },
        "declared": {
            "says": DECLARED,
            "items": evidence_told.declared(statements, _stated(found["given"])),
        },
        "attacker": {"ledger": _ledger(found), "findings": []},
        "thresholds": _thresholds(found, who),
        "corridor": {
            "threshold": None,
            "mean_error": [],
            "probability": [],
            "curve": {**found["curve"], "accepted": found["accepted"]},
        },
        "strongest": [],
        "utility": [],
        "differential_privacy": [_claim(found, statements)],
        "provenance": _provenance(found),
    }
    return {**clean(subject), "rerun": _rerun(found)}


def _claim(found: Mapping[str, Any], statements: Mapping[str, str]) -> dict[str, Any]:
    items = _answers(found, statements)
    return {
        "claim": DEFENSE,
        "epsilons": dict(found["epsilons"]),
        "unanswered": evidence_dp.unanswered(items),
        "items": items,
    }


def _provenance(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "plan_hash": None,
        "plan": dict(found["given"]),
        "seeds": [],
        "data": dict(found["records"]),
        "own_data": None,
        "code": {},
        "versions": dict(found["versions"]),
        "machine": {},
        "models": [],
        "attacks": [],
        "defenses": [],
    }


def _rerun(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "command": found["command"],
        "plan": None,
        "plan_hash": None,
        "records_sha256": None,
        "utility_sha256": None,
        "needs": ["the versions under Provenance", "the same data, where --training names any"],
        "why_not": "a training configuration has no records; the command computes its bounds again",
    }


def _bounds(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Both edges at every threshold: the lower one is attained by an attack on paper."""
    return [
        {
            "model": "any model that a server may send",
            "batch_size": None,
            "defense": DEFENSE,
            "name": f"{edge} edge at {row['psnr']:g} dB",
            "kind": KINDS[edge],
            "value": row[edge],
            "least": row[edge],
            "most": row[edge],
            "psnr": row["psnr"],
            "standard_error": None,
            "accepted": found["accepted"] if edge == "upper" else None,
            "prior": found[f"{edge}_scope"]["prior"],
            "covers_all": edge == "upper",
            "theorem": EDGES.index(edge) + 1,
            "cells": None,
            "of_cells": None,
            "verdict": row["verdict"] if edge == "upper" else None,
        }
        for row in found["thresholds"]
        for edge in EDGES
    ]


def _theorems(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for number, edge in enumerate(EDGES, 1):
        scope, upper = found[f"{edge}_scope"], edge == "upper"
        alike = [words for row in found["thresholds"] for words in _alike(row)] if upper else []
        rows.append(
            {
                "number": number,
                "name": f"{edge} edge",
                "prior": scope["prior"],
                "rests_on_prior": True,
                "covers": scope["attackers"],
                "covers_all": upper,
                "equation": scope["equation"],
                "assumptions": [
                    f"known to the attacker: {scope['known']}",
                    f"it does not say: {scope['not_said']}",
                    *alike,
                ],
            }
        )
    return rows


def _alike(row: Mapping[str, Any]) -> list[str]:
    """What one blind guess reaches of the data, where there are data."""
    if row["alike"] is None:
        return []
    words = f"one blind guess reaches {row['alike']:.2%} of the data given to {row['psnr']:g} dB"
    return [f"{words}, without any update"]


def _stated(given: Mapping[str, Any]) -> list[Item]:
    words = {
        "noise_multiplier": "Noise standard deviation over the clip norm",
        "clip_norm": "Clip norm",
        "steps": "Steps",
        "sampling_rate": "Sampling rate (Poisson)",
        "participation": "Which steps hold a record",
        "dim": "Values of one record",
        "norm": "Least norm of a record",
        "accept": "Accepted probability of a rebuilt example",
        "prior": "Prior of the upper edge",
        "data": "Data that norms and priors are taken from",
    }
    rows = []
    for name, text in words.items():
        value = given.get(name)
        shown = None if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        if name == "participation":
            shown = f"{value}: {SEES[str(value)]}"
        source = "--training" if name in given["stated"] else "default, or taken from the data"
        rows.append(item(f"training_{name}", shown, "declared", source, text))
    return rows


def _ledger(found: Mapping[str, Any]) -> list[Item]:
    """What the attackers of both edges are taken to know."""
    sees = found["given"]["participation"] == "visible"
    law = "the law of the upper edge"
    rows = [
        ("labels", "The true labels", "yes", "any knowledge besides the record", law),
        ("defense", "Noise multiplier and clip norm", "yes", "", law),
        ("mask", "Which weights a mask withheld", "no", "nothing is withheld", "DP-SGD"),
        ("statistics", "The batch's statistics in batch norms", "no",
         "if they leave the client, no edge holds", law),
        ("norms", "The norm of the record", "yes", "the lower edge's attack uses it",
         "the law of the lower edge"),
        ("batch_size", "The batch size", "yes", "the expected one", law),
        ("model", "The model and its weights in every step", "yes", "or chosen by the server", law),
        ("others", "All other records", "yes", "", law),
        ("auxiliary", "The prior of the records", "yes", str(found["prior"]), law),
        ("participation", "Which steps hold the record", "yes" if sees else "no", "",
         "--training participation"),
        ("noise", "The noise that was drawn, or its seed", "no",
         "who has it, subtracts it", law),
    ]  # fmt: skip
    keys = ("name", "words", "answer", "detail", "from")
    return [dict(zip(keys, row, strict=True)) for row in rows]


def _thresholds(found: Mapping[str, Any], who: str | None) -> list[Item]:
    stated = found["given"]["stated"]
    rows = [
        ("rebuilt", "An example counts as rebuilt from", row["psnr"], "dB PSNR", "psnr" in stated)
        for row in found["thresholds"]
    ]
    words = "Probability of a rebuilt example that counts as protected up to"
    rows.append(("accepted", words, found["accepted"], "", "accept" in stated))
    return [
        {
            "name": name,
            "words": words,
            "value": value,
            "unit": unit,
            "origin": "--training" if chosen else "the default of `leakbound evidence`",
            "accepted_by": who or NOT_STATED,
        }
        for name, words, value, unit, chosen in rows
    ]


def _answers(found: Mapping[str, Any], statements: Mapping[str, str]) -> Sequence[Item]:
    given = found["given"]
    clip, noise = given["clip_norm"], given["noise_multiplier"]
    spread = None if clip is None else f", standard deviation {noise * clip:g} on the sum"
    moves = None
    if clip is not None:
        moves = f"{clip:g} in L2 norm for one example added or removed; {2 * clip:g}, one replaced"
    sees = f"Poisson sampling at rate {given['sampling_rate']:g}; {SEES[given['participation']]}"
    made, asked = "by construction", "--training clip_norm"
    answers = {
        "unit_of_privacy": evidence_dp.beside("unit_of_privacy", "one example", statements),
        "parameters": item("", evidence_dp.epsilons(found["epsilons"]), "computed", ACCOUNTANT),
        "neighboring_relation": evidence_dp.beside(
            "neighboring_relation", evidence_dp.NEIGHBORS, statements
        ),
        "mechanism": item(
            "",
            f"Gaussian noise of multiplier {noise:g} on the sum of clipped gradients{spread or ''}",
            "declared",
            "--training",
        ),
        "sensitivity": item("", moves, made, asked),
        "composition": item("", f"{given['steps']} steps, each on a new sample", "computed",
                            "--training steps"),
        "accountant": item("", ACCOUNTANT, "computed", "rounded to the safe side"),
        "sampling": item("", sees, "declared", "--training sampling_rate, participation"),
        "floating_point": item("", evidence_dp.FLOATS, made, "the mechanism"),
        "beyond": item("", BEYOND, made, "the mechanism"),
    }  # fmt: skip
    return evidence_dp.lines(answers, statements)


ACCOUNTANT = (
    "leakbound's own: the composed privacy loss of the subsampled Gaussian mechanism on a grid, or "
    "the mean over numbers of sightings where they are visible"
)
BEYOND = (
    "other releases from the same data, properties of the whole data set, several examples of one "
    "person, records that take part other than by Poisson sampling"
)
