"""Paper B at its own scale: what each part costs, what has run, and what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from leakbound import audit
from leakbound.assess import Assessment
from leakbound.cli import kit
from leakbound.report.best_attack import measured, squared_errors
from leakbound_reproductions.pages import table
from leakbound_reproductions.paired import gain
from leakbound_reproductions.systematic_evaluation.measured import Measured, grouped, label
from leakbound_reproductions.systematic_evaluation.parts import PLACES, Part

PAGE = "own_scale.md"
HEADS = ("part", "of the paper", "done", "state", "hours so far", "hours left")

SETTINGS = (
    (
        "50 stratified images of CIFAR-10",
        "up to 10 rounds of private images of `--color`",
        "no data comes with the package; each round has its own weights",
    ),
    (
        "ResNet-18 with batch norm",
        "with group norm, without the penalty on batch statistics (weight 0.001)",
        "in training, batch norm mixes the images of a batch; in evaluation, new weights have no "
        "statistics",
    ),
    (
        "trained for one epoch (5.1), at random initialization (appendix I)",
        "at random initialization, but for the part `trained`",
        "the paper says both, the second of all other experiments",
    ),
    (
        "1, 2 and 3 epochs: SGD, rate 0.1, momentum 0.9, batches of 64",
        "Adam, rate 0.001, batches of 64 of public images; 0 epochs as well; B = 2",
        "an audit's `train_steps`; the paper does not say B",
    ),
    (
        "head of 16,384 units, of which 2,048 (text: also 4,096) are trained",
        "16,384, of which 14,336 are random",
        "as in the paper",
    ),
    (
        "features: tensor method",
        "all classes and orders decomposed jointly, no fit; with a fit in `malicious`",
        "every row of the head's gradient is used",
    ),
    (
        "U-Net with attention on Wide-ResNet blocks, which takes the features; rate 1e-5",
        "small U-Net on fixed noise; rate 0.003",
        "the paper does not give its sizes",
    ),
    (
        "10,000 steps, rate x 0.1 at 3/8, 5/8 and 7/8; total variation 0.01, features 0.1; cosine "
        "weighted by tensor sizes",
        "the same",
        "",
    ),
    ("GradientInversion: settings of GradAttack", "the same", ""),
    ("CPA: its features in the paper's attack", "the same: deep prior + features", ""),
    ("Robbing the Fed, as published", "the same, by a server that does not know the defense", ""),
    (
        "GIAS (Jeon et al.), generator trained before",
        "untrained; 2 starts of 3,000 steps in the latents, 7,000 in the weights",
        "no weights of a generator come with the package",
    ),
    (
        "B = 1 to 8 (table 2), 2 to 8 (4, 5, 7, 8), 16 and 32 (3), 4 to 32 (6)",
        "the same; table 8 at B = 4 under three defenses",
        "what claim 2-7 compares",
    ),
    (
        "clip 2, 4, 8; dropout 0.3 to 0.9; noise 0.001 to 0.1; prune 0.3 to 0.99; 3 and 5 local "
        "steps",
        "the same; local rate 0.01; table 2 without C = 4",
        "the paper states no local rate; clipping changes only the scale",
    ),
    (
        "table 5: 200 epochs, SGD",
        "2,000 rounds of 4 clients with 16 images each, Adam",
        "the paper's are 156,400 steps for each of 19 defenses",
    ),
    ("LPIPS", "with `--lpips-weights`", "no weights of it come with the package"),
    ("V100 GPUs, 800 hours", "the device of `--device`; see the hours above", ""),
)
"""The paper's settings, ours, and why they differ."""


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
        taken = (hours(self.spent), hours(self.left))
        return self.name, PLACES[self.name], f"{self.done} of {self.units}", self.state, *taken


def hours(seconds: float) -> str:
    """Hours of seconds, to three digits or to an hour.

    Example:
        >>> hours(4000), hours(4_000_000)
        ('1.11', '1,111')
    """
    found = seconds / 3600
    return f"{found:.3g}" if found < 100 else f"{found:,.0f}"


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
        *table(HEADS, (cost.row for cost in costs_of)),
        "",
        "## The paper's settings, line by line",
        "",
        *table(("the paper", "here", "why"), SETTINGS),
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
    return table(heads, rows)


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
