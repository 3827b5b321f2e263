"""The systematic evaluation: run what is missing, then write tables, claims and a figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from leakbound import audit
from leakbound.experiments.systematic_evaluation import (
    evaluation_claims,
    evaluation_page,
    tradeoff_figure,
)
from leakbound.experiments.systematic_evaluation.measured import Measured
from leakbound.experiments.systematic_evaluation.parts import Part, parts
from leakbound.experiments.systematic_evaluation.theory_claims import Claim


def evaluate(
    folder: Path, *, scale: str, color: str, workers: int, device: str = "cpu"
) -> list[Claim]:
    """Run all parts into `folder` and write evaluation.md, evaluation.png and the claims.

    An interrupted run goes on where it was; each part is an audit of its own in
    `folder`/<data>/<part>, which `leakbound report` shows with all its records.

    Raises:
        ValueError: no such scale, or images that cannot be read.
    """
    wanted = parts(scale, color)
    run(wanted, folder, workers, device)
    found = Measured.read(wanted, folder)
    claims = evaluation_claims.claims(found)
    text = json.dumps([asdict(claim) for claim in claims], indent=1)
    (folder / "evaluation_claims.json").write_text(text + "\n", encoding="utf-8")
    tradeoff_figure.draw(found, folder / "evaluation.png")
    page = evaluation_page.page(found, claims, scale, color)
    (folder / "evaluation.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    return claims


def run(wanted: Sequence[Part], folder: Path, workers: int, device: str) -> None:
    """All audits, with a bar for each."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bars = {
            (part.data, part.name): progress.add_task(
                f"{part.data}: {part.name}",
                total=len(part.plan.cells()) + len(part.plan.utility_cells()),
            )
            for part in wanted
        }
        for part in wanted:
            bar = bars[part.data, part.name]
            audit.audit(
                part.plan,
                folder / part.data / part.name,
                workers=workers,
                device=device,
                pictures=False,
                watch=lambda now, bar=bar: progress.update(bar, completed=now.done),  # type: ignore[misc]
            )
