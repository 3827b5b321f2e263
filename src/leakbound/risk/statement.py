"""What is said about risk: one template for each statement, no more than what is proved."""

from __future__ import annotations

from typing import Final

from leakbound.assess.record import ESTIMATE, Bound, DefenseInfo

UNINFORMED: Final = (
    "The prior is a uniform direction, which knows nothing about the data. An attacker who knows "
    "similar data exceeds these numbers, so nothing here is called protected"
)


def of_bound(bound: Bound, psnr: float | None = None) -> str:
    """A bound in one sentence: what it says, of whom, and where it is not proved, why."""
    if bound.probability is not None:
        what = "meets the criterion" if psnr is None else f"reaches {psnr:g} dB"
        if bound.model_free:
            return (
                f"{bound.name}: whatever the model is, no attacker {what} with a probability above "
                f"{bound.probability:.3g}: {bound.confidence:.0%} confidence from "
                f"{bound.public_examples} public examples, of which one guess may match "
                f"{bound.largest_ball}, if private examples are drawn like them" + _margin(bound)
            )
        return (
            f"{bound.name}: {bound.covers} attackers; none {what} with a probability above "
            f"{bound.probability:.3g} if examples follow the model {bound.prior}"
        )
    error = f"{bound.value:.3g}" + ("" if bound.psnr is None else f" ({bound.psnr:.1f} dB)")
    name = f"lower bound on the error ({bound.name})"
    if bound.covers == ESTIMATE:
        return (
            f"estimate of a {name}, not proved: a mean squared error of {error} on average over "
            f"the prior {bound.prior}; {bound.assumptions[0]}"
        )
    if bound.covers == "unbiased":
        return f"{name}: no unbiased attacker has a mean squared error below {error}"
    return (
        f"{name}: no attacker has a mean squared error below {error} on average over the prior "
        f"{bound.prior}"
        + ("" if bound.confidence is None else f" ({bound.confidence:.0%} confidence)")
    )


def _margin(bound: Bound) -> str:
    if bound.density_margin is None or bound.density_margin < 1:
        return ""
    return f" (at most {bound.density_margin:.3g} times as densely)"


def of_guarantee(defense: DefenseInfo) -> str:
    """What a defense guarantees, and whether its noise or mask depends on the batch."""
    more = "; its distribution depends on the private batch" if defense.data_dependent_law else ""
    return f"{defense.guarantee}{more}"
