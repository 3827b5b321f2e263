"""What an attack step needs of a model, and which kernels this machine computes it with.

The exact step of gradient matching is the product of a vector v with the Jacobian of the gradient.
As <g(x), v> is the slope of the loss along v in the weights, its gradient in x is one forward-mode
derivative of an ordinary backward pass (Pearlmutter's R-operator): 7 forwards' worth of products,
the gradient included, where differentiating the backward pass takes 8.

Source: Pearlmutter 1994, "Fast exact multiplication by the Hessian".
"""

from __future__ import annotations

import os
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from leakbound import check

LINE = 16
"""Numbers to a line of 64 bytes, at least."""
VARIABLE = "LEAKBOUND_ENGINE"
ENGINES = ("packed", "plain", "autograd")
"""Convolutions with their weights packed once, by PyTorch's own kernels, or no engine at all."""


class Pulled(NamedTuple):
    """The slopes of sum <g_n, v_n> in the inputs (N, B, *S), and in soft labels (N, B, K)."""

    inputs: Tensor
    labels: Tensor | None


class Engine(Protocol):
    """Gradients and pulls of N cells at once, for one model at fixed weights a cell.

    Each pull belongs to the last gradient. Nothing waits for the device.
    """

    cells: int

    def gradient(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Batch-mean gradients (N, P) at inputs (N, B, *S), with labels (N, B) or (N, B, K)."""

    def pull(self, cotangent: Tensor) -> Pulled:
        """The slopes of sum_n <gradient_n, cotangent_n>, cotangent (N, P), at the last inputs."""


def aligned(rows: int, like: Tensor) -> Tensor:
    """Empty rows (rows, P) that each start where memory is aligned, as the first one does.

    The bits of a product or a sum may depend on where in memory its vectors start.
    """
    size = like.shape[-1]
    return like.new_empty(rows, -(-size // LINE) * LINE)[:, :size]


def kernels() -> str:
    """One of `ENGINES`: that of the variable `LEAKBOUND_ENGINE`, else the quickest measured.

    Packed weights (oneDNN) pay with AVX-512: .5 to .7 of autograd's double backward. With AVX2 they
    took 1.2 to 14 times as long as autograd, and PyTorch's own kernels .3 to 1.0 (docs/engines.md).
    So bits depend on the machine's type, and on nothing else.
    """
    given = os.environ.get(VARIABLE, "")
    if given:
        check.one_of(ENGINES, **{VARIABLE: given})
        return given
    return "packed" if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else "plain"
