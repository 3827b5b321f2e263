"""What an honest-but-curious server sees: a strategy that keeps a round's replies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from leakbound import captured, check
from leakbound.captured.capture import Capture
from leakbound.flower.arrays import only_arrays, read
from leakbound.flower.compat import log

RATES = ("lr", "learning-rate", "learning_rate")
COUNTS = ("num-examples", "num_examples")


class Watched(Strategy):
    """A strategy that does what another does, and keeps what the server sees of some rounds.

    It changes nothing: the same clients are asked, the same replies are aggregated. What it keeps
    is what any server could keep: the weights that it sent, and those that each client answered.

    Args:
        strategy: the strategy of your app.
        rounds: which rounds to keep, from 1.
        out: a folder to write them to, as `leakbound capture` does; None: in memory alone.
        on_round: is called with the round's number and its captures once they are there.
        learning_rate: of the clients' SGD; by default the server's configuration is searched for
            "lr" and "learning-rate".

    Attributes:
        captures: what was seen so far, for `leakbound.captured`.

    Example:
        >>> from flwr.serverapp.strategy import FedAvg
        >>> watched = Watched(FedAvg(), rounds=(1, 2))
        >>> watched.captures, watched.min_train_nodes
        ([], 2)
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        rounds: Sequence[int] = (1,),
        out: Path | str | None = None,
        on_round: Callable[[int, list[Capture]], None] | None = None,
        learning_rate: float | None = None,
    ) -> None:
        self.strategy = strategy
        self.rounds = checked_rounds(rounds)
        self.captures: list[Capture] = []
        self._out, self._on_round, self._rate = out, on_round, learning_rate
        self._sent: dict[int, Message] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "strategy":  # not there yet: copied or unpickled
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The strategy's messages; of a watched round they are remembered."""
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        if server_round in self.rounds:
            self._sent = {message.metadata.dst_node_id: message for message in messages}
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The strategy's sum; of a watched round the replies are kept before."""
        replies = list(replies)
        if server_round in self.rounds:
            self._keep(server_round, replies)
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The strategy's messages."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The strategy's metrics."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """The strategy's summary, and which rounds are kept."""
        self.strategy.summary()
        log(INFO, "\t└──> leakbound keeps what the server sees of rounds %s", list(self.rounds))

    def start(self, *given: Any, **named: Any) -> Result:
        """The strategy's own loop."""
        return type(self.strategy).start(self, *given, **named)

    def _keep(self, number: int, replies: Sequence[Message]) -> None:
        seen: list[Capture] = []
        for reply in replies:
            asked = self._sent.get(reply.metadata.src_node_id)
            if asked is None or reply.has_error():
                continue
            try:
                seen.append(capture_of(number, asked, reply, learning_rate=self._rate))
            except Exception as error:  # the training goes on: this only looks
                log(WARNING, "leakbound does not keep the reply: %s", error)
        self._sent = {}
        self.captures += seen
        if self._out is not None:
            for capture in seen:
                try:
                    keep(Path(self._out), capture)
                except ValueError as error:
                    log(WARNING, "leakbound does not keep the reply: %s", error)
        if self._on_round is not None:
            self._on_round(number, seen)


def capture_of(
    number: int, asked: Message, reply: Message, *, learning_rate: float | None = None
) -> Capture:
    """What the server holds of one client in one round.

    Raises:
        ValueError: a reply whose arrays do not have the names and shapes of those sent, or lie
            about their size.
    """
    client = reply.metadata.src_node_id
    name = f"round {number}, client {client}"
    _, sent = only_arrays(asked.content, "the server's message")
    before = _own(sent)
    _, answered = only_arrays(reply.content, f"the reply of {name}")
    after = read(answered, before, what=f"the reply of {name}")
    told: dict[str, Any] = {"round": number, "client": client, "kind": "weights"}
    told["examples"] = _first(COUNTS, reply.content.metric_records.values())
    rate = _first(RATES, asked.content.config_records.values())
    told["learning_rate"] = rate if learning_rate is None else learning_rate
    about = {key: str(value) for key, value in told.items() if value is not None}
    return Capture(name, "weights", after, before, about)


def keep(folder: Path, capture: Capture) -> Path:
    """Write a capture to a folder of rounds; returns its file."""
    return captured.write(folder, capture.before or {}, capture.update, capture.about)


def checked_rounds(rounds: Sequence[int]) -> tuple[int, ...]:
    """The rounds, once each and in order.

    Raises:
        ValueError: none, or one below 1.
    """
    for number in rounds:
        check.count(rounds=number)
    if not rounds:
        raise ValueError("rounds is empty; give the rounds to keep, from 1: (1,)")
    return tuple(sorted(set(rounds)))


def _first(keys: Sequence[str], records: Iterable[Mapping[str, Any]]) -> Any:
    """The value of the first key that a record has; None where none has one."""
    return next((record[key] for record in records for key in keys if key in record), None)


def _own(record: ArrayRecord) -> dict[str, Tensor]:
    """What this server itself sent, as tensors."""
    return {key: torch.from_numpy(array.numpy().copy()) for key, array in record.items()}
