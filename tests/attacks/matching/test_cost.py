"""What a search step costs: predicted from a few examples, compared with what it then takes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import leakbound as lb
from leakbound._util.memory import GB, Allowed, PeakBytes, held_bytes
from leakbound.attacks.base import expected_rows
from leakbound.attacks.matching import cost as cost_module
from leakbound.attacks.matching.cost import ROOM, Cost, CostLine, StepCost, first_within, measure
from leakbound.attacks.matching.engine import Evaluator
from leakbound.attacks.matching.loop import begin
from leakbound.attacks.matching.objective import Objective
from leakbound.attacks.matching.settings import MatchingSettings
from leakbound.client import Frugal, frugal
from leakbound.core import LocalPlan, Observation, Task, Unit, Update


def observed(examples, plan, *, norm=True, width=16, side=24):
    torch.manual_seed(0)
    layers = []
    for channels in (3, width, width):
        layers += [nn.Conv2d(channels, width, 3, padding=1)]
        layers += [nn.BatchNorm2d(width)] * norm + [nn.Tanh()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * width, 5))
    task = Task.of(model, plan=plan)
    rows = torch.ones(1, task.parameters.numel())  # what was sent costs nothing
    update = Update(rows, Unit.CLIENT, (examples,))
    known = torch.arange(examples) % 5
    return Observation(update, task, (examples,), (3, side, side), labels=known)


def labels(inputs):
    return torch.zeros(len(inputs), dtype=torch.int64)


def step(seen, form):
    """One step of the search that attacks run by default."""
    settings = MatchingSettings(only_images=True)
    with frugal(form):
        search = begin(settings, Objective.of(settings, seen), lb.stream(0))
        Evaluator([search]).evaluate()


PLANS = {
    "sgd": LocalPlan(steps=4, learning_rate=0.1),
    "adam": LocalPlan(steps=4, learning_rate=0.01, optimizer="adam"),
    "minibatches": LocalPlan(steps=4, learning_rate=0.1, batch_size=4),
}


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_the_bytes_of_a_step_are_predicted(plan, norm):
    """In every form, for a batch four to eight times as large as what was measured.

    The graph of a later step is smaller than that of the first, by up to half: it has no share of
    the second backward pass.
    """
    seen = observed(16, PLANS[plan], norm=norm)
    cost = measure(seen, labels)
    assert bool(cost.why) == norm
    forms = list(cost.search_steps())
    assert {type(form.form) for form in forms} == {type(None), Frugal}
    assert len(forms) == 2 if norm else len(forms) > 3
    for form in forms:
        with PeakBytes() as counted:
            step(seen, form.form)
        most = 1.6 if form.form is None else 1.3
        assert 0.9 < form.bytes / ROOM / counted.peak < most, form


CHILD = """
import json, resource, sys, torch
sys.path.insert(0, {folder!r})
from test_cost import PLANS, labels, measure, observed, step
from leakbound._util.memory import held_bytes
torch.set_num_threads(1)
seen = observed({examples}, PLANS[{plan!r}], width=64, side=64)
cost = measure(seen, labels)
form = list(cost.search_steps())[{form}]
start = held_bytes()
step(seen, form.form)
peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([form.bytes, peak - start]))
"""


@pytest.mark.linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "form", "examples"), [("sgd", 0, 16), ("adam", 0, 16), ("adam", 1, 32)]
)
def test_the_operating_system_sees_no_more_than_was_predicted(plan, form, examples):
    code = CHILD.format(folder=str(Path(__file__).parent), plan=plan, form=form, examples=examples)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    predicted, taken = json.loads(done.stdout)
    assert 0.4 < taken / predicted < 1.0


def test_peaks_count_each_storage_once_and_while_it_lives():
    with PeakBytes() as counted:
        whole = torch.ones(1000)
        half = whole[:500]
        assert counted.peak == 4000
        del whole
        again = torch.ones(1000)  # the slice still holds the first
        assert counted.peak == 8000
        del half, again
        torch.ones(500)
        assert counted.peak == 8000


def test_what_was_there_before_does_not_count():
    before = torch.ones(1000)
    with PeakBytes() as counted:
        before[:10].add_(1)
        torch.add(before, 1, out=before)
    assert counted.peak == 0


def test_what_a_graph_alone_keeps_counts():
    x = torch.ones(1000, requires_grad=True)
    with PeakBytes() as counted:
        y = x
        for _ in range(5):
            y = y.exp()  # keeps its result
        assert counted.peak == 5 * 4000
        y.sum().backward()
    assert counted.peak < 9 * 4000


def line(seconds, size):
    return CostLine(2, Cost(2 * seconds, 2 * size), Cost(4 * seconds, 4 * size))


def test_the_first_form_that_fits_runs_and_else_the_smallest_is_named():
    cost = StepCost(line(1.0, 10.0), None, line(0.2, 4.0), 5.0, 0.0, 0.0, 64, 64, 8, "")
    assert cost.usual == Cost(8 * 64.0, ROOM * 8 * 640.0)
    engine = replace(cost, engine=line(0.5, 20.0))
    assert engine.usual == Cost(8 * 32.0, ROOM * 8 * 1280.0)
    assert list(engine.search_steps())[1:] == list(cost.search_steps())[1:]
    for allowed, form in ((1e9, None), (2000, Frugal()), (700, Frugal(32)), (60, Frugal(1))):
        assert first_within(cost.search_steps(), allowed).form == form
    assert first_within(cost.search_steps(), 0.0).form == Frugal(1)
    whole = replace(cost, why="coupled")
    assert [form.form for form in whole.search_steps()] == [None, Frugal()]
    assert [form.form for form in replace(whole, steps=1).search_steps()] == [None]
    saved = list(cost.search_steps())[1]
    assert saved.seconds == pytest.approx(8 * 64 * 1.2)  # the graph is computed twice


def test_a_plan_of_minibatches_counts_their_examples():
    seen = observed(16, PLANS["minibatches"])
    cost = measure(seen, labels)
    assert (cost.examples, cost.steps) == (4, 4)
    assert cost.of(seen.task, 3).examples == 3


def test_a_slow_second_measurement_is_left_out():
    cost = measure(observed(16, PLANS["sgd"]), labels, seconds=0.0)
    assert cost.search.two is None
    fixed = cost.alone.at(0).bytes
    assert 0 < fixed < cost.search.one.bytes
    assert cost.search.at(8).bytes == fixed + 4 * (cost.search.one.bytes - fixed)


def test_an_engine_is_chosen_only_if_that_is_affordable():
    """Else no search may look for one: all of its forms are frugal."""
    seen = observed(16, PLANS["sgd"])
    assert measure(seen, labels).engine is not None
    for limit in ({"seconds": 1e-6}, {"room": 1.0}):
        cost = measure(seen, labels, **limit)
        assert cost.engine is None
        assert all(form.form is not None for form in cost.search_steps())


def test_no_engine_is_looked_for_where_none_saves_enough(monkeypatch):
    """To look for one takes as long as many steps, which is lost if no step will fit."""
    seen = observed(16, PLANS["sgd"])
    usual = measure(seen, labels, engines=False).usual.seconds
    monkeypatch.setattr(cost_module, "PLANNING", 0)
    assert measure(seen, labels, seconds=100 * usual).planned
    assert not measure(seen, labels, seconds=usual / 100).planned


def test_room_is_what_is_free_or_allowed(monkeypatch):
    memory = sys.modules[Allowed.__module__]
    monkeypatch.setattr(memory, "free_bytes", lambda: 5 * GB)
    monkeypatch.setattr(memory, "held_bytes", lambda: GB)
    assert Allowed().room == 5 * GB
    assert Allowed(3 * GB).room == 2 * GB
    assert Allowed(9 * GB).room == 5 * GB
    assert Allowed(GB / 2).room == 0
    monkeypatch.setattr(memory, "free_bytes", lambda: None)
    assert Allowed().room == float("inf")


@pytest.mark.linux
def test_what_is_held_grows_with_tensors():
    before = held_bytes()
    kept = torch.ones(50_000_000)
    assert 1.9e8 < held_bytes() - before < 2.2e8
    del kept


@pytest.mark.parametrize("plan", PLANS)
def test_the_bytes_of_a_training_alone_are_predicted(plan):
    """Also where the optimizer's state is larger than the graph of few examples."""
    seen = observed(48, PLANS[plan], norm=False)
    inputs = torch.zeros(seen.batch_shape)
    for form in measure(seen, labels).trainings():
        with PeakBytes() as counted, torch.no_grad(), frugal(form.form):
            expected_rows(seen, seen.task, inputs, seen.labels)
        assert 0.85 < form.bytes / ROOM / counted.peak < 1.7, form
