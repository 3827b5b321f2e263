"""S_D, the strength of a defense: the smallest mean error that any of the attacks reached.

The error of an attack in one round is the root of the mean squared error over the batch's images,
in the units of the errors given; its mean is over rounds, each with its own weights, batch and
noise. An attacker who must say which attack he uses before he knows the truth gets no less than the
smallest of these means. The smallest error image by image, over the attacks, nobody can choose
without the truth: it stands apart as `oracle`.

Source: Liu et al. 2025 (paper B), section 4.1, which prints the largest error where its text and
tables take the smallest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.special import stdtrit

from leakbound.assess.record import Record

LEVEL = 0.95
NO_UPDATE = "no update"
"""The guess that sees no update, which every attacker has."""

_EXTREME = 300.0
Errors = Mapping[int, Sequence[float]]
"""Squared errors by round (its seed), one number an image."""


@dataclass(frozen=True)
class Strength:
    """What the strongest of some attacks leaves.

    Attributes:
        rmse: S_D, the smallest mean error, in the units of the errors given.
        low, high: cover the smallest of the true means with 95 %, whichever attack has it.
        attack: the one that reached it; "no update" where no attack beats the blind guess.
        oracle: the mean error if the best attack were known for each image.
        blind: the mean error of the guess that sees no update.
        held_out: by round, the error of the attack that is best on all other rounds: what choosing
            an attack beforehand gives, and what comparisons of defenses take.
        means: the mean error of every attack, and of the blind guess.
        n: the rounds.
    """

    rmse: float
    low: float
    high: float
    attack: str
    oracle: float
    blind: float
    held_out: Mapping[int, float]
    means: Mapping[str, float]
    n: int


def strength(attacks: Mapping[str, Errors], blind: Errors) -> Strength:
    """S_D of the attacks and the blind guess, over the rounds of the blind guess.

    The interval joins t intervals of the means, and allows for the choice of the smallest: the
    smallest true mean belongs to one attack, so the least of the one-sided lower limits needs no
    correction; the least of the upper limits may be any attack's, so each has its share of the
    error (Bonferroni). The t intervals take errors as nearly normal: of three to six rounds of
    skewed errors the upper limit is too low in up to 8 % of cases (2.5 % by right). A round in
    which an attack did not apply counts with the blind guess.

    Args:
        attacks: squared errors of every attack, by round.
        blind: those of the guess without an update, by round; at least one.

    Raises:
        ValueError: no round, or an attack with another number of images.

    Example:
        >>> found = strength({"a": {0: [0.01], 1: [0.04]}}, {0: [0.09], 1: [0.09]})
        >>> found.attack, round(found.rmse, 3), round(found.blind, 3), found.held_out
        ('a', 0.15, 0.3, {0: 0.1, 1: 0.2})
    """
    rounds = sorted(blind)
    if not rounds:
        raise ValueError("there is no round; run at least one")
    tables = {NO_UPDATE: dict(blind)}
    for name, errors in attacks.items():
        tables[name] = {seed: errors.get(seed, blind[seed]) for seed in rounds}
        for seed in rounds:
            if len(tables[name][seed]) != len(blind[seed]):
                raise ValueError(
                    f"attack {name!r} has {len(tables[name][seed])} images in round {seed}, the "
                    f"blind guess {len(blind[seed])}; give errors of the same images"
                )
    own = {name: [_root(table[seed]) for seed in rounds] for name, table in tables.items()}
    means = {name: fmean(values) for name, values in own.items()}
    best = min(means, key=lambda name: (means[name], name != NO_UPDATE))
    low = min(_limit(values, -1, (1 - LEVEL) / 2) for values in own.values())
    high = min(_limit(values, 1, (1 - LEVEL) / 2 / len(own)) for values in own.values())
    images = [zip(*(t[seed] for t in tables.values()), strict=True) for seed in rounds]
    nearest = [_root([min(errors) for errors in own_images]) for own_images in images]
    return Strength(
        rmse=means[best],
        low=max(0.0, low),
        high=high,
        attack=best,
        oracle=fmean(nearest),
        blind=means[NO_UPDATE],
        held_out={seed: _held_out(own, i) for i, seed in enumerate(rounds)},
        means=means,
        n=len(rounds),
    )


@dataclass(frozen=True)
class Rounds:
    """Squared errors of some attacks on the same rounds, in squared units of the inputs' range.

    Attributes:
        left_out: how many rounds were left out, as some attack crashed or has not run there.
        missing: the attacks that have no result at all, and would apply as far as is known.
    """

    attacks: Mapping[str, Errors]
    blind: Errors
    left_out: int
    missing: tuple[str, ...] = ()


def rounds_of(cells: Mapping[str, Iterable[Record]]) -> Rounds:
    """The errors of attacks, from their cells on one model, defense and batch size.

    A round counts if every attack ran or did not apply there; else a crash would look like a weak
    attack. What never ran is no attack here.
    """
    own = {name: {cell["seed"]: cell for cell in some} for name, some in cells.items()}
    seeds = sorted({seed for some in own.values() for seed in some})
    missing = tuple(
        name
        for name, some in own.items()
        if not any(map(ran, some.values()))
        and any(cell["status"] != "not_applicable" for cell in some.values())
    )
    own = {name: some for name, some in own.items() if any(map(ran, some.values()))}
    kept = [seed for seed in seeds if _whole([some.get(seed) for some in own.values()])]
    errors = {
        name: {seed: squares(some[seed], "metrics") for seed in kept if ran(some[seed])}
        for name, some in own.items()
    }
    blind = {
        seed: next(squares(c[seed], "blind") for c in own.values() if ran(c[seed])) for seed in kept
    }
    return Rounds(errors, blind, len(seeds) - len(kept), missing)


def ran(cell: Record | None) -> bool:
    """Whether a cell has a number for every image."""
    if cell is None or cell["status"] != "ok" or not (cell["metrics"] or {}).get("psnr"):
        return False
    return None not in (*cell["metrics"]["psnr"], *cell["blind"]["psnr"])


def squares(cell: Record, table: str) -> list[float]:
    """The squared error of each image, of the attack ("metrics") or the "blind" guess."""
    return [square(value) for value in cell[table]["psnr"]]


def square(psnr: float) -> float:
    """The squared error of a PSNR, in squared units of the inputs' range.

    Example:
        >>> square(20.0)
        0.01
    """
    return float(10 ** (-max(min(psnr, _EXTREME), -_EXTREME) / 10))


def _whole(cells: Sequence[Record | None]) -> bool:
    """Whether every attack ran or did not apply in a round, at least one ran, on equal images."""
    own = [cell for cell in cells if cell is not None and ran(cell)]
    idle = [cell for cell in cells if cell is not None and cell["status"] == "not_applicable"]
    same = len({len(cell["metrics"]["psnr"]) for cell in own}) == 1
    return same and len(own) + len(idle) == len(cells)


def _held_out(own: Mapping[str, Sequence[float]], at: int) -> float:
    def elsewhere(name: str) -> float:
        return math.fsum(value for i, value in enumerate(own[name]) if i != at)

    return own[min(own, key=elsewhere)][at]


def _limit(values: Sequence[float], side: int, tail: float) -> float:
    """A one-sided limit of the mean by Student's t; infinite from one value."""
    n = len(values)
    if n < 2:
        return side * math.inf
    reach = float(stdtrit(n - 1, 1 - tail))
    return fmean(values) + side * reach * stdev(values) / math.sqrt(n)


def _root(squares: Sequence[float]) -> float:
    return math.sqrt(fmean(squares))
