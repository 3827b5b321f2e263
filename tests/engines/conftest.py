"""What the engines' tests share: examples, autograd as the judge, and two watchers of operators."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from leakbound import client

CLASSES = 5


@pytest.fixture(params=["packed", "plain"])
def kernels(request, monkeypatch):
    """Both ways to compute convolutions, whichever this machine would take."""
    monkeypatch.setenv("LEAKBOUND_ENGINE", request.param)
    return request.param


def example(task, shape, size, soft=False, seed=1):
    """Inputs, labels and a cotangent of the update."""
    source, dtype = torch.Generator().manual_seed(seed), task.parameters.dtype
    inputs = torch.randn(size, *shape, generator=source, dtype=torch.float64)
    labels = torch.randint(CLASSES, (size,), generator=source)
    if soft:
        labels = torch.rand(size, CLASSES, generator=source, dtype=torch.float64).to(dtype)
    cotangent = torch.randn(len(task.parameters), generator=source, dtype=torch.float64)
    return inputs.to(dtype), labels, cotangent.to(dtype)


def autograd(task, inputs, labels, cotangent):
    """The client's update, and its cotangent pulled back to the inputs and to soft labels."""
    variables = [inputs.clone().requires_grad_()]
    if labels.is_floating_point():
        variables.append(labels.clone().requires_grad_())
    update = client.local_update(task, variables[0], variables[1] if variables[1:] else labels)
    return [update.detach(), *torch.autograd.grad(update, variables, cotangent)]


def mine(engine, inputs, labels, cotangent):
    """The same by an engine."""
    update = engine.gradient(inputs[None], labels[None])[0].clone()
    pulled = engine.pull(cotangent[None])
    assert (pulled.labels is None) == (not labels.is_floating_point())
    return [update, *(part[0] for part in pulled if part is not None)]


def error(found, wanted):
    """The relative distance."""
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    return float((found - wanted).norm() / wanted.norm())


def agree(engine, task, given):
    """The engine is autograd, up to rounding in double precision."""
    for found, wanted in zip(mine(engine, *given), autograd(task, *given), strict=True):
        assert error(found, wanted) < 1e-10


def as_exact(found, truths, *plains):
    """Single precision errs by no more than autograd's own, up to a factor.

    Of several runs by autograd the worst counts, with a smaller factor: a single one may be lucky.
    """
    factor = 5 if len(plains) == 1 else 3
    for at, (one, truth) in enumerate(zip(found, truths, strict=True)):
        floor = 1e-6 if at == 0 else 1e-5
        own = max(error(plain[at].double(), truth) for plain in plains)
        assert error(one.double(), truth) < max(floor, factor * own)


def smooth_loss(outputs, labels):
    """A loss that no engine knows."""
    target = functional.one_hot(labels, CLASSES) if labels.ndim == 1 else labels
    return (torch.tanh(outputs) - target).pow(4).mean()


class NoSync(TorchDispatchMode):
    """Refuses operators that make the host wait for the device."""

    refused = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in self.refused
        return func(*args, **(kwargs or {}))


def products(call):
    """Floating point operations of a call's products."""

    # PyTorch's own count knows neither packed convolutions nor products that are added in place
    def count(x, weight, *_, out_shape, **__):
        return 2 * weight[1] * weight[2] * weight[3] * torch.Size(out_shape).numel()

    def added(_, left, right, **__):
        return 2 * left[0] * left[1] * right[1]

    counts = {torch.ops.aten.addmm_: added}
    if hasattr(torch.ops.mkldnn, "_convolution_pointwise"):
        counts[torch.ops.mkldnn._convolution_pointwise] = count
    counter = FlopCounterMode(display=False, custom_mapping=counts)
    with counter:
        call()
    return counter.get_total_flops()


@pytest.fixture(scope="session")
def judge():
    """The tools above, by name."""
    return SimpleNamespace(
        example=example,
        autograd=autograd,
        mine=mine,
        error=error,
        agree=agree,
        as_exact=as_exact,
        smooth_loss=smooth_loss,
        NoSync=NoSync,
        products=products,
    )
