"""Exact recovery of small batches from a ReLU layer that sees the input, with a certificate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from leakbound import check
from leakbound.attacks.analytic import input_layer
from leakbound.attacks.base import Attack, boxed, expected_rows, summed_task
from leakbound.attacks.blind import VANISHED
from leakbound.client import example_gradients
from leakbound.random import uniform
from leakbound.types import NotApplicable, Observation, Reconstruction, Task

MOST, BLOCK, POOL, AT_ONCE = 16, 2048, 8, 16
ZERO, SAME, EXACT, FULL = 1e-4, 1e-3, 1e-4, 1e-5
OUTSIDE, FEW, MOVED = 1e-2, 1e-2, 0.1
"""Tolerances, all relative: an entry that counts as zero; directions that count as one; a residual
that certifies; a singular value that counts (float32 rounds at about 1e-7); how far an answer may
leave the input range; the share of units that may be on without a gradient (it may be tiny); the
share that may move over local steps.
"""


@dataclass(frozen=True)
class SparseRecovery(Attack):
    """Recover the inputs exactly by finding the zeros that ReLU leaves in a layer's gradient.

    The layer is z = W x + b, relu(z). Its gradient [dW | db] = D [X | 1] has rank B; column i of D
    is zero where image i leaves a unit off. The attack factors the gradient and takes the factor L
    (units, B). It repeatedly draws the direction q orthogonal to B - 1 rows of L. If image i leaves
    all of these units off, L q is column i of D and has far more zeros than the B - 1 forced ones.
    The sparsest directions are refined on all of their zeros. Their inverse gives the images, and
    the bias fixes the scale. If B reaches the number of classes and some units are on for all
    images, other sparse directions exist, and the attack finds few of these batches.

    The answer carries a certificate. Its columns identify the units that its images switch on, and
    the whole gradient of the answer (simulated with the known defense) equals the one seen, up to a
    relative 1e-4. If one of these checks fails, `problem` says which.

    Args:
        samples: the largest number of directions drawn. Each is column i with probability 2^(1 - B)
            if half of the units are on for it.

    Assumptions: a linear layer with a bias sees the flattened input, and a ReLU follows; no noise;
        nothing withheld; B distinct inputs, linearly independent with the 1 appended; more than 2 B
        units. Local steps on the full batch change little.

    Raises:
        NotApplicable: there is no such layer, or there are more than 16 examples.

    Source: Dimitrov et al., "SPEAR: Exact Gradient Inversion of Batches in Federated Learning",
        NeurIPS 2024 (here the bias is a further column, which fixes the scale and needs no fit).

    Example:
        >>> import leakbound as lb
        >>> model = lb.models.mlp(input_shape=(1, 6, 6), classes=3, generator=lb.stream(0, "model"))
        >>> batch = torch.rand(3, 1, 6, 6, generator=lb.stream(0, "batch")), torch.arange(3)
        >>> found = lb.simulate(model, batch, attack=SparseRecovery(), classes=3)
        >>> found.answer.problem, min(found.scores) > 60
        (None, True)
    """

    samples: int = 100_000

    def __post_init__(self) -> None:
        check.count(samples=self.samples)

    def __call__(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        task, count = summed_task(observation), observation.examples
        if not bool(observation.update.rows.isfinite().all()):
            raise NotApplicable("the update is not finite")
        if count > MOST:
            raise NotApplicable(f"{count} examples; the search handles at most {MOST}")
        layer = _Layer.of(task, input_layer(task, observation.input_shape), observation)
        gray = boxed(layer.joint.new_full(observation.batch_shape, float("nan")), task)
        gray = gray.to(observation.update.rows)
        if not bool(observation.update.rows.any()) or not bool(layer.joint.any()):
            return Reconstruction(gray, None, problem=VANISHED)
        left, right = layer.factors(count)
        rank = left.shape[1]
        if rank < count:
            reason = f"the layer's gradient has rank {rank}, not {count}: inputs repeat or vanish"
            return Reconstruction(gray, None, problem=reason)
        reason = f"fewer than {count} sparse directions were found"
        best, least = Reconstruction(gray, None, problem=reason), float("inf")
        for basis in _bases(left, self.samples, generator):
            inputs, columns = _unmixed(basis, left, right)
            wrong, problem = layer.wrong(inputs, columns)
            if wrong >= least:
                continue
            least = wrong
            answer = boxed(inputs.to(gray).reshape(observation.batch_shape), task)
            best = Reconstruction(answer, None, problem=problem)
            if problem is None:
                labels = layer.labels(observation, answer, columns)
                off = _left(observation, task, answer, labels)
                if off < EXACT:
                    return Reconstruction(answer, labels, off)
                reason = f"objective did not fall: the answer's gradient is off by {off:.2g}"
                best = Reconstruction(answer, labels, off, problem=reason)
        return best


@dataclass(frozen=True, eq=False)
class _Layer:
    """The layer's weights and its gradient, both (units, N + 1) with the bias last, float64."""

    task: Task
    name: str
    weights: Tensor
    joint: Tensor

    @staticmethod
    def of(task: Task, name: str, observation: Observation) -> _Layer:
        row = observation.update.rows.sum(0) / task.plan.total_weight
        weights, joint = (_joint(task, flat, name) for flat in (task.parameters, row))
        return _Layer(task, name, weights, joint)

    def factors(self, count: int) -> tuple[Tensor, Tensor]:
        """L (units, r) and R (r, N + 1) with L R the gradient, r at most `count`."""
        u, s, v = torch.linalg.svd(self.joint, full_matrices=False)
        rank = min(count, int((s > FULL * s[0]).sum()))
        return u[:, :rank] * s[:rank], v[:rank]

    def wrong(self, inputs: Tensor, columns: Tensor) -> tuple[float, str | None]:
        """How many units disagree between the inputs and their columns, and why an answer is
        refused, if it is.
        """
        low, high = self.task.input_range
        away = float(torch.maximum(low - inputs, inputs - high).amax()) / (high - low)
        ones = inputs.new_ones(len(inputs), 1)
        outputs = torch.cat([inputs, ones], 1) @ self.weights.T
        has = columns.T.abs() > ZERO * columns.T.abs().amax(1, keepdim=True)
        clear = outputs.abs() > SAME * outputs.abs().amax()
        clear &= self.joint.any(1)
        extra = int((has & clear & (outputs < 0)).sum())
        missing = int((~has & clear & (outputs > 0)).sum())
        if not away <= OUTSIDE:
            worst = has.numel() + abs(away) if away == away else float("inf")
            return worst, f"the answers leave the input range by {away:.2g} of its width"
        moving = MOVED if self.task.plan.steps > 1 else 0
        if extra > moving * has.numel() or missing > (FEW + moving) * has.numel():
            text = (
                f"{extra} units that an answer leaves off have a gradient, {missing} on have none"
            )
            return extra + missing, text
        return extra + missing, None

    def labels(self, observation: Observation, inputs: Tensor, columns: Tensor) -> Tensor:
        """The class (B,) for which each input's derivatives point along its column."""
        classes, known = self.task.label_range, observation.labels
        if known is not None:
            options = sorted(set(known.tolist()))
        elif classes is not None:
            options = list(range(classes))
        else:
            raise NotApplicable("the task has no number of classes; give it to Task.of")
        best = []
        with torch.no_grad():
            for image, column in zip(inputs, columns.T, strict=True):
                likeness = []
                for label in torch.split(torch.tensor(options, device=inputs.device), AT_ONCE):
                    many = image.expand(len(label), *image.shape)
                    each = example_gradients(self.task, many, label)
                    bias = torch.stack([_joint(self.task, g, self.name)[:, -1] for g in each])
                    likeness.append(torch.cosine_similarity(bias, column[None], dim=1))
                best.append(options[int(torch.cat(likeness).argmax())])
        return torch.tensor(best, device=inputs.device)


def _unmixed(basis: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs (B, N) and columns (units, B) of a basis; the appended 1 gives each input's scale."""
    mixed = torch.linalg.solve(basis.T, right)
    scale = mixed[:, -1]
    return mixed[:, :-1] / scale[:, None], left @ basis.T * scale


def _left(observation: Observation, task: Task, inputs: Tensor, labels: Tensor) -> float:
    sent = expected_rows(observation, task, inputs, labels).detach().sum(0)
    seen = observation.update.rows.sum(0)
    return float((sent - seen).norm() / seen.norm())


def _joint(task: Task, row: Tensor, name: str) -> Tensor:
    parts = task.unflatten(row)
    prefix = f"{name}." if name else ""
    return torch.cat([parts[f"{prefix}weight"], parts[f"{prefix}bias"][:, None]], 1).double()


def _bases(left: Tensor, samples: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Bases (B, B) of unit directions q, sorted by the number of zeros of L q. A combination of two
    columns has only the zeros of both, so it comes after them.
    """
    count = left.shape[1]
    if count == 1:
        yield left.new_ones(1, 1)
        return
    norms = left.norm(dim=1)
    alive = norms > ZERO * norms.max()
    rows = left[alive] / norms[alive, None]
    pool, last, swapped = left.new_zeros(0, count), None, False
    for _ in range(0, samples if len(rows) > 2 * count else 0, BLOCK):
        chosen = uniform((BLOCK, len(rows)), generator, like=left).topk(count - 1).indices
        drawn = _orthogonal(rows[chosen])
        drawn = drawn[_zeros(rows, drawn).sum(1) > count]
        drawn = _distinct(rows, drawn)[: POOL * count]
        refined = [_orthogonal(rows[zero]) for zero in _zeros(rows, drawn)]
        pool = _distinct(rows, torch.cat([pool, *[q[None] for q in refined]]))[: POOL * count]
        kept = _sparsest(pool)
        if len(kept) < count:
            continue
        basis = pool[kept]
        if last is None or not torch.equal(basis, last):
            last, swapped = basis, False
            yield basis
        elif not swapped:
            swapped = True
            yield from _swapped(pool, kept)


def _swapped(pool: Tensor, kept: list[int]) -> Iterator[Tensor]:
    """Bases with one direction replaced by one of the next in the pool."""
    others = [i for i in range(len(pool)) if i not in kept][: len(kept)]
    for out in kept:
        for new in others:
            basis = pool[[*(k for k in kept if k != out), new]]
            if torch.linalg.matrix_rank(basis, tol=SAME) == len(kept):
                yield basis


def _zeros(rows: Tensor, directions: Tensor) -> Tensor:
    return (directions @ rows.T).abs() < ZERO


def _orthogonal(rows: Tensor) -> Tensor:
    """The unit vectors (n, B) most orthogonal to each set of rows (n, m, B)."""
    found: Tensor = torch.linalg.eigh(rows.mT @ rows).eigenvectors[..., 0]
    return found


def _distinct(rows: Tensor, directions: Tensor) -> Tensor:
    """Directions that differ, the sparsest first."""
    order = _zeros(rows, directions).sum(1).argsort(descending=True, stable=True)
    ordered = directions[order]
    same = (ordered @ ordered.T).abs() > 1 - SAME
    return ordered[~same.tril(-1).any(1)]


def _sparsest(ordered: Tensor) -> list[int]:
    """Positions of the first directions that are linearly independent of those before them."""
    kept: list[int] = []
    for i in range(len(ordered)):
        if torch.linalg.matrix_rank(ordered[[*kept, i]], tol=SAME) == len(kept) + 1:
            kept.append(i)
    return kept
