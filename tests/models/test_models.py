"""The models: sizes, weights from the generator alone, and derivatives of every kind."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.func import functional_call, grad, jvp, vjp, vmap

from leakbound import models
from leakbound.client import example_gradients, gradient, input_jvp, pure_gradient
from leakbound.core import Task
from leakbound.models.custom import load_user_model, load_weights

CASES = [
    ("mlp", {"hidden": [12, 6]}),
    ("mlp", {"hidden": (), "activation": "tanh"}),
    ("lenet", {}),
    ("simple_convnet", {}),
    ("convnet64", {}),
    ("convnet64", {"norm": "group", "activation": "gelu"}),
    ("convnet64", {"norm": "none"}),
    ("resnet18", {"width": 8}),
    ("two_layer", {"width": 16}),
    ("headed", {"width": 16, "features": 4}),
    ("resnet18", {"width": 8, "norm": "batch"}),
]
DERIVED = [case for case in CASES if case[0] != "convnet64" or "activation" in case[1]]
SMOOTH = [
    ("mlp", {"activation": "gelu"}),
    ("lenet", {}),
    ("resnet18", {"width": 4, "activation": "tanh"}),
    ("resnet18", {"width": 4, "activation": "gelu", "norm": "batch"}),
]


def _stream(seed=0):
    return torch.Generator().manual_seed(seed)


def _build(name, shape=(2, 9, 9), classes=4, seed=0, **kwargs):
    build = getattr(models, name)
    return build(input_shape=shape, classes=classes, generator=_stream(seed), **kwargs)


def _count(model):
    return sum(p.numel() for p in model.parameters())


def _problem(name, kwargs, size=2):
    task = Task.of(_build(name, **kwargs)).to("cpu", torch.float64)
    inputs = torch.rand(size, 2, 9, 9, generator=_stream(1), dtype=torch.float64)
    return task, inputs, torch.arange(size) % 4


@pytest.mark.parametrize(
    ("name", "kwargs", "shape", "classes", "count"),
    [
        ("mlp", {}, (1, 28, 28), 10, 785 * 128 + 129 * 10),
        ("lenet", {}, (3, 32, 32), 100, 912 + 2 * 3612 + 76900),
        ("simple_convnet", {}, (1, 28, 28), 10, 119_530),
        ("convnet64", {}, (3, 32, 32), 10, 2_904_970),
        ("convnet64", {"norm": "group"}, (3, 32, 32), 10, 2_904_970),
        ("convnet64", {"norm": "none"}, (3, 32, 32), 10, 2_901_770),
        ("resnet18", {}, (3, 32, 32), 10, 11_173_962),
        ("resnet18", {"stem": "large", "norm": "batch"}, (3, 64, 64), 1000, 11_689_512),
    ],
)
def test_parameter_count_and_output(name, kwargs, shape, classes, count):
    model = _build(name, shape, classes, **kwargs)
    assert _count(model) == count
    with torch.no_grad():
        assert model(torch.zeros(2, *shape)).shape == (2, classes)


@pytest.mark.parametrize(("name", "kwargs"), CASES)
def test_weights_come_from_the_generator_alone(name, kwargs):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = _build(name, **kwargs).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    second = _build(name, **kwargs).state_dict()
    other = _build(name, seed=1, **kwargs).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    assert all(torch.isfinite(value).all() for value in first.values())


@pytest.mark.parametrize(("name", "kwargs"), CASES)
def test_eval_mode_and_no_hidden_state(name, kwargs):
    model = _build(name, **kwargs)
    inputs = torch.rand(2, 2, 9, 9, generator=_stream())
    copy, state = inputs.clone(), {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        assert torch.equal(model(inputs), model(inputs))
    assert torch.equal(copy, inputs)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())
    assert not any(getattr(module, "inplace", False) for module in model.modules())


def test_initial_law():
    linear = _build("mlp", (1, 20, 20), hidden=())[1]
    for parameter in linear.parameters():
        assert parameter.abs().max() <= 1 / 20
    assert linear.weight.detach().std() == pytest.approx(1 / 20 / math.sqrt(3), rel=0.05)
    for parameter in _build("lenet", (3, 32, 32), 100).parameters():
        assert parameter.abs().max() <= 0.5
        assert parameter.abs().max() > 0.3
    for module in _build("resnet18", width=8, norm="batch").modules():
        if isinstance(module, nn.BatchNorm2d):
            assert torch.equal(module.running_var, torch.ones_like(module.weight))
            assert torch.equal(module.weight, torch.ones_like(module.weight))


@pytest.mark.parametrize(("name", "kwargs"), DERIVED)
def test_example_gradients_are_the_loop(name, kwargs):
    task, inputs, labels = _problem(name, kwargs)
    rows = example_gradients(task, inputs, labels)
    for row, image, label in zip(rows, inputs, labels, strict=True):
        torch.testing.assert_close(row, gradient(task, image[None], label[None]))


@pytest.mark.parametrize(("name", "kwargs"), DERIVED)
def test_forward_and_reverse_derivatives_of_the_gradient_agree(name, kwargs):
    task, inputs, labels = _problem(name, kwargs)
    tangent = torch.randn(inputs.shape, generator=_stream(2), dtype=torch.float64)
    cotangent = torch.randn(len(task.parameters), generator=_stream(3), dtype=torch.float64)
    forward = input_jvp(task, inputs, labels, tangent) @ cotangent
    reverse = (
        vjp(lambda x: pure_gradient(task, x, labels), inputs)[1](cotangent)[0] * tangent
    ).sum()
    leaf = inputs.clone().requires_grad_()
    value = gradient(task, leaf, labels) @ cotangent
    double = (torch.autograd.grad(value, leaf)[0] * tangent).sum()
    torch.testing.assert_close(forward, reverse)
    torch.testing.assert_close(double, reverse)
    assert reverse != 0


@pytest.mark.parametrize(("name", "kwargs"), SMOOTH)
def test_derivatives_against_finite_differences(name, kwargs):
    task, inputs, labels = _problem(name, kwargs)
    tangent = torch.randn(inputs.shape, generator=_stream(2), dtype=torch.float64)
    step = 1e-6
    ahead = gradient(task, inputs + step * tangent, labels)
    behind = gradient(task, inputs - step * tangent, labels)
    exact = input_jvp(task, inputs, labels, tangent)
    numeric = (ahead - behind) / (2 * step)
    assert (exact - numeric).norm() <= 1e-6 * exact.norm()


def test_jvp_in_the_weights_under_vmap():
    model = _build("simple_convnet").double()
    weights = dict(model.named_parameters())
    inputs = torch.rand(3, 2, 9, 9, generator=_stream(), dtype=torch.float64)

    def slope(image):
        def value(w):
            return functional_call(model, w, (image[None],)).square().sum()

        return jvp(value, (weights,), (grad(value)(weights),))[1]

    assert (vmap(slope)(inputs) > 0).all()


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("lenet", {"shape": (28, 28)}, "input_shape is"),
        ("mlp", {"shape": (1, 0, 28)}, "input_shape is"),
        ("lenet", {"shape": (1, 8, 8.0)}, "input_shape is"),
        ("mlp", {"classes": 0}, "classes is 0"),
        ("mlp", {"hidden": (0,)}, "hidden is 0"),
        ("mlp", {"activation": "rleu"}, "did you mean 'relu'"),
        ("simple_convnet", {"shape": (1, 3, 28)}, "at least 4 x 4"),
        ("convnet64", {"shape": (3, 8, 8)}, "at least 9 x 9"),
        ("convnet64", {"norm": "layer"}, "norm is 'layer'"),
        ("resnet18", {"shape": (3, 4, 4)}, "at least 8 x 8"),
        ("resnet18", {"stem": "large"}, "at least 32 x 32"),
        ("resnet18", {"stem": "tiny"}, "stem is 'tiny'"),
    ],
)
def test_errors_name_the_argument(name, kwargs, words):
    with pytest.raises(ValueError, match=words):
        _build(name, **kwargs)


USER = """
import torch
from torch import nn

number = 3

def plain(classes):
    return nn.Linear(4, classes)

def full(*, input_shape, classes, generator, depth=1):
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(depth)])

def needy(classes, secret):
    return nn.Linear(4, classes)

def broken():
    raise RuntimeError("no luck")

def nothing(**kwargs):
    return sorted(kwargs)
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "user_models_a.py").write_text(USER)
    (tmp_path / "user_models_b.py").write_text("import not_installed_at_all")
    (tmp_path / "user_models_c.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    return {"input_shape": (1, 2, 2), "classes": 5, "generator": _stream(7)}


def test_user_model_gets_what_it_takes(user_module):
    before = torch.get_rng_state()
    first = load_user_model("user_models_a:plain", **user_module)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(5)
    second = load_user_model("user_models_a:plain", **user_module)
    assert first.out_features == 5
    assert torch.equal(first.weight, second.weight)
    assert len(load_user_model("user_models_a:full", depth=3, **user_module)) == 3


@pytest.mark.parametrize(
    ("path", "more", "words"),
    [
        ("user_models_a", {}, "write 'package.module:build'"),
        ("user_models_zzz:plain", {}, "no module 'user_models_zzz'"),
        ("user_models_b:plain", {}, "needs 'not_installed_at_all'"),
        ("user_models_c:plain", {}, "importing its module raised ZeroDivisionError"),
        ("user_models_a:absent", {}, "has no 'absent'"),
        ("user_models_a:number", {}, "which is a int"),
        ("user_models_a:needy", {}, "missing a required argument: 'secret'"),
        ("user_models_a:plain", {"depth": 2}, "unexpected keyword argument 'depth'"),
        ("user_models_a:broken", {}, "raised RuntimeError: no luck"),
        ("user_models_a:nothing", {}, "returned a list"),
    ],
)
def test_user_model_errors(user_module, path, more, words):
    with pytest.raises(ValueError, match=words):
        load_user_model(path, **user_module, **more)


def test_weights_round_trip(tmp_path):
    path = tmp_path / "w.safetensors"
    source = _build("resnet18", width=8, norm="batch")
    save_file(source.state_dict(), path)
    target = _build("resnet18", seed=1, width=8, norm="batch")
    load_weights(target, path)
    for key, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[key], value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("1.bias"), r"1\.bias \(12,\) is missing from the file"),
        (lambda s: s.update({"extra": torch.zeros(1)}), "extra is in the file but not"),
        (lambda s: s.update({"1.bias": torch.zeros(3)}), r"1\.bias is \(3,\) in the file"),
        (
            lambda s: s.update({"1.bias": torch.zeros(12, dtype=torch.int64)}),
            "holds integers in the file and floats in the model",
        ),
    ],
)
def test_weights_that_do_not_fit(tmp_path, change, words):
    model = _build("mlp", hidden=(12,))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = {key: value + 1 for key, value in before.items()}
    change(state)
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=words):
        load_weights(model, tmp_path / "w.safetensors")
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_weights_refuses_other_files(tmp_path):
    model = _build("mlp")
    with pytest.raises(ValueError, match="can run code when opened"):
        load_weights(model, tmp_path / "w.pt")
    with pytest.raises(ValueError, match="does not exist"):
        load_weights(model, tmp_path / "absent.safetensors")
    header = json.dumps({"a": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}})
    raw = len(header).to_bytes(8, "little") + header.encode()
    for content in (b"", b"\xff" * 64, raw):
        (tmp_path / "bad.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match="not a valid safetensors file"):
            load_weights(model, tmp_path / "bad.safetensors")
