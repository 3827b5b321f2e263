"""Attacks on data-dependent mechanisms: noise variances or masks chosen from the private batch.

The client does not send its release distribution. An attacker who knows the defense can compute the
distribution that a candidate would have caused: by replaying the client on candidates, or by
following its gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakbound import check
from leakbound.attacks.base import Attack, boxed, expected_rows, seen_task
from leakbound.attacks.blind import VANISHED
from leakbound.client import respond
from leakbound.core import (
    Batch,
    DefenseProtocol,
    Exact,
    Gaussian,
    Laplace,
    Law,
    NotApplicable,
    Observation,
    Reconstruction,
    Task,
    Unknown,
    Update,
)
from leakbound.covariance import Structured
from leakbound.engines.sensitivity import example_gradients
from leakbound.randomness import Source

__all__ = ["CandidateLikelihood", "Replay", "replay", "score"]

FLOOR = 1e-12
"""Least variance of a coordinate, as a share of the candidate's mean variance."""
CHANGED = 0.1
"""Assumed probability that a coordinate's place in the mask differs from a replay."""
NATS = 3.0
CLOSE = 0.01


@dataclass(frozen=True, eq=False)
class Replay:
    """What the attacker knows of the release that a candidate would have caused.

    Attributes:
        mean: (R, P) the noise-free rows.
        law: the distribution of the noise around them, with its covariance.
        kept: (R, P) share of the replays that sent a coordinate; None if no mask depends on the
            batch.
    """

    mean: Tensor
    law: Law
    kept: Tensor | None = None


@dataclass(frozen=True)
class CandidateLikelihood(Attack):
    """Choose the public image whose own mean, noise and mask make the update most likely.

    The attack sends every candidate through the client and the defense. If noise dominates the
    mean, a public noise distribution does not distinguish candidates, but a data-dependent one
    does. The candidates are the observation's auxiliary images. If the true label is known, only
    images of that label are used, if there are any.

    Args:
        use_mean: False takes the mean as zero and uses the pattern of the noise alone.
        draws: how many replays of a candidate are averaged.
        limit: the largest number of candidates.

    Assumptions: one client with one example; the defense is known.

    Raises:
        NotApplicable: there are several examples, no auxiliary images, or a defense without a known
            release distribution.

    Source: this project; `docs/sharp_edges/private_noise.md`.

    Example:
        >>> import leakbound as lb
        >>> model = lb.models.mlp(input_shape=(1, 4, 4), classes=3, generator=lb.stream(0, "model"))
        >>> inputs = torch.rand(20, 1, 4, 4, generator=lb.stream(0, "known"))
        >>> known, batch = lb.Batch(inputs, torch.arange(20) % 3), (inputs[5:6], torch.tensor([2]))
        >>> noise = lb.defenses.LocalOptimalNoise(noise_std=1000.0)  # a thousand times the gradient
        >>> attack = CandidateLikelihood()
        >>> found = lb.simulate(model, batch, defense=noise, attack=attack, public=known)
        >>> torch.equal(found.reconstruction, batch[0])
        True
    """

    use_mean: bool = True
    draws: int = 1
    limit: int = 200

    def __post_init__(self) -> None:
        check.count(draws=self.draws, limit=self.limit)

    def why_not(self, defense: DefenseProtocol, examples: int) -> str | None:
        return several(examples)

    def __call__(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        _single(observation)
        candidates = self._candidates(observation)
        replays = replay(observation, candidates, generator, draws=self.draws)
        scores = score(observation, replays, use_mean=self.use_mean)
        best = int(scores.argmax())
        inputs = boxed(candidates.inputs[best : best + 1], observation.task)
        labels = observation.labels
        if labels is None:
            labels = candidates.labels[best : best + 1].clone()
        objective = -float(scores[best]) / observation.update.rows.numel()
        return Reconstruction(inputs, labels, objective, (), self._problem(observation, scores))

    def _candidates(self, observation: Observation) -> Batch:
        known = observation.auxiliary
        if known is None:
            raise NotApplicable("candidates are public images, and there are none")
        like = observation.task.parameters
        inputs = known.inputs.to(like)
        labels = known.labels.to(like.device)
        if observation.labels is not None and bool((labels == observation.labels).any()):
            same = labels == observation.labels
            inputs = inputs[same]
            labels = labels[same]
        return Batch(inputs[: self.limit], labels[: self.limit])

    def _problem(self, observation: Observation, scores: Tensor) -> str | None:
        if not bool((observation.update.rows != 0).any()):
            return VANISHED
        if len(scores) < 2:
            return "there is only one candidate: nothing to distinguish"
        first, second = scores.topk(2).values.tolist()
        least = CLOSE if isinstance(observation.update.law, Exact) else NATS
        if not first - second >= least:
            return (
                f"the candidates are almost equally likely: the best leads by {first - second:.2g}"
            )
        return None


def _single(observation: Observation) -> None:
    if len(observation.cohort) > 1:
        raise NotApplicable(
            f"the update sums {len(observation.cohort)} clients; the attack replays one"
        )
    if reason := several(observation.examples):
        raise NotApplicable(reason)


def several(examples: int) -> str | None:
    """Why attacks that replay one candidate do not apply, for batches of several examples."""
    return f"a candidate is one image, but the batch has {examples}" if examples > 1 else None


def _defense(observation: Observation) -> DefenseProtocol:
    if observation.defense is None:
        raise NotApplicable("the defense is not known, so the attack cannot replay it")
    return observation.defense


def replay(
    observation: Observation, candidates: Batch, generator: Source, *, draws: int = 1
) -> list[Replay]:
    """Run client and defense on every candidate: single images, each one client's whole batch.

    The result serves all updates of one task and defense. `draws` replays of a candidate are
    averaged.
    """
    defense = _defense(observation)
    task = seen_task(observation)
    found = []
    for i in range(candidates.size):
        one = Batch(candidates.inputs[i : i + 1], candidates.labels[i : i + 1])
        mean = expected_rows(observation, task, one.inputs, one.labels).detach()
        sent = [_sent(observation, defense, one, generator) for _ in range(draws)]
        found.append(_averaged(mean, sent))
    return found


def _sent(observation: Observation, defense: DefenseProtocol, one: Batch, source: Source) -> Update:
    update, _ = respond(observation.task, one, defense, source, each=example_gradients)
    together = defense.sides[1]
    update, _ = together.transform(
        Update.stack([update]), together.init(observation.task), None, source
    )
    return update


def _averaged(mean: Tensor, sent: list[Update]) -> Replay:
    law = sent[0].law
    if isinstance(law, Unknown):
        raise NotApplicable(f"the release distribution is not known: {law.reason}")
    kept = None
    if sent[0].mask_private:
        masks = [u.mask for u in sent if u.mask is not None]
        kept = torch.stack(masks).to(mean).mean(0)
    if isinstance(law, Gaussian) and isinstance(law.covariance, Tensor) and law.private:
        parts = [u.law.covariance for u in sent if isinstance(u.law, Gaussian)]
        total = torch.stack([torch.as_tensor(part) for part in parts]).mean(0)
        law = replace(law, covariance=total if kept is None else total / kept.clamp_min(1e-9))
    return Replay(mean, law, kept)


def score(observation: Observation, replays: list[Replay], *, use_mean: bool = True) -> Tensor:
    """Log-likelihood of the update under every replay, (n,) in float64, up to a constant.

    Without noise: the agreement of the masks plus the cosine of the rows. `use_mean`: False takes
    every candidate's noise-free update as zero.
    """
    seen = observation.update.rows.double()
    mask = observation.update.mask
    return torch.tensor(
        [float(_one(seen, mask, found, use_mean)) for found in replays], dtype=torch.float64
    )


def _one(seen: Tensor, mask: Tensor | None, found: Replay, use_mean: bool) -> Tensor:
    shown = torch.ones_like(seen) if mask is None else mask.double()
    mean = found.mean.double() * shown
    if isinstance(found.law, Exact):
        both = (seen.square().sum() * mean.square().sum()).clamp_min(1e-300)
        alike = (seen * mean).sum() / both.sqrt()
        if found.kept is None:
            return alike
        return alike + 1 - (found.kept.double() - shown).abs().mean()
    left = (seen - mean if use_mean else seen) * shown
    covariance = found.law.covariance if isinstance(found.law, Gaussian) else None
    if isinstance(covariance, Structured):
        return -0.5 * covariance.whiten(left).square().sum()
    if isinstance(found.law, Laplace):
        scale = torch.as_tensor(found.law.scale, dtype=seen.dtype).to(seen).expand_as(seen)
        scale = scale.clamp_min(FLOOR * float(scale.mean()) + 1e-300)
        return (shown * (-left.abs() / scale - (2 * scale).log())).sum()
    variance = torch.as_tensor(covariance, dtype=seen.dtype).to(seen).expand_as(seen)
    each = _normal(left, variance.clamp_min(FLOOR * float(variance.mean()) + 1e-300))
    if found.kept is None:
        return (shown * each).sum()
    sends = found.kept.double().clamp(CHANGED, 1 - CHANGED)
    broad = _normal(seen, (shown * seen.square()).sum() / shown.sum().clamp_min(1))
    each = torch.where(found.kept > 0, each, broad) + sends.log()
    return torch.where(shown > 0, each, (1 - sends).log()).sum()


def _normal(left: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * (left.square() / variance + variance.log() + math.log(2 * math.pi))


def negative_log_likelihood(
    observation: Observation,
    task: Task,
    inputs: Tensor,
    labels: Tensor,
    *,
    floor: float,
    freedom: float = math.inf,
) -> tuple[Tensor, Tensor]:
    """-log p(y; g, v) per coordinate up to a constant, and the mean of (y - g)²/v; differentiable
    in the candidate (B, *S).

    `floor`: what is added to every variance, as a share of their mean. `freedom`: degrees of
    freedom of a Student distribution; infinite for a Gaussian.
    """
    if len(observation.cohort) > 1:
        raise NotApplicable(
            f"the update sums the noise of {len(observation.cohort)} clients; give one"
        )
    variance = _defense(observation).noise_variance(task, inputs, labels)
    if variance is None:
        return _public_law(observation, task, inputs, labels)
    variance = variance + floor * variance.detach().mean().clamp_min(1e-30)
    rows = expected_rows(observation, task, inputs, labels)
    pull = (observation.update.rows - rows).square() / variance
    if math.isinf(freedom):
        each = 0.5 * (pull + variance.log())
    else:
        each = 0.5 * ((freedom + 1) * torch.log1p(pull / freedom) + variance.log())
    mask = observation.update.mask
    if mask is None:
        return each.mean(), pull.detach().mean()
    count = mask.sum().clamp_min(1)
    return (each * mask).sum() / count, (pull.detach() * mask).sum() / count


def _public_law(
    observation: Observation, task: Task, inputs: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for Gaussian noise of a public distribution, without its constant logarithm."""
    law = observation.update.law
    seen = observation.update.rows
    if not isinstance(law, Gaussian):
        raise NotApplicable(
            "the release has no Gaussian noise of a distribution that the attacker knows"
        )
    left = seen - expected_rows(observation, task, inputs, labels)
    if observation.update.mask is not None:
        left = left * observation.update.mask
    if isinstance(law.covariance, Structured):
        pull = law.covariance.whiten(left).square()
    else:
        variance = torch.as_tensor(law.covariance).to(seen).expand_as(seen)
        pull = torch.where(variance > 0, left.square() / variance.clamp_min(1e-30), 0)
    return 0.5 * pull.mean(), pull.detach().mean()
