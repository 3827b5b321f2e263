"""A reproduction's results as `results.json`, written and read again."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from leakbound.cli import kit
from leakbound_reproductions.claim import Claim, Finding, Interval, Mark
from leakbound_reproductions.outcome import Figure, Outcome
from leakbound_reproductions.reproductions import REPRODUCTIONS, Reproduction

SCHEMA = 1
FILE = "results.json"
NUMBERED = re.compile(r"\d-\d+")
"""Claims of the project's list; other numbers are those of the paper's theorems."""
INTERVALS = ("interval", "strict", "region")


@dataclass(frozen=True)
class Results:
    """An outcome, and the data, versions and machine that it depends on.

    Attributes:
        data: the name of the data, and its digest.
        versions, machine: as an audit's `run.json` has them.
    """

    about: Reproduction
    scale: str
    outcome: Outcome
    data: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)

    def split(self) -> tuple[list[Claim], list[Claim]]:
        """The claims of the project's list, and the further statements."""
        claims = self.outcome.claims
        numbered = [claim for claim in claims if NUMBERED.fullmatch(claim.number)]
        return numbered, [claim for claim in claims if claim not in numbered]

    def counts(self) -> dict[str, int]:
        """How many claims of the list have each verdict.

        A claim that cannot be tested here is counted separately.
        """
        words = [str(claim.verdict) for claim in self.split()[0]]
        return {word: words.count(word) for word in dict.fromkeys(sorted(words))}


def encode(results: Results) -> bytes:
    """As JSON of schema 1; an infinite end of an interval is null."""
    outcome = results.outcome
    content = {
        "schema": SCHEMA,
        "name": results.about.name,
        "paper": asdict(results.about.paper),
        "scale": results.scale,
        "settings": outcome.settings,
        "data": dict(results.data),
        "versions": dict(results.versions),
        "machine": dict(results.machine),
        "claims": [_claim(claim) for claim in outcome.claims],
        "figures": [asdict(figure) for figure in outcome.figures],
        "pages": list(outcome.pages),
    }
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def decode(content: bytes) -> Results:
    """Results from their JSON.

    Raises:
        ValueError: no results, or of another schema.
    """
    try:
        found = json.loads(content)
        schema = found["schema"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError("results are damaged: no JSON with a schema; run it again") from None
    if schema != SCHEMA:
        raise ValueError(f"results have schema {schema!r}; this version reads {SCHEMA}")
    outcome = Outcome(
        tuple(_read_claim(claim) for claim in found["claims"]),
        tuple(Figure(**figure) for figure in found["figures"]),
        found["settings"],
        tuple(found["pages"]),
    )
    about = REPRODUCTIONS[found["name"]]
    known = (found[name] for name in ("data", "versions", "machine"))
    return Results(about, found["scale"], outcome, *known)


def read(folder: Path) -> Results:
    """The results of a finished run's folder."""
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"folder {str(folder)!r} holds no {FILE}; run `leakbound reproduce` first")
    return decode(kit.read(path))


def _claim(claim: Claim) -> dict[str, Any]:
    return asdict(claim) | {
        "verdict": str(claim.verdict),
        "findings": [_finding(finding) for finding in claim.findings],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    ends = {name: [_finite(end) for end in getattr(finding, name)] for name in INTERVALS}
    known = asdict(finding) | ends
    return known | {"verdict": str(finding.verdict)}


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _read_claim(found: dict[str, Any]) -> Claim:
    own = ("verdict", "findings", "marks")
    known = {name: value for name, value in found.items() if name not in own}
    findings = tuple(_read_finding(one) for one in found["findings"])
    return Claim(**known, findings=findings, marks=tuple(map(Mark, found.get("marks", ()))))


def _read_finding(found: dict[str, Any]) -> Finding:
    known = {name: value for name, value in found.items() if name != "verdict"}
    return Finding(**known | {name: _ends(found[name]) for name in INTERVALS})


def _ends(pair: list[float | None]) -> Interval:
    low, high = pair
    return -math.inf if low is None else low, math.inf if high is None else high
