"""Calls of modules as they are written: not compiled, and without activation checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints

_NAMES = ("_checkpoint_without_reentrant_generator", "CheckpointFunction")
_LOCK = Lock()
_INSIDE: list[dict[str, Any]] = []
"""The functions of PyTorch before the first thread entered."""


class _Direct:
    """In place of the checkpoint that runs the forward pass again inside the backward pass."""

    @staticmethod
    def apply(
        function: Callable[..., Any],
        preserve: bool,
        *args: Any,
    ) -> Any:
        return function(*args)


def _kept(*args: Any, **options: Any) -> Iterator[None]:
    """In place of the generator around a checkpoint's function: it drops no activation."""
    yield


@contextmanager
def as_written() -> Iterator[None]:
    """While active, compiled functions run as Python, and checkpoints keep their activations.

    A checkpoint computes activations again in the backward pass. By then the weights that
    `functional_call` lent the module are gone, so it would use others. Derivatives of compiled
    functions are limited, and each shape costs a compilation.

    Example:
        >>> with as_written():
        ...     checkpoints.checkpoint(torch.sin, torch.zeros(1), use_reentrant=False)
        tensor([0.])
    """
    with _LOCK:  # the first thread to enter sets them, the last one to leave restores them
        before = _INSIDE[0] if _INSIDE else {name: getattr(checkpoints, name) for name in _NAMES}
        _INSIDE.append(before)
        for name, direct in zip(_NAMES, (_kept, _Direct), strict=True):
            setattr(checkpoints, name, direct)
    compiler = "torch._dynamo" in sys.modules  # its import takes a second
    eager: Any = torch.compiler.set_stance("force_eager") if compiler else nullcontext()
    try:
        with eager:
            yield
    finally:
        with _LOCK:
            _INSIDE.pop()
            if not _INSIDE:
                for name, value in before.items():
                    setattr(checkpoints, name, value)
