"""Undecided with a reason, a distance, a next step, and what leaked from similar updates."""

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
from torch import nn

import leakbound
from leakbound import cli, tensors
from leakbound.captured import load, obstacles
from leakbound.core import Observation, Task, Unit, Update
from leakbound.defenses import Clip, chain
from leakbound.domains import TokenDomain

from .test_optimizer import SHAPE, attacked, trained

STORED = Path(leakbound.__file__).parents[2] / "docs/results/ordinary_training.json"


def info_of(outcome):
    return outcome.records[0].capture


def whats(outcome):
    return " | ".join(one.what for one in info_of(outcome).obstacles)


def test_each_fact_that_is_not_certain_stands_between_with_its_option():
    before, after, batch = trained("AdamW", 1e-3, count=4, steps=5, weight_decay=0.01)
    outcome = attacked(before, after, batch, learning_rate=1e-3)
    options = {one.then for one in info_of(outcome).obstacles}
    assert {"--optimizer NAME", "--local-steps N", "--labels LABELS", "--public DATA"} <= options
    assert "5 steps of AdamW each divide gradients" in whats(outcome)
    assert "4 examples over 5 local steps" in whats(outcome)


def test_what_is_given_stands_between_no_more():
    before, after, batch = trained("Adam", 1e-3, steps=1)
    given = {"optimizer": "adam", "learning_rate": 1e-3, "steps": 1, "labels": batch.labels}
    outcome = attacked(before, after, batch, **given)
    assert [one.then for one in info_of(outcome).obstacles] == ["--public DATA"]


def test_a_declared_defense_asks_for_public_examples_and_for_all_rounds():
    """Not for what was given; and a bound of one update says nothing of the rounds before."""
    before, after, batch = trained("SGD", 0.1)
    (inferred,) = attacked(before, after, batch, defense=chain(Clip(1e6))).inferred
    capture = load(after, before, kind="weights")
    seen = inferred.observation
    both = replace(inferred, observation=replace(seen, history=(seen,)))
    bounds, rounds = "--public DATA for its bounds", "leakbound bound --deployment FILE"
    for context, public, wanted in (
        (inferred, False, {bounds}),
        (inferred, True, set()),
        (both, True, {rounds}),
    ):
        found = {one.then for one in obstacles.obstacles(capture, context, public=public)}
        assert found & {bounds, rounds} == wanted


def test_halves_are_named():
    before, after, batch = trained("SGD", 0.1, halves=True)
    assert "bfloat16" in whats(attacked(before, after, batch))
    before, after, batch = trained("SGD", 0.1)
    # A few whole numbers fit every type.
    after = {**after, "3.bias": torch.ones(10)}
    assert "16" not in whats(attacked(before, after, batch, labels=batch.labels))


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("SGD", {"steps": 6}, "perceptron, digits, untrained; SGD; 5 local steps; batch 4"),
        ("RMSprop", {"steps": 1}, "perceptron, digits, untrained; RMSprop; 1 local step; batch 4"),
        (
            "AdamW",
            {"steps": 30},
            "perceptron, digits, untrained; AdamW, decay .01; 20 local steps; batch 4",
        ),
    ],
)
def test_the_nearest_measured_update_is_named(name, given, says):
    rule = {"optimizer": name.lower(), "learning_rate": 1e-3, "weight_decay": 0.0}
    before, after, batch = trained(name, 1e-3, count=3, **given)
    outcome = attacked(before, after, batch, **rule, **given)
    assert says in info_of(outcome).measured
    assert "a low share is no protection" in info_of(outcome).measured


def test_the_package_holds_the_rows_of_the_page():
    text = resources.files("leakbound.captured").joinpath(obstacles.MEASURED).read_text("utf-8")
    rows = json.loads(text)
    assert len(rows) >= 60
    if STORED.is_file():
        page = json.loads(STORED.read_text("utf-8"))
        assert page["sections"][0]["body"][1]["rows"] == rows


def test_the_terminal_and_the_page_say_it(tmp_path, capsys, monkeypatch):
    before, after, batch = trained("AdamW", 1e-3, count=2, steps=4)
    parts = {"before": before, "after": after}
    parts["truth"] = {"inputs": batch.inputs, "labels": batch.labels}
    for name, named in parts.items():
        tensors.write(tmp_path / f"{name}.safetensors", named)
    (tmp_path / "far_net.py").write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Flatten(), "
        "nn.Linear(144, 200), nn.ReLU(), nn.Linear(200, 10))\n"
    )
    monkeypatch.chdir(tmp_path)
    shape = ",".join(map(str, SHAPE))
    words = f"attack --update after.safetensors --before before.safetensors --input-shape {shape} "
    words += "--model far_net:build --batch-size 2 --truth truth.safetensors --learning-rate 0.001 "
    words += "--attack inverting_gradients,steps=20 --out out"
    with pytest.raises(SystemExit):
        cli.main(words.split())
    shown = " ".join(capsys.readouterr().out.split())
    assert "distance: the best attack reaches" in shown
    assert "What stands between after.safetensors and an answer" in shown
    assert "The nearest measured updates" in shown
    page = (tmp_path / "out/report.html").read_text("utf-8")
    assert "What stands between this update and an answer" in page
    assert "The nearest measured updates" in page


def test_labels_by_signs_are_those_that_occur():
    before, after, batch = trained("Adam", 1e-3, count=4, steps=5)
    outcome = attacked(before, after, batch, learning_rate=1e-3)
    labels = outcome.inferred[0].labels
    assert torch.equal(labels, batch.labels.sort().values)


def test_kinds_that_nobody_measured_have_no_near_update():
    domain = TokenDomain(9, 4)
    words = nn.Sequential(nn.Embedding(9, 6), nn.Flatten(), nn.Linear(24, 9))
    task = Task.of(words, domain=domain)
    update = Update(torch.ones(1, len(task.parameters)), Unit.CLIENT, (1,))
    assert obstacles._nearest(Observation(update, task, (1,), (4,)), decays=False) is None
    series = Task.of(nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(4, 2)))
    update = Update(torch.ones(1, len(series.parameters)), Unit.CLIENT, (1,))
    assert obstacles._nearest(Observation(update, series, (1,), (1, 4)), decays=False) is None
