"""What a policy file (TOML) states: tables of things to check, and what must hold of each.

Keys: docs/reference/policy.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from leakbound import check
from leakbound._util import files
from leakbound.assess.record import Verdict
from leakbound.risk.deployment.file import in_words, line_of
from leakbound.risk.deployment.laws import AUDIENCES, Audience, Unit

Answer = Literal["holds", "broken", "cannot tell"]
HOLDS: Final = "holds"
BROKEN: Final = "broken"
UNSURE: Final = "cannot tell"
CODES: dict[Answer, int] = {HOLDS: 0, UNSURE: 2, BROKEN: 1}
"""Exit codes; of several answers the last in this order counts."""


def answer_of(*, broken: bool, unsure: bool = False) -> Answer:
    """What is broken stays broken, whatever else is not known."""
    if broken:
        return BROKEN
    return UNSURE if unsure else HOLDS


Number = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0)]
Size = Annotated[int, Meta(ge=1)]


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class AuditPolicy(_Table, frozen=True, kw_only=True):
    """`[[audit]]`: of an audit's folder, or of a plan that runs here."""

    folder: str | None = None
    plan: str | None = None
    seconds: Number = 300.0
    defenses: tuple[str, ...] = ()
    exposed: Count | None = None
    verdict: Verdict | None = None
    known: str | None = None
    gain: Share | None = None
    named: Share | None = None
    no_worse_than: str | None = None
    higher_scores: Count | None = None
    accuracy_cost: Number | None = None

    def __post_init__(self) -> None:
        if self.folder is None and self.plan is None:
            raise ValueError("it names no audit; give folder or plan")
        if self.higher_scores is not None and self.no_worse_than is None:
            raise ValueError("higher_scores is without the other audit; give no_worse_than")


class DeploymentPolicy(_Table, frozen=True, kw_only=True):
    """`[[deployment]]`: of a deployment file, over all its rounds."""

    file: str
    audience: tuple[Audience, ...] = AUDIENCES
    unit: tuple[Unit, ...] = ()
    epsilon: Number | None = None
    delta: Share = 1e-5
    success: Share | None = None
    prior: Share = 1e-3
    gain: Share | None = None
    mistakes: Count | None = None


class EpsilonPolicy(_Table, frozen=True, kw_only=True):
    """`[[epsilon_audit]]`: what `leakbound audit-epsilon` found must not exceed what is claimed."""

    file: str
    epsilon: Number | None = None


class NamedModel(_Table, frozen=True, kw_only=True):
    """A model, and the inputs that it takes."""

    model: str
    input_shape: tuple[Size, ...]
    input_range: tuple[float, float] = (0.0, 1.0)
    classes: Size = 10


class ModelPolicy(NamedModel, frozen=True, kw_only=True):
    """`[[model]]`: weights as a server sends them must have no mark of a malicious model."""

    file: str | None = None


class ClientPolicy(NamedModel, frozen=True, kw_only=True):
    """`[[client]]`: what a client's own code sends must be what its deployment file says."""

    update: str
    deployment: str
    facts: str | None = None
    reports: tuple[str, ...] = ()
    batch: Size | None = None
    scale: Annotated[float, Meta(gt=0)] | None = None
    same_signal: bool = False
    repeats: Annotated[int, Meta(ge=8, multiple_of=2)] = 64
    seconds: Number = 120.0

    def __post_init__(self) -> None:
        if self.reports and self.facts is None:
            raise ValueError("reports is without the function that reports; give facts")


KINDS: dict[str, Any] = {
    "audit": AuditPolicy,
    "deployment": DeploymentPolicy,
    "epsilon_audit": EpsilonPolicy,
    "model": ModelPolicy,
    "client": ClientPolicy,
}


@dataclass(frozen=True)
class Requirement:
    """What was stated of a thing, what was found, and what that answers.

    `key` names the rule: the policy's key, or what was tested of a client. The `line` of `file`
    states it. `numbers`: what was found, and what it must not exceed.
    """

    key: str
    stated: str
    found: str
    answer: Answer
    subject: str = ""
    file: str = ""
    line: int | None = None
    numbers: tuple[float, float] | None = None


@dataclass(frozen=True)
class GatePolicy:
    """A policy file: its text and its tables, each with its kind and its place among these."""

    path: Path
    text: str
    tables: tuple[tuple[str, int, Any], ...]


def read(path: Path) -> GatePolicy:
    """A policy file.

    Raises:
        ValueError: it cannot be read, checks nothing, or has an unknown key or a wrong value; the
            message names the line.
    """
    table = files.read_toml(path, f"policy {str(path)!r}")
    text = files.read(path).decode("utf-8-sig")
    tables = tuple(_tables(f"policy {str(path)!r}", text, table))
    if not tables:
        raise ValueError(f"policy {str(path)!r} checks nothing; give [[{']], [['.join(KINDS)}]]")
    return GatePolicy(path, text, tables)


def _tables(
    what: str,
    text: str,
    table: dict[str, Any],
) -> Iterator[tuple[str, int, Any]]:
    for kind, rows in table.items():
        place = 0
        key = kind
        try:
            if kind not in KINDS:
                raise ValueError(f"there is no table {kind!r}; {check.closest(kind, KINDS)}")
            if not isinstance(rows, list):
                raise ValueError(f"{kind} is no list of tables; write [[{kind}]]")
            for place, row in enumerate(rows):
                yield kind, place, msgspec.convert(row, KINDS[kind])
        except ValueError as error:
            words = str(error)
            if isinstance(error, msgspec.ValidationError):
                key, words = in_words(words, KINDS[kind], f"[[{kind}]]")
            key = key.partition("[")[0]
            line = line_of(text, f"{kind}.{place}.{key}") or line_of(text, kind) or 1
            raise ValueError(f"{what}, line {line}: {words}") from None
