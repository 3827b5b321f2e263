"""Infer the labels of the batch from the gradient of the last linear layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from leakbound import check
from leakbound.attacks.adaptive import undone
from leakbound.attacks.analytic import LinearInversion, layer_part
from leakbound.attacks.base import outputs_of, parameter, probed, seen_task, uniform_inputs
from leakbound.client import forward, local_update, watched
from leakbound.core import Exact, NotApplicable, Observation, Task
from leakbound.losses import NamedLoss, named

STAND_INS = 64
PUBLIC = 256
LARGE = 1 << 22
"""The most substitutes for the batch, random or public, and the most values that they hold."""
SUM_WEIGHT = 100.0
NEAR = 1e-2
"""How near to a whole number an exact label of "poisson" counts as that number."""
NEWTON = 30
SOLVED = 1e-6
UNIQUE = 1e-2
"""Most Newton steps to a label after several local steps, the relative error of the last bias that
is enough, and what the whole update may leave.
"""
Rule = Callable[[Observation, torch.Generator], Tensor]


@dataclass(frozen=True, eq=False)
class LastLayer:
    """The last linear layer's gradient as the update shows it: weight (K, h) and bias (K,), summed
    over the clients, averaged over local steps. One may be None: the layer has none, it is frozen,
    or the bias was withheld.
    """

    task: Task
    name: str
    weight: Tensor | None
    bias: Tensor | None

    @property
    def rows(self) -> Tensor:
        if self.weight is None:
            raise NotApplicable(f"the weight of the last layer {self.name!r} is frozen: not sent")
        return self.weight


def infer_labels(
    observation: Observation,
    generator: torch.Generator,
) -> Tensor:
    """Labels (N,), sorted, of the examples behind the update: the rule "bias".

    Under cross-entropy, the last layer's bias gradient is the mean of p - y. With one example, its
    class is the only negative entry. With several, class k has N·(mean p_k) - (sum of p - y)_k
    examples. The mean p comes from public data if available, otherwise from random images; whole
    numbers are filled greedily. A class with a negative entry in a noise-free release is certainly
    in the batch.

    Without a bias, one example's class is the row with the largest norm. For several examples, the
    sums of the rows over the mean sum of the layer's input replace the bias gradient.

    Under another loss of `leakbound.losses.LOSSES`, the label (1,) or (1, K) of one example is
    exact. Under "bce" it is 1 where the bias gradient db is negative, for labels 0 and 1. Else the
    last layer's gradients give its input, and so the output o; the label is o - K db / 2 ("mse") or
    exp(o) - K db ("poisson"). After several local steps it is solved for on the input that the
    first layer reveals. For several examples, `label_totals` is filled with whole numbers, for
    class numbers and a single "bce" output.

    Assumptions: a linear last layer with one row per class; updates not rescaled by
        an unknown factor (clipping makes counts of several examples unreliable, but not a single
        label). Without a bias: at least three classes; for several examples, inputs of the last
        layer with similar sums (sigmoid or ReLU features).

    Raises:
        NotApplicable: there is no such layer, it is frozen, or its gradient was withheld or
            vanished; or the loss reveals no label ("l1", "dice", functions that are not known), or
            only sums of several examples' labels.

    Source: Zhao et al. 2020 (iDLG); Wainakh et al. 2022 and Geng et al. 2021 (counts).
    """
    loss = named(observation.task.loss)
    if loss.name == "cross_entropy":
        signs = _by_signs(observation)
        if signs is not None:
            return signs
    layer = last_layer(observation)
    if loss.name != "cross_entropy":
        return _of_loss(loss, layer, observation, generator)
    if observation.examples == 1:
        lone = layer.rows.norm(dim=1).argmax() if layer.bias is None else layer.bias.argmin()
        return lone.reshape(1)
    output, totals = typical(layer.task, layer.name, stand_ins(observation, generator))
    # A row is its bias gradient times the input, so sums of rows replace it.
    signal = layer.rows.sum(1) / totals.mean() if layer.bias is None else layer.bias
    expected = counts(output.mean(0), signal, observation)
    if layer.bias is None or not isinstance(observation.update.law, Exact):
        return fill(expected, observation.examples)
    return fill(expected, observation.examples, certain=layer.bias < 0)


def label_totals(
    observation: Observation,
    generator: torch.Generator,
) -> Tensor:
    """Expected sums (K,) of the labels of all examples, one per output; for class maps, of pixels.

    The last layer's bias gradient is scale (mean - label) / (B terms), summed over examples and
    pixels. `NamedLoss.mean` comes from public data if available, otherwise from random inputs.

    Raises:
        NotApplicable: as `infer_labels`, or the layer has no bias.

    Example:
        >>> import leakbound as lb
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> batch = lb.Batch(torch.rand(8, 1, 2, 2), torch.eye(2).repeat(4, 1))
        >>> seen = lb.simulate(model, batch, loss="bce").round.observation
        >>> label_totals(seen, lb.stream(0)).round().tolist()
        [4.0, 4.0]
    """
    layer = last_layer(observation)
    loss = named(observation.task.loss)
    if loss.mean is None:
        raise NotApplicable(f"the last layer's gradient under {loss.name} reveals no labels")
    if layer.bias is None:
        raise NotApplicable("the last layer's bias gradient is not known")
    with torch.no_grad():
        output = forward(layer.task, stand_ins(observation, generator))
        means = loss.mean(output).reshape(len(output), len(layer.bias), -1)
    terms = output[0].numel() if loss.elementwise else means.shape[2]
    signal = terms / loss.scale * layer.bias
    return counts(means.mean(0).sum(1), signal, observation)


def _of_loss(
    loss: NamedLoss,
    layer: LastLayer,
    observation: Observation,
    generator: torch.Generator,
) -> Tensor:
    pixels = layer.weight is not None and layer.weight.ndim > 2
    if pixels or not loss.elementwise:
        more = "; but areas are known (label_totals)" if pixels and loss.mean else ""
        raise NotApplicable(f"the last layer's gradient under {loss.name} reveals no label{more}")
    if layer.bias is not None and probed(observation)[0].numel() != len(layer.bias):
        raise NotApplicable(
            "the last layer has a row for many outputs, as one that is applied at every pixel: its "
            "gradient reveals no label"
        )
    single = layer.bias is not None and len(layer.bias) == 1
    if observation.examples == 1:
        label = _exact(loss, layer, observation, generator)
        if loss.coded:
            return (label > 0.5).long() if single else label.argmax().reshape(1)
        if loss.targets == "count":
            whole = label.round().clamp_min(0)
            sure = isinstance(observation.update.law, Exact)
            # An exact fraction shows that the labels are no counts; under noise, it is noise.
            label = torch.where(((label - whole).abs() > NEAR) & sure, label, whole)
        return label if single else label[None]
    totals = label_totals(observation, generator)
    if not (loss.coded or (single and loss.targets == "binary")):
        raise NotApplicable(
            f"of {observation.examples} examples only the sums of their labels are known "
            "(label_totals)"
        )
    expected = torch.cat([observation.examples - totals, totals]) if single else totals
    labels = fill(expected, observation.examples)
    return labels if loss.coded else labels.to(totals)


def _exact(
    loss: NamedLoss,
    layer: LastLayer,
    observation: Observation,
    generator: torch.Generator,
) -> Tensor:
    """The label (K,) of one example, as the loss takes it."""
    if layer.bias is not None and loss.targets == "binary":
        return (layer.bias < 0).to(layer.bias)
    if layer.bias is None or layer.weight is None:
        raise NotApplicable("the gradients of the last layer's weight and bias are not both known")
    assert loss.mean is not None  # of elementwise losses
    task = layer.task
    bias = layer.bias.double()
    weight, shift = layer_part(task, task.parameters, layer.name)
    inside = bias @ layer.weight.double() / bias.square().sum()
    output = weight.double() @ inside + shift.double()
    label = loss.mean(output) - len(bias) / loss.scale * bias
    if not task.plan.is_gradient:
        image = LinearInversion()(observation, generator).inputs.double()
        # Not coded: the label that is solved for has a number for each output.
        wide = replace(task, loss=replace(loss, coded=False)).to(bias.device, torch.float64)
        row = observation.update.rows.sum(0).double()
        label = _solved(wide, parameter(layer.name, "bias"), row, image, label)
    return label.to(layer.bias)


def _solved(
    task: Task,
    name: str,
    row: Tensor,
    image: Tensor,
    start: Tensor,
) -> Tensor:
    """The label (K,) for which local training on the image gives the update, by its last bias."""
    bias = task.unflatten(row)[name]

    def gradient(label: Tensor) -> Tensor:
        return task.unflatten(local_update(task, image, label[None]))[name]

    label = start
    off = gradient(start).detach() - bias
    for _ in range(NEWTON):
        if float(off.norm()) <= SOLVED * float(bias.norm()):
            left = local_update(task, image, label[None]).detach() - row
            if float(left.norm()) <= UNIQUE * float(row.norm()):
                return label
            break  # an unstable training has several solutions
        slope = torch.autograd.functional.jacobian(gradient, label)  # type: ignore[no-untyped-call]
        if not torch.isfinite(slope).all():
            break
        step = torch.linalg.pinv(slope) @ off
        # A full step may leave the region where the slope holds.
        for _ in range(NEWTON):  # half as far, until it helps
            nearer = gradient(label - step).detach() - bias
            if float(nearer.norm()) < float(off.norm()):
                break
            step = step / 2
        label = label - step
        off = nearer
    raise NotApplicable("no label explains the last layer's gradient after the local steps")


def known_or_inferred(
    observation: Observation,
    generator: torch.Generator,
) -> Tensor:
    """The labels that the attacker knows, else those of `infer_labels`."""
    labels = observation.labels
    return infer_labels(observation, generator) if labels is None else labels


def _by_signs(observation: Observation) -> Tensor | None:
    """Labels (N,) by the signs that an adaptive optimizer keeps; None for SGD, and if the sizes of
    a step can be read.

    The bias gradient of a class that does not occur is positive in all steps. The negative ones
    count once each, the most negative ones first and again until there are enough.
    """
    task = seen_task(observation)
    name = parameter(_last(task, outputs_of(observation)), "bias")
    if task.plan.optimizer == "sgd" or name not in task.names:
        return None
    bias = task.unflatten(observation.update.rows.sum(0))[name]
    order = bias.argsort(stable=True)
    negative = order[bias[order] < 0]
    count = observation.examples
    if count > 1:
        with suppress(NotApplicable):
            undone(observation)
            return None
    if not len(negative):
        return None
    times = math.ceil(count / len(negative))
    return negative.repeat(times)[:count].sort().values


def last_layer(observation: Observation) -> LastLayer:
    observation = undone(observation)
    task = seen_task(observation)
    name = _last(task, outputs_of(observation))
    parts = task.unflatten(observation.update.rows.sum(0) / task.plan.total_weight)
    weight = parts.get(parameter(name, "weight"))
    bias = parts.get(parameter(name, "bias"))
    if weight is None and bias is None:
        raise NotApplicable(
            f"the last linear layer {name!r} is frozen: its gradient, which reveals labels, is not "
            "sent"
        )
    if bias is not None and not bias.any():
        bias = None  # withheld
    if bias is None and (weight is None or not weight.any()):
        raise NotApplicable("the last layer's gradient is zero: it reveals no label")
    return LastLayer(task, name, weight, bias)


def counts(
    output: Tensor,
    signal: Tensor,
    observation: Observation,
) -> Tensor:
    """Expected examples (K,) of each class, from mean probabilities and the sum of p - y, (K,)."""
    # Each client sends the mean over its own batch.
    per_client = observation.examples / len(observation.cohort)
    return observation.examples * output - per_client * signal


def fill(
    expected: Tensor,
    examples: int,
    *,
    certain: Tensor | None = None,
) -> Tensor:
    """The most likely multiset of labels, largest expected count (K,) first. `certain` (K,) marks
    classes that get at least one example each, as long as examples remain.
    """
    left = expected.clone()
    labels: list[int] = []
    if certain is not None:
        # Stable: equal counts give the same labels on every machine.
        order = left.argsort(descending=True, stable=True)
        labels = order[certain[order]][:examples].tolist()
        left[labels] -= 1
    while len(labels) < examples:
        best = int(left.argmax())
        labels.append(best)
        left[best] -= 1
    return torch.tensor(sorted(labels), device=expected.device)


def stand_ins(observation: Observation, generator: torch.Generator) -> Tensor:
    """Substitutes for the batch: public examples if available, otherwise random ones."""
    # Large inputs average over their own places, and a forward pass of many takes long.
    most = max(2, LARGE // math.prod(observation.input_shape))
    if observation.auxiliary is not None:
        return observation.auxiliary.inputs[: min(PUBLIC, most)]
    domain = observation.task.domain
    if domain is not None and not domain.dtype.is_floating_point:
        return domain.start(STAND_INS, generator).to(observation.task.parameters.device)
    shape = min(STAND_INS, most), *observation.input_shape
    return uniform_inputs(observation.task, shape, generator)


def typical(
    task: Task,
    name: str,
    inputs: Tensor,
) -> tuple[Tensor, Tensor]:
    """Class probabilities (n, K) of other images, and the sums (n,) of the layer's input."""
    with torch.no_grad():
        output, inside = watched(task, inputs, [name])
        return output.softmax(-1), inside[name].flatten(1).sum(1)


def _last(task: Task, outputs: int | None) -> str:
    """The last linear layer, or, for labels of pixels, the last layer with one row per class."""
    loss = named(task.loss)
    modules = list(task.model.named_modules())
    layers: list[tuple[str, Any]] = [(n, m) for n, m in modules if isinstance(m, nn.Linear)]
    if loss.dense or (loss.elementwise and not layers):
        kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        layers = [(n, m) for n, m in modules if isinstance(m, kinds)]
    if not layers:
        raise NotApplicable("the model has no linear layer to infer labels from")
    wanted = None if outputs is None else loss.outputs(outputs)
    if wanted is not None and len(layers[-1][1].weight) != wanted:
        raise NotApplicable("the last linear layer does not have one row per class")
    return str(layers[-1][0])


def infer(
    rule: str,
    observation: Observation,
    generator: torch.Generator,
) -> Tensor:
    """Labels (N,), sorted, of the examples behind the update, by the named rule.

    Assumptions: a linear last layer with one row per class; cross-entropy for all rules but "bias".
    Each rule states more.

    Raises:
        ValueError: no rule has this name.
        NotApplicable: the rule's assumptions fail.

    Example:
        >>> import leakbound as lb
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
        >>> batch = torch.ones(1, 1, 2, 2), torch.tensor([2])
        >>> infer("idlg", lb.simulate(model, batch).round.observation, lb.stream(2))
        tensor([2])
    """
    check.one_of(LABEL_RULES, rule=rule)
    return LABEL_RULES[rule](observation, generator)


def label_accuracy(inferred: Tensor, truth: Tensor) -> float:
    """Share of the true labels (N,) that the inferred labels contain, as multisets.

    Example:
        >>> label_accuracy(torch.tensor([1, 1, 2]), torch.tensor([2, 1, 3]))
        0.6666666666666666
    """
    if len(truth) == 0:
        raise ValueError("truth holds no label; give at least one")
    both = Counter(inferred.tolist()) & Counter(truth.tolist())
    return both.total() / len(truth)


def idlg(observation: Observation, generator: torch.Generator) -> Tensor:
    """One example: the class whose row has a negative product with every other row. If rounding
    leaves none, the row with the most negative products, the longest first (Zhao et al. 2020,
    iDLG).

    For two classes, both rows have the same length; the sign of the row's sum decides.
    """
    layer = _checked(observation)
    if observation.examples > 1:
        raise NotApplicable(f"idlg infers one label, but {observation.examples} examples were used")
    rows = layer.rows.double()
    if len(rows) < 3:
        return rows.sum(1).argmin().reshape(1)
    products = rows @ rows.T
    negative = (products < 0).sum(1).double()
    lengths = products.diagonal().sqrt()
    # The second part is below 1, so it only breaks ties.
    return (negative + lengths / (1 + lengths.max())).argmax().reshape(1)


def yin(observation: Observation, generator: torch.Generator) -> Tensor:
    """Distinct labels: the N classes whose weight gradient rows have the smallest entries (Yin et
    al. 2021, GradInversion).
    """
    layer = _checked(observation)
    if observation.examples > len(layer.rows):
        raise NotApplicable(
            f"yin needs distinct labels: {observation.examples} examples, {len(layer.rows)} classes"
        )
    least = layer.rows.amin(1).argsort(stable=True)
    return least[: observation.examples].sort().values


def wainakh(observation: Observation, generator: torch.Generator) -> Tensor:
    """Impact and offset (Wainakh et al. 2022, LLG*, white box).

    A negative row sum shows that its class occurs. One example of a class lowers its sum by the
    impact; other classes raise it by the offset. Both are means over substitute batches of one
    class each, whose row sums are mean(p s) - mean(s) y, s >= 0 the sum of the layer's input.
    """
    layer = _checked(observation)
    output, totals = typical(layer.task, layer.name, stand_ins(observation, generator))
    total = _positive(totals.mean())
    offset = (output * totals[:, None]).mean(0)
    examples = observation.examples
    classes = len(offset)
    impact = (offset.mean() - total) * (1 + 1 / classes) / examples
    left = layer.rows.sum(1) / len(observation.cohort)
    least = left.argsort(stable=True).tolist()[:examples]
    labels = [label for label in least if left[label] < 0]
    left[labels] -= impact
    left = left - offset
    while len(labels) < examples:
        label = int(left.argmin())
        labels.append(label)
        left[label] -= impact
    return torch.tensor(sorted(labels), device=left.device)


def geng(observation: Observation, generator: torch.Generator) -> Tensor:
    """Counts from mean probabilities: N (mean p_k - row sum k / mean sum of the layer's input). The
    sum is assumed to be similar for every example (Geng et al. 2021).
    """
    layer = _checked(observation)
    output, totals = typical(layer.task, layer.name, stand_ins(observation, generator))
    expected = _by_sums(layer, output.mean(0), totals.mean(), observation)
    return fill(expected, observation.examples)


def dimitrov(observation: Observation, generator: torch.Generator) -> Tensor:
    """As `geng`, but with mean probabilities and the mean sum of the layer's input interpolated
    between the weights that the server sent and those that came back (Dimitrov et al. 2022).
    """
    layer = _checked(observation)
    plan = layer.task.plan
    clients = len(observation.cohort)
    images = stand_ins(observation, generator)
    moved = layer.task.parameters - plan.learning_rate * observation.update.rows.sum(0) / clients
    output, totals = typical(layer.task, layer.name, images)
    after, totals_after = typical(layer.task.with_parameters(moved), layer.name, images)
    expected = torch.zeros_like(layer.rows[:, 0])
    for step in range(plan.steps):
        past = step / plan.steps
        mean = output.mean(0)
        total = totals.mean()
        if step:
            mean = torch.lerp(mean, after.mean(0), past)
            total = torch.lerp(total, totals_after.mean(), past)
        expected += _by_sums(layer, mean, total, observation) / plan.steps
    if not torch.isfinite(expected).all():
        raise NotApplicable("the weights at the end of the local steps give no finite output")
    return fill(expected, observation.examples)


def ma(observation: Observation, generator: torch.Generator) -> Tensor:
    """Counts that explain the bias gradient, with probabilities of the batch itself (Ma et al.
    2023).

    Row k of the weight gradient over entry k of the bias gradient is the mean of the layer's input
    over the examples of class k. The rule assumes that these inputs are similar. The layer maps
    this mean to the probabilities P_k of that class. The counts n >= 0 solve sum_k n_k (P_k - e_k)
    = N db, sum n = N, in least squares.
    """
    from scipy.optimize import nnls

    layer = _checked(observation)
    if layer.bias is None or not torch.isfinite(layer.bias).all():
        raise NotApplicable("ma needs the gradient of the last layer's bias")
    clients = len(observation.cohort)
    examples = observation.examples
    weight, shift = layer_part(layer.task, layer.task.parameters, layer.name)
    bias = layer.bias.double() / clients
    means = layer.rows.double() / clients / bias.where(bias != 0, 1.0)[:, None]
    outputs = means @ weight.double().T + shift.double()
    system = outputs.softmax(-1).T - torch.eye(len(bias)).to(bias)
    scale = float(bias.abs().max())
    # The heavy last equation makes the counts add up to N.
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
    loss = named(observation.task.loss).name
    if loss != "cross_entropy":
        raise NotApplicable(f"the rule is for cross-entropy, and the loss is {loss}")
    if not torch.isfinite(layer.rows).all():
        raise NotApplicable("the last layer's gradient is not finite")
    if not layer.rows.any():
        raise NotApplicable("the last layer's weight gradient is zero: it reveals no label")
    return layer


def _by_sums(
    layer: LastLayer,
    output: Tensor,
    total: Tensor,
    observation: Observation,
) -> Tensor:
    """Expected examples (K,) by mean probabilities, the rows and the mean sum of their input."""
    return counts(output, layer.rows.sum(1) / _positive(total), observation)


def _positive(total: Tensor) -> Tensor:
    if not total > 0:
        raise NotApplicable("the last layer's input has no positive sum on other images")
    return total
