"""A record: one line of `records.jsonl` or `utility.jsonl`, and what it must hold.

Whoever reads records reads them here, so that what one reader keeps no other refuses.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from leakbound._util import files

SCHEMA = 1
STATUSES = ("ok", "not_applicable", "failed")
ON_AVERAGE = "protected on average"
PROVED = "exposed (certified)"
VERDICTS = (PROVED, "exposed", "undecided", ON_AVERAGE, "protected")

Record = dict[str, Any]

_TEXT, _TABLE, _LIST, _WHOLE, _FLAG = (str,), (dict,), (list,), (int,), (bool,)
_NUMBER, _NOTHING = (int, float), type(None)
_MISSING = object()
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
    "threat.labels_known": _FLAG,
    "threat.defense_known": _FLAG,
    "threat.server": _TEXT,
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
_CAPTURE_TEXTS = ("name", "kind", "digest")
_CAPTURE_NUMBERS = ("share", "direction", "scale")
_PICTURE_NAME = re.compile(r"[0-9a-f]{16}\.png")
_HUGE = 1e300
_DECIBELS = 1000.0
"""No image is so good or so bad."""
_SHARED = ("attack", "data", "defense", "model", "threat", "threshold")
"""Tables that are the same in many records."""


class Damage(ValueError):
    """Why a line is no record."""


class Reader:
    """Reads and checks the lines of one file.

    Args:
        key: what names a record: "cell" for cells, "unit" for trainings.
        share: what many records hold alike (names, settings, sentences) is one object in memory:
            for who keeps many records, and changes none in place.

    Example:
        >>> Reader("cell")(b'{"schema": 1}')
        Traceback (most recent call last):
        ...
        leakbound.assess.record.Damage: model is missing
    """

    def __init__(self, key: str, *, share: bool = False) -> None:
        self._share = share
        self._check = {"cell": check_cell, "unit": check_training}[key]
        self._kept: dict[Any, Any] = {}

    def __call__(self, line: bytes) -> Record:
        """The record in a line.

        Raises:
            Damage: it holds none.
        """
        record = parse(line, self._table if self._share else None)
        self._check(record)
        for name in _SHARED if self._share else ():
            if name in record:
                record[name] = self._kept.setdefault((name, json.dumps(record[name])), record[name])
        return record

    def _table(self, pairs: list[tuple[str, Any]]) -> Record:
        return {sys.intern(key): self._one(value) for key, value in pairs}

    def _one(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._kept.setdefault(value, value)
        if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
            return self._kept.setdefault(tuple(value), value)
        return value


def parse(text: bytes, table: Callable[[list[tuple[str, Any]]], Record] | None = None) -> Record:
    """A JSON object with a schema that this version knows; `table` makes its tables.

    Raises:
        Damage: anything else.
    """
    try:
        value = json.loads(
            text.decode("utf-8"),
            parse_constant=_refuse,
            parse_int=partial(_number, int),
            parse_float=partial(_number, float),
            object_pairs_hook=table,
        )
        json.dumps(value, ensure_ascii=False).encode()
    except Damage:
        raise
    except UnicodeDecodeError:
        raise Damage("it is not UTF-8 text") from None
    except UnicodeEncodeError:
        raise Damage("it holds half of a character") from None
    except (ValueError, RecursionError):
        raise Damage("it is not JSON") from None
    if not isinstance(value, dict):
        raise Damage("it is not a JSON object")
    if type(value.get("schema")) is not int or value["schema"] != SCHEMA:
        raise Damage(
            f"its schema is {str(value.get('schema'))[:20]!r}, but this version reads {SCHEMA}: "
            "use the leakbound that wrote it"
        )
    return value


def picture_name(content: bytes) -> str:
    """The name of a picture's file: the start of its content's SHA-256."""
    return f"{hashlib.sha256(content).hexdigest()[:16]}.png"


def is_picture(path: Path) -> bool:
    """Whether the file is there and holds what its name says."""
    try:
        return path.name == picture_name(files.read(path))
    except OSError:
        return False


def told(record: Record) -> bool:
    """Whether the truth was known when the record was made: every cell but a captured one's."""
    capture = record.get("capture")
    return not isinstance(capture, dict) or capture.get("truth") is not False


def check_cell(record: Record) -> None:
    """Raise `Damage` unless it is a cell's record that every reader can use."""
    check_fields(record, _CELL)
    _check_word("status", record["status"], STATUSES)
    if record.get("verdict") is not None:
        _check_word("verdict", record["verdict"], VERDICTS)
    _check_capture(record)
    if record["status"] == "ok" and told(record):
        check_fields(record, _OK)
        for table in (record["metrics"], record["blind"]):
            for name, values in table.items():
                if not isinstance(values, list) or not all(map(_number_or_null, values)):
                    raise Damage(f"{name} is not a list of numbers")
        if len({len(record["metrics"]["psnr"]), len(record["blind"]["psnr"])}) != 1:
            raise Damage("metrics.psnr and blind.psnr differ in length")
    for name in _table(record, "pictures").values():
        if not isinstance(name, str) or not _PICTURE_NAME.fullmatch(name):
            raise Damage(f"{str(name)[:60]!r} is no name of a picture")
    _check_optional("defense.data_dependent_law", record["defense"].get("data_dependent_law"), bool)
    _check_optional("bounds_note", record.get("bounds_note"), str)
    kept = _table(_table(record, "release"), "utility")
    if not all(map(_number_or_null, kept.values())):
        raise Damage("release.utility is not a table of numbers")
    _check_bounds(record.get("bounds"))


def _check_bounds(bounds: Any) -> None:
    _check_optional("bounds", bounds, list)
    for bound in bounds or []:
        if not isinstance(bound, dict):
            raise Damage(f"a bound is {str(bound)[:60]!r}")
        check_fields(bound, _BOUND)
        for name, kind in _BOUND_MAY_HOLD.items():
            _check_optional(f"bounds.{name}", bound.get(name), kind)
        if bound["value"] < 0 or not abs(bound["psnr"] or 0.0) <= _DECIBELS:
            raise Damage(f"a bound has value {bound['value']!r:.60} and psnr {bound['psnr']!r:.60}")
        for name in ("probability", "accepted"):
            if bound.get(name) is not None and not 0 <= bound[name] <= 1:
                raise Damage(f"bounds.{name} is {str(bound[name])[:60]!r}")
        if not all(isinstance(text, str) for text in bound.get("assumptions") or []):
            raise Damage("bounds.assumptions is not a list of texts")


def check_training(record: Record) -> None:
    """Raise `Damage` unless it is a training's record that every reader can use."""
    check_fields(record, _TRAINING)
    _check_word("status", record["status"], ("ok", "failed"))
    if record["status"] == "ok":
        check_fields(record, {"accuracy": _NUMBER})
    _check_optional("optimizer", record.get("optimizer"), str)
    curve = record.get("curve")
    _check_optional("curve", curve, list)
    last = -1
    for point in curve or []:
        if not isinstance(point, list) or len(point) != 2 or not all(map(_number_or_null, point)):
            raise Damage(f"a point of the curve is {str(point)[:60]!r}")
        if not isinstance(point[0], int) or point[0] <= last:
            raise Damage(f"the rounds of the curve do not rise at {str(point[0])[:60]!r}")
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
        raise Damage(f"{name} is {str(value)[:60]!r}")


def check_fields(record: Record, fields: Mapping[str, tuple[type, ...]]) -> None:
    """Raise `Damage` unless fields, such as "model.name", are there and of one of their types."""
    for name, kinds in fields.items():
        value: Any = record
        for part in name.split("."):
            value = value.get(part, _MISSING)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise Damage(f"{name} is {'missing' if value is _MISSING else repr(str(value)[:60])}")


def _check_word(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise Damage(f"{name} is {str(value)[:60]!r}, not one of {', '.join(allowed)}")


def _number_or_null(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _check_capture(record: Record) -> None:
    capture = record.get("capture")
    _check_optional("capture", capture, dict)
    if capture is None:
        return
    for name in _CAPTURE_TEXTS:
        _check_optional(f"capture.{name}", capture.get(name, 0), str)
    for name in ("round", "client", "certificate"):
        _check_optional(f"capture.{name}", capture.get(name), str)
    _check_optional("capture.truth", capture.get("truth", 0), bool)
    for name in ("findings", "notes"):
        _check_optional(f"capture.{name}", capture.get(name), list)
    for note in capture.get("notes") or []:
        _check_optional("capture.notes", note, str)
    for finding in capture.get("findings") or []:
        _check_optional("capture.findings", finding, dict)
        for name in ("name", "value", "how"):
            _check_optional(f"capture.findings.{name}", finding.get(name, 0), str)
        _check_optional("capture.findings.sure", finding.get("sure"), bool)
    _check_optional("capture.values", capture.get("values"), list)
    for row in capture.get("values") or []:
        _check_optional("capture.values", row if row is not None else 0, list)
        for value in row:
            _check_optional("capture.values", value if value is not None else "", (int, float))
    _check_optional("capture.explained", capture.get("explained"), dict)
    for name in _CAPTURE_NUMBERS:
        _check_optional(
            f"capture.explained.{name}", (capture.get("explained") or {}).get(name), (int, float)
        )
    if not told(record) and record.get("metrics") is not None:
        _check_optional("metrics", "given without the truth", dict)


def _number(kind: type[int] | type[float], text: str) -> int | float:
    value = kind(text)
    if not abs(value) < _HUGE:
        raise Damage(f"it holds the number {text[:20]}")
    return value


def _refuse(constant: str) -> None:
    raise Damage(f"it holds the number {constant}")
