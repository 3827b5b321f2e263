"""Claims 2-7, 2-8 and 2-10 of paper B, from the audits.

Rounds (seeds) are the draws. Where the strongest of some attacks is taken, it is in each round the
one with the smallest mean RMSE over all other rounds: what an attacker gets who chooses by the
mean, as the paper does, before he knows the truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from leakbound.experiments.by_seed import Part, claimed
from leakbound.experiments.claim import Claim
from leakbound.experiments.paired import logs
from leakbound.experiments.systematic_evaluation.measured import ANY, Measured, family
from leakbound.experiments.systematic_evaluation.parts import HONEST, MALICIOUS
from leakbound.report.strength import NO_UPDATE, Rounds

PRUNE, NONE, IMPRINT = "prune", "none", MALICIOUS[1]
RIVALS = ("clip", "dropout", "noise", "local steps")
"""The paper's other defenses: its conclusion is on "our considered defenses"."""
CONSIDERED = (HONEST[0], HONEST[2], HONEST[3], MALICIOUS[0], IMPRINT)
"""The paper's attacks: its own with the features of an honest and of a planted head, Inverting
Gradients, features alone first (CPA), Robbing the Fed. Its conclusion is on "our considered
attacks", of which one has a malicious server."""
HELPED = {
    "clip 2": "20 log10(0.22 / 0.16) = 2.8 dB (C = 4, B = 4; tables 7 and 8)",
    "noise 0.01": "20 log10(0.31 / 0.24) = 2.2 dB (B = 4; tables 7 and 8)",
    "prune 0.9": "20 log10(0.28 / 0.27) = 0.3 dB (p = 0.99, B = 4; tables 7 and 8)",
}
"""What features gain in the paper where it calls it a lot, notable, and little."""
NOTABLE = 1.0
"""Decibels between the paper's "little improvement" (0.3) and its "notable" one (2.2)."""
RESOLUTION = 0.01
"""RMSE to which the paper's tables are printed: what is closer counts as equal."""
TABLE_4 = {
    "noise up to 0.01": "0.03 and 0.06",
    "dropout": "0.12 to 0.14",
    "pruning": "0.07 to 0.14",
}
"""The same differences in the paper's table 4, B = 8."""
IMPRINTED = (
    ("noise up to 0.01", ("noise 0.001", "noise 0.01"), 1),
    ("dropout", ("dropout",), -1),
    ("pruning", (PRUNE,), -1),
)
"""Where the imprint is said to be the strongest attack (1), and where not (-1)."""
Errors = Mapping[str, Mapping[int, float]]


def claims(found: Measured, n: str) -> list[Claim]:
    """The three; `n` says the scale."""
    return [features_help(found, n), pruning_is_best(found, n), imprint_is_strongest(found, n)]


def features_help(found: Measured, n: str) -> Claim:
    """2-7: features gain at least a notable part under clipping and noise, not under pruning.

    Source: appendix I: a lot under clipping, notable under noise, little under heavy pruning.
    """
    parts = []
    for data in found.data:
        tables = found.ablation(data)
        for defense, paper in HELPED.items():
            own = tables.get(defense, {})
            with_, without = (logs(own.get(v, {})) for v in (HONEST[0], "without features"))
            gains = [without[seed] - with_[seed] for seed in sorted(set(with_) & set(without))]
            heavy = family(defense) == PRUNE
            region = (-math.inf, NOTABLE) if heavy else (NOTABLE, math.inf)
            word = "at most" if heavy else "at least"
            text = f"{data}, {defense}: features gain {word} {NOTABLE:g} dB"
            parts.append(Part(text, gains, region, unit="dB", paper=paper))
    return claimed(
        "2-7",
        "Features make the attack more robust to clipping and noise, not to heavy pruning.",
        "appendix I, tables 7 and 8, figure 4",
        f"batches of 4; {n}",
        parts,
    )


def pruning_is_best(found: Measured, n: str) -> Claim:
    """2-8: at equal training loss the strongest considered attack errs most under pruning.

    Each family of defenses starts at no defense, its level 0; what it gives for a loss is the
    largest error among its levels that cost no more.
    """
    parts = []
    for data in found.data:
        batch = max(found.batches(data))
        losses, errors = found.trained(data), considered(found, data, batch)
        for rival in RIVALS:
            text = f"{data}: RMSE under pruning less that under {rival}, at equal loss"
            values = at_equal_loss(losses, errors, rival)
            parts.append(Part(text, values, (-RESOLUTION, math.inf), unit="of the range"))
    return claimed(
        "2-8",
        "At equal training loss the strongest attack errs most under pruning.",
        "section 5.2, figure 3",
        f"{_batches(found)}, the paper's attacks and defenses; {n}",
        parts,
    )


def considered(found: Measured, data: str, batch: int) -> dict[str, dict[int, float]]:
    """By defense: RMSE of the strongest of the paper's attacks and the guess without an update."""
    return {
        defense: held_out(_roots(rounds, CONSIDERED) | {NO_UPDATE: _root(rounds.blind)})
        for defense, rounds in found.rounds(data, batch, ANY).items()
        if len(rounds.blind) > 1
    }


def held_out(errors: Errors) -> dict[int, float]:
    """By round, the error of the attack that has the smallest mean over all other rounds.

    Example:
        >>> held_out({"a": {0: 1.0, 1: 1.0, 2: 1.0}, "b": {0: 0.0, 1: 0.5, 2: 9.0}})
        {0: 1.0, 1: 1.0, 2: 9.0}
    """
    shared = sorted(set.intersection(*(set(own) for own in errors.values())))

    def elsewhere(name: str, at: int) -> float:
        return math.fsum(errors[name][seed] for seed in shared if seed != at)

    best = {at: min(errors, key=lambda name, at=at: elsewhere(name, at)) for at in shared}  # type: ignore[misc]
    return {at: errors[name][at] for at, name in best.items()}


def at_equal_loss(losses: Errors, errors: Errors, rival: str) -> list[float]:
    """How much more error pruning leaves than a rival family, at equal loss.

    Of mean losses and errors, read between the levels, and averaged over the losses that both
    families span; as pseudo-values of the jackknife, one a round, so that an interval counts what
    all these means may be off.
    """
    curves = []
    for name in (PRUNE, rival):
        curves.append([d for d in errors if family(d) in (name, NONE) and losses.get(d)])
    if any(len(levels) < 2 for levels in curves):
        return []
    used = {*curves[0], *curves[1]}
    tables = [own[d] for own in (losses, errors) for d in used]
    return jackknife(
        set.intersection(*(set(own) for own in tables)),
        lambda seeds: _difference(losses, errors, curves, seeds),
    )


def _difference(
    losses: Errors, errors: Errors, curves: Sequence[Sequence[str]], seeds: Sequence[int]
) -> float:
    ours, theirs = (
        raising([(_mean(losses[d], seeds), _mean(errors[d], seeds)) for d in levels])
        for levels in curves
    )
    low, high = max(ours[0][0], theirs[0][0]), min(ours[-1][0], theirs[-1][0])
    at = np.linspace(low, max(low, high), 20)
    return float(np.mean(_read(ours, at) - _read(theirs, at)))


def _read(curve: Sequence[tuple[float, float]], at: NDArray[np.float64]) -> NDArray[np.float64]:
    points = np.array(curve)
    return np.asarray(np.interp(at, points[:, 0], points[:, 1]))


def raising(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """By loss, the points that raise the error so far, and the last one's loss with that error.

    Example:
        >>> raising([(3.0, 0.1), (1.0, 0.0), (2.0, 0.2)])
        [(1.0, 0.0), (2.0, 0.2), (3.0, 0.2)]
    """
    ordered = sorted(points)
    found = ordered[:1]
    for loss, error in ordered[1:]:
        if error > found[-1][1]:
            found.append((loss, error))
    if ordered[-1][0] > found[-1][0]:
        found.append((ordered[-1][0], found[-1][1]))
    return found


def imprint_is_strongest(found: Measured, n: str) -> Claim:
    """2-10: the lowest RMSE of the paper's attacks under little noise, not so under masks."""
    parts = []
    for data in found.data:
        rounds = found.rounds(data, max(found.batches(data)), ANY)
        errors = {d: _roots(own, CONSIDERED) for d, own in rounds.items()}
        for name, families, sign in IMPRINTED:
            own = [own for d, own in errors.items() if {d, family(d)} & set(families)]
            words = "other attacks' RMSE less its own" if sign > 0 else "its RMSE less the others'"
            paper = TABLE_4[name]
            text = f"{data}, {name}: {words}, means over the levels"
            values = ahead(own, sign)
            region = (0.0, math.inf)
            printed = f"{paper} (table 4, B = 8)"
            parts.append(Part(text, values, region, unit="of the range", paper=printed))
    return claimed(
        "2-10",
        "Robbing the Fed is the strongest attack at noise up to 0.01 and fails under masks.",
        "table 4",
        f"{_batches(found)}; {n}",
        parts,
    )


def ahead(tables: Sequence[Errors], sign: int) -> list[float]:
    """By round, how much the imprint is better than the best other attack, times the sign."""
    each = []
    for table in tables:
        others = {name: own for name, own in table.items() if name != IMPRINT}
        if others and IMPRINT in table:
            best, own = held_out(others), table[IMPRINT]
            each.append({seed: best[seed] - own[seed] for seed in set(best) & set(own)})
    seeds = set.intersection(*map(set, each)) if each else set[int]()
    return [sign * fmean(gaps[seed] for gaps in each) for seed in sorted(seeds)]


def jackknife(seeds: Iterable[int], value: Callable[[Sequence[int]], float]) -> list[float]:
    """N times the value of all less (n - 1) times that of all but one, for each.

    Of a mean these are its terms.

    Example:
        >>> jackknife([1, 2, 6], lambda seeds: sum(seeds) / len(seeds))
        [1.0, 2.0, 6.0]
    """
    every = sorted(seeds)
    n = len(every)
    if n < 2:
        return []
    whole = value(every)
    return [n * whole - (n - 1) * value([s for s in every if s != out]) for out in every]


def _roots(rounds: Rounds, names: Sequence[str]) -> dict[str, dict[int, float]]:
    return {name: _root(rounds.attacks[name]) for name in names if name in rounds.attacks}


def _root(errors: Mapping[int, Sequence[float]]) -> dict[int, float]:
    return {seed: math.sqrt(fmean(own)) for seed, own in errors.items()}


def _mean(values: Mapping[int, float], seeds: Sequence[int]) -> float:
    return fmean(values[seed] for seed in seeds)


def _batches(found: Measured) -> str:
    sizes = sorted({max(found.batches(data)) for data in found.data})
    return f"batches of {', '.join(map(str, sizes))}"
