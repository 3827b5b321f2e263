"""Claims 0-1 to 0-6 of paper A, from what was measured at one scale.

Each region is the tolerance; it and the comparisons were fixed before the first run, but for 0-5:
a first look had weights and biases apart, until table 1 was seen to call each of them a layer. The
paper's attacker, which knows nothing of the defense, decides; attackers who know are told in a
remark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import stats

from leakbound.experiments.claim import Claim, Finding, Interval, finding, proportion, student
from leakbound.experiments.claim import exact as numerical
from leakbound.experiments.optimal_defenses.claims import PAPER
from leakbound.experiments.optimal_defenses.points import Key, Point
from leakbound.experiments.optimal_defenses.settings import (
    CUT,
    EQUAL,
    KEPT,
    LOUD,
    MAGNITUDE,
    OURS,
    PRUNED,
    Setting,
)
from leakbound.experiments.paired import differences_at_equal_loss, logs

POSITIVE = (math.nextafter(0.0, 1.0), math.inf)
ALIKE = (-3.0, 3.0)
"""dB: errors within a factor of two are comparable."""
UNEVEN = (3.0, math.inf)
"""Noise of one layer over another's that counts as significantly higher."""
Seeds = Mapping[int, float]
Make = Callable[[int], Finding]


@dataclass(frozen=True)
class Measured:
    """What one scale gave.

    Attributes:
        naive, aware: errors under the paper's attack, and under attacks that know the defense.
        losses: after 5 steps on one batch, by seed.
        trained: trainings with batches that change.
        layers: noise in each tensor under `OURS` at `LOUD`, by seed.
        theory: see `theory.measured`.
        sizes: parameters of each tensor.
    """

    setting: Setting
    naive: Mapping[Key, Point]
    losses: Mapping[Key, Seeds]
    trained: Mapping[Key, Point]
    layers: Mapping[int, Mapping[str, float]]
    theory: Mapping[str, Any]
    aware: Mapping[Key, Point] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    def error(self, key: Key, aware: bool = False) -> Seeds:
        """Mean squared errors by seed: the paper's attack, or the best of all that know."""
        return self.aware[key].strongest() if aware else self.naive[key].mse[PAPER]


def noise(name: str, level: float) -> Key:
    """A noise defense."""
    return Key(name, "noise_std", level)


def rate(name: str, level: float) -> Key:
    """A pruning defense."""
    return Key(name, "rate", level)


def all_claims(measured: Measured) -> tuple[Claim, ...]:
    """Every claim, in the order of their numbers."""
    return (
        pruning_trade(measured),
        pruning_errors(measured),
        pruning_speed(measured),
        noises(measured),
        layers(measured),
        theory(measured.theory),
    )


def pruning_trade(measured: Measured) -> Claim:
    """0-1: more error for the same loss."""
    made, why = _at_equal_loss(measured, PRUNED, MAGNITUDE, "figures 2 and 7")
    for level, source in ((0.7, "section 4.1, figure 2"), (0.8, "figure 3")):
        a, b = rate(PRUNED, level), rate(MAGNITUDE, CUT)
        text = f"{level:.0%} optimal against {CUT:.0%} magnitude"
        gains = _less(logs(measured.error(a)), logs(measured.error(b)))
        made.append(_mean(f"{text}: higher error", gains, POSITIVE, "dB", f"above 0 ({source})"))
        gains = _less(measured.losses[b], measured.losses[a])
        made.append(_mean(f"{text}: lower loss", gains, POSITIVE, "", f"above 0 ({source})"))
    keys = [(rate(PRUNED, level), rate(MAGNITUDE, CUT)) for level in (0.7, 0.8)]
    return Claim(
        "0-1",
        "Optimal pruning has a higher reconstruction error at the same training loss; 70 % and "
        "80 % optimal pruning beat 90 % magnitude pruning on both axes.",
        "section 4.1, figures 2, 3 and 7",
        _scale(measured) + "; losses after 5 steps of Adam on one batch of 64. Figures 2 and 3 "
        "are of CIFAR-10",
        _all(made),
        why + _knowing(measured, keys),
    )


def pruning_errors(measured: Measured) -> Claim:
    """0-2: more error at the same rate."""
    made: list[Make] = []
    for level in measured.setting.rates:
        a, b = rate(PRUNED, level), rate(MAGNITUDE, level)
        gains = _less(logs(measured.error(a)), logs(measured.error(b)))
        text = f"{level:.0%}: higher mean squared error"
        made.append(_mean(text, gains, POSITIVE, "dB", "above 0 (figure 5)"))
        psnr = [measured.naive[key].psnr[PAPER] for key in (b, a)]
        text = f"{level:.0%}: lower PSNR, mean over images"
        made.append(_mean(text, _less(*psnr), POSITIVE, "dB", "above 0 (figure 5)"))
    levels = measured.setting.rates
    return Claim(
        "0-2",
        "At high pruning ratios optimal pruning consistently has a higher mean squared error and a "
        "lower PSNR than magnitude pruning at the same ratio.",
        "section D.1.1, figure 5",
        _scale(measured),
        _all(made),
        _knowing(measured, [(rate(PRUNED, x), rate(MAGNITUDE, x)) for x in levels]),
    )


def pruning_speed(measured: Measured) -> Claim:
    """0-3: faster training at similar privacy."""
    a, b = rate(PRUNED, KEPT), rate(MAGNITUDE, CUT)
    faster = _less(measured.trained[b].late, measured.trained[a].late)
    alike = _less(logs(measured.error(a)), logs(measured.error(b)))
    made = [
        _mean(
            f"loss after {measured.setting.rounds} rounds is lower",
            faster,
            POSITIVE,
            "",
            "above 0 (figure 6)",
        ),
        _mean("error differs by less than a factor of two", alike, ALIKE, "dB", "0 (figure 5)"),
    ]
    return Claim(
        "0-3",
        "80 % optimal pruning trains faster than 90 % magnitude pruning, at similar privacy.",
        "section D.1.1, figure 6",
        _scale(measured) + "; 4 clients x 16 images a round, Adam at 5e-4",
        _all(made),
    )


def noises(measured: Measured) -> Claim:
    """0-4: comparable error and a lower loss at the same noise."""
    made, why = _at_equal_loss(measured, OURS, EQUAL, "figures 4 and 10")
    for level in measured.setting.noises:
        a, b = noise(OURS, level), noise(EQUAL, level)
        gains = _less(logs(measured.error(a)), logs(measured.error(b)))
        text = f"noise {level:g}: error differs by less than a factor of two"
        made.append(_mean(text, gains, ALIKE, "dB", "0 (figure 8)"))
    ours, theirs = (measured.trained[noise(name, LOUD)] for name in (OURS, EQUAL))
    text = f"noise {LOUD:g}: loss after {measured.setting.rounds} rounds is lower"
    made.append(_mean(text, _less(theirs.late, ours.late), POSITIVE, "", "above 0 (figure 9)"))
    gains = _less(ours.accuracy, theirs.accuracy)
    text = f"noise {LOUD:g}: higher test accuracy"
    made.append(_mean(text, gains, POSITIVE, "", "0.910 - 0.886 = 0.024 (section D.2)"))
    keys = [(noise(OURS, x), noise(EQUAL, x)) for x in measured.setting.noises]
    return Claim(
        "0-4",
        "At the same noise scale optimal noise protects comparably and trains faster; it has the "
        "better trade of error against loss.",
        "sections 4.2 and D.1.2, figures 4, 8, 9 and 10",
        _scale(measured) + "; the same root mean square of the noise; losses after 5 steps of Adam "
        "on one batch of 64, and of trainings with 4 clients x 16 images a round, Adam at 1e-3",
        _all(made),
        why + _knowing(measured, keys),
    )


def layers(measured: Measured) -> Claim:
    """0-5: noise differs between layers."""

    def spans(part: str) -> list[float]:
        each = [[v for n, v in one.items() if n.endswith(part)] for one in measured.layers.values()]
        return [math.log(max(own) / min(own)) for own in each]

    middle, law = student(spans(""))
    words = {part: math.exp(float(np.mean(spans(part)))) for part in ("weight", "bias")}
    return Claim(
        "0-5",
        "Some layers get significantly more noise than others.",
        "section D.4, figure 14",
        f"SimpleConvNet on MNIST, optimal noise of root mean square {LOUD:g} over 5 steps; layers "
        "as table 1 has them, weights and biases apart; geometric means over seeds; at least three "
        "times as much counts as significant",
        _all([_ratio("largest over smallest layer's noise", middle, law, len(measured.layers))]),
        f"Among the weights alone it is {words['weight']:.2f} times as much, among the biases "
        f"alone {words['bias']:.2f} times.",
    )


def _ratio(text: str, middle: float, law: Callable[[float], Interval], n: int) -> Make:
    def interval(level: float) -> Interval:
        low, high = law(level)
        return math.exp(low), math.exp(high)

    value = math.exp(middle)
    return lambda among: finding(
        text, value, interval, UNEVEN, n=n, among=among, paper="more than 1 (figure 14)"
    )


def theory(found: Mapping[str, Any]) -> Claim:
    """0-6: theorems 3.2, 3.5 and 3.6 with what they rest on."""
    least = min(found["floor"], key=lambda one: one["mean"])
    models = len(found["floor"])
    made = [
        _normal(
            f"theorem 3.2: error of the best attacker over the floor, least of {models} linear "
            "models",
            least,
            (1.0, math.inf),
            "at least 1",
            models,
        ),
        _normal("eq. 6: Fisher information over its trace", found["fisher"], (0.98, 1.02), "1"),
        _normal("eq. 5: variance of <g, y> over its cost", found["utility"], (0.98, 1.02), "1"),
        _share(
            "theorem 3.5: another covariance of the same cost tells less",
            found["noise"],
            (0.0, 0.01),
            "never",
        ),
        _share(
            "eq. 7 tells less than algorithm 1 with the square at the same cost",
            found["algorithm"],
            (0.95, 1.0),
            "always",
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
        "The floor of theorem 3.2 holds; theorems 3.5 and 3.6 give the noise and the mask that "
        "tell least at a given utility; lemma 3.8 estimates what they need.",
        "theorems 3.2, 3.5 and 3.6, eqs. 5 to 7, lemma 3.8",
        "random linear models with Gaussian priors, Monte Carlo and other solvers; formulas as "
        "corrected in the errata",
        _all(made),
        "Theorem 3.2 is read with d as the number of input values, as in section 2.2; with d as "
        "the number of parameters, as in section 2, it exceeds the best attacker's error. "
        "Algorithm 1 prints the squared norm where eq. 7 and the proof have the norm.",
    )


def _mean(text: str, gains: Sequence[float], region: Interval, unit: str, paper: str) -> Make:
    value, interval = student(gains)
    return lambda among: finding(
        text, value, interval, region, n=len(gains), among=among, unit=unit, paper=paper
    )


def _normal(
    text: str, of: Mapping[str, float], region: Interval, paper: str, tests: int = 1
) -> Make:
    """Of a mean over many draws; the least of several tests."""
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
    at, interval = numerical(value, 1e-9)
    region = (-math.inf, 1e-6)
    return lambda among: finding(text, at, interval, region, n=1, among=among, paper="0")


def _at_equal_loss(
    measured: Measured, ours: str, theirs: str, source: str
) -> tuple[list[Make], str]:
    """The finding at equal loss, or why there is none."""
    by, levels = "noise_std", measured.setting.noises
    if ours == PRUNED:
        by, levels = "rate", measured.setting.rates
    families = [
        [
            (measured.losses[key], measured.error(key))
            for key in (Key(name, by, level) for level in levels)
        ]
        for name in (ours, theirs)
    ]
    gains, seeds = differences_at_equal_loss(*families)
    if len(gains) < 2 or 2 * len(gains) <= seeds:
        return [], f"The losses of both overlap in {len(gains)} of {seeds} seeds: not compared. "
    text = "higher error at the same loss after 5 steps"
    return [_mean(text, gains, POSITIVE, "dB", f"above 0 ({source})")], ""


def _all(made: Sequence[Make]) -> tuple[Finding, ...]:
    return tuple(make(len(made)) for make in made)


def _less(a: Seeds, b: Seeds) -> list[float]:
    """A - b over the seeds that both have."""
    return [a[seed] - b[seed] for seed in sorted(set(a) & set(b))]


def _knowing(measured: Measured, keys: Sequence[tuple[Key, Key]]) -> str:
    """Our remark: the same differences of errors against attackers who know the defense."""
    if not measured.aware:
        return ""
    parts = []
    for a, b in keys:
        gains = _less(*(logs(measured.error(key, aware=True)) for key in (a, b)))
        mean, interval = student(gains)
        low, high = interval(0.95)
        parts.append(f"{a.level:g} against {b.level:g}: {mean:+.1f} [{low:+.1f}, {high:+.1f}] dB")
    seeds = len(measured.aware[keys[0][0]].strongest())
    return f"Not claimed: against attackers who know the defense, {'; '.join(parts)} (n = {seeds})."


def _scale(measured: Measured) -> str:
    setting = measured.setting
    seeds = len(np.unique(list(measured.error(rate(MAGNITUDE, CUT)))))
    return (
        f"SimpleConvNet at random weights, MNIST, batches of {setting.batch_size}, Inverting "
        f"Gradients with {setting.steps} steps that knows nothing of the defense, {seeds} paired "
        "seeds"
    )
