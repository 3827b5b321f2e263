"""Which mods may stand around which, before an app runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flwr.clientapp.typing import Mod

from leakbound.defenses.base import Chain
from leakbound.flower.meter import LeakMeter
from leakbound.flower.mods import DefenseMod, combined, computes_anew
from leakbound.types import Guarantee

CHANGING = frozenset({"LocalDpMod", "adaptiveclipping_mod", "fixedclipping_mod"})
"""Flower's own mods that change the weights in a reply."""
MASKING = frozenset({"secagg_mod", "secaggplus_mod"})
"""Flower's own mods that replace the weights by masked vectors."""


def protected(mods: Sequence[Mod]) -> list[Mod]:
    """The mods as they are, after `check_mods`: for `@app.train(mods=protected([...]))`."""
    check_mods(mods)
    return list(mods)


def check_mods(mods: Sequence[Mod]) -> None:
    """Refuse a list of mods whose order undoes a defense or breaks what it promises.

    The first mod of a list is the outermost: it sees a reply last. So the defenses of a list act
    from its end to its start.

    Raises:
        ValueError: naming both mods and the order that works.

    Example:
        >>> from flwr.clientapp.mod import fixedclipping_mod
        >>> from torch import nn
        >>> from leakbound.defenses import GaussianNoise
        >>> from leakbound.flower import Setup
        >>> noise = DefenseMod(GaussianNoise(0.1), Setup(lambda: nn.Linear(2, 2)))
        >>> check_mods([fixedclipping_mod, noise])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: fixedclipping_mod changes the weights after GaussianNoise(noise_std=0.1), ...
    """
    _check_meter(mods)
    whole: Chain | None = None
    inner: Mod | None = None
    for mod in reversed(mods):
        name = _flowers(mod)
        if isinstance(mod, DefenseMod):
            _check_inside(mod, _flowers(inner))
            whole = mod.defense if whole is None else combined(whole, mod.defense)
        elif name in CHANGING and whole is not None and whole.guarantee is not Guarantee.NONE:
            raise ValueError(
                f"{name} changes the weights after {whole!r}, whose noise distribution would no "
                f"longer hold; put it behind {inner!r} in the list"
            )
        if isinstance(mod, DefenseMod) or name in CHANGING | MASKING:
            inner = mod


def _check_meter(mods: Sequence[Mod]) -> None:
    """A meter judges what leaves: nothing outside it changes weights, nothing inside masks them."""
    at = next((i for i, mod in enumerate(mods) if isinstance(mod, LeakMeter)), None)
    if at is None:
        return
    for mod in mods[:at]:
        name = _flowers(mod)
        if isinstance(mod, DefenseMod) or name in CHANGING:
            raise ValueError(
                f"{name or repr(mod)} changes the weights after the LeakMeter judged them; put the "
                "LeakMeter before it in the list"
            )
    for mod in mods[at + 1 :]:
        if (name := _flowers(mod)) in MASKING:
            raise ValueError(
                f"{name} masks the weights before the LeakMeter sees them; put {name} first in the "
                "list"
            )


def _check_inside(mod: DefenseMod, inner: str | None) -> None:
    if inner in MASKING:
        raise ValueError(
            f"{mod!r} stands before {inner} and would change masked vectors; put {inner} first in "
            "the list"
        )
    anew = computes_anew(mod.defense)
    if inner in CHANGING and anew is not None:
        raise ValueError(
            f"{anew!r} computes the update anew and would undo {inner} inside it; leave {inner} out"
        )


def _flowers(mod: Any) -> str | None:
    """The name of a mod that is Flower's own."""
    thing = mod if hasattr(mod, "__name__") else type(mod)
    return str(thing.__name__) if str(thing.__module__).startswith("flwr.") else None
