"""Figures 4 and 5: errors of the linear trap by noise, sinks and sizes, with both distributions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from leakbound.attacks.trap import max_success_estimate, shrinkage, sphere_mean, unbiased
from leakbound.bounds import from_scratch, identification
from leakbound.randomness import stream
from leakbound_reproductions.mean_to_extreme import trap
from leakbound_reproductions.mean_to_extreme.unbiased import unbiased_error, unbiased_success

Array = NDArray[Any]
Found = dict[tuple[int, str], trap.Records]
LEVELS = (0.001, 0.01, 0.1)
PROMISED_AT = {4: (0.01, 0.1, 0.3, 1.0), 3072: (0.002, 0.0036, 0.006, 0.01, 0.1)}
"""Noise multipliers of the certificates, across the transition of each size."""
GROUPS = 10
"""Parts of a box whose spreads are independent."""
SHOWN = (0.025, 0.25, 0.5, 0.75, 0.975)
TOLERANCE = 4.0
"""Standard errors by which a measured share may lie above a bound: 1 of 30,000 by chance."""


@dataclass(frozen=True)
class Box:
    """One box of figures 4 and 5.

    Attributes:
        draws: how many errors it has, `repeats` per image.
        distance: largest difference between the distribution of errors and paper C's, which has no
            sink. The attacker is that of the paper's code, who ignores the sink.
        fit: the same for an attacker who knows the sink, with each image's effective noise.
        quantiles: of the errors, at `SHOWN`.
        excess: error relative to the distribution's, mean over images, and its standard deviation
            over them.
        raised: error of an attacker who knows the sink relative to no sink at the same draws,
            likewise.
        spreads: (standard deviation / mean) of groups of errors, divided by sqrt(2 / N).
    """

    dim: int
    kind: str
    noise: float
    draws: int
    images: int
    distance: float
    fit: float
    quantiles: tuple[float, ...]
    excess: tuple[float, float]
    raised: tuple[float, float]
    spreads: tuple[float, ...]


def box(records: trap.Records, dim: int, kind: str, noise: float, repeats: int) -> Box:
    """One box: all images with `repeats` draws of noise each."""

    def errors(found: trap.Records, *, scale_known: bool) -> Array:
        source = stream(1, "boxes", dim, kind, repr(noise))
        drawn = [
            trap.errors(found, noise, unbiased, source, scale_known=scale_known).numpy()
            for _ in range(repeats)
        ]
        return np.stack(drawn)

    known, forgot = (errors(records, scale_known=told) for told in (True, False))
    alone = errors(records.alone(), scale_known=True)
    effective = from_scratch.effective_noise(
        noise, clip_norm=trap.CLIP, norm=trap.NORM, rest_norm=records.rest.numpy()
    )
    law = unbiased_success
    over = forgot.mean(0) / (noise * trap.NORM) ** 2
    more = (known / alone).mean(0)
    groups = np.array_split(known.ravel(), GROUPS)
    expected = np.sqrt(2 / dim)
    return Box(
        dim,
        kind,
        noise,
        known.size,
        known.shape[1],
        _distance(law(noise, dim=dim, eta=forgot, norm=trap.NORM)),
        _distance(law(effective, dim=dim, eta=known, norm=trap.NORM)),
        tuple(float(q) for q in np.quantile(forgot, SHOWN)),
        (float(over.mean()), float(over.std(ddof=1))),
        (float(more.mean()), float(more.std(ddof=1))),
        tuple(float(g.std(ddof=1) / g.mean() / expected) for g in groups),
    )


def _distance(places: Any) -> float:
    """Kolmogorov's distance, for values that should be uniform."""
    return float(stats.kstest(np.asarray(places).ravel(), "uniform").statistic)


@dataclass(frozen=True)
class Certificate:
    """Paper C's promise at one level, and what an attacker attains.

    Attributes:
        promised: at most this share of errors is below eta, according to `unbiased_success`.
        hits, n: how often the attacker who knows the norm is below eta.
        exact: gamma* there; upper: what no attacker exceeds.
    """

    dim: int
    noise: float
    promised: float
    eta: float
    hits: int
    n: int
    exact: float
    upper: float


def certificates(draws: int) -> list[Certificate]:
    """How often the estimator that attains gamma* exceeds paper C's certificates.

    Args:
        draws: for each certificate.
    """
    return [
        _certificate(dim, noise, level, eta, draws)
        for dim in trap.DIMS
        for noise in PROMISED_AT[dim]
        for level in LEVELS
        for eta in [float(unbiased_error(noise, dim=dim, gamma=level, norm=trap.NORM))]
    ]


def _certificate(dim: int, noise: float, level: float, eta: float, draws: int) -> Certificate:
    source = stream(2, "certificates", dim, repr(noise), repr(level))
    hits = n = 0
    while n < draws:
        records = trap.directions(dim, min(500, draws - n), source)
        errors = trap.errors(records, noise, lambda r: max_success_estimate(r, eta), source)
        hits = hits + int((errors <= eta).sum())
        n = n + len(errors)
    exact = float(from_scratch.exact(noise, dim=dim, eta=eta, norm=trap.NORM))
    blind = identification.log_kappa_sphere(dim=dim, eta=eta, norm=trap.NORM)
    upper = float(identification.gaussian(noise, log_kappa=blind))
    return Certificate(dim, noise, level, eta, hits, n, exact, upper)


@dataclass(frozen=True)
class Beaten:
    """Comparisons of estimators with gamma*; `above` lists those that exceed it."""

    compared: int
    above: tuple[str, ...]
    worst: float


def beaten(found: Found) -> Beaten:
    """Whether any estimator's share of successes lies above gamma*.

    Real images included: all estimators are rotation-equivariant, so their success is the same for
    every direction. The exception is the zero image, which succeeds from |X|^2 / N on.
    """
    estimators = {"unbiased": unbiased, "shrinkage": shrinkage, "sphere": sphere_mean}
    compared = 0
    worst = -np.inf
    above = []
    for (dim, kind), records in found.items():
        for noise in trap.NOISES:
            for name, estimator in estimators.items():
                source = stream(3, "beaten", dim, kind, repr(noise), name)
                errors = trap.errors(records, noise, estimator, source).numpy()
                levels = np.quantile(errors, [0.02, 0.1, 0.5, 0.9])
                fresh = trap.errors(records, noise, estimator, source).numpy()
                for eta in levels:
                    bound = float(from_scratch.exact(noise, dim=dim, eta=eta, norm=trap.NORM))
                    share = float((fresh <= eta).mean())
                    n = len(fresh)
                    spread = max(np.sqrt(bound * (1 - bound) / n), 1 / n)
                    z = (share - bound) / spread
                    compared = compared + 1
                    worst = max(worst, z)
                    if z > TOLERANCE:
                        above.append(f"{name}, N={dim}, {kind}, noise {noise:g}: {share} > {bound}")
    return Beaten(compared, tuple(above), float(worst))
