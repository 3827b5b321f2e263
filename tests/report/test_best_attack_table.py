"""The table of S_D: known errors in, the same numbers out; what is missing is said, not counted."""

from __future__ import annotations

import math
import re

import pytest

from leakbound.report import tables, write
from leakbound.report.best_attack import BASELINE, TightestBound, best_attack_tables

PRIOR_ONLY = 0.5


def _psnr(*errors):
    """PSNRs of root mean squared errors in units of the range."""
    return [-20 * math.log10(error) for error in errors]


@pytest.fixture
def made(make_assessment):
    """An assessment whose examples have these errors."""

    def make(attack, seed, *errors, **changes):
        size = changes.pop("batch_size", len(errors) or 1)
        baseline = _psnr(*[PRIOR_ONLY] * max(1, len(errors)))
        if changes.get("status", "ok") == "ok":
            changes.setdefault("baseline", baseline)
        psnr = _psnr(*errors) or [0.0]
        return make_assessment(attack=attack, seed=seed, psnr=psnr, batch_size=size, **changes)

    return make


def _rows(cells, trainings=()):
    (table,) = best_attack_tables(cells, trainings, tables.Names(cells, trainings))
    return table.rows


def _line(text, defense):
    """The cells of one line of the table, without markup."""
    table = re.search(
        r'aria-label="Best-attack error of each defense.*?</table>', text, re.DOTALL
    ).group()
    (line,) = [r for r in re.findall(r"<tr>.*?</tr>", table, re.DOTALL) if f">{defense}<" in r]
    cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", line, re.DOTALL)
    return [" ".join(re.sub(r"<[^>]+>", " ", cell).split()) for cell in cells]


def test_the_page_shows_the_numbers_of_the_records(tmp_path, made, make_bound, make_run):
    bounded = {"bounds": [make_bound(20.0)]}  # a mean squared error of 0.01
    cells = [made("near", 0, 0.2, **bounded), made("near", 1, 0.4, **bounded)]
    cells += [made("far", 0, 0.4, **bounded), made("far", 1, 0.4, **bounded)]
    text = write(make_run(tmp_path / "run", cells)).read_text()
    line = _line(text, "no defense")
    # t of one degree of freedom at 97.5 % is 12.7: the lower limit of "far", 0.4, stays above 0
    # and that of "near" does not; the upper limits of "far" and of the baseline have no width
    assert line[:5] == ["no defense", "0.3 0 to 0.4", "near", "2", "0.5"]
    # root((0.2² + 0.4²) / 2) = 0.3162 over 0.1
    assert line[6:] == ["0.1", "3.16"]
    assert 'title="trace bound; prior: N(mean, covariance) in 32 of 784 directions"' in text


def test_the_winner_of_a_batch_and_the_oracle(made):
    (row,) = _rows([made("a", 0, 0.1, 0.7), made("b", 0, 0.6, 0.2)])
    assert row.winner == "b"
    assert row.found.rmse == pytest.approx(math.sqrt((0.36 + 0.04) / 2))
    assert row.found.oracle == pytest.approx(math.sqrt((0.01 + 0.04) / 2))
    assert row.bound == "single examples only"


def test_nothing_beats_the_baseline(tmp_path, made, make_run):
    cells = [made("a", 0, 0.9), made("b", 0, 0.8)]
    assert _rows(cells)[0].winner == BASELINE
    line = _line(write(make_run(tmp_path / "run", cells)).read_text(), "no defense")
    assert line[1:5] == ["0.5 no interval", BASELINE, "1", "0.5"]
    assert line[6] == "none"


def test_units_are_those_of_the_range_whatever_the_inputs(made, make_bound):
    """Inputs in [-1, 1]: an error of 0.2 and a bound of 0.1 there are half as much of the range."""
    held = {"name": "trace", "value": 0.1**2}
    bound = make_bound(-20 * math.log10(0.1 / 2), **held)
    (row,) = _rows([made("a", 0, 0.2 / 2, bounds=[bound])])
    assert row.found.rmse == pytest.approx(0.1)
    assert row.bound.root == pytest.approx(0.05)
    assert row.bound.tightness == pytest.approx(2)


def test_a_round_without_a_result_of_every_attack_is_left_out(tmp_path, made, make_run):
    cells = [made("a", seed, 0.1 * (seed + 1)) for seed in range(4)]
    cells += [made("b", 0, 0.4), made("b", 1, status="failed", reason="x")]
    cells += [made("b", 2, status="not_applicable", reason="y")]  # and no record of round 3
    cells += [made("c", seed, status="failed", reason="x") for seed in range(4)]
    (row,) = _rows(cells)
    assert (row.found.n, row.left_out) == (2, 2)
    assert row.found.means == pytest.approx(
        {BASELINE: PRIOR_ONLY, "a": (0.1 + 0.3) / 2, "b": (0.4 + PRIOR_ONLY) / 2}
    )
    text = write(make_run(tmp_path / "run", cells)).read_text()
    assert _line(text, "no defense")[3] == "2 2 left out"
    assert "is left out for all attacks" in text


def test_none_and_odd_records_break_nothing(tmp_path, made, make_run, make_defense):
    whole = made("a", 0, 0.1, 0.1)
    hole = made("a", 1, 0.1, 0.1, metrics={"psnr": [None, 20.0], "mse": [None, 0.01]})
    uneven = [made("a", 2, 0.1, 0.1), made("b", 2, 0.1, batch_size=2)]
    empty = made("a", 3, 0.1, 0.1, metrics={"psnr": []}, baseline=[])
    huge = made("a", 4, 0.1, 0.1, metrics={"psnr": [-1e299, 1e299]})
    both = [made("b", seed, 0.3, 0.3) for seed in (0, 1, 3, 4)]
    other = made("a", 0, 0.1, 0.1, defense=make_defense("clip"), status="failed", reason="x")
    cells = [whole, hole, *uneven, empty, huge, *both, other]
    row, failed = _rows(cells)
    assert (row.found.n, row.left_out, row.winner) == (2, 3, "b")
    assert (failed.found, failed.winner) == (None, "no round has a result of every attack")
    text = write(make_run(tmp_path / "run", cells)).read_text()
    assert _line(text, "clip")[1:4] == ["–", failed.winner, "0 1 left out"]
    alone = write(make_run(tmp_path / "alone", [other])).read_text()
    assert "Best-attack error of each defense" not in alone


@pytest.mark.parametrize(
    ("bounds", "shown"),
    [
        ([], "none"),
        (["unbiased"], "only for unbiased attackers"),
        (["probability"], "none"),
        (["zero"], TightestBound(0.0, None, "trace", "some", 1)),
        (["low", "high", "unbiased"], TightestBound(0.2, 0.5, "sharp", "some", 1)),
    ],
)
def test_only_bounds_on_all_attackers_enter(made, make_bound, bounds, shown):
    kinds = {
        "unbiased": make_bound(3.0, covers="unbiased"),
        "probability": make_bound(None, probability=0.1, accepted=0.001),
        "zero": make_bound(None, prior="some"),
        "low": make_bound(40.0, prior="some"),
        "high": make_bound(_psnr(0.2)[0], name="sharp", prior="some"),
    }
    (row,) = _rows([made("a", 0, 0.1, bounds=[kinds[kind] for kind in bounds])])
    if isinstance(shown, str):
        assert row.bound == shown
    else:
        assert row.bound.root == pytest.approx(shown.root)
        assert row.bound.tightness == pytest.approx(shown.tightness)
        assert (row.bound.name, row.bound.prior, row.bound.n) == (shown.name, shown.prior, 1)


def test_bounds_of_changed_models_count_with_the_lowest(made, make_bound):
    """A malicious server's attacks see other releases: only the lowest bound covers them all."""
    cells = [
        made("a", 0, 0.1, bounds=[make_bound(_psnr(0.05)[0])]),
        made("b", 0, 0.2, bounds=[make_bound(_psnr(0.15)[0])]),
    ]
    assert _rows(cells)[0].bound.root == pytest.approx(0.05)


def test_the_bound_is_compared_in_its_own_rounds(made, make_bound, tmp_path, make_run):
    cells = [made("a", 0, 0.2, bounds=[make_bound(20.0)]), made("a", 1, 0.4)]
    (row,) = _rows(cells)
    assert row.bound.tightness == pytest.approx(2)
    text = write(make_run(tmp_path / "run", cells)).read_text()
    assert _line(text, "no defense")[6:] == ["0.1 1 of 2 rounds", "2"]


def test_training_loss_is_the_mean_over_seeds_that_ran(
    tmp_path, made, make_run, make_training, make_defense
):
    plain, clip = make_defense("none"), make_defense("clip")
    cells = [made("a", 0, 0.1), made("a", 0, 0.1, defense=clip)]
    units = [make_training(plain, seed, 0.9, training_loss=0.2 + 0.2 * seed) for seed in range(3)]
    units.append(make_training(plain, 3, 0.9, training_loss=None))
    units.append(make_training(plain, 4, None, training_loss=99.0))
    text = write(make_run(tmp_path / "run", cells, units)).read_text()
    assert _line(text, "no defense")[-1] == "0.4"
    assert _line(text, "clip")[-1] == "–"
    head = ">Training loss</th>"
    assert head in text
    assert head not in write(make_run(tmp_path / "bare", cells)).read_text()


def test_models_and_batch_sizes_stand_apart_and_names_are_escaped(
    tmp_path, made, make_run, make_defense, make_bound, hostile
):
    bound = make_bound(20.0, name=hostile, prior=f'"{hostile}')
    given = {"defense": make_defense(hostile), "bounds": [bound]}
    cells = [made(hostile, 0, 0.1, **given), made(hostile, 0, 0.1, 0.1, **given)]
    cells.append(made("a", 0, 0.1, model={"name": hostile, "parameters": {}}))
    text = write(make_run(tmp_path / "run", cells)).read_text()
    part = text[text.index('<h2 id="best-attack">') : text.index('<h2 id="results">')]
    assert part.count("<table") == 3
    assert hostile not in part
    assert "&lt;script&gt;" in part
    assert "prior: &#34;&lt;img" in part
