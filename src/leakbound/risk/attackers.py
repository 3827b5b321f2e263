"""Three attackers, one training: who knows the population, who knows a part, and anyone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from leakbound.assess.criterion import Criterion, distance_of
from leakbound.assess.imputers import Completion, prior_of_intruder
from leakbound.bounds.counting import Lift, PublicSample
from leakbound.bounds.knowledge import informed, largest_gain
from leakbound.domains.known import Known, known_parts
from leakbound.risk.corridor import TrainingSetting, success_bound
from leakbound.risk.examples import SAMPLE, Examples
from leakbound.risk.target import Target

Who = Literal["stranger", "intruder", "anyone"]


@dataclass(frozen=True)
class AttackerRow:
    """What an update adds for one attacker, at one threshold.

    Attributes:
        attacker: "stranger" knows the population, "intruder" also `knows`, "anyone" any q.
        knows: the known parts, as text.
        goal: what counts as reconstructed: of the unknown part alone, for the intruder.
        without: upper confidence limit on the success without the update; None for anyone.
        bound: no attacker of this kind exceeds it with the update; None for anyone.
        gain: the update adds at most this.
        measured: what the best imputer completes without the update; the intruder's alone.
        from_measured: the bound if the success without the update is the measured share.
    """

    attacker: Who
    knows: str
    goal: str
    without: float | None
    bound: float | None
    gain: float
    measured: Completion | None = None
    from_measured: float | None = None

    def plain(self) -> dict[str, Any]:
        """All fields as JSON values."""
        row = dict(vars(self))
        if self.measured is not None:
            row["measured"] = {**vars(self.measured), "share": self.measured.share}
        return row


def three_attackers(
    setting: TrainingSetting,
    examples: Examples,
    known: str,
    *,
    psnr: float = 20.0,
    share: float = 0.9,
    labels_known: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[AttackerRow, ...]:
    """What stranger, intruder and anyone reach with the updates of a training.

    Args:
        setting: the training.
        examples: public ones, with data.
        known: the parts that the intruder knows, as `domains.known_parts` reads them.
        psnr: in dB, what counts as reconstructed: of the whole example for the stranger, of the
            unknown part for the intruder.
        share: the same for tables and text, a share of the columns or tokens.
        labels_known: whether both also know the label.
        say: is called with a line of progress.

    Raises:
        ValueError: the examples have no data, or `known` names no part of them.

    Source: this project; docs/risk.md, "What the attacker already knows".

    Example:
        >>> rows = three_attackers(
        ...     TrainingSetting(1.0, dim=64), Examples.of("digits"), "region:top", psnr=15.0
        ... )
        >>> [row.attacker for row in rows], round(rows[2].gain, 3)
        (['stranger', 'intruder', 'anyone'], 0.383)
    """
    lift = partial(success_bound, setting)
    return attackers_under(
        [lift],
        examples,
        known,
        psnr=psnr,
        share=share,
        labels_known=labels_known,
        say=say,
    )[0]


def attackers_under(
    lifts: Sequence[Lift],
    examples: Examples,
    known: str,
    *,
    psnr: float = 20.0,
    share: float = 0.9,
    labels_known: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> list[tuple[AttackerRow, ...]]:
    """`three_attackers` under each lift F, such as the law of each audience of a deployment.

    What is known without an update is counted once.
    """
    parts, knows = intruder(examples, known, labels_known=labels_known)
    whole = Criterion.of(parts.domain, psnr=psnr, share=share)
    rest = Criterion.of(parts.domain, psnr=psnr, share=share, known=known)
    stranger = examples.prior(labels_known=labels_known)
    assert isinstance(stranger, PublicSample)  # the default prior of data
    completion = _best_completion(examples, parts, rest, stranger, say)
    return [
        (
            _bounded("stranger", "", whole, stranger, lift),
            _bounded("intruder", known, rest, knows, lift, completion),
            AttackerRow("anyone", "anything", "any goal", None, None, largest_gain(lift)[0]),
        )
        for lift in lifts
    ]


def intruder(
    examples: Examples, known: str, *, labels_known: bool = False
) -> tuple[Known, PublicSample]:
    """The parts that an intruder knows, and the prior of the unknown ones (`informed`).

    Raises:
        ValueError: the examples have no data, or `known` names no part of them.
    """
    if examples.form is None:
        raise ValueError(f"known is {known!r}, but there are no data; give --data")
    parts = known_parts(examples.form, known)
    stranger = examples.prior(labels_known=labels_known)
    assert isinstance(stranger, PublicSample)  # the default prior of data
    places = np.flatnonzero(parts.places.numpy()).tolist()
    return parts, informed(stranger, places, distance=distance_of(parts.rest), words=known)


def refuse_model(known: str, prior: str | None) -> None:
    """Reject a model of the data beside known parts."""
    if prior not in (None, SAMPLE):
        raise ValueError(
            f"known is {known!r}, which is counted on public examples without a model, but prior "
            f"is {prior!r}; leave prior out"
        )


def goal_of_intruder(
    examples: Examples,
    known: str,
    target: Target | str,
    *,
    labels_known: bool = False,
    input_width: float = 1.0,
) -> tuple[Target, Examples, PublicSample]:
    """A target over the unknown part, the examples' unknown parts, and the intruder's prior.

    Raises:
        ValueError: as `intruder`; or the intruder may meet the target without the update.
    """
    parts, _ = intruder(examples, known)
    domain = None if parts.rest.distance_is_rmse else parts.rest
    if isinstance(target, str):
        target = Target.parse(target, input_range=input_width, domain=domain)
    examples = examples.without_constants(target)
    parts, prior = intruder(examples, known, labels_known=labels_known)
    limit = float(np.exp(prior.log_kappa(target.eta, parts=2)))
    if limit >= target.gamma:
        raise ValueError(
            f"target is {target} for an intruder who knows {known}, but without any update they "
            f"may succeed with probability {limit:.3g}: of {prior.n} public examples, the best "
            f"answer for each value of what they know may match {prior.largest(target.eta)}. No "
            "noise brings that lower: let the intruder know less, accept a larger probability, or "
            'bound what the training adds (--target "gain<=0.1")'
        )
    assert examples.images is not None  # `intruder` needs them
    unknown = replace(
        examples,
        dim=prior.dim,
        images=examples.images[:, ~parts.places.numpy()],
        domain=domain,
        form=parts.rest,
    )
    return target, unknown, prior


def _best_completion(
    examples: Examples,
    parts: Known,
    criterion: Criterion,
    sample: PublicSample,
    say: Callable[[str], None],
) -> Completion | None:
    """The best imputer's share; None if there are too few examples to fit and to count."""
    assert examples.images is not None  # checked by the caller
    rows = torch.from_numpy(examples.images[sample.places])
    public = rows.reshape(-1, *parts.domain.shape).to(parts.domain.dtype)
    if len(public) < 40:
        return None
    return prior_of_intruder(public, parts, criterion.within, say=say)[0]


def _bounded(
    attacker: Who,
    knows: str,
    criterion: Criterion,
    sample: PublicSample,
    lift: Lift,
    measured: Completion | None = None,
) -> AttackerRow:
    bounds, logs = sample.success_bound(lift, criterion.level)
    without = float(np.exp(logs[0]))
    gain, _ = largest_gain(lift, most=without)
    from_measured = None
    if measured is not None:
        # Nothing was completed: the limit on that is what is known.
        share = max(measured.share, 1 / measured.total)
        from_measured = float(np.ravel(lift(np.array([math.log(share)])))[0])
    return AttackerRow(
        attacker,
        knows,
        criterion.info.goal,
        without,
        float(bounds[0]),
        min(gain, float(bounds[0])),
        measured,
        from_measured,
    )
