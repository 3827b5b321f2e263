"""What is read off an update is told first, cheap attacks run first, and no search is endless."""

import signal
import time

import pytest
import torch
from torch import nn

from leakbound import data
from leakbound.assess.record import Assessment, read
from leakbound.captured import Settings, TrainingInfo, findings, load
from leakbound.captured.findings import searched_steps
from leakbound.captured.run import Listener, Output, attack_all
from leakbound.registry import Spec

SHAPE, RATE = (1, 28, 28), 0.1


@pytest.fixture(scope="module")
def clients():
    """Three clients of a small CNN: 16 examples, 2 epochs, batches of 8. The ranks do not tell."""
    digits = data.load("mnist5k", limit=60)
    found = []
    for client in range(3):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(1, 4, 5, stride=3), nn.Sigmoid(), nn.Flatten(), nn.Linear(256, 10))
        )
        before = {k: v.clone() for k, v in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        own = slice(16 * client, 16 * client + 16)
        for _ in range(2):
            for part in (slice(0, 8), slice(8, 16)):
                optimizer.zero_grad()
                inputs, labels = digits.inputs[own][part], digits.labels[own][part]
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
        found.append(load(dict(model.state_dict()), before, kind="weights"))
    return model, found


def run(clients, *, known=None, **settings):
    """The outcome, and what was told as the attacks went on."""
    model, captures = clients
    events = []
    outcome = attack_all(
        captures,
        model,
        Settings(SHAPE, **settings),
        known or TrainingInfo(examples=16, learning_rate=RATE),
        listener=Listener(
            lambda done, total, what, left: events.append((what, left)),
            inferred=lambda case: events.append(("inferred", None)),
        ),
    )
    return outcome, events


def told_first(events):
    """What was told, each once and in order."""
    return list(dict.fromkeys(what.split(" · ")[0] for what, _ in events))


def test_everything_is_read_before_an_attack_and_no_search_comes_before_the_first(clients):
    outcome, events = run(clients, seconds=4.0, search=0.0)
    words = [what for what, _ in events]
    first_attack = next(i for i, what in enumerate(words) if "linear_inversion" in what)
    assert words[:first_attack].count("inferred") == 3
    assert "finding the number of local steps" not in told_first(events)
    steps = [next(f for f in u.findings if f.name == "local steps") for u in outcome.inferred]
    assert all(not found.sure and found.how.startswith("assumed") for found in steps)


def test_the_search_for_local_steps_comes_after_the_first_attacks_and_ends(clients):
    model, captures = clients
    quick = Spec("linear_inversion"), Spec("inverting_gradients", {"steps": 10})
    outcome, events = run((model, captures[:1]), attacks=quick, search=60.0)
    order = told_first(events)
    assert order.index("linear_inversion") < order.index("finding the number of local steps")
    steps = [next(f for f in u.findings if f.name == "local steps") for u in outcome.inferred]
    assert all("search" in found.how for found in steps)


def test_what_is_told_is_not_searched_for(clients, monkeypatch):
    monkeypatch.setattr(findings, "searched_steps", None)
    told = TrainingInfo(examples=16, learning_rate=RATE, steps=4, batch_size=8)
    outcome, _ = run(clients, known=told, seconds=2.0)
    assert all(u.observation.task.plan.steps == 4 for u in outcome.inferred)


def test_time_ends_searches_where_they_are_and_the_rest_has_no_record(clients):
    began = time.monotonic()
    outcome, events = run(clients, seconds=3.0, search=0.0)
    assert time.monotonic() - began < 60  # of searches that take ten minutes
    ran = [r for r in outcome.records if r.attack.name != "linear_inversion"]
    assert ran
    cut = [r for r in ran if "stopped early, after" in (r.problem or "")]
    assert cut or outcome.unended
    assert len(outcome.records) + outcome.unended == 9
    left = [left for what, left in events if what.startswith("inverting")]
    assert all(0 <= seconds <= 3.0 for seconds in left)


def test_a_cut_search_tells_nothing(clients):
    model, captures = clients
    outcome, _ = run((model, captures[:1]), seconds=1.0)
    inferred = outcome.inferred[0]
    assert inferred.untried
    found = searched_steps(inferred.observation, inferred.untried, 0.2)
    assert found.value == str(inferred.untried[0])
    assert "stopped early" in found.how
    assert not found.sure


def test_an_interrupt_keeps_what_the_search_has_found(clients, tmp_path):
    model, captures = clients
    out, began = tmp_path / "run", []

    def interrupt(done, total, what, left):
        if what.startswith("inverting") and left is not None and not began:
            began.append(what)
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        attack_all(
            captures[:1],
            model,
            Settings(SHAPE, attacks=(Spec("inverting_gradients"),), search=0.0),
            TrainingInfo(examples=16, learning_rate=RATE),
            output=Output(out),
            listener=Listener(interrupt),
        )
    assert signal.getsignal(signal.SIGINT) is before
    (record,) = read(out / "records.jsonl", Assessment)
    assert record.problem.startswith("stopped early, after")
    assert (out / "report.html").exists()


def test_numbers_that_no_search_can_have_are_refused():
    for given in ({"seconds": 0.0}, {"seconds": float("nan")}, {"search": -1.0}):
        with pytest.raises(ValueError, match=next(iter(given))):
            Settings(SHAPE, **given)
    with pytest.raises(ValueError, match="input_shape"):
        Settings((10**5, 10**5))
