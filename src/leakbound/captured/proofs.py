"""What a captured update itself proves or refutes of its client's images and noise."""

from __future__ import annotations

import math

import torch

from leakbound.attacks import LinearInversion
from leakbound.attacks.analytic import input_layer
from leakbound.attacks.base import Attack
from leakbound.covariance import Structured
from leakbound.types import (
    Exact,
    Gaussian,
    Laplace,
    NotApplicable,
    Observation,
    Reconstruction,
)

CERTAIN = 1e-4
"""The share that an outer product may leave of a layer's gradient to be called exact."""
AGREES = 0.999
"""The share of the update's direction that a certified image must give again."""
OUTSIDE = 1e-3
"""How far outside the input range, in units of its width, a value may lie by rounding."""
RARE = 1e-6
"""Noise of the declared law has less energy than this bound allows with this probability."""


def certificate(
    seen: Observation, attack: Attack, answer: Reconstruction, direction: float | None
) -> str | None:
    """A proof that the answer is the input, where the update holds one; in a sentence.

    Without noise and defense, of one example: the first linear layer's gradient is an outer product
    with an image inside the input range, and training on that image gives the update again.

    Args:
        seen: of an update without a declared defense.
        attack: which made the answer.
        answer: the image.
        direction: the share of the update that training on the answer gives, at the best length.
    """
    exact = isinstance(seen.update.law, Exact) and seen.update.mask is None
    if not (isinstance(attack, LinearInversion) and exact and seen.examples == 1):
        return None
    if not answer.objective < CERTAIN or answer.problem or outside(seen) is not None:
        return None
    if direction is None or not direction > AGREES:
        return None
    return (
        "the gradient of the first linear layer is an outer product with one image up to "
        f"{answer.objective:.1g} of its energy, and training on that image gives the update's "
        "direction again: of one example, for SGD with or without momentum, no other image sends "
        "this, whatever the number of local steps"
    )


def outside(seen: Observation) -> str | None:
    """A note where the one image that the first layer gives away lies outside the input range."""
    exact = isinstance(seen.update.law, Exact) and seen.update.mask is None
    if seen.examples != 1 or not exact:
        return None
    try:
        name = input_layer(seen.task, seen.input_shape)
    except NotApplicable:
        return None
    parts = seen.task.unflatten(seen.update.rows[0].double())
    prefix = f"{name}." if name else ""
    weight, bias = parts[prefix + "weight"], parts[prefix + "bias"]
    if not bool((bias != 0).any()):
        return None
    image = bias @ weight / bias.square().sum()
    if (weight - bias[:, None] * image).norm() > 0.1 * weight.norm():  # no outer product
        return None
    low, high = seen.task.input_range
    least, most = float(image.min()), float(image.max())
    slack = OUTSIDE * (high - low)
    if least >= low - slack and most <= high + slack:
        return None
    least = low if abs(least - low) < slack else least
    most = high if abs(most - high) < slack else most
    return (
        f"the first layer gives values from {least:.3g} to {most:.3g}, outside of input_range "
        f"{low:g} to {high:g}: what is rebuilt is cut off there, and nothing is certified; give "
        f"the range that the model is fed (--input-range {min(low, least):.3g} "
        f"{max(high, most):.3g})"
    )


def missing_noise(seen: Observation) -> str | None:
    """A note where the update has less energy than the declared noise alone; None elsewhere.

    What is sent plus independent symmetric noise is seldom shorter than the noise alone (Anderson's
    inequality). Gaussian noise: the lower tail of chi-square; Laplace noise: Maurer's inequality
    for sums of positive variables.
    """
    law, rows = seen.update.law, seen.update.rows.double()
    if not isinstance(law, Gaussian | Laplace) or law.private or not seen.threat.defense_known:
        return None
    if isinstance(law, Gaussian) and isinstance(law.covariance, Structured):
        white = law.covariance.whiten(rows)
    else:
        known = seen.noise_variance
        assert known is not None  # the law is one of known variance
        variance = known.to(rows)
        white = rows[variance > 0] / variance[variance > 0].sqrt()
    count, energy = white.numel(), float(white.square().sum())
    if not count:
        return None
    if isinstance(law, Gaussian):
        halves = torch.tensor((count / 2, energy / 2), dtype=torch.float64)
        absent = float(torch.special.gammainc(halves[0], halves[1])) < RARE
    else:  # the fourth moment is 6 at variance 1
        absent = energy < count - math.sqrt(2 * math.log(1 / RARE) * 6 * count)
    if not absent:
        return None
    share = energy / count
    shown = f"{share:.2%}" if share >= 1e-4 else f"{share:.1e}"
    return (
        f"the update has {shown} of the declared noise's energy: that noise was not added, so "
        "nothing that rests on it holds; leave the defense out, or give the right one (and the "
        "right learning rate)"
    )
