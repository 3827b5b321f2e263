"""The state of one search: what moves, the last evaluation, and the best iterate so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from leakbound.attacks.features.base import FoundFeatures
from leakbound.attacks.matching.images import Images
from leakbound.attacks.matching.objective import Objective
from leakbound.engines.choose import Choice


class Companion(Protocol):
    """What an attack estimates along with the images, and so changes in the objective."""

    variables: list[Tensor]
    """What the optimizer moves of it."""

    def place(self, objective: Objective) -> Objective:
        """The objective at the present estimate, asked before every evaluation."""
        ...

    def learn(self, rows: Tensor, better: bool) -> None:
        """An evaluation is done: the client's rows of the guess, and whether it is the best."""
        ...

    def recall(self) -> None:
        """Go back to the estimate of the best iterate."""
        ...


@dataclass(frozen=True, eq=False)
class ExactEngine:
    """The engine that evaluates a search, and how many rows of gradients it has."""

    choice: Choice
    rows: int


@dataclass(eq=False)
class Search:
    """One search.

    Attributes:
        labels: (N,) class numbers, or logits (N, K) that are searched with the images.
        features: what another method read off the update; None where none was asked.
        exact: the engine that evaluates it; None: autograd.
        direct: known defenses have left the rows as they are so far.
        pull: what else moves the images, without a say in which iterate is best.
        total, match: the objective and the distance at the last evaluation.
        best: the lowest objective so far, and `kept` the variables there.
        trace: the distance now and then.
        vanished: the first evaluation had no gradient.
    """

    objective: Objective
    images: Images
    labels: Tensor
    features: FoundFeatures | None = None
    companion: Companion | None = None
    exact: ExactEngine | None = None
    direct: bool = True
    pull: Callable[[Tensor], Tensor] | None = None
    kept: list[Tensor] = field(default_factory=list)
    trace: list[float] = field(default_factory=list)
    vanished: bool = False

    def __post_init__(self) -> None:
        self.best = torch.tensor(float("inf"), device=self.objective.seen.device)
        self.total = self.match = self.best

    @property
    def joint(self) -> bool:
        """Whether the labels are searched, too."""
        return self.labels.requires_grad

    @property
    def variables(self) -> list[Tensor]:
        """All that the optimizer moves."""
        more = [] if self.companion is None else self.companion.variables
        return [*self.images.variables, *([self.labels] if self.joint else []), *more]

    def guess(self) -> tuple[Tensor, Tensor]:
        """The present images (N, *S), and labels (N,) or probabilities (N, K)."""
        return self.images(), self.labels.softmax(-1) if self.joint else self.labels

    def record(self, total: Tensor, match: Tensor, gradients: Sequence[Tensor]) -> Tensor:
        """Take in an evaluation, with gradients of the variables; whether it is the best so far."""
        for variable, own in zip(self.variables, gradients, strict=True):
            variable.grad = own
        with torch.no_grad():
            better = total < self.best
            self.best = torch.where(better, total, self.best)
            pairs = zip(self.variables, self.kept or self.variables, strict=True)
            self.kept = [torch.where(better, now, before) for now, before in pairs]
        self.total, self.match = total.detach(), match.detach()
        if not self.trace:
            self.trace.append(float(self.match))
            self.vanished = not any(bool(own.any()) for own in gradients)
        return better

    def recall(self) -> None:
        """Put the variables back to the best iterate."""
        with torch.no_grad():
            for variable, kept in zip(self.variables, self.kept, strict=False):
                variable.copy_(kept)  # nothing is kept before the first evaluation
        if self.companion is not None:
            self.companion.recall()
            self.objective = self.companion.place(self.objective)

    def enter(self, factor: float) -> None:
        """Begin a stage from the best iterate; as the objective changes, it is judged anew."""
        self.recall()
        self.objective = self.objective.at_stage(factor)
        self.best = torch.full_like(self.best, float("inf"))
