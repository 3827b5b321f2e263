"""The study of paper B's theory: its claims on made-up errors of a known law, and its files."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from leakbound.experiments.systematic_evaluation import sweep, theory, theory_claims
from leakbound.experiments.systematic_evaluation.all_attackers import Compared
from leakbound.experiments.systematic_evaluation.sweep import Withheld, interval, median_interval
from leakbound.experiments.systematic_evaluation.theory_claims import Rows, claims
from leakbound.experiments.systematic_evaluation.trial import PRUNING, Cell, Trial

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
        trials = [law(cell, seed) for seed in range(SEEDS)]
        floors = tuple(t.floor for t in trials if t.floor is not None)
        errors = tuple(t.error for t in trials)
        low, high = median_interval(errors)
        middle = float(np.median(errors))
        found.append(sweep.Row(cell, errors, errors, floors, middle, low, high, None, None, False))
    return Rows(found)


def _shares(after=0.9, before=1e-3):
    values = {10 / 11: before, 0.99: after}
    return [Withheld(rate, 10, interval(np.full(3, value)), 0.0) for rate, value in values.items()]


def _words(law, **shares):
    return {claim.number: claim.word for claim in claims(_rows(law), _shares(**shares))}


def test_all_claims_hold_under_their_own_law():
    found = _words(_law)
    assert set(found) == {"2-1", "2-2", "2-3", "2-4", "2-5", "2-6", "2-9"}
    assert all(word == "holds" for word in found.values()), found


@pytest.mark.parametrize(
    ("number", "wrong"),
    [
        ("2-1", lambda c: (8192 / c.width) ** 0.4),
        ("2-1", lambda c: 1 / c.batch**2),
        ("2-2", lambda c: 1.01 if c.defense == "clipping" and not c.noise_std else 1.0),
        ("2-3", lambda c: (1 + c.noise_std) ** 0.7),
        ("2-4", lambda c: 1.5 if c.defense == "dropout_units" else 1.0),
        ("2-6", lambda c: 1.2 if c.steps > 1 else 1.0),
    ],
)
def test_a_claim_falls_with_its_law(number, wrong):
    def law(cell, seed):
        given = _law(cell, seed)
        return replace(given, error=given.error * wrong(cell))

    assert _words(law)[number] == "does not hold"


def test_pruning_and_shares_fall_with_their_laws():
    spared = _words(lambda c, s: _law(replace(c, defense="none", level=0.0), s), after=0.1)
    assert spared["2-5"].startswith("does not hold")
    assert spared["2-9"] == "does not hold"
    assert _words(_law, before=0.2)["2-9"] == "does not hold"


def test_a_wide_interval_decides_nothing():
    def law(cell, seed):
        given = _law(cell, seed)
        return replace(given, error=given.error * 4.0 ** (seed * (cell.width > 4096)))

    assert _words(law)["2-1"] == "undecided"


def test_the_interval_of_a_median_covers_it():
    source = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        low, high = median_interval(source.exponential(size=10))
        hits += low <= np.log(2) <= high
    assert 0.95 <= hits / 2000 < 0.995


def test_files_and_a_run_that_is_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(theory, "run", _law)
    monkeypatch.setattr(theory, "compared", lambda seeds: [_compared()])
    found = theory.study(tmp_path / "whole", quick=True)
    assert len(json.loads((tmp_path / "whole" / "theory_claims.json").read_text())) == len(found)
    page = (tmp_path / "whole" / "theory.md").read_text()
    assert all(f"| {claim.number} |" in page for claim in found)
    assert (tmp_path / "whole" / "theory.png").stat().st_size > 10_000
    whole = _table(tmp_path / "whole")
    assert len(whole) == len(sweep.cells(quick=True))
    assert whole[0]["seeds"] == str(theory.FEW)

    def stopped(cell, seed):
        if cell.width > 4096:
            raise KeyboardInterrupt
        return _law(cell, seed)

    monkeypatch.setattr(theory, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        theory.study(tmp_path / "part", quick=True)
    part = _table(tmp_path / "part")
    assert part == whole[: len(part)]
    assert len(part) >= 2


def _table(folder):
    return list(csv.DictReader((folder / "theory.csv").read_text().splitlines()))


def _compared():
    return Compared("softplus", 1.0, 0.5, 0.4, interval(np.array([0.1, 0.2])))


def test_widths_of_the_claims_are_those_of_the_sweep():
    assert set(sweep.WIDTHS) <= {cell.width for cell in sweep.cells()}
    assert Cell().width in sweep.WIDTHS
    assert theory_claims.WIDTHS is sweep.WIDTHS
