"""Flower's secure aggregation (SecAgg+): what the server sees is a sum."""

from __future__ import annotations

from collections.abc import Sequence
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.common import (
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    Parameters,
    Scalar,
    parameters_to_ndarrays,
)
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy
from torch import Tensor

from leakbound.captured.capture import Capture
from leakbound.flower.compat import log
from leakbound.flower.server import checked_rounds, keep

Results = list[tuple[ClientProxy, FitRes]]
Failures = list[tuple[ClientProxy, FitRes] | BaseException]


class WatchedSum(Strategy):
    """A strategy of `flwr.server` that keeps the sums that SecAgg+ shows the server.

    SecAgg+ gives the server the average of the clients' weights, weighted by their numbers of
    examples. For one local step that is one step on all their examples: as a captured update it is
    one client with all examples, in which no attack can tell whose image is whose. For several
    local steps it is that only nearly.

    Args:
        strategy: the strategy that the `LegacyContext` would get.
        rounds: which rounds to keep, from 1.
        learning_rate: of the clients' SGD.
        out: a folder to write them to; None: in memory alone.

    Attributes:
        captures: one a round.
    """

    def __init__(
        self,
        strategy: Strategy,
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

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
        """The strategy's."""
        return self.strategy.initialize_parameters(client_manager)

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """The strategy's; what is sent is remembered."""
        if server_round in self.rounds:
            self._before = _named(parameters)
        return self.strategy.configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(
        self, server_round: int, results: Results, failures: Failures
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """The strategy's; the sum is kept before."""
        if server_round in self.rounds and results:
            self._keep(server_round, results)
        return self.strategy.aggregate_fit(server_round, results, failures)

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """The strategy's."""
        return self.strategy.configure_evaluate(server_round, parameters, client_manager)

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: list[tuple[ClientProxy, EvaluateRes] | BaseException],
    ) -> tuple[float | None, dict[str, Scalar]]:
        """The strategy's."""
        return self.strategy.aggregate_evaluate(server_round, results, failures)

    def evaluate(
        self, server_round: int, parameters: Parameters
    ) -> tuple[float, dict[str, Scalar]] | None:
        """The strategy's."""
        return self.strategy.evaluate(server_round, parameters)

    def _keep(self, number: int, results: Results) -> None:
        first = results[0][1].parameters
        if any(answer.parameters is not first for _, answer in results):
            log(WARNING, "leakbound keeps no sum of round %s: the clients' own are there", number)
            return
        count = sum(answer.num_examples for _, answer in results)
        told: dict[str, Any] = {"round": number, "client": 0, "kind": "weights", "examples": count}
        told["clients"] = len(results)
        if self._rate is not None:
            told["learning_rate"] = self._rate
        about = {key: str(value) for key, value in told.items()}
        name = f"round {number}, the sum of {len(results)} clients"
        capture = Capture(name, "weights", _named(first), self._before, about)
        self.captures.append(capture)
        if self._out is not None:
            keep(Path(self._out), capture)


def _named(parameters: Parameters) -> dict[str, Tensor]:
    """This server's own arrays, numbered in the model's order."""
    arrays = (np.asarray(value, dtype=np.float32) for value in parameters_to_ndarrays(parameters))
    return {str(number): torch.from_numpy(array.copy()) for number, array in enumerate(arrays)}
