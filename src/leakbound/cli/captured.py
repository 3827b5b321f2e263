"""What `leakbound attack --update` and `leakbound capture` do: captured updates."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from leakbound import captured, data, registry, tensors
from leakbound._util import stops
from leakbound._util.formats import format_explained
from leakbound._util.results import Fact
from leakbound.assess.judge import CONTRADICTED
from leakbound.assess.record import CERTIFIED, DISCLOSURES, ESTIMATE, EXPOSURES, Assessment, Bound
from leakbound.assess.sentences import of_fact, ordered
from leakbound.assess.verdict import counted
from leakbound.attacks.pace import STOPPED
from leakbound.captured import (
    Capture,
    Listener,
    Output,
    Settings,
    Skipped,
    TrainingInfo,
    UpdateResult,
    trainer,
)
from leakbound.captured.assess import Case, read_known, read_truth
from leakbound.captured.budget import COST
from leakbound.captured.capture import PREFIX, TREES
from leakbound.captured.findings import Finding
from leakbound.captured.observe import SEARCH
from leakbound.cli import options
from leakbound.cli.shared import Bar, announce, announce_data, verdicts
from leakbound.cli.terminal import as_json, brief, console, errors, safe, table
from leakbound.data.schema import Schema
from leakbound.domains import Domain, TokenDomain
from leakbound.domains.known import KnownValues, as_marked
from leakbound.losses import LOSSES, is_code, named
from leakbound.randomness import stream
from leakbound.risk.statement import of_assessment

CLASSES = 10
EXPOSED_CODE = 3
"""The exit code if an update exposes an example, or reveals a fact."""
EXPLAINED = 0.99
"""Without the truth or a proof, a row is shown if it explains this share of the update."""
NONE = "no attack was finished"
MOST = 100_000
"""Examples, steps and classes of one update: more is a mistake, and would run for hours."""


def attack(command: options.AttackOptions) -> int:
    assert command.update is not None  # the command line asks here only then
    if not command.update.exists():
        raise ValueError(
            f"update is {str(command.update)!r}, which does not exist; give a file, or a folder "
            "that `leakbound capture` wrote"
        )
    options.refuse_unused(command, options.OF_UPDATES)
    for name in ("batch_size", "local_steps", "local_batch_size", "classes"):
        value = getattr(command, name)
        if value is not None and not 1 <= value <= MOST:
            raise ValueError(f"{name} is {value}; give a whole number from 1 to {MOST}")
    skipped: list[Skipped] = []
    captures = [] if command.adapter else _captures(command, skipped)
    settings = _settings(command, captures[0].about if captures else {})
    model = _model(command, settings)
    if command.adapter:
        model, adapted = _adapted(command, model)
        captures = [adapted]
    training = TrainingInfo(
        command.batch_size,
        _labels(command.labels),
        command.learning_rate,
        command.local_steps,
        command.local_batch_size,
        None if command.defense is None else registry.parse("defense", command.defense),
        command.weight_decay,
        _known(command, settings),
        command.optimizer,
    )
    bar = Bar(console)
    shown = dict[int, Sequence[Finding]]()

    def read(case: Case) -> None:
        shown[case.at] = case.inferred.findings
        if not command.json:
            _show_inferred(case)

    def costs(case: Case) -> None:
        """The cost where it is worth a line, and the facts, which a long search would delay."""
        found = [one for one in case.inferred.findings if one.name == COST]
        shown[case.at] = case.inferred.findings
        if found and not command.json:
            _show_facts(case.inferred.facts)
            _show_finding(found[0])

    def ended(record: Assessment) -> None:
        if command.out is not None:
            place = brief(command.out)
            stops.last_words(
                f"stopped; the results so far are in {place}: leakbound report {place} writes "
                "their page, and the same command runs all attacks again"
            )
        if not command.json:
            _certificate(record)

    try:
        with bar:
            outcome = captured.attack_all(
                captures,
                model,
                settings,
                training,
                truth=command.truth,
                output=Output(
                    command.out,
                    command.model,
                    pictures=not command.no_examples,
                ),
                listener=Listener(bar, inferred=read, cost=costs, ended=ended),
                skipped=skipped,
                device=command.device,
            )
    except KeyboardInterrupt:
        if command.out is None or not bar.done:
            errors.say("without --out DIR no result is kept" if bar.done else NONE)
        raise
    for one in outcome.skipped:
        errors.say(brief(str(one)))
    if command.json:
        print(as_json(outcome.records))
    else:
        _show(outcome, shown, explain=command.explain)
    ends = [record.status for record in outcome.records]
    if "failed" in ends:
        return 1
    if outcome.verdict in (*EXPOSURES, *DISCLOSURES):
        return EXPOSED_CODE
    return 0 if "ok" in ends else 2


def _settings(
    command: options.AttackOptions,
    about: Mapping[str, str],
) -> Settings:
    schema = None if command.schema is None else Schema.confirmed_by(command.schema)
    classes = command.classes
    if is_code(command.loss):
        announce("--loss", command.loss)
    announce_data("public", command.public)
    loss = named(command.loss)
    if schema is not None:
        classes = len(schema.classes) or None
        loss = loss.of_data(torch.zeros(1, dtype=torch.int64 if classes else torch.float32))
    domain: Domain | None = None
    if schema is not None:
        domain = schema.domain
        shape = domain.shape
    else:
        shape = _shape(command.input_shape or about.get("input_shape", ""))
    words: tuple[str, ...] = ()
    if command.padding is not None and command.vocabulary is None and command.tokenizer is None:
        raise ValueError(
            f"padding is {command.padding!r}, a token; give --vocabulary or --tokenizer too"
        )
    if command.tokenizer is not None:
        words = data.token_words(command.tokenizer, command.vocabulary)
    vocabulary = command.vocabulary or len(words)
    if vocabulary:
        if schema is not None or len(shape) != 1:
            raise ValueError(
                f"vocabulary is {vocabulary}, for sequences of tokens; give their length "
                "(--input-shape 32), and no schema"
            )
        padding = _padding(command.padding)
        domain = TokenDomain(
            vocabulary,
            shape[0],
            words=words,
            **padding,
        )
        if classes is None:  # otherwise it classifies whole sequences
            classes = vocabulary
            loss = LOSSES["next_token"] if loss.name == "cross_entropy" else loss
    return Settings(
        shape,
        command.input_range,
        classes,
        command.attack or None,
        command.public,
        seed=command.seed,
        seconds=command.time,
        memory=command.memory,
        search=SEARCH if command.steps_search is None else command.steps_search,
        domain=domain,
        loss=loss,
        schema=None if schema is None else str(command.schema),
        people=command.people,
    )


def _padding(text: str | None) -> dict[str, Any]:
    """The token of padding and its side, as `TokenDomain` takes them: 0, or 0,left."""
    if text is None:
        return {}
    token, *sides = text.split(",")
    if not token.isdecimal() or sides not in ([], ["left"], ["right"]):
        raise ValueError(
            f"padding is {text!r}; give the token's number, as in 0, or 0,left if it stands before "
            "the sequences"
        )
    return {"padding": int(token), "padding_side": sides[0] if sides else "right"}


def _known(command: options.AttackOptions, settings: captured.Settings) -> KnownValues | None:
    """The parts that the attacker has of every example; by default what the schema marks."""
    text = as_marked(settings.form, command.known)
    if not text:
        if command.known_values is not None:
            raise ValueError("known_values is given; name the parts too (--known PARTS)")
        return None
    if not command.known and command.known_values is None and command.truth is None:
        errors.say(
            f"the schema marks {brief(text)} as known, but nobody says the values: give them with "
            "--known-values FILE"
        )
        return None
    return read_known(
        text,
        settings.form,
        command.known_values,
        read_truth(command.truth, settings.schema),
        None if command.schema is None else Schema.confirmed_by(command.schema),
    )


def capture(command: options.CaptureOptions) -> int:
    for number in (*command.rounds, command.clients):
        if number < 1:
            raise ValueError(f"rounds and clients hold {number}; give whole numbers from 1")
    how: dict[str, Any] = {
        "rounds": command.rounds,
        "clients": command.clients,
        "on_progress": lambda text: errors.say(brief(text)),
    }
    is_app = (command.app / "pyproject.toml").exists()
    name = "flower" if is_app or not any(command.app.glob("meta.*")) else "nvflare"
    try:
        if name == "flower":
            from leakbound.flower import capture_app as run

            how["run_config"] = _run_config(command.run_config)
        elif command.run_config:
            raise ValueError("run_config is for Flower apps; edit the NVFlare job's settings")
        else:
            from leakbound.nvflare import capture_job as run  # type: ignore[assignment]
    except ImportError as error:
        raise ValueError(
            f"capture needs {name} ({error}); pip install 'leakbound[{name}]'"
        ) from None
    files = run(command.app, command.out, **how)
    heads = ("round", "client", "examples", "kind")
    shown = table(*heads, "file")
    for path in files:
        _, about = tensors.read(path)
        shown.add_row(*(brief(about.get(f"leakbound.{k}", "")) for k in heads), brief(path))
    console.print(shown)
    if about.get("leakbound.kind") == TREES:
        place = shlex.quote(str(files[-1]))
        console.say(f"  leakbound attack --update {brief(place)} --kind {TREES}")
        return 0
    console.say(
        f"{len(files)} updates in {brief(command.out)}. What do they leak?\n"
        f"  {brief(next_command(command.out, about))}\n"
        "Replace words in capitals. Add --input-range LOW HIGH if the inputs of the model are not "
        "from 0 to 1."
    )
    return 0


def next_command(place: Path, about: Mapping[str, str]) -> str:
    """The attack on what was captured; what its metadata do not say is a word in capitals."""
    known = {key.removeprefix(PREFIX): value for key, value in about.items()}
    model = known.get("model", "package.module:build")
    model += "".join(f",{name}=VALUE" for name in known.get("model_needs", "").split(",") if name)
    words = ["leakbound", "attack", "--update", str(place), "--model", model]
    words += ["--input-shape", known.get("input_shape", "SHAPE")]
    words += [] if "examples" in known else ["--batch-size", "EXAMPLES"]
    return shlex.join([*words, "--out", "DIR"])


def _captures(
    command: options.AttackOptions,
    skipped: list[Skipped],
) -> list[Capture]:
    path = command.update
    assert path is not None  # asked in `attack`
    if any(path.glob("adapter_model.*")) if path.is_dir() else path.stem == "adapter_model":
        raise ValueError(
            f"update is {str(path)!r}, an adapter that PEFT wrote; give the adapter that the "
            "server sent (--adapter PATH), and the base of both as --model"
        )
    if path.is_dir() and tensors.weights_in(path) is None:
        return captured.load_all(
            path,
            command.before,
            kind=command.kind,
            round=command.round,
            skipped=skipped,
        )
    if command.round is not None:
        raise ValueError(f"round is {command.round}, but update is one file; leave round out")
    return [captured.load(path, command.before, kind=command.kind)]


def _adapted(
    command: options.AttackOptions,
    base: nn.Module,
) -> tuple[nn.Module, Capture]:
    """The base with the server's adapter, and the client's update of the adapter."""
    path = command.update
    adapter = command.adapter
    assert path is not None  # asked in `attack`
    assert adapter is not None
    for name in ("before", "round"):
        if (value := getattr(command, name)) is not None:
            raise ValueError(
                f"{name} is {str(value)!r}, but with --adapter the weights before are the "
                f"adapter's, and update is one client's; leave {name} out"
            )
    model = captured.read_adapter(adapter, base, update=path)
    sent = captured.sent_tensors(path, base)
    update = captured.load(sent, model.state_dict(), kind=command.kind)
    about = trainer.stated(path, adapter)
    return model, replace(
        update,
        name=path.name,
        about=about,
        notes=update.notes + trainer.note(about),
    )


def _model(command: options.AttackOptions, settings: Settings) -> nn.Module:
    name = command.model.partition(",")[0]
    if ":" in name:
        announce("--model", name)
    model: nn.Module = registry.parse(
        "model",
        command.model,
        input_shape=settings.input_shape,
        classes=CLASSES if settings.classes is None else settings.classes,
        generator=stream(command.seed, "model", name),
        **({} if settings.domain is None else {"domain": settings.domain}),
    )
    return model


def _shape(text: str) -> tuple[int, ...]:
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(
            f"input_shape is {text!r}; give the shape of one input: --input-shape 1,28,28"
        )
    return tuple(int(part) for part in parts)


def _labels(text: str) -> Tensor | list[int] | list[float] | None:
    if not text:
        return None
    parts = text.split(",")
    if all(part.strip().isdecimal() for part in parts):
        return [int(part) for part in parts]
    with suppress(ValueError):
        return [float(part) for part in parts]
    if not Path(text).is_file():
        raise ValueError(
            f"labels is {text!r}; give class numbers such as 3,5, or a file that holds `labels`"
        )
    named, _ = tensors.read(Path(text))
    tensors_of = [named[name] for name in ("labels", "y") if name in named]
    if len(tensors_of) != 1:
        raise ValueError(f"labels {text!r} holds {sorted(named)[:10]}; give one tensor `labels`")
    return tensors_of[0]


def _run_config(text: str) -> dict[str, Any]:
    """The table of `key=value key=value`; values as in TOML."""
    import tomllib

    config: dict[str, Any] = {}
    for part in text.split():
        key, sign, value = part.partition("=")
        if not key or not sign:
            raise ValueError(f"run_config holds {part!r}; write key=value, separated by spaces")
        try:
            config[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            config[key] = value
    return config


def _show_inferred(case: Case) -> None:
    capture = case.capture
    task = case.inferred.observation.task
    console.print(
        f"[bold]{brief(capture.name)}[/bold] ({capture.kind}): {task.parameters.numel():,} numbers "
        f"in {len(task.names)} tensors"
    )
    for finding in case.inferred.findings:
        _show_finding(finding)
    for note in (*case.notes, *case.inferred.notes):
        console.say(f"  note: {brief(note)}")


def _show_finding(finding: Finding) -> None:
    sure = "" if finding.sure else " (not certain)"
    console.say(
        f"  {finding.name}: [bold]{brief(finding.value)}[/bold]{sure}: {brief(finding.how)}"
    )


def _certificate(record: Assessment) -> None:
    """What the update proves of an answer."""
    proved = record.certificate or record.layer_input
    if record.status == "ok" and proved and record.capture:
        word = CERTIFIED if record.certificate else "not certified"
        console.say(
            f"[bold]{word}[/bold]: {brief(record.capture.name)} by "
            f"{brief(record.attack.name)}: {brief(proved)}"
        )
        if CONTRADICTED in record.capture.notes:
            console.say(f"  [bold]warning[/bold]: {CONTRADICTED}")


def _show(
    outcome: UpdateResult,
    shown: Mapping[int, Sequence[Finding]],
    *,
    explain: bool,
) -> None:
    records = outcome.records
    for at, inferred in enumerate(outcome.inferred):
        attacks = [record for record in records if record.seed == at]
        if not attacks or attacks[0].capture is None:
            continue
        console.print(f"[bold]{brief(attacks[0].capture.name)}[/bold]")
        for finding in inferred.findings:
            if finding not in shown[at]:
                _show_finding(finding)
        show_facts(attacks)
        console.print(_results(attacks))
        trusted = (
            [one for one in attacks if one.certificate]
            or [one for one in attacks if one.scores]
            or [one for one in attacks if _merit(one) >= EXPLAINED]
        )
        if trusted:  # an invented row would read as the client's
            show_row(max(trusted, key=_merit))
        _remarks(attacks, explain=explain)
    if outcome.unended:
        console.print(
            f"the time limit is over: {outcome.unended} of {len(records) + outcome.unended} "
            "attacks did not start; give a larger --time"
        )
    if lost := len(outcome.skipped):
        every = lost + len(outcome.inferred)
        console.print(f"{lost} of {every} updates could not be attacked: see above")
    ends = ", ".join(f"{n} {word.replace('_', ' ')}" for word, n in outcome.counts.items())
    cut = "".join(map(_cut, records))
    console.say(f"verdict: [bold]{verdicts(records)[1]}[/bold] (attacks: {ends}{cut})")
    if outcome.verdict not in EXPOSURES:
        _show_distance(records)
    if any(record.status == "ok" and not record.truth_known for record in records):
        criterion = records[0].criterion
        measure = criterion.axis if criterion.of is None else f"share of {criterion.metric}"
        shares = any(record.capture and record.capture.explained for record in records)
        explains = (
            f" The share of the update that it explains is known, but it is not a {measure}."
            if shares
            else ""
        )
        console.print(
            "Without the true batch, no reconstruction can be called right or wrong."
            f"{explains} To measure the {measure}, give --truth FILE."
        )
    if outcome.page is not None:
        console.say(f"report: {brief(outcome.page)}")


def _cut(record: Assessment) -> str:
    """How far a search came that the time limit stopped: a few steps are no attempt."""
    words = (record.problem or "").partition(";")[0]
    return f"; {brief(record.attack.name)} {brief(words)}" if words.startswith(STOPPED) else ""


def _show_distance(records: Sequence[Assessment]) -> None:
    """How far the best attack is from an answer, what keeps it away, and what leaked elsewhere."""
    scored = [record for record in records if record.metrics]
    if scored:
        best = max(scored, key=_merit)
        unit = best.criterion.unit
        guess = max((value or 0.0 for value in best.baseline), default=0.0)
        console.print(
            f"distance: the best attack reaches {_merit(best):.1f} {unit}, an answer that ignores "
            f"the update {guess:.1f} {unit}; {best.criterion.value:g} {unit} count as reconstructed"
        )
    # Once for each update.
    captures = {record.capture.digest: record.capture for record in records if record.capture}
    for capture in captures.values():
        if capture.obstacles:
            console.print(f"[bold]What stands between {brief(capture.name)} and an answer:[/bold]")
        for one in capture.obstacles:
            console.say(f"  - {brief(one.what)}; next: {brief(one.then)}")
        for sentence in (capture.measured, capture.server):
            if sentence:
                console.say(brief(sentence))


def show_facts(records: Sequence[Assessment]) -> None:
    """What the update reveals for certain, before all reconstructions."""
    _show_facts(fact for one in records for fact in counted(one.facts))


def _show_facts(several: Iterable[Fact]) -> None:
    facts = {(fact.kind, fact.subject): fact for fact in several}
    if not facts:
        return
    console.print("[bold]The update reveals, whatever the reconstructions are:[/bold]")
    for fact in ordered(facts.values()):
        mark = " (sensitive)" if fact.sensitive else ""
        console.say(f"  - {brief(of_fact(fact))}{mark}")


def _merit(record: Assessment) -> float:
    """The best score; without the truth, the share of the update that is explained."""
    explained = record.capture and record.capture.explained
    if not record.scores:
        return (explained.direction or 0.0) if explained else 0.0
    return max(score or 0.0 for score in record.scores)


def show_row(record: Assessment) -> None:
    """The row or sequence that was reconstructed best; of a table, sensitive columns first."""
    from leakbound.report.columns import row_of

    row = row_of(record)
    if row is None:
        return
    name = "column" if row.part == "column" else "place"
    shown = table(name, "true", "reconstructed", "right") if row.known else table(name, "value")
    for cell in row.cells:
        values = [
            f"{brief(cell.name)}{' (sensitive)' * cell.sensitive}",
            brief(cell.reconstruction),
        ]
        if row.known:
            values.insert(1, brief(cell.truth))
            values.append("yes" if cell.right else "no")
        shown.add_row(*values)
    console.print(
        f"{row.noun} {row.place} by {brief(record.attack.name)}, the best reconstructed one:"
    )
    console.print(shown)
    if row.more:
        console.print(f"and {row.more} more {row.part}s: --json prints all")


def _results(records: Sequence[Assessment]) -> Table:
    measured = any(record.metrics for record in records)
    width = min(40, max(len(brief(record.attack.name)) for record in records))
    criterion = records[0].criterion
    score = f"{criterion.axis} {criterion.unit}, mean"
    measures = (score, "best", "baseline") if measured else ()
    shown = table("attack", right=["explains", *measures])
    name = shown.columns[0]
    name.no_wrap = True
    name.overflow = "ellipsis"
    name.min_width = width
    for record in records:
        if record.status != "ok":
            shown.add_row(brief(record.attack.name), record.status.replace("_", " "))
            continue
        explained = record.capture and record.capture.explained
        share = None
        if explained:
            share = explained.direction if explained.share is None else explained.share
        values = [format_explained(share)]
        if record.metrics:
            seen, blind = ([v or 0.0 for v in part] for part in (record.scores, record.baseline))
            values += [f"{sum(seen) / len(seen):.1f}", f"{max(seen):.1f}", f"{max(blind):.1f}"]
        shown.add_row(brief(record.attack.name), *values)
    return shown


def _remarks(records: Sequence[Assessment], *, explain: bool) -> None:
    for record in records:
        name = brief(record.attack.name)
        if record.status != "ok":
            words = record.status.replace("_", " ")
            console.say(f"{name} {words}: {brief(record.reason or '')}")
        if record.problem:
            console.print(f"{name} reports a problem: {brief(record.problem)}")
    first = next((r for r in records if r.status == "ok"), None)
    if first is None:
        return
    noise = first.release and first.release.noise_share
    if noise:
        console.print(
            f"noise of the declared distribution is {format_explained(noise)} of the update's "
            "energy"
        )
    for said in of_assessment(first, reasons=False):
        console.say(brief(said))
    show_scope(first.bounds, explain=explain)


def show_scope(bounds: Sequence[Bound], *, explain: bool) -> None:
    """What the bounds rest on; without `explain` only where to find it."""
    if bounds and not explain:
        covers = ", ".join(dict.fromkeys(map(_covered, bounds)))
        priors = "; ".join(dict.fromkeys(bound.prior for bound in bounds))
        units = ", ".join(dict.fromkeys(bound.unit for bound in bounds))
        console.print(
            f"[dim]bounds cover: {covers}; prior: {brief(priors)}; unit: {units} in one "
            "update. Assumptions: --explain[/dim]"
        )
        return
    for bound in bounds:
        source = f" \\[{safe(bound.equation)}]" if bound.equation else ""
        console.print(
            f"[bold]{safe(bound.name)}[/bold]: covers {_covered(bound)}; prior: "
            f"{safe(bound.prior)}; unit: {bound.unit} in one update{source}"
        )
        for assumption in bound.assumptions:
            console.print(f"  - {safe(assumption)}")


def _covered(bound: Bound) -> str:
    return "nothing (an estimate)" if bound.covers == ESTIMATE else f"{bound.covers} attackers"
