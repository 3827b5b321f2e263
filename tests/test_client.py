"""The client's functions against autograd, finite differences and torch.optim."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import vjp
from torch.nn.utils import prune

from leakbound import client, models
from leakbound.client import (
    example_gradients,
    gradient,
    input_jvp,
    local_update,
    rows,
    simulate,
)
from leakbound.core import Batch, LocalPlan, Task, Unit
from leakbound.defenses import (
    Clip,
    DpSgd,
    GaussianNoise,
    LocalAggregation,
    NoDefense,
    SecureAggregation,
    Withhold,
    chain,
)
from leakbound.protocol import play
from leakbound.randomness import stream

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
@pytest.mark.parametrize(
    ("pytorch", "more", "plan"),
    [
        ("SGD", {}, {}),
        ("SGD", {"momentum": 0.8, "weight_decay": 0.1}, {}),
        ("Adam", {}, {}),
        ("Adam", {"weight_decay": 0.1, "betas": (0.5, 0.9), "eps": 1e-3}, {"epsilon": 1e-3}),
        ("AdamW", {"weight_decay": 0.1}, {}),
        ("RMSprop", {"weight_decay": 0.1}, {}),
        ("RMSprop", {"alpha": 0.7}, {"betas": (0.0, 0.7)}),
        ("Adagrad", {"weight_decay": 0.1}, {}),
    ],
)
def test_local_steps_are_those_of_pytorch(steps, batch_size, pytorch, more, plan):
    shared = {key: more[key] for key in ("momentum", "weight_decay", "betas") if key in more}
    plan = LocalPlan(steps, 0.3, batch_size, pytorch.lower(), **{**shared, **plan})
    task, (inputs, labels) = replace(_task("lenet"), plan=plan), _batch(5)
    model = _module(task)
    theirs = getattr(torch.optim, pytorch)(model.parameters(), lr=0.3, **more)
    size = batch_size or 5
    slices = [slice(a, a + size) for a in range(0, 5, size)]
    for step in range(steps):
        theirs.zero_grad()
        part = slices[step % len(slices)]
        nn.functional.cross_entropy(model(inputs[part]), labels[part]).backward()
        theirs.step()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    # AdamW multiplies by 1 - rate * decay: another order of the same sum.
    torch.testing.assert_close(
        local_update(task, inputs, labels), (task.parameters - after) / 0.3, rtol=1e-8, atol=1e-10
    )


def test_steps_of_lion_are_those_of_its_paper():
    plan = LocalPlan(3, 0.05, optimizer="lion", betas=(0.8, 0.95), weight_decay=0.2)
    task, (inputs, labels) = replace(_task("mlp"), plan=plan), _batch(3)
    weights = task.parameters
    mean = torch.zeros_like(weights)
    for _ in range(3):  # Chen et al. 2023, algorithm 2
        slope = gradient(task, inputs, labels, weights).detach()
        step = torch.sign(0.8 * mean + 0.2 * slope)
        weights = weights - 0.05 * (step + 0.2 * weights)
        mean = 0.95 * mean + 0.05 * slope
    sent = local_update(task, inputs, labels)
    torch.testing.assert_close(sent, (task.parameters - weights) / 0.05, rtol=1e-9, atol=1e-11)


def test_the_weight_of_a_plan_is_that_of_equal_gradients():
    """A linear loss has the same gradient everywhere."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 2).double())
    task = Task.of(model, loss=lambda outputs, labels: outputs.sum())
    inputs, labels = _batch(2)
    for plan in (LocalPlan(1), LocalPlan(4, momentum=0.5), LocalPlan(7, momentum=0.9)):
        found = local_update(replace(task, plan=plan), inputs, labels)
        torch.testing.assert_close(found, plan.total_weight * gradient(task, inputs, labels))


def test_adam_can_be_differentiated_where_gradients_are_zero():
    task = replace(_task("mlp"), plan=LocalPlan(3, 0.01, optimizer="adam"))
    inputs, labels = _batch(2)
    inputs = inputs.clone().requires_grad_()
    local_update(task, inputs * (inputs > 0.5), labels).square().sum().backward()
    assert bool(inputs.grad.isfinite().all())


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"optimizer": "lamb"}, "optimizer"),
        ({"betas": (0.9, 1.0), "optimizer": "adam"}, "betas"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"momentum": 0.9, "optimizer": "adam"}, "Adam takes none"),
    ],
)
def test_plans_that_nobody_can_follow(told, said):
    with pytest.raises(ValueError, match=said):
        LocalPlan(3, 0.1, **told)


def test_local_update_computes_one_gradient_a_step():
    calls = []
    task = replace(_task(), plan=LocalPlan(4))
    local_update(task, *_batch(2), lambda *given: calls.append(1) or gradient(*given))
    assert len(calls) == 4


@pytest.mark.parametrize(
    "plan", [LocalPlan(2), LocalPlan(1, batch_size=2), LocalPlan(optimizer="adam")]
)
def test_example_rows_refuse_local_training(plan):
    task = replace(_task(), plan=plan)
    with pytest.raises(ValueError, match="needs 1 step of SGD on the full batch"):
        rows(task, *_batch(3), Unit.EXAMPLE)
    assert rows(task, *_batch(3), Unit.CLIENT).shape == (1, len(task.parameters))


def test_example_rows_refuse_coupled_examples():
    layers = nn.Linear(36, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)
    task = Task.of(nn.Sequential(nn.Flatten(), *layers)).to("cpu", torch.float64)
    with pytest.raises(ValueError, match="no example has a separate gradient"):
        rows(task, *_batch(3), Unit.EXAMPLE)
    found = rows(task, *_batch(3), Unit.CLIENT)[0]
    torch.testing.assert_close(found, gradient(task, *_batch(3)))


@smooth
def test_input_jvp_is_the_central_difference_and_its_adjoint_agrees(task):
    inputs, labels = _batch(2)
    tangent = torch.randn(inputs.shape, generator=stream(3), dtype=torch.float64)
    change, step = input_jvp(task, inputs, labels, tangent), 1e-5
    ahead = gradient(task, inputs + step * tangent, labels)
    behind = gradient(task, inputs - step * tangent, labels)
    error = ((ahead - behind) / (2 * step) - change).norm() / change.norm()
    assert error < 1e-5
    cotangent = torch.randn(len(change), generator=stream(4), dtype=torch.float64)
    pulled = vjp(lambda x: client.pure_gradient(task, x, labels), inputs)[1](cotangent)[0]
    assert float((pulled * tangent).sum()) == pytest.approx(float(cotangent @ change), rel=1e-9)


DEFENSES = {
    "none": (NoDefense(), (2,), None),
    "unknown": (None, (1, 2), None),
    "clip": (chain(Clip(0.01)), (2,), None),
    "dp_sgd": (DpSgd(0.5, 1.0), (3,), None),
    "steps": (NoDefense(), (2,), LocalPlan(3, 0.2)),
    "minibatches": (NoDefense(), (3,), LocalPlan(3, 0.2, 2)),
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
        NoDefense(),
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


def _pruned(task):
    kept = torch.rand(len(task.parameters), generator=stream(0, "kept")) < 0.5
    return task.pruned(kept)


def _torchs_pruned(task):
    """The model with torch's own pruning on all of its tensors, biases too, and its gradient."""
    dense = replace(task, kept=None)
    model = _module(replace(dense, model=copy.deepcopy(task.model)))
    for name, _, start, stop in task.layout:
        layer, _, own = name.rpartition(".")
        module = model.get_submodule(layer)
        mask = task.kept[start:stop].view_as(getattr(module, own))
        prune.custom_from_mask(module, own, mask)

    def gradient_of(inputs, labels):
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        named = dict(model.named_parameters())
        return torch.cat([named[f"{name}_orig"].grad.flatten() for name, *_ in task.layout])

    return model, gradient_of


@pytest.mark.parametrize("build", SMOOTH)
def test_a_pruned_models_gradients_are_those_of_torchs_pruning(build):
    task, (inputs, labels) = _pruned(SMOOTH[build]()), _batch(4)
    assert (task.parameters[~task.kept] == 0).all()
    model, gradient_of = _torchs_pruned(task)
    close = torch.testing.assert_close
    close(client.forward(task, inputs), model(inputs).detach())
    want = gradient_of(inputs, labels)
    close(gradient(task, inputs, labels), want)
    close(client.pure_gradient(task, inputs, labels), want)
    each = torch.stack([gradient_of(inputs[i, None], labels[i, None]) for i in range(4)])
    close(example_gradients(task, inputs, labels), each)
    assert (want[~task.kept] == 0).all()
    direction = torch.randn(inputs.shape, generator=stream(0, "direction"), dtype=inputs.dtype)
    small = 1e-5 * direction
    moved = gradient_of(inputs + small, labels) - gradient_of(inputs - small, labels)
    close(input_jvp(task, inputs, labels, direction), moved / 2e-5, rtol=1e-4, atol=1e-8)
    probe = torch.randn(want.shape, generator=stream(0, "probe"), dtype=want.dtype)
    pulled = vjp(lambda x: client.pure_gradient(task, x, labels), inputs)[1](probe)[0]
    close((pulled * direction).sum(), input_jvp(task, inputs, labels, direction) @ probe)


def test_local_steps_of_a_pruned_model_are_those_of_sgd():
    plan = LocalPlan(steps=4, learning_rate=0.3, batch_size=2)
    task, (inputs, labels) = replace(_pruned(_task()), plan=plan), _batch(3)
    model, gradient_of = _torchs_pruned(task)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for part in (slice(0, 2), slice(2, 3), slice(0, 2), slice(2, 3)):
        gradient_of(inputs[part], labels[part])
        optimizer.step()
    named = dict(model.named_parameters())
    after = torch.cat([named[f"{name}_orig"].detach().flatten() for name, *_ in task.layout])
    assert torch.equal(before.sort().values, task.parameters.sort().values)
    found = local_update(task, inputs, labels)
    torch.testing.assert_close(task.parameters - 0.3 * found, after)
    assert (found[~task.kept] == 0).all()


def test_a_pruned_task_stays_pruned():
    dense = _task()
    task = _pruned(dense)
    other = task.with_parameters(torch.ones_like(task.parameters))
    assert torch.equal(other.parameters != 0, task.kept)
    moved = task.to("cpu", torch.float32)
    assert torch.equal(moved.kept, task.kept)
    assert moved.parameters.dtype == torch.float32
    assert torch.equal(dense.parameters[task.kept], task.parameters[task.kept])
    assert dense.kept is None
    assert task.pruned(None).with_parameters(dense.parameters).parameters.ne(0).all()
    for bad in (task.kept[:-1], task.kept.double()):
        with pytest.raises(ValueError, match=r"kept has shape .* this model takes .* torch.bool"):
            dense.pruned(bad)


@pytest.mark.parametrize(
    "defense", [NoDefense(), GaussianNoise(1.0), DpSgd(), Withhold()], ids=repr
)
def test_what_the_model_does_not_have_is_not_sent(defense):
    task = _pruned(_task())
    batch = Batch(*_batch(3))
    ready = chain(defense).resolve(task, 3)
    update, _ = client.respond(task, batch, ready, stream(0))
    assert (update.rows[0, ~task.kept] == 0).all()
    assert not update.mask[0, ~task.kept].any()
    if not isinstance(defense, Withhold):
        assert torch.equal(update.mask[0], task.kept)
        dense, _ = client.respond(replace(task, kept=None), batch, ready, stream(0))
        if defense == GaussianNoise(1.0):  # the noise of what is sent is the same draw
            torch.testing.assert_close(update.rows[0], dense.rows[0] * task.kept)
        assert type(update.law) is type(dense.law)
        assert not update.mask_private


def test_what_a_client_keeps_comes_back_to_it():
    seen = []

    class Counting(Clip):
        def init(self, task):
            return 0

        def begin(self, task, state, source):
            seen.append(("begin", state))
            return task.with_parameters(task.parameters + 1), state + 1

        def transform(self, update, state, context, source):
            seen.append(("send", state, float(context.task.parameters[0])))
            return update, state + 1

    task, batch = _task(), Batch(*_batch(2))
    defense, state = chain(Counting(1.0)), None
    for _ in range(2):
        update, state = client.respond(task, batch, defense, stream(0), state)
    first = float(task.parameters[0]) + 1
    assert seen == [("begin", 0), ("send", 1, first), ("begin", 2), ("send", 3, first)]
    assert state == (4,)
    want = gradient(task.with_parameters(task.parameters + 1), batch.inputs, batch.labels)
    torch.testing.assert_close(update.rows[0], want)
    assert chain(Counting(1.0)).links[0].changes_start
    assert not Clip(1.0).changes_start
