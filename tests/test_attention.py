"""Transformers: attention is differentiated twice, layers have fused paths, outputs have names."""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import leakbound as lb
from leakbound import client
from leakbound.attacks import LinearInversion, inverting_gradients
from leakbound.bounds.smoothness import not_smooth
from leakbound.channel.fisher import Channel, fisher_matrix
from leakbound.core import Batch, Task
from leakbound.defenses import DpSgd, GaussianNoise, NoDefense, chain
from leakbound.engines.sensitivity import along, example_gradients, moved, sensitivity
from leakbound.randomness import normal, stream

from .captured.flat import attack_update

SHAPE, PATCH, WIDTH, CLASSES = (1, 8, 8), 4, 8, 3


class Attention(nn.Module):
    """Self-attention by PyTorch's function, which picks a kernel that has no second derivative."""

    def __init__(self):
        super().__init__()
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parts = self.mixed(x).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(*parts)
        return self.out(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.after = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.after(x)


class ViT(nn.Module):
    """A vision transformer with learned places and the mean of its tokens."""

    def __init__(self, block):
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.places = nn.Parameter(torch.zeros(1, 4, WIDTH))
        self.block, self.head = block, nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.block(tokens).mean(1))


def torchs_own():
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, activation="gelu", batch_first=True)


BLOCKS = {"by hand": Block, "nn.TransformerEncoderLayer": torchs_own}


@pytest.fixture(params=list(BLOCKS))
def model(request):
    model, source = ViT(BLOCKS[request.param]()).eval(), stream(0, "vit")
    with torch.no_grad():
        for parameter in model.parameters():
            wide = parameter.ndim == 2
            scale = parameter.shape[1] ** -0.5 if wide else 0.3
            parameter.copy_(scale * normal(parameter.shape, source) + (parameter.ndim == 1))
    return model


@pytest.fixture
def task(model):
    return Task.of(model, classes=CLASSES)


@pytest.fixture
def batch():
    return Batch(torch.rand((3, *SHAPE), generator=stream(0, "x")), torch.tensor([2, 0, 1]))


def observed(task, batch, defense):
    sources = [stream(0, "client"), stream(0, "cohort")]
    return lb.play(task, [batch], defense, sources).observation


def plain_gradient(model, inputs, labels):
    loss = functional.cross_entropy(model(inputs), labels)
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])


def test_the_default_attack_searches(task, batch):
    seen = observed(task, Batch(batch.inputs[:1], batch.labels[:1]), NoDefense())
    answer = inverting_gradients(steps=100)(seen, stream(0))
    assert answer.trace[-1] < 0.2 * answer.trace[0]


def test_gradients_are_the_modules_own(model, task, batch):
    wanted = plain_gradient(model, batch.inputs, batch.labels)
    found = client.gradient(task, batch.inputs, batch.labels)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    traced = client.gradient(task, batch.inputs.requires_grad_(), batch.labels)
    torch.testing.assert_close(traced.detach(), wanted, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(client.forward(task, batch.inputs), model(batch.inputs))


def test_dp_sgd_takes_every_examples_gradient(model, task, batch):
    each = [
        plain_gradient(model, x[None], y[None])
        for x, y in zip(batch.inputs, batch.labels, strict=True)
    ]
    for rows in (client.example_gradients, example_gradients):
        found = rows(task, batch.inputs, batch.labels)
        torch.testing.assert_close(found, torch.stack(each), rtol=1e-4, atol=1e-6)
    assert observed(task, batch, DpSgd(1.0, 0.5)).update.rows.isfinite().all()


def test_sensitivities(task, batch):
    wide = task.to("cpu", torch.float64)
    x, y = batch.inputs.double(), batch.labels
    found = sensitivity(wide, x, y, stream(0), estimator="exact").values
    ways = torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)
    changes = along(wide, x, y, ways)
    torch.testing.assert_close(found, changes.square().sum(0), rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(moved(wide, x, y, ways)[1], changes)
    step = 1e-5 * ways[7:8]
    near = client.gradient(wide, x + step[0], y) - client.gradient(wide, x - step[0], y)
    torch.testing.assert_close(near / 2e-5, changes[7], rtol=1e-4, atol=1e-7)


def test_floors(task, batch):
    """The information is that of finite differences, and the model counts as smooth."""
    wide = task.to("cpu", torch.float64)
    one = Batch(batch.inputs[:1].double(), batch.labels[:1])
    defense = chain(GaussianNoise(0.1))
    update = observed(wide, one, defense).update
    found = fisher_matrix(Channel(wide, defense, update.law), one)
    columns = []
    for i in range(one.inputs.numel()):
        step = torch.zeros_like(one.inputs).flatten()
        step[i] = 1e-5
        step = step.view(1, *SHAPE)
        after, before = (client.gradient(wide, one.inputs + s, one.labels) for s in (step, -step))
        columns.append((after - before) / 2e-5)
    jacobian = torch.stack(columns, 1)
    wanted = (jacobian.T @ jacobian / 0.01).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6 * abs(wanted).max())
    assert not_smooth(task, batch.inputs, batch.labels) == ()


def test_kinks_inside_a_fused_layer_are_seen(batch):
    block = nn.TransformerEncoderLayer(WIDTH, 2, 16, activation="relu", batch_first=True)
    task = Task.of(ViT(block).eval())
    assert "relu" in not_smooth(task, batch.inputs, batch.labels)


@dataclass
class Output:
    logits: torch.Tensor
    attentions: None = None


class Pair(NamedTuple):
    hidden: torch.Tensor
    logits: torch.Tensor


FORMS = {
    "object": Output,
    "dictionary": lambda logits: OrderedDict(loss=None, logits=logits),
    "named tuple": lambda logits: Pair(logits, logits),
}


class Returning(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.layer = form, nn.Linear(64, CLASSES)

    def forward(self, x):
        return self.form(self.layer(x.flatten(1)))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_outputs_with_logits_count_as_their_logits(form, batch):
    task = Task.of(Returning(form), classes=CLASSES)
    one = Batch(batch.inputs[:1], batch.labels[:1])
    assert client.forward(task, batch.inputs).shape == (3, CLASSES)
    assert client.example_gradients(task, batch.inputs, batch.labels).shape == (3, 65 * CLASSES)
    answer = LinearInversion()(observed(task, one, NoDefense()), stream(0))
    torch.testing.assert_close(answer.inputs, one.inputs, rtol=0, atol=1e-3)
    assert sensitivity(task, one.inputs, one.labels, stream(0)).values.isfinite().all()


@pytest.mark.parametrize("form", [lambda x: (x, x), lambda x: None, lambda x: {"scores": x}])
def test_other_outputs_are_refused_with_the_mend(form, batch):
    task = Task.of(Returning(form), classes=CLASSES)
    words = r"return a tensor of class scores .* `logits`"
    with pytest.raises(ValueError, match=words):
        client.forward(task, batch.inputs)
    model = Returning(form)
    update = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=rf"^the model returns a .*{words}"):
        attack_update(update, model, kind="gradient", input_shape=SHAPE)


def test_plain_attention_ends_with_the_last_of_several_threads():
    """The switches are the process's: who leaves first must not switch others back."""
    inside, leave = threading.Barrier(2, timeout=600), threading.Event()
    states = []

    def stay():
        with client.plain_attention():
            inside.wait()
            leave.wait(600)
            states.append(torch.backends.cuda.flash_sdp_enabled())

    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.mha.get_fastpath_enabled()
    thread = threading.Thread(target=stay)
    thread.start()
    inside.wait()
    with client.plain_attention(), client.plain_attention():
        pass
    leave.set()
    thread.join()
    assert before == (True, True)
    assert states == [False]
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.mha.get_fastpath_enabled()


def test_what_is_not_differentiated_twice_takes_pytorchs_kernels(task, batch, monkeypatch):
    def refuse():
        raise AssertionError("plain attention was taken")

    monkeypatch.setattr(client, "plain_attention", refuse)
    client.gradient(task, batch.inputs, batch.labels)
    with torch.no_grad():
        client.forward(task, batch.inputs)
