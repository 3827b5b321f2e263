"""Parts that the builders share: argument checks, activations and norms, initial weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from leakbound import check
from leakbound._util.modules import unfilled
from leakbound._util.recurrent import step_by_step
from leakbound.randomness import normal, uniform

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
}
"""Activations by name; LeakyReLU's slope is PyTorch's default 0.01. None works in place."""

NORMS = ("batch", "batch_training", "group", "none")
_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.RNNBase)
# Modules whose own reset draws nothing.
_WITH_RESET = (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm2d)


IMAGE = ("channels", "height", "width")
SERIES = ("channels", "times")


def checked_shape(
    input_shape: Sequence[int],
    classes: int,
    smallest: int = 1,
    form: Sequence[str] | None = IMAGE,
) -> tuple[int, ...]:
    """`input_shape`, after a check of it and of `classes`; `form` names its numbers, None: any."""
    check.count(classes=classes)
    numbers = tuple(input_shape)
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in numbers) or (
        not numbers if form is None else len(numbers) != len(form)
    ):
        wanted = "the shape of one input" if form is None else f"({', '.join(form)})"
        raise ValueError(
            f"input_shape is {input_shape!r}; give {wanted}, whole numbers above 0, or choose a "
            "model for such inputs"
        )
    if form is not None and min(numbers[1:]) < smallest:
        least = " x ".join([str(smallest)] * len(numbers[1:]))
        raise ValueError(
            f"input_shape is {input_shape!r}; this model takes at least {least} values of each "
            "channel: resize the inputs or choose a smaller model"
        )
    return numbers


def new_activation(name: str) -> nn.Module:
    check.one_of(ACTIVATIONS, activation=name)
    return ACTIVATIONS[name]()


def new_norm(name: str, channels: int) -> nn.Module:
    """A new norm over `channels`; "batch_training" uses the statistics of the batch.

    Group norm has 32 groups, or the largest power of two below that divides `channels`, and at
    least two channels per group: with one channel at one pixel, only the shift would remain.
    """
    check.one_of(NORMS, norm=name)
    if name.startswith("batch"):
        return nn.BatchNorm2d(channels, track_running_stats=name == "batch")
    groups = math.gcd(32, channels)
    if groups == channels > 1:
        groups //= 2
    return nn.GroupNorm(groups, channels) if name == "group" else nn.Identity()


# GPT-2's.
EMBEDDED = 0.02


def initialized(
    build: Callable[[], nn.Module],
    generator: torch.Generator,
    *,
    bound: float | None = None,
) -> nn.Module:
    """The module from `build`, in eval mode, with weights drawn from `generator`.

    Weights and biases of linear layers, convolutions and recurrent layers are uniform in +-`bound`,
    by default PyTorch's 1/sqrt(fan_in), or 1/sqrt(hidden units). Norms start as the identity,
    embeddings normal with standard deviation EMBEDDED, as in GPT-2.
    Global random state is neither read nor written.
    """
    model = unfilled(build)
    for module in model.modules():
        if isinstance(module, _WEIGHTED):
            # One row of the weight: the fan-in of linear layers and convolutions.
            inputs = next(module.parameters())[0].numel()
            if isinstance(module, nn.RNNBase):
                inputs = module.hidden_size
            limit = inputs**-0.5 if bound is None else bound
            for parameter in module.parameters():
                _fill(parameter, limit, generator)
        elif isinstance(module, nn.Embedding):
            module.weight.data.copy_(EMBEDDED * normal(module.weight.shape, generator))
        elif isinstance(module, _WITH_RESET):
            module.reset_parameters()
        elif any(True for _ in chain(module.parameters(recurse=False), module.buffers(False))):
            # `unfilled` leaves memory as it was, so no tensor may go without weights.
            raise TypeError(f"{type(module).__name__} has tensors but no initial weights here")
    # PyTorch's own recurrent kernels have no second derivative, or fail under `vmap`.
    return step_by_step(model.eval())


@torch.no_grad()
def _fill(
    parameter: Tensor,
    limit: float,
    generator: torch.Generator,
) -> None:
    draw = uniform(parameter.shape, generator, like=parameter)
    parameter.copy_((2 * draw - 1) * limit)
