"""What a captured update proves or refutes about its client's images, labels and noise."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from leakbound import tensors
from leakbound.attacks import LinearInversion
from leakbound.attacks.analytic import input_layer
from leakbound.attacks.base import Attack
from leakbound.attacks.labels import last_layer
from leakbound.captured.capture import Capture
from leakbound.client import forward
from leakbound.covariance import Structured
from leakbound.losses import named
from leakbound.random import permutation, stream, uniform
from leakbound.types import (
    Exact,
    Gaussian,
    Laplace,
    NotApplicable,
    Observation,
    Reconstruction,
    Task,
)

HALVES = (torch.float16, torch.bfloat16)
CERTAIN = 1e-4
"""The unexplained share of a layer's gradient below which an outer product counts as exact."""
AGREES = 0.9999
"""The share of the update that training on a certified input must reproduce."""
EXACT, FLOOR = 1e-3, 1e-6
"""The share of each tensor that a certified input may leave, and of all of them together."""
ENTRIES = 2 * 10**7
"""Most derivatives, of outputs by weights, that a certificate without a replay computes."""
SIGNS = 0.05
"""Inputs whose values all lie this near to 0 or to the largest size may be signs."""
EQUAL = 1e-3
"""Bias gradients that differ by less, relative to the largest, may be signs times a number."""
DIRECTIONS = 4
"""From this many active units on, two gradients are not multiples of each other by chance."""
PROBES, APART = 32, 0.05
"""Inputs of each kind that are compared with a certified one, and the least sine of the angle
between their gradients if the number of examples is not known."""
OUTSIDE = 1e-3
"""How far outside the input range, in units of its width, a value may be by rounding."""
BALANCED = 1e-3
"""The largest share of their absolute sum to which the last bias's gradients may sum."""
RARE = 1e-6
"""The declared noise has less energy than this bound allows with this probability."""


def certificate(
    seen: Observation,
    attack: Attack,
    answer: Reconstruction,
    agreement: float | None,
    sure: Collection[str],
) -> str | None:
    """A proof that the answer is the input, if the update holds one; in a sentence.

    Without noise and defense, for one example, every row of the first linear layer's gradient is
    the input times a number, and the bias gradient holds these numbers. This holds for every loss.
    One of three checks shows that the client trained by SGD on this input:

    - Training on the answer reproduces the update (at the best length, the share `agreement`).
    - One step: the update is a sum of weighted derivatives of the model's outputs there.
      Exactly such updates are gradients of some loss there, so neither loss nor label is needed.
    - Several steps, if their number is known: the input is no multiple of signs, as Adam and sign
      compression leave it. Nothing shows that biases have the learning rate of other weights.

    Examples also leave an outer product if their gradients are multiples of each other: behind one
    output, or under "l1", always where the same units are on. No check sees that: the answer is
    then a weighted mean. So their number must be known, or other inputs must turn on other units.
    If they do not, the sentence says so. `sure` names the findings that are certain.
    """
    exact = isinstance(seen.update.law, Exact) and seen.update.mask is None
    if not (isinstance(attack, LinearInversion) and exact and seen.examples == 1):
        return None
    if not answer.objective < CERTAIN or answer.problem or outside(seen) is not None:
        return None
    name, weight, bias = _first_layer(seen)
    image = (bias @ weight / bias.square().sum()).to(answer.inputs).reshape(answer.inputs.shape)
    sizes = bias[bias.abs() > EQUAL * bias.abs().max()].abs()
    equal = float(sizes.min()) > (1 - EQUAL) * float(sizes.max())
    size = image.abs() / image.abs().max().clamp_min(1e-30)
    signs = bool(((size < SIGNS) | (size > 1 - SIGNS)).all())
    if len(sizes) < 2 or (equal and signs) or _drawn(seen) or _unknown(seen, name, weight, image):
        return None
    counted, several = "batch size" in sure, "local steps" in sure and seen.task.plan.steps > 1
    replayed = "learning rate" in sure and agreement is not None
    share, slope = _of_outputs(seen, image)
    apart = len(sizes) >= DIRECTIONS and _apart(seen, name, image, slope)
    if not (counted or apart):
        return None
    if agreement is not None and agreement > AGREES:
        how = f"training on this input reproduces {share_of(agreement)} of the update"
    elif share is not None:
        how = f"the derivatives of the model's outputs at this input give {share_of(share)} of it"
    elif counted and several and not (replayed or signs):
        how = "every local step uses the one example (its training is not replayed)"
    else:
        return None
    known = "known" if counted else "likely, by the ranks; of nearly equal ones it is the mean"
    known += "" if apart else "; the update does not show it: behind these units several look alike"
    return (
        "this is the input as the model gets it, up to rounding: the gradient of the layer "
        f"{name!r} is an outer product up to {answer.objective:.1g} of its energy, and {how}. "
        f"Assumed: one example ({known}), SGD with one learning rate for all weights, with or "
        "without momentum and for any number of local steps, and no undeclared defense"
    )


def _unknown(seen: Observation, name: str, weight: Tensor, image: Tensor) -> bool:
    """Whether some value may have been withheld, or no valid example is the image."""
    held = seen.task.tensors()[f"{name}.weight" if name else "weight"]
    domain = seen.task.domain
    if domain is not None:  # a table also says which values are whole, and which are categories
        valid = getattr(domain, "hard", domain.project)(image.clone())
        low, high = domain.input_range
        if float((valid - image).abs().max()) > OUTSIDE * (high - low):
            return True
    return bool(((weight == 0).all(0) & (held == 0).all(0)).any())


def _of_outputs(seen: Observation, image: Tensor) -> tuple[float | None, Tensor | None]:
    """The share of the update that the best weighted sum of the outputs' derivatives at the image
    gives, None if it leaves more than rounding of some tensor; and the sum.
    """
    task = seen.task.to(image.device, torch.float64)
    row = seen.update.rows[0].double()
    with torch.enable_grad():
        flat = task.parameters.requires_grad_()
        try:
            outputs = forward(task, image.double(), flat).flatten()
        except ValueError:  # batch norm has no statistics of a single value
            return None, None
        if len(outputs) * len(flat) > ENTRIES:
            return None, None
        each = [torch.autograd.grad(o, flat, retain_graph=True)[0] for o in outputs.unbind()]
    slopes = torch.stack(each)
    found = torch.linalg.pinv(slopes @ slopes.T, hermitian=True) @ (slopes @ row)
    off, most = row - found @ slopes, FLOOR * float(row.norm())
    pairs = zip(task.unflatten(off).values(), task.unflatten(row).values(), strict=True)
    if any(float(a.norm()) > EXACT * float(b.norm()) + most for a, b in pairs):
        return None, found
    return 1 - float(off.square().sum() / row.square().sum()), found


def _apart(seen: Observation, name: str, image: Tensor, slope: Tensor | None) -> bool:
    """Whether no other input's gradient in the layer is a multiple of the image's, even if the loss
    has the same derivative `slope` in the outputs: tried with valid inputs and shuffled images.
    """
    if slope is None or seen.task.coupled:
        return False
    source, (low, high) = stream(0, "captured", "probes"), seen.task.input_range
    drawn = low + (high - low) * uniform((PROBES, *seen.input_shape), source, like=image)
    if seen.task.domain is not None:
        drawn = seen.task.domain.start(PROBES, source).to(image)
    flat = image.flatten()
    mixed = torch.stack([flat[permutation(len(flat), source)] for _ in range(PROBES)])
    inputs = torch.cat([image, drawn, mixed.reshape(drawn.shape)])
    model = copy.deepcopy(seen.task.model)
    units = seen.task.tensors()[f"{name}.weight" if name else "weight"].shape[0]
    with torch.enable_grad():
        moved = image.new_zeros(len(inputs), units).requires_grad_()
        model.get_submodule(name).register_forward_hook(lambda _, args, output: output + moved)
        outputs = forward(replace(seen.task, model=model), inputs).flatten(1)
        (slopes,) = torch.autograd.grad((outputs * slope.to(outputs)).sum(), moved)
    alike = torch.cosine_similarity(slopes[1:].double(), slopes[:1].double()).abs()
    return bool(alike.max() < (1 - APART**2) ** 0.5)


def share_of(value: float) -> str:
    """In percent, with digits for the remainder; rounded down."""
    digits = 3 if value < 1 - 1e-5 else 4
    scale = 10**digits
    return f"{math.floor(min(value, 1.0) * 100 * scale) / scale:.{digits}f} %"


def _first_layer(seen: Observation) -> tuple[str, Tensor, Tensor]:
    """Name, weight gradient and bias gradient of the first layer that sees the input itself."""
    name = input_layer(seen.task, seen.input_shape)
    parts = seen.task.unflatten(seen.update.rows[0].double())
    prefix = f"{name}." if name else ""
    return name, parts[prefix + "weight"], parts[prefix + "bias"]


def _drawn(seen: Observation) -> bool:
    """Whether the model in training mode changes the input before the layer, as dropout does."""
    model = copy.deepcopy(seen.task.model).train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            module.p = 1.0
    buffers = {key: value.clone() for key, value in seen.task.buffers.items()}
    task = replace(seen.task, model=model, buffers=buffers)
    try:
        with torch.random.fork_rng(devices=[]):
            return input_layer(task, seen.input_shape) != input_layer(seen.task, seen.input_shape)
    except NotApplicable:
        return True


def outside(seen: Observation) -> str | None:
    """A note if the one image that the first layer reveals lies outside the input range."""
    exact = isinstance(seen.update.law, Exact) and seen.update.mask is None
    if seen.examples != 1 or not exact:
        return None
    try:
        _, weight, bias = _first_layer(seen)
    except NotApplicable:
        return None
    if not bool((bias != 0).any()):
        return None
    image = bias @ weight / bias.square().sum()
    if (weight - bias[:, None] * image).norm() > 0.1 * weight.norm():  # not an outer product
        return None
    low, high = seen.task.input_range
    least, most = float(image.min()), float(image.max())
    slack = OUTSIDE * (high - low)
    if least >= low - slack and most <= high + slack:
        return None
    least = low if abs(least - low) < slack else least
    most = high if abs(most - high) < slack else most
    return (
        f"the first layer gives values from {least:.3g} to {most:.3g}, outside of input_range "
        f"{low:g} to {high:g}: the reconstruction is cut off there, and nothing is certified; "
        f"give the range of the model's input (--input-range {min(low, least):.3g} "
        f"{max(high, most):.3g})"
    )


def missing_noise(seen: Observation) -> str | None:
    """A note if the update has less energy than the declared noise alone; None otherwise.

    A signal plus independent symmetric noise is seldom shorter than the noise alone (Anderson's
    inequality). Gaussian noise: the lower tail of chi-square; Laplace noise: Maurer's inequality
    for sums of positive variables.
    """
    law, rows = seen.update.law, seen.update.rows.double()
    if not isinstance(law, Gaussian | Laplace) or law.private or not seen.threat.defense_known:
        return None
    if isinstance(law, Gaussian) and isinstance(law.covariance, Structured):
        white = law.covariance.whiten(rows)
    else:
        known = seen.noise_variance
        assert known is not None  # the distribution has a known variance
        variance = known.to(rows)
        white = rows[variance > 0] / variance[variance > 0].sqrt()
    count, energy = white.numel(), float(white.square().sum())
    if not count:
        return None
    if isinstance(law, Gaussian):
        halves = torch.tensor((count / 2, energy / 2), dtype=torch.float64)
        absent = float(torch.special.gammainc(halves[0], halves[1])) < RARE
    else:  # the fourth moment is 6 at variance 1
        absent = energy < count - math.sqrt(2 * math.log(1 / RARE) * 6 * count)
    if not absent:
        return None
    share = energy / count
    shown = f"{share:.2%}" if share >= 1e-4 else f"{share:.1e}"
    return (
        f"the update has {shown} of the declared noise's energy: that noise was not added, so "
        "nothing that needs it holds; leave the defense out, or give the right one (and the "
        "right learning rate)"
    )


def classes(
    seen: Observation, spread: Tensor | None = None, precision: float = 0.0
) -> tuple[tuple[int, ...], str | None]:
    """Classes that occur: negative entries of the last bias; and a note if they cannot be right.

    Cross-entropy's gradients of the last bias are mean probabilities minus the classes' shares.
    They sum to zero, and at most as many classes as examples are negative. If either fails (for
    label smoothing, weight decay, noise, an adaptive optimizer, another loss), no class is named.
    `spread` (P,) is each entry's rounding, `precision` that of the file's coarsest type.
    """
    try:
        layer = last_layer(seen)
    except NotApplicable:
        return (), None
    exact = isinstance(seen.update.law, Exact) and seen.update.mask is None
    exact = exact and named(seen.task.loss).name == "cross_entropy"
    if layer.bias is None or not exact or seen.threat.defense_known is False:
        return (), None
    bias, slack = layer.bias.double(), torch.full_like(layer.bias, 1e-6).double()
    if spread is not None:
        own = layer.task.unflatten(spread)[f"{layer.name}.bias" if layer.name else "bias"]
        slack = slack + 4 * own.to(slack)
    found = tuple(int(k) for k in (bias < -slack).nonzero().flatten())
    total, whole = float(bias.sum().abs()), float(bias.abs().sum())
    if total > max(BALANCED, 4 * precision) * whole + float(slack.square().sum().sqrt()):
        why = f"sum to {total / whole:.1%} of their absolute sum, and cross-entropy's to 0"
    elif len(found) > seen.examples:
        why = f"are negative for {len(found)} classes, more than there are examples"
    else:
        return found, None
    return (), (
        f"the gradients of the last layer's bias {why}: no class is certain; are these the kind "
        "(--kind delta for a change of the weights) and the weights before (--before) that belong "
        "to the file? Another loss, weight decay, Adam or undeclared noise would explain it too"
    )


def spread(capture: Capture, task: Task, rate: float | None) -> Tensor:
    """(P,) the standard deviation of each entry's rounding, in gradient units, generously.

    Full precision: one unit in the last place of each value of the update and the weights before,
    which also covers the sums of the training. Half precision, or such values in wider types as
    mixed precision leaves them: the effect of one rounding.
    """
    total = _of(capture.update, task, capture.name)
    if capture.kind != "gradient":
        weights = task.parameters.double()
        start = torch.full_like(weights, torch.finfo(task.parameters.dtype).eps) * weights.abs()
        if capture.before is not None:
            start = torch.maximum(start, _of(capture.before, task, "before"))
        total = torch.maximum(total, start) if capture.kind == "delta" else total + start
    return total / (rate or 1.0)


def coarsest(capture: Capture) -> float:
    kinds = [_kind(v) for v in capture.update.values() if v.is_floating_point()]
    return max((torch.finfo(kind).eps for kind in kinds), default=0.0)


def _of(named: Mapping[str, Tensor], task: Task, what: str) -> Tensor:
    own = {str(name): _spread(value) for name, value in named.items()}
    return tensors.flat(task, own, what=what).double()


def _spread(value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value
    kind = _kind(value)
    about = torch.finfo(kind)
    least = value.detach().double().abs().clamp_min(about.smallest_normal)
    return least * about.eps * (0.25 if kind in HALVES else 1.0)


def _kind(value: Tensor) -> torch.dtype:
    if value.dtype in HALVES or not bool((value != 0).any()):
        return value.dtype
    for kind in HALVES:
        if torch.equal(value, value.to(kind).to(value.dtype)):
            return kind
    return value.dtype
