"""What bounds every attacker: a floor on the error, or a probability, for one release."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import ArrayLike

from leakbound.bounds import identification, record_priors, trace_bound_from_samples
from leakbound.bounds.smoothness import not_smooth
from leakbound.channel.class_priors import ClassPriors
from leakbound.channel.fisher import Channel, fisher_trace, strange_power
from leakbound.client import batch_norms
from leakbound.defenses import Chain, GaussianMechanism
from leakbound.meter.policy import Policy
from leakbound.types import Batch, Exact, Guarantee, NotApplicable, Task, Unknown, Update

COMPONENTS = 32


@dataclass(frozen=True)
class Limit:
    """One bound on every attacker, for one release.

    Attributes:
        name: "probability" or "trace floor".
        value: the probability of reaching the threshold, or the least mean squared error.
        psnr: of the floor's error, in dB; None for a probability.
        excludes: whether all attackers are kept under the threshold (but for the accepted
            probability).
        on_average: whether the mean error of all attackers lies above the threshold's.
        covers: "all" attackers, or "unproved" with the reason in `words`.
        words: prior, assumptions and source.
    """

    name: str
    value: float
    psnr: float | None
    excludes: bool
    on_average: bool
    covers: str
    words: str


def probability(
    task: Task,
    update: Update,
    batch: Batch | None,
    shape: tuple[int, ...],
    defense: Chain,
    policy: Policy,
) -> Limit:
    """The law of differential privacy at the threshold: how often any attacker reaches it.

    Raises:
        NotApplicable: no such guarantee, or none that is asked for.
    """
    if policy.probability is None:
        raise NotApplicable("the policy accepts no probability")
    if not defense.links and not isinstance(update.law, Exact):
        raise NotApplicable("no defense was given (defense=), though the update has noise")
    if defense.guarantee is not Guarantee.DIFFERENTIAL_PRIVACY:
        raise NotApplicable("the defense gives no differential privacy")
    low, high = task.input_range
    eta = (high - low) ** 2 / 10 ** (policy.threshold_db / 10)
    examples = 1 if batch is None else batch.size
    public = task.public
    if public is None or public.size < record_priors.MIN_EXAMPLES:
        raise NotApplicable(
            f"a probability needs {record_priors.MIN_EXAMPLES} public examples to take a prior from"
        )
    blind = min(0.0, _blind(public, eta) + math.log(examples))
    prior = f"one Gaussian a class, fitted to {public.size} public examples"
    multiplier = max(m.noise_multiplier for m in _mechanisms(defense))
    found = float(identification.gaussian(multiplier, log_kappa=blind))
    words = (
        f"prior: {prior}; a blind guess reaches the threshold with probability "
        f"{math.exp(blind):.3g}; one release, several leak more [{identification.gaussian.scope}]"
    )
    return Limit(
        "probability",
        found,
        None,
        found <= policy.probability,
        False,
        "all",
        " ".join(words.split()),
    )


def _mechanisms(defense: Chain) -> list[GaussianMechanism]:
    found = [link for link in defense.links if isinstance(link, GaussianMechanism)]
    if not found:
        raise NotApplicable("the guarantee does not rest on Gaussian noise")
    return found


@lru_cache(maxsize=8)
def _blind(public: Batch, eta: float) -> float:
    """Log of the blind success by class, no rarer than among the public examples of a class.

    An update often reveals the labels, so that a guess may differ by class.
    """
    flat = public.inputs.flatten(1).double().cpu().numpy()
    labels = public.labels.cpu().numpy()
    try:
        rung = record_priors.Mixture.from_samples(flat, labels=labels, components=COMPONENTS)
    except ValueError as error:
        raise NotApplicable(f"no prior can be taken from the public images: {error}") from None
    groups: list[ArrayLike] = [flat[labels == y] for y in np.unique(labels)]
    return min(
        0.0,
        float(
            np.asarray(
                record_priors.EmpiricallyBoundedPrior(rung, groups).log_kappa(np.array([eta]))
            )[0]
        ),
    )


def trace_bound(
    task: Task,
    update: Update,
    batch: Batch | None,
    shape: tuple[int, ...],
    defense: Chain,
    policy: Policy,
    generator: torch.Generator,
) -> Limit:
    """A Cramér-Rao floor on the mean squared error, from a few random directions.

    Cost: `floor_images` times `floor_directions` derivatives of the gradient along a direction.

    Raises:
        NotApplicable: there is none, and why.
    """
    if task.coupled:
        raise NotApplicable("batch norm in training mode couples the examples: no floor is known")
    channel = Channel(
        defense.infer(task, update), defense, update.law, update.mask, update.mask_private
    )
    if batch is None:
        raise NotApplicable("the batch was not shown, and the prior needs its labels")
    public = task.public
    if public is not None and tuple(public.inputs.shape[1:]) != shape:
        raise NotApplicable("the public examples have another shape than the batch's")
    by_class = ClassPriors(public, "isotropic")
    prior = by_class.prior(batch.labels)
    if not update.law.private:
        power = strange_power(channel, update, batch)
        if power is not None:
            raise NotApplicable(
                f"what leaves has {power:.3g} times the noise around what one step on this batch "
                "and the defense's `imitate` give: a floor would be that of a stand-in"
            )
    traces = [
        fisher_trace(channel, drawn, generator, directions=policy.floor_directions)
        for drawn in by_class.batches(batch.labels, policy.floor_images, generator)
    ]
    floor = trace_bound_from_samples(traces, prior)
    found = not_smooth(channel.task, batch.inputs, batch.labels, defense)
    words = f"prior: {floor.prior}; {floor.equation}"
    if found:
        words = f"not proved: the update is not smooth in the inputs ({', '.join(found)}); {words}"
    elif update.law.private:
        words = f"not proved: along one draw of the defense's own directions; {words}"
    proved = not found and not update.law.private
    low, high = task.input_range
    limit = (high - low) ** 2 / 10 ** (policy.threshold_db / 10)
    return Limit(
        "trace floor",
        floor.value,
        10 * math.log10((high - low) ** 2 / floor.value) if floor.value > 0 else None,
        False,
        proved and floor.value > limit and batch.size == 1,
        "all" if proved else "unproved",
        words,
    )


def useless_floor(task: Task, update: Update, batch: Batch | None, defense: Chain) -> str | None:
    """Why a floor could not change the verdict; None where it could."""
    examples = sum(update.examples) if batch is None else batch.size
    if examples > 1:
        return "floors on the mean error of several images do not bound their pairs"
    if isinstance(update.law, Unknown):
        return f"no release law is known: {update.law.reason}"
    if update.law.private:
        return "the noise's law depends on the batch, and a floor is then not proved"
    if batch is not None and not task.coupled:
        found = not_smooth(task, batch.inputs, batch.labels)
        if found:
            return f"the update is not smooth in the inputs ({', '.join(found)}): no proved floor"
    return None


def told_beside(task: Task, buffers: bool) -> None:
    """Refuse every bound where more than the defended weights leaves.

    Raises:
        NotApplicable: running statistics of the batch leave beside the update.
    """
    if buffers and batch_norms(task):
        raise NotApplicable("the batch's statistics leave beside the update: no bound covers them")
