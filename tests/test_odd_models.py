"""Models as people have them: compiled, checkpointed, renormalized, of another type, or none."""

import copy
import sys
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm
from torch.utils import checkpoint as checkpoints

from leakbound import Batch, simulate
from leakbound._util import copies
from leakbound.cli import main
from leakbound.client import example_gradients, gradient
from leakbound.core import NotApplicable, Task
from leakbound.domains import TokenDomain

from .captured.flat import attack_update

SHAPE = (1, 4, 4)


def mlp(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 3))


def batch(count=1, kind=torch.float32):
    inputs = torch.rand((count, *SHAPE), generator=torch.Generator().manual_seed(1))
    return Batch(inputs.to(kind), torch.arange(count) % 3)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.net, self.reentrant = mlp(), reentrant

    def forward(self, x):
        inside = self.net[:3]
        return self.net[3](checkpoints.checkpoint(inside, x, use_reentrant=self.reentrant))


class Wrapped(nn.Module):
    """As torch.compile wraps a module, and the wrapper of activation checkpoints."""

    def __init__(self, module, name="_orig_mod"):
        super().__init__()
        self.add_module(name, module)

    def forward(self, x):
        raise AssertionError("the wrapper is called")


def true_gradient(model, data):
    found = torch.autograd.grad(
        nn.functional.cross_entropy(model(data.inputs), data.labels), list(model.parameters())
    )
    return torch.cat([part.flatten() for part in found])


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_change_no_gradient(reentrant):
    model, data = Checkpointed(reentrant), batch(2)
    true = true_gradient(model.net, data)
    task = Task.of(model)
    own = gradient(task, data.inputs, data.labels)
    torch.testing.assert_close(own, true)
    each = example_gradients(task, data.inputs, data.labels)
    torch.testing.assert_close(each.mean(0), true)
    moved = gradient(task, data.inputs, data.labels, task.parameters * 2)
    for weight in model.net.parameters():
        weight.data *= 2
    torch.testing.assert_close(moved, true_gradient(model.net, data))  # at the weights asked for
    assert simulate(model, batch(), attack="linear_inversion").verdict == "exposed"
    assert checkpoints.CheckpointFunction.__name__ == "CheckpointFunction"  # PyTorch's own is back


@pytest.mark.parametrize("name", copies.INNER)
def test_wrappers_go_and_names_of_files_are_understood(name):
    inner = nn.Sequential(Wrapped(mlp()[:3], name), nn.Linear(8, 3))
    model = nn.DataParallel(Wrapped(inner, name))
    data = batch()
    task = Task.of(model)
    assert [own for own, *_ in task.layout] == ["0.1.weight", "0.1.bias", "1.weight", "1.bias"]
    plain = nn.Sequential(inner[0]._modules[name], inner[1])
    own = gradient(task, data.inputs, data.labels)
    torch.testing.assert_close(own, true_gradient(plain, data))
    if name == "_orig_mod":  # the wrapper of checkpoints hides its name from state dicts itself
        names = [own for own, _ in model.named_parameters()]
        assert names[0] == "module._orig_mod.0._orig_mod.1.weight"
        update = dict(zip(names, task.unflatten(own).values(), strict=True))
        found = attack_update(
            *(update, model),
            before=model.state_dict(),
            kind="gradient",
            examples=1,
            input_shape=SHAPE,
            attacks="linear_inversion",
        )
        assert found.verdict == "exposed (certified)"
        assert "the model is compiled" in " ".join(found.records[0].capture.notes)


def test_a_compiled_model_is_not_compiled_here():
    counted = []

    def backend(graph, inputs):
        counted.append(1)
        return graph.forward

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()
            self.part = torch.compile(self.net[:3], backend=backend)

        @torch.compile(backend=backend)
        def last(self, x):
            return self.net[3](x)

        def forward(self, x):
            return self.last(self.part(x))

    whole = torch.compile(Inside(), backend=backend)
    whole.compile(backend=backend)
    assert simulate(whole, batch(), attack="linear_inversion").verdict == "exposed"
    assert counted == []


@pytest.mark.parametrize("kind", ["old", "new", "pruned"])
def test_weights_that_are_computed_from_others(kind):
    model, data = mlp(), batch(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "pruned":
            prune.l1_unstructured(model[1], "weight", 0.5)
        else:
            (weight_norm if kind == "old" else parametrizations.weight_norm)(model[1])
    model(data.inputs)  # leaves a result of this call in the module
    task = Task.of(model)
    own = gradient(task, data.inputs, data.labels)
    torch.testing.assert_close(own, true_gradient(model, data))
    torch.testing.assert_close(example_gradients(task, data.inputs, data.labels).mean(0), own)
    task.to("cpu", torch.float64)  # copies the module after calls under transforms
    with pytest.raises(NotApplicable, match="'1' sees the input, but its weight or bias is comp"):
        simulate(model, batch(), attack="linear_inversion")
    assert simulate(model, batch(), attack="gauss_newton").scores[0] > 20


def without_values():
    with torch.device("meta"):
        return mlp()


class Locked(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.lock = mlp(), threading.Lock()


class Silent(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    @torch.no_grad()
    def forward(self, x):
        return self.net(x)


def half_of_it():
    model = mlp()
    model[3].double()
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: torch.jit.script(mlp()), "model has TorchScript .the model itself."),
        (lambda: torch.jit.trace(mlp(), torch.rand(1, *SHAPE)), "Python module from which"),
        (lambda: nn.Sequential(torch.jit.script(mlp())), "model has TorchScript .0."),
        (lambda: torch.jit.freeze(torch.jit.script(mlp()).eval()), "model has TorchScript"),
        (without_values, "1.weight is on the meta device"),
        (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), "1.weight, of a lazy layer"),
        (half_of_it, "1.bias is float32, 3.bias is float64.; give them one type"),
        (lambda: mlp().to(torch.complex64), "weights of type torch.complex64"),
        (Locked, "model cannot be copied .TypeError: cannot pickle '_thread.lock'"),
        (Silent, "its forward uses torch.no_grad"),
        (lambda: mlp().state_dict(), "model is a state dict; give a torch.nn.Module"),
        (lambda: nn.Linear, "model is a class .Linear."),
        (lambda: None, "model is a NoneType"),
        (lambda: nn.Conv2d(3, 3, 3), "cannot take inputs of shape .1, 1, 4, 4."),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 1), nn.Flatten(0)), "class scores"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_simulated_is_refused_with_the_mend(build, words):
    with pytest.raises(ValueError, match=words):
        simulate(build(), batch(), attack="linear_inversion")


class Pairs(nn.Module):
    """As an encoder-decoder: nothing can be said from the tokens alone."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, tokens, decoder_tokens=None):
        if decoder_tokens is None:
            raise ValueError("you must specify exactly one of input_ids or inputs_embeds")
        return self.out(self.words(tokens))


class Prefixed(nn.Module):
    """As PEFT's prefix tuning: it asks the frozen base for its type."""

    def __init__(self):
        super().__init__()
        self.base, self.prefix = mlp().requires_grad_(False), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.base(x.to(next(self.base.parameters()).dtype)) + self.prefix


def test_models_of_tokens_get_advice_about_tokens():
    words = TokenDomain(9, 5)
    data = (torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[1, 2, 3, 4, 5]]))
    with pytest.raises(ValueError, match=r"it gets tokens .B, n. .* subclass") as error:
        simulate(Pairs(), data, loss="next_token", domain=words, attack="token_rows")
    assert "28" not in str(error.value)
    update = {name: torch.ones_like(value) for name, value in Pairs().named_parameters()}
    facts = {"kind": "gradient", "domain": words, "loss": "next_token", "examples": 1}
    with pytest.raises(ValueError, match=r"it gets tokens .B, n. .* subclass") as error:
        attack_update(update, Pairs(), **facts)
    assert "28" not in str(error.value)
    with pytest.raises(ValueError, match="prefix tuning is not supported"):
        simulate(Prefixed(), batch(), attack="linear_inversion")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (torch.tensor([99]), "labels run from 99 to 99, but the model has 3 classes"),
        (torch.tensor([-1]), "labels run from -1 to -1"),
        (torch.tensor([1.0]), "give one class number per example"),
        (torch.tensor([[1]]), "the loss 'cross_entropy' raised"),
    ],
)
def test_labels_that_the_loss_rejects(labels, words):
    with pytest.raises(ValueError, match=words):
        simulate(mlp(), (batch().inputs, labels), attack="linear_inversion")


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8, torch.bool])
def test_class_numbers_of_other_types(kind):
    data = (batch().inputs, torch.tensor([1]).to(kind))
    assert simulate(mlp(), data, attack="linear_inversion").verdict == "exposed"


def test_whole_numbers_are_no_images():
    data = ((batch().inputs * 255).to(torch.uint8), torch.tensor([1]))
    with pytest.raises(ValueError, match=r"inputs hold torch.uint8: give floats"):
        simulate(mlp(), data, attack="linear_inversion")


def test_tensors_of_inference_mode():
    with torch.inference_mode():
        inputs, model = torch.rand(1, *SHAPE), mlp()
    assert simulate(mlp(), (inputs, torch.tensor([1])), attack="linear_inversion").scores[0] > 60
    with pytest.raises(ValueError, match=r"1.weight., which cannot be trained"):
        simulate(model, batch(), attack="linear_inversion")


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16])
def test_examples_get_the_type_of_the_weights(kind):
    found = simulate(mlp().to(kind), batch(), attack="linear_inversion", public=batch(40))
    assert found.truth.dtype == kind
    assert found.verdict == "exposed"


def test_an_update_in_double_precision_is_not_changed():
    model, data = mlp().double(), batch(kind=torch.float64)
    row = true_gradient(model, data)
    task = Task.of(model)
    update = {name: own.clone() for name, own in task.unflatten(row).items()}
    before = copy.deepcopy(model.state_dict())
    given = {"kind": "gradient", "examples": 1, "input_shape": SHAPE, "attacks": "linear_inversion"}
    first = attack_update(update, model, before=before, **given)
    assert all(torch.equal(update[name], own) for name, own in task.unflatten(row).items())
    assert all(torch.equal(before[name], own) for name, own in model.state_dict().items())
    assert first.verdict == attack_update(update, model, before=before, **given).verdict
    assert first.verdict == "exposed (certified)"


@pytest.mark.parametrize(
    ("inputs", "labels", "words"),
    [
        (torch.rand(1, 4), torch.tensor(2), "labels is one number"),
        (torch.rand(1, 4).numpy(), torch.tensor([2]), "inputs is a ndarray"),
        (torch.rand(1, 4), [2], "labels is a list; give a tensor"),
    ],
)
def test_batches_hold_tensors_with_one_label_for_each_example(inputs, labels, words):
    with pytest.raises(ValueError, match=words):
        Batch(inputs, labels)


CODE = """
import torch
from torch import nn


def without_values():
    with torch.device("meta"):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def double():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()


class Nothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        return self.last(x.flatten(1)) * float("nan")


class Cut(Nothing):
    def forward(self, x):
        return self.last(x.flatten(1)).detach()


def normalized():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))


def renormalized():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    nn.utils.weight_norm(model[1])
    return model
"""


@pytest.fixture
def on_digits(tmp_path, monkeypatch, capsys):
    """The exit code and the words of one experiment with a model of `CODE`."""
    (tmp_path / "odd_nets.py").write_text(CODE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])

    def call(model, attack="linear_inversion"):
        words = f"attack --data digits --error-bound none --model odd_nets:{model}"
        with pytest.raises(SystemExit) as caught:
            main([*words.split(), "--attack", attack])
        said = capsys.readouterr()
        return caught.value.code, " ".join((said.out + said.err).split())

    yield call
    sys.modules.pop("odd_nets", None)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("without_values", "1.weight is on the meta device"),
        ("double", "has weights of torch.float64, and an audit computes in torch.float32; return"),
        ("Nothing", "it returns values that are not finite; check its weights"),
        ("Cut", "the model's output has no gradient: its forward uses torch.no_grad, or detaches"),
        ("normalized", "not applicable: the model has batch norm in training mode, which cannot"),
    ],
)
def test_an_experiment_names_what_a_model_lacks(on_digits, model, words):
    code, said = on_digits(model)
    assert code == 2
    assert words in said


@pytest.mark.filterwarnings("ignore")
def test_an_experiment_with_weight_norm(on_digits):
    assert on_digits("renormalized", "inverting_gradients,steps=1")[0] == 0
