"""A proof, from an update alone, that a reconstruction is the one input behind it."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import scipy
import torch
from torch import Tensor

from leakbound._util import copies
from leakbound._util.formats import format_explained
from leakbound.attacks import LinearInversion
from leakbound.attacks.analytic import first_layer
from leakbound.attacks.base import Attack
from leakbound.client import forward
from leakbound.core import Exact, NotApplicable, Observation, Reconstruction, Task
from leakbound.engines.path import LAYER, NoPath, Path, path_to, steady
from leakbound.randomness import permutation, stream, uniform

CERTAIN = 1e-4
"""The unexplained share of a layer's gradient below which an outer product counts as exact."""
AGREES = 0.9999
"""The share of the update that training on a certified input must reproduce."""
EXACT = 1e-3
FLOOR = 1e-6
"""The share of each tensor that a certified input may leave, and of all of them together."""
ENTRIES = 2 * 10**7
"""Most derivatives, of outputs by weights, that a certificate without a replay computes."""
SIGNS = 0.05
"""Inputs whose values all lie this near to 0 or to the largest size may be signs."""
EQUAL = 1e-3
"""Bias gradients that differ by less, relative to the largest, may be signs times a number."""
DIRECTIONS = 4
"""From this many active units on, two gradients are not multiples of each other by chance."""
LENGTHS = (0.98, 1.02)
"""Other lengths of an input that its update must tell from the true one, whatever the factors."""
LOGARITHMS = [step / 4 for step in range(-36, 37)]
FINEST = 1e-9
"""Logarithms of lengths that are tried for an input, and how finely the best is searched."""
LONGEST = 10**6
"""Weights of the largest model of which lengths are searched: each asks for all derivatives."""
PROBES = 32
APART = 0.05
"""Inputs of each kind that are compared with a certified one, and the least sine of the angle
between their gradients if the number of examples is not known."""
MAGNIFIED = 1e3
"""By how much undoing what the model does before the layer may magnify rounding."""
OUTSIDE = 1e-3
"""How far outside the input range, in units of its width, a value may be by rounding."""


@dataclass(frozen=True)
class Proof:
    """What an update proves of an answer, each in a sentence: that it is the client's input, or no
    more than that it is what the first layer got.
    """

    certificate: str | None = None
    layer_input: str | None = None


def certificate(
    seen: Observation,
    attack: Attack,
    answer: Reconstruction,
    agreement: float | None,
    sure: Collection[str],
    decay: str | None = None,
) -> Proof:
    """A proof that the answer is the input, if the update holds one; in a sentence.

    Without noise and defense, for one example, every row of the first linear layer's gradient is
    the input times a number, and the bias gradient holds these numbers. This holds for every loss.
    One of three checks shows that the client trained by SGD on this input:

    - Training on the answer reproduces the update (at the best length, the share `agreement`).
    - One step: the update is a sum of weighted derivatives of the model's outputs there.
      Exactly such updates are gradients of some loss there, so neither loss nor label is needed.
    - One step under layer-wise rates: the same of each tensor, but for a factor of its own. If the
      input at another length gives this too, it is known up to one factor, and not certified.
    - Several steps, if their number is known: the input is no multiple of signs, as Adam and sign
      compression leave it. Nothing shows that biases have the learning rate of other weights.

    Examples also leave an outer product if their gradients are multiples of each other: behind one
    output, or under "l1", always where the same units are on. No check sees that: the answer is
    then a weighted mean. So their number must be known, or other inputs must turn on other units.
    If they do not, the sentence says so. `sure` names the findings that are certain. `decay` is the
    weight decay that was subtracted.

    All this concerns what the layer got. It is the example only if the model hands it on: the path
    from the input to the layer is traced, and checked forward on the answer (`engines.path`).
    """
    exact = isinstance(seen.update.law, Exact) and seen.update.mask is None
    if not (isinstance(attack, LinearInversion) and exact and seen.examples == 1):
        return Proof()
    if not answer.objective < CERTAIN or answer.problem or outside(seen) is not None:
        return Proof()
    if seen.layer_rates and not seen.task.plan.is_sum:
        return Proof()
    name, weight, bias, path = _first_layer(seen)
    # Least squares over all units: one row over its bias would magnify rounding.
    got = (bias @ weight / bias.square().sum()).to(answer.inputs)
    image = _example(got, path).reshape(answer.inputs.shape)
    sizes = bias[bias.abs() > EQUAL * bias.abs().max()].abs()
    equal = float(sizes.min()) > (1 - EQUAL) * float(sizes.max())
    size = got.abs() / got.abs().max().clamp_min(1e-30)
    signs = bool(((size < SIGNS) | (size > 1 - SIGNS)).all())
    # One active unit leaves an outer product for any mixture of inputs, so it shows nothing.
    if len(sizes) < 2 or (equal and signs) or _unknown(seen, name, weight, image):
        return Proof()
    counted = "batch size" in sure
    several = "local steps" in sure and seen.task.plan.steps > 1
    replayed = "learning rate" in sure and agreement is not None
    share, slope = _of_outputs(seen, image)
    factors: tuple[float, float] | None = None
    if seen.layer_rates:  # what fits at one rate for all may fit at others
        share = agreement = None
    if share is None and not (agreement is not None and agreement > AGREES):
        factors, other = _up_to_factors(seen, image)
        slope = slope if factors is None else other
    apart = len(sizes) >= DIRECTIONS and _apart(seen, name, image, slope)
    if not (counted or apart):
        return Proof()
    if agreement is not None and agreement > AGREES:
        how = f"training on this input reproduces {format_explained(agreement)} of the update"
    elif share is not None:
        explained = format_explained(share)
        how = f"the derivatives of the model's outputs at this input give {explained} of it"
    elif factors is not None:
        low, high = factors
        rates = f"learning rates that differ between tensors, by up to {high / low:.3g} times"
        how = (
            "the derivatives of the model's outputs at this input give each tensor of it but for a "
            f"factor, as {rates}"
        )
    elif counted and several and not (replayed or signs):
        how = (
            "every local step uses the one example (its training is not replayed; if biases have "
            "another learning rate than weights, as under LAMB, it is right up to one factor)"
        )
    else:
        return Proof()
    known = "known" if counted else "likely, by the ranks; of nearly equal ones it is the mean"
    known += "" if apart else "; the update does not show it: behind these units several look alike"
    shown = (
        f"the gradient of the layer {name!r} is an outer product up to {answer.objective:.1g} of "
        f"its energy, and {how}. "
        f"Assumed: one example ({known}), SGD with one learning rate for all weights"
        f"{'' if factors is None else ' of a tensor'}, with or without momentum and for any number "
        "of local steps, and no undeclared defense"
        + ("" if decay is None else f"; its weight decay ({decay}) is subtracted")
    )
    if factors is not None and _other_lengths(seen, image):
        reason = "the update is the same at another length, as behind units without a bias"
        known = "the input of the first layer is known up to one factor"
        return Proof(None, f"{known}: {reason}. What is shown: {shown}")
    if seen.layer_rates and factors is None:
        return Proof(None, f"the input of the first layer is known up to one factor: {shown}")
    try:
        path = path_to(seen.task, seen.input_shape, name)
        if not path.magnifies(*seen.task.input_range) <= MAGNIFIED:
            raise NoPath("before the layer the model makes the input too small beside a constant")
        steady(seen.task, answer.inputs, name, path)
    except NoPath as reason:
        return Proof(None, f"{LAYER}: {reason}. What is shown: {shown}")
    return Proof(f"this is the input as the model gets it, up to rounding: {shown}")


def _other_lengths(seen: Observation, image: Tensor) -> bool:
    """Whether the update is the same at another length of the input."""
    factors = _Factors(seen)
    return any(factors.at(length * image)[0] is not None for length in LENGTHS)


def _unknown(
    seen: Observation,
    name: str,
    weight: Tensor,
    image: Tensor,
) -> bool:
    """Whether some value may have been withheld, or no valid example is the image."""
    held = seen.task.tensors()[f"{name}.weight" if name else "weight"]
    domain = seen.task.domain
    if domain is not None:  # a table also says which values are whole, and which are categories
        valid = domain.hard(image.clone())
        low, high = domain.input_range
        if float((valid - image).abs().max()) > OUTSIDE * (high - low):
            return True
    # A column of weights that are all 0 may be pruned, and its gradient withheld.
    return bool(((weight == 0).all(0) & (held == 0).all(0)).any())


def _of_outputs(
    seen: Observation,
    image: Tensor,
) -> tuple[float | None, Tensor | None]:
    """The share of the update that the best weighted sum of the outputs' derivatives at the image
    gives, None if it leaves more than rounding of some tensor; and the sum.
    """
    task = seen.task.to(image.device, torch.float64)
    row = seen.update.rows[0].double()
    slopes = _slopes(task, image)
    if slopes is None:
        return None, None
    # Derivatives of outputs may depend on each other, as those of a log-softmax do.
    weights = torch.linalg.pinv(slopes @ slopes.T, hermitian=True) @ (slopes @ row)
    off = row - weights @ slopes
    most = FLOOR * float(row.norm())
    pairs = zip(
        task.unflatten(off).values(),
        task.unflatten(row).values(),
        strict=True,
    )
    if any(float(a.norm()) > EXACT * float(b.norm()) + most for a, b in pairs):
        return None, weights
    return 1 - float(off.square().sum() / row.square().sum()), weights


def _slopes(task: Task, image: Tensor) -> Tensor | None:
    """(K, P) the derivatives of the K outputs at the image; None if they are too many."""
    # float64: the tests compare parts in a thousand of each tensor, which float32 sums may lose.
    with torch.enable_grad():
        flat = task.parameters.requires_grad_()
        try:
            outputs = forward(task, image.double(), flat).flatten()
        except ValueError:  # batch norm has no statistics of a single value
            return None
        if len(outputs) * len(flat) > ENTRIES:
            return None
        each = [torch.autograd.grad(o, flat, retain_graph=True)[0] for o in outputs.unbind()]
    return torch.stack(each)


def _up_to_factors(
    seen: Observation,
    image: Tensor,
) -> tuple[tuple[float, float] | None, Tensor | None]:
    """The least and the largest factor by which each tensor of the update is a weighted sum of the
    outputs' derivatives at the image, and the sum; None if one is not.
    """
    if seen.task.plan.steps != 1 or not seen.task.plan.is_sum:
        return None, None
    return _Factors(seen).at(image)


class _Factors:
    """Fits of each tensor of an update, but for a factor of its own, in float64."""

    def __init__(self, seen: Observation) -> None:
        row = seen.update.rows[0].double()
        self.task = seen.task.to(row.device, torch.float64)
        self.parts = {name: part.flatten() for name, part in self.task.unflatten(row).items()}

    def at(self, image: Tensor) -> tuple[tuple[float, float] | None, Tensor | None]:
        """As `_up_to_factors`, at this length alone."""
        fitted = self.fitted(image)
        if fitted is None:
            return None, None
        factors, off, weights = fitted
        if min(factors) <= 0 or max(off) > EXACT:
            return None, None
        return (min(factors), max(factors)), weights

    def fitted(self, image: Tensor) -> tuple[list[float], list[float], Tensor] | None:
        """The factor of each tensor, the share that it leaves, and the weights of the outputs."""
        slopes = _slopes(self.task, image)
        if slopes is None:
            return None
        each = [self.task.unflatten(one) for one in slopes.unbind()]
        # The tensor whose derivatives show most of the weights of the outputs.
        tables = {}
        for name in self.parts:
            tables[name] = torch.stack([one[name].flatten() for one in each])
        ranks = {}
        for name, table in tables.items():
            square = table @ table.T
            ranks[name] = int(torch.linalg.matrix_rank(square, hermitian=True))
        widest = max(ranks, key=ranks.__getitem__)
        table = tables[widest]
        inverse = torch.linalg.pinv(table @ table.T, hermitian=True)
        weights = inverse @ (table @ self.parts[widest])
        factors = []
        off = []
        for name, wanted in self.parts.items():
            given = weights @ tables[name]
            size = given.square().sum().clamp_min(1e-300)
            factor = float(given @ wanted / size)
            rest = (wanted - factor * given).norm()
            factors.append(factor)
            off.append(float(rest / wanted.norm().clamp_min(1e-300)))
        return factors, off, weights


def lengthened(seen: Observation) -> Observation:
    """The observation of one step, with the bias of the first layer at the rate of its weights.

    Under layer-wise rates, the ratio of weights and bias gives the layer's input up to a factor.
    At the right length, the outputs' derivatives give every tensor but for its rate. Unchanged if
    no length does that, or if others do, too.
    """
    plan = seen.task.plan
    if seen.examples != 1 or plan.steps != 1 or not plan.is_sum:
        return seen
    if seen.update.rows.shape[1] > LONGEST:
        return seen
    try:
        name, weight, bias, path = _first_layer(seen)
    except NotApplicable:
        return seen
    if not bool(bias.any()):
        return seen
    got = bias @ weight / bias.square().sum()
    if float((weight - bias[:, None] * got).norm()) > CERTAIN**0.5 * float(weight.norm()):
        return seen
    factors = _Factors(seen)

    def image(length: float) -> Tensor:
        return _example(math.exp(length) * got, path).reshape(1, *seen.input_shape)

    def left(length: float) -> float:
        fitted = factors.fitted(image(length))
        if fitted is None:
            return math.inf
        return sum(min(off, 1.0) ** 2 for off in fitted[1])

    start = min(LOGARITHMS, key=left)
    width = LOGARITHMS[1] - LOGARITHMS[0]
    best = float(
        scipy.optimize.minimize_scalar(
            left,
            bounds=(start - width, start + width),
            method="bounded",
            options={"xatol": FINEST},
        ).x
    )
    if factors.at(image(best))[0] is None:
        return seen
    for length in LENGTHS:
        other = image(best + math.log(length))
        if factors.at(other)[0] is not None:
            return seen
    rows = seen.update.rows.clone()
    parts = seen.task.unflatten(rows[0])
    parts[f"{name}.bias" if name else "bias"].mul_(math.exp(-best))
    update = replace(seen.update, rows=rows)
    return replace(seen, update=update)


def _apart(
    seen: Observation,
    name: str,
    image: Tensor,
    slope: Tensor | None,
) -> bool:
    """Whether no other input's gradient in the layer is a multiple of the image's, even if the loss
    has the same derivative `slope` in the outputs: tried with valid inputs and shuffled images.
    """
    # Probes in one batch of a coupled model would change the gradients of each other.
    if slope is None or seen.task.coupled:
        return False
    source = stream(0, "captured", "probes")
    (low, high) = seen.task.input_range
    drawn = low + (high - low) * uniform((PROBES, *seen.input_shape), source, like=image)
    if seen.task.domain is not None:
        drawn = seen.task.domain.start(PROBES, source).to(image)
    flat = image.flatten()
    # Shuffled, the image keeps its values: other units are then due to their places alone.
    mixed = torch.stack([flat[permutation(len(flat), source)] for _ in range(PROBES)])
    inputs = torch.cat([image, drawn, mixed.reshape(drawn.shape)])
    model = copies.duplicate(seen.task.model)
    units = seen.task.tensors()[f"{name}.weight" if name else "weight"].shape[0]
    with torch.enable_grad():
        # Zeros that are added to the output of the layer: their gradients are the deltas.
        moved = image.new_zeros(len(inputs), units).requires_grad_()
        model.get_submodule(name).register_forward_hook(lambda _, args, output: output + moved)
        outputs = forward(replace(seen.task, model=model), inputs).flatten(1)
        (slopes,) = torch.autograd.grad((outputs * slope.to(outputs)).sum(), moved)
    alike = torch.cosine_similarity(slopes[1:].double(), slopes[:1].double()).abs()
    return bool(alike.max() < (1 - APART**2) ** 0.5)


def _first_layer(seen: Observation) -> tuple[str, Tensor, Tensor, Path | None]:
    """Name, weight gradient and bias gradient of the first layer that gets the example; its path"""
    name, path = first_layer(seen.task, seen.input_shape)
    parts = seen.task.unflatten(seen.update.rows[0].double())
    prefix = f"{name}." if name else ""
    return name, parts[prefix + "weight"], parts[prefix + "bias"], path


def _example(got: Tensor, path: Path | None) -> Tensor:
    """The example (D,) behind what the layer got (D,)."""
    return got if path is None else path.back(got[None], got.new_ones(1))[0]


def outside(seen: Observation) -> str | None:
    """A note if the one image that the first layer reveals lies outside the input range."""
    exact = isinstance(seen.update.law, Exact) and seen.update.mask is None
    if seen.examples != 1 or not exact:
        return None
    try:
        _, weight, bias, path = _first_layer(seen)
    except NotApplicable:
        return None
    if not bool((bias != 0).any()):
        return None
    image = bias @ weight / bias.square().sum()
    if (weight - bias[:, None] * image).norm() > 0.1 * weight.norm():  # not an outer product
        return None
    image = _example(image, path)
    low, high = seen.task.input_range
    least = float(image.min())
    most = float(image.max())
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
