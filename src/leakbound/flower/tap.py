"""The tap: one line in a train loop that shows a client's own mods what it trains on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor

from leakbound.types import Batch


@dataclass
class Tap:
    """The batches of one round of one client, in the order in which it trained on them."""

    batches: list[Batch] = field(default_factory=list)

    @property
    def examples(self) -> int:
        """How many examples went by, those of a second epoch counted again."""
        return sum(batch.size for batch in self.batches)


_OPEN: ContextVar[Tap | None] = ContextVar("leakbound_tap", default=None)


def tap(inputs: Tensor, labels: Tensor) -> None:
    """Show a batch to the leakbound mods around this train function, once a local step.

    Does nothing where no mod listens. What it takes is a copy that stays in this process, in
    memory, until the mods have answered: it is in no message and in no file.

    Args:
        inputs: (B, *S) what the model is fed, after all augmentation.
        labels: (B,) class numbers.

    Example:
        >>> import torch
        >>> with listening() as heard:
        ...     tap(torch.zeros(2, 1, 8, 8), torch.tensor([3, 5]))
        >>> heard.examples
        2
    """
    heard = _OPEN.get()
    if heard is not None:
        heard.batches.append(Batch(inputs.detach().clone(), labels.detach().clone()))


@contextmanager
def listening() -> Iterator[Tap]:
    """What `tap` is given inside. Nested listeners share what the outermost hears.

    Assumptions: the train function calls `tap` in the thread (or task) that the mod runs in; other
    threads are not heard.
    """
    heard = _OPEN.get()
    if heard is not None:
        yield heard
        return
    heard = Tap()
    token = _OPEN.set(heard)
    try:
        yield heard
    finally:
        _OPEN.reset(token)
