"""An audit in a folder: what is done is kept, what is missing is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from leakbound import report
from leakbound._util import files, pictures
from leakbound.assess.record import Assessment, Damage, Record, Training, Verdict, is_picture
from leakbound.assess.verdict import together
from leakbound.audit import engine
from leakbound.audit.context import PlanContext, check_plan
from leakbound.audit.estimate import Clock, estimate
from leakbound.audit.experiment import Result, is_result
from leakbound.audit.journal import Journal
from leakbound.audit.plan import Plan, Unit
from leakbound.audit.run_file import claim, header
from leakbound.report import folder as report_folder
from leakbound.report.presented import Presented

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIMES = "timings.jsonl"


@dataclass(frozen=True)
class Progress:
    """Where an audit is: units done and in all, and the unit that started last.

    Attributes:
        left: seconds that it still takes, by an estimate; None where there is none.
        basis: what the estimate rests on.
    """

    done: int
    total: int
    current: Unit | None
    result: Result | None = None
    left: float | None = None
    basis: str = ""


class Runner(Protocol):
    """What runs the units of a plan: `engine.run`, or another way that gives the same records."""

    def __call__(
        self,
        plan: Plan,
        done: Iterable[str] = (),
        *,
        workers: int,
        pictures: bool,
        context: PlanContext | None,
        started: Callable[[Unit], None],
    ) -> Generator[Result, None, None]:
        """Results of all units that are not done, in the order in which they end."""


@dataclass(frozen=True)
class AuditResult(Presented):
    """A finished audit: its folder and how its experiments ended.

    Attributes:
        failed: how many experiments and trainings failed.
        counts: how many experiments ended with each verdict, as `not_applicable` or as `failed`.
    """

    folder: Path
    experiments: int
    failed: int
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """That of all experiments together: exposed if any is, protected only if every one is."""
        return together(one.verdict for one in self.assessments)

    @property
    def assessments(self) -> list[Assessment]:
        """The record of every experiment."""
        return report_folder.read(self.folder).assessments

    @property
    def trainings(self) -> list[Training]:
        """The record of every training: what the defenses cost."""
        return report_folder.read(self.folder).trainings

    def _figure(self) -> Figure:
        from leakbound.report import figures

        return figures.assessments(self.assessments)

    def to_html(self, path: Path | str) -> Path:
        """Write the report as one file that loads nothing; its path.

        Raises:
            ValueError: a run whose report needs several pages (they stand in its folder:
                `leakbound.report.write`), or a path that holds a file of yours.
        """
        return report.write_one(self.folder, Path(path))

    def _repr_html_(self) -> str:
        """How the experiments of an audit ended."""
        rows = [(word.replace("_", " "), n) for word, n in self.counts.items()]
        failed = f"failed experiments or trainings: {self.failed}" if self.failed else ""
        return pictures.block(
            f"Audit of {self.experiments} experiments",
            pictures.table(("verdict", "experiments"), rows),
            pictures.note(failed) if failed else "",
            pictures.note(f"records in {self.folder}"),
        )


def audit(
    plan: Plan,
    folder: Path,
    *,
    workers: int = 1,
    pictures: bool = True,
    device: str = "cpu",
    watch: Callable[[Progress], None] = lambda progress: None,
    run: Runner = engine.run,
    trainings_only: bool = False,
) -> AuditResult:
    """Run a plan into a folder, going on from what the folder already holds.

    Leaves `run.json`, `records.jsonl` and `utility.jsonl` in the plan's order, `timings.jsonl` and
    `pictures/`. A killed audit loses no finished experiment; started again, it ends with the same
    bytes as one that was never stopped.

    Args:
        plan: what to run.
        folder: where to; made if it is not there.
        workers: processes; the records are the same for any number.
        pictures: keep pictures of the data.
        device: where models and batches live; a folder keeps to one. The last digits of a GPU's
            records ("cuda") may differ from run to run.
        watch: called as the audit goes on.
        run: what runs the units: in this process or in several, or on a cluster.
        trainings_only: leave the experiments alone; a later audit of the same folder runs them.

    Raises:
        ValueError: a folder of another plan, data, version or machine; one in use by another
            process; a file in it that leakbound did not write, where it has to; a plan that cannot
            work on its data; a folder or disk that cannot be written.
    """
    context = PlanContext(plan.data, device)
    check_plan(plan, context)
    about = header(plan, context, pictures)
    with ExitStack() as held:
        with _writing(folder):
            held.enter_context(files.claimed(folder))
            claim(folder, about)
            files.folder(folder, "pictures")
            files.check(folder / TIMES, key="id")
        runs = partial(run, workers=workers, pictures=pictures, context=context)
        return _audit(plan, folder, runs, watch, trainings_only, partial(_clock, context, workers))


def _audit(
    plan: Plan,
    folder: Path,
    run: Callable[..., Generator[Result, None, None]],
    watch: Callable[[Progress], None],
    trainings_only: bool,
    clock_of: Callable[[Plan, set[str]], Clock | None],
) -> AuditResult:
    experiments, trainings = [e.id for e in plan.experiments()], [t.id for t in plan.trainings()]
    left_alone = experiments if trainings_only else []
    experiments = [] if trainings_only else experiments
    records = Journal(folder / "records.jsonl", Assessment)
    utility = Journal(folder / "utility.jsonl", Training)
    with _writing(folder):
        kept = utility.read(_fits(trainings, folder))
        kept |= set() if trainings_only else records.read(_fits(experiments, folder))
    total, done = len(experiments) + len(trainings), len(kept)
    current: list[Unit | None] = [None]
    clock = clock_of(plan, {*kept, *left_alone})

    def tell(result: Result | None = None) -> None:
        left, basis = (None, "") if clock is None else (clock.left, clock.basis)
        watch(Progress(done, total, current[0], result, left, basis))

    def started(unit: Unit) -> None:
        current[0] = unit
        tell()

    tell()
    results = run(plan, {*kept, *left_alone}, started=started)
    with closing(records), closing(utility), closing(results):
        for result in results:
            with _writing(folder):
                _store(folder, result)
                if isinstance(result.record, Assessment):
                    records.append(result.record)
                else:
                    utility.append(result.record)
                cost = {"id": result.id, "schema": 1, "seconds": round(result.seconds, 4)}
                files.append(folder / TIMES, cost, "id")
            done += 1
            if clock is not None:
                clock.finished(result.id)
            tell(result)
    with _writing(folder):
        utility.finish(trainings)
        if not trainings_only:
            records.finish(experiments)
    counts = Counter(records.ends.values())
    untrained = sum(end == "failed" for end in utility.ends.values())
    return AuditResult(
        folder, len(experiments), counts["failed"] + untrained, dict(sorted(counts.items()))
    )


def _clock(context: PlanContext, workers: int, plan: Plan, kept: set[str]) -> Clock | None:
    """What tells the time left; None on a cluster, whose machines are not known."""
    if not workers:
        return None
    every: list[Unit] = [*plan.trainings(), *plan.experiments()]
    units = [unit for unit in every if unit.id not in kept]
    return Clock(estimate(units, context, plan.seeds[0]), max(1, min(workers, len(units))))


def _writing(folder: Path) -> AbstractContextManager[None]:
    """Only our own reading and writing stands in this block: its errors are the folder's."""
    mend = "what was recorded is kept, make room or take another folder and run again"
    return files.writing(folder, mend)


def _fits(wanted: Iterable[str], folder: Path) -> Callable[[Record], bool]:
    """Of a record: its unit need not run, for it is a result and its pictures are what they were.

    `run.json` says that the folder is the plan's, so a record of another unit is damage.
    """
    units = set(wanted)

    def fits(record: Record) -> bool:
        if record.key not in units:
            raise Damage(f"{record.key!r} is no unit of the plan")
        names = record.pictures.values() if isinstance(record, Assessment) else ()
        return is_result(record) and all(is_picture(folder / "pictures" / name) for name in names)

    return fits


def _store(folder: Path, result: Result) -> None:
    for name, content in result.pictures.items():
        files.write(folder / "pictures" / name, content)
