"""What is differentiated: the gradient of the trained weights alone, by every engine."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from leakbound import client
from leakbound.core import LocalPlan, Task
from leakbound.engines import single
from leakbound.engines.choose import choose
from leakbound.engines.sensitivity import along, example_gradients, moved, sensitivity
from leakbound.randomness import normal, stream


def by_hand(model, inputs, labels):
    """The gradient of what is trained, by autograd on the module itself."""
    loss = nn.functional.cross_entropy(model(inputs), labels)
    own = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, own)])


def double(task):
    return replace(task, public=None).to("cpu", torch.float64)


def test_layout_and_buffers(model, task):
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert [name for name, *_ in task.layout] == list(own)
    assert len(task.parameters) == sum(p.numel() for p in own.values())
    assert set(task.frozen) == {n for n, p in model.named_parameters() if not p.requires_grad}
    for key, value in model.state_dict().items():
        torch.testing.assert_close(task.tensors()[key], value, rtol=0, atol=0)


def test_forward_and_gradient_are_the_modules_own(model, task, batch):
    inputs = batch.inputs
    torch.testing.assert_close(client.forward(task, inputs), model(inputs))
    torch.testing.assert_close(
        client.gradient(task, inputs, batch.labels), by_hand(model, inputs, batch.labels)
    )


def test_gradients_of_examples_are_autograds_one_by_one(model, task, batch):
    one = [by_hand(model, batch.inputs[i : i + 1], batch.labels[i : i + 1]) for i in range(4)]
    for each in (client.example_gradients, example_gradients):
        found = each(task, batch.inputs, batch.labels)
        torch.testing.assert_close(found, torch.stack(one), rtol=1e-4, atol=1e-6)


def test_exact_steps_are_autograds(name, task, batch):
    wide, source = double(task), stream(0, "cotangent")
    inputs, labels = batch.inputs.double().requires_grad_(), batch.labels
    plan = single.plan(task, tuple(inputs.shape))
    engine = single.Single(wide, plan)
    gradient = client.gradient(wide, inputs, labels)
    cotangent = normal(gradient.shape, source, like=gradient.detach())
    (pulled,) = torch.autograd.grad(gradient, inputs, cotangent)
    found = engine.gradient(inputs.detach()[None], labels[None])
    torch.testing.assert_close(found[0], gradient.detach(), rtol=1e-9, atol=1e-12)
    found = engine.pull(cotangent[None]).inputs[0]
    torch.testing.assert_close(found, pulled, rtol=1e-9, atol=1e-12)


def test_exact_local_steps_are_autograds(name, task, batch):
    task = replace(task, plan=LocalPlan(3, 0.1))
    shape = tuple(batch.inputs.shape)
    choice = choose(task, 1, shape)
    if name == "LoRA":  # too small for an engine that calls autograd for each product
        assert choice is None
        return
    wide = double(task)
    inputs = batch.inputs.double().requires_grad_()
    update = client.local_update(wide, inputs, batch.labels)
    cotangent = normal(update.shape, stream(0, "cotangent"), like=update.detach())
    (pulled,) = torch.autograd.grad(update, inputs, cotangent)
    engine = choice.engine([wide], 1)
    found = engine.gradient(inputs.detach()[None], batch.labels[None])
    torch.testing.assert_close(found[0], update.detach(), rtol=1e-9, atol=1e-12)
    found = engine.pull(cotangent[None]).inputs[0]
    torch.testing.assert_close(found, pulled, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [1, 4])
def test_the_engine_that_is_chosen_gives_autograds_gradient(task, batch, size):
    inputs, labels = batch.inputs[:size], batch.labels[:size]
    choice = choose(task, 1, tuple(inputs.shape), many=True)
    if choice is None:
        return
    found = choice.engine([task], 1).gradient(inputs[None], labels[None])
    torch.testing.assert_close(
        found[0], client.gradient(task, inputs, labels), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("estimator", ["exact", "per_sample", "batch"])
def test_sensitivities_are_the_jacobians(task, batch, estimator):
    task, inputs = double(task), batch.inputs.double()
    found = sensitivity(task, inputs, batch.labels, stream(0), estimator=estimator, directions=400)
    ways = torch.eye(inputs.numel(), dtype=inputs.dtype).view(-1, *inputs.shape)
    exact = along(task, inputs, batch.labels, ways).square().sum(0)
    assert found.values.shape == task.parameters.shape
    if estimator == "exact":
        torch.testing.assert_close(found.values, exact, rtol=1e-8, atol=1e-12)
    else:
        assert abs(float(found.values.sum() / exact.sum()) - 1) < 0.25
    torch.testing.assert_close(
        found.gradient, client.gradient(task, inputs, batch.labels).detach(), rtol=1e-8, atol=1e-10
    )


def test_changes_along_directions(task, batch):
    task, inputs = double(task), batch.inputs.double()
    ways = normal((3, *inputs.shape), stream(0, "ways"), like=inputs)
    gradient, changes = moved(task, inputs, batch.labels, ways)
    torch.testing.assert_close(gradient, client.gradient(task, inputs, batch.labels).detach())
    torch.testing.assert_close(changes, along(task, inputs, batch.labels, ways))


def test_the_model_is_not_changed(model, batch):
    before = copy.deepcopy(model)
    client.gradient(Task.of(model), batch.inputs, batch.labels)
    assert [p.requires_grad for p in model.parameters()] == [
        p.requires_grad for p in before.parameters()
    ]
    assert list(model.state_dict()) == list(before.state_dict())


def test_a_model_with_nothing_to_train_is_refused_by_name(model):
    model.requires_grad_(False)
    first = next(name for name, _ in model.named_parameters())
    with pytest.raises(ValueError, match=f"no trainable parameter: all are frozen \\('{first}'"):
        Task.of(model)


def test_a_frozen_weight_that_two_layers_share():
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)
    )
    model[3].weight = model[1].weight
    model[1].weight.requires_grad_(False)
    task = Task.of(model)
    assert set(task.frozen) == {"1.weight", "3.weight"}
    inputs = torch.rand(2, 1, 2, 2)
    torch.testing.assert_close(client.forward(task, inputs), model(inputs))
