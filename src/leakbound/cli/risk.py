"""What `leakbound bound` and `leakbound calibrate` do: the risk corridor on the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table

from leakbound._util.decibels import psnr_of_mse
from leakbound._util.formats import (
    BELOW,
    format_fixed,
    format_lower,
    format_number,
    format_percent,
    format_upper,
    format_upper_log,
)
from leakbound.assess import sentences
from leakbound.assess.criterion import Criterion
from leakbound.assess.record import AttackerRow
from leakbound.bounds.counting import CONFIDENCE, Lift, PublicSample
from leakbound.bounds.law import Scope, positive, probability
from leakbound.cli import options
from leakbound.cli.shared import announce_data, check_files, plural, write_results
from leakbound.cli.terminal import as_json, console, errors, safe, table
from leakbound.domains import Domain
from leakbound.risk.attackers import attackers_under, refuse_model
from leakbound.risk.calibrate import UNIFORM, Calibration, calibrate
from leakbound.risk.correlation import standardized
from leakbound.risk.corridor import (
    MOST_STEPS,
    Corridor,
    TrainingSetting,
    around,
    corridor,
    epsilon,
    examples_words,
    success_bound,
)
from leakbound.risk.examples import Examples, listed, person_sizes, width_of
from leakbound.risk.gain import GainCalibration
from leakbound.risk.statement import UNINFORMED, of_membership
from leakbound.risk.target import Target

FILES = ("bound.json", "corridor.png")
COLUMNS = ("baseline", "attained", "bound", "matched", "verdict")
CORRELATED = (
    "An NCC of c is a mean squared error of 1 - c^2 between images of mean 0 and variance 1, "
    "whatever their brightness and contrast."
)


def bound(command: options.BoundOptions) -> int:
    probability("accept", command.accept)
    probability("delta", command.delta)
    if command.out is not None:
        check_files(command.out, FILES)
    with errors.status("bounding ..."):
        examples, edges, rows = bounded(command)
        private = _finite(epsilon(edges.setting, command.delta))
    result = {
        "setting": edges.setting,
        "delta": command.delta,
        "epsilon": private,
        "accepted": command.accept,
        "prior": UNIFORM if edges.prior is None else edges.prior.name,
        "thresholds": rows,
        "attained_scope": edges.attained_scope,
        "bound_scope": edges.bound_scope,
        "unit": sentences.unit_of(edges.setting.people),
    }
    if not command.json:
        _show_bound(result, edges, examples, explain=command.explain)
        _show_count(edges.setting.people, command.people)
    lift = partial(success_bound, edges.setting)
    known = command.known if examples is None else examples.known(command.known)
    # Imputers take seconds: the stranger's table is on the screen before.
    three = [row for rows in attackers(command, examples, known, [lift]) for row in rows]
    result["attackers"] = msgspec.to_builtins(three)
    if command.json:
        print(as_json(result))
    show_attackers([] if command.json else three)
    if command.out is not None:
        contents = as_json(result).encode(), _plot(edges, command)
        write_results(
            command.out,
            dict(zip(FILES, contents, strict=True)),
            json=command.json,
        )
    return 0


def attackers(
    command: options.BoundOptions,
    examples: Examples | None,
    known: str | None,
    lifts: Sequence[Lift],
) -> list[tuple[AttackerRow, ...]]:
    """Stranger, intruder and anyone at the middle threshold under each lift, if parts are named."""
    if known is None:
        return []
    refuse_model(known, command.prior)
    if examples is None:
        raise ValueError(f"known is {known!r}, but there are no data; give --data")
    with errors.status("completing examples without the update ..."):
        return attackers_under(
            lifts,
            examples,
            known,
            psnr=_middle(command.psnr),
            share=_middle(command.share),
            labels_known=command.labels_known,
            say=errors.say,
        )


def _middle(levels: Sequence[float]) -> float:
    return sorted(levels)[len(levels) // 2]


def show_attackers(rows: Sequence[AttackerRow]) -> None:
    """Three lines: who, what they reach without the update, and with it."""
    if not rows:
        return
    shown = table(
        "attacker", "reached", right=("without the update", "with it, at most", "adds at most")
    )
    for row in rows:
        without = "anything" if row.without is None else f"at most {format_upper(row.without)}"
        upper = "" if row.bound is None else format_upper(row.bound)
        shown.add_row(row.attacker, row.goal, without, upper, format_upper(row.gain))
        if row.measured is not None and row.from_measured is not None:
            shown.add_row(
                f"by {row.measured.imputer}",
                f"{row.measured.matched} of {row.measured.total}",
                f"at least {format_lower(row.measured.at_least)}",
                format_upper(row.from_measured),
                format_upper(max(0.0, row.from_measured - row.measured.share)),
            )
    console.print(shown)
    console.print(
        f"The intruder knows {safe(rows[1].knows)}. Each limit has {CONFIDENCE:.0%} confidence, on "
        "average over examples. The line by an imputer assumes that no intruder completes more "
        "without the update than this imputer does; the line above it assumes nothing of the kind."
    )


def calibration(command: options.Calibrate) -> int:
    settings = asdict(command)
    for name in ("plan", "deployment", "audience", "unit", "json", "target", "explain"):
        del settings[name]
    announce_data("data", command.data)
    with errors.status("calibrating ..."):
        calibrated = calibrate(command.target, **settings)
    if command.json:
        print(as_json(calibrated.plain()))
    elif isinstance(calibrated, GainCalibration):
        _show_gain(calibrated, explain=command.explain)
    else:
        _show_calibration(calibrated, explain=command.explain)
    if not command.json:
        _show_count(calibrated.setting.people, command.people)
    return 0


def examples_of(command: options.TrainingOptions, **known: Any) -> Examples:
    """The examples that the options name; `known` are dim and norm."""
    announce_data("data", command.data)
    names = ("size", "channels", "schema", "person", "exclude", "input_range")
    known["person_sizes"] = person_sizes(command.people, command.people_mean)
    examples = Examples.of(
        command.data,
        **{name: getattr(command, name) for name in names},
        **known,
    )
    return standardized(examples) if getattr(command, "ncc", ()) else examples


def bounded(
    command: options.BoundOptions,
) -> tuple[Examples, Corridor, list[dict[str, Any]]]:
    """The examples, both sides of the risk of a setting, and a row for each threshold."""
    if command.noise_multiplier is None:
        raise ValueError(
            "noise_multiplier is not given; give it, or a file with --deployment, --flower or "
            "--nvflare"
        )
    examples = examples_of(command, dim=command.dim, norm=command.norm)
    examples.known(command.known)  # a wrong name is refused before anything is counted
    if math.isinf(command.noise_multiplier):
        raise ValueError("noise_multiplier is inf; give a number, such as 1")
    setting = TrainingSetting(
        command.noise_multiplier,
        dim=examples.dim,
        norm=examples.norms[0],
        steps=command.steps,
        sampling_rate=command.sampling_rate,
        participation=command.participation,
        people=examples.people(command.people),
    )
    prior = examples.prior(command.prior, labels_known=command.labels_known)
    attacks = examples.attacks()
    thresholds = thresholds_of(command, examples.domain)
    edges = corridor(
        setting,
        [eta for _, eta in thresholds],
        prior=prior,
        attacks=attacks,
    )
    rows: list[dict[str, Any]] = []
    matches = examples.matches([eta for _, eta in thresholds])
    for i, (words, eta) in enumerate(thresholds):
        share = None if (found := matches[i]) is None else found.most
        rows.append(
            {
                **words,
                "log10_baseline": _finite(float(edges.log_kappa[i]) / math.log(10)),
                "attained": float(edges.attained[i]),
                "attack": edges.attack[i],
                "guess": float(edges.baseline[i]),
                "bound": float(edges.bound[i]),
                "matched": share,
                "verdict": edges.verdict(i, command.accept, share),
            }
        )
        if (rare := examples.rare(prior, eta)) is not None:
            rows[-1] |= {"rare_rows": rare[0], "rare": list(rare[1])}
    return examples, edges, rows


def thresholds_of(
    command: options.BoundOptions, domain: Domain | None
) -> list[tuple[dict[str, Any], float]]:
    """What reaches every threshold, the easiest first, and its eta."""
    if command.ncc:
        if command.eta:
            raise ValueError("ncc and eta are different thresholds; give one")
        every = sorted(set(command.ncc))
        return [({"ncc": ncc}, Target.of_ncc(ncc, 0.5).eta) for ncc in every]
    if domain is not None:
        if command.eta:
            raise ValueError("eta holds mean squared errors, but the data have another distance")
        name = "psnr" if domain.parts is None else "share"
        criteria = {Criterion.of(domain, **{name: value}) for value in getattr(command, name)}
        rising = sorted(criteria, key=lambda one: -one.within)
        return [({"reached": one.info.goal, "within": one.within}, one.within) for one in rising]
    width = width_of(command.input_range)
    pairs = [
        (
            psnr,
            Target.of_psnr(psnr, 0.5, input_range=width).eta,
        )
        for psnr in command.psnr
    ]
    for eta in command.eta:
        positive("eta", eta)
        psnr = psnr_of_mse(eta, width)
        if not abs(psnr) < 300:
            raise ValueError(f"eta is {eta:g}, {psnr:.0f} dB; give a mean squared error like 0.01")
        pairs.append((psnr, eta))
    if not pairs:
        raise ValueError("psnr and eta are empty; give at least one threshold, such as --psnr 20")
    return [({"psnr": psnr, "mse": eta}, eta) for psnr, eta in sorted(set(pairs))]


def reached(threshold: Mapping[str, Any]) -> str:
    """What reaches one of `thresholds_of`, as words."""
    if "ncc" in threshold:
        return f"NCC {threshold['ncc']:g}"
    return str(threshold.get("reached") or f"{threshold['psnr']:g} dB")


def _show_bound(
    result: dict[str, Any],
    edges: Corridor,
    examples: Examples,
    *,
    explain: bool,
) -> None:
    console.print(_setting_line(edges, result["epsilon"], result["delta"], examples.source))
    squared = examples.domain is None and not examples.correlated
    thresholds = ("PSNR dB", "MSE") if squared else ("reached",)
    shown = table(right=(*thresholds, *COLUMNS))
    for row in result["thresholds"]:
        cells = [reached(row)]
        if squared:
            cells = [format_fixed(row["psnr"]), format_number(row["mse"])]
        baseline = row["log10_baseline"]
        upper = format_upper(row["bound"])
        if row["bound"] == 0 and baseline is not None:  # it underflowed
            upper = BELOW
        shown.add_row(
            *cells,
            "0" if baseline is None else format_upper_log(baseline * math.log(10)),
            format_lower(row["attained"]),
            upper,
            "" if row["matched"] is None else format_percent(row["matched"]),
            row["verdict"],
        )
    console.print(shown)
    console.print(f"accepted probability: {result['accepted']:g}")
    attacks = dict.fromkeys(row["attack"] for row in result["thresholds"] if row["attained"])
    console.print(f"attained by: {', '.join(attacks) or 'no attack'}")
    if examples.images is not None:
        noun = "image" if examples.domain is None else examples.domain.noun
        console.print(
            f"bound: no attacker exceeds it; matched: the share of the data that one fixed {noun} "
            "matches without any update"
        )
    rare = [row for row in result["thresholds"] if row.get("rare")]
    if rare and isinstance(edges.prior, PublicSample):
        few = min(rare, key=lambda row: row["rare_rows"])
        words = sentences.rare(few["rare_rows"], edges.prior.n, few["rare"])
        console.print(f"at {few['reached']}, {words}")
    if examples.correlated:
        console.print(CORRELATED)
    verdicts = [row["verdict"] for row in result["thresholds"]]
    _show_membership(result["epsilon"], result["delta"], *verdicts)
    _show_prior(result["prior"])
    _show_scopes(edges, result["prior"], explain=explain)


def _show_membership(
    epsilon: float | None,
    delta: float,
    *verdicts: str,
) -> None:
    """What "protected" does not cover if epsilon is large: whether an example took part."""
    if any(word.startswith("protected") for word in verdicts):
        said = of_membership(math.inf if epsilon is None else epsilon, delta)
        if said:
            console.print(said)


def _show_calibration(calibration: Calibration, *, explain: bool) -> None:
    answer = {**asdict(calibration.setting), "clip_norm": calibration.clip_norm}[calibration.solved]
    edges = calibration.corridor
    private = _finite(calibration.epsilon)
    _show_public(calibration)
    console.print(
        f"{escape(str(calibration.target))}: [bold]{calibration.solved} = {answer:.6g}[/bold]"
    )
    console.print(_setting_line(edges, private, calibration.delta, calibration.source))
    if calibration.known is not None:
        console.print(f"The target counts what is unknown beside {safe(calibration.known)}.")
    console.print(_calibrated(calibration))
    if calibration.solved == "steps" and calibration.setting.steps == MOST_STEPS:
        console.print(f"more than {MOST_STEPS} steps were not tried")
    _show_left_out(calibration)
    if calibration.target.ncc is not None:
        console.print(CORRELATED)
    if calibration.matches is not None and calibration.matches.example > calibration.target.gamma:
        model = " (--prior gallery)" if calibration.target.goal is None else ""
        console.print(
            "[bold]These examples look alike[/bold]: an attacker who has one of them matches "
            "others without any update. The answer holds for the prior named, not for such an "
            f"attacker{model}."
        )
    if calibration.rare is not None and isinstance(edges.prior, PublicSample):
        alone, names = calibration.rare
        words = sentences.rare(alone, edges.prior.n, names)
        console.print(f"at {calibration.target.goal}, {words}")
    _show_prior(calibration.prior)
    judged = "of `leakbound bound` on this answer"
    if calibration.known is not None:
        judged = f"against an intruder who knows {safe(calibration.known)}"
    console.print(f"verdict {judged}: [bold]{calibration.verdict}[/bold]")
    _show_membership(private, calibration.delta, calibration.verdict)
    _show_scopes(edges, calibration.prior, explain=explain)


def _show_gain(result: GainCalibration, *, explain: bool) -> None:
    setting = result.setting
    answer = {**asdict(setting), "clip_norm": result.clip_norm}[result.solved]
    console.print(f"{escape(str(result.target))}: [bold]{result.solved} = {answer:.6g}[/bold]")
    private = "infinite" if math.isinf(result.epsilon) else f"{result.epsilon:.4g}"
    console.print(
        f"noise multiplier {setting.noise_multiplier:.6g}, {plural(setting.steps, 'step')} at rate "
        f"{setting.sampling_rate:g} ({setting.participation} participation), clip norm "
        f"{result.clip_norm:.6g}: epsilon {private} at delta {result.delta:g}"
    )
    console.print(_rises(result.rises))
    unit = f"Unit: {sentences.unit_of(setting.people)}."
    goal = "any goal, any data and"
    if result.target.column is not None:
        goal = f"{result.target.column} of every person, and"
    if result.share is not None:
        console.print(
            f"One fixed answer gives {safe(result.target.column or '')} for "
            f"{format_lower(result.share)} of people or more ({CONFIDENCE:.0%} confidence)."
        )
    if result.target.at is not None:
        console.print(
            f"A word that occurs is found with a probability of at most "
            f"{format_upper(result.gain, 4)} by any attacker, whatever they know already, who says "
            f"that it occurs with a probability of at most {result.place:.3g} where the text took "
            f"no part. {unit}"
        )
    else:
        console.print(
            f"The training adds at most {format_upper(result.gain, 4)}, and the most at a success "
            f"of {result.place:.2g}. This holds for {escape(goal)} any attacker, whatever they "
            f"know already. {unit}"
        )
    if explain:
        _show_scope("gain", result.scope)


def _rises(rises: Sequence[tuple[float, float]]) -> Table:
    """What a success without the training becomes with it."""
    shown = table(right=("without the training", "with it, at most", "adds at most"))
    for without, success in rises:
        shown.add_row(f"{without:.3g}", format_upper(success), format_upper(success - without))
    return shown


def _calibrated(calibration: Calibration) -> Table:
    edges = calibration.corridor
    shown = Table(show_edge=False, show_header=False)
    shown.add_row("upper bound: no attacker exceeds", format_upper(float(edges.bound[0]), 6))
    shown.add_row(f"attained by a {edges.attack[0]}", format_lower(float(edges.attained[0])))
    shown.add_row("prior-only baseline", format_upper_log(float(edges.log_kappa[0])))
    shown.add_row("noise standard deviation on the sum", f"{calibration.noise_std:.6g}")
    shown.add_row("clip norm", f"{calibration.clip_norm:.6g}")
    if (blind := calibration.matches) is not None:
        share = format_percent(max(blind.constant, blind.mean))
        typical = (
            "a constant or the mean image" if calibration.target.goal is None else "the typical one"
        )
        shown.add_row(f"examples that {typical} matches", share)
        shown.add_row("examples that one other example matches", format_percent(blind.example))
    if calibration.examples is not None and calibration.known is None:
        noise = calibration.identification_noise
        less = calibration.less_noise
        against = "none meets the target" if noise is None else f"{noise:.6g}"
        if less is not None:
            against += f" (this answer: {abs(less):.1%} {'less' if less >= 0 else 'more'})"
        shown.add_row(f"noise against naming 1 of {calibration.examples} examples", against)
    return shown


def _show_public(calibration: Calibration) -> None:
    """What the answer rests on without a model: how many public examples."""
    if (public := calibration.public) is None:
        return
    candidate = "one candidate"
    if calibration.known is not None:
        candidate = "the best answers to what the intruder knows"
    console.print(
        f"public examples: {public['needed']} are needed for this probability at least; here are "
        f"{public['examples']}, of which {candidate} may match {public['largest_ball']}. The "
        f"answer holds with {public['confidence']:.0%} confidence and no model of the data, if "
        "private examples are drawn like them (at most "
        f"{format_lower(public['density_margin'])} times as densely)."
    )


def _show_left_out(calibration: Calibration) -> None:
    if not calibration.left_out:
        return
    count = len(calibration.left_out)
    one = count == 1
    console.print(
        f"[bold]{plural(count, 'example')} {'is' if one else 'are'} left out[/bold]: "
        f"a constant image matches {'it' if one else 'each of them'} within the threshold, and no "
        "amount of noise protects such an example. The answer is for the other "
        f"{calibration.examples}. Left out: {safe(listed(calibration.left_out))}"
    )


def _show_prior(prior: str) -> None:
    """A prior that knows nothing about the data bounds no attacker who knows similar data."""
    if prior == UNIFORM:
        console.print(f"[bold]{UNINFORMED}[/bold]. Give --data.")


def _show_scopes(
    edges: Corridor,
    prior: str,
    *,
    explain: bool,
) -> None:
    """Which attackers and examples the numbers are for; all of it with `explain`."""
    if explain:
        _show_scope("upper bound", edges.bound_scope)
        _show_scope("attained", edges.attained_scope)
        return
    see = "see" if edges.setting.participation == "visible" else "do not see"
    console.print(
        f"[dim]covers: {edges.bound_scope.covers} attackers, who {see} which steps hold the "
        f"example; prior: {escape(prior)}; unit: {sentences.unit_of(edges.setting.people)}. "
        "Scopes: --explain[/dim]"
    )


def _show_count(people: int, declared: int | None) -> None:
    """That the examples of a person were counted in public data, which may hold fewer."""
    if declared is None and people > 1:
        console.print(
            f"A person has up to {people} examples in --data. If one may have more in the private "
            "data, declare it: --people"
        )


def _show_scope(name: str, scope: Scope) -> None:
    console.print(f"[bold]{name}[/bold] ({escape(scope.equation)})")
    for word, text in (
        ("covers", scope.attackers),
        ("examples", scope.prior),
        ("known to the attacker", scope.known),
        ("it does not say", scope.not_said),
    ):
        console.print(f"  {word}: {escape(text)}")


def _setting_line(
    edges: Corridor,
    epsilon: float | None,
    delta: float,
    source: str | None,
) -> str:
    setting = edges.setting
    known = "" if source is None else f" of {safe(source)}"
    private = "infinite" if epsilon is None else f"{epsilon:.4g}"
    return (
        f"noise multiplier {setting.noise_multiplier:.6g}, {plural(setting.steps, 'step')} at rate "
        f"{setting.sampling_rate:g} ({setting.participation} participation), "
        f"{examples_words(edges)}{known}: epsilon {private} at delta {delta:g}"
    )


def _plot(edges: Corridor, command: options.BoundOptions) -> bytes:
    from leakbound.report import figures

    places, eta, name = around(
        edges.prior,
        edges.eta,
        width_of(command.input_range),
        61,
        correlated=bool(command.ncc),
    )
    edges = edges.at(eta)
    return figures.png(figures.corridor(places, edges.attained, edges.bound, command.accept, name))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
