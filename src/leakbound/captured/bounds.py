"""Bounds on every attacker for a captured update, from the declared defense and public images."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import torch

from leakbound.assess.record import Bound
from leakbound.audit import plan as plans
from leakbound.audit.context import PlanContext
from leakbound.defenses import Chain
from leakbound.random import stream
from leakbound.registry import snake
from leakbound.risk.limits import ErrorBoundSpec, Released, RiskSpec, bounds
from leakbound.types import Batch

if TYPE_CHECKING:
    from leakbound.captured.records import Case

NO_PUBLIC = "a bound is for images of a known kind: give public images (--public DATA)"
NO_NOISE = "the declared noise was not added to this update: no bound that rests on it holds"
NO_LAW = "no noise of a known law was declared: the update itself bounds no attacker"


class PublicImages(PlanContext):
    """A data source all of whose images are public, in the units that the model is fed."""

    def __init__(self, spec: plans.DataSpec, input_range: tuple[float, float] = (0.0, 1.0)) -> None:
        super().__init__(spec)
        self._range = input_range

    def batch(self, indices: torch.Tensor) -> Batch:
        """The images with these indices, scaled from [0, 1] to the input range."""
        own = super().batch(indices)
        low, high = self._range
        return Batch(low + (high - low) * own.inputs, own.labels)

    @property
    def splits(self) -> dict[str, torch.Tensor]:
        """All images are the attacker's."""
        none = torch.zeros(0, dtype=torch.long)
        every = torch.arange(len(self.dataset.labels))
        return {"private": none, "public": every, "test": none}


def public_images(
    source: str, input_shape: tuple[int, ...], input_range: tuple[float, float]
) -> PublicImages:
    """Public images of a data source, checked against the model's input.

    Raises:
        ValueError: no such source, or images of another shape.
    """
    context = PublicImages(plans.DataSpec(source), input_range)
    if context.input_shape != tuple(input_shape):
        channels, height, width = context.input_shape
        if len(input_shape) == 3 and input_shape[1] == input_shape[2]:
            spec = plans.DataSpec(source, size=input_shape[1], channels=input_shape[0])
            context = PublicImages(spec, input_range)
        if context.input_shape != tuple(input_shape):
            raise ValueError(
                f"public data {source!r} has images of shape {(channels, height, width)}, the "
                f"model takes {tuple(input_shape)}; give images of that shape"
            )
    return context


def named_defense(defense: Chain) -> tuple[plans.Spec, ...]:
    """The links of a defense as a plan would name them."""
    return tuple(
        plans.Spec(
            snake(type(link).__name__),
            tuple((f.name, plans.plain(getattr(link, f.name))) for f in fields(link) if f.init),
        )
        for link in defense.links
    )


def bounds_of(case: Case) -> tuple[tuple[Bound, ...], str | None]:
    """The bounds on every attacker for one captured update, and why some are missing."""
    understood, context = case.understood, case.public
    if not understood.defense.links:
        return (), NO_LAW
    if understood.refuted:
        return (), NO_NOISE
    if context is None:
        return (), NO_PUBLIC
    seen, public, batch = understood.observation, context.public, case.truth
    assert public is not None  # every image of the context is public
    if batch is None and understood.labels is not None:  # of what stands in, labels alone count
        batch = Batch(public.inputs[:1].expand(seen.batch_shape), understood.labels)
    released = Released(
        task=seen.task,
        update=seen.update,
        defense=understood.defense,
        criterion=case.criterion,
        threat=seen.threat,
        cohort=seen.cohort,
        batch=batch,
        public=public,
        truth_known=case.truth is not None,
        key=(case.at, case.spec),
        once=context.once,
    )
    spec = ErrorBoundSpec()
    source = stream(case.at, "bounds", spec.kind, seen.examples)
    return bounds(released, spec, RiskSpec(), source)
