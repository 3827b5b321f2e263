"""`leakbound evidence` as a user sees it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil

import jsonschema
import pytest

from leakbound import audit
from leakbound._util.formats import format_upper
from leakbound.audit import parse
from leakbound.cli import main
from leakbound.report import evidence
from leakbound.risk.corridor import TrainingSetting, epsilon

PLAN = {
    "name": "tiny",
    "data": {"source": "digits", "limit": 60},
    "models": [{"name": "mlp", "hidden": [4]}],
    "attacks": [{"name": "linear_inversion"}],
    "defenses": [{"name": "none"}, {"name": "dp_sgd", "noise_multiplier": 0.5}],
}
pytestmark = pytest.mark.usefixtures("wide")
VALIDATOR = jsonschema.Draft202012Validator(json.loads(evidence.schema()))


def call(*arguments):
    """The exit code of `leakbound evidence ARGUMENTS`, run here."""
    with pytest.raises(SystemExit) as caught:
        main(["evidence", *map(str, arguments)])
    return caught.value.code


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evidence") / "run"
    audit.audit(parse(PLAN), folder)
    return folder


def content(folder):
    found = json.loads((folder / "report.json").read_text())
    VALIDATOR.validate(found)
    return found


LIMITS = [
    {"method": "Clopper-Pearson", "epsilon": 1.234, "assumes": "nothing", "shown": "<b>rates</b>"},
    {"method": "Gaussian", "epsilon": 5.678, "assumes": "Gaussian noise", "shown": "rates"},
]
AUDIT = {
    "claims": {"delta": 1e-5, "declared": 4.0, "noise_multiplier": 1.0, "rounds": 2},
    "lower": LIMITS,
    **{"confidence": 0.95, "runs": 1001, "power": 9.0, "client": "my_app:update"},
    **{"verdict": "all is well", "code": 0},  # what a stranger may write
}


def test_an_audit_of_the_client_stands_beside_what_is_declared_and_bounded(run, tmp_path, capsys):
    path, out = tmp_path / "audit.json", tmp_path / "out"
    path.write_text(json.dumps(AUDIT))
    assert call(run, "--out", out, "--audited", path) == 0
    (subject,) = content(out)["subjects"]
    (found,) = subject["epsilon_audits"]
    items = [(one["name"], one["value"], one["status"]) for one in found["items"]]
    bounded = format_upper(epsilon(TrainingSetting(1.0, dim=1, steps=2), 1e-5))
    assert items == [
        ("declared", "4", "declared"),
        ("bounded", bounded, "computed"),
        ("found, at least", "1.23", "measured"),
        ("found, at least", "5.67", "measured"),
    ]
    assert found["holds"] is False
    verdict = "the program leaks more than it claims: epsilon is at least 5.67"
    assert found["verdict"].startswith(verdict)
    failed = "The audit of my_app:update found no more than it claims"
    for name in ("evidence.html", "evidence-annex.html"):
        text = (out / name).read_text()
        for words in (failed, verdict, bounded, "all is well", "<b>rates</b>"):
            assert (words in text) == (words in (failed, verdict, bounded)), (name, words)
    assert f"does not hold: {failed}" in " ".join(capsys.readouterr().err.split())
    quiet = AUDIT | {"lower": LIMITS[:1]}
    path.write_text(json.dumps(quiet))
    assert call(run, "--out", out, "--audited", path) == 0
    assert content(out)["subjects"][0]["epsilon_audits"][0]["holds"] is True
    assert "does not hold" not in capsys.readouterr().err
    path.write_text(json.dumps(quiet | {"claims": {}}))
    assert call(run, "--out", out, "--audited", path) == 0
    (found,) = content(out)["subjects"][0]["epsilon_audits"]
    assert (found["holds"], found["items"][0]["status"]) == (None, "not stated")
    assert call(run, "--out", out) == 0
    assert content(out)["subjects"][0]["epsilon_audits"] == []


DEPLOYMENT = """
rounds = {}
clip = {{kind = "example", norm = 1.0}}
noise = {{multiplier = {}, at = "optimizer", seeded = false}}
correlation = "none"
local = {{coupled = false, steps = 1}}
"""


def test_a_deployment_joins_the_bound_of_all_rounds(run, tmp_path):
    path, out = tmp_path / "deployment.toml", tmp_path / "out"
    path.write_text(DEPLOYMENT.format(100, 0.5))
    assert call(run, "--out", out, "--deployment", path) == 0
    found = content(out)["subjects"][0]["training"]
    assert (found["rounds"], found["noise_multiplier"], found["holds"]) == (100, 0.5, False)
    assert "and 0.001 is accepted" in found["why"]
    page = (out / "evidence.html").read_text()
    assert "deployment.toml" in page
    assert "100 rounds" in page
    path.write_text(DEPLOYMENT.format(1, 0.5).replace("rounds = 1", ""))
    assert call(run, "--out", out, "--deployment", path) == 0
    assert "not stated: rounds" in content(out)["subjects"][0]["training"]["why"]
    path.write_text("rouds = 1")
    assert call(run, "--out", out, "--deployment", path) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lower": []}, "it holds no limit"),
        ({"lower": [LIMITS[0] | {"epsilon": -1.0}]}, "epsilon is -1"),
        ({"confidence": 1.5}, "confidence"),
        ({"claims": {"delta": 2.0}}, "delta"),
        ({"runs": "many"}, "Expected `int`"),
        ({"client": "x" * (1 << 20)}, "over 1048576 bytes"),
    ],
)
def test_a_result_that_is_none_is_refused(run, tmp_path, capsys, change, words):
    path = tmp_path / "audit.json"
    path.write_text(json.dumps(AUDIT | change))
    assert call(run, "--out", tmp_path / "out", "--audited", path) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert words in shown
    assert "give what leakbound audit-epsilon --json printed" in shown
    assert not (tmp_path / "out").exists()


def test_results_that_cannot_be_read_or_are_too_many(run, tmp_path, capsys):
    assert call(run, "--audited", tmp_path / "none.json") == 2
    assert "No such file" in capsys.readouterr().err
    assert call(run, "--audited", *["a.json"] * 3) == 2
    assert "audited names 3 files; give at most 2" in capsys.readouterr().err


FILES = ("evidence.html", "evidence-annex.html", "report.json", "model-card.md", "evidence.toml")


def test_a_run_becomes_a_page_an_annex_a_value_and_a_plan(run, tmp_path, capsys):
    said = "A. Reader, 1 March"
    assert call(run, "--out", tmp_path / "out", "--declare", f"accepted_by={said}") == 0
    written = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert written == dict.fromkeys(FILES, 0o600)
    (subject,) = content(tmp_path / "out")["subjects"]
    assert {one["accepted_by"] for one in subject["thresholds"]} == {said}
    (claim,) = subject["differential_privacy"]
    of = {key: epsilon(TrainingSetting(noise, dim=1), 1e-5)
          for key, noise in (("add_remove", 0.5), ("replace", 0.25))}  # fmt: skip
    assert claim["epsilons"] == {"delta": 1e-5, **of}
    captured = capsys.readouterr()
    assert "evidence.html" in captured.out
    assert "not stated: bias, data_collection, " in captured.err
    assert "accepted_by" not in captured.err


def test_by_default_it_stands_in_the_folder_of_the_run(run):
    before = {path.name for path in run.iterdir()}
    assert call(run) == 0
    new = {path.name for path in run.iterdir()} - before
    assert new == {*FILES}
    before = [(run / name).read_bytes() for name in FILES]
    audit.audit(parse(PLAN), run)  # and the folder still goes on as a run
    assert call(run) == 0
    assert [(run / name).read_bytes() for name in FILES] == before
    assert "data:image" in (run / "evidence-annex.html").read_text()
    assert call(run, "--no-examples") == 0
    for name in ("evidence.html", "evidence-annex.html"):
        assert "data:image/png" not in (run / name).read_text()
    assert ".png" not in (run / "report.json").read_text()


def test_a_page_may_have_a_name_and_hold_several_subjects(run, tmp_path):
    page, other = tmp_path / "out" / "signed.html", shutil.copytree(run, tmp_path / "other")
    assert call(run, other, "--out", page) == 0
    assert len(content(page.parent)["subjects"]) == 2
    names = {path.name for path in page.parent.iterdir()}
    plans = {"evidence-1.toml", "evidence-2.toml"}
    assert names == {"signed.html", "signed-annex.html", "report.json", "model-card.md", *plans}
    annex = (page.parent / "signed-annex.html").read_text()
    assert annex.count("leakbound audit evidence-2.toml --out rerun") == 1
    assert page.read_text().count('<article class="sheet"') == 2


def test_the_page_names_its_files_and_what_they_hold(run, tmp_path):
    """The first digits of every SHA-256 are those of the file beside the page or in the run."""
    assert call(run, "--out", tmp_path) == 0
    text = re.sub(r"</?(?:wbr|span)[^>]*>", "", (tmp_path / "evidence.html").read_text())
    named = dict(re.findall(r"([\w.-]+) <code>([0-9a-f]{16})</code>", text))
    own = {name: tmp_path / name for name in FILES if name != "evidence.html"}
    own |= {name: run / name for name in ("run.json", "records.jsonl", "utility.jsonl")}
    own = {name: path for name, path in own.items() if path.exists()}
    assert named == {
        name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in own.items()
    }
    assert {"run.json", "records.jsonl", "evidence-annex.html", "report.json"} <= {*named}


BAD = [
    ((), "runs are not given"),
    (("nowhere",), "holds no run.json"),
    (("{run}", "{run}"), "runs name one folder twice"),
    (("{run}", "{run}/../run", "--out", "{out}"), "runs name one folder twice"),
    (("{run}", "--declare", "accepted=me"), "did you mean 'accepted_by'"),
    (("{run}", "--declare", "bias"), "write NAME=VALUE"),
    (("{run}", "--declare", "bias="), "declare bias has 0 letters"),
    (("{run}", "--declare", "bias=" + "x" * 401), "declare bias has 401 letters"),
    (("{run}", "--declare", "bias=a", "bias=b"), "declare names bias twice"),
    (("{run}", "--delta", "0"), "delta is 0"),
    (("{run}", "--delta", "2"), "delta is 2"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "words"), BAD, ids=range(len(BAD)))
def test_bad_input_is_told_kindly(run, tmp_path, capsys, given, words):
    places = {"run": run, "out": tmp_path / "out"}
    assert call(*(str(one).format(**places) for one in given)) == 2
    captured = capsys.readouterr()
    assert words in " ".join(captured.err.split())
    assert "Traceback" not in captured.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["run.json", "records.jsonl"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]\n", b'{"schema": 9}\n', b"\xff", b"[" * 9000])
def test_damaged_folders_are_told_kindly(tmp_path, capsys, run, damage, content):
    import shutil

    folder = shutil.copytree(run, tmp_path / "copy")
    (folder / damage).write_bytes(content)
    assert call(folder) == 2
    error = capsys.readouterr().err
    assert error.startswith("leakbound: ")
    assert damage in error


def test_a_changed_record_is_told_on_the_screen(tmp_path, capsys, run):
    import shutil

    folder = shutil.copytree(run, tmp_path / "copy")
    text = (folder / "records.jsonl").read_text()
    (folder / "records.jsonl").write_text(text.replace('"undecided"', '"protected from strangers"'))
    assert call(folder) == 0
    assert "does not hold: Every verdict follows" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_told(run, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert call(run, "--out", tmp_path / "file") == 2
    assert "cannot be written" in capsys.readouterr().err
