"""Pairing: the best assignment, in the truth's order."""

import math
from itertools import permutations
from statistics import median

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leakbound.core import Batch, Reconstruction
from leakbound.pairing import pair, squared_distances


def _images(count, seed):
    return torch.rand(count, 1, 2, 3, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(0, 2), st.integers(0, 10**6))
def test_cheapest_of_all_assignments(count, spare, seed):
    truth = Batch(_images(count, seed), torch.arange(count))
    guess = _images(count + spare, seed + 1)
    paired = pair(truth, Reconstruction(guess, torch.arange(count + spare)))
    costs = squared_distances(truth.inputs, guess).tolist()
    scale = 0.1 * median(c for row in costs for c in row)

    def total(order):
        return sum(math.log(1 + costs[i][j] / scale) for i, j in enumerate(order))

    best = min(total(order) for order in permutations(range(count + spare), count))
    assert total(paired.order) == pytest.approx(best)
    assert torch.equal(paired.inputs, guess[list(paired.order)])
    assert tuple(paired.labels.tolist()) == paired.order


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(5)))
def test_shuffled_truth_is_put_back(order):
    truth = Batch(_images(5, 0), torch.arange(5))
    paired = pair(truth, Reconstruction(truth.inputs[order]))
    assert torch.equal(paired.inputs, truth.inputs)
    assert paired.labels is None


def test_an_exact_answer_is_not_given_to_another_example():
    """The second truth is far from the mean answer: by the total error the first one's exact answer
    would go to it.
    """
    truth = torch.tensor([[0.5, 0.2], [0.7, 0.0]]).view(2, 1, 1, 2)
    answers = torch.cat([torch.full((1, 1, 1, 2), 0.3), truth[:1]])
    costs = squared_distances(truth, answers)
    assert costs[0, 0] + costs[1, 1] < costs[0, 1] + costs[1, 0]
    paired = pair(Batch(truth, torch.zeros(2)), Reconstruction(answers))
    assert torch.equal(paired.inputs[0], truth[0])


def test_distances_by_hand():
    a, b = torch.zeros(2, 1, 1, 2), torch.tensor([[[[3.0, 4.0]]]])
    assert squared_distances(a, b).tolist() == [[12.5], [12.5]]
    assert squared_distances(a[:0], b).shape == (0, 1)


@pytest.mark.parametrize(
    ("guess", "labels", "words"),
    [
        (torch.zeros(1, 1, 2, 3), None, "holds 1 images and the truth 2"),
        (torch.zeros(2, 1, 3, 2), None, "give both in one shape"),
        (torch.full((2, 1, 2, 3), float("nan")), None, "reconstruction holds 12 of 12"),
        (torch.full((2, 1, 2, 3), float("inf")), None, "NaN or infinite"),
        (torch.zeros(2, 1, 2, 3), torch.tensor([1]), "and 1 labels"),
    ],
)
def test_errors(guess, labels, words):
    truth = Batch(_images(2, 0), torch.arange(2))
    with pytest.raises(ValueError, match=words):
        pair(truth, Reconstruction(guess, labels))
