"""Whether two runs can be compared: what differs besides what was meant to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from leakbound.assess.record import Record, told
from leakbound.report.folder import Run
from leakbound.report.tables import plain


@dataclass(frozen=True)
class Concern:
    """One thing that differs. `grave`: with it, numbers of both runs do not mean the same."""

    words: str
    grave: bool


def concerns(
    first: Run, second: Run, pairs: Sequence[tuple[Record, Record]]
) -> tuple[Concern, ...]:
    """What differs between two runs, the grave first; `pairs` are cells of equal settings."""
    runs = first, second
    found = [
        *_differ(
            "threat models", [_threats(run) for run in runs], "the attackers are not the same"
        ),
        *_differ("thresholds", [_thresholds(run) for run in runs], "verdicts do not compare"),
        *_data(first, second),
        *_batches(pairs),
        *_trainings(first, second),
        *_unfinished(runs),
        *_settings(pairs),
        *_tables("versions", first, second),
        *_tables("machine", first, second),
    ]
    if first.header["plan_hash"] != second.header["plan_hash"]:
        hashes = " and ".join(str(run.header["plan_hash"]) for run in runs)
        found.append(Concern(f"The plans differ: {hashes}.", False))
    return tuple(sorted(found, key=lambda one: not one.grave))


def threat_words(threat: Record) -> str:
    """What an attacker is told, in a few words.

    Example:
        >>> threat_words({"labels_known": True, "defense_known": False, "server": "honest"})
        'honest server, labels told, defense not told'
    """
    words = [f"{threat.get('server', 'honest')} server"]
    words.append("labels told" if threat.get("labels_known") else "labels not told")
    words.append("defense told" if threat.get("defense_known") else "defense not told")
    return ", ".join(words + (["statistics told"] if threat.get("statistics_known") else []))


def _threats(run: Run) -> list[str]:
    return sorted({threat_words(cell["threat"]) for cell in run.cells})


def _thresholds(run: Run) -> list[str]:
    known = [cell["threshold"] for cell in run.cells]
    return sorted({f"{one['metric']} {plain(one['value'])}" for one in known})


def _differ(what: str, sides: Sequence[Sequence[str]], so: str) -> list[Concern]:
    if sides[0] == sides[1]:
        return []
    said = [" or ".join(side) or "none" for side in sides]
    return [Concern(f"The {what} differ: A {said[0]}; B {said[1]}. So {so}.", True)]


def _data(first: Run, second: Run) -> list[Concern]:
    """Other data: a seed then names other images."""
    one, other = first.header["data"], second.header["data"]
    if one.get("fingerprint") == other.get("fingerprint"):
        return []
    names = [
        f"{d.get('source', 'unknown')} ({str(d.get('fingerprint'))[:12]})" for d in (one, other)
    ]
    words = f"The data differ: A {names[0]}; B {names[1]}. A seed does not name the same examples."
    return [Concern(words, True)]


def _batches(pairs: Iterable[tuple[Record, Record]]) -> list[Concern]:
    """Pairs whose batches differ: the guess without an update scores differently on them."""
    scores = [
        (one["blind"]["psnr"], other["blind"]["psnr"])
        for one, other in pairs
        if all(c["status"] == "ok" and told(c) and c.get("blind") for c in (one, other))
    ]
    count = sum(one != other for one, other in scores)
    if not count:
        return []
    words = (
        f"In {count} of {len(scores)} pairs of cells the guess without an update scores "
        "differently, so the batches, or the public examples, are not the same."
    )
    return [Concern(words, True)]


def _trainings(first: Run, second: Run) -> list[Concern]:
    """Test accuracies of unequal trainings."""
    if not (first.trainings and second.trainings):
        return []
    plans = [_utility(run) for run in (first, second)]
    if plans[0] == plans[1]:
        return []
    words = "The trainings behind the test accuracy differ, so accuracies do not compare: "
    return [Concern(f"{words}A {_brief(plans[0])}; B {_brief(plans[1])}.", True)]


def _utility(run: Run) -> Any:
    """How a plan trains; the first versions wrote no optimizer and had none but Adam."""
    plan = run.header["plan"].get("utility")
    return {"optimizer": "adam", **plan} if isinstance(plan, dict) else plan


def _unfinished(runs: Iterable[Run]) -> list[Concern]:
    found = []
    for letter, run in zip("AB", runs, strict=True):
        wanted, failed = run.header.get("cells"), sum(c["status"] == "failed" for c in run.cells)
        missing = wanted - len(run.cells) if isinstance(wanted, int) else 0
        if missing > 0:
            words = f"{letter} is not finished: {missing} of {wanted} cells are missing."
            found.append(Concern(words, True))
        if failed:
            found.append(Concern(f"In {letter} {failed} of {len(run.cells)} cells failed.", False))
    return found


def _settings(pairs: Iterable[tuple[Record, Record]]) -> list[Concern]:
    """Attacks and defenses of one name whose full settings differ."""
    found: dict[str, None] = {}
    for one, other in pairs:
        for kind in ("attack", "defense"):
            mine, theirs = one[kind]["settings"], other[kind]["settings"]
            if mine != theirs:
                found[f"{one[kind]['name']} has other settings: A {mine}; B {theirs}."] = None
    return [Concern(words, False) for words in found]


def _tables(name: str, first: Run, second: Run) -> list[Concern]:
    """What differs in a table of the header."""
    one, other = first.header[name], second.header[name]
    rows = [
        f"{key} {plain(one.get(key))} and {plain(other.get(key))}"
        for key in sorted({*one, *other})
        if one.get(key) != other.get(key)
    ]
    what = "The versions differ" if name == "versions" else "The machines differ"
    return [Concern(f"{what}: {', '.join(rows)}.", False)] if rows else []


def _brief(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
