"""The search of every calibration: noise, clip norm, steps or sampling rate that meet a limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from leakbound import check
from leakbound._util.formats import rounded
from leakbound.bounds.law import positive, probability
from leakbound.bounds.roots import FAR, edge
from leakbound.risk.corridor import MOST_STEPS, TrainingSetting

if TYPE_CHECKING:
    from leakbound.defenses import Chain

Excess = Callable[..., float]
Over = Callable[[TrainingSetting, bool], float]
First = Callable[[str, Mapping[str, Any]], float]
Solve = Literal["noise_multiplier", "clip_norm", "steps", "sampling_rate"]
SOLVES = ("noise_multiplier", "clip_norm", "steps", "sampling_rate")

DIGITS = 5
"""Significant digits of a result, rounded to the safe side."""
NEAR = 5e-5
"""Relative tolerance of a search."""


@dataclass(frozen=True, eq=False)
class SolvedSetting:
    """A setting that meets a target.

    Attributes:
        solved: the name of the quantity that was solved for.
        setting: the whole setting, including the result.
        clip_norm: bound on the gradient norm per example.
        epsilon, delta: the setting as differential privacy (add or remove one example).
    """

    solved: Solve
    setting: TrainingSetting
    clip_norm: float
    epsilon: float
    delta: float

    @property
    def noise_multiplier(self) -> float:
        """Noise standard deviation / clip norm."""
        return self.setting.noise_multiplier

    @property
    def noise_std(self) -> float:
        """Noise standard deviation on the sum of clipped gradients, gradient units."""
        return self.setting.noise_multiplier * self.clip_norm

    def defense(self) -> Chain:
        """DP-SGD with this clip norm and noise, ready for `audit` and `send`.

        `DpSgd` divides by the number of examples in its batch, so this number counts as public.

        Raises:
            ValueError: no noise is needed, so there is none to add.
            NotApplicable: hidden participation in sampled steps, which this number would reveal.
        """
        if self.noise_multiplier == 0:
            raise ValueError(
                "noise_multiplier is 0: the example is sampled so rarely that the target needs no "
                "noise; give a larger sampling_rate, more steps or a smaller probability"
            )
        from leakbound.core import NotApplicable
        from leakbound.defenses import DpSgd

        if self.setting.participation == "hidden" and self.setting.sampling_rate < 1:
            raise NotApplicable(
                "participation is 'hidden', and DpSgd divides by the number of examples in the "
                "batch: the level of its noise reveals that number, and so who takes part; use "
                "leakbound.opacus.RiskEngine, which divides by a constant, or calibrate with "
                "participation='visible'"
            )
        return DpSgd(clip_norm=self.clip_norm, noise_multiplier=self.noise_multiplier)


def check_solved(
    solve: Solve,
    *,
    clip_norm: float,
    noise_std: float | None,
    delta: float,
) -> None:
    check.one_of(SOLVES, solve=solve)
    positive("clip_norm", clip_norm)
    probability("delta", delta)
    positive("noise_std", 1.0 if noise_std is None else noise_std)
    if (noise_std is None) == (solve == "clip_norm"):
        raise ValueError("noise_std: give it if the clip norm is solved for, and only then")


def solved_for(
    solve: Solve,
    setting: TrainingSetting,
    over: Over,
    first: First,
) -> TrainingSetting:
    """The setting with the result in it, rounded to the safe side and checked.

    Args:
        solve: the quantity.
        setting: of persons with one example; its value of the quantity is ignored.
        over: above 0 if a setting misses the target, on a wider grid if asked: the logarithm of
            the risk minus that of the limit.
        first: the answer for visible steps, from the quantity's name and the known ones.
    """
    # The clip norm follows from the noise multiplier.
    name = "noise_multiplier" if solve == "clip_norm" else solve
    names = ("noise_multiplier", "sampling_rate", "steps")
    known: dict[str, Any] = {n: getattr(setting, n) for n in names if n != name}

    def solved(value: Any) -> TrainingSetting:
        return replace(setting, **{name: value})

    def excess(value: float, rough: bool = False) -> float:
        tried = int(value) if name == "steps" else value
        tried = min(1.0, tried) if name == "sampling_rate" else tried
        return over(solved(tried), rough)

    start = first(name, known)
    # For one step, and at a rate of 1, hidden steps are visible ones.
    hidden = (
        setting.participation == "hidden"
        and known.get("sampling_rate", 0) < 1
        and known.get("steps", 2) > 1
    )
    if name == "steps":
        return solved(_steps(excess, start, hidden, setting.noise_multiplier))
    more_is_safe = name == "noise_multiplier"
    # No noise is needed, and 0 has no logarithm for the search below.
    if more_is_safe and start == 0:
        return solved(0.0)

    def safe(value: float) -> float:
        return rounded(
            value if more_is_safe else min(1.0, value),
            DIGITS,
            up=more_is_safe,
        )

    way = 1 if more_is_safe else -1
    if hidden:
        start = _sharper(excess, start, -way, safe)
    value = safe(start)
    # Only rounded values are tried, the nearest first: the result was evaluated.
    step = way * 10.0 ** (1 - DIGITS)
    while excess(value) > 0:
        value = safe(value * (1 + step))
        step = 2 * step
    return solved(value)


def _steps(
    excess: Excess,
    start: float,
    hidden: bool,
    noise: float,
) -> int:
    """The most steps that meet the target, from the result for visible ones."""
    steps = max(1, int(start))
    if hidden:
        steps = min(MOST_STEPS, math.floor(_sharper(excess, steps, 1, math.floor)))
    while steps > 1 and excess(steps) > 0:
        # By a thousandth, because one evaluation takes up to some tenths of a second.
        steps -= max(1, steps // 1000)
    more = max(1, steps // 20000)
    # The search stops up to 0.005 % short of the edge: go on while it holds.
    while steps + more <= MOST_STEPS and excess(steps + more) <= 0:
        steps += more
    if excess(steps) > 0:
        raise ValueError(
            f"noise_multiplier is {noise:g}: not one step meets the target; give more noise or a "
            "lower sampling_rate"
        )
    return steps


def finished(
    solve: Solve,
    solved: TrainingSetting,
    setting: TrainingSetting,
    *,
    clip_norm: float,
    noise_std: float | None,
) -> tuple[TrainingSetting, float]:
    """The result for persons with several examples, and the clip norm."""
    whole = _of_examples(solve, solved, setting)
    return (whole, clip_norm) if noise_std is None else _clipped(whole, noise_std)


def _of_examples(
    solve: Solve,
    solved: TrainingSetting,
    setting: TrainingSetting,
) -> TrainingSetting:
    """From a training of persons with one example back to persons with several."""
    if setting.people == 1:
        return solved
    if solve in ("noise_multiplier", "clip_norm"):
        # The examples of one person together move the sum by `people` clip norms.
        noise = rounded(
            setting.people * solved.noise_multiplier,
            DIGITS,
            up=True,
        )
        return replace(setting, noise_multiplier=noise)
    if solve == "steps":
        return replace(setting, steps=solved.steps)
    rate = solved.sampling_rate
    # A person takes part if any of the examples does: rate = 1 - (1 - own)^people.
    chance = 1.0 if rate == 1 else -math.expm1(math.log1p(-rate) / setting.people)
    return replace(setting, sampling_rate=rounded(chance, DIGITS, up=False))


def _sharper(
    excess: Excess,
    start: float,
    sign: int,
    turned: Callable[[float], float],
) -> float:
    """Go from the result for visible steps, which holds, to the edge for hidden ones.

    It uses few evaluations, as each takes up to some tenths of a second. It evaluates rounded
    values only, so that the final result is among them.
    """
    limit = math.log(MOST_STEPS)

    def at(place: float, rough: bool = False) -> float:
        value = math.exp(min(place, limit))
        return excess(value, True) if rough else excess(turned(value))

    fine = math.log(start)
    most = limit - fine if sign > 0 else FAR
    place = edge(
        at,
        fine,
        sign,
        near=NEAR,
        rough=lambda place: at(place, True),
        most=most,
    )
    return MOST_STEPS if place >= limit else math.exp(place)


def _clipped(
    solved: TrainingSetting,
    noise_std: float,
) -> tuple[TrainingSetting, float]:
    """The highest clip norm with that noise on the sum, and the resulting multiplier."""
    if solved.noise_multiplier == 0:
        raise ValueError(
            "clip_norm: any value meets the target, even without noise, because the example is "
            "sampled so rarely; give a larger sampling_rate, more steps or a smaller probability"
        )
    # Rounding down is safe: a lower clip norm under the same noise is a higher multiplier.
    clip = rounded(noise_std / solved.noise_multiplier, DIGITS, up=False)
    return replace(solved, noise_multiplier=noise_std / clip), clip
