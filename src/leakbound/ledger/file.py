"""A ledger on a node's disk: it grows line by line, and a line is on disk before its round trains.

Beside the ledger lie its key (`.key`, random, readable by its owner only), which seals lines and
head, and its head (`.head.json`), which names the last line. A ledger that lost lines at its end
differs from its head. Who sets back the whole folder, to an older copy or to nothing, is not seen:
keep the head elsewhere, too.
"""

from __future__ import annotations

import hmac
import itertools
import json
import os
import re
import secrets
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock

from leakbound._util import files
from leakbound.ledger.budget import Budget
from leakbound.ledger.lines import (
    FIRST,
    KEY,
    SCHEMA,
    L,
    Link,
    PaidRound,
    Standing,
    checked,
    digest,
    mac,
    written,
)
from leakbound.ledger.standing import standings
from leakbound.risk.deployment.facts import Deployment

WAIT = 60.0
"""Seconds to wait for another process of the node that is writing a line."""
MOST_HEAD = 1 << 12
MOST_LINE = 1 << 20
"""Bytes of a head and of a line."""
MOST_WORDS = 64
"""Characters of a framework's name of a training or a round: the server chose it."""


@dataclass(frozen=True)
class Charge:
    """What a round costs, and whether it may train.

    Attributes:
        refused: whether the round is withheld; then nothing was written.
        reasons: limits that all rounds with this one exceed.
        after: what is spent with this round.
        number: of its line; None if it is refused.
    """

    refused: bool
    reasons: tuple[str, ...]
    after: tuple[Standing, ...]
    number: int | None


class Ledger:
    """The rounds that a node has paid for, in a file that only grows.

    Reading checks the whole chain and changes nothing. A last line that a kill cut short does not
    count: its round did not train, because `charge` returns only after the line is on disk.
    Processes of one node may share a ledger.

    Args:
        path: the file (JSON Lines), created with its key at the first line.

    Raises:
        ValueError: the file is no ledger, its key is missing, or its chain is broken.

    Example:
        >>> from tempfile import mkdtemp
        >>> from leakbound.risk.deployment import parse
        >>> facts = {"clip": {"norm": 1.0, "kind": "l2", "at": "client"}, "unit": "client",
        ...     "noise": {"multiplier": 2.0, "at": "client", "seeded": False},
        ...     "participation": {"law": "all"}, "correlation": "none"}
        >>> ledger = Ledger(Path(mkdtemp()) / "ledger.jsonl")
        >>> charges = [ledger.charge(parse(facts), Budget(max_epsilon=4.0)) for _ in range(4)]
        >>> [charge.refused for charge in charges], ledger.rounds
        ([False, False, False, True], 3)
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._key: bytes | None = None
        self._end = 0
        self._raw = b""
        self._last: Link | None = None
        self._before: str = FIRST
        self._lags = False
        self._spent: Counter[str] = Counter()
        self._facts: dict[str, Deployment] = {}
        if os.path.lexists(self.path):  # before a lock is laid beside a file of the user
            files.check(self.path, key=KEY)
        with self._locked():
            self._read()

    @property
    def rounds(self) -> int:
        """How many rounds it holds."""
        return 0 if self._last is None else self._last.number

    @property
    def head(self) -> str:
        """The seal of the last line; kept elsewhere, it shows a ledger that was set back."""
        return FIRST if self._last is None else self._last.seal

    @property
    def spent(self) -> list[tuple[Deployment, int]]:
        """How many rounds each deployment ran."""
        return [(self._facts[name], count) for name, count in self._spent.items()]

    def lines(self, first: int = 1) -> Iterator[PaidRound]:
        """The lines from this number on; the chain is checked on the way."""
        if self._last is None:
            return
        with files.opened(self.path) as stream:
            raws = itertools.islice(stream, max(0, first - 2), self.rounds)
            before: Link | None = None
            if first > 1:
                before = msgspec.json.decode(next(raws), type=Link)
            for raw in raws:
                before = self._checked(raw, before, PaidRound)
                yield before

    def charge(
        self,
        deployment: Deployment,
        budget: Budget,
        *,
        job: str = "",
        round: str = "",
    ) -> Charge:
        """Pay for one more round, before it trains, or refuse it. No data of the node decides.

        Args:
            deployment: the facts of the training; its number of rounds does not count.
            budget: what may be spent.
            job: what the framework calls the training.
            round: what it calls the round.

        Raises:
            ValueError: the line cannot be written; the round must not train then.
        """
        with self._locked():
            self._read()  # what other processes wrote
            after = self._with(deployment, budget)
            reasons = budget.exceeded(after)
            # Nothing is written of a refused round: it reveals nothing, so it costs nothing.
            if reasons and budget.on_excess == "withhold":
                return Charge(True, reasons, after, None)
            name = digest(deployment)
            fields = {
                "number": self.rounds + 1,
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "job": _short(job),
                "round": _short(round),
                "mechanism": name,
                "facts": None if name in self._facts else msgspec.to_builtins(deployment),
                "after": msgspec.to_builtins(after),
                "schema": SCHEMA,
            }
            with files.writing(self.path, "no round trains before its line is kept", name="path"):
                self._append(fields)
        return Charge(False, reasons, after, self.rounds)

    def _with(self, deployment: Deployment, budget: Budget) -> tuple[Standing, ...]:
        name = digest(deployment)
        facts = {**self._facts, name: deployment}
        spent = self._spent + Counter([name])
        every = [(facts[own], count) for own, count in spent.items()]
        return standings(every, delta=budget.delta, prior=budget.prior)

    def _append(self, fields: dict[str, Any]) -> None:
        key = self._key or self._new_key()
        raw = written(fields, self.head, key)
        # What no later reading takes must not be written.
        self._checked(raw, self._last, PaidRound)
        if len(raw) > MOST_LINE:
            raise ValueError(f"a line of {len(raw)} bytes is over {MOST_LINE}: give shorter facts")
        # A second line without its head would look like one that was cut off, and a first line
        # without any head like a ledger that was cut down to it.
        if self._lags or self._last is None:
            self._write_head()
        if self._last is None:
            files.write(self.path, raw, key=KEY)
        else:
            descriptor = files.appending(self.path, KEY)
            try:
                os.ftruncate(descriptor, self._end)  # what a kill left of a line
                files.put(descriptor, raw)  # it waits until the line is on disk
            finally:
                os.close(descriptor)
        self._note(self._checked(raw, self._last, Link), raw)
        self._lags = True
        self._write_head()

    def _write_head(self) -> None:
        content = {"rounds": self.rounds, "seal": self.head, "mac": self._mac(self.rounds)}
        files.write(self._beside(".head.json"), json.dumps(content, indent=1).encode())
        self._lags = False

    def _mac(self, rounds: int) -> str:
        """Of the head that names this line, which is the last one or the one before it."""
        seal = self.head if rounds == self.rounds else self._before
        return mac(f"head {rounds} {seal}".encode(), self._own_key())

    def _read(self) -> None:
        """Take over the lines since the last reading."""
        if os.path.lexists(self.path):
            files.check(self.path, key=KEY)
            with files.opened(self.path) as stream:
                stream.seek(self._end - len(self._raw))
                if stream.read(len(self._raw)) != self._raw:
                    raise ValueError(self._broken(f"line {self.rounds} was changed or cut off"))
                while (raw := stream.readline(MOST_LINE + 1)).endswith(b"\n"):
                    self._note(self._checked(raw, self._last, Link), raw)
                if len(raw) > MOST_LINE:
                    raise ValueError(self._broken(f"line {self.rounds + 1} is too long"))
        elif self.rounds:
            raise ValueError(self._broken("it was removed"))
        self._compare()

    def _compare(self) -> None:
        """The head names the last line, or the one before it if a kill came between the two."""
        place = self._beside(".head.json")
        if not place.exists():
            if self.rounds:
                raise ValueError(self._broken("its head is missing"))
            return
        head = files.read_json(place, f"head {str(place)!r}", most=MOST_HEAD)
        number = head.get("rounds")
        if type(number) is not int or number not in (self.rounds, self.rounds - 1):
            raise ValueError(
                self._broken(f"it has {self.rounds} rounds, and its head {str(number)[:20]}")
            )
        if not hmac.compare_digest(str(head.get("mac")).encode(), self._mac(number).encode()):
            raise ValueError(self._broken("its head was changed"))
        self._lags = number < self.rounds

    def _checked(
        self,
        raw: bytes,
        before: Link | None,
        kind: type[L],
    ) -> L:
        number = 1 if before is None else before.number + 1
        key = self._own_key()
        try:
            return checked(raw, before, key, kind)
        except ValueError as error:
            raise ValueError(self._broken(f"line {number}: {error}")) from None

    def _broken(self, why: str) -> str:
        return f"ledger {str(self.path)!r} cannot be trusted: {why}; restore it from a copy"

    def _note(self, line: Link, raw: bytes) -> None:
        if line.facts is not None:
            self._facts[line.mechanism] = line.facts
        if line.mechanism not in self._facts:
            raise ValueError(self._broken(f"line {line.number} has no facts"))
        self._spent[line.mechanism] += 1
        self._before = self.head
        self._last = line
        self._raw = raw
        self._end += len(raw)

    def _own_key(self) -> bytes:
        """The key, which nobody else can have read or chosen."""
        if self._key is None:
            place = self._beside(".key")
            what = f"key {str(place)!r} of the ledger"
            text = files.read_bytes(place, what, most=64).decode("ascii", "replace")
            if not re.fullmatch("[0-9a-f]{64}", text):
                raise ValueError(f"{what} is no key; restore it from a copy")
            mode = place.lstat().st_mode
            if not stat.S_ISREG(mode) or (os.name == "posix" and mode & 0o077):
                raise ValueError(f"{what} can be read by others or is a link; chmod 600 a file")
            self._key = bytes.fromhex(text)
        return self._key

    def _new_key(self) -> bytes:
        """A random key, readable by its owner only."""
        place = self._beside(".key")
        if not place.exists():  # else a kill came before the first line
            files.write(place, secrets.token_hex(32).encode())
        return self._own_key()

    def _beside(self, ending: str) -> Path:
        return self.path.with_name(self.path.name + ending)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        files.folder(self.path.parent)
        with FileLock(self._beside(".lock"), timeout=WAIT, mode=0o600):
            yield


def _short(words: str) -> str:
    """A framework's words, without what no JSON holds."""
    return words[:MOST_WORDS].encode("utf-8", "replace").decode()
