"""What pages say of attackers who know more than the population."""

from __future__ import annotations

from msgspec.structs import replace

from leakbound.assess.record import AttackerRow, Completed
from leakbound.report.attackers import attacker_sentences, audience, sentence
from leakbound.report.evidence.sign_off import NARROW
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
    said = sentence("noise 5", [STRANGER, worse, INTRUDER, INTRUDER, ANYONE, ANYONE])
    assert said == (
        "noise 5, in the worst of its configurations: a stranger reaches 18 of 20 columns with a "
        "probability of 0.09 at most; who has age,sex reaches 17 of 18 columns of the rest with a "
        "probability of 0.13 at most (nearest neighbors: 12 of 100 without the update; if nobody "
        "completes more, 0.19 at most with it). For anyone, whatever they know, one update adds "
        "0.08 at most."
    )


def test_a_limit_that_says_nothing_is_said_to_be_one():
    said = sentence("noise 5", [replace(INTRUDER, without=0.8, bound=0.9), ANYONE])
    assert "1 at most (public examples do not exclude that the known parts determine" in said
    # A stranger's limit is large for want of noise: there are no known parts.
    weak = sentence("noise 1", [replace(STRANGER, without=0.01, bound=0.9), ANYONE])
    assert "a probability of 0.9 at most. " in weak


def test_names_are_cut_and_the_gain_is_not():
    """The sign-off page has room for so many letters (`evidence/sign_off.py`)."""
    long = replace(INTRUDER, knows=",".join(f"column_{i}" for i in range(99)), without=0.8)
    said = sentence("gaussian_noise " * 20, [STRANGER, long, ANYONE])
    assert said.endswith("one update adds 0.08 at most.")
    assert len(said) < 5 * NARROW


def test_a_doubt_about_one_experiment_leaves_the_gain_alone():
    said = sentence("noise 5", [STRANGER, ANYONE, ANYONE])
    assert said == "noise 5: For anyone, whatever they know, one update adds 0.08 at most."


def test_a_setting_is_left_out_if_one_of_its_experiments_has_no_limit(
    make_run, make_assessment, make_defense, tmp_path
):
    own = [
        make_assessment(
            psnr=[9.0], seed=seed, defense=make_defense("weak"), experiment=f"{seed}" * 16
        )
        for seed in range(2)
    ]
    whole = [replace(one, attackers=(STRANGER, ANYONE)) for one in own]
    both = RunSummary(read(make_run(tmp_path / "both", whole)))
    assert len(attacker_sentences(both)) == 1
    half = RunSummary(read(make_run(tmp_path / "half", [whole[0], own[1]])))
    assert attacker_sentences(half) == ()


def test_pages_name_their_attacker(make_bounded, tmp_path):
    folder = make_bounded(tmp_path / "run")
    summary = RunSummary(read(folder))
    assert attacker_sentences(summary) == ()
    assert audience(summary.assessments) == "stranger"
    assert "known from elsewhere" not in threat_line(summary)


def test_the_next_command_is_for_the_same_attacker(make_assessment):
    plan = {"data": {"source": "german"}}
    stranger = make_assessment(psnr=[9.0]).criterion
    intruder = replace(stranger, known="age,sex")
    assert next_command(plan, intruder).endswith("--known age,sex")
    assert "--known" not in next_command(plan, stranger)
    # Who may succeed without the update has no threshold that noise keeps.
    assert next_command(plan, intruder, guessed=True) == 'leakbound calibrate --target "gain<=0.1"'
    assert next_command(plan, stranger, guessed=True).startswith("leakbound bound")
