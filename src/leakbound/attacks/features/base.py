"""The answer of a feature attack: the vectors that entered a layer; distances from the truth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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
        return torch.linalg.qr(self.vectors.double().T)[0].to(self.vectors)


class FeatureMethod(Protocol):
    """A method that infers features from an update."""

    def find(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> FoundFeatures:
        """The features behind the update; NotApplicable if the update does not allow it."""
        ...

    def plant(self, task: Task) -> Task:
        """The model that the method needs from a malicious server; the task unchanged if none."""
        ...


def subspace_error(basis: Tensor, features: Tensor) -> float:
    """Mean share |(I - Q Qᵀ) f| / |f| of the true features (B, n) outside the found span.

    `basis` (n, N) is any basis of the span. Source: paper B, Table 2.

    Raises:
        ValueError: the shapes do not match, or a true feature is zero.

    Example:
        >>> round(subspace_error(torch.eye(3)[:, :2], torch.tensor([[0.0, 3.0, 4.0]])), 6)
        0.8
    """
    if basis.ndim != 2 or features.ndim != 2 or len(basis) != features.shape[1]:
        raise ValueError(
            f"basis has shape {tuple(basis.shape)} and features {tuple(features.shape)}; give a "
            "basis (n, N) and features (B, n)"
        )
    true = _unit(features, "features")
    orthonormal = torch.linalg.qr(basis.double())[0]
    outside = true - (true @ orthonormal) @ orthonormal.T
    return float(outside.norm(dim=1).mean())


def feature_errors(
    found: Tensor,
    true: Tensor,
    *,
    signed: bool = True,
) -> Tensor:
    """Distance of each true feature (B,) from its matched found one, both of length 1.

    The matching of `found` (N, n) and `true` (B, n) is one to one, by the largest sum of |cosine|.
    Distances are between 0 and 2. If not `signed`, the sign is chosen for each pair and the
    distance is at most sqrt(2). A true feature without a partner has distance 1, that of the zero
    vector.

    Raises:
        ValueError: the shapes do not match, or a feature is zero.

    Example:
        >>> result = torch.tensor([[0.0, 2.0], [-1.0, 0.0]])
        >>> feature_errors(result, torch.eye(2)).tolist()
        [2.0, 0.0]
    """
    from scipy.optimize import linear_sum_assignment

    if found.ndim != 2 or true.ndim != 2 or found.shape[1] != true.shape[1]:
        raise ValueError(
            f"found has shape {tuple(found.shape)} and true {tuple(true.shape)}; give (N, n) and "
            "(B, n)"
        )
    directions = _unit(found, "found")
    truth = _unit(true, "true")
    cosine = truth @ directions.T
    rows, columns = linear_sum_assignment(-cosine.abs().cpu().numpy())
    partners = directions[columns]
    if not signed:
        partners = partners * cosine[rows, columns].sign()[:, None]
    errors = torch.ones(len(truth), dtype=truth.dtype, device=truth.device)
    errors[rows] = (truth[rows] - partners).norm(dim=1)
    return errors


def _unit(vectors: Tensor, name: str) -> Tensor:
    wide = vectors.double()
    norms = wide.norm(dim=1, keepdim=True)
    if (norms == 0).any():
        raise ValueError(f"{name} holds a zero vector, which has no direction")
    return wide / norms
