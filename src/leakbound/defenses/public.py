"""Properties of a model's gradients from public data: expected sensitivities, shapes of noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakbound import check
from leakbound._util.cache import RecentCache
from leakbound.core import Batch, NotApplicable, Task
from leakbound.covariance import Kronecker, Structured
from leakbound.defenses.allocation import RULES, shape
from leakbound.engines.directions import fitting
from leakbound.engines.sensitivity import example_changes, example_gradients, sensitivity
from leakbound.randomness import normal, stream

LEAST = 1e-4
"""Smallest variance of a coordinate, relative to the mean variance. A private image may move a
coordinate that no public image moves, and without noise this would be seen exactly."""
DEAD = 1e-20
"""A layer with a smaller share of all sensitivity counts as one that leaks nothing."""
PART = 16
ROWS = 2**27
"""Images whose gradients are held at once, and bytes of these: few of a large model's."""
SHRINK = 0.1
"""How far estimated correlations are shrunk towards zero."""
WIDEST = 512
"""For a layer with more inputs or outputs, correlations between these are not estimated."""
CORRELATIONS = ("none", "layers", "low_rank")


@dataclass(frozen=True)
class PublicShape:
    """Settings of a covariance that is chosen only from the model and public data.

    `correlation` "layers" is a Kronecker product in each weight tensor; "low_rank" adds `rank`
    directions to a diagonal. Both need the rule "energy". The others are as in `OptimalNoise`.
    """

    rule: str = "utility"
    layers: bool = False
    clamp: float | None = None
    correlation: str = "none"
    rank: int = 16
    images: int = 64

    def __post_init__(self) -> None:
        check.one_of(RULES, rule=self.rule)
        check.one_of(CORRELATIONS, correlation=self.correlation)
        check.count(images=self.images, rank=self.rank)
        check.given(check.positive, clamp=self.clamp)
        plain = self.rule == "energy" and not self.layers and self.clamp is None
        if self.correlation != "none" and not plain:
            raise ValueError(
                f"correlation is {self.correlation!r} with rule {self.rule!r}; give the rule "
                '"energy", without layers and clamp'
            )


@dataclass(frozen=True, eq=False)
class Expected:
    """Expectations over public batches: sensitivity and squared gradient, (P,) each."""

    s: Tensor
    g2: Tensor


_EXPECTED = RecentCache[Expected]()
_SHAPES = RecentCache["Tensor | Structured"]()
"""An audit requests the same models again with every attack and noise level."""


def expected(
    task: Task,
    examples: int,
    images: int,
    clamp: float | None,
) -> Expected:
    """E||dg_i/dx||² and E g_i² for batches of `examples` images, from `images` public ones.

    Deterministic: its random directions come from a fixed public stream, so everyone who knows the
    model and the public data gets the same numbers.

    Raises:
        NotApplicable: the task has no public data, or, with a clamp, fewer than `examples`.
    """
    key = (task, examples, images, clamp)
    return _EXPECTED.get(key, lambda: _expected(task, examples, images, clamp))


def _expected(
    task: Task,
    examples: int,
    images: int,
    clamp: float | None,
) -> Expected:
    public = _public(task, images)
    source = stream(0, "public", "sensitivity")
    if clamp is not None:
        return _over_batches(task, public, examples, clamp)
    s = sensitivity(
        task,
        public.inputs,
        public.labels,
        source,
        directions=1,
    ).values
    total = torch.zeros_like(s)
    squares = torch.zeros_like(s)
    for part in _parts(task, public):
        each = example_gradients(task, public.inputs[part], public.labels[part])
        total += each.sum(0)
        squares += each.square_().sum(0)
    n = public.size
    second = squares / n
    # Products of different examples only: own squares would raise the squared mean.
    squared_mean = ((total.square() - squares) / (n * (n - 1))).clamp_min(0) if n > 1 else second
    g2 = squared_mean * (1 - 1 / examples) + second / examples
    return Expected(s * (n / examples), g2)


def _over_batches(
    task: Task,
    public: Batch,
    examples: int,
    clamp: float,
) -> Expected:
    if examples > public.size:
        raise NotApplicable(
            f"batches of {examples} images are clamped as a whole, but {public.size} public ones "
            f"are used; give {examples} public images and images={examples}, or no clamp"
        )
    source = stream(0, "public", "batches")
    s = []
    g2 = []
    for at in range(0, public.size - examples + 1, examples):
        part = slice(at, at + examples)
        one = sensitivity(
            task,
            public.inputs[part],
            public.labels[part],
            source,
            directions=1,
        )
        # A clamped coordinate does not change with the input.
        s.append(one.values * (one.gradient.abs() < clamp))
        g2.append(one.gradient.clamp(-clamp, clamp).square())
    return Expected(torch.stack(s).mean(0), torch.stack(g2).mean(0))


def _public(task: Task, images: int) -> Batch:
    if task.public is None:
        raise NotApplicable(
            "the task has no public data to tune this defense on; give Task.of(..., public=...)"
        )
    return Batch(task.public.inputs[:images], task.public.labels[:images])


def _parts(task: Task, public: Batch) -> Iterator[slice]:
    """Consecutive images whose gradients (n, P) are held at once."""
    few = min(PART, fitting(len(task.parameters), task.parameters, ROWS))
    for at in range(0, public.size, few):
        yield slice(at, at + few)


def public_shape(
    settings: PublicShape,
    task: Task,
    examples: int,
) -> Tensor | Structured:
    """Variances (P,), or a covariance with a low-rank part, of mean variance 1."""
    key = (settings, task, examples)
    return _SHAPES.get(key, lambda: _public_shape(settings, task, examples))


def _public_shape(
    settings: PublicShape,
    task: Task,
    examples: int,
) -> Tensor | Structured:
    known = expected(task, examples, settings.images, settings.clamp)
    if settings.correlation != "none":
        make = _by_layer if settings.correlation == "layers" else _low_rank
        structured = _lifted_parts(make(settings, task, known.s))
        return structured * float(1 / structured.diagonal.mean())
    spans = [(a, b) for _, _, a, b in task.layout] if settings.layers else None
    ratio = shape(known.s, known.g2, settings.rule, spans)
    ratio = (ratio / ratio.mean()).clamp_min(LEAST)
    return ratio / ratio.mean()


def _lifted_parts(covariance: Structured) -> Structured:
    """With at least `LEAST` of the mean variance on every coordinate, also after the increase."""
    diagonal = covariance.diagonal
    least = LEAST * (1 + 2 * LEAST) * diagonal.mean()
    return replace(covariance, scale=covariance.scale * (least / diagonal).clamp_min(1).sqrt())


def _samples(settings: PublicShape, task: Task) -> Iterator[Tensor]:
    """Changes of single public images' gradients along random directions, (few, P) at a time."""
    public = _public(task, settings.images)
    source = stream(0, "public", "directions")
    for part in _parts(task, public):
        inputs = public.inputs[part]
        labels = public.labels[part]
        directions = normal(inputs.shape, source, like=inputs)
        yield example_changes(task, inputs, labels, directions)


def _by_layer(
    settings: PublicShape,
    task: Task,
    s: Tensor,
) -> Structured:
    """About A^(1/2) within each layer, with A = E[J Jᵀ] taken as a Kronecker product.

    The gradient of a weight matrix is a sum of outer products, so rows and columns have separate
    covariances. A side of more than `WIDEST` units keeps only its variances.
    """
    wide = {
        start: size
        for _, size, start, stop in task.layout
        if len(size) >= 2 and float(s[start:stop].sum()) > DEAD * float(s.sum())
    }
    moments: dict[int, tuple[Tensor, Tensor]] = {}
    for sample in _samples(settings, task):
        for start, size in wide.items():
            part = sample[:, start : start + math.prod(size)].reshape(len(sample), size[0], -1)
            new = _moment(part), _moment(part.transpose(1, 2))
            old = moments.get(start)
            moments[start] = new if old is None else (old[0] + new[0], old[1] + new[1])
    scale = torch.ones_like(s)
    blocks = []
    for _, _, start, stop in task.layout:
        total = s[start:stop].sum()
        if start not in wide:
            scale[start:stop] = _lifted(s[start:stop].sqrt(), s).sqrt()
            continue
        left, right = (_shrunk(moment) for moment in moments[start])
        traces = (m.sum() if m.ndim == 1 else m.trace() for m in (left, right))
        # S Sᵀ is A^(1/2), so that S scales as the fourth root of A.
        scale[start:stop] = (total / math.prod(float(t) for t in traces)) ** 0.25
        blocks.append(Kronecker.of(start, _root(left), _root(right)))
    return Structured(scale, tuple(blocks))


def _moment(matrices: Tensor) -> Tensor:
    """Σ M Mᵀ, or only its diagonal if that is wide; M (n, a, b)."""
    if matrices.shape[1] > WIDEST:
        return matrices.square().sum((0, 2))
    return torch.einsum("nij,nkj->ik", matrices, matrices)


def _shrunk(moment: Tensor) -> Tensor:
    """A moment shrunk towards its diagonal, with no diagonal entry near 0."""
    diagonal = moment if moment.ndim == 1 else moment.diagonal()
    diagonal = diagonal.clamp_min(SHRINK * diagonal.mean().clamp_min(1e-30))
    if moment.ndim == 1:
        return diagonal
    return (1 - SHRINK) * moment + torch.diag(diagonal - (1 - SHRINK) * moment.diagonal())


def _root(moment: Tensor) -> Tensor:
    if moment.ndim == 1:
        return moment.sqrt()
    size, basis = torch.linalg.eigh(moment.double())
    root: Tensor = (basis * size.clamp_min(1e-12 * float(size.max())).sqrt()) @ basis.T
    return root.to(moment)


def _low_rank(
    settings: PublicShape,
    task: Task,
    s: Tensor,
) -> Structured:
    """About A^(1/2), A = E[J Jᵀ], by its leading directions; the rest stays on the diagonal.

    One half of the public images gives the directions, the other half the moments along them. The
    half that chose the directions would overstate these.
    """
    sample = torch.cat(list(_samples(settings, task)))
    half = len(sample) // 2
    _, _, basis = torch.linalg.svd(sample[:half], full_matrices=False)
    basis = basis[: settings.rank]
    power = (sample[half:] @ basis.T).square().mean(0)
    # Scaled to the total sensitivity of a whole batch, which `s` has.
    power = power * (s.sum() / sample[half:].square().sum(1).mean().clamp_min(1e-300))
    rest = torch.maximum(s - (basis.square() * power[:, None]).sum(0), SHRINK * s)
    return Structured.of(_lifted(rest.sqrt(), s), [(0, len(s), basis.T * power.pow(0.25))])


def _lifted(variance: Tensor, s: Tensor) -> Tensor:
    """Variances with at least the smallest one that every coordinate gets."""
    return variance.clamp_min(LEAST * s.sqrt().mean().clamp_min(1e-30))
