"""The cheap attacks of a meter: closed forms, on exactly what leaves the client."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from leakbound import inspection
from leakbound.attacks import LinearTrap, RobbingTheFed, TrapWeights
from leakbound.attacks.analytic import input_layer
from leakbound.attacks.base import Attack, seen_task
from leakbound.attacks.planted import Front, chosen, in_front
from leakbound.attacks.trap import Trap
from leakbound.core import NotApplicable, Observation, Reconstruction, Server, Task

STEADY: dict[str, Attack] = {"imprint": RobbingTheFed(), "trap": TrapWeights()}
"""The attacks whose steady layers, which local steps do not move, are read as they were sent."""


class PlantedLayer(Attack):
    """Invert an imprint, trap weights or a linear trap in any layer that sees the input.

    A malicious server knows the kind of its layer; this attack infers it from the marks. It sorts
    parallel rows with graded thresholds and decodes them as `RobbingTheFed` does, in any order and
    scale. It decodes rows of balanced signs as `TrapWeights` does.
    """

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        """Find the layer, move it to the front as the attacks expect it, and decode it."""
        task = seen_task(observation)
        sent: Attack | None = None
        if isinstance(task.model, Trap):
            sent = LinearTrap()
        elif isinstance(task.model, Front) and task.model.frozen is not None:
            sent = STEADY.get(task.model.kind)
        if sent is not None:
            threat = replace(observation.threat, server=Server.MALICIOUS)
            return sent(replace(observation, threat=threat), generator)
        name = input_layer(task, observation.input_shape)
        parts = task.tensors()
        prefix = f"{name}." if name else ""
        rows = parts[f"{prefix}weight"].double()
        bias = parts[f"{prefix}bias"].double()
        members = inspection.parallel(rows)
        even, most = inspection.evened(rows)
        # Two divisions: the product of both, which is the norm of the row, may overflow.
        level = bias / most.clamp_min(1e-300) / even.norm(dim=1).clamp_min(1e-300)
        if len(members) >= inspection.MANY and len(level[members].unique()) > 1:
            order = torch.tensor(members, device=rows.device)
            order = order[level[order].argsort(descending=True)]
            unit = even[order] / even[order].norm(dim=1, keepdim=True)
            # Parallel rows are equal only up to rounding.
            seen = _alone(observation, prefix, order, unit.mean(0).expand_as(unit), level[order])
            return RobbingTheFed()(seen, generator)
        marks = [f for f in inspection.statistics(task) if f.layer == name and f.marked]
        if not any(f.kind in ("trap weights", "rarely active") for f in marks):
            raise NotApplicable("the layer that sees the input has no marks of a malicious one")
        every = torch.arange(len(rows), device=rows.device)
        return TrapWeights()(_alone(observation, prefix, every, rows, bias, "trap"), generator)


def _alone(
    observation: Observation,
    prefix: str,
    order: Tensor,
    weight: Tensor,
    bias: Tensor,
    kind: str = "imprint",
) -> Observation:
    """The update of some units of a layer, as if a malicious layer of them were the whole model."""
    task = seen_task(observation)
    every = task.unflatten(torch.arange(len(task.parameters), device=order.device))
    index = torch.cat([every[f"{prefix}{n}"][order].flatten() for n in ("weight", "bias")])
    public = observation.auxiliary or task.public
    shell = replace(
        task,
        model=nn.Identity(),
        parameters=task.parameters[:0],
        public=public,
        buffers={},
        kept=None,
    )
    front = in_front(shell, weight, bias, 1.0, kind)
    scale = _way_back(task, prefix, order)
    factor = torch.cat([scale.repeat_interleave(weight.shape[1]), scale])
    threat = replace(observation.threat, server=Server.MALICIOUS)
    seen = replace(
        observation,
        update=chosen(observation.update, index, factor),
        task=front,
    )
    # What the whole model sent, and its earlier rounds, do not fit the layer alone.
    return replace(
        seen,
        threat=threat,
        defense=None,
        sent=None,
        history=(),
    )


def _way_back(
    task: Task,
    prefix: str,
    order: Tensor,
) -> Tensor:
    """(units,) 1 / size of each unit's outgoing weights, if a linear layer takes all units."""
    parts = task.tensors()
    linear = [n for n, m in task.model.named_modules() if isinstance(m, nn.Linear)]
    after = linear[linear.index(prefix.removesuffix(".")) + 1 :]
    if after and parts[f"{after[0]}.weight"].shape[1] == len(parts[f"{prefix}weight"]):
        even, most = inspection.evened(parts[f"{after[0]}.weight"].T)
        size: Tensor = (most * even.norm(dim=1))[order]
        if bool((size > 0).all()):
            return size.median() / size
    return torch.ones(len(order), device=order.device, dtype=torch.float64)
