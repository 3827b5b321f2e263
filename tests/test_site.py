"""The documentation's site: it builds strictly, has a page for everything, and needs no network."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe

from leakbound import registry
from leakbound.attacks import Attack
from leakbound.audit import parse
from leakbound.defenses import Defense, GaussianNoise

ROOT = Path(__file__).parent.parent
HOOKS = ROOT / "docs" / "hooks"
SECONDS = 600
NEEDS = ("mkdocs", "material", "mkdocstrings")
OF_COLORS = ["color-contrast", "link-in-text-block"]
ENTRIES = [entry for kind in ("attack", "defense") for entry in registry.entries(kind).values()]


@pytest.fixture(scope="module")
def hooks():
    """The modules that make the pages, imported as mkdocs imports them."""
    before = sys.path.copy()
    sys.path.insert(0, str(HOOKS))
    try:
        names = ("catalogue", "docstring_parts", "notebook_page", "reference", "repository_text")
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path[:] = before


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; one build for all processes of a test run."""
    from filelock import FileLock

    for name in NEEDS:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed (extra docs)")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    folder = shared / "documentation"
    with FileLock(shared / "documentation.lock"):
        if not (folder / "built").exists():
            folder.mkdir(exist_ok=True)
            _build(folder / "site")
            (folder / "built").touch()
    return folder / "site"


def _build(folder):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]


def test_everything_registered_has_a_page(site):
    for entry in ENTRIES:
        page = site / f"{entry.kind}s" / f"{entry.name}.html"
        assert entry.name in page.read_text("utf-8")
        assert f'href="{entry.name}.html"' in (page.parent / "index.html").read_text("utf-8")


@pytest.mark.browser
def test_axe_finds_no_violation(site, browser):
    """WCAG 2.1 A and AA and axe-core's best practices."""
    # Colors are the theme's: two pages with tables, code and pictures have all of them. Nothing
    # else depends on the scheme.
    structure = {"rules": {name: {"enabled": False} for name in OF_COLORS}}
    colors = {"runOnly": OF_COLORS}
    asked = [
        ("index.html", "light", {}),
        ("index.html", "dark", colors),
        ("how_to/calibrate.html", "light", structure),
        ("how_to/calibrate.html", "dark", colors),
        ("gallery.html", "light", structure),
        ("risk.html", "light", structure),
    ]
    for name, scheme, options in asked:
        page = browser.new_context(color_scheme=scheme).new_page()
        page.goto((site / name).as_uri())
        options = {"resultTypes": ["violations"], **options}
        found = Axe().run(page, options=options).response["violations"]
        shown = [(one["id"], one["nodes"][0]["html"][:200]) for one in found]
        assert shown == [], (name, scheme)
        page.context.close()


def test_no_page_fetches_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 100
    for page in pages:
        text = page.read_text("utf-8")
        tags = re.findall(r"<(?:script|link|img|iframe|source|object|embed)\b[^>]*>", text)
        assert tags
        for tag in tags:
            if 'rel="canonical"' in tag:
                continue
            assert not re.search(r"(?:src|href|data)=[\"']?(?:https?:)?//", tag), (page, tag)
        assert not re.search(r"@import|url\(\s*[\"']?(?:https?:)?//", text), page
    for sheet in site.rglob("*.css"):
        found = re.findall(
            r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^)]*", sheet.read_text("utf-8")
        )
        assert not found, sheet


def test_the_search_index_is_there_for_servers_and_folders(site):
    text = (site / "search" / "search_index.json").read_text("utf-8")
    places = {document["location"] for document in json.loads(text)["docs"]}
    assert {"index.html", "quickstart.html", "attacks/dlg.html"} <= places
    script = (site / "search" / "search_index.js").read_text("utf-8")
    assert script == f"var __index = {text}"


@pytest.mark.browser
def test_the_search_works_from_a_folder(site, browser):
    page = browser.new_page()
    errors, asked = [], []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / "how_to" / "lpips.html").as_uri())
    page.fill("input.md-search__input", "robbing the fe")
    page.press("input.md-search__input", "d")  # the search listens for keys
    first = page.locator(".md-search-result__link").first
    first.wait_for(timeout=1000 * SECONDS)
    assert "robbing_the_fed.html" in str(first.get_attribute("href"))
    page.close()
    assert not errors
    assert all(url.startswith(("file:", "data:", "about:", "blob:")) for url in asked)


def test_the_home_page_is_the_readme(site):
    home = (site / "index.html").read_text("utf-8")
    for heading in re.findall(r"^## (.+)$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE):
        assert heading in home
    assert 'href="concepts.html"' in home
    assert "docs/concepts.md" not in home
    assert 'href="changelog.html"' in home or "CHANGELOG" not in home


def test_there_are_six_tabs(site):
    bar = (site / "quickstart.html").read_text("utf-8").partition('class="md-tabs"')[2]
    names = re.findall(r'class="md-tabs__link"[^>]*>\s*([^<]*?)\s*<', bar.partition("</nav>")[0])
    assert names == ["Start", "How-to", "Concepts", "Results", "Reference", "Project"]


def test_every_notebook_is_a_page_with_its_outputs(site, hooks):
    notebooks = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
    assert len(notebooks) >= 4
    for path in notebooks:
        shown = (site / "notebooks" / f"{path.stem}.html").read_text("utf-8")
        text = hooks["notebook_page"].page(path.read_text("utf-8"), path.stem)
        assert '<div class="output">' in text
        assert '<div class="output">' in shown
        assert f"{path.stem}.ipynb" in shown
    assert 'href="notebooks/own_data.html"' in (site / "quickstart.html").read_text("utf-8")


def test_the_reference_shows_every_command_in_80_columns(site, hooks):
    from leakbound.cli.options import VERBS

    shown = (site / "reference" / "command_line.html").read_text("utf-8")
    text = hooks["reference"].pages()["reference/command_line.md"]
    assert all(f"## `leakbound {verb}`" in text for verb in VERBS)
    assert all(f"usage: leakbound {verb}" in shown for verb in VERBS)
    blocks = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 80


def test_nothing_of_the_machinery_is_shown(site):
    assert not (site / "hooks").exists()
    assert not list(site.rglob("*.md"))
    assert not list(site.rglob("*.ipynb"))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_page_says_how_to_run_it(entry, hooks, monkeypatch):
    from leakbound import cli

    catalogue = hooks["catalogue"]
    page, line, table = catalogue.page(entry), catalogue.command(entry), catalogue.plan(entry)
    assert line in page
    assert table in page
    seen = []
    monkeypatch.setattr(cli, "_run", lambda command, known: seen.append(command) or 0)
    with pytest.raises(SystemExit) as end:
        cli.main(shlex.split(line)[1:])
    assert end.value.code == 0
    plan = {"models": [{"name": "mlp"}], "attacks": [{"name": "mean_image"}]}
    assert parse({"defenses": [{"name": "none"}]} | plan | tomllib.loads(table)).experiments()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    made: dict[str, object] = {}
    exec(compile(code, entry.name, "exec"), made)
    assert isinstance(made[entry.kind], Attack | Defense)
    assert all(f"| `{setting.name}` |" in page for setting in entry.parameters)


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_command_of_a_page_applies(entry, hooks, capsys):
    from leakbound import cli

    catalogue = hooks["catalogue"]
    if entry.name in catalogue.LINKS:
        pytest.skip("a link of a chain, run by a plan")
    words = shlex.split(catalogue.command(entry))[1:]
    short = ("steps", "latent_steps", "weight_steps", "generations", "trial")
    names = [setting.name for setting in entry.parameters]
    fewer = "".join(f",{name}=3" for name in short if name in names)
    if entry.kind == "attack":
        words[words.index(entry.name)] += fewer
    else:
        words += ["--attack", "inverting_gradients,steps=3"]
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "--error-bound", "none", "--json"])
    assert (end.value.code, json.loads(capsys.readouterr().out)["status"]) == (0, "ok")


def test_a_new_defense_gets_a_page_by_itself(hooks, monkeypatch):
    catalogue = hooks["catalogue"]
    new = registry.Entry("defense", "quieter", GaussianNoise)
    known = {**registry.entries("defense"), "quieter": new}
    monkeypatch.setattr(registry, "entries", lambda kind: known if kind == "defense" else {})
    pages = catalogue.pages("defense", {"written.md": "# Written\n\nOf `quieter` noise."})
    page = pages["defenses/quieter.md"]
    assert "**known noise distribution**{ .guarantee .law }" in page
    assert "leakbound attack --defense quieter,noise_std=" in page
    assert "- [Written](../written.md)" in page
    assert "[`quieter`](quieter.md) | **known noise distribution**" in pages["defenses/index.md"]


def test_guarantees_are_those_of_the_code(hooks):
    catalogue = hooks["catalogue"]
    for entry in registry.entries("defense").values():
        made = entry.build()
        words = catalogue.PROMISES[made.guarantee][1]
        page = catalogue.page(entry)
        assert f"**{words}**" in page
        assert (catalogue.PRIVATE in page) == bool(made.data_dependent_law), entry.name
    malicious = {e.name for e in ENTRIES if "--malicious-server" in catalogue.command(e)}
    assert malicious == {
        "codebook",
        "correlated_trap",
        "fishing",
        "linear_trap",
        "loki",
        "robbing_the_fed",
        "trap_weights",
    }


def test_docstrings_are_taken_apart(hooks):
    found = hooks["docstring_parts"].parts(
        "Adds noise.\n\nMore, with a_b * c:\n\n    x = y\n\nArgs:\n    one, two: of\n"
        "        both.\n    three: last: of all.\n\nGuarantees: a law.\nMore of it.\n\n"
        "Body again.\n\nExample:\n"
        "    >>> 1\n    1"
    )
    assert found.summary == "Adds noise."
    assert found.named("Args") == {"one": "of both.", "two": "of both.", "three": "last: of all."}
    assert found.sections["Guarantees"] == "a law.\nMore of it."
    assert found.sections["Example"] == ">>> 1\n1"
    shown = hooks["docstring_parts"].markdown(found.body, lambda name: name)
    assert shown == "More, with a\\_b \\* c:\n\n```text\nx = y\n```\n\nBody again."


def test_the_navigation_leaves_no_page_out(hooks):
    pytest.importorskip("mkdocs")
    hook = importlib.import_module("hook")
    nav = ["index.md", {"Results": ["gone.md", {"Evidence": "evidence.md"}, "some/*"]}]
    there = {"index.md", "some/b.md", "some/a.md", "other/c.md"}
    filled = [
        "index.md",
        {"Results": ["gone.md", {"Evidence": "evidence.md"}, "some/a.md", "some/b.md"]},
    ]
    assert hook._filled(nav, there, hook._named(nav)) == filled


def test_links_and_lists_become_the_sites(hooks):
    text = hooks["repository_text"]
    assert text.resolved("docs/how_to/a.md", "../../examples/x") == "examples/x"
    assert text.relative("how_to/a.html", "b.html") == "../b.html"
    page = (
        '[`a`](b.md#c "t") ![i](d.png) <https://e> [f](https://g) `[h](i.md)`\n```\n[j](k.md)\n```'
    )
    assert text.targets(page) == ["b.md", "d.png"]
    assert text.relinked(page, lambda t: f"../{t}").startswith(
        '[`a`](../b.md#c "t") ![i](../d.png)'
    )
    steps = "1. Do:\n\n   ```sh\n   - x\n     y\n   ```\n\n   - in\n     it\n2. Then\n\nText"
    found = text.lists(steps)
    assert found.startswith("1.  Do:\n\n    ```sh\n    - x\n      y\n    ```\n\n")
    assert found.endswith("\n\n    -   in\n        it\n2.  Then\n\nText")


def test_a_link_alone_becomes_its_stored_table(hooks):
    pytest.importorskip("mkdocs")
    hook = importlib.import_module("hook")
    line = "[The rows](../results/errata.json#paper-d-priprune)"
    shown = hook._with_tables(f"Text, {line}.\n\n{line}\n", "docs/reference/a.md")
    assert shown.startswith(f"Text, {line}.\n\nThe formulas in our copy are damaged.")
    assert "\n| D1 (4.1) |" in shown
    shown = hook._with_tables("[Costs](results/engine_costs.json#avx2)", "docs/a.md")
    assert "[all rows](results/engine_choice.json)" in shown  # links fit the page that shows them
    with pytest.raises(ValueError, match="no section"):
        hook._with_tables("[Rows](results/errata.json#gone)", "docs/a.md")


def test_a_name_in_the_code_gets_its_line(hooks):
    text = hooks["repository_text"]
    source = "import os\n\n\nclass A:\n    def g(self): ...\n"
    assert (
        text.with_lines("[`A.g`](../x.py#A.g) | b", lambda _: source)
        == "[`A.g`](../x.py), line 5 | b"
    )
    with pytest.raises(ValueError, match="does not define"):
        text.with_lines("[`h`](x.py#h)", lambda _: source)
