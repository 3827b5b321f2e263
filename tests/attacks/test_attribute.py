"""One attribute of a person whose other values are known."""

import math
from dataclasses import replace

import pytest
import scipy.stats
import torch
from torch import nn

from leakbound.attacks.attribute import read_attribute
from leakbound.core import Batch, LocalPlan, NotApplicable, Task
from leakbound.data import load
from leakbound.defenses import NoDefense, SecureAggregation
from leakbound.protocol import play
from leakbound.randomness import stream


@pytest.fixture(scope="module")
def people():
    return load("german")


PLANS = {
    "one step": LocalPlan(learning_rate=0.1),
    "epochs of SGD": LocalPlan(steps=24, learning_rate=0.05, batch_size=32),
    "epochs of Adam": LocalPlan(steps=24, learning_rate=1e-3, batch_size=32, optimizer="adam"),
}


def outcomes(people, plan, *, size, sites=1, trials=6, hidden=True):
    """Right answers and questions about sole carriers of a level."""
    inputs, labels = people.inputs, people.labels
    levels = [at for start, stop in people.domain.groups for at in range(start, stop)]
    right = asked = 0
    for trial in range(trials):
        draw = stream(trial, "sites")
        model = nn.Sequential(nn.Linear(inputs.shape[1], 64), nn.ReLU(), nn.Linear(64, 2))
        with torch.no_grad():
            for weights in model.parameters():
                weights.copy_(0.2 * torch.randn(weights.shape, generator=draw))
        order = torch.randperm(len(inputs), generator=draw)
        own, public = order[: size * sites], order[500:]
        parts = [Batch(inputs[at], labels[at]) for at in own.split(size)]
        defense = NoDefense() if sites == 1 else SecureAggregation(sites)
        sources = [stream(trial, "play", at) for at in range(sites + 1)]
        seen = play(Task.of(model, plan=plan), parts, defense, sources).observation
        seen = replace(seen, auxiliary=Batch(inputs[public], labels[public]))
        carried = inputs[own].sum(0)
        for level in [at for at in levels if carried[at] == 1][:2]:
            person = int(own[int(inputs[own, level].argmax())])
            asks = Batch(inputs[person].expand(2, -1), torch.tensor([0, 1]))
            reading = read_attribute(
                seen,
                asks,
                stream(trial, "attack", level),
                alone=(lambda batch, at=level: batch.inputs[:, at] == 0) if hidden else None,
                replays=6,
            )
            right += reading.value == int(labels[person])
            asked += 1
    return right, asked


@pytest.mark.parametrize("name", PLANS)
def test_the_outcome_of_a_sole_carrier_is_read(name, people):
    """findings: the sign of (change of that column) x (weights of the head) gave every outcome."""
    right, asked = outcomes(people, PLANS[name], size=200)
    assert asked >= 5
    assert right == asked


def test_it_is_read_from_the_mean_over_sites(people):
    right, asked = outcomes(people, PLANS["one step"], size=50, sites=4)
    assert asked >= 5
    assert right == asked


def test_noise_leaves_what_the_bound_allows():
    """Two values at +-R and everyone else known: right with Phi(R / noise), as the filter does."""
    draw = stream(0, "noise")
    model = nn.Linear(3, 2)
    others = torch.rand(1, 3, generator=draw)
    person = torch.rand(1, 3, generator=draw)
    task = Task.of(model)
    public = Batch(others, torch.tensor([0]))
    asks = Batch(person.expand(2, -1), torch.tensor([0, 1]))
    from leakbound.client import gradient
    from leakbound.defenses import GaussianNoise

    apart = [gradient(task, torch.cat([person, others]), torch.tensor([y, 0])) for y in (0, 1)]
    radius = float((apart[1] - apart[0]).norm()) / 2
    noise = radius / 0.8
    right, trials = 0, 600
    for trial in range(trials):
        truth = trial % 2
        batch = Batch(torch.cat([person, others]), torch.tensor([truth, 0]))
        sources = [stream(trial, "play"), stream(trial, "cohort")]
        seen = play(task, [batch], GaussianNoise(noise_std=noise), sources).observation
        seen = replace(seen, auxiliary=public)
        right += read_attribute(seen, asks, stream(trial, "attack"), replays=2).value == truth
    wanted = scipy.stats.norm.cdf(0.8)
    assert abs(right / trials - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / trials)


def test_what_it_needs(people):
    batch = Batch(people.inputs[:4], people.labels[:4])
    task = Task.of(nn.Linear(people.inputs.shape[1], 2))
    seen = play(task, [batch], NoDefense(), [stream(0, "a"), stream(0, "b")]).observation
    asks = Batch(people.inputs[:1].expand(2, -1), torch.tensor([0, 1]))
    with pytest.raises(NotApplicable, match="public examples"):
        read_attribute(seen, asks, stream(0, "c"))
    few = replace(seen, auxiliary=Batch(people.inputs[:2], people.labels[:2]))
    with pytest.raises(NotApplicable, match="2 public examples for the 3"):
        read_attribute(few, asks, stream(0, "c"))
    with pytest.raises(NotApplicable, match="one completion"):
        read_attribute(seen, Batch(people.inputs[:1], people.labels[:1]), stream(0, "c"))
