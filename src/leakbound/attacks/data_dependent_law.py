"""Attacks on data-dependent mechanisms: noise variances or masks chosen from the private batch.

The client does not send its release distribution. An attacker who knows the defense can compute the
distribution that a candidate would have caused: by replaying the client on candidates, or by
following its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from leakbound import check
from leakbound._util import optimizers
from leakbound._util.cache import RecentCache
from leakbound.attacks.analytic import input_layer, layer_part
from leakbound.attacks.base import Attack, boxed, expected_rows, seen_task, uniform_inputs
from leakbound.attacks.blind import answered
from leakbound.attacks.imputers import FEWEST, completions
from leakbound.attacks.labels import known_or_inferred
from leakbound.attacks.matching.distances import total_variation
from leakbound.attacks.pace import tick
from leakbound.client import refuse_codes, respond
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
from leakbound.domains import has_neighbors
from leakbound.domains.known import KnownValues
from leakbound.engines.sensitivity import example_gradients
from leakbound.randomness import Source, normal

__all__ = [
    "CandidateLikelihood",
    "LawEvolution",
    "LawMatching",
    "Replay",
    "VarianceReadout",
    "replay",
    "score",
]

FLOOR = 1e-12
"""Least variance of a coordinate, as a share of the candidate's mean variance."""
CHANGED = 0.1
"""Assumed probability that a coordinate's place in the mask differs from a replay."""
# Under noise, the best candidate must lead by this log-likelihood; without noise, by this score.
NATS = 3.0
CLOSE = 0.01
# A trace is for a plot: more points add nothing.
TRACE_POINTS = 50
PUBLIC_NOISE = "the defense's noise does not depend on the batch"
FITS = (0.2, 5.0)
"""Least and largest ratio of the noise's power to the power that an answer predicts."""
# How far a generation moves mean and spread: all the way would collapse on a lucky draw.
PACE = 0.7
# A label with fewer public images than this has no reliable mean: all images stand in.
SOME = 10
MIXED = 0.1
"""Share of the images' variance that the readout must explain in public images."""


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
    images of that label are used, if there are any. If the attacker has parts of the example, the
    candidates complete these, by imputers and by public examples with the nearest parts.

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
        >>> result = lb.simulate(model, batch, defense=noise, attack=attack, public=known)
        >>> torch.equal(result.reconstruction, batch[0])
        True
    """

    use_mean: bool = True
    draws: int = 1
    limit: int = 200

    def __post_init__(self) -> None:
        check.count(draws=self.draws, limit=self.limit)

    def why_not(self, defense: DefenseProtocol, examples: int) -> str | None:
        return several(examples)

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        _single(observation)
        candidates = self._candidates(observation)
        replays = replay(observation, candidates, generator, draws=self.draws)
        scores = score(observation, replays, use_mean=self.use_mean)
        best = int(scores.argmax())
        labels = observation.labels
        if labels is None:
            labels = candidates.labels[best : best + 1].clone()
        problem = None
        if len(scores) < 2:
            problem = "there is only one candidate: nothing to distinguish"
        else:
            first, second = scores.topk(2).values.tolist()
            least = CLOSE if isinstance(observation.update.law, Exact) else NATS
            # Written so that NaN is no lead.
            if not first - second >= least:
                lead = f"the best leads by {first - second:.2g}"
                problem = f"the candidates are almost equally likely: {lead}"
        return answered(
            observation,
            observation.task,
            candidates.inputs[best],
            problem,
            labels=labels,
            objective=-float(scores[best]) / observation.update.rows.numel(),
        )

    def _candidates(self, observation: Observation) -> Batch:
        known = _public(observation)
        labels = observation.labels
        # Soft labels have one number for each class: no public example has the same.
        if labels is not None and labels.shape[1:] == known.labels.shape[1:]:
            # An example may have many labels, one for each token.
            same = (known.labels == labels).reshape(known.size, -1).all(1)
            if same.any():
                known = Batch(known.inputs[same], known.labels[same])
        if observation.known is not None:
            return _completed(observation.known, known, self.limit)
        return Batch(known.inputs[: self.limit], known.labels[: self.limit])


def _completed(known: KnownValues, public: Batch, limit: int) -> Batch:
    """Candidates with the known part: imputers complete it, and public examples with like parts."""
    parts = known.parts
    apart = parts.part.costs(known.values, parts.values(public.inputs))[0]
    near = apart.argsort(stable=True)[:limit].to(public.inputs.device)
    rest = parts.unknown(public.inputs[near])
    labels = public.labels[near]
    if public.size >= FEWEST:
        target = parts.joined(known.values, rest[:1]).cpu()
        imputed = [each.to(rest) for _, each in completions(public.inputs.cpu(), parts, target)]
        rest = torch.cat([*imputed, rest])
        labels = torch.cat([labels[:1].expand(len(imputed), *labels.shape[1:]), labels])
    whole = parts.joined(known.values.expand(len(rest), *known.values.shape[1:]), rest)
    return Batch(whole, labels)


def _public(observation: Observation, least: int = 1) -> Batch:
    """The attacker's public images, on the task's device."""
    known = observation.auxiliary
    if known is None or known.size < least:
        raise NotApplicable("it needs public images, and there are none")
    like = observation.task.parameters
    return Batch(known.inputs.to(like), known.labels.to(like.device))


def _one_client(observation: Observation) -> None:
    if len(observation.cohort) > 1:
        raise NotApplicable(
            f"the update sums the noise of {len(observation.cohort)} clients; give one"
        )


def _single(observation: Observation) -> None:
    _one_client(observation)
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
    observation: Observation,
    candidates: Batch,
    generator: Source,
    *,
    draws: int = 1,
) -> list[Replay]:
    """Run client and defense on every candidate: single images, each one client's whole batch.

    The result serves all updates of one task and defense. `draws` replays of a candidate are
    averaged.
    """
    task = seen_task(observation)
    replays = []
    for one in _singles(candidates):
        mean = expected_rows(observation, task, one.inputs, one.labels).detach()
        sent = [_sent(observation, one, generator) for _ in range(draws)]
        replays.append(_averaged(mean, sent))
    return replays


def _singles(batch: Batch) -> list[Batch]:
    parts = zip(
        torch.split(batch.inputs, 1),
        torch.split(batch.labels, 1),
        strict=True,
    )
    return [Batch(*part) for part in parts]


def _sent(
    observation: Observation,
    one: Batch,
    source: Source,
) -> Update:
    defense = _defense(observation)
    # The task as it was sent: `respond` prepares it by the defense.
    update, _ = respond(
        observation.task,
        one,
        defense,
        source,
        each=example_gradients,
    )
    together = defense.sides[1]
    state = together.init(observation.task)
    return together.transform(Update.stack([update]), state, None, source)[0]


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
        # A withheld coordinate has variance 0 in the mean: only replays that sent it count.
        law = replace(law, covariance=total if kept is None else total / kept.clamp_min(1e-9))
    return Replay(mean, law, kept)


def score(
    observation: Observation,
    replays: list[Replay],
    *,
    use_mean: bool = True,
) -> Tensor:
    """Log-likelihood of the update under every replay, (n,) in float64, up to a constant.

    Without noise: the agreement of the masks plus the cosine of the rows. `use_mean`: False takes
    every candidate's noise-free update as zero.
    """
    seen = observation.update.rows.double()
    mask = observation.update.mask
    shown = torch.ones_like(seen) if mask is None else mask.double()
    scores = [float(_one(seen, shown, candidate, use_mean)) for candidate in replays]
    return torch.tensor(scores, dtype=torch.float64)


def _one(
    seen: Tensor,
    shown: Tensor,
    candidate: Replay,
    use_mean: bool,
) -> Tensor:
    mean = candidate.mean.double() * shown
    if isinstance(candidate.law, Exact):
        both = (seen.square().sum() * mean.square().sum()).clamp_min(1e-300)
        cosine = (seen * mean).sum() / both.sqrt()
        if candidate.kept is None:
            return cosine
        return cosine + 1 - (candidate.kept.double() - shown).abs().mean()
    left = (seen - mean if use_mean else seen) * shown
    covariance = candidate.law.covariance if isinstance(candidate.law, Gaussian) else None
    if isinstance(covariance, Structured):
        # Only public noise is structured: its determinant is the same for every candidate.
        return -0.5 * covariance.whiten(left).square().sum()
    if isinstance(candidate.law, Laplace):
        scale = _raised(candidate.law.scale, seen)
        return (shown * (-left.abs() / scale - (2 * scale).log())).sum()
    each = _normal(left, _raised(covariance, seen))
    if candidate.kept is None:
        return (shown * each).sum()
    sends = candidate.kept.double().clamp(CHANGED, 1 - CHANGED)
    # A coordinate that no replay sent has no variance: the mean power of the update stands in.
    broad = _normal(seen, (shown * seen.square()).sum() / shown.sum().clamp_min(1))
    each = torch.where(candidate.kept > 0, each, broad) + sends.log()
    return torch.where(shown > 0, each, (1 - sends).log()).sum()


def _raised(sizes: float | Tensor | None, like: Tensor) -> Tensor:
    """Sizes of the noise in each coordinate, the smallest raised."""
    wide = torch.as_tensor(sizes, dtype=like.dtype).to(like).expand_as(like)
    # A residual over almost no noise would be rounding, and would decide alone.
    return wide.clamp_min(FLOOR * float(wide.mean()) + 1e-300)


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
    _one_client(observation)
    variance = _defense(observation).noise_variance(task, inputs, labels)
    left = observation.update.rows - expected_rows(observation, task, inputs, labels)
    if variance is None:
        return _public_law(observation, left)
    variance = variance + floor * variance.detach().mean().clamp_min(1e-30)
    pull = left.square() / variance
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
    observation: Observation,
    left: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same for Gaussian noise of a public distribution, without its constant logarithm."""
    law = observation.update.law
    if not isinstance(law, Gaussian):
        raise NotApplicable(
            "the release has no Gaussian noise of a distribution that the attacker knows"
        )
    if observation.update.mask is not None:
        left = left * observation.update.mask
    if isinstance(law.covariance, Structured):
        pull = law.covariance.whiten(left).square()
    else:
        variance = torch.as_tensor(law.covariance).to(left).expand_as(left)
        pull = torch.where(variance > 0, left.square() / variance.clamp_min(1e-30), 0)
    return 0.5 * pull.mean(), pull.detach().mean()


@dataclass(frozen=True)
class VarianceReadout(Attack):
    """Infer each pixel from the mean log-power of its column in the first layer's noisy gradient.

    Row r of that layer has g_rp = delta_r x_p. The noise of the local optimum therefore has, up to
    a factor for the row, the variance sqrt(|grad delta_r|²/delta_r² + ... + 1/x_p²): dark pixels
    get the most. Subtracting each row's median removes the factor. The attack fits the monotone
    function from log-power to pixel by replaying the defense on public images. More noise does not
    protect: it scales all powers equally.

    Args:
        images: the largest number of public images that are replayed.
        bins: how many groups of equal size the calibration averages over.

    Assumptions: one client with one example; the first linear layer sees the input.

    Raises:
        NotApplicable: there is no such layer, there are several examples or no public images, or
            the noise has a public distribution.

    Source: this project (see `docs/sharp_edges/private_noise.md`).

    Example:
        >>> VarianceReadout(images=32)
        VarianceReadout(images=32, bins=100)
    """

    images: int = 64
    bins: int = 100

    def __post_init__(self) -> None:
        check.count(images=self.images, bins=self.bins)

    def why_not(self, defense: DefenseProtocol, examples: int) -> str | None:
        return several(examples) or (None if defense.data_dependent_law else PUBLIC_NOISE)

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        _single(observation)
        task = seen_task(observation)
        defense = _defense(observation)
        name = input_layer(task, observation.input_shape)
        known = _public(observation)
        public = Batch(known.inputs[: self.images], known.labels[: self.images])
        if self.why_not(defense, 1) or (
            defense.noise_variance(task, public.inputs[:1], public.labels[:1]) is None
        ):
            raise NotApplicable(PUBLIC_NOISE)
        sent = [_sent(observation, one, generator).rows for one in _singles(public)]
        power = torch.stack([_log_power(task, rows, name) for rows in sent])
        pixels = public.inputs.flatten(1).double()
        curve = monotone_fit(power.flatten(), pixels.flatten(), self.bins)
        left = (curve(power) - pixels).square().mean() / pixels.var(correction=0).clamp_min(1e-30)
        inputs = curve(_log_power(task, observation.update.rows, name))
        problem = None
        if not float(left) < 1 - MIXED:
            problem = "the noise of public images reveals almost nothing of their pixels"
        answer = answered(
            observation,
            task,
            inputs,
            problem,
            labels=observation.labels,
        )
        return replace(answer, objective=float(left))


def _log_power(
    task: Task,
    rows: Tensor,
    name: str,
) -> Tensor:
    """(D,) mean over the layer's rows of log y², minus each row's median; zero rows left out."""
    weight, _ = layer_part(task, rows.sum(0), name)
    squares = weight.double().square()
    squares = squares[squares.amax(1) > 0]
    if len(squares) == 0:
        return torch.zeros(
            weight.shape[1],
            dtype=torch.float64,
            device=weight.device,
        )
    # The logarithm of an exact zero would dominate the mean.
    logs = squares.clamp_min(1e-30 * float(squares.max())).log()
    return (logs - logs.median(1, keepdim=True).values).mean(0)


@dataclass(frozen=True)
class LawMatching(Attack):
    """Search the inputs that make the update and its noise pattern most likely together.

    The attack minimizes -log p(y; g(x), v(x)) / P + total_variation · TV(x) by Adam. Here v(x) is
    the noise variance that a candidate would have caused: a second observation. p is Gaussian, or a
    Student distribution, which tolerates the effect of the defense's random directions on single
    variances. The answer is the iterate with the lowest objective.

    Args:
        total_variation: weight of the total variation.
        steps: steps of Adam; the rate falls tenfold at 3/8, 5/8 and 7/8 of them.
        learning_rate: Adam's learning rate at the start.
        signed: feed Adam only the gradient's sign.
        start: "random", "candidate" (the most likely public image) or "readout"
            (`VarianceReadout`).
        freedom: degrees of freedom of the Student distribution; infinite: the Gaussian.
        floor: what is added to every variance, as a share of their mean. From a random start it
            begins as large as the mean, so that almost silent coordinates do not dominate at first.
        lift: how far above the range's lower end a pixel is moved, in units of the range's width:
            an exactly black pixel has a capped variance without a derivative.

    Assumptions: one client; its batch-dependent noise is the last link that changes values.

    Raises:
        NotApplicable: the noise has a public distribution, or there are several clients.

    Source: this project; what a covariance that depends on x leaks: `docs/errata.md`, A12.

    Example:
        >>> LawMatching(start="readout").start
        'readout'
    """

    total_variation: float = 1e-3
    steps: int = 500
    learning_rate: float = 0.1
    signed: bool = True
    start: str = "random"
    freedom: float = 3.0
    floor: float = 1e-6
    lift: float = 1e-3

    def __post_init__(self) -> None:
        check.count(steps=self.steps)
        check.positive(
            learning_rate=self.learning_rate,
            floor=self.floor,
            freedom=self.freedom,
        )
        check.non_negative(total_variation=self.total_variation, lift=self.lift)
        check.one_of(["random", "candidate", "readout"], start=self.start)

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        task = seen_task(observation)
        defense = _defense(observation)
        _one_client(observation)
        labels = known_or_inferred(observation, generator)
        if self.start == "candidate":
            x = CandidateLikelihood()(observation, generator).inputs.clone()
        elif self.start == "readout":
            x = VarianceReadout()(observation, generator).inputs.clone()
        else:
            x = uniform_inputs(task, observation.batch_shape, generator)
        if defense.noise_variance(task, x, labels) is None:
            raise NotApplicable(PUBLIC_NOISE)
        if self.total_variation and not has_neighbors(observation.input_shape):
            raise NotApplicable("total variation needs images (C, H, W)")
        if not observation.update.rows.any():
            return answered(observation, task, x, labels=labels)
        refuse_codes(task, observation.input_shape)
        likelihood = partial(
            negative_log_likelihood, observation, task, labels=labels, freedom=self.freedom
        )
        low, high = task.input_range
        least = low + self.lift * (high - low)
        x = x.clamp(least, high).requires_grad_()
        optimizer = optimizers.Adam([x], lr=self.learning_rate * (high - low))
        best = None
        lowest = math.inf
        trace = []
        for step in range(self.steps):
            done = step / self.steps
            begun = 2 * done if self.start == "random" else 1.0
            floor = max(self.floor, self.floor ** min(1.0, begun))
            total = likelihood(x, floor=floor)[0] + self._prior(x)
            (slope,) = torch.autograd.grad(total, x)
            value = float(total.detach())
            # With a larger added variance, values are those of another objective.
            if floor == self.floor and value < lowest:
                best = x.detach().clone()
                lowest = value
            if step % max(1, self.steps // TRACE_POINTS) == 0:
                trace.append(value)
            if tick() or not torch.isfinite(slope).all():
                break
            x.grad = slope.sign() if self.signed else slope
            rate = 0.1 ** sum(done >= mark for mark in (3 / 8, 5 / 8, 7 / 8))
            optimizer.param_groups[0]["lr"] = self.learning_rate * (high - low) * rate
            optimizer.step()
            with torch.no_grad():
                x.clamp_(least, high)
        if best is None:
            best = x.detach()
        final, fit = likelihood(best, floor=self.floor)
        problem = None
        if not torch.isfinite(final):
            problem = "not finite: the objective was never a number"
        elif not FITS[0] < float(fit) < FITS[1]:
            problem = f"the noise power is {float(fit):.2g} times what the answer predicts"
        objective = float(final + self._prior(best))
        return Reconstruction(boxed(best, task), labels, objective, tuple(trace), problem)

    def _prior(self, x: Tensor) -> Tensor | float:
        return self.total_variation * total_variation(x) if self.total_variation else 0.0


@dataclass(frozen=True)
class LawEvolution(Attack):
    """Search the span of public images for the inputs that make update and noise most likely.

    The attack handles Gaussian noise of any distribution that the attacker knows or can replay. It
    is like `LawMatching`, but without derivatives, which are uninformative for convolutions with
    max pools. It runs the cross-entropy method on the coefficients of the leading principal
    components of public images.

    Args:
        components: how many principal components.
        population: candidates per generation; the most likely quarter makes the next.
        generations: how many generations.
        freedom: degrees of freedom of the Student distribution that is fitted; see `LawMatching`.
        floor: what is added to every variance, as a share of their mean.
        lift: as in `LawMatching`.
        public_laws: False skips releases whose noise does not depend on the batch.

    Assumptions: one client; its batch-dependent noise is the last link that changes values.

    Raises:
        NotApplicable: there are no public images, there is no noise of a known distribution, or
            there are several clients.

    Source: Rubinstein 1999 (cross-entropy method); its use here is from this project.

    Example:
        >>> LawEvolution(generations=5).population
        80
    """

    components: int = 60
    population: int = 80
    generations: int = 30
    freedom: float = 3.0
    floor: float = 1e-6
    lift: float = 1e-3
    public_laws: bool = True

    def __post_init__(self) -> None:
        check.count(components=self.components, generations=self.generations)
        check.count(population=self.population)
        check.positive(freedom=self.freedom, floor=self.floor)
        check.non_negative(lift=self.lift)

    def why_not(self, defense: DefenseProtocol, examples: int) -> str | None:
        return None if self.public_laws or defense.data_dependent_law else PUBLIC_NOISE

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        if not self.public_laws and (reason := self.why_not(_defense(observation), 1)):
            raise NotApplicable(reason)
        task = seen_task(observation)
        labels = known_or_inferred(observation, generator)
        public = _public(observation, least=2)
        # The cache knows a public set by its identity.
        assert observation.auxiliary is not None  # as `_public` found
        center, basis, known = _principal(observation.auxiliary, task.parameters, self.components)
        refuse_codes(task, observation.input_shape)
        low, high = task.input_range
        least = low + self.lift * (high - low)

        def image(z: Tensor) -> Tensor:
            flat = center + z @ basis
            return boxed(flat.reshape(observation.batch_shape).clamp_min(least), task)

        def cost(z: Tensor) -> float:
            value, _ = negative_log_likelihood(
                observation, task, image(z), labels, floor=self.floor, freedom=self.freedom
            )
            return float(value)

        middle, spread = _by_label(known, public.labels, labels)
        with torch.no_grad():
            first = cost(middle)
            if not observation.update.rows.any():
                return answered(observation, task, image(middle), labels=labels)
            best = middle
            lowest = first
            trace = [first]
            for _ in range(self.generations):
                drawn = normal(
                    (self.population, *middle.shape),
                    generator,
                    like=middle,
                )
                tried = middle + spread * drawn
                costs = torch.tensor([cost(z) for z in tried], dtype=torch.float64)
                # One candidate alone has no spread, and the search would end.
                fittest = tried[costs.argsort()[: max(2, self.population // 4)]]
                middle = (1 - PACE) * middle + PACE * fittest.mean(0)
                variance = (1 - PACE) * spread.square() + PACE * fittest.var(0, correction=0)
                spread = variance.sqrt()
                trace.append(cost(middle))
                if trace[-1] < lowest:
                    best = middle
                    lowest = trace[-1]
                if tick():
                    break
        problem = None
        if not lowest < first:
            problem = f"objective did not fall: {first:.6g} at the start, {lowest:.6g} at the end"
        return Reconstruction(image(best), labels, lowest, tuple(trace), problem)


# An audit attacks many rounds with one public set; its SVD is the same in each.
_SPANS = RecentCache[tuple[Tensor, Tensor, Tensor]](2**26)


def _principal(
    public: Batch,
    like: Tensor,
    most: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Center (D,), leading principal components (k, D) and coefficients (n, k) of the images."""

    def find() -> tuple[Tensor, Tensor, Tensor]:
        flat = public.inputs.flatten(1).to(like)
        center = flat.mean(0)
        # A copy: a slice would keep all singular vectors in the cache.
        basis = torch.linalg.svd(flat - center, full_matrices=False).Vh[:most].clone()
        return center, basis, (flat - center) @ basis.T

    return _SPANS.get((public, like.dtype, like.device, most), find)


def _by_label(
    known: Tensor,
    every: Tensor,
    labels: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mean and spread (N, K) of the public coefficients of each label; of all if few have it."""
    middles = []
    spreads = []
    for label in labels:
        same = known[every == label]
        some = same if len(same) >= SOME else known
        middles.append(some.mean(0))
        spreads.append(some.std(0))
    return torch.stack(middles), torch.stack(spreads)


def monotone_fit(
    x: Tensor,
    y: Tensor,
    bins: int,
) -> Callable[[Tensor], Tensor]:
    """Isotonic regression, in the direction of the covariance, of means over equal bins: linear
    between them, constant beyond the ends.
    """
    order = torch.argsort(x, stable=True)
    size = math.ceil(len(x) / bins)
    at = torch.stack([part.mean() for part in torch.split(x[order], size)])
    means = torch.stack([part.mean() for part in torch.split(y[order], size)])
    count = [len(part) for part in torch.split(x, size)]
    falls = float(((x - x.mean()) * (y - y.mean())).sum()) < 0
    fitted = isotonic_regression(
        means.cpu().numpy(),
        weights=count,
        increasing=not falls,
    ).x
    value = torch.as_tensor(fitted.copy()).to(means)

    def curve(x: Tensor) -> Tensor:
        if len(at) == 1:
            return value.expand(x.shape)
        right = torch.searchsorted(at, x.contiguous()).clamp(1, len(at) - 1)
        low = at[right - 1]
        high = at[right]
        share = ((x - low) / (high - low).clamp_min(1e-300)).clamp(0, 1)
        return value[right - 1] + share * (value[right] - value[right - 1])

    return curve
