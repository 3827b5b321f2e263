"""Bundles against autograd's double backward, and against themselves in other company."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from leakbound import client, models
from leakbound.core import Task
from leakbound.engines import bundle, choose
from leakbound.engines.base import aligned
from leakbound.engines.rules import Given

CLASSES = 7
ACTIVATIONS = {
    "relu": nn.ReLU,
    "leaky": lambda: nn.LeakyReLU(0.1),
    "hard": lambda: nn.Hardtanh(-0.3, 0.3),
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "gelu-tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "softplus": lambda: nn.Softplus(2.0),
    "elu": nn.ELU,
}
BUILT_IN = {
    "simple_convnet": (models.simple_convnet, (1, 12, 12), {}),
    "lenet": (models.lenet, (3, 16, 16), {}),
    "lenet-28": (models.lenet, (1, 28, 28), {}),
    "mlp": (models.mlp, (1, 9, 9), {"activation": "tanh"}),
    "conv": (models.conv, (1, 8, 8), {"width": 0.25, "hidden": 32}),
    "vgg": (models.vgg, (3, 16, 16), {"depth": 6, "width": 0.05}),
    "two_layer": (models.two_layer, (1, 4, 4), {"width": 33, "activation": "gelu"}),
}
# Sides, channels and units that are multiples of nothing.
OWN = {
    "strides": (
        (3, 5, 7),
        lambda: [nn.Conv2d(3, 5, 3, stride=(2, 1), padding=1, bias=False), nn.Tanh()],
    ),
    "average": ((3, 11, 13), lambda: [nn.Conv2d(3, 5, 3, padding=1), nn.AvgPool2d((2, 3))]),
    "pool3": ((3, 11, 13), lambda: [nn.Conv2d(3, 5, 3), nn.MaxPool2d(3), nn.ReLU()]),
    "pool2": ((1, 7, 5), lambda: [nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(1, 3, 2, bias=False)]),
    "monotone": ((3, 7, 9), lambda: [nn.Conv2d(3, 4, 3), nn.LeakyReLU(0.1), nn.MaxPool2d(2)]),
    "rising": ((3, 7, 9), lambda: [nn.Conv2d(3, 4, 3), nn.LeakyReLU(-0.1), nn.MaxPool2d(2)]),
    "bent": ((3, 7, 9), lambda: [nn.Conv2d(3, 4, 3), nn.Sigmoid(), nn.MaxPool2d((1, 2))]),
    "wide": ((2, 6, 5), lambda: [nn.Conv2d(2, 3, 5, padding=2), nn.Identity(), nn.SiLU()]),
    "column": ((3, 5, 7), lambda: [nn.Conv2d(3, 5, (5, 7)), nn.Conv2d(5, 19, 1), nn.ReLU()]),
    "one_place": ((3, 9, 9), lambda: [nn.Conv2d(3, 35, 9), nn.Tanh(), nn.Conv2d(35, 64, 1)]),
    "flat": ((33,), lambda: [nn.Linear(33, 19, bias=False), nn.ELU(), nn.Linear(19, 9), nn.ReLU()]),
    "odd": ((3,), lambda: [nn.Linear(3, 33), nn.ReLU(), nn.Linear(33, 33), nn.ReLU()]),
    "one-unit": ((33,), lambda: [nn.Linear(33, 1), nn.Tanh(), nn.Linear(1, 99), nn.Tanh()]),
}
CURVES = [f"{kind}-{name}" for kind in ("conv", "linear") for name in ACTIVATIONS]
ALL = [*BUILT_IN, *OWN, *CURVES]


def _curve(kind, activation):
    if kind == "linear":
        return (3, 5, 7), [nn.Flatten(), nn.Linear(105, 9), activation()]
    first, second = nn.Conv2d(3, 5, 3, stride=(2, 1), padding=1), nn.Conv2d(5, 3, 3, padding=1)
    return (3, 5, 7), [first, activation(), second, activation()]


def _task(name, dtype=torch.float64):
    torch.manual_seed(0)
    if name in BUILT_IN:
        build, shape, options = BUILT_IN[name]
        generator = torch.Generator().manual_seed(0)
        model = build(input_shape=shape, classes=CLASSES, generator=generator, **options)
    else:
        if name in OWN:
            shape, layers = OWN[name][0], OWN[name][1]()
        else:
            kind, _, activation = name.partition("-")
            shape, layers = _curve(kind, ACTIVATIONS[activation])
        body = nn.Sequential(*layers, nn.Flatten())
        features = body(torch.zeros(1, *shape)).shape[1]
        model = nn.Sequential(body, nn.Linear(features, CLASSES))
    return Task.of(model).to("cpu", dtype), shape


def _cells(task, shape, number, size, soft, seed=1):
    """Weights, inputs, labels and cotangents of cells: nothing is shared."""
    source, dtype = torch.Generator().manual_seed(seed), task.parameters.dtype

    def normal(*own):
        return torch.randn(*own, generator=source, dtype=torch.float64)

    length = len(task.parameters)
    weights = task.parameters + 0.05 * normal(number, length)
    if soft:
        labels = torch.rand(number, size, CLASSES, generator=source, dtype=torch.float64).to(dtype)
    else:
        labels = torch.randint(CLASSES, (number, size), generator=source)
    given = normal(number, size, *shape).to(dtype), labels
    return _rows(weights.to(dtype)), *given, _rows(normal(number, length).to(dtype))


def _rows(rows):
    return aligned(len(rows), rows).copy_(rows)


def _bundled(found, weights, inputs, labels, cotangents, kept=None):
    engine = bundle.Bundle(found, weights, kept)
    gradient = engine.gradient(inputs, labels).clone()
    pulled = engine.pull(cotangents)
    assert (pulled.labels is None) == (not labels.is_floating_point())
    return [gradient, *(part for part in pulled if part is not None)]


def _autograd(task, weights, inputs, labels, cotangents):
    parts = []
    for own, x, y, v in zip(weights, inputs, labels, cotangents, strict=True):
        variables = [x.clone().requires_grad_()]
        if y.is_floating_point():
            variables.append(y.clone().requires_grad_())
        cell = task.with_parameters(own)
        gradient = client.gradient(cell, variables[0], variables[1] if variables[1:] else y)
        parts.append([gradient.detach(), *torch.autograd.grad(gradient, variables, v)])
    return [torch.stack(part) for part in zip(*parts, strict=True)]


def _errors(found, wanted):
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    rows = (found - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
    return float(rows.max())


def _chain(task, shape):
    found = bundle.chain(task, shape)
    assert found is not None
    return found


@pytest.mark.parametrize("name", ALL)
def test_every_cell_is_autograds_double_backward(name):
    task, shape = _task(name)
    for size, soft in ((1, False), (3, True)):
        given = _cells(task, shape, 3, size, soft)
        parts = zip(_bundled(_chain(task, shape), *given), _autograd(task, *given), strict=True)
        for found, wanted in parts:
            assert _errors(found, wanted) < 1e-10


@pytest.mark.parametrize("name", ALL)
def test_float32_is_as_exact_as_autograd(name):
    task, shape = _task(name, torch.float32)
    exact = task.to("cpu", torch.float64)
    for size, soft in ((1, False), (3, True)):
        given = _cells(task, shape, 2, size, soft)
        wide = [t.double() if t.is_floating_point() else t for t in given]
        truths, plain = _autograd(exact, *wide), _autograd(task, *given)
        mine = _bundled(_chain(task, shape), *given)
        for at, (found, other, truth) in enumerate(zip(mine, plain, truths, strict=True)):
            floor = 1e-6 if at == 0 else 1e-5
            assert _errors(found.double(), truth) < max(floor, 5 * _errors(other.double(), truth))


COMPANIES = ([1, 0], [4, 2, 3], [7, 6, 5, 4, 3], list(range(8)))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in ALL), *((name, torch.float64) for name in BUILT_IN)],
)
def test_a_cell_has_the_same_bits_in_any_company(name, dtype):
    task, shape = _task(name, dtype)
    found = _chain(task, shape)
    for size, soft in ((1, False), (2, True), (3, False)):
        given = _cells(task, shape, 8, size, soft)
        alone = [_some(found, given, [i]) for i in range(8)]
        for company in COMPANIES:
            together = _some(found, given, company)
            for (place, i), part in itertools.product(enumerate(company), range(len(together))):
                assert torch.equal(together[part][place], alone[i][part][0]), (size, company, part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("name", ["odd", "lenet", "strides", "mlp"])
def test_pruned_cells_have_the_same_bits_in_any_company(name, dtype):
    task, shape = _task(name, dtype)
    found = _chain(task, shape)
    source = torch.Generator().manual_seed(3)
    kept = torch.rand(8, len(task.parameters), generator=source) < 0.7
    for seed in range(4):
        given = _cells(task, shape, 8, 1 + seed % 2, False, seed)
        alone = [_some(found, given, [i], kept) for i in range(8)]
        for company in COMPANIES:
            together = _some(found, given, company, kept)
            for (place, i), part in itertools.product(enumerate(company), range(len(together))):
                assert torch.equal(together[part][place], alone[i][part][0]), (company, part)


def _some(found, given, cells, kept=None):
    weights, inputs, labels, cotangents = (t[cells] for t in given)
    kept = None if kept is None else kept[cells]
    return _bundled(found, _rows(weights), inputs, labels, _rows(cotangents), kept)


def test_an_engine_forgets_what_it_saw():
    task, shape = _task("lenet")
    first, second = (_cells(task, shape, 2, 2, False, seed) for seed in (1, 2))
    engine = bundle.Bundle(_chain(task, shape), first[0])
    engine.gradient(*second[1:3])
    engine.pull(second[3])
    again = engine.gradient(*first[1:3]).clone(), engine.pull(first[3]).inputs
    for mine, wanted in zip(again, _bundled(_chain(task, shape), *first), strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("name", ["simple_convnet", "strides"])
def test_weights_that_a_cell_does_not_have(name):
    """Some cells are pruned, each in its own way, and some are not."""
    task, shape = _task(name)
    weights, inputs, labels, cotangents = _cells(task, shape, 4, 2, False)
    source, length = torch.Generator().manual_seed(2), len(task.parameters)
    kept = [None, *(torch.rand(length, generator=source) < 0.4 for _ in range(3))]
    tasks = [task.with_parameters(w).pruned(k) for w, k in zip(weights, kept, strict=True)]
    engine = choose.Choice(_chain(task, shape), None).engine(tasks, 1)
    gradient = engine.gradient(inputs, labels).clone()
    pulled = engine.pull(cotangents)
    for i, own in enumerate(tasks):
        x = inputs[i].clone().requires_grad_()
        wanted = client.gradient(own, x, labels[i])
        (slope,) = torch.autograd.grad(wanted, x, cotangents[i])
        assert _errors(gradient[i : i + 1], wanted.detach()[None]) < 1e-10
        assert _errors(pulled.inputs[i : i + 1], slope[None]) < 1e-10
        assert kept[i] is None or not gradient[i, ~kept[i]].any()


def test_an_engine_of_several_rows_a_task():
    task, shape = _task("mlp")
    weights, inputs, labels, cotangents = _cells(task, shape, 6, 1, False)
    tasks = [task.with_parameters(own) for own in weights[:2]]
    chosen = choose.choose(task, 3, (1, *shape))
    assert chosen is not None
    assert chosen.chain is not None
    engine = chosen.engine(tasks, 3)
    assert engine.num_searches == 6
    found = engine.gradient(inputs, labels).clone(), engine.pull(cotangents).inputs
    repeated = weights[:2].repeat_interleave(3, 0)
    wanted = _autograd(task, repeated, inputs, labels, cotangents)
    assert max(map(_errors, found, wanted)) < 1e-10


class _Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.body(x)


def _images(*layers, features=16):
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 3))


def _tied():
    one = nn.Linear(16, 16)
    return nn.Sequential(nn.Flatten(), one, nn.ReLU(), one, nn.Linear(16, 3))


def _hooked(register):
    model = _images()
    getattr(model[1], register)(lambda *_: None)
    return model


REFUSED = {
    "group norm": lambda: _images(nn.Conv2d(1, 4, 1), nn.GroupNorm(2, 4), features=64),
    "batch norm": lambda: _images(nn.BatchNorm2d(1)).eval(),
    "dilation": lambda: _images(nn.Conv2d(1, 1, 2, dilation=2), features=4),
    "groups": lambda: _images(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1, groups=2), features=32),
    "reflection": lambda: _images(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")),
    "transposed": lambda: _images(nn.ConvTranspose2d(1, 1, 1)),
    "residual": lambda: nn.Sequential(nn.Flatten(), _Doubled(), nn.Linear(16, 3)),
    "tied": _tied,
    "hook": lambda: _hooked("register_forward_hook"),
    "hook before": lambda: _hooked("register_forward_pre_hook"),
    "hook back": lambda: _hooked("register_full_backward_hook"),
    "parametrized": lambda: nn.Sequential(
        nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(16, 3))
    ),
    "overlapping max": lambda: _images(nn.MaxPool2d(2, stride=1), features=9),
    "overlapping mean": lambda: _images(nn.AvgPool2d(2, stride=1), features=9),
    "padded max": lambda: _images(nn.MaxPool2d(2, padding=1), features=9),
    "ceiling": lambda: _images(nn.MaxPool2d(3, ceil_mode=True), features=4),
    "divisor": lambda: _images(nn.AvgPool2d(2, divisor_override=1), features=4),
    "adaptive": lambda: _images(nn.AdaptiveAvgPool2d(2), features=4),
    "part of a flatten": lambda: nn.Sequential(nn.Flatten(2), nn.Flatten(), nn.Linear(16, 3)),
    "linear on images": lambda: nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(16, 3)),
    "prelu": lambda: _images(nn.PReLU()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_chain(name):
    assert bundle.chain(Task.of(REFUSED[name]()), (1, 4, 4)) is None


def test_another_loss_is_no_chain():
    model = _images()
    assert bundle.chain(Task.of(model), (1, 4, 4)) is not None
    other = Task.of(model, loss=lambda outputs, labels: functional.cross_entropy(outputs, labels))
    assert bundle.chain(other, (1, 4, 4)) is None


@pytest.mark.parametrize("shape", [(4, 4), (1, 1, 4, 4)], ids=["without channels", "volumes"])
def test_inputs_that_are_neither_images_nor_features(shape):
    assert bundle.chain(Task.of(_images()), shape) is None


def test_chains_of_one_name_differ_in_weights_alone():
    names = {name: _chain(*_task(name)).name for name in ALL}
    assert len(set(names.values())) == len(ALL)
    task, shape = _task("lenet")
    again = Task.of(copy.deepcopy(task.model).requires_grad_(True))
    assert _chain(again, shape).name == names["lenet"]


@pytest.mark.parametrize("kernel", [(2, 2), (3, 3), (1, 2), (3, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("values", ["constant", "zeros", "few", "rectified", "normal", "signs"])
def test_ties_go_to_the_entry_that_torch_takes(values, kernel):
    source = torch.Generator().manual_seed(0)
    shape = (2, 3, 2, 7, 11)
    images = {
        "constant": torch.full(shape, 0.3),
        "zeros": torch.zeros(shape),
        "few": torch.randint(3, shape, generator=source).float(),
        "rectified": torch.randn(shape, generator=source).relu(),
        "normal": torch.randn(shape, generator=source),
        "signs": torch.randint(2, shape, generator=source) * 0.0 * -1.0,
    }[values]
    given = Given((), (), (), moving=True, curved=False)
    pool = bundle.BundledMaxPool(given, kernel)
    found = pool.forward(images)
    wanted, where = functional.max_pool2d(
        images.flatten(0, 2)[:, None], kernel, return_indices=True
    )
    assert torch.equal(found.flatten(), wanted.flatten())
    assert torch.equal(pool.where.flatten(), where.flatten())


@pytest.mark.parametrize(
    ("name", "value"),
    [("pool3", 0.0), ("pool2", 0.0), ("pool2", 0.5), ("monotone", 0.0), ("rising", 0.0)],
    ids=str,
)
def test_constant_images_are_autograds(name, value):
    """After a convolution equal sums are equal to rounding alone, except of zeros."""
    task, shape = _task(name)
    weights, inputs, labels, cotangents = _cells(task, shape, 2, 2, False)
    given = weights, torch.full_like(inputs, value), labels, cotangents
    for found, wanted in zip(
        _bundled(_chain(task, shape), *given), _autograd(task, *given), strict=True
    ):
        assert float((found - wanted).norm()) <= 1e-10 * max(1.0, float(wanted.norm()))


def test_nothing_is_traced():
    task, shape = _task("strides")
    weights, inputs, labels, cotangents = _cells(task, shape, 2, 2, True)
    engine = bundle.Bundle(_chain(task, shape), weights)
    gradient = engine.gradient(inputs.requires_grad_(), labels.requires_grad_())
    pulled = engine.pull(cotangents.requires_grad_())
    assert not any(t.requires_grad for t in (gradient, pulled.inputs, pulled.labels))


def test_a_module_that_does_something_else_is_no_chain():
    plain = nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3))
    assert bundle.chain(Task.of(plain), (3, 2, 2)) is not None
    hooked = Task.of(plain)
    hooked.model[1].register_full_backward_pre_hook(lambda module, grads: None)
    assert bundle.chain(hooked, (3, 2, 2)) is None
    changed = Task.of(plain)
    changed.model[1].forward = lambda x: 3 * nn.functional.linear(x, plain[1].weight)
    assert bundle.chain(changed, (3, 2, 2)) is None
