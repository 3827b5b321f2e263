"""What the local forms read of the client's own batch, and so give away."""

from __future__ import annotations

from leakbound.defenses.base import Defense
from leakbound.engines.sensitivity import Sensitivity, sensitivity
from leakbound.random import Source
from leakbound.types import ClientContext


def batch_sensitivity(
    link: Defense, context: ClientContext | None, source: Source, directions: int | None
) -> Sensitivity:
    """Sensitivity and gradient of the client's batch.

    Raises:
        ValueError: there is no client here.
    """
    if context is None:
        raise ValueError(f"{link!r} runs on a client, which has a batch; give its context")
    batch = context.batch
    return sensitivity(context.task, batch.inputs, batch.labels, source, directions=directions)
