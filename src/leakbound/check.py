"""Small validators for arguments: each error names the argument, its value and the fix."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

__all__ = [
    "closest",
    "count",
    "finite",
    "fraction",
    "labels",
    "non_negative",
    "one_of",
    "positive",
    "within",
]

if TYPE_CHECKING:
    from torch import Tensor

_NEAREST = 3
_SHORT = 8
"""How many near words an error names, and how many words are still a short list."""


def positive(**values: float) -> None:
    """Every value is a finite number above 0.

    Example:
        >>> positive(noise_std=-1.0)
        Traceback (most recent call last):
        ...
        ValueError: noise_std is -1.0; give a finite number above 0
    """
    for name, value in values.items():
        if not (math.isfinite(_number(name, value)) and value > 0):
            raise ValueError(f"{name} is {value!r}; give a finite number above 0")


def non_negative(**values: float) -> None:
    """Every value is a finite number, 0 or above."""
    for name, value in values.items():
        if not (math.isfinite(_number(name, value)) and value >= 0):
            raise ValueError(f"{name} is {value!r}; give a finite number of at least 0")


def fraction(**values: float) -> None:
    """Every value lies in [0, 1]."""
    for name, value in values.items():
        if not 0 <= _number(name, value) <= 1:
            raise ValueError(f"{name} is {value!r}; give a fraction between 0 and 1")


def finite_number(**values: float) -> None:
    """Every value is a finite number."""
    for name, value in values.items():
        if not math.isfinite(_number(name, value)):
            raise ValueError(f"{name} is {value!r}; give a finite number")


def count(**values: int) -> None:
    """Every value is a whole number of at least 1."""
    for name, value in values.items():
        # True is an int, and equals 1.
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; give a whole number of at least 1")


def given(rule: Callable[..., None], **values: Any) -> None:
    """The rule on the values that are not None."""
    rule(**{name: value for name, value in values.items() if value is not None})


def one_of(allowed: Iterable[str], **values: str) -> None:
    """Every value is one of the allowed words; the error offers the closest."""
    words = list(allowed)
    for name, value in values.items():
        if value not in words:
            raise ValueError(f"{name} is {value!r}; {closest(str(value), words)}")


def known_keys(
    where: str,
    table: Iterable[str],
    known: Iterable[str],
) -> None:
    """Reject a key of a table from a file that is none of the known ones."""
    for key in table:
        if key not in known:
            raise ValueError(f"{where} has no key {key!r}; {closest(key, known)}")


def closest(
    word: str,
    words: Iterable[str],
    see: str | None = None,
) -> str:
    """'did you mean ...?' with the nearest words (three at most), and where all of them are shown.

    Args:
        word: what was given.
        words: what could have been given.
        see: a command that shows all words; without it a short list follows, and "" adds nothing.

    Example:
        >>> closest("dgl", ["dlg", "idlg"])
        "did you mean 'dlg' or 'idlg'? (known: dlg, idlg)"
        >>> closest("dgl", ["dlg", "mean_image"], "leakbound list attacks")
        "did you mean 'dlg'? `leakbound list attacks` shows all 2"
    """
    known = sorted(words)
    near = difflib.get_close_matches(word, known, n=_NEAREST, cutoff=0.4)
    *first, last = map(repr, near or [""])
    asked = f"did you mean {', '.join(first)}{' or ' if first else ''}{last}?" if near else ""
    if see:
        more = f"`{see}` shows all {len(known)}"
    elif see == "" or (near and len(known) > _SHORT):
        more = ""
    else:
        more = f"known: {', '.join(known)}"
        more = f"({more})" if near else more
    return " ".join(filter(None, [asked, more]))


def is_finite(value: Tensor) -> bool:
    """Whether the tensor holds no NaN and no infinity, in one pass and without copies."""
    import torch  # late: the bounds check numbers without it

    if value.is_floating_point() and math.isfinite(float(value.detach().sum())):
        return True  # one entry that is not finite would make the sum not finite
    return bool(torch.isfinite(value).all())


def finite(name: str, value: Tensor) -> None:
    """The tensor holds no NaN and no infinity."""
    if is_finite(value):
        return
    import torch  # late: the bounds check numbers without it

    bad = int((~torch.isfinite(value)).sum())
    raise ValueError(
        f"{name} holds {bad} of {value.numel()} entries that are NaN or infinite; check the "
        "images, the weights and the learning rate"
    )


def within(
    name: str,
    value: Tensor,
    bounds: tuple[float, float],
) -> None:
    """Every entry lies in the closed range, up to rounding."""
    low, high = bounds
    slack = 1e-6 * (high - low)
    least = float(value.min())
    most = float(value.max())
    if least < low - slack or most > high + slack:
        raise ValueError(
            f"{name} runs from {least:.6g} to {most:.6g}, but the task's input_range is "
            f"({low:g}, {high:g}); rescale the images, or give the task their range: "
            "Task.of(input_range=...), flower.Setup(input_range=...)"
        )


def labels(values: Tensor, classes: int | None) -> None:
    """Class labels (B,) are whole numbers in 0..classes-1; any values if `classes` is None."""
    import torch

    if classes is None or len(values) == 0:
        return
    if values.ndim != 1 or values.dtype != torch.int64:
        raise ValueError(
            f"labels has shape {tuple(values.shape)} and type {values.dtype}; "
            "give one class number per example, (B,) of torch.int64"
        )
    low = int(values.min())
    high = int(values.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"labels run from {low} to {high}, but the model has {classes} classes; "
            f"give labels in 0..{classes - 1}"
        )


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}; give a number")
    return float(value)
