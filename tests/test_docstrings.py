"""What the page of an attack or defense is made of: every registered one says all of it.

The site takes a page's settings, source, guarantees and example from the docstring. The code that
finds them is the site's own (docs/hooks), so that what passes here is what readers see.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import leakbound
from leakbound import registry
from leakbound.attacks import Attack
from leakbound.defenses import Defense
from leakbound.registry import Entry

HOOKS = Path(__file__).parent.parent / "docs" / "hooks"
PACKAGE = Path(leakbound.__file__).parent
KINDS = ("attack", "defense")
ENTRIES = [
    entry
    for kind in KINDS
    for entry in registry.entries(kind).values()
    if entry.build.__module__.startswith("leakbound.")
]
ELSEWHERE = re.compile(r"as (?:for|in) `(\w+)`")
PRIVATE = re.compile(r"\bsheet\b(?! of style)|\bbeyond\.md\b", re.IGNORECASE)


@pytest.fixture(scope="module")
def catalogue():
    """The module that makes the pages, imported as mkdocs imports it."""
    before = sys.path.copy()
    sys.path.insert(0, str(HOOKS))
    try:
        yield importlib.import_module("catalogue")
    finally:
        sys.path[:] = before


def lacking(entry, catalogue):
    """What a reader of the entry's page would look for in vain."""
    said = catalogue.parts(inspect.getdoc(entry.build) or "").sections
    known = catalogue.meanings(entry)
    names = [p.name for p in entry.parameters]
    found = [f"a meaning of {name}" for name in names if not _means(name, known.get(name, ""))]
    headings = ["Source", "Example"] + ["Guarantees"] * (entry.kind == "defense")
    found += [heading for heading in headings if not said.get(heading, "").strip()]
    if "Example" not in found and ">>> " not in said["Example"]:
        found.append("an example that runs")
    return found


def _means(name, text):
    """Whether the text says what the setting means, or names a page that does."""
    other = ELSEWHERE.match(text)
    return bool(text.strip()) and (other is None or _told(other[1], name))


def _told(name, setting):
    """Whether something of that name has a page, and that setting."""
    return any(
        name in (entry.name, entry.build.__name__) and setting in {p.name for p in entry.parameters}
        for entry in ENTRIES
    )


def test_no_page_lacks_anything(catalogue):
    found = {entry.name: lacking(entry, catalogue) for entry in ENTRIES}
    assert {name: parts for name, parts in found.items() if parts} == {}


def test_all_are_looked_at():
    names = {entry.name for entry in ENTRIES}
    assert {"dlg", "gradient_matching", "linear_trap", "mean", "dp_sgd", "optimal_noise"} <= names
    assert len(names) > 50


WHOLE = """Do nothing.

Args:
    depth: how much of it.

Guarantees: none.

Source: this test.

Example:
    >>> 1 + 1
    2
"""


def planted(kind, text):
    """An entry that is not registered, with this docstring."""

    @dataclass(frozen=True, repr=False)
    class Planted(Attack if kind == "attack" else Defense):
        depth: int = 1

    Planted.__doc__ = text
    return Entry(kind, "planted", Planted)


TAKEN_AWAY = (
    ("Do nothing.", "Do little.", []),
    ("depth: how much of it.", "", ["a meaning of depth"]),
    ("depth: how", "width: how", ["a meaning of depth"]),
    ("how much of it", "as for `GradientMatching`", ["a meaning of depth"]),
    ("how much of it", "as for `SparseInversion`", ["a meaning of depth"]),
    ("Source: this test.", "", ["Source"]),
    ("Source: this test.", "Source:", ["Source"]),
    (">>> 1 + 1", "one and one", ["an example that runs"]),
    ("Example:", "For example", ["Example"]),
)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_taken_away_is_missed(kind, catalogue):
    for part, text, what in TAKEN_AWAY:
        assert part in WHOLE
        assert lacking(planted(kind, WHOLE.replace(part, text)), catalogue) == what, part


def test_a_defense_says_what_it_guarantees(catalogue):
    text = WHOLE.replace("Guarantees: none.", "")
    assert lacking(planted("defense", text), catalogue) == ["Guarantees"]
    assert lacking(planted("attack", text), catalogue) == []


def test_sources_are_ones_that_a_reader_can_look_up():
    for path in PACKAGE.rglob("*.py"):
        assert not PRIVATE.search(path.read_text(encoding="utf-8")), path
