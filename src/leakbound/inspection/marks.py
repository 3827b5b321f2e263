"""Marks of malicious layers, in their weights and when the model runs on images.

No mark depends on the size of a unit's weights. A net of ReLU units is the same function if a
unit's incoming weights are multiplied by c and its outgoing ones by 1 / c. So a server may choose
any c that the numbers can represent.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import scipy
import torch
from torch import Tensor, nn

from leakbound import client
from leakbound.core import NotApplicable, Task
from leakbound.randomness import normal, stream, uniform

MANY = 4.0
"""This many similar units are a mark."""
# Cosines of two rows, and of two columns, that count as parallel.
PARALLEL = 0.99
EQUAL_COLUMNS = 0.999
# Rows with fewer effective weights are parallel by chance.
FEW_WEIGHTS = 8.0
# Signs of a row: the least number that says something, and the width of the balanced range in
# standard deviations.
FEWEST_SIGNS = 32
BALANCED = 0.22
# -log10 of the probability that fresh weights are as balanced.
UNLIKELY = 12.0
# How many times farther than the median a class lies alone.
APART = 10.0
# Inputs with this many times the mean weight may be constants that carry thresholds.
HEAVY = 8.0
# Limits the comparison of wide layers: rows tried as centers, and rows at a time.
CENTERS = 4096
CHUNK = 256


@dataclass(frozen=True, eq=False)
class LayerRows:
    """Weights (k, d) of one layer, one row per unit; its bias (k,); which weights are not pruned.

    `follows`: it is linear and takes the units of the linear layer before it. `entering`: (d,) the
    size of the weights of the units that feed it, in the layer before; None if they do not fit.
    """

    name: str
    rows: Tensor
    bias: Tensor | None
    kept: Tensor
    linear: bool
    follows: bool
    entering: Tensor | None


def layers(task: Task) -> list[LayerRows]:
    parts = task.tensors(task.parameters.detach())
    there = torch.ones_like(task.parameters, dtype=torch.bool) if task.kept is None else task.kept
    kept = task.unflatten(there)
    rows_of: list[LayerRows] = []
    below = 0
    size: Tensor | None = None
    for name, module in task.model.named_modules():
        key = f"{name}.weight" if name else "weight"
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and key in parts:
            rows = parts[key].flatten(1)
            bias = parts.get(f"{name}.bias" if name else "bias")
            linear = isinstance(module, nn.Linear)
            entering = None
            if size is not None and rows.shape[1] % len(size) == 0:
                # A unit may have several outputs in each row, such as the pixels of a channel.
                entering = size.repeat_interleave(rows.shape[1] // len(size))
            follows = linear and rows.shape[1] == below
            here = kept.get(key, torch.ones_like(parts[key], dtype=torch.bool)).flatten(1)
            rows_of.append(LayerRows(name, rows, bias, here, linear, follows, entering))
            even, most = evened(rows if entering is None else rows.double() * entering)
            # Norms over the largest; 1 for rows of zeros.
            size = most / most.max().clamp_min(5e-324) * even.norm(dim=1)
            size = size.masked_fill(size == 0, 1.0)
            below = len(rows) if linear else below
    return rows_of


def evened(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (k, d) in float64, each divided by its largest entry, and these (k,); zeros stay zeros.

    Powers and products of the result neither overflow nor underflow.

    Example:
        >>> evened(torch.tensor([[1e-30, -2e-30], [0.0, 0.0]]))[0].tolist()
        [[0.5, -1.0], [0.0, 0.0]]
    """
    wide = rows.double()
    most = wide.abs().amax(1) if wide.shape[1] else wide.new_zeros(len(wide))
    usable = (most > 0) & most.isfinite()
    even = (wide / most[:, None]).masked_fill(~usable[:, None], 0)
    return even, most.masked_fill(~usable, 0)


def head_of(layers: list[LayerRows]) -> str | None:
    """The output layer, whose rows no activation follows; None for a model of one layer."""
    linear = [layer.name for layer in layers if layer.linear]
    return linear[-1] if len(layers) > 1 and linear else None


@dataclass(frozen=True)
class LayerFinding:
    """One statistic of one layer; a mark of a malicious model if it reaches its threshold.

    Attributes:
        layer: name of the layer; "loss" for the loss.
        kind: one of `KINDS`.
        strength: the statistic; `words` says what it counts. Larger is more suspicious.
        threshold: from this value on it is a mark.
        words: what was seen, in a sentence.
        rows: the units concerned.
    """

    layer: str
    kind: str
    strength: float
    threshold: float
    words: str
    rows: tuple[int, ...] = ()

    @property
    def marked(self) -> bool:
        """Whether the statistic reaches its threshold."""
        return self.strength >= self.threshold


def parallel(
    rows: Tensor,
    least: float = PARALLEL,
    spread: float = FEW_WEIGHTS,
) -> list[int]:
    """The largest set of rows (k, d) that are parallel to one of them, as indices.

    Rows whose weight lies on fewer than `spread` entries are left out: two of these can be parallel
    by chance. Under weights of random direction in `spread` = 8 dimensions, two rows have a cosine
    of 0.99 with probability 2e-7. At most `CENTERS` rows, evenly spaced, are tried as the center of
    a set. The size of a row does not matter.
    """
    even, most = evened(rows)
    wide = even.square().sum(1).square() / even.pow(4).sum(1).clamp_min(1) >= spread
    index = ((most > 0) & wide).nonzero()[:, 0]
    if len(index) == 0:
        return []
    unit = even[index] / even[index].norm(dim=1, keepdim=True)
    count = -1
    best = unit[0]
    for part in unit[:: -(-len(unit) // CENTERS)].split(CHUNK):
        near = (part @ unit.T >= least).sum(1)
        if int(near.max()) > count:
            count = int(near.max())
            best = part[int(near.argmax())]
    return [int(i) for i in index[unit @ best >= least]]


def parallel_rows(layer: LayerRows) -> LayerFinding:
    members = parallel(layer.rows)
    if layer.entering is not None:
        # As if the units that feed them had weights of size 1.
        balanced = evened(layer.rows)[0] * layer.entering
        members = max(members, parallel(balanced), key=len)
    if layer.linear:  # thresholds may be in the weights of a few constant inputs
        energy = evened(layer.rows)[0].square().sum(0)
        light = energy <= HEAVY * energy.mean()
        if not bool(light.all()):
            members = max(members, parallel(layer.rows[:, light]), key=len)
    graded = _graded(layer, members)
    kind = "imprint" if graded else "near-duplicate rows"
    words = (
        f"{len(members)} of {len(layer.rows)} units of {layer.name!r} measure the same direction "
        f"of the input{' with graded thresholds' if graded else ''}"
    )
    return LayerFinding(layer.name, kind, float(len(members)), MANY, words, tuple(members))


def _graded(layer: LayerRows, members: list[int]) -> bool:
    """Whether at least `MANY` parallel rows switch on at different levels."""
    if layer.bias is None or len(members) < 2:
        return False
    even, most = evened(layer.rows[members])
    levels = (layer.bias[members].double() / most / even.norm(dim=1)).sort().values
    apart = 1e-6 * torch.maximum(levels[1:].abs(), levels[:-1].abs())
    return int((levels.diff() > apart).sum()) + 1 >= MANY


def equal_columns(layer: LayerRows) -> LayerFinding:
    classes = len(layer.rows)
    members = parallel(evened(layer.rows)[0].T, EQUAL_COLUMNS, 3.0) if classes >= 8 else []
    words = (
        f"{len(members)} of {layer.rows.shape[1]} units have the same outgoing weights in "
        f"{layer.name!r}, up to scale"
    )
    return LayerFinding(layer.name, "equal columns", float(len(members)), 2 * MANY, words)


def balanced_signs(layer: LayerRows) -> LayerFinding:
    """Rows with as many negative as positive weights, too often for chance.

    A row of n independent random signs has (negative - positive) / sqrt(n) inside +-BALANCED with a
    known probability; training only increases the spread of that difference. Strength: -log10 of
    the probability of this many balanced rows (Poisson-binomial, by Hoeffding's binomial bound).
    """
    count = (layer.rows != 0).sum(1)
    used = count >= FEWEST_SIGNS
    count = count[used]
    rows = layer.rows[used]
    strength = 0.0
    hits = 0
    if len(count):
        gap = (rows > 0).sum(1) - (rows < 0).sum(1)
        hits = int((gap.abs() <= BALANCED * count.double().sqrt()).sum())
        chance = _chance_of_balance(count)
        strength = -float(scipy.stats.binom.logsf(hits - 1, len(count), chance)) / math.log(10)
    words = (
        f"{hits} of {len(count)} units of {layer.name!r} have as many negative as positive "
        f"weights; chance gives so many with probability 1e-{max(0.0, strength):.0f}"
    )
    return LayerFinding(layer.name, "trap weights", max(0.0, strength), UNLIKELY, words)


def _chance_of_balance(count: Tensor) -> float:
    """Mean over rows of P(|B - (n - B)| <= BALANCED sqrt(n)) for B ~ Binomial(n, 1/2)."""
    sizes, often = torch.unique(count, return_counts=True)
    n = sizes.double().numpy()
    reach = BALANCED * n**0.5
    most = (n + reach) // 2
    least = -((reach - n) // 2)
    inside = scipy.stats.binom.cdf(most, n, 0.5) - scipy.stats.binom.cdf(least - 1, n, 0.5)
    return float((inside * often.numpy()).sum() / often.sum())


def lone_classes(layer: LayerRows) -> LayerFinding:
    """Rows of few classes far from those of most others, which are nearly the same.

    The gradients of two examples with equal features and the labels y and z differ by the rows'
    difference below the output layer. So the examples of most classes vanish from a sum only if
    the rows of these classes are nearly equal. Strength: the largest distance from the middle row
    over the median distance.
    """
    rows = layer.rows.double() * (1 if layer.entering is None else layer.entering)
    rows = rows / rows.abs().max().clamp_min(5e-324)
    far = (rows - rows.median(0).values).norm(dim=1)
    ratio = torch.nan_to_num(far / far.median(), nan=0.0, posinf=math.inf)
    most = float(ratio.max())
    much = "infinitely" if most == math.inf else f"{most:.3g} times"
    words = (
        f"a class of {layer.name!r} is {much} farther from the middle class than half of the "
        f"{len(far)} classes (an output layer that began at zero and saw few classes shows this "
        "too)"
    )
    members = tuple(int(i) for i in (ratio >= APART).nonzero()[:, 0])
    return LayerFinding(layer.name, "lone classes", most, APART, words, members)


def zeroed(layer: LayerRows) -> LayerFinding:
    """Units without inputs, or inputs without effect, though pruning did not remove them."""
    zero = (layer.rows == 0) & layer.kept
    dead = 0
    if not bool((layer.rows == 0).all()):
        for side in (1, 0):
            dead += int((zero.any(side) & (layer.rows == 0).all(side)).sum())
    words = (
        f"{dead} units or inputs of {layer.name!r} are cut off by zero weights (a pruned model "
        "shows this too: give the task the mask of its pruning)"
    )
    return LayerFinding(layer.name, "zeroed paths", float(dead), 1.0, words)


# Correlation of two units' outputs on images that counts as equal.
SAME_ANSWERS = 0.999
# A layer that is amplified this much drowns the model's own outputs.
LOUD = 1000.0
# Units on for at most this share of images are rare; a layer is marked if most of its units are.
RARE = 0.25
MOSTLY = 0.9
# A layer of fewer units can look like that by chance.
FEWEST_UNITS = 16
# Four images show gains; their number does not matter.
FEW_IMAGES = 4


def on_probes(
    task: Task,
    layers: list[LayerRows],
    inputs: Tensor,
) -> list[LayerFinding]:
    findings = []
    flat = inputs.flatten(1)
    fits = [la for la in layers if la.linear and la.rows.shape[1] == flat.shape[1]]
    try:
        with torch.no_grad():  # two images show which layers see them
            entering = client.layer_inputs(task, inputs[:2], [la.name for la in fits])
    except (ValueError, RuntimeError, NotApplicable):  # a layer called twice; other images
        return []
    for layer in fits:
        if not torch.equal(entering[layer.name], flat[:2]):
            continue
        even, most = evened(layer.rows)
        seen = flat.double() @ even.T
        level = 0 if layer.bias is None else layer.bias.double() / torch.where(most > 0, most, 1)
        on = seen + level > 0
        rates = on.double().mean(0)
        findings += [_same_answers(layer, seen, rates), _rarely_active(layer, rates)]
    return findings


def _same_answers(
    layer: LayerRows,
    seen: Tensor,
    rates: Tensor,
) -> LayerFinding:
    """Units with the same outputs (n, k) on all probes, up to scale and level. Units that are on
    for almost no image, or for almost all, do not distinguish images: left out.
    """
    used = ((rates >= 0.01) & (rates <= 0.99)).nonzero()[:, 0]
    centered = (seen - seen.mean(0))[:, used]
    members = [int(used[i]) for i in parallel(centered.T, SAME_ANSWERS)]
    words = (
        f"{len(members)} of {len(layer.rows)} units of {layer.name!r} give the same outputs on "
        f"{len(seen)} probe images, up to scale"
    )
    return LayerFinding(
        layer.name, "imprint on probes", float(len(members)), 2 * MANY, words, tuple(members)
    )


def _rarely_active(layer: LayerRows, rates: Tensor) -> LayerFinding:
    """The share of units that are on for few images, but for some. A fresh unit's mirror image is
    equally likely, so half of the units are on for most images; dead units leak nothing.
    """
    rare = (rates > 0) & (rates <= RARE)
    enough = len(rates) >= FEWEST_UNITS
    words = (
        f"{int(rare.sum())} of {len(rates)} units of {layer.name!r} are on for some probe images, "
        "but for at most a quarter of them"
    )
    share = float(rare.double().mean()) if enough else 0.0
    return LayerFinding(layer.name, "rarely active", share, MOSTLY, words)


def tried(
    task: Task,
    inputs: Tensor | None,
    shape: tuple[int, ...],
) -> list[LayerFinding]:
    """Marks that a small batch shows: outputs whose loss ignores the labels, and gains."""
    low, high = task.input_range
    if task.label_range is None:
        return []
    if inputs is None or len(inputs) < FEW_IMAGES:
        source = stream(0, "inspection", *shape)
        inputs = low + (high - low) * uniform((FEW_IMAGES, *shape), source, like=task.parameters)
    inputs = inputs[:FEW_IMAGES]
    labels = torch.arange(len(inputs), device=inputs.device) % task.label_range
    try:
        output, gains = _gains(task, inputs, labels)
    except (RuntimeError, NotApplicable):  # images of another shape; codes that the model lacks
        return []
    return gains if output.ndim != 2 else [_label_blind(task, output, labels), *gains]


def _label_blind(
    task: Task,
    output: Tensor,
    labels: Tensor,
) -> LayerFinding:
    """Outputs for which the loss has a constant derivative, independent of outputs and labels."""
    slopes = []
    for draw in range(2):
        values = uniform(
            output.shape,
            stream(draw, "inspection", "loss"),
            like=output,
        )
        values = (4 * values - 2).requires_grad_()
        moved = labels.roll(draw)
        with torch.enable_grad():
            loss = task.loss(values, moved)
        slopes.append(torch.autograd.grad(loss, values)[0])
    every = torch.cat(slopes).double()
    size = every.abs().amax(0)
    constant = (every - every.mean(0)).abs().amax(0) <= 1e-6 * size
    count = int((constant & (size > 0)).sum())
    words = f"the loss weighs {count} of {output.shape[1]} outputs equally for all labels"
    return LayerFinding("loss", "linear trap", float(count), 1.0, words)


def _gains(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
) -> tuple[Tensor, list[LayerFinding]]:
    """The outputs; and how much the loss moves with each layer's outputs, over the model's own."""
    seen: dict[str, Tensor] = {}

    def keep(
        name: str,
        module: nn.Module,
        inputs: object,
        output: Tensor,
    ) -> None:
        seen[name] = output

    values = {
        name: value.detach().requires_grad_()
        for name, value in task.unflatten(task.parameters).items()
    }
    with torch.enable_grad(), ExitStack() as hooks:
        for layer in layers(task):
            module = task.model.get_submodule(layer.name)
            hooks.enter_context(module.register_forward_hook(partial(keep, layer.name)))
        output = client.call(task, {**task.buffers, **values}, inputs)
        loss = task.loss(output, labels)
    wanted = [output, *seen.values()]
    slopes = _slopes(loss, wanted)
    if not bool(slopes[0].any()):  # the loss is saturated on these images
        push = normal(
            output.shape,
            stream(0, "inspection", "push"),
            like=output,
        )
        slopes = _slopes((output * push).sum(), wanted)
    base = float(slopes[0].double().norm())
    findings = []
    for name, slope in zip(seen, slopes[1:], strict=True):
        gain = float(slope.double().norm()) / base
        gain = gain if math.isfinite(gain) else math.inf
        words = f"the output of {name!r} is amplified {gain:.3g} times on its way to the loss"
        findings.append(LayerFinding(name, "huge gain", gain, LOUD, words))
    return output.detach(), findings


def _slopes(value: Tensor, wanted: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(
        value,
        wanted,
        allow_unused=True,
        materialize_grads=True,
        retain_graph=True,
    )
