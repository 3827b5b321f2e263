"""Defenses at equal utility, from records whose costs and errors are known."""

from __future__ import annotations

import json
import math
import re
from statistics import fmean, stdev

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from scipy.stats import t as student

from leakbound.report import evidence, write
from leakbound.report.equal_utility import FEW, UNSKILLED, equal_utility
from leakbound.report.folder import read
from leakbound.report.tables import Names
from leakbound.report.utility_figure import SAID, _meet, sentence, utility_figures

NOISE = {0.01: (4.0, 0.10), 0.1: (20.0, 0.30)}
PRUNING = {0.5: (2.0, 0.05), 0.9: (10.0, 0.10), 0.99: (30.0, 0.30)}
START = 0.02
"""By strength, points of accuracy lost and the error of the best attack; START: of no defense."""
BASELINE = 0.5
SEEDS = 4


def _psnr(error):
    return -20 * math.log10(error)


@pytest.fixture
def families(make_assessment, make_training, make_defense):
    """Records and trainings of families, `scatter` by seed from a stream."""

    def make(given=None, *, seeds=SEEDS, scatter=0.0, stream=0, skill=True, plain=True, **changes):
        rng = np.random.default_rng(stream)
        given = {"gaussian_noise": NOISE, "magnitude_pruning": PRUNING} if given is None else given
        settings = [(make_defense("none"), 0.0, START)] * plain
        for name, levels in given.items():
            settings += [
                (make_defense(name, strength=strength), *level)
                for strength, level in levels.items()
            ]
        assessments, trainings = [], []
        for defense, points, error in settings:
            for seed in range(seeds):
                worse, dearer = rng.normal(size=2).tolist()
                own = error * math.exp(scatter * worse)
                lost = points + (points > 0) * 5 * scatter * dearer
                for attack, times in {"near": 1.0, "far": 1.2}.items():
                    one = make_assessment(
                        attack=attack,
                        defense=defense,
                        seed=seed,
                        psnr=[_psnr(times * own)] * 2,
                        baseline=[_psnr(BASELINE)] * 2,
                        **changes,
                    )
                    assessments.append(one)
                accuracy = 0.9 - lost / 100
                quality = {"majority": 0.1 if skill else 0.89, "tested": 1000}
                loss = {"training_loss": 0.5 + 0.1 * lost}
                trainings.append(make_training(defense, seed, accuracy, **quality, **loss))
        return assessments, trainings

    return make


def _compared(assessments, trainings):
    (result,) = equal_utility(assessments, trainings, Names(assessments, trainings))
    return result


def _area(levels, low, high):
    """The mean error over costs from low to high, of the lines between levels."""
    points = sorted([(0.0, START), *levels.values()])
    grid = np.linspace(low, high, 20)
    return np.interp(grid, *zip(*points, strict=True)).mean()


def test_curves_are_compared_over_the_costs_that_both_have(families):
    result = _compared(*families())
    assert (result.error, result.defense_known, result.rounds) == ("RMSE", True, 30)
    assert result.baseline == pytest.approx(BASELINE)
    at_loss, at_accuracy = result.comparisons
    (pair,) = at_accuracy.pairs
    assert (pair.first, pair.second) == ("gaussian_noise", "magnitude_pruning")
    assert (pair.low, pair.high) == pytest.approx((0, 20))
    assert pair.first_error.mean == pytest.approx(_area(NOISE, 0, 20))
    assert pair.second_error.mean == pytest.approx(_area(PRUNING, 0, 20))
    assert pair.difference.mean == pytest.approx(_area(NOISE, 0, 20) - _area(PRUNING, 0, 20))
    assert pair.difference.n == SEEDS
    assert pair.seen
    # A loss is 0.5 and a tenth of the points: the same comparison on another axis
    (other,) = at_loss.pairs
    assert (other.low, other.high) == pytest.approx((0.5, 2.5))
    assert other.difference.mean == pytest.approx(pair.difference.mean)
    noise, _ = at_accuracy.families
    assert [level.defense for level in noise.levels] == [
        "no defense",
        "gaussian_noise strength=0.01",
        "gaussian_noise strength=0.1",
    ]
    assert {level.attack for level in noise.levels} == {"near"}
    read_at = {one.cost: one.error.mean for one in noise.at}
    assert read_at == pytest.approx({0: 0.02, 1: 0.04, 2: 0.06, 5: 0.1125, 10: 0.175, 20: 0.3})
    assert at_loss.families[0].at == ()


def test_intervals_are_students_t_over_the_leave_one_out_values(families):
    """By hand for a pair of two levels each: no other level bends the curves."""
    given = {"one": {1: (10.0, 0.2), 2: (10.0, 0.1)}, "other": {1: (10.0, 0.1), 2: (10.0, 0.05)}}
    assessments, trainings = families(given, scatter=0.1, stream=3)
    names = Names(assessments, trainings)
    paid = {(names.defense(t), t.seed): 100 * (0.9 - t.accuracy) for t in trainings}
    left = {
        (names.defense(a), a.seed): 10 ** (-a.scores[0] / 20)
        for a in assessments
        if a.attack.name == "near"
    }

    def area(name, seeds, end):
        points = [
            (fmean(paid[d, s] for s in seeds), fmean(left[d, s] for s in seeds))
            for d in ("no defense", f"{name} strength=1", f"{name} strength=2")
        ]
        grid = np.linspace(0, end, 20)
        best = 0.0
        curve = []
        for x, y in sorted(points):
            best = max(best, y)
            curve.append((x, best))
        return np.interp(grid, *zip(*curve, strict=True)).mean()

    def gap(seeds):
        ends = [
            max(fmean(paid[f"{name} strength={k}", s] for s in seeds) for k in (1, 2))
            for name in given
        ]
        return area("one", seeds, min(ends)) - area("other", seeds, min(ends))

    everyone = range(SEEDS)
    without = [gap([s for s in everyone if s != out]) for out in everyone]
    # The jackknife's standard error: (n - 1) / root(n) times the standard deviation
    error = (SEEDS - 1) / math.sqrt(SEEDS) * stdev(without)
    reach = student.ppf(0.975, SEEDS - 1) * error
    (pair,) = _compared(assessments, trainings).comparisons[1].pairs
    assert (pair.first, pair.second) == ("one", "other")
    assert pair.difference.mean == pytest.approx(gap(everyone))
    assert pair.difference.high - pair.difference.mean == pytest.approx(reach)


def test_pairs_share_the_error(families):
    given = {"gaussian_noise": NOISE, "magnitude_pruning": PRUNING}
    kept = {"scatter": 0.2, "stream": 5}
    (alone,) = _compared(*families(given, **kept)).comparisons[1].pairs
    many = _compared(*families(given | {"other": NOISE}, **kept)).comparisons[1].pairs
    assert len(many) == 3
    same = next(p for p in many if {p.first, p.second} == {*given})
    wide = same.difference.high - same.difference.mean
    assert alone.difference.mean == pytest.approx(same.difference.mean)
    times = student.ppf(1 - 0.025 / 3, SEEDS - 1) / student.ppf(0.975, SEEDS - 1)
    assert wide / (alone.difference.high - alone.difference.mean) == pytest.approx(times)


@pytest.mark.parametrize(
    ("given", "seeds", "changes", "what", "why"),
    [
        (
            {"one": {1: (5.0, 0.1)}},
            4,
            {},
            "one strength=1",
            "one strength; a family has two or more",
        ),
        (None, 1, {}, "all", FEW),
        (None, 4, {"skill": False}, "all", UNSKILLED),
        (
            {"one": NOISE, "free": {1: (0.1, 0.1), 2: (0.2, 0.2)}},
            4,
            {},
            "one and free",
            "they share no more than 1 of cost (points of test accuracy lost)",
        ),
        (
            {"one": NOISE, "dear": {1: (30.0, 0.1), 2: (40.0, 0.2)}},
            4,
            {"plain": False},
            "one and dear",
            "they share no more than 1 of cost (points of test error)",
        ),
    ],
    ids=["one strength", "one seed", "no skill", "free", "apart"],
)
def test_what_has_no_number_is_named_with_the_reason(families, given, seeds, changes, what, why):
    comparison = _compared(*families(given, seeds=seeds, **changes)).comparisons[1]
    assert comparison.pairs == ()
    assert [(one.what, one.why) for one in comparison.not_compared] == [(what, why)]


def test_a_level_whose_training_diverged_is_left_out_and_named(families):
    assessments, trainings = families()
    names = Names(assessments, trainings)
    lost = "magnitude_pruning strength=0.9"
    broken = [
        replace(t, training_loss=None) if names.defense(t) == lost and t.seed == 2 else t
        for t in trainings
    ]
    at_loss, at_accuracy = _compared(assessments, broken).comparisons
    assert [(one.what, one.why) for one in at_loss.not_compared] == [
        (lost, "no training loss for seeds [2]")
    ]
    (pair,) = at_loss.pairs
    rest = {strength: level for strength, level in PRUNING.items() if strength != 0.9}
    assert pair.second_error.mean == pytest.approx(_area(rest, 0, 20))
    assert at_accuracy.not_compared == ()


def test_seeds_without_a_training_are_left_out_of_errors_and_baseline(families):
    assessments, trainings = families()
    other = [
        replace(a, baseline=tuple(_psnr(0.9) for _ in a.baseline)) if a.seed > 1 else a
        for a in assessments
    ]
    result = _compared(other, [t for t in trainings if t.seed < 2])
    assert result.baseline == pytest.approx(BASELINE)
    (pair,) = result.comparisons[1].pairs
    assert pair.difference.n == 2


def test_a_round_in_which_an_attack_crashed_is_left_out_for_all(families):
    assessments, trainings = families()
    crashed = [
        replace(
            a, status="failed", reason="x", metrics={}, baseline=(), matched=(), reidentified=()
        )
        if (a.seed, a.attack.name, a.defense.name) == (1, "far", "gaussian_noise")
        else a
        for a in assessments
    ]
    (pair,) = _compared(crashed, trainings).comparisons[1].pairs
    assert pair.difference.n == SEEDS - 1


def test_no_seed_chooses_its_own_attack(make_assessment, make_training, make_defense):
    """Each attack is best on one seed: an attacker who must choose gets the other one's error."""
    assessments, trainings = [], []
    for strength in (1, 2):
        for seed in (0, 1):
            for attack in (0, 1):
                error = 0.1 if attack == seed else 0.3
                one = make_assessment(
                    defense=make_defense("noise", strength=strength),
                    seed=seed,
                    attack=f"of {attack}",
                    psnr=[_psnr(error)],
                    baseline=[_psnr(0.4)],
                    batch_size=1,
                )
                assessments.append(one)
            own = make_defense("noise", strength=strength)
            trainings.append(make_training(own, seed, 0.9 - 0.1 * strength))
    (family,) = _compared(assessments, trainings).comparisons[1].families
    assert [level.error.mean for level in family.levels] == pytest.approx([0.3, 0.3])


def test_of_tables_the_share_of_wrong_columns_is_compared(make_table, make_training, make_defense):
    assessments, trainings = [], []
    for strength, right in ((1, 3), (2, 1)):
        own = make_defense("noise", strength=strength)
        for seed in (0, 1):
            hits = {f"c{i}": [i < right, i < right] for i in range(4)}
            assessments.append(make_table(hits, defense=own, seed=seed))
            trainings.append(make_training(own, seed, 0.9 - 0.1 * strength))
    result = _compared(assessments, trainings)
    assert result.error == "columns wrong, %"
    (family,) = result.comparisons[1].families
    assert [level.error.mean for level in family.levels] == pytest.approx([25, 75])


def test_equal_families_are_seldom_told_apart(families):
    """Both attacks nearly as good, three families of one truth: 95 % of 200 runs is 190."""
    seen = lower = 0
    given = {"a": NOISE, "b": NOISE, "c": NOISE}
    for run in range(60):
        pairs = _compared(*families(given, scatter=0.2, stream=(7, run))).comparisons[1].pairs
        seen += any(pair.seen for pair in pairs)
        given_better = {"a": NOISE, "b": {s: (c, 3 * e) for s, (c, e) in NOISE.items()}}
        better = _compared(*families(given_better, scatter=0.2, stream=(8, run)))
        (pair,) = better.comparisons[1].pairs
        lower += pair.seen and pair.first == "b"
    assert seen <= 8
    assert lower >= 54


def test_the_sentence_says_what_can_be_seen(families):
    result = _compared(*families())
    text = sentence(result, result.comparisons[1])
    gap = f"{_area(NOISE, 0, 20) - _area(PRUNING, 0, 20):.3f}"
    assert text == (
        "At equal test accuracy, gaussian_noise leaves the best attack a larger error (RMSE) than "
        f"magnitude_pruning: {_area(NOISE, 0, 20):.3f} and {_area(PRUNING, 0, 20):.3f} on average "
        f"over 0 to 20 points lost, a difference of {gap} ({gap} to {gap}) "
        "(95\N{NO-BREAK SPACE}% interval, 4 seeds)."
    )
    noisy = _compared(*families({"a": NOISE, "b": NOISE}, scatter=0.3, stream=2))
    text = sentence(noisy, noisy.comparisons[1])
    assert text.startswith("At equal test accuracy, no difference between ")
    assert "includes 0 (95\N{NO-BREAK SPACE}% interval, 4 seeds)" in text
    text = sentence(noisy, noisy.comparisons[0])
    assert text.startswith("At equal training loss, no difference between ")
    alone = _compared(*families({"gaussian_noise": NOISE}))
    assert sentence(alone, alone.comparisons[1]) == (
        "For 1 point of test accuracy, gaussian_noise leaves the best attack an error (RMSE) of "
        "0.040 (0.040 to 0.040) (95\N{NO-BREAK SPACE}% interval, 4 seeds); no defense leaves "
        "0.020. No two defenses can be compared at equal test accuracy."
    )


def test_the_sentence_counts_pairs(families):
    better = {s: (c, 2 * e) for s, (c, e) in NOISE.items()}
    three = _compared(*families({"a": NOISE, "b": better, "c": NOISE}, scatter=0.05, stream=1))
    text = sentence(three, three.comparisons[1])
    assert text.startswith("At equal test accuracy, b leaves the best attack a larger error than ")
    assert text.endswith(
        "(RMSE; 95\N{NO-BREAK SPACE}% intervals for all pairs jointly, 4 seeds). In 1 of 3 pairs "
        "no difference can be seen."
    )
    same = _compared(*families({"a": NOISE, "b": NOISE, "c": NOISE}, scatter=0.5, stream=1))
    assert "each of the 3 intervals of a difference includes 0" in sentence(
        same, same.comparisons[1]
    )
    many = {f"d{i}": {s: (c, e * 1.5**i) for s, (c, e) in NOISE.items()} for i in range(4)}
    several = _compared(*families(many))
    assert sentence(several, several.comparisons[1]).endswith(
        f" {6 - SAID} more differences can be seen."
    )


def _drawn(result, labels=None, views=(("mlp (hidden=[128])", 2),)):
    settings = {
        level.defense: level.defense[-4:]
        for c in result.comparisons
        for f in c.families
        for level in f.levels
    }
    return utility_figures([result], views, labels or settings, {})


def test_marks_are_where_the_numbers_are(families):
    (figure,) = _drawn(_compared(*families()))
    assert figure.title == "What a point of accuracy buys"
    places = dict(map(reversed, figure.x_ticks))
    noise, pruning = figure.lines
    assert noise.marks[1].x == pytest.approx(places["20"])
    heights = dict(map(reversed, figure.y_ticks))
    assert noise.marks[0].y == pytest.approx((heights["0"] + heights["0.2"]) / 2)
    assert pruning.marks[1].y == noise.marks[0].y
    assert figure.undefended[0] == pytest.approx(places["0"])
    assert figure.baseline == pytest.approx((heights["0.4"] + heights["0.6"]) / 2)
    assert noise.shape != pruning.shape


def test_labels_do_not_meet(families):
    given = {f"d{i}": {s: (5 + s + i / 10, 0.1 + s / 100) for s in range(6)} for i in range(7)}
    (figure,) = _drawn(_compared(*families(given)))
    boxes = []
    for mark in (mark for line in figure.lines for mark in line.marks if mark.text):
        wide = 6.2 * len(mark.text)
        left = mark.text_x - (wide if mark.anchor == "end" else 0)
        boxes.append((left + 0.1, mark.text_y - 9, left + wide - 0.1, mark.text_y + 2.9))
    assert len(boxes) > 3
    assert not any(_meet(a, b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_the_page_shows_figure_sentence_and_numbers(tmp_path, families, make_run):
    assessments, trainings = families()
    text = write(make_run(tmp_path / "run", assessments, trainings)).read_text()
    section = re.search(r'<section class="utility".*?</section>', text, re.DOTALL).group()
    assert ">What a point of accuracy buys</h2>" in section
    assert "At equal test accuracy, gaussian_noise leaves the best attack a larger error" in section
    assert section.count("<polyline") == 4  # two curves, and two in the legend
    assert "attackers who know the defense" in section
    # At 5 points lost: 0.1 and a sixteenth of 0.2 (rounded to even); 0.05 and three eighths of 0.05
    row = re.search(r'<th scope="row" class="n">5</th>(.*?)</tr>', section).group(1)
    assert re.findall(r">(0\.\d+)<br>", row) == ["0.112", "0.069"]
    assert (
        text.index('class="first"')
        < text.index('class="utility"')
        < text.index('<ul class="contents">')
    )


@pytest.mark.parametrize("case", ["no trainings", "one strength each", "one seed"])
def test_without_a_family_the_page_has_no_figure(tmp_path, families, make_run, case):
    given = {"gaussian_noise": {0.1: (4.0, 0.1)}} if case == "one strength each" else None
    assessments, trainings = families(given, seeds=1 if case == "one seed" else 2)
    trainings = [] if case == "no trainings" else trainings
    text = write(make_run(tmp_path / "run", assessments, trainings)).read_text()
    assert "What a point of accuracy buys" not in text
    assert '"#buys"' not in text


def test_without_skill_it_is_drawn_at_equal_loss(tmp_path, families, make_run):
    assessments, trainings = families(skill=False)
    text = write(make_run(tmp_path / "run", assessments, trainings)).read_text()
    section = re.search(r'<section class="utility".*?</section>', text, re.DOTALL).group()
    assert ">Defenses at equal training loss</h2>" in section
    assert f"all: {UNSKILLED}" in section
    assert "At equal training loss, gaussian_noise leaves" in section


def test_report_json_has_the_numbers(tmp_path, families, make_run):
    assessments, trainings = families(scatter=0.1)
    run = read(make_run(tmp_path / "run", assessments, trainings))
    subject = evidence.of_run(run, {}, lambda noise: None, images=False)
    (found,) = json.loads(msgspec.json.encode(subject))["equal_utility"]
    result = _compared(assessments, trainings)
    (pair,) = result.comparisons[1].pairs
    (shown,) = found["comparisons"][1]["pairs"]
    assert shown["first"] == pair.first
    assert shown["difference"]["mean"] == pair.difference.mean
    assert shown["difference"]["low"] == pair.difference.low
    assert shown["difference"]["n"] == SEEDS
