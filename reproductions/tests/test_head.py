"""Heads of many models, what enters their layers, and what a malicious server plants in them."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from leakbound import data, models
from leakbound.client import forward, gradient
from leakbound.core import NotApplicable, Task, Unit, Update
from leakbound.defenses import HiddenDropout
from leakbound.randomness import normal, stream
from leakbound_reproductions.attacks.head import (
    find_head,
    head_layers,
    random_units,
    special_head,
)
from leakbound_reproductions.attacks.hermite import hermite_means

SHAPE = (1, 6, 6)
WIDE = torch.zeros((), dtype=torch.float64)


def small(*between, first=8, last=8, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, first, bias), *between, nn.Linear(last, 3))


class Written(nn.Module):
    """A model whose activation is written in its forward."""

    def __init__(self, function):
        super().__init__()
        self.below, self.above = nn.Linear(36, 8), nn.Linear(8, 3)
        self.function = function

    def forward(self, inputs):
        return self.above(self.function(self.below(inputs.flatten(1))))


class Twice(Written):
    def forward(self, inputs):
        z = inputs.flatten(1)
        return self.above(self.below(z).relu() + self.below(2 * z).relu())


@pytest.mark.parametrize(
    ("model", "reference"),
    [
        (small(nn.ReLU()), torch.relu),
        (small(nn.ReLU(inplace=True)), torch.relu),
        (small(nn.LeakyReLU(0.3)), lambda z: functional.leaky_relu(z, 0.3)),
        (small(nn.PReLU(init=0.1)), lambda z: functional.leaky_relu(z, 0.1)),
        (small(nn.GELU(), nn.Identity()), functional.gelu),
        (small(nn.Tanh(), nn.Dropout(0.5).eval()), torch.tanh),
        (small(nn.Softplus(), bias=False), functional.softplus),
        (Written(functional.silu), functional.silu),
        (Written(torch.sigmoid), torch.sigmoid),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_activation_is_found(model, reference, dtype):
    task = Task.of(model.eval()).to("cpu", dtype)
    head = find_head(task, SHAPE)
    assert (head.first, head.second) == head_layers(task)
    assert bool((head.kept == 1).all())
    z = torch.linspace(-4, 4, 101, dtype=torch.float64)
    torch.testing.assert_close(head.activation(z), reference(z), atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(
        torch.tensor(hermite_means(head.activation)), torch.tensor(hermite_means(reference))
    )


@pytest.mark.parametrize(
    ("name", "settings", "has_head"),
    [
        ("lenet", {}, False),
        ("resnet18", {}, False),
        ("mlp", {"hidden": (20, 64), "activation": "gelu"}, True),
        ("convnet64", {}, False),
    ],
)
def test_the_repository_s_models_answer_or_decline(name, settings, has_head):
    shape = (1, 28, 28)
    build = getattr(models, name)
    model = build(input_shape=shape, classes=10, generator=stream(0, name), **settings)
    task = Task.of(model, classes=10)
    if has_head:
        assert find_head(task, shape).scale > 0
        return
    with pytest.raises(NotApplicable, match="no two linear layers"):
        find_head(task, shape)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), "no two linear layers"),
        (small(nn.Softmax(1)), "elementwise"),
        (small(nn.LayerNorm(8)), "elementwise"),
        (small(nn.ReLU(), nn.Unflatten(1, (2, 4)), nn.Flatten()), None),
        (small(nn.Unflatten(1, (4, 4)), nn.AvgPool1d(2), nn.Flatten(), first=16), "no head"),
        (Twice(torch.relu), "once"),
    ],
)
def test_what_is_no_head_is_declined(model, reason):
    task = Task.of(model.eval())
    if reason is None:
        assert find_head(task, SHAPE).first == "1"
        return
    with pytest.raises(NotApplicable, match=reason):
        find_head(task, SHAPE)


def test_sequences_are_declined():
    model = nn.Sequential(nn.Flatten(2), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(NotApplicable, match="not one vector"):
        find_head(Task.of(model), SHAPE)


def test_weights_of_the_task_count_not_those_of_the_module():
    task = Task.of(small(nn.PReLU(init=0.1)))
    moved = task.with_parameters(task.parameters * 2)
    at = torch.tensor([-1.0], dtype=torch.float64)
    assert float(find_head(moved, SHAPE).activation(at)) == pytest.approx(-0.2)


def test_dropped_units_are_read_from_the_model():
    task = Task.of(small(nn.ReLU(), first=64, last=64))
    row = torch.ones_like(task.parameters)
    above = task.unflatten(row)["3.weight"]
    above[:, :20] = 0
    seen = HiddenDropout(0.5).infer(task, Update(row[None], Unit.CLIENT, (1,)))
    kept = find_head(seen, SHAPE).kept
    assert kept[:20].tolist() == [0.0] * 20
    assert kept[20:].tolist() == [2.0] * 44


# the planted head


def test_the_special_head_is_the_paper_s():
    task = Task.of(small(nn.ReLU(), first=3000, last=3000))
    planted = special_head(task, 2000, stream(0, "plant"))
    before, after = task.unflatten(task.parameters), planted.unflatten(planted.parameters)
    assert torch.equal(before["1.weight"][:1000], after["1.weight"][:1000])
    assert torch.equal(before["3.weight"][:, :1000], after["3.weight"][:, :1000])
    assert after["1.bias"][1000:].abs().max() == 0
    rows = after["1.weight"][1000:].double()
    assert float(rows.mean()) == pytest.approx(0, abs=4 / 72_000**0.5)
    assert float(rows.var()) == pytest.approx(1, abs=4 * (2 / 72_000) ** 0.5)
    for k in range(3):
        torch.testing.assert_close(after["3.weight"][k, 1000:], torch.full((2000,), k / 2000))
    chosen, spread = random_units(planted, find_head(planted, SHAPE), None)
    assert chosen.tolist() == list(range(1000, 3000))
    assert spread == pytest.approx(1, abs=0.02)


def test_planted_logits_hardly_depend_on_the_image():
    """Class k gets k E s(w . z) for every image of the same length of features."""
    task = Task.of(small(nn.ReLU(), first=20_000, last=20_000, bias=False))
    task = special_head(task, 20_000, stream(0, "logits"))
    images = data.load("mnist5k").inputs[:8, :, 10:16, 10:16] + 0.01
    images = images / images.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    bias = task.unflatten(task.parameters)["3.bias"]
    logits = (forward(task, images) - bias).double()
    wanted = hermite_means(torch.relu)[0] * torch.arange(3).double()
    torch.testing.assert_close(logits, wanted.expand(8, 3), atol=0.03, rtol=0)
    assert not torch.allclose(logits, 1.1 * wanted.expand(8, 3), atol=0.03)


def test_the_gradient_of_a_is_a_response_to_the_weights():
    """dL/dA_kj = (1/B) sum_i (p_ik - y_ik) s(w_j . z_i), by hand."""
    task = special_head(Task.of(small(nn.ReLU())), 8, stream(0, "response")).to("cpu", WIDE.dtype)
    images, labels = torch.rand(3, *SHAPE, dtype=WIDE.dtype), torch.tensor([0, 2, 2])
    sent = task.unflatten(gradient(task, images, labels))["3.weight"]
    r = (forward(task, images).softmax(1) - functional.one_hot(labels, 3)) / 3
    hidden = torch.relu(images.flatten(1) @ task.unflatten(task.parameters)["1.weight"].T)
    torch.testing.assert_close(sent, r.T @ hidden)
    assert sent.sum(0).abs().max() < 1e-12


def test_planting_more_units_than_there_are_is_refused():
    task = Task.of(small(nn.ReLU()))
    with pytest.raises(ValueError, match="8 hidden units"):
        special_head(task, 9, stream(0))
    with pytest.raises(NotApplicable):
        special_head(Task.of(nn.Sequential(nn.Flatten(), nn.Linear(36, 3))), 1, stream(0))


def test_only_gaussian_weights_without_bias_will_do():
    ordinary = Task.of(small(nn.ReLU(), first=512, last=512, bias=False))
    with pytest.raises(NotApplicable, match="not Gaussian"):
        random_units(ordinary, find_head(ordinary, SHAPE), None)
    biased = Task.of(small(nn.ReLU(), first=512, last=512))
    with pytest.raises(NotApplicable, match="biases"):
        random_units(biased, find_head(biased, SHAPE), None)
    flat = ordinary.parameters.clone()
    ordinary.unflatten(flat)["1.weight"].copy_(0.3 * normal((512, 36), stream(0, "w")))
    honest = ordinary.with_parameters(flat)
    chosen, spread = random_units(honest, find_head(honest, SHAPE), None)
    assert len(chosen) == 512
    assert spread == pytest.approx(0.3, rel=0.02)
    assert random_units(honest, find_head(honest, SHAPE), 100)[0].tolist() == list(range(412, 512))
