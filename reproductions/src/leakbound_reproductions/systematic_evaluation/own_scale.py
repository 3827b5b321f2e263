"""Paper B at its own scale: what each part costs, what has run, and what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from leakbound import audit
from leakbound.assess import Assessment
from leakbound.cli import kit
from leakbound.report.best_attack import measured, squared_errors
from leakbound_reproductions.paired import gain
from leakbound_reproductions.systematic_evaluation.measured import Measured, grouped, label
from leakbound_reproductions.systematic_evaluation.parts import PLACES, Part

PAGE = "own_scale.md"
HEADS = ("part", "of the paper", "done", "state", "hours so far", "hours left")


@dataclass(frozen=True)
class Cost:
    """A part: how many of its experiments and trainings are done, and seconds of one process."""

    name: str
    done: int
    units: int
    spent: float
    left: float

    @property
    def state(self) -> str:
        """In words, as the page has it."""
        if self.done == self.units:
            return "run"
        return "run in part" if self.done else "*not run*"

    @property
    def row(self) -> tuple[str, ...]:
        """One of `HEADS` each."""
        hours = (f"{seconds / 3600:.3g}" for seconds in (self.spent, self.left))
        return self.name, PLACES[self.name], f"{self.done} of {self.units}", self.state, *hours


def predicted(wanted: Sequence[Part], folder: Path, device: str) -> dict[str, float]:
    """Seconds of one process by unit, from the planner of audits.

    It times one gradient of every model and batch size on the device, and counts steps. A part of
    closed forms has none: one of its experiments is timed, unless the folder has some.
    """
    plan = wanted[0].plan
    context = audit.PlanContext(plan.data, device)
    every = [unit for part in wanted for unit in _units(part)]
    seconds, _ = audit.predicted_seconds(every, context, plan.seeds[0])
    for part in wanted:
        searches = any(attack.parameters.get("steps", 1) > 1 for attack in part.plan.attacks)
        if not searches and not _taken(folder, part):
            units = part.plan.experiments()
            one = audit.run_experiment(units[len(units) // 2], context, pictures=False)
            seconds |= dict.fromkeys((unit.id for unit in units), one.seconds)
    return seconds


def costs(wanted: Sequence[Part], folder: Path, seconds: Mapping[str, float]) -> list[Cost]:
    """What each part has cost, and will cost by `seconds`, which are `predicted`.

    Each part is corrected by its experiments that are done.
    """
    result = []
    for part in wanted:
        own = {unit.id: seconds[unit.id] for unit in _units(part)}
        taken = _taken(folder, part)
        spent = sum(taken.values())
        counted = sum(own[key] for key in taken)
        left = sum(own.values()) - counted
        pace = spent / counted if counted else 1.0
        result.append(Cost(part.name, len(taken), len(own), spent, pace * left))
    return result


def _units(part: Part) -> list[audit.TrainingUnit | audit.Experiment]:
    return [*part.plan.trainings(), *part.plan.experiments()]


def _taken(folder: Path, part: Part) -> dict[str, float]:
    """Seconds by unit that is done."""
    path = folder / part.data / part.name / audit.TIMES
    lines = kit.read(path).splitlines() if path.exists() else []
    return {one["id"]: one["seconds"] for one in map(json.loads, lines)}


def page(
    costs_of: Sequence[Cost], wanted: Sequence[Part], found: Measured, about: str
) -> list[str]:
    """The lines of the page: every part with its state, then what was measured."""
    lines = [
        "# Systematic evaluation at the paper's scale: what has run",
        "",
        about,
        "",
        *_table(HEADS, (cost.row for cost in costs_of)),
    ]
    for part in wanted:
        cells = found.cells[part.data, part.name]
        if cells:
            lines += ["", f"## {part.name} ({PLACES[part.name]})", "", *_measured(part, cells)]
    return lines


def _measured(part: Part, cells: Sequence[Assessment]) -> list[str]:
    heads = ("training steps", "B", "defense", "attack", "n", "RMSE", "PSNR", "LPIPS", "features")
    groups = grouped(
        cells,
        lambda c: (c.model.train_steps, c.batch_size, label(c), part.attacks[c.attack.hash]),
    )
    rows = (
        (*map(str, key), *_numbers([cell for cell in own if cell.status == "ok"]))
        for key, own in groups.items()
    )
    return _table(heads, rows)


def _numbers(cells: Sequence[Assessment]) -> tuple[str, ...]:
    """How many rounds, then means over them."""
    errors = [cell for cell in cells if measured(cell)]
    spans = [cell.features.span for cell in cells if cell.features is not None]

    def mean(of: Callable[[Assessment], float]) -> str:
        return around([of(cell) for cell in errors])

    lpips = [_lpips(cell) for cell in errors]
    return (
        str(len(cells)),
        mean(lambda cell: fmean(squared_errors(cell.scores)) ** 0.5),
        mean(lambda cell: fmean(score for score in cell.scores if score is not None)),
        around([value for value in lpips if value is not None]),
        around([span for span in spans if span is not None]),
    )


def _lpips(cell: Assessment) -> float | None:
    values = [value for value in cell.metrics.get("lpips", ()) if value is not None]
    return fmean(values) if values else None


def around(values: Sequence[float]) -> str:
    """A mean with its 95 % interval by Student's t; "–" without values.

    Example:
        >>> around([]), around([0.25]), around([0.1, 0.2])
        ('–', '0.25', '0.15 [-0.485, 0.785]')
    """
    if len(values) < 2:
        return f"{values[0]:.3g}" if values else "–"
    found = gain(values)
    return f"{found.mean:.3g} [{found.low:.3g}, {found.high:.3g}]"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)]
