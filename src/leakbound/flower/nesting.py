"""What a client's mods learn from what runs inside them: tapped batches, and seals of defenses.

Both travel in context variables, never in a message. A seal lets a mod see what the mods inside it
did to the weights, and whether anything changed the weights afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from flwr.app import Message
from torch import Tensor

from leakbound.defenses.base import Chain
from leakbound.flower.messages import digest, only_arrays
from leakbound.types import Batch, Update


@dataclass
class Tap:
    """The batches of one round of one client, in the order in which it trained on them."""

    batches: list[Batch] = field(default_factory=list)

    @property
    def examples(self) -> int:
        """How many examples were tapped; a second epoch counts them again."""
        return sum(batch.size for batch in self.batches)

    def joined(self) -> Batch:
        """All batches as one."""
        return Batch(
            torch.cat([batch.inputs for batch in self.batches]).cpu(),
            torch.cat([batch.labels for batch in self.batches]).cpu(),
        )


_TAP: ContextVar[Tap | None] = ContextVar("leakbound_tap", default=None)


def tap(inputs: Tensor, labels: Tensor) -> None:
    """Show a batch to the leakbound mods around this train function, once a local step.

    Does nothing where no mod listens. It copies the batch; the copy stays in this process's memory
    until the mods have answered, and enters no message and no file.

    Args:
        inputs: (B, *S) what the model is fed, after all augmentation.
        labels: (B,) class numbers.

    Example:
        >>> with listening() as tapped:
        ...     tap(torch.zeros(2, 1, 8, 8), torch.tensor([3, 5]))
        >>> tapped.examples
        2
    """
    tapped = _TAP.get()
    if tapped is not None:
        tapped.batches.append(Batch(inputs.detach().clone(), labels.detach().clone()))


@contextmanager
def listening() -> Iterator[Tap]:
    """What `tap` is given inside. Nested listeners share the outermost one's batches.

    Assumptions: the train function calls `tap` in the thread (or task) that the mod runs in; other
    threads are not heard.
    """
    tapped = _TAP.get()
    if tapped is not None:
        yield tapped
        return
    token = _TAP.set(tapped := Tap())
    try:
        yield tapped
    finally:
        _TAP.reset(token)


@dataclass(frozen=True)
class Seal:
    """What a defense's mod answered: its links, those inside it included, and a digest.

    `released` is the update with its law, made by the links as `ready` has them; both are None
    where several mods made it. `seeded`: noise of this mod, or of one inside, can be replayed.
    """

    defense: Chain
    digest: str
    released: Update | None = None
    ready: Chain | None = None
    seeded: bool = False


@dataclass
class Inside:
    """What the mods inside one mod sealed; `depth` counts the defenses outside this one."""

    depth: int
    defends: bool = True
    seals: list[Seal] = field(default_factory=list)

    @property
    def seeded(self) -> bool:
        """Whether noise of a mod inside can be replayed."""
        return any(seal.seeded for seal in self.seals)


_INSIDE: ContextVar[Inside | None] = ContextVar("leakbound_seals", default=None)


@contextmanager
def collecting(*, defends: bool = True) -> Iterator[Inside]:
    """Collect the seals of the mods inside; wrap `call_next` with it."""
    outer = _INSIDE.get()
    inside = Inside(0 if outer is None else outer.depth + outer.defends, defends)
    token = _INSIDE.set(inside)
    try:
        yield inside
    finally:
        _INSIDE.reset(token)


def seal(
    reply: Message,
    defense: Chain,
    released: Update | None = None,
    ready: Chain | None = None,
    *,
    seeded: bool = False,
) -> None:
    """Report to the mods outside what left this one. Call it outside of `collecting`."""
    outer = _INSIDE.get()
    if outer is not None:
        name = digest(only_arrays(reply.content, "the reply")[1])
        outer.seals.append(Seal(defense, name, released, ready, seeded))


def unbroken(inside: Inside, reply: Message, who: str) -> Chain | None:
    """The defenses inside, None where there is none.

    Raises:
        ValueError: something in between changed the weights after a defense had made them.
    """
    if not inside.seals:
        return None
    last = inside.seals[-1]
    if digest(only_arrays(reply.content, "the reply")[1]) != last.digest:
        raise ValueError(
            f"the weights that {last.defense!r} answered were changed on their way to {who}, so "
            "their noise distribution is unknown; put the mod in between inside the defense "
            "(after it in the list)"
        )
    return last.defense
