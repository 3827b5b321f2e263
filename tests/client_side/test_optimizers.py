"""What a watch of PyTorch's optimizers declares, and what it does not."""

import pytest
import torch

from leakbound.captured.observe import plan_of
from leakbound.client_side.optimizers import OptimizerWatch
from leakbound.core import LocalPlan

OPTIM = torch.optim


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.ones(3))


@pytest.fixture
def watch():
    made = OptimizerWatch()
    with made.watching():
        yield made


def step(rule, weight):
    rule.zero_grad()
    weight.square().sum().backward()
    rule.step()


@pytest.mark.parametrize(
    ("rule", "settings", "plan"),
    [
        (OPTIM.SGD, {"momentum": 0.5}, LocalPlan(momentum=0.5)),
        (OPTIM.Adam, {"eps": 1e-4}, LocalPlan(optimizer="adam", betas=(0.9, 0.999), epsilon=1e-4)),
        (
            OPTIM.AdamW,
            {"betas": (0.5, 0.75)},
            LocalPlan(optimizer="adamw", betas=(0.5, 0.75), epsilon=1e-8),
        ),
        (
            OPTIM.RMSprop,
            {"alpha": 0.5},
            LocalPlan(optimizer="rmsprop", betas=(0.0, 0.5), epsilon=1e-8),
        ),
        (OPTIM.Adagrad, {"eps": 1e-3}, LocalPlan(optimizer="adagrad", epsilon=1e-3)),
    ],
)
def test_settings_reach_the_plan(rule, settings, plan, weight, watch):
    made = rule([weight], lr=0.25, weight_decay=0.5, **settings)
    step(made, weight)
    step(made, weight)
    about = watch.about()
    assert plan_of(about["optimizer"]) == plan
    assert (about["steps"], about["learning_rate"], about["weight_decay"]) == ("2", "0.25", "0.5")
    assert "optimizer_note" not in about


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda w: OPTIM.NAdam([w]), "NAdam, which is not simulated"),
        (lambda w: OPTIM.Adam([w], amsgrad=True), "Adam with amsgrad = True"),
        (lambda w: OPTIM.SGD([w], lr=1.0, momentum=0.5, nesterov=True), "nesterov = True"),
        (lambda w: OPTIM.RMSprop([w], momentum=0.5), "momentum = 0.5"),
        (lambda w: OPTIM.Adagrad([w], lr_decay=0.5), "lr_decay = 0.5"),
        (lambda w: OPTIM.SGD([w], lr=-1.0 + 2, maximize=True), "maximize = True"),
    ],
)
def test_what_no_plan_can_say_is_a_note(make, words, weight, watch):
    step(make(weight), weight)
    about = watch.about()
    assert about.keys() == {"optimizer_note"}
    assert words in about["optimizer_note"]


def test_a_schedule_leaves_no_single_rate(weight, watch):
    rule = OPTIM.SGD([weight], lr=0.5, weight_decay=0.5)
    step(rule, weight)
    rule.param_groups[0]["lr"] = 0.25
    step(rule, weight)
    about = watch.about()
    assert about["learning_rate"] is None
    assert "weight_decay" not in about
    assert "learning_rate was 0.25 to 0.5" in about["optimizer_note"]


def test_layer_wise_rates_leave_no_single_rate(weight, watch):
    other = torch.nn.Parameter(torch.ones(1))
    rule = OPTIM.Adam([{"params": [weight]}, {"params": [other], "lr": 0.125}], lr=0.5)
    step(rule, weight)
    assert watch.about()["learning_rate"] is None


def test_a_state_of_earlier_rounds_is_named(weight, watch):
    rule = OPTIM.Adagrad([weight])
    step(rule, weight)
    assert "optimizer_note" not in watch.about(), "Adagrad makes its empty state at the start"
    watch.forget()
    step(rule, weight)
    assert watch.about()["steps"] == "1"
    assert "its state is from earlier rounds" in watch.about()["optimizer_note"]


def test_several_optimizers_are_one_training_only_without_a_state(weight, watch):
    for _ in range(2):  # one for each epoch
        step(OPTIM.SGD([weight], lr=0.5), weight)
    assert watch.about()["steps"] == "2"
    assert "optimizer_note" not in watch.about()
    step(OPTIM.SGD([weight], lr=0.5, momentum=0.5), weight)
    assert "in 3 optimizers" in watch.about()["optimizer_note"]
    watch.forget()
    for _ in range(2):
        step(OPTIM.SGD([weight], lr=0.5, momentum=0.5), weight)
    assert "in 2 optimizers" in watch.about()["optimizer_note"]


def test_nothing_is_seen_of_a_training_by_hand(watch):
    assert watch.about() == {}
