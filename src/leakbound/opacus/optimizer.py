"""Opacus optimizers with noise that cannot be replayed."""

from __future__ import annotations

from typing import Any

import torch
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping  # type: ignore[import-untyped]
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed  # type: ignore[import-untyped]

from leakbound import check
from leakbound.core import NotApplicable
from leakbound.randomness import Source, normal, on_grid, secure

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
        """p.grad = p.summed_grad + noise over all parameters as one vector."""
        for p in self.params:
            _check_processed_flag(p.summed_grad)
        total = torch.cat([p.summed_grad.reshape(-1).double() for p in self.params])
        used = getattr(self, "_adjusted_noise_multiplier", self.noise_multiplier)
        std = float(used) * float(self.max_grad_norm)  # of the sum of clipped gradients
        if std > 0:
            source: Source = secure() if self.generator is None else self.generator
            # one flat draw, as the library's defenses make it: the same noise of the same stream
            total += normal((1, len(total)), source, like=total)[0] * std
        if std > 0 and not self.experiment_only:
            total = on_grid(total, std)
        parts = torch.split(total, [p.numel() for p in self.params])
        for p, part in zip(self.params, parts, strict=True):
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
