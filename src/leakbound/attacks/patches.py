"""Images behind a vision transformer, from its first layers: one exactly, or a few by a search."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from leakbound import check
from leakbound.attacks.base import Attack, modules_of, seen_by, seen_task, summed
from leakbound.attacks.blind import answered
from leakbound.attacks.labels import known_or_inferred
from leakbound.attacks.pace import is_over, tick
from leakbound.client import call
from leakbound.core import Exact, NotApplicable, Observation, Reconstruction, Task
from leakbound.engines.path import unlike
from leakbound.randomness import normal, uniform

AGREES = 1e-2
NEAREST = 0.5
"""Relative differences up to which the positions' gradients add up to the patch layer's bias', and
from which they are those of something else.
"""
STEEP = 1e-5
"""Singular values of the positions' gradients below this share of the largest count as zero."""
LEFT = 1e-3
"""The share of the patch layer's gradient that an exact answer may leave."""


@dataclass(frozen=True)
class PatchInversion(Attack):
    """Solve for the patches of one image behind a vision transformer with learned positions.

    A position is added to the output of the patch layer. So its gradient is that of the output at
    this patch, whatever follows. The gradient of the patch layer's weight is the sum over patches
    of these slopes times the patches: a linear system. It has one solution while there are fewer
    patches than the width (norms take a direction), and exact gradients give the image up to
    rounding, after any number of local steps. If pixels rounded to 8 bits explain the update as
    well, they are the answer: it is then exact.

    If the model may change the image before that layer, `problem` says so.

    Assumptions: one image; a convolution whose stride is its kernel, called on the image itself; a
        trained position for each patch. Noise is amplified by the condition of the system.

    Raises:
        NotApplicable: several images, or no such layer or positions.

    Source: this project; Lu et al. 2022 (APRIL) for attention without a norm before it.

    Example:
        >>> import leakbound as lb
        >>> settings = dict(input_shape=(1, 8, 8), classes=3, generator=lb.stream(0, "model"))
        >>> model = lb.models.vit(width=16, **settings)
        >>> batch = torch.linspace(0, 1, 64).reshape(1, 1, 8, 8), torch.tensor([1])
        >>> lb.simulate(model, batch, attack=PatchInversion()).scores[0] > 60
        True
    """

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        observation = summed(observation)
        task = seen_task(observation)
        if observation.examples > 1:
            raise NotApplicable("the patches of several images add up: it is for one image")
        name, layer = patch_layer(task, observation.input_shape)
        sent = task.unflatten(observation.update.rows.sum(0).double())
        weight = sent[f"{name}.weight"].flatten(1)
        count = _places(layer, observation.input_shape)
        slopes, off = _positions(sent, f"{name}.bias", count, len(weight))
        values = torch.linalg.svdvals(slopes)
        rank = int((values > STEEP * values[0]).sum())
        # Rounding is a share of each row; noise is the same for all.
        size = weight.norm(dim=1, keepdim=True).clamp_min(1e-300)
        size = size if isinstance(observation.update.law, Exact) else torch.ones_like(size)
        patches = torch.linalg.pinv(slopes.T / size, rtol=STEEP) @ (weight / size)

        def left(patches: Tensor) -> Tensor:
            return ((slopes.T @ patches - weight) / size).norm() / (weight / size).norm()

        low, high = task.input_range
        # Images mostly have 8 bits; exact pixels remove what rounding left.
        whole = low + (high - low) * ((patches - low) / (high - low) * 255).round() / 255
        # As the client's model got the pixels: rounded to its type.
        whole = whole.to(observation.update.rows).double()
        # The patches' own fit takes up to `rank` of the rows' freedom; rounding leaves the rest.
        fair = 2 * math.sqrt(len(weight) / max(len(weight) - rank, 1))
        patches = whole if left(whole) <= fair * left(patches) else patches
        image = nn.functional.fold(
            patches.T[None], observation.input_shape[1:], layer.kernel_size, stride=layer.stride
        )
        problem = None
        share = float(left(patches))
        if rank < count:
            problem = f"the gradients of {count} positions have rank {rank}: patches are mixed"
        elif share > LEFT or off > AGREES:
            shares = f"{share:.1g} of the first layer's gradient, positions {off:.1g} of its bias'"
            problem = f"patches leave {shares}: noise"
        problem = problem or unlike(task, observation.input_shape, name)
        return answered(
            observation, task, image, problem, labels=observation.labels, objective=share
        )


def patch_layer(task: Task, shape: tuple[int, ...]) -> tuple[str, Any]:
    """The convolution over separate patches that the model calls on the image itself."""
    low, high = task.input_range
    probe = torch.linspace(low, high, math.prod(shape)).reshape(1, *shape).to(task.parameters)
    layers = modules_of(task, nn.Conv2d)
    with torch.no_grad():
        seen = seen_by(task, layers, probe)
    kept = [
        name
        for name, values in seen.items()
        if values is not None
        and torch.equal(values, probe)
        and layers[name].kernel_size == layers[name].stride
        and layers[name].groups == 1
        and {f"{name}.weight", f"{name}.bias"} <= task.names
    ]
    if not kept:
        raise NotApplicable("no trained convolution with a bias cuts the image into patches")
    return kept[0], layers[kept[0]]


def _places(layer: Any, shape: tuple[int, ...]) -> int:
    """How many patches an image of this shape has."""
    return math.prod(s // k for s, k in zip(shape[1:], layer.kernel_size, strict=True))


def _positions(
    sent: dict[str, Tensor],
    bias: str,
    count: int,
    width: int,
) -> tuple[Tensor, float]:
    """(count, width) the gradients of the patches' positions, which add up to the bias'; and the
    relative difference.
    """
    nearest = torch.empty(0)
    least = NEAREST
    for value in sent.values():
        if value.shape[-1:] != (width,) or not count <= value.numel() // width <= count + 2:
            continue
        rows = value.reshape(-1, width)
        for start in range(len(rows) - count, -1, -1):
            candidate = rows[start : start + count]
            off = float(
                (candidate.sum(0) - sent[bias]).norm() / sent[bias].norm().clamp_min(1e-300)
            )
            if off < least:
                nearest = candidate
                least = off
    if not len(nearest):
        raise NotApplicable("no trained positions are added to the patches")
    return nearest, least


# --- several images ---------------------------------------------------------------------------

EARLY = 5.0
"""The weight of tensors before the first norm: their gradients are the least bent in the images."""
TINY = 1e-5
ROWS = 8
TOGETHER = 2**25
"""The smallest norm of a tensor over the update's, rows of the sketch for each unknown number, and
numbers of gradients' derivatives at once.
"""
FIRST = 0.3
ENOUGH = 1e-6
STALE = 0.5
STUCK = 0.995
"""The share of the best fall that a less damped step needs, the objective that is enough, and the
falls from which the Jacobian is computed anew and the search ends.
"""
DAMPING = torch.logspace(-10, 1, 12, dtype=torch.float64)
NEAR = 0.01
FAR = 0.2
"""The standard deviation of the first start's numbers and of later ones', in input ranges."""
UNEXPLAINED = 1e-4
"""The share of the update that an exact answer may leave."""


@dataclass(frozen=True)
class PatchSpan(Attack):
    """Search for the patches of a few images in the spaces that the first layers' gradients show.

    The linear layers behind the first norm see a vector for each patch, and their gradients span
    these vectors. They are affine in the patches up to their scale. So the patches at each position
    lie in a known affine space, of dimension (images - 1) x positions. The span of the patch
    layer's gradient holds them, too. Damped Gauss-Newton steps match the update inside. Between
    new Jacobians, they use Broyden's.

    Args:
        steps: the most steps from a start.
        starts: the most starts, near gray first; the first that explains the update ends them.
        most: the most unknown numbers. A step costs as many gradients' derivatives.

    Assumptions: one gradient step; a convolution that cuts the image into patches and adds
        positions; a norm and linear layers behind it; (images x patches) below the width.

    Raises:
        NotApplicable: one image (`patch_inversion` solves it), no such layers, several local steps,
            too many unknown numbers, or an update that is zero.

    Source: this project; Petrov et al. 2024 (DAGER) for spans of text; Broyden 1965.

    Example:
        >>> import leakbound as lb
        >>> settings = dict(input_shape=(1, 8, 8), classes=3, generator=lb.stream(0, "model"))
        >>> model = lb.models.vit(width=24, layers=2, **settings)
        >>> batch = torch.rand(2, 1, 8, 8, generator=lb.stream(0, "batch")), torch.arange(2)
        >>> min(lb.simulate(model, batch, attack=PatchSpan()).scores) > 60
        True
    """

    steps: int = 60
    starts: int = 3
    most: int = 2048

    def __post_init__(self) -> None:
        check.count(
            steps=self.steps,
            starts=self.starts,
            most=self.most,
        )

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        observation = summed(observation)
        task = seen_task(observation)
        count = observation.examples
        if count < 2:
            raise NotApplicable("it is for several images; patch_inversion solves for one")
        if not task.plan.is_gradient or len(set(observation.cohort)) > 1:
            raise NotApplicable("the update is not one gradient of all images")
        if not 0 < float(observation.update.rows.double().norm()) < math.inf:
            raise NotApplicable("the update is zero or not finite")
        exact = task.to(observation.update.rows.device, torch.float64)
        update = observation.update.rows.sum(0).double() / len(observation.cohort)
        space = _space(exact, update, observation.input_shape, count)
        unknown = count * len(space.base) * space.basis.shape[1]
        if unknown > self.most:
            raise NotApplicable(f"{unknown} numbers are unknown, and `most` is {self.most}")
        labels = known_or_inferred(observation, generator)
        fit = _Fit(exact, update, labels, space, unknown, generator)
        low, high = task.input_range
        middle = (space.basis.T @ ((low + high) / 2 - space.base).T).T.repeat(count, 1).reshape(-1)
        best = middle
        left = math.inf
        for near in (NEAR, *[FAR] * (self.starts - 1)):
            start = middle + near * (high - low) * normal((unknown,), generator, like=middle)
            best, left = min(
                (best, left),
                fit.searched(start, self.steps),
                key=lambda at: at[1],
            )
            if left <= UNEXPLAINED or tick():
                break
        problem = f"the answer leaves {left:.1g} of the update" if left > UNEXPLAINED else None
        name, _ = patch_layer(task, observation.input_shape)
        problem = problem or unlike(task, observation.input_shape, name)
        images = space.images(best)
        return answered(
            observation,
            task,
            images,
            problem,
            labels=labels,
            objective=left,
        )


@dataclass(frozen=True, eq=False)
class _Space:
    """The patches at position p are base[p] + basis @ (free numbers): (P, n) and (n, F)."""

    base: Tensor
    basis: Tensor
    side: tuple[int, ...]
    layer: Any
    early: frozenset[str]

    def images(self, free: Tensor) -> Tensor:
        numbers = free.reshape(-1, len(self.base), self.basis.shape[1])
        patches = self.base.to(free) + numbers @ self.basis.T.to(free)
        kernel = self.layer.kernel_size
        stride = self.layer.stride
        return nn.functional.fold(
            patches.transpose(1, 2),
            self.side,
            kernel,
            stride=stride,
        )


def _space(
    task: Task,
    update: Tensor,
    shape: tuple[int, ...],
    count: int,
) -> _Space:
    """Where the patches lie: their vectors behind the norm are in the span of the readers' rows."""
    name, layer = patch_layer(task, shape)
    places = _places(layer, shape)
    vectors, norm, readers, early = _first_norm(task, shape)
    sent = task.unflatten(update)
    now = task.tensors()
    rank = (count - 1) * places + len(vectors)
    width = vectors.shape[1]
    # A norm may have no scale and shift of its own (elementwise_affine=False).
    scale = now.get(f"{norm}.weight", vectors.new_ones(width))
    shift = now.get(f"{norm}.bias", vectors.new_zeros(width))
    if rank >= width - 1 or vectors.shape[0] < places:
        raise NotApplicable(f"{rank} vectors are no small part of {width} dimensions")
    rows = nn.functional.normalize(torch.cat([sent[f"{r}.weight"] for r in readers])) / scale
    span = torch.linalg.svd(rows, full_matrices=False)[2][:rank]
    # A norm's shift adds one known vector to the span, as the vectors' scales are not known.
    span = torch.linalg.qr(torch.cat([span, (shift / scale)[None]]).T)[0].T if shift.any() else span

    def outside(rows: Tensor) -> Tensor:
        # A layer norm removes the mean of every vector.
        rows = rows - rows.mean(1, keepdim=True)
        return rows - rows @ span.T @ span

    kernel = now[f"{name}.weight"].flatten(1)
    kernel_rows = nn.functional.normalize(sent[f"{name}.weight"].flatten(1))
    seen = torch.linalg.svd(kernel_rows)[2][: min(count * places, kernel.shape[1])].T
    kept = max(seen.shape[1] - (count - 1) * places, 0)
    left, values, right = torch.linalg.svd(outside((kernel @ seen).T).T, full_matrices=False)
    solved = -outside(vectors[-places:]) @ left[:, :kept] / values[:kept] @ right[:kept]
    return _Space(solved @ seen.T, seen @ right[kept:].T, shape[1:], layer, early)


def _first_norm(
    task: Task, shape: tuple[int, ...]
) -> tuple[Tensor, str, list[str], frozenset[str]]:
    """(T, width) the input of the first layer norm for an image of zeros; the norm's name; trained
    linear layers that see its output; and the names of trained tensors before it.
    """
    seen: list[tuple[str, Tensor, Tensor]] = []
    readers: list[str] = []

    def watch(name: str, module: nn.Module) -> Any:
        def note(
            _: nn.Module,
            args: tuple[Any, ...],
            output: Tensor,
        ) -> None:
            if isinstance(module, nn.LayerNorm):
                seen.append((name, args[0], output))
            elif seen and args and args[0] is seen[0][2] and f"{name}.weight" in task.names:
                readers.append(name)

        return note

    leaves = {n: v.detach().requires_grad_() for n, v in task.unflatten(task.parameters).items()}
    with ExitStack() as hooks, torch.enable_grad():
        for name, module in modules_of(task, (nn.LayerNorm, nn.Linear)).items():
            hooks.enter_context(module.register_forward_hook(watch(name, module)))
        call(task, {**task.buffers, **leaves}, torch.zeros(1, *shape).to(task.parameters))
    if not readers or seen[0][1].ndim != 3 or not seen[0][1].requires_grad:
        raise NotApplicable("no trained linear layers see a norm of the patches' vectors")
    norm, vectors, _ = seen[0]
    slopes = torch.autograd.grad(
        vectors.sum(),
        list(leaves.values()),
        allow_unused=True,
    )
    early = frozenset(n for n, s in zip(leaves, slopes, strict=True) if s is not None)
    return vectors[0].detach(), norm, readers, early


class _Fit:
    """What candidates leave of the update: weighted, and summed in groups with random signs."""

    def __init__(
        self,
        task: Task,
        update: Tensor,
        labels: Tensor,
        space: _Space,
        unknown: int,
        generator: torch.Generator,
    ) -> None:
        self.exact = task
        self.rough = task.to(update.device, torch.float32)
        self.update = update
        self.labels = labels
        self.space = space
        total = update.norm().clamp_min(1e-300)
        weights = []
        for name, part in task.unflatten(update).items():
            # All tensors count the same: the head's gradient would hide those of the patches.
            size = part.norm().clamp_min(TINY * total)
            weight = (EARLY if name in space.early else 1.0) / (size * total).sqrt()
            weights.append(weight.expand(part.numel()))
        # Random signs: entries of one kind would cancel or add up in a group.
        signs = (uniform((len(update),), generator, like=update) - 0.5).sign()
        self.weights = torch.cat(weights) * signs
        # Odd, so that columns do not fall in one row.
        self.rows = min(ROWS * unknown, len(update)) | 1

    def grouped(self, vector: Tensor) -> Tensor:
        scaled = self.weights.to(vector) * vector
        padded = nn.functional.pad(scaled, (0, -len(scaled) % self.rows))
        return padded.view(-1, self.rows).sum(0)

    def __call__(self, free: Tensor) -> Tensor:
        task = self.exact if free.dtype == torch.float64 else self.rough
        images = self.space.images(free)

        def loss(weights: dict[str, Tensor]) -> Tensor:
            return task.loss(call(task, {**task.buffers, **weights}, images), self.labels)

        # By names: a gradient of the flat vector pads every tensor's part to the whole of it.
        parts = grad(loss)(task.unflatten(task.parameters))
        flat = torch.cat([part.reshape(-1) for part in parts.values()])
        return self.grouped(flat - self.update.to(flat))

    def jacobian(self, free: Tensor) -> Tensor | None:
        """(rows, unknown) the derivative, computed in float32; None if the time is over before."""
        at = free.float()
        columns = vmap(lambda one: jvp(self, (at,), (one,))[1])
        found = []
        for part in torch.split(torch.eye(len(at)).to(at), max(1, TOGETHER // len(self.update))):
            if is_over():
                return None
            found.append(columns(part))
        return torch.cat(found).T.to(free)

    def searched(self, free: Tensor, steps: int) -> tuple[Tensor, float]:
        """The free numbers that explain the update best, and the share that they leave."""
        total = float(self.grouped(self.update).norm().clamp_min(1e-300))
        left = self(free)
        slope = None
        fresh = False
        for _ in range(steps):
            if slope is None:
                slope = self.jacobian(free)
                if slope is None:
                    break
                fresh = True
            before = float(left.norm())
            move, after = self._step(free, left, slope)
            ratio = float(after.norm()) / before
            if ratio < 1:
                # Broyden's update: the Jacobian then explains the step just taken.
                slope += torch.outer(after - left - slope @ move, move) / move.square().sum()
                free = free + move
                left = after
            if tick() or float(left.norm()) < ENOUGH * total or (fresh and not ratio < STUCK):
                break
            slope, fresh = (slope, False) if ratio < STALE else (None, False)
        return free, float(left.norm()) / total

    def _step(
        self,
        free: Tensor,
        left: Tensor,
        slope: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The step with the least damping among those with a good fall, and what it leaves."""
        values, turn = torch.linalg.eigh(slope.T @ slope)
        along = turn.T @ (slope.T @ left)
        # All dampings are tried: a trial costs one gradient, the slope hundreds.
        tried = []
        for damping in DAMPING.tolist():
            move = -turn @ (along / (values.clamp_min(0) + damping * values[-1]))
            # Where a step leaves the finite numbers, it counts as a rise.
            tried.append((move, torch.nan_to_num(self(free + move), nan=1e30)))
        falls = [float(left.norm() - after.norm()) for _, after in tried]
        best = max(falls)
        # If no step falls, `best` is below its share.
        return tried[next(i for i, fall in enumerate(falls) if fall >= min(FIRST * best, best))]
