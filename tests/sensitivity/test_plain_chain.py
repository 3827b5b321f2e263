"""The engine for plain chains: where it is used, and that it says what the other engines say."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from leakbound import client, models
from leakbound.core import Task
from leakbound.engines import directions, plain_chain, weight_changes
from leakbound.engines.plain_chain import ChainPasses
from leakbound.engines.sensitivity import AnyPasses, sensitivity
from leakbound.randomness import normal, stream

close = torch.testing.assert_close
CHAINS = {
    "nested": lambda: nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.Sequential(nn.ELU(inplace=True), nn.Identity())),
        nn.Sequential(nn.Flatten(), nn.Linear(48, 3)),
    ),
    "pools": lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(3, stride=1, padding=1),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(3, 8, 2, bias=False),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 3),
    ),
    "many_channels": lambda: nn.Sequential(
        nn.Conv2d(1, 8, 3, dilation=(2, 1)),
        nn.Sigmoid(),
        nn.Conv2d(8, 4, (2, 3), stride=(1, 2), padding=(0, 1)),
        nn.AdaptiveAvgPool2d(2),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(16, 3),
        nn.Softplus(beta=2.0),
    ),
    "rows": lambda: nn.Sequential(
        nn.Flatten(1, 2), nn.Linear(6, 4), nn.GELU("tanh"), nn.Flatten(), nn.Linear(24, 3)
    ),
    "overlapping": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, 1, dilation=2), nn.Flatten(), nn.Linear(8, 3)
    ),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3)),
}


def _task(build, dtype=torch.float64, **settings):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Task.of(build().to(dtype).eval(), classes=3, **settings)


def _smoothed(output, labels):
    return nn.functional.cross_entropy(output, labels, label_smoothing=0.1)


def _cubed(output, labels):
    return (output - nn.functional.one_hot(labels, 3)).pow(3).sum(1).mean()


def _absolute(output, labels):
    return (output - nn.functional.one_hot(labels, 3)).abs().sum(1).mean()


def _agrees(small, task, x, y):
    layers = plain_chain.plan(task, x)
    assert layers is not None
    drawn = normal((3, *x.shape), stream(6), like=x)
    point = plain_chain.ChainPoint(task, layers, x, y)
    jacobian = small.jacobian(task, x, y).flatten(2) * len(x)  # of each example's own loss
    moved = torch.einsum("pbn,kbn->kbp", jacobian, drawn.flatten(2))
    power = point.power(drawn)
    close(power.total, moved.square().sum((0, 1)))
    close(power.norm, moved.square().square().sum((0, 1)).sqrt())
    close(point.along(drawn), moved.sum(1))
    close(point.gradient() / len(x), client.gradient(task, x, y))


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("size", [1, 3])
def test_powers_changes_and_gradient_are_what_the_jacobian_says(small, name, size):
    _agrees(small, _task(CHAINS[name]), *small.batch(size))


@pytest.mark.parametrize("loss", [_smoothed, _cubed, _absolute], ids=lambda loss: loss.__name__)
def test_any_loss_that_is_a_batch_mean(small, loss):
    _agrees(small, _task(CHAINS["pools"], loss=loss), *small.batch(3))


def test_soft_and_ignored_labels(small):
    x, _ = small.batch(3)
    soft = torch.softmax(normal((3, 3), stream(4), like=x), 1)
    _agrees(small, _task(CHAINS["pools"]), x, soft)
    task, ignored = _task(CHAINS["pools"]), torch.tensor([0, -100, 2])
    point = plain_chain.ChainPoint(task, plain_chain.plan(task, x), x, ignored)
    close(point.gradient() / 3, client.gradient(task, x, ignored))


@pytest.mark.parametrize("grouped", [0, 2**30])
def test_weight_changes_of_pairs_by_groups_or_one_by_one(small, monkeypatch, grouped):
    monkeypatch.setattr(weight_changes, "_GROUPED", grouped)
    monkeypatch.setattr(weight_changes, "_TOGETHER", 2 * 8 * 4 * 6)
    _agrees(small, _task(CHAINS["many_channels"]), *small.batch(3))
    _agrees(small, _task(CHAINS["many_channels"]), *small.batch(1))


@pytest.mark.parametrize(
    ("directions", "examples", "step"), [(3, 5, 2), (7, 1, 3), (4, 2, 4), (2, 3, 100), (1, 4, 1)]
)
def test_the_parts_cover_every_pair_once(directions, examples, step):
    seen = torch.zeros(directions, examples)
    for ways, part in weight_changes._parts(directions, examples, step):
        seen[ways, part] += 1
        assert 1 <= seen[ways, part].numel() <= step
    assert (seen == 1).all()


@pytest.mark.parametrize("estimator", ["exact", "per_sample"])
def test_the_engines_agree(small, every, estimator):
    task, (x, y) = small.build(every), small.batch(3)
    layers = plain_chain.plan(task, x)
    assert (layers is not None) == (every in ("mlp", "pooled", "strided", "in_place"))
    if layers is None:
        return
    which, again = (
        directions.UnitDirections(x)
        if estimator == "exact"
        else directions.RandomDirections(x, stream(1), 3)
        for _ in range(2)
    )
    fast, gradient = ChainPasses(task, x, y, 5, layers).powers(which)
    slow, own = AnyPasses(task, x, y, 5).powers(again)
    close(fast.total, slow.total)
    close(fast.norm, slow.norm)
    close(gradient, own)


def _hooked():
    model = CHAINS["linear"]()
    model[1].register_forward_hook(lambda *_: None)
    return model


def _overridden():
    model = CHAINS["linear"]()
    model[1].forward = lambda x: nn.functional.linear(x, model[1].weight) / 2
    return model


def _twice():
    layer = nn.Linear(36, 36)
    return nn.Sequential(nn.Flatten(), layer, nn.Tanh(), layer, nn.Linear(36, 3))


def _tied():
    first, second = nn.Linear(36, 36), nn.Linear(36, 36)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, second, nn.Linear(36, 3))


class Sub(nn.Sequential):
    """Not exactly a Sequential."""


REFUSED = {
    "hooked": _hooked,
    "overridden": _overridden,
    "twice": _twice,
    "tied": _tied,
    "subclass": lambda: Sub(*CHAINS["linear"]()),
    "unknown": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3), nn.Softmax(1)),
    "falling": lambda: nn.Sequential(
        nn.Conv2d(1, 1, 3), nn.LeakyReLU(-0.5), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3)
    ),
    "batch_dimension": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.Flatten(0, 1), nn.Flatten(), nn.Linear(36, 3), nn.Tanh()
    ),
    "indices": lambda: nn.Sequential(nn.Linear(6, 6), nn.MaxPool2d(6, return_indices=True)),
    "four_sided": lambda: nn.Sequential(nn.Linear(6, 3)),
    "no_weights": lambda: nn.Sequential(nn.Flatten(), nn.Tanh(), nn.GroupNorm(1, 36)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused(small, name):
    x, _ = small.batch(2)
    assert plain_chain.plan(_task(REFUSED[name]), x) is None


def test_images_that_a_convolution_would_take_for_channels_are_refused():
    task = _task(lambda: nn.Sequential(nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(32, 3)))
    assert plain_chain.plan(task, torch.zeros(2, 6, 6)) is None
    assert plain_chain.plan(task, torch.zeros(2, 2, 6, 6)) is not None


def test_pools_go_before_activations_only_where_these_keep_order():
    order = [
        type(m).__name__
        for _, m, _ in plain_chain.plan(_task(CHAINS["pools"]), torch.zeros(1, 1, 6, 6))
    ]
    assert order[1:5] == ["MaxPool2d", "Tanh", "SiLU", "AvgPool2d"]
    bent = nn.Sequential(
        nn.Conv2d(1, 1, 3), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3)
    )
    order = [
        type(m).__name__
        for _, m, _ in plain_chain.plan(_task(lambda: bent), torch.zeros(1, 1, 6, 6))
    ]
    assert order[1:3] == ["GELU", "MaxPool2d"]


KNOWN = (nn.ReLU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.ELU, nn.GELU, nn.SiLU)


@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
def test_slopes_and_second_derivatives_of_activations(kind):
    x = torch.linspace(-3, 3, 11, dtype=torch.float64)[None]
    *_, (_, module, function) = plain_chain.plan(
        _task(lambda: nn.Sequential(nn.Linear(11, 11), kind())), x
    )
    out, step = plain_chain.take(module, function, x, {})
    close(out, kind()(x))
    ways = torch.ones(1, 1, 11, dtype=torch.float64)
    value, change = torch.func.jvp(kind(), (x,), (ways[0],))
    close(out, value)
    close(step.push(ways)[0], change)
    delta = torch.full_like(x, 2.0)

    def pulled(a):
        return torch.func.vjp(kind(), a)[1](delta)[0]

    close(step.pull(delta), pulled(x))
    bent = torch.func.jvp(pulled, (x,), (ways[0],))[1]
    close(step.pull_moved(delta, torch.zeros_like(ways), ways)[0], bent)


def test_several_blocks_of_examples_and_directions(small):
    task, (x, y) = _task(CHAINS["pools"]), small.batch(5)
    want = sensitivity(task, x, y, stream(2), directions=4, chunk=100)
    for chunk in (1, 2, 3, 7, 11):
        found = sensitivity(task, x, y, stream(2), directions=4, chunk=chunk)
        close(found.values, want.values)
        close(found.gradient, want.gradient)
        close(found.error, want.error)


def test_directions_drawn_in_several_groups_give_the_gradient_once(small, monkeypatch):
    task, (x, y) = _task(CHAINS["pools"]), small.batch(5)
    want = sensitivity(task, x, y, stream(2), directions=4)
    monkeypatch.setattr(directions, "BYTES", 0)
    found = sensitivity(task, x, y, stream(2), directions=4, chunk=2)
    close(found.values, want.values)
    close(found.gradient, want.gradient)


@pytest.mark.parametrize(
    ("estimator", "directions", "forward"),
    [("per_sample", 1, 0), ("per_sample", 3, 0), ("with_forward", 1, 4), ("batch", 2, 0)],
)
def test_counted_operations_are_the_floor(monkeypatch, estimator, directions, forward):
    monkeypatch.setattr(
        weight_changes, "_GROUPED", 0
    )  # the counter takes groups for more than they are
    model = models.simple_convnet(input_shape=(1, 28, 28), classes=10, generator=stream(0, "model"))
    task, source = Task.of(model), stream(1)
    x, y = torch.rand(2, 1, 28, 28, generator=source), torch.tensor([1, 2])

    def count(run):
        with FlopCounterMode(display=False) as counted:
            run()
        return counted.get_total_flops()

    def run():
        settings = {"estimator": estimator, "directions": directions, "forward": forward or None}
        sensitivity(task, x, y, source, **settings)

    run()  # plans once
    once = count(lambda: client.forward(task, x))
    # forward, back, and the gradient; four passes a direction, one where it only passes forward
    due = 3 + 4 * directions + forward
    assert 0.9 * due < count(run) / once < 1.04 * due


@pytest.mark.parametrize("kind", ["class weights", "ignored", "summed"])
@pytest.mark.parametrize("estimator", ["exact", "batch"])
def test_a_loss_that_is_no_mean_of_the_examples_own_takes_another_way(kind, estimator):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(12, 3)
    )
    weights = torch.tensor([0.1, 1.0, 5.0]).double()
    losses = {
        "class weights": lambda out, y: torch.nn.functional.cross_entropy(out, y, weight=weights),
        "ignored": torch.nn.functional.cross_entropy,
        "summed": lambda out, y: torch.nn.functional.cross_entropy(out, y, reduction="sum"),
    }
    task = Task.of(model, loss=losses[kind]).to("cpu", torch.float64)
    x = torch.rand(3, 1, 4, 4, dtype=torch.float64)
    labels = torch.tensor([0, -100, 2] if kind == "ignored" else [0, 1, 2])
    found = sensitivity(task, x, labels, stream(0), estimator=estimator, directions=4000)
    wanted = client.gradient(task, x, labels)
    assert torch.allclose(found.gradient, wanted, rtol=1e-9, atol=1e-12)
    if estimator == "batch" or kind == "ignored":
        return
    if kind == "summed":  # B times the mean, which the oracle takes for granted
        return
    jacobian = torch.autograd.functional.jacobian(
        lambda images: client.gradient(task, images, labels), x
    )
    assert torch.allclose(found.values, jacobian.flatten(1).square().sum(1), rtol=1e-8)
