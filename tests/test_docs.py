"""Code in the documentation runs, plans in it parse, links in it lead somewhere."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from leakbound.audit import parse

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def blocks(language):
    for page in PAGES:
        for number, (indent, name, code) in enumerate(FENCE.findall(page.read_text("utf-8"))):
            if name == language:
                text = re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
                yield pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")


@pytest.mark.parametrize("code", list(blocks("python")))
def test_python_runs(code, capsys):
    # dataclasses look their module up by name, so the block needs a module of its own
    import sys
    import types

    module = types.ModuleType("documentation")
    sys.modules["documentation"] = module
    try:
        exec(compile(code, "documentation", "exec"), module.__dict__)
    finally:
        del sys.modules["documentation"]


@pytest.mark.parametrize("code", list(blocks("toml")))
def test_plans_parse(code):
    assert parse(tomllib.loads(code)).cells()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_readme_example_reconstructs(capsys):
    code = next(iter(blocks("python"))).values[0]
    exec(compile(code, "README", "exec"), {"__name__": "readme"})
    (psnr,) = json.loads(capsys.readouterr().out)
    assert psnr > 25


def test_no_page_names_a_private_path():
    for page in PAGES:
        assert not re.search(r"/(home|root|work|tmp)/", page.read_text("utf-8")), page
