"""Run `leakbound reproduce`: repeat a paper's experiments and say which claims hold."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from leakbound import report
from leakbound.audit.folder import TIMES
from leakbound.cli import kit
from leakbound.cli.kit import console, errors, safe, workers_of
from leakbound_reproductions import kept, pages, results
from leakbound_reproductions.jobs import Jobs
from leakbound_reproductions.reproductions import Reproduction, named
from leakbound_reproductions.results import Results

if TYPE_CHECKING:
    from leakbound_reproductions import options

PAGE = "results.html"
TEXT = "results.md"
STYLES = {"holds": "green", "does not hold": "red", "undecided": "yellow"}


def reproduce(command: options.Reproduce) -> int:
    """Run one paper's reproduction, or all, each in its own folder."""
    report.check_installed()
    workers = workers_of(command.workers)
    chosen = named(command.name)
    missing = 0
    base = command.out or Path("runs") / "reproduce"
    if command.figure is not None:
        _check_figure(chosen, command.figure)
    for about in chosen:
        folder = base if command.out is not None and len(chosen) == 1 else base / about.name
        if command.out is None:
            folder = folder / command.scale
        try:
            run = about.load()
        except ValueError as error:
            if len(chosen) == 1:
                raise
            errors.print(f"leakbound: {safe(error)}", soft_wrap=True)
            missing += 1
            continue
        _announce(about, command.scale, folder)
        jobs = _jobs(about, command)
        with _claimed(about, command, folder, **jobs):
            began = time.monotonic()
            bar = _Bar()
            with bar.progress:
                given = {"workers": workers, "color": command.color, "tell": bar}
                outcome = run(command.scale, folder, **given, **jobs)  # type: ignore[arg-type]
            found = Results(about, command.scale, outcome, _data(folder), **_here())
            _write(found, folder, time.monotonic() - began)
        _show(found, folder)
        if command.figure is not None:
            _tell_figure(found, folder, command.figure)
    return 1 if missing else 0


def _jobs(about: Reproduction, command: options.Reproduce) -> dict[str, Jobs]:
    """The user's choice of a paper's own scale; refused where it would change nothing."""
    weights = command.lpips_weights
    jobs = Jobs(
        tuple(filter(None, command.parts.split(","))),
        command.steps,
        command.seeds,
        command.hours,
        command.device,
        None if weights is None else str(weights),
    )
    if about.by_parts and command.scale == "paper":
        return {"jobs": jobs}
    for field in fields(jobs):
        if getattr(jobs, field.name) != field.default:
            raise ValueError(
                f"{field.name} is for systematic_evaluation with --scale paper; leave it out"
            )
    return {}


def _check_figure(chosen: Sequence[Reproduction], number: str) -> None:
    """Refuse a figure that is not drawn, before anything runs."""
    (about, *others) = chosen
    if others:
        raise ValueError(f"figure is {number!r}, and name is 'all'; name one paper")
    if number not in about.figures:
        drawn = ", ".join(about.figures) or "none"
        raise ValueError(
            f"figure is {number!r}; of paper {about.letter}, these figures are drawn: {drawn}"
        )


def _tell_figure(found: Results, folder: Path, number: str) -> None:
    """Say where the figure and its values are."""
    drawn = [figure for figure in found.outcome.figures if number in figure.numbers]
    if not drawn:
        console.print(f"figure {safe(number)} is not drawn at scale {found.scale}")
        return
    path = folder / drawn[0].file
    console.print(f"figure {safe(number)}: {safe(drawn[0].caption)}", soft_wrap=True)
    console.print(f"{safe(path)}, values in {safe(kept.values_of(path).name)}", soft_wrap=True)


def _announce(about: Reproduction, scale: str, folder: Path) -> None:
    console.print(
        f"reproducing [bold]{safe(about.paper.title)}[/bold] (paper {about.letter}), scale "
        f"{scale}: {safe(about.scales[scale])}; into {safe(folder)}",
        soft_wrap=True,
    )


@contextmanager
def _claimed(
    about: Reproduction, command: options.Reproduce, folder: Path, jobs: Jobs | None = None
) -> Iterator[None]:
    """Lock the folder for this run; it must belong to this reproduction, version and machine."""
    plan: dict[str, Any] = {"name": about.name, "scale": command.scale, "color": command.color}
    if jobs is not None:  # what to run, for how long and where may change from run to run
        plan |= {"steps": jobs.steps, "seeds": jobs.seeds, "lpips_weights": jobs.lpips_weights}
    with ExitStack() as held:
        with kit.writing(folder):
            held.enter_context(kit.claimed(folder))
            kit.claim(folder, {"schema": results.SCHEMA, "plan": plan, **_here()})
            kit.check(*(folder / name for name in (results.FILE, TEXT, PAGE, kept.DATA)))
            kit.check(folder / TIMES, key="id")
        yield


def _here() -> dict[str, Any]:
    """Versions and machine, as an audit's run.json has them."""
    return {"versions": kit.versions(), "machine": kit.machine()}


def _data(folder: Path) -> dict[str, Any]:
    """Names and digests of the data: of the run itself, and of the audits in it."""
    found: dict[str, Any] = kept.data_of(folder)
    for path in sorted(folder.glob("*/run.json")):
        own = json.loads(kit.read(path)).get("data")
        if own is not None:
            found[path.parent.name] = own
    return found


def _write(found: Results, folder: Path, seconds: float) -> None:
    assert not {results.FILE, TEXT, PAGE} & set(found.outcome.pages), "written over here"
    with kit.writing(folder):
        kit.write(folder / results.FILE, results.encode(found))
        kit.write(folder / TEXT, pages.markdown(found).encode())
        kit.write(folder / PAGE, pages.html(found, folder).encode())
        cost = {"id": "reproduce", "schema": 1, "seconds": round(seconds, 1)}
        kit.append(folder / TIMES, cost, "id")


def _show(found: Results, folder: Path) -> None:
    table = Table(show_edge=False)
    for head in ("claim", "the paper says", "verdict"):
        table.add_column(head, overflow="fold")
    for claim in found.outcome.claims:
        word = str(claim.verdict)
        style = STYLES.get(word, "dim")
        table.add_row(safe(claim.number), safe(claim.statement), f"[{style}]{word}[/{style}]")
    console.print(table)
    console.print(safe(pages.tally(found)), soft_wrap=True)
    console.print(f"page: {safe(folder / PAGE)}", soft_wrap=True)


class _Bar:
    """Live progress: the part, its steps, the time; plain lines without a screen."""

    def __init__(self) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("starting", total=None)
        self.told = ("", -1)

    def __call__(self, part: str, done: int, total: int) -> None:
        """Show where the run is."""
        if part != self.told[0]:
            self.progress.reset(self.task, description=safe(part), total=max(1, total))
        self.progress.update(self.task, completed=done, total=max(1, total))
        tenth = 10 * done // max(1, total)
        if (part, tenth) != self.told:
            if not console.is_terminal:
                print(f"{part}: {done} of {total}", file=sys.stderr, flush=True)
            self.told = (part, tenth)
