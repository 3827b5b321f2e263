"""The page of the site about the papers: which claims of each paper hold, from stored results.

`python -m leakbound_reproductions.overview docs/reproductions RUN_FOLDER` stores a finished run's
results, of which `make docs` writes the page.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from leakbound_reproductions import pages, results
from leakbound_reproductions.claim import Claim, Mark, Verdict
from leakbound_reproductions.reproductions import REPRODUCTIONS, Reproduction
from leakbound_reproductions.results import Results

SEVERAL = {
    Verdict.HOLDS: ("holds", "hold"),
    Verdict.FAILS: ("does not hold", "do not hold"),
    Verdict.UNDECIDED: ("is undecided", "are undecided"),
    Verdict.UNTESTED: ("cannot be tested here",) * 2,
}
HEAD = (
    "# The papers, reproduced",
    "",
    "`leakbound reproduce NAME` measures the claims of five papers again, on real data.",
    "",
)
HOW = (
    "**How a claim is judged.** " + pages.RULE,
    "",
    "`make docs` writes this page from the stored results of runs.",
    "",
)


def page(stored: Path, base: Path) -> str:
    """The whole page.

    Args:
        stored: folder with NAME.json of each result that is stored, and its figures in NAME/.
        base: folder that the page will lie in, for links.
    """
    found = {name: _stored(stored / f"{name}.json") for name in REPRODUCTIONS}
    lines = [*HEAD, *_total(found), *_summary(found), *HOW]
    for name, own in found.items():
        lines += _paper(REPRODUCTIONS[name], own)
    for name, own in found.items():
        if own is not None:
            lines += _detail(own, Path(os.path.relpath(stored / name, base)).as_posix())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip("\n") + "\n"


def store(run: Path, stored: Path) -> Path:
    """Copy a finished run's results and figures to the folder of stored ones."""
    own = results.read(run)
    folder = stored / own.about.name
    folder.mkdir(parents=True, exist_ok=True)
    for figure in own.outcome.figures:
        shutil.copyfile(run / figure.file, folder / figure.file)
    target = stored / f"{own.about.name}.json"
    shutil.copyfile(run / results.FILE, target)
    return target


def _stored(path: Path) -> Results | None:
    return results.decode(path.read_bytes()) if path.is_file() else None


def _total(found: dict[str, Results | None]) -> list[str]:
    """How many of all numbered claims are decided; further statements are counted separately.

    So are theorems and identities, which numbers can only show to be printed wrong, and rules that
    changed after numbers were known.
    """
    both = [own.split() for own in found.values() if own]
    counted, others = ([c for pair in both for c in pair[side]] for side in (0, 1))
    if not counted:
        return []
    words = [claim.verdict for claim in counted]
    decided = _decided(counted)
    each = ", ".join(
        f"{n} {said[n > 1]}" for word, said in SEVERAL.items() if (n := words.count(word))
    )
    total = len(counted)
    lines = [f"**{decided} of {total} claims are decided** ({decided / total:.0%}): {each}."]
    rows = [
        (f"{mark} ({_numbers(own)})", _share(own))
        for mark in (Mark.THEOREM, Mark.LATE)
        if (own := [claim for claim in counted if mark in claim.marks])
    ]
    if rows:
        plain = [c for c in counted if not {Mark.THEOREM, Mark.LATE} & set(c.marks)]
        rows.append(("all others", _share(plain)))
    if others:
        lines.append(f"Further statements are not counted ({_numbers(others)}).")
    table = [*pages.table(("among these", "decided"), rows), ""] if rows else []
    return [" ".join(lines), "", *table]


def _share(claims: Sequence[Claim]) -> str:
    return f"{_decided(claims)} of {len(claims)}"


def _decided(claims: Sequence[Claim]) -> int:
    return sum(claim.verdict in (Verdict.HOLDS, Verdict.FAILS) for claim in claims)


def _numbers(claims: Sequence[Claim]) -> str:
    return ", ".join(claim.number for claim in claims)


def _summary(found: dict[str, Results | None]) -> list[str]:
    rows = []
    for name, own in found.items():
        about = REPRODUCTIONS[name]
        said = ("", "not stored yet") if own is None else (f"`{own.scale}`", pages.tally(own))
        rows.append(
            (f"{about.letter}: [{about.paper.title}](#paper-{about.letter.lower()})", *said)
        )
    return [*pages.table(("paper", "scale", "verdicts"), rows), ""]


def _paper(about: Reproduction, own: Results | None) -> list[str]:
    lines = [f"## Paper {about.letter}", "", f"{about.paper}.", ""]
    if own is None:
        command = f"`leakbound reproduce {about.name}`"
        return [*lines, f"No results are stored yet; {command} measures them.", ""]
    rows = [
        (c.number, c.statement, f"**{c.verdict}**{pages.beside(c)}") for c in own.outcome.claims
    ]
    return [*lines, *pages.table(("claim", "the paper says", "verdict"), rows), ""]


def _detail(own: Results, base: str) -> list[str]:
    about = own.about
    return [
        f"## Paper {about.letter} in detail",
        "",
        f"Scale `{own.scale}`. {own.outcome.settings}",
        "",
        *pages.details(own.outcome.claims, level=3),
        *pages.pictures(own, f"{base}/", level=3),
        pages.known(own),
        "",
    ]


def main() -> None:
    """Store finished runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stored", type=Path, help="folder of stored results, NAME.json each")
    parser.add_argument("runs", type=Path, nargs="+", help="finished runs to store")
    given = parser.parse_args()
    for run in given.runs:
        print(f"stored: {store(run, given.stored)}")


if __name__ == "__main__":
    main()
