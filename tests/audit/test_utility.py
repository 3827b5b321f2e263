"""Short trainings: what is measured, and that quick ways measure the same."""

import torch

from leakbound import client, models
from leakbound.audit import utility
from leakbound.random import stream
from leakbound.types import Batch, Task


def test_outputs_are_the_models_own_to_the_bit():
    given = {"input_shape": (1, 12, 12), "classes": 3, "generator": stream(0, "model")}
    task = Task.of(models.simple_convnet(**given))
    count = 2 * utility.TOGETHER + 3
    images = torch.rand(count, 1, 12, 12, generator=stream(0, "images"))
    found = utility._outputs(task, Batch(images, torch.zeros(count)))
    parts = [client.forward(task, few) for few in torch.split(images, utility.TOGETHER)]
    assert torch.equal(found, torch.cat(parts))
    assert not found.requires_grad
