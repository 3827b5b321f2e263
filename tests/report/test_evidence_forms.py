"""Records of every earlier form still read, in the report, the evidence and the comparison.

Each folder under `fixtures` has the form that one step of the project's history wrote: the number
is its order, the name says what came new. All are schema 1; none holds a picture.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import jsonschema
import pytest

from leakbound.audit import parse
from leakbound.report import evidence, write
from leakbound.report.compare import compare
from leakbound.report.compare_html import render_comparison
from leakbound.report.folder import read

FIXTURES = Path(__file__).parent / "fixtures"
FORMS = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())
SCHEMA = jsonschema.Draft202012Validator(json.loads(evidence.schema()))
NEW = {  # what a record or header of this form holds that no earlier one does
    "02_code_of_models": "code",
    "03_model_size": "size",
    "04_training_curves": "curve",
    "05_floors": "bounds_note",
    "06_weiss_weinstein": "weiss_weinstein",
    "07_risk_laws": "probability",
    "08_features": "statistics_known",
    "09_tables": "columns",
    "10_lpips": "lpips",
    "11_captured": "capture",
}
OTHER_MODELS = ("01_first", "11_captured")
SKIPPED = ("02_code_of_models",)  # one attack does not apply there


def accountant(noise):
    return {"delta": 1e-5, "add_remove": 1.0, "replace": None}


def shown(name, **statements):
    run = read(FIXTURES / name)
    subject = evidence.of_run(run, statements, accountant, images=True)
    content = evidence.document([subject], images=True)
    SCHEMA.validate(json.loads(json.dumps(content, allow_nan=False)))
    return evidence.page(content, [run]), subject


def test_the_forms_are_what_their_names_say():
    def holds(name, word):
        file = "run.json" if word == "code" else "*.jsonl"
        return any(f'"{word}"' in path.read_text() for path in (FIXTURES / name).glob(file))

    assert len(FORMS) == 11
    for place, name in enumerate(FORMS):
        if name in NEW:
            assert holds(name, NEW[name])
            assert not any(holds(other, NEW[name]) for other in FORMS[:place]), name


@pytest.mark.parametrize("name", FORMS)
def test_the_report_reads_it(tmp_path, name):
    folder = Path(shutil.copytree(FIXTURES / name, tmp_path / name))
    text = write(folder).read_text(encoding="utf-8")
    assert read(folder).header["plan_hash"] in text


def compared(*names):
    runs = [read(FIXTURES / name) for name in names]
    found = compare(*runs)
    return found, render_comparison(*runs, found)


@pytest.mark.parametrize("name", FORMS)
def test_the_comparison_reads_it(name):
    count = len((FIXTURES / name / "records.jsonl").read_text().splitlines())
    found, text = compared(name, name)
    assert (found.cells, found.only) == ((count, count), ((), ()))
    assert not any(one.grave for one in found.concerns)
    assert text.count(read(FIXTURES / name).header["plan_hash"]) == 2
    for pair in ((name, "10_lpips"), ("10_lpips", name)):
        found, text = compared(*pair)
        assert found.both == len(found.attacks) == (0 if name in OTHER_MODELS else 4)
        assert all(read(FIXTURES / one).header["plan_hash"] in text for one in pair)


@pytest.mark.parametrize("name", FORMS[1:7])
def test_what_an_earlier_form_does_not_say_is_no_difference(name):
    """Of the same model, data and trainings: a later field had one meaning before it came."""
    found, text = compared(name, "10_lpips")
    assert [one.words for one in found.concerns if one.grave] == []
    assert "This comparison is not fair" not in text
    assert [row.psnr.mean for row in found.attacks if row.psnr] == [0.0] * (4 - (name in SKIPPED))
    assert [row.accuracy.mean for row in found.utilities] == [0.0] * 4


@pytest.mark.parametrize("name", FORMS)
def test_the_evidence_reads_it(name):
    text, subject = shown(name)
    assert [check["holds"] for check in subject["checks"]] == [True, True, True, None]
    assert subject["rerun"]["plan_hash"] in text
    count = len((FIXTURES / name / "records.jsonl").read_text().splitlines())
    assert subject["measured"]["cells"]["present"] == count
    ledger = {line["name"]: line["answer"] for line in subject["attacker"]["ledger"]}
    assert set(ledger.values()) <= {"yes", "no", "in some cells"}
    assert ledger["statistics"] == ("in some cells" if name.startswith("08") else "no")


@pytest.mark.parametrize("name", [n for n in FORMS if n != "11_captured"])
def test_its_plan_can_still_be_run(name):
    _, subject = shown(name)
    plan = parse(tomllib.loads(subject["rerun"]["plan"]))
    stored = json.loads((FIXTURES / name / "run.json").read_text())["plan"]
    assert [cell.seed for cell in plan.cells()] == stored["seeds"] * 4
    assert [links[0].name if links else "none" for links in plan.defenses] == [
        links[0]["name"] if links else "none" for links in stored["defenses"]
    ]
    if "risk" in stored and "statistics_known" in stored["threat"]:  # nothing was added since
        assert plan.hash == subject["rerun"]["plan_hash"]


def test_captured_updates_say_what_was_read_off_and_what_is_proved():
    text, subject = shown("11_captured")
    (row,) = subject["measured"]["captured"]
    assert row["explained"] == 1.0
    assert row["proof"].startswith("this is the input as the model was fed it")
    (best,), (kind,) = subject["strongest"], subject["measured"]["combinations"]
    assert best["proof"] == row["proof"]
    assert (kind["verdict"], kind["proved"]) == ("exposed (certified)", 1)
    assert "1 input given away exactly" in text
    assert "<strong>Proof:</strong>" in text
    assert {found["name"] for found in subject["attacker"]["findings"]} >= {"labels", "batch size"}
    assert subject["rerun"]["plan"] is None
    assert "The true examples of captured updates are not known" in text


def test_failed_and_inapplicable_cells_of_the_first_forms():
    first, second = (shown(name)[1]["measured"]["cells"] for name in FORMS[:2])
    assert (first["ok"], first["failed"], second["not_applicable"]) == (3, 1, 1)
