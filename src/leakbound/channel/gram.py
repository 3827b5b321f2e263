"""Inner products of clipped per-example gradients, the input of `bounds.known_model`."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from leakbound import check
from leakbound.client import rows
from leakbound.core import Batch, Task, Unit
from leakbound.defenses.dp_sgd import clip_rows
from leakbound.engines.examples import gram as products
from leakbound.engines.sensitivity import example_gradients, example_products

MOST_BYTES = 1_500_000_000
"""Memory for the gradients of all examples and their products."""
PART_BYTES = 1 << 25


def clipped_gram(
    task: Task,
    batch: Batch,
    clip_norm: float,
    *,
    within_labels: bool = False,
) -> NDArray[np.float64]:
    """Inner products (n, n) of the clipped gradients of n examples, over the squared clip norm.

    Every example's gradient is clipped as in `ClipExamples`; a gradient that is not finite adds
    nothing. Products are summed in float64.

    Args:
        task: the model at its weights, with a local plan of one step.
        batch: the n examples.
        clip_norm: C, the largest L2 norm of one example's gradient, in gradient units.
        within_labels: leave products of examples with different labels at 0, which saves time.

    Raises:
        ValueError: the examples do not fit into 1.5 GB, the clip norm is not above 0, gradients
            have 16 bits, the local plan has several steps, or the model couples the examples.

    Example:
        >>> task = Task.of(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)))
        >>> found = clipped_gram(task, Batch(torch.eye(4)[:2], torch.tensor([0, 0])), 1e-6)
        >>> found.shape, [round(float(norm), 4) for norm in found.diagonal()]
        ((2, 2), [1.0, 1.0])
    """
    check.positive(clip_norm=clip_norm)
    fit = most_examples(task)
    n = batch.size
    if n > fit:
        raise ValueError(
            f"batch holds {n} examples; the gradients of {fit} fit into {MOST_BYTES / 1e9:g} GB, "
            f"at {len(task.parameters):,} weights; give at most {fit}"
        )
    # In 16 bits a norm is known to three digits only, and a clipped one may exceed C.
    if task.parameters.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"the model has weights of type {task.parameters.dtype}, in which norms are too coarse "
            "for clipping; convert it to float32"
        )
    gram = torch.zeros(n, n, dtype=torch.float64)
    labels = batch.labels.cpu().reshape(n, -1) if within_labels else torch.zeros(n, 1)
    group = torch.unique(labels, dim=0, return_inverse=True)[1]
    for place in [(group == k).nonzero()[:, 0] for k in range(int(group.max()) + 1)]:
        block = _products(task, Batch(batch.inputs[place], batch.labels[place]), clip_norm)
        gram[place[:, None], place] = block.cpu() / clip_norm**2
    return np.asarray(gram.numpy(), np.float64)


def most_examples(task: Task) -> int:
    """The largest number of examples that `clipped_gram` accepts for this model, by its memory.

    Example:
        >>> most_examples(Task.of(torch.nn.Linear(784, 10)))
        11870
    """
    # n gradients and n x n products: the root of 8 n^2 + row n = MOST_BYTES.
    row = len(task.parameters) * task.parameters.element_size()
    return int((math.sqrt(row**2 + 32 * MOST_BYTES) - row) / 16)


def _products(
    task: Task,
    batch: Batch,
    clip_norm: float,
) -> torch.Tensor:
    """Inner products (n, n) of the clipped gradients, float64."""
    # Each example is released in some batch: how the plan cuts batches does not matter.
    whole = replace(task, plan=replace(task.plan, batch_size=None))
    gram = None
    if whole.plan.is_gradient and not whole.coupled:
        gram = example_products(whole, batch.inputs, batch.labels)
    if gram is None:
        return products(_clipped(whole, batch, clip_norm))
    squares = gram.diagonal().clone()
    shrink = (clip_norm / squares.sqrt()).clamp(max=1.0)
    sent = squares < torch.finfo(task.parameters.dtype).max  # as the defense's link clips
    return torch.where(sent[:, None] & sent, gram * (shrink[:, None] * shrink), 0.0)


def _clipped(
    whole: Task,
    batch: Batch,
    clip_norm: float,
) -> torch.Tensor:
    """The clipped gradients (n, P), on the CPU."""
    sent = torch.empty(
        batch.size,
        len(whole.parameters),
        dtype=whole.parameters.dtype,
    )
    size = max(1, PART_BYTES // (4 * len(whole.parameters) * whole.parameters.element_size()))
    for start in range(0, batch.size, min(size, 256)):
        part = slice(start, start + min(size, 256))
        arguments = whole, batch.inputs[part], batch.labels[part]
        grads = rows(*arguments, Unit.EXAMPLE, example_gradients)
        grads[~grads.sum(1).isfinite()] = 0.0  # faster than each number; clipping removes overflows
        sent[part] = clip_rows(grads, clip_norm).cpu()
    return sent
