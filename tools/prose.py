"""Check the project's prose: words, spelling, and how easy the pages are to read.

``python tools/prose.py`` reads every text that people see: pages, docstrings, comments, messages,
templates, notebooks. It finds words that glossary.toml replaces and spelling that is not American.
``python tools/prose.py --readability`` measures each page: Flesch reading ease, longest sentence,
and the length of a how-to.
``--only PATH...`` restricts either to files and folders. Exit status 1: something was found.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import prose_text
import readability
import stored

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = Path(__file__).with_name("glossary.toml")
PYTHON = ("src", "reproductions", "examples", "benchmarks", "docs", "tools")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")


@dataclass(frozen=True)
class Rule:
    """A word of the glossary's left column, and what to write instead."""

    name: str
    pattern: re.Pattern[str]
    use: str


@dataclass(frozen=True)
class Allowance:
    """Where a word of the left column is right: in this context, in files whose path matches."""

    words: tuple[str, ...]
    pattern: re.Pattern[str]
    path: re.Pattern[str]
    reason: str


@dataclass(frozen=True)
class Glossary:
    """The rules, their exceptions, and words that the spelling check leaves alone."""

    rules: tuple[Rule, ...]
    exceptions: tuple[Allowance, ...]
    spelling: tuple[str, ...]


def read_glossary(path: Path = GLOSSARY) -> Glossary:
    """Read the glossary: in its patterns a space stands for any white space, also a line break."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))

    def compiled(pattern: str, space: str) -> re.Pattern[str]:
        return re.compile(rf"\b(?:{pattern.replace(' ', space)})\b", re.IGNORECASE)

    rules = tuple(Rule(r["not"], compiled(r["pattern"], r"\s+"), r["use"]) for r in data["rule"])
    # The context is looked up in the raw text, where comments and strings break lines with marks.
    exceptions = tuple(
        Allowance(
            tuple(e["words"]),
            re.compile(e["context"].replace(" ", r"[\s#\"'*`]+"), re.IGNORECASE),
            re.compile(e.get("path", "")),
            e["reason"],
        )
        for e in data["allow"]
    )
    unknown = {word for e in exceptions for word in e.words} - {rule.name for rule in rules}
    if unknown:
        raise ValueError(f"{path.name}: exceptions for words without a rule: {sorted(unknown)}")
    return Glossary(rules, exceptions, tuple(data["spelling"]["allow"]))


def files(root: Path, only: list[Path]) -> list[Path]:
    """List the files with prose, in order; ``only`` keeps those that it names or holds."""
    found = [root / name for name in PAGES]
    found += sorted((root / "docs").rglob("*.md"))
    found += sorted((root / "docs/results").glob("*.json"))
    found += sorted((root / "docs/notebooks").rglob("*.ipynb"))
    found += sorted(root.glob("benchmarks/*.md")) + sorted(root.glob("reproductions/*.md"))
    found += sorted((root / "examples").rglob("*.md")) + sorted((root / "src").rglob("*.toml"))
    found += sorted((root / "src").rglob("*.j2"))
    found += [file for folder in PYTHON for file in sorted((root / folder).rglob("*.py"))]
    found = [f for f in found if f.is_file() and "tests" not in f.relative_to(root).parts]
    only = [path.resolve() for path in only]
    return [f for f in found if not only or any(f == p or p in f.parents for p in only)]


def glossary_findings(name: str, raw: str, prose: str, glossary: Glossary) -> Iterator[str]:
    """Yield a line for each word of the left column in ``prose``, which is ``raw`` with blanks."""
    fired = [rule for rule in glossary.rules if rule.pattern.search(prose)]
    names = {rule.name for rule in fired}
    allowed = [
        (exception.words, match.span())
        for exception in glossary.exceptions
        if names.intersection(exception.words) and exception.path.search(name)
        for match in exception.pattern.finditer(raw)
    ]
    found = []
    for rule in fired:
        for match in rule.pattern.finditer(prose):
            if not any(
                rule.name in words and start < match.end() and match.start() < end
                for words, (start, end) in allowed
            ):
                word = " ".join(match.group().split())
                line = raw.count("\n", 0, match.start()) + 1
                found.append((match.start(), f"{name}:{line}: {word} -> {rule.use}"))
    yield from (text for _, text in sorted(found))


def spelling_findings(proses: dict[str, str], allowed: tuple[str, ...]) -> list[str]:
    """Run codespell over ``proses``, by file name: typing errors and British spelling."""
    with tempfile.TemporaryDirectory() as folder:
        for name, prose in proses.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(prose, encoding="utf-8")
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "codespell_lib",
                "--builtin",
                "clear,rare,en-GB_to_en-US",
                "--ignore-words-list",
                ",".join(allowed),
                ".",
            ],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if run.returncode not in (0, 65):
        raise RuntimeError(f"codespell failed: {run.stderr.strip()}")
    lines = (line.removeprefix("./") for line in run.stdout.splitlines())
    return sorted(line.replace(" ==> ", " -> ") for line in lines if " ==> " in line)


def check_words(root: Path, only: list[Path]) -> int:
    """Print what the glossary and the spelling check find; return how many findings."""
    glossary = read_glossary()
    proses = {}
    findings = []
    for path in files(root, only):
        name = path.relative_to(root).as_posix()
        raw = path.read_text(encoding="utf-8")
        try:
            proses[name] = prose_text.prose(raw, path.suffix)
        except (SyntaxError, ValueError) as error:
            findings.append(f"{name}:1: cannot be read: {error}")
            continue
        findings += list(glossary_findings(name, raw, proses[name], glossary))
    findings += spelling_findings(proses, glossary.spelling)
    print("".join(f"{line}\n" for line in findings), end="")
    print(f"{len(findings)} words to replace in {len(proses)} files")
    return len(findings)


def check_readability(root: Path, only: list[Path]) -> int:
    """Print each page's reading ease and longest sentence; return how many limits are missed."""
    pages = [path for path in files(root, only) if path.suffix in (".md", ".json")]
    scores = []
    failures = []
    print("Flesch  words  longest  page")
    for path in pages:
        name = path.relative_to(root).as_posix()
        raw = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            raw = stored.markdown(json.loads(raw))
        page = readability.measure(raw)
        print(f"{page.ease:6.1f} {page.words:6} {page.longest:8}  {name}")
        if readability.counts(name):
            scores.append(page.ease)
        failures += readability.how_to(name, raw, prose_text.markdown(raw))
        failures += [
            f"{name}:{sentence.line}: {sentence.words} words, at most {readability.LONGEST}: "
            f"{sentence.text[:60]}..."
            for sentence in page.sentences
            if sentence.words > readability.LONGEST
        ]
    if scores:
        median = statistics.median(scores)
        print(f"median of {len(scores)} pages under docs: {median:.1f}")
        if median < readability.EASE and not only:
            failures.append(f"the median reading ease is {median:.1f}, at least {readability.EASE}")
    print("".join(f"{line}\n" for line in failures), end="")
    return len(failures)


def main(arguments: list[str] | None = None) -> int:
    """Check words, or readability; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readability", action="store_true", help="measure how easy pages read")
    parser.add_argument("--only", nargs="+", type=Path, default=[], help="files and folders")
    chosen = parser.parse_args(arguments)
    if missing := [str(path) for path in chosen.only if not path.exists()]:
        parser.error(f"--only: no such file or folder: {', '.join(missing)}")
    check = check_readability if chosen.readability else check_words
    return 1 if check(ROOT, chosen.only) else 0


if __name__ == "__main__":
    sys.exit(main())
