"""Several local steps and minibatches by the engine, against autograd through the client's code."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from leakbound import client, models
from leakbound.core import LocalPlan, Task
from leakbound.engines import norms, rules, single
from leakbound.engines.choose import choose

pytestmark = pytest.mark.usefixtures("kernels")
CLASSES = 5
BUILT_IN = {
    "mlp": (models.mlp, (1, 8, 8), {"activation": "tanh"}),
    "simple_convnet": (models.simple_convnet, (1, 12, 12), {}),
    "lenet": (models.lenet, (3, 16, 16), {}),
    "resnet18-group": (models.resnet18, (3, 16, 16), {"width": 8, "norm": "group"}),
    "resnet18-batch": (models.resnet18, (3, 16, 16), {"width": 8, "norm": "batch"}),
}


def _norm_first(norm):
    """A norm that no weight moves, and one that some do; layers without biases or weights."""
    return nn.Sequential(
        norm(3),
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        norm(8),
        nn.GELU(),
        nn.Conv2d(8, 8, 3, stride=2, groups=2),
        nn.GroupNorm(2, 8, affine=False),
        nn.Conv2d(8, 12, 3, padding=1, dilation=2),
        nn.Softplus(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.LayerNorm(48),
        nn.Linear(48, CLASSES, bias=False),
    )


OWN = {
    "group-first": lambda: _norm_first(lambda size: nn.GroupNorm(1, size)),
    "batch-first": lambda: _norm_first(nn.BatchNorm2d),
    "layer-first": lambda: nn.Sequential(
        nn.LayerNorm([3, 8, 8]),
        nn.Conv2d(3, 40, 3, padding=1),
        nn.LayerNorm([40, 8, 8]),
        nn.SiLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(640, CLASSES),
    ),
}
ALL = [*BUILT_IN, *OWN]
PLANS = {
    "full": (LocalPlan(3, 0.05), 2),
    "one": (LocalPlan(2, 0.05), 1),
    "ragged": (LocalPlan(5, 0.05, 2), 3),
    "first": (LocalPlan(1, 0.05, 2), 3),
}
"""Local plans and batches; of the last two, minibatches of unequal sizes, and one that is left."""


def _task(name, plan, dtype=torch.float64, **more):
    torch.manual_seed(0)
    if name in BUILT_IN:
        build, shape, options = BUILT_IN[name]
        generator = torch.Generator().manual_seed(0)
        model = build(input_shape=shape, classes=CLASSES, generator=generator, **options)
    else:
        model, shape = OWN[name]().eval(), (3, 8, 8)
    with torch.no_grad():  # norms away from the identity
        for module in model.modules():
            for part in ("weight", "bias", "running_mean", "running_var"):
                own = getattr(module, part, None)
                if isinstance(module, nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm) and (
                    own is not None
                ):
                    own.copy_(own + 0.3 * torch.rand_like(own))
    return Task.of(model, plan=plan, **more).to("cpu", dtype), shape


def _engine(task, shape, size):
    choice = choose(task, 1, (size, *shape))
    assert choice is not None
    assert choice.chain is None
    return choice.engine([task], 1)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ALL)
def test_it_is_autograds(judge, name, plan):
    local, size = PLANS[plan]
    soft = plan in ("one", "ragged")
    task, shape = _task(name, local)
    engine = _engine(task, shape, size)
    for seed in (1, 2):
        given = judge.example(task, shape, size, soft, seed)
        judge.agree(engine, task, given)


@pytest.mark.parametrize("plan", ["one", "ragged"])
@pytest.mark.parametrize("name", ALL)
def test_float32_is_as_exact_as_autograd(judge, name, plan):
    local, size = PLANS[plan]
    task, shape = _task(name, local, torch.float32)
    exact = task.to("cpu", torch.float64)
    given = judge.example(task, shape, size, soft=True)
    truths = judge.autograd(exact, *(part.double() for part in given))
    mine = judge.mine(_engine(task, shape, size), *given)
    # Five steps may magnify a rounding of the inputs a thousandfold: autograd's error on inputs
    # moved by up to four roundings ranges from 4e-6 to 1e-4 (the norms of a layer first).
    inputs, *rest = given
    roundings = torch.finfo(torch.float32).eps * torch.arange(-4, 5)
    plains = [judge.autograd(task, inputs * (1 + move), *rest) for move in roundings]
    judge.as_exact(mine, truths, *plains)


@pytest.mark.parametrize(("size", "dtype"), [(3, torch.float64), (1, torch.float32)])
@pytest.mark.parametrize("name", ALL)
def test_slopes_in_the_weights_are_autograds(judge, name, size, dtype):
    """Those of <gradient, v>, layer by layer, at weights that were written over others."""
    task, shape = _task(name, LocalPlan(), dtype)
    inputs, labels, cotangent = judge.example(task, shape, size)
    leaf = task.parameters.clone().requires_grad_()
    gradient = client.gradient(task, inputs, labels, leaf)
    (wanted,) = torch.autograd.grad(gradient, leaf, cotangent)
    row = torch.full_like(task.parameters, float("nan"))
    other = replace(task, parameters=torch.ones_like(row))
    engine = single.Single(other, single.plan(task, (size, *shape)), row)
    other.parameters.copy_(task.parameters)
    engine.gradient(inputs[None], labels[None])
    engine.pull(cotangent[None])
    for _, _, start, stop in task.layout:
        off = (row[start:stop] - wanted[start:stop]).norm()
        least = 1e-10 if dtype is torch.float64 else 1e-4
        assert float(off) <= least * float(wanted.norm())


@pytest.mark.parametrize("soft", [False, True], ids=["classes", "soft"])
def test_another_loss(judge, soft):
    task, shape = _task("simple_convnet", LocalPlan(3, 0.5), loss=judge.smooth_loss)
    engine, given = _engine(task, shape, 3), judge.example(task, shape, 3, soft)
    judge.agree(engine, task, given)


@pytest.mark.parametrize("name", ["simple_convnet", "resnet18-batch"])
def test_a_pruned_task(judge, name):
    task, shape = _task(name, LocalPlan(4, 0.05, 2))
    kept = torch.rand(len(task.parameters), generator=torch.Generator().manual_seed(2)) < 0.4
    task = task.pruned(kept)
    engine, given = _engine(task, shape, 3), judge.example(task, shape, 3)
    assert not judge.mine(engine, *given)[0][~kept].any()
    judge.agree(engine, task, given)


def test_calls_in_any_order_and_nothing_written(judge):
    task, shape = _task("lenet", LocalPlan(3, 0.05))
    start = task.parameters.clone()
    one, two = (judge.example(task, shape, 2, seed=seed) for seed in (1, 2))
    wanted = judge.autograd(task, *one)
    engine, second = _engine(task, shape, 2), _engine(task, shape, 2)
    for given in (one, two, one):
        engine.gradient(given[0][None], given[1][None])
    second.gradient(two[0][None], two[1][None])
    first = engine.pull(one[2][None]).inputs
    kept = first.clone()
    engine.pull(two[2][None])
    assert judge.error(first[0], wanted[1]) < 1e-10
    assert torch.equal(engine.pull(one[2][None]).inputs, kept)
    assert torch.equal(first, kept)
    assert torch.equal(task.parameters, start)
    fresh = _engine(task, shape, 2)
    assert all(map(torch.equal, judge.mine(fresh, *one), judge.mine(engine, *one)))


def test_nothing_is_traced_and_a_pull_needs_a_gradient(judge):
    task, shape = _task("mlp", LocalPlan(2, 0.1))
    inputs, labels, cotangent = judge.example(task, shape, 2, soft=True)
    engine = _engine(task, shape, 2)
    with pytest.raises(ValueError, match="before gradient"):
        engine.pull(cotangent[None])
    update = engine.gradient(inputs[None].requires_grad_(), labels[None].requires_grad_())
    pulled = engine.pull(cotangent[None].requires_grad_())
    assert not any(part.requires_grad for part in (update, pulled.inputs, pulled.labels))


@pytest.mark.parametrize("name", ["simple_convnet", "resnet18-group", "batch-first"])
def test_nothing_waits_for_the_device(judge, name):
    task, shape = _task(name, LocalPlan(3, 0.05, 2), torch.float32)
    engine, given = _engine(task, shape, 3), judge.example(task, shape, 3, soft=True)
    with judge.NoSync():
        engine.gradient(given[0][None], given[1][None])
        engine.pull(given[2][None])


def test_it_says_where_autograd_is_needed():
    task, shape = _task("mlp", LocalPlan(2, 0.1))
    assert choose(task, 1, (2, *shape)) is not None
    assert choose(task, 2, (2, *shape)) is None
    small = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.PReLU())
    assert choose(Task.of(small), 1, (1, 1, 2, 2)) is None


WRONG = {
    "linear": (rules.LinearRule, "write_bias", "mlp"),
    "group": (norms.GroupNormRule, "_curve", "group-first"),
    "fixed": (norms.FixedNormRule, "_curve", "batch-first"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_rule_is_found_out(fault, monkeypatch):
    kind, method, name = WRONG[fault]
    task, shape = _task(name, LocalPlan(2, 0.1))
    assert single.plan(task, (1, *shape)) is not None
    right = getattr(kind, method)

    def wrong(self, *args):
        right(self, *args)
        self.gradients[0].mul_(1.001)

    monkeypatch.setattr(kind, method, wrong)
    assert choose(task, 1, (1, *shape)) is None


@pytest.mark.parametrize("name", ["simple_convnet", "resnet18-group"])
def test_a_local_step_is_nine_forwards_and_the_first_seven(judge, name):
    steps, size = 4, 2
    task, shape = _task(name, LocalPlan(steps, 0.05), torch.float32)
    engine, (inputs, labels, _) = _engine(task, shape, size), judge.example(task, shape, size)
    with torch.no_grad():
        forward = judge.products(lambda: client.forward(task, inputs))
    whole = judge.products(lambda: engine.pull(engine.gradient(inputs[None], labels[None])))
    assert (8.2 * steps - 2) * forward < whole <= (9 * steps - 2) * forward
