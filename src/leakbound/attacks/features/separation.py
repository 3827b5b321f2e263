"""Independent component analysis: sources taken apart from linear mixtures of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from leakbound import check
from leakbound.attacks.features.contrast import contrasts, gaussian_ceiling, rotation, whitener
from leakbound.attacks.features.likelihood import heavy_tailed, nonnegative
from leakbound.attacks.features.lowrank import RowSpace, row_space
from leakbound.attacks.pace import tick
from leakbound.domains import has_neighbors

KINDS = ("general", "nonnegative", "image", "nonnegative image")
SOLVERS = ("likelihood", "contrast", "published")
ZERO, MARGIN = 1e-2, 1.5


@dataclass(frozen=True)
class Separation:
    """How sources are taken apart; the settings of a cocktail-party attack.

    Args:
        solver: "likelihood" finds the rotation of the whitened mixtures of the largest contrast,
            then, for images and for sources that are not negative, the most likely unmixing, which
            lets the sources be correlated. "contrast" stops after the rotation. "published" is Adam
            on the contrast, a penalty on parallel rows and the three priors below, from the
            identity, with all rows of unit length.
        slope: a of the contrast mean_i [mean_t log cosh(a s_it) / a - c_a]^2, the squared distance
            of each source from a Gaussian's expectation c_a.
        literal: leave c_a out, as the paper prints it: sources with heavy tails then come out as
            mixed as they can be.
        restarts: random rotations to start from; the largest contrast wins.
        decorrelation: "published": weight of mean_ij exp(T |cos(w_i, w_j)|) - 1. The contrast is
            some thousandths: from 0.01 on, without a prior, the rows hardly leave the identity.
        sharpness: "published": its T.
        total_variation: "published": weight of the sources' mean absolute differences as images.
        negativity: "published": weight of mean_i min(|relu(-s_i)|, |relu(s_i)|).
        sparsity: "published": weight of the mean absolute value.
        steps: "published": how many.
        learning_rate: "published": Adam's.

    Source: Kariyappa et al. 2023 (Cocktail Party Attack), with the centered contrast of Hyvarinen
    1999 (FastICA).
    """

    solver: str = "likelihood"
    slope: float = 1.0
    literal: bool = False
    restarts: int = 4
    decorrelation: float = 1.0
    sharpness: float = 5.0
    total_variation: float = 0.0
    negativity: float = 0.0
    sparsity: float = 0.0
    steps: int = 25_000
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        check.one_of(SOLVERS, solver=self.solver)
        check.positive(slope=self.slope, learning_rate=self.learning_rate)
        check.count(restarts=self.restarts, steps=self.steps)
        check.non_negative(
            decorrelation=self.decorrelation,
            sharpness=self.sharpness,
            total_variation=self.total_variation,
            negativity=self.negativity,
            sparsity=self.sparsity,
        )


@dataclass(frozen=True, eq=False)
class Separated:
    """Sources, in an order, with signs and on scales of their own.

    Attributes:
        sources: (B, n), float64.
        mixing: (h, B), so that mixing @ sources is the fit of the mixtures.
        contrast: (B,) each source's squared distance from a Gaussian, by which it was found.
        noise: (B,) standard deviation of the noise on a value of each source, in its own unit.
        level: variance of the noise on a mixture of weight 1.
        problem: why the sources are not what they should be; None if nothing shows.
    """

    sources: Tensor
    mixing: Tensor
    contrast: Tensor
    noise: Tensor
    level: float
    problem: str | None


def separate(
    mixtures: Tensor,
    count: int,
    generator: torch.Generator,
    settings: Separation | None = None,
    *,
    kind: str = "general",
    shape: tuple[int, ...] | None = None,
    weights: Tensor | None = None,
) -> Separated:
    """Take `count` sources (B, n) out of linear mixtures (h, n) of them.

    Images, of `shape` (C, H, W): the contrast sees the differences of neighboring pixels, which
    mixing commutes with, and the raw rows are unmixed with the matrix found. Noise, of a level that
    the low-rank fit tells, is shrunk away at the end. Whitening keeps it: with the noise's
    covariance taken off first, directions that hold little but noise would be blown up.

    `weights` (h, n) are 1 / standard deviation of the noise up to a factor, 0 where an entry is
    withheld. `kind` is "nonnegative" where all sources are at least 0 and often 0, "image",
    "nonnegative image" or "general".

    Assumptions: sources are linearly independent, and all but one of them are not Gaussian.

    Raises:
        NotSeparable: fewer mixtures than sources, or mixtures of a lower rank.

    Source: Kariyappa et al. 2023; Hyvarinen 1999. The differences and the likelihood are our own.
    """
    settings = settings or Separation()
    check.one_of(KINDS, kind=kind)
    fit = row_space(mixtures, count, weights)
    seen = fit.inner - fit.inner.mean(1, keepdim=True)
    if kind.endswith("image"):
        seen = differences(fit.inner, shape)
    unmixing, contrast = _unmixing(fit, seen, generator, settings, kind, shape)
    noise = ((unmixing @ fit.noise) * unmixing).sum(1).clamp_min(0).sqrt()
    if fit.clear < count:
        problem: str | None = f"only {fit.clear} of {count} sources stand out from the noise"
    elif settings.solver == "likelihood" and kind == "nonnegative":
        problem = _too_few_zeros(unmixing @ fit.inner, noise)
    else:
        problem = _looks_gaussian(contrast, seen.shape[1], generator, settings.slope)
    mixing = fit.left @ torch.linalg.inv(unmixing)
    return Separated(unmixing @ _shrunk(fit), mixing, contrast, noise, fit.level, problem)


def _unmixing(
    fit: RowSpace,
    seen: Tensor,
    generator: torch.Generator,
    settings: Separation,
    kind: str,
    shape: tuple[int, ...] | None,
) -> tuple[Tensor, Tensor]:
    """(B, B) from the fit's rows to the sources, and the contrast reached on what is `seen`."""
    if settings.solver == "published":
        unmixing = _published(fit.inner, shape, settings)
        return unmixing, contrasts(unmixing @ seen, settings.slope)
    base = whitener(seen)
    turn = rotation(
        base @ seen,
        generator,
        slope=settings.slope,
        literal=settings.literal,
        restarts=settings.restarts,
    )
    unmixing = turn @ base
    contrast = contrasts(unmixing @ seen, settings.slope)
    if settings.solver == "contrast" or kind == "general":
        return unmixing, contrast
    if kind == "nonnegative":
        return nonnegative(unmixing, fit), contrast
    limits = fit if kind == "nonnegative image" else None
    return heavy_tailed(unmixing, seen, limits), contrast


def differences(rows: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    """Differences of neighbors along both image axes, (B, n) to (B, n'), centered.

    Raises:
        ValueError: no (C, H, W) whose product is n.
    """
    if shape is None or not has_neighbors(shape) or math.prod(shape) != rows.shape[1]:
        raise ValueError(f"shape is {shape}; images of {rows.shape[1]} values need (C, H, W)")
    images = rows.reshape(-1, *shape)
    parts = [images.diff(dim=axis).flatten(1) for axis in (2, 3)]
    joined = torch.cat(parts, 1)
    return joined - joined.mean(1, keepdim=True)


def _published(
    inner: Tensor,
    shape: tuple[int, ...] | None,
    settings: Separation,
) -> Tensor:
    """Adam on the contrast with all penalties, from the identity on whitened rows."""
    whiten = whitener(inner - inner.mean(1, keepdim=True))
    raw = whiten @ inner
    weight = torch.eye(len(inner)).to(inner).requires_grad_()
    optimizer = torch.optim.Adam([weight], lr=settings.learning_rate)

    def loss() -> Tensor:
        unit = functional.normalize(weight)
        sources = unit @ raw
        centered = sources - sources.mean(1, keepdim=True)
        total = -contrasts(centered, settings.slope, literal=settings.literal).mean()
        cosine = (unit @ unit.T).abs().fill_diagonal_(0)
        total = total + settings.decorrelation * ((settings.sharpness * cosine).exp() - 1).mean()
        if settings.total_variation:
            variation = differences(sources, shape).abs().mean()
            total = total + settings.total_variation * variation
        if settings.negativity:
            sides = torch.stack([(-sources).relu().norm(dim=1), sources.relu().norm(dim=1)])
            total = total + settings.negativity * sides.amin(0).mean()
        if settings.sparsity:
            total = total + settings.sparsity * sources.abs().mean()
        return total

    with torch.enable_grad():
        for _ in range(settings.steps):
            (weight.grad,) = torch.autograd.grad(loss(), weight)
            optimizer.step()
            if tick():
                break
    return functional.normalize(weight.detach()) @ whiten


def _shrunk(fit: RowSpace) -> Tensor:
    """The rows of the fit, moved to their mean as far as noise explains their spread."""
    mean = fit.inner.mean(1, keepdim=True)
    away = fit.inner - mean
    whiten = whitener(away)
    values, turn = torch.linalg.eigh(whiten @ fit.noise @ whiten.T)
    kept = (1 - values).clamp(0, 1)
    back = torch.linalg.inv(whiten) @ turn
    shrunk: Tensor = mean + (back * kept) @ (turn.T @ whiten @ away)
    return shrunk


def _looks_gaussian(
    contrast: Tensor, columns: int, generator: torch.Generator, slope: float
) -> str | None:
    """Whether two sources or more are no further from Gaussian than rotated noise gets."""
    if len(contrast) == 1:
        return None
    limit = MARGIN * gaussian_ceiling((len(contrast), columns), generator, slope)
    alike = int((contrast <= limit).sum())
    if alike < 2:
        return None
    return f"{alike} of {len(contrast)} sources look Gaussian: nothing tells them apart"


def _too_few_zeros(sources: Tensor, noise: Tensor) -> str | None:
    """Whether some source is 0 too rarely for its zeros to fix it."""
    scale = sources.square().mean(1).sqrt()
    zeros = (sources.abs() < (ZERO * scale + 2 * noise)[:, None]).sum(1)
    least = int(zeros.min())
    if least >= 2 * len(sources):
        return None
    return f"a source is 0 at {least} of {sources.shape[1]} places: too few to tell it by"
