"""A run folder as a report reads it: every line is checked before it is believed."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from leakbound._util import files
from leakbound.assess.record import Damage, Reader, Record, check_fields, parse, picture_name

_RUN: dict[str, tuple[type, ...]] = {
    "plan": (dict,),
    "plan_hash": (str,),
    "data": (dict,),
    "versions": (dict,),
    "machine": (dict,),
}
_PICTURE_LIMIT = 1 << 26


@dataclass(frozen=True)
class Picture:
    """A PNG strip: its size in pixels, and its bytes as a data URI or where it lies."""

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

    def picture(self, name: str, *, inline: bool = True) -> Picture | None:
        """A picture by file name, inline or as its place below the run folder.

        None if it is missing, no PNG, or not what its name says.
        """
        path = self.folder / "pictures" / name
        try:
            content = files.read(path) if path.stat().st_size <= _PICTURE_LIMIT else b""
        except OSError:
            return None
        png = len(content) >= 24 and content.startswith(b"\x89PNG\r\n\x1a\n")
        if not png or picture_name(content) != name:
            return None
        width, height = struct.unpack(">II", content[16:24])
        if not inline:
            return Picture(width, height, f"pictures/{name}")
        code = base64.b64encode(content).decode("ascii")
        return Picture(width, height, f"data:image/png;base64,{code}")


def read(folder: Path) -> Run:
    """Read and check a run folder.

    Raises:
        ValueError: a missing or damaged file (with its line), or a schema that is not known.
    """
    header = _header(folder / "run.json")
    cells = _lines(folder / "records.jsonl", "cell")
    if not cells:
        raise ValueError(f"{folder / 'records.jsonl'} holds no record; run the audit first")
    path = folder / "utility.jsonl"
    return Run(folder, header, cells, _lines(path, "unit") if path.exists() else [])


def _header(path: Path) -> Record:
    content = b"".join(_content(path))
    try:
        header = parse(content)
        check_fields(header, _RUN)
        return header
    except Damage as damage:
        raise ValueError(f"{path} is damaged: {damage}") from None


def _lines(path: Path, key: str) -> list[Record]:
    """All records of a file; of several with one key, the last stands."""
    records: dict[str, Record] = {}
    reader = Reader(key, share=True)
    for number, line in enumerate(_content(path), 1):
        if not line.strip():
            continue
        try:
            record = reader(line)
        except Damage as damage:
            raise ValueError(
                f"{path}, line {number} is damaged: {damage}; run the command that made it again"
            ) from None
        records[record[key]] = record
    return list(records.values())


def _content(path: Path) -> Iterator[bytes]:
    """A file line by line."""
    try:
        with files.opened(path) as stream:
            yield from stream
    except NotADirectoryError:
        raise ValueError(f"{path.parent} is no folder; give the output folder of a run") from None
    except FileNotFoundError:
        raise ValueError(
            f"{path.parent} holds no {path.name}; give the folder of a run "
            "(leakbound audit PLAN.toml --out DIR)"
        ) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
