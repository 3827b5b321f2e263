"""Exact recovery of small batches from a ReLU layer that sees the input, with a certificate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from leakbound import check
from leakbound.attacks.analytic import first_layer, layer_part
from leakbound.attacks.base import (
    Attack,
    expected_rows,
    modules_of,
    parameter,
    seen_by,
    seen_task,
    summed,
    uniform_inputs,
)
from leakbound.attacks.blind import answered, gray
from leakbound.attacks.span import independent
from leakbound.client import call
from leakbound.core import NotApplicable, Observation, Reconstruction, Task
from leakbound.engines.path import Path, unlike
from leakbound.randomness import normal, uniform

MOST = 128
DRAWN = 16
BLOCK = 2048
POOL = 8
AT_ONCE = 16
SPARE = 8
PROBES = 8
"""The most examples, and for draws; draws at once; directions kept for each example; images labeled
at once; random projections beyond B; inputs that show which layers see the ReLU.
"""
STEPS = 40
FEWEST = 8
MEMORY = 2**22
LEFT = 1e-3
MOVING = 0.3
SLOW = 0.999
TINY = 1e-20
STALLED = 1e6
ROUNDED = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
"""Of descents: steps; starts, and numbers of a Jacobian, at once; the share that an end may leave,
and over local steps. A descent ends at a ratio of two values, at a value, or at a damping. Last,
the falling values of the smallest residual in reweighted least squares.
"""
CLOSE = (1e-3, 1e-4)
ZERO = 1e-4
SAME = 1e-3
NEAR = 1e-6
EXACT = 1e-4
FULL = 1e-5
OUTSIDE = 1e-2
FEW = 1e-2
MOVED = 0.1
"""Tolerances, all relative but the second of CLOSE: a layer's input that is the ReLU's output; an
entry that counts as zero; directions that depend on others, and that count as one; a residual that
certifies; a singular value that counts (float32 rounds at about 1e-7); how far an answer may
leave the input range; the share of units that may be on without a gradient (it may be tiny); the
share that may move over local steps.
"""


State = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of descents: points (n, B + k), both factors (n, units), and values (n,)."""


@dataclass(frozen=True)
class SparseRecovery(Attack):
    """Recover the inputs exactly by finding the zeros that ReLU leaves in a layer's gradient.

    The layer is z = W x + b, relu(z). Its gradient [dW | db] = D [X | 1] has rank B; column i of D
    is zero where image i leaves a unit off. The attack factors the gradient and takes the factor L
    (units, B). It searches for the directions q for which L q is a column of D. Their inverse gives
    the images, and the bias fixes the scale.

    Where image i leaves a unit on, column i is V^T d, with V the weights of the next linear layer
    and d a vector in the span of this layer's gradient. So (L q) (L q - V^T d) is zero in every
    unit. Descents from random starts find such q and d. Over local steps only the zeros are exact,
    and each q is rounded to them. If no linear layer sees the ReLU, or the descents fail, up to 16
    examples are searched by draws: if image i leaves B - 1 drawn units off, the direction
    orthogonal to their rows of L gives column i.

    The answer carries a certificate. Its columns identify the units that its images switch on, and
    the whole gradient of the answer (simulated with the known defense) equals the one seen, up to a
    relative 1e-4. And the layer gets the example itself: the path to it is traced
    (`engines.path`). If one of these checks fails, `problem` says which.

    Args:
        starts: the largest number of descents for each example; 0 only draws.
        samples: the largest number of directions drawn. Each is column i with probability 2^(1 - B)
            if half of the units are on for it.

    Assumptions: a linear layer with a bias sees the flattened input, or the input normalized by
        constants, and a ReLU follows; no noise;
        nothing withheld; B distinct inputs, linearly independent with the 1 appended, that switch
        on different units; about 6 B units. Local steps on the full batch change little.

    Raises:
        NotApplicable: there is no such layer, or there are more than 128 examples.

    Source: the draws: Dimitrov et al., "SPEAR: Exact Gradient Inversion of Batches in Federated
        Learning", NeurIPS 2024 (here the bias is a further column, which fixes the scale and needs
        no fit). The descents: this project; they replace the dictionary learning of Bakarsky et
        al., "SPEAR++", arXiv 2510.24200, which does not use the next layer.

    Example:
        >>> import leakbound as lb
        >>> model = lb.models.mlp(input_shape=(1, 6, 6), classes=3, generator=lb.stream(0, "model"))
        >>> batch = torch.rand(3, 1, 6, 6, generator=lb.stream(0, "batch")), torch.arange(3)
        >>> result = lb.simulate(model, batch, attack=SparseRecovery(), classes=3)
        >>> result.answer.problem, min(result.scores) > 60
        (None, True)
    """

    starts: int = 16
    samples: int = 100_000

    def __post_init__(self) -> None:
        check.non_negative(starts=self.starts)
        check.count(samples=self.samples)

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        observation = summed(observation)
        task = seen_task(observation)
        count = observation.examples
        if not observation.update.rows.isfinite().all():
            raise NotApplicable("the update is not finite")
        if count > MOST:
            raise NotApplicable(f"{count} examples; the search handles at most {MOST}")
        name, path = first_layer(task, observation.input_shape)
        layer = _Layer(task, name, path, observation)
        if not layer.joint.any():
            return gray(observation)
        left, right, more = layer.factors(count, generator)
        rank = left.shape[1]
        if more > EXACT:
            reason = f"the layer's gradient has a rank above {count}: noise, or what is withheld"
            return gray(observation, reason)
        if rank < count:
            reason = f"the layer's gradient has rank {rank}, not {count}: inputs repeat or vanish"
            return gray(observation, reason)
        best = gray(observation, f"fewer than {count} sparse directions were found")
        least = float("inf")
        ahead = layer.ahead(observation, count, generator)
        moving = task.plan.steps > 1
        for basis in _bases(left, ahead, moving, self.starts, self.samples, generator):
            inputs, columns = _unmixed(basis, left, right)
            wrong, problem = layer.wrong(inputs, columns)
            if wrong >= least:
                continue
            least = wrong
            best = answered(observation, task, inputs, problem)
            if problem is None:
                labels = layer.labels(observation, best.inputs, columns)
                off = _left(observation, task, best.inputs, labels)
                best = replace(best, labels=labels, objective=off)
                if off < EXACT:
                    if path is None:
                        problem = unlike(task, observation.input_shape, layer.name)
                    return replace(best, problem=problem)
                reason = f"objective did not fall: the answer's gradient is off by {off:.2g}"
                best = replace(best, problem=reason)
        return best


class _Layer:
    """The weights and the gradient of the layer as if it got the examples themselves, both
    (units, N + 1) with the bias last, float64.
    """

    def __init__(
        self,
        task: Task,
        name: str,
        path: Path | None,
        observation: Observation,
    ) -> None:
        self.task = task
        self.name = name
        row = observation.update.rows.sum(0) / task.plan.total_weight
        weights, joint = (layer_part(task, flat.double(), name) for flat in (task.parameters, row))
        if path is not None:
            weights = path.folded(*weights)
            joint = path.back(*joint), joint[1]
        self.weights = torch.cat([weights[0], weights[1][:, None]], 1)
        self.joint = torch.cat([joint[0], joint[1][:, None]], 1)

    def factors(
        self,
        count: int,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor, float]:
        """L (units, r) with orthonormal columns and R (r, N + 1), with L R the gradient and r at
        most `count`; and the next singular value, relative to the first. Random projections find
        the range: a full decomposition is slower.
        """
        width = self.joint.shape[1]
        span = self.joint @ normal((width, count + SPARE), generator, like=self.joint)
        # Power steps: without them small singular values drown in large ones.
        for _ in range(2):
            span = self.joint @ (self.joint.T @ torch.linalg.qr(span).Q)
        span = torch.linalg.qr(span).Q
        u, s, v = torch.linalg.svd(span.T @ self.joint, full_matrices=False)
        rank = min(count, int((s > FULL * s[0]).sum()))
        more = float(s[count] / s[0]) if len(s) > count else 0.0
        return span @ u[:, :rank], s[:rank, None] * v[:rank], more

    def ahead(
        self,
        observation: Observation,
        count: int,
        generator: torch.Generator,
    ) -> Tensor:
        """(units, k) columns that span what the derivatives behind the ReLU can be, by the weights
        and the gradients of the linear layers that see it; empty if none does. Under a known
        dropout, all units that are kept have one scale, and the others have no gradient.
        """
        task = self.task
        probe = uniform_inputs(task, (PROBES, *observation.input_shape), generator)
        ones = self.weights.new_ones(PROBES, 1)
        seen = (torch.cat([probe.flatten(1).double(), ones], 1) @ self.weights.T).relu()
        now = task.tensors()
        sent = task.unflatten(observation.update.rows.sum(0))
        parts = [self.joint[:, :0]]
        layers = modules_of(task, nn.Linear).items()
        names = [name for name, layer in layers if layer.in_features == len(self.weights)]
        with torch.no_grad():
            inputs = seen_by(task, names, probe)
        for name, values in inputs.items():
            if values is None or values.shape != seen.shape:
                continue
            values = values.double()
            factor = (values * seen).sum(0) / seen.square().sum(0).clamp_min(1e-300)
            if torch.allclose(values, factor * seen, *CLOSE):
                key = parameter(name, "weight")
                behind = now[key].double()
                if key in sent:
                    span = torch.linalg.svd(sent[key].double(), full_matrices=False)[0]
                    behind = span[:, :count].T @ behind
                parts.append(behind.T)
        return torch.cat(parts, 1)

    def wrong(
        self,
        inputs: Tensor,
        columns: Tensor,
    ) -> tuple[float, str | None]:
        """How many units disagree between the inputs and their columns, and why an answer is
        refused, if it is.
        """
        low, high = self.task.input_range
        away = float(torch.maximum(low - inputs, inputs - high).amax()) / (high - low)
        ones = inputs.new_ones(len(inputs), 1)
        outputs = torch.cat([inputs, ones], 1) @ self.weights.T
        has = columns.T.abs() > ZERO * columns.T.abs().amax(1, keepdim=True)
        clear = outputs.abs() > SAME * outputs.abs().amax()
        # A unit that dropout removed has no gradient at all, and contradicts no image.
        clear &= self.joint.any(1)
        extra = int((has & clear & (outputs < 0)).sum())
        missing = int((~has & clear & (outputs > 0)).sum())
        if not away <= OUTSIDE:  # NaN fails, too
            worst = has.numel() + abs(away) if away == away else float("inf")
            return worst, f"the answers leave the input range by {away:.2g} of its width"
        moving = MOVED if self.task.plan.steps > 1 else 0
        if extra > moving * has.numel() or missing > (FEW + moving) * has.numel():
            reason = f"{extra} units that an answer leaves off have a gradient, "
            return extra + missing, f"{reason}{missing} on have none"
        return extra + missing, None

    def labels(
        self,
        observation: Observation,
        inputs: Tensor,
        columns: Tensor,
    ) -> Tensor:
        """The class (B,) for which each input's derivatives point along its column."""
        classes = self.task.label_range
        known = observation.labels
        if known is not None:
            options = sorted(set(known.tolist()))
        elif classes is not None:
            options = list(range(classes))
        else:
            raise NotApplicable("the task has no number of classes; give it to Task.of")
        key = parameter(self.name, "bias")
        tensors = self.task.tensors()

        def loss(
            bias: Tensor,
            image: Tensor,
            label: Tensor,
        ) -> Tensor:
            outputs = call(self.task, {**tensors, key: bias}, image[None])
            return self.task.loss(outputs, label[None])

        tried = torch.tensor(options, device=inputs.device)
        each = vmap(
            vmap(grad(loss), (None, None, 0)),
            (None, 0, None),
            chunk_size=AT_ONCE,
        )
        slopes = each(tensors[key], inputs, tried)
        return tried[torch.cosine_similarity(slopes, columns.T[:, None], dim=2).argmax(1)]


def _unmixed(
    basis: Tensor,
    left: Tensor,
    right: Tensor,
) -> tuple[Tensor, Tensor]:
    """Inputs (B, N) and columns (units, B) of a basis; the appended 1 gives each input's scale."""
    mixed = torch.linalg.solve(basis.T, right)
    scale = mixed[:, -1]
    return mixed[:, :-1] / scale[:, None], left @ basis.T * scale


def _left(
    observation: Observation,
    task: Task,
    inputs: Tensor,
    labels: Tensor,
) -> float:
    sent = expected_rows(observation, task, inputs, labels).detach().sum(0)
    seen = observation.update.rows.sum(0)
    return float((sent - seen).norm() / seen.norm())


def _bases(
    left: Tensor,
    ahead: Tensor,
    moving: bool,
    starts: int,
    samples: int,
    generator: torch.Generator,
) -> Iterator[Tensor]:
    """Bases (B, B) of unit directions q, sorted by the number of zeros of L q. A combination of two
    columns has only the zeros of both, so it comes after them. `moving`: over local steps.
    """
    count = left.shape[1]
    if count == 1:
        yield left.new_ones(1, 1)
        return
    norms = left.norm(dim=1)
    alive = norms > ZERO * norms.max()
    # A zero counts the same in every unit, however large its gradient.
    rows = left[alive] / norms[alive, None]
    ahead = torch.linalg.qr(ahead[alive]).Q
    ahead = ahead / norms[alive, None]
    pool = left.new_zeros(0, count)
    last = None
    swapped = False
    samples = samples if len(rows) > 2 * count and count <= DRAWN else 0
    starts = starts * count if 0 < ahead.shape[1] < len(rows) else 0
    most = max(1, MEMORY // (rows.numel() + ahead.numel()))
    while starts > 0 or samples > 0:
        if starts > 0:
            many = min(max(FEWEST, count - len(pool)), most)
            more = _descended(rows, ahead, pool[: count - 1], many, moving, generator)
            starts -= many
        else:
            more = _drawn(rows, generator)
            samples -= BLOCK
        pool = _distinct(rows, torch.cat([pool, more]))[: POOL * count]
        kept, _ = independent(pool, count, SAME)
        if len(kept) < count:
            continue
        basis = pool[kept]
        if last is None or not torch.equal(basis, last):
            last = basis
            swapped = False
            yield basis
        elif not swapped and count <= DRAWN:
            swapped = True
            yield from _swapped(pool, kept)


def _drawn(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Directions (n, B) orthogonal to B - 1 random rows, then to all rows found to be so."""
    count = rows.shape[1]
    scores = uniform((BLOCK, len(rows)), generator, like=rows)
    drawn = _orthogonal(rows[scores.topk(count - 1).indices])
    # B - 1 zeros hold by construction: only more of them are evidence.
    drawn = _distinct(rows, drawn[_zeros(rows, drawn).sum(1) > count])[: POOL * count]
    return torch.cat([drawn[:0], *[_orthogonal(rows[z])[None] for z in _zeros(rows, drawn)]])


def _fitted(
    off: Tensor,
    ahead: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor]:
    """(n, k) the d with the least |off (off - ahead d) weight| for each `off` (n, units), and the
    share of |off off weight| that it leaves.
    """
    aim = (off.square() * weight)[:, :, None]
    slope = (off * weight)[:, :, None] * ahead
    d = torch.linalg.lstsq(slope, aim).solution
    return d[:, :, 0], ((aim - slope @ d).norm(dim=1) / aim.norm(dim=1))[:, 0]


def _rounded(
    rows: Tensor,
    ahead: Tensor,
    q: Tensor,
    d: Tensor,
) -> Tensor:
    """Directions (n, B) by reweighted least squares on the units that are nearer to zero than to
    `ahead` d.
    """
    off = q @ rows.T
    clear = off.abs() < (off - d @ ahead.T).abs()
    # Small weights at once would keep the zeros of the start.
    for least in ROUNDED:
        near = clear / (off.square() + least**2).sqrt()
        q = _orthogonal(rows * near[:, :, None])
        off = q @ rows.T
    return q


def _descended(
    rows: Tensor,
    ahead: Tensor,
    known: Tensor,
    many: int,
    moving: bool,
    generator: torch.Generator,
) -> Tensor:
    """Directions (n, B) where descents of |rows q (rows q - ahead d)|^2 in (q, d) end.

    At column i the product is zero in every unit: the first factor where image i leaves it off, the
    second where it is on. Over local steps only the first is exact. A difference of two similar
    columns has many zeros, too, but leaves more. Starts have random shares of the directions found
    before.
    """
    weight = 1 / (1 + ahead.norm(dim=1))
    q = normal((many, rows.shape[1]), generator, like=rows)
    if len(known):
        span = torch.linalg.qr(known.T).Q
        q = q - uniform((many, 1), generator, like=rows) * (q @ span @ span.T)
    q, d = _settled(rows, ahead, weight, q, _fitted(q @ rows.T, ahead, weight)[0])
    if moving:
        q = _rounded(rows, ahead, q, d)
    left = _fitted(q @ rows.T, ahead, weight)[1]
    return q[left < (MOVING if moving else LEFT)]


def _settled(
    rows: Tensor,
    ahead: Tensor,
    weight: Tensor,
    q: Tensor,
    d: Tensor,
) -> tuple[Tensor, Tensor]:
    """Where the steps of Levenberg and Marquardt end, on the sphere |q| = 1."""
    count = rows.shape[1]
    both = torch.cat([rows, -ahead], 1)

    def at(point: Tensor) -> State:
        point = point / point[:, :count].norm(dim=1, keepdim=True)
        off = point[:, :count] @ rows.T * weight
        on = point @ both.T
        return point, off, on, (off * on).square().sum(1)

    state = at(torch.cat([q, d], 1))
    ended = []
    damping = torch.ones_like(state[3])
    for _ in range(STEPS):
        point, off, on, value = state
        slope = off[:, :, None] * both
        slope[:, :, :count] += (on * weight)[:, :, None] * rows
        curve = slope.mT @ slope
        fall = (slope.mT @ (off * on)[:, :, None])[:, :, 0]
        scale = curve.diagonal(dim1=1, dim2=2)
        along = point * (scale.mean(1).sqrt() / point.norm(dim=1))[:, None]
        curve = curve + torch.diag_embed(damping[:, None] * scale)
        curve = curve + along[:, :, None] * along[:, None]  # the product has no scale
        after = at(point - torch.linalg.solve_ex(curve, fall)[0])
        better = after[3] < value
        over = (better & (after[3] > SLOW * value)) | (after[3] < TINY) | (damping > STALLED)
        damping = torch.where(better, damping / 5, damping * 5)
        state = _chosen(better, after, state)
        # Descents that ended leave the batch, so that the others take less time.
        ended.append(state[0][over])
        point, off, on, value = (part[~over] for part in state)
        state = (point, off, on, value)
        damping = damping[~over]
        if not len(damping):
            break
    points = torch.cat([*ended, state[0]])
    return points[:, :count], points[:, count:]


def _chosen(
    better: Tensor,
    new: State,
    old: State,
) -> State:
    point, off, on = (
        torch.where(better[:, None], a, b) for a, b in zip(new[:3], old[:3], strict=True)
    )
    return point, off, on, torch.where(better, new[3], old[3])


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
    return torch.linalg.eigh(rows.mT @ rows).eigenvectors[..., 0]


def _distinct(rows: Tensor, directions: Tensor) -> Tensor:
    """Directions that differ, the sparsest first."""
    order = _zeros(rows, directions).sum(1).argsort(descending=True, stable=True)
    ordered = directions[order]
    same = (ordered @ ordered.T).abs() > 1 - NEAR
    return ordered[~same.tril(-1).any(1)]
