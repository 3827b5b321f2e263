"""Defenses at equal utility, from a plan to the page: real attacks and trainings on the digits."""

from __future__ import annotations

import json

import pytest

from leakbound import audit, report
from leakbound.cli import main

DEFENSES = [
    {"name": "none"},
    {"name": "gaussian_noise", "noise_std": [0.01, 0.03, 0.1]},
    {"name": "magnitude_pruning", "rate": [0.5, 0.9, 0.99]},
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    plan = {
        "name": "equal",
        "seeds": [0, 1, 2],
        "data": {"source": "digits"},
        "models": [{"name": "mlp", "hidden": [16]}],
        "attacks": [{"name": "linear_inversion"}],
        "defenses": DEFENSES,
        "error_bound": {"kind": "none"},
        "risk": {"probability": 0},
        "utility": {"rounds": 25, "repeats": 3},
    }
    return audit.run_audit(audit.parse(plan), out=tmp_path_factory.mktemp("equal") / "run")


def test_an_audit_compares_its_defenses(found):
    (result,) = found.at_equal_utility()
    assert (result.error, result.batch_size, result.rounds) == ("RMSE", 1, 25)
    at_loss, at_accuracy = result.comparisons
    for comparison in (at_loss, at_accuracy):
        assert [family.defense for family in comparison.families] == [
            "gaussian_noise",
            "magnitude_pruning",
        ]
        (pair,) = comparison.pairs
        assert pair.difference.n == 3
        assert pair.low < pair.high
        assert pair.difference.low < pair.difference.mean < pair.difference.high
        for family in comparison.families:
            plain, *_, strongest = family.levels
            assert plain.defense == "no defense"
            # The plain update of a network whose first layer is linear is the image
            assert plain.error.mean < 1e-3 < strongest.error.mean <= result.baseline + 1e-9
            assert plain.cost.mean < strongest.cost.mean


def test_the_page_and_report_json_have_the_same_numbers(found):
    (pair,) = found.at_equal_utility()[0].comparisons[1].pairs
    page = report.write(found.folder).read_text("utf-8")
    assert "What a point of accuracy buys" in page
    assert f"{pair.first_error.mean:.3f} and {pair.second_error.mean:.3f} on average" in page
    with pytest.raises(SystemExit, match="0"):
        main(["evidence", str(found.folder)])
    subject = json.loads((found.folder / "report.json").read_text("utf-8"))["subjects"][0]
    (shown,) = subject["equal_utility"][0]["comparisons"][1]["pairs"]
    assert shown["difference"]["high"] == pair.difference.high


def test_without_a_training_it_is_refused(tmp_path, table):
    del table["utility"]
    found = audit.run_audit(audit.parse(table), out=tmp_path / "run")
    with pytest.raises(ValueError, match="add \\[utility\\] to the plan"):
        found.at_equal_utility()
