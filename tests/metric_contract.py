"""The contract of a metric: one number per image, and a direction that is true."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import torch

from leakbound.core import Batch
from leakbound.metrics import Metric, Values
from leakbound.pairing import Paired
from leakbound.randomness import normal, permutation, stream, uniform
from leakbound.testing.common import CLASSES, ContractError, check_settings, require, same_bits

LEVELS = (0.0, 0.1, 0.3, 1.0, 1000.0)
"""Standard deviations of the noise; the last hides every image and is only compared to none."""

SIZES = ((12, 1, 16, 16), (2, 1, 180, 180))


def check_metric(metric: Metric) -> None:
    """Check that a metric keeps its contract; `ContractError` states the first violation.

    One number or None per image. Missing labels and tiny images are no error. A
    perfect reconstruction is best; more noise (and more wrong labels) is never better on average;
    the most noise is worse. A permuted batch permutes the values. Nothing is written to.
    """
    name = f"metric {metric.name!r}"
    check_settings(metric, name)
    for shape in ((3, 1, 2, 2), (1, 3, 5, 7)):
        for labels in (True, False):
            _values(metric, _noisy(shape, 0.3, labels=labels), name)
    defined = [_check_order(metric, shape, name) for shape in SIZES]
    require(any(defined), f"{name} has no value on images of any size that was tried")


def _check_order(metric: Metric, shape: tuple[int, ...], name: str) -> bool:
    """Whether values are defined at this size; if so, they follow the noise."""
    means, better = [], 1 if metric.higher_is_better else -1
    for level in LEVELS:
        values = _values(metric, _noisy(shape, level), name)
        known = [v for v in values if v is not None]
        if not known:
            return False
        means.append(better * math.fsum(known) / len(known))
        if level == 0:
            best = better * min(known, key=lambda v: better * v)
        ahead = max(better * v for v in known)
        require(ahead <= best + 1e-9, f"{name} gives a perfect reconstruction not the best value")
    for less, more in pairwise(means[:-1]):
        require(
            more <= less + 1e-9,
            f"{name} scores more noise better on average; higher_is_better may be wrong",
        )
    require(means[-1] < means[0], f"{name} gives a perfect reconstruction and noise the same score")
    paired = _noisy(shape, 0.3)
    values = _values(metric, paired, name)
    order = permutation(len(values), stream(0, "contract", "permute"))
    truth = Batch(paired.truth.inputs[order], paired.truth.labels[order])
    labels = None if paired.labels is None else paired.labels[order]
    turned = replace(paired, truth=truth, inputs=paired.inputs[order], labels=labels)
    moved = _values(metric, turned, name)
    same = all(_close(moved[i], values[int(j)]) for i, j in enumerate(order))
    require(same, f"{name} does not permute its values with the batch")
    return True


def _values(metric: Metric, paired: Paired, name: str) -> Values:
    kept = paired.inputs.clone(), paired.truth.inputs.clone()
    try:
        values = metric.function(paired, data_range=1.0)
    except Exception as error:
        shape = tuple(paired.inputs.shape)
        raise ContractError(f"{name} crashes on images {shape}: {error!r}") from error
    untouched = same_bits(kept[0], paired.inputs) and same_bits(kept[1], paired.truth.inputs)
    require(untouched, f"{name} wrote to the images that it was given")
    require(
        isinstance(values, list) and len(values) == len(paired.inputs),
        f"{name} returns {values!r}; give a list with one value for each image",
    )
    for value in values:
        fine = value is None or (isinstance(value, float) and math.isfinite(value))
        require(fine, f"{name} returns {value!r}; give finite floats, None where not defined")
    return values


def _noisy(shape: tuple[int, ...], level: float, *, labels: bool = True) -> Paired:
    """Random images and reconstructions with noise of that size, and labels as wrong."""
    truth = uniform(shape, stream(0, "contract", "truth")).double()
    noise = normal(shape, stream(0, "contract", "metric noise")).double()
    true_labels = torch.arange(shape[0]) % CLASSES
    wrong = (torch.arange(shape[0]) < level * shape[0]).long()
    guessed = (true_labels + wrong) % CLASSES if labels else None
    return Paired(Batch(truth, true_labels), truth + level * noise, guessed, tuple(range(shape[0])))


def _close(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
