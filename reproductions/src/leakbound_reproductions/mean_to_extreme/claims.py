"""Claims 3-1 to 3-9 of paper C, IV.3 and IV.6, from what was measured.

Each region is the tolerance. Regions and comparisons were fixed before the first run. Three changes
after it are argued from the paper. 3-8 judged one estimate, which is worse than the zero image
where it refuted the claim. The part of 3-9 on the zero image became IV.3. N = 4 was removed from
3-4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from leakbound_reproductions.claim import (
    Claim,
    Finding,
    Interval,
    Mark,
    finding,
    proportion,
    student,
)
from leakbound_reproductions.mean_to_extreme import draws, risk_claims, trap
from leakbound_reproductions.mean_to_extreme.draws import chi_square, kolmogorov
from leakbound_reproductions.mean_to_extreme.grid import Box, Certificate
from leakbound_reproductions.mean_to_extreme.risk_claims import ABOVE, POSITIVE

ALIGNED = 0.1
"""Largest difference of probabilities, at any eta, that still counts as the same distribution."""
LINEAR, RESNET = trap.KINDS[1:]
MARKS: dict[str, tuple[Mark, ...]] = {
    "3-1": (Mark.THEOREM,),
    "3-2": (Mark.CORRECTED, Mark.THEOREM),
    "3-4": (Mark.THEOREM, Mark.LATE),
    "3-5": (Mark.THEOREM,),
    "3-6": (Mark.THEOREM,),
    "3-7": (Mark.THEOREM,),
    "3-8": (Mark.LATE,),
    "3-9": (Mark.LATE,),
}


def all_claims(measured: Mapping[str, Any], boxes: Sequence[Box]) -> tuple[Claim, ...]:
    """Every claim, in the order of their numbers.

    Args:
        measured: the results of `draws`, `company` and `rivals`, by part.
        boxes: of figures 4 and 5.
    """
    certificates = [Certificate(**row) for row in measured["certificates"]]
    found = (
        law(boxes),
        rows(measured["rows"]),
        sinks(boxes),
        limits(measured["limits"]),
        crossing(measured["crossing"]),
        spread(boxes),
        sightings(measured["sightings"]),
        risk_claims.batches(measured["company"], measured["batches"]),
        risk_claims.others(measured["rivals"]),
        risk_claims.best(measured["rivals"]),
        risk_claims.certificate(certificates),
    )
    return tuple(replace(claim, marks=MARKS.get(claim.number, ())) for claim in found)


def law(boxes: Sequence[Box]) -> Claim:
    """3-1: the chi-square distribution of the errors in the optimal case."""
    found = []
    for dim in trap.DIMS:
        own = [box for box in boxes if (box.dim, box.kind) == (dim, "optimal")]
        worst = max(own, key=lambda box: box.distance)
        value, interval = kolmogorov(worst.distance, worst.draws, len(own))
        found.append(
            finding(
                f"N = {dim}: errors follow the distribution, largest difference in probability "
                f"over {len(own)} noise multipliers from {own[0].noise:g} to {own[-1].noise:g}",
                value,
                interval,
                (0.0, ALIGNED),
                n=worst.draws,
                among=2,
                paper="the distribution of theorem IV.5",
            )
        )
    return Claim(
        "3-1",
        "In the optimal case the mean squared error is distributed as sigma² |X|² / N times a "
        "chi-square variable with N degrees of freedom.",
        "theorem IV.5, figures 4 and 5 (top rows)",
        f"{_images(boxes)}, a linear trap of one row, clip norm 1. Intervals (Dvoretzky, Kiefer "
        f"and Wolfowitz) hold for all noise multipliers at once. Tolerance: {ALIGNED:g} in "
        "probability (ours)",
        tuple(found),
    )


def rows(measured: Mapping[str, list[float]]) -> Claim:
    """3-2: how many rows of the linear trap are enough."""

    def one(count: int, text: str, region: Interval, paper: str) -> Finding:
        value, interval = chi_square(measured[str(count)], 784)
        words = f"M = {count}{text}"
        n = len(measured[str(count)])
        return finding(words, value, interval, region, n=n, among=3, paper=paper)

    value, interval = chi_square(measured["5"], 784)
    low, high = interval(0.95)
    return Claim(
        "3-2",
        "The variance of the reconstruction falls to sigma² |X|² once the linear trap has M >= "
        "(C / |X|)² rows, and no further (theorem IV.1 as corrected).",
        "caption of figure 2, theorem IV.1",
        "MNIST digits through the client, DP-SGD and the linear trap at C / |X| = 5, noise "
        "multiplier 0.1: squared error / (N sigma² |X|²). Tolerance: 3 % (ours), above the "
        "sampling error",
        (
            one(
                24, ", one row fewer: variance relative to its minimum is above 1", ABOVE, "above 1"
            ),
            one(25, " = (C / |X|)²: variance relative to its minimum", (0.97, 1.03), "1"),
            one(100, ", four times as many: variance relative to its minimum", (0.97, 1.03), "1"),
        ),
        "Eq. 16 prints M >= C / |X| instead; the caption of figure 2 and the authors' code do "
        f"not use it. M = 5 leaves {value:.2f} [{low:.2f}, {high:.2f}] times the minimum.",
    )


def sinks(boxes: Sequence[Box]) -> Claim:
    """3-3: what other parameters do to the attack."""
    at = {(box.dim, box.kind, box.noise): box for box in boxes}
    low = trap.PRINTED[0]
    high = trap.PRINTED[-1]
    made: list[Callable[[int], Finding]] = []
    for dim in trap.DIMS:
        for kind in (LINEAR, RESNET):
            own = [box for box in boxes if (box.dim, box.kind) == (dim, kind)]
            least = min(own, key=lambda box: box.raised[0])
            words = (
                f"N = {dim}, {kind}: error rises at every noise level, smallest relative increase"
            )
            more = (least.raised[0] - 1, least.raised[1])
            made.append(_mean(words, more, least.images, POSITIVE, "above 0", len(own)))
        linear = [box for box in boxes if (box.dim, box.kind) == (dim, LINEAR)]
        worst = max(linear, key=lambda box: box.distance)
        made.append(
            _aligned(f"N = {dim}, {LINEAR}: errors follow the distribution", worst, len(linear))
        )
        small = at[dim, RESNET, low]
        words = (
            f"N = {dim}, {RESNET}, noise {low:g}: mean error relative to the distribution's "
            "is above 1"
        )
        made.append(_mean(words, small.excess, small.images, ABOVE, "above 1 (figure 4)"))
        words = f"N = {dim}, {RESNET}, noise {high:g}: errors follow the distribution"
        made.append(_aligned(words, at[dim, RESNET, high]))
    return Claim(
        "3-3",
        "Parameters other than the linear trap only lower the quality of the reconstruction. The "
        "errors still follow the distribution next to a linear layer of a million parameters, "
        "and next to a ResNet except at small noise, where they are larger.",
        "corollary IV.2, section V-B, figures 4 and 5",
        f"{_images(boxes)}, clip norm 1, a linear trap of one row; ResNet-18 replaces ResNet-101. "
        "The distribution is compared with the errors of the attacker in the authors' code, who "
        "does not know what share of the clip norm the other parameters take. The increases are "
        f"those of an attacker who does, on the same draws. Tolerance: {ALIGNED:g} in probability "
        "as in 3-1; otherwise none, the sign decides",
        tuple(make(len(made)) for make in made),
    )


def _mean(
    words: str, of: tuple[float, float], n: int, region: Interval, paper: str, tests: int = 1
) -> Callable[[int], Finding]:
    """A finding on a mean with its standard deviation over n images; the least of several tests."""
    from scipy import stats

    mean, deviation = of

    def interval(level: float) -> Interval:
        at = float(stats.t.ppf(1 - (1 - level) / (2 * tests), n - 1))
        return mean - at * deviation / math.sqrt(n), mean + at * deviation / math.sqrt(n)

    return lambda among: finding(words, mean, interval, region, n=n, among=among, paper=paper)


def _aligned(words: str, box: Box, tests: int = 1) -> Callable[[int], Finding]:
    value, interval = kolmogorov(box.distance, box.draws, tests)
    text = f"{words}, largest difference in probability"
    region = (0.0, ALIGNED)
    return lambda among: finding(
        text, value, interval, region, n=box.draws, among=among, paper="aligned (figure 4)"
    )


def limits(measured: Mapping[str, Any]) -> Claim:
    """3-4: where the risk vanishes."""
    nothing = (0.0, 0.01)
    dim = max(trap.DIMS)

    def one(name: str, words: str, region: Interval, paper: str) -> Finding:
        share = measured[name]
        value, interval = proportion(share["hits"], share["n"])
        return finding(words, value, interval, region, n=share["n"], among=3, paper=paper)

    large = f"N = {dim}, noise {draws.FAR:g}: N eta / |X|² <= {draws.HALF:g} is reached"
    tiny = f"N = {dim}, noise {draws.SMALL:g}: N eta / |X|² <= {draws.NEAR:g} is reached"
    chance = f"identification of {draws.CANDIDATES} candidates at noise 1000 falls to chance"
    found = (
        one(f"far {dim}", large, nothing, "0"),
        one(f"near {dim}", tiny, nothing, "0"),
        one("named", chance, (0.09, 0.11), "kappa = 1/10 (figure 3)"),
    )
    value, interval = proportion(**measured["blind"])
    low, high = interval(0.95)
    return Claim(
        "3-4",
        "In a high-dimensional space, the success probability of the from-scratch attack goes to "
        "0 as eta goes to 0 and as the noise grows. That of identification stays at kappa.",
        "section V-A, figure 3",
        "examples of random direction and norm 1.01, the paper's estimator; orthogonal "
        "candidates for identification; exact intervals for shares. Tolerance (ours): at most 1 "
        "% counts as 0, and 1 % on either side of chance",
        found,
        "At N = 4, which is not a high dimension, the paper's estimator reaches these errors in "
        f"{_of(measured['far 4'])} draws at noise {draws.FAR:g} and {_of(measured['near 4'])} at "
        f"noise {draws.SMALL:g}. Another attacker without candidates does better: at noise 1e6, a "
        f"fixed guess that uses only the norm reaches N eta / |X|² <= 0.5 in {value:.1%} "
        f"[{low:.1%}, {high:.1%}] of {measured['blind']['n']:,} draws; the printed distribution "
        f"gives {measured['blind law']:.1g}.",
    )


def _of(share: Mapping[str, int]) -> str:
    return f"{share['hits']:,} of {share['n']:,}"


def crossing(measured: Mapping[str, Any]) -> Claim:
    """3-5: beyond some eta, more noise is needed than against identification."""
    small, large = draws.ETAS
    regions: dict[float, Interval] = {
        small: (0.0, math.nextafter(draws.GAMMA, 0)),
        large: (math.nextafter(draws.GAMMA, 1), 1.0),
    }
    found = []
    for over in draws.KAPPAS:
        own = measured[str(over)]
        for eta, side in ((small, "less"), (large, "more")):
            share = own[repr(eta)]
            value, interval = proportion(share["hits"], share["n"])
            text = (
                f"kappa = 1/{over}: at the noise that holds identification to 10 % "
                f"({own['noise']:.2f}), an error of eta <= {eta:g} is reached {side} often"
            )
            paper = f"the curves cross at eta = {own['crosses']:.3f} (figure 1, computed)"
            found.append(
                finding(text, value, interval, regions[eta], n=share["n"], among=4, paper=paper)
            )
    return Claim(
        "3-5",
        "Beyond some eta, the from-scratch bound needs more noise than identification, another "
        "goal, for the same probability.",
        "section VI, figure 1",
        "N = 1, |X| = 1, probability 0.1 as in figure 1, which decides; kappa as in its caption "
        "(1/11) and as in the authors' code (1/13)",
        tuple(found),
        "The two bounds are for two goals. For one goal, the prior-only success kappa also "
        "depends on eta, and no such crossing exists (see the errata).",
    )


def spread(boxes: Sequence[Box]) -> Claim:
    """3-6: how the error concentrates."""
    found = []
    for dim in trap.DIMS:
        own = [box for box in boxes if (box.dim, box.kind) == (dim, "optimal")]
        value, interval = student([value for box in own for value in box.spreads])
        groups = sum(len(box.spreads) for box in own)
        words = f"N = {dim}: standard deviation / mean of the error, relative to sqrt(2 / N)"
        found.append(finding(words, value, interval, (0.95, 1.05), n=groups, among=2, paper="1"))
    return Claim(
        "3-6",
        "The error concentrates as the dimension of examples grows: its standard deviation "
        "divided by its mean is sqrt(2 / N).",
        "theorem IV.5, section C of the appendix, figure 5",
        f"{_images(boxes)}. Intervals are over n groups of errors. Tolerance: 5 % (ours)",
        tuple(found),
    )


def sightings(measured: Mapping[str, list[float]]) -> Claim:
    """3-7: the mean of k estimates of one example."""
    found = []
    for times in draws.SIGHTINGS:
        value, interval = chi_square(measured[str(times)], 784)
        words = f"k = {times}: variance of the mean relative to sigma² |X|² / k"
        n = len(measured[str(times)])
        found.append(
            finding(words, value, interval, (0.97, 1.03), n=n, among=len(measured), paper="1")
        )
    return Claim(
        "3-7",
        "The mean of k reconstructions that are known to be of the same example has variance "
        "sigma² |X|² / k.",
        "proposition IV.10",
        "MNIST digits, each sent k times through the client, DP-SGD (clip norm 1, noise "
        "multiplier 0.1) and the linear trap. Tolerance: 3 % (ours), as in 3-2",
        tuple(found),
    )


def _images(boxes: Sequence[Box]) -> str:
    box = boxes[0]
    return (
        f"{box.images} tiles of photographs of each size (N = 4 and N = 3,072), "
        f"{box.draws // box.images} draws of noise each"
    )
