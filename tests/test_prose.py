"""The linter of prose: every word of the glossary, in every kind of text; nothing in code."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
sys.path.insert(0, str(TOOLS))

import prose  # noqa: E402
import prose_text  # noqa: E402
import readability  # noqa: E402

GLOSSARY = prose.read_glossary()
# One use of each row, as someone would write it.
WRONG = {
    "tells of": "the mask tells much of the batch; the server is told it",
    "rebuild": "the attack rebuilds an image that was rebuilt before",
    "guess": "the guess moves towards the image",
    "floor": "a floor under the error",
    "ceiling": "a ceiling of 30 dB",
    "edge": "the upper edge lies at 0.2",
    "corridor": "the corridor is narrow",
    "blind guess": "a blind guess gets 12 dB",
    "reach": "the attack reaches an example",
    "alike": "both are alike",
    "release law": "the release law is public",
    "noise law": "the noise's law is known",
    "private law": "a private law leaks",
    "kinks": "activations with kinks",
    "rung, ladder": "each rung of priors",
    "oracle ledger": "the oracle ledger names it",
    "cell": "every cell of the plan runs",
    "combination": "each combination runs once",
    "strength S_D": "the strength S_D of a defense",
    "in trouble": "the search is in trouble",
    "planted": "a planted layer",
    "trap": "a trap in the model",
    "record": "it clips a record to norm 1",
    "read off": "labels are read off the bias",
    "people who must sign": "a page for people who must sign",
    "company": "it depends on an image's company",
    "may be had": "no bound may be had",
    "does not hold there": "the theorem does not hold there",
    "he": "he knows the labels",
}


def found(text: str, suffix: str, name: str = "page") -> list[str]:
    findings = prose.glossary_findings(name, text, prose_text.prose(text, suffix), GLOSSARY)
    return [line.partition(" -> ")[0].partition(": ")[2] for line in findings]


def rules(text: str, suffix: str) -> set[str]:
    """The rows that fire."""
    proses = prose_text.prose(text, suffix)
    return {rule.name for rule in GLOSSARY.rules if rule.pattern.search(proses)}


def cell(source: str, kind: str = "markdown") -> dict[str, object]:
    return {"cell_type": kind, "source": source.splitlines(keepends=True)}


def test_every_row_has_an_example() -> None:
    assert set(WRONG) == {rule.name for rule in GLOSSARY.rules}


@pytest.mark.parametrize("row", WRONG)
def test_a_word_is_found_wherever_people_read_it(row: str) -> None:
    text = WRONG[row]
    texts = {
        "page": (f"# Title\n\n{text}.\n", ".md"),
        "table": (f"| a | b |\n|---|---|\n| {text} | 1 |\n", ".md"),
        "docstring": (f'def f():\n    """Short.\n\n    {text}.\n    """\n', ".py"),
        "message": (f'raise ValueError("{text}; give x")\n', ".py"),
        "formatted": (f'x = f"{{value:.3g}}: {text}"\n', ".py"),
        "comment": (f"x = 1  # {text}\n", ".py"),
        "template": (f"<p>{{{{ x }}}} {text}</p>\n", ".j2"),
        "tooltip": (f'<a title="{text}">x</a>\n', ".j2"),
        "notebook": (json.dumps({"cells": [cell(f"# Title\n{text}.")]}, indent=1), ".ipynb"),
        "settings": (f'x = "a"  # {text}\n', ".toml"),
    }
    for kind, (source, suffix) in texts.items():
        assert row in rules(source, suffix), kind
        assert found(source, suffix), kind


@pytest.mark.parametrize("row", WRONG)
def test_a_word_is_found_across_a_line_break(row: str) -> None:
    text = WRONG[row].replace(" ", "\n    ")
    assert row in rules(f'def f():\n    """{text}."""\n', ".py")
    broken = WRONG[row].replace(" ", ' "\n    f"')
    assert row in rules(f'raise ValueError(\n    "{broken}"\n)\n', ".py")


def test_code_is_no_prose() -> None:
    pages = [
        ("```python\nrecord = told(guess)\n```\n", ".md"),
        ("    ~~~\n    record\n    ~~~\n", ".md"),
        ("Call `record(guess)` or ``told``, see [it](told/record.md).\n", ".md"),
        ('<img src="record.png" alt="">\n', ".md"),
        ("<!-- told -->\n", ".md"),
        ("see https://example.org/record and records.jsonl and a_record, --record\n", ".md"),
        ("record = told\nx = {'record': guess}\n", ".py"),
        ('"""Short.\n\n    >>> record = told(1)\n    >>> guess\n    """\n', ".py"),
        ('"""Short.\n\n    Args:\n        record: the example.\n    """\n', ".py"),
        ('x = f"{record} of {guess.told!r} examples"\n', ".py"),
        ("{% for record in records %}<p class='record'>{{ guess }}</p>{% endfor %}\n", ".j2"),
        ("<style>.record { }</style><script>let record = 1</script>\n", ".j2"),
        (json.dumps({"cells": [cell("record = 1\n# told", "code")]}, indent=1), ".ipynb"),
        ("record = 'told'\n", ".toml"),
    ]
    for source, suffix in pages:
        assert found(source, suffix) == [], source


def test_notebooks_of_either_form_are_read() -> None:
    cells = [{"cell_type": "markdown", "source": '# Ä\n"he" knows'}, cell("x = 'he'", "code")]
    for ascii_only in (True, False):
        source = json.dumps({"cells": cells}, indent=1, ensure_ascii=ascii_only)
        assert found(source, ".ipynb") == ["he"]


def test_a_file_that_cannot_be_read_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("def f(:\n")
    assert prose.check_words(tmp_path, []) == 1
    assert "src/a.py:1: cannot be read: invalid syntax" in capsys.readouterr().out


def test_the_rest_keeps_its_place() -> None:
    page = "# A\n\n```\nx\n```\nü `code` and he\n"
    text = prose_text.prose(page, ".md")
    assert len(text) == len(page)
    assert text.index("he") == page.index("he", 6)
    finding = list(prose.glossary_findings("docs/a.md", page, text, GLOSSARY))
    assert finding == ["docs/a.md:6: he -> the attacker; they, their, them"]


def test_columns_count_bytes_and_letters() -> None:
    source = 'x = "σ² ≥ 0", "what he knows"  # ü, his\n'
    assert found(source, ".py") == ["he", "his"]


@pytest.mark.parametrize(
    "text",
    [
        "The linear trap sends each row.",
        "Trap weights select examples.",
        "A guess without the update matches it.",
        "Digits look so alike.",
        "The risk corridor is paper C's term.",
        "A linear combination of the rows.",
        "He et al. 2016 name it.",
        "Each line of `records.jsonl` is a record with its verdict.",
        "exactly floor(rate * n) of n",
    ],
)
def test_an_allowed_context_is_left(text: str) -> None:
    assert found(f"{text}\n", ".md") == []


def test_an_exception_covers_its_word_only() -> None:
    assert found("The linear trap is a trap that he plants.\n", ".md") == ["trap", "he", "plants"]


def test_an_exception_needs_a_reason_and_a_rule(tmp_path: Path) -> None:
    assert all(exception.reason for exception in GLOSSARY.exceptions)
    text = prose.GLOSSARY.read_text(encoding="utf-8")
    path = tmp_path / "glossary.toml"
    path.write_text(text + '\n[[allow]]\nwords = ["nothing"]\ncontext = "x"\nreason = "y"\n')
    with pytest.raises(ValueError, match=r"without a rule: \['nothing'\]"):
        prose.read_glossary(path)


def test_spelling_is_american_and_code_is_left() -> None:
    page = "The colour of teh center, in `colour`.\n"
    found = prose.spelling_findings({"docs/a.md": prose_text.prose(page, ".md")}, ())
    assert found == ["docs/a.md:1: colour -> color", "docs/a.md:1: teh -> the"]
    assert prose.spelling_findings({"a.md": "The colour."}, ("colour",)) == []


def test_the_command_names_places_and_fails(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "a.md"
    page.write_text("# Title\n\nHe is told.\n")
    assert prose.check_words(tmp_path, []) == 2
    assert prose.check_words(tmp_path, [tmp_path / "docs"]) == 2
    page.write_text("# Title\n\nThey know it.\n")
    assert prose.check_words(tmp_path, []) == 0
    (tmp_path / "docs" / "b.md").write_text("he\n")
    assert prose.check_words(tmp_path, [page]) == 0
    run = subprocess.run(
        [sys.executable, TOOLS / "prose.py", "--only", tmp_path / "absent"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert "no such file or folder" in run.stderr


# Counted by hand, with a dictionary.
SYLLABLES = {
    "the": 1, "cat": 1, "example": 3, "gradient": 3, "client": 2, "images": 3, "defense": 2,
    "variance": 3, "radius": 3, "any": 2, "noise": 1, "matches": 2, "matched": 1, "added": 2,
    "table": 2, "tables": 2, "batches": 2, "statement": 2, "theorem": 3, "reconstruction": 4,
    "linear": 3, "layer": 2, "unique": 2, "sequence": 2, "guarantee": 3, "mechanism": 4,
    "something": 2, "measure": 2, "prior": 2, "ratio": 3, "special": 2, "privacy": 3, "whole": 1,
    "rule": 1, "people": 2, "continuous": 4, "create": 2, "being": 2, "coefficient": 4, "axes": 2,
}  # fmt: skip


def test_syllables_of_words_counted_by_hand() -> None:
    wrong = {
        w: readability.syllables(w) for w, n in SYLLABLES.items() if readability.syllables(w) != n
    }
    assert len(wrong) <= 2, wrong
    difference = statistics.mean(readability.syllables(w) - n for w, n in SYLLABLES.items())
    assert abs(difference) <= 0.05
    assert readability.syllables("3.5") == readability.syllables("σ²") == 1
    assert readability.syllables("noise-free") == 2


def test_reading_ease_by_hand() -> None:
    # Flesch's formula at 6 words, 1 sentence, 6 syllables: 206.835 - 6.09 - 84.6.
    assert readability.measure("The cat sat on the mat.\n").ease == pytest.approx(116.145)
    # 11 words in 2 sentences, 18 syllables: noise 1, covers 2, each 1, image 2; ...
    page = readability.measure("Noise covers each image. The server\nsees only a noisy gradient.\n")
    assert [(s.words, s.syllables) for s in page.sentences] == [(4, 6), (7, 12)]
    assert page.ease == pytest.approx(206.835 - 1.015 * 5.5 - 84.6 * 18 / 11)
    assert page.words == 11


def test_reading_ease_is_that_of_textstat() -> None:
    # textstat 0.7.13 with the CMU dictionary, on the beginning of its own example.
    text = (
        "Playing games has always been thought to be important to the development of well-balanced "
        "and creative children; however, what part, if any, they should play in the lives of "
        "adults has never been researched that deeply. I believe that playing games is every bit "
        "as important for adults as for children. Not only is taking time out to play games with "
        "our children and other adults valuable to building interpersonal relationships but is "
        "also a wonderful way to release built up tension."
    )
    assert readability.measure(text).ease == pytest.approx(44.96971544715447)


def test_sentences_end_with_items_and_skip_what_is_none() -> None:
    page = """# A heading of five words

One two three (e.g. four). Five `a long code span with many words` six
seven [eight nine](https://example.org/a?b=c d).

- item one
- item two
  goes on

| a table | has no sentences. None |
|---|---|

```
code has none. None at all.
```

![a picture](of.png)
1. last 3.5 dB, see e.g. Sec. 3
"""
    found = readability.measure(page).sentences
    assert [(s.line, s.words) for s in found] == [(3, 5), (3, 6), (6, 2), (7, 4), (18, 7)]


def test_a_sentence_has_at_most_40_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "README.md"
    page.write_text(" ".join(["word"] * 40) + ".\n")
    assert prose.check_readability(tmp_path, []) == 0
    page.write_text("Short.\nA " + " ".join(["word"] * 40) + ".\n")
    assert prose.check_readability(tmp_path, []) == 1
    assert "README.md:1: 41 words, at most 40: A word" in capsys.readouterr().out


def test_the_median_page_must_read_easily(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c", "decisions/d"):
        path = tmp_path / f"docs/{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("Differential confidentiality necessitates considerable perturbation.\n")
    assert prose.check_readability(tmp_path, []) == 1
    assert "median of 3 pages under docs: -" in capsys.readouterr().out
    for name in ("a", "b"):
        (tmp_path / f"docs/{name}.md").write_text("Noise hides the data.\n")
    assert prose.check_readability(tmp_path, []) == 0


def test_a_how_to_is_short_and_has_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs/how_to/a.md"
    page.parent.mkdir(parents=True)
    head = "![the report](a.png)\n\n```\n" + "code " * 800 + "\n```\n\n"
    page.write_text(head + "One two.\n" * 399)  # 798 and the two words of the picture
    assert prose.check_readability(tmp_path, []) == 0
    page.write_text("Three.\n\n" + head + "One two.\n" * 399)
    assert prose.check_readability(tmp_path, []) == 1
    assert "docs/how_to/a.md: 801 words, at most 800" in capsys.readouterr().out
    page.write_text("No picture.\n")
    assert prose.check_readability(tmp_path, []) == 1
    assert "docs/how_to/a.md: a how-to without a picture" in capsys.readouterr().out


def test_a_decision_is_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "docs/decisions/0001-a.md"
    page.parent.mkdir(parents=True)
    page.write_text("One two.\n" * 75)
    assert prose.check_readability(tmp_path, []) == 0
    page.write_text("One two.\n" * 76)
    assert prose.check_readability(tmp_path, []) == 1
    assert "152 words, at most 150 in a decision" in capsys.readouterr().out
