"""What a training is worth: measures that see rare classes, and costs that are unknown."""

import csv

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from leakbound import run_audit
from leakbound.assess.record import Training, read
from leakbound.audit.utility import quality
from leakbound.data.schema import Schema
from leakbound.randomness import normal, stream, uniform
from leakbound.report import tables, write


def draws(seed, count, classes):
    source = stream(seed, "quality")
    labels = (uniform((count,), source) * classes).long()
    return normal((count, classes), source), labels


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("skill", [0.0, 1.0])
def test_against_scikit_learn(classes, skill):
    output, labels = draws(classes, 400, classes)
    output[torch.arange(400), labels] += skill
    found = quality("cross_entropy", output, labels)
    assert found["balanced_accuracy"] == pytest.approx(
        balanced_accuracy_score(labels, output.argmax(1))
    )
    scores = output.softmax(1)
    known = (
        roc_auc_score(labels, scores[:, 1])
        if classes == 2
        else roc_auc_score(labels, scores, multi_class="ovr")
    )
    assert found["auc"] == pytest.approx(known)
    assert found["tested"] == 400
    assert found["majority"] == pytest.approx(int(torch.bincount(labels).max()) / 400)


def test_one_output():
    source = stream(3, "quality")
    labels = (uniform((300,), source) < 0.1).float()
    output = (normal((300, 1), source) + labels[:, None]).round(decimals=1)  # with ties
    found = quality("bce", output, labels)
    assert found["auc"] == pytest.approx(roc_auc_score(labels, output[:, 0]))
    assert found["balanced_accuracy"] == pytest.approx(
        balanced_accuracy_score(labels, output[:, 0] > 0)
    )


def test_the_error_of_the_area_is_that_of_no_relation():
    """2,000 draws of independent scores: their standard deviation, and twice it covers 95 %."""
    source = np.random.default_rng(0)
    labels = torch.from_numpy((source.random(120) < 0.2).astype(np.int64))
    areas = []
    for _ in range(2000):
        output = torch.from_numpy(source.normal(size=(120, 2)))
        found = quality("cross_entropy", output, labels)
        areas.append(found["auc"])
    assert np.std(areas) == pytest.approx(found["auc_error"], rel=0.06)
    assert abs(np.mean(areas) - 0.5) < 0.01


def test_masks_and_tokens_have_no_area():
    mask = torch.zeros(2, 1, 3, 3)
    mask[:, :, 0] = 1
    found = quality("dice", mask - 0.5, mask)
    assert (found["auc"], found["accuracy"], found["tested"]) == (None, 1.0, 18)
    tokens = torch.tensor([[1, 2, 1, 0]])
    output = torch.nn.functional.one_hot(tokens.roll(-1, 1), 3).float()
    found = quality("next_token", output, tokens)
    assert (found["accuracy"], found["auc"]) == (1.0, None)


def trained(accuracy, *, seed=0, name="none", majority=0.96, auc=0.5, error=0.03):
    return Training(
        training=f"{name} {seed}",
        defense={"name": name, "parameters": {}, "settings": name, "guarantee": "none",
                 "data_dependent_law": False},
        model={"name": "mlp", "parameters": {}},
        seed=seed, rounds=10, optimizer="sgd", accuracy=accuracy, balanced_accuracy=0.5,
        majority=majority, tested=500, auc=auc, auc_error=error,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("plain", "auc", "cost", "area"),
    [(0.96, 0.51, False, False), (0.97, 0.8, False, True), (0.99, 0.9, True, True)],
)
def test_a_cost_is_known_only_where_something_was_learned(plain, auc, cost, area):
    """97 % of 500 is no better than always naming a class of 96 %: the limit is 95.3 %."""
    from msgspec import convert, to_builtins

    own = [trained(plain, seed=s, auc=auc) for s in range(3)]
    own += [trained(plain, seed=s, name="dp_sgd", auc=0.5) for s in range(3)]
    own = [convert(to_builtins(one), Training) for one in own]
    found = tables.training_costs(own, tables.Names([], own))["mlp", "dp_sgd"]
    assert (found.lost is not None) is cost
    assert (found.auc_lost is not None) is area
    assert found.unskilled is not cost


def test_a_table_with_few_positives_says_that_its_cost_is_unknown(tmp_path):
    """4 % positives, with a signal that 20 rounds do not find: all trainings name the majority."""
    source = np.random.default_rng(0)
    rows = source.random((600, 6))
    with (tmp_path / "t.csv").open("w", newline="") as stream_:
        writer = csv.writer(stream_)
        writer.writerow([*"abcdef", "outcome"])
        for row, draw in zip(rows, source.random(600), strict=True):
            writer.writerow([*(f"{v:.4f}" for v in row), "yes" if draw < 0.04 else "no"])
    text = Schema.infer(tmp_path / "t.csv", target="outcome").text()
    (tmp_path / "t.toml").write_text(text.replace("confirmed = false", "confirmed = true"))
    found = run_audit(
        "mlp,hidden=[8]",
        str(tmp_path / "t.csv"),
        attacks=["mean_image"],
        defenses=["none", "dp_sgd,noise_multiplier=5"],
        seeds=[0, 1],
        rounds=5,
        out=tmp_path / "run",
    )
    trainings = [*read(found.folder / "utility.jsonl", Training)]
    assert trainings
    assert all(one.accuracy <= one.majority + 1e-9 for one in trainings)
    page = write(tmp_path / "run").read_text()
    assert "The undefended training did not beat the majority class" in page
    assert "cost no accuracy" not in page
