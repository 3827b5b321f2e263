"""A run folder as a report reads it: every line is checked before it is believed."""

from __future__ import annotations

import base64
import dataclasses
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from leakbound._util import files
from leakbound.assess import record
from leakbound.assess.record import (
    Assessment,
    Damage,
    Diagnosis,
    R,
    Reidentification,
    Reidentified,
    RunInfo,
    Training,
)

_PICTURE_LIMIT = 1 << 26
REIDENTIFIED = "reidentified.jsonl"


@dataclass(frozen=True)
class Strip:
    """A PNG of examples side by side: its size in pixels, and its data URI or where it lies."""

    width: int
    height: int
    uri: str


@dataclass(frozen=True)
class Run:
    folder: Path
    info: RunInfo
    assessments: list[Assessment]
    trainings: list[Training]
    diagnoses: list[Diagnosis]

    @property
    def missing(self) -> int:
        return max(0, self.info.experiments - len(self.assessments))

    def withheld(self) -> Run:
        """The same without values of examples in what updates reveal."""
        facts = [tuple(fact.withheld for fact in a.facts) for a in self.assessments]
        each = zip(self.assessments, facts, strict=True)
        return dataclasses.replace(self, assessments=[replace(a, facts=some) for a, some in each])

    def picture(self, name: str, *, inline: bool = True) -> Strip | None:
        """A picture by file name; None if it is missing, no PNG, or not what its name says."""
        path = self.folder / "pictures" / name
        try:
            # The size comes first: a huge file never reaches the memory.
            content = files.read(path) if path.stat().st_size <= _PICTURE_LIMIT else b""
        except OSError:
            return None
        png = len(content) >= 24 and content.startswith(b"\x89PNG\r\n\x1a\n")
        # A name is the hash of its content: nobody can put another picture in its place.
        if not png or record.picture_name(content) != name:
            return None
        width, height = struct.unpack(">II", content[16:24])
        if not inline:
            return Strip(width, height, f"pictures/{name}")
        code = base64.b64encode(content).decode("ascii")
        return Strip(width, height, f"data:image/png;base64,{code}")


def read(folder: Path) -> Run:
    path = folder / files.RUN
    with _reading(path):
        info = record.decode(files.read(path), RunInfo)
    assessments = _lines(folder / "records.jsonl", Assessment)
    if not assessments:
        raise ValueError(f"{folder / 'records.jsonl'} holds no record; run the audit first")
    more = folder / "utility.jsonl", folder / "diagnosis.jsonl"
    trainings = _lines(more[0], Training) if more[0].exists() else []
    diagnoses = _lines(more[1], Diagnosis) if more[1].exists() else []
    if (folder / REIDENTIFIED).exists():
        matches = further_matches(folder)
        assessments = [_with(a, matches.get(a.experiment, ())) for a in assessments]
    return Run(folder, info, assessments, trainings, diagnoses)


def further_matches(folder: Path) -> dict[str, tuple[Reidentification, ...]]:
    """By experiment, what matchers found that ran after the audit."""
    return {one.experiment: one.found for one in _lines(folder / REIDENTIFIED, Reidentified)}


def _with(assessment: Assessment, results: tuple[Reidentification, ...]) -> Assessment:
    """The record with further matches; those of a matcher that ran again replace its first ones."""
    names = {one.how for one in results}
    kept = tuple(one for one in assessment.reidentified if one.how not in names)
    return replace(assessment, reidentified=(*kept, *results))


def _lines(path: Path, kind: type[R]) -> list[R]:
    """All records of a file; of several with one key, the last stands."""
    records: dict[str, R] = {}
    with _reading(path):
        for number, line in enumerate(record.read(path, kind), 1):
            if isinstance(line, Damage):
                raise ValueError(
                    f"{path}, line {number} is damaged: {line}; run the command that made it again"
                )
            records[line.key] = line
    return list(records.values())


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What the system says about a path, as what to do about it."""
    try:
        yield
    except Damage as damage:
        raise ValueError(f"{path} is damaged: {damage}") from None
    except NotADirectoryError:
        raise ValueError(f"{path.parent} is no folder; give the output folder of a run") from None
    except FileNotFoundError:
        raise ValueError(
            f"{path.parent} holds no {path.name}; give the folder of a run "
            "(leakbound audit PLAN.toml --out DIR)"
        ) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
