"""The sign-off page: the answer first and true, the settings that matter, what is not covered, and
the questions of two guidelines in the annex."""

from __future__ import annotations

import html
import re
from functools import partial

import pytest
from msgspec.structs import replace

from leakbound.assess.record import VERDICTS
from leakbound.assess.verdict import MEANINGS
from leakbound.report import evidence, tables, template
from leakbound.report.evidence import sign_off
from leakbound.report.evidence.parts import Epsilons, SignOff
from leakbound.report.evidence.questions import CLAIMED, NO, NO_CLAIM
from leakbound.report.folder import read
from leakbound.report.rerun import digest
from leakbound.report.settings import DeclaredTraining, Limit, SettingRow


def subject(folder, **statements):
    return evidence.of_run(
        read(folder), statements, lambda noise: Epsilons(1e-5, 4, 8), images=False
    )


def shown(one, files=()):
    """The text of a sign-off page without its marks."""
    page = evidence.page(evidence.document([one], images=False), files)
    body = page[page.index("<body>") :]
    return " ".join(html.unescape(re.sub(r"<wbr>|</?span[^>]*>|<[^>]+>", _space, body)).split())


def _space(mark):
    return "" if mark.group().startswith(("<wbr", "<span", "</span")) else " "


PLAN = {"name": "demo", "psnr": 20.0}
LOW = {"psnr": [12.0, 12.0]}
PROOF = {"psnr": None, "probability": 0.004, "accepted": 0.01, "excludes_threshold": True,
         "on_average": False, "basis": "sample"}  # fmt: skip


@pytest.fixture
def run_of(make_run):
    """A run folder whose plan has the hash that it says."""
    return partial(make_run, plan=PLAN, plan_hash=digest(PLAN))


@pytest.fixture
def protected(make_assessment, make_bound, make_defense):
    """Records of a defense with a theorem in every experiment, and none of no defense."""

    def make(**changes):
        bounds = (make_bound(**(PROOF | changes)),)
        given = make_defense("gaussian_noise", noise_std=0.5)
        word = (
            "protected under a model"
            if changes.get("basis") == "fitted model"
            else "protected from strangers"
        )
        return make_assessment(defense=given, bounds=bounds, verdict=word, **LOW)

    return make


def test_an_exposed_run_says_who_reconstructs_what_under_how_many(
    tmp_path, make_assessment, run_of, protected
):
    own = [make_assessment(psnr=[31.0, 12.0]), protected()]
    text = shown(subject(run_of(tmp_path / "run", own)))
    answer = "A server that follows the protocol reconstructed images under 1 of 2 tested"
    assert f"{answer} configurations." in text
    best = "Of the defenses tested, gaussian_noise noise_std=0.5 (protected from strangers)"
    assert f"{best} is enough for one update." in text
    assert "Its cost in accuracy was not measured." in text
    assert text.index(answer) < text.index("Tested") < text.index("Results by defense setting")
    assert "1 of 2 1 to 99 %" in text  # the exact interval of one of two
    assert "at most 0.4 %" in text
    assert "not known" in text


def test_an_undecided_run_says_that_this_is_no_evidence_of_safety(
    tmp_path, make_assessment, run_of, make_defense
):
    noise = make_assessment(defense=make_defense("gaussian_noise", noise_std=0.5), **LOW)
    found = subject(run_of(tmp_path / "run", [make_assessment(**LOW), noise])).sign_off
    assert found.answer == (
        "No attack reconstructed an image in 2 tested configurations. 2 of 2 remain open "
        "(2 undecided): this is no evidence of safety."
    )
    assert found.advice == (
        "The defense tested is not enough for every model and batch size tested. The strongest is "
        "gaussian_noise noise_std=0.5 (undecided). Its cost in accuracy was not measured."
    )
    assert [row.limits for row in found.rows] == [(), ()]


def test_a_protected_run_names_the_theorems_and_its_cost(
    tmp_path, run_of, make_training, make_assessment, protected
):
    own = protected()
    plain = make_assessment().defense
    costs = [make_training(plain, 0, 0.9), make_training(own.defense, 0, 0.75)]
    found = subject(run_of(tmp_path / "run", [own], costs)).sign_off
    assert found.answer == (
        "No attack reconstructed an image in 1 tested configuration. Theorems keep every covered "
        "attacker to the accepted probability."
    )
    assert found.advice == (
        "Of the defenses tested, gaussian_noise noise_std=0.5 (protected from strangers) is enough "
        "for one update at the lowest cost. In a short training it cost up to 15.0 points of test "
        "accuracy."
    )


@pytest.fixture
def private(make_assessment, make_bound, dp_sgd):
    """One protected record of DP-SGD with noise multiplier 0.5."""
    return make_assessment(
        defense=dp_sgd, bounds=(make_bound(**PROOF),), verdict="protected from strangers", **LOW
    )


DECLARED = DeclaredTraining("d.toml", 9, 0.5, True, "d.toml: 9 rounds.", "")


@pytest.mark.parametrize(
    ("training", "words", "never"),
    [
        (None, "is enough for one update.", "declared"),
        (DECLARED, "is enough for all 9 declared rounds.", "not enough"),
        (
            replace(DECLARED, holds=False, why="its bound is 1"),
            "is enough for one update. It is not enough for the declared training: its bound is 1.",
            "all 9",
        ),
        (
            replace(DECLARED, noise_multiplier=0.6),
            "is enough for one update. It is not enough for the declared training: no defense that "
            "is enough here has its noise multiplier (0.6).",
            "all 9",
        ),
        (replace(DECLARED, noise_multiplier=None), "is enough for one update.", "all 9"),
    ],
)
def test_enough_is_said_for_all_declared_rounds_or_for_one_update(
    tmp_path, run_of, private, training, words, never
):
    run = read(run_of(tmp_path / "run", [private]))
    one = evidence.of_run(
        run, {}, lambda noise: Epsilons(1e-5, 4, 8), images=False, training=training
    )
    content = evidence.document([one], images=False)
    assert words in one.sign_off.advice
    assert never not in one.sign_off.advice
    assert words in " ".join(evidence.card(content).replace("\\", "").split())
    assert ("d.toml: 9 rounds." in shown(one)) is (training is not None)
    rest = " ".join(one.sign_off.not_covered)
    assert ("More than one round" in rest) is (training is None)


def test_a_model_of_the_data_is_not_enough(tmp_path, run_of, protected):
    one = protected(basis="fitted model")
    found = subject(run_of(tmp_path / "run", [one])).sign_off
    assert "1 of 1 remain open (1 protected under a model)" in found.answer
    assert found.advice.startswith("The defense tested is not enough")
    assert found.rows[0].limits == (Limit(0.004, "under a model"),)


def test_a_defense_that_was_not_tested_everywhere_is_not_recommended(
    tmp_path, run_of, make_assessment, protected
):
    own = [protected(), make_assessment(batch_size=8, **LOW)]
    assert "not enough" in subject(run_of(tmp_path / "run", own)).sign_off.advice


def test_a_bound_that_is_missing_once_is_no_limit(tmp_path, run_of, protected):
    both = [protected(), replace(protected(), seed=1, bounds=(), experiment="b")]
    (row,) = subject(run_of(tmp_path / "run", both)).sign_off.rows
    assert row.limits == ()


def test_a_folder_that_does_not_hold_together_gets_no_advice(tmp_path, run_of, protected):
    one = subject(run_of(tmp_path / "run", [protected()], experiments=2))
    assert one.sign_off.advice == sign_off.UNSOUND
    assert "is enough" not in shown(one)


def test_no_defense_tested_is_said(tmp_path, make_assessment, run_of):
    found = subject(run_of(tmp_path / "run", [make_assessment()])).sign_off
    assert found.advice == "No defense was tested."


def test_a_captured_update_says_what_proves_it(tmp_path, make_captured):
    text = shown(subject(make_captured(tmp_path / "run")))
    assert "reconstructed images under 1 of 1 tested configuration." in text
    assert "The update itself proves it." in text
    assert "1 input revealed exactly" in text
    assert "The attacker sees a captured update" in text


def test_a_captured_update_that_nothing_could_check_says_so(tmp_path, make_captured, change):
    folder = make_captured(tmp_path / "run")
    change(
        folder,
        lambda a: {
            "verdict": "undecided",
            "certificate": None,
        },
    )
    found = subject(folder).sign_off
    assert found.answer.startswith("No reconstruction could be checked in 1 tested configuration")
    assert "no evidence of safety" in found.answer


def test_the_worst_row_counts_over_all_models_and_attacks(tmp_path, make_assessment, run_of):
    own = [
        make_assessment(psnr=[31.0, 12.0], attack="one"),
        make_assessment(psnr=[31.0, 30.0], attack="two"),
        make_assessment(psnr=[12.0] * 4, batch_size=4, attack="two"),
    ]
    (row,) = subject(run_of(tmp_path / "run", own)).sign_off.rows
    assert (row.reconstructed.hits, row.reconstructed.n) == (2, 2)
    kept = tables.largest_share({"a": [True, False], "b": [True] * 2, "c": [False] * 4})[1]
    assert row.reconstructed == kept
    assert row.configurations == 2


def test_the_date_is_that_of_the_records(tmp_path, make_assessment, run_of):
    import os

    folder = run_of(tmp_path / "run", [make_assessment()])
    os.utime(folder / "records.jsonl", (86400 * 365.25, 86400 * 365.25))
    assert "records of 1971-01-01 (UTC)" in shown(subject(folder))


def rows(*verdicts):
    return tuple(SettingRow(f"d{place}", word, 1) for place, word in enumerate(verdicts))


def page_of(found):
    return SignOff(None, "a", "b", "c", "d", "e", (), found, ())


def test_rows_give_way_where_a_sheet_is_full():
    every = page_of(rows(*VERDICTS))
    few = sign_off.fitting(every, [], 6, MEANINGS)
    assert 1 < len(few) <= sign_off.MOST
    same = page_of(rows(*["exposed"] * 10))
    assert len(sign_off.fitting(same, [], 6, MEANINGS)) == sign_off.MOST
    assert len(sign_off.fitting(same, ["x" * 150] * 9, 6, MEANINGS)) < sign_off.MOST
    assert len(sign_off.fitting(same, ["x" * 150] * 40, 6, MEANINGS)) == 1


def test_settings_that_do_not_fit_are_counted(tmp_path, make_grid):
    one = subject(make_grid(tmp_path / "run", seeds=1, hostile=False))
    text = shown(one)
    count = len(re.findall(r"▲ exposed|\? undecided", text))
    assert len(one.sign_off.rows) == 9
    assert f"{9 - count} more setting is in the annex" in text
    families = {row.defense.split()[0] for row in one.sign_off.rows[:4]}
    assert families == {"no", "gaussian_noise", "top_k_pruning", "secure_aggregation"}


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.1004, "10.1\u00a0%"), (1e-3, "0.1\u00a0%"), (1e-12, "1 in a billion"), (1, "100\u00a0%")],
)
def test_a_probability_is_rounded_up(value, words):
    assert sign_off.chance(value) == words


def test_names_break_between_their_words_only():
    found = template.breakable("a gaussian_noise noise_std=0.001 <b>")
    assert found == (
        'a <span class="w">gaussian_<wbr>noise</span> <span class="w">noise_<wbr>std=0.001</span> '
        "&lt;b&gt;"
    )


def test_the_annex_has_every_question(tmp_path, make_assessment, run_of, dp_sgd):
    folder = run_of(tmp_path / "run", [make_assessment(defense=dp_sgd), make_assessment()])
    one = subject(folder, data_security="two guards")
    nist = {q.question: q for q in one.questions if q.guideline == "NIST SP 800-226"}
    edpb = {q.question: q for q in one.questions if q.guideline == "EDPB Opinion 28/2024"}
    assert {*nist} == {*CLAIMED.values(), "Which empirical tests were made?"}
    assert "epsilon 4" in nist[CLAIMED["parameters"]].answer
    assert nist[CLAIMED["data_security"]].answer == "two guards"
    assert nist[CLAIMED["privacy_budget"]].status == "not stated"
    for words in ("extracted directly", "queries to the model", "reasonably likely",
                  "reconstruction", "model inversion", "membership", "attribute", "exfiltration",
                  "regurgitation", "impact assessment", "outputs", "documented"):  # fmt: skip
        assert [q for q in edpb if words in q], words
    for words in ("queries to", "membership", "attribute", "exfiltration", "regurgitation"):
        (line,) = [line for question, line in edpb.items() if words in question]
        assert line.status == "not answered"
        assert line.answer.startswith(NO)
    text = html.unescape(evidence.annex(evidence.document([one], images=False)))
    text = re.sub(r"<wbr>|</?span[^>]*>", "", text)
    for line in one.questions:
        assert line.question in text
        assert line.answer in text


def test_without_a_claim_there_is_nothing_to_ask(tmp_path, make_assessment, run_of):
    one = subject(run_of(tmp_path / "run", [make_assessment()]))
    nist = {q.question: q for q in one.questions if q.guideline == "NIST SP 800-226"}
    assert nist[CLAIMED["parameters"]].answer == NO_CLAIM
    assert nist[CLAIMED["parameters"]].status == "not answered"
    assert nist[CLAIMED["data_collection"]].status == "not stated"
