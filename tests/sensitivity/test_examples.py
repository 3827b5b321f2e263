"""Single examples' gradients and changes by hand, against `torch.func` and autograd."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

from leakbound import client, models
from leakbound.core import Task
from leakbound.engines import examples
from leakbound.engines import sensitivity as estimate
from leakbound.engines.sensitivity import along, example_changes, example_gradients, moved
from leakbound.randomness import normal, stream

close = torch.testing.assert_close
BUILDS = {
    "mlp": lambda: models.mlp(input_shape=(1, 6, 6), classes=3, generator=stream(0, "m")),
    "digits": lambda: models.simple_convnet(
        input_shape=(1, 6, 6), classes=3, generator=stream(0, "c")
    ),
    "pools": lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(3, stride=1, padding=1),
        nn.AvgPool2d(2),
        nn.Conv2d(3, 8, 2, bias=False),
        nn.Softplus(),
        nn.Flatten(),
        nn.Linear(32, 3),
    ),
    "many_channels": lambda: nn.Sequential(
        nn.Conv2d(1, 8, 3, dilation=(2, 1)),
        nn.Sigmoid(),
        nn.Conv2d(8, 4, (2, 3), stride=(1, 2), padding=(0, 1)),
        nn.Flatten(),
        nn.Linear(8, 3, bias=False),
    ),
    "rows": lambda: nn.Sequential(
        nn.Flatten(1, 2), nn.Linear(6, 4), nn.GELU("tanh"), nn.Flatten(), nn.Linear(24, 3)
    ),
}


def _task(build):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Task.of(build().double().eval(), classes=3)


def _smoothed(output, labels):
    return nn.functional.cross_entropy(output, labels, label_smoothing=0.1)


def _distance(output, labels):
    return (output - labels).square().mean()


def _batch(task, soft=False, size=5):
    x = normal((size, 1, 6, 6), stream(0, "x"), like=task.parameters)
    y = torch.arange(size) % 3
    return x, torch.softmax(normal((size, 3), stream(0, "y"), like=x), 1) if soft else y


def _exact(found, wanted):
    close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.fixture(params=sorted(BUILDS))
def task(request):
    return _task(BUILDS[request.param])


@pytest.mark.parametrize("soft", [False, True])
def test_they_are_those_of_torch_func(task, soft):
    x, y = _batch(task, soft)
    assert examples.plan(task, x) is not None
    ways = normal(x.shape, stream(0, "ways"), like=x)
    _exact(example_gradients(task, x, y), client.example_gradients(task, x, y))
    _exact(example_changes(task, x, y, ways), estimate.pair_changes(task, x, y, ways))


def test_plain_chains_do_without_torch_func(task, monkeypatch):
    x, y = _batch(task)
    for name in ("client.example_gradients", "client.pure_gradient", "client.input_jvp"):
        monkeypatch.setattr(f"leakbound.{name}", lambda *_: pytest.fail("the plain path"))
    monkeypatch.setattr(estimate, "pair_changes", lambda *_: pytest.fail("the plain path"))
    example_gradients(task, x, y), example_changes(task, x, y, x), moved(task, x, y, x[None])


def test_what_a_pruned_model_lacks_has_no_gradient():
    task = _task(BUILDS["pools"])
    task = task.pruned(torch.arange(len(task.parameters)) % 3 > 0)
    x, y = _batch(task)
    ways = normal((2, *x.shape), stream(0, "ways"), like=x)
    _exact(example_gradients(task, x, y), client.example_gradients(task, x, y))
    gradient, changes = moved(task, x, y, ways)
    _exact(gradient, client.gradient(task, x, y))
    _exact(changes, along(task, x, y, ways))


@pytest.mark.parametrize("loss", [_distance, _smoothed])
def test_other_models_and_losses_take_the_plain_path(loss):
    round_ = nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular")
    odd = Task.of(nn.Sequential(round_, nn.Tanh(), nn.Flatten(), nn.Linear(144, 3)).double())
    x, y = _batch(odd, soft=True)
    for task in (odd, replace(_task(BUILDS["mlp"]), loss=loss)):
        ways = normal(x.shape, stream(0, "ways"), like=x)
        _exact(example_gradients(task, x, y), client.example_gradients(task, x, y))
        _exact(example_changes(task, x, y, ways), estimate.pair_changes(task, x, y, ways))
        _exact(moved(task, x, y, ways[None])[1], along(task, x, y, ways[None]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
def test_an_example_that_is_not_finite_stays_by_itself(task, bad):
    x, y = _batch(task)
    rows = example_gradients(task, x, y)
    x = x.clone()
    x[2] = bad
    again = example_gradients(task, x, y)
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(again[others], rows[others])
    assert bad == 1e300 or not bool(again[2].isfinite().all())


def test_gradients_and_changes_of_a_whole_batch(task):
    x, y = _batch(task)
    ways = normal((3, *x.shape), stream(0, "ways"), like=x)
    gradient, changes = moved(task, x, y, ways)
    _exact(gradient, client.gradient(task, x, y))
    _exact(changes, along(task, x, y, ways))


def test_slopes_pass_in_all_of_pytorchs_ways(monkeypatch):
    task = _task(BUILDS["pools"])
    x, y = _batch(task)
    ways = normal((2, *x.shape), stream(0, "ways"), like=x)
    monkeypatch.setattr(estimate, "ExamplePasses", lambda *_: pytest.fail("it has no slopes"))

    def of(images):
        gradient, changes = moved(task, images, y, ways)
        return gradient.square().sum() + changes.square().sum()

    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(of(leaf), leaf)
    assert float(slope.abs().sum()) > 0
    _exact(grad(of)(x), slope)
    with torch.no_grad():
        change = jvp(of, (x,), (x,))[1]
        _exact(change, (slope * x).sum())
        vmap(of)(x[None])
    with forward_ad.dual_level(), torch.no_grad(), pytest.raises(RuntimeError, match="Nested"):
        of(forward_ad.make_dual(x, x))  # refused by PyTorch, not answered without its change
