"""Paper B reproduced: its theory on two-layer networks, its evaluation on images."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from rich.table import Table

from leakbound import check
from leakbound.cli.kit import console
from leakbound_reproductions import kept
from leakbound_reproductions.claim import Claim, left_open
from leakbound_reproductions.jobs import Jobs
from leakbound_reproductions.outcome import Figure, Outcome, Tell
from leakbound_reproductions.systematic_evaluation import (
    evaluation,
    evaluation_claims,
    features_figure,
    own_scale,
    theory_claims,
    tradeoff_figure,
)
from leakbound_reproductions.systematic_evaluation.evaluation import evaluate
from leakbound_reproductions.systematic_evaluation.evaluation_page import named
from leakbound_reproductions.systematic_evaluation.measured import Measured
from leakbound_reproductions.systematic_evaluation.parts import (
    BEHIND_CLAIMS,
    FEW,
    HONEST,
    LENGTHENED,
    PAPER,
    PLACES,
    PRUNED_FEATURES,
    TIMES,
    Part,
    base,
    parts,
)
from leakbound_reproductions.systematic_evaluation.sweep import AGAIN, FIRST, LOUD_WIDTH
from leakbound_reproductions.systematic_evaluation.theory import PRECISE, REPEATED, SEEDS, study

ENOUGH = 1000
"""Steps below which a deep prior's search does not show which attack is the strongest: on color
images without a defense it leaves 0.27 of the range after 250 steps and 0.18 after 1,000."""
THEORY = "theory"
"""The name of the two-layer networks among the parts."""
FIGURES = (
    Figure(
        "evaluation.png",
        "RMSE of the strongest attack by an honest server after the plan's steps, against the "
        "training loss under each defense. One line per family of defenses, one panel per set of "
        "images. Dotted: the prior-only baseline.",
        "figure 3",
    ),
    Figure(
        "theory.png",
        "Error of the tensor attack on two-layer networks against the width, under noise, and "
        "under dropout and pruning. Last panel: the share of the Jacobian that pruning withholds.",
    ),
    Figure(
        "features.png",
        "PSNR of paper B's attack with and without features under each defense: means, lowest and "
        "highest round.",
        "figure 4",
    ),
    Figure(
        "gallery.png",
        "The first batch of color images, and what two attacks by an honest server make of it "
        "under each defense at its largest setting: Inverting Gradients, and the deep prior with "
        "features.",
        "figure 2",
    ),
)


def reproduce(
    scale: str,
    folder: Path,
    *,
    workers: int,
    color: str,
    tell: Tell,
    jobs: Jobs = Jobs(),  # noqa: B008
) -> Outcome:
    """Measure what `folder` does not have yet and judge claims 2-1 to 2-10.

    Args:
        scale: one of `SCALES`.
        folder: for journals, tables and figures; a later call goes on from it.
        workers: processes for the evaluation.
        color: the source of 32 x 32 color images.
        tell: called as it goes on.
        jobs: what to run at the paper's own scale. Claims are judged once what they rest on has
            run.

    Raises:
        ValueError: no such scale or part, images that cannot be read, or a folder of other
            settings.
    """
    base(scale)
    if scale == PAPER:
        return _own_scale(folder, workers, color, tell, jobs)
    theory = study(folder, scale, tell)
    pictures = evaluate(folder, tell=tell, scale=scale, color=color, workers=workers)
    claims = [
        *theory_claims.claims(theory.rows, theory.shares),
        evaluation_claims.pruning_hides_features(
            pictures, _rounds(scale), theory_claims.pruned_span(theory.rows)
        ),
        *judged(evaluation_claims.claims(pictures, _scale(scale)), _longest(scale)),
    ]
    pages = ("theory.md", "evaluation.md")
    figures = [*FIGURES[:2]]
    if features_figure.draw(pictures, folder / FIGURES[2].file):
        figures.append(FIGURES[2])
    if evaluation.gallery(pictures, folder):
        figures.append(FIGURES[3])
    return Outcome(_ordered(claims), tuple(figures), settings(scale, color), pages)


def _ordered(claims: Iterable[Claim]) -> tuple[Claim, ...]:
    return tuple(sorted(claims, key=lambda claim: int(claim.number.split("-")[1])))


def _own_scale(folder: Path, workers: int, color: str, tell: Tell, jobs: Jobs) -> Outcome:
    """The chosen parts of the paper's scale, after a table of what all of them cost."""
    began = time.monotonic()
    device = jobs.device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = jobs.parts or (THEORY, *PLACES)
    for name in chosen:
        check.one_of((THEORY, *PLACES), parts=name)
    given = {"steps": jobs.steps, "seeds": jobs.seeds, "lpips_weights": jobs.lpips_weights}
    wanted = parts(PAPER, color, **given)  # type: ignore[arg-type]
    seconds = own_scale.predicted(wanted, folder, device)
    _say(own_scale.costs(wanted, folder, seconds), device)
    claims = []
    pages = [own_scale.PAGE]
    figures = []
    if THEORY in chosen and jobs.hours != 0:
        theory = study(folder, PAPER, tell)
        claims += theory_claims.claims(theory.rows, theory.shares)
        pages.append("theory.md")
        figures.append(FIGURES[1])
    end = math.inf if jobs.hours is None else began + 3600 * jobs.hours
    with suppress(evaluation.OutOfTime):
        own = [part for part in wanted if part.name in chosen]
        evaluation.run(own, folder, workers, device, tell, end)
    found = Measured.read(wanted, folder)
    after = own_scale.costs(wanted, folder, seconds)
    run = {cost.name for cost in after if cost.done == cost.units}
    steps = jobs.steps or _steps(PAPER)
    rounds = max(len(part.plan.seeds) for part in wanted)
    scale = f"{rounds} rounds, searches of {steps:,} steps"
    if PRUNED_FEATURES in run:
        claims.append(evaluation_claims.pruning_hides_features(found, scale, ""))
    claims += judged(evaluation_claims.claims(found, scale, run), steps)
    if {*BEHIND_CLAIMS} <= run:
        tradeoff_figure.draw(found, folder / "evaluation.png")
        figures.append(FIGURES[0])
    if features_figure.draw(found, folder / FIGURES[2].file):
        figures.append(FIGURES[2])
    if evaluation.gallery(found, folder):
        figures.append(FIGURES[3])
    about = _about(wanted, steps, color, device)
    kept.page(folder / own_scale.PAGE, own_scale.page(after, wanted, found, about))
    return Outcome(_ordered(claims), tuple(figures), about, tuple(pages))


def _say(costs: Sequence[own_scale.Cost], device: str) -> None:
    table = Table(*own_scale.HEADS, show_edge=False)
    for cost in costs:
        table.add_row(*cost.row)
    table.add_row("all", "", "", "", "", own_scale.hours(sum(cost.left for cost in costs)))
    console.print(table)
    console.print(
        f"hours are those of one process on {device}, predicted from one gradient of each model "
        "and batch size, or from one experiment of closed forms. Choose parts (--parts), fewer "
        "rounds (--seeds), shorter searches (--steps) or a time limit (--hours); the same command "
        "goes on later",
        soft_wrap=True,
    )


def _about(wanted: Sequence[Part], steps: int, color: str, device: str) -> str:
    plan = next(part.plan for part in wanted if part.name == "honest")
    shorter = "" if steps == _steps(PAPER) else f", where the paper takes {_steps(PAPER):,}"
    epoch = next(part for part in wanted if part.name == "trained").plan.models[1].train_steps
    return (
        f"Images: {named(color)} of 32 x 32. Model: ResNet-18 with group norm and the paper's head "
        f"of 16,384 hidden units, ReLU; where the paper's own attack runs, a malicious server has "
        f"made 14,336 of them random. Epochs: passes over the public images, {epoch} steps each. "
        f"Batches of 1 to 32; {len(plan.seeds)} rounds (features: up to {FEW}), each with its own "
        f"weights, batch and noise. Searches of {steps:,} steps{shorter}. Ran on {device}, LPIPS "
        f"{'with' if plan.lpips_weights else 'without'} the user's weights."
    )


def judged(claims: Iterable[Claim], steps: int) -> list[Claim]:
    """Claims on the strongest attack or defense, left open if searches end too early.

    A search that ends too early loses to any closed form, so its errors would refute a claim that
    holds. The measurements are in evaluation.md. Claim 2-5 is not affected, because the tensor
    attack is a closed form.
    """
    if steps >= ENOUGH:
        return list(claims)
    why = (
        f"searches of {steps} steps do not show which attack is the strongest; "
        f"from {ENOUGH} on (scale cpu) they are judged. What was measured is in "
        "evaluation.md of the run's folder"
    )
    return [left_open(claim, why) for claim in claims]


def settings(scale: str, color: str) -> str:
    """Data, models, attacks and seeds, in a paragraph."""
    plan = base(scale)
    model = plan.models[0]
    built = dict(model.settings)
    backbone = built.get("backbone", "a small convolutional network")
    times = PRECISE[scale]
    more = f" ({times * SEEDS[scale]} for dropout and at M = {LOUD_WIDTH:,})" if times > 1 else ""
    again = f". Two slopes again on {REPEATED[scale]} seeds from {AGAIN} on"
    return (
        f"Theory: random two-layer networks, {SEEDS[scale]} seeds per configuration{more}, from "
        f"{FIRST} on (an earlier run with seeds 0 to 99 was known when the rules were "
        f"written){again if REPEATED[scale] else ''}. Images: digits (mnist5k) and color images "
        f"{named(color)} of 32 x 32. Model: {backbone} with the paper's random head of width "
        f"{built['width']} (GELU) and random weights. Batches of "
        f"{', '.join(map(str, plan.batch_sizes))}; {len(plan.seeds)} rounds, each with its own "
        f"weights, batch and noise. Seven attacks, {_searches(scale)}. Training losses after "
        f"{plan.utility.rounds} rounds, {plan.utility.repeats} repeats."
    )


def _scale(scale: str) -> str:
    steps = _steps(scale)
    longest = _longest(scale)
    more = "" if longest == steps else f" or {longest:,}"
    return f"{_rounds(scale)}, searches of {steps:,}{more} steps"


def _searches(scale: str) -> str:
    steps = _steps(scale)
    longest = _longest(scale)
    told = f"searches of {steps:,} steps"
    if longest == steps:
        return told
    return (
        f"{told}. {HONEST[0].capitalize()} takes {longest:,} steps for claim 2-7, and elsewhere "
        f"where it could then be the strongest (its error after {steps:,} steps is less than twice "
        "that of the strongest)"
    )


def _rounds(scale: str) -> str:
    return f"{len(base(scale).seeds)} rounds"


def _steps(scale: str) -> int:
    """The smallest number of steps of any search of the plan."""
    taken = (attack.parameters.get("steps") for attack in base(scale).attacks)
    return min(steps for steps in taken if isinstance(steps, int))


def _longest(scale: str) -> int:
    """The steps of the searches that claims rest on."""
    return _steps(scale) * (TIMES if scale == LENGTHENED else 1)
