"""Whether releases really have the law that they declare: statistics over many draws."""

from __future__ import annotations

import torch
from scipy import stats
from torch import Tensor

from leakbound.covariance import Structured
from leakbound.testing.common import CHANCE, require
from leakbound.types import Gaussian, Guarantee, Laplace, Update

MOST = 400
"""Coordinates that a law is checked on; of wider updates, evenly spread ones."""


def check_law(
    draws: list[Update], center: Tensor | None, name: str, *, promise: Guarantee | None = None
) -> None:
    """Draws of one release by independent streams have the law they declare.

    Args:
        draws: releases of the same data by different streams.
        name: what messages call the defense.
        center: the noise-free rows (R, P); None takes the mean of the draws in their place.
        promise: KNOWN_NOISE needs a noise law on every draw.
    """
    law = draws[0].law
    for draw in draws:
        require(type(draw.law) is type(law), f"{name} declares another law for another stream")
    if promise is Guarantee.KNOWN_NOISE:
        noisy = isinstance(law, Gaussian | Laplace)
        require(noisy, f"{name} promises a known noise distribution, but its update declares {law}")
    if not isinstance(law, Gaussian | Laplace):
        return
    residual, seen = _standard(draws, center, name)
    if residual.shape[1] == 0:
        return
    _check_spread(residual, seen, law, name, centered=center is None)
    _check_shape(residual, seen, law, name)
    _check_independence(residual, name)
    if center is not None:
        _check_center(residual, seen, name)


def check_exact(draws: list[Update], name: str) -> None:
    """Draws that declare an exact release are the same; with masks, where two of them show.

    What is shown under a mask may be scaled by a factor that hangs on the mask.
    """
    first = draws[0]
    for draw in draws[1:]:
        if first.mask is None and draw.mask is None:
            same = torch.equal(first.rows, draw.rows)
        else:
            shown = _shown(first) & _shown(draw)
            a, b = (u.rows.detach().double() * shown for u in (first, draw))
            lengths = a.norm(dim=1) * b.norm(dim=1)
            same = bool(((a * b).sum(1) >= lengths * (1 - 1e-6)).all())
        require(same, f"{name} declares an exact release, but another stream gives another one")


def spread(update: Update) -> Tensor:
    """The declared standard deviation (R, P) of every coordinate."""
    law = update.law
    if isinstance(law, Gaussian):
        value = torch.as_tensor(law.variance, dtype=torch.float64).sqrt()
    elif isinstance(law, Laplace):
        value = torch.as_tensor(law.scale, dtype=torch.float64) * 2**0.5
    else:
        value = torch.zeros((), dtype=torch.float64)
    return value.cpu().expand(update.rows.shape)


def _shown(update: Update) -> Tensor:
    return torch.ones_like(update.rows, dtype=torch.bool) if update.mask is None else update.mask


def _standard(draws: list[Update], center: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    """(draws, coordinates) residuals over declared standard deviations, 0 where not `seen`."""
    rows = torch.stack([draw.rows.detach().double().cpu() for draw in draws])
    seen = torch.stack([_shown(draw).cpu() for draw in draws])
    std = torch.stack([spread(draw) for draw in draws])
    middle = (rows * seen).sum(0) / seen.sum(0).clamp_min(1)
    rest = (rows - (middle if center is None else center.detach().double().cpu())) * seen
    if center is None:
        count = seen.sum(0).clamp_min(2)
        rest = rest * (count / (count - 1)).sqrt()
    still = (std == 0) & seen
    tiny = 1e-5 * rows.abs().amax() + 1e-12
    require(
        bool((rest[still].abs() <= tiny).all()),
        f"{name} declares no noise on coordinates that have some",
    )
    seen = (seen & (std > 0)).flatten(1)
    residual = torch.where(seen, rest.flatten(1) / std.flatten(1).clamp_min(1e-300), 0)
    law = draws[0].law
    if isinstance(law, Gaussian) and isinstance(law.covariance, Structured):
        residual = law.covariance.whiten(rest.flatten(0, 1)).reshape(len(rest), -1)
    width = residual.shape[1]
    index = torch.arange(width)
    if width > MOST:
        index = torch.linspace(0, width - 1, MOST).long()
    index = index[seen[:, index].sum(0) > len(draws) / 10]
    return residual[:, index], seen[:, index]


def _check_spread(
    residual: Tensor, seen: Tensor, law: Gaussian | Laplace, name: str, *, centered: bool
) -> None:
    """Variance is 1: pooled, and of every coordinate on its own."""
    kurtosis = 3.0 if isinstance(law, Gaussian) else 6.0
    count = seen.sum(0).double() - (1 if centered else 0)
    squares = residual.square()
    if centered:
        squares = squares * (count / (count + 1))
    each = squares.sum(0)
    total, number = float(each.sum()), float(count.sum())
    ratio = total / number
    word = type(law).__name__
    surprise = abs(total - number) / ((kurtosis - 1) * number) ** 0.5
    require(
        2 * stats.norm.sf(surprise) > CHANCE,
        f"{name} declares {word} noise, but its variance is {ratio:.3f} times the declared one",
    )
    if isinstance(law, Gaussian):
        low = stats.chi2.cdf(each.numpy(), count.numpy())
        worst = float(min(low.min(), (1 - low).min()))
        require(
            worst * 2 * len(each) > CHANCE,
            f"{name} declares a Gaussian variance that is wrong on some coordinates",
        )


def _check_shape(residual: Tensor, seen: Tensor, law: Gaussian | Laplace, name: str) -> None:
    values = residual[seen].numpy()
    if isinstance(law, Gaussian):
        found = stats.kstest(values, stats.norm.cdf)
    else:
        found = stats.kstest(values, stats.laplace(scale=0.5**0.5).cdf)
    word = type(law).__name__
    require(found.pvalue > CHANCE, f"{name} declares {word} noise, but its shape is another")


def _check_independence(residual: Tensor, name: str) -> None:
    """No two coordinates (of any layer or row) move together, and not all of them a little."""
    draws, width = residual.shape
    if width < 2:
        return
    unit = residual / residual.norm(dim=0).clamp_min(1e-300)
    upper = torch.triu(unit.T @ unit, 1)
    pairs = width * (width - 1) / 2
    limit = stats.norm.isf(CHANCE / 2 / pairs) / draws**0.5
    require(
        float(upper.abs().max()) < min(0.95, 1.2 * limit),
        f"{name} gives two coordinates noise that moves together; draw it for each of them",
    )
    average = float(upper.square().sum() / pairs) * draws
    require(
        average < 1.1 + 6 * (2 / pairs) ** 0.5,
        f"{name} gives noise that is correlated over many coordinates",
    )


def _check_center(residual: Tensor, seen: Tensor, name: str) -> None:
    count = seen.sum(0).double()
    shift = (residual.sum(0) / count.sqrt()).square().sum()
    chance = stats.chi2.sf(float(shift), residual.shape[1])
    require(chance > CHANCE, f"{name} releases rows whose mean is not what `imitate` gives")
