"""Two runs beside each other: pairs, differences, warnings and the page."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
from msgspec.structs import replace
from scipy import stats

from leakbound.assess.record import Training
from leakbound.report.compare import (
    compare,
    difference,
    render_comparison,
    signed,
    summary,
    write_comparison,
)
from leakbound.report.folder import read


def info(folder, **changes):
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def two(tmp_path, make_bounded):
    """The same run twice."""
    first = make_bounded(tmp_path / "one", seeds=4)
    return first, shutil.copytree(first, tmp_path / "two")


def found(two):
    return compare(*map(read, two))


def page(two):
    runs = [*map(read, two)]
    return render_comparison(*runs, compare(*runs))


@pytest.mark.parametrize("n", [2, 3, 6, 40])
def test_the_interval_is_that_of_a_paired_t_test(n):
    rng = np.random.default_rng(n)
    one, other = rng.normal(0, 2, n), rng.normal(0.4, 2, n)
    got = difference([*zip(one.tolist(), other.tolist(), strict=True)])
    interval = stats.ttest_rel(other, one).confidence_interval(0.95)
    assert (got.low, got.high) == pytest.approx((interval.low, interval.high))
    assert got.mean == pytest.approx(other.mean() - one.mean())
    assert got.n == n


def test_the_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(5)
    draws = rng.normal(0.3, 1, (2000, 4))
    pairs = [difference([(0.0, float(v)) for v in row]) for row in draws]
    covered = np.mean([one.low <= 0.3 <= one.high for one in pairs])
    assert abs(covered - 0.95) < 0.02
    no_effect = [difference([(0.3, float(v)) for v in row]) for row in draws]
    assert abs(np.mean([one.side != 0 for one in no_effect]) - 0.05) < 0.02


def test_what_is_said_of_a_difference():
    assert difference([]) is None
    assert difference([(1.0, 1.0)]).words == "the same in every pair"
    assert difference([(1.0, 2.0)]).words == "one pair: no interval"
    assert difference([(1.0, 2.0), (1.0, 0.5), (1.0, 1.6)]).words == "no difference can be seen"
    assert difference([(1.0, 2.0), (1.0, 2.1), (1.0, 1.9)]).words == "higher in B"
    assert difference([(2.0, 1.0), (2.1, 1.0), (1.9, 1.0)]).words == "lower in B"


def test_identical_runs_are_told(two):
    got = found(two)
    assert got.identical == ("records.jsonl", "utility.jsonl")
    assert got.experiments == (56, 56)
    assert got.only == ((), ())
    assert got.grave == got.notes == ()
    assert all(row.score.same and row.rmse.same for row in got.attacks)
    text = page(two)
    assert "records.jsonl and utility.jsonl are byte-identical in both runs" in text
    assert "No verdict changed: 7 configurations in both runs." in text
    assert "not fair" not in text
    first = (two[1] / "records.jsonl").read_text().splitlines()[0]
    with (two[1] / "records.jsonl").open("a") as stream:
        stream.write(f"{first}\n")
    assert found(two).identical == ("utility.jsonl",)


def test_a_change_is_found_where_it_is(two, change):
    def lower(a):
        if (a.attack.name, a.defense.name) != ("dlg", "none"):
            return {}
        psnr = tuple(v - 5 - 0.1 * a.seed for v in a.scores)
        return {"metrics": a.metrics | {"psnr": psnr}}

    change(two[1], lower)
    got = found(two)
    moved = [row for row in got.attacks if not row.score.same]
    assert [(row.key[2], row.attack) for row in moved] == [("no defense", "dlg")]
    psnr = moved[0].score
    assert psnr.mean == pytest.approx(-5.15)
    assert psnr.n == 4
    reach = stats.t.ppf(0.975, 3) * np.std([0, 0.1, 0.2, 0.3], ddof=1) / 2
    assert (psnr.low, psnr.high) == pytest.approx((-5.15 - reach, -5.15 + reach))
    assert psnr.words == "lower in B"
    assert moved[0].rmse.words == "higher in B"
    assert got.experiments == (56, 52)
    assert "lower in B" in page(two)


def test_rmse_is_the_root_of_the_mean_of_squares(tmp_path, make_assessment, make_run):
    runs = []
    for name, psnr in (("one", [20.0, 10.0]), ("two", [30.0, 40.0])):
        cells = [make_assessment(seed=s, psnr=psnr) for s in range(2)]
        runs.append(make_run(tmp_path / name, cells))
    (row,) = found(runs).attacks
    assert row.rmse.first == pytest.approx(np.sqrt((0.01 + 0.1) / 2))
    assert row.rmse.second == pytest.approx(np.sqrt((0.001 + 0.0001) / 2))
    assert row.score.mean == pytest.approx(20)


def test_verdicts_that_became_less_safe_stand_first(two, change):
    words = {"bounded_noise": "undecided", "adaptive_noise": "protected from strangers"}

    change(two[1], lambda a: {"verdict": words.get(a.defense.name, a.verdict)})
    got = found(two)
    order = [(pair.first.defense, pair.change) for pair in got.verdicts]
    assert order[:2] == [("bounded_noise level=2", -1), ("adaptive_noise budget=1", 1)]
    assert {change for _, change in order[2:]} == {0}
    assert (
        summary(got) == "2 of 7 configurations changed verdict: 1 less safe in B and 1 safer in B."
    )
    rows = re.findall(r'<tr><th scope="row">(\w+)', page(two))
    assert rows[:2] == ["bounded_noise", "adaptive_noise"]


def test_what_only_one_has(two, change):
    change(two[0], lambda a: None if (a.attack.name, a.seed) == ("dlg", 3) else {})
    change(two[1], lambda a: None if a.defense.name == "none" else {})
    first, second = found(two).only
    assert {(*key[2:], count) for key, count in first} == {
        ("no defense", "dlg", 3),
        ("no defense", "inverting_gradients", 4),
    }
    assert {(key[3], count) for key, count in second} == {("dlg", 1)}
    assert all(row.score.n == 3 for row in found(two).attacks if row.attack == "dlg")


@pytest.mark.parametrize(
    ("edit", "changes", "words"),
    [
        ({"threat": {"labels_known": False}}, {}, "The threat models differ: A honest server, lab"),
        ({"criterion": {"value": 25.0}}, {}, "The thresholds differ: A 20 dB PSNR or more;"),
        ({"baseline": (5.0, 5.0)}, {}, "In 56 of 56 pairs of experiments the prior-only base"),
        (
            None,
            {"data": {"source": "x", "fingerprint": "a", "examples": 9, "shape": [3]}},
            "The data differ: A mnist5k (fedc",
        ),
        (None, {"experiments": 99}, "B is not finished: 43 of 99 experiments are missing."),
        (None, {"plan": {"utility": {"rounds": 3}}}, "The trainings behind the test accuracy dif"),
    ],
)
def test_an_unfair_comparison_is_warned_of_on_top(two, change, edit, changes, words):
    for key, value in (edit or {}).items():
        nested = isinstance(value, dict)
        change(
            two[1],
            lambda a, k=key, v=value, n=nested: {k: replace(getattr(a, k), **v) if n else v},
        )
    info(two[1], **changes)
    grave = found(two).grave
    assert any(one.startswith(words) for one in grave), grave
    text = page(two)
    assert text.index("This comparison is not fair as it stands") < text.index('id="verdicts"')
    assert words in text


def test_versions_and_machines_are_named_but_no_alarm(two):
    info(two[1], versions={"leakbound": "0.2.0"}, machine={"processor": "arm"}, plan_hash="ff")
    got = found(two)
    assert got.grave == ()
    assert list(got.notes) == [
        "The versions differ: leakbound 0.1.0 and 0.2.0, torch 2.13.0 and none.",
        "The machines differ: processor x86_64 and arm, threads 1 and none.",
        "The plans differ: 0123456789abcdef and ff.",
    ]


def test_an_attack_of_other_settings_is_paired_and_named(two, change):
    other = {"settings": "GradientMatching('dlg', steps=9)", "hash": "cd" * 6}
    change(
        two[1],
        lambda a: {"attack": replace(a.attack, **other)} if a.attack.name == "dlg" else {},
    )
    got = found(two)
    assert got.only == ((), ())
    assert any("dlg has other settings: A " in words for words in got.notes)


def test_accuracies_are_paired_by_seed(two, change):
    change(two[1], lambda t: {"accuracy": t.accuracy - 0.1}, Training)
    rows = found(two).accuracies
    assert len(rows) == 7
    assert all(row.accuracy.mean == pytest.approx(-0.1) for row in rows)
    assert all(row.accuracy.n == 2 for row in rows)


def test_best_attack_errors_stand_side_by_side(two, change):
    change(two[1], lambda a: None if a.attack.name == "inverting_gradients" else {})
    rows = {row.key[2]: row for row in found(two).best_attack}
    row = rows["no defense"]
    assert (row.first.attack, row.second.attack) == ("inverting_gradients", "dlg")
    assert row.second.rmse > row.first.rmse
    assert row.held_out.mean > 0


def test_nothing_in_common_and_nothing_that_ran(tmp_path, make_assessment, make_run, make_defense):
    one = make_run(tmp_path / "one", [make_assessment()])
    two = make_run(tmp_path / "two", [make_assessment(defense=make_defense("prune", rate=0.5))])
    assert "share no configuration" in page((one, two))
    three = make_run(tmp_path / "three", [make_assessment(status="failed", reason="x")])
    text = page((one, three))
    assert "no seed ran in both" in text
    assert "In B 1 of 1 experiments failed." in text


def test_strangers_text_is_escaped_and_bytes_are_the_same(tmp_path, make_grid, hostile):
    runs = [read(make_grid(tmp_path / name, seeds=2)) for name in ("a", "b")]
    path = tmp_path / "out.html"
    write_comparison(*runs, path)
    first = path.read_bytes()
    write_comparison(*runs, path)
    assert path.read_bytes() == first
    assert path.stat().st_mode & 0o777 == 0o600
    text = first.decode()
    assert hostile not in text
    assert text.count("<script") == 1
    assert "<img" not in text
    links = re.findall(r'(?:src|href)="([^"]+)"', text)
    assert all(link.startswith(("#", "data:")) for link in links)
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_signs():
    assert [signed(v) for v in (1.26, -0.04, 0.0, -3.0, None)] == [
        "+1.3",
        "0.0",
        "0.0",
        "−3.0",
        "–",
    ]
