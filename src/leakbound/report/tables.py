"""Tables of a report: what the records say, counted with intervals and averaged over nothing else.

A cell is one attack on one batch under one defense; its value is the mean over its images. A group
is all cells of one model, batch size, defense and attack: they differ in their seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from scipy.special import bdtr, betaincinv

from leakbound.assess.record import ON_AVERAGE, PROVED, Record
from leakbound.report import captured
from leakbound.report.floors import Ceiling, Chance, Sources, ceiling, chance, of_mean_error

LEVEL = 0.95
LOWER_IS_BETTER = frozenset({"mse", "rmse"})
NO_DEFENSE = "none"


@dataclass(frozen=True)
class Middle:
    """A median over cells. `exact`: low..high covers it with 95 %; else they are min and max."""

    median: float
    low: float
    high: float
    n: int
    exact: bool


@dataclass(frozen=True)
class Share:
    """`hits` of `n`, with a 95 % interval."""

    hits: int
    n: int
    low: float
    high: float

    @property
    def value(self) -> float:
        """The share itself."""
        return self.hits / self.n


@dataclass(frozen=True)
class Setting:
    """A defense with one choice of its parameters. `strength`: those that vary under its name."""

    name: str
    label: str
    strength: tuple[tuple[str, Any], ...]
    guarantee: str
    data_dependent_law: bool = False

    @property
    def number(self) -> float | None:
        """The strength as one number, where one numeric parameter varies."""
        if len(self.strength) != 1 or isinstance(self.strength[0][1], bool | str | None):
            return None
        value = self.strength[0][1]
        return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True)
class Group:
    """All cells of one model, batch size, defense and attack."""

    model: str
    batch_size: int
    defense: str
    attack: str
    ok: int
    problems: int
    not_applicable: int
    failed: int
    psnr: Middle | None
    ssim: Middle | None
    best: float | None
    blind: float | None
    reached: Share | None
    labels: float | None
    identified: float | None
    lpips: Middle | None = None

    @property
    def cells(self) -> int:
        """How many cells there are, whatever became of them."""
        return self.ok + self.not_applicable + self.failed


@dataclass(frozen=True)
class Verdict:
    """What all attacks together show of one model, batch size and defense.

    `attack` is the one that rebuilt the best single image, `best` that image's PSNR. `ceiling` is
    the strongest floor on all attackers' mean error, `mean_error` the same measure of the attack
    that comes closest to it: the PSNR of its mean squared error. `chance` is the probability with
    which any attacker reaches the threshold. `proved` counts the cells whose update proves
    that the reconstruction is the input; `attack` is theirs where nothing else was measured.
    """

    model: str
    batch_size: int
    defense: str
    verdict: str
    attack: str | None
    best: float | None
    reached: Share | None
    cells: int
    failed: int
    ceiling: Ceiling | None = None
    mean_error: float | None = None
    chance: Chance | None = None
    proved: int = 0


@dataclass(frozen=True)
class Utility:
    """Test accuracy of one model under one defense, over seeds."""

    mean: float | None
    low: float | None
    high: float | None
    n: int
    failed: int


def middle(values: Sequence[float]) -> Middle | None:
    """The median with an exact interval from order statistics (binomial, no assumption on shape).

    Below six values no such interval has 95 %: then the smallest and the largest are given.

    Example:
        >>> middle([1.0, 2.0, 9.0])
        Middle(median=2.0, low=1.0, high=9.0, n=3, exact=False)
    """
    if not values:
        return None
    ordered, n = sorted(values), len(values)
    rank = 0
    while rank < n // 2 and bdtr(rank, n, 0.5) <= (1 - LEVEL) / 2:
        rank += 1
    low, high = (ordered[rank - 1], ordered[n - rank]) if rank else (ordered[0], ordered[-1])
    return Middle(median(ordered), low, high, n, rank > 0)


def share(hits: int, n: int) -> Share | None:
    """A share with its Clopper-Pearson interval; None of nothing.

    Example:
        >>> found = share(0, 10)
        >>> found.low, round(found.high, 4)
        (0.0, 0.3085)
    """
    if n == 0:
        return None
    tail = (1 - LEVEL) / 2
    low = 0.0 if hits == 0 else float(betaincinv(hits, n - hits + 1, tail))
    high = 1.0 if hits == n else float(betaincinv(hits + 1, n - hits, 1 - tail))
    return Share(hits, n, low, high)


def reaches(cell: Record) -> list[bool]:
    """Per image: it reaches the cell's threshold and beats the guess that saw no update.

    Nothing where the truth is not known.
    """
    if cell["metrics"] is None:
        return []
    metric, limit = cell["threshold"]["metric"], cell["threshold"]["value"]
    sign = -1 if metric in LOWER_IS_BETTER else 1
    values = cell["metrics"].get(metric) or []
    pairs = zip(cell["metrics"]["psnr"], cell["blind"]["psnr"], strict=True)
    beats = [other is None or (own is not None and own > other) for own, other in pairs]
    return [
        value is not None and sign * value >= sign * limit and better
        for value, better in zip(values, beats, strict=False)
    ]


def proved(cell: Record) -> bool:
    """Whether the update proves that the cell's reconstruction is the input."""
    return captured.proof(cell) is not None


def cell_value(cell: Record, metric: str, table: str = "metrics") -> float | None:
    """The mean over a cell's images where the metric is defined."""
    values = [v for v in (cell[table] or {}).get(metric) or [] if v is not None]
    return fmean(values) if values else None


class Names:
    """What a page calls models, defenses and attacks: one label for each distinct setting."""

    def __init__(self, cells: Iterable[Record], trainings: Iterable[Record] = ()) -> None:
        self.settings: dict[str, Setting] = {}
        self.attacks: dict[str, dict[str, str]] = {}
        self.models: dict[str, Record] = {}
        cells = list(cells)
        both = [*cells, *trainings]
        kinds: dict[str, dict[str, dict[str, Any]]] = {}
        hashes: dict[str, set[str]] = {}
        for record in both:
            defense = record["defense"]
            kinds.setdefault(defense["name"], {})[_key(defense["parameters"])] = defense[
                "parameters"
            ]
        self._varying = {name: _varying(list(rows.values())) for name, rows in kinds.items()}
        for cell in cells:
            hashes.setdefault(cell["attack"]["name"], set()).add(cell["attack"]["hash"])
        self._twins = {name for name, found in hashes.items() if len(found) > 1}
        for record in both:
            setting = self._setting(record["defense"])
            self.settings.setdefault(setting.label, setting)
            self.models.setdefault(self.model(record), record["model"])
        for cell in cells:
            self.attacks.setdefault(self.attack(cell), cell["attack"])

    def model(self, record: Record) -> str:
        """A model with its parameters and training."""
        model = record["model"]
        notes = [_pair(*item) for item in model["parameters"].items()]
        if model.get("train_steps"):
            notes.append(f"trained {model['train_steps']} steps")
        if model.get("weights"):
            notes.append(f"weights {model['weights']}")
        return str(model["name"]) + (f" ({', '.join(notes)})" if notes else "")

    def defense(self, record: Record) -> str:
        """A defense with those of its parameters that vary."""
        return self._setting(record["defense"]).label

    def attack(self, cell: Record) -> str:
        """An attack; with its hash where one name has several settings."""
        name, mark = cell["attack"]["name"], cell["attack"]["hash"]
        return f"{name} [{mark[:6]}]" if name in self._twins else str(name)

    def _setting(self, defense: Record) -> Setting:
        name, parameters = defense["name"], defense["parameters"]
        strength = tuple((key, parameters.get(key)) for key in self._varying[name])
        title = "no defense" if name == NO_DEFENSE else name
        label = " ".join([title, *(_pair(*item) for item in strength)])
        private = bool(defense.get("data_dependent_law"))
        return Setting(name, label, strength, defense.get("guarantee", "none"), private)


def groups(cells: Iterable[Record], names: Names) -> list[Group]:
    """One row for each model, batch size, defense and attack, in the order of the records."""
    found: dict[tuple[str, int, str, str], list[Record]] = {}
    for cell in cells:
        key = (names.model(cell), cell["batch_size"], names.defense(cell), names.attack(cell))
        found.setdefault(key, []).append(cell)
    return [_group(key, members) for key, members in found.items()]


def verdicts(cells: Iterable[Record], names: Names) -> list[Verdict]:
    """One row for each model, batch size and defense: exposed if any attack's cell is.

    Protected only if every cell with a verdict is; protected on average if every one is at least
    that; undecided in all other cases.
    """
    cells = list(cells)
    sources = Sources(cells)
    found: dict[tuple[str, int, str], list[Record]] = {}
    for cell in cells:
        key = (names.model(cell), cell["batch_size"], names.defense(cell))
        found.setdefault(key, []).append(cell)
    return [_verdict(key, members, names, sources) for key, members in found.items()]


def utility(trainings: Iterable[Record], names: Names) -> dict[tuple[str, str], Utility]:
    """Test accuracy by model and defense; failed trainings are counted, not averaged."""
    found: dict[tuple[str, str], list[Record]] = {}
    for unit in trainings:
        found.setdefault((names.model(unit), names.defense(unit)), []).append(unit)
    return {key: _utility(units) for key, units in found.items()}


def _group(key: tuple[str, int, str, str], cells: list[Record]) -> Group:
    ok = [cell for cell in cells if cell["status"] == "ok"]

    def values(metric: str, table: str = "metrics") -> list[float]:
        return _defined(cell_value(cell, metric, table) for cell in ok)

    blind, hits = values("psnr", "blind"), [hit for cell in ok for hit in reaches(cell)]
    return Group(
        *key,
        ok=len(ok),
        problems=sum(bool(cell.get("problem")) for cell in ok),
        not_applicable=sum(cell["status"] == "not_applicable" for cell in cells),
        failed=sum(cell["status"] == "failed" for cell in cells),
        psnr=middle(values("psnr")),
        ssim=middle(values("ssim")),
        best=max(_images(ok), default=None),
        blind=median(blind) if blind else None,
        reached=share(sum(hits), len(hits)),
        labels=_mean(values("label_accuracy")),
        identified=_mean(values("identification")),
        lpips=middle(values("lpips")),
    )


def word(given: Iterable[str | None]) -> str:
    """The verdict of a combination from those of its cells; None is no verdict.

    Example:
        >>> word(["protected", "protected on average", None])
        'protected on average'
    """
    known = set(given) - {None}
    for exposed in ("exposed", PROVED):
        if exposed in known:
            return exposed
    if not known:
        return "undecided"
    if known == {"protected"}:
        return "protected"
    return ON_AVERAGE if known <= {"protected", ON_AVERAGE} else "undecided"


def _verdict(
    key: tuple[str, int, str], cells: list[Record], names: Names, sources: Sources
) -> Verdict:
    images: dict[str, list[float]] = {}
    hits: dict[str, list[bool]] = {}
    for cell in cells:
        if cell["status"] == "ok":
            label = names.attack(cell)
            hits.setdefault(label, []).extend(reaches(cell))
            images.setdefault(label, []).extend(_images([cell]))
    best = {label: max(values) for label, values in images.items() if values}
    strongest = max(best, key=lambda label: best[label], default=None)
    shown = hits[strongest] if strongest else []
    certain = [names.attack(cell) for cell in cells if proved(cell)]
    return Verdict(
        *key,
        verdict=word(cell.get("verdict") for cell in cells),
        attack=strongest or (certain[0] if certain else None),
        best=best[strongest] if strongest else None,
        reached=share(sum(shown), len(shown)),
        cells=len(cells),
        failed=sum(cell["status"] == "failed" for cell in cells),
        ceiling=ceiling(cells, sources),
        mean_error=max(_defined(map(of_mean_error, images.values())), default=None),
        chance=chance(cells, sources),
        proved=len(certain),
    )


def _utility(units: list[Record]) -> Utility:
    values = [float(unit["accuracy"]) for unit in units if unit["status"] == "ok"]
    failed = len(units) - len(values)
    if not values:
        return Utility(None, None, None, 0, failed)
    return Utility(fmean(values), min(values), max(values), len(values), failed)


def _images(cells: Iterable[Record]) -> list[float]:
    return _defined(v for cell in cells for v in (cell["metrics"] or {}).get("psnr", ()))


def _defined(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _varying(rows: list[dict[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if len({_key(row.get(name)) for row in rows}) > 1]


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _pair(name: str, value: Any) -> str:
    return f"{name}={plain(value)}"


def plain(value: Any) -> str:
    """A JSON value as short text; numbers without digits that say nothing.

    Example:
        >>> plain(0.010), plain([8, 16]), plain(None)
        ('0.01', '[8, 16]', 'none')
    """
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(plain, value)) + "]"
    words: dict[Any, str] = {None: "none", True: "yes", False: "no"}
    if value is None or isinstance(value, bool):
        return words[value]
    return str(value)
