"""The section for a model card: what the sign-off page says, and no Markdown of strangers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from msgspec.structs import replace

from leakbound._util.text import markdown
from leakbound.report import evidence
from leakbound.report.evidence.parts import Epsilons
from leakbound.report.folder import read

MARKS = (
    "<img src=x onerror=alert(1)> [a](http://b) ![c](d) `e` *f* __g__ _h_ ~~i~~ | j @k #1 $l$ \\m "
    "<!-- n --> &amp; &#60; www.o.org http://p.q r@s.org \x1b[2J\n\n# t\n- u\n```\nv"
)
"""What Markdown, or a page that shows it, acts on."""
PLAIN = "dp_sgd noise_multiplier=0.1 (95 % interval; n = 3): 1,000.5 – it’s “ü”"
PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def subject_of(folder):
    accountant = lambda noise: Epsilons(1e-5, 4 / noise, 8 / noise)  # noqa: E731
    return evidence.of_run(read(folder), {}, accountant, images=False)


def card(*subjects):
    return evidence.card(evidence.document(subjects, images=False))


def tokens(text):
    return [one for block in PARSER.parse(text) for one in (block, *(block.children or ()))]


def tables(text):
    """The cells of each table as a reader sees them."""
    found = []
    for one in PARSER.parse(text):
        if one.type == "table_open":
            found.append([])
        elif one.type == "tr_open":
            found[-1].append([])
        elif one.type == "inline" and found and len(found[-1]) and one.level > 3:
            found[-1][-1].append("".join(part.content for part in one.children))
    return found


@pytest.mark.parametrize("mark", [*MARKS.split(" "), MARKS])
def test_no_text_of_strangers_is_markdown(mark):
    (_, inside, _) = PARSER.parse(f"a {markdown(f'{mark} {mark}')} z")
    kinds = {one.type for one in inside.children}
    assert kinds <= {"text", "text_special"}
    shown = "".join(one.content for one in inside.children)
    assert " ".join(mark.split()).replace("\x1b", "\\x1b") in shown
    assert not re.search(r"[<>@`|$#]|www\.|\w:\S|\[", markdown(mark).replace("&#", ""))


def test_plain_text_stays_readable():
    assert markdown(PLAIN) == PLAIN
    assert markdown(markdown(PLAIN)) == PLAIN


def test_a_hostile_run_adds_no_markdown(tmp_path, make_grid):
    quiet = subject_of(make_grid(tmp_path / "quiet", hostile=False, seeds=2))
    run = make_grid(tmp_path / "run", hostile=True, seeds=2)
    made = subject_of(run)
    loud = replace(
        made,
        name=MARKS,
        sign_off=replace(made.sign_off, tested=MARKS, answer=f"No. {MARKS}"),
        provenance=replace(made.provenance, versions={MARKS: MARKS}),
        rerun=replace(made.rerun, plan_hash=MARKS),
    )
    rows = {"tr_open", "tr_close", "td_open", "td_close"}
    kinds = [
        [one.type for one in tokens(card(one)) if one.type not in rows | {"inline", "text"}]
        for one in (quiet, loud)
    ]
    assert set(kinds[1]) - {"text_special"} <= set(kinds[0])
    assert kinds[1].count("heading_open") == kinds[1].count("fence") == 1
    assert MARKS.split()[0] not in card(loud)
    assert len(tables(card(loud))[1][-1]) == 5


def test_it_says_what_the_sign_off_page_says(tmp_path, make_bounded):
    subject = subject_of(make_bounded(tmp_path / "run"))
    text, page = card(subject), subject.sign_off
    shown = " ".join("".join(one.content for one in tokens(text) if one.type != "inline").split())
    for words in (page.answer, page.advice, *page.not_covered):
        assert " ".join(words.split()) in shown
    facts, results = tables(text)
    said = dict(row for row in facts if len(row) == 2)
    assert said["Tested"] == page.tested
    assert said["Attacker"] == page.attacker
    assert said["Attacks"] == "inverting_gradients and dlg"
    assert "one client" in said["Unit"]
    assert "32 of 784 directions" in said["Priors of the bounds"]
    rows = results[1:]
    assert [row[:2] for row in rows] == [[row.defense, row.verdict] for row in page.rows]
    assert {word for word in (row.verdict for row in page.rows) if f"{word}: " in shown} == {
        row.verdict for row in page.rows
    }
    own = page.rows[0].reconstructed
    assert rows[0][2].startswith(f"{own.hits} of {own.n} (")
    assert subject.rerun.command in text
    assert subject.rerun.records_sha256 in text
    assert "leakbound 0.1.0" in shown


def test_bounds_costs_and_gaps_are_named(tmp_path, make_grid):
    made = subject_of(make_grid(tmp_path / "run", hostile=False, seeds=2))
    assert made.sign_off.rows[0].defense == "no defense"
    head, none, other, *_ = tables(card(made))[1]
    assert head[-1] == "Accuracy lost"
    assert none[-1] == "–"
    assert re.fullmatch(r"[\d.−]+ points \([\d.−]+ to [\d.−]+, n = 3\)", other[-1])
    assert other[3] == "not known"
    assert [len(row) for row in tables(card(replace(made, utility=())))[1]][:2] == [4, 4]


def test_what_does_not_hold_comes_first(tmp_path, make_grid):
    folder = make_grid(tmp_path / "run", hostile=False, seeds=2)
    lines = (folder / "records.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "records.jsonl").write_bytes(b"".join(lines[:-3]))
    text = card(subject_of(folder))
    assert "\n- Does not hold: All planned experiments are here (" in text
    assert text.index("Does not hold") < text.index("| Tested |")


def test_it_is_written_beside_the_sign_off_page(tmp_path, make_grid):
    from leakbound.cli import main

    folder = make_grid(tmp_path / "run", hostile=False, seeds=2)
    path = Path(folder / "model-card.md")
    for _ in range(2):
        with pytest.raises(SystemExit) as end:
            main(["evidence", str(folder)])
        assert end.value.code == 0
    first, rest = path.read_text("utf-8").split("\n", 1)
    assert first.startswith("<!-- written by leakbound, sha256 ")
    assert rest == card(subject_of(folder))
    path.write_text("# My card\n")
    with pytest.raises(SystemExit) as end:
        main(["evidence", str(folder)])
    assert end.value.code == 2
    assert path.read_text() == "# My card\n"
