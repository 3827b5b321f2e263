"""`leakbound evidence` as a user sees it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil

import jsonschema
import numpy as np
import pytest
from scipy import optimize, stats

from leakbound import audit
from leakbound.audit import parse
from leakbound.cli import main
from leakbound.report import evidence
from leakbound.risk.corridor import TrainingSetting, corridor, epsilon

PLAN = {
    "name": "tiny",
    "data": {"source": "digits", "limit": 60},
    "models": [{"name": "mlp", "hidden": [4]}],
    "attacks": [{"name": "linear_inversion"}],
    "defenses": [{"name": "none"}, {"name": "dp_sgd", "noise_multiplier": 0.5}],
}
STATED = ("noise_multiplier=1.1", "sampling_rate=0.1", "steps=20", "clip_norm=2", "dim=64",
          "norm=3,4", "prior=sphere", "psnr=15,20", "accept=0.01")  # fmt: skip
KNOWN = [word for word in STATED if word != "prior=sphere"]
UNKNOWN = STATED[1:]
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


FILES = ("evidence.html", "evidence-annex.html", "report.json", "evidence.toml")


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
    assert call(run, other, "--training", *STATED, "--out", page) == 0
    kinds = [subject["kind"] for subject in content(page.parent)["subjects"]]
    assert kinds == ["run", "run", "training"]
    names = {path.name for path in page.parent.iterdir()}
    plans = {"evidence-1.toml", "evidence-2.toml"}
    assert names == {"signed.html", "signed-annex.html", "report.json", *plans}
    annex = (page.parent / "signed-annex.html").read_text()
    assert annex.count("leakbound audit evidence-2.toml --out rerun") == 1
    assert page.read_text().count('<article class="sheet"') == 3


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


def seen(mu, steps, rate):
    """Epsilon at delta 1e-5 where steps that hold the record are seen, by the Gaussian formula."""
    k = np.arange(1, steps + 1)
    mass, mu = stats.binom.pmf(k, steps, rate), mu * np.sqrt(k)

    def excess(level):
        gain = stats.norm.cdf(mu / 2 - level / mu)
        return mass @ (gain - np.exp(level) * stats.norm.cdf(-mu / 2 - level / mu)) - 1e-5

    return optimize.brentq(excess, 0, 60, xtol=1e-9)


def test_a_training_is_bounded_and_not_measured(tmp_path):
    assert call("--training", *STATED, "--out", tmp_path) == 0
    (subject,) = content(tmp_path)["subjects"]
    assert subject["measured"]["says"] == "No attack was run: nothing here is measured."
    assert subject["measured"]["attacks"] == subject["strongest"] == subject["utility"] == []
    setting = TrainingSetting(1.1, dim=64, norm=3.0, steps=20, sampling_rate=0.1)
    edges = corridor(setting, [10**-1.5, 10**-2.0])
    rows = subject["bounded"]["bounds"]
    upper = [row["value"] for row in rows if row["covers_all"]]
    lower = [row["value"] for row in rows if not row["covers_all"]]
    assert upper == pytest.approx(edges.bound.tolist())
    assert lower == pytest.approx(edges.attained.tolist())
    (claim,) = subject["differential_privacy"]
    for shift, key in ((1, "add_remove"), (2, "replace")):
        assert claim["epsilons"][key] == pytest.approx(seen(shift / 1.1, 20, 0.1), rel=1e-4)
    items = {item["name"]: item for item in claim["items"]}
    assert items["randomness"]["status"] == "not stated"
    assert "20 steps" in items["composition"]["value"]
    stated = {item["name"]: item for item in subject["declared"]["items"]}
    assert stated["training_steps"]["source"] == "--training"
    assert stated["training_participation"]["source"].startswith("default")
    assert {one["origin"] for one in subject["thresholds"]} == {"--training"}
    text = (tmp_path / "evidence-annex.html").read_text()
    assert "that nobody ran here" in text
    figure = text[text.index('<figure class="curve"') :]
    labels = re.findall(r"<text[^>]*>([^<]+)</text>", figure[: figure.index("</figure>")])
    assert "1e−12" in labels
    assert not [label for label in labels if "$" in label]


def test_a_replaced_example_of_hidden_samples_has_no_epsilon(tmp_path):
    assert call("--training", *STATED, "participation=hidden", "--out", tmp_path) == 0
    (claim,) = content(tmp_path)["subjects"][0]["differential_privacy"]
    assert claim["epsilons"]["replace"] is None
    (neighbors,) = [i for i in claim["items"] if i["name"] == "neighboring_relation"]
    assert "the number of examples is public" in neighbors["value"]
    assert "never by the size of the batch that was drawn" in neighbors["value"]  # would show who
    assert call("--training", *STATED, "noise_multiplier=0", "--out", tmp_path) == 2


def test_a_prior_that_knows_nothing_of_the_data_is_said_on_top_and_protects_nothing(tmp_path):
    given = ("noise_multiplier=5", "data=digits", "psnr=30", "accept=0.01")
    words = "knows nothing about the data"
    for more, word in ((("prior=sphere",), "undecided"), ((), "protected")):
        page = tmp_path / word
        assert call("--training", *given, *more, "--out", page) == 0
        (subject,) = content(page)["subjects"]
        verdicts = [row["verdict"] for row in subject["bounded"]["bounds"] if row["verdict"]]
        assert verdicts == [word]
        notices = (page / "evidence.html").read_text().split("<table", 1)[0]
        assert (words in notices) == any(words in one for one in subject["notices"]) == bool(more)


def test_data_give_norms_and_what_one_image_matches(tmp_path):
    given = ("noise_multiplier=0", "data=digits", "psnr=20")
    assert call("--training", *given, "--out", tmp_path) == 0
    (subject,) = content(tmp_path)["subjects"]
    (claim,) = subject["differential_privacy"]
    assert claim["epsilons"]["add_remove"] == "infinite"
    assert "epsilon infinite" in (tmp_path / "evidence-annex.html").read_text()
    assert subject["provenance"]["data"]["source"] == "digits"
    theorem = subject["bounded"]["theorems"][0]
    assert any("one fixed image matches" in text for text in theorem["assumptions"])


BAD = [
    ((), "runs and training are not given"),
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
    (("--training", "steps=3", "--out", "{out}"), "training has no noise_multiplier"),
    (("--training", "noise=1", "--out", "{out}"), "did you mean 'noise_multiplier'"),
    (("--training", "noise_multiplier=x", "--out", "{out}"), "invalid float value: 'x'"),
    (("--training", *UNKNOWN, "noise_multiplier=nan", "--out", "{out}"), "noise_multiplier is nan"),
    (("--training", "noise_multiplier=1,2", "--out", "{out}"), "invalid float value: '1,2'"),
    (("--training", "noise_multiplier=1", "steps=a", "--out", "{out}"), "invalid int value: 'a'"),
    (("--training", "noise_multiplier=1", "--out", "{out}"), "dim and norm are not given"),
    (("--training", *STATED, "clip_norm=0", "--out", "{out}"), "names clip_norm twice"),
    (("--training", *KNOWN, "--out", "{out}"), "prior is not given"),
    (("--training", *KNOWN, "prior=cube", "--out", "{out}"), "invalid choice: 'cube'"),
    (("--training", *STATED, "input_range=3", "--out", "{out}"), "write --input-range LOW HIGH"),
    (("--training", *STATED, "delta=1", "--out", "{out}"), "delta is 1"),
    (("--training", *KNOWN, "prior=gallery", "--out", "{out}"), "give --data"),
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
    (folder / "records.jsonl").write_text(text.replace('"undecided"', '"protected"'))
    assert call(folder) == 0
    assert "does not hold: Every verdict follows" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_told(run, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert call(run, "--out", tmp_path / "file") == 2
    assert "cannot be written" in capsys.readouterr().err
