"""Opacus optimizers with noise that cannot be replayed, and with noise of a public shape."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping  # type: ignore[import-untyped]
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed  # type: ignore[import-untyped]
from torch import Tensor, nn

from leakbound import check
from leakbound.covariance import Kronecker, LowRank, Structured
from leakbound.defenses.whitening import FixedMap, Whiten
from leakbound.random import Source, normal, on_grid, secure
from leakbound.task import trained
from leakbound.types import Batch, Loss, NotApplicable, Task

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class PublicRoot:
    """The factor S from `Whiten` for a model at its current weights, without private data.

    The weights in training are already a private release, and the images are public. Computing S
    again from both is post-processing, and the next step composes with it.

    Attributes:
        settings: rule, correlation, rank, images, and for how many steps one S is kept (`refresh`).
        task: the architecture, with the public data.
        examples: the expected size of a batch.
        parameters: the trained ones of the live model, in the order of its `named_parameters()`;
            those that were frozen when this was made are constants.
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
        """For a plain module, before Opacus wraps it. The guarantee does not depend on `loss`."""
        check.count(examples=examples)
        if any(hasattr(part, "autograd_grad_sample_hooks") for part in module.modules()):
            raise NotApplicable(
                "the module has Opacus' hooks, which the public gradients would trigger; "
                "give the plain module"
            )
        bare = copy.deepcopy(module).eval()
        for held in bare.parameters():
            held.grad = None
        task = Task.of(bare, loss=loss, public=public)
        own = tuple(trained(module).values())
        return PublicRoot(settings or Whiten(), task, examples, own)

    def now(self, which: Sequence[bool]) -> Structured:
        """S of mean variance 1 at the current weights, over the `parameters` that `which` marks."""
        weights = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        task = self.task.with_parameters(weights)
        fixed = self.settings.resolve(task, self.examples)
        assert isinstance(fixed, FixedMap)
        layout = zip(which, self.task.layout, strict=True)
        return restricted(fixed.root, [(a, b) for keep, (_, _, a, b) in layout if keep])


def restricted(root: Structured, spans: Spans) -> Structured:
    """The covariance of some spans of coordinates, scaled to mean variance 1; of all, unchanged."""
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
    """The part of a block on the coordinates `inside`, which begin at `start` among those kept."""
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


CHUNK = 2**24
"""Most numbers that are held flat and whitened at a time: 64 MiB in float32."""
EXPERIMENT = "EXPERIMENT ONLY: seeded noise, which anyone with the seed can subtract"


class SecureNoise:
    """Gaussian noise from the operating system's entropy, added in float64 and rounded to a grid.

    The grid is 2^-24 to 2^-25 of the noise, so that many draws give each released number
    (docs/sharp_edges/floating_point_noise.md). With a `generator`, noise is not rounded.
    """

    generator: torch.Generator | None
    noise_multiplier: float
    max_grad_norm: float
    params: list[Any]
    _divisor: int | None

    def __init__(  # Opacus accepts and ignores any other keyword, such as a misspelled one
        self,
        optimizer: torch.optim.Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: int | None,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
    ) -> None:
        if secure_mode:
            raise ValueError(
                "secure_mode is True; leave it out: the noise comes from the system's entropy "
                "anyway, unless a generator is given"
            )
        check.given(check.positive, expected_batch_size=expected_batch_size)
        super().__init__(  # type: ignore[call-arg]  # of the Opacus class behind this one
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
        )

    @property
    def expected_batch_size(self) -> int | None:
        return self._divisor

    @expected_batch_size.setter
    def expected_batch_size(self, value: int | None) -> None:
        """Set once: a divisor that follows the batches shows their sizes in the noise level."""
        if "_divisor" in vars(self):
            raise NotApplicable(
                f"expected_batch_size is set to {value} after the optimizer was made: the number "
                "that divides updates must be a public constant, since the size of a "
                "sampled batch is private; leave it, or make the training private again"
            )
        self._divisor = value

    @property
    def experiment_only(self) -> bool:
        return self.generator is not None

    def add_noise(self) -> None:
        self._noised(self.params, None)

    def _noised(self, params: Sequence[Any], root: Structured | None) -> None:
        """p.grad = S (p.summed_grad + noise) over all parameters as one vector; None: S = I."""
        for p in params:
            _check_processed_flag(p.summed_grad)
        total = torch.cat([p.summed_grad.reshape(-1).double() for p in params])
        used = getattr(self, "_adjusted_noise_multiplier", self.noise_multiplier)
        std = float(used) * float(self.max_grad_norm)  # of the sum of clipped gradients
        if std > 0:
            source: Source = secure() if self.generator is None else self.generator
            # one flat draw, as the library's defenses make it: the same noise of the same stream
            total += normal((1, len(total)), source, like=total)[0] * std
        if std > 0 and not self.experiment_only:
            total = on_grid(total, std)
        if root is not None:
            total = root.color(total[None])[0]
        parts = torch.split(total, [p.numel() for p in params])
        for p, part in zip(params, parts, strict=True):
            p.grad = part.to(p.dtype).view_as(p)
            _mark_as_processed(p.summed_grad)

    def __repr__(self) -> str:
        inner = repr(getattr(self, "original_optimizer", None))
        noise = EXPERIMENT if self.experiment_only else "noise from the system's entropy"
        level = f"noise_multiplier={self.noise_multiplier}, max_grad_norm={self.max_grad_norm}"
        return f"{type(self).__name__}({level}; {noise}; {inner})"


class SecureDPOptimizer(SecureNoise, DPOptimizer):  # type: ignore[misc]
    """Opacus' `DPOptimizer` with secure noise.

    An example whose gradient is not finite adds nothing; in Opacus it turns the whole release into
    NaN, which no noise hides. Everything else, and every other argument, is as in Opacus.

    Args:
        noise_multiplier: noise standard deviation / max_grad_norm.
        max_grad_norm: L2 bound of every example's gradient.
        expected_batch_size: the divisor of the sum under `loss_reduction` "mean": a public number,
            which cannot be changed afterwards.
        generator: a seeded CPU generator, for experiments only.

    Source: Abadi et al. 2016, algorithm 1; docs/sharp_edges/floating_point_noise.md.
    """

    slack = 1e-6

    def clip_and_accumulate(self) -> None:
        for p in self.params:
            _check_processed_flag(p.grad_sample)
        samples = [
            sample.to(p.dtype).reshape(len(sample), p.numel())
            for p, sample in zip(self.params, self.grad_samples, strict=True)
        ]
        place = samples[0].device
        norms = torch.stack([sample.norm(dim=1).to(place) for sample in samples]).norm(dim=0)
        fine = norms.isfinite()
        factors = torch.where(fine, self.max_grad_norm / (norms + self.slack), 0.0).clamp(max=1.0)
        for p, sample in zip(self.params, samples, strict=True):
            kept = torch.where(fine.to(sample.device)[:, None], sample, 0.0)
            fresh = (factors.to(sample) @ kept).view_as(p)
            p.summed_grad = fresh if p.summed_grad is None else p.summed_grad + fresh
            _mark_as_processed(p.grad_sample)


class SecureGhostOptimizer(SecureNoise, DPOptimizerFastGradientClipping):  # type: ignore[misc]
    """Opacus' optimizer for ghost clipping with secure noise; arguments as `SecureDPOptimizer`.

    A step whose sum of clipped gradients is not finite is `NotApplicable`: ghost clipping has only
    the sum, and cannot leave one example out. Nothing is released.
    """

    def accumulate(self) -> None:
        if not all(bool(p.grad.isfinite().all()) for p in self.params):
            raise NotApplicable(
                "an example has a gradient that is not finite, which ghost clipping cannot leave "
                "out; use grad_sample_mode 'hooks', where it adds nothing, or fix the example"
            )
        super().accumulate()


class WhitenedDPOptimizer(SecureDPOptimizer):
    """DP-SGD whose noise has a public covariance S Sᵀ: whiten, clip, sum, add noise, color.

    Every example's gradient g becomes S⁻¹ g over the flat vector of trained parameters and is
    clipped in that norm. White noise is added to the sum, and then S is applied. `p.summed_grad`
    holds the sum in whitened coordinates.

    Args:
        shape: the source of S, and the model's parameters in order. S is computed again every
            `shape.settings.refresh` steps, never inside a batch that is split in parts.
        settings: as of `SecureDPOptimizer`; `max_grad_norm` bounds the whitened norm.

    Guarantees: one step is the Gaussian mechanism with that multiplier for adding or removing one
    example, as in `DPOptimizer`: an accountant needs no change (docs/whitened_dp.md).

    Source: docs/whitened_dp.md; Chen, Gursoy and Lei, theorem 3.5.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, shape: PublicRoot, **settings: Any
    ) -> None:
        super().__init__(optimizer, **settings)
        self.shape = shape
        self._age = 0
        known = {id(p) for p in shape.parameters}
        if any(id(p) not in known for p in self.params):
            raise NotApplicable(
                "the optimizer trains parameters for which the shape was not made; give "
                "PublicRoot.of the module whose parameters the optimizer has"
            )
        self._trained = self._which()
        pairs = zip(shape.parameters, self._trained, strict=True)
        self._ordered: list[Any] = [p for p, is_trained in pairs if is_trained]
        self.root = shape.now(self._trained)

    def _which(self) -> list[bool]:
        own = {id(p) for p in self.params}
        return [id(p) in own for p in self.shape.parameters]

    def clip_and_accumulate(self) -> None:
        if self._which() != self._trained:
            raise NotApplicable(
                "the set of trained parameters has changed since the optimizer was made; make it "
                "again after freezing or unfreezing"
            )
        params = self._ordered
        for p in params:
            _check_processed_flag(p.grad_sample)
        if params[0].summed_grad is None:  # the first part of a batch
            if self._age >= self.shape.settings.refresh:
                self.root, self._age = self.shape.now(self._trained), 0
            self._age += 1
        samples = [self._get_flat_grad_sample(p) for p in params]
        parts = torch.split(self._clipped_sum(samples), [p.numel() for p in params])
        for p, part in zip(params, parts, strict=True):
            fresh = part.view_as(p)
            p.summed_grad = fresh if p.summed_grad is None else p.summed_grad + fresh
            _mark_as_processed(p.grad_sample)

    def add_noise(self) -> None:
        self._noised(self._ordered, self.root)

    def _clipped_sum(self, samples: list[Tensor]) -> Tensor:
        """(P,) sum of the whitened, clipped gradients of all examples, some at a time."""
        like = self._ordered[0]
        width = sum(p.numel() for p in self._ordered)
        total = torch.zeros(width, dtype=like.dtype, device=like.device)
        few = max(1, CHUNK // width)
        for at in range(0, len(samples[0]), few):
            flat = [s[at : at + few].to(total).flatten(1) for s in samples]
            white = self.root.whiten(torch.cat(flat, 1))
            norms = white.norm(dim=1)
            fine = norms.isfinite()
            factors = torch.where(fine, self.max_grad_norm / (norms + self.slack), 0.0)
            total += factors.clamp(max=1.0) @ torch.where(fine[:, None], white, 0.0)
        return total
