"""The pages of attacks and defenses, made from the registry and the docstrings.

Whatever is registered gets a page: a new attack or defense needs nothing here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from docstring_parts import Parts, inline, markdown, parts

from leakbound import registry
from leakbound.cli.describe import LINKS, command, is_malicious, made, meanings, required, written
from leakbound.core import Guarantee, Unit
from leakbound.registry import Entry

KINDS = ("attack", "defense")
PROMISES: Mapping[Guarantee, tuple[str, str, str]] = {
    Guarantee.DIFFERENTIAL_PRIVACY: (
        "dp",
        "differential privacy",
        "A bound on what any attacker learns about one example; an accountant gives (ε, δ).",
    ),
    Guarantee.KNOWN_NOISE: (
        "law",
        "known noise distribution",
        "The noise is known exactly, so error bounds can be computed. No differential privacy.",
    ),
    Guarantee.NONE: (
        "none",
        "none",
        "No guarantee: only attacks show how well it protects.",
    ),
}
UNITS = {Unit.EXAMPLE: "examples", Unit.CLIENT: "clients", Unit.COHORT: "cohorts"}
PRIVATE = (
    "Its noise or mask is chosen from the private batch and [leaks it]"
    "(../sharp_edges/private_noise.md)."
)


def folder(kind: str) -> str:
    """Where the pages of a kind lie in the site."""
    return f"{kind}s"


def pages(kind: str, texts: Mapping[str, str]) -> dict[str, str]:
    """All pages of a kind by path: one for each registered name, and `index.md`.

    Args:
        kind: "attack" or "defense".
        texts: the written pages, path to Markdown; a page names those that speak of its subject.
    """
    found = {f"{folder(kind)}/index.md": _index(kind)}
    for name, entry in registry.entries(kind).items():
        found[f"{folder(kind)}/{name}.md"] = page(entry, texts)
    return found


def page(entry: Entry, texts: Mapping[str, str] | None = None) -> str:
    """The page of one attack or defense."""
    said = parts(inspect.getdoc(entry.build) or "")
    blocks = [
        f"# `{entry.name}`",
        f"{inline(said.summary, link)}\n{{ .summary }}",
        *_facts(entry, said),
        markdown(said.body, link),
        *_section("Assumptions", said.sections.get("Assumptions", "")),
        *_section("Units", said.sections.get("Units", "")),
        *_section("Cost", said.sections.get("Cost", "")),
        *_settings(entry),
        *_refusals(said),
        *_run(entry),
        *_example(said),
        *_section("Source", said.sections.get("Source", "")),
        *_read_on(entry, texts or {}),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def plan(entry: Entry) -> str:
    """The table of a plan that names it."""
    if entry.name in LINKS:
        rows = "".join(f'  {{ name = "{name}" }},\n' for name in LINKS[entry.name])
        return f"[[defenses]]\nlinks = [\n{rows}]"
    return f'[[{entry.kind}s]]\nname = "{entry.name}"'


def link(name: str) -> str:
    """A name in code; one that has a page leads to it, and so does a page of the docs."""
    written = re.fullmatch(r"docs/([\w/]+)\.md", name)
    if written:
        return f"[{written[1].replace('_', ' ')}](../{written[1]}.md)"
    place = _places().get(name)
    return f"[`{name}`](../{place})" if place else f"`{name}`"


@cache
def _places() -> Mapping[str, str]:
    """Names of things, as plans and as Python write them, to their pages."""
    found: dict[str, str] = {}
    for kind in KINDS:
        for name, entry in registry.entries(kind).items():
            place = f"{folder(kind)}/{name}.md"
            found |= {name: place, entry.build.__name__: place}
    return found


def _index(kind: str) -> str:
    rows = [f"| {kind} | what it is |", "|---|---|"]
    if kind == "defense":
        rows = ["| defense | guarantee | what it does |", "|---|---|---|"]
    for name, entry in registry.entries(kind).items():
        cells = [f"[`{name}`]({name}.md)", inline(entry.summary, link)]
        if kind == "defense":
            cells.insert(1, _badge(_guarantee(entry)))
        rows.append(f"| {' | '.join(cells)} |")
    title, text = _HEADS[kind]
    return f"# {title}\n\n{text}\n\n" + "\n".join(rows) + "\n"


_HEADS = {
    "attack": (
        "All attacks",
        "Every registered attack. Which one to use: [the attacks](../attacks.md). What they "
        "reconstruct: [attack quality](../results/attack_quality.md). No attack sees the truth.",
    ),
    "defense": (
        "All defenses",
        "Every registered defense. What the guarantees mean: [concepts](../concepts.md). What a "
        "defense costs: [training under defenses](../train_under_defenses.md). A plan composes "
        "defenses by `links`.",
    ),
}


def _facts(entry: Entry, said: Parts) -> Iterator[str]:
    promise = inline(" ".join(said.sections.get("Guarantees", "").split()), link)
    if entry.kind == "attack":
        who = "malicious: it sends a changed model" if is_malicious(entry) else "honest"
        yield _table([("server", who), ("its claim", promise)])
        return
    built = made(entry)
    guarantee = _guarantee(entry)
    explained = PROMISES[guarantee][2] if guarantee else "It depends on the settings."
    if getattr(built, "data_dependent_law", False):
        explained += f" {PRIVATE}"
    accepts: frozenset[Unit] = getattr(built, "accepts", frozenset())
    rows = [
        ("guarantee", f"{_badge(guarantee)} {explained}"),
        ("in detail", promise),
        ("rows it takes", ", ".join(UNITS[unit] for unit in sorted(accepts))),
        ("acts on", _where(built)),
    ]
    yield _table(rows)


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return "| | |\n|---|---|\n" + "\n".join(f"| {k} | {v} |" for k, v in rows if v)


def _where(made: Any) -> str:
    if made is None:
        return ""
    acts = ["the local training"] * made.changes_training + ["the update"]
    reads = ", and reads the client's batch" if made.uses_context else ""
    return " and ".join(acts) + reads


def _badge(guarantee: Guarantee | None) -> str:
    short, words, _ = PROMISES[guarantee] if guarantee else ("none", "by its settings", "")
    return f"**{words}**{{ .guarantee .{short} }}"


def _guarantee(entry: Entry) -> Guarantee | None:
    built = made(entry)
    return None if built is None else built.guarantee


def _settings(entry: Entry) -> Iterator[str]:
    if not entry.parameters:
        return
    known = meanings(entry)
    rows = ["## Settings", "", "| setting | type | default | meaning |", "|---|---|---|---|"]
    needed = required(entry)
    for setting in entry.parameters:
        default = "required" if setting.name in needed else f"`{written(setting.default)}`"
        meaning = inline(known.get(setting.name, ""), link)
        rows.append(f"| `{setting.name}` | `{setting.kind}` | {default} | {meaning} |")
    yield "\n".join(rows)


def _refusals(said: Parts) -> Iterator[str]:
    raises = said.named("Raises")
    if raises:
        text = "".join(f"- `{name}`: {inline(why, link)}\n" for name, why in raises.items())
        yield f"## Where it does not apply\n\n{text}"


def _run(entry: Entry) -> Iterator[str]:
    yield f"## Run it\n\n```sh\n{command(entry)}\n```"
    yield f"In a [plan](../plans.md):\n\n```toml\n{plan(entry)}\n```"
    call = f"{entry.build.__name__}({', '.join(f'{n}=...' for n in sorted(required(entry)))})"
    module = f"leakbound.{folder(entry.kind)}"
    if getattr(registry.PACKAGES[entry.kind], entry.build.__name__, None) is not entry.build:
        module = entry.build.__module__
    code = f"from {module} import {entry.build.__name__}\n\n{entry.kind} = {call}"
    yield f"In Python:\n\n```python\n{code}\n```"


def _example(said: Parts) -> Iterator[str]:
    text = said.sections.get("Example", "")
    if text:
        yield f"## Example\n\n```pycon\n{text}\n```"


def _section(title: str, text: str) -> Iterator[str]:
    if text:
        yield f"## {title}\n\n{markdown(text[0].upper() + text[1:], link)}"


def _read_on(entry: Entry, texts: Mapping[str, str]) -> Iterator[str]:
    word: Callable[[str], bool] = re.compile(rf"\b{entry.name}\b").search  # type: ignore[assignment]
    rows = [
        f"- [{title[1].replace('`', '')}](../{path})"
        for path, text in sorted(texts.items())
        if word(text) and (title := re.search(r"^# (.+)$", text, re.MULTILINE))
    ]
    if rows:
        yield "## Pages about it\n\n" + "\n".join(rows)
