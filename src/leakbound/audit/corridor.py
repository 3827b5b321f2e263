"""The risk corridor: what an attack reaches and what none exceeds, on one error threshold."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from leakbound import check
from leakbound.bounds import composition, conversions, from_scratch, identification
from leakbound.bounds.law import Scope, non_negative, positive, probability, rate, single, whole
from leakbound.bounds.roots import least_where

Array = NDArray[Any]
Participation = Literal["visible", "hidden"]

ROUNDING = 1e-7
"""Relative rounding of the two edges: a lower one above the upper by less is set to it."""
CUT = 1e-9
"""Part of delta that stands for numbers of sightings left out of a sum, on either side."""
MOST_STEPS = 2**30
SPHERE = "a direction uniform on the sphere, of the given norm or a larger one"
LOWER_SAYS = {
    "visible": "averages the steps that hold the record, which it knows",
    "hidden": "adds up all steps, as it does not know which hold the record",
}


@dataclass(frozen=True)
class Setting:
    """One private training: what both edges need to know.

    Attributes:
        noise_multiplier: noise standard deviation / clip norm.
        dim: N, the number of values of one record.
        norm: |X|, the least among the records that the answer is for.
        steps, sampling_rate: how often the model is updated, and the chance that a step holds a
            given record (Poisson sampling).
        participation: whether the attacker sees which steps hold the record. In federated learning
            the server picks the clients: "visible". Both need Poisson sampling: a record that takes
            part once in an epoch is at more risk, and k sure steps are k full-batch ones.
        clip_norm, rows: of a trap with few rows, which attains less; by default it has enough.
    """

    noise_multiplier: float
    dim: int
    norm: float = 1.0
    steps: int = 1
    sampling_rate: float = 1.0
    participation: Participation = "visible"
    clip_norm: float | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        single("noise_multiplier", non_negative("noise_multiplier", self.noise_multiplier))
        single("dim", whole("dim", self.dim))
        single("norm", positive("norm", self.norm))
        if single("steps", whole("steps", self.steps)) > MOST_STEPS:
            raise ValueError(f"steps is {self.steps}; give at most {MOST_STEPS}")
        single("sampling_rate", rate("sampling_rate", self.sampling_rate))
        check.one_of(LOWER_SAYS, participation=self.participation)
        if (self.rows is None) != (self.clip_norm is None):
            raise ValueError("clip_norm and rows: give both, or neither for a trap of enough rows")

    @property
    def trap_noise(self) -> float:
        """The noise multiplier that a trap with this number of rows is left with."""
        if self.rows is None or self.clip_norm is None:
            return self.noise_multiplier
        found = from_scratch.effective_noise(
            self.noise_multiplier, clip_norm=self.clip_norm, norm=self.norm, rows=self.rows
        )
        return float(found)


@dataclass(frozen=True, eq=False)
class Corridor:
    """Both edges of the risk at thresholds eta.

    Attributes:
        setting: what they hold for.
        eta: (n,) mean squared errors, input units squared.
        lower: (n,) success of the best attack on the linear trap: attained.
        upper: (n,) success that no attacker exceeds, with any model, on average over the prior.
        log_kappa: (n,) natural logarithm of the blind success behind the upper edge.
        informed: whether the upper edge's prior knows the data. A uniform direction does not: an
            attacker who knows similar data exceeds its edge, so it protects nothing.
        lower_scope, upper_scope: whom each covers and what it does not say.
    """

    setting: Setting
    eta: Array
    lower: Array
    upper: Array
    log_kappa: Array
    informed: bool
    lower_scope: Scope
    upper_scope: Scope

    @property
    def width(self) -> Array:
        """The upper edge over the lower, where the lower edge is above 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.lower > 0, self.upper / self.lower, np.nan)

    def _repr_html_(self) -> str:
        from leakbound.audit.notebook import of_corridor

        return of_corridor(self)


def corridor(
    setting: Setting,
    eta: ArrayLike,
    *,
    log_kappa: Callable[[Array], Array] | None = None,
    prior: str = "the records that log_kappa is computed for",
    informed: bool = True,
) -> Corridor:
    """Both edges of the risk that some image is rebuilt with an MSE of at most eta.

    Lower: gamma* of the linear trap over the numbers of sightings. Upper: the trade-off function of
    the composed, subsampled Gaussian mechanism at the blind success kappa(eta). Both average over a
    direction that is uniform on the sphere of radius `norm`, unless another blind success is given
    for the upper edge; then only that one moves.

    Shapes: `eta` (n,) or a number.

    Args:
        setting: the training.
        eta: mean squared errors above 0, input units squared.
        log_kappa: the logarithm of the blind success at each eta, for another prior. The lower edge
            stays that of a uniform direction, so it can then exceed the upper one.
        prior: that prior in words.
        informed: whether that prior knows the data; a uniform direction, the default, does not.

    Raises:
        ValueError: eta of 0 or below.

    Source: docs/errata.md, "the valid corridor"; corrects paper C, section V.

    Example:
        >>> edges = corridor(Setting(0.5, dim=16), [0.5 / 16, 0.9 / 16])
        >>> edges.lower.round(3).tolist(), edges.upper.round(3).tolist()
        ([0.068, 0.762], [0.12, 0.777])
    """
    levels = np.atleast_1d(positive("eta", eta, infinite=True))
    blind = (
        np.asarray(identification.log_kappa_sphere(dim=setting.dim, eta=levels, norm=setting.norm))
        if log_kappa is None
        else np.asarray(log_kappa(levels))
    )
    lower = lower_edge(setting, levels)
    upper = upper_edge(setting, blind)
    over = (lower > upper) & (lower < upper * (1 + ROUNDING))
    if log_kappa is None:
        lower = np.where(over, upper, lower)
    scope = replace(
        edge_law(setting).scope,
        prior=f"averaged over {SPHERE if log_kappa is None else prior}; other records fixed or "
        "known",
    )
    knows = informed and log_kappa is not None
    return Corridor(setting, levels, lower, upper, blind, knows, _lower_scope(setting), scope)


def lower_edge(setting: Setting, eta: Array) -> Array:
    """The success of the best attack on the linear trap, over the numbers of sightings.

    Shapes: `eta` (n,).

    Example:
        >>> lower_edge(Setting(0.5, dim=16), np.array([0.5 / 16])).round(4).tolist()
        [0.0683]
    """
    with np.errstate(invalid="ignore"):  # no noise and no sighting: 0 / 0 inside, a blind guess
        found = from_scratch.averaged(
            setting.trap_noise,
            dim=setting.dim,
            eta=eta,
            steps=setting.steps,
            sampling_rate=setting.sampling_rate,
            norm=setting.norm,
            participation=setting.participation,
        )
    return np.asarray(found)


def upper_edge(setting: Setting, log_kappa: ArrayLike) -> Array:
    """The success that no attacker exceeds, for the logarithm of its blind success.

    Shapes: `log_kappa` (n,).

    Example:
        >>> upper_edge(Setting(1.0, dim=4), [np.log(0.1)]).round(4).tolist()
        [0.3891]
    """
    found = edge_law(setting)(
        setting.noise_multiplier,
        sampling_rate=setting.sampling_rate,
        steps=setting.steps,
        log_kappa=log_kappa,
    )
    return np.asarray(found)


def epsilon(setting: Setting, delta: float) -> float:
    """The epsilon that goes with delta, adding or removing a record; infinite without noise.

    An attacker who sees which steps hold the record gains no doubt from sampling but the chance
    that none does: delta(epsilon) is then the mean of that of k full-batch steps over k.

    Example:
        >>> round(epsilon(Setting(1.0, dim=4, steps=10, sampling_rate=0.1), 1e-5), 2)
        8.17
        >>> hidden = Setting(1.0, dim=4, steps=10, sampling_rate=0.1, participation="hidden")
        >>> round(epsilon(hidden, 1e-5), 2)
        2.85
    """
    most = single("delta", probability("delta", delta))
    noise, steps, q = setting.noise_multiplier, setting.steps, setting.sampling_rate
    if setting.participation == "hidden" or q == 1:
        return float(conversions.epsilon(noise, delta=most, steps=steps, sampling_rate=q))
    hits, cut = stats.binom(steps, q), most * CUT
    k = np.arange(max(0.0, hits.ppf(cut)), min(steps, hits.isf(cut)) + 1)
    mass, gain = hits.pmf(k), np.asarray(conversions.mu(noise, steps=np.maximum(k, 1)))
    gain = np.where(k == 0, 0.0, gain)

    def holds(level: Array) -> Array:
        found = mass @ np.exp(conversions.log_delta(gain, level))
        return np.asarray(found <= most * (1 - 3 * CUT))

    high = float(conversions.epsilon(noise, delta=most, steps=steps))
    if not math.isfinite(high):
        return 0.0 if holds(np.array(0.0)) else math.inf
    return float(least_where(holds, np.array(0.0), np.array(high)))


def edge_law(setting: Setting) -> Any:
    """The law of the upper edge for the setting's participation."""
    return composition.subsampled if setting.participation == "hidden" else composition.visible


def _lower_scope(setting: Setting) -> Scope:
    scope = from_scratch.exact.scope
    says = LOWER_SAYS[setting.participation]
    return Scope(
        covers="attained",
        attackers=f"the best attack on the linear trap, which {says}",
        prior="direction uniform on the sphere of the given norm; other records removed",
        known=scope.known,
        not_said="that no attacker does better: another model or an image prior can",
        equation=scope.equation,
    )
