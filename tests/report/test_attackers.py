"""What pages say of attackers who know more than the population."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from leakbound.assess.record import AttackerRow, Completed
from leakbound.report.attackers import attacker_sentences, audience, sentence
from leakbound.report.folder import read
from leakbound.report.overview import next_command, threat_line
from leakbound.report.tables import RunSummary

STRANGER = AttackerRow(attacker="stranger", goal="18 of 20 columns", bound=0.06, gain=0.05)
INTRUDER = AttackerRow(
    attacker="intruder",
    knows="age,sex",
    goal="17 of 18 columns",
    without=0.1,
    bound=0.13,
    gain=0.03,
    measured=Completed(imputer="nearest neighbors", matched=12, total=100, at_least=0.06),
    from_measured=0.19,
)
ANYONE = AttackerRow(attacker="anyone", goal="any goal", gain=0.08)


def test_a_sentence_has_the_worst_of_each_attacker():
    worse = replace(STRANGER, bound=0.09)
    said = sentence("noise 5", [STRANGER, worse, INTRUDER, ANYONE])
    assert said == (
        "noise 5: a stranger reconstructs 18 of 20 columns with a probability of 0.09 at most; who "
        "has age,sex reconstructs 17 of 18 columns of the rest with a probability of 0.13 at most "
        "(nearest neighbors: 12 of 100 without the update; if nobody completes more, 0.19 at most "
        "with it). For anyone, whatever they know, one update adds 0.08 at most."
    )


@pytest.mark.parametrize("bound", [0.5, 0.999, 1.0])
def test_a_limit_that_says_nothing_is_said_to_be_one(bound):
    said = sentence("noise 5", [replace(INTRUDER, bound=bound), ANYONE])
    assert "1 at most (public examples do not exclude that the known parts determine" in said


def test_pages_name_their_attacker(make_bounded, tmp_path):
    folder = make_bounded(tmp_path / "run")
    summary = RunSummary(read(folder))
    assert attacker_sentences(summary) == ()
    assert audience(summary.assessments) == "stranger"
    assert "known from elsewhere" not in threat_line(summary)


def test_the_next_command_is_for_the_same_attacker(make_assessment):
    plan = {"data": {"source": "german"}, "threat": {"known": "age,sex"}}
    criterion = make_assessment(psnr=[9.0]).criterion
    assert next_command(plan, criterion).endswith("--known age,sex")
    for wrong in ({}, {"threat": 3}, {"threat": {"known": 3}}):
        assert "--known" not in next_command({"data": {"source": "german"}} | wrong, criterion)
