"""The one judge: what is known of an attack on an update becomes an assessment.

Audits, captured updates and the meter build `Evidence` and read the `Assessment`. None of them
decides, and none leaves a bound out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec.structs import replace

from leakbound._util.results import Fact
from leakbound.assess.certificate import OUTSIDE, Proof, certificate
from leakbound.assess.chance import Replay
from leakbound.assess.facts import confirmed, facts_of, without_zeros
from leakbound.assess.limits import ErrorBoundSpec, Limits, leak_map, of_release
from leakbound.assess.measure import Measured, measure, objective_of, shown
from leakbound.assess.record import Assessment, Reidentification
from leakbound.assess.reidentification import built_in, reidentify
from leakbound.assess.released import Released
from leakbound.assess.success import RiskSpec, attained, private_noise
from leakbound.assess.verdict import verdict
from leakbound.attacks.base import Attack
from leakbound.core import Batch, NotApplicable, Observation, Reconstruction, Server
from leakbound.metrics import Metric
from leakbound.randomness import stream

CONTRADICTED = (
    "a certificate says that the reconstruction is the input, but the truth says it is not: one is "
    "wrong (is this truth the batch behind the update, as fed to the model?)"
)
LABEL_ALONE = (
    "every column is known: no bound is stated for the label (leakbound calibrate --target "
    "'gain<=0.1 for the label' limits what an update adds)"
)
OF_ROUNDS = (
    "the attack may use earlier rounds of the client, and a bound of one update does not limit it: "
    "leakbound bound --deployment limits what all rounds show"
)
OWN_TRAINING = frozenset({"batch size", "local steps"})
"""What is certain of a training that was run or measured here."""


@dataclass(frozen=True)
class RiskSettings:
    """What a judge is asked for; what counts as reconstructed is the release's criterion.

    Attributes:
        error_bound: the lower bound on every attacker's mean error.
        risk: the accepted probability of a reconstruction.
        metrics: of images, in addition to the built-in ones.
        quick: whether only the criterion's score is measured.
        pictures: whether examples and reconstructions are shown.
    """

    error_bound: ErrorBoundSpec = field(default_factory=ErrorBoundSpec)
    risk: RiskSpec = field(default_factory=RiskSpec)
    metrics: tuple[Metric, ...] = ()
    quick: bool = False
    pictures: bool = True


@dataclass(frozen=True, eq=False)
class Evidence:
    """All that is known of one attack on one update.

    Attributes:
        record: what was attacked and how, without results.
        observation: what the attacker saw.
        release: the update with its noise distribution, and everything that bounds on it may use.
        attack, reconstruction: the attack and its result; None judges the update alone.
        truth: the examples behind the update; None if they are not known.
        public: the public examples that the attacker has, for the prior-only baseline.
        decoys: examples drawn like the truth that no attack saw: they show which matches are
            chance.
        certain: which of "batch size", "local steps" and "learning rate" are certain.
        agreement: the share of the update that training on the reconstruction reproduces, if known.
        decay: the weight decay that was subtracted from the update.
        facts: what the update shows without an attack.
        unbounded: why no bound holds for this update, whatever the release says.
        replay: attacks what the clients would have sent of other examples; None if it cannot, or
            takes long.
    """

    record: Assessment
    observation: Observation
    release: Released
    attack: Attack | None = None
    reconstruction: Reconstruction | None = None
    truth: Batch | None = None
    public: Batch | None = None
    decoys: Batch | None = None
    certain: Collection[str] = ()
    agreement: float | None = None
    decay: str | None = None
    facts: tuple[Fact, ...] = ()
    unbounded: str | None = None
    replay: Replay | None = None


class Contradiction(RuntimeError):
    """A proof says that the reconstruction is the input, and the given truth differs."""


def judge(
    evidence: Evidence,
    settings: RiskSettings,
) -> tuple[Assessment, dict[str, bytes]]:
    """The record with its results and verdict, and the pictures that it names.

    Draws for the bounds are named by the record's seed, so every caller gets the same numbers.

    Raises:
        Contradiction: a proof says that the reconstruction is the input, and the truth differs.
    """
    record = evidence.record
    release = evidence.release
    reconstruction = evidence.reconstruction
    domain = release.criterion.whole
    # Before the truth is seen: a proof rests on the update alone.
    proof = _proof(evidence)
    limits = _limits(evidence, settings)
    measured: Measured | None = None
    if reconstruction is not None and evidence.truth is not None and not _asks_label(release):
        measured = measure(
            evidence.truth,
            reconstruction,
            release.criterion,
            evidence.public,
            more=settings.metrics,
            quick=settings.quick,
            decoys=evidence.decoys,
            proved=proof.certificate is not None,
            once=release.of_public,
            # What read a level has tested it against trainings already.
            replay=None if _tested(reconstruction) else evidence.replay,
        )
        proof = _confirmed(proof, measured, release)
    facts = facts_of(evidence.observation, reconstruction, domain, evidence.public, evidence.facts)
    if evidence.truth is not None:
        facts = confirmed(facts, evidence.truth, domain)
    if evidence.decay is not None:
        facts = without_zeros(facts)
    reidentified = _reidentified(evidence, settings)
    record = replace(
        record,
        bounds=limits.bounds,
        attained=limits.attained,
        bounds_note=limits.note,
        attackers=limits.attackers,
        verdict=verdict(
            () if measured is None else measured.matched,
            limits.bounds,
            certified=proof.certificate is not None,
            attained=limits.attained,
            facts=facts,
            reidentified=reidentified,
        ),
        facts=facts if settings.pictures else tuple(fact.withheld for fact in facts),
        certificate=proof.certificate,
        layer_input=proof.layer_input,
        **({} if measured is None else measured.fields),
        reidentified=reidentified,
    )
    if reconstruction is None:
        return record, {}
    record = replace(record, problem=reconstruction.problem, objective=objective_of(reconstruction))
    if _asks_label(release):
        return record, {}
    leaks = None
    if settings.pictures and any(bound.on_error for bound in limits.bounds):
        leaks = leak_map(release, settings.error_bound)
    fields, files = shown(
        release.criterion,
        None if measured is None else measured.paired.truth.inputs,
        reconstruction.inputs if measured is None else measured.paired.inputs,
        images=settings.pictures,
        leaks=leaks,
        baseline=None if measured is None else measured.guess,
        agreement=reconstruction.agreement if measured is None else measured.agreement,
    )
    values = fields.pop("values", None)
    if record.capture is not None:  # where there may be no truth beside which they could stand
        record = replace(record, capture=replace(record.capture, values=values))
    return replace(record, **fields), files


def judge_given(
    evidence: Evidence, settings: RiskSettings
) -> tuple[Assessment, dict[str, bytes], str | None]:
    """As `judge`, with a truth that a person gave, and a warning.

    If a proof contradicts the truth, the update still proves somebody's input: it is judged without
    the truth, and the third value says so.
    """
    try:
        return *judge(evidence, settings), None
    except Contradiction as error:
        return *judge(dataclasses.replace(evidence, truth=None), settings), str(error)


def _asks_label(release: Released) -> bool:
    known = release.criterion.known
    return known is not None and known.everything


def _tested(reconstruction: Reconstruction) -> bool:
    return any(fact.kind == "attribute" for fact in reconstruction.facts)


def _proof(evidence: Evidence) -> Proof:
    reconstruction = evidence.reconstruction
    # A proof is for plain gradients, which a declared defense may have changed.
    if evidence.attack is None or reconstruction is None or evidence.release.defense.links:
        return Proof()
    return certificate(
        evidence.observation,
        evidence.attack,
        reconstruction,
        evidence.agreement,
        evidence.certain,
        evidence.decay,
    )


def _confirmed(
    proof: Proof,
    measured: Measured,
    release: Released,
) -> Proof:
    """The proof of a reconstruction that the truth confirms; none if a criterion is too fine."""
    if any(measured.matched):
        return proof
    criterion = release.criterion
    low, high = criterion.domain.input_range
    truth = criterion.counted(measured.paired.truth.inputs)
    distance = criterion.domain.distance(truth, criterion.counted(measured.paired.inputs))
    # Near enough without a match: a fixed candidate is as near, as for an image of one color. The
    # update proves the input all the same.
    if proof.certificate is None or bool((distance <= criterion.within).any()):
        return proof
    if not bool((distance <= OUTSIDE * (high - low)).any()):
        raise Contradiction(CONTRADICTED)
    return Proof()  # a proof holds up to rounding, which a threshold of many decibels excludes


def _reidentified(
    evidence: Evidence,
    settings: RiskSettings,
) -> tuple[Reidentification, ...]:
    """Whether each built-in matcher names the right examples; empty if there is no gallery."""
    answer = evidence.reconstruction
    release = evidence.release
    decoys = evidence.decoys
    if answer is None or evidence.truth is None or decoys is None or settings.quick:
        return ()
    if release.criterion.known is not None:
        # Every answer has the known part, which names its example without the update: neither 1 / M
        # nor F(1 / M) holds.
        return ()
    noise = None
    if _unbounded(evidence) is None:
        with suppress(NotApplicable):
            private = private_noise(release, settings.risk)
            noise = None if private is None else private[0]
    try:
        return tuple(
            reidentify(
                evidence.truth,
                answer.inputs,
                decoys,
                release.criterion,
                matcher,
                persons=release.persons,
                noise_multiplier=noise,
                source=stream(evidence.record.seed, "gallery"),
            )
            for matcher in built_in(release.criterion.domain)
        )
    except NotApplicable:
        return ()


def _unbounded(evidence: Evidence) -> str | None:
    """Why no bound of the update limits the attack; None if a bound may."""
    across = evidence.attack is not None and evidence.attack.across_rounds
    if evidence.unbounded is None and across and evidence.observation.history:
        return OF_ROUNDS
    return evidence.unbounded


def _limits(evidence: Evidence, settings: RiskSettings) -> Limits:
    """All bounds on the release, or why there are none; a guess without the update always counts"""
    release = evidence.release
    spec = settings.error_bound
    if _asks_label(release):
        return Limits(note=LABEL_ALONE)
    unbounded = _unbounded(evidence)
    if unbounded is not None:
        honest = dataclasses.replace(release.threat, server=Server.HONEST)
        guess = attained(dataclasses.replace(release, threat=honest), settings.risk)
        return Limits(note=unbounded, attained=guess)
    source = stream(evidence.record.seed, "bounds", spec.kind, release.cohort[0])
    return of_release(release, spec, settings.risk, source)
