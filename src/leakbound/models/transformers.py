"""Built-in transformers: decoders and encoders of tokens (n,), and a vision transformer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leakbound import check
from leakbound.models.blocks import IMAGE, checked_shape, initialized
from leakbound.randomness import normal


class AdapterLayer(nn.Module):
    """A frozen layer with a low-rank adapter: base(x) + scale B A x, as PEFT computes it.

    With `magnitude` (outputs,) it is DoRA (Liu et al. 2024, eq. 5): each row of W + scale B A is
    brought to this length. Their section 4.3 takes the rows' own lengths as constants in gradients.

    Example:
        >>> import torch
        >>> layer = AdapterLayer(nn.Linear(3, 2), torch.ones(1, 3), torch.zeros(2, 1), 2.0)
        >>> [name for name, p in layer.named_parameters() if p.requires_grad]
        ['lora_A.weight', 'lora_B.weight']
    """

    def __init__(
        self,
        base: nn.Module,
        down: Tensor,
        up: Tensor,
        scale: float,
        magnitude: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = _linear(down)
        self.lora_B = _linear(up)
        self.scale = scale
        self.lora_magnitude_vector: nn.Parameter | None = None
        if magnitude is not None:
            self.lora_magnitude_vector = nn.Parameter(magnitude.clone())

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
        result = self.base_layer(x)
        # As in PEFT: adapters may have 32 bits next to a base of 16.
        change = self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))) * self.scale
        if self.lora_magnitude_vector is None:
            return (result + change).to(result.dtype)
        bias = 0 if self.bias is None else self.bias
        factor = self.lora_magnitude_vector / self._lengths()
        whole = result - bias + change
        return (factor * whole + bias).to(result.dtype)

    def _lengths(self) -> Tensor:
        """(outputs,) of the rows of W + scale B A, without a gradient."""
        # Layers of transformers' Conv1D hold the weight as inputs first.
        weight = self.weight if isinstance(self.base_layer, nn.Linear) else self.weight.T
        product = self.lora_B.weight.detach() @ self.lora_A.weight.detach()
        whole = weight + self.scale * product
        return torch.linalg.vector_norm(whole, dim=1)


def _linear(weight: Tensor) -> nn.Linear:
    # On "meta": neither memory nor random numbers for weights that are replaced.
    made = nn.Linear(
        weight.shape[1],
        weight.shape[0],
        bias=False,
        device="meta",
    )
    made.weight = nn.Parameter(weight.clone())
    return made


TURNS = 10_000.0
"""The base of the wavelengths of rotary positions."""
SMALL = 0.05
"""Norm of an adapter's product over that of the weights."""


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each behind a layer norm and beside a shortcut (pre-norm).

    `mask` (B, n): the places that others see; causal blocks need it.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool,
        rotary: bool,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.rotary = rotary
        self.before = nn.LayerNorm(width)
        self.after = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        seen = self.before(x)
        parts = (layer(seen) for layer in (self.query, self.key, self.value))
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        if self.rotary:
            query = _turned(query)
            key = _turned(key)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        if mask is not None:
            hidden = mask[:, None, None, :].logical_not()
            if self.causal:
                places = torch.arange(x.shape[1], device=x.device)
                hidden = hidden | (places > places[:, None])
            # Not -inf: a row without any visible place would become NaN.
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        mixed = scores.softmax(-1) @ value
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.after(x))))


class _Transformer(nn.Module):
    """Token and position embeddings, blocks, a last norm and a linear layer."""

    def __init__(
        self,
        shape: Sequence[int],
        vocabulary: int,
        classes: int,
        width: int,
        layers: int,
        heads: int,
        *,
        causal: bool = False,
        rotary: bool = False,
        tied: bool = False,
        pooled: bool = False,
    ) -> None:
        super().__init__()
        check.count(
            classes=classes,
            vocabulary=vocabulary,
            width=width,
            heads=heads,
            layers=layers,
        )
        if len(shape) != 1:
            raise ValueError(f"input_shape is {tuple(shape)}; give (n,), the length of a sequence")
        if width % (2 * heads):
            raise ValueError(
                f"width is {width} and heads {heads}; give a width that 2 * heads divides"
            )
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = None if rotary else nn.Embedding(int(shape[0]), width)
        self.blocks = nn.ModuleList(
            TransformerBlock(width, heads, causal, rotary) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        # GPT-2's output layer, which is tied, has no bias.
        self.head = nn.Linear(width, classes, bias=not tied)
        self.pooled = pooled

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        mask = torch.ones_like(tokens) if attention_mask is None else attention_mask
        x = self.tokens(tokens)
        if self.places is not None:
            x = x + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, mask > 0)
        x = self.norm(x)
        if self.pooled:
            share = mask[..., None].to(x) / mask.sum(1).clamp_min(1)[:, None, None]
            x = (share * x).sum(1)
        return self.head(x)


def _turned(x: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021) for (B, heads, n, width)."""
    half = x.shape[-1] // 2
    rates = TURNS ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)[:, None] * rates
    one = x[..., :half]
    two = x[..., half:]
    cos = angles.cos()
    sin = angles.sin()
    return torch.cat([one * cos - two * sin, one * sin + two * cos], -1)


def decoder(
    *,
    input_shape: Sequence[int],
    classes: int,
    generator: torch.Generator,
    vocabulary: int | None = None,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    positions: str = "learned",
    tied: bool = False,
    embeddings: str = "trained",
    adapters: int = 0,
) -> nn.Module:
    """A causal transformer (pre-norm) that scores the next token at every place.

    Args:
        input_shape: (n,), the length of a sequence.
        classes: the number of outputs of each place, as a rule the vocabulary.
        generator: the source of the initial weights.
        vocabulary: number of tokens; `classes` by default.
        width: of embeddings and layers.
        layers: number of blocks.
        heads: attention heads in each; they divide the width into even parts.
        positions: "learned" (one vector per place) or "rotary".
        tied: the output layer is the token table.
        embeddings: "trained", or "frozen": clients do not send what belongs to tokens and places.
        adapters: rank of LoRA on queries and values, which alone are trained; 0: none. Both factors
            are drawn, as after some rounds; their product is a twentieth of the weights.

    Source: Radford et al. 2019 (GPT-2), without dropout; Su et al. 2021 for "rotary"; Hu et al.
        2022 for LoRA.

    Example:
        >>> model = decoder(input_shape=(8,), classes=50, generator=torch.Generator())
        >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
        torch.Size([2, 8, 50])
    """
    check.one_of(("learned", "rotary"), positions=positions)
    check.one_of(("trained", "frozen"), embeddings=embeddings)
    if adapters:
        check.count(adapters=adapters)
    size = vocabulary or classes, classes, width, layers, heads
    rotary = positions == "rotary"
    model = initialized(
        lambda: _Transformer(
            input_shape,
            *size,
            causal=True,
            rotary=rotary,
            tied=tied,
        ),
        generator,
    )
    if tied:  # drawing weights separates what is shared
        model.get_submodule("head").weight = model.get_submodule("tokens").weight
    if embeddings == "frozen":
        for name in ("tokens", "places"):
            part = getattr(model, name)
            if part is not None:
                part.requires_grad_(False)
    return _adapted(model, adapters, generator) if adapters else model


def _adapted(
    model: nn.Module,
    rank: int,
    generator: torch.Generator,
) -> nn.Module:
    """The model with LoRA of this rank on queries and values; everything else is frozen."""
    model.requires_grad_(False)
    for block in model.get_submodule("blocks").children():
        for name in ("query", "value"):
            base: Any = getattr(block, name)
            down = normal((rank, base.in_features), generator) / base.in_features**0.5
            up = normal((base.out_features, rank), generator) / rank**0.5
            size = SMALL * base.weight.norm() / (up @ down).norm()
            setattr(block, name, AdapterLayer(base, down, size * up, 1.0))
    return model.eval()


def encoder(
    *,
    input_shape: Sequence[int],
    classes: int,
    generator: torch.Generator,
    vocabulary: int | None = None,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
) -> nn.Module:
    """A transformer (pre-norm) whose places see each other; it classifies their mean.

    If `vocabulary` is None it scores a token at every place instead, as masked models do. The other
    arguments are those of `decoder`.

    Source: Devlin et al. 2019 (BERT), with norms before the layers and without token types.

    Example:
        >>> settings = dict(input_shape=(8,), generator=torch.Generator(), vocabulary=50)
        >>> encoder(classes=2, **settings)(torch.zeros(3, 8, dtype=torch.long)).shape
        torch.Size([3, 2])
    """
    size = vocabulary or classes, classes, width, layers, heads
    pooled = vocabulary is not None
    return initialized(
        lambda: _Transformer(input_shape, *size, pooled=pooled),
        generator,
    )


class _VisionTransformer(nn.Module):
    """Patches, a class token and positions, then blocks; the class token's output is scored."""

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        patch: int,
        width: int,
        layers: int,
        heads: int,
    ) -> None:
        super().__init__()
        channels, _, side = shape
        self.patches = nn.Conv2d(channels, width, patch, patch)
        # An embedding, as `initialized` draws no bare parameter.
        self.first = nn.Embedding(1, width)
        self.places = nn.Embedding(1 + (side // patch) ** 2, width)
        self.blocks = nn.ModuleList(
            TransformerBlock(width, heads, causal=False, rotary=False) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        first = self.first.weight.expand(len(x), 1, -1)
        x = torch.cat([first, x], 1) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def vit(
    *,
    input_shape: Sequence[int],
    classes: int,
    generator: torch.Generator,
    patch: int = 4,
    width: int = 96,
    layers: int = 3,
    heads: int = 4,
) -> nn.Module:
    """A vision transformer (pre-norm) on square patches, with learned positions and a class token.

    Args:
        input_shape: (C, H, W) of one square image.
        classes: the number of outputs.
        generator: the source of the initial weights.
        patch: side of a patch in pixels; it divides that of the image.
        width: of patches' vectors and layers.
        layers: number of blocks.
        heads: attention heads in each; they divide the width.

    Source: Dosovitskiy et al. 2021 (ViT), without dropout.

    Example:
        >>> model = vit(input_shape=(3, 32, 32), classes=10, generator=torch.Generator())
        >>> model(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    shape = checked_shape(input_shape, classes, form=IMAGE)
    _, height, side = shape
    check.count(
        patch=patch,
        width=width,
        layers=layers,
        heads=heads,
    )
    if height != side or side % patch or width % heads:
        raise ValueError(
            f"input_shape is {tuple(input_shape)}, patch {patch}, width {width} and heads {heads}; "
            "give square images whose side is a multiple of patch, and a width that heads divides"
        )
    size = classes, patch, width, layers, heads
    return initialized(lambda: _VisionTransformer(shape, *size), generator)
