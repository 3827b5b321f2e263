"""What an attacker knows already, and what an update adds to it.

An attacker who knows a part A of the example reaches a goal without the update with the probability
q = E max_c P(X in ball(c) | A): the best answer for each value of what is known. The trade-off
curve F of a whole training bounds the success with the update by F(q), for any q, as F is concave.
So one mechanism gives three statements:

- a stranger knows the population only: `PublicSample` bounds q;
- an intruder also knows A: `informed` bounds q from public examples, if A is coarse;
- anyone, whatever they know: the update adds at most the largest F(q) - q, which is the total
  variation of the mechanism.

If A is nearly unique, no sample can exclude that A determines the rest. The bound on q is then near
1, and the gain is what can be said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from leakbound.bounds.composition import visible
from leakbound.bounds.counting import Lift, PublicSample, gaussian_lift
from leakbound.bounds.distances import Distance
from leakbound.bounds.law import between, non_negative, one, positive, probability, whole

__all__ = [
    "attribute_success",
    "enclosing_radius",
    "gain_of_step",
    "informed",
    "largest_gain",
    "naming_success",
    "noise_for_gain",
]

CELLS = 64
"""Number of intervals of prior successes at first; those that may hold the largest gain are split
into PARTS until it is known to CLOSE, relative, or there are MOST_CELLS."""
PARTS = 4
CLOSE = 1e-5
MOST_CELLS = 300_000
CENTERS = 1000
"""Number of steps of the search for the center of a ball; every center is valid."""


def informed(
    sample: PublicSample,
    known: Sequence[int],
    *,
    distance: Distance | None = None,
    words: str = "some columns",
) -> PublicSample:
    """The same public examples for an attacker who knows some of the columns exactly.

    Only the other columns count: the goal is reached by the distance over them. Without the update,
    the best rule names one candidate for each value of the known columns. It matches N of n public
    examples, at most the sum over these values of the largest ball's count, and N is binomial: the
    count bounds q as K* bounds kappa. The bounds on success follow as for known labels, and known
    labels stay known.

    Args:
        sample: of whole examples.
        known: places of the columns in the flat example.
        distance: which candidates match the unknown columns; by default that of the sample.
        words: what is known, for the sample's name.

    Raises:
        ValueError: a place is outside the example, or every column is known.

    Source: this project; docs/risk.md, "What the attacker already knows".

    Example:
        >>> draw = np.random.default_rng(0)
        >>> sex, other = draw.integers(0, 2, (400, 1)), draw.random((400, 9))
        >>> sample = PublicSample(np.hstack([sex, other]))
        >>> knows_sex = informed(sample, [0])
        >>> knows_sex.dim, knows_sex.largest(0.001), sample.largest(0.001)
        (9, 2, 1)
    """
    places = np.unique(np.asarray(known, dtype=int))
    if places.size and not 0 <= places[0] <= places[-1] < sample.dim:
        raise ValueError(f"known is {list(known)}; give places from 0 to {sample.dim - 1}")
    if places.size == sample.dim:
        raise ValueError("known names every column, so nothing is left to reconstruct")
    values = sample.examples[:, places]
    if sample.labels is not None:
        values = np.column_stack([values, sample.labels])
    group = np.unique(values, axis=0, return_inverse=True)[1].reshape(-1)
    rest = np.delete(sample.examples, places, axis=1)
    # One example of each source was taken already; there is no class beyond those seen.
    sources = None if sample.sources is None else np.arange(sample.n)
    return replace(
        sample,
        examples=rest,
        labels=group,
        sources=sources,
        classes=None,
        distance=sample.distance if distance is None else distance,
        knows=words if sample.labels is None else f"{words} and labels",
    )


def gain_of_step(noise_multiplier: ArrayLike) -> Any:
    """The largest gain of one full-batch release: 2 Phi(1 / (2 s)) - 1.

    Example:
        >>> round(gain_of_step(3.98), 3)
        0.1
    """
    noise = non_negative("noise_multiplier", noise_multiplier)
    with np.errstate(divide="ignore"):
        return one(special.erf(1 / (2 * math.sqrt(2) * noise)))


def noise_for_gain(gain: ArrayLike) -> Any:
    """The noise multiplier of one full-batch release that adds at most `gain` for anyone.

    Example:
        >>> noise_for_gain([0.05, 0.1, 0.2]).round(2).tolist()
        [7.97, 3.98, 1.97]
    """
    wanted = probability("gain", gain)
    return one(1 / (2 * math.sqrt(2) * special.erfinv(wanted)))


def largest_gain(
    lift: Lift | float,
    *,
    most: float = 1.0,
) -> tuple[float, float]:
    """The largest F(q) - q over prior successes q, never below the truth, and its q.

    Args:
        lift: F as in `PublicSample.success_bound`: rising, from the logarithm of a prior success;
            or the noise multiplier of one full-batch release.
        most: the largest q, of an attacker whose success without the update is known to be below.

    Example:
        >>> gain, place = largest_gain(1.0)
        >>> round(gain, 4), round(place, 2)
        (0.3829, 0.31)
    """
    law = lift if callable(lift) else gaussian_lift(lift)
    ends = np.linspace(0.0, most, CELLS + 1)
    left = ends[:-1]
    right = ends[1:]
    while True:
        success = np.minimum(1.0, law(np.log(right)))
        # F rises: within a part F(q) - q is at most F(right) - left.
        above = success - left
        reached = success - right
        best = int(np.argmax(reached))
        gain = float(above.max())
        near = above >= reached[best]
        # Where F(q) - q is flat, every part may hold the largest; the limit stands without more.
        if gain - reached[best] <= CLOSE * gain or near.sum() * PARTS > MOST_CELLS:
            return max(0.0, gain), float(right[best])
        ends = np.linspace(left[near], right[near], PARTS + 1, axis=1)
        left = ends[:, :-1].ravel()
        right = ends[:, 1:].ravel()


def naming_success(
    gallery: int | Sequence[float],
    lift: Lift | float,
) -> float:
    """Upper bound on naming the right one of a public gallery: F(q), with q the best prior answer.

    The true example is one of M candidates, which the attacker has. Without the update the best
    answer is the likeliest one: q = 1 / M if an auditor drew the gallery uniformly. Two candidates
    whose clipped gradients are opposite attain the bound.

    Args:
        gallery: M equally likely candidates; or the probability of each, where they are not.
        lift: as in `largest_gain`.

    Raises:
        ValueError: fewer than one candidate, or probabilities that do not sum to 1.

    Source: this project; docs/risk.md, "Is it this person?".

    Example:
        >>> round(naming_success(100, 1.0), 4), round(naming_success([0.5, 0.3, 0.2], 1.0), 4)
        (0.0924, 0.8413)
    """
    if isinstance(gallery, int):
        q = 1 / int(whole("gallery", gallery))
    else:
        shares = probability("gallery", gallery, closed=True)
        if abs(float(np.sum(shares)) - 1) > 1e-9:
            raise ValueError(f"gallery sums to {float(np.sum(shares)):g}; give probabilities")
        q = float(np.max(shares))
    law = lift if callable(lift) else gaussian_lift(lift)
    return float(law(np.asarray(math.log(q))))


def attribute_success(
    prior: ArrayLike,
    noise_multiplier: ArrayLike,
    *,
    radius: ArrayLike = 1.0,
    sampling_rate: ArrayLike = 1.0,
    steps: ArrayLike = 1,
) -> Any:
    """Upper bound on reading one attribute for an attacker who knows everything else.

    The possible values of the attribute give clipped gradients in a ball of radius R around some
    center. Against the release at the center, each moves the mean by at most R, and the answers
    exclude one another: success is at most F(q) at the shift R / (s C), with q the best
    answer without the update. For two equally likely values this is Phi(R / (s C)), which the
    matched filter attains. The steps that hold the example count as known to the attacker.

    Args:
        prior: q, the best answer's success without the update, such as the largest class's share.
        noise_multiplier: noise standard deviation / clip norm.
        radius: R / clip norm, at most 1 for any model; `enclosing_radius` measures it.
        sampling_rate: probability that a step holds the example.
        steps: number of steps.

    Source: this project; docs/risk.md, "What the attacker already knows".

    Example:
        >>> round(attribute_success(0.6, 0.454), 3)
        0.993
    """
    share = between("radius", radius, 0.0, 1.0)
    q = np.log(positive("prior", probability("prior", prior, closed=True)))
    with np.errstate(divide="ignore", invalid="ignore"):
        noise = non_negative("noise_multiplier", noise_multiplier) / share
    # Values that all give one gradient are never distinguished, not even without noise.
    noise = np.where(share == 0, np.inf, noise)
    return visible(noise, sampling_rate=sampling_rate, steps=steps, log_kappa=q)


def enclosing_radius(vectors: ArrayLike) -> float:
    """The radius of a ball that holds all vectors, at most a few percent above the smallest.

    Shapes: (L, N).

    Source: Badoiu and Clarkson 2003; every center gives a valid radius, the best one is returned.

    Example:
        >>> round(enclosing_radius([[0.0, 0.0], [2.0, 0.0], [1.0, 1.0]]), 3)
        1.0
    """
    points = np.asarray(vectors, dtype=float)
    # Two points are done here: the midpoint is the center.
    first = points[0]
    far = points[np.linalg.norm(points - first, axis=1).argmax()]
    far_from_it = points[np.linalg.norm(points - far, axis=1).argmax()]
    center = (far + far_from_it) / 2
    radius = math.inf
    for step in range(CENTERS):
        distances = np.linalg.norm(points - center, axis=1)
        radius = min(radius, float(distances.max()))
        center = center + (points[distances.argmax()] - center) / (step + 2)
    return radius
