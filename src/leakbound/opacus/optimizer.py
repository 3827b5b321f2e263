"""Opacus optimizers with noise that cannot be replayed, and with noise of a public shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping  # type: ignore[import-untyped]
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed  # type: ignore[import-untyped]
from torch import Tensor

from leakbound.covariance import Structured
from leakbound.opacus.shape import PublicRoot
from leakbound.random import Source, normal, on_grid, secure
from leakbound.types import NotApplicable

CHUNK = 2**24
"""Most numbers that are held flat and whitened at a time: 64 MiB in float32."""
EXPERIMENT = "EXPERIMENT ONLY: seeded noise, which anybody with the seed can subtract"


class SecureNoise:
    """Gaussian noise from the operating system's entropy, added in float64 and put on a grid.

    The grid is 2^-24 to 2^-25 of the noise, so that each released number has many draws behind it
    (docs/sharp_edges/floating_point_noise.md). Seeded noise is left as it is drawn.

    With a `generator` the noise can be replayed, and the optimizer says *experiment only* wherever
    it is shown. Mixed into an Opacus optimizer before its own class.
    """

    generator: torch.Generator | None
    noise_multiplier: float
    max_grad_norm: float
    params: list[Any]

    def __init__(  # Opacus takes and ignores any other keyword, such as one with a typing error
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
        super().__init__(  # type: ignore[call-arg]  # of the Opacus class behind this one
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
        )

    @property
    def experiment_only(self) -> bool:
        """Whether the noise came from a generator that was asked for."""
        return self.generator is not None

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the sum of clipped gradients."""
        used = getattr(self, "_adjusted_noise_multiplier", self.noise_multiplier)
        return float(used) * float(self.max_grad_norm)

    def add_noise(self) -> None:
        """Sum of clipped gradients plus noise, into `p.grad`."""
        self._noised(self.params, None)

    def _noised(self, params: Sequence[Any], root: Structured | None) -> None:
        """p.grad = S (p.summed_grad + noise) over all parameters as one vector; None: S = I."""
        for p in params:
            _check_processed_flag(p.summed_grad)
        total = torch.cat([p.summed_grad.reshape(-1).double() for p in params])
        std = self.noise_std
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

    An example whose gradient is not finite adds nothing; Opacus lets it turn the whole release into
    NaN, which no noise hides. All else is Opacus' own.

    Args:
        optimizer: the torch optimizer to wrap.
        noise_multiplier: noise standard deviation / max_grad_norm.
        max_grad_norm: L2 bound of every example's gradient.
        expected_batch_size: what the sum is divided by.
        loss_reduction: of the training's loss, "mean" or "sum".
        generator: a seeded CPU generator, for experiments only.

    Source: Abadi et al. 2016, algorithm 1; docs/sharp_edges/floating_point_noise.md.
    """

    slack = 1e-6

    def clip_and_accumulate(self) -> None:
        """Clip and add up the examples of this part of the batch."""
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

    Raises:
        NotApplicable: at a step, the sum of the clipped gradients is not finite: ghost clipping has
            only the sum, and cannot leave one example out of it. Nothing is released.
    """

    def accumulate(self) -> None:
        """Add up this part of the batch."""
        if not all(bool(p.grad.isfinite().all()) for p in self.params):
            raise NotApplicable(
                "an example has a gradient that is not finite, which ghost clipping cannot leave "
                "out; take grad_sample_mode 'hooks', where it adds nothing, or mend the example"
            )
        super().accumulate()


class WhitenedDPOptimizer(SecureDPOptimizer):
    """DP-SGD whose noise has a public covariance S Sᵀ: whiten, clip, sum, add noise, color.

    Every example's gradient g becomes S⁻¹ g over the flat vector of trained parameters and is
    clipped in that norm. White noise goes on the sum, and then S is applied. `p.summed_grad` holds
    the sum in whitened coordinates.

    Args:
        optimizer: as of `SecureDPOptimizer`, and so are its settings; `max_grad_norm` bounds the
            whitened norm.
        shape: where S comes from, and the model's parameters in order. S is computed anew every
            `shape.settings.refresh` steps, never inside a batch that is split in parts.

    Guarantees: one step is the Gaussian mechanism with that multiplier for adding or removing one
    example, as of `DPOptimizer`: an accountant sees no difference (docs/whitened_dp.md).

    Raises:
        NotApplicable: parameters of the optimizer that the shape does not know.

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
                "the optimizer trains parameters that the shape was not made for; give "
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
        """Whiten, clip and add up the examples of this part of the batch."""
        if self._which() != self._trained:
            raise NotApplicable(
                "which parameters are trained has changed since the optimizer was made; make it "
                "anew after freezing or unfreezing"
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
        """S (whitened sum + white noise), into `p.grad`."""
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
