"""What bounds every attacker: a floor on the error, or a probability, for one release."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from leakbound.bounds import GaussianPrior, identification, ladder, trace_floor_from_samples
from leakbound.bounds.fisher import Channel, fisher_trace, strange_power
from leakbound.bounds.kinks import kinks
from leakbound.client import batch_norms
from leakbound.defenses import Chain, GaussianMechanism
from leakbound.meter.policy import Policy
from leakbound.random import permutation, uniform
from leakbound.types import Batch, Exact, Guarantee, NotApplicable, Task, Unknown, Update

FEWEST, ENOUGH = 8, 64
"""Public images that a floor's prior, and a probability's, take at least."""
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
    if policy.prior == "gaussian" and public is not None and public.size >= ENOUGH:
        one, prior = _blind(public, eta), f"Gaussian images, fitted to {public.size} public ones"
    else:
        norm = _least_norm(batch, shape, high)
        one = float(identification.log_kappa_sphere(dim=math.prod(shape), eta=eta, norm=norm))
        prior = "a direction uniform on the sphere: images are known far better than that"
    blind = min(0.0, one + math.log(examples))
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


def _least_norm(batch: Batch | None, shape: tuple[int, ...], high: float) -> float:
    if batch is None:
        return math.sqrt(math.prod(shape)) * abs(high)
    least = float(batch.inputs.flatten(1).double().norm(dim=1).min())
    if least == 0:
        raise NotApplicable("an image that is all zeros is rebuilt by the zero image")
    return least


@lru_cache(maxsize=8)
def _blind(public: Batch, eta: float) -> float:
    """Log of the blind success under Gaussian images, no rarer than among the public ones."""
    flat = public.inputs.flatten(1).double().cpu().numpy()
    try:
        rung = ladder.GaussianImages.from_samples(flat, components=min(COMPONENTS, len(flat) // 2))
    except ValueError as error:
        raise NotApplicable(f"no prior can be taken from the public images: {error}") from None
    return min(0.0, float(np.asarray(ladder.Seen(rung, [flat]).log_kappa(np.array([eta])))[0]))


def trace_floor(
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
    examples = sum(update.examples) if batch is None else batch.size
    if task.coupled:
        raise NotApplicable("batch norm in training mode couples the examples: no floor is known")
    channel = Channel(
        defense.infer(task, update), defense, update.law, update.mask, update.mask_private
    )
    public = task.public
    if public is None or public.size < FEWEST or tuple(public.inputs.shape[1:]) != shape:
        raise NotApplicable("there are too few public images to take a prior from")
    pixels = public.inputs.flatten(1).double().cpu().numpy()
    prior = GaussianPrior.isotropic(pixels.mean(0), float(pixels.var(0).mean()))
    if batch is not None and not update.law.private:
        power = strange_power(channel, update, batch)
        if power is not None:
            raise NotApplicable(
                f"what leaves has {power:.3g} times the noise around what one step on this batch "
                "and the defense's `imitate` give: a floor would be that of a stand-in"
            )
    traces = [
        fisher_trace(channel, drawn, generator, directions=policy.floor_directions)
        for drawn in _draws(prior, public, examples, policy.floor_images, generator)
    ]
    whole = prior if examples == 1 else prior.repeat(examples)
    floor = trace_floor_from_samples(traces, whole)
    found = kinks(channel.task, public.inputs[:examples], public.labels[:examples], defense)
    words = f"prior: {floor.prior}; {floor.equation}"
    if found:
        words = f"not proved: the model has kinks ({', '.join(found)}); {words}"
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
        proved and floor.value > limit and examples == 1,
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
        found = kinks(task, batch.inputs, batch.labels)
        if found:
            return f"the model has kinks ({', '.join(found)}), and a floor is then not proved"
    return None


def told_beside(task: Task, buffers: bool) -> None:
    """Refuse every bound where more than the defended weights leaves.

    Raises:
        NotApplicable: running statistics of the batch leave beside the update.
    """
    if buffers and batch_norms(task):
        raise NotApplicable("the batch's statistics leave beside the update: no bound covers them")


def _draws(
    prior: GaussianPrior, public: Batch, examples: int, count: int, generator: torch.Generator
) -> list[Batch]:
    """Batches drawn from the prior, with labels of public images."""
    source = np.random.default_rng(int(uniform((1,), generator) * 2**24))
    order = permutation(public.size, generator)
    index = order[torch.arange(count * examples) % public.size]
    drawn = torch.as_tensor(prior.draw(count * examples, source)).to(public.inputs)
    inputs = drawn.reshape(-1, *public.inputs.shape[1:])
    parts = [slice(a, a + examples) for a in range(0, count * examples, examples)]
    return [Batch(inputs[part], public.labels[index][part]) for part in parts]
