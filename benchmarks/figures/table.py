"""The page of results: one line per figure, kept until the same figure is measured again."""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import stored

PAGE = "speed_against_peers"
HEADER = "| figure | measured | n | target | minimum | what it is | date |"
RULE = "|---|--:|--:|--:|--:|---|---|"
TITLE = "# Speed, compared with other tools"
INTRO = (
    "A ratio below 1 means that leakbound is faster than the peer. Ratios are formed within each "
    "round; the table gives the median (smallest to largest) over interleaved rounds in one "
    "process with one thread. Model, images, start and objective (cosine, no total variation) "
    "are the same. Before timing, value and gradient are checked against float64: they must be "
    "as close as the peer's (within 1e-5, or twice its distance). The minimum is the time of the "
    "arithmetic alone: the same matrix products, by the faster of two libraries' kernels, in the "
    "same rounds. Written by `make bench`; a line stays until its figure is measured again."
)
PACKAGES = ("torch", "leakbound", "breaching", "numpy")


@dataclass(frozen=True)
class Figure:
    """One line: its name, the number with its spread, and its target."""

    name: str
    measured: str
    n: int
    what: str
    target: str = ""
    minimum: str = ""

    def line(self, day: str) -> str:
        """For the table."""
        cells = (self.name, self.measured, self.n, self.target, self.minimum, self.what, day)
        return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


def machine() -> str:
    """Processor, memory and versions, without the machine's name."""
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


def write(figures: list[Figure], notes: dict[str, str]) -> None:
    """Replace old lines by new ones; on another machine, start a new page."""
    day, here = datetime.now(tz=UTC).date().isoformat(), f"Machine: {machine()}."
    path = stored.FOLDER / f"{PAGE}.json"
    kept: dict[str, str] = {}
    if path.is_file():
        old = stored.read(PAGE)["sections"][0]["body"]
        if here in old:
            kept = {row[0]: f"| {' | '.join(row)} |" for row in old[-1]["rows"]}
        else:
            path.unlink()
    kept |= {figure.name: figure.line(day) for figure in figures}
    parts = [TITLE, INTRO, here, "\n".join([HEADER, RULE, *kept.values()])]
    parts += [f"## {title}\n\n{text}" for title, text in notes.items()]
    stored.keep(PAGE, "\n\n".join(parts))
