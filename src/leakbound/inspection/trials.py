"""Marks that appear when a malicious model runs on images: real ones, or random ones."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from leakbound import client
from leakbound.core import NotApplicable, Task
from leakbound.inspection.weights import MANY, LayerFinding, LayerRows, evened, layers, parallel
from leakbound.randomness import normal, stream, uniform

SAME_ANSWERS = 0.999
LOUD = 1000.0
RARE = 0.25
MOSTLY = 0.9
FEWEST_UNITS = 16
FEW_IMAGES = 4


def on_probes(task: Task, layers: list[LayerRows], inputs: Tensor) -> list[LayerFinding]:
    found = []
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
        found += [_same_answers(layer, seen, rates), _rarely_active(layer, rates)]
    return found


def _same_answers(layer: LayerRows, seen: Tensor, rates: Tensor) -> LayerFinding:
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


def tried(task: Task, inputs: Tensor | None, shape: tuple[int, ...]) -> list[LayerFinding]:
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


def _label_blind(task: Task, output: Tensor, labels: Tensor) -> LayerFinding:
    """Outputs for which the loss has a constant derivative, independent of outputs and labels."""
    slopes = []
    for draw in range(2):
        values = uniform(output.shape, stream(draw, "inspection", "loss"), like=output)
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


def _gains(task: Task, inputs: Tensor, labels: Tensor) -> tuple[Tensor, list[LayerFinding]]:
    """The outputs; and how much the loss moves with each layer's outputs, over the model's own."""
    seen: dict[str, Tensor] = {}
    handles = []

    def keep(name: str, module: nn.Module, inputs: object, output: Tensor) -> None:
        seen[name] = output

    modules = dict(task.model.named_modules())
    values = {
        name: value.detach().requires_grad_()
        for name, value in task.unflatten(task.parameters).items()
    }
    try:
        for layer in layers(task):
            handles.append(modules[layer.name].register_forward_hook(partial(keep, layer.name)))
        with torch.enable_grad():
            output = client.call(task, {**task.buffers, **values}, inputs)
            loss = task.loss(output, labels)
    finally:
        for handle in handles:
            handle.remove()
    wanted = [output, *seen.values()]
    slopes = _slopes(loss, wanted)
    if not bool(slopes[0].any()):  # the loss is saturated on these images
        push = normal(output.shape, stream(0, "inspection", "push"), like=output)
        slopes = _slopes((output * push).sum(), wanted)
    base = float(slopes[0].double().norm())
    found = []
    for name, slope in zip(seen, slopes[1:], strict=True):
        gain = float(slope.double().norm()) / base
        gain = gain if math.isfinite(gain) else math.inf
        words = f"the output of {name!r} is amplified {gain:.3g} times on its way to the loss"
        found.append(LayerFinding(name, "huge gain", gain, LOUD, words))
    return output.detach(), found


def _slopes(value: Tensor, wanted: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(
        value, wanted, allow_unused=True, materialize_grads=True, retain_graph=True
    )
