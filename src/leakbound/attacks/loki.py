"""LOKI: every client gets its own convolution, so that a sum of updates keeps clients apart."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from leakbound.attacks.imprint import RobbingTheFed
from leakbound.attacks.planted import Front, placed, planted_task
from leakbound.core import Observation, Reconstruction, Task, Unit


class Routed(Front):
    """A `Front` whose layer sees one block of columns for each client.

    `routes` is a convolution whose output has C + 1 channels for each client: the image, and a
    constant for the biases. In the model of client i, all other clients' channels are 0. So the
    layer's gradient in block i is that of client i alone, also after a sum over clients.
    """

    def __init__(
        self, shape: torch.Size, clients: int, units: int, gain: float, inner: nn.Module
    ) -> None:
        super().__init__(shape.numel(), units, gain, "loki", inner)
        columns = clients * (shape.numel() + 1)
        channels = clients * (shape[0] + 1)
        self.layer = nn.Linear(columns, units, bias=False).requires_grad_(False)
        self.routes = nn.Conv2d(shape[0], channels, 3, padding=1).requires_grad_(False)
        self.clients = clients

    def seen(self, inputs: Tensor) -> Tensor:
        maps = self.routes(inputs).unflatten(1, (self.clients, -1)).flatten(3)
        return torch.cat([maps[:, :, :-1].flatten(2), maps[:, :, -1, :1]], 2).flatten(1)

    def part(self, rows: Tensor) -> Tensor:
        """[dW | db] (clients, units, N + 1) of all clients' blocks, from one row (1, P)."""
        size = self.layer.weight.shape
        return rows[0, : size.numel()].reshape(size[0], self.clients, -1).movedim(1, 0)


@dataclass(frozen=True)
class Loki(RobbingTheFed):
    """Send every client another convolution, so that the sum of their updates keeps them apart.

    A convolution comes first, then the layer of `RobbingTheFed` on all its channels. Of the
    convolution, client i gets the identity for the i-th group of channels and zeros for the others.
    So each client's images reach their own columns of the layer's weights. The sum of the clients'
    updates holds the gradients of every client apart. Each client's images are then read as
    `RobbingTheFed` reads one batch. The layer has `clients` times as many weights as that one.

    A further channel of each group is constant. It carries the biases, so that their gradients
    also stay apart. (With one bias for all clients, they would be summed.)

    Args:
        bins, measure, law, gain, mean, std, frequency, seed, features: as of `RobbingTheFed`.

    Assumptions: the server knows which client is which, and may send different models; the inputs
        are images (C, H, W), with public ones of the same shape.

    Raises:
        NotApplicable: the server is honest, or it has no public images to build the layer from.

    Source: Zhao et al., "LOKI: Large-scale Data Reconstruction Attack against Federated Learning
        through Model Manipulation", IEEE S&P 2024, arXiv 2303.12233. The constant channel and the
        decoding under noise are from this project.

    Example:
        >>> import leakbound as lb
        >>> from leakbound.core import Server
        >>> model = lb.models.mlp(input_shape=(1, 6, 6), classes=3, generator=lb.stream(0, "model"))
        >>> images = torch.rand(206, 1, 6, 6, generator=lb.stream(0, "images"))
        >>> public = lb.Batch(images[6:], torch.arange(200) % 3)
        >>> task = Task.of(model, classes=3, public=public)
        >>> clients = [lb.Batch(images[i : i + 2], torch.arange(2)) for i in (0, 2, 4)]
        >>> streams = [lb.stream(0, "noise", i) for i in range(4)]
        >>> threat, summed = lb.ThreatModel(server=Server.MALICIOUS), lb.defenses.SecureAggregation
        >>> seen = lb.play(task, clients, summed(3), streams, threat=threat, attack=Loki())
        >>> found = Loki()(seen.observation, lb.stream(0, "attack")).inputs
        >>> bool((torch.cdist(images[:6].flatten(1), found.flatten(1)).amin(1) < 1e-3).all())
        True
    """

    bins: int = 256

    def plant(self, task: Task) -> Task:
        """The first client's model; the task unchanged if the data to build it is missing."""
        return self.plant_each(task, 1)[0]

    def plant_each(self, task: Task, clients: int) -> list[Task]:
        """One model for each client: only the kernels and biases of the convolution differ."""
        layer = self._layer(task)
        if layer is None or task.public is None or task.public.inputs.ndim != 4:
            return [task] * clients
        shape = task.public.inputs.shape[1:]
        model = Routed(shape, clients, self.bins, self.gain, task.model)
        block = torch.cat([layer[0], layer[1][:, None]], 1) / (self.gain * self.bins)
        planted = []
        for client in range(clients):
            kernels = torch.zeros(clients, shape[0] + 1, shape[0], 3, 3)
            kernels[client, :-1, :, 1, 1] = torch.eye(shape[0])
            bias = torch.zeros(clients, shape[0] + 1)
            bias[client, -1] = 1.0
            rest = kernels.flatten(), bias.flatten()
            planted.append(placed(task, model, block.repeat(1, clients).flatten(), *rest))
        return planted

    def __call__(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        task = planted_task(observation, "loki")
        update = observation.update.summed(Unit.COHORT)
        return self._read(replace(observation, update=update), task)
