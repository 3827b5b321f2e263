"""Sentences about risk: one template for each statement, which says no more than is proven."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from leakbound._util.formats import FAINT, format_fixed, format_lower, format_upper
from leakbound.assess.chance import FEWEST
from leakbound.assess.record import DELTA, ESTIMATE, Assessment, Attained, Bound, DefenseInfo
from leakbound.assess.sentences import DOUBTED, GUESS

STRONG: Final = 1.0
"""The largest epsilon that counts as a strong guarantee (NIST SP 800-226)."""
UNINFORMED: Final = (
    "The prior is a uniform direction, which knows nothing about the data. An attacker who knows "
    "similar data exceeds these numbers, so nothing here is called protected"
)


def of_assessment(
    assessment: Assessment,
    *,
    reasons: bool = True,
) -> list[str]:
    """All that is known of attackers on one update, a sentence each; `reasons` as in `of_bound`."""
    goal = assessment.criterion.goal
    said = [
        of_attack(assessment),
        *of_bounds(assessment.bounds, goal, reasons=reasons),
    ]
    if assessment.attained is not None:
        said.append(of_attained(assessment.attained, goal))
    return [*said, f"no bound: {assessment.bounds_note}"] if assessment.bounds_note else said


def of_attack(assessment: Assessment) -> str:
    """What the attack achieved, compared with the prior-only baseline."""
    name = assessment.attack.name
    criterion = assessment.criterion
    if assessment.certificate is not None:
        return f"{name} reconstructed the input: {assessment.certificate}"
    if criterion.label_alone:
        return f"{name}: only the label is not known, and no reconstruction is measured"
    if not assessment.truth_known and assessment.layer_input is not None:
        return f"{name}: {assessment.layer_input}"
    if not assessment.truth_known:
        return f"what {name} reconstructed cannot be measured: the truth is not known"
    hits = [place for place, hit in enumerate(assessment.matched) if hit]
    if not hits:
        best = max((value for value in assessment.scores if value is not None), default=None)
        reached = "" if best is None else f"; at best it reaches {criterion.shown(best)}"
        none = (
            f"{name} reconstructed none of {len(assessment.matched)} to {criterion.goal}{reached}"
        )
        return none + _by_chance(assessment, best)
    # The closest baseline: any other would make the attack look stronger.
    guess = max(assessment.baseline[place] or 0.0 for place in hits)
    return (
        f"{name} reconstructed {len(hits)} of {len(assessment.matched)} to {criterion.goal} or "
        f"better; the closest guess without the update has {criterion.shown(guess)} for them at "
        "best"
    )


def _by_chance(assessment: Assessment, best: float | None) -> str:
    """Why examples that meet the criterion do not count."""
    test = assessment.chance
    if best is None or best < assessment.criterion.value or test is None:
        return ""
    if test.p_value is None:
        return (
            f": there are too few public examples to tell this from chance ({test.decoys} with "
            f"these labels that the attack never saw; {FEWEST} are needed)"
        )
    if test.excluded:
        return ": a guess without the update is as close"
    return (
        f": that may be chance (p = {test.p_value:.2g} against {test.against}; "
        f"{test.level:g} or less counts)"
    )


def of_bounds(
    bounds: Iterable[Bound],
    goal: str | None = None,
    *,
    reasons: bool = True,
) -> list[str]:
    """A sentence for each bound, and one sentence on what they leave open about membership."""
    every = list(bounds)
    open_ = (of_membership(b.epsilon, DELTA) for b in every if b.epsilon is not None)
    return [
        *(of_bound(bound, goal, reasons=reasons) for bound in every),
        *dict.fromkeys(filter(None, open_)),
    ]


def of_bound(
    bound: Bound,
    goal: str | None = None,
    *,
    reasons: bool = True,
) -> str:
    """A bound in one sentence: what it says, about which attackers, and why it may be unproven.

    Without `reasons`, an estimate is still called not proved, but the reason is left out.
    """
    if bound.probability is not None:
        doubts = (f"; but {one}" for one in bound.assumptions if one.startswith(DOUBTED))
        return f"{bound.name}: {_claimed(bound, goal)}{next(doubts, '')}"
    error = f"{format_lower(bound.value)}" + (
        "" if bound.psnr is None else f" ({format_fixed(bound.psnr, up=True)} dB)"
    )
    name = f"lower bound on the error ({bound.name})"
    if bound.covers == ESTIMATE:
        why = f"; {bound.assumptions[0]}" if reasons else ""
        return (
            f"estimate of a {name}, not proved: a mean squared error of {error} on average over "
            f"the prior {bound.prior}{why}"
        )
    sampled = bound.confidence is not None and bound.basis == "fitted model"
    if bound.covers == "unbiased":
        return f"{name}: no unbiased attacker has a mean squared error below {error}"
    return (
        f"{name}: no attacker has a mean squared error below {error} on average over the prior "
        f"{bound.prior}" + (f" ({bound.confidence:.0%} confidence)" if sampled else "")
    )


def _claimed(bound: Bound, goal: str | None) -> str:
    what = f"{'meets the criterion' if goal is None else f'reaches {goal}'} for {bound.unit}"
    above = f"with a probability above {format_upper(max(bound.probability or 0.0, FAINT))}"
    if bound.basis == "examples":
        return (
            f"whatever the model is, no attacker {what} from one update {above}, averaged over "
            f"these {bound.public_examples} examples; it says nothing about others"
        )
    if bound.basis == "fitted model":
        return (
            f"{bound.covers} attackers; none {what} from one update {above} if examples follow the "
            f"model {bound.prior}"
        )
    sure = f"{bound.confidence:.0%} confidence from {bound.public_examples} public examples"
    like = f"if private examples are drawn like them{_margin(bound)}"
    if bound.basis == "known model":
        return f"from one update of this model, no attacker {what} {above}: {sure}, {like}"
    who = "attacker who has the known parts" if bound.basis == "known parts" else "stranger"
    return (
        f"whatever the model is, no {who} {what} from one update {above}: {sure}, of which one "
        f"candidate (or one for each value of what is known) may match {bound.largest_ball}, {like}"
    )


def of_membership(epsilon: float, delta: float) -> str:
    """What a bound on reconstruction leaves open about membership. Empty if it is hidden."""
    if epsilon <= STRONG:
        return ""
    return (
        f"Nothing here hides who took part: epsilon is {epsilon:.3g} at delta {delta:g}, and only "
        f"{STRONG:g} or less protects membership well"
    )


def of_attained(attained: Attained, goal: str) -> str:
    """The success of working attacks, in one sentence."""
    low, high = attained.baseline
    sure = f"{attained.confidence:.0%} confidence, {attained.public_examples} examples"
    if attained.guessable:
        return (
            f"a guess without any update reaches {goal} for {format_lower(low)} of the examples or "
            f"more ({sure}), above the accepted {attained.accepted:g}: then no amount of noise "
            "protects at this threshold"
        )
    if attained.attack == GUESS:
        ends = f"{format_lower(low)} to {format_upper(high)}"
        return (
            f"a guess without any update reaches {goal} for {ends} of "
            f"examples like the public ones ({sure})"
        )
    over = "" if attained.recoverable else "; that does not decide"
    success = format_lower(attained.success)
    return (
        f"a malicious server's {attained.attack} reaches {goal} for {success} "
        f"or more of examples like the public ones, one in an update, a guess without any update "
        f"for {format_upper(high)} at most ({sure}){over}"
    )


def _margin(bound: Bound) -> str:
    if bound.density_margin is None or bound.density_margin < 1:
        return ""
    return f" (at most {format_lower(bound.density_margin)} times as densely)"


def of_guarantee(defense: DefenseInfo) -> str:
    """What a defense guarantees, and whether its noise or mask depends on the batch."""
    more = "; its distribution depends on the private batch" if defense.data_dependent_law else ""
    return f"{defense.guarantee}{more}"
