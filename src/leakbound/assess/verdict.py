"""The only rule that says exposed, protected or undecided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from leakbound.assess.record import (
    CERTIFIED,
    EXPOSED,
    ON_AVERAGE,
    PROTECTED,
    UNDECIDED,
    UNDER_MODEL,
    VERDICTS,
    Bound,
    Verdict,
)


def decide(
    *,
    exposed: bool,
    certified: bool = False,
    excluded: bool = False,
    under_model: bool = False,
    on_average: bool = False,
) -> Verdict:
    """The verdict from what was shown; what an attack did comes before what a bound says.

    `excluded` rests on no model of the data; what rests on a fitted one is `under_model`.
    """
    if exposed:
        return EXPOSED
    if certified:
        return CERTIFIED
    if excluded:
        return PROTECTED
    if under_model:
        return UNDER_MODEL
    return ON_AVERAGE if on_average else UNDECIDED


def verdict(
    matched: Sequence[bool], bounds: Iterable[Bound] = (), *, certified: bool = False
) -> Verdict:
    """The verdict on one attack on one update.

    `matched` is empty where the truth is not known. What contradicts itself is a `RuntimeError`: an
    attack met what a bound excludes for certain, or a certificate names another truth.
    """
    exposed = any(matched)
    if certified and matched and not exposed:
        raise RuntimeError(
            "a certificate says that the reconstruction is the input, and the truth that it is "
            "not: one is wrong (is this truth the batch behind the update, as the model was fed?)"
        )
    general = [bound for bound in bounds if bound.covers == "all"]
    excluding = [bound for bound in general if bound.excludes_threshold]
    if (exposed or certified) and any(bound.on_error for bound in excluding):
        raise RuntimeError("an attack met a criterion that a bound excludes: one is wrong")
    return decide(
        exposed=exposed,
        certified=certified,
        excluded=any(bound.model_free for bound in excluding),
        under_model=bool(excluding),
        on_average=any(bound.on_average for bound in general),
    )


def together(given: Iterable[Verdict | None]) -> Verdict:
    """The verdict on a configuration: exposed if one experiment is, protected only if all are."""
    known = {one for one in given if one is not None}
    if EXPOSED in known:
        return EXPOSED
    return min(known, key=VERDICTS.index, default=UNDECIDED)
