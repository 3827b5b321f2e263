"""Claim 0-6 of paper A, from what `theory.measured` found."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scipy import stats

from leakbound_reproductions.claim import Claim, Finding, Interval, exact, finding, proportion

Make = Callable[[int], Finding]


def theory(found: Mapping[str, Any]) -> Claim:
    """0-6: theorems 3.2, 3.5 and 3.6 with their lemmas."""
    least = min(found["floor"], key=lambda one: one["mean"])
    models = len(found["floor"])
    other = found["algorithm"]
    made = [
        _normal(
            "theorem 3.2: error of the best attacker relative to the lower bound, smallest of "
            f"{models} linear models",
            least,
            (1.0, math.inf),
            "at least 1",
            models,
        ),
        _normal(
            "eq. 6: Fisher information relative to its trace",
            found["fisher"],
            (0.98, 1.02),
            "1",
        ),
        _normal(
            "eq. 5: variance of <g, y> relative to its cost",
            found["utility"],
            (0.98, 1.02),
            "1",
        ),
        _share(
            "theorem 3.5: another covariance of the same cost leaks less",
            found["noise"],
            (0.0, 0.01),
            "never",
        ),
        _computed(
            "theorem 3.6: distance from the linear program's optimum, largest share",
            found["pruning"],
        ),
        _share(
            "lemma 3.8: an estimate along 10 directions is off by more than half",
            found["estimate"],
            (0.0, 0.8),
            "at most 2 / (k epsilon²) = 0.8",
        ),
    ]
    return Claim(
        "0-6",
        "As corrected: the lower bound of theorem 3.2 holds. Theorems 3.5 and 3.6 give the noise "
        "and the mask that leak least at a given utility. Lemma 3.8 estimates what they need.",
        "theorems 3.2, 3.5 and 3.6, eqs. 5 to 7, lemma 3.8",
        "random linear models with Gaussian priors, checked by Monte Carlo and by other solvers. "
        "Formulas are as corrected in the errata. Tolerances: 1 and 0.8 come from the theorem "
        "and the lemma. The 2 % of an equality, 1 % of a share and 1e-6 are ours, above the "
        "resolution of the draws and the solver",
        _all(made),
        "Theorem 3.2 is read with d as the number of input values, as in section 2.2; with d as "
        "the number of parameters, as in section 2, it exceeds the best attacker's error. "
        "Algorithm 1 prints the squared norm; eq. 7 and the proof have the norm. At the same "
        f"cost, eq. 7 leaks less in {other['hits']} of {other['n']} models. This is not judged, "
        "because the paper does not claim it.",
    )


def _normal(
    text: str, of: Mapping[str, float], region: Interval, paper: str, tests: int = 1
) -> Make:
    """A finding on a mean over many draws; the smallest of several tests."""
    error = of["deviation"] / math.sqrt(of["n"])

    def interval(level: float) -> Interval:
        half = float(stats.norm.ppf(1 - (1 - level) / (2 * tests))) * error
        return of["mean"] - half, of["mean"] + half

    return lambda among: finding(
        text, of["mean"], interval, region, n=int(of["n"]), among=among, paper=paper
    )


def _share(text: str, of: Mapping[str, int], region: Interval, paper: str) -> Make:
    value, interval = proportion(of["hits"], of["n"])
    return lambda among: finding(
        f"{text}: share", value, interval, region, n=of["n"], among=among, paper=paper
    )


def _computed(text: str, value: float) -> Make:
    at, interval = exact(value, 1e-9)
    region = (-math.inf, 1e-6)
    return lambda among: finding(text, at, interval, region, n=1, among=among, paper="0")


def _all(made: Sequence[Make]) -> tuple[Finding, ...]:
    return tuple(make(len(made)) for make in made)
