"""The risk and the epsilon of a training, from an accountant's history."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, cast

import numpy as np
from numpy.typing import ArrayLike

from leakbound import check
from leakbound._util.formats import format_lower, format_upper, format_upper_log
from leakbound._util.pictures import facts
from leakbound.assess.sentences import unit_of
from leakbound.bounds import identification
from leakbound.bounds import mixed_steps as mixed
from leakbound.bounds.counting import PublicSample
from leakbound.bounds.knowledge import largest_gain
from leakbound.bounds.law import Scope, positive, probability, single
from leakbound.bounds.privacy_loss import Part
from leakbound.bounds.record_priors import Baseline
from leakbound.core import NotApplicable
from leakbound.risk import Target, TrainingSetting
from leakbound.risk.corridor import Participation, attained_scope, corridor, success_bound
from leakbound.risk.corridor import epsilon as homogeneous_epsilon
from leakbound.risk.statement import STRONG, of_membership

Divisor = Literal["constant", "batch size"]

SEES = {
    "hidden": "no attacker sees which steps hold an example",
    "visible": "the attacker sees which steps hold an example",
}
PUBLIC = {
    "constant": (
        "the number of examples is public, and no update is divided by the size of its batch"
    ),
    "batch size": "the number of examples and the size of every batch are public",
}
"""What a statement takes as public, by the divisor of each noisy sum of gradients."""
SEEDED = (
    "EXPERIMENT ONLY: the noise came from a seeded generator; anyone with the seed can subtract it"
)
INFORMED = "known parts"
"""The basis of a prior for who has parts of the example."""
RISES = (0.01, 0.001, 0.0001)
"""Prior-only success probabilities for which a statement without a prior answers."""


class Accountant(Protocol):
    """The part of an Opacus accountant that is used."""

    history: list[Any]


@dataclass(frozen=True, eq=False)
class Statement:
    """The risk after some steps from both sides, and epsilon.

    Without a prior from the data, no probability holds for all attackers: their success without the
    training is then unknown, and the statement says only what the training adds.

    Attributes:
        history: (noise multiplier, sampling rate, steps) of each kind of step, merged.
        dim, norm: of the examples that it holds for: number of values, least norm.
        eta: mean squared error up to which an example counts as reconstructed, input units squared.
        psnr: the same in dB, if it was given so.
        participation: whether the attacker sees which steps hold the example.
        attained: success of the best attack on the linear trap.
        bound: success that no attacker exceeds, on average over the prior; None without one.
        log_kappa: natural logarithm of the prior-only success behind it; None without a prior.
        rises: (a, b) pairs: an example that is guessed with probability a without the training is
            reconstructed with probability b at most.
        epsilon, delta: of all steps, adding or removing one example; infinite without noise.
        prior: the examples for which the upper bound holds; None if none was given.
        attained_scope, bound_scope: whom each side covers and what it does not say.
        experiment_only: the noise can be replayed.
        divisor: the divisor of each noisy sum: a public "constant" (or none), or the "batch size"
            that was drawn, which is then taken as public.
        people: the largest number of one person's examples, which the bound, the rises and epsilon
            count as one.
        gain: the most that the training adds to anyone's success, whatever they know.
        known: what the attacker of `bound` has of the example; "" is a stranger, who knows
            the population.
    """

    history: tuple[Part, ...]
    dim: int
    norm: float
    eta: float
    psnr: float | None
    participation: Participation
    attained: float
    bound: float | None
    log_kappa: float | None
    rises: tuple[tuple[float, float], ...]
    epsilon: float
    delta: float
    prior: str | None
    attained_scope: Scope
    bound_scope: Scope
    experiment_only: bool = False
    divisor: Divisor = "constant"
    people: int = 1
    gain: float = 1.0
    known: str = ""

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return sum(count for *_, count in self.history)

    def plain(self) -> dict[str, Any]:
        """The statement as JSON values; infinite values are None."""
        values = asdict(self) | {"steps": self.steps, "words": str(self)}
        values |= {"history": list(map(list, self.history)), "rises": list(map(list, self.rises))}
        for key in ("epsilon", "log_kappa"):
            if values[key] is not None and not math.isfinite(values[key]):
                values[key] = None
        return values

    def __str__(self) -> str:
        goal = f"an MSE of {self.eta:.4g} or less"
        if self.psnr is not None:
            goal = f"{self.psnr:g} dB PSNR or better"
        privacy = f"{self.epsilon:.3g}" if math.isfinite(self.epsilon) else "infinite"
        example = f"the rest of an example, of which they have {self.known}," * bool(self.known)
        attacker = (
            f"After {_words(self.history)}, an attacker who picks the model reconstructs "
            f"{example or 'an example'} to {goal} with "
        )
        if self.bound is None or self.log_kappa is None:
            attacker += (
                "a probability that depends on what they guess without the training: "
                f"{_rises(self.rises)}"
            )
            prior = "No prior was given (prior=), so nothing is called protected"
        else:
            attacker += (
                f"probability {format_upper(self.bound)} at most, and without the training with "
                f"{_blind(self.log_kappa)} at most"
            )
            prior = f"The first number holds on average over examples ({self.prior})"
        sentences = [
            attacker,
            f"One attack ({self.attained_scope.prior}; {self.dim} values, norm {self.norm:.4g} or "
            f"more) attains {_attained(self.attained)}",
            "To the success of anyone, whatever they know, the training adds at most "
            f"{format_upper(self.gain)}",
            f"Epsilon is {privacy} at delta {self.delta:g}"
            if self.bound is None or self.epsilon <= STRONG
            else of_membership(self.epsilon, self.delta),
            prior,
            f"This holds for {unit_of(self.people)}, where {SEES[self.participation]}, "
            f"{PUBLIC[self.divisor]}",
        ]
        return ". ".join([SEEDED, *sentences] if self.experiment_only else sentences) + "."

    def _repr_html_(self) -> str:
        decibels = "" if self.psnr is None else f" ({self.psnr:g} dB PSNR)"
        upper = "not stated: no prior was given" if self.bound is None else f"{self.bound:.3g}"
        table = facts(
            {
                "steps": _words(self.history),
                "reconstructed means": f"MSE of {self.eta:.4g} or less{decibels}",
                "no attacker exceeds": upper,
                "a guess without the training rises to": _rises(self.rises),
                "added at most, whatever is known": format_upper(self.gain),
                "one attack attains": _attained(self.attained),
                "prior-only baseline": _blind(self.log_kappa),
                "epsilon": f"{self.epsilon:.3g} at delta {self.delta:g}",
                "examples": f"{self.dim} values, norm {self.norm:.4g}; {self.prior or 'no prior'}",
                "unit": unit_of(self.people),
                "attacker": SEES[self.participation] + f"; has {self.known}" * bool(self.known),
                "taken as public": PUBLIC[self.divisor],
            }.items()
        )
        return f"<p><strong>{SEEDED}</strong></p>{table}" if self.experiment_only else table


def risk(
    history: Accountant | Sequence[Sequence[float]],
    *,
    dim: int,
    norm: float,
    psnr: float | None = None,
    eta: float | None = None,
    input_range: float = 1.0,
    participation: Participation = "hidden",
    prior: Baseline | None = None,
    delta: float = 1e-5,
    experiment_only: bool = False,
    divisor: Divisor = "constant",
    people: int = 1,
) -> Statement:
    """The risk that an example is reconstructed, after the steps of an accountant.

    Steps of one setting: `risk.corridor`. Of several: the privacy losses are composed on one grid
    (`bounds.mixed_steps`), and the attack weights steps by their noise. Numerical errors increase
    the upper bound and decrease the attained success.

    Args:
        history: an Opacus accountant, or its history [(noise multiplier, sampling rate, steps)].
        dim: number of values of one example; of its unknown part if the prior's attacker has some.
        norm: the least among the examples, or among their unknown parts.
        psnr: in dB, for inputs of range `input_range`; or
        eta: a mean squared error, input units squared.
        input_range: width of the range of an input.
        participation: "hidden" if no attacker sees which batch holds an example, as Opacus' epsilon
            assumes; "visible" if one does.
        prior: of the examples, for the upper bound, as `record_priors.from_images(public)`; or of
            an intruder, as `bounds.knowledge.informed`. Without one the statement says only what
            the training adds to an attacker's success.
        delta: the delta at which epsilon is stated.
        experiment_only: the noise was seeded; the statement then says so.
        divisor: the divisor of each noisy sum of gradients. "constant": a number that does not
            depend on the batch, as Opacus' `expected_batch_size`, or none. "batch size": the number
            of examples that were drawn, in the optimizer, the loss or the learning rate.
        people: the largest number of one person's examples in the data. The bound and epsilon are
            then for a person; the attack's success stays that on one example.

    Assumptions: Poisson sampling; noise that the attacker cannot replay; a public number of
        examples, since Opacus computes rate and divisor from it. Epsilon compares with a training
        in which the example's gradient counts as zero and all else is the same.

    Raises:
        NotApplicable: hidden participation in sampled steps, divided by the batch's size: the noise
            level shows that size, and the size shows whether the example takes part.

    Source: docs/errata.md, "the valid corridor"; docs/opacus.md for several settings.

    Example:
        >>> found = risk([(1.0, 0.01, 1000)], dim=784, norm=9.2, psnr=20)
        >>> round(found.epsilon, 2), [f"{a:g} to {b:.2g}" for a, b in found.rises]
        (1.83, ['0.01 to 0.029', '0.001 to 0.0041', '0.0001 to 0.00055'])
    """
    goal = _target(psnr, eta, input_range)
    single(probability, delta=delta)
    if prior is not None and prior.dim != dim:
        raise ValueError(f"prior is of {prior.dim} values an example, but dim is {dim}")
    if prior is not None and not prior.distance.squared:
        raise ValueError(
            f"prior measures {prior.distance.axis}, but a statement here is about mean squared "
            "errors; calibrate with leakbound.calibrate(data=...), and give its noise"
        )
    parts = _read(history)
    _check_divisor(parts, divisor, participation)
    setting = TrainingSetting(1.0, dim, norm, participation=participation, people=people)
    of_person = _of_person(parts, setting)
    if len(parts) == 1:
        noise, rate, steps = parts[0]
        setting = replace(
            setting,
            noise_multiplier=noise,
            sampling_rate=rate,
            steps=steps,
        )
    edges = corridor(setting, goal.eta, prior=prior)
    log_kappa = float(edges.log_kappa[0])
    if len(parts) == 1:
        lower = float(edges.attained[0])
        upper = float(edges.bound[0])
        privacy = homogeneous_epsilon(setting, delta)
    elif parts:
        visible = participation == "visible"
        least = mixed.visible_lower if visible else mixed.hidden_lower
        lower = least(
            mixed.merged(parts, more=False),
            dim=dim,
            eta=goal.eta,
            norm=norm,
        )
        upper = float(_upper(of_person, setting, log_kappa))
        if prior is None:
            lower = min(lower, upper)  # both round outward: they cross only by rounding
        privacy = mixed.epsilon(mixed.merged(of_person), delta, visible=visible)
    else:
        lower = float(identification.kappa_sphere(dim=dim, eta=goal.eta, norm=norm))
        upper = math.exp(log_kappa)
        privacy = 0.0
    scope = edges.attained_scope if len(parts) == 1 else attained_scope(setting, None)
    return Statement(
        history=parts,
        dim=dim,
        norm=norm,
        eta=goal.eta,
        psnr=psnr,
        participation=participation,
        attained=lower,
        bound=None if edges.basis is None else upper,
        log_kappa=None if edges.basis is None else log_kappa,
        rises=tuple((kappa, float(_upper(of_person, setting, math.log(kappa)))) for kappa in RISES),
        epsilon=privacy,
        delta=delta,
        prior=None if prior is None else prior.name,
        attained_scope=scope,
        bound_scope=edges.bound_scope,
        experiment_only=experiment_only,
        divisor=divisor,
        people=people,
        gain=largest_gain(partial(_upper, of_person, setting))[0] if parts else 0.0,
        known=prior.knows if isinstance(prior, PublicSample) and prior.basis == INFORMED else "",
    )


def _of_person(parts: tuple[Part, ...], setting: TrainingSetting) -> tuple[Part, ...]:
    """Kinds of steps as one example would see them that moves as much as a person's together."""
    each = [
        replace(setting, noise_multiplier=noise, sampling_rate=rate, steps=steps).of_person
        for noise, rate, steps in parts
    ]
    if len(parts) == 1:  # `success_bound` and `epsilon` take the person from the setting
        return parts
    return tuple((one.noise_multiplier, one.sampling_rate, one.steps) for one in each)


def _check_divisor(
    parts: tuple[Part, ...],
    divisor: Divisor,
    participation: Participation,
) -> None:
    """Reject the drawn batch size as the divisor if it shows hidden participation."""
    check.one_of(SEES, participation=participation)
    check.one_of(PUBLIC, divisor=divisor)
    sampled = any(rate < 1 for _, rate, _ in parts)
    if divisor == "batch size" and participation == "hidden" and sampled:
        raise NotApplicable(
            "divisor is 'batch size' and participation is 'hidden': the noise level shows "
            "how many examples a batch has, and so whether it holds a given one; divide by a "
            "constant such as Opacus' expected_batch_size, or give participation='visible', "
            "which takes the batch sizes as public"
        )


def _target(
    psnr: float | None,
    eta: float | None,
    input_range: float,
) -> Target:
    if (psnr is None) == (eta is None):
        raise ValueError(f"psnr is {psnr} and eta is {eta}; give exactly one of them")
    if psnr is not None:
        return Target.of_psnr(psnr, 0.5, input_range=input_range)
    return Target(single(positive, eta=cast(float, eta)), 0.5)


def _upper(
    parts: tuple[Part, ...],
    setting: TrainingSetting,
    log_kappa: ArrayLike,
) -> Any:
    """The success that no attacker exceeds, from the logarithm of the prior-only one."""
    if not parts:
        return np.exp(log_kappa)
    if len(parts) == 1:
        return success_bound(setting, log_kappa)
    visible = setting.participation == "visible"
    most = mixed.visible_upper if visible else mixed.hidden_upper
    return most(mixed.merged(parts), log_kappa)


def _read(history: Accountant | Sequence[Sequence[float]]) -> tuple[Part, ...]:
    """Kinds of steps, each once; the order of steps does not matter."""
    rows = cast(Sequence[Any], getattr(history, "history", history))
    mechanism = getattr(history, "mechanism", None)
    if mechanism is not None and mechanism() == "gdp":
        warnings.warn(
            "the gdp accountant's own epsilon may be too low; this statement uses only its history",
            stacklevel=3,
        )
    counts: dict[tuple[float, float], int] = {}
    for row in rows:
        if not hasattr(row, "__len__") or len(row) != 3:
            raise ValueError(
                f"history holds {row!r}; give a list of (noise multiplier, rate, steps)"
            )
        noise = float(row[0])
        rate = float(row[1])
        steps = row[2]
        if not (math.isfinite(noise) and noise >= 0):
            raise ValueError(f"history holds the noise multiplier {noise}; give one of at least 0")
        if not 0 < rate <= 1:
            raise ValueError(
                f"history holds the sampling rate {rate}; give one in (0, 1] (Opacus counts more "
                "where gradients of several batches were accumulated, which is not a Poisson "
                "sample)"
            )
        if int(steps) != steps or steps < 1:
            raise ValueError(f"history holds {steps} steps; give a whole number of at least 1")
        counts[noise, rate] = counts.get((noise, rate), 0) + int(steps)
    return tuple((noise, rate, steps) for (noise, rate), steps in counts.items())


def _words(history: tuple[Part, ...]) -> str:
    if not history:
        return "no step"
    noises, rates, counts = zip(*history, strict=True)
    spans = (sorted({min(values), max(values)}) for values in (noises, rates))
    noise, rate = (" to ".join(f"{value:.4g}" for value in span) for span in spans)
    total = sum(counts)
    return f"{total:,} step{'s' * (total != 1)} (noise multiplier {noise}, sampling rate {rate})"


def _rises(pairs: Sequence[tuple[float, float]]) -> str:
    return ", ".join(f"{before:.2%} to at most {after:.3g}" for before, after in pairs)


def _attained(chance: float) -> str:
    return format_lower(chance) if chance > 0 else "none that was counted"


def _blind(log: float | None) -> str:
    return "not known" if log is None else format_upper_log(log)
