"""A plan's trainings through Flower's messages: the numbers of this process, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from leakbound import audit
from leakbound.assess.record import encode
from leakbound.audit import utility
from leakbound.flower import grid, training

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # files that Ray leaves open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
DEFENSES = [
    {"name": "none"},
    {"name": "pri_prune"},  # keeps withheld weights
    {"name": "top_k"},  # keeps a memory
    {"name": "withhold", "rule": "mix"},  # keeps weights, and draws
    {"name": "optimal_noise", "noise_std": 0.01, "refresh": 3},  # kept for some rounds
    {"name": "optimal_pruning"},
    {"name": "mixup"},
    {"name": "whitened_dp_sgd"},  # resolves to a chain with a map
    {
        "links": [
            {"name": "gaussian_noise", "noise_std": 0.01},
            {"name": "secure_aggregation", "clients": 3},
        ]
    },
]
TABLE = {
    "seeds": [0],
    "data": {"source": "digits"},
    "models": [{"name": "mlp", "hidden": [8]}],
    "attacks": [{"name": "linear_inversion"}],
    "defenses": DEFENSES,
    "utility": {"rounds": 6, "repeats": 1, "clients": 3, "batch_size": 4},
}


def parsed(**changes):
    plan = audit.parse(TABLE | changes)
    return plan, {cell.id for cell in plan.experiments()}


def through_messages(plan, bench, on_exchange=None):
    """All results of a plan's trainings, by an app in this process."""
    units, flow = plan.trainings(), training.Flow()
    grid.run(
        training.server_app(units, bench, flow),
        training.client_app(units, bench.dataset.fingerprint),
        plan.utility.clients,
        on_exchange=on_exchange,
    )
    events = []
    while not flow.events.empty():
        events.append(flow.events.get())
    assert events[0::2] == list(units)
    return events[1::2]


@pytest.fixture(scope="module")
def local():
    plan, done = parsed()
    return {result.id: encode(result.record) for result in audit.run(plan, done)}


def test_messages_give_the_same_records(local):
    """With what clients keep, resolved defenses and sums of the cohort: byte for byte."""
    plan, _ = parsed()
    results = through_messages(plan, audit.PlanContext(plan.data))
    assert {r.id: encode(r.record) for r in results} == local
    assert all(r.record.status == "ok" for r in results)
    assert len({r.record.training_loss for r in results}) == len(DEFENSES), "each acts"


def test_the_server_is_sent_the_update_alone():
    """Neither the client's state, nor its noise, nor its images are in a reply."""
    plan, _ = parsed(defenses=[{"name": "pri_prune"}])
    seen = []
    through_messages(
        plan, audit.PlanContext(plan.data), lambda asked, reply: seen.append(reply.content)
    )
    assert len(seen) == 6 * 3
    for content in seen:
        assert set(content) == {training.SENT, training.TURN}
        assert set(content[training.SENT]) == {"rows", "mask", "examples"}
        assert set(content[training.TURN]) == {"rows_of"}


def test_a_training_that_fails_fails_alike():
    """The client's error is the record's reason, as if it had happened here."""
    bad = {"defenses": [{"name": "none"}, {"name": "mixup"}]}
    bad["utility"] = TABLE["utility"] | {"batch_size": 1}  # nothing to mix
    plan, done = parsed(**bad)
    here = {r.id: r.record for r in audit.run(plan, done)}
    results = through_messages(plan, audit.PlanContext(plan.data))
    assert {r.id: r.record for r in results} == here
    assert sorted(r.status for r in here.values()) == ["failed", "ok"]


class Backwards(grid.InProcessGrid):
    """Replies come in another order than the messages went."""

    def pull_messages(self, message_ids):
        return list(super().pull_messages(message_ids))[::-1]


def test_updates_are_in_the_order_of_the_clients_whoever_answers_first():
    plan, _ = parsed(defenses=[DEFENSES[4]])
    (unit,), bench = plan.trainings(), audit.PlanContext(plan.data)
    app = training.client_app([unit], bench.dataset.fingerprint)
    there = training.GridClients(Backwards(app, 3), unit, training.Flow())
    here, ages = utility._here(unit, bench), []

    def both(opening):
        wanted, found = here(opening), there(opening)
        for one, other in zip(wanted, found, strict=True):
            assert torch.equal(one.rows, other.rows)
        assert not torch.equal(found[0].rows, found[2].rows)
        ages.append(opening.defense.links[0].age)
        return found

    utility.train(unit, bench, both)
    assert ages == [0, 1, 2, 0, 1, 2], "a defense goes on from that of the round before"


def test_what_goes_wrong_on_a_client_is_the_reason(monkeypatch):
    plan, done = parsed(defenses=[{"name": "gaussian_noise", "noise_std": 0.01}])
    real = training.step

    def failing(*given):
        raise TypeError("no such thing at 0x7f12")

    monkeypatch.setattr(training, "step", failing)
    monkeypatch.setattr(utility, "step", failing)
    (result,) = through_messages(plan, audit.PlanContext(plan.data))
    (wanted,) = audit.run(plan, done)
    assert result.record == wanted.record
    assert result.record.reason == "TypeError: no such thing at 0x"
    monkeypatch.setattr(training, "step", real)


def test_a_client_with_other_data_refuses():
    plan, _ = parsed(defenses=[{"name": "none"}])
    units, flow = plan.trainings(), training.Flow()
    bench = audit.PlanContext(plan.data)
    grid.run(training.server_app(units, bench, flow), training.client_app(units, "0" * 64), 3)
    assert flow.events.get() == units[0]
    reason = flow.events.get().record.reason
    assert reason == "data source 'digits' differs from the server's on this node"


def test_cells_and_gpus_are_refused():
    plan, done = parsed()
    with pytest.raises(ValueError, match="only trainings"):
        next(training.run(plan))
    bench = type("PlanContext", (), {"device": type("Device", (), {"type": "cuda"})()})()
    with pytest.raises(ValueError, match="on CPUs"):
        next(training.run(plan, done, context=bench))
    everything = {*done, *(unit.id for unit in plan.trainings())}
    assert list(training.run(plan, everything)) == []


def children():
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.add(stat.parent.name)
    return found


@pytest.mark.slow
def test_the_simulation_engine_gives_the_same_records(local):
    """Two client processes on Ray; and a run that is left early leaves no process."""
    before = children()
    kept = [DEFENSES[0], DEFENSES[1], DEFENSES[3], DEFENSES[4]]
    plan, done = parsed(defenses=kept)
    results = list(training.run(plan, done, workers=2))
    assert len(results) == len(kept)
    assert {r.id: encode(r.record) for r in results}.items() <= local.items()
    assert children() <= before

    long = audit.parse(TABLE | {"utility": TABLE["utility"] | {"rounds": 100_000}})
    given = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it

    def stop_soon(unit):
        timer = threading.Timer(2, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()

    flow = training.run(
        long, {cell.id for cell in long.experiments()}, workers=1, started=stop_soon
    )
    try:
        with pytest.raises(KeyboardInterrupt):
            next(flow)
    finally:
        signal.signal(signal.SIGINT, given)
        flow.close()
    limit = time.monotonic() + 600
    while children() - before and time.monotonic() < limit:
        time.sleep(0.1)
    assert children() <= before


def test_records_hold_a_curve(local):
    for line in local.values():
        record = json.loads(line)
        assert [number for number, _ in record["curve"]] == [0, 5, 6]
