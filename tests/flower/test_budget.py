"""A budget as a mod of a real Flower app: it stops at the round that would cost too much."""

import logging

import pytest
from flwr.app import Context, RecordDict

from leakbound.client_side.paid import OVER
from leakbound.flower import BudgetMod, InProcessGrid, run
from leakbound.ledger import Budget, Ledger
from leakbound.risk.deployment import parse

NOISY = parse(
    {
        "clip": {"norm": 1.0, "kind": "l2", "at": "client"},
        "noise": {"multiplier": 2.0, "at": "client", "seeded": False},
        "participation": {"law": "all"},
        "correlation": "none",
    }
)
FOUR = Budget(max_epsilon=4.4)
"""Epsilon of four rounds: 4.377; of five: 4.983."""


@pytest.fixture
def trained():
    """Each training that ran: (client, round)."""
    return []


@pytest.fixture
def noting(batches, trained):
    def of(who, round):
        if round:
            trained.append((who, round))
        return batches(who, round)

    return of


def test_a_training_stops_before_the_round_that_costs_too_much(
    flower, noting, trained, tmp_path, caplog
):
    app = flower.client_app([BudgetMod(tmp_path, NOISY, FOUR)], batches=noting)
    with caplog.at_level(logging.WARNING, "leakbound.ledger"):
        run(flower.server_app(6), app, 2)
    assert sorted(trained) == [(who, round) for who in (0, 1) for round in range(1, 5)]
    for who in (0, 1):
        ledger = Ledger(tmp_path / f"client-{who}.jsonl")
        assert ledger.spent == [(NOISY, 4)]
        assert [line.round for line in ledger.lines()] == ["1", "2", "3", "4"]
    said = [record.getMessage() for record in caplog.records if record.name == "leakbound.ledger"]
    assert len(said) == 2 * 2 * 2, "two rounds, two clients, two audiences"
    assert said[0] == "withheld: server: epsilon would be 4.983, above 4.4"


def test_a_withheld_round_says_nothing_of_the_data(flower, noting, trained, tmp_path):
    app = flower.client_app([BudgetMod(tmp_path, NOISY, Budget(max_epsilon=0.1))], batches=noting)
    grid = InProcessGrid(app, 2)
    replies = [flower.ask(app, flower.message(grid, node=node), grid=grid) for node in (2, 3)]
    assert {(one.error.code, one.error.reason) for one in replies} == {
        (replies[0].error.code, OVER)
    }
    assert trained == []
    assert not list(tmp_path.glob("*.jsonl"))


def test_evaluation_is_not_charged(flower, noting, tmp_path):
    mod = BudgetMod(tmp_path, NOISY, FOUR)
    app = flower.client_app([mod], batches=noting, level="app")
    assert not flower.ask(app, kind="evaluate").has_error()
    assert mod.purse.ledger("client-0").rounds == 0


def test_a_new_node_id_opens_no_new_ledger(flower, tmp_path):
    """The server gives node ids, and one that lies would give a new one for each round."""
    replies = []
    for number in range(6):
        mod = BudgetMod(tmp_path, NOISY, FOUR)
        context = Context(1, 1000 + number, {}, RecordDict(), {"lr": 0.5})
        asked = flower.message(InProcessGrid(None, 1), round="x" * 10_000)
        replies.append(mod(asked, context, lambda message, context: "trained"))
    assert [reply == "trained" for reply in replies] == [True] * 4 + [False] * 2
    ledger = Ledger(tmp_path / "node.jsonl")
    assert ledger.rounds == 4
    assert max(len(line.round) for line in ledger.lines()) == 64


def test_a_restarted_node_remembers(flower, noting, trained, tmp_path):
    for _ in range(2):
        app = flower.client_app([BudgetMod(tmp_path, NOISY, FOUR)], batches=noting)
        run(flower.server_app(3), app, 1)
    assert trained == [(0, 1), (0, 2), (0, 3), (0, 1)]


def test_a_ledger_that_cannot_be_trusted_stops_the_training(flower, noting, trained, tmp_path):
    app = flower.client_app([BudgetMod(tmp_path, NOISY, FOUR)], batches=noting)
    assert not flower.ask(app).has_error()
    path = tmp_path / "client-0.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"round":"', b'"round":"x'))
    again = flower.client_app([BudgetMod(tmp_path, NOISY, FOUR)], batches=noting)
    assert flower.ask(again).error.reason == OVER
    assert len(trained) == 1
