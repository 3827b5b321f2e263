"""The risk corridor: attained success and the upper bound on success, by error threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from leakbound import check
from leakbound._util import pictures
from leakbound._util.decibels import mse_of_psnr, psnr_of_mse
from leakbound._util.formats import format_lower, format_number, format_upper, format_upper_log
from leakbound.assess.record import Basis, Verdict
from leakbound.assess.verdict import decide
from leakbound.bounds import composition, conversions, from_scratch, identification
from leakbound.bounds.attainable import Attainable
from leakbound.bounds.counting import PublicSample
from leakbound.bounds.distances import Distance, SquaredError
from leakbound.bounds.law import Scope, non_negative, positive, probability, rate, single, whole
from leakbound.bounds.record_priors import Baseline
from leakbound.bounds.roots import least_where
from leakbound.risk.statement import UNINFORMED

Array = NDArray[Any]
Participation = Literal["visible", "hidden"]

ROUNDING = 1e-7
"""Relative rounding of the two curves: attained success less than this above the bound is cut."""
CUT = 1e-9
"""Part of delta for numbers of sightings that are left out of a sum, on either side."""
MOST_STEPS = 2**30
AROUND = 5
"""Decibels, or columns, that plots show beside the thresholds."""
BESIDE = 0.1
"""The same of correlations."""
SHOWN = 7
"""Maximum number of thresholds in a notebook's table; the curve shows all."""
SPHERE = "a direction uniform on the sphere, of the given norm or a larger one"
ATTACKER_KNOWS = {
    "visible": "averages the steps that hold the example, which it knows",
    "hidden": "adds up all steps, as it does not know which hold the example",
}


@dataclass(frozen=True)
class TrainingSetting:
    """One private training: the inputs of attained success and upper bound.

    Attributes:
        noise_multiplier: noise standard deviation / clip norm.
        dim: N, the number of values of one example.
        norm: |X|, the smallest among the covered examples.
        steps, sampling_rate: the number of model updates, and the probability that a step holds a
            given example (Poisson sampling).
        participation: whether the attacker sees which steps hold the example. In federated learning
            the server picks the clients: "visible". Both need Poisson sampling: an example that
            takes part once per epoch is at more risk, and k certain steps are k full-batch ones.
        clip_norm, rows: of a trap with few rows, which attains less; by default it has enough.
        people: the largest number of one person's examples in the training set. Bounds and epsilon
            are for a person; what attacks attain is counted for one example.
    """

    noise_multiplier: float
    dim: int
    norm: float = 1.0
    steps: int = 1
    sampling_rate: float = 1.0
    participation: Participation = "visible"
    clip_norm: float | None = None
    rows: int | None = None
    people: int = 1

    def __post_init__(self) -> None:
        single(non_negative, noise_multiplier=self.noise_multiplier)
        single(whole, dim=self.dim)
        single(positive, norm=self.norm)
        if single(whole, steps=self.steps) > MOST_STEPS:
            raise ValueError(f"steps is {self.steps}; give at most {MOST_STEPS}")
        single(rate, sampling_rate=self.sampling_rate)
        check.one_of(ATTACKER_KNOWS, participation=self.participation)
        check.count(people=self.people)
        if (self.rows is None) != (self.clip_norm is None):
            raise ValueError("clip_norm and rows: give both, or neither for a trap of enough rows")

    @property
    def of_person(self) -> TrainingSetting:
        """A training whose one example moves as much as all of a person's examples here.

        A step holds none of k examples with probability (1 - q)^k, and moves by k clip norms at
        most otherwise. Both sides of the likelihood ratio are monotone in the same direction, so
        the larger shift dominates.
        """
        if self.people == 1:
            return self
        rate = self.sampling_rate
        if rate < 1:
            # A step holds none of the person's examples with (1 - q)^k, without cancellation.
            rate = -math.expm1(self.people * math.log1p(-rate))
        noise = self.noise_multiplier / self.people
        return replace(
            self,
            noise_multiplier=noise,
            sampling_rate=rate,
            people=1,
        )


@dataclass(frozen=True, eq=False)
class Corridor:
    """Attained success and upper bound of the risk at thresholds eta.

    Attributes:
        setting: the training they hold for.
        eta: (n,) mean squared errors, input units squared.
        attained: (n,) success of working attacks: of the best one on the linear trap, or a lower
            confidence limit for those that were counted on data.
        bound: (n,) upper bound on any attacker's success, for any model, on average over the prior.
        log_kappa: (n,) natural logarithm of the prior-only success behind the upper bound.
        prior: of the examples, for the upper bound; None is a uniform direction.
        attacks: the attacks that attain it; None is the linear trap.
        baseline: (n,) known success of a prior-only baseline, such as the zero image.
        attack: (n,) the attack that attains it.
        attained_scope, bound_scope: which attackers each covers and what it does not say.
    """

    setting: TrainingSetting
    eta: Array
    attained: Array
    bound: Array
    log_kappa: Array
    prior: Baseline | None
    attacks: Attainable | None
    baseline: Array
    attack: tuple[str, ...]
    attained_scope: Scope
    bound_scope: Scope

    @property
    def basis(self) -> Basis | None:
        """What the upper bound rests on; None if its prior knows nothing about the data.

        An attacker who knows similar data exceeds the bound of such a prior: it protects nothing.
        """
        return None if self.prior is None else self.prior.basis

    def at(self, eta: ArrayLike) -> Corridor:
        """The same at other thresholds."""
        return corridor(
            self.setting,
            eta,
            prior=self.prior,
            attacks=self.attacks,
        )

    def verdict(
        self,
        index: int,
        accepted: float,
        matched: float | None = None,
    ) -> Verdict:
        """The verdict at one threshold if no attack was run.

        It is "recoverable" if attacks attain more than the baseline, under either prior. It is
        never "protected" if the baseline matches more of the data than is accepted (`matched`), or
        under a prior that knows nothing about the data.
        """
        attained = float(self.attained[index])
        bound = float(self.bound[index])
        # A baseline that matched more of the data than kappa says refutes the prior.
        guess = max(float(np.exp(self.log_kappa[index])), matched or 0.0)
        baseline = guess
        if _distance(self.prior).squared:
            eta = float(self.eta[index])
            direction = identification.log_kappa_sphere(
                dim=self.setting.dim,
                eta=eta,
                norm=self.setting.norm,
            )
            baseline = max(guess, float(np.exp(direction)))
        below = bound <= accepted and guess <= accepted
        return decide(
            # At infinite noise both are one number, computed in two ways.
            recoverable=attained > accepted and attained > baseline * (1 + 1e-9),
            guessable=float(self.baseline[index]) > accepted,
            excluded={self.basis} if below and self.basis is not None else (),
        )

    def _repr_html_(self) -> str:
        """Attained success and upper bound as a table, with the attackers they cover."""
        heads = (f"{_distance(self.prior).axis}, at most", "prior-only baseline")
        order = np.argsort(self.eta)
        last = len(order) - 1
        places = [order[round(last * i / (SHOWN - 1))] for i in range(SHOWN)]
        places = places if last >= SHOWN else list(order)
        rows = [
            (
                format_number(float(self.eta[i])),
                format_upper_log(float(self.log_kappa[i])),
                format_lower(float(self.attained[i])),
                format_upper(float(self.bound[i])),
            )
            for i in places
        ]
        setting = self.setting
        steps = "1 step" if setting.steps == 1 else f"{setting.steps} steps"
        if setting.sampling_rate < 1:
            steps += f" at sampling rate {setting.sampling_rate:g}"
        words = f"noise multiplier {setting.noise_multiplier:g}, {steps}; {examples_words(self)}"
        return pictures.block(
            "Risk that an example is reconstructed",
            pictures.note(words),
            pictures.table((*heads, "attained", "no attacker exceeds"), rows),
            uninformed_note(self),
            scope_notes(self),
        )


def corridor(
    setting: TrainingSetting,
    eta: ArrayLike,
    *,
    prior: Baseline | None = None,
    attacks: Attainable | None = None,
) -> Corridor:
    """Attained success and upper bound on the probability that the error is at most eta.

    Bound: the trade-off function of the composed, subsampled Gaussian mechanism at the prior-only
    success kappa(eta) under the prior. For public examples without a model, the profile bound if it
    is better. Attained: the success of attacks that were built from data and counted on other data.
    Without data, gamma* of the linear trap over the numbers of sightings.

    Shapes: `eta` (n,) or a number.

    Args:
        setting: the training.
        eta: mean squared errors above 0, input units squared.
        prior: of the examples; None is a direction uniform on the sphere of radius `norm`.
        attacks: on examples of the same kind. None takes them from a `PublicSample`. Under other
            priors it is the linear trap, on examples of the known norm: its success may exceed a
            bound that is averaged over other examples.

    Raises:
        ValueError: eta is 0 or less.

    Source: docs/errata.md, "the valid corridor"; corrects paper C, section VI.

    Example:
        >>> edges = corridor(TrainingSetting(0.5, dim=16), [0.5 / 16, 0.9 / 16])
        >>> edges.attained.round(3).tolist(), edges.bound.round(3).tolist()
        ([0.068, 0.762], [0.12, 0.777])
    """
    levels = _distance(prior).levels(eta)
    upper, blind = upper_bound(prior, setting, levels)
    if attacks is None and isinstance(prior, PublicSample):
        attacks = Attainable.of(prior)
    if attacks is None:
        lower = attained_success(setting, levels)
        baseline = np.where(levels * setting.dim >= setting.norm**2, 1.0, 0.0)  # the zero image
        names = ("linear trap",) * len(levels)
        # Both are exact at some settings, and rounding may put either on top.
        over = (lower > upper) & (lower < upper * (1 + ROUNDING))
        lower = np.where(over, upper, lower) if prior is None else lower
    else:
        attained = attacks.success(seen_of(setting), levels, parts=2)  # other half: kappa's limit
        lower = attained.success
        baseline = attained.baseline
        names = attained.attack
    people = "each person has one example"
    if setting.people > 1:
        people = f"each person has up to {setting.people} examples, which count as one"
    scope = replace(
        bound_law(setting).scope,
        prior=f"averaged over {SPHERE if prior is None else prior.name}; other examples fixed or "
        f"known; {people}",
    )
    return Corridor(
        setting=setting,
        eta=levels,
        attained=lower,
        bound=upper,
        log_kappa=blind,
        prior=prior,
        attacks=attacks,
        baseline=baseline,
        attack=names,
        attained_scope=attained_scope(setting, attacks),
        bound_scope=scope,
    )


def upper_bound(
    prior: Baseline | None,
    setting: TrainingSetting,
    eta: ArrayLike,
) -> tuple[Array, Array]:
    """Upper bound on any attacker's success at each eta, and the log kappa behind it."""
    levels = _distance(prior).levels(eta)
    if prior is None:
        blind = identification.log_kappa_sphere(
            dim=setting.dim,
            eta=levels,
            norm=setting.norm,
        )
    elif isinstance(prior, PublicSample):
        return prior.success_bound(partial(success_bound, setting), levels)
    else:
        blind = prior.log_kappa(levels)
    return success_bound(setting, blind), np.asarray(blind)


def _distance(prior: Baseline | None) -> Distance:
    return SquaredError() if prior is None else prior.distance


def seen_of(setting: TrainingSetting) -> list[tuple[float, float]]:
    """(probability, noise multiplier) of what the attacker sees of one example."""
    mass, factor = from_scratch.sightings(
        setting.steps, sampling_rate=setting.sampling_rate, participation=setting.participation
    )
    with np.errstate(invalid="ignore"):
        noise = np.where(np.isinf(factor), np.inf, setting.noise_multiplier * factor)
    return list(
        zip(
            mass.ravel().tolist(),
            noise.ravel().tolist(),
            strict=True,
        )
    )


def attained_success(setting: TrainingSetting, eta: Array) -> Array:
    """The success of the best attack on the linear trap, over the numbers of sightings."""
    noise: Any = setting.noise_multiplier
    if setting.rows is not None and setting.clip_norm is not None:
        noise = from_scratch.effective_noise(
            noise,
            clip_norm=setting.clip_norm,
            norm=setting.norm,
            rows=setting.rows,
        )
    # no noise and no sighting: 0 / 0 inside, a prior-only baseline
    with np.errstate(invalid="ignore"):
        success = from_scratch.averaged(
            float(noise),
            dim=setting.dim,
            eta=eta,
            steps=setting.steps,
            sampling_rate=setting.sampling_rate,
            norm=setting.norm,
            participation=setting.participation,
        )
    return np.asarray(success)


def success_bound(
    setting: TrainingSetting,
    log_kappa: ArrayLike,
    *,
    rough: bool = False,
) -> Array:
    """Upper bound on any attacker's success, for the logarithm of the prior-only success.

    A `rough` one takes a wider grid.
    """
    setting = setting.of_person
    law = bound_law(setting)
    bound = (law.rough if rough else law)(
        setting.noise_multiplier,
        sampling_rate=setting.sampling_rate,
        steps=setting.steps,
        log_kappa=log_kappa,
    )
    return np.asarray(bound)


def epsilon(setting: TrainingSetting, delta: float) -> float:
    """The epsilon for a given delta, adding or removing a person; infinite without noise.

    A person has one example, or as many as the setting's `people`.

    If an attacker sees which steps hold the example, sampling adds no doubt, except for the
    probability that no step does. So delta(epsilon) is the mean over k of that of k full-batch
    steps.

    Example:
        >>> round(epsilon(TrainingSetting(1.0, dim=4, steps=10, sampling_rate=0.1), 1e-5), 2)
        8.17
    """
    most = single(probability, delta=delta)
    person = setting.of_person
    noise = person.noise_multiplier
    steps = person.steps
    q = person.sampling_rate
    if setting.participation == "hidden" or q == 1:
        return float(
            conversions.epsilon(
                noise,
                delta=most,
                steps=steps,
                sampling_rate=q,
            )
        )
    hits = scipy.stats.binom(steps, q)
    cut = most * CUT
    # Numbers of sightings outside weigh less than the part of delta that is kept back for them.
    k = np.arange(max(0.0, hits.ppf(cut)), min(steps, hits.isf(cut)) + 1)
    mass = hits.pmf(k)
    # `mu` takes one step or more; without a sighting the gain is 0.
    gain = np.asarray(conversions.mu(noise, steps=np.maximum(k, 1)))
    gain = np.where(k == 0, 0.0, gain)

    def holds(level: Array) -> Array:
        delta_at = mass @ np.exp(conversions.log_delta(gain, level))
        return delta_at <= most * (1 - 3 * CUT)

    high = float(conversions.epsilon(noise, delta=most, steps=steps))
    if not math.isfinite(high):
        # Without noise, only a chance below delta to take part at all hides a person.
        return 0.0 if holds(np.array(0.0)) else math.inf
    return float(least_where(holds, np.array(0.0), np.array(high)))


def around(
    prior: Baseline | None,
    eta: ArrayLike,
    width: float,
    count: int,
    *,
    correlated: bool = False,
) -> tuple[list[float], Array, str]:
    """Thresholds for a plot about those of eta: their places, their eta, and the axis's name.

    `width` is that of the input range; about `count` places of a distance that is no count.
    `correlated`: eta is 1 - NCC^2.
    """
    levels = np.atleast_1d(eta)
    if correlated:
        least = math.sqrt(1 - levels.max()) - BESIDE
        places = np.linspace(max(BESIDE, least), 1 - BESIDE**2, count)
        return places.tolist(), 1 - places**2, "NCC threshold"
    distance = _distance(prior)
    if (columns := distance.columns) is not None:
        right = np.arange(max(1, columns - levels.max() - AROUND), columns + 1)
        return right.tolist(), columns - right, f"right {distance.parts} of {columns}"
    squares, width = (levels, width) if distance.squared else (levels**2, 1.0)
    ends = psnr_of_mse(squares, width)
    places = np.linspace(ends.min() - AROUND, ends.max() + AROUND, count)
    levels_at = mse_of_psnr(places, width)
    return places.tolist(), levels_at if distance.squared else levels_at**0.5, "PSNR threshold (dB)"


def bound_law(setting: TrainingSetting) -> Any:
    """The law of the upper bound for the setting's participation."""
    return composition.subsampled if setting.participation == "hidden" else composition.visible


def attained_scope(
    setting: TrainingSetting,
    attacks: Attainable | None,
) -> Scope:
    """The attackers that the attained success covers."""
    scope = from_scratch.exact.scope
    says = ATTACKER_KNOWS[setting.participation]
    if attacks is not None:
        return Scope(
            covers="attained",
            attackers="a malicious server that sends a codebook or a linear trap, made of public "
            f"examples, and {says}",
            prior=f"examples like the public ones: {attacks.confidence:.0%} confidence from "
            f"{attacks.counted} of them that no attack was made of",
            known="the clip norm and the noise multiplier; one example per update, one update",
            not_said="a bound: other attackers may do better; nor the result for one given example",
            equation="this project (docs/risk.md)",
        )
    return Scope(
        covers="attained",
        attackers=f"the best attack on the linear trap, which {says}",
        prior="direction uniform on the sphere of the given norm; other examples removed",
        known=scope.known,
        not_said="that no attacker does better: another model or an image prior can",
        equation=scope.equation,
    )


def uninformed_note(edges: Corridor) -> str:
    """A note that a prior which knows nothing about the data protects nothing."""
    return "" if edges.basis is not None else pictures.note(UNINFORMED)


def scope_notes(edges: Corridor) -> str:
    """The attackers that attained success and upper bound cover, in small letters."""

    def lines(name: str, scope: Scope) -> str:
        return pictures.note(f"{name}: {scope.attackers}; examples: {scope.prior}") + (
            f"<br>{pictures.note(f'it does not say: {scope.not_said}')}"
        )

    return (
        f"{lines('attained', edges.attained_scope)}<br>"
        f"{lines('no attacker exceeds', edges.bound_scope)}"
    )


def examples_words(edges: Corridor) -> str:
    """What one example is, such as "784 values per example, least norm 9.2"."""
    distance = _distance(edges.prior)
    if distance.columns:
        return f"{distance.noun}s of {distance.columns} {distance.parts}"
    return f"{edges.setting.dim} values per example, least norm {edges.setting.norm:.4g}"
