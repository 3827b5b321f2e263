"""The batches that a train function shows: kept in memory until the update has left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock

import torch
from torch import Tensor

from leakbound.core import Batch, LocalPlan, Unit

Tapped = list[Batch]
"""The batches of one round of one client, in training order."""
NAME = "leakbound.client_side.tap"

# Flower runs the train function inside the mod's call: another thread there is another client.
_OF_CALL: ContextVar[Tapped | None] = ContextVar("leakbound_tap", default=None)
# NVFlare runs a filter and the train script in two threads of one client's process.
_OF_PROCESS: Tapped | None = None
_LOCK = Lock()


def tap(inputs: Tensor, labels: Tensor) -> None:
    """Show a batch to the mods or the filter of this client, once per local step.

    Does nothing if none of them needs batches, or if training runs in another process. It copies
    the batch; the copy stays in this process's memory until the update has left, and enters no
    message and no file.

    Args:
        inputs: (B, *S) the model's inputs, after all augmentation.
        labels: (B,) class numbers.

    Example:
        >>> with listening() as tapped:
        ...     tap(torch.zeros(2, 1, 8, 8), torch.tensor([3, 5]))
        >>> tapped[0].size
        2
    """
    with _LOCK:
        tapped = _OF_CALL.get()
        if tapped is None:
            tapped = _OF_PROCESS
        if tapped is not None:
            # a train loop may reuse its tensors for the next batch
            tapped.append(Batch(inputs.detach().clone(), labels.detach().clone()))


@contextmanager
def listening() -> Iterator[Tapped]:
    """Collect the batches given to `tap` in this thread; nested calls share the outermost's."""
    tapped = _OF_CALL.get()
    if tapped is not None:
        yield tapped
        return
    tapped = []
    token = _OF_CALL.set(tapped)
    try:
        yield tapped
    finally:
        _OF_CALL.reset(token)


def listen() -> None:
    """Start to keep the batches of every thread, and forget earlier ones."""
    global _OF_PROCESS
    with _LOCK:
        _OF_PROCESS = []


def shown() -> Tapped:
    """The batches shown since `listen`; they are forgotten here."""
    global _OF_PROCESS
    with _LOCK:
        tapped = _OF_PROCESS or []
        _OF_PROCESS = None
        return tapped


def joined(tapped: Tapped) -> Batch:
    """All batches as one, on the CPU."""
    inputs = torch.cat([batch.inputs for batch in tapped]).cpu()
    return Batch(inputs, torch.cat([batch.labels for batch in tapped]).cpu())


def distinct(tapped: Tapped) -> Batch:
    """All training examples, each once.

    Raises:
        ValueError: the train function showed none.
    """
    if not tapped:
        raise ValueError(
            "the train function showed no batch, so nothing can be evaluated; call "
            f"{NAME}(inputs, labels) in it"
        )
    batch = joined(tapped)
    # several local steps show one example several times
    first: dict[bytes, int] = {}
    for i, image in enumerate(batch.inputs):
        first.setdefault(image.contiguous().numpy().tobytes(), i)
    index = torch.tensor(sorted(first.values()))
    return Batch(batch.inputs[index], batch.labels[index])


def one_batch(
    tapped: Tapped,
    plan: LocalPlan,
    who: str,
    unit: Unit,
) -> Batch:
    """The client's training examples, as one batch that the plan cuts in the same order.

    Raises:
        ValueError: they do not fit what `who`, a link of the defense, needs.
    """
    if not tapped:
        raise ValueError(
            f"{who} needs the client's batch, but the train function showed none; call "
            f"{NAME}(inputs, labels) in it, in the same process and thread"
        )
    sizes = [batch.size for batch in tapped]
    if unit is Unit.EXAMPLE and (len(sizes) > 1 or plan.steps > 1):
        raise ValueError(
            f"{who} needs every example's gradient of one local step, but the train function took "
            f"{max(len(sizes), plan.steps)}; use a defense that edits the whole update, such as "
            "chain(Clip(5.0), GaussianNoise(0.02)), train one step on one batch of all examples, "
            "or use leakbound.opacus for DP-SGD in every local step"
        )
    size = plan.batch_size
    # The last batch of an epoch may be smaller.
    cut = len(sizes) == plan.steps and {*sizes[:-1], size} == {size} and sizes[-1] <= (size or 0)
    if len(sizes) > 1 and not cut:
        raise ValueError(
            f"{who} needs the client's training batches, but the train function showed other "
            f"batches than the Setup says (steps={plan.steps}, batch_size={size}); tap one batch, "
            "or give Setup the steps and the batch size"
        )
    return joined(tapped)
