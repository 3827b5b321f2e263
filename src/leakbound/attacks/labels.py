"""Which labels were in the batch, read from the gradient of the last linear layer."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from leakbound.attacks.base import seen_task
from leakbound.client import forward
from leakbound.random import uniform
from leakbound.types import Exact, NotApplicable, Observation, Task

STAND_INS = 64
PUBLIC = 256


@dataclass(frozen=True, eq=False)
class LastLayer:
    """The last linear layer's gradient, as far as the update shows it.

    Shapes: weight (K, h) and bias (K,), summed over the clients, a local step's mean; None where
        the layer has none, it is frozen, or (the bias) it was withheld. One of them is there.

    Attributes:
        task: the task that the attacker simulates.
        name: the layer's name within the model.
    """

    task: Task
    name: str
    weight: Tensor | None
    bias: Tensor | None

    @property
    def rows(self) -> Tensor:
        """The weight.

        Raises:
            NotApplicable: it is frozen.
        """
        if self.weight is None:
            raise NotApplicable(f"the weight of the last layer {self.name!r} is frozen: not sent")
        return self.weight


def infer_labels(observation: Observation, generator: torch.Generator) -> Tensor:
    """Labels (N,), sorted, of the examples behind the update, under cross-entropy.

    The last layer's bias gradient is the mean of p - y. One example: its class is the only
    negative entry. Several: class k has N·(mean p_k) - (sum of p - y)_k examples, with mean p from
    public data where there is some, else from random images; whole numbers are filled greedily.
    Classes whose entry is negative in a release without noise are there for certain: no
    probability is negative, whatever the weights were.
    Without a bias, the layer's weight gradient is (p - y) times the layer's input: one example's
    class is the row of the largest norm; of several, the sums of the rows over the mean sum of the
    layer's input stand in for the bias.

    This is the rule "bias" of `label_rules`, which has others to compare.

    Assumptions: cross-entropy; a linear last layer with one row a class; updates not rescaled by an
    unknown factor (clipping makes counts of several examples unreliable, not the single label).
    Without a bias: at least three classes, and for several examples inputs of the last layer whose
    sum is alike for all of them (sigmoid or ReLU features).

    Raises:
        NotApplicable: no such layer, it is frozen, or its gradient was withheld or vanished.

    Source: Zhao et al. 2020 (iDLG); Wainakh et al. 2022 and Geng et al. 2021 (counts).
    """
    layer = last_layer(observation)
    if observation.examples == 1:
        lone = layer.rows.norm(dim=1).argmax() if layer.bias is None else layer.bias.argmin()
        return lone.reshape(1)
    output, totals = typical(layer.task, layer.name, stand_ins(observation, generator))
    signal = layer.rows.sum(1) / totals.mean() if layer.bias is None else layer.bias
    expected = counts(output.mean(0), signal, observation)
    if layer.bias is None or not isinstance(observation.update.law, Exact):
        return fill(expected, observation.examples)
    return fill(expected, observation.examples, certain=layer.bias < 0)


def last_layer(observation: Observation) -> LastLayer:
    """The last linear layer's part of the update.

    Raises:
        NotApplicable: no such layer, it is frozen, or its gradient was withheld or vanished.
    """
    task = seen_task(observation)
    name = _last_linear(task)
    parts = task.unflatten(observation.update.rows.sum(0) / task.plan.steps)
    weight = parts.get(f"{name}.weight" if name else "weight")
    bias = parts.get(f"{name}.bias" if name else "bias")
    if weight is None and bias is None:
        raise NotApplicable(
            f"the last linear layer {name!r} is frozen: its gradient, which tells labels, is not "
            "sent"
        )
    if bias is not None and not bool((bias != 0).any()):
        bias = None  # withheld
    if bias is None and (weight is None or not bool((weight != 0).any())):
        raise NotApplicable("the last layer's gradient is zero: it tells no label")
    return LastLayer(task, name, weight, bias)


def counts(output: Tensor, signal: Tensor, observation: Observation) -> Tensor:
    """Expected examples (K,) of each class, of mean probabilities and the sum of p - y, (K,)."""
    per_client = observation.examples / len(observation.cohort)
    return observation.examples * output - per_client * signal


def fill(expected: Tensor, examples: int, *, certain: Tensor | None = None) -> Tensor:
    """The most likely multiset of labels, largest expected count (K,) first.

    `certain` (K,) marks classes that get at least one example, as far as there are enough.
    """
    left = expected.clone()
    found: list[int] = []
    if certain is not None:
        order = left.argsort(descending=True, stable=True)
        found = order[certain[order]][:examples].tolist()
        left[found] -= 1
    while len(found) < examples:
        best = int(left.argmax())
        found.append(best)
        left[best] -= 1
    return torch.tensor(sorted(found), device=expected.device)


def stand_ins(observation: Observation, generator: torch.Generator) -> Tensor:
    """Images that stand in for the batch: public ones where there are some, else random ones."""
    if observation.auxiliary is not None:
        return observation.auxiliary.inputs[:PUBLIC]
    low, high = observation.task.input_range
    shape = (STAND_INS, *observation.input_shape)
    return low + (high - low) * uniform(shape, generator, like=observation.task.parameters)


def typical(task: Task, name: str, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Class probabilities (n, K) of other images, and the sums (n,) of the layer's input."""
    model, features = copy.deepcopy(task.model), []
    model.get_submodule(name).register_forward_pre_hook(lambda _, args: features.append(args[0]))
    with torch.no_grad():
        output = forward(replace(task, model=model), inputs).softmax(-1)
    return output, features[0].flatten(1).sum(1)


def _last_linear(task: Task) -> str:
    linear = [(n, m) for n, m in task.model.named_modules() if isinstance(m, nn.Linear)]
    if not linear:
        raise NotApplicable("the model has no linear layer to read labels from")
    if task.label_range is not None and linear[-1][1].out_features != task.label_range:
        raise NotApplicable("the last linear layer has not one row a class")
    return str(linear[-1][0])
