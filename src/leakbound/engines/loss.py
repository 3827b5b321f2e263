"""The loss's derivatives in the logits, and how these change with the logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leakbound.core import Loss
from leakbound.losses import NamedLoss, named


class CrossEntropy:
    """The sum of all rows' cross-entropies over `size`, the rows of one batch, in closed form.

    Rows (M, K) may belong to several batches, as each row is independent of the others.
    """

    def __init__(
        self,
        logits: Tensor,
        labels: Tensor,
        size: int,
    ) -> None:
        self.chances = torch.softmax(logits, -1)
        self.size = size
        self.mass: Tensor | None = None
        if labels.ndim == 1:
            deltas = torch.scatter(
                self.chances,
                1,
                labels[:, None].long(),
                -1.0,
                reduce="add",
            )
        else:
            # Soft labels may not sum to 1 while an attack searches for them.
            self.mass = labels.sum(-1, keepdim=True)
            deltas = self.chances * self.mass - labels
        self.deltas = deltas.div_(size)

    def moved(self, tangent: Tensor) -> tuple[Tensor, Tensor | None]:
        """The changes (M, K) of deltas and of derivatives in soft labels, None for classes."""
        weighted = self.chances * tangent
        mean = weighted.sum(-1, keepdim=True)
        change = torch.addcmul(weighted, self.chances, mean, value=-1)
        if self.mass is None:
            return change.div_(self.size), None
        return change.mul_(self.mass / self.size), (mean - tangent).div_(self.size)


class _EveryPosition:
    """As `CrossEntropy`, for scores (B, K, ...) of every position, and labels of each."""

    def __init__(self, logits: Tensor, labels: Tensor) -> None:
        self.shape = logits.movedim(1, -1).shape
        targets = self._rows(labels) if labels.ndim == logits.ndim else labels.flatten()
        self.rows = CrossEntropy(self._rows(logits), targets, logits.numel() // logits.shape[1])
        self.deltas = self._values(self.rows.deltas)

    def moved(self, tangent: Tensor) -> tuple[Tensor, Tensor | None]:
        change, soft = self.rows.moved(self._rows(tangent))
        return self._values(change), None if soft is None else self._values(soft)

    def _rows(self, values: Tensor) -> Tensor:
        return values.movedim(1, -1).reshape(-1, values.shape[1])

    def _values(self, rows: Tensor) -> Tensor:
        return rows.view(self.shape).movedim(-1, 1)


class _Elementwise:
    """As `CrossEntropy`, for a loss whose outputs each have a label, such as squared errors."""

    def __init__(
        self,
        loss: NamedLoss,
        logits: Tensor,
        labels: Tensor,
        size: int,
    ) -> None:
        assert loss.mean is not None
        assert loss.slope is not None
        mean = loss.mean(logits)
        self.share = loss.scale / (size * logits[0].numel())
        self.slope = loss.slope(mean)
        self.labels = labels
        self.deltas = (mean - loss.target(logits, labels)).mul_(self.share)

    def moved(self, tangent: Tensor) -> tuple[Tensor, Tensor | None]:
        change = self.slope * tangent * self.share
        labels = self.labels
        if not labels.is_floating_point():
            return change, None
        soft = tangent * -self.share
        if labels.numel() > soft.numel():  # probabilities of two classes for one output
            soft = nn.functional.pad(soft.reshape(-1, 1), (1, 0))
        return change, soft.reshape(labels.shape)


class _Traced:
    """Any twice differentiable loss, by differentiating its gradient."""

    def __init__(
        self,
        loss: Loss,
        logits: Tensor,
        labels: Tensor,
    ) -> None:
        with torch.enable_grad():
            self.logits = logits.detach().requires_grad_()
            self.labels = labels.detach()
            if labels.is_floating_point():
                self.labels.requires_grad_()
            value = loss(self.logits, self.labels)
            (self.slopes,) = torch.autograd.grad(value, self.logits, create_graph=True)
        self.deltas = self.slopes.detach()

    def moved(self, tangent: Tensor) -> tuple[Tensor, Tensor | None]:
        soft = self.labels.requires_grad
        wanted = [self.logits, self.labels] if soft else [self.logits]
        if self.slopes.requires_grad:
            # the Hessian is symmetric and kept: a gradient may have several pulls
            changes = torch.autograd.grad(
                self.slopes, wanted, tangent, retain_graph=True, materialize_grads=True
            )
        else:
            # A loss that is linear in the logits has constant slopes, without a graph.
            changes = tuple(torch.zeros_like(tensor) for tensor in wanted)
        return changes[0], changes[1] if soft else None


LossHead = CrossEntropy | _EveryPosition | _Elementwise | _Traced


def closed(loss: Loss) -> bool:
    """Whether `head` has a closed form, for rows of several batches too."""
    return named(loss).elementwise or named(loss).name == "cross_entropy"


def head(
    loss: Loss,
    logits: Tensor,
    labels: Tensor,
    size: int | None = None,
) -> LossHead:
    """The derivatives at logits of `size` rows per batch; None: all are one batch."""
    known = named(loss)
    size = len(logits) if size is None else size
    if known.name == "cross_entropy" and logits.ndim == 2:
        return CrossEntropy(logits, labels, size)
    if known.name == "cross_entropy" and logits.ndim > 2 and size == len(logits):
        return _EveryPosition(logits, labels)
    if known.elementwise:
        return _Elementwise(known, logits, labels, size)
    return _Traced(loss, logits, labels)


def example_deltas(
    loss: Loss,
    output: Tensor,
    labels: Tensor,
) -> Tensor:
    """The derivative (n, K) of every example's own loss by its output."""
    if _classes_alone(loss, output, labels):
        return torch.softmax(output, 1) - nn.functional.one_hot(labels.long(), output.shape[1])
    return _by_autograd(loss, output, labels)[1].detach()


def example_delta_changes(
    loss: Loss,
    output: Tensor,
    labels: Tensor,
    moved: Tensor,
) -> Tensor:
    """The change (k, n, K) of `example_deltas` when the output changes by `moved`."""
    if _classes_alone(loss, output, labels):
        chances = torch.softmax(output, 1)
        weighed = chances * moved
        return weighed - chances * weighed.sum(-1, keepdim=True)
    leaf, delta = _by_autograd(loss, output, labels)
    if not delta.requires_grad:
        return torch.zeros_like(moved)
    # The second derivative is symmetric, and no example's loss depends on another's output.
    # Of sums: with a cotangent, PyTorch imports sympy to compare the shapes.
    with torch.enable_grad():
        sums = [(delta * way).sum() for way in moved]
    return torch.stack([torch.autograd.grad(one, leaf, retain_graph=True)[0] for one in sums])


def _classes_alone(
    loss: Loss,
    output: Tensor,
    labels: Tensor,
) -> bool:
    """Cross-entropy of class numbers, none of them ignored."""
    whole = labels.ndim == 1 and not labels.is_floating_point() and output.ndim == 2
    return named(loss).name == "cross_entropy" and whole and bool((labels >= 0).all())


def _by_autograd(
    loss: Loss,
    output: Tensor,
    labels: Tensor,
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = output.detach().requires_grad_()
        # The loss is a mean over examples; times n, a row is the derivative of its own loss.
        total = loss(leaf, labels) * len(output)
        return leaf, torch.autograd.grad(total, leaf, create_graph=True)[0]
