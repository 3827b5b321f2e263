"""Which optimizer trained a client: seen at its steps, and as metadata of the client's update.

Only settings that `LocalPlan` simulates are declared. Of others a note says what ran.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from leakbound.captured import declared

PLAIN = {"maximize": False}
"""What every simulated optimizer has to be set to."""


@dataclass(frozen=True)
class _Kind:
    """An optimizer of PyTorch: its name in a plan, what is read, and what is not simulated."""

    name: str
    reads: Mapping[str, str]
    only: Mapping[str, Any]


EPSILON = {"eps": "epsilon"}
ADAM = {"betas": "betas", **EPSILON}
KINDS: dict[type, _Kind] = {
    torch.optim.SGD: _Kind(
        "sgd",
        {"momentum": "momentum"},
        {"dampening": 0, "nesterov": False},
    ),
    torch.optim.Adam: _Kind(
        "adam",
        ADAM,
        {"amsgrad": False, "decoupled_weight_decay": False},
    ),
    torch.optim.AdamW: _Kind(
        "adamw",
        ADAM,
        {"amsgrad": False},
    ),
    torch.optim.RMSprop: _Kind(
        "rmsprop",
        {"alpha": "betas", **EPSILON},
        {"momentum": 0, "centered": False},
    ),
    torch.optim.Adagrad: _Kind(
        "adagrad",
        EPSILON,
        {"lr_decay": 0, "initial_accumulator_value": 0},
    ),
}


@dataclass
class _Run:
    """The steps of one optimizer: its groups' settings at each step that differed."""

    optimizer: torch.optim.Optimizer
    kept: bool
    steps: int = 0
    settings: list[dict[str, Any]] = field(default_factory=list)

    def values(self, name: str) -> list[Any]:
        """The different values that a setting had, in order."""
        found: list[Any] = []
        for row in self.settings:
            if name in row and row[name] not in found:
                found.append(row[name])
        return found


class OptimizerWatch:
    """Sees the steps of PyTorch's optimizers in this process, of one round at a time.

    Example:
        >>> watch = OptimizerWatch()
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> with watch.watching():
        ...     weight.sum().backward()
        ...     torch.optim.Adam([weight], lr=0.5).step()
        >>> watch.about()["optimizer"], watch.about()["learning_rate"], watch.about()["steps"]
        ('adam,betas=[0.9, 0.999],epsilon=1e-08', '0.5', '1')
    """

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    def forget(self) -> None:
        """Begin a round."""
        self._runs = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See every step inside this block."""
        handle = self.start()
        try:
            yield
        finally:
            handle.remove()

    def start(self) -> Any:
        """See every step until the returned handle is removed."""
        return register_optimizer_step_pre_hook(self._step)

    def about(self) -> dict[str, str | None]:
        """Metadata of the round's update; None for what is known to differ, {} if nothing ran."""
        if not self._runs:
            return {}
        names = list(dict.fromkeys(type(run.optimizer).__name__ for run in self._runs))
        ran = f"the client trained with {' and '.join(names)}"
        try:
            row = self._row()
        except ValueError as error:
            return {declared.OPTIMIZER_NOTE: f"{ran}{error}, which is not simulated"}
        about = {
            declared.OPTIMIZER: declared.optimizer_text(row),
            "steps": str(sum(run.steps for run in self._runs)),
            "learning_rate": None,
        }
        notes = []
        for name, key in (("lr", "learning_rate"), ("weight_decay", "weight_decay")):
            values = [value for run in self._runs for value in run.values(name)]
            if len({*values}) == 1:
                about[key] = f"{values[0]:.9g}"
            else:
                notes.append(f"{key} was {min(values):g} to {max(values):g}, so none is declared")
        if about["learning_rate"] is None and about.get("weight_decay") != "0":
            about.pop("weight_decay", None)  # its part of the update depends on the rate
        if self._runs[0].kept:
            notes.append("its state is from earlier rounds, but attacks simulate a new one")
        if notes:
            about[declared.OPTIMIZER_NOTE] = f"{ran}: {'; '.join(notes)}"
        return about

    def _row(self) -> dict[str, Any]:
        """The optimizer as a plan names it; ValueError with what no plan can say."""
        first, *others = self._runs
        kind = KINDS.get(type(first.optimizer))
        if kind is None:
            raise ValueError("")
        for name, only in {**PLAIN, **kind.only}.items():
            if any(value != only for value in first.values(name)):
                raise ValueError(f" with {name} = {first.values(name)[0]}")
        row: dict[str, Any] = {"name": kind.name}
        for name, setting in kind.reads.items():
            values = first.values(name)
            if len(values) != 1:
                raise ValueError(f" with several values of {name}")
            row[setting] = [0.0, values[0]] if name == "alpha" else values[0]
        # A new optimizer has a new state; only SGD without momentum has none.
        joined = row == {"name": "sgd", "momentum": 0}
        settings = [*PLAIN, *kind.only, *kind.reads]

        def is_same(one: _Run) -> bool:
            same = type(one.optimizer) is type(first.optimizer)
            return same and all(one.values(name) == first.values(name) for name in settings)

        same = all(map(is_same, others))
        if others and not (joined and same):
            raise ValueError(f", in {len(self._runs)} optimizers")
        return row

    def _step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        run = next((one for one in self._runs if one.optimizer is optimizer), None)
        if run is None:
            run = _Run(optimizer, _has_stepped(optimizer))
            self._runs.append(run)
        run.steps += 1
        for group in optimizer.param_groups:
            row = {}
            for name, value in group.items():
                if name != "params":
                    row[name] = _number(value)
            if row not in run.settings:
                run.settings.append(row)


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it holds a state of earlier steps; Adagrad makes an empty one at its start."""
    for state in optimizer.state.values():
        if "step" in state:
            if state["step"] > 0:
                return True
        elif any(value is not None for value in state.values()):
            return True
    return False


def _number(value: Any) -> Any:
    """A setting as JSON has it: a rate may be a tensor."""
    if isinstance(value, torch.Tensor):
        return float(value)
    return json.loads(json.dumps(value, default=str))
