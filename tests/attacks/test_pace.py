"""Budgets for attacks: a search stops with the step in which the time is up, and says so."""

import pytest
import torch

import leakbound as lb
from leakbound import registry
from leakbound.attacks import pace
from leakbound.attacks.pace import Pace, planned


class Clock:
    """A time that goes on by one second a look."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        self.now += 1.0
        return self.now


@pytest.fixture
def observed():
    images = lb.data.load("digits", limit=20)
    model = lb.models.mlp(input_shape=(1, 8, 8), classes=10, generator=lb.stream(0, "model"))
    task = lb.Task.of(model, classes=10, public=images.batch(torch.arange(10, 20)))
    batch = images.batch(torch.arange(2))
    sources = [lb.stream(0, "client"), lb.stream(0, "server")]
    return lb.play(task, [batch], lb.defenses.NoDefense(), sources).observation


def run(attack, observed):
    return attack(observed, lb.stream(0, "attack"))


SEARCHES = {
    "gradient_matching": {"steps": 400},
    "inverting_gradients_large_steps": {"steps": 400},
    "dlg": {"steps": 400},
    "fed_avg_matching": {"steps": 400},
    "grad_inversion": {"steps": 400},
    "gias": {"weight_steps": 400},
    "learned_prior": {"steps": 400, "training": 1},
}


@pytest.mark.parametrize("name", SEARCHES)
def test_every_search_stops_when_the_time_is_up(name, observed, monkeypatch):
    attack = registry.build("attack", name, SEARCHES[name])
    monkeypatch.setattr(pace, "time", Clock())
    with Pace(10.0) as budget:
        answer = pace.noted(run(attack, observed))
    assert budget.cut
    assert 8 <= budget.steps < 60  # between restarts the clock is read, too
    assert answer.problem.startswith(f"stopped early, after {budget.steps} steps")
    assert bool(torch.isfinite(answer.inputs).all())


def test_a_budget_that_is_not_used_up_changes_no_bit(observed):
    attack = lb.attacks.GradientMatching(steps=20)
    plain, seen = run(attack, observed), []
    with Pace(600.0, seen.append):
        timed = pace.noted(run(attack, observed))
    assert torch.equal(plain.inputs, timed.inputs)
    assert (plain.trace, plain.objective, plain.problem) == (
        timed.trace, timed.objective, timed.problem,
    )  # fmt: skip
    assert seen == list(range(1, 21))
    assert not pace.tick()


def test_a_stopped_search_answers_with_its_best_iterate(observed):
    attack = lb.attacks.GradientMatching(steps=400, distance="euclidean", signed=False)
    with Pace() as budget:
        budget._watch = lambda steps: budget.stop() if steps == 30 else None
        answer = run(attack, observed)
    assert budget.steps == 30
    assert answer.objective < answer.trace[0]


def test_a_pace_inside_keeps_to_the_time_around_it():
    with Pace(0.0) as outer, Pace(100.0) as inner:
        assert inner.over
        assert inner.left == 0.0
        assert pace.tick()
    assert (outer.steps, inner.steps, inner.cut) == (1, 1, True)


def test_evaluations_are_counted_from_the_settings():
    built = {name: registry.build("attack", name, {}) for name in registry.entries("attack")}
    counts = {name: planned(attack) for name, attack in built.items()}
    assert counts["linear_inversion"] == counts["robbing_the_fed"] == 0
    assert counts["inverting_gradients"] == counts["strong_matching"] == 1000
    assert counts["dlg"] == 3 * 100 * pace.EVALUATIONS
    assert counts["fed_avg_matching"] == 1000 + 100 * (4 + 5)
    assert planned(lb.attacks.FedAvgMatching(local_steps=3)) == 1000 + 100 * 4
    assert counts["gias"] == 2 * 1000
    assert counts["learned_prior"] == 2 * 800
