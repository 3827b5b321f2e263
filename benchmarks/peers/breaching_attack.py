"""breaching 0.1.2's own attacker class, as its functions `prepare_attack` and `reconstruct` run it.

Its preset `invertinggradients`: cosine, signed Adam at rate 0.1, rate x 0.1 at 3/8, 5/8 and 7/8 of
the steps, box. Total variation is off, because breaching's assumes three channels and pads with
zeros.
"""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from figures.setting import Setting
from torch import Tensor, nn

from peers.stand_in import import_breaching


class Timed(list):  # type: ignore[type-arg]
    """breaching's list of objective values, each with its time."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def append(self, value: float) -> None:
        super().append(value)
        self.times.append(time.perf_counter())


class Breaching:
    """An attacker of breaching's on one setting."""

    def __init__(self, given: Setting, steps: int) -> None:
        breaching = import_breaching()
        self.given = given
        self.config = _config(breaching, steps)
        with contextlib.redirect_stdout(io.StringIO()):
            self.attacker = breaching.attacks.prepare_attack(
                given.model, nn.CrossEntropyLoss(), self.config
            )
        self.server = [
            {
                "parameters": [p.detach() for p in given.model.parameters()],
                "buffers": [b.detach() for b in given.model.buffers()],
                "metadata": SimpleNamespace(shape=given.observation.input_shape, modality="vision"),
            }
        ]
        told = {
            "num_data_points": given.truth.size,
            "labels": given.labels,
            "local_hyperparams": None,
        }
        self.shared = [{"gradients": given.seen, "buffers": None, "metadata": told}]

    def closure(self) -> tuple[Any, Tensor]:
        """The closure that its optimizer calls once per step, and the candidate that it changes.

        The closure turns the gradient into signs last; it leaves the objective as its value.
        """
        attacker = self.attacker
        models, labels, _ = attacker.prepare_attack(self.server, self.shared)
        hyper = self.shared[0]["metadata"]["local_hyperparams"]
        attacker.objective.initialize(attacker.loss_fn, attacker.cfg.impl, hyper)
        candidate = attacker._initialize_data(list(self.given.start.shape))
        candidate.data = self.given.start.clone()
        optimizer, _ = attacker._init_optimizer([candidate])
        shared = attacker._cast_shared_data([dict(s) for s in self.shared])
        run = attacker._compute_objective(candidate, labels, models, optimizer, shared, 0)
        return run, candidate

    def compare(self) -> tuple[float, Tensor]:
        """Value and gradient at the start, before signs are taken."""
        signed, self.config.optim.signed = self.config.optim.signed, None
        try:
            run, candidate = self.closure()
            value = float(run().detach())
        finally:
            self.config.optim.signed = signed
        return value, candidate.grad.detach().clone()

    def run(self) -> tuple[Tensor, list[float], list[float]]:
        """The whole attack: its result, the objective at every step, seconds since the call."""
        timed: defaultdict[str, Any] = defaultdict(Timed)
        plain = self.attacker.prepare_attack

        def prepared(*given: Any) -> Any:
            models, labels, _ = plain(*given)
            return models, labels, timed

        self.attacker.prepare_attack = prepared
        began = time.perf_counter()
        try:
            answer, _ = self.attacker.reconstruct(
                self.server, self.shared, server_secrets={}, initial_data=self.given.start
            )
        finally:
            self.attacker.prepare_attack = plain
        values = timed["Trial_0_Val"]
        return answer["data"], list(values), [moment - began for moment in values.times]


def _config(breaching: Any, steps: int) -> Any:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its hydra.initialize names no version
        config = breaching.get_attack_config("invertinggradients")
    config.regularization.total_variation.scale = 0.0
    config.optim.max_iterations = steps
    config.optim.callback = 10**9
    config.restarts.num_trials = 1
    return config


def version() -> str:
    """The installed version."""
    from importlib.metadata import version as installed

    return f"breaching {installed('breaching')}"
