"""Attacks on captured updates, from files to records and a report."""

from __future__ import annotations

import json
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch import nn

from leakbound import check, client, registry
from leakbound._util import files, stops
from leakbound._util import pictures as html
from leakbound._util.formats import format_number
from leakbound._util.memory import GB, Allowed
from leakbound._util.text import digest, plain
from leakbound.assess.criterion import Criterion
from leakbound.assess.record import KEYS, SCHEMA, UNDECIDED, Assessment, Verdict, encode
from leakbound.assess.verdict import of_run
from leakbound.attacks import Attack, AttributeFilter, FedAvgMatching, LinearInversion
from leakbound.attacks.knowing import with_known
from leakbound.attacks.matching.cost import StepCost
from leakbound.attacks.matching.objective import MOST_ROUNDS
from leakbound.attacks.matching.settings import MatchingSettings
from leakbound.attacks.pace import Pace, ended_by_interrupt, noted, planned
from leakbound.attacks.planted import Front
from leakbound.audit import plan as plans
from leakbound.audit.context import one_line, one_thread, usable
from leakbound.audit.journal import Journal
from leakbound.audit.run_file import machine, versions
from leakbound.captured import budget, server
from leakbound.captured.assess import (
    Case,
    check_truth,
    contradicted,
    header,
    judged,
    known_facts,
    public_examples,
    read_truth,
)
from leakbound.captured.capture import Capture, Given, Skipped, load, none_left
from leakbound.captured.findings import Finding, assumed_steps, searched_steps
from leakbound.captured.observe import (
    SEARCH,
    InferredContext,
    TrainingInfo,
    infer_context,
    task_of,
)
from leakbound.core import Batch, LocalPlan, Loss, NotApplicable, Observation, Reconstruction
from leakbound.domains import Domain, of_shape, smooth_axes
from leakbound.domains.known import KnownValues, known_parts
from leakbound.losses import named
from leakbound.randomness import stream
from leakbound.registry import Spec
from leakbound.report.template import Presented

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ONE_STEP = ("linear_inversion", "inverting_gradients", "strong_matching")
SMALL = ("inverting_gradients_large_steps",)
SMOOTH = ("dlg",)
"""Where activations are smooth, L-BFGS ends at rounding and the other searches far from it. Behind
two convolutions with sigmoids, after one step of SGD, it reconstructs the digit of 8 of 8 updates;
`inverting_gradients` in 300 steps that of none (docs/results).
"""
SEVERAL_STEPS = ("linear_inversion", "inverting_gradients", "fed_avg_matching")
MANY = ("linear_inversion", "inverting_gradients")
BY_DOMAIN: dict[str, tuple[str, ...]] = {
    "tokens": ("token_rows", "token_span", "adapter_pursuit", "adapter_words"),
    "table": ("linear_inversion", "touched_rows", "span_decoding", "tab_leak"),
}
"""The attacks that are for one domain alone, by its name; the searches are for the others."""
SEARCHES = ("tab_leak",)
SMOOTHER = {
    "inverting_gradients": Spec("inverting_gradients", (("total_variation", 0.01),)),
}
"""Attacks with the settings that volumes need: an update has few numbers for each voxel. One step
of a MONAI U-Net on 32 x 32 x 32 voxels, 4 draws: 5.4 to 8.0 dB above the baseline, 4.4 to 7.6 dB
with the weight that images have.
"""
FEW = 8
LOTS = 64
"""The most examples for the longest search by default, and the number above which few attacks run.
"""
LARGEST = 10**8
MOST_PICTURES = 6
LEAST = 2.0
"""Seconds below which a search for the number of local steps does not begin."""
OWN_DATA = "captured updates"
RECORDS = "records.jsonl"
SERVER_SECONDS = 5.0
SERVER_SHARE = 20
"""A malicious server is simulated for so many seconds, and in this part of the time left."""
Made = tuple[Assessment, dict[str, bytes], Reconstruction | None]
"""A record, its pictures, and the attack's answer."""
PLANTED = ("robbing_the_fed", "linear_trap", "trap_weights")
Watch = Callable[[int, int, str, float | None], None]
"""Called with attacks done, attacks in total, what runs now, and seconds left (None: unknown)."""


@dataclass(frozen=True)
class Job:
    """One attack on one update, by their positions; zero steps are a closed form.

    `cost` is that of a step, in gradients of one example.
    """

    at: int
    rank: int
    spec: Spec
    steps: int
    cost: int


@dataclass
class Work:
    """Attacks on all updates: closed forms first, then searches, those of few steps first.

    `jobs` have not ended, in the order in which they run; `made` holds the results of the others,
    by the positions of update and attack. `measured` is the cost of simulated training, once it is
    needed: large models take minutes. All updates are of one model. `told` gets the first case
    then. `asked` is what a malicious server gets from an update's plan.
    """

    pace: Pace
    cases: list[Case]
    settings: Settings
    allowed: Allowed
    pictures: bool
    skipped: Sequence[Skipped]
    watch: Watch
    told: Callable[[Case], None]
    made: dict[tuple[int, int], Made] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    measured: tuple[StepCost | None] | None = None
    _paid: float = 0.0
    _spent: float = 0.0
    _began: float = 0.0
    asked: dict[int, tuple[LocalPlan, str | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for at in range(len(self.cases)):
            self.again(at)

    @property
    def total(self) -> int:
        return len(self.made) + len(self.jobs)

    @property
    def share(self) -> float:
        """Seconds of the remaining time for one of the remaining attacks."""
        return self.pace.left / len(self.jobs)

    def tell(self, what: str, step: int = 0) -> None:
        """Report the progress, after `step` steps of the first attack."""
        self.watch(len(self.made), self.total, what, self._left(step) if self.jobs else None)

    def again(self, at: int) -> None:
        """Choose the attacks on an update again, after more is inferred of it."""
        seen = self.cases[at].inferred.observation
        cost = seen.examples * seen.task.plan.steps
        jobs = [job for job in self.jobs if job.at != at]
        for rank, spec in enumerate(_attacks(self.settings, self.cases[at].inferred)):
            if (at, rank) not in self.made:
                jobs.append(Job(at, rank, spec, planned(plans.build_attack(spec)), cost))
        # Closed forms first: a run that is stopped early has them all.
        self.jobs = sorted(jobs, key=lambda job: (job.steps, job.at))

    def run(self) -> Made:
        """Run the next attack."""
        job = self.jobs[0]
        _ask_server(self, job.at)
        case = self.cases[job.at]
        self._began = time.monotonic()
        tell = partial(self.tell, f"{job.spec.name} · {case.capture.name}")
        tell()
        made = self._attack(job, tell)
        if stops.came() == signal.SIGTERM:  # Ctrl-C ends a search with its best candidate
            stops.check()
        self.jobs.pop(0)
        self.made[job.at, job.rank] = made
        if job.steps and made[0].status == "ok":
            self._spent += time.monotonic() - self._began
            self._paid += job.steps * job.cost
        return made

    def _measure(self) -> StepCost | None:
        """Measure what simulated training costs, and add it to what is known of every update."""
        self.tell("measuring the cost of a search step")
        # A quarter of the time: what is left is for attacks.
        cost = budget.step_cost(
            self.cases[0].inferred,
            self.pace.left / 4,
            self.allowed.room,
            engines=any(job.steps for job in self.jobs),
        )
        self.measured = (cost,)
        for at in range(len(self.cases)):
            self.note_cost(at)
        self.told(self.cases[0])
        return cost

    def note_cost(self, at: int) -> None:
        """Add the cost of a search step to what is known of an update."""
        inferred = budget.with_cost(self.cases[at].inferred, self.cost_of(at))
        self.cases[at] = replace(self.cases[at], inferred=inferred)

    def cost_of(self, at: int) -> StepCost | None:
        """The cost of simulated training for an update's batch and local steps."""
        cost = self._measure() if self.measured is None else self.measured[0]
        seen = self.cases[at].inferred.observation
        return None if cost is None else cost.of(seen.task, seen.examples)

    def _attack(self, job: Job, tell: Callable[[int], None]) -> Made:
        """Run an attack in a form that fits into its share of the time and into memory."""
        room = self.allowed.room
        fit = budget.Budgeted()
        share = self.share
        attack = plans.build_attack(job.spec)
        if job.steps and attack.step_trainings:
            history = self.cases[job.at].inferred.observation.history
            rounds = 1 + len(history[1 - MOST_ROUNDS :]) * attack.across_rounds
            cost = self.cost_of(job.at)
            share = self.share
            fit = budget.search_fit(cost, room, share, attack, rounds)
            if math.isfinite(share) and fit.after < share:
                share -= fit.after

        def judging() -> budget.Budgeted:
            return budget.training_fit(self.cost_of(job.at), room, self.pace.left)

        with (
            Pace(share if job.steps else None, tell),
            client.frugal(None if fit.cost is None else fit.cost.form),
        ):
            return _run(self, job, fit.refused, judging)

    def pass_over(self, why: str) -> None:
        """Record the next attack as one that did not run."""
        job = self.jobs.pop(0)
        made = _run(self, job, why)
        self.made[job.at, job.rank] = made

    def outcome(self) -> UpdateResult:
        """The results so far, by update and attack."""
        ordered = [self.made[key] for key in sorted(self.made)]
        pictures = dict[str, bytes]()
        for _, shown, _ in ordered:
            pictures |= shown
        return UpdateResult(
            tuple(record for record, _, _ in ordered),
            tuple(case.inferred for case in self.cases),
            tuple(answer for _, _, answer in ordered),
            unended=len(self.jobs),
            pictures=pictures,
            skipped=tuple(self.skipped),
        )

    def _left(self, step: int = 0) -> float | None:
        """Seconds until all have ended, after `step` steps of the first; None if unknown."""
        limit = self.pace.left
        begun = min(step, self.jobs[0].steps) * self.jobs[0].cost
        paid = self._paid + begun
        if not paid:
            return limit if math.isfinite(limit) else None
        spent = self._spent + (time.monotonic() - self._began if step else 0.0)
        rest = sum(job.steps * job.cost for job in self.jobs) - begun
        return min(limit, spent / paid * rest)


@dataclass(frozen=True, eq=False)
class UpdateResult(Presented):
    """The result: one record and answer per attack on an update, and where all was written.

    Without the truth the records have no metrics. `inferred` states for each update what was
    inferred from it and what was assumed; `unended` counts attacks that did not begin in time.
    `skipped` are updates that could not be attacked.
    """

    records: tuple[Assessment, ...]
    inferred: tuple[InferredContext, ...]
    answers: tuple[Reconstruction | None, ...]
    folder: Path | None = None
    page: Path | None = None
    unended: int = 0
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    skipped: tuple[Skipped, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """How many records ended with each verdict, as not applicable or as failed."""
        return dict(sorted(Counter(record.end for record in self.records).items()))

    @property
    def verdict(self) -> Verdict:
        """The verdict of all attacks on all updates together."""
        return of_run(self.records)

    @property
    def best(self) -> Reconstruction | None:
        """The reconstruction that explains most of its update, among all that explain some."""
        sound = [
            (_direction(record), answer)
            for record, answer in zip(self.records, self.answers, strict=True)
            if answer is not None and answer.problem is None
        ]
        # Of equal ones the first.
        return max(sound, key=lambda row: row[0], default=(0.0, None))[1]

    def _figure(self) -> Figure:
        from leakbound.report import figures

        return figures.assessments(self.records)

    def _repr_html_(self) -> str:
        rows = [
            (
                one.attack.name,
                one.end,
                format_number(_direction(one)),
                one.certificate or one.layer_input or "",
            )
            for one in self.records
        ]
        head = ("attack", "verdict", "share explained", "what is proved")
        shown = [html.picture(content, "reconstructed") for content in self.pictures.values()]
        return html.block(self.verdict, html.table(head, rows), *shown[:MOST_PICTURES])


@dataclass(frozen=True)
class Settings:
    """How updates are attacked, the same for all of a run.

    Attributes:
        input_shape: of one input without the batch; that of `domain` if it is left out.
        input_range: lowest and highest value of the model's input.
        classes: labels run from 0 to `classes` - 1.
        attacks: attacks, by name with settings; None is all suitable ones, from cheap to strong.
        public: a data source of the same kind.
        psnr, share: from which PSNR, or share of right columns or tokens, an example counts as
            reconstructed.
        seed: names every draw of an attack.
        seconds: after them, searches stop and no further attack begins. A search whose first step
            would take longer than its share does not run.
        memory: gigabytes (10^9 bytes) for the whole process; None is what is free. Searches save
            memory if they have to, and do not run if that is not enough.
        search: most seconds for one update's number of local steps.
        domain: what an input is, if it is a row of a table or text.
        loss: what the client trained on, as in `Task.of`.
        schema: the file of a table's schema, for `public` and the truth.
        people: the largest number of one person's examples in an update, for bounds; None is 1.
    """

    input_shape: tuple[int, ...] = ()
    input_range: tuple[float, float] = (0.0, 1.0)
    classes: int | None = None
    attacks: str | Sequence[str | Spec] | None = None
    public: str | None = None
    psnr: float = 20.0
    seed: int = 0
    seconds: float | None = None
    memory: float | None = None
    search: float = SEARCH
    share: float = 0.9
    domain: Domain | None = None
    loss: str | Loss = "cross_entropy"
    schema: str | None = None
    people: int | None = None

    @property
    def form(self) -> Domain:
        """What one input is."""
        return self.domain or of_shape(self.input_shape, self.input_range)

    @cached_property
    def specs(self) -> tuple[Spec, ...] | None:
        """The attacks with their settings; one with a list of values is one for each value."""
        if self.attacks is None:
            return None
        several = [self.attacks] if isinstance(self.attacks, str | Spec) else self.attacks
        if not isinstance(several, Sequence) or any(
            not isinstance(attack, str | Spec) for attack in several
        ):
            raise ValueError(
                f"attacks is {str(self.attacks)[:60]!r}; give names, with settings as in "
                "'inverting_gradients,steps=500'"
            )
        specs: list[Spec] = []
        for attack in several:
            if isinstance(attack, Spec):
                specs.append(attack)
                continue
            for grid in registry.grids_of("attack", registry.row_of("attack", attack)):
                specs += grid
        return tuple(specs)

    def __post_init__(self) -> None:
        named(self.loss)
        if self.domain is not None and not isinstance(self.domain, Domain):
            raise ValueError(
                f"domain is {str(self.domain)[:60]!r}; give a leakbound.domains.Domain"
            )
        self._check_shape()
        limits = self.input_range
        if not isinstance(limits, Sequence) or len(limits) != 2 or isinstance(limits, str):
            raise ValueError(f"input_range is {limits!r}; give two numbers, low and high")
        low, high = limits
        check.finite_number(input_range=low)
        check.finite_number(input_range=high)
        if not low < high:
            raise ValueError(f"input_range is {limits}; give low < high")
        check.given(check.count, classes=self.classes, people=self.people)
        check.non_negative(seed=self.seed, search=self.search)
        check.given(check.positive, seconds=self.seconds, memory=self.memory)
        for spec in self.specs or ():
            plans.build_attack(spec)

    def _check_shape(self) -> None:
        if not isinstance(self.input_shape, Sequence):
            raise ValueError(
                f"input_shape is {self.input_shape!r}; give the shape of one input without the "
                "batch, such as (1, 28, 28)"
            )
        shape = tuple(self.input_shape)
        if self.domain is not None:
            shape = shape or self.domain.shape
            if shape != self.domain.shape:
                raise ValueError(
                    f"input_shape is {shape}, but a row of the table has {self.domain.shape}"
                )
        object.__setattr__(self, "input_shape", shape)
        if not shape:
            raise ValueError("input_shape is empty; give the shape of one input, such as 1,28,28")
        for size in shape:
            check.count(input_shape=size)
        if math.prod(shape) > LARGEST:
            raise ValueError(
                f"input_shape is {shape}, which is more than {LARGEST:,} numbers; give "
                "the shape of one input"
            )


@dataclass(frozen=True)
class Output:
    """Where records, pictures and report.html go, and the model's name in them.

    Without a `folder` nothing is written.
    """

    folder: Path | None = None
    model: str = ""
    pictures: bool = True


def _ignored(*_: object) -> None:
    """Hears nothing."""


@dataclass(frozen=True)
class Listener:
    """What a caller hears while attacks run: progress, what was inferred, and every record.

    `cost` is called once simulated training is measured, before the first search.
    """

    progress: Watch = _ignored
    inferred: Callable[[Case], None] = _ignored
    cost: Callable[[Case], None] = _ignored
    ended: Callable[[Assessment], None] = _ignored


def attack_update(
    capture: Capture | Given,
    model: nn.Module,
    settings: Settings,
    training: TrainingInfo | None = None,
    *,
    truth: Batch | Path | str | None = None,
    output: Output | None = None,
    listener: Listener | None = None,
    device: str = "cpu",
) -> UpdateResult:
    """Attack one captured update: what `load` returned, or what it takes.

    Args:
        capture: the update, best from `load(after, before)`.
        model: the architecture; its weights count only if the capture has none before.
        settings: how it is attacked.
        training: what is known of the local training, and of the defense.
        truth: the true batch or a file of it, which no attack sees.
        output: where the results are written; None writes nothing.
        listener: receives the progress of the run.
        device: where torch computes, such as "cuda".

    Example:
        >>> import torch, leakbound as lb
        >>> net = lb.models.mlp(input_shape=(1, 4, 4), classes=3, generator=lb.stream(0, "model"))
        >>> task, batch = lb.Task.of(net), lb.Batch(torch.rand(1, 1, 4, 4), torch.tensor([2]))
        >>> parts = task.unflatten(lb.client.gradient(task, batch.inputs, batch.labels).detach())
        >>> update = load(parts, dict(net.state_dict()), kind="gradient")
        >>> settings = Settings((1, 4, 4), attacks="linear_inversion")
        >>> attack_update(update, net, settings, truth=batch).verdict
        'exposed'
    """
    loaded = capture if isinstance(capture, Capture) else load(capture)
    return attack_all(
        [loaded],
        model,
        settings,
        training,
        truth=truth,
        output=output,
        listener=listener,
        device=device,
    )


def attack_all(
    captures: Sequence[Capture],
    model: nn.Module,
    settings: Settings,
    training: TrainingInfo | None = None,
    *,
    truth: Batch | Path | str | None = None,
    output: Output | None = None,
    listener: Listener | None = None,
    skipped: Sequence[Skipped] = (),
    device: str = "cpu",
) -> UpdateResult:
    """Attack several captured updates of one model, the cheapest attacks first; as `attack_update`.

    Every update is read before the first attack. An update that cannot be attacked is skipped, if
    there are others: the result and the report say why. `skipped` are updates that `load_all` could
    not read.

    After `settings.seconds`, or on Ctrl-C, the running search
    ends with its best candidate so far, and attacks that did not begin have no record. All results
    are written to the folder; an interrupt is then raised again.

    Raises:
        ValueError: wrong arguments, or no update can be attacked.
    """
    output = output or Output()
    listener = listener or Listener()
    watch = listener.progress
    if not captures:
        raise ValueError("captures is empty; give at least one update")
    if truth is not None and len(captures) > 1:
        raise ValueError(f"truth is that of one update, and {len(captures)} were given; name one")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {str(model)[:60]!r}; give a torch.nn.Module")
    allowed = Allowed(
        None if settings.memory is None else GB * settings.memory,
        usable(device),
    )
    kept = None if output.folder is None else _Kept(Path(output.folder))
    reader = CaseReader(
        model,
        settings,
        allowed,
        training or TrainingInfo(),
        read_truth(truth, settings.schema),
        output.model or type(model).__name__,
    )
    with one_thread(), Pace(settings.seconds) as pace:
        cases: list[Case] = []
        lost = list(skipped)
        for capture in captures:
            watch(0, 0, f"reading {capture.name}", None)
            try:
                cases.append(reader.read(capture, len(cases)))
            except (ValueError, NotApplicable) as error:
                if len(captures) + len(skipped) == 1:
                    raise
                lost.append(Skipped.of(capture.place, error))
                continue
            listener.inferred(cases[-1])
        if not cases:
            raise none_left(lost)
        cases = [_remembered(case, cases) for case in cases]
        work = Work(pace, cases, settings, allowed, output.pictures, lost, watch, listener.cost)
        try:
            with ended_by_interrupt(pace):
                while work.jobs and not pace.over:
                    if _found_steps(work, reader):
                        continue
                    record, pictures, _ = work.run()
                    if kept is not None:
                        kept.add(work, record, pictures)
                    listener.ended(record)
                if not work.made:  # what the update shows without an attack belongs to the page
                    work.pass_over("the time was over before it began")
        except KeyboardInterrupt:
            work.tell("stopped")
            if kept is not None and work.made:
                kept.end(work)
            raise
        work.tell("done" if kept is None else "writing the report")
    return work.outcome() if kept is None else kept.end(work)


def _ask_server(work: Work, at: int) -> None:
    """Simulate what a malicious server gets from an update's training, once for each plan."""
    case = work.cases[at]
    if case.public is None:
        return
    plan = case.inferred.observation.task.plan
    before, told = work.asked.get(at, (None, None))
    if before != plan:
        seconds = min(SERVER_SECONDS, work.pace.left / SERVER_SHARE)
        fit = budget.training_fit(work.cost_of(at), work.allowed.room, seconds)
        told = None
        if not fit.refused:
            told = server.simulated(case.inferred, case.public.halves, case.criterion, seconds)
        work.asked[at] = plan, told
    work.cases[at] = replace(case, server=told)


def _remembered(case: Case, cases: Iterable[Case]) -> Case:
    """An update with what its client sent in earlier rounds, if their metadata name both."""
    client = case.capture.about.get("client")
    now = _round_of(case)
    if not client or now is None:
        return case
    earlier = dict[int, Observation]()
    for other in cases:
        number = _round_of(other)
        same = other.capture.about.get("client") == client
        if same and number is not None and number < now:
            earlier[number] = replace(other.inferred.observation, history=())
    history = tuple(earlier[number] for number in sorted(earlier))
    seen = replace(case.inferred.observation, history=history)
    return replace(case, inferred=replace(case.inferred, observation=seen))


def _round_of(case: Case) -> int | None:
    text = case.capture.about.get("round", "")
    return int(text) if text.isdecimal() else None


def _found_steps(
    work: Work,
    reader: CaseReader,
) -> bool:
    """Search for the number of local steps if the next attack needs it; return whether it did."""
    job = work.jobs[0]
    case = work.cases[job.at]
    seconds = min(work.settings.search, work.share / 4)
    if not job.steps or not case.inferred.untried or seconds < LEAST:
        return False
    work.tell(f"finding the number of local steps · {case.capture.name}")
    inferred = case.inferred
    room = work.allowed.room
    fit = budget.trial_fit(work.cost_of(job.at), inferred.untried, room, seconds)
    if fit.refused:
        steps = assumed_steps(inferred.untried, f"no search among them: {fit.refused}")
    else:
        with client.frugal(None if fit.cost is None else fit.cost.form):
            steps = searched_steps(inferred.observation, inferred.untried, seconds)
    work.cases[job.at] = _remembered(reader.read(case.capture, job.at, steps), work.cases)
    work.note_cost(job.at)
    work.again(job.at)
    return True


@dataclass(frozen=True)
class CaseReader:
    """Reads captures of one model; again, once the number of local steps is found."""

    model: nn.Module
    settings: Settings
    allowed: Allowed
    training: TrainingInfo
    truth: Batch | None
    title: str

    def read(
        self,
        capture: Capture,
        at: int,
        steps: Finding | None = None,
    ) -> Case:
        settings = self.settings
        form = settings.form
        training = self.training
        context = None
        public = None
        if settings.public is not None:
            device = self.allowed.device
            context = public_examples(settings.public, form, settings.schema, device)
            public, _ = context.halves
            if settings.domain is not None:
                form = context.domain  # its scales are those of the public rows
        if training.known is not None:
            # With the scales of the public rows.
            parts = known_parts(form, training.known.parts.text)
            training = replace(training, known=KnownValues(parts, training.known.values))
        task, notes = task_of(
            self.model,
            capture,
            form,
            classes=settings.classes,
            loss=settings.loss,
            allowed=self.allowed,
        )
        inferred = infer_context(
            capture,
            task,
            training,
            input_shape=settings.input_shape,
            public=public,
            steps=steps,
        )
        truth = self.truth
        if truth is not None:
            truth = check_truth(truth, inferred.observation)
            notes += contradicted(truth, inferred)
        known = inferred.observation.threat.known
        criterion = Criterion.of(form, psnr=settings.psnr, share=settings.share, known=known)
        return Case(
            capture, inferred, notes, at, self.title, criterion, context, truth, settings.people
        )


def _attacks(
    settings: Settings,
    inferred: InferredContext,
) -> tuple[Spec, ...]:
    """The attacks to run: the requested ones, or the suitable ones, from cheap to strong."""
    if settings.specs is not None:
        return settings.specs
    seen = inferred.observation
    if seen.known is not None and seen.known.parts.everything:
        return (Spec("attribute_filter"),)
    names: tuple[str, ...] = ONE_STEP if seen.task.plan.steps == 1 else SEVERAL_STEPS
    if settings.form.name in BY_DOMAIN:
        names = BY_DOMAIN[settings.form.name]
        if seen.examples > LOTS:
            names = tuple(name for name in names if name not in SEARCHES)
        if seen.known is not None and seen.known.parts.rest.parts == 1:
            names += ("attribute_filter",)
    elif seen.examples > LOTS:
        names = MANY
    elif seen.examples <= FEW:
        names += SMALL if seen.task.plan.steps == 1 else ()
        names += SMOOTH if seen.task.plan.is_sum else ()
        names += ("matching_over_rounds",) if seen.history else ()
    if seen.examples == 1 and not seen.task.plan.is_sum:
        names = ("sign_inversion", *names)
    if isinstance(seen.task.model, Front):
        names = (*PLANTED, *names)
    stronger = SMOOTHER if len(smooth_axes(settings.form.shape)) > 2 else {}
    return tuple(stronger.get(name, Spec(name)) for name in names)


def _build(spec: Spec, inferred: InferredContext) -> Attack:
    """The attack; `fed_avg_matching` gets the number of steps that was found."""
    settings = spec.parameters
    if spec.name == "fed_avg_matching":
        settings = {"local_steps": inferred.observation.task.plan.steps, **settings}
    built: Attack = registry.build("attack", spec.name, settings)
    trains = isinstance(built, FedAvgMatching | AttributeFilter)
    seen = inferred.observation
    if not (seen.task.plan.is_sum or seen.layer_rates):  # the rate is in the sizes of such steps
        trains = trains or isinstance(built, LinearInversion | MatchingSettings)
    if trains and not inferred.rate_known:
        raise NotApplicable("the learning rate is not known: no local training can be simulated")
    return built


def _run(
    work: Work,
    job: Job,
    refused: str = "",
    judging: Callable[[], budget.Budgeted] = budget.Budgeted,
) -> Made:
    """The result of an attack. It does not run if it is `refused`; `judging` is how, or whether,
    what the answer explains is computed.
    """
    case = work.cases[job.at]
    spec = job.spec
    built: Attack | None = None

    def ended(**fields: Any) -> Made:
        before = header(case, spec.name, built)
        return msgspec.structs.replace(before, **fields), {}, None

    try:
        built = _build(spec, case.inferred)
        if refused:
            raise NotApplicable(f"not run: {refused}")
        source = stream(work.settings.seed, "attack", spec.name, case.inferred.observation.examples)
        seen = case.inferred.observation
        answer = noted(with_known(seen, built(seen, source)), job.steps)
        fit = judging() if built.explains else None
        return *judged(
            work.cases[job.at],  # with the cost, if it was measured
            built,
            answer,
            fit,
            name=spec.name,
            pictures=work.pictures,
        ), answer
    except NotApplicable as error:
        stops.check()
        # What the update shows without any attack belongs to the run, too.
        facts = known_facts(case)
        return ended(
            status="not_applicable",
            reason=" ".join(error.reason.split()),
            facts=facts if work.pictures else tuple(fact.withheld for fact in facts),
        )
    except Exception as error:  # a crash is a result: recorded and counted
        stops.reraise(error)
        return ended(
            status="failed",
            reason=one_line(error),
            verdict=UNDECIDED,
        )


def _direction(record: Assessment) -> float:
    explained = record.capture and record.capture.explained
    return (explained.direction if explained else None) or 0.0


class _Kept:
    """The folder of a run that goes on: each result is on the disk before the next attack begins,
    for native code may keep a stop from coming back to Python.
    """

    def __init__(self, folder: Path) -> None:
        check_place(folder)
        self._folder = folder
        self._journal = Journal(folder / RECORDS, Assessment)
        self._begun = False

    def add(
        self,
        work: Work,
        record: Assessment,
        pictures: Mapping[str, bytes],
    ) -> None:
        with files.writing(self._folder), files.claimed(self._folder):
            if not self._begun:
                self._write_header(work)
                self._journal.read(lambda earlier: False)  # those of an earlier run go
                self._begun = True
            self._write_pictures(pictures)
            self._journal.append(record)
            self._journal.close()

    def end(self, work: Work) -> UpdateResult:
        """Write all in order, with the report."""
        from leakbound import report

        folder = self._folder
        outcome = work.outcome()
        lines = b"".join(map(encode, outcome.records))
        with files.writing(folder), files.claimed(folder):
            self._write_header(work)
            self._write_pictures(outcome.pictures)
            files.write(folder / RECORDS, lines, key=KEYS[Assessment])
            page = report.write(folder, images=work.pictures)
        return replace(outcome, folder=folder, page=page)

    def _write_header(self, work: Work) -> None:
        check_place(self._folder)
        text = json.dumps(_header(work), indent=1)
        files.write(self._folder / files.RUN, text.encode() + b"\n")

    def _write_pictures(self, pictures: Mapping[str, bytes]) -> None:
        place = files.folder(self._folder, "pictures")
        for name, content in pictures.items():
            files.write(place / name, content)


def check_place(folder: Path) -> None:
    """Reject a folder that a run cannot write into, before any attack runs."""
    from leakbound.report import check_installed
    from leakbound.report.page import FILE

    check_installed()
    with files.writing(folder):
        files.check_run(folder)
        files.check(folder / FILE)
        files.check(folder / RECORDS, key=KEYS[Assessment])
        old = (folder / files.RUN).exists()
        about = json.loads(files.read(folder / files.RUN)) if old else {}
    if about.get("data", {}).get("source", OWN_DATA) != OWN_DATA:
        raise ValueError(
            f"out is {str(folder)!r}, which belongs to an audit; use an empty or new folder"
        )


def _header(work: Work) -> dict[str, Any]:
    # A domain and a loss function are no plain values: their names follow below.
    settings = replace(
        work.settings,
        attacks=work.settings.specs,
        domain=None,
        loss="cross_entropy",
    )
    plan = {"name": OWN_DATA, **plain(settings), "loss": named(work.settings.loss).name}
    plan["domain"] = None if work.settings.domain is None else repr(work.settings.domain)
    cases = work.cases
    first = cases[0].inferred.observation
    plan["defense"] = "; ".join(dict.fromkeys(repr(case.inferred.declared) for case in cases))
    return {
        "schema": SCHEMA,
        "plan": plan,
        "plan_hash": digest(plan),
        "data": {
            "source": OWN_DATA,
            "fingerprint": digest([case.capture.digest for case in cases]),
            "examples": sum(case.inferred.observation.examples for case in cases),
            "shape": list(first.input_shape),
            "classes": first.task.label_range,
            "weights": {},
        },
        "code": {},
        "versions": versions(),
        "machine": machine(),
        "pictures": work.pictures,
        "experiments": work.total,  # the page reports those without a record as missing
        "own_data": True,
        "notes": [str(one) for one in work.skipped],
    }
