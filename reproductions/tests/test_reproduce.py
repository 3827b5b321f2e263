"""Results that are written, read and shown; the page of all papers; parts that are kept."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from leakbound.data import Dataset
from leakbound_reproductions import overview, pages, results, words
from leakbound_reproductions.claim import Claim, Finding, Mark, Verdict
from leakbound_reproductions.kept import Parts, data_of, note_data
from leakbound_reproductions.outcome import SCALES, Figure, Outcome
from leakbound_reproductions.reproductions import REPRODUCTIONS, named

ROOT = Path(__file__).parents[2]
STORED = ROOT / "docs" / "reproductions"


def outcome():
    ends = {"interval": (0.5, 2.0), "strict": (0.4, 2.2), "region": (0.0, math.inf)}
    held = Finding("a is above b", 1.25, n=7, unit="dB", paper="2 (table 1)", **ends)
    far = Finding("never", 0.2, (0.1, 0.3), (0.05, 0.4), (-math.inf, 0.0), 1000)
    return Outcome(
        (
            Claim("1-1", "a beats b", "table 1", "small", (held,), marks=(Mark.THEOREM,)),
            Claim("1-2", "no c", "table 2", "small", (held, far), "A remark."),
            Claim("1-3", "d", "table 3", "small", (), "no such data"),
            Claim("IV.1", "e", "corollary IV.1", "small", (held,), marks=(Mark.CORRECTED,)),
        ),
        (Figure("plot.png", "a plot", "figure 2"),),
        "Some settings.",
        ("further.md",),
    )


def made(scale="cpu"):
    about = REPRODUCTIONS["mean_to_extreme"]
    return results.Results(about, scale, outcome(), {"mine": 1}, {"python": "3"}, {"threads": 1})


def test_results_are_read_as_they_were_written():
    content = results.encode(made())
    assert results.decode(content) == made()
    assert json.loads(content)["claims"][0]["findings"][0]["region"] == [0.0, None]
    assert results.encode(results.decode(content)) == content


def test_results_without_marks_are_read_as_before():
    found = json.loads(results.encode(made()))
    for claim in found["claims"]:
        del claim["marks"]
    read = results.decode(json.dumps(found).encode()).outcome.claims
    assert read == tuple(replace(claim, marks=()) for claim in outcome().claims)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"nonsense", b'{"schema": 2}'])
def test_other_results_are_refused_with_a_word(content, tmp_path):
    with pytest.raises(ValueError, match=r"damaged|schema 2"):
        results.decode(content)
    with pytest.raises(ValueError, match="leakbound reproduce"):
        results.read(tmp_path)


def test_the_page_shows_paper_ours_interval_tolerance_and_verdict():
    text = pages.markdown(made())
    row = "| a is above b | 2 (table 1) | 1.25 dB | [0.5, 2] | at least 0 | 7 | holds |"
    assert row in text
    assert "## 1-2: does not hold\n" in text
    assert "Verdict: **does not hold** (1 of 2 findings hold)." in text
    assert "| 1-3 | d | table 3 | **cannot be tested here** |" in text
    tally = "2 of 3 claims are decided (cannot be tested here: 1, does not hold: 1, holds: 1). "
    assert tally in text
    assert "Further statements: IV.1 holds." in text
    assert "| **holds** (theorem or identity, checked numerically) |" in text
    assert "Verdict: **holds** (1 of 1 finding holds; as corrected)." in text
    assert "| never | no number | 0.2 |" in text
    assert "- no such data." in text


def test_the_html_page_has_no_marks_of_markdown(tmp_path):
    (tmp_path / "plot.png").write_bytes(b"png")
    own = replace(made(), outcome=replace(outcome(), settings="Images `photos` <b>."))
    page = pages.html(own, tmp_path)
    assert "<p>Images photos &lt;b&gt;.</p>" in page
    assert "`" not in page


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ((math.nextafter(0, 1), math.inf), "above 0"),
        ((0.0, math.inf), "at least 0"),
        ((-math.inf, math.nextafter(1, 0)), "below 1"),
        ((0.97, 1.03), "0.97 to 1.03"),
        ((0.12345678, math.inf), "at least 0.1235"),
    ],
)
def test_regions_say_whether_their_ends_belong_to_them(ends, said):
    assert words.region(ends) == said


def test_every_paper_has_a_name_a_letter_and_words_for_every_scale():
    assert [one.letter for one in REPRODUCTIONS.values()] == ["A", "B", "C", "D", "E"]
    for name, one in REPRODUCTIONS.items():
        assert named(name) == [one]
        assert set(one.scales) == set(SCALES)
        assert one.paper.authors in str(one.paper)
    with pytest.raises(ValueError, match="choose one of optimal_defenses"):
        named("other")


def test_stored_results_make_the_page_of_the_docs():
    page = overview.page(STORED, ROOT / "docs")
    papers = [STORED / f"{name}.json" for name in REPRODUCTIONS]
    claims = [c for path in papers for c in json.loads(path.read_bytes())["claims"]]
    rows = re.findall(r"^\| (\S+) \| .* \*\*([^*]+)\*\*", page, re.M)
    assert rows == [(claim["number"], claim["verdict"]) for claim in claims]
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page):
        assert "://" in target or (ROOT / "docs" / target).exists(), target


def test_stored_claims_follow_from_their_own_intervals():
    stored = sorted(STORED.glob("*.json"))
    assert stored
    for path in stored:
        for claim in json.loads(path.read_bytes())["claims"]:
            found = [one["verdict"] for one in claim["findings"]]
            for one in claim["findings"]:
                (low, high), (least, most) = one["interval"], one["region"]
                least = -math.inf if least is None else least
                most = math.inf if most is None else most
                tie = high - low < 1e-12 and min(abs(low - least), abs(high - most)) < 1e-12
                inside = least <= low and high <= most and not tie
                outside = (high < least or low > most) and not tie
                word = "holds" if inside else "does not hold" if outside else "undecided"
                assert one["verdict"] == word
                assert one["strict"][0] <= low <= high <= one["strict"][1]
            if claim["verdict"] == "holds":
                assert set(found) == {"holds"}
            if claim["verdict"] == "does not hold":
                assert "does not hold" in found
            assert claim["statement"]
            assert claim["scale"]


def test_the_rules_name_the_claims_that_the_stored_marks_name():
    """And its stricter count: without theorems and whatever changed after numbers of any run."""
    stored = json.loads((ROOT / "docs/results/judging_claims.json").read_text("utf-8"))
    sections = {one.get("heading", ""): one["body"] for one in stored["sections"]}
    *_, table = sections["What changed after numbers of an earlier run were known"]
    rules = json.dumps(stored, ensure_ascii=False)
    papers = [json.loads(file.read_text("utf-8")) for file in STORED.glob("*.json")]
    claims = {c["number"]: c for p in papers for c in p["claims"] if c["number"][0].isdigit()}
    late = {n for n, c in claims.items() if Mark.LATE in c["marks"]}
    listed = re.search(r"measured anew or not \(([^;]*);", rules).group(1)
    assert set(listed.split(", ")) == late
    changed = {number for row in table["rows"] for number in row[0].split(", ")}
    assert late <= changed
    rest = [c for n, c in claims.items() if n not in changed and Mark.THEOREM not in c["marks"]]
    decided = sum(c["verdict"] in (Verdict.HOLDS, Verdict.FAILS) for c in rest)
    assert f"of the {len(changed)} claims in the table below" in rules
    assert f"without theorems {decided} of {len(rest)} are decided" in rules


def test_storing_takes_results_and_figures_over(tmp_path):
    run, stored = tmp_path / "run", tmp_path / "stored"
    run.mkdir()
    (run / "results.json").write_bytes(results.encode(made()))
    (run / "plot.png").write_bytes(b"png")
    overview.store(run, stored)
    assert (stored / "mean_to_extreme" / "plot.png").read_bytes() == b"png"
    page = overview.page(stored, tmp_path)
    assert "**2 of 3 claims are decided** (67%): 1 holds, 1 does not hold, 1 cannot be" in page
    assert "| theorem or identity, checked numerically (1-1) | 1 of 1 |" in page
    assert "| all others | 1 of 2 |" in page
    assert "Further statements are not counted (IV.1)." in page
    assert "| 1-2 | no c | **does not hold** |" in page
    assert "![a plot](stored/mean_to_extreme/plot.png)" in page
    assert page.count("No results are stored yet") == 4


def test_parts_are_made_once_and_damaged_ones_are_named(tmp_path):
    parts, calls = Parts(tmp_path / "parts"), []

    def make():
        calls.append(1)
        return {"a": [1.5]}

    assert not parts.has("x")
    assert parts.once("x", make) == parts.once("x", make) == {"a": [1.5]}
    assert calls == [1]
    assert parts.has("x")
    (tmp_path / "parts" / "x.json").write_text("{")
    with pytest.raises(ValueError, match="damaged; remove it"):
        parts.once("x", make)
    with pytest.raises(ValueError, match="JSON"):
        parts.once("y", lambda: math.nan)
    assert not parts.has("y")


def test_other_data_are_not_mixed_in(tmp_path):
    one = Dataset(torch.zeros(3, 1, 2, 2), torch.zeros(3, dtype=torch.long), ("x",), name="a")
    two = Dataset(torch.ones(3, 1, 2, 2), torch.zeros(3, dtype=torch.long), ("x",), name="a")
    note_data(tmp_path, "a", one)
    note_data(tmp_path, "a", one)
    assert data_of(tmp_path)["a"]["examples"] == 3
    with pytest.raises(ValueError, match="other data of 'a'"):
        note_data(tmp_path, "a", two)
