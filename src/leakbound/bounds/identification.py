"""Upper bounds on reaching a goal of known prior-only success.

A server that may choose the model and sees every step distinguishes "example in" from "example out"
no better than the Gaussian mechanism allows. So a goal that the prior-only baseline reaches with
probability kappa (the prior-only success) is reached with probability at most gamma. Both are
averages over the prior of examples that kappa is computed for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from leakbound.bounds.from_scratch import exact
from leakbound.bounds.law import (
    Array,
    RiskLaw,
    Scope,
    between,
    non_negative,
    one,
    probability,
    whole,
)

__all__ = ["gaussian", "kappa_sphere", "log_kappa_sphere"]


@dataclass(frozen=True)
class GaussianLaw(RiskLaw):
    """gamma = Phi(Phi^-1(kappa) + sqrt(steps) / noise): every attacker, full-batch steps."""

    def __call__(
        self,
        noise_multiplier: ArrayLike,
        *,
        kappa: ArrayLike | None = None,
        log_kappa: ArrayLike | None = None,
        steps: ArrayLike = 1,
    ) -> Any:
        """Upper bound on the probability to reach a goal of prior-only success kappa; broadcasts.

        Args:
            noise_multiplier: noise standard deviation / clip norm.
            kappa: prior-only success, in [0, 1]; or
            log_kappa: its natural logarithm, for those too small for a float.
            steps: full-batch steps, composed adaptively.

        Source: Hayes et al. 2023; Kaissis et al. 2023; paper C; docs/errata.md, C8.

        Example:
            >>> round(gaussian(1.0, kappa=0.1), 4)
            0.3891
        """
        return one(np.exp(np.asarray(self.log(noise_multiplier, kappa, log_kappa, steps))))

    def log(
        self,
        noise_multiplier: ArrayLike,
        kappa: ArrayLike | None = None,
        log_kappa: ArrayLike | None = None,
        steps: ArrayLike = 1,
    ) -> Any:
        """The natural logarithm of the same bound."""
        sigma = non_negative("noise_multiplier", noise_multiplier)
        count = whole("steps", steps)
        blind = log_blind(kappa, log_kappa)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            gain = np.sqrt(count) / sigma
            log_bound = special.log_ndtr(special.ndtri_exp(blind) + gain)
        # With an infinite gain, inf - inf is NaN.
        log_bound = np.where(blind == -np.inf, -np.inf, log_bound)
        return one(np.where((blind == 0) | (gain == np.inf), 0.0, log_bound))

    def noise_for(
        self,
        gamma: ArrayLike,
        *,
        kappa: ArrayLike | None = None,
        log_kappa: ArrayLike | None = None,
        steps: ArrayLike = 1,
    ) -> Any:
        """The noise multiplier at which the bound is gamma; infinite where gamma = kappa.

        Raises:
            ValueError: kappa is above gamma, so no noise can help.

        Example:
            >>> round(gaussian.noise_for(0.1, kappa=1 / 11), 2)
            18.65
        """
        gamma, blind, count = np.broadcast_arrays(
            probability("gamma", gamma), log_blind(kappa, log_kappa), whole("steps", steps)
        )
        if np.any(blind > np.log(gamma)):
            worst = np.argmax((blind - np.log(gamma)).ravel())
            raise ValueError(
                f"gamma is {gamma.flat[worst]:g}, below the prior-only success kappa = "
                f"{np.exp(blind.flat[worst]):.6g}: no noise helps; give a larger gamma"
            )
        with np.errstate(divide="ignore"):
            distance = special.ndtri(gamma) - special.ndtri_exp(blind)
            # The two transforms round differently; the distance must not become negative.
            distance = np.where(blind == np.log(gamma), 0.0, np.maximum(0.0, distance))
            return one(np.sqrt(count) / distance)


gaussian = GaussianLaw(
    Scope(
        covers="all",
        attackers="all attackers, models and gradient maps with a per-example norm of at most the "
        "clip norm, over adaptive steps",
        prior="averaged over the prior that kappa is computed for; other examples fixed or known",
        known="everything but the example and the noise",
        not_said="a bound for one given example, or for a sharper prior",
        equation="Hayes et al. 2023",
    )
)


def kappa_sphere(
    *,
    dim: ArrayLike,
    eta: ArrayLike,
    norm: ArrayLike = 1.0,
) -> Any:
    """Prior-only success on the sphere: how often the best candidate has an MSE of at most eta.

    For a uniform direction and known |X| = norm. It is a cap of half-angle
    arcsin sqrt(N eta / norm^2), and 1 from eta = norm^2 / N on. Below 1e-308 it is 0: use
    `log_kappa_sphere` there.

    Source: docs/errata.md, "kappa".

    Example:
        >>> round(kappa_sphere(dim=2, eta=0.25), 4)
        0.25
    """
    return exact(np.inf, dim=dim, eta=eta, norm=norm)


def log_kappa_sphere(
    *,
    dim: ArrayLike,
    eta: ArrayLike,
    norm: ArrayLike = 1.0,
) -> Any:
    """The natural logarithm of `kappa_sphere`.

    Example:
        >>> round(log_kappa_sphere(dim=3072, eta=0.037 / 3072), 1)
        -5067.2
    """
    return exact.log(np.inf, dim=dim, eta=eta, norm=norm)


def log_blind(kappa: ArrayLike | None, log_kappa: ArrayLike | None) -> Array:
    """The logarithm of the prior-only success, from whichever of the two is given."""
    if kappa is not None and log_kappa is None:
        with np.errstate(divide="ignore"):
            return np.log(probability("kappa", kappa, closed=True))
    if log_kappa is None or kappa is not None:
        raise ValueError("kappa and log_kappa: give exactly one of them")
    return between("log_kappa", log_kappa, -np.inf, 0)
