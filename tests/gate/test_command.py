"""`leakbound check` as a pipeline sees it: exit codes, files, the action, the hook, the example."""

from __future__ import annotations

import json
import ntpath
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree as Xml

import jsonschema
import pytest
import yaml

from leakbound.cli import main
from leakbound.gate import reports
from leakbound.gate.policy import Requirement

from . import workflow

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "ci-gate"
ACTION = ROOT / "integrations" / "github-action" / "action.yml"
HOSTILE = "<script>alert(1)</script> | @someone #1 `x` [a](http://b) \x1b[2J\n\n# head \ufffe\ud800"
FOUND = [
    Requirement("exposed", "at most 0", "0 of 4", "holds", "audit 1", "policy.toml", 3),
    Requirement("clip", f"norm {HOSTILE}", HOSTILE, "broken", "client 1", "a b/policy.toml", 9),
    Requirement(
        "client", "it can be checked", HOSTILE, "cannot tell", HOSTILE, "policy.toml", None
    ),
]
pytestmark = pytest.mark.usefixtures("wide")


def call(*arguments):
    with pytest.raises(SystemExit) as caught:
        main(["check", *map(str, arguments)])
    return caught.value.code


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the example's deployment, and policies that hold, break and cannot tell."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLE / "deployment.toml", tmp_path)
    text = "[[deployment]]\nfile = '{}'\nunit = ['client']\nepsilon = {}\n"
    (tmp_path / "good.toml").write_text(text.format("deployment.toml", 6.0))
    (tmp_path / "bad.toml").write_text(text.format("deployment.toml", 1.0) + text.format("no", 1.0))
    (tmp_path / "open.toml").write_text(text.format("no.toml", 6.0))
    (tmp_path / "wrong.toml").write_text("[[deployment]]\nfile = 'a'\nepsilom = 1.0\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("good", 0, "good.toml: 3 hold\n"),
        ("bad", 1, "bad.toml: 2 broken, 1 cannot be decided, 1 hold\n"),
        ("open", 2, "open.toml: 1 cannot be decided\n"),
    ],
)
def test_the_exit_code_and_a_line_for_each_requirement(place, capsys, name, code, words):
    assert call(f"{name}.toml") == code
    shown = capsys.readouterr()
    first, *lines = shown.out.splitlines()
    assert (first + "\n").endswith(words)
    stated = "deployment 1: epsilon at most"
    assert any(stated in line for line in lines) == (name != "open")
    assert len(lines) == sum(int(n) for n in re.findall(r"\d+(?= [bch])", words))
    assert "checking deployment 1" in shown.err


def test_a_wrong_policy_is_a_usage_error(place, capsys):
    assert call("wrong.toml") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "'wrong.toml', line 3" in shown.err
    assert "did you mean 'epsilon'" in shown.err
    assert call("none.toml") == 2
    assert call("good.toml", "--sarif", "a.json") == 2
    assert "a.json'; name a file that ends in .sarif" in capsys.readouterr().err


def test_files_replace_our_own_alone(place):
    files = ("--junit", "c.xml", "--sarif", "c.sarif", "--markdown", "c.md")
    assert call("bad.toml", *files) == 1
    before = [(place / name).read_bytes() for name in ("c.xml", "c.sarif", "c.md")]
    assert call("good.toml", *files) == 0
    after = [(place / name).read_bytes() for name in ("c.xml", "c.sarif", "c.md")]
    assert all(one != other for one, other in zip(before, after, strict=True))
    for name in ("c.xml", "c.sarif", "c.md"):
        content = (place / name).read_bytes()
        (place / name).write_bytes(content + b"\n")  # the user's now
        assert call("good.toml", *files) == 2
        assert (place / name).read_bytes() == content + b"\n"
        (place / name).write_bytes(content)


def test_junit():
    root = Xml.fromstring(reports.junit(FOUND))
    assert root.tag == "testsuites"
    (suite,) = root
    assert suite.attrib == {
        "name": "leakbound check", "tests": "3", "failures": "1", "errors": "1"
    }  # fmt: skip
    cases = list(suite)
    assert [[child.tag for child in case] for case in cases] == [[], ["failure"], ["error"]]
    assert {"classname", "name"} <= set(cases[0].attrib)
    assert "<script>" in cases[1][0].attrib["message"]  # one attribute, not an element
    assert cases[1][0].text == "a b/policy.toml, line 9"


def closed(required, **properties):
    """The schema of an object with these properties and no others; the first words are required."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


TEXT = {"type": "string", "minLength": 1}
MESSAGE = closed("text", text=TEXT)
PLACE = closed(
    "artifactLocation region",
    artifactLocation=closed(
        "uri", uri={"type": "string", "pattern": r"^[A-Za-z0-9._~%-][A-Za-z0-9._~/%-]*$"}
    ),
    region=closed("startLine", startLine={"type": "integer", "minimum": 1}),
)
RESULT = closed(
    "ruleId level message locations partialFingerprints",
    ruleId=TEXT,
    level={"enum": ["error", "warning"]},
    message=MESSAGE,
    locations={
        "type": "array",
        "minItems": 1,
        "items": closed("physicalLocation", physicalLocation=PLACE),
    },
    partialFingerprints={"type": "object", "additionalProperties": TEXT, "minProperties": 1},
)
DRIVER = closed(
    "name version rules",
    name={"const": "leakbound"},
    version=TEXT,
    rules={
        "type": "array",
        "uniqueItems": True,
        "items": closed("id shortDescription", id=TEXT, shortDescription=MESSAGE),
    },
)
RUN = closed(
    "tool results",
    tool=closed("driver", driver=DRIVER),
    results={"type": "array", "items": RESULT},
)
SARIF = closed(
    "$schema version runs",
    **{"$schema": TEXT, "version": {"const": "2.1.0"}, "properties": {"type": "object"}},
    runs={"type": "array", "items": RUN, "minItems": 1, "maxItems": 1},
)
"""What we use of SARIF 2.1.0; its objects allow no other keys than the standard's.

Files that fit it were valid under the standard's own schema (docs/decisions/0021-a-gate.md).
"""


def test_sarif():
    validator = jsonschema.Draft202012Validator(SARIF)
    log = json.loads(reports.sarif(FOUND))
    validator.validate(log)
    (run,) = log["runs"]
    ids = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(ids) == len(set(ids))
    assert [result["level"] for result in run["results"]] == ["error", "warning"]
    assert {result["ruleId"] for result in run["results"]} <= {*ids}
    prints = [tuple(r["partialFingerprints"].values()) for r in run["results"]]
    assert len(set(prints)) == 2
    run["results"][0]["severity"] = "high"  # a key that the standard does not have
    assert not validator.is_valid(log)
    nothing = json.loads(reports.sarif(FOUND[:1]))
    validator.validate(nothing)
    assert nothing["runs"][0]["results"] == []


def test_a_file_on_another_drive_of_windows_has_its_whole_address(monkeypatch):
    monkeypatch.setattr("os.path.relpath", lambda path: ntpath.relpath("D:\\a", "C:\\b"))
    (result,) = json.loads(reports.sarif(FOUND[1:2]))["runs"][0]["results"]
    uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri == (Path.cwd() / "a b" / "policy.toml").as_uri()


def test_markdown_is_a_table_whatever_the_text_holds():
    text = reports.markdown(FOUND).decode()
    head, empty, *table = text.splitlines()
    assert head == "**leakbound check**: 1 broken, 1 cannot be decided, 1 hold"
    assert empty == ""
    assert [line.count("|") for line in table] == [5] * 5
    assert table[2].startswith("| **broken**")
    for sign in ("<", ">", "`", "@", "[", "\x1b", "http:", "# head"):
        assert sign not in "".join(table[2:])
    assert "&#60;script&#62;" in text


@pytest.fixture
def path(place):
    """The PATH of a shell that has this `leakbound`."""
    tool = place / "bin" / "leakbound"
    tool.parent.mkdir()
    own = f'PYTHONPATH="{ROOT / "src"}:$PYTHONPATH" exec "{sys.executable}" -m leakbound.cli "$@"'
    tool.write_text(f"#!/bin/sh\n{own}\n")
    tool.chmod(0o755)
    return f"{tool.parent}:{os.environ['PATH']}"


@pytest.mark.linux
def test_the_action_runs(place, path):
    """The text of its `run:`, as the runner's shell runs it."""
    action = yaml.safe_load(ACTION.read_text("utf-8"))
    install, check = action["runs"]["steps"]
    assert action["runs"]["using"] == "composite"
    assert "pip install" in install["run"]
    given = {key: f"${{{{ inputs.{name} }}}}" for key, name in (
        ("POLICY", "policy"), ("CODE", "path"), ("WORKERS", "workers"), ("REPORT", "report")
    )}  # fmt: skip
    assert check["env"] == given
    assert set(action["outputs"]) == {"code", "sarif", "junit"}
    assert "${{" not in install["run"] + check["run"]  # no input is pasted into a shell

    def run(name):
        output, summary = place / f"{name}.out", place / f"{name}.summary"
        settings = {
            "PATH": path,
            "GITHUB_OUTPUT": str(output),
            "GITHUB_STEP_SUMMARY": str(summary),
            "RUNNER_TEMP": str(place),
            **{"POLICY": f"{name}.toml", "CODE": "", "WORKERS": "1", "REPORT": ""},
        }
        script = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", check["run"]]
        done = subprocess.run(script, env=os.environ | settings, cwd=place, check=False)
        said = dict(line.split("=", 1) for line in output.read_text().splitlines())
        assert said["code"] == str(done.returncode)
        return done.returncode, said, summary.read_text() if summary.exists() else ""

    code, said, summary = run("bad")
    assert code == 1
    assert "| **broken** | deployment 1 |" in summary
    assert len(json.loads(Path(said["sarif"]).read_text())["runs"][0]["results"]) == 3
    assert Xml.parse(said["junit"]).getroot().attrib["failures"] == "2"
    code, said, summary = run("good")
    assert code == 0
    assert "**holds**" in summary
    code, said, summary = run("wrong")
    assert (code, set(said), summary) == (2, {"code"}, "")


@pytest.mark.linux
def test_the_hook_runs(place, path):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
    assert {"id", "name", "entry", "language"} <= set(hook)
    assert hook["pass_filenames"] is False
    words = f"{hook['entry']} {' '.join(hook['args'])}"
    for name, code in (("good", 0), ("bad", 1)):
        shutil.copy(f"{name}.toml", "policy.toml")
        done = subprocess.run(["bash", "-c", words], env=os.environ | {"PATH": path}, check=False)
        assert done.returncode == code
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    assert "leakbound" in scripts  # what the hook's environment installs


def test_the_example_is_green(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    assert call(EXAMPLE / "policy.toml") == 0
    shown = capsys.readouterr()
    assert "11 hold" in shown.out.splitlines()[0]
    assert "checking client 1, client:update, client:facts, client:build" in shown.err


@pytest.mark.slow
def test_the_examples_pipeline_is_green_and_red_after_a_regression(place, path):
    """As .ci/run does it with the wheel, but without the install: CI need not do it twice."""
    project = place / "project"
    shutil.copytree(EXAMPLE, project)
    code, summary = workflow.run(project, PATH=path)
    assert (code, "11 hold" in summary) == (0, True)
    text = (project / "client.py").read_text()
    weaker = text.replace("+ NOISE * CLIP", "+ NOISE / 2 * CLIP")
    assert weaker != text
    (project / "client.py").write_text(weaker)
    code, summary = workflow.run(project, PATH=path)
    assert (code, "| **broken** | client 1 |" in summary) == (1, True)


def test_what_a_pipeline_may_use(place):
    project = place / "project"
    shutil.copytree(EXAMPLE, project)
    scripts = [script for script, _ in workflow.steps(project, "leakbound.whl")]
    assert "pip install" in scripts[0]
    assert "leakbound check" in scripts[1]
    (path,) = (project / ".github" / "workflows").glob("*.yml")
    text = path.read_text()
    path.write_text(text.replace("policy: policy.toml", "polici: policy.toml"))
    with pytest.raises(ValueError, match=r"no input \['polici'\]"):
        list(workflow.steps(project, None))
    path.write_text(text.replace("actions/checkout", "others/checkout"))
    with pytest.raises(ValueError, match="others/checkout"):
        list(workflow.steps(project, None))
