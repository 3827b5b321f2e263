"""What a client's mod or filter needs to know of the training: model, loss and step size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leakbound import check
from leakbound.core import Batch, LocalPlan, Loss, Task
from leakbound.domains import Domain
from leakbound.task import trained

MOST_BYTES = 2**32
"""The most bytes of arrays in one message."""


@dataclass(frozen=True, eq=False)
class Setup:
    """The training that mods defend or measure.

    Parameters that `model` returns frozen are constants: a train function that changes them raises
    an error. Batch norms stay as `model` returns them: return `Net().eval()` if you train with
    frozen statistics. A mod that computes the update itself trains without dropout.

    Args:
        model: makes the model, as `Net`; its weights do not matter.
        learning_rate: of the local SGD, or its key in the configuration that the server sends with
            a message, or in the app's run configuration.
        loss: a name in `leakbound.losses.LOSSES`, or a function of the model's outputs and the
            labels, a mean over the batch.
        input_range: the range of every input value of the model.
        classes: the number of classes, to check labels; None does not check.
        public: public data of the same kind; some defenses use it.
        steps: local steps per round.
        domain: what one input is, where more is known than its range: a table's columns.
        batch_size: of a local step; None is all that a client trains on in a round.
        most_bytes: messages with more bytes of arrays are rejected.

    Example:
        >>> linear = lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> setup = Setup(linear, learning_rate="lr")
        >>> setup.task(setup.state(), {"lr": 0.1}).plan.learning_rate
        0.1
    """

    model: Callable[[], nn.Module]
    learning_rate: float | str = "lr"
    loss: str | Loss = nn.functional.cross_entropy
    input_range: tuple[float, float] = (0.0, 1.0)
    classes: int | None = None
    public: Batch | None = None
    steps: int = 1
    batch_size: int | None = None
    most_bytes: int = MOST_BYTES
    domain: Domain | None = None

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module) or not callable(self.model):
            raise ValueError(
                f"model is a {type(self.model).__name__}; give what makes a model, such as its "
                "class (Setup(Net)) or lambda: Net()"
            )
        if not isinstance(self.learning_rate, str):
            check.positive(learning_rate=self.learning_rate)
        check.count(steps=self.steps, most_bytes=self.most_bytes)
        check.given(check.count, batch_size=self.batch_size)

    def state(self) -> dict[str, Tensor]:
        """A fresh model's state dict: the names, shapes and types of a message's arrays."""
        return dict(self._fresh().state_dict())

    def rate(self, config: Mapping[str, Any]) -> float:
        """The learning rate, looked up if it was given by its key."""
        if not isinstance(self.learning_rate, str):
            return self.learning_rate
        if self.learning_rate not in config:
            known = ", ".join(repr(key) for key in config) or "nothing"
            raise ValueError(
                f"learning_rate is the key {self.learning_rate!r}, but the server's configuration "
                f"and the run's hold {known}; send it (train_config=ConfigRecord), or give Setup "
                "the number"
            )
        value = config[self.learning_rate]
        # a server that adds a key could make the noise as small as it likes
        if isinstance(value, Conflict):
            raise ValueError(
                f"learning_rate is the key {self.learning_rate!r}, which has the values "
                f"{value.values} in the run's configuration and the server's; use one key for each"
            )
        check.positive(**{self.learning_rate: value})
        return float(value)

    def task(
        self,
        named: Mapping[str, Tensor],
        config: Mapping[str, Any],
    ) -> Task:
        """The task at the weights that the server sent; the model's own fill what `named` lacks."""
        model = self._fresh()
        weights = trained(model)
        names = model.named_parameters(remove_duplicate=False)
        if shared := {name for name, p in names if p.requires_grad} - set(weights):
            raise ValueError(
                f"the model holds one tensor under two names ({min(shared)!r}); mods cannot defend "
                "tied weights: give each layer its own"
            )
        if missing := [name for name in weights if name not in named]:
            raise ValueError(f"the weights {missing[0]!r} are missing; send all trained weights")
        model.load_state_dict(dict(named), strict=False)
        return Task.of(
            model,
            loss=self.loss,
            plan=LocalPlan(self.steps, self.rate(config), self.batch_size),
            input_range=self.input_range,
            classes=self.classes,
            public=self.public,
            domain=self.domain,
        )

    def _fresh(self) -> nn.Module:
        """A model without dropout, made without a draw from torch's global generator."""
        # initial weights must not move the draws of the training around them
        with torch.random.fork_rng(devices=[]):
            model = self.model()
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        return model


@dataclass(frozen=True)
class Conflict:
    """A key that two configurations give different values."""

    values: tuple[Any, ...]
