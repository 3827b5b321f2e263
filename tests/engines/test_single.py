from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from leakbound import client, models
from leakbound.core import Task
from leakbound.engines import single

pytestmark = pytest.mark.usefixtures("kernels")
CLASSES = 5
BUILT_IN = {
    "simple_convnet": (models.simple_convnet, (1, 12, 12), {}),
    "convnet64-batch": (models.convnet64, (3, 9, 9), {}),
    "convnet64-group": (models.convnet64, (3, 9, 9), {"norm": "group", "activation": "gelu"}),
    "convnet64-none": (models.convnet64, (3, 9, 9), {"norm": "none", "activation": "relu"}),
    "lenet": (models.lenet, (3, 16, 16), {}),
    "mlp": (models.mlp, (1, 8, 8), {"activation": "tanh"}),
    "conv-1": (models.conv, (1, 8, 8), {"depth": 1, "width": 0.1}),
    "conv-4": (models.conv, (1, 8, 8), {"depth": 4, "width": 0.1, "activation": "gelu"}),
    "vgg-6": (models.vgg, (3, 16, 16), {"depth": 6, "width": 0.1}),
    "two_layer": (models.two_layer, (1, 4, 4), {"activation": "gelu"}),
    "headed": (models.headed, (1, 12, 12), {"width": 64}),
    "resnet18-batch": (models.resnet18, (3, 16, 16), {"width": 8, "norm": "batch"}),
    "resnet18-group": (models.resnet18, (3, 16, 16), {"width": 8, "norm": "group"}),
    "resnet18-none": (
        models.resnet18,
        (3, 32, 32),
        {"width": 8, "norm": "none", "stem": "large", "activation": "tanh"},
    ),
}


class Residual(nn.Module):
    """A user's model: functions, methods, shortcuts, writing in place, reshapes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, stride=2, padding="valid", dilation=1, bias=False)
        self.second = nn.Conv2d(6, 6, 3, padding="same", groups=3)
        self.norm = nn.LayerNorm([6, 5, 5])
        self.act = nn.SiLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(6 * 4, 8)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.act(self.norm(self.first(x)))
        y = self.second(x)
        y += x
        y = functional.max_pool2d(functional.relu(y), 3, stride=1, padding=1)
        y = functional.avg_pool2d(torch.add(y, x), 2)
        y = self.drop(y).contiguous().view(y.size(0), -1)
        y = torch.sigmoid(self.last(y))
        return self.out(torch.flatten(y, 1).tanh())


class Odd(nn.Module):
    """Convolutions of unlike strides, paddings and dilations, with no norm to even them out."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.ELU(),
            nn.Conv2d(3, 8, (3, 5), stride=(2, 1), padding=(1, 3)),
            nn.Softplus(beta=2.0),
            nn.Conv2d(8, 12, 3, dilation=2, padding=1),
            nn.GELU(approximate="tanh"),
            nn.Conv2d(12, 40, 1, stride=2),
            nn.Hardtanh(-0.2, 0.2),
            nn.Conv2d(40, 40, 3, padding=3),
            nn.GroupNorm(4, 40, affine=False),
            nn.LeakyReLU(-0.1),
            nn.AdaptiveAvgPool2d(2),
            nn.BatchNorm2d(40, affine=False),
        )
        self.norm = nn.GroupNorm(5, 40)
        self.out = nn.Linear(40, CLASSES)

    def forward(self, x):
        return self.out(self.norm(self.body(x).mean((2, 3))))


def _task(name, dtype=torch.float64, **more):
    torch.manual_seed(0)
    if name in BUILT_IN:
        build, shape, options = BUILT_IN[name]
        generator = torch.Generator().manual_seed(0)
        model = build(input_shape=shape, classes=CLASSES, generator=generator, **options)
    else:
        model, shape = {"residual": Residual, "odd": Odd}[name]().eval(), (3, 12, 12)
    _shake(model)
    return Task.of(model, **more).to("cpu", dtype), shape


def _shake(model):
    """Norms away from the identity."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm):
                for name in ("weight", "bias", "running_mean", "running_var"):
                    own = getattr(module, name, None)
                    if own is not None:
                        own.copy_(own + 0.3 * torch.rand_like(own))


def _engine(task, shape):
    plan = single.plan(task, (1, *shape))
    assert plan is not None
    return single.Single(task, plan)


LONG = ("convnet64-group", "convnet64-none", "conv-1")
ALL = [
    *(pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in BUILT_IN),
    *("residual", "odd"),
]


@pytest.mark.parametrize("name", ALL)
def test_it_is_autograds_double_backward(judge, name):
    task, shape = _task(name)
    engine = _engine(task, shape)
    for size, soft in ((1, False), (3, True), (3, False), (1, True)):
        given = judge.example(task, shape, size, soft)
        judge.agree(engine, task, given)


@pytest.mark.parametrize("name", ALL)
def test_float32_is_as_exact_as_autograd(judge, name):
    task, shape = _task(name, torch.float32)
    exact = task.to("cpu", torch.float64)
    engine = _engine(task, shape)
    for size, soft in ((1, False), (3, True)):
        given = judge.example(task, shape, size, soft)
        wide = [t.double() if t.is_floating_point() else t for t in given]
        truths = judge.autograd(exact, *wide)
        plain, mine = judge.autograd(task, *given), judge.mine(engine, *given)
        judge.as_exact(mine, truths, plain)


@pytest.mark.parametrize("name", ["simple_convnet", "residual"])
@pytest.mark.parametrize("soft", [False, True], ids=["classes", "soft"])
def test_another_loss(judge, name, soft):
    task, shape = _task(name, loss=judge.smooth_loss)
    engine, given = _engine(task, shape), judge.example(task, shape, 3, soft)
    judge.agree(engine, task, given)


@pytest.mark.parametrize("name", ["simple_convnet", "resnet18-batch"])
def test_a_pruned_task(judge, name):
    task, shape = _task(name)
    kept = torch.rand(len(task.parameters), generator=torch.Generator().manual_seed(2)) < 0.4
    task = task.pruned(kept)
    engine, given = _engine(task, shape), judge.example(task, shape, 3, False)
    assert not judge.mine(engine, *given)[0][~kept].any()
    judge.agree(engine, task, given)


def test_other_weights_share_the_plan(judge):
    task, shape = _task("residual")
    other = task.with_parameters(task.parameters + 0.1)
    assert single.plan(task, (1, *shape)) is single.plan(other, (4, *shape))
    engine, given = _engine(other, shape), judge.example(other, shape, 2, False)
    judge.agree(engine, other, given)


def test_two_engines_and_calls_in_any_order(judge):
    task, shape = _task("resnet18-batch")
    engine, second = _engine(task, shape), _engine(task, shape)
    one, two = (judge.example(task, shape, 2, False, seed) for seed in (1, 2))
    kept = task.parameters.clone()
    wanted_one, wanted_two = (judge.autograd(task, *given) for given in (one, two))
    engine.gradient(one[0][None], one[1][None])
    second.gradient(two[0][None], two[1][None])
    engine.gradient(two[0][None], two[1][None])
    engine.gradient(one[0][None], one[1][None])
    first = engine.pull(one[2][None]).inputs
    engine.pull(two[2][None])
    assert judge.error(first[0], wanted_one[1]) < 1e-10
    assert judge.error(second.pull(two[2][None]).inputs[0], wanted_two[1]) < 1e-10
    assert torch.equal(engine.pull(one[2][None]).inputs, first)
    assert torch.equal(task.parameters, kept)


def test_a_pull_is_the_callers(judge):
    model = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, CLASSES))
    task, shape = Task.of(model), (1, 4, 4)
    engine, (inputs, labels, cotangent) = _engine(task, shape), judge.example(task, shape, 2, False)
    engine.gradient(inputs[None], labels[None])
    first = engine.pull(cotangent[None]).inputs
    kept = first.clone()
    engine.gradient(-inputs[None], labels[None])
    engine.pull(2 * cotangent[None])
    assert torch.equal(first, kept)


def test_a_gradient_is_not_traced(judge):
    task, shape = _task("mlp")
    inputs, labels, cotangent = judge.example(task, shape, 2, True)
    engine = _engine(task, shape)
    gradient = engine.gradient(inputs[None].requires_grad_(), labels[None].requires_grad_())
    pulled = engine.pull(cotangent[None])
    assert not any(t.requires_grad for t in (gradient, pulled.inputs, pulled.labels))


def test_a_pull_needs_a_gradient():
    task, shape = _task("mlp")
    with pytest.raises(ValueError, match="before gradient"):
        _engine(task, shape).pull(task.parameters[None])


@pytest.mark.parametrize("soft", [False, True], ids=["classes", "soft"])
@pytest.mark.parametrize("name", ["simple_convnet", "resnet18-group", "odd"])
def test_nothing_waits_for_the_device(judge, name, soft):
    task, shape = _task(name, torch.float32)
    engine, given = _engine(task, shape), judge.example(task, shape, 2, soft)
    with judge.NoSync():
        engine.gradient(given[0][None], given[1][None])
        engine.pull(given[2][None])


COUNTED = {
    "simple_convnet": (models.simple_convnet, (1, 28, 28), {}),
    "convnet64": (models.convnet64, (3, 32, 32), {}),
    "resnet18": (models.resnet18, (3, 32, 32), {"norm": "batch"}),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_step_is_seven_forwards(judge, name):
    build, shape, options = COUNTED[name]
    size = 2
    model = build(input_shape=shape, classes=10, generator=torch.Generator(), **options)
    task = Task.of(model)
    engine = single.Single(task, single.layers_of(task, shape))
    inputs, labels = torch.rand(1, size, *shape), torch.zeros(1, size, dtype=torch.long)
    with torch.no_grad():
        forward = judge.products(lambda: client.forward(task, inputs[0]))
    step = judge.products(lambda: engine.pull(engine.gradient(inputs, labels)))
    assert 6.5 * forward < step <= 7.0 * forward


def test_a_wrong_rule_is_found_out(monkeypatch):
    from leakbound.engines import rules

    task, shape = _task("mlp")
    monkeypatch.setattr(rules.ActivationRule, "moved", rules.ActivationRule.backward)
    assert single.plan(replace(task), (1, *shape)) is None
