"""What is smooth is found by an allow-list on the traced gradient, whatever a model is made of."""

import dataclasses

import pytest
import torch
from torch import nn

from leakbound import defenses, models
from leakbound.bounds.smoothness import not_smooth
from leakbound.core import LocalPlan, Task
from leakbound.randomness import stream

IMAGE, LABEL = torch.rand(2, 1, 8, 8, generator=stream(0, "images")), torch.tensor([0, 3])
of = nn.functional


class Functional(nn.Module):
    """Calls its nonlinearity without a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.last(self.function(self.first(x.flatten(1))))


def found(function):
    return not_smooth(Task.of(Functional(function)), IMAGE, LABEL)


def into_a_view(z):
    """The base of the view is a constant until the view is written."""
    buffer = torch.zeros(len(z), 8)
    buffer[:, :4] = z[:, :4]
    return z + of.relu(buffer)


class StraightThrough(torch.autograd.Function):
    """Rounds, with the slope of the identity."""

    @staticmethod
    def forward(z):
        return z.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g


JUMPS_OR_POLES = {
    "relu": torch.relu,
    "leaky_relu": of.leaky_relu,
    "sign": torch.sign,
    "round": torch.round,
    "floor": torch.floor,
    "where": lambda z: torch.where(z > 0, z, z * 0.1),
    "a mask": lambda z: z * (z > 0),
    "abs": torch.abs,
    "clamp": lambda z: z.clamp(0, 1),
    "maximum": lambda z: torch.maximum(z, 0 * z),
    "sort": lambda z: z.sort(1)[0],
    "topk": lambda z: z * (z >= z.topk(3, 1)[0][:, -1:]),
    "argmax": lambda z: z * of.one_hot(z.argmax(1), 8),
    "long": lambda z: (z * 10).long().float() + z,
    "remainder": lambda z: torch.remainder(z, 1.0),
    "frac": torch.frac,
    "heaviside": lambda z: torch.heaviside(z, torch.zeros(())),
    "bucketize": lambda z: z + torch.bucketize(z.detach(), torch.tensor([0.0, 0.5])).float(),
    "searchsorted": lambda z: z + torch.searchsorted(torch.tensor([0.0, 0.5]), z.detach()),
    "root of a square": lambda z: (z * z).sqrt(),
    "power of a square": lambda z: (z * z) ** 0.5,
    "hardswish": of.hardswish,
    "a detached comparison": lambda z: z + (z.detach() > 0).float(),
    "atan2": lambda z: torch.atan2(z, z.roll(1, 1)),
    "masked_fill": lambda z: z.masked_fill(z < 0, 0.0),
    "an embedding": lambda z: z + torch.eye(3)[(z.detach() > 0).long()].sum(-1),
    "acos of cos": lambda z: torch.acos(torch.cos(z)),
    "median": lambda z: z - z.median(1, keepdim=True)[0],
    "hypot": lambda z: torch.hypot(z, 0 * z),
    "a branch": lambda z: z if float(z.detach().sum()) > 0 else -z,
    "numpy": lambda z: z + torch.from_numpy((z.detach().numpy() > 0) * 1.0),
    "division by itself": lambda z: z / (z * z).sum(1, keepdim=True),
    "signbit": lambda z: z * torch.signbit(z),
    "celu": lambda z: of.celu(z, 0.5),
    "selu": of.selu,
    "log": lambda z: torch.log(z * z),
    "norm": lambda z: z / z.norm(),
    "max pool": lambda z: of.max_pool1d(z[:, None], 2)[:, 0].repeat(1, 2),
    "written into a view": into_a_view,
    "straight through": StraightThrough.apply,
    "a list": lambda z: torch.tensor(z.detach().tolist()),
}


@pytest.mark.parametrize("name", JUMPS_OR_POLES)
def test_what_jumps_or_has_a_pole_is_refused(name):
    assert found(JUMPS_OR_POLES[name])


SMOOTH = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": of.gelu,
    "gelu by tanh": lambda z: of.gelu(z, approximate="tanh"),
    "silu": of.silu,
    "mish": of.mish,
    "softplus": of.softplus,
    "layer norm": lambda z: of.layer_norm(z, (8,)),
    "square": lambda z: z * z,
    "power": lambda z: z**3,
    "elu": of.elu,
    "softmax": lambda z: z.softmax(1),
    "sin": torch.sin,
    "dropout that is off": lambda z: of.dropout(z, 0.5, False),
    "division by a constant": lambda z: z / 3,
    "a constant mask": lambda z: torch.where(torch.arange(8) > 3, z, 0.0),
    "attention": lambda z: of.scaled_dot_product_attention(*(3 * [z.view(-1, 2, 1, 4)])).reshape(
        -1, 8
    ),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_what_is_smooth_passes(name):
    assert found(SMOOTH[name]) == ()


def test_convolutions_pools_and_norms():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 8, 3),
        nn.Sigmoid(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    ).eval()
    assert not_smooth(Task.of(model), IMAGE, LABEL) == ()


@pytest.mark.parametrize(
    ("name", "settings", "smooth"),
    [
        ("lenet", {}, True),
        ("mlp", {}, False),
        ("mlp", {"activation": "tanh"}, True),
        ("simple_convnet", {}, False),
    ],
)
def test_built_in_models(name, settings, smooth):
    build = getattr(models, name)
    shape = (1, 28, 28)
    model = build(input_shape=shape, classes=10, generator=stream(0, "model"), **settings)
    assert (not_smooth(Task.of(model), torch.rand(1, *shape), LABEL[:1]) == ()) == smooth


def test_several_local_steps_are_traced():
    task = Task.of(Functional(torch.tanh))
    several = dataclasses.replace(task, plan=LocalPlan(steps=3, learning_rate=0.1))
    assert not_smooth(several, IMAGE, LABEL) == ()


def test_the_loss_counts_too():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
    task = Task.of(model, loss=lambda out, _: (out - 1).abs().mean())
    assert not_smooth(task, IMAGE, LABEL)
    squares = Task.of(model, loss=lambda out, _: (out - 1).square().mean())
    assert not_smooth(squares, IMAGE, LABEL) == ()


def test_of_defenses_only_those_that_say_so_are_continuous():
    """A defense of one's own that overrides `imitate` is not trusted until it says otherwise."""

    @dataclasses.dataclass(frozen=True)
    class Threshold(defenses.Defense):
        def imitate(self, rows):
            return rows * (rows.abs() > 0.1)

    class Scaled(Threshold):
        continuous = True

    task = Task.of(Functional(torch.tanh))
    noise = defenses.GaussianNoise(0.1)
    for link, word in (
        (Threshold(), ("the defense",)),
        (defenses.Sign(), ("the defense",)),
        (Scaled(), ()),
        (defenses.Clip(1.0), ()),
        (noise, ()),
    ):
        assert not_smooth(task, IMAGE, LABEL, defenses.chain(link, noise)) == word
    assert not_smooth(task, IMAGE, LABEL, defenses.chain(*defenses.DpSgd(1.0, 1.0).links)) == ()
