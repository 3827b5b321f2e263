"""One HTML page of a run: what was tested, what was reconstructed and what that shows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from leakbound.assess.record import (
    EXPOSED,
    ON_AVERAGE,
    PROTECTED,
    UNDECIDED,
    VERDICTS,
    Assessment,
    CriterionInfo,
)
from leakbound.assess.verdict import DIAGNOSES, meanings
from leakbound.report import best_attack, columns, heatmap, overview, tables, trainings
from leakbound.report.facts import revealed
from leakbound.report.folder import Run, read
from leakbound.report.gallery import (
    BASELINE,
    Card,
    best_examples,
    captured_updates,
    cards_of,
    pages_of,
)
from leakbound.report.rounds import attacked_rounds
from leakbound.report.template import (
    cell,
    check_installed,
    rendered,
    save,
    significant,
    top_of,
)

FILE = "report.html"
ROWS = 500
"""How many rows of one kind the first page shows."""
PANELS = 12
LINES = 20
"""Of how many models and batch sizes the first page has tables, and of how many attacks."""
_LONG = (
    *("verdicts", "summaries", "failed", "untrained", "captured", "settings"),
    *("attacks", "models", "progress", "pages"),
)
LONGEST_PLAN = 100_000
"""How many letters of the plan the page shows."""


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
    names = tables.Names(run.assessments, run.trainings)
    parts = pages_of(run.assessments, names)
    pages_at = [FILE, *(f"report-{number}.html" for number in range(2, len(parts) + 1))]
    common = _context(run, names)
    best = best_examples(parts, names)
    counted = (a for a in run.assessments if a.status != "not_applicable")
    place = {a.experiment: number for number, a in enumerate(counted, 1)}
    ends = [[place[a.experiment] for s in part for a in s.experiments] or [0] for part in parts]
    labels = [f"experiments {min(own):,} to {max(own):,}" for own in ends]
    for part, here, about in zip(parts, pages_at, labels, strict=True):
        links = {
            key: ("" if pages_at[page] == here else pages_at[page]) + f"#{anchor}"
            for key, (page, anchor) in best.items()
        }
        cards = cards_of(run, names, part, images=images, inline=len(pages_at) == 1)
        context = common | _shown(cards)
        context |= {
            "images": images,
            "best": links,
            "here": here,
            "home": "" if here == FILE else FILE,
            "about": about,
            "pages": list(zip(pages_at, labels, strict=True)),
            "linked": len(pages_at) > 1,
            "img_from": "data:" if len(pages_at) == 1 else "data: 'self' file:",
            "own_data": (context["pictures"] or context["valued"]) and run.info.own_data,
        }
        if here == FILE:
            inline = len(pages_at) == 1
            context |= _opening(run, names, context, images=images, inline=inline)
            yield here, rendered("report.html.j2", _first_page(context))
        else:
            yield here, rendered("report.further.j2", _further_page(context))


def _opening(
    run: Run, names: tables.Names, context: Mapping[str, Any], *, images: bool, inline: bool
) -> dict[str, Any]:
    """What the first page begins with, and its functions for single lines."""
    rows = context["verdicts"]
    accuracies = context["accuracies"]
    best = context["best"]
    found = overview.overview(run, names, rows, accuracies, best, images=images, inline=inline)
    views = found.views[: overview.VIEWS]
    return {
        "over": found,
        "views": views,
        "folded": max(0, ROWS // max(1, len(views)) - overview.LINES),
        "views_left_out": max(0, len(found.views) - overview.VIEWS),
        "lines": overview.LINES,
        "measured": overview.measured,
        "limit": overview.limit,
        "baselines": overview.BASELINES.get(run.assessments[0].data.domain, overview.MEAN),
    }


def _first_page(context: dict[str, Any]) -> dict[str, Any]:
    rows = context["verdicts"]
    measured = [row for row in rows if row.best_score is not None and row.strongest_attack]
    worst = max(measured, key=lambda row: row.best_score, default=None)
    anchor = worst and context["best"].get((*worst.key, worst.strongest_attack))
    if len(rows) > ROWS:
        rows = sorted(rows, key=lambda row: (VERDICTS.index(row.verdict), -(row.best_score or 0.0)))
    summaries = [row for row in context["summaries"] if row.ran or row.failed]
    if len(summaries) > ROWS:
        summaries = sorted(summaries, key=lambda row: -(row.best_score or 0.0))
    context = context | {"verdicts": rows, "summaries": summaries}
    left_out = {name: max(0, len(context[name]) - ROWS) for name in _LONG}
    left_out |= {name: context[f"{name}_left_out"] for name in ("best_attack", "columns")}
    shown = {name: context[name][:ROWS] for name in _LONG}
    more = {"worst": worst, "worst_anchor": anchor, "contents": _contents(context)}
    return context | shown | more | {"left_out": left_out}


def _further_page(context: dict[str, Any]) -> dict[str, Any]:
    own = {(card.model, card.batch_size, card.defense) for card in context["gallery"]}
    mine = {
        name: [row for row in context[name] if (row.model, row.batch_size, row.defense) in own]
        for name in ("verdicts", "summaries")
    }
    at = [file for file, _ in context["pages"]].index(context["here"])
    beside = context["pages"][max(0, at - 1) : at + 2]
    return context | mine | {"pages": beside, "left_out": {"pages": 0}}


def _context(run: Run, names: tables.Names) -> dict[str, Any]:
    own = run.assessments
    theorems = tables.Theorems(own)
    verdicts = tables.configurations(own, names, theorems)
    summaries = tables.attack_summaries(own, names)
    words = _verdict_words(own)
    defenses = _defenses(own)
    facts = revealed(own, names)
    accuracies = tables.accuracies(run.trainings, names)
    counts = Counter(row.verdict for row in verdicts)
    plan = json.dumps(run.info.plan, indent=1, sort_keys=True, ensure_ascii=False)
    missing = [*tables.missing_bounds(own, names).items()]
    untrained = [training for training in run.trainings if training.status == "failed"]
    return {
        "info": run.info,
        "plan": plan if len(plan) <= LONGEST_PLAN else f"{plan[:LONGEST_PLAN]} ... (see run.json)",
        "names": names,
        "status": Counter(a.status for a in own),
        "missing": run.missing,
        "problems": sum(bool(a.problem) for a in own if a.status == "ok"),
        "verdict_words": words,
        "meanings": meanings(truth_known=all(a.truth_known for a in own)),
        "counts": [(word, n) for word in VERDICTS if (n := counts[word])],
        "counted": ", ".join(f"{counts[word]} {word}" for word in VERDICTS if counts[word]),
        "verdicts": verdicts,
        "attacked_rounds": attacked_rounds(run, names),
        **_diagnoses(run, names),
        "configurations": len(verdicts),
        "summaries": summaries,
        "lpips": any(row.lpips for row in summaries),
        "failed": [a for a in own if a.status == "failed"],
        "untrained": untrained,
        "untrained_count": len(untrained),
        "inapplicable": sum(a.status == "not_applicable" for a in own),
        "captured": captured_updates(own, names),
        "revealed": facts[: tables.SHOWN],
        "more_revealed": max(0, len(facts) - tables.SHOWN),
        "truth_unknown": not all(a.truth_known for a in own),
        "defenses": defenses,
        "settings": [(name, text) for name, _, _, settings in defenses for text in settings],
        "attacks": list(names.attacks.items()),
        "models": list(names.models.items()),
        "labels_hidden": not all(a.threat.labels_known for a in own),
        "accuracies": accuracies,
        "unskilled": any(one.unskilled for one in accuracies.values()),
        "title": tables.title,
        "threats": list(dict.fromkeys(a.threat for a in own)),
        "thresholds": list(dict.fromkeys(a.criterion.text for a in own)),
        "batch_sizes": sorted({a.batch_size for a in own}),
        "seeds": sorted({a.seed for a in own}),
        "clients": sorted({a.clients for a in own}),
        "error_bounds": any(row.error_bound for row in verdicts),
        "success_bounds": any(row.success_bound for row in verdicts),
        "rare": tables.rare_share(verdicts),
        "theorems": theorems.all[: tables.SHOWN],
        "more_theorems": max(0, len(theorems.all) - tables.SHOWN),
        "unbounded": missing[: tables.SHOWN],
        "more_unbounded": max(0, len(missing) - tables.SHOWN),
        **_scores(own, names, verdicts),
        **_best_attack(run, names),
        **_charts(run, names, summaries, verdicts),
    }


def _diagnoses(run: Run, names: tables.Names) -> dict[str, Any]:
    """Why configurations are undecided, by configuration, and what the words mean."""
    own = {a.experiment: a for a in run.assessments}
    found = {names.key(own[one.experiment]): one for one in run.diagnoses if one.experiment in own}
    words = list(dict.fromkeys(one.word for one in found.values()))
    return {"diagnoses": found, "why": [(word, DIAGNOSES[word]) for word in words]}


def _scores(
    own: Sequence[Assessment], names: tables.Names, verdicts: Sequence[tables.Configuration]
) -> dict[str, Any]:
    """What scores are called and measure; of a table, its columns."""
    criterion = own[0].criterion
    ordered = sorted(verdicts, key=lambda row: VERDICTS.index(row.verdict))
    found = columns.column_tables(own, names, ordered)
    return {
        "criterion": criterion,
        "measured_by": "share of " * (criterion.of is not None) + criterion.axis,
        "in_cells": criterion.unit if criterion.of is None else criterion.axis,
        "noun": overview.nouns(own),
        "measure": partial(_measure, criterion),
        "reading": partial(_reading, criterion),
        "columns": found[:PANELS],
        "columns_left_out": max(0, len(found) - PANELS),
        "significance": columns.SIGNIFICANT,
    }


def _contents(context: Mapping[str, Any]) -> list[tuple[str, str]]:
    sections = [
        ("captured", "Captured updates", context["captured"]),
        ("verdicts", "Every configuration", True),
        ("tested", "What was tested", True),
        ("columns", "Columns", context["columns"]),
        ("heatmaps", "Defense by attack", context["heatmaps"]),
        ("utility", "Cost in accuracy", context["accuracies"]),
        ("best-attack", "Best-attack error", context["best_attack"]),
        ("results", "Results by attack", True),
        ("failed", "Failed", context["failed"] or context["untrained"]),
        ("gallery", "Pictures" if context["pictures"] else "Experiments", True),
        ("settings", "Settings", True),
    ]
    return [(anchor, words) for anchor, words, there in sections if there]


def _shown(gallery: Sequence[Card]) -> dict[str, Any]:
    entries = [entry for card in gallery for entry in card.entries]
    return {
        "gallery": gallery,
        "experiments_shown": len(entries),
        "certified": [e for e in entries if e.own.capture and e.own.certificate],
        "drilled": any(card.table.examples for card in gallery),
        "pictures": any(e.picture or e.truth or e.leak_map for e in entries),
        "valued": any(e.row for e in entries),
        "shown_models": list(dict.fromkeys(card.model for card in gallery)),
        "shown_defenses": list(dict.fromkeys(card.defense for card in gallery)),
        "shown_attacks": list(dict.fromkeys(entry.attack for entry in entries)),
    }


def _measure(criterion: CriterionInfo, name: str) -> str:
    columns = criterion.of is not None
    words = {
        criterion.metric: criterion.axis if columns else f"{criterion.axis}, {criterion.unit}",
        BASELINE: BASELINE if columns else f"{BASELINE}, {criterion.unit}",
        "identification": "identified",
        "ms_ssim": "MS-SSIM",
        "label_accuracy": "label right",
    }
    short = ("ssim", "mse", "rmse", "lpips", "ncc")
    return name.upper() if name in short else words.get(name, name).replace("_", " ")


def _reading(criterion: CriterionInfo, name: str, value: float | None) -> str:
    if value in (0.0, 1.0) and name in ("identification", "label_accuracy"):
        return "yes" if value else "no"
    own = name in (criterion.metric, BASELINE)
    return cell(value, criterion) if own else significant(value)


def _verdict_words(own: Sequence[Assessment]) -> list[str]:
    """The verdicts that this page explains: three always, the others where they may occur."""
    met = {a.verdict for a in own} | {EXPOSED, UNDECIDED, PROTECTED}
    if any(bound.on_error and bound.covers == "all" for a in own for bound in a.bounds):
        met.add(ON_AVERAGE)
    return [word for word in VERDICTS if word in met]


def _defenses(own: Sequence[Assessment]) -> list[tuple[str, str, bool, list[str]]]:
    found = tables.grouped(
        ((d.name, d.guarantee, d.data_dependent_law), d.settings) for d in (a.defense for a in own)
    )
    return [(*key, list(dict.fromkeys(settings))) for key, settings in found.items()]


def _best_attack(run: Run, names: tables.Names) -> dict[str, Any]:
    found = best_attack.best_attack_tables(run.assessments, run.trainings, names)
    rows = [row for table in found for row in table.rows]
    shown = []
    room = ROWS
    for table in found:
        if room > 0:
            shown.append(replace(table, rows=table.rows[:room]))
            room -= len(table.rows)
    return {
        "best_attack": shown,
        "best_attack_left_out": max(0, len(rows) - ROWS),
        "tight": any(isinstance(row.bound, best_attack.TightestBound) for row in rows),
        "losses": any(row.loss is not None for row in rows),
    }


def _charts(
    run: Run,
    names: tables.Names,
    summaries: Sequence[tables.AttackSummary],
    verdicts: Sequence[tables.Configuration],
) -> dict[str, Any]:
    both = list(dict.fromkeys((row.model, row.batch_size) for row in summaries))
    attacks = list(names.attacks)[:LINES]
    drawn = set(both[:PANELS])
    rows = [r for r in summaries if (r.model, r.batch_size) in drawn and r.attack in attacks]
    strongest = tables.grouped(
        ((row.model, row.defense), row.score.median) for row in summaries if row.score
    )
    bounds = {row.key: row.error_bound for row in verdicts}
    progress = trainings.loss_curves(run.trainings, names)
    return {
        "heatmaps": heatmap.heatmaps(
            rows, attacks, bounds, top_of(run.assessments[0].criterion), ROWS
        ),
        "strongest": {key: max(medians) for key, medians in strongest.items()},
        "panels_left_out": max(0, len(both) - PANELS),
        "lines_left_out": len(names.attacks) - len(attacks),
        "progress": progress,
        "early": any(row.early is not None for row in progress),
    }
