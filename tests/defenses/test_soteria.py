"""Which features Soteria withholds, by brute force; what an attacker who knows it leaves out."""

from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn

from leakbound.attacks.matching.distances import cosine
from leakbound.client import gradient
from leakbound.core import Batch, Exact, Guarantee, Task, ThreatModel
from leakbound.defenses import GaussianNoise, NoDefense, SecureAggregation, chain
from leakbound.defenses.soteria import Soteria, defended_layer, distances, representation
from leakbound.models import simple_convnet
from leakbound.protocol import play, send
from leakbound.randomness import normal, stream, uniform
from leakbound.testing import check_defense


@pytest.fixture
def task(convnet):
    return Task.of(convnet, classes=3)


def _columns(task, mask, layer):
    """Which input features a mask (P,) withholds, after checking that it is made of columns."""
    for name, _, a, b in task.layout:
        if name != f"{layer}.weight":
            assert bool(mask[a:b].all())
    weight = task.unflatten(mask)[f"{layer}.weight"]
    assert bool((weight == weight[0]).all())
    return set(np.flatnonzero(~weight[0].numpy()))


def test_distances_by_one_backward_pass_a_feature(task, batch):
    inputs = batch.inputs.clone().requires_grad_()
    found = distances(task, inputs, "5")
    r = representation(task, inputs, "5")
    assert found.shape == r.shape == (6, 48)
    for i in range(48):
        (slope,) = torch.autograd.grad(r[:, i].sum(), inputs, retain_graph=True)
        wanted = r[:, i].abs() / slope.flatten(1).norm(dim=1)
        torch.testing.assert_close(found[:, i], wanted.detach())


def test_the_distance_is_the_shortest_way_to_a_feature_of_zero():
    first, second = nn.Conv2d(1, 2, 2, bias=False).double(), nn.Linear(12, 3).double()
    task = Task.of(nn.Sequential(first, nn.Flatten(), second))
    weights = normal((len(task.parameters),), stream(0), like=task.parameters)
    task = task.with_parameters(weights)
    x = normal((1, 1, 3, 4), stream(1), like=weights)
    r = representation(task, x, "2")
    unit = torch.eye(12, dtype=torch.float64).reshape(12, 1, 3, 4)
    jacobian = torch.cat([representation(task, e[None], "2") for e in unit]).T  # linear in x
    for i, way in enumerate(distances(task, x, "2")[0]):
        shortest, *_ = np.linalg.lstsq(jacobian[i : i + 1].numpy(), -r[0, i : i + 1].numpy())
        assert np.linalg.norm(shortest) == pytest.approx(float(way))
        moved = x + torch.tensor(shortest).reshape(x.shape)
        assert float(representation(task, moved, "2")[0, i].abs()) < 1e-12


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_other_set_of_features_moves_the_input_further(count):
    """Brute force over all sets, where features are independent, so that order 1 is exact."""
    first, second = nn.Linear(6, 6, bias=False).double(), nn.Linear(6, 2).double()
    task = Task.of(nn.Sequential(nn.Flatten(), first, second))
    turned, _ = torch.linalg.qr(normal((6, 6), stream(3)).double())
    scale = torch.tensor([3.0, 0.1, 1.0, 0.4, 2.0, 0.2], dtype=torch.float64)
    rest = task.parameters[36:]
    task = task.with_parameters(torch.cat([(scale[:, None] * turned).reshape(-1), rest]))
    x = uniform((1, 1, 2, 3), stream(4), like=rest)
    r = representation(task, x, "2")[0].numpy()
    matrix = (scale[:, None] * turned).numpy()

    def moved(gone):
        rows = list(gone)
        return np.linalg.norm(np.linalg.pinv(matrix[rows]) @ r[rows])

    best = max(combinations(range(6), count), key=moved)
    sent = send(task, Batch(x, torch.tensor([0])), Soteria(count / 6), stream(0))
    assert _columns(task, sent.mask[0], "2") == set(best)
    smallest = np.argsort(np.abs(r) / scale.numpy())[:count]
    assert moved(smallest) < 0.5 * moved(best)  # the other direction would be another defense


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_exactly_that_many_columns_go(task, batch, rate):
    sent, plain = (
        send(task, batch, Soteria(rate), stream(0)),
        send(task, batch, NoDefense(), stream(0)),
    )
    gone = _columns(task, sent.mask[0], "5")
    order = np.argsort(-distances(task, batch.inputs, "5").sum(0).numpy(), kind="stable")
    assert gone == set(order[: int(rate * 48)])
    assert torch.equal(sent.rows, plain.rows * sent.mask)
    assert torch.equal(sent.rows, send(task, batch, Soteria(rate), stream(1)).rows)
    assert isinstance(sent.law, Exact)
    assert sent.law.private


def test_dead_features_go_last(batch):
    """A feature of 0 has a column of 0: there is nothing to hide."""
    first, second = nn.Linear(12, 8).double(), nn.Linear(8, 3).double()
    task = Task.of(nn.Sequential(nn.Flatten(), first, nn.ReLU(), second), classes=3)
    task = task.with_parameters(normal((len(task.parameters),), stream(0), like=task.parameters))
    one = Batch(batch.inputs[:1], batch.labels[:1])
    r = representation(task, one.inputs, "3")[0]
    dead = {i for i in range(8) if r[i] == 0}
    assert 0 < len(dead) < 7
    assert bool(distances(task, one.inputs, "3").isfinite().all())
    sent = send(task, one, Soteria((8 - len(dead)) / 8), stream(0))
    assert _columns(task, sent.mask[0], "3") == set(range(8)) - dead


def test_a_constant_feature_goes_first():
    first = nn.Linear(4, 3).double()
    task = Task.of(nn.Sequential(nn.Flatten(), first, nn.Linear(3, 2).double()))
    weights = normal((len(task.parameters),), stream(0), like=task.parameters)
    weights[4:8] = 0  # the second feature is its bias
    task = task.with_parameters(weights)
    x = torch.rand(1, 1, 2, 2, dtype=torch.float64)
    assert float(distances(task, x, "2")[0, 1]) == float("inf")
    sent = send(task, Batch(x, torch.tensor([0])), Soteria(0.4), stream(0))
    assert _columns(task, sent.mask[0], "2") == {1}


def test_the_knowing_attacker_leaves_the_columns_out(task, batch):
    """Known, the true input matches exactly; unknown, zeroed columns look like a poor match."""
    seen = {}
    for known in (True, False):
        threat = ThreatModel(defense_known=known)
        streams = [stream(0), stream(1)]
        observation = play(task, [batch], Soteria(0.6), streams, threat=threat).observation
        truth = gradient(task, batch.inputs, batch.labels)[None]
        seen[known] = float(cosine(truth, observation.update.rows, observation.weights, []))
    assert abs(seen[True]) < 1e-12
    assert seen[False] > 0.05


def test_layers_are_found_by_place_and_name(task, batch):
    shape = {"input_shape": (1, 28, 28), "classes": 10, "generator": stream(0)}
    assert defended_layer(Task.of(simple_convnet(**shape))) == "7"
    mlp = Task.of(
        nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    )
    assert defended_layer(mlp) == "3"
    assert defended_layer(mlp, "1") == "1"
    direct = distances(mlp, batch.inputs, "1")  # the input itself: every pixel moves alone
    torch.testing.assert_close(direct, batch.inputs.flatten(1))
    with pytest.raises(ValueError, match="did you mean '3'"):
        defended_layer(mlp, "33")
    with pytest.raises(ValueError, match="no trained linear layer behind"):
        defended_layer(Task.of(nn.Sequential(nn.Flatten(), nn.Linear(12, 3))))


def test_layers_that_do_not_fit_are_refused():
    twice = nn.Linear(4, 4)
    task = Task.of(nn.Sequential(nn.Flatten(), nn.Linear(4, 4), twice, nn.Tanh(), twice))
    with pytest.raises(ValueError, match="calls the layer '2' 2 times"):
        distances(task, torch.rand(1, 1, 2, 2), "2")
    with pytest.raises(ValueError, match="vector per example"):
        distances(Task.of(nn.Linear(2, 2)), torch.rand(1, 1, 2, 2), "")


def test_it_runs_on_a_client_only(task, batch):
    update = send(task, batch, NoDefense(), stream(0))
    with pytest.raises(ValueError, match="context"):
        Soteria().transform(update, None, None, stream(0))
    with pytest.raises(ValueError, match="Soteria"):
        chain(SecureAggregation(2), Soteria())
    assert chain(Soteria(), GaussianNoise(0.1)).guarantee is Guarantee.KNOWN_NOISE
    assert chain(Soteria(), GaussianNoise(0.1)).data_dependent_law


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_the_rate_is_checked(rate):
    with pytest.raises(ValueError, match="rate"):
        Soteria(rate)


@pytest.mark.parametrize(
    "defense",
    [Soteria(0.4), Soteria(0.5, "1"), chain(Soteria(0.5), SecureAggregation(2))],
    ids=repr,
)
def test_contract(defense):
    check_defense(defense)


def test_both_ways_give_the_jacobian_s_rows():
    """Few features go backward, many forward; both against the whole Jacobian."""
    inputs = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    for features in (5, 40):  # 16 pixels
        torch.manual_seed(features)
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(16, features), nn.Tanh(), nn.Linear(features, 2)
        )
        task = Task.of(model)

        def one(x, task=task):
            return representation(task, x[None], "3")[0]

        norms = torch.stack(
            [torch.autograd.functional.jacobian(one, x).flatten(1).norm(dim=1) for x in inputs]
        )
        r = representation(task, inputs, "3").detach()
        found = distances(task, inputs, "3")
        torch.testing.assert_close(found, r.abs() / norms, rtol=1e-5, atol=1e-6)


def test_a_layer_is_found_in_a_wrapped_model():
    """A malicious server puts layers in front: the client still defends the layer it named."""
    inner = nn.Sequential()
    inner.add_module("below", nn.Linear(4, 3))
    inner.add_module("head", nn.Linear(3, 2))
    wrapped = Task.of(nn.Sequential(nn.Flatten(), inner))
    assert defended_layer(wrapped, "head") == "1.head"
    assert defended_layer(Task.of(inner), "head") == "head"
    twice = Task.of(nn.Sequential(inner, nn.Sequential(nn.Linear(2, 4), inner)))
    with pytest.raises(ValueError, match="layer is 'tail'"):
        defended_layer(twice, "tail")
