"""Local updates that save memory: the same values and derivatives, from one graph at a time."""

import pytest
import torch
from torch import nn

import leakbound as lb
from leakbound._util.memory import PeakBytes
from leakbound.client import Frugal, frugal, indivisible, is_frugal, local_update
from leakbound.core import LocalPlan, Task
from leakbound.losses import LOSSES
from leakbound.randomness import normal, uniform

PLANS = {
    "sgd": LocalPlan(steps=3, learning_rate=0.1),
    "momentum": LocalPlan(steps=3, learning_rate=0.1, momentum=0.9),
    "adam": LocalPlan(steps=3, learning_rate=0.01, optimizer="adam", epsilon=1e-3),
    "minibatches": LocalPlan(steps=4, learning_rate=0.1, batch_size=2),
}


def trained(plan, *, norm=False, loss="cross_entropy"):
    torch.manual_seed(0)
    middle = nn.BatchNorm2d(3) if norm else nn.Identity()
    parts = nn.Conv2d(1, 3, 3), middle, nn.Tanh(), nn.Flatten(), nn.Linear(48, 4)
    return Task.of(nn.Sequential(*parts).double(), plan=plan, loss=loss)


def slopes(task, inputs, labels, form):
    """The update, and the derivatives of a fixed sum of it in inputs and soft labels."""
    leaves = inputs.clone().requires_grad_(), labels.clone()
    wanted = [leaves[0]]
    if labels.is_floating_point():
        wanted.append(leaves[1].requires_grad_())
    with frugal(form):
        update = local_update(task, *leaves)
    weights = normal(update.shape, lb.stream(1)).to(update)
    return update.detach(), *torch.autograd.grad((update * weights).sum(), wanted)


def batch(soft=False):
    inputs = uniform((5, 1, 6, 6), lb.stream(0)).double()
    hard = torch.tensor([0, 3, 1, 2, 2])
    return inputs, (nn.functional.one_hot(hard, 4).double() if soft else hard)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_no_bit_changes_where_nothing_is_split(plan, norm):
    task = trained(PLANS[plan], norm=norm)
    if norm and plan == "minibatches":
        task = trained(LocalPlan(steps=4, learning_rate=0.1), norm=True)
    for soft in (False, True):
        usual = slopes(task, *batch(soft), None)
        for one, two in zip(usual, slopes(task, *batch(soft), Frugal()), strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("plan", PLANS)
def test_chunks_add_up(plan):
    """Also chunks of unequal size, whose means have unequal weights."""
    task = trained(PLANS[plan])
    usual = slopes(task, *batch(soft=True), None)
    for size in (1, 2, 3):
        for one, two in zip(usual, slopes(task, *batch(soft=True), Frugal(size)), strict=True):
            assert torch.allclose(one, two, rtol=1e-9, atol=1e-12)


def test_derivatives_are_differences():
    """The same derivative by differences of updates, which share no code with a backward pass."""
    task = trained(PLANS["adam"])
    inputs, labels = batch()
    _, slope = slopes(task, inputs, labels, Frugal(2))
    along = normal(inputs.shape, lb.stream(2)).double()
    weights = normal(task.parameters.shape, lb.stream(1)).double()
    sides = [
        (local_update(task, inputs + step * along, labels) @ weights).detach()
        for step in (1e-6, -1e-6)
    ]
    assert float((slope * along).sum()) == pytest.approx(
        float(sides[0] - sides[1]) / 2e-6, rel=1e-6
    )


@pytest.mark.parametrize("name", LOSSES)
def test_every_divisible_loss_is_a_mean_of_its_parts(name):
    loss = LOSSES[name]
    shape = {"class map": (5, 4, 2, 2), "mask": (5, 1, 2, 2), "tokens": (5, 3, 4)}
    output = normal(shape.get(loss.targets, (5, 4)), lb.stream(3))
    labels = {
        "classes": lambda: torch.arange(5) % 4,
        "class map": lambda: torch.arange(20).reshape(5, 2, 2) % 4,
        "tokens": lambda: torch.arange(15).reshape(5, 3) % 4,
    }.get(loss.targets, lambda: (uniform(output.shape, lb.stream(4)) > 0.5).float())()
    model = nn.Linear(2, 2)
    if indivisible(Task.of(model, loss=name)):
        assert loss.of_inputs
        return
    parts = zip(torch.split(output, 2), torch.split(labels, 2), strict=True)
    whole = sum(loss(*part) * len(part[0]) / 5 for part in parts)
    assert torch.allclose(loss(output, labels), whole, rtol=1e-5)


def test_what_cannot_be_split_says_why():
    assert "batch norm" in indivisible(trained(LocalPlan(), norm=True))
    own = lb.Task.of(nn.Linear(2, 2), loss=lambda output, labels: output.sum())
    assert "may not be a mean" in indivisible(own)
    assert indivisible(trained(LocalPlan())) == ""


def test_one_graph_is_kept_at_a_time():
    """So memory hardly grows with the steps, and falls with the chunk."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3), nn.Tanh(), nn.Conv2d(16, 16, 3), nn.Tanh()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2)),
    )
    inputs, labels = torch.rand(8, 1, 24, 24), torch.zeros(8, dtype=torch.int64)

    def peak(steps, form):
        task = Task.of(model, plan=LocalPlan(steps=steps, learning_rate=0.1))
        with PeakBytes() as counted:
            slopes(task, inputs, labels, form)
        return counted.peak

    assert peak(6, None) > 3 * peak(6, Frugal())
    assert peak(6, Frugal()) < 1.3 * peak(1, Frugal())
    assert peak(6, Frugal(1)) < peak(6, Frugal()) / 4


def test_it_ends_with_its_block():
    with frugal(Frugal()):
        assert is_frugal()
    assert not is_frugal()
