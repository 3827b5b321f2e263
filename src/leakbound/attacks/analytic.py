"""Closed-form inversion of a biased linear layer whose input is the flattened example."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from leakbound import check
from leakbound._util import copies
from leakbound.attacks.adaptive import Step, step_rows, undone
from leakbound.attacks.base import Attack, boxed, modules_of, parameter, seen_by, seen_task
from leakbound.attacks.blind import answered, gray, public_images
from leakbound.core import NotApplicable, Observation, Reconstruction, Task
from leakbound.engines.path import NoPath, Path, path_to

SAME = 1e-3
ROUNDS = 50
NOISY = 0.1


@dataclass(frozen=True)
class LinearInversion(Attack):
    """Compute the input from the gradient of the first linear layer.

    Row i of dL/dW is dL/db_i times the input. For one example, the attack fits [dW | db] by an
    outer product. The fit is exact without noise and is the maximum-likelihood estimate under
    Gaussian noise with a known distribution. Withheld coordinates are left out.

    For several examples, a row that only one example activates gives that example exactly; the
    other rows give mixtures. Candidates dW_i / db_i that are valid inputs are ranked by how many
    rows agree on them, then by |db_i|. The known noise level decides which rows are used and which
    agree. Rows that agree are averaged. Of a table, the prior-only baseline fills the rest.

    Args:
        tolerance: how far outside the input range, in units of its width, a candidate may lie.

    A model may reorder the example, or multiply its values by constants and add constants, before
    the layer: this is undone.

    One step of Adam, AdamW, RMSprop or Adagrad is undone as far as the optimizer's epsilon shows
    sizes of gradients (`leakbound.attacks.adaptive.undone`).

    Assumptions: a linear layer with a bias has the flattened example as its input, or such a
        function of it.

    Raises:
        NotApplicable: there is no such layer.

    Source: Phong et al. 2018; Geiping et al. 2020, proposition 3.1.

    Example:
        >>> import leakbound as lb
        >>> model = lb.models.mlp(input_shape=(1, 4, 4), classes=3, generator=lb.stream(0, "model"))
        >>> batch = torch.linspace(0, 1, 16).reshape(1, 1, 4, 4), torch.tensor([2])
        >>> lb.simulate(model, batch, attack=LinearInversion()).scores[0] > 80
        True
    """

    tolerance: float = 0.05

    def __post_init__(self) -> None:
        check.non_negative(tolerance=self.tolerance)

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        sent = observation
        observation = undone(sent)
        task = seen_task(observation)
        name, path = first_layer(task, observation.input_shape)
        if observation.examples == 1 and path is None and not seen_task(sent).plan.is_sum:
            image = _behind_step(sent, name)
            if image is not None:
                return answered(observation, task, image, labels=observation.labels)
        weight, bias = layer_part(task, observation.update.rows.sum(0), name)
        trust = observation.weights
        if trust is None:
            trust = torch.ones_like(observation.update.rows)
        kept, bias_kept = layer_part(task, trust.amax(0), name)
        if path is not None:
            weight = path.back(weight, bias)
            # Trust is 1 / standard deviation, and the path spreads variances.
            kept = path.spread(kept**-2, bias_kept**-2).rsqrt()
        bias = bias * (bias_kept > 0)
        if not bias.any():
            reason = "gradient vanished: the layer's bias gradient is zero everywhere"
            return replace(gray(observation, reason), labels=observation.labels)
        if observation.examples == 1:
            joint = torch.cat([weight, bias[:, None]], 1)
            image, left = _rank_one(joint, torch.cat([kept, bias_kept[:, None]], 1))
            problem = None
            if left > _left_by_noise(joint.shape):
                problem = "objective did not fall: the layer's gradient looks like noise alone"
            labels = observation.labels
            return answered(
                observation,
                task,
                image,
                problem,
                labels=labels,
                objective=left,
            )
        known = (kept > 0) & (bias_kept[:, None] > 0)
        error = torch.zeros_like(bias)
        noise = observation.noise_variance
        if noise is not None:
            spread, bias_spread = layer_part(task, noise.sum(0), name)
            spread = spread if path is None else path.spread(spread, bias_spread)
            error = ((spread.mean(1) + bias_spread).sqrt() / bias.abs()).to(bias)
        return self._separate(observation, task, weight, bias, known, error)

    def _separate(
        self,
        observation: Observation,
        task: Task,
        weight: Tensor,
        bias: Tensor,
        known: Tensor,
        error: Tensor,
    ) -> Reconstruction:
        """Rank the rows' candidates; `error` (h,) is the expected error of each, per pixel."""
        low, high = task.input_range
        width = high - low
        # A unit that is off has no gradient: its quotient is rounding.
        rows = (bias.abs() > 1e-6 * bias.abs().max()) & (error < NOISY * width)
        images = torch.where(known[rows], weight[rows], 0) / bias[rows, None]
        error = error[rows]
        strength = bias[rows].abs()
        # Four standard deviations: noise may push a valid input out of the range.
        slack = self.tolerance * width + 4 * error[:, None]
        valid = boxed(images.reshape(len(images), *observation.input_shape), task)
        if task.domain is not None:  # a mixture of categories is no row of a table
            valid = task.domain.hard(valid)
        inside = ((images - valid.reshape(images.shape)).abs() <= slack).all(1)
        images = images[inside]
        error = error[inside]
        strength = strength[inside]
        # The difference of two noisy rows has the sum of their variances.
        same = SAME * width + 1.2 * (error.square()[:, None] + error.square()).sqrt()
        chosen, agreed = _agreed(images, strength, observation.examples, same, bool(error.any()))
        answer = weight.new_full((observation.examples, weight.shape[1]), float("nan"))
        if task.domain is not None:
            answer[:] = task.domain.blind(public_images(observation)).flatten().to(answer)
        answer[: len(chosen)] = chosen
        problem = None
        if len(chosen) < observation.examples:
            problem = f"only {len(chosen)} of {observation.examples} inputs could be separated"
        elif not agreed:
            problem = "no two rows agree on an input: all candidates may be mixtures"
        elif agreed < len(chosen):
            problem = f"two rows agree on {agreed} of {len(chosen)} inputs: others may be mixtures"
        return answered(observation, task, answer, problem)


def _behind_step(observation: Observation, name: str) -> Tensor | None:
    """The input (D,) of a layer in one step of an adaptive optimizer; None where it is no outer
    product: SGD with decay, or decay that was divided with the gradient.
    """
    task = seen_task(observation)
    plan = task.plan
    if plan.optimizer == "sgd" or (plan.weight_decay > 0 and not plan.decoupled):
        return None
    step = Step.of(task, step_rows(observation).sum(0))
    weight, bias = _names(name)

    def layer(flat: Tensor) -> Tensor:
        parts = task.unflatten(flat)
        return torch.cat([parts[weight], parts[bias][:, None]], 1)

    rest, error, signs = map(layer, (step.rest, step.error, step.signs))
    limit = max(map(abs, task.input_range))
    return Step(rest, error, signs, step.keep, step.added).outer(limit)


def input_layer(task: Task, input_shape: tuple[int, ...]) -> str:
    """The first trained linear layer with a bias whose input is the flattened example."""
    low, high = task.input_range
    size = math.prod(input_shape)
    layers = [
        name
        for name, layer in modules_of(task, nn.Linear).items()
        if layer.bias is not None and layer.in_features == size
    ]
    if not layers:  # known without a copy of a large model
        raise NotApplicable("no linear layer with a bias sees the input")
    # All values differ, so that another order of them is seen.
    probe = torch.linspace(low, high, 2 * size).reshape(2, *input_shape).to(task.parameters)
    # A copy: a client may train the model at the same time.
    apart = replace(task, model=copies.duplicate(task.model))
    with torch.no_grad():
        seen = seen_by(apart, layers, probe)
    readers = [
        name
        for name, values in seen.items()
        if values is not None and torch.equal(values, probe.flatten(1))
    ]
    sent = [name for name in readers if {*_names(name)} <= task.names]
    if readers and not sent:
        computed = not {*_names(readers[0])} <= task.buffers.keys() | task.names
        why = "is computed from other weights" if computed else "is frozen"
        raise NotApplicable(
            f"the linear layer {readers[0]!r} sees the input, but its weight or bias {why}: the "
            "client does not send its gradient"
        )
    if not readers:
        raise NotApplicable("no linear layer with a bias sees the input")
    return sent[0]


def first_layer(
    task: Task,
    input_shape: tuple[int, ...],
) -> tuple[str, Path | None]:
    """The first trained linear layer with a bias that gets the example, and the path to it.

    None: it gets the flattened example itself, as far as `input_layer` sees. With a path it gets
    the values in another order, or each scaled and shifted by constants.

    Raises:
        NotApplicable: there is none.
    """
    try:
        return input_layer(task, input_shape), None
    except NotApplicable:
        size = math.prod(input_shape)
        for name, layer in task.model.named_modules():
            fits = isinstance(layer, nn.Linear) and layer.in_features == size
            if fits and {*_names(name)} <= task.names:
                with suppress(NoPath):
                    return name, path_to(task, input_shape, name)
        raise


def _names(name: str) -> tuple[str, str]:
    return parameter(name, "weight"), parameter(name, "bias")


def layer_part(
    task: Task,
    row: Tensor,
    name: str,
) -> tuple[Tensor, Tensor]:
    """A layer's weight and bias in a flat vector (P,)."""
    parts = task.unflatten(row)
    weight, bias = _names(name)
    return parts[weight], parts[bias]


def _rank_one(joint: Tensor, trust: Tensor) -> tuple[Tensor, float]:
    """The input x of the best fit u [x | 1] to `joint` (h, D + 1), and the share it leaves
    unexplained, by alternating weighted least squares from u = db (with equal weights, power
    iteration).
    """
    seen = joint.double()
    weight = trust.double().square()
    held = weight * seen
    # The last column is the bias gradient: up to noise it is the answer.
    u = seen[:, -1]
    tiny = 1e-300
    for _ in range(ROUNDS):
        v = (u @ held) / (u.square() @ weight).clamp_min(tiny)
        u = (held @ v) / (weight @ v.square()).clamp_min(tiny)
    left = (weight * (seen - u[:, None] * v).square()).sum() / (held * seen).sum().clamp_min(tiny)
    return v[:-1] / v[-1], float(left.sqrt())


def _left_by_noise(shape: torch.Size) -> float:
    """The share of pure noise that the best rank-one fit leaves unexplained, minus a margin."""
    rows, columns = shape
    explained = (rows**0.5 + columns**0.5) ** 2 / (rows * columns)
    return float((1 - min(0.5, 1.2 * explained)) ** 0.5)


def _agreed(
    images: Tensor,
    strength: Tensor,
    count: int,
    same: Tensor,
    noisy: bool,
) -> tuple[Tensor, int]:
    """Up to `count` distinct candidates, those with most agreement first, and on how many of them
    two rows agree. `same` (n, n) is the largest distance between two rows of one input. Noisy rows
    are averaged.
    """
    if len(images) == 0:
        return images, 0
    distance = torch.cdist(images.double(), images.double()) / images.shape[1] ** 0.5
    agree = distance < same
    support = agree.sum(1)
    # A mixture agrees with no other row; an example often does.
    order = sorted(range(len(images)), key=lambda i: (-int(support[i]), -float(strength[i])))
    chosen: list[int] = []
    for i in order:
        if not any(bool(agree[i, j]) for j in chosen):
            chosen.append(i)
        if len(chosen) == count:
            break
    pairs = int((support[chosen] > 1).sum())
    if not noisy:
        return images[chosen], pairs
    # The error of a quotient dW / db falls as 1 / |db|: these are inverse variances.
    share = agree[chosen] * strength.square()
    return (share @ images) / share.sum(1, keepdim=True), pairs
