"""Which engine this machine takes: a rule of its instruction set, unless the user forces one."""

from __future__ import annotations

import os

import torch

from leakbound import check

VARIABLE = "LEAKBOUND_ENGINE"
ENGINES = ("packed", "plain", "autograd")
"""Convolutions with their weights packed once, by PyTorch's own kernels, or no engine at all."""


def kernels() -> str:
    """One of `ENGINES`: that of the variable `LEAKBOUND_ENGINE`, else the quickest measured.

    Packed weights (oneDNN) pay with AVX-512: .5 to .7 of autograd's double backward. With AVX2 they
    took 1.2 to 14 times as long as autograd, and PyTorch's own kernels .3 to 1.0 (docs/engines.md).
    So bits depend on the machine's type, and on nothing else.

    Raises:
        ValueError: the variable names no engine.

    Example:
        >>> kernels() in ENGINES
        True
    """
    given = os.environ.get(VARIABLE, "")
    if given:
        check.one_of(ENGINES, **{VARIABLE: given})
        return given
    return "packed" if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else "plain"
