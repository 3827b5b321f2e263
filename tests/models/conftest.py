"""What the models' tests share."""

import pytest
import torch
from torch.func import vjp

from leakbound.client import example_gradients, gradient, input_jvp, pure_gradient
from leakbound.core import Task


@pytest.fixture
def derivatives_agree():
    """Gradients by example with those alone, and both ways through the model with each other."""

    def check(model, shape):
        task, source = Task.of(model).to("cpu", torch.float64), torch.Generator().manual_seed(1)
        inputs, tangent = torch.rand(2, 2, *shape, generator=source, dtype=torch.float64)
        cotangent = torch.randn(len(task.parameters), generator=source, dtype=torch.float64)
        labels = torch.tensor([0, 3])
        rows = example_gradients(task, inputs, labels)
        for row, image, label in zip(rows, inputs, labels, strict=True):
            torch.testing.assert_close(row, gradient(task, image[None], label[None]))
        forward = input_jvp(task, inputs, labels, tangent) @ cotangent
        reverse = (
            vjp(lambda x: pure_gradient(task, x, labels), inputs)[1](cotangent)[0] * tangent
        ).sum()
        torch.testing.assert_close(forward, reverse)
        assert reverse != 0

    return check
