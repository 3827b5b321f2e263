"""Batches that a train script shows to the filter of its client: in memory of one process."""

from __future__ import annotations

from threading import Lock

from torch import Tensor

from leakbound.core import Batch
from leakbound.meter.defended import Tapped

_LOCK = Lock()
_SHOWN: Tapped | None = None


def tap(inputs: Tensor, labels: Tensor) -> None:
    """Show a batch to the `LeakboundFilter` of this client, once per local step.

    Does nothing if no filter needs batches, or if training runs in another process than the
    filter (an executor with a launcher). The copy stays in memory until the update has left.

    Args:
        inputs: (B, *S) the model's inputs, after all augmentation.
        labels: (B,) class numbers.

    Example:
        >>> import torch
        >>> listen()
        >>> tap(torch.zeros(2, 1, 8, 8), torch.tensor([3, 5]))
        >>> [batch.size for batch in shown()]
        [2]
    """
    with _LOCK:
        if _SHOWN is not None:
            _SHOWN.append(Batch(inputs.detach().clone(), labels.detach().clone()))


def listen() -> None:
    """Start to keep batches, and forget earlier ones."""
    global _SHOWN
    with _LOCK:
        _SHOWN = []


def shown() -> Tapped:
    """The batches shown since `listen`; they are forgotten here."""
    global _SHOWN
    with _LOCK:
        found = _SHOWN or []
        _SHOWN = None
        return found
