"""A ledger on a node's disk: it grows line by line, and a line is on disk before its round trains.

Beside the ledger lie its key (`.key`, random, readable by its owner only), which seals the lines,
and its head (`.head.json`), which names the last line. A ledger that lost lines at its end differs
from its head. Who sets back all three files to an older copy is not seen: keep the head elsewhere,
too.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

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
    written,
)
from leakbound.ledger.standing import standings
from leakbound.risk.deployment.facts import Deployment

WAIT = 60.0
"""Seconds to wait for another process of the node that is writing a line."""
MOST_HEAD = 1 << 12


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

    Reading checks the whole chain. A last line that a kill cut short is dropped: its round did not
    train, because `charge` returns only after the line is on disk. Processes of one node may share
    a ledger.

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
        self._last: Link | None = None
        self._spent: Counter[tuple[str, str]] = Counter()
        self._facts: dict[str, Deployment] = {}
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
        """How many rounds each deployment ran; of correlated noise, in each job."""
        return [(self._facts[name], count) for (name, _), count in self._spent.items()]

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
            after = self._with(deployment, budget, job)
            reasons = budget.exceeded(after)
            # Nothing is written of a refused round: it reveals nothing, so it costs nothing.
            if reasons and budget.on_excess == "withhold":
                return Charge(True, reasons, after, None)
            self._append(deployment, after, job, round)
        return Charge(False, reasons, after, self.rounds)

    def _with(
        self,
        deployment: Deployment,
        budget: Budget,
        job: str,
    ) -> tuple[Standing, ...]:
        name = digest(deployment)
        facts = {**self._facts, name: deployment}
        spent = self._spent + Counter([_group(name, deployment, job)])
        every = [(facts[own], count) for (own, _), count in spent.items()]
        return standings(every, delta=budget.delta, prior=budget.prior)

    def _append(
        self,
        deployment: Deployment,
        after: tuple[Standing, ...],
        job: str,
        round: str,
    ) -> None:
        name = digest(deployment)
        fields = {
            "number": self.rounds + 1,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "job": job,
            "round": round,
            "mechanism": name,
            "facts": None if name in self._facts else msgspec.to_builtins(deployment),
            "after": msgspec.to_builtins(after),
            "schema": SCHEMA,
        }
        with files.writing(self.path, "no round may train before its line is written", name="path"):
            key = self._key or self._new_key()
            raw = written(fields, self.head, key)
            if self._last is None:
                files.write(self.path, raw, key=KEY)
            else:
                descriptor = files.appending(self.path, KEY)
                try:
                    files.put(descriptor, raw)  # it waits until the line is on disk
                finally:
                    os.close(descriptor)
            self._note(self._checked(raw, self._last, Link), len(raw))
            content = json.dumps({"rounds": self.rounds, "seal": self.head}, indent=1).encode()
            files.write(self._beside(".head.json"), content)

    def _read(self) -> None:
        """Take over the lines since the last reading, and cut off one that a kill left."""
        if not os.path.lexists(self.path):
            self._compare()
            return
        files.check(self.path, key=KEY)
        with files.opened(self.path) as stream:
            stream.seek(self._end)  # what was read before was checked then
            torn = b""
            for raw in stream:
                if not raw.endswith(b"\n"):
                    torn = raw
                    break
                self._note(self._checked(raw, self._last, Link), len(raw))
        if torn:  # nobody writes now: we hold the lock
            descriptor = files.appending(self.path, KEY)
            try:
                os.ftruncate(descriptor, self._end)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._compare()

    def _compare(self) -> None:
        """The head names the last line, or the one before it if a kill came between the two."""
        place = self._beside(".head.json")
        if not place.exists():
            if self.rounds > 1:
                raise ValueError(self._broken("its head is missing"))
            return
        head = files.read_json(place, f"head {str(place)!r}", most=MOST_HEAD)
        if head.get("rounds") not in (self.rounds, self.rounds - 1):
            raise ValueError(
                self._broken(f"it has {self.rounds} rounds, and its head {head.get('rounds')!r}")
            )
        if head["rounds"] == self.rounds and head.get("seal") != self.head:
            raise ValueError(self._broken("its head has another seal"))

    def _checked(
        self,
        raw: bytes,
        before: Link | None,
        kind: type[L],
    ) -> L:
        number = 1 if before is None else before.number + 1
        try:
            return checked(raw, before, self._own_key(), kind)
        except ValueError as error:
            raise ValueError(self._broken(f"line {number}: {error}")) from None

    def _broken(self, why: str) -> str:
        return f"ledger {str(self.path)!r} cannot be trusted: {why}; restore it from a copy"

    def _note(self, line: Link, length: int) -> None:
        if line.facts is not None:
            self._facts[line.mechanism] = line.facts
        if line.mechanism not in self._facts:
            raise ValueError(self._broken(f"line {line.number} has no facts"))
        self._spent[_group(line.mechanism, self._facts[line.mechanism], line.job)] += 1
        self._last = line
        self._end += length

    def _own_key(self) -> bytes:
        if self._key is None:
            place = self._beside(".key")
            text = files.read_bytes(place, f"key {str(place)!r} of the ledger", most=64)
            self._key = bytes.fromhex(text.decode("ascii", "replace"))
        return self._key

    def _new_key(self) -> bytes:
        """A random key, readable by its owner only."""
        place = self._beside(".key")
        if place.exists():  # a kill came before the first line
            return self._own_key()
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            files.put(descriptor, secrets.token_hex(32).encode())
        finally:
            os.close(descriptor)
        return self._own_key()

    def _beside(self, ending: str) -> Path:
        return self.path.with_name(self.path.name + ending)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with FileLock(self._beside(".lock"), timeout=WAIT, mode=0o600):
            yield


def _group(name: str, deployment: Deployment, job: str) -> tuple[str, str]:
    """Rounds that compose by one law: noise that is correlated across rounds ends with its job."""
    return name, "" if deployment.correlation in (None, "none") else job
