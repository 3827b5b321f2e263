"""The lines of a ledger: one for each round, in a chain that shows what was changed or removed.

The seal of a line is a keyed digest of the line and of the seal before it. So a line that was
changed, moved or removed breaks the chain for everyone who has the key, and nobody without the key
can write a line.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, TypeVar

import msgspec

from leakbound._util import files
from leakbound.risk.deployment.facts import Deployment

FIRST = "0" * 64
"""The seal before the first line."""
KEY = "seal"
SCHEMA = 1
_END = len(b',"seal":""}\n') + 64
"""Bytes of a line from its seal on: the seal's name sorts after all others."""


class Standing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all rounds of a ledger together let one audience do to one unit.

    Attributes:
        audience, unit: who, and what of whom.
        rounds: how many.
        mu: of Gaussian differential privacy, if all rounds have one; None otherwise.
        epsilon: for the unit's membership (adding or removing it) at `delta`; None: no bound.
        delta: its delta.
        gain: the most that the rounds add to anyone's success, whatever they know. Of any example:
            its success above that at one given example.
        success: what a success of `prior` without the rounds becomes at most.
        prior: a success without the rounds.
        missing: what is not stated and counts as its worst case.
    """

    audience: str
    unit: str
    rounds: int
    mu: float | None
    epsilon: float | None
    delta: float
    gain: float
    success: float
    prior: float
    missing: tuple[str, ...] = ()


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What a line says of its place in the chain and of what it counts for.

    Attributes:
        number: from 1 on, without gaps.
        mechanism: digest of the deployment's facts.
        facts: of the deployment, in the first line of each mechanism.
        seal: of the chain.
    """

    number: int
    mechanism: str
    facts: Deployment | None
    seal: str


class PaidRound(Link, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One round.

    Attributes:
        at: the node's time (ISO 8601, UTC); it orders nothing, for clocks change.
        job, round: what the framework calls the training and the round.
        after: what is spent with this round.
        schema: of the format.
    """

    at: str
    job: str
    round: str
    after: tuple[Standing, ...]
    schema: int


L = TypeVar("L", bound=Link)


def digest(deployment: Deployment) -> str:
    """Sixteen hex digits of all facts but the number of rounds and the title."""
    # The ledger counts the rounds, and a title protects nothing.
    own = msgspec.structs.replace(deployment, rounds=None, title="")
    return hashlib.sha256(files.encode(msgspec.to_builtins(own))).hexdigest()[:16]


def written(fields: dict[str, Any], before: str, key: bytes) -> bytes:
    """A line with its seal, behind the line of the seal `before`."""
    body = files.encode(fields)
    # In place of the last brace: so the line stays in the form that `files` knows as ours.
    return body[:-2] + f',"{KEY}":"{mac(before.encode() + body, key)}"}}\n'.encode()


def checked(
    raw: bytes,
    before: Link | None,
    key: bytes,
    kind: type[L],
) -> L:
    """The line in these bytes, which follows the line `before`, or what a `Link` needs of it.

    Raises:
        ValueError: it is damaged, or the chain breaks here.
    """
    try:
        line = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is no line of a ledger ({error})") from None
    number = 1 if before is None else before.number + 1
    # Over the bytes as they are: two forms of one value must not have one seal.
    last = FIRST if before is None else before.seal
    seal = mac(last.encode() + raw[:-_END] + b"}\n", key)
    if line.number != number or not hmac.compare_digest(line.seal, seal):
        raise ValueError("it was changed, or a line before it is missing or changed")
    return line


def mac(body: bytes, key: bytes) -> str:
    """A keyed digest, as hex digits."""
    return hmac.new(key, body, "sha256").hexdigest()
