import pytest
import torch
from torch import nn
from torch.nn import functional

from leakbound.engines import single
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
