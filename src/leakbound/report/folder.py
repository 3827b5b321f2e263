"""A run folder as a report reads it: every line is checked before it is believed."""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leakbound._util import files
from leakbound.report import captured

SCHEMAS = frozenset({1})
STATUSES = ("ok", "not_applicable", "failed")
ON_AVERAGE = "protected on average"
VERDICTS = ("exposed", "undecided", ON_AVERAGE, "protected")

Record = dict[str, Any]

_TEXT, _TABLE, _LIST, _WHOLE = (str,), (dict,), (list,), (int,)
_NUMBER, _NOTHING = (int, float), type(None)
_SETTING: dict[str, tuple[type, ...]] = {
    "model": _TABLE,
    "model.name": _TEXT,
    "model.parameters": _TABLE,
    "defense": _TABLE,
    "defense.name": _TEXT,
    "defense.parameters": _TABLE,
    "status": _TEXT,
}
_CELL = _SETTING | {
    "cell": _TEXT,
    "attack": _TABLE,
    "attack.name": _TEXT,
    "attack.settings": _TEXT,
    "attack.hash": _TEXT,
    "defense.settings": _TEXT,
    "defense.guarantee": _TEXT,
    "batch_size": _WHOLE,
    "clients": _WHOLE,
    "seed": _WHOLE,
    "threat": _TABLE,
    "threshold": _TABLE,
    "threshold.metric": _TEXT,
    "threshold.value": _NUMBER,
}
_OK = {"metrics": _TABLE, "metrics.psnr": _LIST, "blind": _TABLE, "blind.psnr": _LIST}
_TRAINING = _SETTING | {"unit": _TEXT, "seed": _WHOLE}
_BOUND = {
    "name": _TEXT,
    "value": _NUMBER,
    "psnr": (*_NUMBER, _NOTHING),
    "prior": _TEXT,
    "covers": _TEXT,
}
_BOUND_MAY_HOLD: dict[str, type | tuple[type, ...]] = {
    "rests_on_prior": bool,
    "excludes_threshold": bool,
    "on_average": bool,
    "equation": (str, _NOTHING),
    "assumptions": list,
    "standard_error": (*_NUMBER, _NOTHING),
    "probability": _NUMBER,
    "accepted": _NUMBER,
}
_RUN: dict[str, tuple[type, ...]] = {
    "plan": _TABLE,
    "plan_hash": _TEXT,
    "data": _TABLE,
    "versions": _TABLE,
    "machine": _TABLE,
}
_PICTURE_NAME = re.compile(r"[0-9a-f]{8,64}\.png")
_PICTURE_LIMIT = 1 << 26
_HUGE = 1e300
_DECIBELS = 1000.0
"""No image is so good or so bad."""


@dataclass(frozen=True)
class Picture:
    """A PNG strip: its size in pixels and its bytes as a data URI."""

    width: int
    height: int
    uri: str


@dataclass(frozen=True)
class Run:
    """What a run left: its header, its cells and its trainings."""

    folder: Path
    header: Record
    cells: list[Record]
    trainings: list[Record]

    def picture(self, name: str) -> Picture | None:
        """A picture by file name; None if it is missing or no PNG."""
        path = self.folder / "pictures" / name
        try:
            content = files.read(path) if path.stat().st_size <= _PICTURE_LIMIT else b""
        except OSError:
            return None
        if len(content) < 24 or not content.startswith(b"\x89PNG\r\n\x1a\n"):
            return None
        width, height = struct.unpack(">II", content[16:24])
        code = base64.b64encode(content).decode("ascii")
        return Picture(width, height, f"data:image/png;base64,{code}")


def read(folder: Path) -> Run:
    """Read and check a run folder.

    Raises:
        ValueError: a missing or damaged file (with its line), or a schema that is not known.
    """
    header = _header(folder / "run.json")
    cells = _lines(folder / "records.jsonl", "cell", _check_cell)
    if not cells:
        raise ValueError(f"{folder / 'records.jsonl'} holds no record; run the audit first")
    path = folder / "utility.jsonl"
    return Run(
        folder, header, cells, _lines(path, "unit", _check_training) if path.exists() else []
    )


def _header(path: Path) -> Record:
    try:
        header = _parse(_text(path), path)
        _check_fields(header, _RUN)
        return header
    except _Damage as damage:
        raise ValueError(f"{path} is damaged: {damage}") from None


def _lines(path: Path, key: str, check: Callable[[Record], None]) -> list[Record]:
    """All records of a file; of several with one key, the last stands."""
    records: dict[str, Record] = {}
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = _parse(line, path)
            check(record)
        except _Damage as damage:
            raise ValueError(f"{path}, line {number} is damaged: {damage}") from None
        records[record[key]] = record
    return list(records.values())


class _Damage(Exception):
    """Why a line cannot be used."""


def _text(path: Path) -> str:
    try:
        return files.read(path).decode("utf-8")
    except NotADirectoryError:
        raise ValueError(f"{path.parent} is no folder; give the output folder of a run") from None
    except FileNotFoundError:
        raise ValueError(
            f"{path.parent} holds no {path.name}; give the folder of a run "
            "(leakbound audit PLAN.toml --out DIR)"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ValueError(f"{path} cannot be read: {why}") from None


def _parse(text: str, path: Path) -> Record:
    def refuse(constant: str) -> None:
        raise _Damage(f"it holds the number {constant}")

    try:
        value = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        raise _Damage("it is not JSON") from None
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _Damage("it holds half of a character") from None
    if not isinstance(value, dict):
        raise _Damage("it is not a JSON object")
    if not any(value.get("schema") == known for known in SCHEMAS):
        raise ValueError(
            f"{path} holds schema {str(value.get('schema'))[:20]!r}; this version reads "
            f"{sorted(SCHEMAS)}: use a newer leakbound"
        )
    return value


def _check_cell(record: Record) -> None:
    _check_fields(record, _CELL)
    _check_word("status", record["status"], STATUSES)
    if record.get("verdict") is not None:
        _check_word("verdict", record["verdict"], VERDICTS)
    captured.check(record, _check_optional)
    if record["status"] == "ok" and captured.told(record):
        _check_fields(record, _OK)
        for table in (record["metrics"], record["blind"]):
            for name, values in table.items():
                if not isinstance(values, list) or not all(map(_number_or_null, values)):
                    raise _Damage(f"{name} is not a list of numbers")
        if len({len(record["metrics"]["psnr"]), len(record["blind"]["psnr"])}) != 1:
            raise _Damage("metrics.psnr and blind.psnr differ in length")
    for name in _table(record, "pictures").values():
        if not isinstance(name, str) or not _PICTURE_NAME.fullmatch(name):
            raise _Damage(f"{str(name)[:60]!r} is no name of a picture")
    _check_optional("defense.private_law", record["defense"].get("private_law"), bool)
    _check_optional("bounds_note", record.get("bounds_note"), str)
    kept = _table(_table(record, "release"), "utility")
    if not all(map(_number_or_null, kept.values())):
        raise _Damage("release.utility is not a table of numbers")
    _check_bounds(record.get("bounds"))


def _check_bounds(bounds: Any) -> None:
    _check_optional("bounds", bounds, list)
    for bound in bounds or []:
        if not isinstance(bound, dict):
            raise _Damage(f"a bound is {str(bound)[:60]!r}")
        _check_fields(bound, _BOUND)
        for name, kind in _BOUND_MAY_HOLD.items():
            _check_optional(f"bounds.{name}", bound.get(name), kind)
        if not all(_number_or_null(bound.get(name)) for name in ("value", "standard_error")):
            raise _Damage("a number of a bound is not finite")
        if bound["value"] < 0 or not abs(bound["psnr"] or 0.0) <= _DECIBELS:
            raise _Damage(
                f"a bound has value {bound['value']!r:.60} and psnr {bound['psnr']!r:.60}"
            )
        for name in ("probability", "accepted"):
            if bound.get(name) is not None and not 0 <= bound[name] <= 1:
                raise _Damage(f"bounds.{name} is {str(bound[name])[:60]!r}")
        if not all(isinstance(text, str) for text in bound.get("assumptions") or []):
            raise _Damage("bounds.assumptions is not a list of texts")


def _check_training(record: Record) -> None:
    _check_fields(record, _TRAINING)
    _check_word("status", record["status"], ("ok", "failed"))
    if record["status"] == "ok":
        _check_fields(record, {"accuracy": _NUMBER})
    _check_optional("optimizer", record.get("optimizer"), str)
    curve = record.get("curve")
    _check_optional("curve", curve, list)
    last = -1
    for point in curve or []:
        if not isinstance(point, list) or len(point) != 2 or not all(map(_number_or_null, point)):
            raise _Damage(f"a point of the curve is {str(point)[:60]!r}")
        if not isinstance(point[0], int) or point[0] <= last:
            raise _Damage(f"the rounds of the curve do not rise at {str(point[0])[:60]!r}")
        last = point[0]


def _table(record: Record, name: str) -> Record:
    """A table that may be missing."""
    value = record.get(name)
    _check_optional(name, value, dict)
    return value or {}


def _check_optional(name: str, value: Any, kind: type | tuple[type, ...]) -> None:
    """`value` is missing (None) or of this kind; a yes or no is no number."""
    wrong = isinstance(value, bool) and kind is not bool
    if value is not None and (wrong or not isinstance(value, kind)):
        raise _Damage(f"{name} is {str(value)[:60]!r}")


def _check_fields(record: Record, fields: Mapping[str, tuple[type, ...]]) -> None:
    for name, kinds in fields.items():
        value: Any = record
        for part in name.split("."):
            value = value.get(part)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise _Damage(f"{name} is {str(value)[:60]!r}")


def _check_word(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise _Damage(f"{name} is {str(value)[:60]!r}, not one of {', '.join(allowed)}")


def _number_or_null(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value is None
    return abs(value) < _HUGE
