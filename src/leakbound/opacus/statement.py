"""What a training amounts to: a risk and an epsilon, from an accountant's history."""

from __future__ import annotations

import html
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, cast

from leakbound import check
from leakbound.bounds import identification
from leakbound.bounds import mixed_steps as mixed
from leakbound.bounds.ladder import Rung
from leakbound.bounds.law import Scope, positive, probability, single
from leakbound.bounds.mixed_steps import Part
from leakbound.risk import Target, TrainingSetting
from leakbound.risk.calibrate import under
from leakbound.risk.corridor import Participation, success_bound
from leakbound.risk.corridor import epsilon as homogeneous_epsilon

SEES = {
    "hidden": "no attacker sees which steps hold a record",
    "visible": "the attacker sees which steps hold a record",
}
SEEDED = (
    "EXPERIMENT ONLY: the noise came from a seeded generator, and whoever has the seed subtracts it"
)
RISES = (0.01, 0.001, 0.0001)
"""Probabilities of a guess without the training, for which a statement without a prior answers."""
SHAPED = "; with noise of a public shape, that the same attack attains as much"


class Accountant(Protocol):
    """What is read of an Opacus accountant."""

    history: list[Any]


@dataclass(frozen=True, eq=False)
class Statement:
    """The risk after some steps from both sides, and epsilon.

    Without a prior that knows the data there is no probability that holds for all attackers: how
    often they succeed without the training is then not known, only how much the training adds.

    Attributes:
        history: (noise multiplier, sampling rate, steps) of each kind of step, merged.
        dim, norm: of the records that it holds for: number of values, least norm.
        eta: mean squared error below which a record counts as rebuilt, input units squared.
        psnr: the same in dB, where it was given so.
        participation: whether the attacker sees which steps hold a record.
        lower: success of the best attack on the linear trap: attained.
        upper: success that no attacker exceeds, on average over the prior; None without one.
        log_kappa: natural logarithm of the blind success behind it; None without a prior.
        rises: (a, b) pairs: what is guessed with probability a without the training is
            reconstructed with probability b at most.
        epsilon, delta: of all steps, adding or removing one record; infinite without noise.
        prior: for which records the upper edge holds; None if none was given.
        lower_scope, upper_scope: whom each edge covers and what it does not say.
        experiment_only: the noise can be replayed.
    """

    history: tuple[Part, ...]
    dim: int
    norm: float
    eta: float
    psnr: float | None
    participation: Participation
    lower: float
    upper: float | None
    log_kappa: float | None
    rises: tuple[tuple[float, float], ...]
    epsilon: float
    delta: float
    prior: str | None
    lower_scope: Scope
    upper_scope: Scope
    experiment_only: bool = False

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return sum(count for *_, count in self.history)

    def plain(self) -> dict[str, Any]:
        """All of it as JSON values; what is infinite is None."""
        found = {key: getattr(self, key) for key in self.__dataclass_fields__}
        found["history"] = [list(part) for part in self.history]
        found["rises"] = [list(pair) for pair in self.rises]
        for key in ("epsilon", "log_kappa"):
            finite = found[key] is not None and math.isfinite(found[key])
            found[key] = found[key] if finite else None
        for key in ("lower_scope", "upper_scope"):
            found[key] = asdict(found[key])
        return {**found, "steps": self.steps, "words": str(self)}

    def __str__(self) -> str:
        goal = f"an MSE of {self.eta:.4g} or less"
        if self.psnr is not None:
            goal = f"{self.psnr:g} dB PSNR or better"
        privacy = f"{self.epsilon:.3g}" if math.isfinite(self.epsilon) else "infinite"
        begin = f"After {_words(self.history)}, "
        attained = (
            f"One attack, on examples of {self.dim} values and norm {self.norm:.4g}, attains "
            f"{_attained(self.lower)}"
        )
        private = f"Epsilon is {privacy} at delta {self.delta:g}"
        where = f"This holds where {SEES[self.participation]}"
        if self.upper is None or self.log_kappa is None:
            begin += (
                f"an attacker who picks the model reconstructs an example to {goal} with a "
                f"probability that depends on what they guess without the training: "
                f"{_rises(self.rises)}"
            )
            prior = "No prior was given (prior=), so nothing is called protected"
        else:
            begin += (
                f"an attacker who picks the model reconstructs an example to {goal} with "
                f"probability {self.upper:.3g} at most, and without the training with "
                f"{_tiny(self.log_kappa)}"
            )
            prior = f"The first number is an average over the prior ({self.prior})"
        note = f"{SEEDED}. " if self.experiment_only else ""
        return f"{note}{begin}. {attained}. {private}. {prior}. {where}."

    def _repr_html_(self) -> str:
        rows = {
            "steps": _words(self.history),
            "reconstructed means": f"MSE of {self.eta:.4g} or less"
            + ("" if self.psnr is None else f" ({self.psnr:g} dB PSNR)"),
            "no attacker exceeds": "not stated: no prior was given"
            if self.upper is None
            else f"{self.upper:.3g}",
            "what a guess reaches rises to": _rises(self.rises),
            "one attack attains": _attained(self.lower),
            "a guess that sees nothing": "not known"
            if self.log_kappa is None
            else _tiny(self.log_kappa),
            "epsilon": f"{self.epsilon:.3g} at delta {self.delta:g}",
            "examples": f"{self.dim} values, norm {self.norm:.4g}; {self.prior or 'no prior'}",
            "attacker": SEES[self.participation],
        }
        body = "".join(
            f"<tr><th>{html.escape(key)}</th><td>{html.escape(value)}</td></tr>"
            for key, value in rows.items()
        )
        note = f"<p><strong>{html.escape(SEEDED)}</strong></p>" if self.experiment_only else ""
        return f"{note}<table>{body}</table>"


def risk(
    history: Accountant | Sequence[Sequence[float]],
    *,
    dim: int,
    norm: float,
    psnr: float | None = None,
    eta: float | None = None,
    input_range: float = 1.0,
    participation: Participation = "hidden",
    prior: Rung | None = None,
    delta: float = 1e-5,
    experiment_only: bool = False,
    shaped: bool = False,
) -> Statement:
    """The risk that an example is reconstructed, after the steps of an accountant.

    Steps of one setting: `risk.corridor`. Of several: the privacy losses are composed on one grid
    (`bounds.mixed_steps`), and the attack weighs steps by their noise. Errors go to more risk
    above, less below.

    Args:
        history: an Opacus accountant, or its history [(noise multiplier, sampling rate, steps)].
        dim: number of values of one record.
        norm: the least among the records.
        psnr: in dB, for inputs of range `input_range`; or
        eta: a mean squared error, input units squared.
        input_range: width of the range of an input.
        participation: "hidden" where no attacker sees which batch holds a record, as epsilon in
            Opacus has it; "visible" where one does.
        prior: of the records, for the upper edge, such as `ladder.from_images(public)`. Without one
            the statement says only how much the training adds to what an attacker guesses.
        delta: at which epsilon is stated.
        experiment_only: the noise was seeded; the statement then says so.
        shaped: the noise had a public shape: whether the attack below attains as much is unknown.

    Assumptions: Poisson sampling; noise that the attacker cannot replay.

    Raises:
        ValueError: neither or both of psnr and eta, or a history that is none.

    Source: docs/errata.md, "the valid corridor"; docs/opacus.md for several settings.

    Example:
        >>> found = risk([(1.0, 0.01, 1000)], dim=784, norm=9.2, psnr=20)
        >>> round(found.epsilon, 2), found.upper
        (1.83, None)
        >>> [f"{before:g} to {after:.2g}" for before, after in found.rises]
        ['0.01 to 0.029', '0.001 to 0.0041', '0.0001 to 0.00055']
    """
    goal = _target(psnr, eta, input_range)
    check.one_of(SEES, participation=participation)
    parts = tuple(_read(history))
    setting = TrainingSetting(1.0, dim, norm, participation=participation)
    one = under(prior, setting, goal.eta)
    scope = one.attained_scope
    if shaped:
        scope = replace(scope, not_said=scope.not_said + SHAPED)
    lower, upper, privacy = _edges(parts, setting, goal.eta, prior, delta)
    return Statement(
        history=parts,
        dim=dim,
        norm=norm,
        eta=goal.eta,
        psnr=psnr,
        participation=participation,
        lower=lower,
        upper=upper if one.informed else None,
        log_kappa=float(one.log_kappa[0]) if one.informed else None,
        rises=tuple((kappa, _most(parts, setting, math.log(kappa))) for kappa in RISES),
        epsilon=privacy,
        delta=delta,
        prior=None if prior is None else prior.name,
        lower_scope=scope,
        upper_scope=one.bound_scope,
        experiment_only=experiment_only,
    )


def _most(parts: tuple[Part, ...], setting: TrainingSetting, log_kappa: float) -> float:
    """The success that no attacker exceeds, from the logarithm of the blind one."""
    if not parts:
        return math.exp(log_kappa)
    if len(parts) == 1:
        noise, rate, steps = parts[0]
        setting = replace(setting, noise_multiplier=noise, sampling_rate=rate, steps=steps)
        return float(success_bound(setting, log_kappa))
    visible = setting.participation == "visible"
    most = mixed.visible_upper if visible else mixed.hidden_upper
    return float(most(mixed.merged(parts), log_kappa))


def _edges(
    parts: tuple[Part, ...], setting: TrainingSetting, eta: float, prior: Rung | None, delta: float
) -> tuple[float, float, float]:
    """Lower edge, upper edge, epsilon."""
    single("delta", probability("delta", delta))
    if prior is not None and prior.dim != setting.dim:
        raise ValueError(f"prior is of {prior.dim} values a record, but dim is {setting.dim}")
    dim, norm, visible = setting.dim, setting.norm, setting.participation == "visible"
    if len(parts) == 1:
        noise, rate, steps = parts[0]
        setting = replace(setting, noise_multiplier=noise, sampling_rate=rate, steps=steps)
        edges = under(prior, setting, eta)
        return float(edges.attained[0]), float(edges.bound[0]), homogeneous_epsilon(setting, delta)
    log_kappa = float(under(prior, setting, eta).log_kappa[0])
    if not parts:
        blind = float(identification.kappa_sphere(dim=dim, eta=eta, norm=norm))
        return blind, math.exp(log_kappa), 0.0
    least = mixed.visible_lower if visible else mixed.hidden_lower
    lower = least(mixed.merged(parts, more=False), dim=dim, eta=eta, norm=norm)
    upper = _most(parts, setting, log_kappa)
    if prior is None:
        lower = min(lower, upper)  # both round outwards: they cross by rounding alone
    return lower, upper, mixed.epsilon(mixed.merged(parts), delta, visible=visible)


def _target(psnr: float | None, eta: float | None, input_range: float) -> Target:
    if (psnr is None) == (eta is None):
        raise ValueError(f"psnr is {psnr} and eta is {eta}; give exactly one of them")
    if psnr is not None:
        return Target.of_psnr(psnr, 0.5, input_range=input_range)
    return Target(single("eta", positive("eta", cast(float, eta))), 0.5)


def _read(history: Accountant | Sequence[Sequence[float]]) -> list[Part]:
    """Kinds of steps, each once; the order of steps makes no difference to any edge."""
    rows = cast(Sequence[Any], getattr(history, "history", history))
    mechanism = getattr(history, "mechanism", None)
    if mechanism is not None and mechanism() == "gdp":
        warnings.warn(
            "the gdp accountant's own epsilon may be too low; this statement uses its history "
            "alone",
            stacklevel=3,
        )
    found: dict[tuple[float, float], int] = {}
    for row in rows:
        if not hasattr(row, "__len__") or len(row) != 3:
            raise ValueError(
                f"history holds {row!r}; give a list of (noise multiplier, rate, steps)"
            )
        noise, rate, steps = float(row[0]), float(row[1]), row[2]
        if not (math.isfinite(noise) and noise >= 0):
            raise ValueError(f"history holds the noise multiplier {noise}; give one of at least 0")
        if not 0 < rate <= 1:
            raise ValueError(
                f"history holds the sampling rate {rate}; give one in (0, 1] (Opacus counts more "
                "where gradients of several batches were accumulated, which is no Poisson sample)"
            )
        if int(steps) != steps or steps < 1:
            raise ValueError(f"history holds {steps} steps; give a whole number of at least 1")
        found[noise, rate] = found.get((noise, rate), 0) + int(steps)
    return [(noise, rate, steps) for (noise, rate), steps in found.items()]


def _words(history: tuple[Part, ...]) -> str:
    total = sum(count for *_, count in history)
    if not history:
        return "no step"
    noises, rates = sorted({n for n, *_ in history}), sorted({q for _, q, _ in history})
    return (
        f"{total:,} step{'s' * (total != 1)} (noise multiplier {_span(noises)}, sampling rate "
        f"{_span(rates)})"
    )


def _span(values: list[float]) -> str:
    ends = f"{values[0]:.4g}"
    return ends if len(values) == 1 else f"{ends} to {values[-1]:.4g}"


def _rises(pairs: Sequence[tuple[float, float]]) -> str:
    each = [f"{before:.2%} to at most {after:.3g}" for before, after in pairs]
    return ", ".join(each)


def _attained(chance: float) -> str:
    return f"{chance:.3g}" if chance > 0 else "less than 1e-300"


def _tiny(log: float) -> str:
    power = log / math.log(10)
    return f"{math.exp(log):.3g}" if power > -300 else f"1e{power:.0f}" if power > -1e9 else "0"
