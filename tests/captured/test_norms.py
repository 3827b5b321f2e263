"""Batch norms of clients: their mode, their passes, and the statistics of their batch."""

import copy

import pytest
import torch
from torch import nn

from leakbound import Batch
from leakbound.captured import load, norms
from leakbound.captured.observe import TrainingInfo, infer_context, task_of
from leakbound.domains import of_shape

from .flat import attack_update

SHAPE = (1, 8, 8)


def net(momentum=0.1):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.BatchNorm2d(4, momentum=momentum),
        nn.Tanh(),
        nn.Flatten(),
        nn.BatchNorm1d(64, momentum=momentum),
        nn.Linear(64, 3),
    )


def client(model, count=4, steps=1, training=True):
    """Weights before and after ordinary training with PyTorch, and what went into each norm."""
    batch = Batch(
        torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(1)),
        torch.arange(count) % 3,
    )
    model = copy.deepcopy(model).train(training)
    for norm in (model[1], model[4]):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
    before = copy.deepcopy(model.state_dict())
    inside = {}

    def note(norm, args):
        inside.setdefault(1 if norm is model[1] else 4, args[0])

    for norm in (model[1], model[4]):
        norm.register_forward_pre_hook(note)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
        optimizer.step()
    return before, model.state_dict(), batch, inside


def read(model, before, after, kind="weights", **known):
    if kind == "delta":
        after = {name: value - before[name] for name, value in after.items()}
    capture = load(after, before, kind=kind)
    task, notes = task_of(model, capture, of_shape(SHAPE))
    info = TrainingInfo(**{"examples": 4, "learning_rate": 0.1, **known})
    return infer_context(capture, task, info, input_shape=SHAPE), task, " ".join(notes)


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_the_clients(training, built):
    model = net()
    before, after, *_ = client(model, training=training)
    inferred, task, notes = read(model.train(built), before, after)
    assert task.coupled is training
    assert ("were set to" in notes) is (training is not built)
    assert ("affect each other" in notes) is training
    assert (inferred.observation.statistics is not None) is training
    assert inferred.observation.threat.statistics_known is training
    held = {name for name in before if "running" not in name}
    without = [{name: part[name] for name in held} for part in (before, after)]
    assert read(model.train(built), *without)[1].coupled is built  # nothing shows the mode


@pytest.mark.parametrize("kind", ["weights", "delta"])
@pytest.mark.parametrize("momentum", [0.1, 0.7])
def test_the_statistics_are_those_of_the_batch(momentum, kind):
    model = net(momentum)
    before, after, _, inside = client(model)
    found = read(model, before, after, kind)[0].observation.statistics
    for at in (1, 4):
        others = [0, *range(2, inside[at].ndim)]
        variance, mean = torch.var_mean(inside[at].detach(), others, correction=0)
        torch.testing.assert_close(found[str(at)][0], mean, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(found[str(at)][1], variance, rtol=1e-3, atol=1e-5)


def test_several_passes_are_counted_and_give_no_statistics_of_one_batch():
    model = net()
    before, after, *_ = client(model, steps=3)
    inferred, task, _ = read(model, before, after)
    steps = {one.name: one for one in inferred.findings}["local steps"]
    assert (steps.value, steps.sure) == ("3", False)
    assert "num_batches_tracked" in steps.how
    assert inferred.observation.statistics is None
    for known in ({"steps": 3}, {"steps": 1, "batch_size": 2}):
        assert read(model, before, after, **known)[0].observation.statistics is None
    assert norms.passes(load(after, before, kind="weights"), task) == 3
    cumulative = client(net(momentum=None))
    assert read(net(momentum=None), *cumulative[:2])[0].observation.statistics is None
    del after["1.num_batches_tracked"], after["4.num_batches_tracked"]
    assert read(model, before, after)[0].observation.statistics is None  # who knows how many steps


@pytest.mark.slow
def test_the_statistics_in_a_file_help_the_search():
    model = net()
    before, after, batch, _ = client(model, count=8)
    scores = []
    for held in (True, False):
        sent = {name: value for name, value in after.items() if held or "running" not in name}
        found = attack_update(
            *(sent, model),
            before=before,
            kind="weights",
            examples=8,
            steps=1,
            learning_rate=0.1,
            labels=batch.labels,
            truth=batch,
            input_shape=SHAPE,
            attacks="strong_matching,steps=300,batch_norm=0.1,features=none",
        )
        scores.append(sum(found.records[0].scores) / 8)
    assert scores[0] > scores[1], scores
