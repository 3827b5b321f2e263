"""Three attackers, one training: who knows the population, who knows a part, and anyone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from leakbound.assess.attackers import Intruder, best_completion, rows_of, with_known_parts
from leakbound.assess.criterion import Criterion
from leakbound.assess.record import AttackerRow
from leakbound.bounds.counting import Lift, PublicSample
from leakbound.domains.known import Known, known_parts
from leakbound.risk.corridor import TrainingSetting, success_bound
from leakbound.risk.examples import SAMPLE, Examples
from leakbound.risk.target import Target


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
    parts, sample = intruder(examples, known, labels_known=labels_known)
    domain = parts.domain
    whole = Criterion.of(domain, psnr=psnr, share=share)
    rest = Criterion.of(domain, psnr=psnr, share=share, known=known)
    stranger = examples.prior(labels_known=labels_known)
    assert isinstance(stranger, PublicSample)  # the default prior of data
    assert examples.images is not None  # `intruder` needs them
    taken = torch.from_numpy(examples.images[stranger.places])
    public = taken.reshape(-1, *domain.shape).to(domain.dtype)
    labels = None
    if labels_known and examples.labels is not None:
        labels = torch.from_numpy(examples.labels[stranger.places])
    knows = Intruder(rest, sample, best_completion(public, rest, labels, say))
    return [rows_of(lift, whole, stranger, knows) for lift in lifts]


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
    return parts, with_known_parts(stranger, parts)


def refuse_model(known: str, prior: str | None) -> None:
    """Reject a model of the data beside known parts."""
    if prior not in (None, SAMPLE):
        raise ValueError(
            f"known is {known!r}, which is counted on public examples without a model, but prior "
            f'is {prior!r}; leave prior out, or give known "none"'
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
    if target.ncc is not None:
        raise ValueError(
            f"target is {target}, which counts whole images, but known is {known!r}; leave it out"
        )
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
