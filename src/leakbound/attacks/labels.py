"""Which labels were in the batch, read from the gradient of the last linear layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leakbound.attacks.base import seen_task
from leakbound.client import forward
from leakbound.random import uniform
from leakbound.types import NotApplicable, Observation, Task


def infer_labels(observation: Observation, generator: torch.Generator) -> Tensor:
    """Labels (N,), sorted, of the examples behind the update, under cross-entropy.

    The last layer's bias gradient is the mean of p - y. One example: its class is the only
    negative entry. Several: class k has N·(mean p_k) - (sum of p - y)_k examples, with mean p from
    public data where there is some, else from random images; whole numbers are filled greedily.
    Without a bias the sums of the weight rows stand in (the layer's inputs must be at least 0).

    Assumptions: cross-entropy; a linear last layer with one row a class; updates not rescaled by an
    unknown factor (clipping makes counts of several examples unreliable, not the single label).

    Raises:
        NotApplicable: no such layer, or its gradient was withheld or vanished.

    Source: Zhao et al. 2020 (iDLG); Wainakh et al. 2022 and Geng et al. 2021 (counts).
    """
    task, total = seen_task(observation), observation.update.rows.sum(0)
    signal = _last_layer_signal(task, total) / task.plan.steps
    if not bool((signal != 0).any()):
        raise NotApplicable("the last layer's gradient is zero: it tells no label")
    if observation.examples == 1:
        return signal.argmin().reshape(1)
    per_client = observation.examples / len(observation.cohort)
    counts = observation.examples * _mean_output(observation, generator) - per_client * signal
    found = []
    for _ in range(observation.examples):
        best = int(counts.argmax())
        found.append(best)
        counts[best] -= 1
    return torch.tensor(sorted(found), device=total.device)


def _last_layer_signal(task: Task, total: Tensor) -> Tensor:
    linear = [(n, m) for n, m in task.model.named_modules() if isinstance(m, nn.Linear)]
    if not linear:
        raise NotApplicable("the model has no linear layer to read labels from")
    name, layer = linear[-1]
    if task.label_range is not None and layer.out_features != task.label_range:
        raise NotApplicable("the last linear layer has not one row a class")
    parts = task.unflatten(total)
    prefix = f"{name}." if name else ""
    if layer.bias is not None and bool((parts[f"{prefix}bias"] != 0).any()):
        return parts[f"{prefix}bias"].clone()
    return parts[f"{prefix}weight"].sum(1)


def _mean_output(observation: Observation, generator: torch.Generator) -> Tensor:
    task = observation.task
    if observation.auxiliary is not None:
        inputs = observation.auxiliary.inputs[:256]
    else:
        low, high = task.input_range
        shape = (64, *observation.input_shape)
        inputs = low + (high - low) * uniform(shape, generator, like=task.parameters)
    with torch.no_grad():
        return forward(task, inputs).softmax(-1).mean(0)
