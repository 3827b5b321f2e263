"""The errata: every row has its own id and a test that exists, or says why it has none."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import stored  # noqa: E402

TABLES = stored.markdown(stored.read("errata"))
PAGE = f"{TABLES}\n{(ROOT / 'docs' / 'errata.md').read_text('utf-8')}"
"""The stored rows, and what is written by hand."""
ROW = re.compile(r"^\| ([A-Z]\d+)(?: \(([^)]*)\))? \|", re.MULTILINE)
NAMED = re.compile(r"`((?:reproductions/)?tests/[\w/]+\.py)(?:::(\w+))?`")
CITED = re.compile(r"[Ee]rrat(?:a|um) (\d\.\d+(?:(?:,| to| and) \d\.\d+)*)")


def rows(page=PAGE):
    """Cells of each row of the tables of errata; an escaped bar is no border."""
    lines = [line for line in page.splitlines() if ROW.match(line)]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@cache
def functions(path):
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def faults(page):
    """What is wrong with a page, in words."""
    found, seen = [], {}
    for cells in rows(page):
        name = cells[0].split()[0]
        if len(cells) != 5 or not all(cells):
            found.append(f"{name} has {len(cells)} cells, or an empty one")
            continue
        if name in seen:
            found.append(f"{name} is there twice")
        seen[name] = cells
        if not NAMED.search(cells[4]) and not re.fullmatch(r"no test: .+", cells[4]):
            found.append(f"{name} names no test and no reason")
    for letter in {name[0] for name in seen}:
        numbers = [int(name[1:]) for name in seen if name[0] == letter]
        if numbers != list(range(1, len(numbers) + 1)):
            found.append(f"the rows of {letter} are not in order")
    for path, function in NAMED.findall(page):
        if not (ROOT / path).is_file():
            found.append(f"{path} does not exist")
        elif function not in functions(path):
            found.append(f"{path} has no function '{function}'")
    return found


def test_every_row_is_its_own_and_its_tests_exist():
    assert faults(PAGE) == []
    letters = [cells[0][0] for cells in rows()]
    assert sorted(set(letters)) == list("ABCDOV")
    assert len(letters) > 80


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("| A2 (0.2) |", "| A1 (0.2) |", "A1 is there twice"),
        ("| B4 (2.4) |", "| B40 (2.4) |", "rows of B are not in order"),
        ("::test_weyl_needs", "::test_vile_needs", "no function 'test_vile_needs"),
        ("tests/test_edgeworth.py", "tests/test_edge.py", "does not exist"),
        ("no test: notation |", "|", "an empty one"),
        ("no test: notation |", "the same |", "names no test and no reason"),
    ],
)
def test_a_fault_is_found(old, new, message):
    assert old in PAGE
    assert any(message in fault for fault in faults(PAGE.replace(old, new, 1)))


def cited():
    """Numbers of errata that code and tests speak of, with the ends of "4.1 to 4.4"."""
    for folder in ("src", "tests", "docs"):
        for path in sorted((ROOT / folder).rglob("*.*")):
            if path.suffix not in (".py", ".md", ".json"):
                continue
            for group in CITED.findall(path.read_text("utf-8")):
                yield from re.findall(r"\d\.\d+", group)


def test_every_number_that_code_speaks_of_is_on_the_page():
    listed = {number for cells in rows() for number in re.findall(r"\d\.\d+", cells[0])}
    listed |= set(re.findall(r"\((\d\.\d+), appendix", PAGE))  # checked and right
    assert listed > set(cited())
    sheets = {"0": 17, "2": 15, "3": 14, "4": 10}
    assert listed == {f"{p}.{n}" for p, last in sheets.items() for n in range(1, last + 1)}


def test_every_section_that_code_names_is_there():
    headings = [line.lower().replace("\\", "") for line in PAGE.splitlines() if line[:1] == "#"]
    for path in sorted((ROOT / "src").rglob("*.py")):
        for name in re.findall(r'docs/errata\.md, "([^"]+)"', path.read_text("utf-8")):
            assert any(name.lower() in heading for heading in headings), (path.name, name)


def test_links_inside_the_page_lead_to_headings():
    slugs = {
        re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in PAGE.splitlines()
        if line[:1] == "#"
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= slugs
