"""Errors of the features that an attack found, in cases that are known."""

from __future__ import annotations

import pytest
import torch

from leakbound.attacks.features.base import feature_errors, subspace_error


def test_errors_of_known_features():
    true = torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0]])
    assert subspace_error(torch.eye(3)[:, :2], true) == pytest.approx(0, abs=1e-12)
    assert subspace_error(torch.eye(3)[:, :1], true) == pytest.approx(0.4)
    assert subspace_error(torch.eye(3)[:, 2:], 5 * true) == pytest.approx(1)
    skewed = torch.tensor([[1.0, 1.0], [0.0, 1e-3], [0.0, 0.0]])
    assert subspace_error(skewed, true) == pytest.approx(0, abs=1e-6)
    found = torch.stack([-2 * true[1], true[0]])
    assert feature_errors(found, true).tolist() == pytest.approx([0, 2])
    assert feature_errors(found, true, signed=False).tolist() == pytest.approx([0, 0], abs=1e-7)
    assert feature_errors(found[:1], true, signed=False).tolist() == pytest.approx([1, 0], abs=1e-7)


@pytest.mark.parametrize(
    ("basis", "features", "word"),
    [((3,), (2, 3), "basis"), ((4, 2), (2, 3), "shape"), ((3, 2), (2, 3), "zero")],
)
def test_odd_shapes_are_named(basis, features, word):
    with pytest.raises(ValueError, match=word):
        subspace_error(torch.ones(basis), torch.zeros(features))
    if word != "basis":
        with pytest.raises(ValueError, match=word):
            feature_errors(torch.ones(basis).T, torch.zeros(features))
