"""Probabilities on the page: with prior and accepted level, escaped; and the plots."""

from __future__ import annotations

import io
import re

import msgspec
import numpy as np
import pytest
from PIL import Image

from leakbound.report import figures, tables, template, write

BAD = "<img src=x onerror=alert(1)>"


def probability(value=3e-5, **changes):
    """The fields of a bound on the probability of success."""
    return {
        "name": "probability",
        "value": value,
        "probability": value,
        "accepted": 0.001,
        "psnr": None,
        "prior": "mixture of 10 Gaussians (public images)",
        "rests_on_prior": True,
        "covers": "all",
        "excludes_threshold": value <= 0.001,
        "on_average": False,
        "equation": "Hayes et al. 2023",
        "assumptions": ["covers all attackers", "each image for itself"],
        "standard_error": None,
    } | changes


@pytest.fixture
def experiments(make_assessment, make_defense):
    """Two defenses with a small and a large probability, and none."""

    def make(hostile="", more=None, covers="all"):
        found = []
        for name, value in (("dp_sgd", 3e-5), ("weak_dp", 0.4)):
            for seed in range(2):
                risk = probability(value * (1 + seed), prior=f"mixture{hostile}", covers=covers)
                risk["assumptions"].append(f"one{hostile}")
                given = make_defense(name)
                verdict = "protected from strangers" if risk["excludes_threshold"] else "undecided"
                found.append(
                    make_assessment(
                        defense=given,
                        seed=seed,
                        psnr=[9.0, 8.0],
                        bounds=[risk] + ([more] if more else []),
                        verdict=verdict,
                    )
                )
        return [*found, make_assessment()]

    return make


def page(tmp_path, make_run, records):
    return write(make_run(tmp_path / "run", records)).read_text()


def test_words_of_the_page(tmp_path, make_run, experiments):
    text = page(tmp_path, make_run, experiments())
    assert "This rests on a count of public examples and on no model of the data" in text
    assert "protected on average" not in text[text.index("<body>") :]  # the error is not bounded
    assert "Upper bound for any attacker" not in text
    (note,) = re.findall(r'<li id="bound-1">.*?</li>\s*</ol>', text, re.DOTALL)
    assert "<strong>Probability</strong> that an example is matched within the threshold" in note
    assert "threshold (mixture). Accepted: <strong>0.001</strong>. It covers all attackers." in note
    assert "lower bound" not in note
    assert "Hayes et al. 2023" in note
    assert "each image for itself" in note


def test_the_largest_probability_of_a_configuration_is_shown(tmp_path, make_run, experiments):
    records = experiments()
    text = page(tmp_path, make_run, records)
    body = re.search(r'aria-label="Verdicts".*?</table>', text, re.DOTALL).group()
    rows = {
        name: row for row in body.split("<tr>") for name in ("dp_sgd", "weak_dp") if name in row
    }
    assert "6e−05" in rows["dp_sgd"]
    assert 'title="' in rows["dp_sgd"]
    assert "mixture; accepted: 0.001" in rows["dp_sgd"]
    assert "0.8" in rows["weak_dp"]
    names = tables.Names(records)
    found = {row.defense: row for row in tables.configurations(records, names)}
    row = found["dp_sgd"].success_bound
    assert (row.probability, row.experiments, row.of_experiments) == (6e-5, 2, 2)
    assert (found["dp_sgd"].error_bound, found["no defense"].success_bound) == (None, None)


def test_a_probability_does_not_bound_the_error_nor_the_other_way_round(
    tmp_path, make_run, make_bound, experiments
):
    records = experiments(more=make_bound(19.0))
    found = tables.configurations(records, tables.Names(records))
    assert found[0].error_bound.psnr == 19.0
    assert found[0].success_bound.accepted == 0.001
    assert [one.accepted for one in tables.Theorems(records).all] == ["0.001", None]
    text = page(tmp_path, make_run, records)
    assert "Mean error as PSNR: bound, attacks" in text
    assert "<strong>trace: lower bound on the error</strong>" in text
    assert "protected on average" in text


def test_only_all_attackers_count(experiments):
    records = experiments(covers="trap")
    assert not any(
        row.success_bound for row in tables.configurations(records, tables.Names(records))
    )


def test_missing_bounds_are_named(tmp_path, make_run, make_assessment, make_defense, experiments):
    other = make_assessment(
        defense=make_defense("copy"), bounds_note="the probability needs 64 images"
    )
    text = page(tmp_path, make_run, [*experiments(), other])
    assert "A bound is missing for copy: the probability needs 64 images." in text


def test_hostile_words_are_escaped(tmp_path, make_run, experiments):
    text = page(tmp_path, make_run, experiments(hostile=BAD))
    assert BAD not in text
    assert text.count("mixture&lt;img src=x") >= 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"probability": "0.1"},
        {"probability": 1.5},
        {"probability": -0.1},
        {"probability": True},
        {"accepted": 2},
        {"accepted": [1]},
    ],
)
def test_damaged_records_are_refused(tmp_path, make_run, make_assessment, wrong):
    own = msgspec.to_builtins(make_assessment()) | {"bounds": [probability(**wrong)]}
    run = make_run(tmp_path / "run", [own])
    with pytest.raises(ValueError, match=rf"line 1 is damaged: .*\]\.{next(iter(wrong))}`"):
        write(run)


def test_a_probability_that_nobody_accepted(tmp_path, make_run, make_assessment):
    old = probability()
    del old["accepted"]
    text = page(tmp_path, make_run, [make_assessment(bounds=[old])])
    assert "Accepted: <strong>none named</strong>" in text


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "–"),
        (1.0, "1"),
        (0.5, "0.5"),
        (0.12341, "0.124"),
        (9.999e-4, "0.001"),
        (0.0, "<1e−9"),
    ],
)
def test_probabilities_in_words(value, words):
    assert template.upper_bound(value) == words


def test_words_are_never_below_the_probability():
    for value in np.exp(np.random.default_rng(0).uniform(-20, 0, 500)):
        text = template.upper_bound(float(value)).replace("−", "-")
        assert value <= float(text) <= value * 1.11


def corridor_png(*given):
    return figures.png(figures.corridor(*given))


def test_the_plots_are_pictures_and_differ_with_their_numbers():
    psnr = np.linspace(10, 30, 21).tolist()
    upper = 10 ** -np.linspace(0, 12, 21)
    lower = upper / 10
    line = corridor_png(psnr, lower, upper, 0.001)
    assert line == corridor_png(psnr, lower, upper, 0.001)
    assert line != corridor_png(psnr, lower, upper, 0.01)
    assert Image.open(io.BytesIO(line)).height > 300
    corridor_png(psnr, 0 * lower, np.ones(21), 1e-12)
