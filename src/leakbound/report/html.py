"""One HTML page of a run: what was tested, what was rebuilt and what that shows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from leakbound._util import files
from leakbound.report import captured, drill, floors, strength_table, tables
from leakbound.report.folder import ON_AVERAGE, VERDICTS, Record, Run, read
from leakbound.report.gallery import Card, best_images, gallery_of

FILE = "report.html"
NEEDS = ("jinja2", "matplotlib", "markupsafe")
"""About how many pixels of the page one image is wide."""


def check_installed() -> None:
    """Raise `ValueError` unless the libraries that a report needs can be imported."""
    for name in NEEDS:
        try:
            __import__(name)
        except ImportError:
            raise ValueError(f"the report needs {name}; pip install 'leakbound[report]'") from None


def write(folder: Path, *, images: bool = True) -> Path:
    """Write `report.html` into a run folder; the same inputs give the same bytes.

    Args:
        folder: where an audit left `run.json` and `records.jsonl`.
        images: with the pictures of the true and the rebuilt images; without, the page holds none.

    Returns:
        The path of the page. It is readable by its owner only.

    Raises:
        ValueError: a missing or damaged file, an unknown schema, a folder that cannot be written,
            a report.html that leakbound did not write, or jinja2 or matplotlib is not installed.
    """
    check_installed()
    return save(Path(folder) / FILE, render(read(Path(folder)), images=images))


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


def render(run: Run, *, images: bool = True) -> str:
    """The page as text."""
    context = _context(run, images)
    context["contents"] = _contents(context)
    return rendered("report.html.j2", context)


def rendered(
    template: str, context: dict[str, Any], filters: dict[str, Callable[..., str]] | None = None
) -> str:
    """A page from one of the report's templates, with its own filters beside the common ones."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("leakbound.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
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


def _context(run: Run, images: bool) -> dict[str, Any]:
    cells, names = run.cells, tables.Names(run.cells, run.trainings)
    gallery = gallery_of(run, names, images=images)
    verdicts = tables.verdicts(cells, names)
    shown = any(e.picture or e.truth or e.leak_map for card in gallery for e in card.entries)
    status = Counter(cell["status"] for cell in cells)
    words, groups = _verdict_words(cells), tables.groups(cells, names)
    return {
        "header": run.header,
        "plan": json.dumps(run.header["plan"], indent=1, sort_keys=True, ensure_ascii=False),
        "names": names,
        "status": status,
        "missing": max(0, _whole(run.header.get("cells")) - len(cells)),
        "problems": sum(bool(c.get("problem")) for c in cells if c["status"] == "ok"),
        "verdict_words": words,
        "counts": [(word, sum(v.verdict == word for v in verdicts)) for word in words],
        "verdicts": verdicts,
        "groups": groups,
        "lpips": any(group.lpips for group in groups),
        **_drilled(gallery, verdicts),
        "pictures": shown,
        "images": images,
        "own_data": shown and run.header.get("own_data") is not False,
        "failed": [cell for cell in cells if cell["status"] == "failed"],
        "untrained": [unit for unit in run.trainings if unit["status"] == "failed"],
        "inapplicable": _inapplicable(cells, names),
        "captured": captured.rows(cells, names.attack),
        "untold": any(not captured.told(cell) for cell in cells),
        "defenses": _defenses(cells),
        "labels_hidden": any(not cell["threat"].get("labels_known") for cell in cells),
        "utility": tables.utility(run.trainings, names),
        **_strengths(run, names),
        "word": _word,
        "title": _title,
        **_tested(cells),
        **_floors(cells, names, verdicts),
        **_plots(run, names),
        **_training(run, names),
    }


def _contents(context: dict[str, Any]) -> list[tuple[str, str]]:
    """The page's sections by anchor and name: those that it has."""
    sections = [
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


def _drilled(gallery: Sequence[Card], verdicts: Sequence[tables.Verdict]) -> dict[str, Any]:
    """The cards, and where the best image of a combination or an attack stands among them."""
    best = best_images(gallery)
    rows = [row for row in verdicts if row.best is not None and row.attack]
    worst = max(rows, key=lambda row: row.best or 0.0, default=None)
    key = worst and (worst.model, worst.batch_size, worst.defense, worst.attack or "")
    return {
        "gallery": gallery,
        "cells_shown": sum(len(card.entries) for card in gallery),
        "best": best,
        "drilled": any(card.detail.images for card in gallery),
        "worst": worst and {"row": worst, "anchor": best.get(key or ("", 0, "", ""))},
        "measure": _measure,
        "reading": _reading,
    }


def _measure(name: str) -> str:
    """A column of one image's measures for reading."""
    known = {"psnr": "PSNR, dB", drill.BLIND: "without update, dB", "identification": "told apart"}
    return known.get(name) or _word(name).replace("_", " ")


def _reading(name: str, value: float | None) -> str:
    """One image's value of a measure for reading."""
    if value in (0.0, 1.0) and name in ("identification", "label_accuracy"):
        return "yes" if value else "no"
    return decimal(value) if name in ("psnr", drill.BLIND) else significant(value)


def _verdict_words(cells: Iterable[Record]) -> list[str]:
    """The verdicts that this page explains: that of floors on the mean only where it may occur."""
    floored = any(
        any(map(floors.is_floor, cell.get("bounds") or [])) or cell.get("verdict") == ON_AVERAGE
        for cell in cells
    )
    return [word for word in VERDICTS if floored or word != ON_AVERAGE]


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
    return {
        "strengths": sections,
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


def _plots(run: Run, names: tables.Names) -> dict[str, Any]:
    from markupsafe import Markup

    from leakbound.report import drawing, plots

    groups, costs = tables.groups(run.cells, names), tables.utility(run.trainings, names)
    limits = {c["threshold"]["value"] for c in run.cells if c["threshold"]["metric"] == "psnr"}
    threshold = limits.pop() if len(limits) == 1 else None
    defenses = list(dict.fromkeys(setting.name for setting in names.settings.values()))
    tradeoffs = plots.tradeoffs(groups, names.settings, costs, defenses, threshold)
    rows = tables.verdicts(run.cells, names)
    over = {(r.model, r.batch_size, r.defense): r.ceiling.psnr for r in rows if r.ceiling}
    curves = plots.curves(groups, names.settings, list(names.attacks), threshold, over)
    return {
        "tradeoffs": tradeoffs,
        "tradeoff_keys": drawing.keys([*map(_title, defenses)], "kt") if tradeoffs else [],
        "curves": curves,
        "curve_keys": drawing.keys(list(names.attacks), "kc") if curves else [],
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
        "progress_plots": training.panels(rows, labels),
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
        key = (defense["name"], defense["guarantee"], bool(defense.get("private_law")))
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
