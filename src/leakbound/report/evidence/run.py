"""Evidence from a run: measured, bounded and declared risk of its records, kept apart."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from leakbound._util import files
from leakbound.assess.record import Assessment, AttackInfo, Bound, DefenseInfo, is_picture
from leakbound.assess.verdict import verdict
from leakbound.report import tables
from leakbound.report.best_attack import best_attack_tables
from leakbound.report.evidence import auxiliary, privacy
from leakbound.report.evidence.schema import (
    BestAttackLine,
    BoundedPart,
    BoundLine,
    CapturedLine,
    Check,
    DeclaredPart,
    Ends,
    Epsilons,
    MeasuredPart,
    MissingBound,
    PrivacyClaim,
    Provenance,
    RunAgain,
    StrongestLine,
    Subject,
    TrainingCost,
    clean,
    cleaned,
)
from leakbound.report.folder import Run
from leakbound.report.gallery import captured_updates
from leakbound.report.rerun import command_of, digest, toml_of
from leakbound.report.tables import Names, Theorem, Theorems, grouped

Accountant = Callable[[float], Epsilons]
"""Epsilons of one release with a noise multiplier."""
SHOWN = 100
"""Of how many configurations the pictures are kept."""
MEASURED = (
    "What the attacks of this run did on real examples, counted. A failed attack proves nothing: "
    "another one may succeed."
)
BOUNDED = (
    "What theorems say about every attacker that they cover, under the assumptions and the prior "
    "named with each. No attack was needed for it, and no attack can refute it within them."
)
DECLARED = (
    "What was stated and not checked here. Everything above holds only as far as these statements "
    "do."
)
COVERS = {
    "all": "all attackers",
    "unproved": "nobody for certain: it is not proved here, the assumptions say why",
}


def of_run(
    run: Run,
    statements: Mapping[str, str],
    accountant: Accountant,
    *,
    images: bool,
    plan: str = "evidence.toml",
) -> Subject:
    """One run as a subject of the report.

    Args:
        run: what `folder.read` gave.
        statements: what somebody declares, by the names in `auxiliary.STATEMENTS`.
        accountant: epsilons of one Gaussian mechanism.
        images: name the pictures of the strongest attacks.
        plan: the file that holds the plan, for the command that runs it again.
    """
    names, theorems = Names(run.assessments, run.trainings), Theorems(run.assessments)
    rows = tables.configurations(run.assessments, names, theorems)
    limits = {a.criterion.value for a in run.assessments}
    ends, costs = _ends(run), training_costs(run, names)
    declared = auxiliary.of_plan(run.info, run.assessments)
    subject = Subject(
        kind="run",
        name=run.info.name,
        notices=tuple(_notices(run, ends)),
        checks=tuple(_checks(run)),
        configurations=tuple(rows),
        measured=_measured(run, names, ends),
        bounded=_bounded(run.assessments, names, theorems),
        declared=DeclaredPart(DECLARED, auxiliary.declared(statements, declared)),
        attacker=auxiliary.attacker(run.info, run.assessments, names),
        thresholds=auxiliary.thresholds(run.info, run.assessments, statements.get("accepted_by")),
        threshold=limits.pop() if len(limits) == 1 else None,
        strongest=tuple(_strongest(run, names, rows, images=images)),
        utility=costs,
        differential_privacy=tuple(_private(run, names, costs, statements, accountant)),
        provenance=_provenance(run, names),
        rerun=_rerun(run, plan),
    )
    return cleaned(subject)


def _ends(run: Run) -> Ends:
    count = Counter(a.status for a in run.assessments)
    ends = count["ok"], count["not_applicable"], count["failed"]
    return Ends(run.info.experiments, len(run.assessments), *ends)


def _notices(run: Run, ends: Ends) -> list[str]:
    """What stands on top: that something is missing, failed, or cannot be known."""
    found = []
    if run.missing:
        here = f"{ends.present} of {ends.planned} experiments are here"
        found.append(f"The run is not finished: {here}.")
    if ends.failed:
        found.append(f"{ends.failed} of {ends.present} experiments failed: they show nothing.")
    failed = sum(training.status == "failed" for training in run.trainings)
    if failed:
        found.append(f"{failed} of {len(run.trainings)} trainings failed and enter no mean.")
    if not all(a.truth_known for a in run.assessments):
        found.append(
            "The true examples of captured updates are not known: nothing is measured there."
        )
    if not run.trainings:
        found.append("No training was run: what the defenses cost in accuracy is not measured.")
    return found


def _checks(run: Run) -> list[Check]:
    """What could be computed again from the folder alone."""
    present, planned = len(run.assessments), run.info.experiments
    follow = sum(map(_follows, run.assessments))
    pictures = sorted({name for a in run.assessments for name in a.pictures.values()})
    whole = sum(is_picture(run.folder / "pictures" / name) for name in pictures)
    plan = digest(run.info.plan)
    kept = whole == len(pictures) if pictures else None
    return [
        Check("The plan belongs to its hash", plan == run.info.plan_hash, plan),
        Check("Every verdict follows from its own record", follow == present,
              f"{follow} of {present}"),
        Check("All planned experiments are here", present == planned, f"{present} of {planned}"),
        Check("Every picture has the name of its content", kept, f"{whole} of {len(pictures)}"),
    ]  # fmt: skip


def _follows(own: Assessment) -> bool:
    """Whether a record's verdict is what its own matches and bounds give."""
    if own.status != "ok":
        return own.verdict in (None, "undecided")
    chances = [
        b for b in own.bounds if b.covers == "all" and None not in (b.probability, b.accepted)
    ]
    if any(b.excludes_threshold != ((b.probability or 0) <= (b.accepted or 0)) for b in chances):
        return False
    try:
        return own.verdict == verdict(own.matched, own.bounds, certified=bool(own.certificate))
    except RuntimeError:  # what was matched and what is excluded contradict each other
        return False


def _measured(run: Run, names: Names, ends: Ends) -> MeasuredPart:
    best = [
        BestAttackLine(
            table.model,
            table.batch_size,
            row.defense,
            found.rmse,
            found.low if found.n > 1 else None,
            found.high if math.isfinite(found.high) else None,
            tables.LEVEL,
            found.attack,
            found.baseline,
            found.n,
            row.left_out,
        )
        for table in best_attack_tables(run.assessments, run.trainings, names)
        for row in table.rows
        if (found := row.found)
    ]
    captured = [
        CapturedLine(
            update.label,
            update.own.kind,
            attack,
            update.explained,
            update.scaled,
            own.certificate,
            own.status,
            own.problem if own.status == "ok" else own.reason,
        )
        for some in captured_updates(run.assessments, names)
        for attack, update, own in some
    ]
    attacks = tables.attack_summaries(run.assessments, names)
    return MeasuredPart(MEASURED, ends, tuple(attacks), tuple(best), tuple(captured))


def _bounded(own: Sequence[Assessment], names: Names, theorems: Theorems) -> BoundedPart:
    """One line for each bound on each configuration, its theorems, and where one is missing."""
    ran = [a for a in own if a.status == "ok"]
    counts = Counter(map(names.key, ran))
    found = grouped(((names.key(a), theorems.of(bound)), bound) for a in ran for bound in a.bounds)
    missing = tables.missing_bounds(own, names)
    return BoundedPart(
        BOUNDED,
        tuple(
            _bound(key, bounds, theorem, counts[key]) for (key, theorem), bounds in found.items()
        ),
        tuple(
            Theorem(
                one.number,
                one.name,
                one.prior,
                one.rests_on_prior,
                COVERS.get(one.covers, f"{one.covers} attackers only"),
                one.covers_all,
                one.equation,
                one.assumptions,
                one.accepted,
            )
            for one in dict.fromkeys(theorem for _, theorem in found)
        ),
        tuple(MissingBound(reason, tuple(defenses)) for reason, defenses in missing.items()),
    )


def _bound(
    key: tables.ConfigurationKey, own: Sequence[Bound], theorem: Theorem, experiments: int
) -> BoundLine:
    on_error = own[0].on_error
    values = [bound.value for bound in own]
    levels = tables.defined(bound.psnr for bound in own)
    return BoundLine(
        *key,
        theorem.name,
        LOWER_BOUND if on_error else PROBABILITY,
        value=median(values) if on_error else max(values),
        least=min(values),
        most=max(values),
        psnr=median(levels) if levels else None,
        standard_error=max(tables.defined(b.standard_error for b in own), default=None),
        accepted=None if on_error else own[0].accepted,
        prior=theorem.prior,
        covers_all=theorem.covers_all,
        theorem=theorem.number,
        experiments=len(own),
        of_experiments=experiments,
        verdict=None,
    )


LOWER_BOUND = "lower bound on the mean squared error"
PROBABILITY = "probability of a reconstructed example"


def _strongest(
    run: Run, names: Names, rows: Sequence[tables.Configuration], *, images: bool
) -> list[StrongestLine]:
    best: dict[tuple[tables.ConfigurationKey, str], tuple[float, Assessment]] = {}
    for a in run.assessments:
        if a.status == "ok":
            key = names.key(a), names.attack(a)
            value = math.inf if a.certificate else max(tables.defined(a.psnr), default=-math.inf)
            if key not in best or value > best[key][0]:
                best[key] = value, a
    found = []
    for place, row in enumerate(rows):
        if (row.key, row.strongest_attack) not in best:
            continue
        attack = str(row.strongest_attack)
        _, own = best[row.key, attack]
        shown = own.pictures if images and place < SHOWN else {}
        found.append(
            StrongestLine(
                *row.key,
                row.verdict,
                attack,
                own.seed,
                own.experiment,
                own.psnr,
                own.baseline,
                own.matched,
                own.problem,
                own.certificate,
                dict(shown) or None,
            )
        )
    return found


def training_costs(run: Run, names: Names) -> tuple[TrainingCost, ...]:
    """Test accuracy of each model under each defense, and what is lost against no defense."""
    plain = {
        (names.model(t), t.seed): t.accuracy
        for t in run.trainings
        if t.defense.name == tables.NO_DEFENSE and t.status == "ok"
    }
    made = []
    found = grouped(((names.model(t), names.defense(t)), t) for t in run.trainings)
    for (model, defense), own in found.items():
        ran = [(t.seed, t.accuracy) for t in own if t.status == "ok" and t.accuracy is not None]
        lost = [
            before - accuracy
            for seed, accuracy in ran
            if (before := plain.get((model, seed))) is not None
            and own[0].defense.name != tables.NO_DEFENSE
        ]
        accuracy = tables.mean_of([accuracy for _, accuracy in ran])
        rounds = max(t.rounds for t in own)
        failed = len(own) - len(ran)
        made.append(TrainingCost(model, defense, rounds, accuracy, tables.mean_of(lost), failed))
    return tuple(made)


def _private(
    run: Run,
    names: Names,
    costs: Sequence[TrainingCost],
    statements: Mapping[str, str],
    accountant: Accountant,
) -> list[PrivacyClaim]:
    """The questions for every defense that claims differential privacy."""
    defenses: dict[str, DefenseInfo] = {}
    for a in run.assessments:
        if a.defense.guarantee.lower() == "differential privacy":
            defenses.setdefault(names.defense(a), a.defense)
    statistics = any(a.threat.statistics_known for a in run.assessments)
    found = []
    for label, defense in defenses.items():
        known = privacy.mechanism(defense.settings)
        parts = [
            f"test accuracy {row.accuracy.mean:.1%} over {row.accuracy.n} seeds ({row.model})"
            for row in costs
            if row.defense == label and row.accuracy is not None
        ]
        found.append(
            privacy.of_defense(
                label,
                defense,
                accountant(known[0]) if known else None,
                statements,
                utility="; ".join(parts) or None,
                statistics=statistics,
            )
        )
    return found


def _provenance(run: Run, names: Names) -> Provenance:
    fields = run.info.fields
    kept = ("plan", "data", "versions", "plan_hash", "own_data", "code", "machine")
    return Provenance(
        **{name: fields[name] for name in kept},
        seeds=tuple(sorted({a.seed for a in run.assessments})),
        models={label: model.size for label, model in names.models.items()},
        attacks=tuple(
            AttackInfo(name=label, hash=attack.hash, settings=attack.settings)
            for label, attack in names.attacks.items()
        ),
        defenses=tuple(sorted({a.defense.settings for a in run.assessments})),
    )


def _rerun(run: Run, plan: str) -> RunAgain:
    """How to make the records again: the plan, the command, and what has to be the same."""
    needs = [
        "the versions under Provenance, and a machine of that kind",
        "the same data under the same name: their fingerprint is compared",
    ]
    if run.info.code:
        needs.append("the Python code that the plan names: it runs, so read it first")
    text = why = None
    command = command_of(run.info, plan)
    if any(a.capture for a in run.assessments):
        command = "leakbound attack --update FILE --out DIR"
        why = "the captured updates themselves are not part of the run folder"
    else:
        try:
            text = toml_of(run.info.plan)
        except ValueError as error:
            why = str(error)
    return RunAgain(
        command,
        tuple(needs),
        text,
        clean(run.info.plan_hash),
        _digest(run, "records.jsonl"),
        _digest(run, "utility.jsonl") if run.trainings else None,
        why,
    )


def _digest(run: Run, name: str) -> str | None:
    try:
        return hashlib.sha256(files.read(run.folder / name)).hexdigest()
    except OSError:
        return None
