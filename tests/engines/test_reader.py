import pytest
import torch
from torch import nn
from torch.nn import functional

from leakbound import client
from leakbound.engines import bundle, plain_chain, reader, single
from leakbound.engines.reader import Kind, Unreadable
from leakbound.types import Task


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


class Twice(Tied):
    def __init__(self):
        super().__init__()
        self.second = nn.Identity()

    def forward(self, x):
        return self.first(torch.relu(self.first(x)))


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return x @ self.weight


class Unused(Tied):
    def forward(self, x):
        return self.first(x)


class Branching(Tied):
    def forward(self, x):
        return self.first(x) if x.sum() > 0 else -self.first(x)


class Overwriting(nn.Module):
    """What is read again after it was written to."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(functional.elu(hidden, inplace=True) + hidden)


def _hooked():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, out: 2 * out)
    return model


FOREIGN = {
    "tied": Tied,
    "twice": Twice,
    "bare": Bare,
    "unused": Unused,
    "branching": Branching,
    "overwriting": Overwriting,
    "hooks": _hooked,
    "unknown": lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU()),
    "softmax": lambda: nn.Sequential(nn.Linear(4, 4), nn.Softmax(1)),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_models_have_no_plan(name):
    assert single.plan(Task.of(FOREIGN[name]().eval()), (1, 4)) is None


IMAGE_FOREIGN = {
    "control": nn.Identity,
    "training-norm": lambda: nn.BatchNorm2d(3),
    "reflect": lambda: nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"),
    "uneven-same": lambda: nn.Conv2d(3, 3, 2, padding="same"),
    "flat-later": lambda: nn.Flatten(2),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", IMAGE_FOREIGN)
def test_other_layers_have_no_plan(name):
    layer = IMAGE_FOREIGN[name]()
    model = nn.Sequential(nn.Conv2d(3, 3, 1), layer, nn.Flatten(), nn.LazyLinear(2))
    model(torch.zeros(2, 3, 4, 4))
    for norm in model:
        if isinstance(norm, nn.BatchNorm2d):
            norm.track_running_stats, norm.running_mean = False, None
    plan = single.plan(Task.of(model), (1, 3, 4, 4))
    assert (plan is not None) == (name == "control")


def _again():
    """One activation module in two places."""
    function = nn.Tanh()
    return nn.Sequential(
        nn.Flatten(), nn.Linear(4, 4), function, nn.Linear(4, 4), function, nn.Linear(4, 2)
    )


def test_a_module_without_weights_may_come_again():
    task = Task.of(_again())
    x, y = torch.rand(2, 1, 2, 2), torch.tensor([0, 1])
    kinds = [layer.kind for layer in reader.sequence(task, (1, 2, 2))]
    assert kinds == [Kind.FLATTEN, *[Kind.LINEAR, Kind.ACTIVATION] * 2, Kind.LINEAR]
    wanted = client.gradient(task, x, y)
    found = bundle.Bundle(bundle.chain(task, (1, 2, 2)), task.parameters[None])
    torch.testing.assert_close(found.gradient(x[None], y[None])[0], wanted)
    point = plain_chain.ChainPoint(task, plain_chain.plan(task, x), x, y)
    torch.testing.assert_close(point.gradient() / 2, wanted)
    assert single.plan(task, (2, 1, 2, 2)) is not None


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        return self.last((functional.relu(self.norm(x)) + x).mean((2, 3)))


def test_layers_are_typed():
    layers = reader.read(Task.of(Steps()), (1, 4, 4))
    found = [(layer.kind, layer.sources, layer.output, layer.before) for layer in layers]
    assert found == [
        (Kind.CONVOLUTION, (0,), 1, (1, 4, 4)),
        (Kind.GROUP_NORM, (1,), 2, (4, 2, 2)),
        (Kind.ACTIVATION, (2,), 3, (4, 2, 2)),
        (Kind.SUM, (3, 1), 4, (4, 2, 2)),
        (Kind.MEAN, (4,), 5, (4, 2, 2)),
        (Kind.LINEAR, (5,), 6, (4,)),
    ]
    assert layers[0].weights == ("first.weight", "first.bias")
    assert [layer.moving for layer in layers] == [False, *[True] * 5]
    assert [layer.owns for layer in layers] == [True, True, False, False, False, True]


REASONS = {
    "tied": (Tied, "does not belong to exactly one layer"),
    "hooks": (_hooked, "has hooks"),
    "unknown": (FOREIGN["unknown"], "PReLU has no kind"),
    "bare": (Bare, "weight depends on more than the input"),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_model_that_cannot_be_read_says_why(name):
    build, reason = REASONS[name]
    with pytest.raises(Unreadable, match=reason):
        reader.read(Task.of(build().eval()), (4,))


def test_every_engine_says_what_it_does_not_support():
    model = nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.Linear(12, 2))
    with pytest.raises(Unreadable, match="0 is a linear layer on values of several dimensions"):
        single.layers_of(Task.of(model), (4, 4))
    dilated = nn.Sequential(nn.Conv2d(1, 1, 2, dilation=2), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(Unreadable, match=r"0 is a convolution .* which bundles do not support"):
        bundle._plan(Task.of(dilated), (1, 4, 4))
    with pytest.raises(Unreadable, match=r"not consist of nn\.Sequential"):
        reader.sequence(Task.of(Steps()), (1, 4, 4))
