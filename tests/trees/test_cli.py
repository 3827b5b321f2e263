"""`leakbound attack --update model.json --kind xgboost`: what is printed, and what is refused."""

import json

import numpy as np
import pytest
import xgboost
from sklearn.datasets import load_breast_cancer

from leakbound.cli import main

CANCER = load_breast_cancer()
NAMES = [name.replace(" ", "_") for name in CANCER.feature_names]


def call(*arguments):
    with pytest.raises(SystemExit) as caught:
        main(["attack", *(str(argument) for argument in arguments), "--kind", "xgboost"])
    return caught.value.code


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A client's model after round 2, the model before, that of round 1, and rows."""
    monkeypatch.chdir(tmp_path)
    parts = [
        xgboost.DMatrix(
            CANCER.data[at : at + 150], CANCER.target[at : at + 150], feature_names=NAMES
        )
        for at in (0, 150)
    ]
    settings = {"objective": "binary:logistic", "eta": 0.1, "max_depth": 4, "nthread": 1}
    before = xgboost.train(settings, parts[1], 2)
    before.save_model("before.json")
    xgboost.train(settings, parts[0], 3, xgb_model=before).save_model("after.json")
    xgboost.train(settings, parts[0], 1).save_model("first.json")
    for name, at in (("truth", 0), ("public", 300)):
        rows = np.column_stack([np.arange(150), CANCER.data[at : at + 150]])
        head = ",".join(["id", *NAMES])
        np.savetxt(f"{name}.csv", rows, delimiter=",", header=head, comments="")
    return tmp_path


def test_the_first_round_shows_thresholds_and_exact_leaves(place, capsys):
    text = (place / "first.json").read_text()  # names are strangers' text
    (place / "first.json").write_text(text.replace("worst_perimeter", "[b]\\u001b[2J"))
    assert call("--update", "first.json") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "first.json: 1 tree of the client, 0 received before; binary:logistic",
        "each threshold is a value of a row of this client under tree_method hist",
        "To measure what is known of the rows, give --truth and --public.",
        "region of a leaf",
        "[b]",
    ):
        assert words in shown
    assert "\x1b[2J" not in shown


def test_what_is_known_is_printed_and_written(place, capsys):
    given = ("--update", "after.json", "--before", "before.json", "--truth", "truth.csv")
    assert call(*given, "--public", "public.csv", "--out", "out") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "3 trees of the client, 2 received before" in shown
    assert "entries known, global model alone" in shown
    assert "known for trees that start from no other tree alone" in shown
    assert call(*given, "--public", "public.csv", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    kept = json.loads((place / "out" / "trees.json").read_text())
    assert {key: kept[key] for key in found} == found
    measured = found["measured"]
    assert measured["thresholds that are values"]["share"] == 1
    assert measured["entries known, prior only"]["n"] == 150 * 30
    shares = [
        measured[f"entries known, {what}"]["hits"]
        for what in ("prior only", "global model alone", "with the update")
    ]
    assert shares == sorted(shares)
    assert all(0 <= share["interval_95"][0] <= share["share"] for share in measured.values())
    assert call(*given) == 0
    assert "give --public" in capsys.readouterr().out


def test_regions_in_json_hold_as_many_rows_as_they_say(place, capsys):
    assert call("--update", "first.json", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    columns = dict(zip(NAMES, CANCER.data[:150].astype(np.float32).T, strict=True))
    for leaf in found["leaves"]:
        inside = np.ones(150, bool)
        for words in leaf["region"]:
            parts = words.split()
            at = next(i for i, part in enumerate(parts) if part in columns)
            if at:
                inside &= columns[parts[at]] >= np.float32(parts[0])
            if at + 1 < len(parts):
                inside &= columns[parts[at]] < np.float32(parts[-1])
        assert (leaf["rows"], leaf["targets"]) == (inside.sum(), CANCER.target[:150][inside].sum())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), "--kind xgboost needs a model; give --update model.json"),
        (("--update", "first.json", "--input-shape", "1,8,8"), "--input-shape is not for trees"),
        (("--update", "first.json", "--attack", "dlg"), "--attack is not for trees"),
        (("--update", "."), "it is a folder"),
        (("--update", "truth.csv"), "is no JSON"),
        (("--update", "first.json", "--before", "before.json", "--truth", "no.csv"), "'no.csv'"),
    ],
)
def test_what_does_not_fit_is_named(place, capsys, given, words):
    assert call(*given) == 2
    assert words in " ".join(capsys.readouterr().err.split())
