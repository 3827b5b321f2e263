"""Low-rank adapters of linear layers, as PEFT computes them, without PEFT."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn


class AdapterLayer(nn.Module):
    """A frozen layer with a low-rank adapter: base(x) + scale B A x, as PEFT computes it.

    Example:
        >>> import torch
        >>> layer = AdapterLayer(nn.Linear(3, 2), torch.ones(1, 3), torch.zeros(2, 1), 2.0)
        >>> [name for name, p in layer.named_parameters() if p.requires_grad]
        ['lora_A.weight', 'lora_B.weight']
    """

    def __init__(self, base: nn.Module, down: Tensor, up: Tensor, scale: float) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = _linear(down)
        self.lora_B = _linear(up)
        self.scale = scale

    @property
    def weight(self) -> Any:
        """The frozen layer's weight."""
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        """The frozen layer's bias."""
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """The adapted layer's output."""
        result: Tensor = self.base_layer(x)
        change = self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))) * self.scale
        return cast(Tensor, (result + change).to(result.dtype))


def _linear(weight: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight.clone())
    return made
