"""What is said: each sentence with its numbers, and no more than what is proved."""

from __future__ import annotations

import pytest

from leakbound._util.formats import rounded
from leakbound.assess.record import (
    PROTECTS,
    VERDICTS,
    Assessment,
    AttackInfo,
    Attained,
    Bound,
    CriterionInfo,
    DataInfo,
    DefenseInfo,
    ModelInfo,
    Threat,
)
from leakbound.assess.verdict import MEANINGS, meanings
from leakbound.risk.statement import of_assessment, of_attained, of_bound, of_bounds, of_membership

KNOWN = {
    "name": "probability",
    "value": 0.04,
    "probability": 0.04,
    "psnr": None,
    "prior": "1000 public examples",
    "covers": "all",
    "rests_on_prior": True,
    "excludes_threshold": True,
    "on_average": False,
    "accepted": 0.05,
    "confidence": 0.95,
    "public_examples": 1000,
    "largest_ball": 3,
    "density_margin": 1.4,
}


def bound(**changes):
    return Bound(**KNOWN | changes)


@pytest.mark.parametrize(
    ("basis", "words"),
    [
        ("sample", "whatever the model is, no stranger reaches 20 dB for one example from one "
         "update with a probability above 0.04: 95% confidence from 1000 public examples, of which "
         "one candidate (or one for each value of what is known) may match 3, if private examples "
         "are drawn like them (at most 1.4 times as densely)"),
        ("known parts", "whatever the model is, no attacker who has the known parts reaches 20 dB "
         "for one example from one update with a probability above 0.04: 95% confidence from 1000 "
         "public examples, of which one candidate (or one for each value of what is known) may "
         "match 3, if private examples are drawn like them (at most 1.4 times as densely)"),
        ("examples", "whatever the model is, no attacker reaches 20 dB for one example from one "
         "update with a "
         "probability above 0.04, averaged over these 1000 examples; it says nothing about others"),
        ("known model", "from one update of this model, no attacker reaches 20 dB for one example "
         "with a probability above 0.04: 95% confidence from 1000 public examples, if private "
         "examples are drawn like them (at most 1.4 times as densely)"),
        ("fitted model", "all attackers; none reaches 20 dB for one example from one update with a "
         "probability above 0.04 if examples follow the model 1000 public examples"),
    ],
)  # fmt: skip
def test_what_each_bound_says(basis, words):
    assert of_bound(bound(basis=basis), "20 dB") == f"probability: {words}"


def test_every_verdict_has_a_meaning_and_none_promises_too_much():
    assert set(MEANINGS) == set(VERDICTS)
    assert set(PROTECTS.values()) <= set(VERDICTS)
    for text in MEANINGS.values():
        assert not {"safe", "secure"} & set(text.lower().replace(".", "").split())
    assert meanings(truth_known=False) != meanings(truth_known=True) == MEANINGS


def test_a_large_epsilon_is_said_once_to_hide_no_membership():
    assert of_membership(1.0, 1e-5) == ""
    both = of_bounds([bound(basis="sample", epsilon=9.97), bound(epsilon=9.97)], "20 dB")
    assert sum("hides who took part: epsilon is 9.97 at delta 1e-05" in said for said in both) == 1
    assert len(both) == 3
    assert len(of_bounds([bound(epsilon=0.7)])) == 1


def attained(success, low, high):
    return Attained(
        attack="codebook",
        success=success,
        baseline=(low, high),
        accepted=0.01,
        confidence=0.95,
        public_examples=900,
    )


def test_what_attacks_attain():
    said = of_attained(attained(0.03, 0.001, 0.004), "20 dB")
    assert said == (
        "a malicious server's codebook reaches 20 dB for 0.03 or more of examples like the public "
        "ones, one in an update, a guess without any update for 0.004 at most (95% confidence, 900 "
        "examples)"
    )
    assert of_attained(attained(0.003, 0.001, 0.004), "20 dB").endswith("; that does not decide")
    assert "no amount of noise protects" in of_attained(attained(0.03, 0.02, 0.04), "20 dB")


def record(**changes):
    known = {
        "experiment": "x",
        "attack": AttackInfo(name="dlg", settings="", hash=""),
        "defense": DefenseInfo(
            name="none", parameters={}, settings="", guarantee="none", data_dependent_law=False
        ),
        "model": ModelInfo(name="mlp", parameters={}),
        "data": DataInfo(source="mnist5k", domain="images", shape=(1, 2, 2)),
        "batch_size": 2,
        "clients": 1,
        "seed": 0,
        "threat": Threat(
            labels_known=True, defense_known=True, server="honest", statistics_known=False
        ),
        "criterion": CriterionInfo(value=20.0, within=0.1),
    }
    return Assessment(**known | changes)


def test_what_the_attack_did_comes_first():
    own = {"metrics": {"psnr": (31.0, 12.5)}, "baseline": (11.0, 12.0)}
    hit = record(**own, matched=(True, False), bounds=(bound(),), bounds_note="because")
    first, second, last = of_assessment(hit)
    assert first == (
        "dlg reconstructed 1 of 2 to 20 dB or better; the closest guess without the update has "
        "11.0 dB for them at best"
    )
    assert second == of_bound(bound(), "20 dB")
    assert last == "no bound: because"
    [missed] = of_assessment(record(**own, matched=(False, False)))
    assert missed == "dlg reconstructed none of 2 to 20 dB; at best it reaches 31.0 dB"


def test_numbers_are_rounded_to_the_safe_side():
    """0.00100449 is above an accepted 0.001, and is not printed as 0.001."""
    assert "above 0.00101:" in of_bound(bound(basis="sample", probability=0.00100449))
    error = bound(probability=None, value=0.0123999, psnr=19.0, confidence=None)
    assert "below 0.0123 " in of_bound(error)
    assert "for 0.0309 or more" in of_attained(attained(0.030999, 0.001, 0.00400001), "20 dB")
    assert "for 0.00401 at most" in of_attained(attained(0.030999, 0.001, 0.00400001), "20 dB")
    values = [10.0**k * m for k in range(-12, 3) for m in (1.0, 1.2345678, 9.9999999)]
    for value in values:
        assert rounded(value, 3, up=False) <= value <= rounded(value, 3, up=True)
        assert rounded(value, 3, up=True) <= value * 1.011
    for text in (f"{digits}e{k}" for k in range(-300, 300, 7) for digits in ("1", "1.01", "9.99")):
        assert rounded(float(text), 3, up=True) == rounded(float(text), 3, up=False) == float(text)


def test_a_failed_test_of_the_distribution_is_said():
    doubted = bound(basis="sample", assumptions=("a test found private examples drawn unlike",))
    assert of_bound(doubted).endswith("; but a test found private examples drawn unlike")
