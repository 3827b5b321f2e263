"""Seals: what a client's mods learn from the mods inside them.

A seal shows a mod what its inner mods did to the weights, and whether anything changed the weights
afterwards. Seals are context variables and never part of a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flwr.app import Message

from leakbound.core import Update
from leakbound.defenses.base import Chain
from leakbound.flower.messages import digest, only_arrays

T = TypeVar("T")


@contextmanager
def _holding(variable: ContextVar[T | None], value: T) -> Iterator[T]:
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


@dataclass(frozen=True)
class Seal:
    """The answer of a defense's mod: all links, including inner ones, and a digest.

    `made`: the update with its distribution and the resolved links that made it; None if several
    mods did. `seeded`: noise of this mod, or of an inner one, can be replayed. `given`: digest of
    the weights before all links. `rate`: the update's row is (change of the weights) / rate.
    """

    defense: Chain
    digest: str
    made: tuple[Update, Chain] | None
    seeded: bool
    given: str = ""
    rate: float = 1.0


@dataclass
class Inside:
    """The seals of the mods inside one mod; `depth` counts the defenses outside this one."""

    depth: int
    defends: bool
    seals: list[Seal] = field(default_factory=list)

    @property
    def seeded(self) -> bool:
        return any(seal.seeded for seal in self.seals)


_INSIDE: ContextVar[Inside | None] = ContextVar("leakbound_seals", default=None)


def collecting(*, defends: bool) -> AbstractContextManager[Inside]:
    """Collect the seals of the mods inside; wrap `call_next` with it."""
    outer = _INSIDE.get()
    depth = 0 if outer is None else outer.depth + outer.defends
    return _holding(_INSIDE, Inside(depth, defends))


_WATCH: ContextVar[Callable[[Seal], None] | None] = ContextVar("leakbound_watch", default=None)


def watched_seals(
    watch: Callable[[Seal], None],
) -> AbstractContextManager[Callable[[Seal], None] | None]:
    """Call `watch` with the seal of every mod that answers, the inner ones first."""
    return _holding(_WATCH, watch)


def given_to(inside: Inside, reply: Message) -> str:
    """The digest of the weights before all defenses; empty if nobody asks for it."""
    if _INSIDE.get() is None and _WATCH.get() is None:
        return ""
    inner = inside.seals[-1].given if inside.seals else ""
    return inner or digest(only_arrays(reply.content, "the reply")[1])


def seal(
    reply: Message,
    defense: Chain,
    **about: Any,
) -> None:
    """Report what left this mod to the outer mods; `about` are the other parts of a `Seal`.

    Call it outside of `collecting`.
    """
    outer = _INSIDE.get()
    watch = _WATCH.get()
    if outer is None and watch is None:
        return
    sealed = Seal(defense, digest(only_arrays(reply.content, "the reply")[1]), **about)
    if outer is not None:
        outer.seals.append(sealed)
    if watch is not None:
        watch(sealed)


def unbroken(
    inside: Inside,
    reply: Message,
    who: str,
) -> Chain | None:
    """The defenses inside; ValueError if something in between changed the weights afterwards."""
    if not inside.seals:
        return None
    last = inside.seals[-1]
    if digest(only_arrays(reply.content, "the reply")[1]) != last.digest:
        raise ValueError(
            f"the weights from {last.defense!r} were changed on their way to {who}, so "
            "the distribution of their noise is unknown; put the mod in between inside the defense "
            "(after it in the list)"
        )
    return last.defense
