"""One HTML page of a run: what was tested, what was rebuilt and what that shows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leakbound._util import files
from leakbound.assess.record import ON_AVERAGE, PROVED, VERDICTS, Record, told
from leakbound.report import captured, drill, floors, strength_table, tables
from leakbound.report.folder import Run, read
from leakbound.report.gallery import Batch, Card, best_images, cards_of, pages_of

if TYPE_CHECKING:
    from jinja2 import Environment

FILE = "report.html"
NEEDS = ("jinja2", "matplotlib", "markupsafe")
ROWS = 500
"""How many rows of one kind the first page shows."""
PANELS, LINES = 12, 20
"""Of how many models and batch sizes the first page has plots, and of how many attacks."""
_LONG = (
    *("verdicts", "groups", "failed", "untrained", "inapplicable", "captured", "settings"),
    *("attacks", "models", "progress", "pages"),
)
LONGEST_PLAN = 100_000
"""How many letters of the plan the page shows."""


def check_installed() -> None:
    """Raise `ValueError` unless the libraries that a report needs can be imported."""
    for name in NEEDS:
        try:
            __import__(name)
        except ImportError:
            raise ValueError(f"the report needs {name}; pip install 'leakbound[report]'") from None


def write(folder: Path, *, images: bool = True) -> Path:
    """Write `report.html` into a run folder; the same inputs give the same bytes.

    A run of more than `gallery.CELLS` cells gets further pages beside it (`report-2.html`, ...),
    and their pictures stay in `pictures/`; that of a smaller run is one file that holds all.

    Args:
        folder: where an audit left `run.json` and `records.jsonl`.
        images: with the pictures of the true and the rebuilt images; without, no page shows any.

    Returns:
        The path of the first page. All are readable by their owner only.

    Raises:
        ValueError: a missing or damaged file, an unknown schema, a folder that cannot be written,
            a report.html that leakbound did not write, or jinja2 or matplotlib is not installed.
    """
    check_installed()
    folder = Path(folder)
    for name, page in _pages(read(folder), images):
        save(folder / name, page)
    return folder / FILE


def save(path: Path, page: str) -> Path:
    """Put a page at a path, in one step and readable by its owner only.

    Raises:
        ValueError: it cannot be written there, or would replace a file that leakbound did not
            write.
    """
    with files.writing(path, name="page"):
        files.folder(path.parent)
        files.write(path, page.encode("utf-8"))
    return path


def _pages(run: Run, images: bool) -> Iterator[tuple[str, str]]:
    """The report's pages as text, by their file names; `FILE` first."""
    names = tables.Names(run.cells, run.trainings)
    parts = pages_of(run.cells, names)
    pages_at = [FILE, *(f"report-{number}.html" for number in range(2, len(parts) + 1))]
    common, best = _context(run, names), best_images(parts, names)
    labels = [_label(part, common["place"]) for part in parts]
    for part, here, about in zip(parts, pages_at, labels, strict=True):
        links = {
            key: ("" if pages_at[page] == here else pages_at[page]) + f"#{anchor}"
            for key, (page, anchor) in best.items()
        }
        context = common | _shown(
            cards_of(run, names, part, images=images, inline=len(pages_at) == 1)
        )
        context |= {
            "images": images,
            "best": links,
            "here": here,
            "home": "" if here == FILE else FILE,
            "about": about,
            "pages": list(zip(pages_at, labels, strict=True)),
            "linked": len(pages_at) > 1,
            "img_from": "data:" if len(pages_at) == 1 else "data: 'self' file:",
        }
        context["own_data"] = context["pictures"] and run.header.get("own_data") is not False
        if here == FILE:
            yield here, rendered("report.html.j2", _first_page(context))
        else:
            yield here, rendered("report.cells.j2", _further_page(context))


def _label(part: Sequence[Batch], place: Mapping[str, int]) -> str:
    numbers = [place[cell["cell"]] for batch in part for cell in batch.cells] or [0]
    return f"cells {min(numbers):,} to {max(numbers):,}"


def _first_page(context: dict[str, Any]) -> dict[str, Any]:
    """The page of the whole run; of long tables, what matters most."""
    rows = context["verdicts"]
    if len(rows) > ROWS:
        rows = sorted(rows, key=lambda row: (VERDICTS.index(row.verdict), -(row.best or 0.0)))
    groups = context["groups"]
    if len(groups) > ROWS:
        groups = sorted(groups, key=lambda row: -(row.best or 0.0))
    context = _worst(context) | {"verdicts": rows, "groups": groups}
    context["contents"] = _contents(context)
    left_out = {name: max(0, len(context[name]) - ROWS) for name in _LONG}
    shown = {name: context[name][:ROWS] for name in _LONG}
    left_out["strengths"] = context["strengths_left_out"]
    return context | shown | {"left_out": left_out}


def _further_page(context: dict[str, Any]) -> dict[str, Any]:
    """A page of cells, with the rows of their combinations."""
    own = {(card.model, card.batch_size, card.defense) for card in context["gallery"]}
    mine = {
        name: [row for row in context[name] if (row.model, row.batch_size, row.defense) in own]
        for name in ("verdicts", "groups")
    }
    at = [file for file, _ in context["pages"]].index(context["here"])
    beside = context["pages"][max(0, at - 1) : at + 2]
    return context | mine | {"pages": beside, "left_out": {"pages": 0}}


def environment_of(**settings: Any) -> Environment:
    """The jinja2 environment of every page: it escapes, and refuses what no reader should see.

    `row.update` is the entry of a dictionary that has one, not the dictionary's method. A name that
    is not there, or a value that is a function, is an error: the page would show Python internals.
    """
    from jinja2 import Environment, StrictUndefined, Undefined

    class Pages(Environment):
        def getattr(self, obj: Any, attribute: str) -> Any:
            own = isinstance(obj, Mapping) and attribute in obj
            return obj[attribute] if own else super().getattr(obj, attribute)

    def shown(value: Any) -> Any:
        if callable(value) and not isinstance(value, Undefined):
            raise TypeError(f"a page would show {value!r}; name an entry, or call the function")
        return value

    return Pages(autoescape=True, undefined=StrictUndefined, finalize=shown, **settings)


def rendered(
    template: str, context: dict[str, Any], filters: dict[str, Callable[..., str]] | None = None
) -> str:
    """A page from one of the report's templates, with its own filters beside the common ones."""
    from jinja2 import PackageLoader

    environment = environment_of(
        loader=PackageLoader("leakbound.report"), trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "decimal": decimal,
        "significant": significant,
        "brief": brief,
        "percent": percent,
        "chance": floors.spelled,
        "plain": tables.plain,
        "listing": listing,
        "plural": plural,
        "explained": captured.share,
        **(filters or {}),
    }
    return environment.get_template(template).render(context) + "\n"


def decimal(value: float | None, digits: int = 1) -> str:
    """A number for reading; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}".replace("-", "−")


def significant(value: float | None) -> str:
    """A number of any size in three digits; a dash where there is none.

    Example:
        >>> significant(1.9), significant(100.0)
        ('1.90', '100')
    """
    return "–" if value is None else f"{value:#.3g}".rstrip(".").replace("-", "−")


def brief(values: Sequence[str]) -> str:
    """Words joined as in a sentence; of very many, the first and a count of the rest.

    Example:
        >>> brief(["a", "b"])
        'a and b'
    """
    more = len(values) - floors.SHOWN
    return listing([*values[: floors.SHOWN], f"{more} more"] if more > 0 else values)


def percent(value: float | None, digits: int = 0) -> str:
    """A share for reading."""
    return "–" if value is None else f"{100 * value:.{digits}f}\N{NO-BREAK SPACE}%"


def listing(values: Iterable[Any]) -> str:
    """Words joined as in a sentence.

    Example:
        >>> listing([1, 4, 8])
        '1, 4 and 8'
    """
    words = [tables.plain(value) for value in values]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def plural(count: int, one: str, many: str | None = None) -> str:
    """A count with its noun.

    Example:
        >>> plural(1, "batch", "batches"), plural(0, "cell")
        ('1 batch', '0 cells')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def _context(run: Run, names: tables.Names) -> dict[str, Any]:
    """What holds on every page of a run."""
    cells = run.cells
    verdicts, groups = tables.verdicts(cells, names), tables.groups(cells, names)
    status = Counter(cell["status"] for cell in cells)
    words, defenses = _verdict_words(cells), _defenses(cells)
    untrained = [unit for unit in run.trainings if unit["status"] == "failed"]
    return {
        "header": run.header,
        "plan": _plan(run.header["plan"]),
        "names": names,
        "place": {cell["cell"]: number for number, cell in enumerate(cells, 1)},
        "status": status,
        "missing": max(0, _whole(run.header.get("cells")) - len(cells)),
        "problems": sum(bool(c.get("problem")) for c in cells if c["status"] == "ok"),
        "verdict_words": words,
        "counts": [(word, sum(v.verdict == word for v in verdicts)) for word in words],
        "verdicts": verdicts,
        "combinations": len(verdicts),
        "groups": groups,
        "lpips": any(group.lpips for group in groups),
        "failed": [cell for cell in cells if cell["status"] == "failed"],
        "untrained": untrained,
        "untrained_count": len(untrained),
        "inapplicable": _inapplicable(cells, names),
        "captured": captured.rows(cells, names.attack),
        "untold": any(not told(cell) for cell in cells),
        "defenses": defenses,
        "settings": [(name, text) for name, _, _, settings in defenses for text in settings],
        "attacks": list(names.attacks.items()),
        "models": list(names.models.items()),
        "labels_hidden": any(not cell["threat"].get("labels_known") for cell in cells),
        "utility": tables.utility(run.trainings, names),
        **_strengths(run, names),
        "word": _word,
        "title": _title,
        "measure": _measure,
        "reading": _reading,
        **_tested(cells),
        **_floors(cells, names, verdicts),
        **_plots(run, names, groups, verdicts),
        **_training(run, names),
    }


def _plan(plan: Record) -> str:
    text = json.dumps(plan, indent=1, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= LONGEST_PLAN else text[:LONGEST_PLAN] + " ... (see run.json)"


def _contents(context: dict[str, Any]) -> list[tuple[str, str]]:
    """The page's sections by anchor and name: those that it has."""
    sections = [
        ("certified", "Exposed for certain", "certified"),
        ("captured", "Captured updates", "captured"),
        ("verdicts", "Verdicts", "verdicts"),
        ("strength", "Strength", "strengths"),
        ("tested", "What was tested", "verdicts"),
        ("tradeoff", "Privacy and utility", "tradeoffs"),
        ("training", "Training", "progress_plots"),
        ("curves", "Error by strength", "curves"),
        ("results", "Results by attack", "groups"),
        ("failed", "Failed", "failures"),
        ("inapplicable", "Not applicable", "inapplicable"),
        ("gallery", "Pictures" if context["pictures"] else "Cells", "verdicts"),
        ("settings", "Settings", "verdicts"),
    ]
    context = context | {"failures": context["failed"] or context["untrained"]}
    return [(anchor, words) for anchor, words, need in sections if context[need]]


def _shown(gallery: Sequence[Card]) -> dict[str, Any]:
    """The cards of one page, and what they are filtered by."""
    entries = [entry for card in gallery for entry in card.entries]
    return {
        "gallery": gallery,
        "cells_shown": len(entries),
        "certified": [e for e in entries if e.captured is not None and e.captured.certificate],
        "drilled": any(card.detail.images for card in gallery),
        "pictures": any(e.picture or e.truth or e.leak_map for e in entries),
        "shown_models": list(dict.fromkeys(card.model for card in gallery)),
        "shown_defenses": list(dict.fromkeys(card.defense for card in gallery)),
        "shown_attacks": list(dict.fromkeys(entry.attack for entry in entries)),
    }


def _worst(context: dict[str, Any]) -> dict[str, Any]:
    """With the combination of the best image of all, and where that image is."""
    rows = [row for row in context["verdicts"] if row.best is not None and row.attack]
    row = max(rows, key=lambda row: row.best or 0.0, default=None)
    key = row and (row.model, row.batch_size, row.defense, row.attack)
    return context | {"worst": row and {"row": row, "anchor": context["best"].get(key)}}


def _measure(name: str) -> str:
    """A column of one image's measures for reading."""
    known = {"psnr": "PSNR, dB", drill.BLIND: "without update, dB", "identification": "told apart"}
    return known.get(name) or _word(name).replace("_", " ")


def _reading(name: str, value: float | None) -> str:
    """One image's value of a measure for reading."""
    if value in (0.0, 1.0) and name in ("identification", "label_accuracy"):
        return "yes" if value else "no"
    return decimal(value) if name in ("psnr", drill.BLIND) else significant(value)


def _verdict_words(cells: Sequence[Record]) -> list[str]:
    """The verdicts that this page explains: two of them only where they may occur."""
    floored = any(
        any(map(floors.is_floor, cell.get("bounds") or [])) or cell.get("verdict") == ON_AVERAGE
        for cell in cells
    )
    certain = any(cell.get("verdict") == PROVED for cell in cells)
    shown = {ON_AVERAGE: floored, PROVED: certain}
    return [word for word in VERDICTS if shown.get(word, True)]


def _floors(
    cells: Sequence[Record], names: tables.Names, verdicts: Sequence[tables.Verdict]
) -> dict[str, Any]:
    """Bounds on all attackers, their footnotes, and why one is missing elsewhere."""
    sources, notes = floors.Sources(cells).all, floors.notes(cells, names.defense)
    return {
        "ceilings": any(row.ceiling for row in verdicts),
        "chances": any(row.chance for row in verdicts),
        "sources": sources[: floors.SHOWN],
        "more_sources": max(0, len(sources) - floors.SHOWN),
        "floorless": notes[: floors.SHOWN],
        "more_floorless": max(0, len(notes) - floors.SHOWN),
    }


def _strengths(run: Run, names: tables.Names) -> dict[str, Any]:
    sections = strength_table.sections(run.cells, run.trainings, names)
    rows = [row for section in sections for row in section.rows]
    shown, room = [], ROWS
    for section in sections:
        if room > 0:
            shown.append(replace(section, rows=section.rows[:room]))
            room -= len(section.rows)
    return {
        "strengths": shown,
        "strengths_left_out": max(0, len(rows) - ROWS),
        "tight": any(isinstance(row.floor, strength_table.Least) for row in rows),
        "losses": any(row.loss is not None for row in rows),
    }


def _tested(cells: Sequence[Record]) -> dict[str, Any]:
    """What the page's second section says in words."""
    threats = {json.dumps(cell["threat"], sort_keys=True): cell["threat"] for cell in cells}
    thresholds = {(c["threshold"]["metric"], c["threshold"]["value"]): None for c in cells}
    return {
        "threats": list(threats.values()),
        "thresholds": list(thresholds),
        "batch_sizes": sorted({cell["batch_size"] for cell in cells}),
        "seeds": sorted({cell["seed"] for cell in cells}),
        "clients": sorted({cell["clients"] for cell in cells}),
    }


def _plots(
    run: Run,
    names: tables.Names,
    groups: Sequence[tables.Group],
    rows: Sequence[tables.Verdict],
) -> dict[str, Any]:
    from markupsafe import Markup

    from leakbound.report import drawing, plots

    both = list(dict.fromkeys((group.model, group.batch_size) for group in groups))
    attacks = list(names.attacks)[:LINES]
    drawn = set(both[:PANELS])
    groups = [g for g in groups if (g.model, g.batch_size) in drawn and g.attack in attacks]
    costs = tables.utility(run.trainings, names)
    limits = {c["threshold"]["value"] for c in run.cells if c["threshold"]["metric"] == "psnr"}
    threshold = limits.pop() if len(limits) == 1 else None
    defenses = list(dict.fromkeys(setting.name for setting in names.settings.values()))
    tradeoffs = plots.tradeoffs(groups, names.settings, costs, defenses, threshold)
    over = {(r.model, r.batch_size, r.defense): r.ceiling.psnr for r in rows if r.ceiling}
    curves = plots.curves(groups, names.settings, attacks, threshold, over)
    return {
        "tradeoffs": tradeoffs,
        "tradeoff_keys": drawing.keys([*map(_title, defenses)], "kt") if tradeoffs else [],
        "curves": curves,
        "curve_keys": drawing.keys(attacks, "kc") if curves else [],
        "panels_left_out": max(0, len(both) - PANELS),
        "lines_left_out": len(names.attacks) - len(attacks),
        "ceiling_key": drawing.ceiling_key("ko") if curves and over else "",
        "threshold": threshold,
        "svg": Markup,  # the plots' own markup; matplotlib escapes what it is given
    }


def _training(run: Run, names: tables.Names) -> dict[str, Any]:
    from leakbound.report import drawing, training

    rows = training.progress(run.trainings, names)
    labels = training.drawn(rows, names)
    rest = [label for label in dict.fromkeys(row.defense for row in rows) if label not in labels]
    return {
        "progress": rows,
        "progress_plots": training.panels(rows, labels)[:PANELS],
        "progress_keys": drawing.keys(labels, "kl"),
        "progress_rest": rest,
        "early": any(row.early is not None for row in rows),
    }


def _inapplicable(
    cells: Iterable[Record], names: tables.Names
) -> list[tuple[tuple[str, int, str, str, str], int]]:
    found = Counter(
        (
            names.model(cell),
            cell["batch_size"],
            names.defense(cell),
            names.attack(cell),
            str(cell.get("reason")),
        )
        for cell in cells
        if cell["status"] == "not_applicable"
    )
    return list(found.items())


def _defenses(cells: Iterable[Record]) -> list[tuple[str, str, bool, list[str]]]:
    """Each defense by name with its guarantee and all settings that were tested."""
    found: dict[tuple[str, str, bool], dict[str, None]] = {}
    for cell in cells:
        defense = cell["defense"]
        key = (defense["name"], defense["guarantee"], bool(defense.get("data_dependent_law")))
        found.setdefault(key, {})[defense["settings"]] = None
    return [(*key, list(settings)) for key, settings in found.items()]


def _word(metric: str) -> str:
    short = ("psnr", "ssim", "mse", "rmse", "lpips", "ncc")
    words = {"ms_ssim": "MS-SSIM", "label_accuracy": "label right"}
    return metric.upper() if metric in short else words.get(metric, metric)


def _title(defense: str) -> str:
    return "no defense" if defense == tables.NO_DEFENSE else defense


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0
