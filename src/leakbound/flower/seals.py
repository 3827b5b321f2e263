"""Seals: a mod sees what the mods inside it did to the weights, and whether that was changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from flwr.app import Message

from leakbound.defenses.base import Chain
from leakbound.flower.arrays import digest, only_arrays
from leakbound.types import Update


@dataclass(frozen=True)
class Seal:
    """What a defense's mod answered: its links, those inside it included, and a digest.

    `released` is the update with its law as it left a mod that had no other inside, made by the
    links as `ready` has them; None where several mods made it. `seeded`: noise of this mod, or of
    one inside, can be replayed.
    """

    defense: Chain
    digest: str
    released: Update | None = None
    ready: Chain | None = None
    seeded: bool = False


@dataclass
class Inside:
    """What the mods inside one mod sealed; `depth` counts the defenses outside this one.

    `adds` is what this mod adds to the depth of those inside: 0 where it defends nothing.
    """

    depth: int
    adds: int = 1
    seals: list[Seal] = field(default_factory=list)


_OPEN: ContextVar[Inside | None] = ContextVar("leakbound_seals", default=None)


@contextmanager
def looking(*, adds: int = 1) -> Iterator[Inside]:
    """Open a place for the seals of the mods inside; wrap `call_next` with it."""
    outer = _OPEN.get()
    inside = Inside(0 if outer is None else outer.depth + outer.adds, adds)
    token = _OPEN.set(inside)
    try:
        yield inside
    finally:
        _OPEN.reset(token)


def seal(
    reply: Message,
    defense: Chain,
    released: Update | None = None,
    ready: Chain | None = None,
    *,
    seeded: bool = False,
) -> None:
    """Tell the mods outside what left this one. Call it outside of `looking`."""
    outer = _OPEN.get()
    if outer is not None:
        name = digest(only_arrays(reply.content, "the reply")[1])
        outer.seals.append(Seal(defense, name, released, ready, seeded))


def unbroken(inside: Inside, reply: Message, who: str) -> Chain | None:
    """The defenses inside, None where there is none.

    Raises:
        ValueError: something between changed the weights after a defense had made them.
    """
    if not inside.seals:
        return None
    last = inside.seals[-1]
    if digest(only_arrays(reply.content, "the reply")[1]) != last.digest:
        raise ValueError(
            f"the weights that {last.defense!r} answered were changed on their way to {who}, so "
            "nothing that is said of their law holds; put the mod in between inside the defense "
            "(after it in the list)"
        )
    return last.defense
