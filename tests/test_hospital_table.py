"""The example of a hospital's table: its files fit together, and its plan runs."""

import runpy
import shutil
from dataclasses import replace
from pathlib import Path

from leakbound import audit, data
from leakbound.data.schema import Schema

EXAMPLE = Path(__file__).parents[1] / "examples" / "hospital-table"


def test_from_csv_to_verdicts(tmp_path, monkeypatch):
    shutil.copytree(EXAMPLE, tmp_path / "own")
    monkeypatch.chdir(tmp_path / "own")
    runpy.run_path("patients.py")["main"](Path("patients.csv"))
    drafted = Schema.infer("patients.csv", target="progression")
    checked = Schema.load("patients.toml")
    assert "patient" in drafted.ignore
    assert [c.name for c in drafted.columns] == [c.name for c in checked.columns]
    assert drafted.classes == checked.classes
    table = data.load("patients.csv")
    assert table.inputs.shape == (442, 11)
    plan = audit.load(Path("audit.toml"))
    few = replace(
        plan, attacks=plan.attacks[:1], batch_sizes=(1,), utility=replace(plan.utility, rounds=0)
    )
    found = audit.audit(few, tmp_path / "run", workers=1)
    ends = {one.defense.settings: one.verdict for one in found.assessments}
    assert list(ends.values()) == ["exposed", "undecided", "undecided", "protected from strangers"]
