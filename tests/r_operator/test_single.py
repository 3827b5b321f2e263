from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from leakbound import client, models
from leakbound.r_operator import single
from leakbound.types import Task

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


def _example(task, shape, size, soft, seed=1):
    source = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, *shape, generator=source, dtype=torch.float64)
    labels = torch.randint(CLASSES, (size,), generator=source)
    if soft:
        labels = torch.rand(size, CLASSES, generator=source, dtype=torch.float64)
        labels = labels.to(task.parameters.dtype)
    cotangent = torch.randn(len(task.parameters), generator=source, dtype=torch.float64)
    return inputs.to(task.parameters.dtype), labels, cotangent.to(task.parameters.dtype)


def _autograd(task, inputs, labels, cotangent):
    variables = [inputs.clone().requires_grad_()]
    if labels.is_floating_point():
        variables.append(labels.clone().requires_grad_())
    gradient = client.gradient(task, variables[0], variables[1] if variables[1:] else labels)
    return [gradient.detach(), *torch.autograd.grad(gradient, variables, cotangent)]


def _mine(engine, inputs, labels, cotangent):
    gradient = engine.gradient(inputs[None], labels[None])[0].clone()
    pulled = engine.pull(cotangent[None])
    assert (pulled.labels is None) == (not labels.is_floating_point())
    return [gradient, *(part[0] for part in pulled if part is not None)]


def _error(found, wanted):
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    return float((found - wanted).norm() / wanted.norm())


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
def test_it_is_autograds_double_backward(name):
    task, shape = _task(name)
    engine = _engine(task, shape)
    for size, soft in ((1, False), (3, True), (3, False), (1, True)):
        given = _example(task, shape, size, soft)
        for found, wanted in zip(_mine(engine, *given), _autograd(task, *given), strict=True):
            assert _error(found, wanted) < 1e-10


@pytest.mark.parametrize("name", ALL)
def test_float32_is_as_exact_as_autograd(name):
    task, shape = _task(name, torch.float32)
    exact = task.to("cpu", torch.float64)
    engine = _engine(task, shape)
    for size, soft in ((1, False), (3, True)):
        given = _example(task, shape, size, soft)
        wide = [t.double() if t.is_floating_point() else t for t in given]
        truths = _autograd(exact, *wide)
        plain, mine = _autograd(task, *given), _mine(engine, *given)
        for at, (found, other, truth) in enumerate(zip(mine, plain, truths, strict=True)):
            floor = 1e-6 if at == 0 else 1e-5
            assert _error(found.double(), truth) < max(floor, 5 * _error(other.double(), truth))


def _smooth_loss(outputs, labels):
    target = functional.one_hot(labels, CLASSES) if labels.ndim == 1 else labels
    return (torch.tanh(outputs) - target).pow(4).mean()


@pytest.mark.parametrize("name", ["simple_convnet", "residual"])
@pytest.mark.parametrize("soft", [False, True], ids=["classes", "soft"])
def test_another_loss(name, soft):
    task, shape = _task(name, loss=_smooth_loss)
    engine, given = _engine(task, shape), _example(task, shape, 3, soft)
    for found, wanted in zip(_mine(engine, *given), _autograd(task, *given), strict=True):
        assert _error(found, wanted) < 1e-10


@pytest.mark.parametrize("name", ["simple_convnet", "resnet18-batch"])
def test_a_pruned_task(name):
    task, shape = _task(name)
    kept = torch.rand(len(task.parameters), generator=torch.Generator().manual_seed(2)) < 0.4
    task = task.pruned(kept)
    engine, given = _engine(task, shape), _example(task, shape, 3, False)
    found = _mine(engine, *given)
    assert not found[0][~kept].any()
    for mine, wanted in zip(found, _autograd(task, *given), strict=True):
        assert _error(mine, wanted) < 1e-10


def test_other_weights_share_the_plan():
    task, shape = _task("residual")
    other = task.with_parameters(task.parameters + 0.1)
    assert single.plan(task, (1, *shape)) is single.plan(other, (4, *shape))
    engine, given = _engine(other, shape), _example(other, shape, 2, False)
    for found, wanted in zip(_mine(engine, *given), _autograd(other, *given), strict=True):
        assert _error(found, wanted) < 1e-10


def test_two_engines_and_calls_in_any_order():
    task, shape = _task("resnet18-batch")
    engine, second = _engine(task, shape), _engine(task, shape)
    one, two = (_example(task, shape, 2, False, seed) for seed in (1, 2))
    kept = task.parameters.clone()
    wanted_one, wanted_two = (_autograd(task, *given) for given in (one, two))
    engine.gradient(one[0][None], one[1][None])
    second.gradient(two[0][None], two[1][None])
    engine.gradient(two[0][None], two[1][None])
    engine.gradient(one[0][None], one[1][None])
    first = engine.pull(one[2][None]).inputs
    engine.pull(two[2][None])
    assert _error(first[0], wanted_one[1]) < 1e-10
    assert _error(second.pull(two[2][None]).inputs[0], wanted_two[1]) < 1e-10
    assert torch.equal(engine.pull(one[2][None]).inputs, first)
    assert torch.equal(task.parameters, kept)


def test_a_pull_is_the_callers():
    model = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, CLASSES))
    task, shape = Task.of(model), (1, 4, 4)
    engine, (inputs, labels, cotangent) = _engine(task, shape), _example(task, shape, 2, False)
    engine.gradient(inputs[None], labels[None])
    first = engine.pull(cotangent[None]).inputs
    kept = first.clone()
    engine.gradient(-inputs[None], labels[None])
    engine.pull(2 * cotangent[None])
    assert torch.equal(first, kept)


def test_a_gradient_is_not_traced():
    task, shape = _task("mlp")
    inputs, labels, cotangent = _example(task, shape, 2, True)
    engine = _engine(task, shape)
    gradient = engine.gradient(inputs[None].requires_grad_(), labels[None].requires_grad_())
    pulled = engine.pull(cotangent[None])
    assert not any(t.requires_grad for t in (gradient, pulled.inputs, pulled.labels))


def test_a_pull_needs_a_gradient():
    task, shape = _task("mlp")
    with pytest.raises(ValueError, match="before gradient"):
        _engine(task, shape).pull(task.parameters[None])


class _NoSync(TorchDispatchMode):
    refused = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in self.refused
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("soft", [False, True], ids=["classes", "soft"])
@pytest.mark.parametrize("name", ["simple_convnet", "resnet18-group", "odd"])
def test_nothing_waits_for_the_device(name, soft):
    task, shape = _task(name, torch.float32)
    engine, given = _engine(task, shape), _example(task, shape, 2, soft)
    with _NoSync():
        engine.gradient(given[0][None], given[1][None])
        engine.pull(given[2][None])


def _products(call):
    # PyTorch's own count knows no packed convolution
    counter = FlopCounterMode(display=False, custom_mapping=_packed())
    with counter:
        call()
    return counter.get_total_flops()


def _packed():
    if not hasattr(torch.ops.mkldnn, "_convolution_pointwise"):
        return {}

    def count(x, weight, *_, out_shape, **__):
        return 2 * weight[1] * weight[2] * weight[3] * torch.Size(out_shape).numel()

    return {torch.ops.mkldnn._convolution_pointwise: count}


COUNTED = {
    "simple_convnet": (models.simple_convnet, (1, 28, 28), {}),
    "convnet64": (models.convnet64, (3, 32, 32), {}),
    "resnet18": (models.resnet18, (3, 32, 32), {"norm": "batch"}),
}


@pytest.mark.parametrize("size", [1, 2], ids=["one", "two"])
@pytest.mark.parametrize("name", COUNTED)
def test_a_step_is_seven_forwards(name, size):
    build, shape, options = COUNTED[name]
    model = build(input_shape=shape, classes=10, generator=torch.Generator(), **options)
    task = Task.of(model)
    engine = single.Single(task, single.Plan(single.steps_of(task, shape)))
    inputs, labels = torch.rand(1, size, *shape), torch.zeros(1, size, dtype=torch.long)
    with torch.no_grad():
        forward = _products(lambda: client.forward(task, inputs[0]))
    step = _products(lambda: engine.pull(engine.gradient(inputs, labels)))
    assert 6.5 * forward < step <= 7.0 * forward


def test_a_wrong_rule_is_found_out(monkeypatch):
    from leakbound.r_operator import rules

    task, shape = _task("mlp")
    monkeypatch.setattr(rules.Elementwise, "moved", rules.Elementwise.backward)
    assert single.plan(replace(task), (1, *shape)) is None
