"""A budget as a filter of a real NVFlare client."""

import pytest
from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from leakbound.ledger import Ledger
from leakbound.nvflare import BudgetFilter, capture_job

DEPLOYMENT = """
correlation = "none"
clip = {norm = 1.0, kind = "l2", at = "client"}
noise = {multiplier = 2.0, at = "client", seeded = false}
participation = {law = "all"}
"""
TWO = {"max_epsilon": 3.1}
"""Epsilon of two rounds: 2.97; of three: 3.72."""


@pytest.fixture
def given(tmp_path):
    """The arguments of a filter: a folder, a deployment file and a budget of two rounds."""
    path = tmp_path / "deployment.toml"
    path.write_text(DEPLOYMENT)
    return {"folder": str(tmp_path / "ledgers"), "deployment": str(path), "budget": TWO}


def test_a_filter_pays_for_each_task_until_the_budget_is_spent(given, tmp_path):
    context, task = FLContext(), Shareable()
    context.set_prop(ReservedKey.IDENTITY_NAME, "site-1", private=False)
    own = BudgetFilter(**given)
    assert own.process(task, context) is task
    again = BudgetFilter(**given)  # each job has a filter of its own
    assert again.process(task, context) is task
    for one in (own, again):
        with pytest.raises(ValueError, match="budget is spent"):
            one.process(task, context)
    assert Ledger(tmp_path / "ledgers" / "site-1.jsonl").rounds == 2


def test_a_wrong_budget_is_refused_before_the_job_runs(given):
    with pytest.raises(ValueError, match="max_epsilon"):
        BudgetFilter(**given | {"budget": {"max_epsilon": -1.0}})


@pytest.mark.slow
def test_a_job_stops_at_the_round_that_costs_too_much(job, given, tmp_path):
    own = {"path": "leakbound.nvflare.BudgetFilter", "args": given}
    place = job(clients=2, rounds=4, before=[own])
    with pytest.raises(ValueError, match="no result of round 3 was kept"):
        capture_job(place, tmp_path / "out", rounds=(1, 2, 3), clients=2, seconds=300)
    for site in (1, 2):
        ledger = Ledger(tmp_path / "ledgers" / f"site-{site}.jsonl")
        rounds = [line.round for line in ledger.lines()]
        assert rounds == ["0", "1"]
