"""What a feature attack answers: the vectors that entered a layer, up to their scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from leakbound.types import Observation, Task


@dataclass(frozen=True, eq=False)
class FoundFeatures:
    """Estimates of the inputs of one linear layer, one for each example.

    Attributes:
        vectors: (N, n) of unit length; the order is arbitrary.
        layer: the name of the linear layer whose inputs they are.
        signed: whether the signs are known; where not, only lines are.
        problem: why the method thinks that it failed; None if it does not.
    """

    vectors: Tensor
    layer: str
    signed: bool = True
    problem: str | None = None

    @property
    def basis(self) -> Tensor:
        """(n, N) an orthonormal basis of their span."""
        basis: Tensor = torch.linalg.qr(self.vectors.double().T)[0].to(self.vectors)
        return basis


class FeatureMethod(Protocol):
    """A way to read features off an update."""

    def find(self, observation: Observation, generator: torch.Generator) -> FoundFeatures:
        """The features behind the update; NotApplicable where it does not allow it."""
        ...

    def plant(self, task: Task) -> Task:
        """The change of the model that it needs of a malicious server; the identity if none."""
        ...
