"""Bounds on every attacker for one release: on the error, and on the probability of success.

The audit, captured updates and the leak meter ask here.

The bounds on one release are one concept: they share what a release is, what makes every one of
them void, and whom they cover.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from scipy import special
from torch import Tensor

from leakbound import check
from leakbound._util.decibels import psnr_of_mse
from leakbound.assess.criterion import Criterion
from leakbound.assess.record import Bound, short
from leakbound.bounds import (
    ErrorBound,
    Prior,
    counting,
    full_bound,
    full_bound_from_samples,
    identification,
    trace_bound_from_samples,
)
from leakbound.bounds.law import Scope
from leakbound.bounds.record_priors import KINDS
from leakbound.bounds.smoothness import not_smooth
from leakbound.bounds.weiss_weinstein import default_steps, least_informed, weiss_weinstein_bound
from leakbound.channel import ClassPriors
from leakbound.channel.fisher import Channel, fisher_matrix, fisher_trace, overlaps, strange_power
from leakbound.client import batch_norms
from leakbound.defenses import Chain, GaussianMechanism, NoisyCopy
from leakbound.risk import kappa
from leakbound.types import (
    Batch,
    Gaussian,
    Guarantee,
    NotApplicable,
    Server,
    Task,
    ThreatModel,
    Update,
)

T = TypeVar("T")
Once = Callable[[Any, Callable[[], T]], T]

LEAST = 1e-300
"""Smaller probabilities are given as this."""
PILOT, STEPS = 4, 5
GRID = (30, 28, 26, 24.5, 23, 21.5, 20, 18.5, 17, 15.5, 14, 12)
"""PSNRs in dB at which the bound on the mean error takes the bound on success."""
DOUBT = 0.01
"""From which p-value on a test does not say that private examples differ from public ones."""
MANY = 96
"""Draws for a Weiss-Weinstein bound: a linear release then loses 20 % of it to its confidence."""


@dataclass(frozen=True)
class ErrorBoundSpec:
    """A lower bound on every attacker's mean error, or an estimate of one.

    Attributes:
        kind: "trace", "full" (tighter, slower, with a leak map), both estimates; "weiss_weinstein"
            (proved, for models with non-smooth activations too, slowest) or "none".
        prior: what attackers know of examples: "gaussian" (mean and covariance of public ones, in
            their `components` leading directions), "isotropic" (their mean variance) or "flat".
        images: over how many draws of the prior the information is averaged.
        directions: random directions for each trace.
    """

    kind: str = "trace"
    prior: str = "gaussian"
    components: int = 32
    images: int = 16
    directions: int = 4

    def __post_init__(self) -> None:
        check.one_of(["none", "trace", "full", "weiss_weinstein"], kind=self.kind)
        if (self.kind, self.prior) == ("weiss_weinstein", "flat"):
            raise ValueError(
                "kind is 'weiss_weinstein' with prior 'flat'; it needs a Gaussian prior"
            )
        check.one_of(["gaussian", "isotropic", "flat"], prior=self.prior)
        check.count(components=self.components, images=self.images, directions=self.directions)


@dataclass(frozen=True)
class RiskSpec:
    """The accepted probability of a reconstruction, where the release is private.

    Attributes:
        probability: a release is "protected" if no attacker meets the criterion more often, by
            what public examples show without a model; None asks for no such bound.
        prior: the model under which a second bound is stated, for "protected under a model":
            "mixture" (Gaussians fitted to public examples), "gaussian" (one of them), "gallery"
            (the public examples themselves) or "none".
        components: leading directions of the Gaussians.
    """

    probability: float | None = 0.001
    prior: str = "mixture"
    components: int = 32

    def __post_init__(self) -> None:
        if self.probability is not None and not 0 < self.probability < 1:
            raise ValueError(
                f"probability is {self.probability!r}; give one between 0 and 1, or 0 to ask for "
                "no such bound"
            )
        check.one_of([*KINDS, "none"], prior=self.prior)
        check.count(components=self.components)


@dataclass(frozen=True, eq=False)
class Released:
    """One release, and all that bounds on it may rest on.

    Attributes:
        task: the model as the attacker knows it.
        cohort: batch size of every client in the update.
        batch: its labels count as known; its inputs are looked at only with `truth_known`, to
            compare what was sent with what the defense's `imitate` gives.
        public: public examples of the same kind.
        origins: (n,) what each public example comes from, where several come from one.
        same_law: p-value of a test that private examples are drawn like public ones; None: no test.
        key: what names the release, so that `once` computes a bound once; None computes it anew.
    """

    task: Task
    update: Update
    defense: Chain
    criterion: Criterion
    threat: ThreatModel
    cohort: tuple[int, ...]
    batch: Batch | None
    public: Batch | None
    truth_known: bool = True
    origins: Tensor | None = None
    same_law: float | None = None
    key: Any = None
    once: Once[Any] = lambda key, make: make()

    def cached(self, name: str, key: Any, make: Callable[[], T]) -> T:
        found: T = make() if self.key is None else self.once((name, self.key, key), make)
        return found

    @property
    def examples(self) -> int:
        return sum(self.cohort)


def bounds(
    released: Released, error: ErrorBoundSpec, risk: RiskSpec, source: torch.Generator
) -> tuple[tuple[Bound, ...], str | None]:
    """All bounds that there are for a release, and why others are missing."""
    found: list[Bound] = []
    notes: list[str] = []
    domain = released.criterion.domain
    if not domain.distance_is_rmse:
        return (), f"no bound is known for the distance of {domain.name}"
    makers: tuple[Callable[[], Bound | None], ...] = (
        partial(error_bound, released, error, source),
        partial(sample_error_bound, released, error, risk),
        partial(sample_probability, released, risk),
        partial(model_probability, released, risk),
    )
    for make in makers:
        try:
            bound = make()
        except NotApplicable as missing:
            notes.append(" ".join(missing.reason.split()))
        else:
            found += [] if bound is None else [bound]
    return tuple(found), "; ".join(dict.fromkeys(notes)) or None


def refuse_side_information(released: Released) -> None:
    """Refuse where the attacker knows more of the batch than the release: no bound covers that."""
    if released.threat.statistics_known and batch_norms(released.task):
        raise NotApplicable(
            "the batch's statistics leave beside the update, without noise: no bound covers them, "
            "and no guarantee of the defense does"
        )


def error_bound(released: Released, spec: ErrorBoundSpec, source: torch.Generator) -> Bound | None:
    """The lower bound on every attacker's mean squared error that is asked for.

    The prior is one Gaussian for each class, and labels count as known, since an update often
    reveals them. Only of single examples a bound is said to hold on average: candidates for several
    are paired in the best order, and the bound is not.

    Raises:
        NotApplicable: there is no such bound here, and why.
    """
    if spec.kind == "none":
        return None
    refuse_side_information(released)
    if released.task.coupled:
        raise NotApplicable(
            "batch norm in training mode couples the examples: no lower bound on the error is known"
        )
    if released.threat.server is Server.MALICIOUS:
        raise NotApplicable(
            "a malicious server chooses the model, and a lower bound on the error for one model "
            "bounds no other: it may scale its weights until the noise is nothing"
        )
    if released.batch is None:
        raise NotApplicable("a lower bound on the error needs the labels, which are not known")
    labels = released.batch.labels

    def make() -> ErrorBound | str:
        try:
            return _error_bound(released, spec, labels, source)
        except NotApplicable as error:
            return error.reason

    found = released.cached("error bound", (tuple(labels.tolist()), spec), make)
    if isinstance(found, str):
        raise NotApplicable(found)
    criterion, (low, high) = released.criterion, released.task.input_range
    return Bound(
        name=found.name,
        value=_nine(found.value),
        psnr=short(psnr_of_mse(found.value, high - low)),
        prior=found.prior,
        covers=found.covers,
        rests_on_prior=found.rests_on_prior,
        excludes_threshold=False,
        on_average=found.covers == "all"
        and found.value > criterion.error
        and released.examples == 1,
        equation=found.equation,
        assumptions=tuple(found.assumptions),
        standard_error=short(found.standard_error),
        confidence=found.confidence,
    )


def leak_map(released: Released, spec: ErrorBoundSpec) -> Tensor | None:
    """How much of each value's uncertainty the release takes away, (B, *S) in [0, 1].

    1 - sqrt(posterior bound / prior variance) at the very examples that were sent: 0 where a value
    stays as uncertain as the prior has it, 1 where it is given away. None without a full bound.
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
    except (NotApplicable, ValueError):  # a picture less, and no other part of the record changes
        return None
    if left is None:
        return None
    before = _prior_variance(prior)
    varies = before > 1e-9 * before.max()
    share = np.where(varies, left / np.where(varies, before, 1.0), 1.0)
    known = 1 - np.sqrt(np.clip(share, 0, 1))
    return torch.as_tensor(known).reshape(truth.inputs.shape)


def sample_error_bound(released: Released, error: ErrorBoundSpec, risk: RiskSpec) -> Bound | None:
    """A lower bound on every attacker's mean squared error by public examples, without a model.

    None where the release is not private or no such bound is asked for.
    """
    found = None if error.kind == "none" else _private(released, risk)
    if found is None or released.public is None or released.public.size < 2:
        return None
    noise, scope, _ = found
    sample, (low, high) = _sample(released), released.task.input_range
    levels = (high - low) ** 2 * 10 ** (-np.array(GRID) / 10)
    value = released.once(
        ("sample error", *_sample_key(released), noise), lambda: sample.mean_error(noise, levels)
    )
    if value < levels[0]:  # below the grid the bound says nothing
        return None
    criterion = released.criterion
    return Bound(
        name="count of public examples",
        value=_nine(value),
        psnr=short(psnr_of_mse(value, high - low)),
        prior=sample.name,
        rests_on_prior=True,
        model_free=True,
        confidence=sample.confidence,
        public_examples=sample.n,
        covers=scope.covers,
        excludes_threshold=False,
        on_average=value > criterion.error and released.examples == 1 and not _doubted(released),
        equation="sum of (eta_j - eta_(j-1)) (1 - success bound at eta_j) (docs/risk.md)",
        assumptions=(
            f"covers {scope.attackers}",
            "examples: private ones are drawn independently and like the public ones",
            "a mean over examples and noise: it does not exclude one lucky example",
        ),
    )


def _sample_key(released: Released) -> tuple[Any, ...]:
    return released.threat.labels_known, released.examples


def _doubted(released: Released) -> bool:
    """Whether a test found that private examples are not drawn like public ones."""
    return released.same_law is not None and released.same_law < DOUBT


def _sample(released: Released) -> counting.PublicSample:
    """The public examples as a sample, made once; labels count where they are known."""
    public, origins = released.public, released.origins
    assert public is not None  # the callers ask
    found: counting.PublicSample = released.once(
        ("sample", *_sample_key(released)),
        lambda: counting.PublicSample(
            public.inputs.flatten(1).double().cpu().numpy(),
            labels=public.labels.cpu().numpy() if released.threat.labels_known else None,
            guesses=released.examples,
            classes=released.task.label_range,
            sources=None if origins is None else origins.cpu().numpy(),
        ),
    )
    return found


def sample_probability(released: Released, spec: RiskSpec) -> Bound | None:
    """With what probability any attacker meets the criterion, by public examples without a model.

    It says nothing, in `excludes_threshold`, where a test found that private examples are not
    drawn like the public ones.

    Raises:
        NotApplicable: no public examples.
    """
    found = _private(released, spec)
    if found is None or spec.probability is None:
        return None
    public, eta = released.public, released.criterion.error
    accepted = spec.probability
    if public is None or public.size < 2:
        raise NotApplicable(
            f"a probability of {accepted:g} needs "
            f"{counting.examples_needed(accepted, confidence=0.975)} public examples or more"
        )
    sample, (noise, scope, name) = _sample(released), found
    edge, known = released.once(
        ("sample bound", *_sample_key(released), noise, eta),
        lambda: tuple(float(v[0]) for v in sample.success_bound(noise, eta)),
    )
    doubted = _doubted(released)
    limit, least = math.exp(known), sample.needed(accepted, parts=2)
    doubts = [f"a test found private examples drawn unlike public ones (p = {released.same_law})"]
    few = [f"a probability of {accepted:g} needs {least} public examples or more"]
    return Bound(
        name=name,
        value=_nine(edge),
        probability=_nine(edge),
        accepted=accepted,
        psnr=None,
        prior=sample.name,
        rests_on_prior=True,
        model_free=True,
        confidence=sample.confidence,
        public_examples=sample.n,
        largest_ball=sample.largest(eta),
        density_margin=short(max(_margin(noise, accepted, limit), accepted / max(edge, LEAST))),
        covers=scope.covers,
        excludes_threshold=edge <= accepted and not doubted,
        on_average=False,
        equation="limit on kappa and profile bound (docs/risk.md)",
        assumptions=(
            f"covers {scope.attackers}",
            "examples: private ones are drawn independently and like the public ones; each for "
            "itself",
            *(doubts if doubted else ()),
            *(few if sample.n < least else ()),
            f"it does not say: {scope.not_said}",
            f"the prior-only baseline succeeds with probability {_tiny(known)} at most",
        ),
    )


def model_probability(released: Released, spec: RiskSpec) -> Bound | None:
    """With what probability any attacker meets the criterion, under a model of the data.

    Differential privacy: the trade-off function of the Gaussian mechanism at the baseline's success
    under the prior. A noisy copy: what the copy itself gives away under that prior, which covers
    all that is ever computed from it. Each example for itself; for several the worst one's.

    Raises:
        NotApplicable: no prior can be taken from the public examples.
    """
    private = _private(released, spec)
    if private is None or spec.prior == "none":
        return None
    labels_known = released.threat.labels_known
    public, eta = released.public, released.criterion.error
    prior, one = released.once(
        ("baseline", spec.prior, spec.components, labels_known, eta),
        lambda: kappa.of_public(public, spec.prior, spec.components, labels_known, eta),
    )
    blind = min(0.0, one + math.log(released.examples))  # any of the guesses may be the right one
    copies = [link.noise_std for link in released.defense.links if isinstance(link, NoisyCopy)]
    noise, scope, name = private
    if copies:
        logs = max(one, kappa.after_copy(copies[0], prior, eta=eta, baseline=one))
        found = math.exp(min(0.0, logs + math.log(released.examples)))
    else:
        found = float(identification.gaussian(noise, log_kappa=blind))
    value = _nine(max(found, LEAST))
    assert spec.probability is not None  # `_private` asks
    return Bound(
        name=f"{name} under a model",
        value=value,
        probability=value,
        accepted=spec.probability,
        psnr=None,
        prior=f"{prior.name}, fitted to public examples",
        rests_on_prior=True,
        covers=scope.covers,
        excludes_threshold=found <= spec.probability,
        on_average=False,
        equation=scope.equation,
        assumptions=(
            f"covers {scope.attackers}",
            "examples: averaged over the model, which is taken to hold for the private ones; each "
            "for itself",
            f"it does not say: {scope.not_said}",
            f"the prior-only baseline succeeds with probability {_tiny(blind)}",
        ),
    )


def _private(released: Released, spec: RiskSpec) -> tuple[float, Scope, str] | None:
    """The noise multiplier behind which an example hides, whom that covers, and its name.

    Of a noisy copy: in units of the farthest that an example lies from the middle of its range.
    """
    if spec.probability is None:
        return None
    refuse_side_information(released)
    copies = [link.noise_std for link in released.defense.links if isinstance(link, NoisyCopy)]
    if copies:
        low, high = released.task.input_range
        size = math.prod(released.criterion.domain.shape)
        farthest = math.sqrt(size) * (high - low) / 2
        return copies[0] / farthest, COPY, "probability after a noisy copy"
    if released.defense.guarantee is not Guarantee.DIFFERENTIAL_PRIVACY:
        return None
    return _multiplier(released.defense), PRIVATE, "probability"


def _margin(noise: float, accepted: float, limit: float) -> float:
    """How many times as densely as public examples private ones may lie: F(A kappa) = accepted."""
    if noise == 0 or limit == 0:
        return 0.0
    return float(special.ndtr(special.ndtri(accepted) - 1 / noise)) / limit


def _multiplier(defense: Chain) -> float:
    """The largest multiplier of the mechanisms in the chain; each alone covers what follows."""
    found = [m.noise_multiplier for m in defense.links if isinstance(m, GaussianMechanism)]
    if not found:
        raise NotApplicable("the guarantee does not rest on Gaussian noise")
    return max(found)


def _error_bound(
    released: Released, spec: ErrorBoundSpec, labels: Tensor, source: torch.Generator
) -> ErrorBound:
    channel, by_class = _channel(released), _by_class(spec, released)
    prior = by_class.prior(labels)
    least = MANY + PILOT if spec.kind == "weiss_weinstein" else 4
    drawn = by_class.batches(labels, max(least, spec.images // len(labels)), source)
    basis = _basis(prior)
    if spec.kind == "full":
        fishers = [fisher_matrix(channel, b, basis) for b in drawn]
        return _explained(full_bound_from_samples(fishers, prior), channel, drawn[0])
    if spec.kind == "weiss_weinstein":
        return _without_smoothness(channel, prior, drawn, basis)
    traces = [
        fisher_trace(channel, b, source, directions=spec.directions, basis=basis) for b in drawn
    ]
    return _explained(trace_bound_from_samples(traces, prior), channel, drawn[0])


def _without_smoothness(
    channel: Channel, prior: Prior, drawn: list[Batch], basis: Tensor | None
) -> ErrorBound:
    """The Weiss-Weinstein bound, along the directions that a few pilot draws reveal least of."""
    pilot, rest = drawn[:PILOT], drawn[PILOT:]
    fisher = np.mean([fisher_matrix(channel, b, basis) for b in pilot], axis=0)
    directions, known = least_informed(fisher, prior, max(1, prior.rank // 2))
    steps = default_steps(prior, STEPS, directions=directions, information=known)
    frame = torch.as_tensor(directions)
    frame = frame if basis is None else basis @ frame
    return weiss_weinstein_bound(
        overlaps(channel, rest, frame, steps), steps, prior, directions=directions
    )


def _explained(estimate: ErrorBound, channel: Channel, batch: Batch) -> ErrorBound:
    """The estimate, with what else the theorem behind it lacks: smoothness, one public noise."""
    assert isinstance(channel.law, Gaussian)  # checked when the channel was built
    found = not_smooth(channel.task, batch.inputs, batch.labels, channel.defense)
    if found:
        words = f"what is sent is not known to be smooth in the inputs ({', '.join(found)})"
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
    update, defense = released.update, released.defense
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
    made: ClassPriors = released.once(
        ("prior", spec.prior, spec.components),
        lambda: ClassPriors(released.public, spec.prior, spec.components),
    )
    return made


def _basis(prior: Prior) -> Tensor | None:
    return None if prior.basis is None else torch.as_tensor(np.ascontiguousarray(prior.basis))


def _prior_variance(prior: Prior) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The prior's variance of every value, (m,)."""
    if prior.information.ndim == 1:
        own = np.where(prior.information > 0, 1 / np.maximum(prior.information, 1e-300), 0)
        if prior.basis is None:
            return np.asarray(own)
        return np.asarray(prior.basis**2 @ own)
    covariance = np.linalg.inv(prior.matrix)
    if prior.basis is None:
        return np.asarray(np.diagonal(covariance))
    return np.asarray(np.einsum("ij,jk,ik->i", prior.basis, covariance, prior.basis))


def _nine(value: float) -> float:
    return float(f"{value:.9g}")


def _tiny(log: float) -> str:
    power = log / math.log(10)
    return f"{math.exp(log):.3g}" if power > -300 else f"1e{power:.0f}"


PRIVATE = replace(
    identification.gaussian.scope,
    attackers="all attackers, models and gradient maps with a per-example norm of at most the clip "
    "norm, on one release; each example by itself",
    prior="other examples fixed or known, none of them a copy",
    not_said="what several rounds leak, which is more (`leakbound bound --steps`), that no example "
    "of a batch is reconstructed, a bound for one given example, or that membership is hidden",
)
COPY = Scope(
    covers="all",
    attackers="all attackers and models, over any number of rounds: they see x + w at most",
    prior="the copies of other examples fixed or known",
    known="the distribution of w",
    not_said="a bound for one given example; labels are not protected",
    equation="the best guess given x + w (docs/risk.md)",
)
