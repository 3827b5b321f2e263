"""Stranger, intruder and anyone: what a training adds for each."""

import json

import numpy as np
import pytest

from leakbound.bounds.identification import gaussian
from leakbound.bounds.knowledge import gain_of_step
from leakbound.cli import main
from leakbound.risk.attackers import three_attackers
from leakbound.risk.corridor import TrainingSetting
from leakbound.risk.examples import Examples

COARSE = "foreign_worker,personal_status_and_sex"


@pytest.fixture(scope="module")
def german():
    return Examples.of("german")


def exit_code(words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code or 0


def rows(examples, noise, known, **more):
    return three_attackers(TrainingSetting(noise, dim=examples.dim), examples, known, **more)


def test_each_attacker_has_a_statement(german):
    stranger, intruder, anyone = rows(german, 1.0, COARSE)
    assert (stranger.goal, intruder.goal) == ("18 of 20 columns", "17 of 18 columns")
    assert stranger.bound < intruder.bound < 1
    # Who knows more completes more, and the count of public rows says so.
    assert stranger.without < intruder.without
    assert anyone.gain == pytest.approx(gain_of_step(1.0), abs=1e-5)
    assert stranger.gain < intruder.gain < anyone.gain
    # Better than the curve at the limit on q: the profile of the sample counts, too.
    assert intruder.bound <= gaussian(1.0, kappa=intruder.without) + 1e-9


def test_knowledge_that_determines_the_rest_is_measured_from_below(german):
    """findings K1: who knows 14 columns completes rows without any update."""
    names = [column.name for column in german.form.columns]
    _, intruder, _ = rows(german, 1.0, ",".join(names[:14]))
    assert intruder.without == pytest.approx(1.0)
    measured = intruder.measured
    assert measured.at_least < measured.share
    assert 0.15 < measured.share < 0.3
    assert intruder.from_measured == pytest.approx(gaussian(1.0, kappa=measured.share))


def test_more_noise_adds_less(german):
    gains = [[row.gain for row in rows(german, noise, COARSE)] for noise in (0.5, 2.0, 8.0)]
    assert np.all(np.diff(gains, axis=0) < 0)


def test_a_whole_training_adds_more_than_a_step(german):
    step, training = (
        three_attackers(
            TrainingSetting(2.0, dim=german.dim, steps=steps, sampling_rate=0.1), german, COARSE
        )
        for steps in (1, 200)
    )
    for one, all_of_them in zip(step, training, strict=True):
        assert one.gain < all_of_them.gain


def test_images_with_a_known_half():
    stranger, intruder, anyone = rows(Examples.of("digits"), 3.0, "region:top", psnr=15.0)
    assert intruder.measured.total > 500
    # Who sees the upper half completes some digits; without it a candidate matches few.
    assert stranger.without < intruder.measured.at_least < intruder.measured.share
    assert intruder.measured.share < intruder.from_measured < intruder.measured.share + anyone.gain


def test_the_command_shows_three_lines(capsys):
    words = ["bound", "--noise-multiplier", "1", "--data", "german", "--known", COARSE]
    assert exit_code([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["attacker"] for row in printed["attackers"]] == ["stranger", "intruder", "anyone"]
    assert printed["attackers"][1]["measured"]["total"] == 500
    assert exit_code(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"The intruder knows {COARSE}" in shown
    assert "adds at most" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "german", "--known", "zip"], "known names 'zip'"),
        (["--data", "digits", "--known", "top"], "give region:"),
        (["--data", "german", "--known", "housing", "--prior", "these"], "leave prior out"),
        (["--dim", "9", "--norm", "1", "--known", "region:top"], "give data"),
    ],
)
def test_what_cannot_be_known_is_said(words, message, capsys):
    assert exit_code(["bound", "--noise-multiplier", "1", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_without_known_parts_nothing_changes(capsys):
    assert exit_code(["bound", "--noise-multiplier", "1", "--data", "german", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["attackers"] == []
