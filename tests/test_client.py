"""The client's functions against autograd, finite differences and torch.optim."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from leakbound import models
from leakbound.client import (
    example_gradients,
    gradient,
    input_jvp,
    input_vjp,
    local_update,
    rows,
    simulate,
)
from leakbound.defenses import Clip, LocalAggregation, SecureAggregation, chain, dp_sgd
from leakbound.protocol import play
from leakbound.random import stream
from leakbound.types import Batch, LocalPlan, Task, Unit

SHAPE, CLASSES = (1, 6, 6), 4


def _task(build="mlp", **settings):
    given = {"input_shape": SHAPE, "classes": CLASSES, "generator": stream(1, build)}
    model = getattr(models, build)(**given, **settings)
    return Task.of(model, classes=CLASSES).to("cpu", torch.float64)


SMOOTH = {
    "mlp-tanh": lambda: _task("mlp", hidden=(8,), activation="tanh"),
    "mlp-sigmoid": lambda: _task("mlp", hidden=(8, 5), activation="sigmoid"),
    "lenet": lambda: _task("lenet"),
}
smooth = pytest.mark.parametrize("task", [build() for build in SMOOTH.values()], ids=SMOOTH)


def _batch(size, seed=0):
    generator = stream(seed, "batch")
    inputs = torch.rand(size, *SHAPE, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (size,), generator=generator)


def _module(task):
    """The task's model as a trainable module at the task's weights."""
    model = task.model.requires_grad_(True)
    model.load_state_dict({**task.unflatten(task.parameters), **task.buffers})
    return model


@smooth
def test_gradient_is_autograds_and_the_central_difference(task):
    inputs, labels = _batch(3)
    found = gradient(task, inputs, labels)
    model = _module(task)
    model.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    torch.testing.assert_close(found, torch.cat([p.grad.flatten() for p in model.parameters()]))

    def loss(weights):
        moved = task.with_parameters(weights)
        return task.loss(
            torch.func.functional_call(model, moved.unflatten(weights), (inputs,)), labels
        ).item()

    for seed in range(3):
        way = torch.randn(len(found), generator=stream(seed), dtype=torch.float64)
        way, step = way / way.norm(), 1e-5
        slope = (loss(task.parameters + step * way) - loss(task.parameters - step * way)) / 2 / step
        assert slope == pytest.approx(float(found @ way), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("build", ["mlp", "lenet", "simple_convnet"])
def test_example_gradients_average_to_the_gradient(build):
    task, (inputs, labels) = _task(build), _batch(5)
    each = example_gradients(task, inputs, labels)
    torch.testing.assert_close(each.mean(0), gradient(task, inputs, labels))
    torch.testing.assert_close(each[2], gradient(task, inputs[2:3], labels[2:3]))


def test_gradient_is_detached_unless_asked_for():
    task, (inputs, labels) = _task(), _batch(2)
    assert not gradient(task, inputs, labels).requires_grad
    assert gradient(task, inputs.requires_grad_(), labels).requires_grad
    with torch.no_grad():
        assert not gradient(task, inputs, labels).requires_grad


def test_a_weight_that_the_loss_does_not_use_has_gradient_zero():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(4, 2), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x.flatten(1))

    row = gradient(Task.of(Spare()), torch.ones(1, 1, 2, 2), torch.tensor([0]))
    assert row[:10].any()
    assert not row[10:].any()


def test_one_local_step_is_the_gradient_bit_for_bit():
    inputs, labels = _batch(4)
    for build in ("mlp", "simple_convnet"):
        task = _task(build).to("cpu", torch.float32)
        inputs = inputs.float()
        assert torch.equal(local_update(task, inputs, labels), gradient(task, inputs, labels))


@pytest.mark.parametrize(("steps", "batch_size"), [(3, None), (1, 2), (5, 2), (4, 3), (2, 99)])
def test_local_steps_are_those_of_sgd(steps, batch_size):
    plan = LocalPlan(steps, 0.3, batch_size)
    task, (inputs, labels) = replace(_task("lenet"), plan=plan), _batch(5)
    model = _module(task)
    sgd = torch.optim.SGD(model.parameters(), lr=0.3)
    size = batch_size or 5
    slices = [slice(a, a + size) for a in range(0, 5, size)]
    for step in range(steps):
        sgd.zero_grad()
        part = slices[step % len(slices)]
        nn.functional.cross_entropy(model(inputs[part]), labels[part]).backward()
        sgd.step()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(
        local_update(task, inputs, labels), (task.parameters - after) / 0.3, rtol=1e-9, atol=1e-11
    )


def test_local_update_computes_one_gradient_a_step(monkeypatch):
    from leakbound import client

    calls = []
    own = client.gradient
    monkeypatch.setattr(client, "gradient", lambda *a: calls.append(1) or own(*a))
    local_update(replace(_task(), plan=LocalPlan(4)), *_batch(2))
    assert len(calls) == 4


@pytest.mark.parametrize("plan", [LocalPlan(2), LocalPlan(1, batch_size=2)])
def test_example_rows_refuse_local_training(plan):
    task = replace(_task(), plan=plan)
    with pytest.raises(ValueError, match="needs a local plan of 1 step on the full batch"):
        rows(task, *_batch(3), Unit.EXAMPLE)
    assert rows(task, *_batch(3), Unit.CLIENT).shape == (1, len(task.parameters))


def test_example_rows_refuse_coupled_examples():
    layers = nn.Linear(36, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)
    task = Task.of(nn.Sequential(nn.Flatten(), *layers)).to("cpu", torch.float64)
    with pytest.raises(ValueError, match="no example has a gradient of its own"):
        rows(task, *_batch(3), Unit.EXAMPLE)
    found = rows(task, *_batch(3), Unit.CLIENT)[0]
    torch.testing.assert_close(found, gradient(task, *_batch(3)))


@smooth
def test_input_jvp_is_the_central_difference_and_input_vjp_its_adjoint(task):
    inputs, labels = _batch(2)
    tangent = torch.randn(inputs.shape, generator=stream(3), dtype=torch.float64)
    change, step = input_jvp(task, inputs, labels, tangent), 1e-5
    ahead = gradient(task, inputs + step * tangent, labels)
    behind = gradient(task, inputs - step * tangent, labels)
    error = ((ahead - behind) / (2 * step) - change).norm() / change.norm()
    assert error < 1e-5
    cotangent = torch.randn(len(change), generator=stream(4), dtype=torch.float64)
    pulled = input_vjp(task, inputs, labels, cotangent)
    assert float((pulled * tangent).sum()) == pytest.approx(float(cotangent @ change), rel=1e-9)


DEFENSES = {
    "none": (chain(), (2,), None),
    "unknown": (None, (1, 2), None),
    "clip": (chain(Clip(0.01)), (2,), None),
    "dp_sgd": (dp_sgd(0.5, 1.0), (3,), None),
    "steps": (chain(), (2,), LocalPlan(3, 0.2)),
    "minibatches": (chain(), (3,), LocalPlan(3, 0.2, 2)),
    "secure aggregation": (SecureAggregation(2), (1, 2), None),
    "clip, aggregate": (chain(Clip(0.01), SecureAggregation(2)), (2, 1), None),
}


@pytest.mark.parametrize("case", DEFENSES)
def test_simulate_is_differentiable_twice_in_inputs_and_soft_labels(case):
    defense, cohort, plan = DEFENSES[case]
    if defense is not None:
        defense = chain(defense)
    task = _task("mlp", hidden=(3,), activation="tanh")
    task = replace(task, plan=plan or LocalPlan())
    total = sum(cohort)
    inputs, _ = _batch(total)
    soft = torch.randn(total, CLASSES, generator=stream(5), dtype=torch.float64).softmax(-1)
    weights = torch.randn(len(task.parameters), generator=stream(6), dtype=torch.float64)

    def seen(inputs, soft):
        return simulate(task, inputs, soft, cohort=cohort, defense=defense) @ weights

    given = (inputs.requires_grad_(), soft.requires_grad_())
    assert torch.autograd.gradcheck(seen, given)
    assert torch.autograd.gradgradcheck(seen, given)


@pytest.mark.parametrize(
    "defense",
    [
        chain(),
        Clip(0.01),
        SecureAggregation(3),
        chain(Clip(0.01), SecureAggregation(3)),
        LocalAggregation(4, 0.3),
        chain(LocalAggregation(3, 0.3), SecureAggregation(2)),
    ],
    ids=repr,
)
def test_the_truth_simulates_the_release_of_a_deterministic_defense(defense):
    task = _task("simple_convnet")
    clients = [Batch(*_batch(size, seed=size)) for size in (2, 1, 4)][: defense.cohort_size]
    sources = [stream(0, "defense", i) for i in range(len(clients) + 1)]
    played = play(task, clients, defense, sources)
    seen, truth = played.observation, played.truth
    own = chain(defense).infer(task, seen.update)
    again = simulate(own, truth.inputs, truth.labels, cohort=seen.cohort, defense=seen.defense)
    torch.testing.assert_close(again, seen.update.rows, rtol=1e-12, atol=0)


def test_without_a_known_defense_the_plain_updates_are_summed():
    task, (inputs, labels) = _task(), _batch(3)
    found = simulate(task, inputs, labels, cohort=(1, 2), defense=None)
    want = gradient(task, inputs[:1], labels[:1]) + gradient(task, inputs[1:], labels[1:])
    torch.testing.assert_close(found, want[None])
