"""Signatures of a model that a malicious server has prepared to read its clients' images.

Planted layers that are known from the literature leave marks in the weights, in the loss, and in
which units real images switch on. `inspect` looks for these marks before a client trains. Nothing
found is not safety: whoever knows the marks can avoid them (`BLIND_SPOTS`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from scipy import stats
from torch import Tensor, nn
from torch.func import functional_call

from leakbound import client
from leakbound.random import stream, uniform
from leakbound.types import Batch, Task

PARALLEL, EQUAL_COLUMNS, SAME_ANSWERS = 0.99, 0.999, 0.999
FEW_WEIGHTS, FEWEST_SIGNS, BALANCED = 8.0, 32, 0.22
MANY, UNLIKELY, LOUD = 4.0, 12.0, 1000.0
RARE, MOSTLY, FEWEST_UNITS = 0.25, 0.9, 16
LEAST_PROBES, MOST_PROBES, FEW_IMAGES, CENTERS, CHUNK = 64, 256, 4, 4096, 256

KINDS = (
    *("imprint", "near-duplicate rows", "imprint on probes", "equal columns"),
    *("trap weights", "rarely active", "linear trap", "zeroed paths", "huge gain"),
)
"""Every kind of mark."""

BLIND_SPOTS = (
    "rows that measure the same of real images but point elsewhere, where no probes are given",
    "an imprint on fewer than about eight input values, or behind a layer that mixes them",
    "trap weights whose rows have a random number of negative weights, where no probes are given",
    "weights that were found by optimizing the leak rather than by a published recipe",
)
"""What this inspection does not see."""

NOT_SAFE = "Nothing was found. That is not safety: a server that knows these marks can avoid them."


@dataclass(frozen=True)
class Finding:
    """One statistic of one layer; a mark of a planted model where it reaches its threshold.

    Attributes:
        layer: name of the layer; "loss" for the loss.
        kind: one of `KINDS`.
        strength: the statistic; what it counts is in `words`. Larger is more suspicious.
        threshold: from where on it is a mark.
        words: what was seen, for people.
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


def inspect(
    task: Task, probes: Batch | None = None, *, input_shape: tuple[int, ...] | None = None
) -> tuple[Finding, ...]:
    """The marks of a planted model that were found; none is no proof of safety.

    Args:
        task: the model as the server sent it.
        probes: images to try it on, public ones or the client's own (nothing of them is sent);
            64 at least for what needs them. None: the task's public ones, where there are some.
        input_shape: (C, H, W) of one image where there are no images at all: the loss and the
            gains are then tried on random ones.

    Example:
        >>> from leakbound import models
        >>> from leakbound.attacks import RobbingTheFed
        >>> def of(images):
        ...     net = models.mlp(input_shape=(1, 6, 6), classes=3, generator=stream(0, "model"))
        ...     return Task.of(net, classes=3, public=images)
        >>> images = Batch(uniform((99, 1, 6, 6), stream(0, "images")), torch.arange(99) % 3)
        >>> inspect(of(images))
        ()
        >>> [(f.layer, f.kind, f.strength) for f in inspect(RobbingTheFed().plant(of(images)))]
        [('layer', 'imprint', 128.0)]
    """
    found = [f for f in statistics(task, probes, input_shape=input_shape) if f.marked]
    imprinted = {f.layer for f in found if f.kind in ("imprint", "near-duplicate rows")}
    doubled = ("equal columns", "imprint on probes")
    return tuple(f for f in found if not (f.kind in doubled and f.layer in imprinted))


def statistics(
    task: Task, probes: Batch | None = None, *, input_shape: tuple[int, ...] | None = None
) -> tuple[Finding, ...]:
    """Every statistic that `inspect` judges, marked or not: for margins and calibration."""
    images = probes or task.public
    inputs = None if images is None else images.inputs[:MOST_PROBES].to(task.parameters)
    found: list[Finding] = []
    layers = _layers(task)
    head = _head(layers)
    for layer in layers:
        if layer.name != head:
            found.append(_parallel_rows(layer))
            found.append(_balanced_signs(layer))
        if layer.below is not None and layer.rows.shape[1] == layer.below:
            found.append(_equal_columns(layer))
        found.append(_zeroed(layer))
    if inputs is not None and len(inputs) >= LEAST_PROBES:
        found += _on_probes(task, [layer for layer in layers if layer.name != head], inputs)
    shape = input_shape if inputs is None else tuple(inputs.shape[1:])
    if shape is not None:
        found += _tried(task, inputs, shape)
    return tuple(found)


@dataclass(frozen=True, eq=False)
class _Layer:
    """Weights (k, d) of one layer, a row a unit; its bias (k,); which weights are not pruned.

    `below`: of a linear layer, how many units the linear layer before it has.
    """

    name: str
    rows: Tensor
    bias: Tensor | None
    kept: Tensor
    linear: bool
    below: int | None


def _layers(task: Task) -> list[_Layer]:
    parts = task.unflatten(task.parameters.detach())
    there = torch.ones_like(task.parameters, dtype=torch.bool) if task.kept is None else task.kept
    kept = task.unflatten(there)
    found: list[_Layer] = []
    below: int | None = None
    for name, module in task.model.named_modules():
        key = f"{name}.weight" if name else "weight"
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and key in parts:
            rows = parts[key].flatten(1)
            bias = parts.get(f"{name}.bias" if name else "bias")
            linear = isinstance(module, nn.Linear)
            under = below if linear else None
            found.append(_Layer(name, rows, bias, kept[key].flatten(1), linear, under))
            below = len(rows) if linear else below
    return found


def _head(layers: list[_Layer]) -> str | None:
    """The output layer, whose rows no activation follows; None in a model of one layer."""
    linear = [layer.name for layer in layers if layer.linear]
    return linear[-1] if len(layers) > 1 and linear else None


def parallel(rows: Tensor, least: float = PARALLEL, spread: float = FEW_WEIGHTS) -> list[int]:
    """The largest set of rows (k, d) that point the way of one of them, as indices.

    Rows whose weight lies on fewer than `spread` entries are left out: two of these are parallel by
    chance. Under weights of random direction in `spread` = 8 dimensions, two rows have a cosine of
    0.99 with probability 2e-7. Of more than `CENTERS` rows so many, evenly spaced, are tried as the
    middle of a set.
    """
    size = rows.norm(dim=1)
    wide = rows.square().sum(1).square() / rows.pow(4).sum(1).clamp_min(1e-300) >= spread
    index = ((size > 0) & wide & size.isfinite()).nonzero()[:, 0]
    if len(index) == 0:
        return []
    unit = rows[index] / size[index, None]
    most, best = -1, unit[0]
    for part in unit[:: -(-len(unit) // CENTERS)].split(CHUNK):
        near = (part @ unit.T >= least).sum(1)
        if int(near.max()) > most:
            most, best = int(near.max()), part[int(near.argmax())]
    return [int(i) for i in index[unit @ best >= least]]


def _parallel_rows(layer: _Layer) -> Finding:
    members = parallel(layer.rows)
    graded = _graded(layer, members)
    kind = "imprint" if graded else "near-duplicate rows"
    words = (
        f"{len(members)} of {len(layer.rows)} units of {layer.name!r} measure one and the same "
        "thing of the input" + (" with graded thresholds" if graded else "")
    )
    return Finding(layer.name, kind, float(len(members)), MANY, words, tuple(members))


def _graded(layer: _Layer, members: list[int]) -> bool:
    """Whether parallel rows switch on at different levels, `MANY` at least."""
    if layer.bias is None or len(members) < 2:
        return False
    levels = (layer.bias[members] / layer.rows[members].norm(dim=1)).sort().values
    spread = float(levels[-1] - levels[0])
    return spread > 0 and int((levels.diff() > 1e-6 * spread).sum()) + 1 >= MANY


def _equal_columns(layer: _Layer) -> Finding:
    """Units of the layer before that all weigh alike in every output."""
    classes = len(layer.rows)
    members = parallel(layer.rows.T, EQUAL_COLUMNS, 3.0) if classes >= 8 else []
    words = (
        f"{len(members)} of {layer.rows.shape[1]} units have the same outgoing weights in "
        f"{layer.name!r}, up to scale"
    )
    return Finding(layer.name, "equal columns", float(len(members)), 2 * MANY, words)


def _balanced_signs(layer: _Layer) -> Finding:
    """Rows with as many negative as positive weights, too often for chance.

    A row of n weights of independent random signs has (negative - positive) / sqrt(n) inside
    +-BALANCED with a known probability; training only spreads that difference. Strength: -log10 of
    the probability of so many balanced rows (Poisson-binomial, by Hoeffding's binomial bound).
    """
    count = (layer.rows != 0).sum(1)
    used = count >= FEWEST_SIGNS
    count, rows = count[used], layer.rows[used]
    strength, hits = 0.0, 0
    if len(count):
        gap = (rows > 0).sum(1) - (rows < 0).sum(1)
        reach = BALANCED * count.double().sqrt()
        balanced = gap.abs() <= reach
        chance = _chance_of_balance(count)
        hits = int(balanced.sum())
        strength = -float(stats.binom.logsf(hits - 1, len(count), chance)) / math.log(10)
    words = (
        f"{hits} of {len(count)} units of {layer.name!r} have as many negative as positive "
        f"weights, by chance so many with probability 1e-{max(0.0, strength):.0f}"
    )
    return Finding(layer.name, "trap weights", max(0.0, strength), UNLIKELY, words)


def _chance_of_balance(count: Tensor) -> float:
    """Mean over rows of P(|B - (n - B)| <= BALANCED sqrt(n)) for B ~ Binomial(n, 1/2)."""
    sizes, often = torch.unique(count, return_counts=True)
    n = sizes.double().numpy()
    reach = BALANCED * n**0.5
    inside = stats.binom.cdf((n + reach) // 2, n, 0.5) - stats.binom.cdf(
        -((reach - n) // 2) - 1, n, 0.5
    )
    return float((inside * often.numpy()).sum() / often.sum())


def _zeroed(layer: _Layer) -> Finding:
    """Units that nothing enters, or inputs that go nowhere, though pruning did not take them."""
    zero = (layer.rows == 0) & layer.kept
    dead = 0
    if not bool((layer.rows == 0).all()):
        for side in (1, 0):
            dead += int((zero.any(side) & (layer.rows == 0).all(side)).sum())
    words = (
        f"{dead} units or inputs of {layer.name!r} are cut off by zero weights (a pruned model "
        "shows this too: tell the task what pruning kept)"
    )
    return Finding(layer.name, "zeroed paths", float(dead), 1.0, words)


def _on_probes(task: Task, layers: list[_Layer], inputs: Tensor) -> list[Finding]:
    """What real images make of linear layers that see them."""
    found, flat = [], inputs.flatten(1)
    fits = [la for la in layers if la.linear and la.rows.shape[1] == flat.shape[1]]
    try:
        with torch.no_grad():  # two images tell which layers see them
            entering = client.layer_inputs(task, inputs[:2], [la.name for la in fits])
    except (ValueError, RuntimeError):  # a layer called several times; images of another shape
        return []
    for layer in fits:
        if not torch.equal(entering[layer.name], flat[:2]):
            continue
        seen = flat @ layer.rows.T
        on = seen + (0 if layer.bias is None else layer.bias) > 0
        rates = on.double().mean(0)
        found += [_same_answers(layer, seen, rates), _rarely_active(layer, rates)]
    return found


def _same_answers(layer: _Layer, seen: Tensor, rates: Tensor) -> Finding:
    """Units that say the same of all probes (n, k), up to scale and level, wherever they point.

    Units that are on for hardly any image, or for nearly all, are left out: they tell none apart.
    """
    used = ((rates >= 0.01) & (rates <= 0.99)).nonzero()[:, 0]
    centered = (seen - seen.mean(0))[:, used]
    members = [int(used[i]) for i in parallel(centered.T, SAME_ANSWERS)]
    words = (
        f"{len(members)} of {len(layer.rows)} units of {layer.name!r} say the same of "
        f"{len(seen)} probe images, up to scale"
    )
    return Finding(
        layer.name, "imprint on probes", float(len(members)), 2 * MANY, words, tuple(members)
    )


def _rarely_active(layer: _Layer, rates: Tensor) -> Finding:
    """The share of units that are on for few images, and yet for some.

    The mirror image of a fresh unit is as likely as itself, so half of the units are on for more
    than half of the images; training may leave units dead, which leak nothing.
    """
    rare = (rates > 0) & (rates <= RARE)
    enough = len(rates) >= FEWEST_UNITS
    words = (
        f"{int(rare.sum())} of {len(rates)} units of {layer.name!r} are on for some probe images, "
        "but for a quarter of them at most"
    )
    share = float(rare.double().mean()) if enough else 0.0
    return Finding(layer.name, "rarely active", share, MOSTLY, words)


def _tried(task: Task, inputs: Tensor | None, shape: tuple[int, ...]) -> list[Finding]:
    """What a small batch shows: outputs whose loss does not look at labels, and gains."""
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
    except RuntimeError:  # images of another shape than the model's
        return []
    return gains if output.ndim != 2 else [_label_blind(task, output, labels), *gains]


def _label_blind(task: Task, output: Tensor, labels: Tensor) -> Finding:
    """Outputs whose derivative of the loss is one constant, whatever outputs and labels are."""
    slopes = []
    for draw in range(2):
        values = uniform(output.shape, stream(draw, "inspection", "loss"), like=output)
        values = (4 * values - 2).requires_grad_()
        moved = labels.roll(draw)
        with torch.enable_grad():
            loss = task.loss(values, moved)
        slopes.append(torch.autograd.grad(loss, values)[0])
    every = torch.cat(slopes)
    size = every.abs().amax(0)
    constant = (every - every.mean(0)).abs().amax(0) <= 1e-6 * size
    count = int((constant & (size > 0)).sum())
    words = f"the loss weighs {count} of {output.shape[1]} outputs the same whatever the labels are"
    return Finding("loss", "linear trap", float(count), 1.0, words)


def _gains(task: Task, inputs: Tensor, labels: Tensor) -> tuple[Tensor, list[Finding]]:
    """The outputs; and how much the loss moves with each layer's outputs, over the model's own."""
    seen: dict[str, Tensor] = {}
    handles = []

    def note(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            seen[name] = output

        return hook

    names = [layer.name for layer in _layers(task)]
    modules = dict(task.model.named_modules())
    values = {
        name: value.detach().requires_grad_()
        for name, value in task.unflatten(task.parameters).items()
    }
    try:
        handles = [modules[name].register_forward_hook(note(name)) for name in names]
        with torch.enable_grad():
            output = functional_call(task.model, {**task.buffers, **values}, (inputs,))
            loss = task.loss(output, labels)
    finally:
        for handle in handles:
            handle.remove()
    order = list(seen)
    wanted = [output, *(seen[name] for name in order)]
    slopes = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    base = float(slopes[0].norm())
    found = []
    for name, slope in zip(order, slopes[1:], strict=True):
        gain = float(slope.norm()) / base if base > 0 else 0.0
        gain = gain if math.isfinite(gain) else math.inf
        words = f"what {name!r} says is amplified {gain:.3g} times on its way to the loss"
        found.append(Finding(name, "huge gain", gain, LOUD, words))
    return output.detach(), found
