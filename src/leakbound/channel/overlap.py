"""Overlaps of releases at two images a step apart: tensors in, numbers out.

What the Weiss-Weinstein bound averages. No derivative with respect to the inputs is taken, so that
non-smooth activations, jumps and thresholds of the release count as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from leakbound.channel.fisher import CHUNK_BYTES, Array, Channel
from leakbound.types import Batch, NotApplicable


def overlaps(channel: Channel, drawn: Iterable[Batch], basis: Tensor | None, steps: Any) -> Array:
    """exp(-|S^-1 (g(x + h u / 2) - g(x - h u / 2))|^2 / 8), noise of covariance S S^T.

    Cost: 2 r S releases without noise for each batch, many at a time.

    Args:
        channel: what is sent; its noise must not depend on the batch.
        drawn: n independent batches of the prior, all inputs of a batch together being x.
        basis: (m, r) orthonormal directions u as columns; None for the m inputs themselves.
        steps: (r, S), input units, as `weiss_weinstein.default_steps` gives.

    Returns:
        (n, r, S), in [0, 1]. Rounding in the releases makes overlaps smaller, as noise would.

    Raises:
        NotApplicable: as `Channel`; or the noise depends on the batch.
        ValueError: steps that do not fit, no batch at all.

    Source: Weiss and Weinstein, IEEE Trans. IT 31(5), 1985; the Bhattacharyya coefficient of two
        Gaussians with one covariance.
    """
    sizes = np.asarray(steps, dtype=np.float64)
    rows = [_of_batch(channel, batch, basis, sizes) for batch in drawn]
    if not rows:
        raise ValueError("drawn holds no batch; give at least four for a bound")
    return np.stack(rows)


def _of_batch(channel: Channel, batch: Batch, basis: Tensor | None, steps: Array) -> Array:
    inputs, labels = batch.inputs, batch.labels
    if channel.variance(inputs, labels) is not None:
        raise NotApplicable("the noise depends on the batch; the overlaps are for public noise")
    total = inputs.numel()
    frame = torch.eye(total).to(inputs) if basis is None else basis.to(inputs)
    if steps.ndim != 2 or frame.shape != (total, len(steps)):
        raise ValueError(f"steps {steps.shape} and basis {tuple(frame.shape)} do not fit {total}")

    sizes = torch.as_tensor(steps).to(inputs)
    pairs = torch.cartesian_prod(*(torch.arange(count) for count in steps.shape))
    width = 32 * (len(channel.task.parameters) + total) * inputs.element_size()
    found = []
    for part in torch.split(pairs, max(1, min(32, CHUNK_BYTES // width))):
        which, at = part.unbind(1)
        moves = (frame.T[which] * sizes[which, at][:, None] / 2).reshape(-1, *inputs.shape)
        with torch.no_grad():
            ends: Tensor = vmap(partial(channel.expected, labels=labels))(
                torch.cat([inputs + moves, inputs - moves])
            )
            change = channel.whiten(ends[: len(part)] - ends[len(part) :], inputs, labels)
        found.append(torch.exp(-change.double().square().sum(1) / 8))
    shares: Array = torch.cat(found).reshape(steps.shape).cpu().numpy()
    return shares
