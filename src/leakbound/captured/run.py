"""Attacks on captured updates, from files to records and a report."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch import Tensor, nn

from leakbound import check, registry
from leakbound._util import files
from leakbound._util import pictures as html
from leakbound.assess.criterion import Criterion
from leakbound.assess.record import KEYS, SCHEMA, UNDECIDED, Assessment, Verdict, encode
from leakbound.assess.verdict import together
from leakbound.attacks import Attack, FedAvgMatching
from leakbound.attacks.pace import Pace, ended_by_interrupt, noted
from leakbound.attacks.planted import Front
from leakbound.audit import plan as plans
from leakbound.audit.context import one_line, one_thread
from leakbound.audit.run_file import machine, versions
from leakbound.captured.assess import (
    Case,
    Made,
    check_truth,
    header,
    judged,
    public_images,
    read_truth,
)
from leakbound.captured.capture import Capture, Given, load
from leakbound.captured.findings import Finding
from leakbound.captured.model import task_of
from leakbound.captured.observe import (
    SEARCH,
    TrainingInfo,
    Understood,
    as_chain,
    found_steps,
    understand,
)
from leakbound.captured.work import Watch, Work
from leakbound.defenses import Defense
from leakbound.domains import of_shape
from leakbound.random import stream
from leakbound.report.presented import Presented
from leakbound.types import Batch, NotApplicable, Reconstruction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ONE_STEP = ("linear_inversion", "inverting_gradients", "strong_matching")
SMALL = ("inverting_gradients_large_steps",)
SEVERAL_STEPS = ("linear_inversion", "inverting_gradients", "fed_avg_matching")
MANY = ("linear_inversion", "inverting_gradients")
FEW, LOTS = 8, 64
"""Up to how many examples the longest search runs unasked, and beyond how many few attacks do."""
LARGEST = 10**8
MOST_PICTURES = 6
LEAST = 2.0
"""Seconds below which a search for the number of local steps does not begin."""
OWN_DATA = "captured updates"
PLANTED = ("robbing_the_fed", "linear_trap", "trap_weights")


@dataclass(frozen=True, eq=False)
class UpdateResult(Presented):
    """What came out: one record an update and attack, the guesses, and where all was written.

    Attributes:
        records: as an audit's; without metrics where the truth is not known.
        understood: for each update what was read off it, and what was assumed.
        answers: for each record what the attack rebuilt; None where it did not run.
        folder: where records and report lie; None where nothing was written.
        unended: how many attacks did not begin before the time was up.
    """

    records: tuple[Assessment, ...]
    understood: tuple[Understood, ...]
    answers: tuple[Reconstruction | None, ...]
    folder: Path | None = None
    page: Path | None = None
    unended: int = 0
    pictures: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """How many records ended with each verdict, as not applicable or as failed."""
        return dict(sorted(Counter(record.end for record in self.records).items()))

    @property
    def verdict(self) -> Verdict:
        """That of all attacks on all updates together."""
        return together(record.verdict for record in self.records)

    @property
    def best(self) -> Reconstruction | None:
        """The guess that explains most of its update, of all that explain some."""
        found = [
            (_direction(record), -i, answer)
            for i, (record, answer) in enumerate(zip(self.records, self.answers, strict=True))
            if answer is not None and answer.problem is None
        ]
        return max(found, key=lambda row: row[:2])[2] if found else None

    def _figure(self) -> Figure:
        from leakbound.report import figures

        return figures.assessments(self.records)

    def _repr_html_(self) -> str:
        """Every attack's verdict, and how much of its update the reconstruction explains."""
        rows = [
            (one.attack.name, one.end, html.number(_direction(one)), one.certificate or "")
            for one in self.records
        ]
        head = ("attack", "verdict", "share explained", "certificate")
        shown = [html.picture(content, "reconstructed") for content in self.pictures.values()]
        return html.block(self.verdict, html.table(head, rows), *shown[:MOST_PICTURES])


@dataclass(frozen=True)
class Settings:
    """How updates are attacked, the same for all of a run.

    Attributes:
        attacks: by name, with their settings; None takes those that fit, cheap to strong.
        defense: what the client is known to have applied to its update.
        public: a data source (`leakbound list`) of the same kind of images.
        psnr: in dB, from which an example counts as reconstructed.
        seed: of the attacks' own random starts.
        seconds: after which searches stop where they are and no further attack begins; None is no
            limit.
        search: seconds that finding out one update's number of local steps may take, where neither
            the user nor a closed form tells it; 0 assumes the least that is possible.
    """

    input_shape: tuple[int, ...]
    input_range: tuple[float, float] = (0.0, 1.0)
    classes: int | None = None
    attacks: tuple[plans.Spec, ...] | None = None
    defense: Defense | None = None
    public: str | None = None
    psnr: float = 20.0
    seed: int = 0
    seconds: float | None = None
    search: float = SEARCH

    def __post_init__(self) -> None:
        as_chain(self.defense)
        if not self.input_shape:
            raise ValueError("input_shape is empty; give the shape of one input, such as 1,28,28")
        for size in self.input_shape:
            check.count(input_shape=size)
        if math.prod(self.input_shape) > LARGEST:
            raise ValueError(
                f"input_shape is {self.input_shape}, which is more than {LARGEST:,} numbers; give "
                "the shape of one input"
            )
        low, high = self.input_range
        if not low < high:
            raise ValueError(f"input_range is {self.input_range}; give low < high")
        check.non_negative(seed=self.seed, search=self.search)
        if self.seconds is not None:
            check.positive(seconds=self.seconds)
        for spec in self.attacks or ():
            plans.build_attack(spec)


def attack_update(
    capture: Capture | Given,
    model: nn.Module,
    *,
    input_shape: Sequence[int],
    before: Given | None = None,
    kind: str = "auto",
    examples: int | None = None,
    labels: Sequence[int] | Tensor | None = None,
    learning_rate: float | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    defense: Defense | None = None,
    input_range: tuple[float, float] = (0.0, 1.0),
    classes: int | None = None,
    attacks: str | Sequence[str | plans.Spec] | None = None,
    public: str | None = None,
    truth: Batch | Path | str | None = None,
    psnr: float = 20.0,
    seed: int = 0,
    seconds: float | None = None,
    search: float = SEARCH,
    out: Path | None = None,
    name: str = "",
    pictures: bool = True,
    watch: Watch = lambda done, total, what, left: None,
) -> UpdateResult:
    """Attack one captured update: what `load` returned, or what it takes (with `before`, `kind`).

    `model` is the architecture; its weights count only where the capture has none before. What is
    known of the local training is as in `observe`, the rest as in `Settings`. `truth` is the true
    batch or a file of it, which no attack sees. Records, pictures and report.html go into `out`;
    None writes nothing. `name` is what they call the model, `watch` is called as `Watch` says.

    Raises:
        ValueError: what cannot be read, does not fit, or must be given, by name.
    """
    loaded = capture if isinstance(capture, Capture) else load(capture, before, kind=kind)
    shape, specs = _shape(input_shape), _specs(attacks)
    settings = Settings(
        *(shape, input_range, classes, specs, defense, public, psnr, seed),
        seconds=seconds,
        search=search,
    )
    training = TrainingInfo(examples, labels, learning_rate, steps, batch_size)
    return attack_all(
        [loaded],
        model,
        settings,
        known=training,
        truth=truth,
        out=out,
        name=name,
        pictures=pictures,
        watch=watch,
    )


def attack_all(
    captures: Sequence[Capture],
    model: nn.Module,
    settings: Settings,
    *,
    known: TrainingInfo | None = None,
    truth: Batch | Path | str | None = None,
    out: Path | None = None,
    name: str = "",
    pictures: bool = True,
    watch: Watch = lambda done, total, what, left: None,
    understood: Callable[[Case], None] = lambda case: None,
    ended: Callable[[Assessment], None] = lambda record: None,
) -> UpdateResult:
    """Attack several captured updates of one model, the cheapest attacks first; as `attack_update`.

    Every update is read, and `understood` called with what was found, before the first attack;
    `ended` is called with every record. When `settings.seconds` are over, the search that runs ends
    with the best that it found, and attacks that did not begin have no record. An interrupt
    (Ctrl-C) ends the search that runs in the same way, writes what is there to `out`, and is raised
    again.

    Raises:
        ValueError: as `attack_update`; a truth for more than one update.
    """
    if not captures:
        raise ValueError("captures is empty; give at least one update")
    if truth is not None and len(captures) > 1:
        raise ValueError(f"truth is that of one update, and {len(captures)} were given; name one")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {str(model)[:60]!r}; give a torch.nn.Module, as it is built")
    if out is not None:
        check_place(Path(out))
    batch = _truth(truth)
    title = name or type(model).__name__
    with one_thread(), Pace(settings.seconds) as pace:
        read = [
            partial(_case, capture, at, model, settings, known or TrainingInfo(), batch, title)
            for at, capture in enumerate(captures)
        ]
        cases = []
        for at, one in enumerate(read):
            watch(0, 0, f"reading {captures[at].name}", None)
            cases.append(one())
            understood(cases[-1])
        work = Work(pace, cases, partial(_attacks, settings))
        made: dict[tuple[int, int], tuple[Made, Reconstruction | None]] = {}
        try:
            with ended_by_interrupt(pace):
                while work.jobs and not pace.over:
                    if not _found_steps(work, read, settings, watch):
                        job = work.jobs[0]
                        made[job.at, job.rank] = _next(work, settings, pictures, watch)
                        ended(made[job.at, job.rank][0].record)
        except KeyboardInterrupt:
            work.tell(watch, "stopped")
            if out is not None and made:
                write_run(_outcome(made, work), Path(out), cases, settings, pictures, work.total)
            raise
        work.tell(watch, "writing the report" if out else "done")
    found = _outcome(made, work)
    if out is None:
        return found
    return write_run(found, Path(out), cases, settings, pictures, work.total)


def _found_steps(
    work: Work,
    read: Sequence[Callable[[Finding], Case]],
    settings: Settings,
    watch: Watch,
) -> bool:
    """Search for the number of local steps where the next attack needs it; whether it did."""
    job = work.jobs[0]
    case, seconds = work.cases[job.at], min(settings.search, work.share / 4)
    if not job.steps or not case.understood.untried or seconds < LEAST:
        return False
    work.tell(watch, f"finding the number of local steps · {case.capture.name}")
    work.cases[job.at] = read[job.at](found_steps(case.understood, seconds))
    work.again(job.at)
    return True


def _next(
    work: Work, settings: Settings, pictures: bool, watch: Watch
) -> tuple[Made, Reconstruction | None]:
    """Run the next attack, for its share of the time that is left."""
    job, case = work.jobs[0], work.cases[work.jobs[0].at]
    tell = partial(work.tell, watch, f"{job.spec.name} · {case.capture.name}")
    tell()
    work.begins()
    with Pace(work.share if job.steps else None, tell):
        made = _run(case, job.spec, settings.seed, pictures)
    work.ended()
    return made


def _shape(given: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(given, Sequence):
        raise ValueError(
            f"input_shape is {given!r}; give the shape of one input without the batch, such as "
            "(1, 28, 28)"
        )
    return tuple(given)


def _specs(given: str | Sequence[str | plans.Spec] | None) -> tuple[plans.Spec, ...] | None:
    """Attacks by name; one name alone is one attack."""
    if given is None:
        return None
    several = [given] if isinstance(given, str | plans.Spec) else given
    return tuple(a if isinstance(a, plans.Spec) else plans.Spec(a) for a in several)


def _truth(given: Batch | Path | str | None) -> Batch | None:
    batch = read_truth(given) if isinstance(given, Path | str) else given
    if batch is not None and not isinstance(batch, Batch):
        raise ValueError(
            f"truth is a {type(batch).__name__}; give leakbound.Batch(inputs, labels), or a file "
            "that holds both"
        )
    return batch


def _outcome(
    made: Mapping[tuple[int, int], tuple[Made, Reconstruction | None]], work: Work
) -> UpdateResult:
    """What was made, update by update."""
    ordered = [made[key] for key in sorted(made)]
    return UpdateResult(
        tuple(m.record for m, _ in ordered),
        tuple(case.understood for case in work.cases),
        tuple(answer for _, answer in ordered),
        unended=len(work.jobs),
        pictures={k: v for m, _ in ordered for k, v in m.pictures.items()},
    )


def _case(
    capture: Capture,
    at: int,
    model: nn.Module,
    settings: Settings,
    known: TrainingInfo,
    truth: Batch | None,
    title: str,
    steps: Finding | None = None,
) -> Case:
    context = None
    if settings.public is not None:
        context = public_images(settings.public, settings.input_shape, settings.input_range)
    public = None if context is None else context.public
    task, notes = task_of(
        model,
        capture,
        input_shape=settings.input_shape,
        input_range=settings.input_range,
        classes=settings.classes,
    )
    known = replace(known, defense=settings.defense or known.defense)
    shape = settings.input_shape
    understood = understand(capture, task, known, input_shape=shape, public=public, steps=steps)
    if truth is not None:
        truth = check_truth(truth, understood.observation)
    return Case(
        capture,
        understood,
        notes,
        at,
        plans.ModelSpec(title),
        Criterion.of_psnr(settings.psnr, of_shape(settings.input_shape, settings.input_range)),
        as_chain(known.defense),
        context,
        truth,
    )


def _attacks(settings: Settings, understood: Understood) -> tuple[plans.Spec, ...]:
    """The attacks to run: those asked for, or those that fit, cheap to strong."""
    if settings.attacks is not None:
        return settings.attacks
    seen = understood.observation
    names: tuple[str, ...] = ONE_STEP if seen.task.plan.steps == 1 else SEVERAL_STEPS
    if seen.examples > LOTS:
        names = MANY
    elif seen.examples <= FEW and seen.task.plan.steps == 1:
        names += SMALL
    if isinstance(seen.task.model, Front):
        names = (*PLANTED, *names)
    return tuple(plans.Spec(name) for name in names)


def _build(spec: plans.Spec, understood: Understood) -> Attack:
    """The attack; of `fed_avg_matching` the steps that were found are filled in."""
    settings = spec.parameters
    plan = understood.observation.task.plan
    if spec.name == "fed_avg_matching" and "local_steps" not in settings:
        settings |= {"local_steps": plan.steps}
    built = registry.build("attack", spec.name, settings)
    assert isinstance(built, Attack)  # the registry holds attacks only
    if isinstance(built, FedAvgMatching) and not understood.rate_known:
        raise NotApplicable("the learning rate is not known: no local training can be simulated")
    return built


def _run(
    case: Case, spec: plans.Spec, seed: int, pictures: bool
) -> tuple[Made, Reconstruction | None]:
    """One attack on one update; what it throws becomes a record."""
    built: Attack | None = None

    def ended(**fields: Any) -> tuple[Made, None]:
        before = header(case, spec.name, built, settings="" if built else spec.name)
        return Made(msgspec.structs.replace(before, **fields)), None

    try:
        built = _build(spec, case.understood)
        source = stream(seed, "attack", spec.name, case.understood.observation.examples)
        answer = noted(built(case.understood.observation, source))
        before = header(case, spec.name, built)
        return judged(case, before, built, answer, pictures=pictures), answer
    except NotApplicable as error:
        return ended(status="not_applicable", reason=" ".join(error.reason.split()))
    except Exception as error:  # a crash is a result of its own: recorded and counted
        return ended(status="failed", reason=one_line(error), verdict=UNDECIDED)


def _direction(record: Assessment) -> float:
    found = record.capture and record.capture.explained
    return (found.direction if found else None) or 0.0


def write_run(
    outcome: UpdateResult,
    folder: Path,
    cases: Sequence[Case],
    settings: Settings,
    pictures: bool,
    total: int,
) -> UpdateResult:
    """Records, pictures, run.json and the page into a folder of their own.

    `total` is how many attacks were to run; those that are missing are called missing on the page.

    Raises:
        ValueError: a folder that holds other files or an audit, or cannot be written.
    """
    from leakbound import report

    about = json.dumps(_header(cases, settings, pictures, total), indent=1).encode() + b"\n"
    lines = b"".join(map(encode, outcome.records))
    with files.writing(folder), files.claimed(folder):
        check_place(folder)
        files.write(folder / files.RUN, about)
        place = files.folder(folder, "pictures")
        for name, content in outcome.pictures.items():
            files.write(place / name, content)
        files.write(folder / "records.jsonl", lines, key=KEYS[Assessment])
        page = report.write(folder, images=pictures)
    return replace(outcome, folder=folder, page=page)


def check_place(folder: Path) -> None:
    """Refuse a folder that `write_run` cannot write into, before any attack runs.

    Raises:
        ValueError: the folder belongs to an audit, or holds a file that leakbound did not write.
    """
    from leakbound.report import check_installed
    from leakbound.report.page import FILE

    check_installed()
    with files.writing(folder):
        files.check_run(folder)
        files.check(folder / FILE)
        files.check(folder / "records.jsonl", key=KEYS[Assessment])
        old = (folder / files.RUN).exists()
        about = json.loads(files.read(folder / files.RUN)) if old else {}
    if about.get("data", {}).get("source", OWN_DATA) != OWN_DATA:
        raise ValueError(
            f"out is {str(folder)!r}, which belongs to an audit; take an empty or new folder"
        )


def _header(
    cases: Sequence[Case], settings: Settings, pictures: bool, total: int
) -> dict[str, Any]:
    """What `run.json` holds."""
    plan = {"name": OWN_DATA, **plans.plain(replace(settings, defense=None))}
    plan["defense"] = repr(settings.defense) if settings.defense else "none"
    first = cases[0].understood.observation
    return {
        "schema": SCHEMA,
        "plan": plan,
        "plan_hash": plans.digest(plan)[:16],
        "data": {
            "source": OWN_DATA,
            "fingerprint": plans.digest([case.capture.digest for case in cases])[:16],
            "examples": sum(case.understood.observation.examples for case in cases),
            "shape": list(first.input_shape),
            "classes": first.task.label_range,
            "weights": {},
        },
        "code": {},
        "versions": versions(),
        "machine": machine(),
        "pictures": pictures,
        "experiments": total,
        "own_data": True,
    }
