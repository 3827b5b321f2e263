"""The first screen: what it says and draws, from made-up runs whose answers are known."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace
from scipy.stats import beta

from leakbound.assess.record import Attained, CriterionInfo
from leakbound.report import figures, overview, tables, write
from leakbound.report.folder import read


@pytest.fixture
def look(tmp_path, make_run):
    """The first screen of some records, and the page's text."""

    def build(records, trainings=(), **info):
        folder = make_run(tmp_path / "run", list(records), list(trainings), **info)
        summary = tables.RunSummary(read(folder))
        return overview.overview(summary, {}, images=True, inline=True)

    return build


@pytest.fixture
def trained(make_training):
    """Two seeds of a training under a defense, of accuracies around a mean."""

    def build(defense, mean):
        return [make_training(defense, seed, mean + 0.01 * (seed - 0.5)) for seed in (0, 1)]

    return build


def proved(make_bound, probability, basis="sample", **more):
    return make_bound(
        None,
        value=probability,
        probability=probability,
        accepted=0.05,
        basis=basis,
        excludes_threshold=probability <= 0.05,
        on_average=False,
        **{"name": "probability"} | more,
    )


def test_the_answer_counts_configurations_not_experiments(look, make_assessment, make_defense):
    noise = make_defense("gaussian_noise", noise_std=0.1)
    own = [make_assessment(seed=s, attack=a) for s in (0, 1) for a in ("dlg", "idlg")]
    own += [make_assessment(seed=s, defense=noise, psnr=[9.0]) for s in (0, 1)]
    found = look(own)
    assert found.answer == (
        "A server that follows the protocol reconstructed images under 1 of 2 tested "
        "configurations."
    )
    assert found.best == (
        "The defense tested is not enough for every model and batch size tested. The strongest is "
        "gaussian_noise noise_std=0.1 (undecided). Its cost in accuracy was not measured."
    )


def test_without_an_exposure_it_claims_no_safety(look, make_assessment, make_defense):
    own = [make_assessment(psnr=[9.0], verdict=v, seed=0, defense=make_defense(v[:4]))
           for v in ("undecided", *["protected from strangers"] * 2)]  # fmt: skip
    own[2] = replace(own[2], batch_size=3, experiment="ab" * 8)
    assert look(own).answer == (
        "No attack reconstructed an image in 3 tested configurations. 1 of 3 remain open "
        "(1 undecided): this is no evidence of safety."
    )
    assert "no evidence" not in look(own[1:]).answer


def test_a_malicious_server_and_table_rows_are_named(look, make_assessment):
    own = make_assessment()
    own = replace(
        own,
        threat=replace(own.threat, server="malicious", labels_known=False),
        data=replace(own.data, domain="table", shape=(30,)),
    )
    found = look([own])
    assert found.answer == (
        "A server that changes the model reconstructed rows of a table under 1 of 1 tested "
        "configuration."
    )
    assert found.threat.startswith("labels not known · defense known · malicious server · ")


def test_lines_go_from_risk_to_safety_and_hold_what_is_known(
    look, make_assessment, make_defense, make_bound
):
    strong = make_assessment(
        defense=make_defense("dp", z=5.0),
        psnr=[9.0],
        verdict="protected from strangers",
        bounds=[proved(make_bound, 0.03), proved(make_bound, 0.002, "fitted model", name="m")],
        attained=Attained(
            attack="codebook", success=0.001, baseline=(0.0, 0.01), accepted=0.05,
            confidence=0.95, public_examples=1000,
        ),
    )  # fmt: skip
    weak = make_assessment(
        defense=make_defense("dp", z=0.1), psnr=[9.0], bounds=[proved(make_bound, 1.0)]
    )
    (view,) = look([strong, weak, make_assessment()]).views
    assert [line.row.defense for line in view.lines] == ["no defense", "dp z=0.1", "dp z=5"]
    bare, loose, tight = view.lines
    assert (tight.excluded, tight.excluded_if, tight.row.attained) == (0.03, 0.03, 0.001)
    assert tight.limit == "≤ 0.03"  # what the verdict rests on
    assert loose.limit == "the bound is 1: it excludes nothing"
    assert bare.limit == "not known"
    assert (bare.family, loose.family, tight.family) == (None, 0, 0)
    assert (loose.shade, tight.shade) == (0.0, 1.0)


def test_a_limit_that_one_experiment_lacks_is_not_known(
    look, make_assessment, make_defense, make_bound
):
    given = {"defense": make_defense("dp", z=5.0), "psnr": [9.0]}
    both = [proved(make_bound, 0.03), proved(make_bound, 0.002, "fitted model", name="m")]
    bounded = [make_assessment(seed=s, bounds=both, **given) for s in (0, 1)]
    ((line,),) = (view.lines for view in look(bounded).views)
    assert (line.excluded, line.excluded_if) == (0.03, 0.002)
    one_less = [bounded[0], make_assessment(seed=1, bounds=both[:1], **given)]
    ((line,),) = (view.lines for view in look(one_less).views)
    assert (line.excluded, line.excluded_if) == (0.03, 0.03)
    ((line,),) = (view.lines for view in look([bounded[0], make_assessment(seed=1, **given)]).views)
    assert (line.excluded, line.excluded_if) == (1.0, 1.0)


def test_limits_on_these_examples_alone_are_not_for_every_attacker_on_all_data(
    look, make_assessment, make_defense, make_bound
):
    own = make_assessment(
        defense=make_defense("dp", z=5.0), psnr=[9.0], bounds=[proved(make_bound, 0.03, "examples")]
    )
    ((line,),) = (view.lines for view in look([own]).views)
    assert (line.excluded, line.excluded_if) == (1.0, 0.03)
    assert line.limit == "≤ 0.03 for these very examples"


def test_the_threshold_and_the_accepted_probability_stand_on_the_first_screen(
    look, make_assessment, make_bound
):
    own = make_assessment(bounds=[proved(make_bound, 0.03)])
    ends = "reconstructed: 20 dB PSNR or more · accepted probability: 5 %"
    assert look([own]).threat.endswith(ends)


def test_what_is_left_out_is_said(tmp_path, make_assessment, make_defense, make_run):
    many = [make_assessment(batch_size=2 + i, seed=i) for i in range(overview.VIEWS + 2)]
    many += [make_assessment(defense=make_defense(f"d{i}"), seed=i) for i in range(12)]
    text = write(make_run(tmp_path / "run", many)).read_text()
    assert "2 more choices of model and batch size" in text
    assert "4 more defenses" in text


def test_families_have_the_colors_of_the_charts():
    assert len(figures.COLORS) == overview._NUMBERED


def test_the_share_is_of_the_best_attack_and_its_interval_allows_for_the_choice():
    hits = {"a": [True] * 3 + [False] * 7, "b": [True] * 5 + [False] * 5, "c": [False] * 2}
    name, found = tables.largest_share(hits)
    assert (name, found.hits, found.n) == ("b", 5, 10)
    tail = 0.025 / 3
    assert found.low == pytest.approx(beta.ppf(tail, 5, 6), rel=1e-9)
    assert found.high == pytest.approx(beta.ppf(1 - tail, 6, 5), rel=1e-9)
    assert tables.largest_share({"a": []}) == (None, None)


def test_the_interval_follows_from_the_numbers_beside_it():
    """Before, "4 of 4" stood beside 84 to 100 %, the lower limit of 30 of 30 elsewhere."""
    name, found = tables.largest_share({"a": [True] * 4, "b": [True] * 30})
    assert (name, found.hits, found.n) == ("b", 30, 30)
    alone = tables.largest_share({"a": [True] * 4, "b": [True] * 29 + [False]})[1]
    assert (alone.hits, alone.n) == (4, 4)
    assert 0.3 < alone.low < 0.4


def test_the_interval_covers_the_largest_true_share():
    """Of ten attacks that all succeed with 30 %, the best of 12 rounds each looks like 60 %."""
    import numpy as np

    draws = np.random.default_rng(3).random((2000, 10, 12)) < 0.3
    covered = 0
    for one in draws:
        _, found = tables.largest_share({str(i): list(map(bool, row)) for i, row in enumerate(one)})
        covered += found.low <= 0.3 <= found.high
    assert covered / 2000 >= 0.95


def test_pairs_that_do_not_apply_are_not_counted(tmp_path, make_assessment, make_run):
    idle = {"attack": "other", "status": "not_applicable", "reason": "no"}
    own = [make_assessment(), *(make_assessment(seed=s, **idle) for s in (0, 1))]
    text = write(make_run(tmp_path / "run", own)).read_text()
    assert "This report holds 1 experiment: 1 ran, 0 failed." in text
    assert "2 pairs of attack and batch did not apply" in text
    heat = re.search(r'<table class="heat">.*?</table>', text, re.DOTALL).group()
    assert "other" not in heat


@pytest.mark.parametrize(
    ("plan", "command"),
    [
        (
            {"risk": {"probability": 0.05}, "data": {"source": "mnist5k"}},
            'leakbound calibrate --target "psnr>=25 with probability<=0.05" --data mnist5k',
        ),
        (
            {"data": {"source": "my images; rm -rf"}},
            'leakbound calibrate --target "psnr>=25 with probability<=0.01" '
            "--data 'my images; rm -rf'",
        ),
        (
            {"risk": {"probability": "x"}, "data": 3},
            'leakbound calibrate --target "psnr>=25 with probability<=0.01" '
            "--data YOUR_PUBLIC_DATA",
        ),
    ],
)
def test_the_next_command_is_for_this_data(plan, command):
    assert overview.next_command(plan, CriterionInfo(value=25.0, within=0.05623)) == command


def test_a_captured_update_without_its_truth_measures_nothing(make_captured, tmp_path):
    text = write(make_captured(tmp_path / "run")).read_text()
    first = text[text.index('<section class="first"') : text.index("</section>")]
    assert "1 of 1 tested configuration. The update itself proves it." in first
    assert "<table" not in first
    assert "Next step." in first


def test_a_limit_with_known_parts_is_for_every_intruder(
    look, make_assessment, make_defense, make_bound
):
    """The legend of such a page is about intruders: its hatch is that of no further condition."""
    own = make_assessment(
        defense=make_defense("dp", z=5.0),
        psnr=[9.0],
        bounds=[proved(make_bound, 0.03, "known parts")],
    )
    ((line,),) = (view.lines for view in look([own]).views)
    assert (line.excluded, line.excluded_if) == (0.03, 0.03)
    assert line.limit == "≤ 0.03 with the known parts"
