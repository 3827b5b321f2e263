"""The head of a network: the loss's slopes in the logits, and how they move with the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from leakbound.types import Loss


class LossHead(Protocol):
    """One loss at given logits and labels.

    Attributes:
        deltas: its slopes in the logits, of their shape.
    """

    deltas: Tensor

    def moved(self, tangent: Tensor) -> tuple[Tensor, Tensor | None]:
        """How `deltas` and the slopes in soft labels change when the logits move along `tangent`.

        The second is None for class labels.
        """
        ...


def head(loss: Loss, logits: Tensor, labels: Tensor) -> LossHead:
    """The head for logits (B, K) and the labels that `loss` takes.

    Example:
        >>> logits, labels = torch.zeros(1, 2), torch.tensor([0])
        >>> head(nn.functional.cross_entropy, logits, labels).deltas
        tensor([[-0.5000,  0.5000]])
    """
    if loss is nn.functional.cross_entropy and logits.ndim == 2:
        return cross_entropy(logits, labels, len(logits))
    return _Traced.of(loss, logits, labels)


def cross_entropy(logits: Tensor, labels: Tensor, size: int) -> CrossEntropy:
    """The sum of all rows' cross-entropies over `size`, the rows of one batch.

    Rows may belong to several batches, as each row stands for itself.

    Shapes:
        logits (M, K); labels (M,) class numbers or (M, K) probabilities.

    Example:
        >>> at = cross_entropy(torch.zeros(2, 2), torch.tensor([0, 1]), size=1)
        >>> at.moved(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))[0]
        tensor([[ 0.2500, -0.2500],
                [ 0.0000,  0.0000]])
    """
    chances = torch.softmax(logits, -1)
    if labels.ndim == 1:
        mass = None
        deltas = torch.scatter(chances, 1, labels[:, None].long(), -1.0, reduce="add")
    else:
        mass = labels.sum(-1, keepdim=True)
        deltas = chances * mass - labels
    return CrossEntropy(chances, mass, deltas.div_(size), size)


@dataclass(eq=False)
class CrossEntropy:
    """Cross-entropy in closed form: see `cross_entropy`.

    Attributes:
        chances: the softmax of the logits (M, K).
        mass: the sums (M, 1) of soft labels; None for class labels.
        deltas: the slopes in the logits (M, K).
        size: what the sum over the rows is divided by.
    """

    chances: Tensor
    mass: Tensor | None
    deltas: Tensor
    size: int

    def moved(self, tangent: Tensor) -> tuple[Tensor, Tensor | None]:
        """The changes (M, K) of the deltas and of the slopes in soft labels."""
        weighted = self.chances * tangent
        mean = weighted.sum(-1, keepdim=True)
        change = torch.addcmul(weighted, self.chances, mean, value=-1)
        if self.mass is None:
            return change.div_(self.size), None
        return change.mul_(self.mass / self.size), (mean - tangent).div_(self.size)


@dataclass(eq=False)
class _Traced:
    """Any twice differentiable loss, by differentiating its gradient."""

    logits: Tensor
    labels: Tensor
    slopes: Tensor
    deltas: Tensor

    @staticmethod
    def of(loss: Loss, logits: Tensor, labels: Tensor) -> _Traced:
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            labels = labels.detach()
            if labels.is_floating_point():
                labels = labels.requires_grad_()
            value = loss(logits, labels)
            (slopes,) = torch.autograd.grad(value, logits, create_graph=True)
        return _Traced(logits, labels, slopes, slopes.detach())

    def moved(self, tangent: Tensor) -> tuple[Tensor, Tensor | None]:
        soft = self.labels.requires_grad
        wanted = [self.logits, self.labels] if soft else [self.logits]
        if self.slopes.requires_grad:
            # the Hessian is symmetric, and kept: a gradient may be pulled on several times
            changes = torch.autograd.grad(
                self.slopes, wanted, tangent, retain_graph=True, materialize_grads=True
            )
        else:
            changes = tuple(torch.zeros_like(own) for own in wanted)
        return changes[0], changes[1] if soft else None


def example_deltas(loss: Loss, output: Tensor, labels: Tensor) -> Tensor:
    """The derivative (n, K) of every example's own loss by its output."""
    if _classes_alone(loss, output, labels):
        return torch.softmax(output, 1) - nn.functional.one_hot(labels.long(), output.shape[1])
    return _by_autograd(loss, output, labels)[1].detach()


def example_delta_changes(loss: Loss, output: Tensor, labels: Tensor, moved: Tensor) -> Tensor:
    """The change (k, n, K) of `example_deltas` when the output changes by `moved`."""
    if _classes_alone(loss, output, labels):
        chances = torch.softmax(output, 1)
        weighed = chances * moved
        return weighed - chances * weighed.sum(-1, keepdim=True)
    leaf, delta = _by_autograd(loss, output, labels)
    if not delta.requires_grad:
        return torch.zeros_like(moved)
    # the second derivative is symmetric, and no example's loss depends on another's output
    each = [torch.autograd.grad(delta, leaf, way, retain_graph=True)[0] for way in moved]
    return torch.stack(each)


def _classes_alone(loss: Loss, output: Tensor, labels: Tensor) -> bool:
    """Cross-entropy of class numbers, none of them ignored."""
    whole = labels.ndim == 1 and not labels.is_floating_point() and output.ndim == 2
    return loss is nn.functional.cross_entropy and whole and bool((labels >= 0).all())


def _by_autograd(loss: Loss, output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = output.detach().requires_grad_()
        total = loss(leaf, labels) * len(output)
        return leaf, torch.autograd.grad(total, leaf, create_graph=True)[0]
