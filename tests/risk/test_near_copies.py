"""Batches that hold near-copies: a bound counts them as one unit of their number."""

from __future__ import annotations

import pytest
import torch

from leakbound import data, models, stream
from leakbound.audit.simulate import simulate
from leakbound.types import Batch

SHAPE = (1, 28, 28)


@pytest.fixture(scope="module")
def digits():
    return data.load("mnist5k").batch(torch.arange(600))


def near(inputs, places):
    """Images 40 dB from the first one of the places, in each place."""
    found = inputs[places].clone()
    noise = torch.randn(found.shape, generator=stream(0, "near"))
    found[:] = (found[:1] + 0.01 * noise).clamp(0, 1)
    return found


def bounds_of(batch, public, defense="dp_sgd,noise_multiplier=2,clip_norm=1"):
    model = models.mlp(input_shape=SHAPE, classes=10, generator=stream(0, "model"), hidden=(8,))
    found = simulate(
        model, batch, public=public, defense=defense, attack="linear_inversion", psnr=25.0,
        error_bound="none", probability=0.2, fresh=True,
    )  # fmt: skip
    return {bound.basis: bound for bound in found.assessment.bounds}


def test_a_batch_of_near_copies_counts_as_one_unit(digits):
    """A matched filter succeeds with .729 where .0862 was stated for each example by itself."""
    labels, public = digits.labels[:8], Batch(digits.inputs[8:], digits.labels[8:])
    alone = bounds_of(Batch(digits.inputs[:8], labels), public)
    copies = bounds_of(Batch(near(digits.inputs, range(8)), labels[:1].expand(8)), public)
    assert any(
        "none of the examples in this update is near" in words
        for words in alone["sample"].assumptions
    )
    assert any("up to 8 of the examples" in words for words in copies["sample"].assumptions)
    assert alone["sample"].probability < 0.4
    assert copies["sample"].probability > 0.729
    assert copies["sample"].epsilon == alone["sample"].epsilon  # the membership of one example
    assert "known model" not in copies


def test_two_near_examples_divide_the_noise_by_two(digits):
    labels, public = digits.labels[:8], Batch(digits.inputs[8:], digits.labels[8:])
    inputs = digits.inputs[:8].clone()
    inputs[3] = near(digits.inputs, [3, 3])[1]
    inputs[4] = digits.inputs[3]
    two = bounds_of(Batch(inputs, labels), public)["sample"]
    half = bounds_of(Batch(digits.inputs[:8], labels), public, "dp_sgd,noise_multiplier=1")[
        "sample"
    ]
    assert two.probability == half.probability
    assert any("the noise of one is divided by 2" in words for words in two.assumptions)
