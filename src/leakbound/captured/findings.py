"""What an update reveals about the training behind it, and how certain that is."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from leakbound.attacks import FedAvgMatching, LinearInversion
from leakbound.attacks.analytic import input_layer
from leakbound.attacks.labels import LABEL_RULES, infer, label_totals, last_layer
from leakbound.attacks.pace import Pace, is_over
from leakbound.client import gradient, layer_inputs, local_update
from leakbound.core import Exact, NotApplicable, Observation, Task
from leakbound.losses import named
from leakbound.randomness import stream

CANDIDATES = (1, 2, 5, 10, 20)
MOST_STEPS = 64
TRIAL = 60
FITS = 1e-2
SURE = 1e-3
"""Shares of the update's norm that may remain if a number of steps fits, and fits surely."""
VOTES = 2.0
"""Seconds after which no further rule for labels is asked."""
LISTED = 16
"""Most labels, or classes, that are listed one by one."""
TYPICAL = 0.05
"""How far outside of their range sums of labels may be by untypical outputs, for each example."""
GIVE = "give the number of local steps if you know it"
PLAIN = "if the client ran plain SGD in full precision without a defense"
"""The assumption behind conclusions from ranks."""


@dataclass(frozen=True)
class Finding:
    """One fact that was given, inferred from the update, or assumed; `how` states its source.

    `sure` means that it was given, or follows from the update with certainty.
    """

    name: str
    value: str
    how: str
    sure: bool


@dataclass(frozen=True)
class Size:
    """What the ranks of the linear layers' gradients show about the number of examples, if `PLAIN`.

    There were at least `least`, and examples times local steps at least `products`. `likely` is
    their number by `layer`, whose shape allows more; `room` is the same for `products`.
    """

    least: int
    likely: int | None
    layer: str
    products: int
    room: bool = False


def batch_size(
    task: Task,
    row: Tensor,
    *,
    input_shape: tuple[int, ...],
    steps: int | None,
    spread: Tensor,
) -> Size:
    """Bounds on the number of examples from the rank of the linear layers' gradients.

    A linear layer's gradient is a sum of one outer product per example and local step; in a layer
    that sees the input itself, per example only. So its rank is at most their number. If the rank
    is below the limit of the layer's shape, it is likely their number. If `steps` is None, other
    layers show nothing about the examples alone, unless their rank is 1.
    """
    first = None
    with suppress(NotApplicable):
        first = input_layer(task, input_shape)
    parts = task.unflatten(row)
    rounded = task.unflatten(spread)
    least = 1
    products = 1
    layer = first or ""
    room = False
    likely: dict[str, int] = {}
    for name, rows in _rows_an_example(task, input_shape).items():
        key = f"{name}.weight" if name else "weight"
        errors = rounded[key]
        values = torch.linalg.svdvals(parts[key].double())
        # A random matrix has about the norm of its longest row plus longest column.
        noise = 8 * float(errors.norm(dim=0).max() + errors.norm(dim=1).max())
        rank = int((values > max(1e-5 * float(values[0]), noise)).sum())
        below = rank < len(values) - 1
        if math.ceil(rank / rows) >= products:
            products = math.ceil(rank / rows)
            room = below
        known = name == first or steps is not None or rank <= rows
        if not known or not rank:
            continue
        examples = math.ceil(rank / rows / (1 if name == first else steps or 1))
        if examples > least:
            least = examples
            layer = name
        if below:
            likely[name] = examples
    if first in likely and steps is None:
        return Size(least, likely[first], first or "", products, room)
    best = max(likely, key=likely.__getitem__, default="")
    if not likely or (products > 1 and steps is None) or likely[best] < least:
        return Size(least, None, layer, products, room)
    return Size(least, likely[best], best, products, room)


def labels(
    observation: Observation, certain: tuple[int, ...] = ()
) -> tuple[Tensor | None, Finding]:
    """Labels by the published rules, and how well they agree; None if no rule applies. `certain`
    are classes that are known to occur.
    """
    answers: dict[str, tuple[int, ...]] = {}
    reasons: list[str] = []
    began = time.monotonic()
    # The first rule gives the answer; the others count how many agree.
    for rule in sorted(LABEL_RULES, key="bias".__ne__):
        if answers and time.monotonic() - began > VOTES:
            break
        try:
            inferred = infer(rule, observation, stream(0, "captured", "labels", rule))
            answers[rule] = tuple(sorted(inferred.tolist()))
        except NotApplicable as error:
            reasons.append(error.reason)
    if not answers:
        return None, Finding("labels", "unknown", f"{reasons[0]}; give labels", False)
    votes = Counter(answers.values())
    best = answers.get("bias", votes.most_common(1)[0][0])
    how = f"{votes[best]} of {len(answers)} rules agree (attacks.LABEL_RULES)"
    if certain:
        how += (
            f"; classes {_listed(certain)} for certain, since their bias gradients are negative "
            "(for plain cross-entropy, without label smoothing, weight decay or noise)"
        )
    sure = observation.examples == 1 and certain == best
    return torch.tensor(best), Finding("labels", _grouped(best), how, sure)


def _grouped(labels: tuple[int, ...]) -> str:
    """Each label of a few; of many, how many there are of each class."""
    if len(labels) <= LISTED:
        return _listed(labels)
    counts = Counter(labels).most_common()
    shown = ", ".join(f"{count} of class {label}" for label, count in counts[:LISTED])
    return shown if len(counts) <= LISTED else f"{shown}, ..."


def targets(
    observation: Observation,
    *,
    sure: bool,
) -> tuple[Tensor | None, Finding]:
    """Labels under another loss than cross-entropy, or their sums; `sure`: rate and steps are."""
    source = stream(0, "captured", "labels", "bias")
    if not observation.task.plan.is_sum:
        how = "the optimizer leaves signs of gradients, which add up to no labels; give labels"
        return None, Finding("labels", "unknown", how, False)
    hard = named(observation.task.loss).targets == "binary"
    try:
        if not (sure or hard):
            raise NotApplicable("they depend on the learning rate and the number of local steps")
        labels = infer("bias", observation, source)
    except NotApplicable as error:
        how = f"{error.reason}; give labels"
        with suppress(NotApplicable):
            how += f". {_sums(observation, label_totals(observation, source))}"
        return None, Finding("labels", "unknown", how, False)
    one = observation.examples == 1 and isinstance(observation.update.law, Exact)
    how = "the last layer's gradients give the label of one example"
    if observation.examples > 1:
        how = "likely: the last layer's bias gradient, if outputs are typical"
    elif hard:
        how = "the sign of the last layer's bias gradients, for labels 0 and 1"
    return labels, Finding("labels", shown(labels), how, one)


def _sums(observation: Observation, totals: Tensor) -> str:
    """The sums of the labels by output, or why they cannot be right."""
    targets = named(observation.task.loss).targets
    pixels = math.prod(observation.input_shape[1:]) if targets in ("mask", "class map") else 1
    count = observation.examples * pixels
    if targets in ("binary", "mask", "class map", "classes"):
        slack = TYPICAL * count
        if not bool(((totals >= -slack) & (totals <= count + slack)).all()):
            return (
                f"The last layer's bias gives no possible sums of {count} labels between 0 and 1: "
                "another optimizer than SGD, weight decay, noise, or another loss"
            )
        totals = totals.clamp(0, count)
    sums = ", ".join(f"{value:.4g}" for value in totals.tolist()[:64])
    return f"Their sums by output are about {sums}, if outputs are typical and training is SGD"


def shown(labels: Tensor) -> str:
    """Labels as text: numbers, or rows of numbers."""
    if labels.ndim > 2:
        return f"{len(labels)} maps"
    rows = labels[:64, None] if labels.ndim == 1 else labels[:64]
    text = ["; ".join(f"{v:.6g}" for v in row) for row in rows.tolist()]
    return ", ".join(text) + (", ..." if len(labels) > 64 else "")


def steps(
    observation: Observation,
    size: Size,
) -> tuple[Finding, tuple[int, ...]]:
    """The number of local steps as far as closed forms show it, and the numbers left to try.

    If the first layer reveals the single example, training on it is replayed. Otherwise the least
    possible number is assumed, and `searched_steps` can try others.
    """
    replayed = _replayed(observation)
    if replayed is not None:
        return replayed, ()
    part = min(observation.task.plan.batch_size or observation.examples, observation.examples)
    epoch = math.ceil(observation.examples / part)
    ranked = math.ceil(size.products / part)
    least = max(epoch, ranked, _moved(observation))
    if size.room and ranked == least:
        how = f"likely: the linear layers' gradients have the rank of this many steps, {PLAIN}"
        return Finding("local steps", str(least), how, False), ()
    tried = tuple(epoch * n for n in CANDIDATES if epoch * n >= least) or (least,)
    how = (
        f"assumed: the first of {_listed(tried)} (at least {least}, by the gradients' ranks and "
        f"the last bias, {PLAIN}); {GIVE}"
    )
    return Finding("local steps", str(tried[0]), how, False), tried if len(tried) > 1 else ()


def searched_steps(
    observation: Observation,
    tried: tuple[int, ...],
    seconds: float,
) -> Finding:
    """The number of local steps whose short search leaves the least unexplained.

    Numbers are compared after equally many steps of their searches. If a search stops early, no
    number is concluded and the first one stays assumed.
    """
    search = FedAvgMatching(candidates=tried, trial=TRIAL)
    try:
        with Pace(seconds) as pace:
            plan = search.find_plan(observation, stream(0, "captured", "steps"))
    except NotApplicable as error:
        return assumed_steps(tried, f"no search among them: {error.reason}")
    if pace.cut:
        return assumed_steps(tried, "a search among them was stopped early")
    how = f"the best of {_listed(tried)} by a short search each; {GIVE}"
    return Finding("local steps", str(plan.steps), how, False)


def assumed_steps(tried: tuple[int, ...], why: str) -> Finding:
    """The first of the possible numbers of local steps, and why none was found."""
    how = f"assumed: the first of {_listed(tried)}; {why}; {GIVE}"
    return Finding("local steps", str(tried[0]), how, False)


def _moved(observation: Observation) -> int:
    """A lower bound on the steps: each moves an entry of the last bias by at most the rate."""
    try:
        layer = last_layer(observation)
    except NotApplicable:
        return 1
    if layer.bias is None or not isinstance(observation.update.law, Exact):
        return 1
    if named(observation.task.loss).name not in ("cross_entropy", "bce", "l1"):
        return 1  # a step may be of any length
    # The small number keeps rounding from adding a step.
    return max(1, math.ceil(float(layer.bias.abs().max()) - 1e-4))


def _replayed(observation: Observation) -> Finding | None:
    if observation.examples != 1 or not isinstance(observation.update.law, Exact):
        return None
    source = stream(0, "captured", "replay")
    try:
        image = LinearInversion()(observation, source)
        errors = _errors(observation, image.inputs, source)
    except NotApplicable:
        return None
    best = min(errors, key=errors.__getitem__)
    if not errors[best] <= FITS:
        return None
    how = (
        f"training on the image that the first layer reveals, replayed: this number of steps "
        f"leaves {errors[best]:.2g} of the update's norm (for SGD without momentum)"
    )
    return Finding("local steps", str(best), how, errors[best] < SURE)


def _errors(
    observation: Observation,
    image: Tensor,
    source: torch.Generator,
) -> dict[int, float]:
    """The share of the update's norm that training on the image leaves, by the number of steps."""
    task = observation.task
    seen = observation.update.rows[0]
    rate = task.plan.learning_rate
    total = torch.zeros_like(seen)
    errors = {}
    label = observation.labels
    if label is None and named(task.loss).targets in ("real", "count"):  # depends on the steps
        for count in CANDIDATES:
            trial = replace(task, plan=replace(task.plan, steps=count))
            with suppress(NotApplicable):
                label = infer("bias", replace(observation, task=trial), source)
                off = local_update(trial, image, label).detach() - seen
                errors[count] = float(off.norm() / seen.norm())
        return errors or {1: math.inf}
    label = infer("bias", observation, source) if label is None else label
    # Each turn adds one step: to begin again for each count would cost its square.
    for count in range(1, MOST_STEPS + 1):
        if is_over():
            break
        moved = task.parameters - rate * total
        total = total + gradient(task, image, label, moved).detach()
        errors[count] = float((total - seen).norm() / seen.norm())
    return errors or {1: math.inf}


def _rows_an_example(
    task: Task,
    input_shape: tuple[int, ...],
) -> dict[str, int]:
    """Linear layers whose gradient is sent, and how many rows each has per example."""
    count = 2 if task.coupled else 1  # a batch norm in training mode refuses one
    probe = probes(task, count, input_shape)
    rows = {}
    for name, module in task.model.named_modules():
        if not isinstance(module, nn.Linear) or f"{name}.weight".lstrip(".") not in task.names:
            continue
        with suppress(ValueError), torch.no_grad():  # called several times, or on no tensor
            inside = layer_inputs(task, probe, [name])[name]
            rows[name] = max(1, inside.numel() // inside.shape[-1] // count)
    return rows


def probes(
    task: Task,
    count: int,
    input_shape: tuple[int, ...],
) -> Tensor:
    """Valid inputs (count, *S) that have nothing to do with the client's: a ramp, random tokens."""
    domain = task.domain
    if domain is not None and not domain.dtype.is_floating_point:
        return domain.start(count, stream(0, "captured", "probe")).to(task.parameters.device)
    low, high = task.input_range
    ramp = torch.linspace(low, high, count * math.prod(input_shape))
    return ramp.reshape(count, *input_shape).to(task.parameters)


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
