"""Published rules that read the labels of a batch from the last layer, side by side.

All see the gradient of the last linear layer, the mean of (p - y) h, where p are an example's class
probabilities, y its label as a unit vector and h >= 0 the layer's input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from leakbound import check
from leakbound.attacks.labels import (
    LastLayer,
    counts,
    fill,
    infer_labels,
    last_layer,
    stand_ins,
    typical,
)
from leakbound.types import NotApplicable, Observation

SUM_WEIGHT = 100.0
Rule = Callable[[Observation, torch.Generator], Tensor]


def infer(rule: str, observation: Observation, generator: torch.Generator) -> Tensor:
    """Labels (N,), sorted, of the examples behind the update, by the rule of this name.

    Assumptions: cross-entropy; a linear last layer with one row a class. See each rule for more.

    Raises:
        ValueError: no such rule.
        NotApplicable: the rule's assumptions fail.

    Example:
        >>> from leakbound.protocol import play
        >>> from leakbound.defenses import NoDefense
        >>> from leakbound.random import stream
        >>> from leakbound.types import Batch, Task
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
        >>> batch = Batch(torch.ones(1, 1, 2, 2), torch.tensor([2]))
        >>> seen = play(Task.of(model), [batch], NoDefense(), [stream(0), stream(1)]).observation
        >>> infer("idlg", seen, stream(2))
        tensor([2])
    """
    check.one_of(LABEL_RULES, rule=rule)
    return LABEL_RULES[rule](observation, generator)


def label_accuracy(found: Tensor, truth: Tensor) -> float:
    """Share of the true labels (N,) that the labels found contain, as multisets.

    Example:
        >>> label_accuracy(torch.tensor([1, 1, 2]), torch.tensor([2, 1, 3]))
        0.6666666666666666
    """
    if len(truth) == 0:
        raise ValueError("truth holds no label; give at least one")
    both = Counter(found.tolist()) & Counter(truth.tolist())
    return both.total() / len(truth)


def idlg(observation: Observation, generator: torch.Generator) -> Tensor:
    """One example: the class whose row has a negative product with every other row.

    Only the label's p - y is negative. Where rounding leaves no such row, the one of most negative
    products is taken, the longest first.

    Assumptions: one example, at least three classes (of two, both rows have the same length: the
    bias tells, or the sign of the row's sum).

    Source: Zhao et al. 2020 (iDLG).
    """
    layer = _checked(observation)
    if observation.examples > 1:
        raise NotApplicable(f"idlg reads one label, and {observation.examples} examples were used")
    rows = layer.rows.double()
    if len(rows) < 3:
        return rows.sum(1).argmin().reshape(1)
    products = rows @ rows.T
    negative = (products < 0).sum(1).double()
    lengths = products.diagonal().sqrt()
    return (negative + lengths / (1 + lengths.max())).argmax().reshape(1)


def yin(observation: Observation, generator: torch.Generator) -> Tensor:
    """Distinct labels: the N classes whose rows of the weight gradient have the least entries.

    Assumptions: no label occurs twice; at most as many examples as classes.

    Source: Yin et al. 2021 (GradInversion), batch label restoration.
    """
    layer = _checked(observation)
    if observation.examples > len(layer.rows):
        raise NotApplicable(
            f"yin needs distinct labels: {observation.examples} examples, {len(layer.rows)} classes"
        )
    least = layer.rows.amin(1).argsort(stable=True)
    return least[: observation.examples].sort().values


def wainakh(observation: Observation, generator: torch.Generator) -> Tensor:
    """Label Leakage from Gradients with the model at hand (LLG*): impact and offset.

    Rows' sums: a negative one says that its class occurs. One example of a class lowers its sum by
    the impact; other classes raise it by the offset. Both are means over stand-in batches of one
    class each, which need no gradients: such a batch's row sums are mean(p s) - mean(s) y, s the
    sum of the layer's input.

    Assumptions: the layer's input is not negative.

    Source: Wainakh et al. 2022, LLG* (white box).
    """
    layer = _checked(observation)
    output, totals = typical(layer.task, layer.name, stand_ins(observation, generator))
    total = _positive(totals.mean())
    offset = (output * totals[:, None]).mean(0)
    examples, classes = observation.examples, len(offset)
    impact = (offset.mean() - total) * (1 + 1 / classes) / examples
    left = layer.rows.sum(1) / len(observation.cohort)
    found: list[int] = []
    for label in left.argsort(stable=True).tolist()[:examples]:
        if left[label] < 0:
            found.append(label)
    left[found] -= impact
    left = left - offset
    while len(found) < examples:
        label = int(left.argmin())
        found.append(label)
        left[label] -= impact
    return torch.tensor(sorted(found), device=left.device)


def geng(observation: Observation, generator: torch.Generator) -> Tensor:
    """Counts from mean probabilities: N (mean p_k - row sum k / mean sum of the layer's input).

    Assumptions: the layer's input has much the same sum for every example.

    Source: Geng et al. 2021, zero-shot batch label restoration.
    """
    layer = _checked(observation)
    output, totals = typical(layer.task, layer.name, stand_ins(observation, generator))
    signal = layer.rows.sum(1) / _positive(totals.mean())
    return fill(counts(output.mean(0), signal, observation), observation.examples)


def dimitrov(observation: Observation, generator: torch.Generator) -> Tensor:
    """As `geng`, but averaged along the local steps, between the weights at their start and end.

    Mean probabilities and the mean sum of the layer's input are interpolated linearly between the
    weights that the server sent and those that came back.

    Source: Dimitrov et al. 2022, label reconstruction.
    """
    layer = _checked(observation)
    plan, clients = layer.task.plan, len(observation.cohort)
    images = stand_ins(observation, generator)
    moved = layer.task.parameters - plan.learning_rate * observation.update.rows.sum(0) / clients
    output, totals = typical(layer.task, layer.name, images)
    after, totals_after = typical(layer.task.with_parameters(moved), layer.name, images)
    expected = torch.zeros_like(layer.rows[:, 0])
    for step in range(plan.steps):
        past = step / plan.steps
        mean, total = output.mean(0), totals.mean()
        if step:
            mean = torch.lerp(mean, after.mean(0), past)
            total = torch.lerp(total, totals_after.mean(), past)
        signal = layer.rows.sum(1) / _positive(total)
        expected += counts(mean, signal, observation) / plan.steps
    if not bool(torch.isfinite(expected).all()):
        raise NotApplicable("the weights at the end of the local steps give no finite output")
    return fill(expected, observation.examples)


def ma(observation: Observation, generator: torch.Generator) -> Tensor:
    """Counts that explain the bias gradient, with probabilities of the batch itself.

    Row k of the weight gradient over entry k of the bias gradient is the mean of the layer's input
    over the examples of class k, as far as these alone move row k. Sent through the layer it gives
    the probabilities P_k of that class, and the counts n >= 0 solve sum_k n_k (P_k - e_k) = N db,
    sum n = N, in least squares. No stand-in images are needed.

    Assumptions: the layer has a bias; examples of a class look alike to the layer.

    Source: Ma et al. 2023 (instance-wise batch label restoration).
    """
    from scipy.optimize import nnls

    layer = _checked(observation)
    if layer.bias is None or not bool(torch.isfinite(layer.bias).all()):
        raise NotApplicable("ma needs the gradient of the last layer's bias")
    clients, examples = len(observation.cohort), observation.examples
    held = layer.task.unflatten(layer.task.parameters)
    prefix = f"{layer.name}." if layer.name else ""
    bias = layer.bias.double() / clients
    means = layer.rows.double() / clients / bias.where(bias != 0, 1.0)[:, None]
    outputs = means @ held[f"{prefix}weight"].double().T + held[f"{prefix}bias"].double()
    system = outputs.softmax(-1).T - torch.eye(len(bias)).to(bias)
    scale = float(bias.abs().max())
    rows = torch.cat([system / scale, torch.full_like(bias, SUM_WEIGHT)[None]])
    values = torch.cat([bias / scale, bias.new_tensor([SUM_WEIGHT])])
    shares, _ = nnls(rows.cpu().numpy(), values.cpu().numpy())
    return fill(torch.from_numpy(shares).to(bias) * examples, examples)


LABEL_RULES: dict[str, Rule] = {
    "idlg": idlg,
    "yin": yin,
    "wainakh": wainakh,
    "geng": geng,
    "dimitrov": dimitrov,
    "ma": ma,
    "bias": infer_labels,
}
"""Name -> rule; "bias" is the default, `labels.infer_labels`."""


def _checked(observation: Observation) -> LastLayer:
    layer = last_layer(observation)
    if not bool(torch.isfinite(layer.rows).all()):
        raise NotApplicable("the last layer's gradient is not finite")
    if not bool((layer.rows != 0).any()):
        raise NotApplicable("the last layer's weight gradient is zero: it tells no label")
    return layer


def _positive(total: Tensor) -> Tensor:
    if not float(total) > 0:
        raise NotApplicable("the last layer's input does not sum to more than zero on other images")
    return total
