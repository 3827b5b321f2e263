"""Bounds on every attacker for a captured update, from the declared defense and public images."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from leakbound.audit import plan as plans
from leakbound.audit.bench import Bench
from leakbound.audit.floors import floors
from leakbound.audit.risk import risks
from leakbound.defenses import Chain
from leakbound.protocol import Round
from leakbound.registry import snake
from leakbound.types import Batch, NotApplicable

if TYPE_CHECKING:
    from leakbound.captured.records import Case

NO_PUBLIC = "a floor is for images of a known kind: give public images (--public DATA)"
NO_NOISE = "the declared noise was not added to this update: no bound that rests on it holds"
NO_LAW = "no noise of a known law was declared: the update itself bounds no attacker"


class PublicImages(Bench):
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
    bench = PublicImages(plans.DataSpec(source), input_range)
    if bench.input_shape != tuple(input_shape):
        channels, height, width = bench.input_shape
        if len(input_shape) == 3 and input_shape[1] == input_shape[2]:
            spec = plans.DataSpec(source, size=input_shape[1], channels=input_shape[0])
            bench = PublicImages(spec, input_range)
        if bench.input_shape != tuple(input_shape):
            raise ValueError(
                f"public data {source!r} has images of shape {(channels, height, width)}, the "
                f"model takes {tuple(input_shape)}; give images of that shape"
            )
    return bench


def named_defense(defense: Chain) -> tuple[plans.Spec, ...]:
    """The links of a defense as a plan would name them."""
    return tuple(
        plans.Spec(
            snake(type(link).__name__),
            tuple((f.name, plans.plain(getattr(link, f.name))) for f in fields(link) if f.init),
        )
        for link in defense.links
    )


def bounds_of(case: Case, spec: plans.Spec | None) -> dict[str, Any]:
    """The floors and probability laws for one captured update, and why some are missing."""
    understood = case.understood
    if not understood.defense.links:
        return {"bounds": [], "bounds_note": NO_LAW}
    if understood.refuted:
        return {"bounds": [], "bounds_note": NO_NOISE}
    if case.public is None:
        return {"bounds": [], "bounds_note": NO_PUBLIC}
    seen = understood.observation
    cell = plans.Cell(
        data=case.public.spec,
        model=case.spec,
        defense=named_defense(understood.defense),
        attack=spec or plans.Spec("linear_inversion"),
        batch_size=seen.examples,
        seed=case.at,
        threat=seen.threat,
        threshold=case.threshold,
        floor=plans.FloorSpec(),
        risk=plans.RiskSpec(),
    )
    truth, labels = case.truth, understood.labels
    if truth is None:  # what stands in for it is used for its shape and labels alone
        public = case.public.public
        assert public is not None  # every image of the bench is public
        images = public.inputs[:1].expand(seen.batch_shape)
        truth = Batch(images, public.labels[:1].expand(seen.examples) if labels is None else labels)
    played = Round(seen, truth, seen.update, understood.defense)
    found: list[dict[str, Any]] = []
    notes: list[str] = []
    try:
        if case.truth is None and labels is None:
            raise NotApplicable("a lower bound on the error needs the labels, which are not known")
        found += floors(cell, case.public, played, truth_known=case.truth is not None)
    except NotApplicable as error:
        notes.append(" ".join(error.reason.split()))
    try:
        found += risks(cell, case.public, played)
    except NotApplicable as error:
        notes.append(" ".join(error.reason.split()))
    shown = [
        {k: float(f"{v:.9g}") if isinstance(v, float) else v for k, v in bound.items()}
        for bound in found
    ]
    return {"bounds": shown, "bounds_note": "; ".join(notes) or None}
