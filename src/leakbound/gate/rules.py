"""Whether the requirements of a policy hold. Every rule here is another module's: this asks it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import singledispatch
from pathlib import Path
from typing import Any

import msgspec

from leakbound import inspection, tensors
from leakbound._util.formats import format_upper
from leakbound.assess.record import (
    DISCLOSURES,
    EXPOSURES,
    NOT_RUN,
    RECOVERABLE,
    VERDICTS,
    Assessment,
)
from leakbound.audit import Progress, run_audit
from leakbound.audit_epsilon import finding
from leakbound.captured.capture import Capture
from leakbound.captured.observe import task_of
from leakbound.domains import of_shape
from leakbound.domains.known import names_in
from leakbound.gate import client
from leakbound.gate.policy import (
    BROKEN,
    CODES,
    HOLDS,
    UNSURE,
    Answer,
    AuditPolicy,
    ClientPolicy,
    DeploymentPolicy,
    EpsilonPolicy,
    GatePolicy,
    ModelPolicy,
    Requirement,
    answer_of,
)
from leakbound.report import folder, tables
from leakbound.report.compare import compare
from leakbound.risk.deployment import file, state
from leakbound.risk.deployment.calibrate import gain_of
from leakbound.risk.deployment.laws import laws_of
from leakbound.risk.deployment.statement import OF, WHO

SHOWN = 3
"""How many offenders a sentence names."""


def decide(
    policy: GatePolicy,
    *,
    workers: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> list[Requirement]:
    """Every requirement of a policy with its answer; `say` gets what starts, with its code.

    Example:
        >>> table = AuditPolicy(folder="no/run", exposed=0)
        >>> stated = GatePolicy(Path("policy.toml"), "", (("audit", 0, table),))
        >>> [(one.subject, one.key, one.answer) for one in decide(stated)]
        [('audit 1', 'audit', 'cannot tell')]
    """
    requirements = []
    for kind, place, table in policy.tables:
        rows = list[Requirement]()
        subject = f"{kind} {place + 1}"
        code = [getattr(table, key, None) for key in ("update", "facts", "model", "plan")]
        say("checking " + ", ".join([subject, *filter(None, code)]))
        try:
            for row in _answers(table, policy.path.parent, workers):
                rows.append(row)  # kept, whatever the next one raises
            if not rows:
                raise ValueError("this table requires nothing; state what must hold")
        except (ValueError, OSError) as error:
            rows.append(Requirement(kind, "it can be checked", str(error), UNSURE))
        for row in rows:
            if not row.file:
                line = file.line_of(policy.text, f"{kind}.{place}.{row.key}")
                row = replace(row, file=str(policy.path), line=line)
            requirements.append(replace(row, subject=subject))
    return requirements


def worst(answers: Sequence[Answer]) -> Answer:
    return max(answers, key=[*CODES].index)


@singledispatch
def _answers(
    table: Any,
    base: Path,
    workers: int,
) -> Iterator[Requirement]:
    raise NotImplementedError(type(table))


@_answers.register
def _of_audit(
    table: AuditPolicy,
    base: Path,
    workers: int,
) -> Iterator[Requirement]:
    run = _run(table, base, workers)
    names = tables.Names(run.assessments, run.trainings)
    every = tables.configurations(run.assessments, names)
    rows = [row for row in every if _counts(table, row.defense)]
    for name in table.defenses:
        if not any(_is(name, row.defense) for row in every):
            known = ", ".join(dict.fromkeys(row.defense for row in every))
            raise ValueError(f"no configuration has the defense {name!r}; known: {known}")
    # what did not run may be exposed, too
    counts = {
        "experiments failed": sum(row.failed for row in rows),
        "experiments are missing": run.missing,
        "configurations were not run": sum(row.verdict == NOT_RUN for row in rows),
    }
    gaps = [f"{count} {how}" for how, count in counts.items() if count]
    if table.exposed is not None:
        bad = [row for row in rows if row.verdict in (*EXPOSURES, *DISCLOSURES)]
        answer = answer_of(broken=len(bad) > table.exposed, unsure=bool(gaps))
        stated = f"at most {table.exposed} configurations are exposed"
        words = _words(f"{len(bad)} of {len(rows)}", bad, gaps)
        yield Requirement(
            "exposed",
            stated,
            words,
            answer,
            numbers=(len(bad), table.exposed),
        )
    if table.verdict is not None:
        least = VERDICTS.index(table.verdict)
        bad = [row for row in rows if VERDICTS.index(row.verdict) < least]
        shown = any(row.verdict in (*EXPOSURES, *DISCLOSURES, RECOVERABLE) for row in bad)
        answer = answer_of(broken=shown, unsure=bool(bad or gaps))
        words = _words(f"{len(rows) - len(bad)} of {len(rows)} are", bad, gaps)
        stated = f"each verdict is at least {table.verdict!r}"
        yield Requirement(
            "verdict",
            stated,
            words,
            answer,
            numbers=(len(bad), 0),
        )
    counted = [a for a in run.assessments if _counts(table, names.defense(a))]
    if table.known is not None:
        yield _known(table.known, counted)
    if table.gain is not None:
        yield _gain(table.gain, counted, names)
    if table.named is not None:
        yield _named(table.named, rows)
    if table.accuracy_cost is not None:
        yield _cost(table, table.accuracy_cost, tables.training_costs(run.trainings, names))
    if table.no_worse_than is not None:
        yield from _no_worse(table, folder.read(base / table.no_worse_than), run)


def _known(stated: str, assessments: Sequence[Assessment]) -> Requirement:
    """Whether every experiment was against an attacker who has these parts of the examples."""
    wanted = {*names_in(stated)}
    held = {one.threat.known for one in assessments}
    others = {known for known in held if not wanted <= {*names_in(known)}}
    words = ", ".join(sorted(one or "nothing" for one in others)) or stated
    return Requirement(
        "known",
        f"the attacker has {stated} of every example",
        f"the attacker has {words}",
        # A weaker attacker shows nothing of a stronger one.
        answer_of(broken=False, unsure=bool(others) or not assessments),
        numbers=(len(others), 0),
    )


def _gain(limit: float, assessments: Sequence[Assessment], names: tables.Names) -> Requirement:
    """Whether one update adds little for anyone, whatever they know."""
    ran = [one for one in assessments if one.status == "ok"]
    open_ = dict.fromkeys(names.defense(one) for one in ran if not one.attackers)
    gains = [row.gain for one in ran for row in one.attackers if row.attacker == "anyone"]
    words = [f"at most {format_upper(max(gains), 4)}"] if gains else []
    words += [f"no bound: {', '.join([*open_][:SHOWN])}"] * bool(open_)
    return Requirement(
        "gain",
        f"one update adds at most {limit:g} for anyone",
        "; ".join(words) or "no experiment ran",
        answer_of(broken=any(one > limit for one in gains), unsure=bool(open_) or not gains),
        numbers=(max(gains), limit) if gains else None,
    )


def _named(limit: float, rows: Sequence[tables.Configuration]) -> Requirement:
    """Whether nobody names persons more often: by the bound; attacks only show that somebody does.

    Of a small gallery chance alone may exceed the limit.
    """
    found = [(row, row.identified) for row in rows if row.verdict != NOT_RUN]
    words = []
    bounds = []
    for row, one in found:
        if one is None:
            words.append(f"{row.defense}: not tested")
            continue
        said = "no bound" if one.bound is None else f"at most {format_upper(one.bound, 4)}"
        count = f"{one.share.hits} of {one.share.n} named right of {one.candidates}"
        words.append(f"{row.defense}, {row.model}, batch {row.batch_size}: {said}; {count}")
        bounds.append(1.0 if one.bound is None else one.bound)
    known = [one for _, one in found if one is not None]
    open_ = len(known) < len(found) or not known or max(bounds) > limit
    more = [f"{len(words) - SHOWN} more"] * (len(words) > SHOWN)
    return Requirement(
        "named",
        f"a person is named with probability {limit:g} at most",
        "; ".join([*words[:SHOWN], *more]) or "no experiment ran",
        answer_of(broken=any(one.share.low > limit for one in known), unsure=open_),
        numbers=(max(bounds), limit) if bounds else None,
    )


def _run(
    table: AuditPolicy,
    base: Path,
    workers: int,
) -> folder.Run:
    """The audit's records; of a plan, after it has run within its time."""
    place = None if table.folder is None else base / table.folder
    if table.plan is None:
        assert place is not None  # asked by the policy
        return folder.read(place)
    end = time.monotonic() + table.seconds

    def watch(now: Progress) -> None:
        left = end - time.monotonic()
        need = now.left or 0.0
        if now.done < now.total and (left < 0 or (not now.done and need > left)):
            raise ValueError(
                f"the audit of {table.plan} takes about {need:.0f} s more, with {left:.0f} of "
                f"{table.seconds:g} s left; give more seconds or a smaller plan"
            )

    done = run_audit(
        base / table.plan,
        out=place,
        workers=workers,
        pictures=False,
        watch=watch,
    )
    return folder.read(done.folder)


def _counts(table: AuditPolicy, defense: str) -> bool:
    return not table.defenses or any(_is(name, defense) for name in table.defenses)


def _is(name: str, defense: str) -> bool:
    """Whether a name, or a label with its settings, means the defense of that label."""
    return tables.title(name) in (defense, defense.split()[0])


def _words(
    first: str,
    bad: Sequence[tables.Configuration],
    gaps: Sequence[str],
) -> str:
    words = [f"{row.defense}, {row.model}, batch {row.batch_size}: {row.verdict}" for row in bad]
    more = [f"{len(bad) - SHOWN} more"] * (len(bad) > SHOWN)
    return "; ".join([first, *words[:SHOWN], *more, *gaps[:SHOWN]])


def _no_worse(
    table: AuditPolicy,
    before: folder.Run,
    run: folder.Run,
) -> Iterator[Requirement]:
    both = compare(before, run)
    pairs = [pair for pair in both.verdicts if _counts(table, pair.first.defense)]
    worse = [pair.second for pair in pairs if pair.change < 0]
    lost = [f"{key[2]} with {key[3]} is only there" for key, _ in both.only[0]]
    gaps = [*both.grave, *(words for words in lost if _counts(table, words))]
    gaps += ["no configuration is in both"] * (not pairs)
    answer = answer_of(broken=bool(worse) and not both.grave, unsure=bool(gaps))
    words = _words(f"{len(worse)} of {len(pairs)} are less safe", worse, gaps)
    stated = f"no verdict is worse than in {before.folder}"
    yield Requirement(
        "no_worse_than",
        stated,
        words,
        answer,
        numbers=(len(worse), 0),
    )
    if table.higher_scores is not None:
        rows = [row for row in both.attacks if row.score and _counts(table, row.key[2])]
        higher = [row for row in rows if row.score and row.score.side > 0]
        many = len(higher) > table.higher_scores
        answer = answer_of(broken=many and not both.grave, unsure=bool(both.grave))
        labels = [f"{row.attack} on {row.key[2]}, batch {row.key[1]}" for row in higher[:SHOWN]]
        words = f"{len(higher)} of {len(rows)}; about {0.025 * len(rows):.1f} by chance"
        stated = f"at most {table.higher_scores} attacks score visibly higher"
        words = "; ".join([words, *labels, *both.grave])
        numbers = (len(higher), table.higher_scores)
        yield Requirement(
            "higher_scores",
            stated,
            words,
            answer,
            numbers=numbers,
        )


def _cost(
    table: AuditPolicy,
    limit: float,
    costs: dict[tuple[str, str], tables.TrainingCost],
) -> Requirement:
    """Decided by the interval over training seeds: by its upper end it holds, by its lower not."""
    words = []
    answers = list[Answer]()
    means = list[float]()
    for (_, label), row in costs.items():
        if label == tables.title(tables.NO_DEFENSE) or not _counts(table, label):
            continue
        answer: Answer = UNSURE
        lost = row.lost
        # a model that learned nothing loses nothing by a defense
        if row.unskilled:
            cost = "the undefended training did not beat the majority class"
        elif lost is None or lost.low is None or lost.high is None or row.failed:
            ran = 0 if row.accuracy is None else row.accuracy.n
            cost = f"no interval ({ran} trainings, {row.failed} failed)"
        else:
            mean, low, high = (100 * share for share in (lost.mean, lost.low, lost.high))
            answer = answer_of(broken=low > limit, unsure=high > limit)
            means.append(mean)
            cost = f"{mean:.2f} [{low:.2f}, {high:.2f}], {lost.n} seeds"
        answers.append(answer)
        words.append(f"{label}: {cost}")
    if not answers:
        words = ["there is no training of a defense ([utility])"]
        answers = [UNSURE]
    stated = f"a defense costs at most {limit:g} points of accuracy"
    numbers = (max(means), limit) if means else None
    return Requirement(
        "accuracy_cost",
        stated,
        "; ".join(words),
        worst(answers),
        numbers=numbers,
    )


@_answers.register
def _of_deployment(
    table: DeploymentPolicy,
    base: Path,
    workers: int,
) -> Iterator[Requirement]:
    path = base / table.file
    deployment, mistakes = file.read(path)
    words = [f"{one.name}: {one.text}" for one in mistakes[:SHOWN]]
    allowed = table.mistakes or 0
    many = len(mistakes) > allowed
    yield Requirement(
        "mistakes",
        f"{table.file} has at most {allowed} mistakes",
        "; ".join([str(len(mistakes)), *words]),
        answer_of(broken=many),
        file=str(path) if many else "",
        line=mistakes[0].line if many else None,
        numbers=(len(mistakes), allowed),
    )
    # the last row of `rises` is then that of this prior
    known = msgspec.structs.replace(deployment.record, kappa=table.prior)
    deployment = msgspec.structs.replace(deployment, record=known)
    rows = state(deployment, delta=table.delta, audiences=table.audience)
    rows = tuple(row for row in rows if not table.unit or row.unit in table.unit)
    if not rows or {*table.unit} - {row.unit for row in rows}:
        raise ValueError(f"{table.file} says nothing of {', '.join(table.unit)}; give another unit")
    if (table.epsilon, table.success, table.gain, table.mistakes) == (None,) * 4:
        raise ValueError(
            f"nothing is required of what {table.file} protects; state epsilon, success or gain "
            "(or mistakes, if it only has to be free of them)"
        )
    gains: dict[tuple[str, str], float] = {}
    if table.gain is not None:
        gains = {(law.audience, law.unit): gain_of(law) for law in laws_of(deployment)}
    for row in rows:
        of = f"({WHO[row.audience]}, {OF[row.unit]})"
        bounds = (
            ("epsilon", table.epsilon, row.epsilon, f"at delta {table.delta:g}"),
            ("success", table.success, row.rises[-1][1], f"for a prior of {table.prior:g}"),
            ("gain", table.gain, gains.get((row.audience, row.unit)), "for anyone"),
        )
        for key, limit, value, at in bounds:
            if limit is None:
                continue
            words = ["infinite" if value is None else f"at most {format_upper(value, 4)}"]
            answer = answer_of(broken=value is None or value > limit)
            if row.missing and answer == BROKEN:  # it may be the worst case of what is missing
                answer = UNSURE
                words.append(f"not stated: {', '.join(row.missing)}")
            stated = f"{key} at most {limit:g} {at} {of}"
            numbers = None if value is None else (value, limit)
            yield Requirement(
                key,
                stated,
                "; ".join(words),
                answer,
                numbers=numbers,
            )


@_answers.register
def _of_epsilon(
    table: EpsilonPolicy,
    base: Path,
    workers: int,
) -> Iterator[Requirement]:
    audited = finding.read(base / table.file)
    claimed = [eps for eps in (table.epsilon, audited.claims.declared) if eps is not None]
    claims = replace(audited.claims, declared=min(claimed, default=None))
    audited = replace(audited, claims=claims)
    answers: dict[int, Answer] = {finding.CONSISTENT: HOLDS, finding.LEAKS: BROKEN}
    stated = f"no epsilon above its claim is found in {table.file}, at delta {claims.delta:g}"
    numbers = None if claims.least is None else (audited.best.epsilon, claims.least)
    answer = answers.get(audited.code, UNSURE)
    yield Requirement(
        "file",
        stated,
        audited.sentence,
        answer,
        numbers=numbers,
    )


@_answers.register
def _of_client(
    table: ClientPolicy,
    base: Path,
    workers: int,
) -> Iterator[Requirement]:
    return client.answers(table, base)


@_answers.register
def _of_model(
    table: ModelPolicy,
    base: Path,
    workers: int,
) -> Iterator[Requirement]:
    net = client.built(table)
    named = dict(net.state_dict()) if table.file is None else tensors.read(base / table.file)[0]
    form = of_shape(table.input_shape, table.input_range)
    task, _ = task_of(net, Capture("weights", "weights", named, named), form)
    marks = inspection.inspect(task, input_shape=table.input_shape)
    words = "; ".join(f"{mark.kind}: {mark.words}" for mark in marks[:SHOWN])
    stated = f"{table.file or table.model} has no mark of a malicious model"
    answer = answer_of(broken=bool(marks))
    yield Requirement(
        "file",
        stated,
        words or inspection.NOT_SAFE,
        answer,
        numbers=(len(marks), 0),
    )
