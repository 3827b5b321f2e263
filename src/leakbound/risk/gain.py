"""Calibration for a gain: what a training adds to the success of an attacker, whatever they know.

A success of q without the training becomes at most F(q) with it. The largest F(q) - q needs neither
data nor a model. For one sensitive column of a person whose other columns are known, what moves is
the value alone: by the radius of a ball that holds the gradients of all values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from leakbound._util import pictures
from leakbound._util.formats import format_upper
from leakbound.bounds.counting import PublicSample, count_least
from leakbound.bounds.knowledge import noise_for_gain
from leakbound.bounds.law import Scope, rate, single
from leakbound.bounds.roots import crossing, last_that
from leakbound.domains.known import LABEL, known_parts
from leakbound.risk.corridor import TrainingSetting, bound_law, epsilon, success_bound
from leakbound.risk.examples import SAMPLE, Examples
from leakbound.risk.solve import Solve, SolvedSetting, check_solved, finished, solved_for
from leakbound.risk.target import GainTarget

STEP = 0.25
"""First step of the search for an end, in the logarithm of the noise."""
SHOWN = (0.01, 0.1, 0.3, 0.5, 0.9)
"""Prior successes for which a result says what they become."""


@dataclass(frozen=True, eq=False)
class GainCalibration(SolvedSetting):
    """A setting under which a training adds at most the target's gain.

    Attributes:
        target: the requested gain.
        gain: the training adds at most this; of words, no attacker finds more.
        place: the success without the training at which it adds the most.
        share: lower confidence limit on how often one fixed answer gives the column's value; None
            without data.
        radius: of a ball that holds the gradients of the column's values / clip norm.
    """

    target: GainTarget
    gain: float
    place: float
    share: float | None = None
    radius: float = 1.0

    @property
    def rises(self) -> tuple[tuple[float, float], ...]:
        """(q, F(q)): a success of q without the training becomes at most F(q) with it."""
        own = self.share, self.target.at
        shown = sorted({*SHOWN, *(q for q in own if q)})
        success = _law(self.setting, self.target, self.radius)(np.log(shown))
        return tuple(zip(shown, success.tolist(), strict=True))

    @property
    def scope(self) -> Scope:
        """The attackers that the gain covers."""
        scope: Scope = bound_law(self.setting).scope
        what = "any goal" if self.target.column is None else f"the value of {self.target.column}"
        what = what if self.target.at is None else "whether a word occurs, as any other claim"
        return replace(
            scope,
            prior=f"{what}, for every person, whatever is known; other examples fixed or known",
            not_said="the success itself: it includes what is known without the training",
        )

    def plain(self) -> dict[str, Any]:
        """All fields as JSON values; infinite ones are None."""
        names = ("noise_multiplier", "steps", "sampling_rate", "participation", "people")
        return {
            "target": {**asdict(self.target), "words": str(self.target)},
            "solved": self.solved,
            "setting": {name: getattr(self.setting, name) for name in names},
            "clip_norm": self.clip_norm,
            "noise_std": self.noise_std,
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
            "delta": self.delta,
            "gain": self.gain,
            "place": self.place,
            "share": self.share,
            "radius": self.radius,
            "rises": [list(pair) for pair in self.rises],
            "scope": asdict(self.scope),
        }

    def _repr_html_(self) -> str:
        rises = [
            (f"{q:.3g} without the training becomes at most", format_upper(success))
            for q, success in self.rises
        ]
        pairs = [
            ("noise multiplier", f"{self.noise_multiplier:g}"),
            ("clip norm", f"{self.clip_norm:g}"),
            ("steps", f"{self.setting.steps}"),
            ("sampling rate", f"{self.setting.sampling_rate:g}"),
            ("the training adds at most", format_upper(self.gain)),
            *rises,
        ]
        return pictures.block(str(self.target), pictures.facts(pairs))


def calibrate_gain(
    target: GainTarget,
    setting: TrainingSetting,
    *,
    solve: Solve = "noise_multiplier",
    clip_norm: float = 1.0,
    noise_std: float | None = None,
    delta: float = 1e-5,
    share: float | None = None,
    radius: float = 1.0,
) -> GainCalibration:
    """Solve for the quantity at which the training adds at most the target's gain.

    Args:
        target: the accepted gain.
        setting: the known quantities; its value of the solved quantity is ignored.
        solve: "noise_multiplier", "clip_norm", "steps" (the most) or "sampling_rate".
        clip_norm: bound on the gradient norm per example, or
        noise_std: noise standard deviation on the sum, if the clip norm is solved for.
        delta: the delta at which epsilon is reported.
        share: shown in the result (`fixed_answer` of a column).
        radius: of a ball that holds the gradients of the column's values / clip norm
            (`bounds.knowledge.enclosing_radius`); 1 for any model.

    Raises:
        ValueError: nothing meets the target; or a column's gain under hidden participation, for
            which no bound is known.

    Source: this project; docs/risk.md, "What the attacker already knows".

    Example:
        >>> found = calibrate_gain(GainTarget(0.1), TrainingSetting(1.0, dim=1, steps=4))
        >>> round(found.noise_multiplier, 2), round(found.gain, 4)
        (7.96, 0.1)
    """
    check_solved(solve, clip_norm=clip_norm, noise_std=noise_std, delta=delta)
    single(rate, radius=radius)
    sampled = setting.sampling_rate < 1 or solve == "sampling_rate"
    if target.column is not None and setting.participation == "hidden" and sampled:
        raise ValueError(
            "participation is 'hidden', but for one column no bound is known that gains from it; "
            "give 'visible'"
        )

    def over(tried: TrainingSetting, rough: bool) -> float:
        gain, _ = target.limited(_law(tried, target, radius, rough))
        return math.log(max(gain, 1e-300)) - math.log(target.most)

    person = setting.of_person
    first = partial(_visible, target, replace(person, participation="visible"), over)
    solved = solved_for(solve, person, over, first)
    solved, clip_norm = finished(solve, solved, setting, clip_norm=clip_norm, noise_std=noise_std)
    gain, place = target.limited(_law(solved, target, radius))
    return GainCalibration(
        target=target,
        solved=solve,
        setting=solved,
        clip_norm=clip_norm,
        epsilon=epsilon(solved, delta),
        delta=delta,
        gain=gain,
        place=place,
        share=share,
        radius=radius,
    )


def fixed_answer(examples: Examples, column: str) -> float:
    """Lower confidence limit (95 %) on how often the best fixed answer gives a column's value.

    The answer is chosen on half of the examples and counted on the other half. No calibration rests
    on it: if 4 % have a disease, "healthy" is right for 96 %, and a training that reveals every one
    of the 4 % adds only .04 on average.

    Raises:
        ValueError: the data are no table, or have no such column.

    Example:
        >>> fixed_answer(Examples.of("german"), "foreign_worker") > 0.9
        True
    """
    sample = examples.prior(SAMPLE)
    assert isinstance(sample, PublicSample)  # the default prior of data
    order = np.random.default_rng(0).permutation(sample.n)
    chosen_on, counted_on = np.array_split(_codes(examples, sample, column)[order], 2)
    rising = np.sort(chosen_on)
    # A value matches those within the tolerance, which is 1 in units of the codes.
    ends = np.searchsorted(rising, rising + 2, "right")
    best = int(np.argmax(ends - np.arange(len(rising))))
    middle = (rising[best] + rising[ends[best] - 1]) / 2
    matched = int((np.abs(counted_on - middle) <= 1).sum())
    return count_least(matched, len(counted_on))


def _codes(
    examples: Examples,
    sample: PublicSample,
    column: str,
) -> np.ndarray[Any, Any]:
    """(n,) one number for each example: values that match are within 1."""
    if column == LABEL:
        labels = examples.labels
        if labels is None or labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise ValueError(f"target is for {LABEL}, but the labels are no classes")
        return 10.0 * labels[sample.places]
    assert examples.form is not None  # of data
    part = known_parts(examples.form, column)
    if part.part.parts != 1:
        raise ValueError(f"target is for {column!r}; give one column of a table, or {LABEL}")
    rows = torch.tensor(sample.examples, dtype=examples.form.dtype)
    return np.asarray(part.part.coded(part.values(rows)))[:, 0]


def _law(
    setting: TrainingSetting,
    target: GainTarget,
    radius: float,
    rough: bool = False,
) -> Any:
    """F of a training. Of one column, what moves is the value and not the whole example."""
    if target.column is not None:
        # Sampled hidden steps are compared with those of no example, and not of another value.
        noise = setting.noise_multiplier / radius
        setting = replace(setting, noise_multiplier=noise, participation="visible")
    return partial(success_bound, setting, rough=rough)


def _visible(
    target: GainTarget,
    setting: TrainingSetting,
    over: Callable[[TrainingSetting, bool], float],
    name: str,
    known: Mapping[str, Any],
) -> float:
    """The answer for visible steps: as `solved_for` asks for it."""

    def at(place: float) -> float:
        value: Any = {name: math.exp(place)}
        return over(replace(setting, **value), False)

    if name == "steps":
        return last_that(lambda count: over(replace(setting, steps=count), False) <= 0, 0)
    if name == "sampling_rate":
        fine = math.log(target.most / setting.steps)
        while at(fine) > 0:  # by the rounding of the gain
            fine -= STEP
        return 1.0 if at(0.0) <= 0 else math.exp(crossing(at, fine, 0.0))
    if over(replace(setting, noise_multiplier=0.0), False) <= 0:
        return 0.0
    fine = math.log(noise_for_gain(target.most) * math.sqrt(setting.steps))
    while at(fine) > 0:
        fine += STEP
    bad = fine - STEP
    while at(bad) <= 0:
        bad -= 2 * (fine - bad)
    return math.exp(crossing(at, fine, bad))
