"""Independent component analysis as the cocktail-party attack publishes it: Adam on the contrast.

leakbound's own `Separation` finds the rotation by fixed points, and a likelihood after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from leakbound import check
from leakbound.attacks.features.separation import (
    contrasts,
    differences,
    log_cosh,
    row_space,
    whitener,
)


@dataclass(frozen=True)
class PublishedSeparation:
    """Adam on the contrast, a penalty on parallel rows and three priors, from the identity.

    All rows have unit length.

    Args:
        slope: a of the contrast mean_i [mean_t log cosh(a s_it) / a - c_a]^2.
        literal: leave c_a out, as the paper prints it: sources with heavy tails then stay mixed as
            much as possible.
        decorrelation: weight of mean_ij exp(T |cos(w_i, w_j)|) - 1. The contrast is some
            thousandths: from 0.01 on, without a prior, the rows hardly leave the identity.
        sharpness: its T.
        total_variation: weight of the sources' mean absolute differences as images.
        negativity: weight of mean_i min(|relu(-s_i)|, |relu(s_i)|).
        sparsity: weight of the mean absolute value.
        steps: how many steps.
        learning_rate: Adam's learning rate.

    Source: Kariyappa et al. 2023 (Cocktail Party Attack).
    """

    slope: float = 1.0
    literal: bool = False
    decorrelation: float = 1.0
    sharpness: float = 5.0
    total_variation: float = 0.0
    negativity: float = 0.0
    sparsity: float = 0.0
    steps: int = 25_000
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        check.positive(slope=self.slope, learning_rate=self.learning_rate)
        check.count(steps=self.steps)
        check.non_negative(
            decorrelation=self.decorrelation,
            sharpness=self.sharpness,
            total_variation=self.total_variation,
            negativity=self.negativity,
            sparsity=self.sparsity,
        )

    def sources(self, mixtures: Tensor, count: int, shape: tuple[int, ...] | None = None) -> Tensor:
        """`count` sources (B, n) of mixtures (h, n); images of `shape` for total variation."""
        raw = row_space(mixtures, count).inner
        raw = whitener(raw - raw.mean(1, keepdim=True)) @ raw
        weight = torch.eye(len(raw)).to(raw).requires_grad_()
        optimizer = torch.optim.Adam([weight], lr=self.learning_rate)
        with torch.enable_grad():
            for _ in range(self.steps):
                loss = self._loss(functional.normalize(weight), raw, shape)
                (weight.grad,) = torch.autograd.grad(loss, weight)
                optimizer.step()
        return functional.normalize(weight.detach()) @ raw

    def _loss(self, unit: Tensor, raw: Tensor, shape: tuple[int, ...] | None) -> Tensor:
        sources = unit @ raw
        centered = sources - sources.mean(1, keepdim=True)
        measure = printed_contrasts if self.literal else contrasts
        cosine = (unit @ unit.T).abs().fill_diagonal_(0)
        total = self.decorrelation * ((self.sharpness * cosine).exp() - 1).mean()
        total = total - measure(centered, self.slope).mean()
        if self.total_variation:
            total = total + self.total_variation * differences(sources, shape).abs().mean()
        if self.negativity:
            sides = torch.stack([(-sources).relu().norm(dim=1), sources.relu().norm(dim=1)])
            total = total + self.negativity * sides.amin(0).mean()
        return total + self.sparsity * sources.abs().mean()


def printed_contrasts(sources: Tensor, slope: float = 1.0) -> Tensor:
    """[mean_t log cosh(a s_t) / a]^2, (B,), of rows (B, n) scaled to mean square 1."""
    unit = sources / sources.square().mean(1, keepdim=True).sqrt().clamp_min(1e-300)
    return (log_cosh(slope * unit).mean(1) / slope).square()
