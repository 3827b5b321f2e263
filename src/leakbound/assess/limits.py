"""All bounds on one release, on success and on the error, for audits, captures and the meter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from leakbound import check
from leakbound._util.decibels import mse_of_psnr, psnr_of_mse
from leakbound.assess.record import AttackerRow, Attained, Bound, short
from leakbound.assess.released import (
    Released,
    nine,
    refuse_known_parts,
    refuse_other_distances,
    refuse_side_information,
)
from leakbound.assess.success import (
    RiskSpec,
    attackers,
    attained,
    doubted,
    known_model_probability,
    known_sample,
    model_probability,
    private_noise,
    sample_key,
    sample_probability,
    these_probability,
)
from leakbound.bounds import (
    ErrorBound,
    Prior,
    full_bound,
    full_bound_from_samples,
    trace_bound_from_samples,
)
from leakbound.bounds.smoothness import not_smooth
from leakbound.bounds.weiss_weinstein import default_steps, least_informed, weiss_weinstein_bound
from leakbound.channel import ClassPriors
from leakbound.channel.fisher import Channel, fisher_matrix, fisher_trace, overlaps, strange_power
from leakbound.core import Batch, Gaussian, NotApplicable, Server

PILOT = 4
STEPS = 5
GRID = (30, 28, 26, 24.5, 23, 21.5, 20, 18.5, 17, 15.5, 14, 12)
"""PSNRs in dB at which the bound on the mean error evaluates the bound on success."""
MANY = 96
"""Draws for a Weiss-Weinstein bound: its confidence costs a linear release 20 % of the bound."""


@dataclass(frozen=True)
class ErrorBoundSpec:
    """A lower bound on every attacker's mean error, or an estimate of one.

    Attributes:
        kind: "sample" (what public examples show of a private release); in addition "trace" or
            "full" (tighter, slower, with a leak map), both estimates, or "weiss_weinstein" (proven,
            also for non-smooth activations, slowest); or "none".
        prior: what attackers know of examples: "gaussian" (mean and covariance of public ones, in
            their `components` leading directions), "isotropic" (their mean variance) or "flat".
        images: number of draws of the prior over which the information is averaged.
        directions: number of random directions for each trace.
    """

    kind: str = "trace"
    prior: str = "gaussian"
    components: int = 32
    images: int = 16
    directions: int = 4

    def __post_init__(self) -> None:
        check.one_of(["none", "sample", "trace", "full", "weiss_weinstein"], kind=self.kind)
        if (self.kind, self.prior) == ("weiss_weinstein", "flat"):
            raise ValueError(
                "kind is 'weiss_weinstein' with prior 'flat'; it needs a Gaussian prior"
            )
        check.one_of(["gaussian", "isotropic", "flat"], prior=self.prior)
        check.count(
            components=self.components,
            images=self.images,
            directions=self.directions,
        )


@dataclass(frozen=True)
class Limits:
    """The known bounds on all attackers of a release, and the success of known attacks.

    Attributes:
        bounds: the available bounds.
        note: why others are missing.
        attained: success of the best known attack; None if it is not known.
        attackers: what a private release adds for a stranger, an intruder and anyone.
    """

    bounds: tuple[Bound, ...] = ()
    note: str | None = None
    attained: Attained | None = None
    attackers: tuple[AttackerRow, ...] = ()


def of_release(
    released: Released,
    error: ErrorBoundSpec,
    risk: RiskSpec,
    source: torch.Generator,
) -> Limits:
    """All available bounds for a release, and the attained success."""
    bounds: list[Bound] = []
    notes: list[str] = []
    makers: tuple[Callable[[], Bound | None], ...] = (
        partial(error_bound, released, error, source),
        partial(sample_error_bound, released, error, risk),
        partial(sample_probability, released, risk),
        partial(these_probability, released, risk),
        partial(known_model_probability, released, risk),
        partial(model_probability, released, risk),
    )
    for make in makers:
        try:
            bound = make()
        except NotApplicable as missing:
            notes.append(" ".join(missing.reason.split()))
            continue
        if bound is not None:
            bounds.append(bound)
    note = "; ".join(dict.fromkeys(notes)) or None
    rows: tuple[AttackerRow, ...] = ()
    with suppress(NotApplicable):  # the bound on the probability has said why
        rows = attackers(released, risk)
    return Limits(tuple(bounds), note, attained(released, risk), rows)


def error_bound(
    released: Released,
    spec: ErrorBoundSpec,
    source: torch.Generator,
) -> Bound | None:
    """The requested lower bound on every attacker's mean squared error.

    The prior is one Gaussian per class, and labels count as known, since an update often reveals
    them. The bound is stated on average only for single examples: several reconstructions are
    paired in the best order, which the bound does not cover.

    Raises:
        NotApplicable: no such bound is available here, with the reason.
    """
    if spec.kind in ("none", "sample"):
        return None
    refuse_known_parts(released)
    refuse_other_distances(released)
    refuse_side_information(released)
    if released.task.coupled:
        raise NotApplicable(
            "batch norm in training mode couples the examples: no lower bound on the error is known"
        )
    if released.threat.server is Server.MALICIOUS:
        raise NotApplicable(
            "a malicious server chooses the model, and a lower bound on the error for one model "
            "does not bound others: the server may scale its weights until the noise is negligible"
        )
    if released.batch is None:
        raise NotApplicable("a lower bound on the error needs the labels, which are not known")
    labels = released.batch.labels
    if labels.ndim > 1 or labels.is_floating_point():
        raise NotApplicable("a lower bound on the error needs one class for each example")

    # A reason is returned and not raised, so that it is cached like a bound.
    def make() -> ErrorBound | str:
        try:
            return _error_bound(released, spec, labels, source)
        except NotApplicable as error:
            return error.reason

    bound = released.cached("error bound", (tuple(labels.tolist()), spec), make)
    if isinstance(bound, str):
        raise NotApplicable(bound)
    criterion = released.criterion
    (low, high) = released.task.input_range
    return Bound(
        name=bound.name,
        value=nine(bound.value, up=False),
        psnr=short(psnr_of_mse(bound.value, high - low)),
        prior=bound.prior,
        covers=bound.covers,
        rests_on_prior=bound.rests_on_prior,
        excludes_threshold=False,
        on_average=bound.covers == "all"
        and bound.value > criterion.error
        and released.examples == 1,
        equation=bound.equation,
        assumptions=tuple(bound.assumptions),
        standard_error=short(bound.standard_error),
        confidence=bound.confidence,
    )


def leak_map(released: Released, spec: ErrorBoundSpec) -> Tensor | None:
    """How much of each value's uncertainty the release removes, (B, *S) in [0, 1].

    1 - sqrt(posterior bound / prior variance) at the very examples that were sent. 0: a value stays
    as uncertain as under the prior. 1: it is revealed. None without a full bound.
    """
    truth = released.batch
    if truth is None or spec.kind != "full":
        return None
    prior = _by_class(spec, released).prior(truth.labels)
    if not prior.information.any():
        return None
    try:
        information = fisher_matrix(_channel(released), truth, _basis(prior))
        left = full_bound(information, prior).per_pixel
    except (NotApplicable, ValueError):  # only the picture is missing; the record stays the same
        return None
    if left is None:
        return None
    before = _prior_variance(prior)
    varies = before > 1e-9 * before.max()
    # A value that does not vary has no uncertainty to remove.
    share = np.where(varies, left / np.where(varies, before, 1.0), 1.0)
    known = 1 - np.sqrt(np.clip(share, 0, 1))
    return torch.as_tensor(known).reshape(truth.inputs.shape)


def sample_error_bound(
    released: Released,
    error: ErrorBoundSpec,
    risk: RiskSpec,
) -> Bound | None:
    """A lower bound on every attacker's mean squared error from public examples, without a model.

    None if the release is not private or no such bound is requested.
    """
    private = None if error.kind == "none" else private_noise(released, risk)
    if private is None or released.public is None or released.public.size < 2:
        return None
    refuse_known_parts(released)
    refuse_other_distances(released)
    noise, scope, _ = private
    sample = known_sample(released)
    (low, high) = released.task.input_range
    levels = mse_of_psnr(np.array(GRID), high - low)
    value = released.of_public(
        ("sample error", *sample_key(released), noise, high - low),
        lambda: sample.mean_error(noise, levels),
    )
    if value < levels[0]:  # below the grid the bound says nothing
        return None
    criterion = released.criterion
    return Bound(
        name="count of public examples",
        value=nine(value, up=False),
        psnr=short(psnr_of_mse(value, high - low)),
        prior=sample.name,
        rests_on_prior=True,
        basis="sample",
        confidence=sample.confidence,
        public_examples=sample.n,
        covers=scope.covers,
        excludes_threshold=False,
        on_average=value > criterion.error and released.examples == 1 and not doubted(released),
        equation="sum of (eta_j - eta_(j-1)) (1 - success bound at eta_j) (docs/risk.md)",
        assumptions=(
            f"covers {scope.attackers}",
            "examples: private ones are drawn independently and like the public ones",
            "a mean over examples and noise: it does not exclude one lucky example",
        ),
    )


def _error_bound(
    released: Released,
    spec: ErrorBoundSpec,
    labels: Tensor,
    source: torch.Generator,
) -> ErrorBound:
    channel = _channel(released)
    by_class = _by_class(spec, released)
    prior = by_class.prior(labels)
    # 4 is the fewest that `full_bound_from_samples` takes.
    least = MANY + PILOT if spec.kind == "weiss_weinstein" else 4
    drawn = by_class.batches(labels, max(least, spec.images // len(labels)), source)
    basis = _basis(prior)
    if spec.kind == "full":
        fishers = [fisher_matrix(channel, b, basis) for b in drawn]
        return _explained(full_bound_from_samples(fishers, prior), channel, drawn[0])
    if spec.kind == "weiss_weinstein":
        return _without_smoothness(channel, prior, drawn, basis)
    traces = [
        fisher_trace(
            channel,
            b,
            source,
            directions=spec.directions,
            basis=basis,
        )
        for b in drawn
    ]
    return _explained(trace_bound_from_samples(traces, prior), channel, drawn[0])


def _without_smoothness(
    channel: Channel,
    prior: Prior,
    drawn: list[Batch],
    basis: Tensor | None,
) -> ErrorBound:
    """The Weiss-Weinstein bound, along the directions that a few pilot draws reveal least."""
    pilot = drawn[:PILOT]
    rest = drawn[PILOT:]
    fisher = np.mean([fisher_matrix(channel, b, basis) for b in pilot], axis=0)
    directions, known = least_informed(fisher, prior, max(1, prior.rank // 2))
    steps = default_steps(
        prior,
        STEPS,
        directions=directions,
        information=known,
    )
    frame = torch.as_tensor(directions)
    frame = frame if basis is None else basis @ frame
    return weiss_weinstein_bound(
        overlaps(channel, rest, frame, steps), steps, prior, directions=directions
    )


def _explained(
    estimate: ErrorBound,
    channel: Channel,
    batch: Batch,
) -> ErrorBound:
    """The estimate, with the other conditions that its theorem lacks: smoothness, public noise."""
    assert isinstance(channel.law, Gaussian)  # checked when the channel was built
    parts = not_smooth(channel.task, batch.inputs, batch.labels, channel.defense)
    if parts:
        words = f"what is sent is not known to be smooth in the inputs ({', '.join(parts)})"
    elif channel.law.private:
        words = "the noise of private data is taken along one draw of the defense's directions"
    else:
        return estimate
    why, *others = estimate.assumptions
    return replace(estimate, assumptions=(f"{words}, and {why}", *others))


def _channel(released: Released) -> Channel:
    if len(released.cohort) > 1:
        raise NotApplicable(
            "the update sums several clients; a bound on the error is for one client's release"
        )
    update = released.update
    defense = released.defense
    task = defense.infer(released.task, update)
    channel = Channel(task, defense, update.law, update.mask, update.mask_private)
    if released.truth_known and released.batch is not None and not update.law.private:
        power = strange_power(channel, update, released.batch)
        if power is not None:
            raise NotApplicable(
                f"what was sent has {power:.3g} times the noise around what the defense's "
                "`imitate` gives: a bound would be that of a stand-in"
            )
    return channel


def _by_class(spec: ErrorBoundSpec, released: Released) -> ClassPriors:
    make = partial(ClassPriors, released.public, spec.prior, spec.components)
    key = "prior", spec.prior, spec.components
    return cast(ClassPriors, make() if released.once is None else released.once(key, make))


def _basis(prior: Prior) -> Tensor | None:
    # PyTorch takes no negative strides, which reversed eigenvectors have.
    return None if prior.basis is None else torch.as_tensor(np.ascontiguousarray(prior.basis))


def _prior_variance(prior: Prior) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The prior's variance of every value, (m,)."""
    basis = prior.basis
    if prior.information.ndim == 1:
        variance = np.where(prior.information > 0, 1 / np.maximum(prior.information, 1e-300), 0)
        return np.asarray(variance if basis is None else basis**2 @ variance)
    covariance = np.linalg.inv(prior.matrix)
    if basis is None:
        return np.asarray(np.diagonal(covariance))
    return np.asarray(np.einsum("ij,jk,ik->i", basis, covariance, basis))
