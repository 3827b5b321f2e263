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
from leakbound.assess.record import DISCLOSURES, EXPOSURES, NOT_RUN, RECOVERABLE, VERDICTS
from leakbound.audit import Progress, run_audit
from leakbound.audit_epsilon import finding
from leakbound.captured.capture import Capture
from leakbound.captured.observe import task_of
from leakbound.domains import of_shape
from leakbound.gate import client
from leakbound.gate import policy as policies
from leakbound.gate.policy import (
    BROKEN,
    CODES,
    HOLDS,
    UNSURE,
    Answer,
    Requirement,
    answer_of,
)
from leakbound.report import folder, tables
from leakbound.report.compare import compare
from leakbound.risk.deployment import file, state
from leakbound.risk.deployment.statement import OF, WHO

SHOWN = 3
"""How many offenders a sentence names."""


def decide(
    policy: policies.GatePolicy, *, workers: int = 1, say: Callable[[str], None] = lambda text: None
) -> list[Requirement]:
    """Every requirement of a policy with its answer; `say` gets what starts, with its code.

    Example:
        >>> own = policies.AuditPolicy(folder="no/run", exposed=0)
        >>> stated = policies.GatePolicy(Path("policy.toml"), "", (("audit", 0, own),))
        >>> [(one.subject, one.key, one.answer) for one in decide(stated)]
        [('audit 1', 'audit', 'cannot tell')]
    """
    found = []
    for kind, place, own in policy.tables:
        rows = list[Requirement]()
        subject = f"{kind} {place + 1}"
        code = [getattr(own, key, None) for key in ("update", "facts", "model", "plan")]
        say("checking " + ", ".join([subject, *filter(None, code)]))
        try:
            for row in _answers(own, policy.path.parent, workers):
                rows.append(row)  # kept, whatever the next one raises
            if not rows:
                raise ValueError("this table requires nothing; state what must hold")
        except (ValueError, OSError) as error:
            rows.append(Requirement(kind, "it can be checked", str(error), UNSURE))
        for row in rows:
            line = file.line_of(policy.text, f"{kind}.{place}.{row.key}")
            where = (row.file, row.line) if row.file else (str(policy.path), line)
            found.append(replace(row, subject=subject, file=where[0], line=where[1]))
    return found


def worst(answers: Sequence[Answer]) -> Answer:
    return max(answers, key=[*CODES].index)


@singledispatch
def _answers(own: Any, base: Path, workers: int) -> Iterator[Requirement]:
    raise NotImplementedError(type(own))


@_answers.register
def _of_audit(own: policies.AuditPolicy, base: Path, workers: int) -> Iterator[Requirement]:
    run = _run(own, base, workers)
    names = tables.Names(run.assessments, run.trainings)
    every = tables.configurations(run.assessments, names)
    rows = [row for row in every if _counts(own, row.defense)]
    for name in own.defenses:
        if not any(_is(name, row.defense) for row in every):
            known = ", ".join(dict.fromkeys(row.defense for row in every))
            raise ValueError(f"no configuration has the defense {name!r}; known: {known}")
    # what did not run may be exposed, too
    idle = sum(row.verdict == NOT_RUN for row in rows)
    counts = {
        "experiments failed": sum(row.failed for row in rows),
        "experiments are missing": run.missing,
        "configurations were not run": idle,
    }
    gaps = [f"{count} {how}" for how, count in counts.items() if count]
    if own.exposed is not None:
        bad = [row for row in rows if row.verdict in (*EXPOSURES, *DISCLOSURES)]
        answer = answer_of(broken=len(bad) > own.exposed, unsure=bool(gaps))
        stated = f"at most {own.exposed} configurations are exposed"
        words = _words(f"{len(bad)} of {len(rows)}", bad, gaps)
        yield Requirement("exposed", stated, words, answer, numbers=(len(bad), own.exposed))
    if own.verdict is not None:
        least = VERDICTS.index(own.verdict)
        bad = [row for row in rows if VERDICTS.index(row.verdict) < least]
        shown = any(row.verdict in (*EXPOSURES, *DISCLOSURES, RECOVERABLE) for row in bad)
        answer = answer_of(broken=shown, unsure=bool(bad or gaps))
        words = _words(f"{len(rows) - len(bad)} of {len(rows)} are", bad, gaps)
        stated = f"each verdict is at least {own.verdict!r}"
        yield Requirement("verdict", stated, words, answer, numbers=(len(bad), 0))
    if own.accuracy_cost is not None:
        yield _cost(own, own.accuracy_cost, tables.training_costs(run.trainings, names))
    if own.no_worse_than is not None:
        yield from _no_worse(own, folder.read(base / own.no_worse_than), run)


def _run(own: policies.AuditPolicy, base: Path, workers: int) -> folder.Run:
    """The audit's records; of a plan, after it has run within its time."""
    place = None if own.folder is None else base / own.folder
    end = time.monotonic() + own.seconds
    if own.plan is None:
        assert place is not None  # asked by the policy
        return folder.read(place)

    def watch(now: Progress) -> None:
        left = end - time.monotonic()
        need = now.left or 0.0
        if now.done < now.total and (left < 0 or (not now.done and need > left)):
            raise ValueError(
                f"the audit of {own.plan} takes about {need:.0f} s more, with {left:.0f} of "
                f"{own.seconds:g} s left; give more seconds or a smaller plan"
            )

    done = run_audit(base / own.plan, out=place, workers=workers, pictures=False, watch=watch)
    return folder.read(done.folder)


def _counts(own: policies.AuditPolicy, defense: str) -> bool:
    return not own.defenses or any(_is(name, defense) for name in own.defenses)


def _is(name: str, defense: str) -> bool:
    """Whether a name, or a label with its settings, means the defense of that label."""
    return tables.title(name) in (defense, defense.split()[0])


def _words(first: str, bad: Sequence[tables.Configuration], gaps: Sequence[str]) -> str:
    words = [f"{row.defense}, {row.model}, batch {row.batch_size}: {row.verdict}" for row in bad]
    more = [f"{len(bad) - SHOWN} more"] * (len(bad) > SHOWN)
    return "; ".join([first, *words[:SHOWN], *more, *gaps[:SHOWN]])


def _no_worse(
    own: policies.AuditPolicy, before: folder.Run, run: folder.Run
) -> Iterator[Requirement]:
    found = compare(before, run)
    pairs = [pair for pair in found.verdicts if _counts(own, pair.first.defense)]
    worse = [pair.second for pair in pairs if pair.change < 0]
    lost = [f"{key[2]} with {key[3]} is only there" for key, _ in found.only[0]]
    gaps = [*found.grave, *(words for words in lost if _counts(own, words))]
    gaps += ["no configuration is in both"] * (not pairs)
    answer = answer_of(broken=bool(worse) and not found.grave, unsure=bool(gaps))
    words = _words(f"{len(worse)} of {len(pairs)} are less safe", worse, gaps)
    stated = f"no verdict is worse than in {before.folder}"
    yield Requirement("no_worse_than", stated, words, answer, numbers=(len(worse), 0))
    if own.higher_scores is not None:
        rows = [row for row in found.attacks if row.score and _counts(own, row.key[2])]
        higher = [row for row in rows if row.score and row.score.side > 0]
        many = len(higher) > own.higher_scores
        answer = answer_of(broken=many and not found.grave, unsure=bool(found.grave))
        labels = [f"{row.attack} on {row.key[2]}, batch {row.key[1]}" for row in higher[:SHOWN]]
        words = f"{len(higher)} of {len(rows)}; about {0.025 * len(rows):.1f} by chance"
        stated = f"at most {own.higher_scores} attacks score visibly higher"
        words = "; ".join([words, *labels, *found.grave])
        numbers = (len(higher), own.higher_scores)
        yield Requirement("higher_scores", stated, words, answer, numbers=numbers)


def _cost(
    own: policies.AuditPolicy, limit: float, found: dict[tuple[str, str], tables.TrainingCost]
) -> Requirement:
    """Decided by the interval over training seeds: by its upper end it holds, by its lower not."""
    words = []
    answers = list[Answer]()
    means = list[float]()
    for (_, label), row in found.items():
        if label == tables.title(tables.NO_DEFENSE) or not _counts(own, label):
            continue
        # a model that learned nothing loses nothing by a defense
        if row.unskilled:
            answers.append(UNSURE)
            words.append(f"{label}: the undefended training did not beat the majority class")
            continue
        if row.lost is None or row.lost.low is None or row.lost.high is None or row.failed:
            answers.append(UNSURE)
            ran = 0 if row.accuracy is None else row.accuracy.n
            words.append(f"{label}: no interval ({ran} trainings, {row.failed} failed)")
            continue
        mean, low, high = (100 * x for x in (row.lost.mean, row.lost.low, row.lost.high))
        answers.append(answer_of(broken=low > limit, unsure=high > limit))
        means.append(mean)
        words.append(f"{label}: {mean:.2f} [{low:.2f}, {high:.2f}], {row.lost.n} seeds")
    if not answers:
        words = ["there is no training of a defense ([utility])"]
        answers = [UNSURE]
    stated = f"a defense costs at most {limit:g} points of accuracy"
    numbers = (max(means), limit) if means else None
    return Requirement("accuracy_cost", stated, "; ".join(words), worst(answers), numbers=numbers)


@_answers.register
def _of_deployment(
    own: policies.DeploymentPolicy, base: Path, workers: int
) -> Iterator[Requirement]:
    path = base / own.file
    given, mistakes = file.read(path)
    words = [f"{one.name}: {one.text}" for one in mistakes[:SHOWN]]
    allowed = own.mistakes or 0
    found = "; ".join([str(len(mistakes)), *words])
    many = len(mistakes) > allowed
    stated = f"{own.file} has at most {allowed} mistakes"
    where = (str(path), mistakes[0].line) if many else ("", None)
    answer = answer_of(broken=many)
    yield Requirement(
        "mistakes", stated, found, answer, "", *where, numbers=(len(mistakes), allowed)
    )
    # the last row of `rises` is then that of this prior
    known = msgspec.structs.replace(given.record, kappa=own.prior)
    given = msgspec.structs.replace(given, record=known)
    rows = state(given, delta=own.delta, audiences=own.audience)
    rows = tuple(row for row in rows if not own.unit or row.unit in own.unit)
    if not rows or {*own.unit} - {row.unit for row in rows}:
        raise ValueError(f"{own.file} says nothing of {', '.join(own.unit)}; give another unit")
    if (own.epsilon, own.success, own.mistakes) == (None, None, None):
        raise ValueError(
            f"nothing is required of what {own.file} protects; state epsilon or success (or "
            "mistakes, if it only has to be free of them)"
        )
    for row in rows:
        of = f"({WHO[row.audience]}, {OF[row.unit]})"
        bounds = (
            ("epsilon", own.epsilon, row.epsilon, f"at delta {own.delta:g}"),
            ("success", own.success, row.rises[-1][1], f"for a prior of {own.prior:g}"),
        )
        for key, limit, value, at in bounds:
            if limit is not None:
                found = "infinite" if value is None else f"at most {format_upper(value, 4)}"
                answer = answer_of(broken=value is None or value > limit)
                if row.missing and answer == BROKEN:  # it may be the worst case of what is missing
                    answer = UNSURE
                    found = f"{found}; not stated: {', '.join(row.missing)}"
                stated = f"{key} at most {limit:g} {at} {of}"
                numbers = None if value is None else (value, limit)
                yield Requirement(key, stated, found, answer, numbers=numbers)


@_answers.register
def _of_epsilon(own: policies.EpsilonPolicy, base: Path, workers: int) -> Iterator[Requirement]:
    found = finding.read(base / own.file)
    said = [value for value in (own.epsilon, found.claims.declared) if value is not None]
    claims = replace(found.claims, declared=min(said, default=None))
    holds: dict[int, Answer] = {finding.CONSISTENT: HOLDS, finding.LEAKS: BROKEN}
    stated = f"no epsilon above its claim is found in {own.file}, at delta {claims.delta:g}"
    numbers = None if claims.least is None else (found.best.epsilon, claims.least)
    found = replace(found, claims=claims)
    answer = holds.get(found.code, UNSURE)
    yield Requirement("file", stated, found.sentence, answer, numbers=numbers)


@_answers.register
def _of_client(own: policies.ClientPolicy, base: Path, workers: int) -> Iterator[Requirement]:
    return client.answers(own, base)


@_answers.register
def _of_model(own: policies.ModelPolicy, base: Path, workers: int) -> Iterator[Requirement]:
    net = client.built(own)
    named = dict(net.state_dict()) if own.file is None else tensors.read(base / own.file)[0]
    form = of_shape(own.input_shape, own.input_range)
    task, _ = task_of(net, Capture("weights", "weights", named, named), form)
    found = inspection.inspect(task, input_shape=own.input_shape)
    words = "; ".join(f"{mark.kind}: {mark.words}" for mark in found[:SHOWN])
    stated = f"{own.file or own.model} has no mark of a malicious model"
    answer = answer_of(broken=bool(found))
    words = words or inspection.NOT_SAFE
    yield Requirement("file", stated, words, answer, numbers=(len(found), 0))
