"""What mkdocs runs while it builds the site.

Pages come from five places: the registry (attacks, defenses), the docstrings (the reference),
stored results (docs/results and docs/reproductions), notebooks, and files outside `docs/`, such as
README.md, which is the home page. Links in the files fit the repository; this hook changes them to
links of the site. A paragraph that is only a link to a section of stored results becomes its table.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import catalogue
import notebook_page
import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from repository_text import lists, relative, relinked, resolved, targets, with_lines

from leakbound_reproductions import overview

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import stored  # noqa: E402  of tools, which is no package

HOME = "index.md"
NAMES = {
    "README.md": HOME,
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/flower-hospital/README.md": "examples/flower-hospital.md",
    "examples/flower-privacy-check/README.md": "examples/flower-privacy-check.md",
    "examples/quickstart/README.md": "examples/quickstart.md",
}
"""Pages from outside `docs/`, and where the site has them."""
CLAIMS = "docs/reproductions"
"""The folder of the papers' stored claims, which together make one page."""
TABLE = re.compile(r"^\[[^\]]+\]\((?:\.\./)*results/([\w-]+)\.json#([\w-]+)\)$", re.MULTILINE)
LARGEST = 2**20
SEARCH = 'data-md-component="search" role="dialog"'
_sources: dict[str, str] = {}  # page of the site -> file of the repository
_places: dict[str, str] = {}  # stored results -> the page that shows them


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the pages that are generated, and fill the navigation's `folder/*` with them."""
    _sources.clear()
    docs = Path(config.docs_dir)
    written = {p.relative_to(docs).as_posix(): p.read_text("utf-8") for p in _pages(docs)}
    results = {"reproductions.md": CLAIMS}
    for path in sorted((docs / "results").glob("*.json")):
        # a written page of the same name shows the tables itself
        page = f"{path.stem}.md" if f"{path.stem}.md" in written else f"results/{path.name}"
        results[page.replace(".json", ".md")] = f"docs/results/{path.name}"
    shown = {page: _text(source) for page, source in results.items() if page not in written}
    made = {**_generated(written, shown), **shown}
    config.extra["made"] = made
    notebooks = {f"notebooks/{path.stem}.md": path for path in _notebooks(docs)}
    for page, path in notebooks.items():
        made[page] = notebook_page.page(path.read_text("utf-8"), path.stem)
    there = {*written, *made, *NAMES.values()}
    _places.clear()
    _places.update({source: page for page, source in results.items()})
    config.nav = _filled(config.nav, there, _named(config.nav))
    _sources.update(results)
    _sources.update({page: f"docs/{page}" for page in written})
    _sources.update({page: source for source, page in NAMES.items()})
    _sources.update({page: f"docs/notebooks/{path.name}" for page, path in notebooks.items()})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, those from outside, and whatever else they link to outside."""
    for path, text in config.extra.pop("made").items():
        files.append(File.generated(config, path, content=text))
    waiting = list(NAMES)
    for source in list(_sources.values()):
        waiting += _outside(source, _text(source))
    seen: set[str] = set()
    while waiting:
        source = waiting.pop()
        if source in seen or not _fit(ROOT / source):
            continue
        seen.add(source)
        place = NAMES.get(source, f"repository/{source}")
        _sources[place] = source
        if source.endswith(".md"):
            text = (ROOT / source).read_text("utf-8")
            files.append(File.generated(config, place, content=text))
            waiting += _outside(source, text)
        else:
            files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str | None:
    """Turn links and lists from the repository's view to the site's."""
    path = page.file.src_uri
    source = _sources.get(path)
    if source is None:
        return None
    places = {**_places, **{file: place for place, file in _sources.items()}}

    def place(target: str) -> str:
        return relative(path, _place(resolved(source, target), places))

    def read(target: str) -> str:
        return (ROOT / resolved(source, target)).read_text("utf-8")

    return lists(relinked(with_lines(_with_tables(markdown, source), read), place))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """For screen readers: name the search dialog; the empty corner of a table is no heading."""
    output = re.sub(r"<th( style=\"[^\"]*\")?></th>", r"<td\1></td>", output)
    return output.replace(SEARCH, f'{SEARCH} aria-label="Search"', 1)


def on_post_build(config: MkDocsConfig) -> None:
    """Keep the search index as a script too: a page opened from a folder may not fetch JSON."""
    index = Path(config.site_dir) / "search" / "search_index.json"
    if index.exists():
        text = index.read_text("utf-8")
        index.with_suffix(".js").write_text(f"var __index = {text}", "utf-8")


def _notebooks(docs: Path) -> list[Path]:
    return sorted((docs / "notebooks").glob("*.ipynb"))


def _notebook(source: str) -> bool:
    return source.endswith(".ipynb")


def _text(source: str) -> str:
    """A file of the repository as Markdown."""
    if source == CLAIMS:
        return overview.page(ROOT / CLAIMS, ROOT / "docs")
    if source.startswith("docs/results/"):
        return stored.markdown(stored.read(Path(source).stem))
    text = (ROOT / source).read_text("utf-8")
    return notebook_page.written(text) if _notebook(source) else _with_tables(text, source)


def _with_tables(text: str, source: str) -> str:
    """The text with stored tables in place of the links to them that are paragraphs."""

    def table(match: re.Match[str]) -> str:
        body = stored.section(stored.read(match[1]), match[2])
        file = f"docs/results/{match[1]}.json"
        return relinked(body, lambda target: relative(source, resolved(file, target)))

    return TABLE.sub(table, text)


def _pages(docs: Path) -> list[Path]:
    return [p for p in sorted(docs.rglob("*.md")) if "hooks" not in p.relative_to(docs).parts]


def _generated(written: dict[str, str], results: dict[str, str]) -> dict[str, str]:
    made = reference.pages()
    for kind in catalogue.KINDS:
        made |= catalogue.pages(kind, {**written, **results})
    titles = {path: _title(text) for path, text in {**written, **results}.items()}
    for folder, head in _HEADS.items():
        rows = [f"- [{t}]({p.partition('/')[2]})" for p, t in titles.items() if _in(p, folder)]
        made.setdefault(f"{folder}/index.md", f"# {head}\n\n{_LEADS[folder]}\n\n" + "\n".join(rows))
    return {path: text for path, text in made.items() if path not in written}


_HEADS = {"decisions": "Decisions", "sharp_edges": "Sharp edges", "results": "Results"}
_LEADS = {
    "decisions": "One page for each decision: decision, reason, consequence.",
    "results": "What was measured, by the scripts that the pages name.",
    "sharp_edges": "Cases in which a defense, a seed or a number protects less than it seems.",
}


def _in(path: str, folder: str) -> bool:
    return posixpath.dirname(path) == folder and path != f"{folder}/index.md"


def _title(text: str) -> str:
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    return found[1] if found else ""


def _named(nav: Any) -> set[str]:
    """Every path that the navigation names by itself."""
    if isinstance(nav, str):
        return {nav}
    items = nav.values() if isinstance(nav, dict) else nav or ()
    return {path for item in items for path in _named(item)}


def _filled(nav: Any, there: set[str], named: set[str]) -> Any:
    """The navigation with `folder/*` for all other pages of a folder.

    A page that it names and that is not there stays: mkdocs reports it.
    """
    if isinstance(nav, dict):
        return {title: _filled(item, there, named) for title, item in nav.items()}
    if not isinstance(nav, list):
        return nav
    shown: list[Any] = []
    for item in nav:
        if isinstance(item, str) and item.endswith("/*"):
            shown += [p for p in sorted(there - named) if posixpath.dirname(p) == item[:-2]]
        else:
            shown.append(_filled(item, there, named))
    return shown


def _outside(source: str, text: str) -> list[str]:
    """Files outside `docs/` that a page links to."""
    found = [_file(resolved(source, target)) for target in targets(text)]
    return [path for path in found if not path.startswith(("docs/", ".."))]


def _file(path: str) -> str:
    """What is shown for a folder: its README."""
    readme = posixpath.join(path, "README.md")
    return readme if (ROOT / readme).is_file() else path


def _fit(path: Path) -> bool:
    return path.is_file() and path.is_relative_to(ROOT) and path.stat().st_size <= LARGEST


def _place(path: str, places: dict[str, str]) -> str:
    """Where the site has a file of the repository; an unknown one is left for mkdocs to report."""
    file = _file(path)
    if file in places:
        return places[file]
    inside = file.removeprefix("docs/")
    return f"{inside}/index.md" if (ROOT / file).is_dir() else inside
