"""A model with more outputs than the data has classes: attacks search labels among its outputs."""

import pytest
import torch

import leakbound as lb
from leakbound import audit
from leakbound.attacks import dlg, idlg
from leakbound.attacks.base import outputs_of
from leakbound.attacks.labels import LABEL_RULES, infer, infer_labels, label_accuracy
from leakbound.core import Batch, NotApplicable, Server, Task, ThreatModel
from leakbound.defenses import NoDefense
from leakbound.models import mlp
from leakbound.randomness import stream, uniform

from ..test_contracts import FEW

OUTPUTS, CLASSES = 10, 2
UNKNOWN = ThreatModel(labels_known=False, server=Server.MALICIOUS)


def task_of(outputs):
    """A small perceptron with so many outputs, on data of two classes."""
    given = {"input_shape": (1, 6, 6), "hidden": (8,), "activation": "tanh"}
    model = mlp(classes=outputs, generator=stream(0, "model"), **given)
    public = Batch(uniform((12, 1, 6, 6), stream(0, "public")), torch.arange(12) % CLASSES)
    return Task.of(model, classes=CLASSES, public=public).to("cpu", torch.float64)


def seen(outputs, attack=None, labels=(0, 1)):
    task = task_of(outputs)
    images = uniform((len(labels), 1, 6, 6), stream(0, "batch")).double()
    sources = [stream(0, "source", i) for i in range(2)]
    batch = Batch(images, torch.tensor(labels))
    found = lb.play(task, [batch], NoDefense(), sources, threat=UNKNOWN, attack=attack)
    return found.observation


def applies(attack, outputs):
    try:
        return attack(seen(outputs, attack), stream(0, "attack")) is not None
    except NotApplicable:
        return False


@pytest.mark.parametrize("name", FEW)
def test_every_attack_without_labels(name):
    """`dlg` failed with "The size of tensor a (10) must match"; most others did not apply."""
    assert applies(FEW[name], OUTPUTS) >= applies(FEW[name], CLASSES)


def test_the_number_of_outputs():
    assert outputs_of(seen(OUTPUTS)) == 10
    assert outputs_of(seen(CLASSES)) == 2


@pytest.mark.parametrize("rule", LABEL_RULES)
@pytest.mark.parametrize("label", [0, 1])
def test_labels_of_one_example_are_inferred(rule, label):
    try:
        found = infer(rule, seen(OUTPUTS, labels=(label,)), stream(0, "labels"))
    except NotApplicable:
        infer_labels(seen(OUTPUTS, labels=(label,)), stream(0, "labels"))
        with pytest.raises(NotApplicable):  # for another reason than the outputs
            infer(rule, seen(CLASSES, labels=(label,)), stream(0, "labels"))
        return
    assert label_accuracy(found, torch.tensor([label])) == 1


@pytest.mark.parametrize("attack", [idlg(steps=60), dlg(steps=60)], ids=["idlg", "dlg"])
def test_a_search_for_labels_finds_the_image(attack):
    observation = seen(OUTPUTS, labels=(1,))
    truth = uniform((1, 1, 6, 6), stream(0, "batch")).double()
    errors = []
    for seed in range(4):
        found = attack(observation, stream(seed, "attack"))
        errors.append(float((found.inputs - truth).square().mean()))
    assert min(errors) < 1e-4
    assert found.labels.tolist() == [1]


def test_an_audit_has_no_failed_experiment(tmp_path, monkeypatch):
    """20 of 32 experiments failed on an own model with 10 outputs and two folders of images."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "ten_outputs.py").write_text(
        "from torch import nn\n\n\n"
        "def build():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(30, 12), nn.Sigmoid(), nn.Linear(12, 10))"
    )
    plan = audit.parse(
        {
            "data": {"source": "breast_cancer"},
            "models": [{"name": "ten_outputs:build"}],
            "attacks": [{"name": "dlg", "steps": 5}, {"name": "idlg", "steps": 5}],
            "threat": {"labels_known": False},
            "seeds": [0, 1],
            "error_bound": {"kind": "none"},
            "risk": {"probability": 0},
        }
    )
    assert audit.PlanContext(plan.data).dataset.classes == CLASSES
    results = [result.record for result in audit.run(plan)]
    assert {record.status for record in results} == {"ok"}, results[0].reason
