"""Stored results: they become pages and back, and a script that runs again keeps what is said."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = r"""# Title

It holds.

## A `b`

How.

| x | y\|z |
|---|--:|
| 1 | 2 |

### C

End.
"""


@pytest.fixture(scope="module")
def stored():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        yield importlib.import_module("stored")
    finally:
        sys.path.remove(str(ROOT / "tools"))


def test_a_page_is_written_as_it_was_read(stored):
    page = stored.parse(TEXT)
    assert stored.markdown(page) == TEXT
    assert json.loads(stored.dumps(page)) == page
    assert '["1", "2"]' in stored.dumps(page)
    assert stored.section(page, "a-b").startswith("How.\n\n| x |")
    with pytest.raises(ValueError, match="no section"):
        stored.section(page, "gone")


def test_a_script_replaces_what_it_measured_and_keeps_what_is_said(stored, tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    stored.keep("new", TEXT)
    page = stored.read("new")
    page["sections"][1]["says"] = ["It is more."]
    (tmp_path / "new.json").write_text(stored.dumps(page), "utf-8")
    stored.keep("new", "## A `b`\n\n| x |\n|---|\n| 3 |\n\n## D\n\nMore.\n")
    page = stored.read("new")
    assert page["title"] == "Title"
    assert [one.get("heading") for one in page["sections"]] == [None, "A `b`", "C", "D"]
    assert stored.section(page, "a-b") == "| x |\n|---|\n| 3 |\n\nIt is more."
    assert "It is more." in list(stored.texts(page))


def test_every_stored_page_is_whole(stored):
    paths = sorted(stored.FOLDER.glob("*.json"))
    assert len(paths) > 15
    for path in paths:
        page = stored.read(path.stem)
        assert path.read_text("utf-8") == stored.dumps(page), (
            f"{path.name}: write it by stored.keep"
        )
        text = stored.markdown(page)
        assert stored.markdown(stored.parse(text)) == text, f"{path.name} is another page when read"
        for section in page["sections"]:
            for table in (block for block in section["body"] if not isinstance(block, str)):
                widths = {len(row) for row in (table["columns"], table["align"], *table["rows"])}
                assert len(widths) == 1, (path.name, section.get("heading"))


def test_words_are_counted_by_the_part_of_the_navigation(stored, tmp_path):
    words = importlib.import_module("words")
    navigation = "      - quickstart.md\n      - a.md\n  - Deep:\n      - B:\n          - b/*\n"
    parts = words.kinds(f"x: 1\nnav:\n  - Start:\n{navigation}")
    assert parts == {"quickstart.md": "How-to", "a.md": "Start", "b/*": "Deep"}
    (tmp_path / "b").mkdir()
    (tmp_path / "a.md").write_text("one two\n")
    (tmp_path / "b" / "c.md").write_text("| three |\n")
    (tmp_path / "results").mkdir()
    page = {"title": "T", "sections": [{"body": ["how it was"], "says": ["what it says"]}]}
    (tmp_path / "results" / "r.json").write_text(json.dumps(page))
    assert words.written(tmp_path, parts) == {"Start": 2, "Deep": 3, "Results": 3}
