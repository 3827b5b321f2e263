"""The public root S of a covariance for a model in training, from public data alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from leakbound import check
from leakbound.covariance import Kronecker, LowRank, Structured
from leakbound.defenses.whitening import FixedMap, Whiten
from leakbound.task import trained
from leakbound.types import Batch, Loss, NotApplicable, Task

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class PublicRoot:
    """What `Whiten` makes of a model at its current weights, without private data.

    The weights in training are a private release already, and the images are public: computing S
    anew from both is post-processing, and the next step composes with it.

    Attributes:
        settings: rule, correlation, rank, images, and for how many steps one S is kept (`refresh`).
        task: the architecture, with the public data.
        examples: the expected size of a batch.
        parameters: those of the live model that are trained, in the order of its
            `named_parameters()`; those that were frozen when this was made are constants.
    """

    settings: Whiten
    task: Task
    examples: int
    parameters: tuple[nn.Parameter, ...]

    @staticmethod
    def of(
        module: nn.Module,
        public: Batch,
        settings: Whiten | None = None,
        *,
        examples: int,
        loss: Loss = nn.functional.cross_entropy,
    ) -> PublicRoot:
        """For a plain module, before Opacus wraps it. No guarantee needs `loss` to fit.

        Raises:
            NotApplicable: a module that Opacus has put its hooks on.

        Example:
            >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
            >>> images = Batch(torch.rand(8, 1, 2, 2), torch.arange(8) % 2)
            >>> PublicRoot.of(model, images, examples=4).now([True, True]).scale.shape
            torch.Size([10])
        """
        check.count(examples=examples)
        if any(hasattr(part, "autograd_grad_sample_hooks") for part in module.modules()):
            raise NotApplicable(
                "the module has Opacus' hooks on it, which the public gradients would set off; "
                "give the plain module"
            )
        bare = copy.deepcopy(module).eval()
        for held in bare.parameters():
            held.grad = None
        task = Task.of(bare, loss=loss, public=public)
        own = tuple(trained(module).values())
        return PublicRoot(settings or Whiten(), task, examples, own)

    def now(self, which: Sequence[bool]) -> Structured:
        """S at the current weights, over those of `parameters` that `which` says are still trained.

        Its mean variance is 1.
        """
        weights = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        task = self.task.with_parameters(weights)
        fixed = self.settings.resolve(task, self.examples)
        assert isinstance(fixed, FixedMap)
        layout = zip(which, self.task.layout, strict=True)
        return restricted(fixed.root, [(a, b) for keep, (_, _, a, b) in layout if keep])


def restricted(root: Structured, spans: Spans) -> Structured:
    """The covariance of some spans (start, stop) of coordinates, scaled to mean variance 1.

    Of all of them it is unchanged. A Kronecker block stays or goes as a whole.

    Example:
        >>> root = Structured.of(torch.tensor([1.0, 2.0, 3.0]))
        >>> [round(v, 3) for v in restricted(root, [(1, 3)]).diagonal.tolist()]
        [0.8, 1.2]
    """
    if not spans:
        raise ValueError("spans is empty: no parameter is trained; leave some of them unfrozen")
    kept = torch.cat([torch.arange(a, b) for a, b in spans])
    if len(kept) == len(root.scale):
        return root
    blocks: list[LowRank | Kronecker] = []
    for block in root.blocks:
        where = torch.nonzero((kept >= block.start) & (kept < block.stop)).reshape(-1)
        if len(where):
            blocks.append(_part(block, kept[where] - block.start, int(where[0])))
    part = Structured(root.scale[kept.to(root.scale.device)], tuple(blocks))
    return part * float(1 / part.diagonal.mean())


def _part(block: LowRank | Kronecker, inside: Tensor, start: int) -> LowRank | Kronecker:
    """A block on the coordinates `inside` of it, which begin at `start` among those that stay."""
    if len(inside) == block.stop - block.start:
        return replace(block, start=start, stop=start + len(inside))
    if isinstance(block, Kronecker):
        raise ValueError(
            f"spans cut the Kronecker block {block.start}..{block.stop}; keep it or leave it out"
        )
    basis = block.basis[inside.to(block.basis.device)]
    factor = basis * ((1 + block.gain).square() - 1).sqrt()
    covered = Structured.of(torch.ones_like(factor[:, 0]), [(0, len(inside), factor)]).blocks[0]
    return replace(covered, start=start, stop=start + len(inside))
