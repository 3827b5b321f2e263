"""A small run never says that a claim does not hold: a larger one may find that it does."""

import math
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from leakbound_reproductions import pages
from leakbound_reproductions.by_seed import in_words
from leakbound_reproductions.claim import Claim, Mark, Verdict
from leakbound_reproductions.comparison import AGAINST, FAILS, HOLDS, UNDECIDED, Comparison, shown
from leakbound_reproductions.outcome import Outcome, at_scale
from leakbound_reproductions.reproductions import REPRODUCTIONS
from leakbound_reproductions.results import Results, decode

STORED = Path(__file__).parents[2] / "docs" / "reproductions"
CLAIMS = [
    pytest.param(name, claim, id=claim.number)
    for name in sorted(REPRODUCTIONS)
    for claim in decode((STORED / f"{name}.json").read_bytes()).outcome.claims
    if claim.findings
]


def _refuted(claim: Claim, *, weakly: bool = False) -> Claim:
    """The claim with its first finding far from where it is true; or only at 95 %."""
    first, *rest = claim.findings
    far = first.interval[1] + 1
    wrong = replace(first, region=(far, math.inf))
    if weakly:
        wrong = replace(wrong, strict=(first.interval[0] - 1, far + 1))
    return replace(claim, findings=(wrong, *rest), why="")


def _run(monkeypatch, name, scale, claim):
    """What the reproduction of that name says at a scale, if it measures this claim."""
    module = types.ModuleType(name)
    module.reproduce = lambda *scale, **given: Outcome((claim,), (), "Settings.")
    monkeypatch.setitem(sys.modules, f"leakbound_reproductions.{name}.reproduce", module)
    run = REPRODUCTIONS[name].load()
    return run(scale, Path(), workers=1, color="photos", tell=lambda *now: None)


@pytest.mark.parametrize("weakly", [False, True], ids=["refuted", "one finding against"])
@pytest.mark.parametrize(("name", "claim"), CLAIMS)
def test_a_small_run_refutes_no_claim_that_a_larger_one_may_confirm(
    monkeypatch, name, claim, weakly
):
    wrong = _refuted(claim, weakly=weakly)
    if Mark.THEOREM in claim.marks:
        assert _run(monkeypatch, name, "minutes", wrong).claims == (wrong,)
        return
    found = _run(monkeypatch, name, "minutes", wrong)
    (left,) = found.claims
    assert left.verdict is Verdict.UNTESTED
    results = Results(REPRODUCTIONS[name], "minutes", found)
    said = "\n".join([*pages.overview(found.claims), *pages.details(found.claims)])
    assert "does not hold" not in said
    assert "At the scale minutes no claim is refuted" in pages.markdown(results)
    assert wrong.findings[0].statement in said  # what was measured is not lost
    assert results.counts().get("does not hold", 0) == 0


@pytest.mark.parametrize("scale", ["cpu", "paper"])
def test_a_full_run_refutes(monkeypatch, scale):
    name, claim = CLAIMS[0].values
    wrong = _refuted(replace(claim, marks=()))
    assert _run(monkeypatch, name, scale, wrong).claims == (wrong,)
    assert wrong.verdict is Verdict.FAILS


def test_what_holds_or_is_undecided_stays_at_any_scale():
    claims = tuple(value.values[1] for value in CLAIMS)
    kept = tuple(c for c in claims if not any(f.against for f in c.findings))
    assert {c.verdict for c in kept} >= {Verdict.HOLDS, Verdict.UNDECIDED}
    found = at_scale("minutes", Outcome(kept, (), "")).claims
    assert [one.findings for one in found] == [one.findings for one in kept]


def test_remarks_of_a_small_run_refute_nothing():
    claim = next(value.values[1] for value in CLAIMS if not value.values[1].marks)
    wrong = _refuted(claim).findings[0]
    told = f"{in_words(wrong)}\nWith shorter searches only, the verdict is: {Verdict.FAILS}"
    assert told.count("does not hold") == 2
    kept = replace(claim, findings=(), why=told)
    (left,) = at_scale("minutes", Outcome((kept,), (), "")).claims
    assert "does not hold" not in left.why
    assert left.why.count(AGAINST) == 2
    assert at_scale("cpu", Outcome((kept,), (), "")).claims == (kept,)


def test_tables_of_a_small_run_refute_nothing():
    rows = [Comparison("1-1", "a", "1", word) for word in (HOLDS, FAILS, UNDECIDED)]
    assert [row.word for row in shown(rows, small=True)] == [HOLDS, AGAINST, UNDECIDED]
    assert shown(rows, small=False) == rows
