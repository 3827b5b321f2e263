"""The study of paper B's theory: its claims on made-up errors of a known law, and its files."""

import csv
import math
from dataclasses import replace

import numpy as np
import pytest

from leakbound_reproductions.claim import Verdict
from leakbound_reproductions.systematic_evaluation import (
    all_attackers,
    sweep,
    theory,
    theory_claims,
)
from leakbound_reproductions.systematic_evaluation.all_attackers import Compared
from leakbound_reproductions.systematic_evaluation.sweep import Withheld, interval, median_interval
from leakbound_reproductions.systematic_evaluation.theory_claims import Rows, claims
from leakbound_reproductions.systematic_evaluation.trial import PRUNING, Cell, Trial

SEEDS = 4


def _law(cell, seed):
    """Table 1 with constants: what the claims say, were all of it true."""
    width = cell.width * (1 - cell.level * cell.defense.startswith("dropout"))
    scale = cell.level if cell.defense == "clipping" else 1.0
    level = np.hypot(cell.batch, scale * cell.noise_std) * np.sqrt(cell.inputs / width)
    if cell.defense in PRUNING:
        level = max(0.5 if cell.level >= 0.7 else 0.0, level)
    spread = np.random.default_rng([seed, cell.batch, int(width)]).normal()
    error = float(level * np.exp(0.05 * spread))
    return Trial(error, error, 0.5 * error if cell.noise_std else None)


def _rows(law):
    found = []
    for cell in sweep.cells():
        seeds = SEEDS * (3 if sweep.precise(cell) else 1)
        trials = [law(cell, seed) for seed in range(seeds)]
        floors = tuple(t.floor for t in trials if t.floor is not None)
        errors, spans = tuple(t.error for t in trials), tuple(t.span for t in trials)
        low, high = median_interval(errors)
        middle = float(np.median(errors))
        found.append(sweep.Row(cell, errors, spans, floors, middle, low, high, None, None, False))
    return Rows(found)


def _shares(after=0.9, before=1e-3):
    values = {10 / 11: before, 0.99: after}
    return [Withheld(rate, 10, (value,) * 3) for rate, value in values.items()]


def _words(law, **shares):
    return {claim.number: claim.verdict for claim in claims(_rows(law), _shares(**shares))}


def test_all_claims_hold_under_their_own_law():
    found = _words(_law)
    assert set(found) == {"2-1", "2-2", "2-3", "2-4", "2-6", "2-9"}
    assert all(word is Verdict.HOLDS for word in found.values()), found


def test_every_finding_says_what_it_rests_on():
    for claim in claims(_rows(_law), _shares()):
        assert claim.source
        assert "seeds" in claim.scale
        for one in claim.findings:
            assert one.n >= 3
            assert one.region[0] < one.region[1]
            assert one.strict[0] <= one.interval[0] <= one.estimate <= one.interval[1]


def test_slopes_are_those_of_a_power_law():
    levels = (1.0, 2.0, 8.0)
    logs = [np.log(np.array([3.0, 5.0]) * level**0.7) for level in levels]
    assert sweep.slopes(levels, logs) == pytest.approx([0.7, 0.7])
    assert pytest.approx(1 / math.log(4096)) == theory_claims.TILDE


def test_slopes_of_levels_with_more_seeds_take_the_first_ones():
    own = np.array([3.0, 5.0, 700.0, 0.1])
    logs = [np.log(own[:n] * level**0.7) for level, n in ((1.0, 4), (2.0, 2), (8.0, 3))]
    assert sweep.slopes((1.0, 2.0, 8.0), logs) == pytest.approx([0.7, 0.7])


@pytest.mark.parametrize(
    ("number", "wrong"),
    [
        ("2-1", lambda c: (8192 / c.width) ** 0.4),
        ("2-1", lambda c: 1 / c.batch**2),
        ("2-1", lambda c: c.inputs**0.3),
        ("2-2", lambda c: 1.05 if c.defense == "clipping" and not c.noise_std else 1.0),
        ("2-3", lambda c: (1 + c.noise_std) ** 0.7),
        ("2-3", lambda c: 2.0 if c.noise_std and c.defense == "clipping" else 1.0),
        ("2-3", lambda c: 1.3 if 0 < c.noise_std < 1 else 1.0),
        ("2-4", lambda c: 1.5 if c.defense == "dropout_units" else 1.0),
        ("2-4", lambda c: (1 - c.level) ** 0.5 if c.defense == "dropout_entries" else 1.0),
        ("2-6", lambda c: 1.2 if c.steps == 3 else 1.0),
        ("2-6", lambda c: 1.3 if c.steps == 5 else 1.0),
    ],
)
def test_a_claim_falls_with_its_law(number, wrong):
    def law(cell, seed):
        given = _law(cell, seed)
        return replace(given, error=given.error * wrong(cell))

    assert _words(law)[number] is Verdict.FAILS


def test_shares_fall_with_their_laws():
    assert _words(_law, after=0.1)["2-9"] is Verdict.FAILS
    assert _words(_law, before=0.2)["2-9"] is Verdict.FAILS


def _spared(method):
    """The law, but for one attack, whose span pruning leaves at 1.1 times the share."""

    def law(cell, seed):
        given = _law(replace(cell, defense="none", level=0.0), seed)
        own = cell.defense in PRUNING and cell.method == method
        return replace(given, span=given.span * 1.1) if own else _law(cell, seed)

    return law


def test_what_pruning_does_to_two_layers_is_told_with_numbers():
    """It judges nothing: the paper claims no more than no evidence."""

    def law(cell, seed):
        return (
            _spared("library")(cell, seed)
            if cell.method == "library"
            else _spared("printed")(cell, seed)
        )

    told = theory_claims.pruned_span(_rows(law))
    assert "both tensor attacks still find the span" in told
    for name in ("printed, B = 1", "printed, B = 2", "library, B = 1", "library, B = 2"):
        assert f"{name}: 1.1 [1.1, 1.1]" in told
    for method in ("printed", "library"):
        assert "still find" not in theory_claims.pruned_span(_rows(_spared(method)))


TABLE_2 = {3: (1.058, 1.088, 1.103, 1.154), 5: (1.246, 1.228, 1.253, 1.274)}
"""Errors under local steps over those without, by batch size."""


@pytest.mark.parametrize("at", range(4))
def test_the_papers_own_table_passes_the_claim_on_local_steps(at):
    def law(cell, seed):
        given = _law(cell, seed)
        return replace(given, error=given.error * TABLE_2.get(cell.steps, [1.0] * 4)[at])

    assert _words(law)["2-6"] is Verdict.HOLDS


def _claim(law, number):
    return next(own for own in claims(_rows(law), _shares()) if own.number == number)


def test_larger_learning_rates_are_told_beside_the_judged_one():
    def law(cell, seed):
        given = _law(cell, seed)
        return replace(
            given, error=given.error * (1.4 if cell.level == 0.5 and cell.steps == 5 else 1)
        )

    claim = _claim(law, "2-6")
    assert claim.verdict is Verdict.HOLDS
    assert "82 / M^2" in claim.why
    assert "w_j trained too, 0.5 / M, 5 steps: 1.4 [1.4, 1.4]" in claim.why
    assert {one.statement.split(", ")[1] for one in claim.findings} == {"0.01 / M", "0.1 / M"}


def test_noise_as_the_papers_own_order_has_it_passes():
    """B + noise_std is 1.125 at noise_std = B / 8: no refutation of the order that says so."""

    def law(cell, seed):
        if not cell.noise_std:
            return _law(cell, seed)
        scale = cell.level if cell.defense == "clipping" else 1.0
        plain = _law(replace(cell, noise_std=0.0, defense="none", level=0.0), seed)
        return replace(
            plain, error=plain.error * (1 + scale * cell.noise_std / cell.batch), floor=0.0
        )

    claim = _claim(law, "2-3")
    flat = [one for one in claim.findings if "about 1" in one.statement]
    assert [one.estimate for one in flat] == pytest.approx([1.125] * 2)
    assert all(one.verdict is Verdict.HOLDS for one in flat)
    assert "identity" in claim.why
    assert "identity" in claim.findings[-1].statement


def test_the_series_that_is_not_judged_is_told_with_its_slope():
    def law(cell, seed):
        given = _law(cell, seed)
        steep = (cell.activation, cell.batch, cell.method) == ("relu", 2, "printed")
        return replace(given, error=given.error * (8192 / cell.width) ** (0.3 * steep))

    claim = _claim(law, "2-1")
    printed = theory_claims.over_width(_rows(law))["printed, relu, B = 2"]
    assert printed.value < -0.7
    assert f"the printed attack has the slope {printed} in log M" in claim.why
    assert "upper bound" in claim.scale
    lost = _claim(lambda c, s: replace(_law(c, s), error=1.3 if c.batch == 2 else 0.3), "2-1")
    assert lost.findings == ()


def test_every_claim_says_where_its_tolerance_comes_from():
    told = {own.number: own.scale for own in claims(_rows(_law), _shares())}
    sources = {
        "2-1": "one logarithm at M = 4,096", "2-2": "table 2", "2-3": "ours", "2-4": "ours",
        "2-6": "table 2", "2-9": "ours",
    }  # fmt: skip
    assert set(told) == set(sources)
    assert all(source in told[number] for number, source in sources.items())
    assert all("eq. 3" in told[number] for number in ("2-2", "2-3", "2-4", "2-6"))


def test_a_wide_interval_decides_nothing():
    def law(cell, seed):
        given = _law(cell, seed)
        return replace(given, error=given.error * 4.0 ** (seed * (cell.width > 4096)))

    assert _words(law)["2-1"] is Verdict.UNDECIDED


def test_the_interval_of_a_median_covers_it():
    source = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        low, high = median_interval(source.exponential(size=10))
        hits += low <= np.log(2) <= high
    assert 0.95 <= hits / 2000 < 0.995


def _nothing(part, done, total):
    assert 0 <= done <= total


@pytest.mark.parametrize("repeated", [0, 4])
def test_files_and_a_run_that_is_interrupted_goes_on(tmp_path, monkeypatch, repeated):
    runs = []

    def counted(cell, seed):
        runs.append((cell, seed))
        return _law(cell, seed)

    monkeypatch.setattr(theory, "run", counted)
    monkeypatch.setattr(theory, "compared", lambda seeds: [_compared()])
    monkeypatch.setattr(sweep, "_orders", lambda cell: (0.1, None, False))
    monkeypatch.setattr(theory, "SEEDS", {"minutes": 2})
    monkeypatch.setattr(theory, "PRECISE", {"minutes": 3})
    monkeypatch.setattr(theory, "REPEATED", {"minutes": repeated})
    whole = theory.study(tmp_path / "whole", "minutes", _nothing)
    assert "The attack is better in 0 of 1" in (tmp_path / "whole" / "theory.md").read_text()
    assert (tmp_path / "whole" / "theory.png").stat().st_size > 10_000
    table = _table(tmp_path / "whole")
    assert len(table) == len(whole.rows.all) == len(sweep.cells(quick=True))
    assert {row["seeds"] for row in table} == {"2", "6"}
    assert min(seed for _, seed in runs) == sweep.FIRST == 1000, "seeds that no rule has seen"
    every = set(runs)
    assert len(every) == len(runs)
    late = [(cell, seed) for cell, seed in runs if seed >= sweep.AGAIN]
    assert len(late) == repeated * len([*sweep.over_inputs(), *sweep.loud(2)])
    assert max(seed for _, seed in set(runs) - set(late)) < sweep.AGAIN == 2000

    def stopped(cell, seed):
        if len(runs) == len(every) // 2:
            raise KeyboardInterrupt
        return counted(cell, seed)

    runs.clear()
    monkeypatch.setattr(theory, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        theory.study(tmp_path / "part", "minutes", _nothing)
    journal = tmp_path / "part" / "theory.jsonl"
    journal.write_text(journal.read_text()[:-9], "utf-8")  # a kill in the middle of a line
    monkeypatch.setattr(theory, "run", counted)
    again = theory.study(tmp_path / "part", "minutes", _nothing)
    assert len(runs) == len(every) + 1
    assert _table(tmp_path / "part") == table
    assert claims(again.rows, again.shares) == claims(whole.rows, whole.shares)


def test_no_trial_of_the_theory_repeats_a_seed_that_was_seen(monkeypatch):
    seeds = set()

    def told(cell, seed):
        seeds.add(seed)
        return draw(cell, seed)

    draw = sweep.draw
    monkeypatch.setattr(sweep, "draw", told)
    sweep.withheld([0.5], 10, 2, width=64)
    assert seeds == {1000, 1001}
    sweep._orders(Cell(width=64, noise_std=1.0, defense="prune_layer", level=0.5))
    monkeypatch.setattr(all_attackers, "stream", lambda seed, *names: seeds.add(seed) or stop())
    with pytest.raises(KeyboardInterrupt):
        all_attackers.compared(1)
    assert seeds == {1000, 1001}


def stop():
    raise KeyboardInterrupt


def _table(folder):
    return list(csv.DictReader((folder / "theory.csv").read_text().splitlines()))


def _compared():
    return Compared("softplus", 1.0, 0.5, 0.4, interval(np.array([0.1, 0.2])))


@pytest.mark.parametrize(
    ("number", "level", "cells"),
    [("2-1", "inputs", sweep.over_inputs()), ("2-3", "noise_std", sweep.loud(2))],
)
def test_a_slope_that_was_left_undecided_is_judged_again(number, level, cells):
    """Where the first run's seeds have slopes to both sides of the edge, the second decides."""

    def bent(powers):
        return [
            replace(
                rows[cell],
                errors=tuple(
                    error * (getattr(cell, level) / getattr(cells[1], level)) ** power
                    for error, power in zip(rows[cell].errors, powers, strict=False)
                ),
            )
            for cell in cells
        ]

    rows = _rows(_law)
    torn = Rows([*{r.cell: r for r in [*rows.all, *bent((0.4, -0.2) * SEEDS)]}.values()])
    again = Rows(torn.all, bent((0.0,) * 3 * SEEDS))
    against = Rows(torn.all, bent((1.0,) * 3 * SEEDS))
    first, second, third, stays = (
        {c.number: c for c in claims(own, _shares())}
        for own in (torn, again, against, Rows(rows.all, bent((1.0,) * 3 * SEEDS)))
    )
    assert first[number].verdict is Verdict.UNDECIDED
    assert second[number].verdict is stays[number].verdict is Verdict.HOLDS
    assert third[number].verdict is Verdict.FAILS
    assert "A first run was undecided" in second[number].why
    assert "do not change the verdict" in stays[number].why
    assert {c.verdict for n, c in third.items() if n != number} == {Verdict.HOLDS}


def test_widths_of_the_claims_are_those_of_the_sweep():
    assert set(sweep.WIDTHS) <= {cell.width for cell in sweep.cells()}
    assert Cell().width in sweep.WIDTHS
    assert theory_claims.WIDTHS is sweep.WIDTHS


@pytest.mark.parametrize("defense", ["none", "clipping", "dropout_units", "dropout_entries"])
def test_no_order_from_above_lies_below_the_one_from_below(defense):
    """Table 1 has dropout's without noise: 0.14 stood beside a lower order of 0.28."""
    level = {"none": 0.0, "clipping": 4.0}.get(defense, 0.5)
    loud, quiet = (
        sweep.row(
            Cell(width=512, defense=defense, level=level, noise_std=std), [Trial(1.0, 1.0, None)]
        )
        for std in (4.0, 0.0)
    )
    assert quiet.lower is None
    assert quiet.upper > 0
    if defense in ("none", "clipping"):
        assert loud.upper > loud.lower > 0
    else:
        assert (loud.upper, loud.meets) == (None, False)
        assert loud.lower > quiet.upper
