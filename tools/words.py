"""Count the words of docs that people write, by kind, and compare them with pyproject.toml.

A page is of the kind that its part of the navigation in mkdocs.yml has. What scripts write does not
count: the tables and methods in docs/results, of which only `says` is a person's, and all that the
site's build makes. A reader has to find what to do, so guides and tutorials have a least share.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUIDES = "How-to"
TUTORIALS = ("quickstart.md", "install.md")  # the part "Start" also holds other pages


def kinds(settings: str) -> dict[str, str]:
    """Every page that the navigation in mkdocs.yml names, or `folder/*`, and its part's title."""
    found: dict[str, str] = {}
    part = ""
    for line in settings.partition("\nnav:\n")[2].splitlines():
        title = re.fullmatch(r"  - (.+):", line)
        page = re.fullmatch(r" +- (\S+\.md|\S+/\*)", line)
        if title:
            part = title[1]
        elif page:
            found[page[1]] = GUIDES if page[1] in TUTORIALS else part
    return found


def written(docs: Path, parts: dict[str, str]) -> Counter[str]:
    """The words of each kind."""
    found = Counter[str]()
    for path in sorted(docs.rglob("*.md")):
        name = path.relative_to(docs).as_posix()
        folder = f"{Path(name).parent.as_posix()}/*"
        kind = parts.get(name) or parts.get(folder, "Project")
        found[kind] += len(path.read_text("utf-8").split())
    for path in sorted(docs.glob("notebooks/*.ipynb")):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            if cell["cell_type"] == "markdown":
                found[GUIDES] += len("".join(cell["source"]).split())
    for path in sorted(docs.glob("results/*.json")):
        sections = json.loads(path.read_text("utf-8"))["sections"]
        texts = [text for one in sections for text in one.get("says", ())]
        found["Results"] += sum(len(text.split()) for text in texts)
    return found


def main() -> int:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    limits = settings["tool"]["leakbound"]
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    words = written(ROOT / "docs", kinds(navigation))
    total = words.total()
    for kind, count in words.most_common():
        print(f"{kind:12}{count:8,}{count / total:8.0%}")
    print(f"{'all':12}{total:8,}")
    faults = []
    if total > limits["most_words"]:
        faults.append(f"more than {limits['most_words']:,} words (most_words)")
    if words[GUIDES] < limits["least_how_to"] * total:
        faults.append(f"guides are less than {limits['least_how_to']:.0%} (least_how_to)")
    for fault in faults:
        print(f"{fault}: the limit stands in pyproject.toml")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
