"""The setting of a comparison: one model with fixed weights, one observed update, one start."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakbound import data, models
from leakbound.core import Batch, Observation, Task
from leakbound.defenses import NoDefense
from leakbound.protocol import play
from leakbound.randomness import normal, stream

CLASSES = 10
SOURCES = {1: "mnist5k", 3: "photos"}
LIBRARY = ("resnet50",)
"""Models of torchvision, which the project does not install: only where a machine has it."""
GRAY = ("simple_convnet", "lenet", "mlp")


@dataclass(frozen=True, eq=False)
class Setting:
    """A module in eval mode, its task, its client's update, and a first candidate."""

    model: nn.Module
    task: Task
    observation: Observation
    start: Tensor
    truth: Batch

    @property
    def seen(self) -> list[Tensor]:
        """The update as one tensor per parameter."""
        return list(self.task.unflatten(self.observation.update.rows[0]).values())

    @property
    def labels(self) -> Tensor:
        """The labels, which both sides know."""
        return self.truth.labels


def setting(
    name: str, size: int, seed: int = 0, side: int = 0, device: str = "cpu", **options: str
) -> Setting:
    """A fresh network, `size` real images (MNIST, or tiles of photographs), and a start.

    The start is what `GradientMatching` draws from `stream(seed, "bench", "attack")`.
    """
    channels = 1 if name in GRAY else 3
    images = _images(channels, side)
    drawn = torch.randperm(len(images.labels), generator=stream(seed, "bench", "images"))
    chosen = images.batch(drawn[:size])
    batch = Batch(chosen.inputs.to(device), chosen.labels.to(device))
    shape = (channels, *batch.inputs.shape[2:])
    weights = stream(seed, "bench", "weights")
    if name in LIBRARY:
        model = _of_torchvision(name, weights).to(device)
    else:
        build = getattr(models, name)
        model = build(input_shape=shape, classes=CLASSES, generator=weights, **options).to(device)
    task = Task.of(model, classes=CLASSES)
    played = play(task, [batch], NoDefense(), [stream(seed, "bench", i) for i in range(2)])
    start = normal(batch.inputs.shape, attack_stream(seed), like=task.parameters)
    return Setting(model, task, played.observation, start, batch)


def _of_torchvision(name: str, weights: torch.Generator) -> nn.Module:
    """In eval mode, with weights that its own initialization draws."""
    import torchvision  # type: ignore[import-not-found, unused-ignore]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=weights)))
        model: nn.Module = getattr(torchvision.models, name)(num_classes=CLASSES)
    return model.eval()


def attack_stream(seed: int) -> torch.Generator:
    """The random stream of an attack on a setting."""
    return stream(seed, "bench", "attack")


_kept: dict[tuple[int, int], data.Dataset] = {}


def _images(channels: int, side: int) -> data.Dataset:
    if (channels, side) not in _kept:
        _kept[channels, side] = data.load(SOURCES[channels], size=side or None)
    return _kept[channels, side]
