"""Risk of rows of a table, counted in columns: targets, the corridor, calibration, releases."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import special

from leakbound import audit, calibrate, data
from leakbound.assess.criterion import Criterion, distance_of
from leakbound.bounds.attainable import Attainable
from leakbound.bounds.counting import PublicSample, count_least, count_limit
from leakbound.bounds.distances import ColumnMisses
from leakbound.cli import main
from leakbound.domains import SeriesDomain, of_shape
from leakbound.risk import Target, TrainingSetting, calibrate_setting, corridor
from leakbound.risk.corridor import around
from leakbound.risk.examples import Examples
from leakbound.risk.kappa import baseline_matches, row_matches
from leakbound.risk.statement import of_assessment

pytestmark = pytest.mark.usefixtures("wide")
TARGET = "columns>=0.9 with probability<=0.05"


@cache
def german():
    return Examples.of("german")


def call(*arguments):
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code


# --- targets


@pytest.mark.parametrize(
    ("text", "differ", "goal"),
    [
        ("columns>=0.9 with probability<=0.01", 2, "18 of 20 columns"),
        ("Columns >= 90 % with probability <= 1%", 2, "18 of 20 columns"),
        ("columns>=1 with probability<=0.01", 0, "20 of 20 columns"),
        ("columns>=0.81 with probability<=0.01", 3, "17 of 20 columns"),
    ],
)
def test_targets_in_columns(text, differ, goal):
    found = Target.parse(text, domain=german().domain)
    assert (found.eta, found.gamma, found.goal, found.psnr) == (differ, 0.01, goal, None)
    assert str(found) == f"{goal} or more with probability <= 0.01"


def test_targets_of_series():
    found = Target.parse("psnr>=20 with probability<=0.01", domain=SeriesDomain((2, 8)))
    assert (found.eta, str(found)) == (0.1, "20 dB or more with probability <= 0.01")
    # Reports write the metric's own name.
    assert Target.parse("snr>=20 with probability<=0.01", domain=SeriesDomain((2, 8))) == found
    for domain in (None, of_shape((1, 8, 8))):
        with pytest.raises(ValueError, match='write it as "psnr>=20'):
            Target.parse("snr>=20 with probability<=0.01", domain=domain)


@pytest.mark.parametrize(
    ("text", "domain", "words"),
    [
        ("columns>=0.9 with probability<=0.01", None, 'mean squared error; .* "psnr>=20'),
        ("psnr>=20 with probability<=0.01", "german", 'count by columns; .* "columns>=0.9'),
        ("mse<=0.1 with probability<=0.01", "german", "rows, which"),
        ("mse<=0.1 with probability<=0.01", "series", "mse<=0.1"),
        ("columns>=18 with probability<=0.01", "german", "share is 18"),
        ("columns>=0 with probability<=0.01", "german", "share is 0"),
        ("columns>=0.9 dB with probability<=0.01", "german", "columns has no dB"),
        ("columns<=0.9 with probability<=0.01", "german", "write it as"),
    ],
)
def test_targets_that_do_not_fit(text, domain, words):
    known = {"german": german().domain, "series": SeriesDomain((2, 8)), None: None}[domain]
    with pytest.raises(ValueError, match=words):
        Target.parse(text, domain=known)


# --- calibration and the corridor


def test_calibration_is_the_least_noise_of_the_counted_bound():
    found = calibrate(TARGET, data="german")
    sample = found.corridor.prior
    assert isinstance(sample, PublicSample)
    assert isinstance(sample.distance, ColumnMisses)
    assert found.verdict == "protected from strangers"
    assert found.target.goal == "18 of 20 columns"
    noise = found.noise_multiplier
    assert (
        sample.success_bound(noise, 2)[0][0] <= 0.05 < sample.success_bound(0.999 * noise, 2)[0][0]
    )
    assert found.public["largest_ball"] == sample.largest(2) <= 3
    assert found.public["density_margin"] >= 1
    alone, rows = found.rare
    assert alone == len(sample.alone(2)) > 700
    assert rows == tuple(map(str, sample.alone(2)[:5]))
    plain = json.loads(json.dumps(found.plain()))
    assert (plain["rare_rows"], plain["rare"]) == (alone, list(rows))
    assert plain["target"]["goal"] == "18 of 20 columns"
    assert found.defense().links[0].clip_norm == 1.0
    assert found._figure().axes[0].get_xlabel() == "right columns of 20"


def test_many_steps_lift_the_same_counts():
    """The bound of a training is that of the count, lifted by the training's trade-off."""
    prior = german().prior()
    setting = TrainingSetting(1.0, 61, steps=40, sampling_rate=0.1)
    edges = corridor(setting, [0, 2, 4], prior=prior, attacks=german().attacks())
    assert (np.diff(edges.bound) >= 0).all()
    one = corridor(TrainingSetting(1.0, 61), [0, 2, 4], prior=prior, attacks=edges.attacks)
    assert (edges.bound > one.bound).all()
    assert (edges.log_kappa == one.log_kappa).all()
    k = np.arange(41)
    share = special.binom(40, k) * 0.1**k * 0.9 ** (40 - k)
    kappa = math.exp(edges.log_kappa[1])
    lifted = share @ special.ndtr(special.ndtri(kappa) + np.sqrt(k) / 1.0)
    assert edges.bound[1] <= lifted * (1 + 1e-6)
    assert "columns that may differ" in edges._repr_html_()
    assert "rows of 20 columns" in edges._repr_html_()
    more = calibrate(TARGET, data="german", steps=40, sampling_rate=0.1)
    assert more.noise_multiplier > calibrate(TARGET, data="german").noise_multiplier


def test_plots_run_over_columns():
    places, eta, name = around(german().prior(), [2, 4], 1.0, 61)
    assert places == list(range(11, 21))
    assert (eta == 20 - np.array(places)).all()
    assert name == "right columns of 20"


def test_labels_let_the_attacker_choose_by_class():
    bounds = [
        german().prior(labels_known=known).success_bound(1.0, 2)[0][0] for known in (False, True)
    ]
    assert bounds[0] < bounds[1]


@pytest.mark.parametrize(
    ("target", "more", "words"),
    [
        (
            "columns>=0.9 with probability<=0.001",
            {},
            "no number of examples like these .* ask for more columns",
        ),
        ("columns>=0.5 with probability<=0.05", {}, "ask for more columns"),
        (TARGET, {"prior": "mixture"}, "this distance .table."),
        (TARGET, {"prior": "sphere"}, "measured in another way"),
        (Target.of_psnr(20, 0.05), {}, "measured in another way"),
    ],
)
def test_what_is_refused_of_tables(target, more, words):
    with pytest.raises(ValueError, match=words) as caught:
        calibrate(target, data="german", **more)
    assert "mixture" not in str(caught.value) or more


def test_a_prior_of_images_is_refused_for_columns():
    rows = np.random.default_rng(0).random((100, 4))
    target = Target.parse(TARGET, domain=german().domain)
    with pytest.raises(ValueError, match="measured in another way"):
        calibrate_setting(target, TrainingSetting(1.0, 4), prior=PublicSample(rows))


def test_private_rows_are_not_named():
    found = calibrate(TARGET, data="german", prior="these")
    assert found.verdict == "protected (these examples)"
    assert found.rare is None
    assert found.noise_multiplier < calibrate(TARGET, data="german").noise_multiplier


# --- what attacks attain


def test_the_best_public_row_is_counted_on_other_rows():
    """A third of the rows differ from one row in at most a column: a guess that is certain."""
    draw = np.random.default_rng(0)
    rows = 10.0 * draw.integers(0, 50, (600, 12))
    rows[::3] = 10.0
    found = Attainable(rows, distance=ColumnMisses(lambda own: own, 12))
    reached = found.success([(1.0, math.inf)], [0, 1, 6])
    assert reached.baseline == pytest.approx(reached.success)
    assert 0.22 < reached.baseline[0] < 1 / 3
    built = np.random.default_rng(2).permutation(600)[300:]  # the counted half
    hits = int((built % 3 == 0).sum())
    alone = [found.success([(1.0, math.inf)], 0).baseline[0], count_least(hits, 300)]
    assert alone[0] == pytest.approx(alone[1], rel=0.15)
    loud = found.success([(1.0, 1e-3)], [0]).success[0]
    assert loud > 0.99 * reached.baseline[0]


def test_success_on_rows_is_what_a_simulated_codebook_reaches():
    """Forty rows, all as likely: named among 40 by a noisy answer."""
    draw = np.random.default_rng(1)
    base = 10.0 * draw.integers(0, 50, (40, 12))
    rows = base[draw.integers(0, 40, 4000)]
    found = Attainable(rows, distance=ColumnMisses(lambda own: own, 12))
    limit = found.success([(1.0, 0.4)], 1).success[0]
    seen = 0.4 * draw.standard_normal((20_000, 40))
    seen[:, 0] += 1
    true = (seen.argmax(1) == 0).mean()
    assert 0.9 * true < limit < true


def test_matches_of_rows():
    own = german()
    found = row_matches(own.images, own.domain)(4)
    inputs = torch.tensor(own.images).float()
    blind = own.domain.blind(inputs)
    assert found.mean == (own.domain.distance(inputs, blind.expand_as(inputs)) <= 4).double().mean()
    near = (own.domain.distances(inputs, inputs) <= 4).sum(1).max() - 1
    assert found.example == pytest.approx(float(near) / 999)
    assert own.matches([4])[0] == found
    assert Examples.of("digits").matches([0.01])[0] == baseline_matches(
        Examples.of("digits").images, 0.01
    )


# --- commands


def test_bound_shows_columns_and_names_rare_rows(capsys, tmp_path):
    arguments = ("bound", "--noise-multiplier", 1, "--data", "german", "--share", 1, 0.9, 0.8)
    assert call(*arguments, "--accept", 0.05, "--out", tmp_path) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "rows of 20 columns of german",
        "16 of 20 columns",
        "18 of 20 columns",
        "one fixed row matches",
        "bounds average over examples and state nothing of one given example",
        "public examples are rare",
        "(such as numbers ",
        "1000 public rows without a model",
    ):
        assert words in text, words
    assert "dB" not in text
    found = json.loads((tmp_path / "bound.json").read_text())
    assert [row["within"] for row in found["thresholds"]] == [4, 2, 0]
    assert [row["verdict"] for row in found["thresholds"]][1:] == [
        "protected from strangers",
        "protected from strangers",
    ]
    assert found["thresholds"][2]["rare_rows"] == 1000
    assert {"corridor.png"} <= {path.name for path in tmp_path.iterdir()}


def test_calibrate_shows_columns(capsys):
    assert call("calibrate", "--target", TARGET, "--data", "german") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "18 of 20 columns or more with probability <= 0.05: noise_multiplier = 0." in text
    assert "at 18 of 20 columns, bounds average over examples" in text
    assert "examples that the typical one matches" in text
    assert "verdict of `leakbound bound` on this answer: protected" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bound", "--noise-multiplier", 1, "--eta", 0.01), "eta holds mean squared errors"),
        (("bound", "--noise-multiplier", 1, "--share", 1.5), "share is 1.5"),
        (("calibrate", "--target", "psnr>=20 with probability<=0.1"), "data are rows"),
        (("calibrate", "--target", TARGET, "--prior", "gallery"), "this distance"),
    ],
)
def test_one_line_for_what_does_not_fit(capsys, arguments, words):
    own = () if arguments[0] == "evidence" else ("--data", "german")
    assert call(*arguments, *own) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("leakbound:")]
    assert words in line


# --- releases


def test_an_audit_of_a_table_is_protected_by_the_count():
    plan = {
        "data": {"source": "german"},
        "models": [{"name": "mlp", "hidden": [16]}],
        "attacks": [{"name": "linear_inversion"}],
        "defenses": [{"name": "dp_sgd", "noise_multiplier": [0.1, 2.0]}],
        "threat": {"server": "malicious", "labels_known": False},
        "risk": {"probability": 0.1, "prior": "mixture", "these": True},
        "criterion": {"share": 0.8},
        "utility": {"rounds": 0},
    }
    loud, quiet = (one.record for one in audit.run(audit.parse(plan), pictures=False))
    kinds = [(bound.basis, bound.largest_ball) for bound in quiet.bounds]
    assert [basis for basis, _ in kinds] == ["sample", "examples"]
    counted, these = quiet.bounds
    assert counted.probability >= these.probability
    assert quiet.verdict == "protected (these examples)"
    assert any("public examples are rare" in words for words in counted.assumptions)
    assert "none is known for what is counted of a row" in quiet.bounds_note
    assert loud.verdict == "person named"
    assert loud.attained.attack == "linear estimator"
    assert any("reaches 16 of 20 columns" in words for words in of_assessment(loud))
    own = data.load("german")
    domain = own.domain.fitted(own.inputs)
    level = Criterion.of(domain, share=0.8).within
    sample = PublicSample(own.inputs.double().numpy(), distance=distance_of(domain))
    assert level == 4
    wanted = count_limit(sample.largest(4), 1000, confidence=0.975)
    assert np.exp(sample.log_kappa(4, parts=2)) == pytest.approx(wanted)


def test_the_table_of_the_docs_is_what_is_computed():
    text = (Path(__file__).parents[2] / "docs" / "risk.md").read_text(encoding="utf-8")
    part = text.split("## Rows of a table")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines()]
    told = {row[0]: row[1:] for row in rows if len(row) == 6}
    sample = german().prior()
    codes = sample.distance.coded(sample.examples)
    near = np.concatenate(list(sample.distance.among(codes)))
    own = sample.distance.apart(sample.examples, sample.examples)
    for place, k in enumerate(map(int, told["right columns"])):
        level = 20 - k
        found = {
            "neighbors at most": f"{(near <= 2 * level).sum(1).max()}",
            "K\\* at most": f"{sample.largest(level)}",
            "fixed": f"{(own <= level).sum(1).max()}",
            "limit on kappa": f"{100 * np.exp(sample.log_kappa(level)):.2g} %",
            "bound at noise multiplier 1": f"{sample.success_bound(1.0, level)[0][0]:.2g}",
            "least noise for a probability of 0.05": f"{least_noise(level):.3g}",
            "rare rows": f"{len(sample.alone(level)) / 10:.2g} %",
        }
        for name, value in found.items():
            stated = float(told[name][place].split()[0])
            assert stated == pytest.approx(float(value.split()[0]), rel=0.02), (name, k)


def least_noise(level):
    target = Target(level, 0.05, goal="columns")
    setting = TrainingSetting(1.0, 61)
    prior, attacks = german().prior(), german().attacks()
    return calibrate_setting(target, setting, prior=prior, attacks=attacks).noise_multiplier
