"""What `run.json` says about a run: its plan, data, versions and machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from leakbound._util import files
from leakbound.assess.record import SCHEMA, Count, Damage, Parameters, RecordPart


class DataFacts(RecordPart, frozen=True, kw_only=True):
    """The data of a run; `copies` were left out, `weights` are the digests of weight files."""

    source: str
    fingerprint: str
    examples: Count
    shape: tuple[Count, ...]
    classes: Count | None = None
    copies: Count = 0
    weights: dict[str, str] = msgspec.field(default_factory=dict)


class RunInfo(RecordPart, frozen=True, kw_only=True):
    """The content of `run.json`.

    Attributes:
        plan: as it was read, every list of values expanded.
        code: digests of the Python files that the plan names.
        pictures: whether pictures were kept.
        experiments: how many the plan makes.
        own_data: whether the data are the user's own.
        written_by: the seal that `files.write` adds.
    """

    schema: Literal[1] = SCHEMA
    plan: Parameters
    plan_hash: str
    data: DataFacts
    code: dict[str, str] = msgspec.field(default_factory=dict)
    versions: dict[str, str]
    machine: dict[str, str | int]
    pictures: bool
    experiments: Count
    own_data: bool
    written_by: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def name(self) -> str:
        """The plan's name."""
        return str(self.plan.get("name") or "audit")

    @property
    def fields(self) -> dict[str, Any]:
        """All of it as JSON values."""
        found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return found


def read(path: Path) -> RunInfo:
    """The content of a `run.json`.

    Raises:
        Damage: it holds none.
        OSError: it cannot be read.
    """
    try:
        return msgspec.json.decode(files.read(path), type=RunInfo)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damage(str(error)) from None
