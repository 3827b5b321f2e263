"""The page of results: one line a figure, kept until the same figure is measured anew."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

PAGE = Path(__file__).parents[1] / "RESULTS.md"
HEADER = "| figure | measured | n | target | floor | what it is | on |"
RULE = "|---|--:|--:|--:|--:|---|---|"
TITLE = "# How fast, against whom, and how far from the floor"
INTRO = (
    "Ratios are medians (least to most) over interleaved rounds in one process with one "
    "thread, formed within each round; below 1 is faster than the peer. Same model, same "
    "images, same start, same objective (cosine, no total variation): before the clock "
    "starts, value and gradient are checked to be as near to float64 as the peer's (within "
    "1e-5, or twice its distance). A floor is what the arithmetic alone would take: the same "
    "matrix products with nothing around them, by the faster of two libraries' kernels, in "
    "the same rounds. Written by `make bench`; a line stays until its figure is measured "
    "anew."
)
PACKAGES = ("torch", "leakbound", "breaching", "numpy")


@dataclass(frozen=True)
class Figure:
    """One line: its name, the number with its spread, and what it is to be compared with."""

    name: str
    measured: str
    n: int
    what: str
    target: str = ""
    floor: str = ""

    def line(self, day: str) -> str:
        """For the table."""
        cells = (self.name, self.measured, self.n, self.target, self.floor, self.what, day)
        return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


def machine() -> str:
    """What ran this, without its name."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"model name\s*: (.*)", info.read_text(encoding="utf-8"))
        cpu = found.group(1).strip() if found else cpu
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(f"{name} {_installed(name)}" for name in PACKAGES)
    hardware = f"{cpu} ({torch.backends.cpu.get_cpu_capability()}), {cores} cores, {memory:.0f} GiB"
    return f"{hardware}; Python {platform.python_version()}, {versions}"


def _installed(name: str) -> str:
    try:
        return version(name)
    except ModuleNotFoundError:
        return "absent"


def write(figures: list[Figure], notes: dict[str, str], page: Path = PAGE) -> None:
    """Put new lines in the place of old ones; a page of another machine starts anew."""
    day, here = datetime.now(tz=UTC).date().isoformat(), machine()
    old = page.read_text(encoding="utf-8") if page.exists() else ""
    kept = _lines(old) if f"Machine: {here}." in old else {}
    said = _notes(old) if kept else {}
    kept |= {figure.name: figure.line(day) for figure in figures}
    said |= notes
    parts = [TITLE, INTRO, f"Machine: {here}.", "\n".join([HEADER, RULE, *kept.values()])]
    parts += [f"## {title}\n\n{text}" for title, text in said.items()]
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _lines(text: str) -> dict[str, str]:
    """The figures of a page by name."""
    table = text.partition(HEADER)[2].partition("\n\n")[0].splitlines()
    lines = [line for line in table if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


def _notes(text: str) -> dict[str, str]:
    """The sections of a page by title."""
    parts = re.split(r"^## (.*)\n\n", text, flags=re.MULTILINE)[1:]
    return {title: body.strip() for title, body in zip(parts[::2], parts[1::2], strict=True)}
