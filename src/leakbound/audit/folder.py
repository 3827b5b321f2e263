"""An audit in a folder: it keeps what is done and runs what is missing."""

from __future__ import annotations

import shutil
import tempfile
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leakbound import registry, report
from leakbound._util import files, pictures
from leakbound._util.text import plain
from leakbound.assess.record import Assessment, Damage, Record, Training, Verdict, is_picture
from leakbound.assess.verdict import of_run
from leakbound.attacks import Attack
from leakbound.audit import engine
from leakbound.audit.context import PlanContext, check_plan
from leakbound.audit.estimate import Clock, predicted_seconds
from leakbound.audit.experiment import DIED, NO_MEMORY, Result, refused
from leakbound.audit.journal import Journal
from leakbound.audit.plan import Plan, Unit, units_left
from leakbound.audit.plan_file import load, parse
from leakbound.audit.run_file import claim, header
from leakbound.core import ThreatModel
from leakbound.defenses import Defense
from leakbound.report import folder as report_folder
from leakbound.report.equal_utility import EqualUtility, equal_utility
from leakbound.report.tables import Names
from leakbound.report.template import Presented

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIMES = "timings.jsonl"


@dataclass(frozen=True)
class Progress:
    """Units done and in total, the unit that started last, and the estimated seconds left."""

    done: int
    total: int
    current: Unit | None
    result: Result | None = None
    left: float | None = None
    basis: str = ""


Runner = Callable[..., Generator[Result, None, None]]
"""Runs the units of a plan: called as `engine.run`, it gives the same records."""


@dataclass(frozen=True)
class AuditResult(Presented):
    """A finished audit: its folder and how many of its experiments ended in each way."""

    folder: Path
    experiments: int
    failed: int
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The joint verdict: exposed if any experiment is, protected only if all are."""
        return of_run(self.assessments)

    @property
    def assessments(self) -> list[Assessment]:
        """The record of every experiment."""
        return report_folder.read(self.folder).assessments

    @property
    def trainings(self) -> list[Training]:
        """The record of every training: the cost of the defenses."""
        return report_folder.read(self.folder).trainings

    def at_equal_utility(self) -> tuple[EqualUtility, ...]:
        """Compare the defenses at equal training loss and at equal test accuracy.

        A defense in two or more strengths is a family. Its curve is the error of the best attack
        (S_D: root mean squared error, 1 is the inputs' range) against its cost, linear between the
        strengths. Two families are compared by the mean of their curves over the costs that both
        span. It is the comparison of the report's first page.

        Returns:
            One result for each model and batch size with trainings, each with two `comparisons`:
            at equal training loss, then at equal accuracy. Every number is a `MeanInterval` with
            its n (seeds that have an attack and a training). `not_compared` names what has no
            number and why: one strength, fewer than two seeds, no common range of costs.

        Assumes that errors and costs of seeds are nearly normal. The intervals (95 %; of
        differences for all pairs of a comparison jointly) are Student's t over jackknife
        pseudo-values. A stronger attack or a longer training may change the order.

        Raises:
            ValueError: the audit has no training, because its plan has no `[utility]`.

        Source: Liu et al. 2025 (paper B), section 4.1 and figure 3.

        Example:
            >>> noise = [f"gaussian_noise,noise_std={std}" for std in (0.01, 1.0)]
            >>> found = run_audit("mlp,hidden=[16]", "digits", attacks=["linear_inversion"],
            ...     defenses=["none", *noise, "magnitude_pruning,rate=0.9"], seeds=[0, 1], rounds=9)
            >>> (result,) = found.at_equal_utility()
            >>> at_loss, at_accuracy = result.comparisons
            >>> [family.defense for family in at_loss.families]
            ['gaussian_noise']
            >>> at_loss.not_compared[0].why
            'one strength; a family has two or more'
        """
        run = report_folder.read(self.folder)
        if not run.trainings:
            raise ValueError(
                f"the audit in {self.folder} has no training, so no cost is known; add [utility] "
                "to the plan, or rounds= to run_audit"
            )
        return equal_utility(run.assessments, run.trainings, Names(run.assessments, run.trainings))

    def _figure(self) -> Figure:
        from leakbound.report import figures

        return figures.assessments(self.assessments)

    def to_html(self, path: Path | str) -> Path:
        """Write the report as one file that loads nothing else; return its path."""
        return report.write_one(self.folder, Path(path))

    def _repr_html_(self) -> str:
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
    """Run a plan in a folder, and continue from what the folder already holds.

    It leaves `run.json`, `records.jsonl` and `utility.jsonl` in the plan's order, `timings.jsonl`
    and `pictures/`. A killed audit loses no finished experiment. Started again, it ends with the
    same bytes as one that was never stopped. A folder of another plan, data, version, device or
    machine is rejected.

    The records are the same for any number of `workers`, and for any way to `run` the units: in
    processes or on a cluster. The last digits of a GPU's records (`device` "cuda") may differ
    between runs. With `trainings_only` a later audit of the same folder runs the experiments.
    """
    context = PlanContext(plan.data, device)
    check_plan(plan, context)
    about = header(plan, context, pictures)
    records = Journal(folder / "records.jsonl", Assessment)
    utility = Journal(folder / "utility.jsonl", Training)
    experiments = [e.id for e in plan.experiments()]
    trainings = [t.id for t in plan.trainings()]
    with ExitStack() as held:
        with _writing(folder):
            held.enter_context(files.claimed(folder))
            claim(folder, about)
            files.folder(folder, "pictures")
            files.check(folder / TIMES, key="id")
        for said in [] if trainings_only else refused(plan.experiments(), context):
            warnings.warn(said, stacklevel=2)
        with _writing(folder):
            done = utility.read(_fits(trainings, folder))
            if not trainings_only:
                done |= records.read(_fits(experiments, folder))
        skipped = {*done, *experiments} if trainings_only else done
        total = len(trainings) + (0 if trainings_only else len(experiments))
        current: Unit | None = None
        clock = None
        if workers:  # else the machines of a cluster, which are not known
            left = units_left(plan, skipped)
            work = predicted_seconds(left, context, plan.seeds[0])
            clock = Clock(*work, max(1, min(workers, len(left))))

        def tell(result: Result | None = None) -> None:
            left, basis = (None, "") if clock is None else (clock.left, clock.basis)
            watch(Progress(len(done), total, current, result, left, basis))

        def started(unit: Unit) -> None:
            nonlocal current
            current = unit
            tell()

        tell()
        results = run(
            plan,
            skipped,
            started=started,
            workers=workers,
            pictures=pictures,
            context=context,
        )
        with closing(records), closing(utility), closing(results):
            for result in results:
                with _writing(folder):
                    # Pictures first: a record on the disk has all of its pictures.
                    for name, content in result.pictures.items():
                        files.write(folder / "pictures" / name, content)
                    if isinstance(result.record, Assessment):
                        records.append(result.record)
                    else:
                        utility.append(result.record)
                    cost = {"id": result.id, "schema": 1, "seconds": round(result.seconds, 4)}
                    files.append(folder / TIMES, cost, "id")
                done.add(result.id)
                if clock is not None:
                    clock.finished(result.id)
                tell(result)
        with _writing(folder):
            utility.finish(trainings)
            if not trainings_only:
                records.finish(experiments)
    counts = Counter(records.ends.values())
    failed = counts["failed"] + Counter(utility.ends.values())["failed"]
    return AuditResult(
        folder, 0 if trainings_only else len(experiments), failed, dict(sorted(counts.items()))
    )


def _writing(folder: Path) -> AbstractContextManager[None]:
    """For our reads and writes only: an error in this block is an error of the folder."""
    mend = "what was recorded is kept, make room or choose another folder and run again"
    return files.writing(folder, mend)


def _fits(wanted: Iterable[str], folder: Path) -> Callable[[Record], bool]:
    """A test of records: a unit need not run if its record is a result with unchanged pictures.
    `run.json` confirms that the folder is the plan's, so a record of another unit is damage.
    """
    units = set(wanted)

    def fits(record: Record) -> bool:
        if record.key not in units:
            raise Damage(f"{record.key!r} is not a unit of the plan")
        names = record.pictures.values() if isinstance(record, Assessment) else ()
        if record.status == "failed" and record.reason in (DIED, NO_MEMORY):
            return False  # this depends on the state of the machine at that time
        return all(is_picture(folder / "pictures" / name) for name in names)

    return fits


Named = str | Mapping[str, Any]
"""A name with settings ("mlp,hidden=[64]"), or a table as in plans."""


def run_audit(
    model: Named | Sequence[Named] | Plan | Path,
    data: Named = "mnist5k",
    *,
    attacks: Sequence[Named | Attack] = ("linear_inversion", "inverting_gradients"),
    defenses: Sequence[Named | Defense] = ("none",),
    batch_sizes: Sequence[int] = (1,),
    seeds: Sequence[int] = (0, 1, 2),
    psnr: float = 20.0,
    threat: ThreatModel | None = None,
    error_bound: str = "trace",
    probability: float = 0.001,
    rounds: int = 0,
    out: Path | str | None = None,
    workers: int = 1,
    pictures: bool = True,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> AuditResult:
    """Run every attack on every batch under every defense, and judge each configuration.

    Everything is given by name, so that the run can be repeated. Your own model is
    "package.module:build", your own data a folder or a file (`leakbound list`). For objects in
    memory use `simulate`.

    Args:
        model: one or several models; or a whole plan, or the path of one, instead of the rest.
        data: a data source, or a table as in plans.
        attacks: by name with settings, or attacks that a name and settings describe.
        defenses: as attacks; "none" is no defense.
        batch_sizes: examples per client.
        seeds: one repetition each, with separate weights, batch and noise.
        psnr: PSNR in dB from which an example counts as reconstructed.
        threat: what the attacker knows; by default labels and defense.
        error_bound: "trace", "full", "weiss_weinstein" or "none".
        probability: the accepted probability of a reconstruction; 0 requests no such bound.
        rounds: of a short training under each defense, which shows its cost; 0 for none.
        out: the run's folder, which a second call continues; None uses a temporary one, which
            exists as long as the result.
        workers: number of processes; the records are the same for any number.
        pictures: whether pictures of the data are kept.
        watch: called as the audit continues.

    Example:
        >>> found = run_audit("mlp,hidden=[16]", "digits", attacks=["linear_inversion"],
        ...     defenses=["none", "gaussian_noise,noise_std=1.0"], seeds=[0])
        >>> found.verdict
        'exposed'
    """
    if isinstance(model, Plan):
        plan = model
    elif isinstance(model, Path):
        plan = load(model)
    else:
        models = [model] if isinstance(model, str | Mapping) else list(model)
        source = {"source": data} if isinstance(data, str) else dict(data)
        table: dict[str, Any] = {
            "name": "audit",
            "data": source,
            "models": [registry.row_of("model", one) for one in models],
            "attacks": [registry.row_of("attack", one) for one in attacks],
            "defenses": [registry.row_of("defense", one) for one in defenses],
            "batch_sizes": list(batch_sizes),
            "seeds": list(seeds),
            "criterion": {"psnr": psnr},
            "threat": plain(threat or ThreatModel()),
            "error_bound": {"kind": error_bound},
            "risk": {"probability": probability},
        }
        if rounds:
            table["utility"] = {"rounds": rounds, "repeats": len(seeds)}
        plan = parse(table)
    if out is not None:
        return audit(
            plan,
            Path(out),
            workers=workers,
            pictures=pictures,
            watch=watch,
        )
    place = Path(tempfile.mkdtemp(prefix="leakbound-"))
    try:
        result = audit(
            plan,
            place / "run",
            workers=workers,
            pictures=pictures,
            watch=watch,
        )
    except BaseException:  # also Ctrl-C: nobody else knows the folder
        shutil.rmtree(place, ignore_errors=True)
        raise
    weakref.finalize(result, shutil.rmtree, place, ignore_errors=True)
    return result
