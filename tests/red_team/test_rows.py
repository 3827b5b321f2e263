"""No adversary is above what is stated of rows of a table; wrong rules for the count are beaten."""

from __future__ import annotations

import numpy as np
import pytest

from leakbound.bounds import identification
from leakbound.bounds.counting import count_limit

from . import rows

NOISES = (0.3, 1.0)
TABLES = {
    "german": lambda: rows.drawn("german", 40, 0.1, 1000),
    "breast_cancer": lambda: rows.drawn("breast_cancer", 40, 0.1, 1000),
    "german, split": lambda: rows.split("german", 600),
}


def shown(attacks):
    return [(one.adversary, one.level, one.noise, one.stated, one.hits / one.n) for one in attacks]


@pytest.mark.parametrize(
    ("name", "labeled"),
    [
        pytest.param("german", False, id="german-unknown"),
        pytest.param("german", True, id="german-known"),
        pytest.param("breast_cancer", True, id="breast_cancer-known"),
        pytest.param("german, split", False, id="german, split-unknown"),
        pytest.param("breast_cancer", False, id="breast_cancer-unknown", marks=pytest.mark.slow),
        pytest.param("german, split", True, id="german, split-known", marks=pytest.mark.slow),
    ],
)
def test_no_adversary_is_above_a_statement(name, labeled):
    attacks = list(rows.attacked(TABLES[name](), NOISES, labeled=labeled))
    assert len({one.level for one in attacks}) >= 4
    assert {one.noise for one in attacks} == set(NOISES)
    assert shown(rows.beaten(attacks)) == []
    if name != "german, split":
        assert min(one.n for one in attacks) == rows.HELD
        best = max(one.hits / one.n / one.stated for one in attacks)
        assert 0.8 < best < 1  # near to what is stated: the adversaries are real


def test_adversaries_are_real():
    """So that no test above passes for attacks that fail."""
    own = TABLES["german"]()
    found = {one.adversary: one.hits / one.n for one in rows.attacked(own, (0.3,), labeled=False)}
    assert {name for name, share in found.items() if share > 0.02} >= {
        *("between", "codebook", "middle_codebook", "hidden_codebook"),
        *("likeliest", "ball", "by_column", "hidden_likeliest"),
    }
    quiet = [rows.hits(own, guess, False, 2, 0.02, 0) for guess in (rows.linear, rows.likeliest)]
    assert min(quiet) > 0.3 * rows.HELD


HIDDEN = {"german": lambda: rows.hidden_center(2), "breast_cancer": rows.jittered}
RULES = {
    "rows that one public row matches": (1.0, 1, {"german", "breast_cancer"}),
    "twice the columns, but one tolerance": (1.0, 2, {"breast_cancer"}),
    "twice the tolerance, but the columns once": (2.0, 1, {"german"}),
}


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("rule", RULES)
def test_a_wrong_count_is_beaten(rule, name):
    scale, times, tables = RULES[rule]
    own = HIDDEN[name]()

    def wrong(sample, noise, level):
        near = own.apart(own.rows, own.rows, scale) <= times * level
        limit = count_limit(int(near.sum(1).max()), len(own.rows), confidence=0.975)
        return float(identification.gaussian(noise, log_kappa=np.log(limit)))

    attacks = list(rows.attacked(own, (3.0,), labeled=False, stated=wrong))
    assert bool(rows.beaten(attacks)) == (name in tables)


@pytest.mark.parametrize("name", HIDDEN)
def test_a_row_that_no_one_has_is_counted(name):
    """Most neighbors are as far as two rows around one candidate can be."""
    attacks = list(rows.attacked(HIDDEN[name](), (1.0, 3.0), labeled=False))
    assert shown(rows.beaten(attacks)) == []
    assert max(one.hits / one.n / one.stated for one in attacks) > 0.5
