"""Which labels were in the batch, read from the gradient of the last linear layer."""

from __future__ import annotations

import copy
from dataclasses import replace

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
    Without a bias, the layer's weight gradient is (p - y) times the layer's input: one example's
    class is the row of the largest norm; of several, the sums of the rows over the mean sum of the
    layer's input stand in for the bias.

    Assumptions: cross-entropy; a linear last layer with one row a class; updates not rescaled by an
    unknown factor (clipping makes counts of several examples unreliable, not the single label).
    Without a bias: at least three classes, and for several examples inputs of the last layer whose
    sum is alike for all of them (sigmoid or ReLU features).

    Raises:
        NotApplicable: no such layer, or its gradient was withheld or vanished.

    Source: Zhao et al. 2020 (iDLG); Wainakh et al. 2022 and Geng et al. 2021 (counts).
    """
    task = seen_task(observation)
    name = _last_layer(task)
    parts = task.unflatten(observation.update.rows.sum(0) / task.plan.steps)
    weight = parts[f"{name}.weight" if name else "weight"]
    bias = parts.get(f"{name}.bias" if name else "bias")
    if bias is not None and not bool((bias != 0).any()):
        bias = None  # withheld
    if bias is None and not bool((weight != 0).any()):
        raise NotApplicable("the last layer's gradient is zero: it tells no label")
    if observation.examples == 1:
        found = weight.norm(dim=1).argmax() if bias is None else bias.argmin()
        return found.reshape(1)
    output, total = _typical(observation, task, name, generator)
    signal = weight.sum(1) / total if bias is None else bias
    return _fill(output, signal, observation)


def _fill(output: Tensor, signal: Tensor, observation: Observation) -> Tensor:
    """The most likely multiset of labels, largest expected count first."""
    per_client = observation.examples / len(observation.cohort)
    counts = observation.examples * output - per_client * signal
    found = []
    for _ in range(observation.examples):
        best = int(counts.argmax())
        found.append(best)
        counts[best] -= 1
    return torch.tensor(sorted(found), device=signal.device)


def _last_layer(task: Task) -> str:
    linear = [(n, m) for n, m in task.model.named_modules() if isinstance(m, nn.Linear)]
    if not linear:
        raise NotApplicable("the model has no linear layer to read labels from")
    if task.label_range is not None and linear[-1][1].out_features != task.label_range:
        raise NotApplicable("the last linear layer has not one row a class")
    return str(linear[-1][0])


def _typical(
    observation: Observation, task: Task, name: str, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Mean class probabilities (K,) and mean sum of the last layer's input, on other images."""
    if observation.auxiliary is not None:
        inputs = observation.auxiliary.inputs[:256]
    else:
        low, high = task.input_range
        shape = (64, *observation.input_shape)
        inputs = low + (high - low) * uniform(shape, generator, like=task.parameters)
    model, features = copy.deepcopy(task.model), []
    model.get_submodule(name).register_forward_pre_hook(lambda _, args: features.append(args[0]))
    with torch.no_grad():
        output = forward(replace(task, model=model), inputs).softmax(-1).mean(0)
    return output, features[0].flatten(1).sum(1).mean()
