"""One attribute of a person whose other values are known."""

import math
from dataclasses import replace

import pytest
import scipy.stats
import torch
from torch import nn

from leakbound.attacks.attribute import (
    _chosen,
    _MatchedFilter,
    _Separation,
    read_attribute,
)
from leakbound.core import Batch, LocalPlan, NotApplicable, Task
from leakbound.data import load
from leakbound.defenses import DpSgd, NoDefense, SecureAggregation
from leakbound.protocol import play
from leakbound.randomness import stream


@pytest.fixture(scope="module")
def people():
    return load("german")


PLANS = {
    "one step": LocalPlan(learning_rate=0.1),
    "epochs of SGD": LocalPlan(steps=14, learning_rate=0.05, batch_size=32),
    "epochs of Adam": LocalPlan(steps=14, learning_rate=1e-3, batch_size=32, optimizer="adam"),
}


TESTED = 4
"""Updates of whose people a p-value is asked for, which takes 200 trainings."""


def outcomes(people, plan, *, size, sites=1, trials=6, hidden=True):
    """Right answers about sole carriers, how many are asked for, and p-values of some."""
    inputs, labels = people.inputs, people.labels
    levels = [at for start, stop in people.domain.groups for at in range(start, stop)]
    right = asked = 0
    tested = []
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
                tests=99 if trial < TESTED else 0,
            )
            right += reading.value == int(labels[person])
            if reading.p_value is not None:
                tested.append(reading.p_value)
            asked += 1
    return right, asked, tested


@pytest.mark.parametrize("name", PLANS)
def test_the_outcome_of_a_sole_carrier_is_read(name, people):
    """findings: the sign of (change of that column) x (weights of the head) gave every outcome."""
    right, asked, tested = outcomes(people, PLANS[name], size=200)
    assert asked >= 5
    assert right == asked
    # A training with the same value is farther away than 99 others in 1 of 100 cases.
    assert sum(p_value <= 0.01 for p_value in tested) >= len(tested) - 1 > 1


def test_it_is_read_from_the_mean_over_sites(people):
    right, asked, tested = outcomes(people, PLANS["one step"], size=50, sites=4)
    assert asked >= 5
    assert right == asked
    assert sum(p_value <= 0.01 for p_value in tested) >= len(tested) - 1 > 1


def readings(people, defense, *, absent=False, unmoved=False, runs=300, size=4):
    """Of `runs` people in updates of `size`: their values, and what was read with its p-value."""
    inputs, labels = people.inputs, people.labels
    for run in range(runs):
        draw = stream(run, "chance")
        order = torch.randperm(len(inputs), generator=draw)
        person, *others = order[: size + 1].tolist()
        public = order[500:]
        model = nn.Linear(inputs.shape[1], 2)
        with torch.no_grad():
            for weights in model.parameters():
                weights.copy_(0.2 * torch.randn(weights.shape, generator=draw))
        here = torch.tensor(others if absent else [person, *others[1:]])
        batch = Batch(inputs[here], labels[here])
        sources = [stream(run, "play", at) for at in range(2)]
        seen = play(Task.of(model), [batch], defense, sources).observation
        seen = replace(seen, auxiliary=Batch(inputs[public], labels[public]))
        asks = Batch(inputs[person].expand(2, -1), torch.tensor([0, 1]))
        if unmoved:  # the attribute is no input of the model
            asks = Batch(asks.inputs, labels[person].expand(2))
        reading = read_attribute(seen, asks, stream(run, "attack"), replays=2, tests=99)
        yield int(labels[person]), reading.value, reading.p_value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defense", "more"),
    [
        (DpSgd(1.0, 1000.0), {}),
        (NoDefense(), {"absent": True}),
        (NoDefense(), {"unmoved": True}),
    ],
    ids=["noise", "absent", "unmoved"],
)
def test_chance_reads_nothing(defense, more, people):
    """At most 1 % + 2 standard errors of updates that hold nothing of the attribute."""
    runs = 300
    p_values = [p_value for _, _, p_value in readings(people, defense, runs=runs, **more)]
    assert sum(p_value <= 0.01 for p_value in p_values) / runs <= 0.01 + 2 * (0.0099 / runs) ** 0.5


@pytest.mark.slow
def test_a_wrong_value_is_read_at_the_stated_level(people):
    """Noise that leaves something: right answers are read more often, wrong ones in 1 % at most."""
    runs = 300
    found = [*readings(people, DpSgd(1.0, 0.1), runs=runs)]
    wrong = sum(value != true and p_value <= 0.01 for true, value, p_value in found)
    right = sum(value == true and p_value <= 0.01 for true, value, p_value in found)
    assert wrong / runs <= 0.01 + 2 * (0.0099 / runs) ** 0.5
    assert right > 4 * runs * 0.01


def test_one_coordinate_that_fails_is_not_enough():
    """One that leads by far in most trainings, and is wrong in some: four read them all."""
    few, more, all_ = (_MatchedFilter(size, False) for size in (1, 4, 16))
    right = {few: 0.875, more: 1.0, all_: 1.0}
    filters = {each: _Separation(10.0, 1.0, share) for each, share in right.items()}
    assert _chosen(filters) == more
    # None leads by far: the one that leads by most, whatever it reads right.
    weak = {few: _Separation(1.0, 1.0, 1.0), more: _Separation(2.0, 1.0, 0.9)}
    assert _chosen(weak) == more


def test_a_prior_moves_the_answer_and_not_the_reading(people):
    [(_, _, p_value)] = readings(people, DpSgd(1.0, 1000.0), runs=1)
    assert p_value > 0.01
    batch = Batch(people.inputs[:2], people.labels[:2])
    task = Task.of(nn.Linear(people.inputs.shape[1], 2))
    sources = [stream(0, "play", at) for at in range(2)]
    seen = play(task, [batch], DpSgd(1.0, 1000.0), sources).observation
    seen = replace(seen, auxiliary=Batch(people.inputs[9:], people.labels[9:]))
    asks = Batch(people.inputs[:1].expand(2, -1), torch.tensor([0, 1]))
    for likely in (0, 1):
        prior = torch.where(torch.arange(2) == likely, 0.9, 0.1)
        flat, moved = (
            read_attribute(seen, asks, stream(0, "attack"), prior=given, tests=19)
            for given in (None, prior)
        )
        assert moved.value == likely
        assert torch.equal(flat.scores, moved.scores)
        # Nats: under this noise the values differ by almost nothing.
        assert float(flat.scores.min()) > -0.1


def test_scores_are_nats(people):
    """A linear model with known others: the log-likelihood ratio of the exact filter."""
    from leakbound.client import gradient
    from leakbound.defenses import GaussianNoise

    pair = people.inputs[:2]
    task = Task.of(nn.Linear(pair.shape[1], 2))
    batch = Batch(pair, torch.tensor([0, 1]))
    means = torch.stack([gradient(task, pair, torch.tensor([y, 1])) for y in (0, 1)]).double()
    noise = float((means[1] - means[0]).norm()) / 3
    sources = [stream(1, "play", at) for at in range(2)]
    seen = play(task, [batch], GaussianNoise(noise_std=noise), sources).observation
    seen = replace(seen, auxiliary=Batch(pair[1:], torch.tensor([1])))
    asks = Batch(pair[:1].expand(2, -1), torch.tensor([0, 1]))
    sent = seen.update.rows[0].double()
    exact = -(sent - means).square().sum(1) / (2 * noise**2)
    found = read_attribute(seen, asks, stream(1, "attack"), replays=2).scores
    assert float(found[0] - found[1]) == pytest.approx(float(exact[0] - exact[1]), rel=0.02)


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
    public = replace(seen, auxiliary=Batch(people.inputs, people.labels))
    with pytest.raises(NotApplicable, match="one completion"):
        read_attribute(public, Batch(people.inputs[:1], people.labels[:1]), stream(0, "c"))
