"""Products of clipped gradients, against one gradient at a time by autograd."""

import numpy as np
import pytest
import torch
from torch import nn

from leakbound import models
from leakbound.channel import clipped_gram, gram, most_examples
from leakbound.core import Batch, LocalPlan, Task, Unit, Update
from leakbound.defenses import ClipExamples
from leakbound.randomness import stream
from leakbound.testing.common import small_task


@pytest.fixture(scope="module")
def task():
    return small_task()


@pytest.fixture(scope="module")
def batch(task):
    inputs = torch.rand(7, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    return Batch(inputs.to(task.parameters), torch.arange(7) % 3)


def one_by_one(task, batch, clip_norm):
    rows = []
    for image, label in zip(batch.inputs, batch.labels, strict=True):
        flat = task.parameters.clone().requires_grad_()
        output = torch.func.functional_call(task.model, task.tensors(flat), (image[None],))
        (row,) = torch.autograd.grad(task.loss(output, label[None]), flat)
        row = row.double().numpy() * (1 if task.kept is None else task.kept.numpy())
        rows.append(row / clip_norm / max(1.0, np.linalg.norm(row) / clip_norm))
    return np.array(rows) @ np.array(rows).T


@pytest.mark.parametrize("share", [0.5, 1.0, 2.0])
def test_products_are_those_of_single_gradients(task, batch, share):
    """Some, all and none are clipped."""
    clip_norm = share * float(np.sqrt(np.median(one_by_one(task, batch, 1e6).diagonal())) * 1e6)
    found = clipped_gram(task, batch, clip_norm)
    assert found == pytest.approx(one_by_one(task, batch, clip_norm), rel=1e-5, abs=1e-9)
    assert found.dtype == np.float64
    assert (found == found.T).all()
    assert found.diagonal().max() <= 1 + 1e-6
    assert (found == clipped_gram(task, batch, clip_norm)).all()


@pytest.mark.parametrize("name", ["mlp", "simple_convnet", "lenet"])
def test_products_need_no_gradients(name, batch, monkeypatch):
    """Those of linear layers come from inputs and deltas alone; of others, part by part."""
    model = getattr(models, name)(
        input_shape=(1, 16, 16), classes=3, generator=stream(1, "gram", name)
    )
    inputs = torch.rand(5, 1, 16, 16, generator=stream(2, "gram"))
    task, batch = Task.of(model.double()), Batch(inputs.double(), torch.arange(5) % 3)
    fast = clipped_gram(task, batch, 0.1)
    monkeypatch.setattr(gram, "example_products", lambda *_: None)
    assert fast == pytest.approx(clipped_gram(task, batch, 0.1), rel=1e-12, abs=1e-14)
    assert fast == pytest.approx(one_by_one(task, batch, 0.1), rel=1e-10, abs=1e-12)


def test_parts_change_nothing(task, batch, monkeypatch):
    whole = clipped_gram(task, batch, 0.1)
    monkeypatch.setattr(gram, "example_products", lambda *_: None)
    monkeypatch.setattr(gram, "PART_BYTES", 5000)
    assert clipped_gram(task, batch, 0.1) == pytest.approx(whole, rel=1e-6, abs=1e-12)


def test_a_pruned_model_sends_what_is_left(task, batch):
    kept = torch.arange(len(task.parameters)) % 3 != 0
    small = task.pruned(kept)
    found = clipped_gram(small, batch, 0.1)
    assert found == pytest.approx(one_by_one(small, batch, 0.1), rel=1e-5, abs=1e-9)


class Inverse(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.last(1 / x.flatten(1))


def test_gradients_that_are_not_finite_add_nothing():
    """As the defense's own link has it."""
    task = Task.of(Inverse())
    inputs = torch.full((3, 1, 2, 2), 0.5)
    inputs[1] = 0.0
    batch = Batch(inputs, torch.tensor([0, 1, 1]))
    found = clipped_gram(task, batch, 0.1)
    assert np.isfinite(found).all()
    assert (found[1] == 0).all()
    assert found[0, 0] == pytest.approx(1.0, abs=1e-6)
    rows = torch.tensor([[3.0, 4.0], [float("nan"), 1.0]])
    update = Update(rows, Unit.EXAMPLE, (1, 1))
    assert ClipExamples(1.0).transform(update, None, None, None)[0].rows[1].tolist() == [0, 0]


def test_memory_is_checked_before_it_is_taken(task, batch, monkeypatch):
    fit = most_examples(task)
    weights = len(task.parameters) * task.parameters.element_size()
    assert 8 * fit**2 + fit * weights <= gram.MOST_BYTES < 8 * (fit + 1) ** 2 + (fit + 1) * weights
    monkeypatch.setattr(gram, "MOST_BYTES", 8 * 25 + 5 * weights)
    assert most_examples(task) == 5
    monkeypatch.setattr(gram, "_clipped", lambda *_: pytest.fail("memory was taken"))
    with pytest.raises(ValueError, match=r"batch holds 7 examples; .* give at most 5"):
        clipped_gram(task, batch, 0.1)


def test_what_has_no_gradients_of_its_own_is_refused(batch):
    size = batch.inputs[0].numel()
    coupled = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(size), nn.Linear(size, 4))
    plain = nn.Sequential(nn.Flatten(), nn.Linear(size, 4))
    inputs = Batch(batch.inputs.float(), batch.labels % 4)
    cases = [
        (Task.of(coupled), "batch norm in training mode"),
        (Task.of(plain, plan=LocalPlan(steps=2)), "steps is 2"),
        (Task.of(plain.half()), "too coarse"),
    ]
    for task, words in cases:
        with pytest.raises(ValueError, match=words):
            clipped_gram(task, inputs, 1.0)
    with pytest.raises(ValueError, match="clip_norm is 0"):
        clipped_gram(cases[1][0], inputs, 0.0)


def test_how_batches_are_cut_does_not_matter(batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(batch.inputs[0].numel(), 4))
    inputs = Batch(batch.inputs.float(), batch.labels % 4)
    found = [
        clipped_gram(Task.of(model, plan=LocalPlan(batch_size=size)), inputs, 1.0)
        for size in (None, 2)
    ]
    assert (found[0] == found[1]).all()
