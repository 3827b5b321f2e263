"""Recurrent layers step by step: PyTorch's own values, and every derivative."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.nn.utils.rnn import pack_sequence

from leakbound import client
from leakbound._util.recurrent import step_by_step
from leakbound.core import Task
from leakbound.randomness import stream
from leakbound.task import drops

LAYERS = {
    "lstm": lambda: nn.LSTM(2, 5),
    "lstm deep": lambda: nn.LSTM(2, 5, num_layers=2, bidirectional=True, batch_first=True),
    "lstm short": lambda: nn.LSTM(2, 5, proj_size=3, bidirectional=True, bias=False),
    "gru": lambda: nn.GRU(2, 5, batch_first=True),
    "gru deep": lambda: nn.GRU(2, 5, num_layers=2, bidirectional=True, bias=False),
    "rnn": lambda: nn.RNN(2, 5, num_layers=2),
    "rnn relu": lambda: nn.RNN(2, 5, nonlinearity="relu", batch_first=True),
}


def both(make):
    torch.manual_seed(0)
    theirs = make().double()
    return theirs, step_by_step(copy.deepcopy(theirs))


def flat(*parts):
    return [p for part in parts for p in (flat(*part) if isinstance(part, tuple) else [part])]


def same(first, second):
    pairs = list(zip(flat(first), flat(second), strict=True))
    assert pairs
    for a, b in pairs:
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_pytorchs(name):
    theirs, ours = both(LAYERS[name])
    assert isinstance(ours, type(theirs))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(4, 3, 2, generator=stream(0), dtype=torch.float64)
    wanted = theirs(x)
    same(ours(x), wanted)
    same(ours(x, wanted[1]), theirs(x, wanted[1]))
    alone = x[:, 0] if not theirs.batch_first else x[0]
    same(ours(alone), theirs(alone))
    same(_second(ours, x), _second(theirs, x))


def _second(module, x):
    """A derivative of the squared gradient, as gradient matching needs it."""
    leaf, weights = x.clone().requires_grad_(), list(module.parameters())
    slopes = torch.autograd.grad(flat(module(leaf))[0].square().sum(), weights, create_graph=True)
    return torch.autograd.grad(sum(own.square().sum() for own in slopes), leaf)


@pytest.mark.parametrize("name", LAYERS)
def test_every_transform(name):
    _, ours = both(LAYERS[name])
    weights = {key: p.detach() for key, p in ours.named_parameters()}
    shape = (3, 1, 4, 2) if ours.batch_first else (3, 4, 1, 2)
    x = torch.randn(shape, generator=stream(0), dtype=torch.float64)

    def value(w, one):
        return flat(functional_call(ours, w, (one,)))[0].square().sum()

    each = vmap(grad(value), (None, 0))(weights, x)
    for at, one in enumerate(x):
        same(tuple(own[at] for own in each.values()), tuple(grad(value)(weights, one).values()))
    along, back = torch.randn_like(x[0]), {key: torch.randn_like(w) for key, w in weights.items()}
    ahead = jvp(lambda one: grad(value)(weights, one), (x[0],), (along,))[1]
    reverse = vjp(lambda one: grad(value)(weights, one), x[0])[1](back)[0]
    total = sum((ahead[key] * back[key]).sum() for key in weights)
    torch.testing.assert_close(total, (reverse * along).sum())


class Last(nn.Module):
    def __init__(self, frozen=False):
        super().__init__()
        self.layer, self.head = nn.LSTM(2, 6, batch_first=True), nn.Linear(6, 3)
        self.layer.requires_grad_(not frozen)

    def forward(self, x):
        return self.head(self.layer(x.transpose(1, 2))[0][:, -1])


@pytest.mark.parametrize("frozen", [False, True])
def test_a_task_has_the_gradient_of_the_users_module(frozen):
    """Also at other weights than the module's: PyTorch's layers keep a second list of theirs."""
    model = Last(frozen).double()
    task = Task.of(model)
    assert type(model.layer) is nn.LSTM
    x = torch.randn(2, 2, 7, generator=stream(0), dtype=torch.float64)
    for factor in (1.0, 2.0):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(factor)
        trained = [p for p in model.parameters() if p.requires_grad]
        loss = nn.functional.cross_entropy(model(x), torch.tensor([0, 2]))
        wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])
        task = task.with_parameters(factor * task.parameters)
        torch.testing.assert_close(client.gradient(task, x, torch.tensor([0, 2])), wanted)
        assert bool((wanted != 0).all())


def test_packed_series_and_dropout_are_refused():
    _, ours = both(LAYERS["gru"])
    with pytest.raises(ValueError, match="series of one length"):
        ours(pack_sequence([torch.zeros(3, 2).double()]))
    deep = nn.Sequential(nn.GRU(2, 2, num_layers=2, dropout=0.3))
    with pytest.raises(ValueError, match="dropout in training mode"):
        Task.of(deep)
    assert drops(deep[0])
    assert not drops(deep.eval()[0])
