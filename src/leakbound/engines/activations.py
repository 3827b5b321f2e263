"""The table of activations: values, derivatives, order and smoothness."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

Kernel = Callable[..., Tensor]
# Autograd's own kernels, so that slopes at non-smooth points follow the same convention.
_relu_backward: Kernel = torch.ops.aten.threshold_backward.default
_leaky_relu_backward: Kernel = torch.ops.aten.leaky_relu_backward.default
_clamp_backward: Kernel = torch.ops.aten.hardtanh_backward.default
_gelu_backward: Kernel = torch.ops.aten.gelu_backward.default


class Activation:
    """A function f of every element, in any memory layout.

    `curved`: f'' is not zero everywhere that f' is continuous. `operator`: its name in PyTorch's
    tracing, if all its derivatives are continuous. `order`: it keeps the order of elements
    "exactly", "up to rounding", or possibly not (None).
    """

    curved = True
    operator: str | None = None
    order: str | None = None

    def value(self, u: Tensor) -> tuple[Tensor, Any]:
        """f(u), and what the derivatives take as `saved`."""
        raise NotImplementedError

    def times_slope(self, saved: Any, t: Tensor) -> Tensor:
        """f'(u) t, in new memory."""
        slope: Tensor = saved[0]
        return slope * t

    def second(self, saved: Any) -> Tensor:
        return torch.zeros_like(saved)


@dataclass(frozen=True)
class Rectifier(Activation):
    """u if it is above 0, otherwise `slope` u: ReLU at slope 0, otherwise LeakyReLU."""

    slope: float = 0.0
    curved = False

    @property
    def order(self) -> str | None:  # type: ignore[override]
        return "exactly" if self.slope >= 0 else None  # a negative slope is not monotone

    def value(self, u: Tensor) -> tuple[Tensor, Tensor]:
        value = torch.relu(u) if self.slope == 0 else functional.leaky_relu(u, self.slope)
        return value, value if self.slope >= 0 else u  # the value has the sign of u

    def times_slope(self, saved: Tensor, t: Tensor) -> Tensor:
        if self.slope == 0:
            return _relu_backward(t, saved, 0)
        return _leaky_relu_backward(t, saved, self.slope, False)


@dataclass(frozen=True)
class Clamp(Activation):
    """u cut off at `low` and `high`: Hardtanh, ReLU6."""

    low: float = -1.0
    high: float = 1.0
    curved = False
    order = "exactly"

    def value(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return functional.hardtanh(u, self.low, self.high), u

    def times_slope(self, saved: Tensor, t: Tensor) -> Tensor:
        return _clamp_backward(t, saved, self.low, self.high)


class Sigmoid(Activation):
    """f' = f (1 - f), f'' = f' (1 - 2 f)."""

    operator = "sigmoid"
    # Monotone as a function, but two close values may change places when rounded.
    order = "up to rounding"

    def value(self, u: Tensor) -> tuple[Tensor, Any]:
        value = torch.sigmoid(u)
        return value, (torch.addcmul(value, value, value, value=-1), value)

    def second(self, saved: tuple[Tensor, ...]) -> Tensor:
        slope, value = saved
        return torch.addcmul(slope, slope, value, value=-2)


class Tanh(Activation):
    """f' = 1 - f^2, f'' = -2 f f'."""

    operator = "tanh"
    order = "up to rounding"

    def value(self, u: Tensor) -> tuple[Tensor, Any]:
        value = torch.tanh(u)
        return value, ((value * value).neg_().add_(1), value)

    def second(self, saved: tuple[Tensor, ...]) -> Tensor:
        slope, value = saved
        return (slope * value).mul_(-2)


@dataclass(frozen=True)
class Gelu(Activation):
    """u times the standard normal distribution function at u, or its tanh approximation."""

    approximate: str = "none"
    # No `order`: GELU falls until u = -0.75, so a max pool may not change places with it.
    operator = "gelu"

    def value(self, u: Tensor) -> tuple[Tensor, Any]:
        value = functional.gelu(u, approximate=self.approximate)
        # The slope is computed once here, because three of the four passes multiply by it.
        return value, (
            _gelu_backward(
                torch.ones_like(u),
                u,
                approximate=self.approximate,
            ),
            u,
        )

    def second(self, saved: tuple[Tensor, Tensor]) -> Tensor:
        u = saved[1]
        if self.approximate == "none":  # phi(u) (2 - u^2), phi the normal density
            square = u * u
            scale = (2 * math.pi) ** -0.5
            density = (square * -0.5).exp_()
            return square.mul_(-scale).add_(2 * scale).mul_(density)
        scale = (2 / math.pi) ** 0.5
        # The constant of the tanh approximation in PyTorch (Hendrycks and Gimpel 2016).
        cubic = 0.044715
        inner = torch.tanh(scale * (u + cubic * u**3))
        first = scale * (1 + 3 * cubic * u * u)
        second = 6 * scale * cubic * u
        slope = 1 - inner * inner
        return cast(Tensor, slope * (first + 0.5 * u * (second - 2 * inner * first * first)))


class Silu(Activation):
    """u s, s the sigmoid of u; f' = s (1 + u (1 - s)), f'' = s (1 - s) (2 + u (1 - 2 s))."""

    operator = "silu"

    def value(self, u: Tensor) -> tuple[Tensor, Any]:
        s = torch.sigmoid(u)
        return u * s, (s * (1 + u * (1 - s)), u, s)

    def second(self, saved: tuple[Tensor, ...]) -> Tensor:
        _, u, s = saved
        return s * (1 - s) * (2 + u * (1 - 2 * s))


@dataclass(frozen=True)
class Softplus(Activation):
    """log(1 + exp(beta u)) / beta, f' the sigmoid of beta u; u if beta u is over `threshold`."""

    beta: float = 1.0
    threshold: float = 20.0
    operator = "softplus"
    order = "up to rounding"

    def value(self, u: Tensor) -> tuple[Tensor, Any]:
        value = functional.softplus(u, self.beta, self.threshold)
        # PyTorch returns u itself above the threshold; the slope must follow that branch.
        straight = self.beta * u > self.threshold
        slope = torch.sigmoid(self.beta * u).masked_fill_(straight, 1.0)
        return value, (slope, straight)

    def second(self, saved: tuple[Tensor, ...]) -> Tensor:
        slope, straight = saved
        return (self.beta * slope * (1 - slope)).masked_fill_(straight, 0.0)


@dataclass(frozen=True)
class Elu(Activation):
    """u above 0, otherwise alpha (exp(u) - 1): f'' jumps at 0."""

    alpha: float = 1.0

    def value(self, u: Tensor) -> tuple[Tensor, Any]:
        falling = u <= 0
        part = self.alpha * torch.exp(u.clamp_max(0))
        return functional.elu(u, self.alpha), (torch.where(falling, part, 1.0), falling)

    def second(self, saved: tuple[Tensor, ...]) -> Tensor:
        slope, falling = saved
        return slope * falling


KINDS = (Rectifier, Clamp, Sigmoid, Tanh, Gelu, Silu, Softplus, Elu)
OF_CALLS: dict[Any, Callable[..., Activation]] = {
    # `inplace` is accepted and ignored: rules never write to their input.
    functional.relu: lambda inplace=False: Rectifier(),
    functional.relu6: lambda inplace=False: Clamp(0.0, 6.0),
    functional.leaky_relu: lambda negative_slope=0.01, inplace=False: Rectifier(negative_slope),
    functional.gelu: lambda approximate="none": Gelu(approximate),
    functional.silu: lambda inplace=False: Silu(),
    functional.hardtanh: lambda min_val=-1.0, max_val=1.0, inplace=False: Clamp(min_val, max_val),
    functional.softplus: Softplus,
    functional.elu: lambda alpha=1.0, inplace=False: Elu(alpha),
    **dict.fromkeys((torch.relu, torch.relu_, Tensor.relu, Tensor.relu_), Rectifier),
    **dict.fromkeys((functional.sigmoid, torch.sigmoid, Tensor.sigmoid), Sigmoid),
    **dict.fromkeys((functional.tanh, torch.tanh, Tensor.tanh), Tanh),
}
"""From functions and tensor methods, by the arguments that follow the first."""
