"""One HTML page of a run: what was tested, what was reconstructed and what that shows."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from leakbound._util.groups import grouped
from leakbound.assess.record import (
    EXPOSED,
    ON_AVERAGE,
    PROTECTED,
    UNDECIDED,
    VERDICTS,
    CriterionInfo,
)
from leakbound.assess.verdict import DIAGNOSES, meanings
from leakbound.report import columns, overview, tables
from leakbound.report.attackers import audience
from leakbound.report.best_attack import best_attack_tables
from leakbound.report.equal_utility import equal_utility
from leakbound.report.folder import Run, read
from leakbound.report.gallery import (
    BASELINE,
    IDENTIFIED,
    CardSource,
    best_examples,
    captured_updates,
    cards_of,
    pages_of,
)
from leakbound.report.over_rounds import panels, round_rows
from leakbound.report.sentences import attacked_rounds, is_it_this_person, revealed
from leakbound.report.tables import AttackSummary, ErrorBoundRow, RunSummary
from leakbound.report.template import cell, check_installed, rendered, save, significant
from leakbound.report.utility_figure import short, spread, utility_figures

FILE = "report.html"
ROWS = 500
"""How many rows of one kind the first page shows."""
PANELS = 12
LINES = 20
"""Of how many models and batch sizes the first page has tables, and of how many attacks."""
LONGEST_PLAN = 100_000
"""How many letters of the plan the page shows."""


HeatLine = tuple[str, dict[str, AttackSummary], ErrorBoundRow | None]
"""A defense, what each attack did, and what bounds every attacker."""


@dataclass(frozen=True)
class Heatmap:
    """Defense by attack on one model and batch size.

    `lowest`: the lowest score of all tables, which has no color. `more`: how many defenses are left
    out, those with the lowest scores.
    """

    model: str
    batch_size: int
    attacks: tuple[str, ...]
    lines: tuple[HeatLine, ...]
    lowest: float
    more: int

    @property
    def bounded(self) -> bool:
        return any(bound for *_, bound in self.lines)


def write(folder: Path, *, images: bool = True) -> Path:
    """Write `report.html` into a run folder; the same inputs give the same bytes.

    A run of more than `gallery.EXPERIMENTS` experiments gets further pages beside it
    (`report-2.html`, ...), and their pictures stay in `pictures/`; that of a smaller run is one
    file that holds all. Without `images` no page shows pictures of true or reconstructed examples.

    Returns:
        The path of the first page. All are readable by their owner only.

    Raises:
        ValueError: a missing or damaged file, an unknown schema, a folder that cannot be written,
            a report.html that leakbound did not write, or jinja2 or matplotlib is not installed.
    """
    check_installed()
    folder = Path(folder)
    for name, page in pages(read(folder), images=images):
        save(folder / name, page)
    return folder / FILE


def write_one(folder: Path, path: Path) -> Path:
    """Write a run's report to a path anywhere: one file that holds all.

    Raises:
        ValueError: as `write`; a run whose report needs several pages.
    """
    check_installed()
    first, *more = pages(read(Path(folder)), images=True)
    if more:
        raise ValueError(
            f"the report of {folder} has {len(more) + 1} pages, which stand beside its pictures; "
            "write them there: leakbound.report.write"
        )
    return save(path, first[1])


def pages(run: Run, *, images: bool) -> Iterator[tuple[str, str]]:
    """The name and text of every page; each is made when it is asked for."""
    if not images:
        run = run.withheld()
    summary = RunSummary(run)
    names = summary.names
    parts = pages_of(run.assessments, names)
    inline = len(parts) == 1
    files = [FILE, *(f"report-{number}.html" for number in range(2, len(parts) + 1))]
    counted = (a for a in run.assessments if a.status != "not_applicable")
    place = {a.experiment: number for number, a in enumerate(counted, 1)}
    # A run of which nothing applies still has a page.
    ends = [[place[a.experiment] for s in part for a in s.experiments] or [0] for part in parts]
    labels = [f"experiments {min(places):,} to {max(places):,}" for places in ends]
    every_page = list(zip(files, labels, strict=True))
    best = best_examples(parts, names)
    common = _context(summary)
    for number, (here, about) in enumerate(every_page):
        links = {
            key: ("" if page == number else files[page]) + f"#{anchor}"
            for key, (page, anchor) in best.items()
        }
        context = common | _experiments(
            run,
            names,
            parts[number],
            images=images,
            inline=inline,
        )
        context |= {
            "images": images,
            "best": links,
            "here": here,
            "home": "" if number == 0 else FILE,
            "about": about,
            "pages": every_page,
            "linked": not inline,
            # A page on a disk has no origin that 'self' would match.
            "img_from": "data:" if inline else "data: 'self' file:",
        }
        if number == 0:
            context["over"] = overview.overview(
                summary,
                links,
                images=images,
                inline=inline,
            )
            context["utility_figures"] = utility_figures(
                equal_utility(run.assessments, run.trainings, names),
                [(view.model, view.batch_size) for view in context["over"].views],
                {setting.label: setting.short for setting in names.settings.values()},
                overview.families(names),
            )
            yield here, rendered("report.html.j2", context, {"spread": spread, "short": short})
        else:
            # A page of experiments has only the rows of its own configurations, and its neighbors.
            keys = {(card.model, card.batch_size, card.defense) for card in context["gallery"]}
            context |= {
                "verdicts": [row for row in summary.configurations if row.key in keys],
                "summaries": [row for row in summary.attacks if row.key in keys],
                "pages": every_page[number - 1 : number + 2],
            }
            yield here, rendered("report.further.j2", context)


def _context(summary: RunSummary) -> dict[str, Any]:
    """What all pages of a run show."""
    run = summary.run
    assessments = summary.assessments
    names = summary.names
    rows = summary.configurations
    criterion = assessments[0].criterion
    counts = Counter(row.verdict for row in rows)
    plan = json.dumps(
        run.info.plan,
        indent=1,
        sort_keys=True,
        ensure_ascii=False,
    )
    # A diagnosis may be of an experiment that a later run of the plan no longer has.
    by_experiment = {a.experiment: a for a in assessments}
    diagnoses = {
        names.key(by_experiment[one.experiment]): one
        for one in run.diagnoses
        if one.experiment in by_experiment
    }
    truth_known = all(a.truth_known for a in assessments)
    # Three verdicts are always explained, the others where they may occur.
    met = {a.verdict for a in assessments} | {EXPOSED, UNDECIDED, PROTECTED}
    if any(b.on_error and b.covers == "all" for a in assessments for b in a.bounds):
        met.add(ON_AVERAGE)
    most_exposed = sorted(rows, key=lambda row: VERDICTS.index(row.verdict))
    verdicts = rows
    if len(rows) > ROWS:
        best_first = sorted(rows, key=lambda row: -(row.best_score or 0.0))
        verdicts = sorted(best_first, key=lambda row: VERDICTS.index(row.verdict))
    summaries = [row for row in summary.attacks if row.ran or row.failed]
    medians = grouped(
        ((row.model, row.defense), row.score.median) for row in summaries if row.score
    )
    if len(summaries) > ROWS:
        summaries.sort(key=lambda row: -(row.best_score or 0.0))
    # Each defense with its guarantee, whether it depends on private data, and its settings.
    settings = grouped(
        ((tables.title(d.name), d.guarantee, d.data_dependent_law), d.settings)
        for d in (a.defense for a in assessments)
    )
    measured = [row for row in rows if row.best_score is not None and row.strongest_attack]
    return {
        "most": ROWS,
        "listed": tables.SHOWN,
        "panels": PANELS,
        "run": run,
        "info": run.info,
        "summary": summary,
        "names": names,
        "costs": summary.costs,
        "criterion": criterion,
        "noun": overview.nouns(assessments),
        "baselines": overview.BASELINES.get(assessments[0].data.domain, overview.MEAN),
        "plan": plan if len(plan) <= LONGEST_PLAN else f"{plan[:LONGEST_PLAN]} ... (see run.json)",
        "status": Counter(a.status for a in assessments),
        "verdict_words": [word for word in VERDICTS if word in met],
        "meanings": meanings(truth_known=truth_known),
        "counts": [(word, n) for word in VERDICTS if (n := counts[word])],
        "verdicts": verdicts[:ROWS],
        "worst": max(
            measured,
            key=lambda row: tables.defined([row.best_score]),
            default=None,
        ),
        "summaries": summaries[:ROWS],
        "summaries_left_out": len(summaries) > ROWS,
        "attacked_rounds": attacked_rounds(run, names),
        "diagnoses": diagnoses,
        "why": {one.word: DIAGNOSES[one.word] for one in diagnoses.values()},
        "captured": captured_updates(assessments, names),
        "revealed": revealed(assessments, names),
        "persons": is_it_this_person(rows, criterion),
        "truth_unknown": not truth_known,
        "who": audience(assessments),
        "labels_hidden": not all(a.threat.labels_known for a in assessments),
        "defenses": [(*key, list(dict.fromkeys(texts))) for key, texts in settings.items()],
        "rare": tables.rare_share(rows),
        "theorems": summary.theorems.all[: tables.SHOWN],
        "missing_bounds": list(tables.missing_bounds(assessments, names).items()),
        "measure": partial(_measure, criterion),
        "reading": partial(_reading, criterion),
        "columns": columns.column_tables(assessments, names, most_exposed),
        "significance": columns.SIGNIFICANT,
        "over_rounds": round_rows(assessments, names),
        "round_panels": panels(assessments, names, f"{criterion.axis}, {criterion.unit}"),
        "curves": tables.loss_curves(run.trainings, names),
        # By model and defense, the score of the strongest attack at any batch size.
        "strongest": {key: max(values) for key, values in medians.items()},
        "best_attack": best_attack_tables(assessments, run.trainings, names),
        "heatmaps": heatmaps(summary),
        "attacks_left_out": max(0, len(names.attacks) - LINES),
    }


def _experiments(
    run: Run,
    names: tables.Names,
    part: Sequence[CardSource],
    *,
    images: bool,
    inline: bool,
) -> dict[str, Any]:
    """The experiments that one page shows, and whether anything of the data is among them."""
    cards = cards_of(run, names, part, images=images, inline=inline)
    entries = [entry for card in cards for entry in card.entries]
    pictures = any(e.picture or e.truth or e.leak_map for e in entries)
    valued = any(e.row for e in entries)
    return {
        "gallery": cards,
        "entries": entries,
        "certified": [e for e in entries if e.own.capture and e.own.certificate],
        "drilled": any(card.table.examples for card in cards),
        "pictures": pictures,
        "valued": valued,
        "own_data": (pictures or valued) and run.info.own_data,
    }


def _measure(criterion: CriterionInfo, name: str) -> str:
    columns = criterion.of is not None
    words = {
        criterion.metric: criterion.axis if columns else f"{criterion.axis}, {criterion.unit}",
        BASELINE: BASELINE if columns else f"{BASELINE}, {criterion.unit}",
        "ms_ssim": "MS-SSIM",
        "label_accuracy": "label right",
    }
    short = ("ssim", "mse", "rmse", "lpips", "ncc")
    return name.upper() if name in short else words.get(name, name).replace("_", " ")


def _reading(
    criterion: CriterionInfo,
    name: str,
    value: float | None,
) -> str:
    if value in (0.0, 1.0) and name in (IDENTIFIED, "label_accuracy"):
        return "yes" if value else "no"
    is_score = name in (criterion.metric, BASELINE)
    return cell(value, criterion) if is_score else significant(value)


def heatmaps(summary: RunSummary) -> list[Heatmap]:
    """The median score of every pair that ran, one table for each of some models and batch sizes.

    An attack that nowhere applies to a model and batch size has no column. All tables together
    have at most `ROWS` lines.
    """
    attacks = list(summary.names.attacks)[:LINES]
    shown = list(dict.fromkeys((row.model, row.batch_size) for row in summary.attacks))[:PANELS]
    ran = [
        row
        for row in summary.attacks
        if (row.ran or row.failed)
        and (row.model, row.batch_size) in shown
        and row.attack in attacks
    ]
    lowest = min((row.score.median for row in ran if row.score), default=0.0)
    panels = grouped(((row.model, row.batch_size), row) for row in ran)
    bounds = {row.key: row.error_bound for row in summary.configurations}

    def highest(line: HeatLine) -> float:
        scores = (row.score for row in line[1].values())
        return max((score.median for score in scores if score), default=-math.inf)

    made = []
    for (model, size), rows in panels.items():
        met = {row.attack for row in rows}
        heads = tuple(attack for attack in attacks if attack in met)
        lines = [
            (defense, {row.attack: row for row in some}, bounds.get((model, size, defense)))
            for defense, some in grouped((row.defense, row) for row in rows).items()
        ]
        # Every table gets its share of the lines, or the first one would take them all.
        room = ROWS // len(panels)
        if len(lines) > room:
            lines.sort(key=highest, reverse=True)
        left_out = max(0, len(lines) - room)
        made.append(Heatmap(model, size, heads, tuple(lines[:room]), lowest, left_out))
    return made
