"""Simulate the attained success under correlated noise, and compare mechanisms.

    python benchmarks/correlated_edges.py [COMPARISONS] [DRAWS]

First part: random mechanisms, patterns, noises and error levels. In each comparison, Y = C G +
sigma Z is drawn DRAWS times, the best estimator answers, and its success is compared with the
attained success that `bounds.correlated` states and with its upper bound. It prints how many
comparisons are more than 4 standard errors apart, and how many chance explains (exactly, from
binomial tails).

Second part: which mechanism leaks more at equal epsilon, and at equal error of the prefix sums.
"""

import sys
import time

import numpy as np
from scipy import stats

from leakbound.bounds import conversions
from leakbound.bounds.correlated import (
    Factor,
    Scheme,
)
from leakbound.bounds.from_scratch import exact
from leakbound.bounds.identification import gaussian, kappa_sphere

COMPARISONS, DRAWS = 10_000, 1500
LEAST = 10.0
"""Least variance of a count that is compared: rarer successes are not near normal."""
MECHANISMS = (
    "none",
    "tree",
    "tree_prefixes",
    "band:4",
    "bisr:4",
    "blt:0.985,0.62/0.13,0.3",
    "root",
)
ROUNDS, DIM, KAPPA, MU = 64, 32, 1e-3, 4.0
LEVEL = {"dim": DIM, "eta": 0.5 / DIM}


def own_rounds(factor: Factor, pattern: list[int]) -> float:
    """The noise of a mean over the unit's own releases, over sigma: weaker than 1 / |C p|."""
    return float(np.linalg.norm(factor.inverse[list(pattern)].sum(0))) / len(pattern)


def final_model(factor: Factor, pattern: list[int]) -> float:
    """The noise of the sum of all releases, over sigma and the unit's number of rounds."""
    return float(np.linalg.norm(factor.inverse.sum(0))) / len(pattern)


def random_factor(draw: np.random.Generator) -> Factor:
    """A built-in mechanism, or a random triangular matrix with entries of any sign."""
    rounds, kind = int(draw.integers(1, 13)), int(draw.integers(8))
    if kind == 7:
        return Factor(np.tril(draw.standard_normal((rounds, rounds))) + 3 * np.eye(rounds))
    width = int(draw.integers(1, 6))
    words = ("none", "tree", "tree_prefixes", "root", f"band:{width}", f"bisr:{width}")
    return Factor.parse((*words, "blt:0.9,0.5/0.1,0.2")[kind], rounds)


def simulated(
    factor: Factor, pattern: list[int], sigma: float, dim: int, cosine: float, draws: int,
    draw: np.random.Generator,
) -> int:  # fmt: skip
    """How often (C p)^T Y / |C p|^2 lies within the angle of the truth, from draws of Y."""
    truth = draw.standard_normal(dim)
    truth /= np.linalg.norm(truth)
    signal = factor.matrix[:, pattern].sum(1)
    white = draw.standard_normal((draws, len(signal), dim), dtype=np.float32)
    seen = signal @ (signal[:, None] * truth + sigma * white) / (signal @ signal)
    return int((seen @ truth >= cosine * np.linalg.norm(seen, axis=1)).sum())


def compare(comparisons: int, draws: int) -> None:
    draw, began = np.random.default_rng(0), time.perf_counter()
    apart, chance, above, highest = 0, 0.0, 0, -1.0
    for _ in range(comparisons):
        factor = random_factor(draw)
        pattern = draw.permutation(factor.rounds)[: draw.integers(1, factor.rounds + 1)].tolist()
        dim, e = int(draw.choice([2, 3, 8, 32])), float(draw.uniform(0.05, 0.95))
        level = {"dim": dim, "eta": e / dim}
        value = 0.0
        while draws * value * (1 - value) < LEAST:
            sigma = float(np.exp(draw.uniform(-5, 1))) * factor.attained(pattern)
            value = float(exact(sigma / factor.attained(pattern), **level))
        limit = float(gaussian(sigma / factor.sensitivity(pattern), kappa=kappa_sphere(**level)))
        hits = simulated(factor, pattern, sigma, dim, np.sqrt(1 - e), draws, draw)
        room = 4 * np.sqrt(draws * value * (1 - value))
        apart += abs(hits - draws * value) > room
        law = stats.binom(draws, value)
        chance += law.cdf(np.ceil(draws * value - room) - 1) + law.sf(
            np.floor(draws * value + room)
        )
        above += hits > draws * limit + 4 * np.sqrt(draws * limit * (1 - limit))
        highest = max(highest, value - limit)
    print(
        f"{comparisons} comparisons of {draws} draws, {time.perf_counter() - began:.0f} s: {apart} "
        f"more than 4 standard errors apart ({chance:.2f} expected by chance), {above} above the "
        f"upper bound; largest attained minus upper {highest:.1e}"
    )


def table(pattern: list[int], scheme: Scheme, title: str) -> None:
    """Equal epsilon: mu = MU for the scheme. Equal error: that of `band:4` there."""
    factors = [Factor.parse(name, ROUNDS) for name in MECHANISMS]
    band = factors[MECHANISMS.index("band:4")]
    goal = [band.sensitivity(scheme) / MU * error for error in _losses(band)]
    print(f"\n{title}; T = {ROUNDS}, N = {DIM}, e = 0.5, kappa = {KAPPA:g}")
    print(
        f"equal epsilon: mu = {MU:g}, epsilon {conversions.epsilon(1 / MU, delta=1e-5):.2f} at 1e-5"
    )
    print(
        "| mechanism | sigma | RMSE of sums | largest | attained | own rounds | final model "
        "| mu, equal RMSE | attained | upper | mu, equal largest |"
    )
    for factor in factors:
        delta = factor.sensitivity(scheme)
        sigma, errors = delta / MU, _losses(factor)
        row = [sigma, *(sigma * error for error in errors)]
        row.append(exact(sigma / factor.attained(pattern), **LEVEL))
        for share in (own_rounds(factor, pattern), final_model(factor, pattern)):
            row.append(exact(sigma * share, **LEVEL))
        noise = goal[0] / errors[0]
        row += [delta / noise, exact(noise / factor.attained(pattern), **LEVEL)]
        row.append(gaussian(noise / factor.sensitivity(scheme), kappa=KAPPA))
        row.append(delta * errors[1] / goal[1])
        print(f"| {factor.name} | " + " | ".join(f"{value:.3g}" for value in row) + " |")


def _losses(factor: Factor) -> tuple[float, float]:
    """Root mean squared and largest root mean squared error of the prefix sums at sigma = 1."""
    mean, largest = factor.loss
    return float(np.sqrt(mean)), largest


def main() -> None:
    comparisons = int(sys.argv[1]) if len(sys.argv) > 1 else COMPARISONS
    compare(comparisons, int(sys.argv[2]) if len(sys.argv) > 2 else DRAWS)
    table([0], Scheme(most=1), "one round of an example")
    four = [0, 16, 32, 48]
    table(four, Scheme(separation=16), "four rounds, 16 apart")


if __name__ == "__main__":
    main()
