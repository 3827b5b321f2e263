"""A run on rows of a table: columns beside the baseline, single rows, and no word of images."""

from __future__ import annotations

import html
import json
import re

import numpy as np
import pytest
from scipy.stats import binomtest, combine_pvalues
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from leakbound._util.intervals import holm, wilson
from leakbound.assess.record import CriterionInfo
from leakbound.report import columns, evidence, overview, tables, write
from leakbound.report.compare import write_comparison
from leakbound.report.evidence.parts import Epsilons
from leakbound.report.folder import read

LEVEL, FORMULA = "<script>alert(3)</script>", '=HYPERLINK("http://x")'
TABLE_WORDS = re.compile(r"image|psnr|\bdb\b|picture|pixel|rmse", re.IGNORECASE)


def seen(text):
    """What a reader sees or hears of a page: no code, settings, scripts or styles."""
    text = text.replace("<wbr>", "")
    text = re.sub(r"<(style|script|pre|code)\b.*?</\1>", "", text, flags=re.DOTALL)
    said = re.findall(r'\b(?:aria-label|title|alt)="([^"]*)"', text)
    return html.unescape(" ".join([re.sub(r"<[^>]+>", " ", text), *said]))


@pytest.fixture
def run(tmp_path, make_clinic):
    return make_clinic(tmp_path / "run")


def _tables(own):
    names = tables.Names(own)
    return columns.column_tables(own, names, tables.configurations(own, names))


def test_intervals_and_corrections_are_those_of_other_libraries():
    for n in (1, 2, 7, 40, 1000):
        for hits in {0, 1, n // 3, n - 1, n}:
            theirs = proportion_confint(hits, n, method="wilson")
            assert wilson(hits, n) == pytest.approx(theirs, abs=1e-12), (hits, n)
    assert wilson(0, 0) == (0, 1)
    draw = np.random.default_rng(0)
    for size in (1, 2, 30):
        p = draw.uniform(size=size) ** 3
        assert holm(p.tolist()) == pytest.approx(multipletests(p, method="holm")[1])
    assert holm([]) == []
    for won, lost, same in ((0, 0, 3), (5, 0, 1), (7, 3, 2), (3, 7, 0), (40, 12, 9)):
        pairs = [(True, False)] * won + [(False, True)] * lost + [(True, True)] * same
        theirs = binomtest(won, won + lost, alternative="greater").pvalue if won else 1.0
        assert columns.paired(pairs) == pytest.approx(theirs, rel=1e-12)


def test_each_column_is_counted_over_all_experiments_beside_the_baseline(make_table):
    own = [
        make_table(
            {"a": [True, True, False], "b": [True] * 3, "c": [True, False, False]},
            {"b": [True, True, False], "a": [False, False, True]},
            sensitive=("c",),
            seed=seed,
        )
        for seed in range(4)
    ]
    own.append(make_table({name: [False] * 3 for name in "abc"}, attack="weaker"))
    (table,) = _tables(own)
    assert (table.attack, table.rows) == ("inverting_gradients", 12)
    assert [one.name for one in table.columns] == ["c", "b", "a"]  # sensitive, then by share
    counts = {c.name: (c.attack.hits, c.attack.n, c.baseline.hits) for c in table.columns}
    assert counts == {"a": (8, 12, 4), "b": (12, 12, 8), "c": (4, 12, 0)}
    first = table.columns[0].attack
    assert (first.low, first.high) == pytest.approx(proportion_confint(4, 12, method="wilson"))
    # a: right where the baseline is wrong 8 times, the reverse 4 times; b: 4 and 0; c: 4 and 0
    plain = [binomtest(w, n, alternative="greater").pvalue for w, n in ((8, 12), (4, 4), (4, 4))]
    theirs = multipletests([*plain, 1, 1, 1], method="holm")[1][:3]  # six tests: two attacks
    assert [{c.name: c.p_value for c in table.columns}[n] for n in "abc"] == pytest.approx(theirs)
    assert table.fewest == 10  # 6 tests of 2^-10 are below 0.01, of 2^-9 they are not


def test_columns_that_leak_are_revealed_and_blind_guesses_are_not(make_table):
    rng, false = np.random.default_rng(1), 0
    for _ in range(200):
        both = [{str(k): (rng.random(16) < 0.3).tolist() for k in range(10)} for _ in range(2)]
        false += _tables([make_table(*both)])[0].revealed > 0
    assert false <= 6  # 0.01 a table, and three standard errors
    leak = {str(k): [True] * 16 for k in range(10)}
    (table,) = _tables([make_table(leak, {"0": [True] * 16})])
    assert {c.name for c in table.columns if not c.revealed} == {"0"}
    assert (table.revealed, table.few) == (9, False)


def test_a_page_of_a_table_has_no_word_of_images(run):
    for images in (True, False):
        text = seen(write(run, images=images).read_text("utf-8")).replace("--no-examples", "")
        assert TABLE_WORDS.findall(text) == []
        assert "reconstructed rows of a table under 1 of 2 tested configurations" in text
        assert "reconstructed: 3 of 3 columns or more" in text
    assert "columns&gt;=0.9 with probability&lt;=0.01" in write(run).read_text()


def test_columns_stand_beside_the_baseline_sensitive_first(run):
    text = write(run).read_text("utf-8")
    fold = text[text.index('id="columns-fold"') : text.index('id="heatmaps-fold"')]
    rows = [seen(row).split() for row in re.findall(r"<tr>.*?</tr>", fold, re.DOTALL)]
    names = [row[0] for row in rows[1:4]]
    assert names[0] == "hiv"
    assert set(names) == {"hiv", "age", FORMULA.split()[0]}
    assert rows[1][1:3] == ["sensitive", "years"]
    by_name = {row[0]: " ".join(row) for row in rows[1:4]}
    assert "50 % (2 of 4) 15 to 85 % 100 % (4 of 4) 51 to 100 %" in by_name["age"]
    assert "50 % (2 of 4) 15 to 85 % 0 % (0 of 4) 0 to 49 %" in by_name["hiv"]
    assert "4 rows are too few to test columns" in fold


def test_the_best_row_stands_on_the_first_screen_and_is_escaped(run):
    text = write(run).read_text("utf-8")
    first = text[: text.index("<nav")]
    assert seen(first).split("Reconstructed")[1].split()[:6] == [
        *("Right", "hiv", "sensitive", "positive", "positive", "✓"),
    ]
    assert "41 years" in first
    assert "secret" not in first  # of the other row
    assert LEVEL not in text
    assert FORMULA not in text
    assert "&lt;script&gt;alert(3)" in first
    assert FORMULA in seen(first)
    card = text[text.index('id="card-1"') :]
    assert seen(card).count("positive") >= 2
    assert "This report holds values" not in text


def test_without_examples_only_rates_are_left(run, make_run):
    for text in (write(run, images=False).read_text(), _without_values(run, make_run)):
        assert "50\xa0% (2 of 4)" in text
        for value in ("41 years", "positive", "secret", "alert(3)"):
            assert value not in text


def _info(run):
    found = json.loads((run / "run.json").read_text())
    return {name: found[name] for name in ("plan", "data")}


def _without_values(run, make_run):
    own = json.loads("[" + ",".join((run / "records.jsonl").read_text().splitlines()) + "]")
    for one in own:
        for column in one["columns"]:
            column |= {"truth": [], "reconstruction": []}
    make_run(run, own, **_info(run), pictures=False, own_data=True)
    text = write(run).read_text()
    assert "The run kept no values of examples" in text
    assert "This report holds values" not in text
    return text


def test_private_values_are_warned_of(run, make_run):
    own = read(run)
    make_run(run, own.assessments, **_info(run), own_data=True)
    warning = "This report holds values of your private data."
    assert warning in write(run).read_text()
    assert warning not in write(run, images=False).read_text()


@pytest.mark.parametrize(
    ("chance", "said"),
    [
        ({"p_value": 0.3, "decoys": 150, "level": 0.01}, "p = 0.3 against 150 examples"),
        ({"p_value": 0.003, "decoys": 400, "level": 0.01}, "p = 0.003 against 400 examples"),
        (
            {"p_value": None, "decoys": 50, "level": 0.01, "closer": False},
            "too few public examples to tell this",
        ),
        (
            {"p_value": None, "decoys": 50, "level": 0.01, "closer": True},
            "a match is ten times closer than any guess",
        ),
    ],
)
def test_the_test_of_chance_is_said_where_it_decides(tmp_path, make_table, make_run, chance, said):
    p_value = chance["p_value"]
    counts = chance.get("closer", False) if p_value is None else p_value <= 0.01
    hit = make_table({"a": [True, False]}, chance=chance)
    miss = make_table({"a": [False, False]}, chance=chance, seed=1)
    text = write(make_run(tmp_path / "run", [hit, miss])).read_text()
    assert text.count(said) == 1
    assert ("nothing here counts as reconstructed" in text) is not counts
    (row,) = tables.configurations([hit, miss], tables.Names([hit, miss]))
    assert row.verdict == ("exposed" if counts else "undecided")
    if p_value is None:
        assert row.chance is None
    else:
        both = min(p_value, combine_pvalues([p_value] * 2).pvalue)  # Simes of two equal, Fisher
        assert row.chance == pytest.approx(2 * both)


def test_many_experiments_that_match_by_chance_are_not_exposed(tmp_path, make_table, make_run):
    weak = {"p_value": 0.009, "decoys": 400, "level": 0.01}
    none = {"p_value": 0.9, "decoys": 400, "level": 0.01}
    own = [make_table({"a": [True]}, chance=weak)]
    own += [make_table({"a": [False]}, chance=none, seed=seed) for seed in range(1, 4)]
    (row,) = tables.configurations(own, tables.Names(own))
    assert (row.verdict, row.chance) == (
        "undecided",
        pytest.approx(2 * 4 * 0.009),
    )
    assert "chance: p = 0.072" in write(make_run(tmp_path / "run", own)).read_text()


def test_scores_are_counts_of_columns_and_charts_run_to_100(run):
    text = write(run).read_text("utf-8")
    assert "3 of 3 columns" in text
    assert 'style="--v:0.5"' in text  # a median of 50 %
    assert not re.search(r"Best-attack error|Median SSIM|Identified", seen(text))


@pytest.mark.parametrize(
    ("plan", "level"), [({"share": 0.85}, "0.85"), ({}, "0.9231"), ({"share": "x"}, "0.9231")]
)
def test_the_next_command_names_a_share_of_columns(plan, level):
    info = CriterionInfo(metric="columns", value=92.3076923, within=2.0, of=26)
    command = overview.next_command(plan, info)
    shown = level if plan.get("share") == 0.85 else "0.923"
    assert f'"columns>={shown} with probability<=0.01"' in command
    assert -(-float(shown) * 26 // 1) <= 24  # no more columns than the criterion asks for


def test_a_series_is_measured_by_its_own_score(tmp_path, make_assessment, make_run):
    own = make_assessment(
        metrics={"snr": [31.0, 12.0]},
        criterion={"metric": "snr", "value": 20.0, "within": 0.1},
        data={"source": "ecg", "domain": "series", "shape": [2, 96], "classes": 5},
        matched=[True, False],
    )
    text = seen(write(make_run(tmp_path / "run", [own])).read_text())
    assert "reconstructed series under 1 of 1 tested configuration" in text
    assert "20 dB SNR or more" in text
    assert not re.search("PSNR|image", text)
    assert "Best-attack error" not in text  # an SNR is no error in units of the range


def test_a_table_whose_truth_is_not_known_shows_what_was_reconstructed(
    tmp_path, make_captured, change
):
    folder = make_captured(tmp_path / "run")
    known = [{"name": "age", "unit": "years", "reconstruction": ["41 years"]}]
    criterion = {"metric": "columns", "value": 100.0, "within": 0.0, "of": 1}
    lines = json.loads((folder / "records.jsonl").read_text())
    lines |= {"columns": known, "criterion": criterion}
    lines["data"]["domain"] = "table"
    (folder / "records.jsonl").write_text(json.dumps(lines) + "\n")
    text = write(folder).read_text()
    assert "A row that the update reveals" in text
    assert "<td>41 years</td>" in text
    assert ">True<" not in text
    assert TABLE_WORDS.findall(seen(text).replace("--no-examples", "")) == []


def test_the_evidence_of_a_table_has_rates_and_no_values(run):
    subject = evidence.of_run(read(run), {}, lambda noise: Epsilons(1e-5, 1.0, 2.0), images=True)
    content = evidence.document([subject], images=True)
    page, annex = evidence.page(content), evidence.annex(content, [read(run)])
    for text in (page, annex):
        assert TABLE_WORDS.findall(seen(text)) == []
        assert "secret" not in text + json.dumps(str(content))
    assert "reconstructed rows of a table under 1 of 2" in page
    assert "3 of 3 columns or more (each within its tolerance)" in page
    assert "50\xa0% (2 of 4)" in annex
    assert subject.measured.columns[0].columns[0].name == "hiv"
    (row,) = [one for one in subject.questions if "attribute" in one.question]
    assert row.status == "in part"
    (limit,) = [one for one in subject.thresholds if one.name == "reconstructed"]
    assert (limit.value, limit.unit) == (3, "of 3 columns")
    assert limit.origin.startswith("plan: criterion.share; it is the default")


def test_two_runs_on_a_table_compare_shares_of_columns(tmp_path, run, make_assessment, make_run):
    found = write_comparison(read(run), read(run), tmp_path / "same.html")
    text = seen((tmp_path / "same.html").read_text())
    assert TABLE_WORDS.findall(text) == []
    assert (found.axis, found.unit, found.grave) == ("columns right", "%", ())
    assert "best example 3 of 3 columns" in text
    assert [row.score.first for row in found.attacks] == [50.0, 0.0]
    other = read(make_run(tmp_path / "other", [make_assessment()]))
    mixed = write_comparison(other, read(run), tmp_path / "mixed.html")
    assert mixed.attacks == ()  # decibels and columns have no difference
    assert "A 20 dB PSNR or more; B 3 of 3 columns or more" in " ".join(mixed.grave)
