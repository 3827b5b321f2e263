"""Evidence from a run: measured, bounded and declared risk apart."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from leakbound._util import files
from leakbound._util.groups import grouped
from leakbound._util.text import digest
from leakbound.assess.record import ESTIMATE, Assessment, Bound, is_picture
from leakbound.assess.verdict import verdict
from leakbound.report import tables
from leakbound.report.best_attack import best_attack_tables
from leakbound.report.columns import column_tables
from leakbound.report.equal_utility import equal_utility
from leakbound.report.evidence import auxiliary, parts, privacy, questions, sign_off
from leakbound.report.evidence.privacy import Accountant
from leakbound.report.folder import Run
from leakbound.report.gallery import captured_updates
from leakbound.report.rerun import command_of, toml_of
from leakbound.report.settings import DeclaredTraining
from leakbound.report.tables import RunSummary, Theorem

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
    ESTIMATE: "nobody for certain: it is an estimate, the assumptions say why",
}
LOWER_BOUND = "lower bound on the mean squared error"
PROBABILITY = "probability of a reconstructed example"


def of_run(
    run: Run,
    statements: Mapping[str, str],
    accountant: Accountant,
    *,
    images: bool,
    plan: str = "evidence.toml",
    audited: Sequence[parts.EpsilonPart] = (),
    training: DeclaredTraining | None = None,
) -> parts.Subject:
    """One run as a subject of the report; `plan` names the file in the command to run it again.

    `audited`: audits of the client's code, which stand beside what is declared and bounded.
    `training`: what a deployment file says of all rounds.
    """
    summary = RunSummary(run)
    assessments = run.assessments
    limits = {a.criterion.value for a in assessments}
    declared = auxiliary.declared(statements, auxiliary.of_plan(run.info, assessments))
    known = auxiliary.attacker(run.info, assessments, summary.names)
    limited = auxiliary.thresholds(run.info, assessments, statements.get("accepted_by"))
    measured = _measured(summary)
    claims = _private(summary, statements, accountant)
    checks = _checks(run)
    code_checks = (
        parts.Check(f"The audit of {a.client} found no more than it claims", a.holds, a.verdict)
        for a in audited
    )
    page = sign_off.of_run(
        summary,
        known.auxiliary,
        limited,
        silent=auxiliary.silent(declared),
        sound=all(one.holds is not False for one in checks),
        training=training,
    )
    subject = parts.Subject(
        name=run.info.name,
        sign_off=page,
        questions=(
            *questions.of_nist(claims, declared, measured),
            *questions.of_edpb(page, measured, claims, known.auxiliary, declared),
        ),
        notices=tuple(_notices(run, measured.experiments)),
        checks=(*checks, *code_checks),
        configurations=tuple(summary.configurations),
        measured=measured,
        bounded=_bounded(summary),
        declared=parts.DeclaredPart(DECLARED, declared),
        attacker=known,
        thresholds=limited,
        criterion=assessments[0].criterion,
        threshold=limits.pop() if len(limits) == 1 else None,
        strongest=tuple(_strongest(summary, images=images)),
        utility=tuple(summary.costs.values()),
        equal_utility=equal_utility(assessments, run.trainings, summary.names),
        differential_privacy=tuple(claims),
        epsilon_audits=tuple(audited),
        training=training,
        provenance=_provenance(summary),
        rerun=_rerun(run, plan),
    )
    return parts.cleaned(subject)


def _notices(run: Run, ends: parts.Ends) -> list[str]:
    notices = []
    if run.missing:
        here = f"{ends.present} of {ends.planned} experiments are here"
        notices.append(f"The run is not finished: {here}.")
    if ends.failed:
        notices.append(f"{ends.failed} of {ends.present} experiments failed: they show nothing.")
    failed = sum(training.status == "failed" for training in run.trainings)
    if failed:
        notices.append(f"{failed} of {len(run.trainings)} trainings failed and enter no mean.")
    if not all(a.truth_known for a in run.assessments):
        notices.append(
            "The true examples of captured updates are not known: nothing is measured there."
        )
    if not run.trainings:
        notices.append("No training was run: what the defenses cost in accuracy is not measured.")
    return notices


def _checks(run: Run) -> list[parts.Check]:
    """What could be computed again from the folder alone."""
    present = len(run.assessments)
    planned = run.info.experiments
    follow = sum(map(_follows, run.assessments))
    pictures = sorted({name for a in run.assessments for name in a.pictures.values()})
    whole = sum(is_picture(run.folder / "pictures" / name) for name in pictures)
    plan = digest(run.info.plan)
    rows = {
        "The plan belongs to its hash": (plan == run.info.plan_hash, plan),
        "Every verdict follows from its own record": (follow == present, f"{follow} of {present}"),
        "All planned experiments are here": (present == planned, f"{present} of {planned}"),
    }
    if pictures:
        named = whole == len(pictures), f"{whole} of {len(pictures)}"
        rows["Every picture has the name of its content"] = named
    return [parts.Check(words, *outcome) for words, outcome in rows.items()]


def _follows(record: Assessment) -> bool:
    """Whether a record's verdict is what its own matches and bounds give."""
    # What did not run decides nothing.
    if record.status != "ok":
        return record.verdict in (None, "undecided")
    for bound in record.bounds:
        if bound.covers != "all" or bound.probability is None or bound.accepted is None:
            continue
        # A record that claims an exclusion which its own numbers deny was changed by hand.
        if bound.excludes_threshold != (bound.probability <= bound.accepted):
            return False
    try:
        return record.verdict == verdict(
            record.matched,
            record.bounds,
            certified=bool(record.certificate),
            attained=record.attained,
            facts=record.facts,
        )
    except RuntimeError:  # what was matched and what is excluded contradict each other
        return False


def _measured(summary: RunSummary) -> parts.MeasuredPart:
    run = summary.run
    names = summary.names
    count = Counter(a.status for a in run.assessments)
    best = [
        parts.BestAttackLine(
            table.model,
            table.batch_size,
            row.defense,
            rmse=error.rmse,
            low=error.low if error.n > 1 else None,
            high=error.high if math.isfinite(error.high) else None,
            level=tables.LEVEL,
            attack=error.attack,
            baseline_rmse=error.baseline,
            rounds=error.n,
            left_out=row.left_out,
        )
        for table in best_attack_tables(run.assessments, run.trainings, names)
        for row in table.rows
        if (error := row.found) is not None
    ]
    captured = [
        parts.CapturedLine(
            update.label,
            update.own.kind,
            attack,
            explained=update.explained,
            at_best_length=update.scaled,
            proof=a.certificate,
            status=a.status,
            note=(a.problem or a.layer_input) if a.status == "ok" else a.reason,
        )
        for some in captured_updates(run.assessments, names)
        for attack, update, a in some
    ]
    return parts.MeasuredPart(
        MEASURED,
        parts.Ends(
            planned=run.info.experiments,
            present=len(run.assessments),
            ok=count["ok"],
            not_applicable=count["not_applicable"],
            failed=count["failed"],
        ),
        attacks=tuple(summary.attacks),
        best_attack=tuple(best),
        captured=tuple(captured),
        columns=tuple(column_tables(run.assessments, names, summary.configurations[:SHOWN])),
    )


def _bounded(summary: RunSummary) -> parts.BoundedPart:
    names = summary.names
    ran = [a for a in summary.assessments if a.status == "ok"]
    counts = Counter(map(names.key, ran))
    bounds = grouped(
        ((names.key(a), summary.theorems.of(bound)), bound) for a in ran for bound in a.bounds
    )
    lines = [_bound(key, some, theorem, counts[key]) for (key, theorem), some in bounds.items()]
    theorems = [
        replace(theorem, covers=COVERS.get(theorem.covers, f"{theorem.covers} attackers only"))
        for theorem in dict.fromkeys(theorem for _, theorem in bounds)
    ]
    missing = tables.missing_bounds(summary.assessments, names)
    why = [parts.MissingBound(reason, tuple(defenses)) for reason, defenses in missing.items()]
    return parts.BoundedPart(BOUNDED, tuple(lines), tuple(theorems), tuple(why))


def _bound(
    key: tables.ConfigurationKey,
    bounds: Sequence[Bound],
    theorem: Theorem,
    experiments: int,
) -> parts.BoundLine:
    on_error = bounds[0].on_error
    values = [bound.value for bound in bounds]
    levels = tables.defined(bound.psnr for bound in bounds)
    kind = LOWER_BOUND if on_error else PROBABILITY
    if on_error and bounds[0].covers == ESTIMATE:
        kind = f"{ESTIMATE} of a {LOWER_BOUND}"
    return parts.BoundLine(
        *key,
        theorem.name,
        kind,
        value=median(values) if on_error else max(values),
        least=min(values),
        most=max(values),
        psnr=median(levels) if levels else None,
        standard_error=max(tables.defined(b.standard_error for b in bounds), default=None),
        accepted=None if on_error else bounds[0].accepted,
        prior=theorem.prior,
        covers_all=theorem.covers_all,
        theorem=theorem.number,
        experiments=len(bounds),
        of_experiments=experiments,
    )


def _strongest(
    summary: RunSummary,
    *,
    images: bool,
) -> list[parts.StrongestLine]:
    names = summary.names
    ran = grouped((names.attack_key(a), a) for a in summary.assessments if a.status == "ok")

    def closeness(a: Assessment) -> float:
        return math.inf if a.certificate else max(tables.defined(a.scores), default=-math.inf)

    lines = []
    for place, row in enumerate(summary.configurations):
        attack = str(row.strongest_attack)
        if (*row.key, attack) in ran:
            a = max(ran[*row.key, attack], key=closeness)
            line = parts.StrongestLine(
                *row.key,
                row.verdict,
                attack,
                seed=a.seed,
                experiment=a.experiment,
                score=a.scores,
                baseline_score=a.baseline,
                matched=a.matched,
                problem=a.problem,
                proof=a.certificate,
                pictures=(dict(a.pictures) or None) if images and place < SHOWN else None,
            )
            lines.append(line)
    return lines


def _private(
    summary: RunSummary,
    statements: Mapping[str, str],
    accountant: Accountant,
) -> list[parts.PrivacyClaim]:
    statistics = any(a.threat.statistics_known for a in summary.assessments)
    defenses = grouped((summary.names.defense(a), a.defense) for a in summary.assessments)
    claims = []
    for label, (defense, *_) in defenses.items():
        if defense.guarantee.lower() != "differential privacy":
            continue
        known = privacy.mechanism(defense.settings)
        epsilons = accountant(known[0]) if known else None
        utility = "; ".join(
            f"test accuracy {row.accuracy.mean:.1%} over {row.accuracy.n} seeds ({row.model})"
            for row in summary.costs.values()
            if row.defense == label and row.accuracy is not None
        )
        claim = privacy.of_defense(
            label,
            defense,
            epsilons,
            statements,
            utility=utility or None,
            statistics=statistics,
        )
        claims.append(claim)
    return claims


def _provenance(summary: RunSummary) -> parts.Provenance:
    run = summary.run
    names = summary.names
    fields = run.info.fields
    kept = ("plan", "data", "versions", "plan_hash", "own_data", "code", "machine")
    return parts.Provenance(
        **{name: fields[name] for name in kept},
        seeds=tuple(sorted({a.seed for a in run.assessments})),
        models={label: model.size for label, model in names.models.items()},
        attacks=tuple(replace(attack, name=label) for label, attack in names.attacks.items()),
        defenses=tuple(sorted({a.defense.settings for a in run.assessments})),
    )


def _rerun(run: Run, plan: str) -> parts.RunAgain:
    needs = [
        "the versions under Provenance, and a machine of that kind",
        "the same data under the same name: their fingerprint is compared",
    ]
    if run.info.code:
        needs.append("the Python code that the plan names: it runs, so read it first")
    text = None
    why = None
    command = command_of(run.info, plan)
    if any(a.capture for a in run.assessments):
        command = "leakbound attack --update FILE --model MODEL --input-shape SHAPE --out DIR"
        why = "the captured updates themselves are not part of the run folder"
    else:
        try:
            text = toml_of(run.info.plan)
        except ValueError as error:
            why = str(error)
    made = digests(run.folder, ["records.jsonl", *["utility.jsonl"] * bool(run.trainings)])
    return parts.RunAgain(
        command,
        tuple(needs),
        plan=text,
        plan_hash=parts.clean(run.info.plan_hash),
        records_sha256=made.get("records.jsonl"),
        utility_sha256=made.get("utility.jsonl"),
        why_not=why,
    )


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of files in a folder by their names, of those that can be read."""
    hashes = {}
    for name in names:
        with suppress(OSError):
            hashes[name] = hashlib.sha256(files.read(folder / name)).hexdigest()
    return hashes
