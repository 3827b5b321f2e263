"""What the tables count and average, against hand-computed values and scipy.stats."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from scipy import stats

from leakbound.report import tables


@pytest.mark.parametrize("n", [6, 7, 9, 20, 33, 101])
def test_median_interval_is_the_tightest_with_its_level(n):
    found = tables.middle([float(v) for v in range(1, n + 1)])
    rank = int(found.low)
    assert found.level == 0.95
    assert found.high == n + 1 - rank
    assert 1 - 2 * stats.binom.cdf(rank - 1, n, 0.5) >= 0.95
    assert 1 - 2 * stats.binom.cdf(rank, n, 0.5) < 0.95
    assert found.median == (n + 1) / 2


def test_median_interval_known_values():
    # n = 10: the 2nd to the 9th value cover the median with 97.9 % (any table of the sign test).
    found = tables.middle([float(v) for v in range(10, 0, -1)])
    assert (found.low, found.high, found.median) == (2.0, 9.0, 5.5)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_too_few_experiments_give_min_and_max_and_say_so(n):
    found = tables.middle([float(v) for v in range(n)])
    assert (found.low, found.high, found.level) == (0.0, n - 1.0, None)


def test_median_interval_covers():
    rng = np.random.default_rng(0)
    draws = rng.exponential(size=(2000, 15))
    found = [tables.middle(list(row)) for row in draws]
    covered = np.mean([m.low <= np.log(2) <= m.high for m in found])
    assert covered >= 0.95 - 3 * np.sqrt(0.05 * 0.95 / 2000)


@pytest.mark.parametrize(("hits", "n"), [(0, 1), (0, 10), (3, 10), (10, 10), (57, 200)])
def test_share_is_clopper_pearson(hits, n):
    found = tables.share(hits, n)
    known = stats.binomtest(hits, n).proportion_ci(0.95, method="exact")
    assert (found.low, found.high) == pytest.approx((known.low, known.high), abs=1e-12)
    assert found.value == hits / n


def test_share_of_nothing():
    assert tables.share(0, 0) is None
    assert tables.middle([]) is None


def test_group_counts_everything_and_averages_only_what_ran(make_assessment):
    own = [
        make_assessment(seed=0, psnr=[30.0, 10.0], problem="objective did not fall"),
        make_assessment(seed=1, psnr=[25.0, 21.0]),
        make_assessment(seed=2, psnr=[9.0, 8.0]),
        make_assessment(seed=3, status="failed", reason="RuntimeError"),
        make_assessment(seed=4, status="not_applicable", reason="no"),
    ]
    (row,) = tables.attack_summaries(own, tables.Names(own))
    counts = row.ran, row.did_not_converge, row.failed, row.not_applicable
    assert counts == (3, 1, 1, 1)
    assert (row.score.median, row.score.low, row.score.high) == (20.0, 8.5, 23.0)
    assert row.score.level is None
    assert (row.reconstructed.hits, row.reconstructed.n) == (3, 6)
    assert (row.best_score, row.baseline_score) == (30.0, 11.0)


def test_undefined_values_are_left_out(make_assessment):
    metrics = {"psnr": [24.0, 12.0], "ssim": [None, 0.25], "ms_ssim": [None, None]}
    one = make_assessment(metrics=metrics)
    assert tables.mean_value(one, "ssim") == 0.25
    assert tables.mean_value(one, "ms_ssim") is None
    assert tables.mean_value(one, "nothing") is None


def test_what_counts_as_reconstructed_is_what_the_record_says(make_assessment):
    own = [make_assessment(psnr=[24.0, 24.0, 19.0], matched=[True, False, True])]
    (row,) = tables.configurations(own, tables.Names(own))
    assert (row.reconstructed.hits, row.reconstructed.n) == (2, 3)


def test_verdict_names_the_attack_with_the_best_image(make_assessment):
    own = [
        make_assessment(attack="a", psnr=[18.0, 18.0]),
        make_assessment(attack="b", psnr=[26.0, 5.0]),
        make_assessment(attack="c", status="failed", reason="x"),
    ]
    (row,) = tables.configurations(own, tables.Names(own))
    assert (row.verdict, row.strongest_attack, row.best_score, row.failed) == (
        "exposed",
        "b",
        26.0,
        1,
    )
    assert (row.reconstructed.hits, row.reconstructed.n) == (1, 2)


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        (["undecided", "undecided"], "undecided"),
        (["protected from strangers", "protected from strangers"], "protected from strangers"),
        (["protected from strangers", None], "protected from strangers"),
        (["protected from strangers", "undecided"], "undecided"),
        (["protected from strangers", "exposed"], "exposed"),
        (["protected on average", "protected from strangers"], "protected on average"),
        (["protected on average", None], "protected on average"),
        (["protected on average", "undecided"], "undecided"),
        (["protected on average", "exposed"], "exposed"),
        ([None, None], "not run"),
    ],
)
def test_verdict_of_a_configuration(make_assessment, words, verdict):
    states = {None: {"status": "not_applicable", "reason": "no"}}
    own = [make_assessment(seed=i, **states.get(w, {}), verdict=w) for i, w in enumerate(words)]
    (row,) = tables.configurations(own, tables.Names(own))
    assert row.verdict == verdict


def test_strength_is_what_varies_under_one_name(make_assessment, make_defense):
    own = [
        make_assessment(defense=make_defense("clip", clip_norm=1.0, noise_std=std))
        for std in (0.1, 1.0)
    ]
    own += [make_assessment(defense=make_defense("prune", rate=0.5)), make_assessment()]
    names = tables.Names(own)
    assert list(names.settings) == [
        "clip noise_std=0.1",
        "clip noise_std=1",
        "prune rate=0.5",
        "no defense",
    ]
    assert [setting.number for setting in names.settings.values()] == [0.1, 1.0, 0.5, 0.0]
    assert len(tables.attack_summaries(own, names)) == 4


def test_nearby_strengths_stay_apart(make_assessment, make_defense):
    stds = (0.12345671, 0.12345672)
    own = [make_assessment(defense=make_defense("noise", noise_std=std)) for std in stds]
    assert len(tables.attack_summaries(own, tables.Names(own))) == 2


def test_attacks_of_one_name_are_told_apart_by_their_hash(make_assessment):
    one, two = make_assessment(seed=0), make_assessment(seed=1)
    two = replace(two, attack=replace(two.attack, hash="cd" * 6))
    names = tables.Names([one, two])
    assert list(names.attacks) == ["inverting_gradients [ababab]", "inverting_gradients [cdcdcd]"]


def test_utility_by_model_and_defense(make_assessment, make_training, make_defense):
    given = make_defense("none")
    units = [make_training(given, s, a) for s, a in enumerate((0.8, 0.9, None))]
    names = tables.Names([make_assessment()], units)
    (row,) = tables.training_costs(units, names).values()
    assert row.accuracy.mean == pytest.approx(0.85)
    assert (row.lowest, row.highest, row.accuracy.n, row.failed) == (0.8, 0.9, 2, 1)
