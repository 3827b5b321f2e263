"""Losses of the user's own, as of segmentation, with masks as labels and as truth."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

from leakbound import Batch, run_audit, simulate
from leakbound.audit import parse
from leakbound.audit.context import code
from leakbound.cli import main
from leakbound.client import example_gradients, fitted, gradient
from leakbound.core import Task
from leakbound.defenses import GaussianNoise
from leakbound.losses import LOSSES

from .flat import attack_update

SHAPE = (1, 6, 6)
CODE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, outputs=1):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, outputs, 3, padding=1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Focal(nn.Module):
    def __init__(self, gamma=2.0):
        super().__init__()
        self.gamma = gamma

    def forward(self, output, mask):
        wrong = nn.functional.binary_cross_entropy_with_logits(output, mask, reduction="none")
        return ((1 - torch.exp(-wrong)) ** self.gamma * wrong).mean()


def focal(output, mask):
    return Focal()(output, mask)


def make_focal(gamma=1.0):
    return Focal(gamma)


def no_scalar(output, mask):
    return output - mask
"""


class DiceCE(nn.Module):
    """As MONAI's DiceCELoss(to_onehot_y=True, softmax=True): class maps (B, 1, H, W)."""

    def forward(self, output, target):
        if output.ndim != target.ndim:
            raise ValueError("the number of dimensions for input and target should be the same")
        whole = target.squeeze(1).long()
        true = nn.functional.one_hot(whole, output.shape[1]).movedim(-1, 1).to(output)
        p = output.softmax(1)
        over = (2 * (p * true).sum((2, 3)) + 1e-5) / ((p + true).sum((2, 3)) + 1e-5)
        return (1 - over).mean() + nn.functional.cross_entropy(output, whole)


class PerPixel(nn.Module):
    """A head that is applied at every pixel."""

    def __init__(self, outputs=1):
        super().__init__()
        self.net, self.last = net(4), nn.Linear(4, outputs)

    def forward(self, x):
        return self.last(torch.tanh(self.net(x)).movedim(1, -1)).movedim(-1, 1)


own = {}
exec(CODE, own)
net, Focal = own["Net"], own["Focal"]
source = torch.Generator().manual_seed(1)
IMAGE = torch.rand((1, *SHAPE), generator=source)
MASK = (torch.rand((1, *SHAPE), generator=source) > 0.5).float()
MAP = torch.randint(0, 3, (1, *SHAPE), generator=source)


def change(model, loss, labels, rate=0.1):
    """The weights after a step, and those before."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    slopes = torch.autograd.grad(loss(model(IMAGE), labels), list(model.parameters()))
    pairs = zip(before.items(), slopes, strict=True)
    return {name: value - rate * slope for (name, value), slope in pairs}, before


def attacked(model, loss, true, *, name=None, **given):
    after, before = change(model, loss, true)
    facts = {"kind": "weights", "input_shape": SHAPE, "examples": 1, "learning_rate": 0.1}
    facts |= {"loss": name or loss, "attacks": "inverting_gradients,steps=3", "search": 2.5}
    return attack_update(after, model, before=before, **facts | given)


@pytest.mark.parametrize(
    ("loss", "labels", "outputs"), [(DiceCE(), MAP, 3), (Focal(), MASK, 1)], ids=["DiceCE", "Focal"]
)
def test_masks_are_labels_and_truths_of_own_losses(loss, labels, outputs):
    found = attacked(net(outputs), loss, labels, labels=labels, truth=Batch(IMAGE, labels), steps=1)
    (record,) = found.records
    assert record.status == "ok"
    assert record.capture.explained.direction > 0
    assert record.scores
    noise = GaussianNoise(noise_std=1e-3)
    (record,) = attacked(net(outputs), loss, labels, steps=1, defense=noise).records
    if outputs == 1:  # no label is known: the mask is searched
        assert record.status == "ok"
    else:  # this loss takes whole numbers alone
        assert record.reason.endswith("no derivative in numbers between labels; give the labels")
    with pytest.raises(
        ValueError, match=r"labels has shape .1,. and type torch.(float32|int64), and the loss"
    ):
        attacked(net(outputs), loss, labels, labels=[0], steps=1)


def test_masks_as_bytes_and_class_maps_with_a_channel():
    found = attacked(net(), Focal(), MASK, labels=MASK.to(torch.uint8), steps=1)
    assert found.records[0].capture.explained.direction > 0
    dense = LOSSES["dense_cross_entropy"]
    given = {"name": "dense_cross_entropy", "labels": MAP, "truth": Batch(IMAGE, MAP), "steps": 1}
    found = attacked(net(3), dense, MAP.squeeze(1), **given)
    assert found.records[0].capture.explained.direction > 0
    truth = Batch(IMAGE, MASK.bool())
    assert (
        attacked(net(), LOSSES["dice"], MASK, name="dice", truth=truth, steps=1).records[0].scores
    )


@pytest.mark.parametrize("name", ["dice", "dense_cross_entropy", "bce", "l1", "mse", "poisson"])
@pytest.mark.parametrize("build", [net, PerPixel])
def test_the_steps_stay_assumed_where_no_label_is_known(build, name):
    dense = name == "dense_cross_entropy"
    labels, outputs = (MAP.squeeze(1), 3) if dense else (MASK, 1)
    found = attacked(build(outputs), LOSSES[name], labels, name=name)
    steps = {one.name: one for one in found.inferred[0].findings}["local steps"]
    assert not steps.sure
    assert steps.how.startswith("assumed: the first of 1, ")
    label = {one.name: one for one in found.inferred[0].findings}["labels"]
    assert label.value == "unknown"


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "own_losses.py").write_text(CODE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    after, before = change(net(), Focal(1.0), MASK)
    for file, named in (("after", after), ("before", before)):
        np.savez(f"{file}.npz", **{key: value.numpy() for key, value in named.items()})
    np.savez("truth.npz", inputs=IMAGE.numpy(), labels=MASK.numpy())
    yield tmp_path
    sys.modules.pop("own_losses", None)


def call(loss, *more):
    words = "attack --update after.npz --before before.npz --kind weights --batch-size 1"
    words += " --model own_losses:Net --input-shape 1,6,6 --attack inverting_gradients,steps=2"
    words += " --labels truth.npz --truth truth.npz --local-steps 1 --learning-rate 0.1"
    with pytest.raises(SystemExit) as caught:
        main([*words.split(), "--loss", loss, *more])
    return caught.value.code


@pytest.mark.parametrize(
    "loss",
    [
        "own_losses:Focal,gamma=1.0",
        "own_losses:Focal",
        "own_losses:focal",
        "own_losses:make_focal",
        "torch.nn:MSELoss",
    ],
)
def test_the_command_line_takes_own_losses(place, loss, capsys):
    assert call(loss) == 0
    said = capsys.readouterr()
    assert f"importing Python code that --loss names: {loss.split(',')[0]}" in said.err
    assert "%" in said.out


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("own_losses:Focal,gama=1", "unexpected keyword argument 'gama'; give a function"),
        ("own_losses:lost", "has no 'lost'"),
        ("own_losses:no_scalar", "returns no scalar for the model's output"),
        ("dicee", "did you mean 'dice'"),
    ],
)
def test_own_losses_that_fail_are_refused(place, loss, words, capsys):
    assert call(loss) == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("loss", ["Focal,gamma=1.0", "focal", "make_focal", "make_focal,gamma=2"])
def test_a_plan_takes_own_losses(place, loss, monkeypatch):
    monkeypatch.syspath_prepend(place)
    data = {"source": "photo_masks", "size": 6, "channels": 1, "limit": 60}
    data |= {"loss": f"own_losses:{loss}"}
    plan = plan_of({"name": "own_losses:Net"}, data)
    assert set(code(plan)) == {"own_losses:Net", f"own_losses:{loss.partition(',')[0]}"}
    (record,) = run_audit(plan).assessments
    assert record.status == "ok"
    assert record.model.loss == data["loss"]
    with pytest.raises(ValueError, match="gama"):
        run_audit(plan_of({"name": "own_losses:Net"}, data | {"loss": "own_losses:Focal,gama=1"}))


def plan_of(model, data):
    attacks = [{"name": "inverting_gradients", "steps": 1}]
    rows = {"data": data, "models": [model], "attacks": attacks, "defenses": [{"name": "none"}]}
    return parse({**rows, "seeds": [0], "error_bound": {"kind": "none"}})


class Heads(nn.Module):
    """Two heads: what the image shows, and a mask of it."""

    def __init__(self, form):
        super().__init__()
        self.net, self.form = net(2), form

    def forward(self, x):
        mask = self.net(x)
        parts = {"whole": mask.mean((2, 3)), "mask": mask}
        return parts if self.form == "dict" else (parts["whole"], [parts["mask"]])


def of_dict(output, labels):
    mask = nn.functional.binary_cross_entropy_with_logits(output["mask"][:, :1], labels)
    return mask + output["whole"].square().mean()


def of_tuple(output, labels):
    whole, (mask,) = output
    return of_dict({"whole": whole, "mask": mask}, labels)


@pytest.mark.parametrize(("form", "loss"), [("dict", of_dict), ("tuple", of_tuple)])
def test_a_loss_of_several_heads(form, loss):
    model = Heads(form)
    found = attacked(model, loss, MASK, labels=MASK, truth=Batch(IMAGE, MASK), steps=1)
    (record,) = found.records
    assert record.status == "ok"
    assert record.capture.explained.direction > 0
    true = torch.autograd.grad(loss(model(IMAGE), MASK), list(model.parameters()))
    task, _ = fitted(Task.of(model, loss=loss), IMAGE)
    flat = torch.cat([part.flatten() for part in true])
    torch.testing.assert_close(gradient(task, IMAGE, MASK), flat)
    both = IMAGE.repeat(2, 1, 1, 1), MASK.repeat(2, 1, 1, 1)
    torch.testing.assert_close(example_gradients(task, *both), flat.expand(2, -1))
    assert simulate(model, Batch(IMAGE, MASK), loss=loss, attack="gauss_newton").scores
    with pytest.raises(ValueError, match="give a loss of your own that takes what the model"):
        attacked(model, loss, MASK, name="dice")


class Auxiliary(Heads):
    def forward(self, x):
        return {**super().forward(x), "balance": self.net.first.weight.square().sum()}


def test_parts_without_a_row_for_each_example_are_refused():
    with pytest.raises(ValueError, match=r"a dict with a part \(shape \(\), torch.float32\) that"):
        attacked(Auxiliary("dict"), of_dict, MASK, labels=MASK)
