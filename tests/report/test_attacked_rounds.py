"""What pages say of the attacked round: every case of the sentences."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from leakbound.assess.record import ReleaseInfo
from leakbound.report.sentences import attacked_rounds
from leakbound.report.tables import Names


@pytest.fixture
def said(make_assessment):
    """The sentences for pairs of a round and whether the defense had an effect in it."""

    def found(*pairs, chosen=(None,)):
        made = []
        for seed, (number, effective) in enumerate(pairs):
            release = ReleaseInfo(
                law="Exact",
                data_dependent=True,
                withheld=0.1,
                unit="client",
                round=number,
                effective=effective,
            )
            made.append(replace(make_assessment(seed=seed), release=release))
        info = SimpleNamespace(plan={"rounds": list(chosen)})
        return attacked_rounds(SimpleNamespace(assessments=made, info=info), Names(made))

    return found


def test_the_first_round_needs_no_words(said):
    assert said((1, True), (1, True)) == []
    assert said((None, True)) == []  # a captured update


def test_a_late_defense_names_its_rounds_and_how_to_compare(said):
    (one,) = said((15, True), (15, True))
    assert "was attacked in round 15 of a training, the first in which it has an effect." in one
    assert "Earlier rounds have no protection." in one
    assert "`rounds = 15` in the plan" in one
    (several,) = said((18, True), (15, True))
    assert "in rounds 15 to 18 of a training" in several
    assert "`rounds = 18` in the plan" in several


def test_a_chosen_round_says_whether_the_defense_had_an_effect(said):
    (acting,) = said((5, True), (5, True), chosen=[5])
    assert acting.endswith("was attacked in round 5 of a training. No other round was tested.")
    (idle,) = said((5, False), (5, True), chosen=[5])
    assert idle.endswith("It had no effect yet in 1 of 2 experiments.")
    (first,) = said((1, False), chosen=[1])
    assert first.endswith("It had no effect yet in 1 of 1 experiment.")


def test_several_chosen_rounds_are_named(said):
    (one,) = said((1, False), (20, True), (5, True), chosen=[1, 20, 5])
    assert "was attacked in rounds 1, 5, 20 of a training" in one
    assert one.endswith("It had no effect yet in 1 of 3 experiments.")
