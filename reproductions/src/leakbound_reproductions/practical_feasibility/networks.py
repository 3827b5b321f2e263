"""The small networks of the study: residual networks by four choices, and two modern designs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakbound.randomness import bernoulli, stream

CLASSES = 10
SIDE = 8


@dataclass(frozen=True)
class Design:
    """What a network is built from.

    Attributes:
        family: "residual" (two 3 x 3 convolutions a block, with batch norm), "convnext" (depthwise
            and pointwise convolutions with layer norm) or "vit" (transformer blocks).
        depth: number of blocks.
        width: channels of all blocks.
        skip: whether blocks have skip connections.
        before: whether each norm and activation stands before its convolution (pre-activation), or
            after it.
        dropout: rate of the dropout in every block.
    """

    family: str = "residual"
    depth: int = 1
    width: int = 32
    skip: bool = True
    before: bool = True
    dropout: float = 0.0


class Drop(nn.Module):
    """Dropout whose draws are given: the units (B, *S) that a client keeps in one step.

    Without draws it is the identity, as in inference mode.
    """

    kept: Tensor | None

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("kept", None)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.kept is None else x * self.kept


class _Residual(nn.Module):
    def __init__(self, design: Design, norm: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        width = design.width
        self.design = design
        self.drop = Drop(design.dropout)
        self.norm1 = norm(width)
        self.norm2 = norm(width)
        self.conv1, self.conv2 = (
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)
        )
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        if self.design.before:
            out = self.conv1(self.act(self.norm1(x)))
            out = self.conv2(self.drop(self.act(self.norm2(out))))
            before: Tensor = x + out if self.design.skip else out
            return before
        out = self.drop(self.act(self.norm1(self.conv1(x))))
        out = self.norm2(self.conv2(out))
        result: Tensor = self.act(x + out if self.design.skip else out)
        return result


class _Channels(nn.LayerNorm):
    """Layer norm over the channels of (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class _ConvNext(nn.Module):
    def __init__(self, design: Design) -> None:
        super().__init__()
        width = design.width
        self.mix = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = _Channels(width)
        self.act = nn.GELU()
        self.up = nn.Conv2d(width, 4 * width, 1)
        self.down = nn.Conv2d(4 * width, width, 1)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.down(self.act(self.up(self.norm(self.mix(x)))))
        return x + self.scale * change


class _Vit(nn.Module):
    """Pre-norm blocks on patches of 2 x 2 pixels, averaged."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        width = design.width
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.places = nn.Parameter(0.02 * torch.randn(1, (SIDE // 2) ** 2, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(design.depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x).mean(1))
        return result


def network(design: Design, seed: int) -> nn.Module:
    """A network in eval mode, with PyTorch's random weights, for gray images of 8 x 8 pixels."""
    width = design.width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if design.family == "vit":
            return _Vit(design).eval()
        if design.family == "convnext":
            parts = [nn.Conv2d(1, width, 2, 2), _Channels(width)]
            parts += [_ConvNext(design) for _ in range(design.depth)]
            last: list[nn.Module] = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(width)]
        else:
            stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
            own = [nn.BatchNorm2d(width), nn.GELU()]
            blocks = [_Residual(design) for _ in range(design.depth)]
            parts = [stem, *blocks, *own] if design.before else [stem, *own, *blocks]
            last = [nn.AvgPool2d(4), nn.Flatten()]
        features = width if design.family == "convnext" else width * (SIDE // 4) ** 2
        return nn.Sequential(*parts, *last, nn.Linear(features, CLASSES)).eval()


def drops(model: nn.Module) -> Iterator[Drop]:
    """The model's dropouts with a rate above 0."""
    return (m for m in model.modules() if isinstance(m, Drop) and m.rate)


def draw(model: nn.Module, inputs: Tensor, seed: int) -> None:
    """Draw every dropout of a model for a batch (B, *S), each example and unit separately."""
    hooks = []
    source = stream(seed, "dropout")

    def note(drop: Drop, args: tuple[Tensor, ...], _: Tensor) -> None:
        keep = 1 - drop.rate
        drop.kept = bernoulli(args[0].shape, keep, source).to(args[0]) / keep

    for drop in drops(model):
        hooks.append(drop.register_forward_hook(note))
    with torch.no_grad():
        model(inputs)
    for hook in hooks:
        hook.remove()


def train(model: nn.Module, inputs: Tensor, labels: Tensor, steps: int, seed: int) -> None:
    """Train by Adam on public images, then set the batch norms' running statistics to theirs.

    With 0 steps only the statistics are set.
    """
    model.train()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    adam = torch.optim.Adam(model.parameters(), 3e-3)
    source = stream(seed, "training")
    for _ in range(steps):
        at = torch.randint(len(inputs), (64,), generator=source)
        adam.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[at]), labels[at])
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    with torch.no_grad():
        model(inputs)
    model.eval().zero_grad()
