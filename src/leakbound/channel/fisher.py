"""Fisher information of a release about its inputs: tensors in, numbers out.

J is the Jacobian of the defense's noise-free output. J_F(x) = Jᵀ Σ⁻¹ J for Gaussian noise of
covariance Σ. If Σ depends on the batch, the pattern of the noise leaks too: ½ Σ_i ∇log Σ_ii
∇log Σ_iiᵀ is added, which no noise level reduces. The gradient of a non-smooth model (ReLU, max
pools) is discontinuous, and what the discontinuities leak is not in J (see `smoothness`). So a
bound from J is proven for smooth models only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import jvp, vmap

from leakbound.client import pure_simulate
from leakbound.core import (
    Batch,
    DefenseProtocol,
    Gaussian,
    Law,
    NotApplicable,
    Task,
    Unit,
    Unknown,
    Update,
)
from leakbound.covariance import Structured
from leakbound.engines.sensitivity import example_changes, example_gradients, moved
from leakbound.randomness import Source, normal

Array = NDArray[np.float64]
CHUNK_BYTES = 1 << 28
MOST_BYTES = 1 << 31
STRANGE = 6.0
"""Standard deviations by which the noise's power may differ from the distribution's."""


@dataclass(frozen=True, eq=False)
class Channel:
    """One client's release as a function of its inputs, and the distribution of its noise.

    Attributes:
        task: the model; the client's model if a defense changes the local training.
        defense: resolved, for one client; None for the plain gradient.
        law: the noise distribution of one update of this kind.
        mask: (1, P) the sent coordinates, if there is a mask.
        mask_private: the mask was chosen from the batch.

    Raises:
        NotApplicable: there is no noise (the information is infinite), the distribution is not
            Gaussian or not known, private data chose the mask, or there are several rows.
    """

    task: Task
    defense: DefenseProtocol | None
    law: Law
    mask: Tensor | None = None
    mask_private: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.law, Unknown):
            raise NotApplicable(f"the noise distribution is not known: {self.law.reason}")
        if not isinstance(self.law, Gaussian):
            raise NotApplicable(
                "the release has no Gaussian noise, so it does not bound an attacker's Fisher "
                "information"
            )
        if self.mask_private:
            raise NotApplicable("which coordinates are sent depends on private data, and leaks it")
        if self.law.private and (self.defense is None or not self.defense.data_dependent_law):
            raise NotApplicable("the noise depends on private data in a way that is not known")

    def expected(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The noise-free release (P,)."""
        return self._seen(pure_simulate(self.task, inputs, labels, self.defense))

    def _value(self, batch: Batch) -> Tensor:
        """As `expected`, but not differentiable."""
        arguments = batch.inputs, batch.labels, self.defense
        return self._seen(pure_simulate(self.task, *arguments, example_gradients)).detach()

    def _seen(self, rows: Tensor) -> Tensor:
        if rows.shape[-2] != 1:
            raise NotApplicable(f"the release has {rows.shape[-2]} rows; bounds are for one row")
        return rows[..., 0, :] if self.mask is None else rows[..., 0, :] * self.mask[0]

    def variance(self, inputs: Tensor, labels: Tensor) -> Tensor | None:
        """(P,) the variances that depend on the batch, differentiable; None if they do not."""
        assert isinstance(self.law, Gaussian)  # checked when it was built
        if not self.law.private or self.defense is None:
            return None
        variance = self.defense.noise_variance(self.task, inputs, labels)
        if variance is None:
            raise NotApplicable("the noise depends on private data in a way that is not known")
        if bool((variance <= 0).any()):
            raise NotApplicable(
                "which coordinates get no noise depends on private data, and leaks it"
            )
        return variance

    def log_variance(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The logarithm of `variance`, if there is one."""
        variance = self.variance(inputs, labels)
        assert variance is not None  # called only if the noise depends on the batch
        return variance.log()

    def whiten(
        self,
        rows: Tensor,
        inputs: Tensor,
        labels: Tensor,
    ) -> Tensor:
        """Rows (R, P) over the noise's standard deviation; must be 0 in places without noise."""
        assert isinstance(self.law, Gaussian)  # as above
        covariance = self.law.covariance
        if isinstance(covariance, Structured):
            return covariance.whiten(rows)
        var = self.variance(inputs, labels)
        spread = torch.as_tensor(covariance if var is None else var.detach()).to(rows).sqrt()
        spread = spread.expand_as(rows)
        if bool((rows[spread == 0] != 0).any()):
            raise NotApplicable("some coordinate that depends on the inputs has no noise")
        return torch.where(spread > 0, rows / spread.clamp_min(1e-30), 0)


def strange_power(
    channel: Channel,
    update: Update,
    batch: Batch,
) -> float | None:
    """Excess mean power of the sent update, relative to the noise's; None if it fits.

    A defense that imitates itself by something smoother (for a sign, say) would get the bound of
    this approximation. Over many coordinates the noise's mean power is known to a few percent.
    """
    rows = update.rows - channel._value(batch)
    if update.mask is not None:
        rows = rows * update.mask
    white = channel.whiten(rows, batch.inputs, batch.labels).double()
    count = max(1, int((white != 0).sum()))
    power = float(white.square().sum()) / count
    # The mean of this many squared normal numbers has variance 2 / count.
    return power if abs(power - 1) > STRANGE * (2 / count) ** 0.5 else None


def fisher_matrix(
    channel: Channel,
    batch: Batch,
    basis: Tensor | None = None,
) -> Array:
    """J_F(x) of one batch, dense: (m, m), or (k, k) along the columns of a basis; float64.

    Shapes:
        m is the number of inputs' entries, all images together; basis (m, k).

    Raises:
        NotApplicable: as `Channel`; or it would need more than 2 GiB (use a basis of fewer
            columns).

    Source: Chen, Gursoy and Lei, lemma A.1; the variance term: docs/errata.md, A12.
    """
    total = batch.inputs.numel()
    count = total if basis is None else basis.shape[1]
    width = len(channel.task.parameters)
    need = count * width * 8
    if need > MOST_BYTES:
        raise NotApplicable(f"the Jacobian takes {need / 2**30:.1f} GiB; take fewer directions")
    # One direction at a time, many in a chunk: the whole Jacobian is never differentiated at once.
    frame = torch.eye(total).to(batch.inputs) if basis is None else basis.to(batch.inputs)
    changes = []
    patterns = []
    for part in torch.split(frame.T, _chunk(width, batch.inputs)):
        mean, pattern = _moved(channel, batch, part.reshape(-1, *batch.inputs.shape))
        changes.append(channel.whiten(mean, batch.inputs, batch.labels).double())
        if pattern is not None:
            patterns.append(pattern.double())
    whole = torch.cat(changes)
    information = whole @ whole.T
    if patterns:
        pattern = torch.cat(patterns)
        information = information + 0.5 * (pattern @ pattern.T)
    return cast(Array, ((information + information.T) / 2).cpu().numpy())


def fisher_trace(
    channel: Channel,
    batch: Batch,
    source: Source,
    *,
    directions: int = 2,
    basis: Tensor | None = None,
) -> float:
    """An unbiased estimate of tr J_F(x), or of tr Bᵀ J_F(x) B, from random directions."""
    count = batch.inputs.numel() if basis is None else basis.shape[1]
    draws = normal((directions, count), source, like=batch.inputs)
    if basis is not None:
        draws = draws @ basis.to(draws).T
    total = 0.0
    chunk = _chunk(len(channel.task.parameters), batch.inputs)
    for part in torch.split(draws, chunk):
        mean, pattern = _moved(channel, batch, part.reshape(-1, *batch.inputs.shape))
        white = channel.whiten(mean, batch.inputs, batch.labels)
        total += float(white.square().double().sum())
        if pattern is not None:
            total += 0.5 * float(pattern.square().double().sum())
    return total / directions


def _moved(
    channel: Channel,
    batch: Batch,
    directions: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Changes (k, P) of the noise-free release and of the log variances along directions."""
    mean = _mean_moved(channel, batch, directions)
    if channel.variance(batch.inputs, batch.labels) is None:
        return mean, None
    pattern = partial(channel.log_variance, labels=batch.labels)
    slopes = [jvp(pattern, (batch.inputs,), (d,))[1] for d in directions]
    return mean, torch.stack(slopes)


def _mean_moved(
    channel: Channel,
    batch: Batch,
    directions: Tensor,
) -> Tensor:
    task = channel.task
    defense = channel.defense
    count = len(directions)
    inputs = batch.inputs
    labels = batch.labels
    if defense is not None and defense.starts is Unit.EXAMPLE:
        rows = example_gradients(task, inputs, labels)
        again = torch.arange(len(inputs)).repeat(count)
        each = example_changes(task, inputs[again], labels[again], directions.flatten(0, 1))
        changes = each.view(count, len(inputs), -1) * (1 if task.kept is None else task.kept)
    elif task.plan.is_gradient and task.plan.batch_size is None:
        rows, changes = (part.unsqueeze(-2) for part in moved(task, inputs, labels, directions))
    else:
        of = partial(channel.expected, labels=labels)
        return vmap(lambda way: cast(Tensor, jvp(of, (inputs,), (way,))[1]))(directions)
    if defense is not None:
        alone, together = defense.sides
        sent = lambda point: together.imitate(alone.imitate(point))  # noqa: E731
        changes = vmap(lambda way: cast(Tensor, jvp(sent, (rows,), (way,))[1]))(changes)
    return channel._seen(changes)


def _chunk(width: int, like: Tensor) -> int:
    return max(1, min(64, CHUNK_BYTES // (16 * width * like.element_size())))


def overlaps(
    channel: Channel,
    drawn: Iterable[Batch],
    basis: Tensor | None,
    steps: Any,
) -> Array:
    """exp(-|S^-1 (g(x + h u / 2) - g(x - h u / 2))|^2 / 8), noise of covariance S S^T.

    Cost: 2 r S releases without noise for each batch, many at a time.

    Args:
        channel: what is sent; its noise must not depend on the batch.
        drawn: n independent batches of the prior, all inputs of a batch together being x.
        basis: (m, r) orthonormal directions u as columns; None for the m inputs themselves.
        steps: (r, S), input units, as `weiss_weinstein.default_steps` returns them.

    Returns:
        (n, r, S), in [0, 1]. Rounding in the releases makes overlaps smaller, as noise would.

    Raises:
        NotApplicable: as `Channel`; or the noise depends on the batch.
        ValueError: steps do not fit, or there is no batch.

    Source: Weiss and Weinstein, IEEE Trans. IT 31(5), 1985; the Bhattacharyya coefficient of two
        Gaussians with one covariance.
    """
    sizes = np.asarray(steps, dtype=np.float64)
    rows = [_of_batch(channel, batch, basis, sizes) for batch in drawn]
    if not rows:
        raise ValueError("drawn holds no batch; give at least four for a bound")
    return np.stack(rows)


def _of_batch(
    channel: Channel,
    batch: Batch,
    basis: Tensor | None,
    steps: Array,
) -> Array:
    inputs = batch.inputs
    labels = batch.labels
    if channel.variance(inputs, labels) is not None:
        raise NotApplicable("the noise depends on the batch; the overlaps are for public noise")
    total = inputs.numel()
    frame = torch.eye(total).to(inputs) if basis is None else basis.to(inputs)
    if steps.ndim != 2 or frame.shape != (total, len(steps)):
        raise ValueError(f"steps {steps.shape} and basis {tuple(frame.shape)} do not fit {total}")

    sizes = torch.as_tensor(steps).to(inputs)
    pairs = torch.cartesian_prod(*(torch.arange(count) for count in steps.shape))
    width = 32 * (len(channel.task.parameters) + total) * inputs.element_size()
    overlaps = []
    for part in torch.split(pairs, max(1, min(32, CHUNK_BYTES // width))):
        which, at = part.unbind(1)
        moves = (frame.T[which] * sizes[which, at][:, None] / 2).reshape(-1, *inputs.shape)
        with torch.no_grad():
            ends: Tensor = vmap(partial(channel.expected, labels=labels))(
                torch.cat([inputs + moves, inputs - moves])
            )
            change = channel.whiten(ends[: len(part)] - ends[len(part) :], inputs, labels)
        overlaps.append(torch.exp(-change.double().square().sum(1) / 8))
    return cast(Array, torch.cat(overlaps).reshape(steps.shape).cpu().numpy())
