"""Any attacker's probability to meet the criterion on one release: bounds and attained success."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special

from leakbound import check
from leakbound._util.cache import RecentCache
from leakbound._util.formats import format_upper_log
from leakbound.assess import near_copies
from leakbound.assess.attackers import (
    Intruder,
    best_completion,
    only_anyone,
    rows_of,
    with_known_parts,
)
from leakbound.assess.criterion import distance_of
from leakbound.assess.record import DELTA, AttackerRow, Attained, Bound, short
from leakbound.assess.released import (
    Released,
    nine,
    refuse_known_parts,
    refuse_other_distances,
    refuse_side_information,
)
from leakbound.assess.sentences import DOUBTED, GUESS, rare, unit_of
from leakbound.bounds import conversions, counting, identification, record_priors
from leakbound.bounds.attainable import FEWEST, Attainable
from leakbound.bounds.known_model import KnownModel
from leakbound.bounds.language import BigramText
from leakbound.bounds.law import Scope
from leakbound.bounds.record_priors import KINDS, Baseline
from leakbound.channel import clipped_gram, most_examples
from leakbound.core import Batch, Guarantee, NotApplicable, Server, Task, Unit
from leakbound.defenses import Chain, GaussianMechanism, NoisyCopy
from leakbound.defenses.dp_sgd import ClipExamples, Mean
from leakbound.domains import Domain

MOST_KNOWN = 2500
MOST_PRODUCTS = 2e11
"""Maximum number of public examples whose gradients are compared, and of products; some seconds."""
_LATEST: RecentCache[KnownModel] = RecentCache(0)  # the latest two: each holds a large matrix
OF_SOURCES = (
    "examples: a random one of a random source (a person, a photograph), so a source with many "
    "examples counts once"
)
ONE_SET = (
    "the test of private against public examples compares parts of one data set: it sees no "
    "difference of another site"
)
LEAST = 1e-300
"""Smaller probabilities are given as this value."""
DOUBT = 0.01
"""At smaller p-values a test says that private examples differ from public ones."""


@dataclass(frozen=True)
class RiskSpec:
    """The accepted probability of a reconstruction, for a private release.

    Attributes:
        probability: a release is "protected" if no attacker meets the criterion more often, by
            what public examples show without a model; None requests no such bound.
        prior: the model for a second bound, for "protected under a model": "mixture" (Gaussians
            fitted to public examples), "gaussian" (one of them), "gallery" (the public examples
            themselves) or "none".
        components: number of leading directions of the Gaussians.
        these: also state, exactly, what holds on average over the private examples of the audit.
            The number depends on private data: keep the records and the report local.
        people: the largest number of one person's examples in an update; near-copies that are
            counted in a batch may be more. None: counted where the data say who is who, else 1.
    """

    probability: float | None = 0.001
    prior: str = "mixture"
    components: int = 32
    these: bool = False
    people: int | None = None

    def __post_init__(self) -> None:
        if self.probability is not None and not 0 < self.probability < 1:
            raise ValueError(
                f"probability is {self.probability!r}; give one between 0 and 1, or 0 for no such "
                "bound"
            )
        check.one_of([*KINDS, "none"], prior=self.prior)
        check.count(components=self.components)
        check.given(check.count, people=self.people)


def sample_key(released: Released) -> tuple[Any, ...]:
    origins = None if released.origins is None else tuple(released.origins.tolist())
    known = released.threat.labels_known, released.examples, released.task.label_range
    return *known, origins, released.criterion.domain, released.criterion.known


def doubted(released: Released) -> bool:
    """Whether a test found that private and public examples have different distributions."""
    return released.same_law is not None and released.same_law < DOUBT


def _doubts(released: Released, limit: float) -> list[str]:
    """Why the public examples, of which no candidate matches more than `limit`, do not cover these.

    One test compares the samples by nearest neighbors; the other counts how many examples of the
    update one of them matches.
    """
    doubts = []
    if doubted(released):
        p_value = released.same_law
        doubts.append(f"{DOUBTED} private examples drawn unlike public ones (p = {p_value})")
    p_value = near_copies.crowding(released, limit)
    if p_value < DOUBT:
        doubts.append(
            f"{DOUBTED} that more examples of the update match each other than if they were "
            f"independent and like the public ones (p = {p_value:.2g})"
        )
    return doubts


def known_sample(released: Released) -> counting.PublicSample:
    """The public examples as a sample, made once; labels and parts count if they are known."""
    public = released.public
    origins = released.origins
    assert public is not None  # the callers ask

    def make() -> counting.PublicSample:
        criterion = released.criterion
        sample = counting.PublicSample(
            public.inputs.flatten(1).double().cpu().numpy(),
            labels=public.labels.cpu().numpy() if released.threat.labels_known else None,
            guesses=released.examples,
            classes=released.task.label_range,
            sources=None if origins is None else origins.cpu().numpy(),
            distance=distance_of(criterion.whole),
        )
        return with_known_parts(sample, criterion.known)

    return released.of_public(("sample", *sample_key(released)), make)


def sample_probability(released: Released, spec: RiskSpec) -> Bound | None:
    """Upper bound on any attacker's probability, from public examples without a model.

    It says nothing, in `excludes_threshold`, if a test found that private and public examples have
    different distributions.

    Raises:
        NotApplicable: there are no public examples.
    """
    private = private_noise(released, spec)
    if private is None or spec.probability is None:
        return None
    public = released.public
    eta = released.criterion.level
    accepted = spec.probability
    if public is None or public.size < 2:
        raise NotApplicable(
            f"a probability of {accepted:g} needs "
            f"{counting.examples_needed(accepted, confidence=1 - (1 - counting.CONFIDENCE) / 2)} "
            "public examples or more"
        )
    sample = known_sample(released)
    (noise, scope, name) = private
    edge, known = released.of_public(
        ("sample bound", *sample_key(released), noise, eta),
        lambda: tuple(float(v[0]) for v in sample.success_bound(noise, eta)),
    )
    limit = math.exp(known)
    least = sample.needed(accepted, parts=2)
    doubts = _doubts(released, limit)
    few = [f"a probability of {accepted:g} needs {least} public examples or more"]
    alone = len(sample.alone(eta))
    return _stated(
        released,
        spec,
        edge,
        scope,
        holds=not doubts,
        name=name,
        prior=sample.name,
        basis=sample.basis,
        confidence=sample.confidence,
        public_examples=sample.n,
        largest_ball=sample.largest(eta),
        rare=short(alone / sample.n),
        density_margin=short(max(_margin(noise, accepted, limit), accepted / max(edge, LEAST))),
        equation="limit on kappa and profile bound (docs/risk.md)",
        assumptions=(
            f"covers {scope.attackers}",
            "examples: private ones are drawn independently and like the public ones; each for "
            "itself",
            *(() if released.origins is None else (OF_SOURCES,)),
            *doubts,
            *(() if released.same_law is None else (ONE_SET,)),
            *(few if sample.n < least else ()),
            f"it does not say: {scope.not_said}",
            rare(alone, sample.n),
            f"the prior-only baseline succeeds with probability {format_upper_log(known)} at most",
        ),
    )


def attackers(released: Released, spec: RiskSpec) -> tuple[AttackerRow, ...]:
    """What the update adds for a stranger, for who has the known parts, and for anyone.

    Empty if the release is not private. A noisy copy may be attacked in every round, and its curve
    is not one of a step: it has no rows. If a test says that private examples are not like the
    public ones, only the row for anyone needs no public examples.
    """
    criterion = released.criterion
    whole = criterion.of_stranger or criterion
    of_stranger = replace(released, criterion=whole)
    # Which examples are near-copies depends on what counts of them: the lower noise holds for all.
    private = [private_noise(each, spec) for each in (released, of_stranger)]
    noises = [one[0] for one in private if one is not None]
    public = released.public
    if not noises or public is None or public.size < 2 or _copies(released):
        return ()
    noise = min(noises)
    sample = known_sample(of_stranger)
    known = float(sample.log_kappa(whole.level, parts=2))
    if _doubts(of_stranger, math.exp(known)):
        return only_anyone(counting.gaussian_lift(noise))

    def make() -> tuple[AttackerRow, ...]:
        lift = counting.gaussian_lift(noise)
        if criterion.known is None:
            return rows_of(lift, whole, sample)
        places = torch.from_numpy(sample.places).to(public.inputs.device)
        labels = public.labels[places] if released.threat.labels_known else None
        # No noise changes what is completed without the update.
        completed = released.of_public(
            ("completed", *sample_key(released), criterion),
            lambda: best_completion(public.inputs[places], criterion, labels),
        )
        return rows_of(lift, whole, sample, Intruder(criterion, known_sample(released), completed))

    return released.of_public(("attackers", *sample_key(released), noise, criterion), make)


def these_probability(released: Released, spec: RiskSpec) -> Bound | None:
    """Upper bound on any attacker's probability, on average over private examples.

    None if no private examples were given to count.
    """
    release = private_noise(released, spec)
    private = released.private
    if release is None or private is None or not spec.these:
        return None
    refuse_known_parts(released)
    if private.size > counting.MOST:
        raise NotApplicable(
            f"there are {private.size} private examples, and at most {counting.MOST} are counted "
            "one by one"
        )
    (noise, scope, name) = release
    eta = released.criterion.level
    known = released.threat.labels_known

    def make() -> tuple[float, int, str]:
        examples = counting.TheseExamples(
            private.inputs.flatten(1).double().cpu().numpy(),
            labels=private.labels.cpu().numpy() if known else None,
            guesses=released.examples,
            distance=distance_of(released.criterion.domain),
        )
        success = float(examples.success_bound(noise, eta)[0][0])
        return success, examples.largest(eta), examples.name

    edge, largest, words = released.cached("these", (*sample_key(released), noise, eta), make)
    return _stated(
        released,
        spec,
        edge,
        scope,
        name=f"{name} for these examples",
        prior=words,
        basis="examples",
        public_examples=private.size,
        largest_ball=largest,
        equation="profile bound over the examples themselves (docs/risk.md)",
        assumptions=(
            f"covers {scope.attackers}",
            "examples: one of these, each equally likely; the others may be known",
            f"it does not say: {scope.not_said}, or anything of other examples",
            "it depends on private data: keep it local",
        ),
    )


def known_model_probability(
    released: Released,
    spec: RiskSpec,
) -> Bound | None:
    """Upper bound on the probability that an honest server succeeds with this model's update.

    It uses the posterior over public examples, without a model of the data. None if the server is
    malicious: it sends another model.

    Raises:
        NotApplicable: there are no public examples, or the update is not a mean of clipped
            gradients of this model at weights that depend on no example.
    """
    private = private_noise(released, spec)
    if private is None or released.threat.server is not Server.HONEST:
        return None
    refuse_known_parts(released)
    refuse_other_distances(released)
    why = _why_not_known(released, spec)
    if why is not None:
        raise NotApplicable(f"no bound for this model alone: {why}")
    noise = private[0]
    eta = released.criterion.error

    def make() -> tuple[float, str, float, int]:
        model = _known_model(released)
        return model.success_bound(noise, eta), model.name, model.confidence, model.n

    key = *sample_key(released), noise, eta
    try:
        edge, prior, confidence, count = released.cached("known model", key, make)
    except ValueError as error:  # such as weights whose gradients do not fit into memory
        raise NotApplicable(f"no bound for this model alone: {error}") from None
    return _stated(
        released,
        spec,
        edge,
        PRIVATE,
        holds=not doubted(released),
        name="probability from this model",
        prior=prior,
        basis="known model",
        confidence=confidence,
        public_examples=count,
        equation="posterior over public examples (docs/risk.md)",
        assumptions=(
            "covers all attackers who see one release of this model at these weights, which depend "
            "on no example",
            "examples: private ones are drawn independently and like the public ones; each for "
            "itself, other examples fixed or known",
            "it does not say: what another model leaks, or what several rounds leak",
        ),
    )


def _stated(
    released: Released,
    spec: RiskSpec,
    edge: float,
    scope: Scope,
    *,
    holds: bool = True,
    assumptions: tuple[str, ...] = (),
    **more: Any,
) -> Bound:
    """A bound on the probability of success; it excludes nothing if `holds` is False."""
    assert spec.probability is not None  # `private_noise` checks
    value = nine(edge, up=True)
    # Of one release and one example; a noisy copy hides no membership.
    epsilon = None
    if not _copies(released):
        epsilon = float(conversions.epsilon(_multiplier(released.defense), delta=DELTA))
    return Bound(
        value=value,
        probability=value,
        accepted=spec.probability,
        psnr=None,
        rests_on_prior=True,
        epsilon=short(epsilon),
        covers=scope.covers,
        excludes_threshold=value <= spec.probability and holds,
        on_average=False,
        unit=unit_of(near_copies.most_of_person(released, spec.people)),
        assumptions=(
            *assumptions[:1],
            *near_copies.words(released, spec.people),
            *assumptions[1:],
        ),
        **more,
    )


def _why_not_known(released: Released, spec: RiskSpec) -> str | None:
    """Why there is no bound for the known model; None if there is one."""
    links = released.defense.links
    changed = any(link.changes_training or link.changes_start for link in links)
    # By exact type, because a subclass may send something else.
    if [type(link) for link in links[:3]] != [ClipExamples, Mean, GaussianMechanism] or changed:
        return "it is for clipped gradients of examples with Gaussian noise on their mean"
    if len(released.cohort) > 1:
        return "the update sums several clients"
    if not released.task.plan.is_gradient or released.task.coupled:
        return "it is for one local step of SGD on examples that do not see each other"
    if not released.fresh:
        return "the weights may depend on public or private examples"
    if near_copies.count(released, spec.people) > 1:
        return "several examples of the update are near each other or of one person"
    if released.public is None or released.public.size < FEWEST:
        return f"it needs {FEWEST} public examples or more"
    return None


def _known_model(released: Released) -> KnownModel:
    clip = released.defense.links[0]
    sample = known_sample(released)
    assert isinstance(clip, ClipExamples)
    assert released.public is not None
    arguments = (
        released.task,
        released.public,
        clip.clip_norm,
        sample,
        released.examples,
        released.threat.labels_known,
    )
    return _LATEST.get(arguments, lambda: known_model(*arguments))


def known_model(
    task: Task,
    public: Batch,
    clip_norm: float,
    sample: counting.PublicSample | None = None,
    guesses: int = 1,
    labels_known: bool = True,
    confidence: float = counting.CONFIDENCE,
) -> KnownModel:
    """What public examples show about the updates of one model from an honest server.

    It holds if neither the model nor the clip norm was chosen from these public examples.

    Args:
        task: the model at its weights.
        public: independent draws from the private examples' distribution; at most MOST_KNOWN count.
        clip_norm: C, the largest L2 norm of one example's gradient.
        sample: the same as a sample, if they are not independent.
        guesses: number of the attacker's candidates, of which one has to match.
        labels_known: whether the attacker knows the label.
        confidence: of its bounds.

    Raises:
        ValueError: weights have 16 bits, or fewer than two examples fit into memory.

    Source: docs/risk.md, "An honest server".

    Example:
        >>> import torch
        >>> from leakbound import data, models, stream
        >>> model = models.mlp(input_shape=(1, 8, 8), classes=10, generator=stream(0, "model"))
        >>> public = data.load("digits").batch(torch.arange(300))
        >>> known = known_model(Task.of(model), public, clip_norm=1.0)
        >>> round(known.success_bound(1.0, 0.001), 2) < 0.2
        True
    """
    places = np.arange(public.size) if sample is None else sample.places
    # All pairs of n gradients of P weights take n^2 P products.
    most = min(MOST_KNOWN, most_examples(task), int((MOST_PRODUCTS / len(task.parameters)) ** 0.5))
    if len(places) > most:  # random order: data are often sorted by class
        places = np.sort(np.random.default_rng(0).permutation(places)[:most])
    at = torch.from_numpy(places)
    batch = Batch(public.inputs[at], public.labels[at])
    classes = labels_known and not batch.labels.is_floating_point()
    return KnownModel(
        batch.inputs.flatten(1).double().cpu().numpy(),
        clipped_gram(task, batch, clip_norm, within_labels=classes),
        labels=batch.labels.cpu().numpy() if labels_known else None,
        guesses=guesses,
        density=1.0 if sample is None else sample.density,
        confidence=confidence,
    )


def model_probability(released: Released, spec: RiskSpec) -> Bound | None:
    """Upper bound on any attacker's probability, under a model of the data.

    Differential privacy: the trade-off function of the Gaussian mechanism at the prior-only success
    under the prior. A noisy copy: what the copy itself reveals under that prior, which covers
    everything that is ever computed from it. The bound is for each example; for several, for the
    worst one.

    Raises:
        NotApplicable: no prior can be taken from the public examples.
    """
    private = private_noise(released, spec)
    if private is None or spec.prior == "none":
        return None
    refuse_known_parts(released)
    copies = _copies(released)
    if released.criterion.domain.vocabulary is None or copies:
        refuse_other_distances(released)
    labels_known = released.threat.labels_known
    public = released.public
    domain = released.criterion.domain
    eta = released.criterion.level
    how = spec.prior, spec.components, labels_known, eta, domain
    prior, one = released.of_public(("baseline", *how), lambda: prior_of(public, *how))
    blind = min(0.0, one + math.log(released.examples))  # any of the candidates may match
    noise, scope, name = private
    if copies:
        # Near-copies have noise of their own, so the mean of m of them divides it by sqrt(m).
        alone = copies[0] / math.sqrt(near_copies.count(released, spec.people))
        logs = max(one, after_copy(alone, prior, eta=eta, baseline=one))
        success = math.exp(min(0.0, logs + math.log(released.examples)))
    else:
        success = float(identification.gaussian(noise, log_kappa=blind))
    return _stated(
        released,
        spec,
        # exp may underflow, and a bound of 0 would be wrong.
        max(success, LEAST),
        scope,
        name=f"{name} under a model",
        prior=f"{prior.name}, fitted to public examples",
        equation=scope.equation,
        assumptions=(
            f"covers {scope.attackers}",
            "examples: averaged over the model, assumed to hold for the private ones; each for "
            "itself",
            f"it does not say: {scope.not_said}",
            f"the prior-only baseline succeeds with probability {format_upper_log(blind)}",
        ),
    )


def prior_of(
    public: Batch | None,
    kind: str,
    components: int,
    labels_known: bool,
    eta: float,
    domain: Domain | None = None,
) -> tuple[Baseline, float]:
    """A prior taken from public examples, and log kappa under it at an MSE of eta, or a level.

    Of text, it is the bigram model, whatever the kind.

    A known label is not part of the release, so candidates may differ by class. A model of images
    may have a much smaller kappa than real images. The share of the others (of its class) that one
    public example matches has no such error, and the largest such share errs upwards.
    """
    if public is None or public.size < record_priors.MIN_EXAMPLES:
        raise NotApplicable(
            f"the probability needs at least {record_priors.MIN_EXAMPLES} public examples for a "
            "prior"
        )
    if domain is not None and domain.vocabulary is not None:
        text = BigramText.from_sequences(public.inputs.cpu().numpy(), domain.vocabulary)
        return text, float(text.log_kappa(eta))
    flat = public.inputs.flatten(1).double().cpu().numpy()
    labels = public.labels.cpu().numpy()
    by_class = kind == "gaussian" and labels_known  # one Gaussian per class
    try:
        prior = _fitted("mixture" if by_class else kind, flat, labels, components)
    except ValueError as error:  # such as a class with one public example
        raise NotApplicable(f"no prior can be taken from the public examples: {error}") from None
    groups = [flat[labels == y] for y in np.unique(labels)] if labels_known else [flat]
    known = float(
        np.asarray(
            record_priors.EmpiricallyBoundedPrior(prior, [*groups]).log_kappa(np.array([eta]))
        )[0]
    )
    if isinstance(prior, record_priors.Gallery) and labels_known:
        shares = [len(group) / len(flat) for group in groups]
        each = [np.asarray(record_priors.Gallery(g).log_kappa(np.array([eta])))[0] for g in groups]
        known = max(known, float(np.log(np.dot(shares, np.exp(each)))))
    return prior, min(0.0, known)


def _fitted(
    kind: str,
    flat: NDArray[Any],
    labels: NDArray[Any],
    components: int,
) -> Baseline:
    if kind == "gaussian":
        return record_priors.GaussianImages.from_samples(flat, components=components)
    if kind == "mixture":
        return record_priors.Mixture.from_samples(
            flat,
            labels=labels,
            components=components,
        )
    return record_priors.Gallery(flat)


def after_copy(
    noise_std: float,
    prior: Baseline,
    *,
    eta: float,
    baseline: float,
) -> float:
    """Log of the largest probability that one candidate from x + w comes within eta of x.

    Gaussians: given the copy and its part, x is Gaussian with a covariance that does not depend on
    the copy, so the largest mass of a ball is known. Gallery: no image is farther from the middle
    than the farthest, in units of noise.
    """
    levels = np.array([eta])
    if isinstance(prior, record_priors.Mixture):
        square = noise_std**2

        def left(variance: Any) -> Any:
            return variance * (square / (variance + square))

        parts = [
            replace(part, variances=left(part.variances), rest=left(part.rest))
            for part in prior.parts
        ]
        return float(np.asarray(record_priors.Mixture(parts, prior.weights).log_kappa(levels))[0])
    assert isinstance(prior, record_priors.Gallery)  # there is no other kind
    farthest = float(np.linalg.norm(prior.images - prior.images.mean(0), axis=1).max())
    return float(identification.gaussian.log(noise_std / farthest, log_kappa=baseline))


def attained(released: Released, spec: RiskSpec) -> Attained | None:
    """Success of working attacks on examples like the public ones; None if nothing is known.

    The attacks of a malicious server, if examples are clipped and the noise is known. Otherwise,
    and for an honest server, the prior-only baseline: in a batch, one guess for each example. The
    attacks are counted where no other example is sent along.
    """
    public = released.public
    if spec.probability is None or public is None or doubted(released):
        return None
    sample = known_sample(released)
    eta = released.criterion.level
    attacks = released.of_public(
        ("attainable", *sample_key(released)), lambda: Attainable.of(sample)
    )
    if attacks is None:
        return None
    noise = None
    malicious = released.threat.server is Server.MALICIOUS
    if malicious and released.examples == 1 and not _copies(released):
        # Where the attacker learns more than the release, the baseline still counts.
        with suppress(NotApplicable):
            private = private_noise(released, spec)
            noise = None if private is None else private[0]
    hits = [(1.0, math.inf if noise is None else noise)]

    def make() -> Attained:
        # Each of the two gets half of the failure probability.
        attained = attacks.success(hits, eta, parts=2)
        known = float(sample.log_kappa(eta, parts=2))
        assert spec.probability is not None
        return Attained(
            attack=GUESS if noise is None else attained.attack[0],
            success=nine(float(attained.success[0]), up=False),
            baseline=(nine(float(attained.baseline[0]), up=False), nine(math.exp(known), up=True)),
            accepted=spec.probability,
            confidence=sample.confidence,
            public_examples=sample.n,
        )

    return released.of_public(("attained", *sample_key(released), hits[0], eta, spec), make)


def private_noise(
    released: Released,
    spec: RiskSpec,
) -> tuple[float, Scope, str] | None:
    """The noise multiplier that protects an example, the attackers that this covers, and its name.

    For a noisy copy: in units of an example's largest distance from the middle of its range.
    """
    if spec.probability is None:
        return None
    refuse_side_information(released)
    copies = _copies(released)
    if copies:
        low, high = released.task.input_range
        size = math.prod(released.criterion.whole.shape)
        farthest = math.sqrt(size) * (high - low) / 2
        several = math.sqrt(near_copies.count(released, spec.people))  # each has noise of its own
        return copies[0] / farthest / several, COPY, "probability after a noisy copy"
    if released.defense.guarantee is not Guarantee.DIFFERENTIAL_PRIVACY:
        return None
    if released.task.coupled:
        raise NotApplicable(
            "batch norm in training mode lets an example change the gradients of others, so "
            "clipping bounds no example's part"
        )
    plan = released.task.plan
    if not plan.is_gradient and released.defense.starts is Unit.EXAMPLE:
        raise NotApplicable(
            f"the client takes {plan.steps} local steps of {plan.optimizer}, and the noise of a "
            "mechanism on gradients of examples covers one of sgd"
        )
    noise = _multiplier(released.defense) / near_copies.count(released, spec.people)
    return noise, PRIVATE, "probability"


def _copies(released: Released) -> list[float]:
    return [link.noise_std for link in released.defense.links if isinstance(link, NoisyCopy)]


def _margin(
    noise: float,
    accepted: float,
    limit: float,
) -> float:
    """How much denser than public examples private ones may be: A with F(A kappa) = accepted."""
    if noise == 0 or limit == 0:
        return 0.0
    return float(special.ndtr(special.ndtri(accepted) - 1 / noise)) / limit


def _multiplier(defense: Chain) -> float:
    """The largest multiplier of the mechanisms in the chain; each alone covers what follows it."""
    noises = [m.noise_multiplier for m in defense.links if isinstance(m, GaussianMechanism)]
    if not noises:
        raise NotApplicable("the guarantee does not rest on Gaussian noise")
    return max(noises)


PRIVATE = replace(
    identification.gaussian.scope,
    attackers="all attackers, models and gradient maps with a per-example norm of at most the clip "
    "norm, on one release; each example by itself",
    prior="other examples fixed or known, none of them near it",
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
