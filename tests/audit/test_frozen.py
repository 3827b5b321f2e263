"""Audits of a user's model of which a part is frozen: attacks, bounds and trainings."""

import pytest
import torch

from leakbound import audit
from leakbound.assess.record import Assessment, Training
from leakbound.audit.context import PlanContext, check_plan
from leakbound.core import Task

MODEL = """
    import torch
    from torch import nn


    def build(input_shape, classes, frozen="first"):
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(36, classes)
        )
        if frozen != "none":
            model[0 if frozen == "first" else 3].requires_grad_(False)
        if frozen == "all":
            model.requires_grad_(False)
        return model
"""


@pytest.fixture
def frozen(table, user_module):
    """The plan of a model with a frozen backbone."""
    table["models"] = [{"name": user_module("adapted", MODEL)}]
    table["attacks"] = [{"name": "inverting_gradients", "steps": 20}, {"name": "linear_inversion"}]
    table["seeds"] = [0]
    table["utility"] = {"rounds": 2, "repeats": 1}
    table["error_bound"] = {"kind": "trace", "prior": "gaussian"}
    return table


def test_an_audit(frozen):
    found = list(audit.run(audit.parse(frozen)))
    cells = [r.record for r in found if isinstance(r.record, Assessment)]
    assert {record.status for record in cells} <= {"ok", "not_applicable"}
    for record in cells:
        assert record.model.size == 370
        if record.attack.name == "linear_inversion":
            assert record.reason == "no linear layer with a bias sees the input"
        else:
            assert record.status == "ok"
    noisy = [r for r in cells if r.defense.name != "none" and r.status == "ok"]
    assert all(r.bounds for r in noisy)
    trainings = [r.record for r in found if isinstance(r.record, Training)]
    assert all(training.curve for training in trainings)
    assert trainings


def test_a_frozen_last_layer_makes_labels_unknown(frozen):
    frozen["models"][0]["frozen"] = "last"
    frozen["threat"] = {"labels_known": False}
    found = [result.record for result in audit.run(audit.parse(frozen))]
    records = [record for record in found if isinstance(record, Assessment)]
    searched = [r for r in records if r.attack.name == "inverting_gradients"]
    assert {r.status for r in searched} == {"not_applicable"}
    assert all("the last linear layer '3' is frozen" in r.reason for r in searched)


def test_training_leaves_the_frozen_part_as_it_is(frozen):
    bench = PlanContext(audit.parse(frozen).data)
    (spec,) = audit.parse(frozen | {"models": [frozen["models"][0] | {"train_steps": 3}]}).models
    (fresh,) = audit.parse(frozen).models
    trained, start = bench.task(spec, 0), bench.task(fresh, 0)
    assert not torch.equal(trained.parameters, start.parameters)
    for name, value in start.frozen.items():
        assert torch.equal(trained.tensors()[name], value)


def test_nothing_to_train_is_refused(frozen):
    frozen["models"][0]["frozen"] = "all"
    plan = audit.parse(frozen)
    with pytest.raises(ValueError, match="no trainable parameter"):
        check_plan(plan, PlanContext(plan.data))


def test_nothing_changes_where_nothing_is_frozen(table):
    table["models"] = [{"name": "lenet"}]
    bench = PlanContext(audit.parse(table).data)
    task = bench.task(audit.parse(table).models[0], 0)
    assert task.frozen == {}
    assert isinstance(task, Task)
    assert not any(name.endswith(("weight", "bias")) for name in task.buffers)
