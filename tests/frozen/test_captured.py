"""Captured updates of models of which a part is frozen."""

import copy
from dataclasses import replace

import pytest
import torch

from leakbound import client, tensors
from leakbound.captured import load
from leakbound.captured.observe import TrainingInfo, infer_context, task_of
from leakbound.core import LocalPlan, Task
from leakbound.domains import of_shape

from ..captured.flat import attack_update

SHAPE, RATE = (1, 6, 6), 0.1


def trained_on(model, batch, steps=1):
    """The state dict after plain SGD of what is trained."""
    after = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in after.parameters() if p.requires_grad], lr=RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(after(batch.inputs), batch.labels).backward()
        optimizer.step()
    return {name: value.clone() for name, value in after.state_dict().items()}


def own(model, state):
    return {name: state[name] for name, p in model.named_parameters() if p.requires_grad}


def read(capture, model, examples=4):
    task, notes = task_of(model, capture, of_shape(SHAPE), classes=3)
    told = TrainingInfo(examples=examples, learning_rate=RATE, steps=1)
    inferred = infer_context(capture, task, told, input_shape=SHAPE)
    return inferred.observation, (*notes, *inferred.notes)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *((form, form) for form in ("all", "trained", "listed", "trained, listed")),
        *(("all", "trained"), ("trained", "listed"), ("trained, listed", "all")),
    ],
)
def test_every_form_is_the_same_update(model, batch, before, after):
    start = {name: value.clone() for name, value in model.state_dict().items()}
    end = trained_on(model, batch)

    def form(state, how):
        named = own(model, state) if "trained" in how else state
        return list(named.values()) if "listed" in how else named

    capture = load(form(end, after), form(start, before), kind="weights")
    seen, notes = read(capture, model)
    wanted = client.gradient(Task.of(model), batch.inputs, batch.labels)
    torch.testing.assert_close(seen.update.rows[0], wanted, rtol=1e-3, atol=1e-5)
    words = "frozen tensors"
    assert any(words in note for note in notes) == ("trained" in before)
    assert not any("were changed by the training" in note for note in notes)


@pytest.mark.parametrize("kind", ["gradient", "delta"])
def test_gradients_and_changes_hold_nothing_or_zeros_for_what_is_frozen(model, batch, kind):
    start, end = model.state_dict(), trained_on(model, batch)
    scale = -1 / RATE if kind == "gradient" else 1.0
    whole = {name: scale * (end[name] - start[name]) for name in start}
    for named in (whole, own(model, whole)):
        capture = load(named, start, kind=kind)
        seen, notes = read(capture, model)
        wanted = client.gradient(Task.of(model), batch.inputs, batch.labels)
        torch.testing.assert_close(seen.update.rows[0], wanted, rtol=1e-3, atol=1e-4)
        assert not notes


def test_frozen_weights_are_those_of_the_weights_before(make_model, batch):
    """The model's code may build others: a pretrained backbone comes with the server's message."""
    server = make_model("frozen backbone")
    fresh = make_model("frozen backbone")
    with torch.no_grad():
        fresh[0].weight.normal_(generator=torch.Generator().manual_seed(1))
    capture = load(trained_on(server, batch), dict(server.state_dict()), kind="weights")
    seen, notes = read(capture, fresh)
    assert torch.equal(seen.task.tensors()["0.weight"], server[0].weight)
    replayed = client.gradient(seen.task, batch.inputs, batch.labels)
    torch.testing.assert_close(seen.update.rows[0], replayed, rtol=1e-3, atol=1e-5)
    assert not notes


def test_frozen_weights_that_moved_are_said(make_model, batch):
    model = make_model("frozen backbone")
    start, end = dict(model.state_dict()), trained_on(model, batch)
    end["0.weight"] = end["0.weight"] + 0.01
    _, notes = read(load(end, start, kind="weights"), model)
    (note,) = notes
    assert "1 of 8 tensors that are frozen in the model (such as 0.weight) were changed" in note
    assert "requires_grad_(True)" in note
    halves = {
        k: v.half() if v.is_floating_point() else v for k, v in trained_on(model, batch).items()
    }
    assert not [n for n in read(load(halves, start, kind="weights"), model)[1] if "frozen" in n]


def test_a_frozen_weight_of_another_shape_is_refused(make_model, batch):
    model = make_model("frozen backbone")
    end = trained_on(model, batch)
    end["0.weight"] = torch.zeros(4, 1, 5, 5)
    with pytest.raises(
        ValueError, match=r"0.weight is \(4, 1, 5, 5\), in the model \(4, 1, 3, 3\)"
    ):
        read(load(end, dict(model.state_dict()), kind="weights"), model)


def test_frozen_weights_that_are_not_finite_are_refused(make_model, batch):
    model = make_model("frozen backbone")
    start, end = dict(model.state_dict()), trained_on(model, batch)
    start["0.weight"] = start["0.weight"] / 0
    with pytest.raises(ValueError, match=r"before: 0\.weight"):
        read(load(end, start, kind="weights"), model)


def test_the_order_of_the_state_dict_is_kept():
    """A layer of which only the bias is trained is still listed weight first."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 3))
    model[1].weight.requires_grad_(False)
    task = Task.of(model)
    values = [torch.zeros(3, 3), torch.ones(3)]
    found = tensors.flat(task, dict(zip("01", values, strict=True)), what="update")
    assert found.tolist() == [1.0, 1.0, 1.0]


def test_an_adapter_is_attacked_by_what_it_sends(make_model, batch):
    model = make_model("LoRA")
    start, end = dict(model.state_dict()), trained_on(model, batch)
    found = attack_update(
        own(model, end), model, before=start, kind="weights", input_shape=SHAPE, examples=4,
        learning_rate=RATE, steps=1,
        attacks=["linear_inversion", "inverting_gradients"],
    )  # fmt: skip
    assert [r.model.size for r in found.records] == [142, 142]
    for record in found.records:
        assert record.status == "not_applicable"
        assert "is frozen" in record.reason
    assert "give the labels" in found.records[1].reason
    found = attack_update(
        own(model, end), model, before=start, kind="weights", input_shape=SHAPE, steps=1,
        labels=batch.labels, learning_rate=RATE, attacks=["inverting_gradients"],
    )  # fmt: skip
    assert found.records[0].status == "ok"


def test_several_steps_of_an_adapter(make_model, batch):
    model = make_model("LoRA")
    capture = load(
        own(model, trained_on(model, batch, 3)), dict(model.state_dict()), kind="weights"
    )
    task, _ = task_of(model, capture, of_shape(SHAPE), classes=3)
    told = TrainingInfo(examples=4, learning_rate=RATE, steps=3)
    seen = infer_context(capture, task, told, input_shape=SHAPE).observation
    task = replace(Task.of(model), plan=LocalPlan(3, RATE))
    wanted = client.local_update(task, batch.inputs, batch.labels)
    torch.testing.assert_close(seen.update.rows[0], wanted, rtol=1e-3, atol=1e-4)
