"""Odd tensors, labels and settings of captured updates: inferred, or refused by name."""

import numpy as np
import pytest
import torch
from torch import nn

from leakbound import Batch, captured, simulate
from leakbound.client import example_gradients, gradient
from leakbound.core import Task

from .flat import attack_update

SHAPE = (1, 4, 4)
INPUTS, LABELS = torch.rand((1, *SHAPE), generator=torch.Generator().manual_seed(1)), [1]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


class Scaled(nn.Module):
    """With a weight that is one number, and one without entries."""

    def __init__(self):
        super().__init__()
        self.net, self.scale = model(), nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return self.net(x) * self.scale + self.none.sum()


def update_of(own):
    task = Task.of(own)
    return task.unflatten(gradient(task, INPUTS, torch.tensor(LABELS)))


def attacked(update, own=None, **given):
    own = own or model()
    facts = {"kind": "gradient", "input_shape": SHAPE, "examples": 1, **given}
    return attack_update(update, own, **{"attacks": "linear_inversion", **facts})


def test_weights_of_one_number_or_none():
    own = Scaled()
    update = {
        name: torch.autograd.grad(own(INPUTS).sum(), weight)[0]
        for name, weight in own.named_parameters()
    }  # with the strides that autograd gives
    assert update["none"].shape == (0,)
    assert captured.load(update, kind="gradient").digest
    update = update_of(own)
    assert attacked(update, own).verdict == "exposed (certified)"
    assert attacked(list(update.values()), own).verdict == "exposed (certified)"
    task, count = Task.of(own), 3
    each = example_gradients(task, INPUTS.expand(count, *SHAPE), torch.tensor([0, 1, 2]))
    true = gradient(task, INPUTS.expand(count, *SHAPE), torch.tensor([0, 1, 2]))
    torch.testing.assert_close(each.mean(0), true)
    for defense in ("dp_sgd,noise_multiplier=1,clip_norm=1", "quantization,bits=8"):
        data = (INPUTS, torch.tensor(LABELS))
        simulate(own, data, defense=defense, attack="inverting_gradients,steps=1")


def test_sparse_updates_are_those_of_dense_ones():
    sparse = {name: own.to_sparse() for name, own in update_of(model()).items()}
    assert attacked(sparse).verdict == "exposed (certified)"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda u: 3, "update is a int; give a file, tensors by name"),
        (lambda u: None, "update is a NoneType"),
        (lambda u: torch.cat([v.flatten() for v in u.values()]), "update is a Tensor"),
        (lambda u: np.zeros(3), "update is a ndarray"),
        (lambda u: model(), "update is a Sequential"),
        (lambda u: [], "update holds no tensor"),
        (lambda u: {k: v.to("meta") for k, v in u.items()}, "on the meta device"),
        (lambda u: {k: v.to(torch.complex64) for k, v in u.items()}, "type torch.complex64"),
        (lambda u: [[[1.0, 2.0], [3.0]]], "is no array of numbers"),
        (lambda u: [torch.zeros(0), *u.values()], "is a list of 5 tensors without names"),
    ],
)
def test_what_is_no_update_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        attacked(change(update_of(model())))


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (torch.tensor(1), "labels has shape .. and type torch.int64; give one label for each"),
        (1, "give one label for each example"),
        ("1", "labels is '1'; give one number"),
        ([None], "give one number for each example"),
        ([[1, 2], [3]], "give one number for each example"),
        ([], "labels has shape .0,."),
        (torch.tensor([1 + 0j]), "type torch.complex64"),
    ],
)
def test_odd_labels_are_refused(labels, words):
    with pytest.raises(ValueError, match=words):
        attacked(update_of(model()), labels=labels)


def test_a_truth_with_one_number_as_label_is_refused(tmp_path):
    place = tmp_path / "truth.npz"
    np.savez(place, inputs=INPUTS.numpy(), labels=np.array(1))
    with pytest.raises(ValueError, match=r"labels is one number .1. without a dimension"):
        attacked(update_of(model()), truth=place)
    np.savez(place, inputs=INPUTS.numpy(), labels=np.array([1]))
    assert attacked(update_of(model()), truth=Batch(INPUTS, torch.tensor([1]))).records[0].scores
    assert attacked(update_of(model()), truth=place).records[0].scores[0] > 60


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"input_range": (0.0,)}, "input_range is .0.0,.; give two numbers"),
        ({"input_range": (0.0, float("inf"))}, "input_range is inf; give a finite number"),
        ({"input_range": "01"}, "give two numbers"),
        ({"classes": 0}, "classes is 0; give a whole number"),
        ({"classes": 2.5}, "classes is 2.5"),
        ({"domain": "images"}, "domain is 'images'; give a leakbound.domains.Domain"),
        ({"attacks": 3}, "attacks is '3'; give names"),
        ({"attacks": "dlg,step=3"}, "did you mean 'steps'"),
    ],
)
def test_odd_settings_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        attacked(update_of(model()), **given)


def test_attacks_take_settings_as_everywhere():
    found = attacked(
        update_of(model()), attacks=["linear_inversion", "inverting_gradients,steps=2"]
    )
    assert [one.attack.name for one in found.records] == ["linear_inversion", "inverting_gradients"]
    assert "steps=2" in found.records[1].attack.settings
