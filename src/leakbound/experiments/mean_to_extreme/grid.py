"""Figures 4 and 5: errors of the trap over noise, sinks and sizes, against both laws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from leakbound.attacks.trap_estimators import most_often, shrinkage, sphere_mean, unbiased
from leakbound.bounds import from_scratch, identification
from leakbound.experiments.mean_to_extreme import trap
from leakbound.random import stream

Array = NDArray[Any]
LEVELS = (0.001, 0.01, 0.1)
PROMISED_AT = {4: (0.01, 0.1, 0.3, 1.0), 3072: (0.002, 0.0036, 0.006, 0.01, 0.1)}
"""Noise multipliers of the certificates, across the transition of each size."""
REPEATS = 20
TOLERANCE = 4.0
"""Standard errors by which a measured share may lie above a bound: 1 of 30,000 by chance."""


@dataclass(frozen=True)
class Row:
    """One box of figures 4 and 5.

    Attributes:
        fits: p-value of Kolmogorov-Smirnov against the law at the effective noise of each image.
        coverage: share of errors below the law's 95 % quantile.
        ideal: the same for paper C's law, which knows no sink; 1 where the sink only adds error.
        ignored: mean error over the law's where the attacker forgets the sink in the scale.
    """

    dim: int
    kind: str
    noise: float
    errors: Array
    fits: float
    coverage: float
    ideal: float
    ignored: float


@dataclass(frozen=True)
class Certificate:
    """Paper C's promise at one level, and what an attacker makes of it.

    Attributes:
        promised: at most this share of errors is below eta, says `unbiased`.
        hits, n: how often the attacker that knows the norm is below eta.
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


def boxes(found: dict[tuple[int, str], trap.Records]) -> list[Row]:
    """All boxes: sizes x sinks x noises."""
    rows = []
    for (dim, kind), records in found.items():
        for noise in trap.NOISES:
            source = stream(1, "boxes", dim, kind, repr(noise))
            errors = trap.errors(records, noise, unbiased, source).numpy()
            rest = records.rest.numpy()
            effective = from_scratch.effective_noise(
                noise, clip_norm=trap.CLIP, norm=trap.NORM, rest_norm=rest
            )
            place = np.asarray(
                from_scratch.unbiased(effective, dim=dim, eta=errors, norm=trap.NORM)
            )
            paper = from_scratch.unbiased(noise, dim=dim, eta=errors, norm=trap.NORM)
            again = stream(1, "boxes", dim, kind, repr(noise))
            ignored = trap.errors(records, noise, unbiased, again, scale_known=False).mean()
            rows.append(
                Row(
                    dim,
                    kind,
                    noise,
                    errors,
                    float(stats.kstest(place, "uniform").pvalue),
                    float((place <= 0.95).mean()),
                    float((np.asarray(paper) <= 0.95).mean()),
                    float(ignored) / float(np.mean((effective * trap.NORM) ** 2)),
                )
            )
    return rows


def certificates() -> list[Certificate]:
    """How often the estimator that attains gamma* beats paper C's certificates."""
    rows = []
    for dim in trap.DIMS:
        for noise in PROMISED_AT[dim]:
            for level in LEVELS:
                eta = float(
                    from_scratch.unbiased.eta_at(noise, dim=dim, gamma=level, norm=trap.NORM)
                )
                rows.append(_certificate(dim, noise, level, eta))
    return rows


def _certificate(dim: int, noise: float, level: float, eta: float) -> Certificate:
    source = stream(2, "certificates", dim, repr(noise), repr(level))
    hits = n = 0
    for _ in range(REPEATS):
        records = trap.directions(dim, trap.IMAGES, source)
        errors = trap.errors(records, noise, lambda r: most_often(r, eta), source)
        hits, n = hits + int((errors <= eta).sum()), n + len(errors)
    exact = float(from_scratch.exact(noise, dim=dim, eta=eta, norm=trap.NORM))
    blind = identification.log_kappa_sphere(dim=dim, eta=eta, norm=trap.NORM)
    upper = float(identification.gaussian(noise, log_kappa=blind))
    return Certificate(dim, noise, level, eta, hits, n, exact, upper)


@dataclass(frozen=True)
class Beaten:
    """Comparisons of estimators with the edges that cover them; `above` lists what beat one."""

    compared: int
    above: tuple[str, ...]
    worst: float


def beaten(found: dict[tuple[int, str], trap.Records]) -> Beaten:
    """Whether any estimator's share of successes lies above gamma* or the upper edge.

    On real images too: all estimators turn with the record, so their success is the same for every
    direction, except the zero image, which has its own rule (it succeeds from |X|^2 / N on).
    """
    estimators = {"unbiased": unbiased, "shrinkage": shrinkage, "sphere": sphere_mean}
    compared, worst, above = 0, -np.inf, []
    for (dim, kind), records in found.items():
        for noise in trap.NOISES:
            for name, estimator in estimators.items():
                source = stream(3, "beaten", dim, kind, repr(noise), name)
                errors = trap.errors(records, noise, estimator, source).numpy()
                levels = np.quantile(errors, [0.02, 0.1, 0.5, 0.9])
                fresh = trap.errors(records, noise, estimator, source).numpy()
                for eta in levels:
                    bound = float(from_scratch.exact(noise, dim=dim, eta=eta, norm=trap.NORM))
                    share, n = float((fresh <= eta).mean()), len(fresh)
                    spread = max(np.sqrt(bound * (1 - bound) / n), 1 / n)
                    z = (share - bound) / spread
                    compared, worst = compared + 1, max(worst, z)
                    if z > TOLERANCE:
                        above.append(f"{name}, N={dim}, {kind}, noise {noise:g}: {share} > {bound}")
    return Beaten(compared, tuple(above), float(worst))


def gather() -> dict[tuple[int, str], trap.Records]:
    """The records of every size with every sink."""
    return {(dim, kind): trap.records(dim, kind) for dim in trap.DIMS for kind in trap.KINDS}
