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
    FlatPrior,
    Floor,
    GaussianPrior,
    Prior,
    full_floor,
    full_floor_from_samples,
    trace_floor_from_samples,
)
from leakbound.bounds.fisher import Channel, fisher_matrix, fisher_trace, strange_power
from leakbound.bounds.kinks import kinks
from leakbound.bounds.overlap import overlaps
from leakbound.bounds.weiss_weinstein import default_steps, least_informed, weiss_weinstein_floor
from leakbound.client import batch_norms
from leakbound.protocol import Round
from leakbound.random import permutation, stream, uniform
from leakbound.types import Batch, Gaussian, NotApplicable, Server

FEWEST = 8
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

    Without `truth_known` nothing but the shape of `played.truth` counts (a captured update), and
    what was sent is not held against what the truth would have sent.

    They depend on model, defense, batch size and seed alone, not on the attack (unless it changes
    the model): all cells that share these share one computation. Only for single images a floor is
    said to hold on average: guesses for several are paired in the best order, floors are not.

    Raises:
        NotApplicable: there is no floor here, and why.
    """
    spec = cell.floor
    if spec.kind == "none":
        return []
    told_beside(cell, played)
    if played.observation.task.coupled:
        raise NotApplicable("batch norm in training mode couples the examples: no floor is known")
    planted = cell.attack if cell.threat.server is Server.MALICIOUS else None
    key = ("floor", cell.model, cell.seed, cell.defense, cell.batch_size, spec, planted)
    found: Floor | str = bench.once(key, lambda: _floor_or_reason(cell, bench, played, truth_known))
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
    prior = _prior(cell.floor, bench, cell.batch_size)
    if cell.floor.kind != "full" or not prior.information.any():
        return None
    truth = played.truth
    try:
        information = fisher_matrix(_channel(played), truth, _basis(prior))
        left = full_floor(information, prior).per_pixel
    except (NotApplicable, ValueError):  # a picture less, and no other part of the record changes
        return None
    if left is None:
        return None
    before = _prior_variance(prior)
    varies = before > 1e-9 * before.max()
    share = np.where(varies, left / np.where(varies, before, 1.0), 1.0)
    known = 1 - np.sqrt(np.clip(share, 0, 1))
    return torch.as_tensor(known).reshape(truth.inputs.shape)


def _floor_or_reason(cell: Cell, bench: Bench, played: Round, truth_known: bool) -> Floor | str:
    try:
        return _floor(cell, bench, played, truth_known)
    except NotApplicable as error:
        return error.reason


def _floor(cell: Cell, bench: Bench, played: Round, truth_known: bool) -> Floor:
    spec, channel = cell.floor, _channel(played, truth_known)
    prior = _prior(spec, bench, cell.batch_size)
    source = stream(cell.seed, "bounds", spec.kind, cell.batch_size)
    drawn = _batches(spec, bench, cell.batch_size, source)
    basis = _basis(prior)
    if spec.kind == "full":
        fishers = [fisher_matrix(channel, b, basis) for b in drawn]
        return _proved(full_floor_from_samples(fishers, prior), channel, drawn[0])
    if spec.kind == "weiss_weinstein":
        return _without_smoothness(channel, prior, drawn, basis)
    traces = [
        fisher_trace(channel, b, source, directions=spec.directions, basis=basis) for b in drawn
    ]
    return _proved(trace_floor_from_samples(traces, prior), channel, drawn[0])


def _without_smoothness(
    channel: Channel, prior: Prior, drawn: list[Batch], basis: Tensor | None
) -> Floor:
    """The Weiss-Weinstein floor, along the directions of which a few pilot images tell least."""
    pilot, rest = drawn[:PILOT], drawn[PILOT:]
    fisher = np.mean([fisher_matrix(channel, b, basis) for b in pilot], axis=0)
    directions, known = least_informed(fisher, prior, max(1, prior.rank // 2))
    steps = default_steps(prior, STEPS, directions=directions, information=known)
    frame = torch.as_tensor(directions)
    frame = frame if basis is None else basis @ frame
    return weiss_weinstein_floor(
        overlaps(channel, rest, frame, steps), steps, prior, directions=directions
    )


def _proved(floor: Floor, channel: Channel, batch: Batch) -> Floor:
    """The floor, marked where its proof does not reach: kinks, noise with random directions."""
    assert isinstance(channel.law, Gaussian)  # checked when the channel was built
    found = kinks(channel.task, batch.inputs, batch.labels, channel.defense)
    if found:
        words = f"model or defense have kinks ({', '.join(found)}), where what is sent jumps"
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


def _prior(spec: FloorSpec, bench: Bench, batch_size: int) -> Prior:
    public = bench.public
    if public is None or public.size < FEWEST:
        raise NotApplicable("there are too few public images to take a prior from")

    def make() -> Prior:
        pixels = public.inputs.flatten(1).double().cpu().numpy()
        if spec.prior == "gaussian":
            return GaussianPrior.from_samples(pixels, components=spec.components)
        variance = float(pixels.var(0).mean())
        if spec.prior == "flat":
            return FlatPrior(pixels.shape[1], variance * pixels.shape[1])
        return GaussianPrior.isotropic(pixels.mean(0), variance)

    one: Prior = bench.once(("prior", spec.prior, spec.components), make)
    return one if batch_size == 1 else one.repeat(batch_size)


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


def _batches(spec: FloorSpec, bench: Bench, size: int, source: torch.Generator) -> list[Batch]:
    """Batches over which the information is averaged: drawn from the prior where that is known.

    A floor is a theorem about its prior, so its images come from the prior; their labels from the
    public ones. A flat prior cannot be drawn from: then they are public images.
    """
    public = bench.public
    assert public is not None  # _prior has asked
    prior = _prior(spec, bench, 1)
    order = permutation(public.size, source)
    least = MANY + PILOT if spec.kind == "weiss_weinstein" else 4
    count = max(least, spec.images // size)
    index = order[torch.arange(count * size) % public.size]
    inputs = public.inputs[index]
    if isinstance(prior, GaussianPrior):
        generator = np.random.default_rng(int(uniform((1,), source) * 2**24))
        drawn = prior.draw(count * size, generator)
        inputs = torch.as_tensor(drawn).to(inputs).reshape(inputs.shape)
    labels = public.labels[index]
    parts = range(0, count * size, size)
    return [Batch(inputs[a : a + size], labels[a : a + size]) for a in parts]
