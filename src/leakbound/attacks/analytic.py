"""Closed-form inversion of a biased linear layer that sees the input."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakbound import check
from leakbound.attacks.base import Attack, boxed, seen_task
from leakbound.types import NotApplicable, Observation, Reconstruction, Task

SAME = 1e-3


@dataclass(frozen=True)
class LinearInversion(Attack):
    """Read the input off the first linear layer: row i of dL/dW is dL/db_i times the input.

    One example: the least-squares input over all rows, which is exact without noise and averages
    noise away with it; withheld coordinates are left out. Several examples: each row gives a
    mixture of the inputs; rows that only one example activates give it exactly. Candidates
    dW_i / db_i that lie in the input range are ranked by how many rows agree on them, then by
    |db_i| (the best-conditioned first).

    Args:
        tolerance: how far outside the input range, in units of its width, a candidate may lie.

    Assumptions: some linear layer with a bias has the flattened input as its input.

    Raises:
        NotApplicable: there is no such layer.

    Source: Phong et al. 2018; Geiping et al. 2020, proposition 3.1.
    """

    tolerance: float = 0.05

    def __post_init__(self) -> None:
        check.non_negative(tolerance=self.tolerance)

    def __call__(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        """Solve; the generator is not used."""
        task = seen_task(observation)
        name = input_layer(task, observation.input_shape)
        mask = observation.update.mask if observation.threat.defense_known else None
        weight, bias = _layer(task, observation.update.rows.sum(0), name)
        known = torch.ones_like(weight, dtype=torch.bool)
        if mask is not None:
            kept, bias_kept = _layer(task, mask.any(0), name)
            known, bias = kept & bias_kept[:, None], bias * bias_kept
        if not bool((bias != 0).any()):
            middle = torch.full(observation.batch_shape, float("nan"), device=weight.device)
            reason = "gradient vanished: the layer's bias gradient is zero everywhere"
            return Reconstruction(boxed(middle, task), observation.labels, problem=reason)
        if observation.examples == 1:
            image, residual = _least_squares(weight, bias, known)
            inputs = image.reshape(observation.batch_shape)
            problem = None if residual < 0.9 else "objective did not fall: no input explains it"
            return Reconstruction(boxed(inputs, task), observation.labels, residual, (), problem)
        return self._separate(observation, task, weight, bias, known)

    def _separate(
        self, observation: Observation, task: Task, weight: Tensor, bias: Tensor, known: Tensor
    ) -> Reconstruction:
        low, high = task.input_range
        slack = self.tolerance * (high - low)
        rows = bias.abs() > 1e-6 * bias.abs().max()
        images = torch.where(known[rows], weight[rows], 0) / bias[rows, None]
        strength = bias[rows].abs()
        inside = ((images >= low - slack) & (images <= high + slack)).all(1)
        images, strength = images[inside], strength[inside]
        chosen = _agreed(images, strength, observation.examples, SAME * (high - low))
        answer = torch.full((observation.examples, weight.shape[1]), float("nan"))
        answer = answer.to(weight)
        answer[: len(chosen)] = chosen
        problem = None
        if len(chosen) < observation.examples:
            problem = f"only {len(chosen)} of {observation.examples} inputs could be separated"
        inputs = boxed(answer.reshape(observation.batch_shape), task)
        return Reconstruction(inputs, None, float("nan"), (), problem)


def input_layer(task: Task, input_shape: tuple[int, ...]) -> str:
    """Name of the first linear layer with a bias whose input is the flattened input itself.

    Raises:
        NotApplicable: there is none.
    """
    model = copy.deepcopy(task.model)
    low, high = task.input_range
    probe = torch.linspace(low, high, 2 * int(torch.tensor(input_shape).prod()))
    probe = probe.reshape(2, *input_shape).to(task.parameters)
    found: list[str] = []

    def watch(name: str, layer: nn.Linear) -> None:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            given = args[0].flatten(1)
            if given.shape == probe.flatten(1).shape and torch.equal(given, probe.flatten(1)):
                found.append(name)

        layer.register_forward_pre_hook(hook)

    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            watch(name, layer)
    with torch.no_grad():
        torch.func.functional_call(
            model, {**task.buffers, **task.unflatten(task.parameters)}, (probe,)
        )
    if not found:
        raise NotApplicable("no linear layer with a bias sees the input")
    return found[0]


def _layer(task: Task, row: Tensor, name: str) -> tuple[Tensor, Tensor]:
    parts = task.unflatten(row)
    prefix = f"{name}." if name else ""
    return parts[f"{prefix}weight"], parts[f"{prefix}bias"]


def _least_squares(weight: Tensor, bias: Tensor, known: Tensor) -> tuple[Tensor, float]:
    """Argmin over x of the known part of |weight - bias xᵀ|², and the share left unexplained."""
    wide = torch.where(known, weight, 0).double()
    own = torch.where(known, bias[:, None], 0).double()
    image = (own * wide).sum(0) / own.square().sum(0).clamp_min(1e-300)
    rest = (wide - own * image).square().sum() / wide.square().sum().clamp_min(1e-300)
    return image.to(weight.dtype), float(rest.sqrt())


def _agreed(images: Tensor, strength: Tensor, count: int, same: float) -> Tensor:
    """Up to `count` distinct candidates, most agreed on first, then best conditioned."""
    if len(images) == 0:
        return images
    distance = torch.cdist(images.double(), images.double()) / images.shape[1] ** 0.5
    support = (distance < same).sum(1)
    order = sorted(range(len(images)), key=lambda i: (-int(support[i]), -float(strength[i])))
    chosen: list[int] = []
    for i in order:
        if all(float(distance[i, j]) >= same for j in chosen):
            chosen.append(i)
        if len(chosen) == count:
            break
    return images[chosen]
