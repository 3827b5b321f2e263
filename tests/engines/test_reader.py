import pytest
import torch
from torch import nn
from torch.nn import functional

from leakbound import client
from leakbound.core import Task
from leakbound.engines import bundle, calls, examples, single
from leakbound.engines.reader import Kind, Unreadable


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def _hooked():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, out: 2 * out)
    return model


def _again():
    """One activation module in two places, and dropout that is switched off."""
    function = nn.Tanh()
    layers = [nn.Linear(4, 4), function, nn.Dropout(0.5), nn.Linear(4, 4), function]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(4, 2)).eval()


def test_a_module_without_weights_may_come_again():
    task = Task.of(_again())
    x, y = torch.rand(2, 1, 2, 2), torch.tensor([0, 1])
    kinds = [layer.kind for layer in calls.sequence(task, (1, 2, 2))]
    assert kinds == [Kind.RESHAPE, *[Kind.LINEAR, Kind.ACTIVATION] * 2, Kind.LINEAR]
    wanted = client.gradient(task, x, y)
    found = bundle.Bundle(bundle.chain(task, (1, 2, 2)), task.parameters[None])
    torch.testing.assert_close(found.gradient(x[None], y[None])[0], wanted)
    rows = examples.ExampleRows(task, examples.plan(task, x), x, y)
    torch.testing.assert_close(rows.gradient() / 2, wanted)
    assert single.plan(task, (2, 1, 2, 2)) is not None


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        return self.last((functional.relu(self.norm(x)) + x).mean((2, 3)))


def test_layers_are_typed():
    layers = calls.read(Task.of(Steps()), (1, 4, 4))
    found = [(layer.kind, layer.sources, layer.output, layer.before) for layer in layers]
    # values 1 and 2 are the convolution's weights, and so on
    assert found == [
        (Kind.CONVOLUTION, (0,), 3, (1, 4, 4)),
        (Kind.GROUP_NORM, (3,), 6, (4, 2, 2)),
        (Kind.ACTIVATION, (6,), 7, (4, 2, 2)),
        (Kind.SUM, (7, 3), 8, (4, 2, 2)),
        (Kind.MEAN, (8,), 9, (4, 2, 2)),
        (Kind.LINEAR, (9,), 12, (4,)),
    ]
    assert layers[0].weights == ("first.weight", "first.bias")
    assert [layer.moving for layer in layers] == [False, *[True] * 5]
    assert [layer.owns for layer in layers] == [True, True, False, False, False, True]


class Own(nn.LeakyReLU):
    pass


REASONS = {
    "subclass": (lambda: nn.Sequential(nn.Linear(4, 4), Own()), "not consist of nn.Sequential"),
    "tied": (Tied, "not consist of nn.Sequential"),
    "hooks": (_hooked, "has hooks"),
    "unknown": (lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU()), "prelu has no kind"),
    "reflect": (
        lambda: nn.Sequential(nn.Conv2d(3, 3, 3, 1, 1, padding_mode="reflect")),
        "pad has no",
    ),
    "uneven": (lambda: nn.Sequential(nn.Conv2d(3, 3, 2, padding="same")), "conv2d has no kind"),
}


@pytest.mark.filterwarnings("ignore:Using padding")
@pytest.mark.parametrize("name", REASONS)
def test_a_model_that_cannot_be_taken_apart_says_why(name):
    build, reason = REASONS[name]
    shape = (3, 4, 4) if name in ("reflect", "uneven") else (4,)
    with pytest.raises(Unreadable, match=reason):
        calls.sequence(Task.of(build().eval()), shape)


def test_every_engine_says_what_it_does_not_support():
    dilated = nn.Sequential(nn.Conv2d(1, 1, 2, dilation=2), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(Unreadable, match=r"0 is a convolution .* which bundles do not support"):
        bundle._plan(Task.of(dilated), (1, 4, 4))
    with pytest.raises(Unreadable, match=r"not consist of nn\.Sequential"):
        calls.sequence(Task.of(Steps()), (1, 4, 4))
