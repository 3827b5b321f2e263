"""Local steps against torch.optim; hidden dropout against a narrower network."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from leakbound.client import gradient, simulate
from leakbound.core import LocalPlan, Task, Unit, Unknown, Update
from leakbound.defenses import GaussianNoise, HiddenDropout, LocalAggregation, chain
from leakbound.protocol import send
from leakbound.randomness import stream


@pytest.mark.parametrize("steps", [1, 3, 5])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_local_steps_are_those_of_torch(mlp, batch, steps, batch_size):
    rate, model = 0.2, copy.deepcopy(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    before = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
    parts = [slice(0, 6)] if batch_size is None else [slice(0, 4), slice(4, 6)]
    for step in range(steps):
        part = parts[step % len(parts)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs[part]), batch.labels[part]).backward()
        optimizer.step()
    after = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    task = Task.of(mlp, classes=3, plan=LocalPlan(batch_size=batch_size))
    sent = send(task, batch, LocalAggregation(steps, rate), stream(0))
    torch.testing.assert_close(sent.rows[0], (before - after) / rate)


def test_the_attacker_simulates_the_same_steps(task, batch):
    defense = chain(LocalAggregation(4, 0.3))
    sent = send(task, batch, defense, stream(0))
    known = defense.infer(task, sent)
    assert known.plan == LocalPlan(4, 0.3)
    guess = simulate(known, batch.inputs, batch.labels, cohort=(6,), defense=defense)
    assert torch.equal(guess, sent.rows)
    assert not torch.allclose(gradient(task, batch.inputs, batch.labels), sent.rows[0], rtol=1e-2)


@pytest.mark.parametrize("settings", [{"steps": 0}, {"learning_rate": 0.0}])
def test_local_settings_are_checked(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        LocalAggregation(**settings)


def _masks(task):
    """The mask in front of every layer that has one."""
    hooks = [h for m in task.model.modules() for h in m._forward_pre_hooks.values()]
    return [hook.mask.flatten() for hook in hooks]


def _narrow_gradient(mlp, batch, kept, factor):
    """Gradient of the net of the kept units alone, put back into the places of the full one."""
    one, two, three = (m for m in mlp if isinstance(m, nn.Linear))
    a, b = (mask.nonzero().flatten() for mask in kept)
    leaves = [
        one.weight[a],
        one.bias[a],
        two.weight[:, a],
        two.bias,
        three.weight[:, b],
        three.bias,
    ]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    hidden = (batch.inputs.flatten(1) @ leaves[0].T + leaves[1]).tanh()
    hidden = (factor * hidden @ leaves[2].T + leaves[3]).tanh()[:, b]
    logits = factor * hidden @ leaves[4].T + leaves[5]
    loss = nn.functional.cross_entropy(logits, batch.labels)
    parts = torch.autograd.grad(loss, leaves)
    full = [torch.zeros_like(p) for p in mlp.parameters()]
    full[0][a], full[1][a], full[2][:, a], full[3][:] = parts[:4]
    full[4][:, b], full[5][:] = parts[4:]
    return torch.cat([part.reshape(-1) for part in full])


@pytest.mark.parametrize("seed", range(4))
def test_hidden_dropout_is_a_narrower_net(mlp, task, batch, seed):
    defense = HiddenDropout(0.4)
    masks = _masks(defense.prepare(task, stream(seed)))
    assert [len(mask) for mask in masks] == [7, 5]
    assert all(set(mask.tolist()) <= {0.0, 1 / 0.6} for mask in masks)
    wanted = _narrow_gradient(mlp, batch, masks, 1 / 0.6)
    sent = send(task, batch, defense, stream(seed))
    torch.testing.assert_close(sent.rows[0], wanted)
    assert isinstance(sent.law, Unknown)


def test_the_frequency_of_dropped_units(task):
    kept = torch.cat(
        [m for i in range(300) for m in _masks(HiddenDropout(0.3).prepare(task, stream(i)))]
    )
    share = float((kept == 0).double().mean())  # of 3600 units
    assert share == pytest.approx(0.3, abs=4 * (0.21 / len(kept)) ** 0.5)
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("net", ["mlp", "convnet"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(3))
def test_the_draw_is_read_from_the_update(request, batch, net, dtype, seed):
    task = Task.of(request.getfixturevalue(net), classes=3).to("cpu", dtype)
    batch = replace(batch, inputs=batch.inputs.to(dtype))
    defense = HiddenDropout(0.5)
    sent = send(task, batch, defense, stream(seed))
    assert sent.rows.dtype == dtype
    drawn, known = _masks(defense.prepare(task, stream(seed))), defense.infer(task, sent)
    assert len(drawn) == 2
    assert any(bool((mask == 0).any()) for mask in drawn)
    for a, b in zip(drawn, _masks(known), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(gradient(known, batch.inputs, batch.labels), sent.rows[0])


def test_a_channel_is_dropped_whole(convnet, batch):
    task = Task.of(convnet, classes=3)
    sent = send(task, batch, HiddenDropout(0.5), stream(2))
    kernel = task.unflatten(sent.rows[0])["2.weight"]
    mask = _masks(HiddenDropout(0.5).prepare(task, stream(2)))[0]
    assert torch.equal((kernel != 0).all(dim=(0, 2, 3)), mask > 0)
    assert torch.equal((kernel == 0).all(dim=(0, 2, 3)), mask == 0)


def test_grouped_and_one_dimensional_convolutions():
    grouped = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Conv1d(4, 4, 3, groups=2))
    task = Task.of(nn.Sequential(grouped, nn.Conv1d(4, 3, 1), nn.Flatten(), nn.Linear(12, 2)))
    masks = _masks(HiddenDropout(0.5).prepare(task, stream(0)))
    assert [len(mask) for mask in masks] == [4, 12]
    inputs, labels = torch.rand(3, 2, 8), torch.tensor([0, 1, 0])
    dropped = HiddenDropout(0.5).prepare(task, stream(0))
    assert torch.isfinite(gradient(dropped, inputs, labels)).all()


def test_nothing_is_learned_under_noise_or_from_several_rows(task, batch):
    defense = chain(HiddenDropout(0.5), GaussianNoise(0.1))
    sent = send(task, batch, defense, stream(0))
    assert not _masks(defense.infer(task, sent))
    two = Update(torch.zeros(2, len(task.parameters)), Unit.CLIENT, (1, 1))
    assert HiddenDropout(0.5).infer(task, two) is task


def test_the_servers_task_is_left_alone(task):
    HiddenDropout(0.5).prepare(task, stream(0))
    assert not _masks(task)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.1, float("nan")])
def test_the_rate_is_checked(rate):
    with pytest.raises(ValueError, match="rate"):
        HiddenDropout(rate)
