"""Prior-only baselines: answers that ignore the update. An attack has to beat them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leakbound.attacks.base import Attack, boxed
from leakbound.core import Batch, NotApplicable, Observation, Reconstruction, Task

MISSING = "there are no public images to average; give public images"
VANISHED = "gradient vanished: the update is zero everywhere"


def gray(observation: Observation, problem: str = VANISHED) -> Reconstruction:
    """The middle of the input range, where the update shows nothing."""
    nothing = torch.full(observation.batch_shape, math.nan).to(observation.update.rows)
    return Reconstruction(boxed(nothing, observation.task), problem=problem)


def public_examples(
    observation: Observation,
    *,
    fitting: bool = True,
) -> Batch | None:
    """Public examples: the attacker's own, otherwise those that came with the task.

    If `fitting`, only of the shape of the client's own.
    """
    public = observation.auxiliary or observation.task.public
    if public is None or (fitting and tuple(public.inputs.shape[1:]) != observation.input_shape):
        return None
    return public


def public_images(observation: Observation) -> Tensor | None:
    """Public images (n, *S) of any shape, as `public_examples` finds them."""
    public = public_examples(observation, fitting=False)
    return None if public is None else public.inputs


def answered(
    observation: Observation,
    task: Task,
    inputs: Tensor,
    problem: str | None = None,
    *,
    labels: Tensor | None = None,
    objective: float = math.nan,
    trace: tuple[float, ...] = (),
) -> Reconstruction:
    """Numbers for all inputs as an answer in the task's range; an update of zeros is a problem.

    Without `labels`, the inputs may be in any order.
    """
    if not observation.update.rows.any():
        problem = VANISHED
    inputs = inputs.to(observation.update.rows).reshape(observation.batch_shape)
    return Reconstruction(boxed(inputs, task), labels, objective, trace, problem)


@dataclass(frozen=True)
class ConstantImage(Attack):
    """Answer one gray value everywhere, independent of the update.

    Args:
        value: the gray value, moved into the input range. None: the mean of all public pixels,
            which minimizes the mean squared error over public images. A value of 0 beats the
            unbiased estimator of a linear trap if N noise^2 > 1.

    Raises:
        NotApplicable: `value` is None and there are no public images.

    Source: this project, as a baseline.

    Example:
        >>> import leakbound as lb
        >>> model = lb.models.mlp(input_shape=(1, 4, 4), classes=3, generator=lb.stream(0, "model"))
        >>> batch = torch.linspace(0, 1, 16).reshape(1, 1, 4, 4), torch.tensor([2])
        >>> lb.simulate(model, batch, attack=ConstantImage(0.25)).reconstruction.unique()
        tensor([0.2500])
    """

    value: float | None = None

    def __post_init__(self) -> None:
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"value is {self.value!r}; give a finite number or None")

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        value = self.value
        if value is None:
            public = public_images(observation)
            if public is None:
                raise NotApplicable(MISSING)
            value = float(public.double().mean())
        shape = observation.input_shape
        return _blind(
            observation,
            torch.full(shape, value, dtype=torch.float64),
        )


@dataclass(frozen=True)
class MeanImage(Attack):
    """Answer the mean public image, independent of the update: the best prior-only reconstruction.

    Of a table these are the median of each number and the most frequent levels, of a text the most
    frequent token of each place.

    Raises:
        NotApplicable: there are no public images of the input's shape.

    Source: this project, as a baseline.

    Example:
        >>> import leakbound as lb
        >>> model = lb.models.mlp(input_shape=(1, 4, 4), classes=3, generator=lb.stream(0, "model"))
        >>> batch = lb.Batch(torch.linspace(0, 1, 16).reshape(1, 1, 4, 4), torch.tensor([2]))
        >>> result = lb.simulate(model, batch, attack=MeanImage(), public=batch)
        >>> torch.equal(result.reconstruction, batch.inputs)  # the mean of one public image
        True
    """

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        public = public_images(observation)
        if public is None:
            raise NotApplicable(MISSING)
        if tuple(public.shape[1:]) != observation.input_shape:
            raise NotApplicable("the public images and the input differ in shape")
        domain = observation.task.domain
        # The mean minimizes the mean squared error alone; other distances have other minimizers.
        if domain is not None and not domain.distance_is_rmse:
            return _blind(observation, domain.blind(public))
        return _blind(observation, public.double().mean(0))


def _blind(observation: Observation, image: Tensor) -> Reconstruction:
    inputs = image.expand(observation.batch_shape).clone()
    return answered(
        observation,
        observation.task,
        inputs,
        labels=observation.labels,
    )
