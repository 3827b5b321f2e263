"""What `leakbound bound --deployment` does: who sees what of a federated training, and how much."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace
from rich.markup import escape
from rich.table import Table

from leakbound._util.formats import BELOW, format_lower, format_upper
from leakbound._util.groups import grouped
from leakbound.bounds.law import probability
from leakbound.bounds.record_priors import Baseline
from leakbound.cli import options, risk, utility
from leakbound.cli.shared import check_files, write_results
from leakbound.cli.terminal import as_json, console, errors, safe, table
from leakbound.domains.known import NOTHING
from leakbound.risk.attackers import goal_of_intruder, refuse_model
from leakbound.risk.calibrate import refuse_given
from leakbound.risk.correlation import standardized
from leakbound.risk.deployment import file, flower_app, nvflare
from leakbound.risk.deployment.calibrate import least_noise
from leakbound.risk.deployment.laws import SEES_ALL, laws_of, noise_of
from leakbound.risk.deployment.mistakes import CLEAR
from leakbound.risk.deployment.statement import OF, WHO, RiskCriteria, Row, state
from leakbound.risk.examples import SPHERE, Examples, width_of
from leakbound.risk.statement import UNINFORMED
from leakbound.risk.target import GainTarget, Target

if TYPE_CHECKING:
    from leakbound.risk.deployment import Deployment, Mistake

TOML = "deployment.toml"
FILES = ("deployment.json", TOML)
PROTECTED = 0
OPEN = 1
NOT_STATED = 3
"""Exit codes."""


def bound(command: options.BoundOptions) -> int:
    """Of a deployment if a file is given, otherwise of one training.

    Exit code of a deployment: 0: protected from all (with known parts, also from the intruder); 1:
    not; 3: not, and a fact that may change it
    is missing.
    """
    if not any((command.deployment, command.flower, command.nvflare)):
        return risk.bound(command)
    probability("accept", command.accept)
    probability("delta", command.delta)
    deployment, mistakes, source = _read(command)
    if command.out is not None:
        check_files(command.out, FILES)
    with errors.status("bounding ..."):
        examples = _examples(command, deployment)
        # A wrong name is refused before anything is counted.
        known = _known(command.known, deployment, examples)
        deployment = deployment if examples is None else _counted(deployment, examples)
        against = None if examples is None else _against(command, examples)
        rows = state(
            deployment,
            delta=command.delta,
            audiences=command.audience,
            against=against,
        )
    asked = deployment.unit or "example"
    laws = [
        law
        for law in laws_of(deployment)
        if known and law.unit == asked and law.audience in command.audience
    ]
    three = risk.attackers(command, examples, known, [law.bound for law in laws])
    result = {
        "deployment": deployment,
        "rows": [row.plain() for row in rows],
        "attackers": [
            {"audience": law.audience, "unit": law.unit, "rows": msgspec.to_builtins(some)}
            for law, some in zip(laws, three, strict=True)
        ],
        "mistakes": mistakes,
        "prior": None if against is None or against.prior is None else against.prior.name,
        "accepted": command.accept,
    }
    text = as_json(result)
    if command.json:
        print(text)
    else:
        _show(command, deployment, mistakes, rows, against, source)
        for some, who in grouped(
            zip(three, (WHO[law.audience] for law in laws), strict=True)
        ).items():
            console.print(f"[bold]{', '.join(who)}: {OF[asked]}, over all rounds[/bold]")
            risk.show_attackers(some)
    if command.out is not None:
        toml = file.text_of(deployment, [f"{one.name}: {one.text}" for one in mistakes])
        contents = dict(zip(FILES, (text.encode(), toml.encode()), strict=True))
        write_results(command.out, contents, json=command.json)
    # what leaves without noise is covered by no row
    in_clear = CLEAR in {one.name for one in mistakes}
    intruded = any(some[1].bound is None or some[1].bound > command.accept for some in three)
    if rows and all(row.protected for row in rows) and not in_clear and not intruded:
        return PROTECTED
    return NOT_STATED if any(row.missing for row in rows if not row.protected) else OPEN


def calibration(command: options.Calibrate) -> int:
    """The noise of a plan's defenses or of a deployment if a file is given, else of a training."""
    if command.plan is not None:
        return utility.calibration(command, command.plan)
    if command.deployment is None:
        return risk.calibration(command)
    deployment, mistakes = file.read(command.deployment)
    one = command.steps == command.sampling_rate == 1
    if command.solve != "noise_multiplier" or not one or command.people is not None:
        raise ValueError(
            "solve, steps, sampling_rate and people are those of one training; a deployment file "
            "names its rounds, participation and record.people, and its noise multiplier is found"
        )
    with errors.status("calibrating ..."):
        deployment, target, prior = _goal(command, deployment)
        calibrated = least_noise(
            deployment,
            target,
            prior,
            audiences=command.audience,
            unit=command.unit,
        )
        rows = state(
            calibrated,
            delta=command.delta,
            audiences=command.audience,
        )
    unit = command.unit or deployment.unit or "example"
    plain = {
        "target": str(target),
        "unit": unit,
        "audience": list(command.audience),
        "noise_multiplier": calibrated.noise.multiplier,
        "prior": None if prior is None else prior.name,
        "rows": [row.plain() for row in rows],
        "mistakes": mistakes,
    }
    if command.json:
        print(as_json(plain))
        return 0
    multiplier = format_upper(calibrated.noise.multiplier or 0.0, 5)
    console.print(f"{escape(str(target))}, of {OF[unit]}, against {', '.join(command.audience)}:")
    rests = "for anyone, whatever they know" if prior is None else f"prior: {escape(prior.name)}"
    console.print(f"[bold]noise multiplier {multiplier}[/bold] ({rests})")
    _mistakes(mistakes)
    console.print(_table(rows, None))
    return 0


def _goal(
    command: options.Calibrate,
    deployment: Deployment,
) -> tuple[Deployment, Target | GainTarget, Baseline | None]:
    """The deployment with what the data count, the target, and the prior; a gain needs none."""
    gain = GainTarget.parse(command.target)
    if command.radius != 1:
        raise ValueError(
            f"radius is {command.radius:g}, which is measured at one model and for the gradient of "
            "one example; the rounds of a deployment have other models, and may clip whole "
            "updates: leave it out"
        )
    if gain is not None:
        given = {"data": command.data, "prior": command.prior, "known": command.known}
        refuse_given(given, gain)
        return deployment, gain, None
    if command.data is None:
        raise ValueError("data is not given; give public examples like the clients' with --data")
    examples = risk.examples_of(command)
    deployment = _counted(deployment, examples)
    width = width_of(command.input_range)
    known = _known(command.known, deployment, examples)
    if known is not None:
        refuse_model(known, command.prior)
        target, _, knows = goal_of_intruder(
            examples,
            known,
            command.target,
            labels_known=command.labels_known,
            input_width=width,
        )
        return deployment, target, knows
    target = Target.parse(command.target, input_range=width, domain=examples.domain)
    if target.ncc is not None:
        examples = standardized(examples)
    prior = examples.prior(command.prior, labels_known=command.labels_known)
    if prior is None:
        raise ValueError("prior is sphere, under which nothing is protected; leave it out")
    return deployment, target, prior


def _read(command: options.BoundOptions) -> tuple[Deployment, tuple[Mistake, ...], Path]:
    readers = (
        (command.deployment, file.read),
        (command.flower, flower_app.read),
        (command.nvflare, nvflare.read),
    )
    asked = [(path, read) for path, read in readers if path is not None]
    if len(asked) > 1 or command.noise_multiplier is not None:
        raise ValueError(
            "deployment, flower, nvflare and noise_multiplier are different ways to say what is "
            "bounded; give one"
        )
    path, read = asked[0]
    return *read(path), path


def _examples(command: options.BoundOptions, deployment: Deployment) -> Examples | None:
    """Those of the data, or by their numbers alone; None if neither is given."""
    dim = deployment.record.dim
    norm = deployment.record.norm
    if command.data is not None:
        return risk.examples_of(command)
    if command.prior == SPHERE and dim is not None and norm is not None:
        return risk.examples_of(command, dim=dim, norm=(norm,))
    return None


def _against(command: options.BoundOptions, examples: Examples) -> RiskCriteria:
    levels = [
        (risk.reached(words), eta) for words, eta in risk.thresholds_of(command, examples.domain)
    ]
    matches = examples.matches([eta for _, eta in levels])
    return RiskCriteria(
        levels,
        examples.prior(command.prior, labels_known=command.labels_known),
        examples.attacks(),
        command.accept,
        [0.0 if one is None else one.most for one in matches],
        examples.dim,
        examples.norms[0],
    )


def _known(
    asked: str | None,
    deployment: Deployment,
    examples: Examples | None,
) -> str | None:
    """The known parts: as asked for, else as the file states, else as the data's schema marks."""
    if examples is None:
        if asked is None and deployment.record.known is not None:
            errors.say("record.known is not used: an intruder needs public examples (--data)")
        return None if asked == NOTHING else asked
    return examples.known(asked or deployment.record.known)


def _counted(deployment: Deployment, examples: Examples) -> Deployment:
    """The same with the most examples of one person, if the data say who is who."""
    if examples.persons is None:
        return deployment
    people = examples.people(deployment.record.people)
    return replace(deployment, record=replace(deployment.record, people=people))


def _show(
    command: options.BoundOptions,
    deployment: Deployment,
    mistakes: tuple[Mistake, ...],
    rows: tuple[Row, ...],
    against: RiskCriteria | None,
    source: Path,
) -> None:
    console.print(f"{escape(deployment.title)} ({safe(source)}): {_setting(deployment)}")
    if any(row.audience == "server" and SEES_ALL in row.reason for row in rows):
        console.print(f"[bold]{SEES_ALL[0].upper()}{SEES_ALL[1:]}.[/bold]")
    _mistakes(mistakes)
    console.print(_table(rows, against))
    if against is None:
        console.print(
            "A column a -> b: what is known with probability a without the training is "
            "reconstructed with probability b at most. Without --data nothing is called protected."
        )
    else:
        console.print(
            "attained to bound: what working attacks do, and what no attacker exceeds. Accepted: "
            f"{command.accept:g}."
        )
        if against.prior is None:
            console.print(UNINFORMED)
    console.print(
        f"others: other clients and outsiders. epsilon: of membership at delta {command.delta:g}, "
        "against the unit's part being zero. One example of a client whose whole update is clipped "
        "moves it by up to twice the clip norm."
    )
    reasons = grouped(((WHO[row.audience], row.reason), OF[row.unit]) for row in rows)
    for (who, reason), units in reasons.items():
        of = "" if len(units) == len({row.unit for row in rows}) else f" ({', '.join(units)})"
        console.print(f"[dim]{who}{of}: {escape(reason)}[/dim]")
    missing = list(dict.fromkeys(key for row in rows for key in row.missing))
    if missing:
        console.print(
            f"[bold]not stated[/bold], so the worst case counts: {escape(', '.join(missing))}"
        )
    if rows and not all(row.protected for row in rows):
        console.print(f"[bold]Next step.[/bold] {_next(rows, missing, command, against)}")


TARGETS = {"columns": "columns>=0.9", "tokens": "tokens>=0.9"}
"""Targets for calibration, by the unit of a threshold; of images it is in decibels."""


def _next(
    rows: tuple[Row, ...],
    missing: list[str],
    command: options.BoundOptions,
    against: RiskCriteria | None,
) -> str:
    """What a reader can do about the first row that is not protected."""
    place = command.deployment
    if place is None and command.out is not None:
        place = command.out / TOML
    if missing:
        here = "--out DIR writes one" if place is None else safe(place)
        return f"State {escape(missing[0])} in the deployment file ({here})."
    if any(SEES_ALL in row.reason for row in rows):
        return (
            'To protect clients from the server, let them add the noise: at = "client", or '
            '"share" under secure aggregation. For the others alone: --audience clients.'
        )
    words = "Find the noise for a risk that you accept:"
    if place is None:
        words = "Write the facts with --out DIR. Then find the noise for a risk that you accept:"
        place = Path("DIR") / TOML
    data = shlex.quote(command.data) if command.data is not None else "SOURCE"
    unit = "" if against is None else against.thresholds[0][0].rpartition(" ")[2]
    target = TARGETS.get(unit, "psnr>=25")
    return (
        f"{words} leakbound calibrate --deployment {safe(shlex.quote(str(place)))} "
        f'--target "{target} with probability<=0.01" --data {escape(data)}'
    )


def _mistakes(mistakes: tuple[Mistake, ...]) -> None:
    if mistakes:
        console.print(f"[bold]{len(mistakes)} mistake{'s' if len(mistakes) > 1 else ''}[/bold]")
    for one in mistakes:
        line = "" if one.line is None else f"line {one.line}, "
        console.print(f"  {line}{escape(one.key)}: {escape(one.text)} ({one.name})")


def _table(rows: tuple[Row, ...], against: RiskCriteria | None) -> Table:
    columns = ["mu", "epsilon"]
    if against is None:
        columns += [f"{kappa:.3g} ->" for kappa, _ in rows[0].rises] if rows else []
    else:
        columns += [words for words, _ in against.thresholds]
    shown = table("who", "of", right=columns)
    for row in rows:
        private = "infinite" if row.epsilon is None else format_upper(row.epsilon, 4)
        shown.add_row(
            WHO[row.audience],
            OF[row.unit],
            "" if row.mu is None else format_upper(row.mu, 4),
            private,
            *(format_upper(bound) for _, bound in row.rises if against is None),
            *(
                f"{format_lower(low)} to {format_upper(high) if high else BELOW}\n{word}"
                for _, low, high, word in row.thresholds
            ),
        )
    return shown


def _setting(deployment: Deployment) -> str:
    clip = deployment.clip
    norm = "" if clip.l2 is None else f" (L2 norm {clip.l2:.4g})"
    multiplier = noise_of(deployment)
    size = "" if multiplier is None else f" of multiplier {multiplier:.4g}"
    place = deployment.noise.at or "an unknown place"
    rounds = "unknown" if deployment.rounds is None else deployment.rounds
    law = deployment.participation.law or "unknown"
    return (
        f"{clip.kind or 'unknown'} clip{norm}, noise{size} at {place}, {rounds} rounds, "
        f"participation {law}"
    )
