"""The gradient behind a step of an adaptive optimizer, and what remains where it cannot be read."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from leakbound import client
from leakbound.attacks import LinearInversion, SignInversion
from leakbound.attacks.adaptive import undone
from leakbound.attacks.idle import idle
from leakbound.core import (
    Batch,
    Gaussian,
    LocalPlan,
    NotApplicable,
    Observation,
    Task,
    Unit,
    Update,
)
from leakbound.randomness import normal, stream, uniform

SHAPE = (1, 8, 8)


def seen_of(
    name, rate=1e-3, *, count=1, steps=1, dtype=torch.float32, low=0.0, seed=0, width=40, **more
):
    """The observation of weights that PyTorch's own optimizer left, and the batch behind it."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 5)).to(
        dtype
    )
    task = Task.of(model, input_range=(low, 1.0))
    inputs = low + (1 - low) * uniform((count, *SHAPE), stream(seed, "inputs")).to(dtype)
    inputs = inputs * (inputs.abs() > 0.2)
    labels = torch.arange(count) % 5
    theirs = getattr(torch.optim, name)(model.parameters(), lr=rate, **more)
    for _ in range(steps):
        theirs.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        theirs.step()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    plan = LocalPlan(steps, rate, optimizer=name.lower(), **more)
    row = (task.parameters - after) / rate
    seen = Observation(
        Update(row[None], Unit.CLIENT, (count,)),
        replace(task, plan=plan),
        (count,),
        SHAPE,
        labels=labels,
    )
    return seen, inputs, labels


def true_gradient(seen, inputs, labels):
    return client.gradient(seen.task, inputs, labels).detach()


@pytest.mark.parametrize(
    ("name", "rate", "more"),
    [
        ("Adam", 1e-3, {}),
        ("Adam", 1e-3, {"weight_decay": 1e-3}),
        ("AdamW", 1e-3, {"weight_decay": 1e-2}),
        ("RMSprop", 1e-3, {}),
        ("Adagrad", 1e-2, {}),
    ],
)
def test_a_step_in_double_precision_is_undone_to_the_gradient(name, rate, more):
    seen, inputs, labels = seen_of(name, rate, dtype=torch.float64, **more)
    gradient = undone(seen)
    known = gradient.update.mask[0]
    assert float(known.double().mean()) > 0.9
    true = true_gradient(seen, inputs, labels)
    off = (gradient.update.rows[0] - true)[known].norm() / true.norm()
    assert float(off) < 1e-4
    assert gradient.task.plan.is_gradient


@pytest.mark.parametrize(("name", "more"), [("Adam", {}), ("AdamW", {"weight_decay": 0.0})])
def test_the_stated_error_is_that_of_stored_weights(name, more):
    ratios = []
    for seed in range(4):
        seen, inputs, labels = seen_of(name, seed=seed, **more)
        found = undone(seen)
        error = found.noise_variance[0].sqrt()
        off = (found.update.rows[0] - true_gradient(seen, inputs, labels)).double()
        # Where the error is small beside the gradient, its slope holds.
        sure = found.update.mask[0] & (error < 0.1 * found.update.rows[0].abs())
        ratios.append((off / error)[sure])
    spread = float(torch.cat(ratios).square().mean().sqrt())
    assert 0.3 < spread < 1.5, spread


def test_another_epsilon_is_seen_as_wrong():
    seen, inputs, labels = seen_of("Adam", dtype=torch.float64)
    wrong = replace(seen, task=replace(seen.task, plan=replace(seen.task.plan, epsilon=1e-7)))
    known = undone(wrong).update.mask[0]
    off = (undone(wrong).update.rows[0] - true_gradient(seen, inputs, labels))[known]
    assert float(off.norm()) > 5 * float(true_gradient(seen, inputs, labels)[known].norm())
    # Its scale is unknown then, and a quotient of two gradients does not have it.
    answer = LinearInversion()(wrong, stream(0, "attack"))
    assert float((answer.inputs - inputs).abs().max()) < 1e-2


@pytest.mark.parametrize(
    ("name", "low", "least"),
    [("Adam", 0.0, 25), ("Adam", -1.0, 20), ("AdamW", 0.0, 25), ("RMSprop", -1.0, 45)],
)
def test_an_example_is_read_from_one_step_in_single_precision(name, low, least):
    more = {"weight_decay": 0.0} if name == "AdamW" else {}
    errors = []
    for seed in range(4):
        seen, inputs, _ = seen_of(name, low=low, seed=seed, width=400, **more)
        answer = LinearInversion()(seen, stream(seed, "attack"))
        error = float((answer.inputs - inputs).square().mean()) / (1 - low) ** 2
        errors.append(-10 * math.log10(error))
    print(errors)
    assert sum(errors) / len(errors) > least, errors


def test_halves_hide_the_sizes():
    seen, _, _ = seen_of("Adam", 1e-4)
    coarse = seen.task.parameters.bfloat16().float()
    seen = replace(seen, task=replace(seen.task, parameters=coarse))
    with pytest.raises(NotApplicable, match="rounding hides"):
        undone(replace(seen, update=replace(seen.update, rows=seen.update.rows.sign())))


def test_what_cannot_be_undone_says_why():
    with pytest.raises(NotApplicable, match="3 steps of Adam"):
        undone(seen_of("Adam", steps=3)[0])
    seen, _, _ = seen_of("Adam")
    noisy = replace(seen, update=replace(seen.update, law=Gaussian(1.0)))
    with pytest.raises(NotApplicable, match="noise"):
        undone(noisy)
    plan = replace(seen.task.plan, optimizer="lion")
    with pytest.raises(NotApplicable, match="Lion"):
        undone(replace(seen, task=replace(seen.task, plan=plan)))


@pytest.mark.parametrize("more", [{}, {"momentum": 0.9}])
@pytest.mark.parametrize("steps", [1, 4])
def test_the_multiple_of_the_weights_is_that_of_training_without_gradients(steps, more):
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    before = weight.detach().clone()
    theirs = torch.optim.SGD([weight], lr=0.1, weight_decay=0.3, **more)
    for _ in range(steps):
        weight.grad = torch.zeros_like(weight)
        theirs.step()
    plan = LocalPlan(steps, 0.1, weight_decay=0.3, **more)
    assert float(idle(plan, before)) == pytest.approx(float((1 - weight.detach()) / 0.1))


def test_known_decay_of_sgd_is_undone():
    seen, inputs, _ = seen_of("SGD", 0.1, weight_decay=0.05)
    answer = LinearInversion()(seen, stream(0, "attack"))
    assert float((answer.inputs - inputs).abs().max()) < 1e-4


@pytest.mark.parametrize("steps", [1, 5, 20])
@pytest.mark.parametrize("name", ["Adam", "RMSprop", "Adagrad"])
def test_zeros_are_exact_and_signs_are_right(name, steps):
    right = []
    for seed in range(4):
        seen, inputs, _ = seen_of(name, steps=steps, low=-1.0, seed=seed)
        answer = SignInversion()(seen, stream(seed, "attack"))
        assert torch.equal(answer.inputs == 0, inputs == 0)
        right.append((answer.inputs.sign() == inputs.sign()).double().mean())
    assert float(torch.stack(right).mean()) >= 0.99


def test_inputs_of_one_sign_give_a_silhouette():
    seen, inputs, _ = seen_of("Adam", steps=20)
    answer = SignInversion()(seen, stream(0, "attack"))
    assert torch.equal(answer.inputs > 0, inputs > 0)
    assert answer.problem is not None


def test_sizes_of_public_examples_are_used():
    seen, inputs, _ = seen_of("Adam", steps=5)
    others = Batch(0.3 * torch.ones(5, *SHAPE), torch.zeros(5, dtype=torch.long))
    answer = SignInversion()(replace(seen, auxiliary=others), stream(0, "attack"))
    torch.testing.assert_close(answer.inputs, 0.3 * (inputs > 0))


def test_random_updates_give_no_example():
    """Chance: the step of random gradients tells nothing of the example."""
    seen, inputs, _ = seen_of("Adam", low=-1.0)
    noise = normal(seen.update.rows.shape, stream(1, "noise")) * 1e-3
    steps = noise / (noise.abs() + 1e-8)
    answer = LinearInversion()(
        replace(seen, update=replace(seen.update, rows=steps)), stream(0, "attack")
    )
    agreement = (answer.inputs.sign() == inputs.sign()).double()[inputs != 0].mean()
    assert 0.3 < float(agreement) < 0.7
