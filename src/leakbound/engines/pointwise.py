"""Elementwise functions with their first and second derivatives, for tensors of any layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

_ATEN = torch.ops.aten


class Pointwise(Protocol):
    """A function f of every element.

    `start` gives f(u) and what the other two take as `saved`.
    """

    @property
    def monotone(self) -> bool:
        """Whether a larger element never gives a smaller one, after rounding too."""
        ...

    @property
    def curved(self) -> bool:
        """Whether f'' is not zero everywhere off the kinks."""
        ...

    def start(self, u: Tensor) -> tuple[Tensor, Any]:
        """f(u), and what is to be kept."""
        ...

    def times(self, saved: Any, t: Tensor) -> Tensor:
        """f'(u) t, in new memory."""
        ...

    def bend(self, saved: Any) -> Tensor:
        """f''(u); only asked for where `curved`."""
        ...


@dataclass(frozen=True)
class Rectifier:
    """u where it is above 0, and `slope` u elsewhere: ReLU at slope 0, LeakyReLU else."""

    slope: float = 0.0
    curved: bool = False

    @property
    def monotone(self) -> bool:
        """Never falls, unless the slope is negative."""
        return self.slope >= 0

    def start(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """The value has the sign of u, so that it alone is kept."""
        value = torch.relu(u) if self.slope == 0 else nn.functional.leaky_relu(u, self.slope)
        return value, value if self.slope >= 0 else u

    def times(self, saved: Tensor, t: Tensor) -> Tensor:
        """Times 1 where u is above 0, and `slope` elsewhere."""
        result: Tensor
        if self.slope == 0:
            result = _ATEN.threshold_backward.default(t, saved, 0)
        else:
            result = _ATEN.leaky_relu_backward.default(t, saved, self.slope, False)
        return result

    def bend(self, saved: Tensor) -> Tensor:
        """Zero."""
        return torch.zeros_like(saved)


@dataclass(frozen=True)
class Clamp:
    """u cut off at `low` and `high`: Hardtanh, ReLU6."""

    low: float = -1.0
    high: float = 1.0
    curved: bool = False
    monotone: bool = True

    def start(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """The clamped u; u is kept."""
        return nn.functional.hardtanh(u, self.low, self.high), u

    def times(self, saved: Tensor, t: Tensor) -> Tensor:
        """Times 1 strictly between the two ends, 0 elsewhere."""
        result: Tensor = _ATEN.hardtanh_backward.default(t, saved, self.low, self.high)
        return result

    def bend(self, saved: Tensor) -> Tensor:
        """Zero."""
        return torch.zeros_like(saved)


@dataclass(frozen=True)
class Smooth:
    """Functions with a second derivative; what is kept starts with f'."""

    curved: bool = True
    monotone: bool = False

    def times(self, saved: Any, t: Tensor) -> Tensor:
        """By the kept slope."""
        slope: Tensor = saved[0]
        return slope * t


@dataclass(frozen=True)
class Sigmoid(Smooth):
    """1 / (1 + exp(-u))."""

    def start(self, u: Tensor) -> tuple[Tensor, Any]:
        """Here f' = f (1 - f)."""
        value = torch.sigmoid(u)
        slope = torch.addcmul(value, value, value, value=-1)
        return value, (slope, value)

    def bend(self, saved: Any) -> Tensor:
        """Here f'' = f' (1 - 2 f)."""
        slope, value = saved
        return torch.addcmul(slope, slope, value, value=-2)


@dataclass(frozen=True)
class Tanh(Smooth):
    """The hyperbolic tangent."""

    def start(self, u: Tensor) -> tuple[Tensor, Any]:
        """Here f' = 1 - f^2."""
        value = torch.tanh(u)
        return value, ((value * value).neg_().add_(1), value)

    def bend(self, saved: Any) -> Tensor:
        """Here f'' = -2 f f'."""
        slope, value = saved
        result: Tensor = (slope * value).mul_(-2)
        return result


@dataclass(frozen=True)
class Gelu(Smooth):
    """u times the normal law's distribution function at u, or its tanh approximation."""

    approximate: str = "none"

    def start(self, u: Tensor) -> tuple[Tensor, Any]:
        """Here f' from the kernel of the backward pass."""
        value = nn.functional.gelu(u, approximate=self.approximate)
        ones = torch.ones_like(u)
        slope = _ATEN.gelu_backward.default(ones, u, approximate=self.approximate)
        return value, (slope, u)

    def bend(self, saved: Any) -> Tensor:
        """phi(u) (2 - u^2), phi the normal density; or the approximation's own f''."""
        u: Tensor = saved[1]
        if self.approximate == "none":
            density = (u * u).mul_(-0.5).exp_().mul_((2 * math.pi) ** -0.5)
            return density * (2 - u * u)
        scale, cubic = (2 / math.pi) ** 0.5, 0.044715
        inner = torch.tanh(scale * (u + cubic * u**3))
        first, second = scale * (1 + 3 * cubic * u * u), 6 * scale * cubic * u
        slope = 1 - inner * inner
        result: Tensor = slope * (first + 0.5 * u * (second - 2 * inner * first * first))
        return result


@dataclass(frozen=True)
class Silu(Smooth):
    """u times the sigmoid of u."""

    def start(self, u: Tensor) -> tuple[Tensor, Any]:
        """Here f' = s (1 + u (1 - s)), s the sigmoid."""
        s = torch.sigmoid(u)
        return u * s, (s * (1 + u * (1 - s)), u, s)

    def bend(self, saved: Any) -> Tensor:
        """Here f'' = s (1 - s) (2 + u (1 - 2 s))."""
        _, u, s = saved
        result: Tensor = s * (1 - s) * (2 + u * (1 - 2 * s))
        return result


@dataclass(frozen=True)
class Softplus(Smooth):
    """log(1 + exp(beta u)) / beta, and u where beta u is above the threshold."""

    beta: float = 1.0
    threshold: float = 20.0

    def start(self, u: Tensor) -> tuple[Tensor, Any]:
        """Here f' is the sigmoid of beta u."""
        value = nn.functional.softplus(u, self.beta, self.threshold)
        straight = self.beta * u > self.threshold
        slope = torch.sigmoid(self.beta * u).masked_fill_(straight, 1.0)
        return value, (slope, straight)

    def bend(self, saved: Any) -> Tensor:
        """Here f'' = beta f' (1 - f')."""
        slope, straight = saved
        result: Tensor = (self.beta * slope * (1 - slope)).masked_fill_(straight, 0.0)
        return result


@dataclass(frozen=True)
class Elu(Smooth):
    """u above 0, alpha (exp(u) - 1) elsewhere."""

    alpha: float = 1.0

    def start(self, u: Tensor) -> tuple[Tensor, Any]:
        """Here f' is 1, or alpha exp(u)."""
        falling = u <= 0
        part = self.alpha * torch.exp(u.clamp_max(0))
        return nn.functional.elu(u, self.alpha), (torch.where(falling, part, 1.0), falling)

    def bend(self, saved: Any) -> Tensor:
        """0, or alpha exp(u)."""
        slope, falling = saved
        result: Tensor = slope * falling
        return result


def of_module(module: nn.Module) -> Pointwise | None:
    """The function of an activation module; None where it is none that is known here.

    Example:
        >>> of_module(nn.LeakyReLU(0.2)), of_module(nn.PReLU())
        (Rectifier(slope=0.2, curved=False), None)
    """
    kind = type(module)
    fixed: dict[type[nn.Module], Pointwise] = {
        nn.ReLU: Rectifier(),
        nn.ReLU6: Clamp(0.0, 6.0),
        nn.Sigmoid: Sigmoid(),
        nn.Tanh: Tanh(),
        nn.SiLU: Silu(),
    }
    if kind in fixed:
        return fixed[kind]
    if isinstance(module, nn.LeakyReLU) and kind is nn.LeakyReLU:
        return Rectifier(float(module.negative_slope))
    if isinstance(module, nn.Hardtanh) and kind is nn.Hardtanh:
        return Clamp(float(module.min_val), float(module.max_val))
    if isinstance(module, nn.GELU) and kind is nn.GELU:
        return Gelu(approximate=module.approximate)
    if isinstance(module, nn.Softplus) and kind is nn.Softplus:
        return Softplus(beta=float(module.beta), threshold=float(module.threshold))
    if isinstance(module, nn.ELU) and kind is nn.ELU:
        return Elu(alpha=float(module.alpha))
    return None
