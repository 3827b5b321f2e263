"""The laws in an audit: the probability that any attacker reaches the threshold, for one cell."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from leakbound.audit.bench import Bench
from leakbound.audit.floors import told_beside
from leakbound.audit.plan import Cell, RiskSpec
from leakbound.bounds import identification, record_priors
from leakbound.bounds.law import Scope
from leakbound.defenses import Chain, GaussianMechanism, NoisyCopy
from leakbound.protocol import Round
from leakbound.types import Guarantee, NotApplicable

LEAST = 1e-300
"""Smaller probabilities are given as this."""


def risks(cell: Cell, bench: Bench, played: Round) -> list[dict[str, Any]]:
    """The upper edge at the cell's threshold for one release, as records hold it; none or one.

    Differential privacy: the trade-off function of the Gaussian mechanism at the blind success
    under the plan's prior. A noisy copy: what the copy itself tells under that prior, which covers
    all that is ever computed from it. Each image for itself; for several it is that of the worst.
    Nothing of `played.truth` is used.

    Raises:
        NotApplicable: there is no prior to be had from the public images.
    """
    spec, defense = cell.risk, played.defense
    if spec.probability is None or not isinstance(defense, Chain):
        return []
    told_beside(cell, played)
    copies = [link.noise_std for link in defense.links if isinstance(link, NoisyCopy)]
    if not copies and defense.guarantee is not Guarantee.DIFFERENTIAL_PRIVACY:
        return []
    low, high = played.observation.task.input_range
    eta = (high - low) ** 2 / 10 ** (cell.threshold / 10)
    guesses = max(cell.batch_size, sum(played.observation.cohort))
    told = cell.threat.labels_known
    rung = _rung(spec, bench, told)
    key = ("blind", spec.prior, spec.components, told, eta)
    one = bench.once(key, lambda: _blind(rung, bench, eta, told))
    blind = min(0.0, one + math.log(guesses))  # any of the guesses may hit the image
    if copies:
        logs = max(one, _copied(copies[0], rung, eta=eta, blind=one))
        found, scope = float(np.exp(min(0.0, logs + math.log(guesses)))), COPY
    else:
        found = float(identification.gaussian(_multiplier(defense), log_kappa=blind))
        scope = PRIVATE
    prior = f"{rung.name} (public images)"
    sentence = f"a blind guess succeeds with probability {_tiny(blind)}"
    return [_record(max(found, LEAST), spec.probability, prior, scope, sentence)]


def _record(
    found: float, accepted: float, prior: str, scope: Scope, sentence: str
) -> dict[str, Any]:
    return {
        "name": "probability after a noisy copy" if scope is COPY else "probability",
        "value": found,
        "probability": found,
        "accepted": accepted,
        "psnr": None,
        "prior": prior,
        "rests_on_prior": True,
        "covers": scope.covers,
        "excludes_threshold": found <= accepted,
        "on_average": False,
        "equation": scope.equation,
        "assumptions": [
            f"covers {scope.attackers}",
            f"records: {scope.prior}; each image for itself",
            f"it does not say: {scope.not_said}",
            sentence,
        ],
        "standard_error": None,
    }


def _multiplier(defense: Chain) -> float:
    """The largest multiplier of the mechanisms in the chain; each alone covers what follows."""
    return max(m.noise_multiplier for m in defense.links if isinstance(m, GaussianMechanism))


def _copied(
    noise_std: float, rung: record_priors.RecordPrior, *, eta: float, blind: float
) -> float:
    """Log of the most probability with which one guess from x + w comes within eta of x.

    Gaussians: given the copy and the part it is of, x is Gaussian with a covariance that does not
    depend on the copy, so the most mass of a ball is known. Gallery: no image is farther from the
    middle than the farthest, in units of noise.
    """
    levels = np.array([eta])
    if isinstance(rung, record_priors.Mixture):
        square = noise_std**2

        def left(variance: Any) -> Any:
            return variance * (square / (variance + square))

        parts = [
            replace(part, variances=left(part.variances), rest=left(part.rest))
            for part in rung.parts
        ]
        return float(np.asarray(record_priors.Mixture(parts, rung.weights).log_kappa(levels))[0])
    assert isinstance(rung, record_priors.Gallery)  # there is no other
    farthest = float(np.linalg.norm(rung.images - rung.images.mean(0), axis=1).max())
    return float(identification.gaussian.log(noise_std / farthest, log_kappa=blind))


def _blind(rung: record_priors.RecordPrior, bench: Bench, eta: float, labels_known: bool) -> float:
    """Log of the blind success: the rung's, or what public images reach of one another if more.

    A known label is told outside the update, so that blind guesses may differ by class. A model of
    images may lie far below real ones; what one public image reaches of the others (of its class)
    does not, and the largest such share errs upwards.
    """
    public = bench.public
    assert public is not None  # the rung was fitted on them
    flat = public.inputs.flatten(1).double().cpu().numpy()
    labels = public.labels.cpu().numpy()
    groups = [flat[labels == y] for y in np.unique(labels)] if labels_known else [flat]
    known = float(
        np.asarray(
            record_priors.EmpiricallyBoundedPrior(rung, [*groups]).log_kappa(np.array([eta]))
        )[0]
    )
    if isinstance(rung, record_priors.Gallery) and labels_known:
        shares = [len(group) / len(flat) for group in groups]
        each = [np.asarray(record_priors.Gallery(g).log_kappa(np.array([eta])))[0] for g in groups]
        known = max(known, float(np.log(np.dot(shares, np.exp(each)))))
    return min(0.0, known)


def _rung(spec: RiskSpec, bench: Bench, labels_known: bool) -> record_priors.RecordPrior:
    by_class = spec.prior == "gaussian" and labels_known  # one Gaussian a class
    spec = replace(spec, prior="mixture") if by_class else spec
    return bench.once(("rung", spec.prior, spec.components), lambda: _fitted(spec, bench))


def _fitted(spec: RiskSpec, bench: Bench) -> record_priors.RecordPrior:
    public = bench.public
    if public is None or public.size < record_priors.MIN_EXAMPLES:
        raise NotApplicable(
            f"the probability needs {record_priors.MIN_EXAMPLES} public images to take a prior from"
        )
    images = public.inputs.flatten(1).double().cpu().numpy()
    try:
        if spec.prior == "gaussian":
            return record_priors.GaussianImages.from_samples(images, components=spec.components)
        if spec.prior == "mixture":
            return record_priors.Mixture.from_samples(
                images, labels=public.labels.cpu().numpy(), components=spec.components
            )
        return record_priors.Gallery(images)
    except ValueError as error:  # such as a class of one public image
        raise NotApplicable(f"no prior can be taken from the public images: {error}") from None


def _tiny(log: float) -> str:
    power = log / math.log(10)
    return f"{math.exp(log):.3g}" if power > -300 else f"1e{power:.0f}"


PRIVATE = replace(
    identification.gaussian.scope,
    attackers="all attackers, models and gradient maps with a per-record norm of at most the clip "
    "norm, on one release; each image by itself",
    prior="averaged over the prior, which was fitted to public images and is taken to hold for the "
    "private ones; other records fixed or known, none of them a copy",
    not_said="what several rounds leak, which is more (`leakbound bound --steps`), that no image "
    "of a batch is rebuilt, or a bound for one given record or for a sharper prior",
)
COPY = Scope(
    covers="all",
    attackers="all attackers and models, over any number of rounds: they see x + w at most",
    prior="averaged over the prior; the copies of other records fixed or known",
    known="the prior and the law of w",
    not_said="a bound for one given image, or for a sharper prior; labels are not protected",
    equation="the best guess given x + w (docs/risk.md, the family of priors)",
)
