"""Paper B reproduced: its theory on two-layer networks, its evaluation on images."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from leakbound_reproductions.claim import Claim, left_open
from leakbound_reproductions.outcome import Figure, Outcome, Tell
from leakbound_reproductions.systematic_evaluation import evaluation_claims, theory_claims
from leakbound_reproductions.systematic_evaluation.evaluation import evaluate
from leakbound_reproductions.systematic_evaluation.evaluation_page import named
from leakbound_reproductions.systematic_evaluation.parts import HONEST, LENGTHENED, TIMES, base
from leakbound_reproductions.systematic_evaluation.sweep import AGAIN, FIRST, LOUD_WIDTH
from leakbound_reproductions.systematic_evaluation.theory import PRECISE, REPEATED, SEEDS, study

ENOUGH = 1000
"""Steps below which a deep prior's search does not show which attack is the strongest: on color
images without a defense it leaves 0.27 of the range after 250 steps and 0.18 after 1,000."""
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
)


def reproduce(scale: str, folder: Path, *, workers: int, color: str, tell: Tell) -> Outcome:
    """Measure what `folder` does not have yet and judge claims 2-1 to 2-10.

    Args:
        scale: one of `SCALES`. At the paper's own, a GPU is used where there is one.
        folder: for journals, tables and figures; a later call goes on from it.
        workers: processes for the evaluation.
        color: the source of 32 x 32 color images.
        tell: called as it goes on.

    Raises:
        ValueError: no such scale, images that cannot be read, or a folder of other settings.
    """
    base(scale)
    device = "cuda" if scale == "paper" and torch.cuda.is_available() else "cpu"
    theory = study(folder, scale, tell)
    given = {"scale": scale, "color": color, "workers": workers, "device": device}
    pictures = evaluate(folder, tell=tell, **given)  # type: ignore[arg-type]
    claims = [
        *theory_claims.claims(theory.rows, theory.shares),
        evaluation_claims.pruning_hides_features(
            pictures, _rounds(scale), theory_claims.pruned_span(theory.rows)
        ),
        *judged(evaluation_claims.claims(pictures, _scale(scale)), _longest(scale)),
    ]
    ordered = sorted(claims, key=lambda claim: int(claim.number.split("-")[1]))
    pages = ("theory.md", "evaluation.md")
    return Outcome(tuple(ordered), FIGURES, settings(scale, color), pages)


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
