"""The full matrix: `python -m tests.red_team.table` writes docs/results/evidence-of-truth.json.

`--check` prints the summary alone. Both end with 1 if an adversary is above a statement.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from tools import stored

from . import domains
from .domains import Domain
from .matrix import (
    GAMMAS,
    PSNR,
    Pair,
    Statement,
    attack,
    calibrated,
    grid,
    mean_errors,
    with_update,
    without_update,
)

HIGH = (25.5, 28.0, 32.0)
FEW = 5000
"""Of more public examples, bounds on the mean error take minutes and gigabytes."""


@dataclass(frozen=True)
class Part:
    """A domain, and which statements on it are attacked."""

    make: Callable[[], Domain]
    psnrs: tuple[float, ...] = PSNR
    labels: tuple[bool, ...] = (False, True)
    words: str = ""


PARTS = (
    Part(
        domains.mnist,
        words="1,000 MNIST digits are public and 4,000 others are held out.",
    ),
    Part(
        domains.photographs,
        words="Color tiles of 16 x 16 pixels, at uniform positions of the eight packaged "
        "photographs. The label names the photograph.",
    ),
    Part(
        lambda: domains.table("breast_cancer"),
        words="Rows of the table, drawn with replacement. Columns are scaled to [0, 1].",
    ),
    Part(
        lambda: domains.table("wine"),
        words="Rows of the table, drawn with replacement. Columns are scaled to [0, 1].",
    ),
    Part(
        domains.resampled,
        HIGH,
        words="The 5,000 digits, drawn with replacement: a distribution of 5,000 values. "
        "20,000 draws are public.",
    ),
    Part(
        domains.collages,
        (18.0, 20.0, 22.0, 25.5),
        (False,),
        words="Each quarter comes from a digit drawn for it, so there are many more values than "
        "draws.",
    ),
    Part(
        domains.two_digits,
        (20.0, 32.0),
        (False,),
        words="One 0 and one 1, each equally likely. Here attacks attain the upper bound, up to "
        "the width of the confidence limit.",
    ),
)


@dataclass
class Found:
    """What the matrix showed."""

    pairs: list[Pair] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    means: list[tuple[Statement, float, float, str]] = field(default_factory=list)

    @property
    def beaten(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.beaten]

    @property
    def means_beaten(self) -> list[tuple[Statement, float, float, str]]:
        return [one for one in self.means if one[1] > one[2]]


def statements(part: Part, domain: Domain, labeled: bool, found: Found) -> list[Statement]:
    """Of the grid, and at the noise that calibration finds; what is refused is noted."""
    made = list(grid(domain, labeled, part.psnrs))
    for psnr in part.psnrs:
        for gamma in GAMMAS:
            one = calibrated(domain, labeled, psnr, gamma)
            if one is None:
                found.closed.append(f"{domain.name}, {words(labeled)}, {psnr:g} dB, {gamma:g}")
            else:
                made.append(one)
    return made


def words(labeled: bool) -> str:
    return "labels known" if labeled else "labels unknown"


def run(parts: tuple[Part, ...] = PARTS, log: Callable[[str], None] = lambda line: None) -> Found:
    """Every statement against every adversary."""
    found, began = Found(), time.monotonic()
    todo = [
        (domain, one)
        for part in parts
        for domain in [part.make()]
        for labeled in part.labels
        for one in statements(part, domain, labeled, found)
    ]
    lowest: dict[tuple[str, bool, float], Statement] = {}
    for domain, one in todo:
        key = (domain.name, one.labeled, one.psnr)
        if key not in lowest or one.value < lowest[key].value:
            lowest[key] = one
    for done, (domain, one) in enumerate(todo, 1):
        found.pairs += attack(one, with_update())
        if lowest[domain.name, one.labeled, one.psnr] is one:
            found.pairs += attack(one, without_update())
        if one.psnr == 20.0 and one.target is None and len(domain.rows) <= FEW:
            found.means.append((one, *mean_errors(one)))
        spent = time.monotonic() - began
        left = spent / done * (len(todo) - done)
        log(f"{done} of {len(todo)}: {domain.name}, {one.psnr:g} dB; {left / 60:.1f} min left")
    return found


def summary(found: Found) -> str:
    trials = min(pair.n for pair in found.pairs)
    worst = max(found.pairs, key=lambda pair: pair.z)
    return (
        f"{len(found.pairs):,} pairs of a statement and an adversary, each with at least "
        f"{trials:,} held-out trials: {len(found.beaten)} adversaries are above their statement. "
        f"The largest z score is {worst.z:.2f} ({worst.adversary}; "
        f"{worst.statement.domain.name}, {worst.statement.psnr:g} dB, noise "
        f"{worst.statement.noise:.3g}). Calibration refused {len(found.closed)} targets. Of "
        f"{len(found.means)} bounds on the mean error, {len(found.means_beaten)} are above an "
        "adversary's error."
    )


INTRODUCTION = """# Evidence: statements against adversaries

leakbound states that no attacker reconstructs an example to a given PSNR with more than a given
probability. The statement uses n public examples and no model of the data ([risk](../risk.md)). On
this page, adversaries try to exceed such statements.

{summary}

Repeat it from a clone: `python -m tests.red_team.table`, {minutes:.0f} minutes on one core.
`make proof` runs it and stores nothing. Part of it runs with every change
(`tests/red_team/test_statements.py`). `tests/red_team/test_old_rules.py` shows that the same
adversaries exceed each rule that was replaced ([errata](../errata.md#ours)).

## How it works

1. Each adversary is fitted to the same public examples and to nothing else.
2. It sends its own model, whose gradients have at most the clip norm.
3. It sees the noisy release and answers for examples that nobody fitted anything to.
4. It is above a statement if the lower limit of its success is (Clopper-Pearson, error 0.0001).

**Adversaries:**

{adversaries}

Where labels are known, each is fitted for every class. The last three do not use the update. They
count once for each threshold, against the lowest statement.

**Data.** Digits are split. All other data are distributions made of real examples, as each section
says. Their public and held-out examples are independent draws, so the assumption of a statement is
true.

**An honest server.** `tests/red_team/test_known_model.py` attacks the bound for the model that an
honest server sends: two models, twelve statements and five adversaries, each with 4,000 held-out
digits. None is above its statement.

## Limits

- The page covers one release of one example by the Gaussian mechanism at full batch. Other settings
  rest on proofs and on `tests/bounds`.
- Statements near 1 say nothing and are left out.
- Statements hold with 95 % confidence over the public sample. They hold only where private examples
  are drawn like public ones, as here.
- No list of adversaries proves a bound. Most margins are wide. It is not known how much of them a
  better attacker would use.

## Columns of the tables

| column | meaning |
|---|---|
| noise | the noise multiplier: noise standard deviation / clip norm |
| target | the row has the least noise that calibration finds for this probability |
| stated | the statement: no attacker exceeds this probability |
| best adversary, success, 95 % | the best adversary, its success, and the 95 % interval of it |
| ratio | stated / success |
"""


def head(names: str) -> Iterator[str]:
    yield f"| {names} |"
    yield "|---" * len(names.split(" | ")) + "|"


def page(found: Found, minutes: float) -> Iterator[str]:
    names = "\n".join(f"- {one.name}" for one in (*with_update(), *without_update()))
    yield INTRODUCTION.format(summary=summary(found), minutes=minutes, adversaries=names)
    for part in PARTS:
        domain = part.make()
        yield f"\n## {domain.name.capitalize()}\n"
        yield (
            f"{part.words} {len(domain.rows):,} public examples of {domain.rows.shape[1]} values, "
            f"{len(domain.held_rows):,} held out.\n"
        )
        own = [pair for pair in found.pairs if pair.statement.domain is domain]
        yield from head(
            "dB | labels | noise | target | stated | best adversary | success | 95 % | ratio"
        )
        for one in dict.fromkeys(pair.statement for pair in own):
            best = max((pair for pair in own if pair.statement is one), key=lambda pair: pair.hits)
            who = best.adversary if best.hits else "none"
            low, up = best.interval(0.025)
            share = best.hits / best.n
            margin = f"{one.value / share:.3g}" if share else "-"
            yield (
                f"| {one.psnr:g} | {'known' if one.labeled else 'unknown'} | {one.noise:.3g} | "
                f"{'' if one.target is None else f'{one.target:g}'} | {one.value:.4f} | "
                f"{who} | {share:.4f} | {low:.4f} to {up:.4f} | {margin} |"
            )
    yield "\n## Mean errors\n"
    yield "*Smallest error*: the smallest mean error of the adversaries, plus 4 standard errors.\n"
    yield from head("data | labels | noise | stated: none below | smallest error | adversary")
    for one, bound, least, name in found.means:
        known = "known" if one.labeled else "unknown"
        numbers = f"{one.noise:g} | {bound:.4f} | {least:.4f}"
        yield f"| {one.domain.name} | {known} | {numbers} | {name} |"
    yield "\n## Targets that calibration refuses\n"
    yield "No noise meets them: the sample is too small, or its examples are too similar.\n"
    yield from head("data | labels | dB | refused probabilities")
    refused: dict[str, list[str]] = {}
    for line in found.closed:
        target, gamma = line.rsplit(", ", 1)
        refused.setdefault(target, []).append(gamma)
    for target, gammas in refused.items():
        name, labels, psnr = target.split(", ")
        cells = (name, labels.removeprefix("labels "), psnr.removesuffix(" dB"), ", ".join(gammas))
        yield f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="print the summary alone")
    check = parser.parse_args().check
    torch.set_num_threads(1)
    began = time.monotonic()
    found = run(log=lambda line: print(line, file=sys.stderr))
    minutes = max(1.0, (time.monotonic() - began) / 60)
    print(summary(found))
    if not check:
        stored.keep("evidence-of-truth", "\n".join(page(found, minutes)))
    return int(bool(found.beaten or found.means_beaten))


if __name__ == "__main__":
    sys.exit(main())
