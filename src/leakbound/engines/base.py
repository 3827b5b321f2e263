"""The interface of an exact attack step, and the kernels that this machine uses.

The exact step of gradient matching is the product of a vector v with the Jacobian of the gradient.
<g(x), v> is the derivative of the loss along v in the weights. So its gradient in x is one
forward-mode derivative of an ordinary backward pass (Pearlmutter's R-operator). With the gradient
this costs 7 forward passes' worth of products; differentiating the backward pass costs 8.

Source: Pearlmutter 1994, "Fast exact multiplication by the Hessian".
"""

from __future__ import annotations

import os
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from leakbound import check

LINE = 16
"""Numbers in a line of 64 bytes, at least."""
VARIABLE = "LEAKBOUND_ENGINE"
ENGINES = ("packed", "plain", "autograd")
"""Convolutions with weights packed once, PyTorch's own kernels, or no engine."""


class Pulled(NamedTuple):
    """The derivatives of sum <g_n, v_n> in the inputs (N, B, *S), and in soft labels (N, B, K)."""

    inputs: Tensor
    labels: Tensor | None


class Engine(Protocol):
    """Gradients and pulls of N searches at once, for one model, each at fixed weights.

    A pull (vector-Jacobian product) belongs to the last gradient. Nothing waits for the device.
    """

    num_searches: int

    def gradient(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Batch-mean gradients (N, P) at inputs (N, B, *S), with labels (N, B) or (N, B, K)."""

    def pull(self, cotangent: Tensor) -> Pulled:
        """The derivatives of sum_n <gradient_n, cotangent_n> (both (N, P)) at the last inputs."""


def aligned(rows: int, like: Tensor) -> Tensor:
    """Empty rows (rows, P), each of which starts at an aligned address, as the first one does.

    The bits of a product or a sum may depend on where in memory its vectors start.
    """
    size = like.shape[-1]
    return like.new_empty(rows, -(-size // LINE) * LINE)[:, :size]


def kernels() -> str:
    """One of `ENGINES`: the value of the variable `LEAKBOUND_ENGINE`, or the quickest measured.

    Packed weights (oneDNN) help with AVX-512: 0.5 to 0.7 of the time of autograd's double backward.
    With AVX2 they took 1.2 to 14 times as long as autograd, and PyTorch's own kernels 0.3 to 1.0
    (docs/engines.md). So bits depend only on the machine's type.
    """
    engine = os.environ.get(VARIABLE, "")
    if engine:
        check.one_of(ENGINES, **{VARIABLE: engine})
        return engine
    return "packed" if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else "plain"
