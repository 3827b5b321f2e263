"""Examples of several classes at once: a data set in .npz through every command."""

import numpy as np
import pytest
import torch
from torch import nn

from leakbound import Batch, run_audit
from leakbound.audit import parse
from leakbound.audit.context import PlanContext
from leakbound.audit.plan import DataSpec
from leakbound.cli import main
from leakbound.data import load
from leakbound.losses import LOSSES, named

from .captured.flat import attack_update


@pytest.fixture
def digits(tmp_path):
    """Digits that are odd, large, round: the file, inputs and labels."""
    data = load("digits", limit=300)
    number = data.labels
    labels = torch.stack([number % 2 == 1, number > 4, (number % 3 == 0)], 1)
    path = tmp_path / "several.npz"
    np.savez(path, inputs=data.inputs.numpy(), labels=labels.numpy().astype(np.uint8))
    return path, data.inputs, labels.float()


def test_the_loss_of_several_labels(digits):
    _, _, labels = digits
    loss = named("cross_entropy").of_data(labels)
    assert (loss.name, loss.outputs(3), loss.outputs(2)) == ("bce", 3, 2)
    output = torch.randn(len(labels), 3)
    own = nn.BCEWithLogitsLoss()(output, labels)
    assert torch.equal(loss(output, labels), own)
    assert LOSSES["bce"].outputs(2) == 1, "two classes of one label have one output"
    with pytest.raises(ValueError, match="a 0 or 1 for each class; give one of bce"):
        LOSSES["dice"].of_data(labels)


@pytest.mark.parametrize("count", [2, 3])
def test_an_audit_of_several_labels(digits, tmp_path, count):
    path, inputs, labels = digits
    np.savez(path, inputs=inputs.numpy(), labels=labels[:, :count].numpy())
    attacks = [{"name": "linear_inversion"}, {"name": "dlg", "steps": 3}]
    plan = {"data": {"source": str(path)}, "attacks": attacks, "seeds": [0]}
    plan |= {"models": [{"name": "mlp"}], "defenses": [{"name": "none"}]}
    plan |= {"utility": {"rounds": 2, "repeats": 1}}
    task = PlanContext(DataSpec(str(path))).task(parse(plan).models[0], 0)
    assert task.parameters.shape
    assert task.model(inputs[:1]).shape == (1, count)
    found = run_audit(parse(plan))
    assert [record.status for record in found.assessments] == ["ok", "ok"]
    assert found.assessments[0].verdict == "exposed"
    assert found.trainings[0].auc is not None


def test_bound_and_attack_of_several_labels(digits, tmp_path, capsys):
    path, inputs, labels = digits
    with pytest.raises(SystemExit) as ended:
        main(["bound", "--data", str(path), "--noise-multiplier", "5"])
    assert ended.value.code == 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 3))
    loss = nn.BCEWithLogitsLoss()
    slopes = torch.autograd.grad(loss(model(inputs[:1]), labels[:1]), list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    found = attack_update(
        dict(zip(names, slopes, strict=True)),
        model,
        kind="gradient",
        input_shape=(1, 8, 8),
        examples=1,
        loss="bce",
        public=str(path),
        truth=Batch(inputs[:1], labels[:1]),
        attacks=["linear_inversion"],
    )
    assert found.records[0].scores[0] > 100
