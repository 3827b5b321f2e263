"""A gate's answers for machines and reviewers: JUnit, SARIF 2.1.0, and Markdown."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree as Xml

from leakbound._util.files import SEAL
from leakbound._util.text import digest, printable, version
from leakbound._util.text import markdown as escaped
from leakbound.gate.policy import BROKEN, CODES, HOLDS, UNSURE, Requirement

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def summary(requirements: Sequence[Requirement]) -> str:
    counts = Counter(one.answer for one in requirements)
    words = {HOLDS: "hold", BROKEN: "broken", UNSURE: "cannot be decided"}
    return ", ".join(f"{n} {words[answer]}" for answer, n in sorted(counts.items()))


def junit(requirements: Sequence[Requirement]) -> bytes:
    """A broken requirement is a failure; one that cannot be decided, an error."""
    counts = Counter(one.answer for one in requirements)
    numbers = {"tests": len(requirements), "failures": counts[BROKEN], "errors": counts[UNSURE]}
    size = {key: str(value) for key, value in numbers.items()}
    root = Xml.Element("testsuites", size)
    suite = Xml.SubElement(root, "testsuite", {"name": "leakbound check"} | size)
    for one in requirements:
        name = {"classname": _line(one.subject), "name": _line(f"{one.key}: {one.stated}")}
        case = Xml.SubElement(suite, "testcase", name)
        if one.answer != HOLDS:
            kind = "failure" if one.answer == BROKEN else "error"
            about = {"message": _line(one.found), "type": one.answer}
            Xml.SubElement(case, kind, about).text = _line(f"{one.file}, line {one.line}")
    head = f'<?xml version="1.0" encoding="UTF-8"?>\n<!-- {SEAL} -->\n'
    return head.encode() + bytes(Xml.tostring(root, encoding="utf-8"))


def sarif(requirements: Sequence[Requirement]) -> bytes:
    """What does not hold: broken as errors, what cannot be decided as warnings."""
    keys = sorted({one.key for one in requirements})
    rules = [{"id": key, "shortDescription": {"text": f"leakbound: {key}"}} for key in keys]
    driver = {"name": "leakbound", "version": version("leakbound"), "rules": rules}
    results = [_result(one) for one in requirements if one.answer != HOLDS]
    log = {
        "$schema": SARIF_SCHEMA,
        "version": "2.1.0",
        "properties": {"writtenBy": SEAL},
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
    return json.dumps(log, indent=1).encode() + b"\n"


def _result(one: Requirement) -> dict[str, Any]:
    try:
        place = Path(os.path.relpath(one.file)).as_posix()
        uri = quote(place)
    except ValueError:  # on another drive of Windows
        place = uri = Path(one.file).absolute().as_uri()
    where = {"artifactLocation": {"uri": uri}, "region": {"startLine": one.line or 1}}
    words = f"{one.subject}: {one.stated}: {one.answer}. Found: {one.found}"
    return {
        "ruleId": one.key,
        "level": "error" if one.answer == BROKEN else "warning",
        "message": {"text": _line(words)},
        "locations": [{"physicalLocation": where}],
        # without the line: a requirement that moved is still the same one
        "partialFingerprints": {"requirement/v1": digest([place, one.subject, one.stated])},
    }


def markdown(requirements: Sequence[Requirement]) -> bytes:
    """A table for a pull request."""
    lines = [f"**leakbound check**: {summary(requirements)}\n", "| answer | of | stated | found |"]
    lines.append("|---|---|---|---|")
    for one in sorted(
        requirements,
        key=lambda one: [*CODES].index(one.answer),
        reverse=True,
    ):
        texts = (one.subject, one.stated, one.found)
        cells = [escaped(_line(text)) for text in texts]
        lines.append(" | ".join([f"| **{one.answer}**", *cells]) + " |")
    return "\n".join(lines).encode() + b"\n"


def _line(text: str) -> str:
    """One line of characters that XML and a terminal may hold."""
    return "".join(c for c in printable(text) if not "\ud800" <= c <= "\udfff" and c < "\ufffe")


FORMS = {"junit": (junit, ".xml"), "sarif": (sarif, ".sarif"), "markdown": (markdown, ".md")}
"""The options of `leakbound check` that name a file: what it holds, and its ending."""
