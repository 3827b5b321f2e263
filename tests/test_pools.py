"""Quick max pools: PyTorch's own bits, ties, zeros of both signs and NaN included."""

import pytest
import torch
from torch import nn

from leakbound import models
from leakbound._util import pools
from leakbound.random import stream

POOLS = (
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 2},
    {"kernel_size": (2, 3), "stride": (2, 2), "ceil_mode": True},
)


def _images(kind, channels, dtype):
    source = stream(0, "pools", kind, channels)
    images = torch.randn(2, channels, 9, 11, generator=source, dtype=dtype)
    if kind == "ties":
        return images.round()
    if kind == "zeros":
        return 0 * images
    return torch.where(images > 1, float("nan"), images) if kind == "nan" else images


def _bits(values):
    return values.contiguous().view(torch.uint8)


@pytest.mark.parametrize("how", POOLS, ids=str)
@pytest.mark.parametrize("kind", ["plain", "ties", "zeros", "nan"])
def test_bits_are_those_of_pytorch(how, kind):
    pool = nn.MaxPool2d(**how)
    for channels in (1, 3, 16):
        for dtype in (torch.float32, torch.float64):
            images = _images(kind, channels, dtype)
            before = images.clone()
            with pools.quick(pool):
                found = pool(images)
            assert found.stride() == pool(images).stride()
            assert torch.equal(_bits(images), _bits(before))
            assert torch.equal(_bits(found), _bits(pool(images)))


def test_one_pixel_lies_as_it_does_in_pytorch():
    """A convolution may take another way for other strides."""
    pool, images = nn.MaxPool2d(2), torch.rand(2, 5, 2, 2)
    with pools.quick(pool):
        found = pool(images)
    assert found.stride() == pool(images).stride() == (5, 1, 1, 1)


def test_inside_vmap():
    pool, images = nn.MaxPool2d(2), torch.rand(3, 2, 4, 6, 6)
    with pools.quick(pool):
        found = torch.func.vmap(pool)(images)
    assert torch.equal(found, torch.stack([pool(own) for own in images]))


def test_pools_go_through_it_and_slopes_with_them(monkeypatch):
    model = models.simple_convnet(input_shape=(1, 8, 8), classes=3, generator=stream(0, "model"))
    images = torch.rand(4, 1, 8, 8, generator=stream(0, "x"))
    plain = torch.autograd.grad(model(images).sum(), list(model.parameters()))
    calls, real = [], pools._pooled
    monkeypatch.setattr(pools, "_pooled", lambda *a, **k: calls.append(1) or real(*a, **k))
    with pools.quick(model):
        quick = torch.autograd.grad(model(images).sum(), list(model.parameters()))
    assert len(calls) == 2
    torch.testing.assert_close(quick, plain)


def test_other_images_and_models_are_left_alone(monkeypatch):
    monkeypatch.setattr(pools, "_pooled", lambda *a, **k: pytest.fail("not for this"))
    pool, last = nn.MaxPool2d(2), torch.rand(2, 4, 6, 6).to(memory_format=torch.channels_last)
    with pools.quick(pool):
        pool(torch.rand(3, 6, 6)), pool(last)
        nn.MaxPool2d(2, return_indices=True)(torch.rand(2, 3, 6, 6))
    linear = nn.Linear(2, 2)
    with pools.quick(linear):
        nn.functional.max_pool2d(torch.rand(2, 3, 6, 6), 2)
