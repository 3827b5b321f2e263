"""A truth whose labels the update contradicts gets a note."""

import pytest
import torch
from torch import nn

from leakbound.core import Batch

from .flat import attack_update

SHAPE = (1, 6, 6)


def noted(true, told=None):
    """Notes on an update of class 2, with a truth of class `true`, and perhaps a given label."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 4))
    image = torch.linspace(0, 1, 36).reshape(1, *SHAPE)
    nn.functional.cross_entropy(model(image), torch.tensor([2])).backward()
    found = attack_update(
        {k: p.grad for k, p in model.named_parameters()},
        model,
        kind="gradient",
        input_shape=SHAPE,
        attacks="linear_inversion",
        truth=Batch(image, torch.tensor([true])),
        labels=None if told is None else [told],
        examples=1,
    )
    return " ".join(found.records[0].capture.notes)


@pytest.mark.parametrize("true", [0, 1, 3])
def test_a_class_that_occurs_for_certain_is_missed_in_the_truth(true):
    assert "the truth has no example of class 2" in noted(true)


def test_a_right_truth_gets_no_note():
    assert "truth" not in noted(2)
    assert "truth" not in noted(2, 2)


def test_given_labels_that_are_not_the_truths_get_a_note():
    assert "the given labels are not those of the truth" in noted(3, 2)
