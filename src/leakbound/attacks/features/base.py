"""The answer of a feature attack: the vectors that entered a layer, up to their scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from leakbound.core import Observation, Task


@dataclass(frozen=True, eq=False)
class FoundFeatures:
    """Estimates of the inputs of one linear layer, one per example.

    Attributes:
        vectors: (N, n) of unit length; the order is arbitrary.
        layer: the name of the linear layer whose inputs they are.
        signed: whether the signs are known; otherwise only lines are known.
        problem: why the method considers itself failed; None if it does not.
    """

    vectors: Tensor
    layer: str
    signed: bool = True
    problem: str | None = None

    @property
    def basis(self) -> Tensor:
        """(n, N) an orthonormal basis of their span."""
        return cast(Tensor, torch.linalg.qr(self.vectors.double().T)[0].to(self.vectors))


class FeatureMethod(Protocol):
    """A method that infers features from an update."""

    def find(self, observation: Observation, generator: torch.Generator) -> FoundFeatures:
        """The features behind the update; NotApplicable if the update does not allow it."""
        ...

    def plant(self, task: Task) -> Task:
        """The model that the method needs from a malicious server; the task unchanged if none."""
        ...
