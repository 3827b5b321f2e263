"""Floors on every attacker's error for one cell: from the release's law and a named prior."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leakbound.audit.bench import Bench
from leakbound.audit.plan import Cell, FloorSpec
from leakbound.bounds import (
    ErrorBound,
    Prior,
    full_bound,
    full_bound_from_samples,
    trace_bound_from_samples,
)
from leakbound.bounds.smoothness import not_smooth
from leakbound.bounds.weiss_weinstein import default_steps, least_informed, weiss_weinstein_bound
from leakbound.channel.class_priors import ClassPriors
from leakbound.channel.fisher import Channel, fisher_matrix, fisher_trace, strange_power
from leakbound.channel.overlap import overlaps
from leakbound.client import batch_norms
from leakbound.protocol import Round
from leakbound.random import stream
from leakbound.types import Batch, Gaussian, NotApplicable, Server

PILOT, STEPS = 4, 5
MANY = 64
"""Images for a Weiss-Weinstein floor: with fewer its limit was too optimistic in tests."""
UNPROVED = "unproved"


def told_beside(cell: Cell, played: Round) -> None:
    """Refuse where the attacker is told more than the release: no bound here covers that.

    Raises:
        NotApplicable: the batch's statistics are told, and the model has batch norms.
    """
    if cell.threat.statistics_known and batch_norms(played.observation.task):
        raise NotApplicable(
            "the batch's statistics are told beside the release, without noise: no bound covers "
            "them, and no guarantee of the defense does"
        )


def floors(
    cell: Cell, bench: Bench, played: Round, *, truth_known: bool = True
) -> list[dict[str, Any]]:
    """The floors that the plan asks for, as records hold them.

    Without `truth_known` nothing but shape and labels of `played.truth` counts (a captured update),
    and what was sent is not compared with what the truth would have sent.

    They depend on model, defense, batch size and seed alone, not on the attack: all cells that
    share these share one computation. The prior is one Gaussian for each class, and labels count as
    known, since an update often reveals them. Only for single images a bound is said to hold on
    average: candidates for several are paired in the best order, bounds are not.

    Raises:
        NotApplicable: there is no floor here, and why.
    """
    spec = cell.floor
    if spec.kind == "none":
        return []
    told_beside(cell, played)
    if played.observation.task.coupled:
        raise NotApplicable("batch norm in training mode couples the examples: no floor is known")
    if cell.threat.server is Server.MALICIOUS:
        raise NotApplicable(
            "a malicious server chooses the model, and a lower bound on the error for one model "
            "bounds no other: it may scale its weights until the noise is nothing"
        )
    labels = tuple(played.truth.labels.tolist())
    key = ("floor", cell.model, cell.seed, cell.defense, labels, spec)
    found: ErrorBound | str = bench.once(
        key, lambda: _floor_or_reason(cell, bench, played, truth_known)
    )
    if isinstance(found, str):
        raise NotApplicable(found)
    low, high = played.observation.task.input_range
    limit = (high - low) ** 2 / 10 ** (cell.threshold / 10)
    ceiling = 10 * math.log10((high - low) ** 2 / found.value) if found.value > 0 else None
    return [
        {
            "name": found.name,
            "value": found.value,
            "psnr": ceiling,
            "prior": found.prior,
            "rests_on_prior": found.rests_on_prior,
            "covers": found.covers,
            "excludes_threshold": False,
            "on_average": found.value > limit and cell.batch_size == 1,
            "equation": found.equation,
            "assumptions": list(found.assumptions),
            "standard_error": found.standard_error,
        }
    ]


def leak_map(cell: Cell, bench: Bench, played: Round) -> Tensor | None:
    """How much of each pixel's uncertainty the release takes away, (B, C, H, W) in [0, 1].

    1 - sqrt(posterior floor / prior variance) at the very images that were sent: 0 where a pixel
    stays as uncertain as the prior has it, 1 where it is given away. None without a full floor.
    """
    prior = _by_class(cell.floor, bench).prior(played.truth.labels)
    if cell.floor.kind != "full" or not prior.information.any():
        return None
    truth = played.truth
    try:
        information = fisher_matrix(_channel(played), truth, _basis(prior))
        left = full_bound(information, prior).per_pixel
    except (NotApplicable, ValueError):  # a picture less, and no other part of the record changes
        return None
    if left is None:
        return None
    before = _prior_variance(prior)
    varies = before > 1e-9 * before.max()
    share = np.where(varies, left / np.where(varies, before, 1.0), 1.0)
    known = 1 - np.sqrt(np.clip(share, 0, 1))
    return torch.as_tensor(known).reshape(truth.inputs.shape)


def _floor_or_reason(
    cell: Cell, bench: Bench, played: Round, truth_known: bool
) -> ErrorBound | str:
    try:
        return _floor(cell, bench, played, truth_known)
    except NotApplicable as error:
        return error.reason


def _floor(cell: Cell, bench: Bench, played: Round, truth_known: bool) -> ErrorBound:
    spec, channel, labels = cell.floor, _channel(played, truth_known), played.truth.labels
    by_class = _by_class(spec, bench)
    prior = by_class.prior(labels)
    source = stream(cell.seed, "bounds", spec.kind, cell.batch_size)
    least = MANY + PILOT if spec.kind == "weiss_weinstein" else 4
    drawn = by_class.batches(labels, max(least, spec.images // len(labels)), source)
    basis = _basis(prior)
    if spec.kind == "full":
        fishers = [fisher_matrix(channel, b, basis) for b in drawn]
        return _proved(full_bound_from_samples(fishers, prior), channel, drawn[0])
    if spec.kind == "weiss_weinstein":
        return _without_smoothness(channel, prior, drawn, basis)
    traces = [
        fisher_trace(channel, b, source, directions=spec.directions, basis=basis) for b in drawn
    ]
    return _proved(trace_bound_from_samples(traces, prior), channel, drawn[0])


def _without_smoothness(
    channel: Channel, prior: Prior, drawn: list[Batch], basis: Tensor | None
) -> ErrorBound:
    """The Weiss-Weinstein floor, along the directions of which a few pilot images tell least."""
    pilot, rest = drawn[:PILOT], drawn[PILOT:]
    fisher = np.mean([fisher_matrix(channel, b, basis) for b in pilot], axis=0)
    directions, known = least_informed(fisher, prior, max(1, prior.rank // 2))
    steps = default_steps(prior, STEPS, directions=directions, information=known)
    frame = torch.as_tensor(directions)
    frame = frame if basis is None else basis @ frame
    return weiss_weinstein_bound(
        overlaps(channel, rest, frame, steps), steps, prior, directions=directions
    )


def _proved(floor: ErrorBound, channel: Channel, batch: Batch) -> ErrorBound:
    """The floor, marked where its proof does not reach: jumps, noise with random directions."""
    assert isinstance(channel.law, Gaussian)  # checked when the channel was built
    found = not_smooth(channel.task, batch.inputs, batch.labels, channel.defense)
    if found:
        words = f"what is sent is not known to be smooth in the inputs ({', '.join(found)})"
    elif channel.law.private:
        words = "the noise of private data is taken along one draw of the defense's directions"
    else:
        return floor
    sentence = f"{words}: the floor is not proved"
    return replace(floor, covers=UNPROVED, assumptions=(sentence, *floor.assumptions))


def _channel(played: Round, truth_known: bool = True) -> Channel:
    if len(played.observation.cohort) > 1:
        raise NotApplicable("the update sums several clients; floors are for one client's release")
    task = played.defense.infer(played.observation.task, played.update)
    update, truth = played.update, played.truth
    channel = Channel(task, played.defense, update.law, update.mask, update.mask_private)
    if truth_known and not update.law.private:
        power = strange_power(channel, update, truth)
        if power is not None:
            raise NotApplicable(
                f"what was sent has {power:.3g} times the noise around what the defense's "
                "`imitate` gives: a floor would be that of a stand-in"
            )
    return channel


def _by_class(spec: FloorSpec, bench: Bench) -> ClassPriors:
    key = ("prior", spec.prior, spec.components)
    made: ClassPriors = bench.once(
        key, lambda: ClassPriors(bench.public, spec.prior, spec.components)
    )
    return made


def _basis(prior: Prior) -> Tensor | None:
    return None if prior.basis is None else torch.as_tensor(np.ascontiguousarray(prior.basis))


def _prior_variance(prior: Prior) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The prior's variance of every pixel, (m,)."""
    if prior.information.ndim == 1:
        own = np.where(prior.information > 0, 1 / np.maximum(prior.information, 1e-300), 0)
        if prior.basis is None:
            return np.asarray(own)
        return np.asarray(prior.basis**2 @ own)
    covariance = np.linalg.inv(prior.matrix)
    if prior.basis is None:
        return np.asarray(np.diagonal(covariance))
    return np.asarray(np.einsum("ij,jk,ik->i", prior.basis, covariance, prior.basis))
