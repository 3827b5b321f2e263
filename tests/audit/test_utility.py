"""Short trainings: what is measured, and that quick ways measure the same."""

import torch

from leakbound import client, models
from leakbound.audit import utility
from leakbound.core import Batch, Task
from leakbound.randomness import stream


def test_outputs_are_the_models_own_to_the_bit():
    given = {"input_shape": (1, 12, 12), "classes": 3, "generator": stream(0, "model")}
    task = Task.of(models.simple_convnet(**given))
    count = 2 * utility.TOGETHER + 3
    images = torch.rand(count, 1, 12, 12, generator=stream(0, "images"))
    found = utility._outputs(task, Batch(images, torch.zeros(count)))
    parts = [client.forward(task, few) for few in torch.split(images, utility.TOGETHER)]
    assert torch.equal(found, torch.cat(parts))
    assert not found.requires_grad


def test_images_that_share_statistics_go_by_the_hundred():
    """What batch norm in training mode gives depends on who is measured together."""
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Flatten()
    model = torch.nn.Sequential(*layers, torch.nn.Linear(75, 2))
    task = Task.of(model.train(), classes=2)
    assert task.coupled
    images = torch.rand(130, 1, 7, 7, generator=stream(0, "images"))
    found = utility._outputs(task, Batch(images, torch.zeros(130)))
    parts = [client.forward(task, few) for few in (images[:100], images[100:])]
    assert torch.equal(found, torch.cat(parts))
