"""The contract of a metric."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from leakbound.metrics import Metric
from leakbound.pairing import Paired, pair
from leakbound.random import normal, stream, uniform
from leakbound.testing.common import require
from leakbound.types import Batch, Reconstruction

SHAPE = (4, 1, 176, 176)
LEVELS = (0.0, 0.02, 0.1, 0.4)


def check_metric(metric: Metric) -> None:
    """Raise `ContractError` unless the metric keeps its contract.

    Guarantees checked: one number (or None) an image; the perfect reconstruction gets the best
    value; more noise never gets a better mean; permuting the images permutes the values; the same
    input gives the same value.
    """
    images = uniform(SHAPE, stream(0, "contract", "metric"))
    means, best = [], None
    for level in LEVELS:
        values = _values(metric, _noisy(images, level))
        require(len(values) == SHAPE[0], f"{metric.name} gives {len(values)} values for 4 images")
        numbers = [v for v in values if v is not None]
        require(
            all(isinstance(v, float) and v == v and abs(v) < float("inf") for v in numbers),
            f"{metric.name} gives {numbers}: numbers must be finite floats, or None",
        )
        require(bool(numbers), f"{metric.name} is not defined on images of {SHAPE[-1]} pixels")
        sign = 1.0 if metric.higher_is_better else -1.0
        means.append(sign * sum(numbers) / len(numbers))
        best = means[0] if best is None else best
    require(
        all(value <= means[0] + 1e-9 for value in means),
        f"{metric.name} rates a noisy image over the perfect one",
    )
    require(
        all(later <= earlier + 1e-9 for earlier, later in pairwise(means)),
        f"{metric.name} rates more noise better: is higher_is_better true?",
    )
    paired = _noisy(images, 0.1)
    values, again = _values(metric, paired), _values(metric, paired)
    require(values == again, f"{metric.name} gives other values for the same images")
    turned = _values(metric, _turned(paired))
    require(
        all(_near(a, b) for a, b in zip(turned, values[1:] + values[:1], strict=True)),
        f"{metric.name} does not follow its images when they are permuted",
    )


def _values(metric: Metric, paired: Paired) -> list[float | None]:
    more: dict[str, Any] = {}
    if metric.needs_distractors:
        more["distractors"] = uniform(SHAPE, stream(0, "contract", "distractors"))
    return metric.function(paired, data_range=1.0, **more)


def _noisy(images: torch.Tensor, level: float) -> Paired:
    noise = level * normal(SHAPE, stream(0, "contract", "noise"))
    labels = torch.arange(SHAPE[0])
    guess = labels if level < 0.4 else labels.flip(0)
    return pair(Batch(images, labels), Reconstruction((images + noise).clamp(0, 1), guess))


def _turned(paired: Paired) -> Paired:
    def turn(values: torch.Tensor) -> torch.Tensor:
        return values.roll(-1, 0)

    truth = Batch(turn(paired.truth.inputs), turn(paired.truth.labels))
    labels = None if paired.labels is None else turn(paired.labels)
    return Paired(truth, turn(paired.inputs), labels, paired.order)


def _near(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) <= 1e-6 * (1 + abs(b))
