"""One simulated update, attacked and bounded, from a model and a batch in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from leakbound import check, client, registry
from leakbound._util import copies
from leakbound._util.formats import format_number
from leakbound._util.text import digest, plain
from leakbound.assess import header as headers
from leakbound.assess import record as records
from leakbound.assess.chance import halves
from leakbound.assess.criterion import Criterion
from leakbound.assess.judge import Evidence, RiskSettings
from leakbound.assess.limits import ErrorBoundSpec, leak_map, of_release
from leakbound.assess.success import RiskSpec
from leakbound.attacks import Attack
from leakbound.attacks.knowing import with_known
from leakbound.attacks.pace import noted
from leakbound.audit import experiment
from leakbound.audit.attacked_round import attacked_round
from leakbound.audit.context import one_thread
from leakbound.audit.plan import build_attack, build_defense
from leakbound.core import Batch, LocalPlan, Loss, NotApplicable, Reconstruction, Task, ThreatModel
from leakbound.defenses import Chain, Defense, chain
from leakbound.domains import Domain, of_shape
from leakbound.domains.known import as_marked
from leakbound.losses import check_fit, named
from leakbound.pairing import pair
from leakbound.protocol import Round, play
from leakbound.randomness import stream
from leakbound.report.template import Presented
from leakbound.risk.release_bounds import ReleaseBounds
from leakbound.task import trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIVEN = "given"
"""The name of unnamed data and models in records."""


@dataclass(frozen=True, eq=False)
class Simulation(Presented):
    """What an attack reconstructed from a simulated update, and what bounds every attack.

    `truth` (B, *S) are the clients' examples, `reconstruction` is the attack's result in the order
    of the truth. `round` is what was sent and what the attacker saw. `pictures` are PNG by file
    name.
    """

    assessment: records.Assessment
    truth: Tensor
    reconstruction: Tensor
    round: Round
    answer: Reconstruction
    pictures: Mapping[str, bytes]

    @property
    def verdict(self) -> records.Verdict:
        """What the attack achieved, or what the bounds exclude."""
        assert self.assessment.verdict is not None  # else the attack does not apply
        return self.assessment.verdict

    @property
    def scores(self) -> records.Values:
        """The criterion's score of every example, such as its PSNR in dB."""
        return self.assessment.scores

    @property
    def metrics(self) -> dict[str, records.Values]:
        """One number per example, by metric."""
        return self.assessment.metrics

    def _figure(self) -> Figure:
        from leakbound.report import figures

        unit = self.assessment.criterion.unit
        captions = [f"{format_number(value)} {unit}" for value in self.scores]
        span = self.round.observation.task.input_range
        return figures.examples(self.truth, self.reconstruction, captions, span)

    def _repr_html_(self) -> str:
        return experiment.Result(self.assessment, dict(self.pictures))._repr_html_()


def simulate(
    model: nn.Module,
    batch: Batch | tuple[Tensor, Tensor] | Sequence[Batch],
    *,
    defense: Defense | str | None = None,
    attack: Attack | str = "inverting_gradients",
    seed: int = 0,
    public: Batch | None = None,
    psnr: float = 20.0,
    share: float = 0.9,
    threat: ThreatModel | None = None,
    plan: LocalPlan | None = None,
    classes: int | None = None,
    input_range: tuple[float, float] = (0.0, 1.0),
    domain: Domain | None = None,
    loss: str | Loss = "cross_entropy",
    error_bound: str = "trace",
    probability: float | None = 0.001,
    people: int | None = None,
    fresh: bool = False,
    round: int | None = None,
) -> Simulation:
    """Attack the update that a client would send for this batch, and judge the reconstruction.

    The attacker knows labels and defense, unless `threat` says otherwise; no attack sees the batch.

    Args:
        model: with the weights that the server sends; returns (B, K) for inputs (B, *S). Examples
            are converted to the type of its weights.
        batch: what one client holds, `Batch(inputs, labels)` or both as a pair; or one batch per
            client if the defense sums several.
        defense: a defense, or its name with settings, as in "gaussian_noise,noise_std=0.01".
        attack: an attack, or its name with settings, as in "inverting_gradients,steps=500".
        seed: names every draw; the same seed gives the same numbers.
        public: examples of the same kind that the attacker has. Bounds need them, and count them
            as independent: give one of each photograph or person. A random half is kept from the
            attack: it shows which matches are chance.
        psnr: PSNR in dB from which an example counts as reconstructed.
        share: share of right columns or tokens from which a row or sequence does.
        threat: what the attacker knows.
        plan: the client's local training; one step on the whole batch by default.
        classes: labels run from 0 to `classes` - 1; needed if the attacker does not know them.
        input_range: lowest and highest value of an input.
        domain: the form of one example; by default images for inputs (C, H, W), else values.
        loss: what the client trains on, as in `Task.of`; labels are what it takes.
        error_bound: which bound on every attacker's error: "trace" or "full" (estimates),
            "weiss_weinstein" (proven) or "none".
        probability: the accepted probability of a reconstruction; None requests no such bound.
        people: the largest number of one person's examples in the update; None counts as 1.
        fresh: the weights depend on no public or private example, such as random ones. Only then
            is there a bound for an honest server that sends this model.
        round: the attacked round of a training of these clients alone, in which each holds its
            batch in every round. None is the first in which the defense has an effect, and there
            are bounds for the first round only.

    Source: the round is that of docs/attacks.md; the verdict that of docs/evidence.md.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        >>> batch = Batch(torch.rand(1, 1, 8, 8), torch.tensor([3]))
        >>> found = simulate(model, batch, attack="linear_inversion")
        >>> found.verdict, found.scores[0] > 60
        ('exposed', True)
    """
    if round is not None:
        check.count(round=round)
    copies.refuse(model)
    clients, public = typed(model, clients_of(batch), public)
    built, defense_info = defense_of(defense)
    built_attack, attack_info = _attack(attack)
    shape = tuple(clients[0].inputs.shape[1:])
    threat = threat or ThreatModel(labels_known=not named(loss).of_inputs)
    domain = domain or of_shape(shape, input_range)
    threat = replace(threat, known=as_marked(domain, threat.known))
    every = public
    public, decoys = halves(public)
    task = Task.of(
        model,
        loss=loss,
        plan=plan,
        classes=classes,
        public=public,
        domain=domain,
    )

    def round_of(batches: Sequence[Batch], *draws: str | int) -> Round:
        # One source for each client, and the last one for links on their sum.
        sources = [stream(seed, *draws, "defense", i) for i in range(len(clients) + 1)]
        return attacked_round(
            task,
            batches,
            built,
            sources,
            number=round,
            threat=threat,
            attack=built_attack,
            auxiliary=public,
        )

    with one_thread():
        task = check_outputs(task, clients[0])
        played = round_of(clients)
        answer = built_attack(played.observation, stream(seed, "attack", attack_info.name))
        answer = noted(with_known(played.observation, answer))
    criterion = Criterion.of(domain, psnr=psnr, share=share, known=threat.known)
    about = headers.header(
        digest(
            [attack_info.hash, repr(built), seed, plain(threat), named(loss).name, round],
        ),
        attack_info,
        defense_info,
        headers.model_info(type(model).__name__, task),
        played.observation,
        criterion,
        source=GIVEN,
        seed=seed,
    )
    with one_thread():
        evidence = Evidence(
            about,
            played.observation,
            experiment.released(played, criterion, threat, every, fresh=fresh),
            built_attack,
            answer,
            truth=played.truth,
            public=public,
            decoys=decoys,
            replay=experiment.replay_of(built_attack, played, round_of, seed),
        )
        settings = RiskSettings(ErrorBoundSpec(error_bound), RiskSpec(probability, people=people))
        record, files = experiment.judged(played, evidence, settings)
    paired = pair(played.truth, answer, domain.costs)
    return Simulation(record, paired.truth.inputs, paired.inputs, played, answer, files)


def error_bound(
    model: nn.Module,
    batch: Batch | tuple[Tensor, Tensor] | Sequence[Batch],
    defense: Defense | str,
    *,
    public: Batch | None,
    kind: str = "full",
    prior: str = "gaussian",
    components: int = 32,
    images: int = 16,
    probability: float | None = 0.001,
    seed: int = 0,
    psnr: float = 20.0,
    share: float = 0.9,
    threat: ThreatModel | None = None,
    classes: int | None = None,
    input_range: tuple[float, float] = (0.0, 1.0),
    domain: Domain | None = None,
    loss: str | Loss = "cross_entropy",
    fresh: bool = False,
) -> ReleaseBounds:
    """Bounds on every attacker for the update that a client would send for this batch.

    Arguments are as in `simulate`; no attack runs. The labels of `batch` count as known. Only a
    `defense` with a known noise distribution has a bound.

    `kind` is "full" (with a leak map) or "trace" (faster), both estimates that prove nothing, or
    "weiss_weinstein" (slow, proven, also for models with non-smooth activations). `prior` is
    "gaussian", "isotropic" or "flat": fitted to `public`, in its leading `components` directions.
    The information is averaged over `images` draws of the prior.
    `probability` is the accepted probability of a reconstruction, for defenses with differential
    privacy.

    Source: docs/error_bounds.md; paper A, sections 2.2 and 3.1.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10))
        >>> from leakbound import data
        >>> digits = data.load("digits")
        >>> public, batch = digits.batch(torch.arange(500)), digits.batch(torch.tensor([1000]))
        >>> found = error_bound(model, batch, "gaussian_noise,noise_std=0.1", public=public)
        >>> found.leak_map().shape, found.error.covers, found.error.psnr < 20
        (torch.Size([1, 1, 8, 8]), 'estimate', True)
    """
    copies.refuse(model)
    clients, public = typed(model, clients_of(batch), public)
    built, _ = defense_of(defense)
    domain = domain or of_shape(clients[0].inputs.shape[1:], input_range)
    task = Task.of(
        model,
        loss=loss,
        classes=classes,
        public=public,
        domain=domain,
    )
    threat = threat or ThreatModel()
    threat = replace(threat, known=as_marked(domain, threat.known))
    spec = ErrorBoundSpec(kind, prior, components, images)
    sources = [stream(seed, "defense", i) for i in range(len(clients) + 1)]
    with one_thread():
        task = check_outputs(task, clients[0])
        played = play(
            task,
            clients,
            built,
            sources,
            threat=threat,
            auxiliary=public,
        )
        criterion = Criterion.of(domain, psnr=psnr, share=share, known=threat.known)
        released = experiment.released(
            played,
            criterion,
            threat,
            public,
            fresh=fresh,
        )
        limits = of_release(released, spec, RiskSpec(probability), stream(seed, "bounds", kind))
        known = leak_map(released, spec) if any(b.on_error for b in limits.bounds) else None
    return ReleaseBounds(limits.bounds, limits.note, criterion.info, limits.attained, known)


def clients_of(batch: Batch | tuple[Tensor, Tensor] | Sequence[Batch]) -> list[Batch]:
    if isinstance(batch, Batch):
        return [batch]
    parts = list(batch) if isinstance(batch, tuple | list) else []
    if len(parts) == 2 and all(isinstance(part, Tensor) for part in parts):
        return [Batch(parts[0], parts[1])]
    if parts and all(isinstance(part, Batch) for part in parts):
        return parts
    raise ValueError(
        f"batch is a {type(batch).__name__}; give leakbound.Batch(inputs, labels), both as a pair, "
        "or a list with one Batch per client"
    )


def typed(
    model: nn.Module,
    clients: Sequence[Batch],
    public: Batch | None,
) -> tuple[list[Batch], Batch | None]:
    """The batches in the type of the model's trained weights, as its clients pass them to it."""
    kind = next((weight.dtype for weight in trained(model).values()), None)

    def cast(value: Tensor) -> Tensor:
        # A tensor of inference mode can be in no gradient.
        value = value.clone() if value.is_inference() else value
        return value.to(kind) if value.is_floating_point() else value

    def converted(batch: Batch) -> Batch:
        inputs = cast(batch.inputs)
        labels = cast(batch.labels)
        if labels.ndim == 1 and not labels.is_floating_point():
            labels = labels.long()
        # What bounds count of public examples is kept with the batch, for the next call.
        same = inputs is batch.inputs and labels is batch.labels
        return batch if same else Batch(inputs, labels)

    return [converted(batch) for batch in clients], public and converted(public)


def check_outputs(task: Task, batch: Batch) -> Task:
    """The task with a loss that fits the model's outputs.

    A model that cannot take the inputs or does not repeat itself is rejected, and a loss that does
    not take its outputs.
    """
    inputs = batch.inputs
    try:
        task, output = client.fitted(task, inputs)
    except (NotApplicable, client.WrongOutput):
        raise
    except Exception as error:
        raise ValueError(client.unfit(task, inputs, error)) from error
    client.refuse_changing(task, inputs[:2])
    loss = named(task.loss)
    if wrong := loss.misfit(output, len(inputs)):
        raise ValueError(wrong)
    if loss.targets == "classes" and batch.labels.ndim == 1:
        check.labels(batch.labels, output.shape[1])
    check_fit(loss, output, batch.labels)
    return task


def defense_of(defense: Defense | str | None) -> tuple[Chain, records.DefenseInfo]:
    if isinstance(defense, Defense):
        built = defense if isinstance(defense, Chain) else chain(defense)
        return built, headers.defense_info(built)
    links = registry.specs_of("defense", registry.NO_DEFENSE if defense is None else defense)
    built = build_defense(links)
    return built, headers.defense_info(built, links)


def _attack(attack: Attack | str) -> tuple[Attack, records.AttackInfo]:
    if isinstance(attack, Attack):
        return attack, headers.attack_info(attack)
    (spec,) = registry.specs_of("attack", attack)
    built = build_attack(spec)
    return built, headers.attack_info(built, spec.name)
