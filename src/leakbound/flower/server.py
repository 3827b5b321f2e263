"""What an honest-but-curious server sees: strategies that keep a round's replies or their sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import FitIns, FitRes, Parameters, Scalar, parameters_to_ndarrays
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy as SumStrategy
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from leakbound import captured, check
from leakbound.captured.capture import Capture
from leakbound.flower.compat import log
from leakbound.flower.messages import COUNTS, SENT, first, only_arrays, read

RATES = ("lr", "learning-rate", "learning_rate")
Results = list[tuple[ClientProxy, FitRes]]
Failures = list[tuple[ClientProxy, FitRes] | BaseException]


def _passed_on(name: str) -> Any:
    """A method that is the wrapped strategy's."""

    def method(self: Any, *args: Any, **named: Any) -> Any:
        return getattr(self.strategy, name)(*args, **named)

    return method


class Watched(Strategy):
    """A strategy that does what another does, and keeps what the server sees of some rounds.

    It keeps what any server could keep: the weights that it sent, and those that each client
    answered.

    Args:
        strategy: the strategy of your app.
        rounds: which rounds to keep, from 1.
        out: a folder to write them to, as `leakbound capture` does; None: in memory alone.
        on_round: is called with the round's number and its captures once they are there.
        learning_rate: of the clients' SGD; by default "lr" or "learning-rate" in the server's
            configuration.

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

    configure_evaluate = _passed_on("configure_evaluate")
    aggregate_evaluate = _passed_on("aggregate_evaluate")

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

    def summary(self) -> None:
        """The strategy's summary, and which rounds are kept."""
        self.strategy.summary()
        log(INFO, "\t└──> leakbound keeps what the server sees of rounds %s", list(self.rounds))

    def start(self, *args: Any, **named: Any) -> Result:
        """The strategy's own loop."""
        return type(self.strategy).start(self, *args, **named)

    def _keep(self, number: int, replies: Sequence[Message]) -> None:
        captures: list[Capture] = []
        for reply in replies:
            asked = self._sent.get(reply.metadata.src_node_id)
            if asked is None or reply.has_error():
                continue
            try:
                captures.append(capture_of(number, asked, reply, learning_rate=self._rate))
            except Exception as error:  # the training goes on: this only looks
                log(WARNING, "leakbound does not keep the reply: %s", error)
        self._sent = {}
        self.captures += captures
        for capture in captures:
            try:
                if self._out is not None:
                    keep(self._out, capture)
            except ValueError as error:
                log(WARNING, "leakbound does not keep the reply: %s", error)
        if self._on_round is not None:
            self._on_round(number, captures)


class WatchedSum(SumStrategy):
    """A strategy of `flwr.server` that keeps the sums that SecAgg+ shows the server.

    SecAgg+ gives the server the average of the clients' weights, weighted by their numbers of
    examples. For one local step that is one client's step on all examples, in which no attack can
    tell whose image is whose; for several local steps this is an approximation.

    Args:
        strategy: the strategy that the `LegacyContext` would get.
        rounds: which to keep, from 1.
        learning_rate: of the clients' SGD.
        out: a folder to write them to; None: in memory alone.

    Attributes:
        captures: one a round.
    """

    def __init__(
        self,
        strategy: SumStrategy,
        *,
        rounds: Sequence[int] = (1,),
        learning_rate: float | None = None,
        out: Path | str | None = None,
    ) -> None:
        self.strategy = strategy
        self.rounds = checked_rounds(rounds)
        self.captures: list[Capture] = []
        self._rate, self._out = learning_rate, out
        self._before: dict[str, Tensor] = {}

    initialize_parameters = _passed_on("initialize_parameters")
    configure_evaluate = _passed_on("configure_evaluate")
    aggregate_evaluate = _passed_on("aggregate_evaluate")
    evaluate = _passed_on("evaluate")

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """The strategy's; what is sent is remembered."""
        if server_round in self.rounds:
            self._before = _numbered(parameters)
        return self.strategy.configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(
        self, server_round: int, results: Results, failures: Failures
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """The strategy's; the sum is kept before."""
        if server_round in self.rounds and results:
            self._keep(server_round, results)
        return self.strategy.aggregate_fit(server_round, results, failures)

    def _keep(self, number: int, results: Results) -> None:
        shared = results[0][1].parameters
        if any(answer.parameters is not shared for _, answer in results):
            log(WARNING, "leakbound keeps no sum of round %s: the clients' own are there", number)
            return
        count = sum(answer.num_examples for _, answer in results)
        name = f"round {number}, the sum of {len(results)} clients"
        about: dict[str, Any] = {"round": number, "client": 0, "kind": "weights", "examples": count}
        about |= {"clients": len(results), "learning_rate": self._rate}
        capture = Capture(name, "weights", _numbered(shared), self._before, _texts(about))
        self.captures.append(capture)
        if self._out is not None:
            keep(self._out, capture)


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
    _, sent = only_arrays(asked.content, SENT)  # by this server itself: nothing to check
    before = {key: torch.from_numpy(array.numpy().copy()) for key, array in sent.items()}
    _, answered = only_arrays(reply.content, f"the reply of {name}")
    after = read(answered, before, what=f"the reply of {name}")
    examples = first(COUNTS, reply.content.metric_records.values())
    if learning_rate is None:
        learning_rate = first(RATES, asked.content.config_records.values())
    about = {"round": number, "client": client, "kind": "weights", "examples": examples}
    texts = _texts(about | {"learning_rate": learning_rate})
    return Capture(name, "weights", after, before, texts)


def _texts(about: dict[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in about.items() if value is not None}


def keep(folder: Path | str, capture: Capture) -> Path:
    """Write a capture to a folder of rounds; returns its file."""
    return captured.write(Path(folder), capture.before or {}, capture.update, capture.about)


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


def _numbered(parameters: Parameters) -> dict[str, Tensor]:
    """This server's own arrays, numbered in the model's order."""
    arrays = (np.asarray(value, dtype=np.float32) for value in parameters_to_ndarrays(parameters))
    return {str(number): torch.from_numpy(array.copy()) for number, array in enumerate(arrays)}
