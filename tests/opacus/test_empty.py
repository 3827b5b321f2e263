"""Batches of nobody, which Poisson sampling draws: every mode takes them, and adds noise alone."""

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from leakbound.opacus import RiskEngine, SecureDPOptimizer
from leakbound.randomness import normal, stream

from .conftest import net

MODES = ["hooks", "functorch", "ew", "ghost"]
SIGMA, CLIP, RATE, EXPECTED = 0.5, 2.0, 0.1, 2
SIZES = [3, 0, 2, 0, 0, 4]


def conv():
    """A convolution with group norm: PyTorch's vmap refuses it where a batch is empty."""
    layers = nn.Conv2d(1, 2, 2), nn.GroupNorm(1, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)
    model, source = nn.Sequential(*layers).double(), stream(0, "weights")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * normal(parameter.shape, source, like=parameter))
    return model


def drawn(sizes):
    source = stream(0, "records")
    for size in sizes:
        inputs = torch.rand(size, 1, 3, 4, generator=source, dtype=torch.float64)
        yield inputs, torch.arange(size) % 3


def private(mode, build=net, count=8):
    model, engine = build(), RiskEngine()
    inputs, labels = next(drawn([count]))
    batches = stream(1, "batches")
    module, optimizer, *rest, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        data_loader=DataLoader(TensorDataset(inputs, labels), EXPECTED, generator=batches),
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        noise_generator=stream(0, "noise"),
        grad_sample_mode=mode,
    )
    return engine, model, module, optimizer, rest[0] if rest else nn.CrossEntropyLoss(), loader


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def stepped(mode, build=net):
    """The weights before every step and after the last."""
    engine, model, module, optimizer, criterion, _ = private(mode, build)
    weights = [flat(model)]
    for inputs, labels in drawn(SIZES):
        optimizer.zero_grad()
        criterion(module(inputs), labels).backward()
        optimizer.step()
        weights.append(flat(model))
    assert engine.risk(dim=12, norm=2.0, psnr=20).steps == len(SIZES)
    return torch.stack(weights)


@pytest.mark.parametrize("build", [net, conv])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_takes_the_same_steps(mode, build):
    """Against examples one at a time, by hand: clipped, summed, noised."""
    model, criterion, source = build(), nn.CrossEntropyLoss(), stream(0, "noise")
    weights = [flat(model)]
    for inputs, labels in drawn(SIZES):
        total = torch.zeros_like(weights[0])
        for one, label in zip(inputs, labels, strict=True):
            model.zero_grad()
            criterion(model(one[None]), label[None]).backward()
            own = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
            total += own * min(1.0, CLIP / (float(own.norm()) + 1e-6))
        noise = normal((1, len(total)), source, like=total)[0] * SIGMA * CLIP
        step = (total + noise) / EXPECTED
        torch.nn.utils.vector_to_parameters(weights[-1] - RATE * step, model.parameters())
        weights.append(flat(model))
    assert torch.allclose(stepped(mode, build), torch.stack(weights), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_a_real_loader_that_draws_nobody_trains_to_its_end(mode):
    """Four records at a rate of 1 / 4 each: a third of the batches are empty."""
    engine, model, module, optimizer, criterion, loader = private(mode, conv)
    before, empty, seen = flat(model), 0, 0
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=1, optimizer=optimizer
    ) as parts:
        for _ in range(10):
            for inputs, labels in parts:
                optimizer.zero_grad()
                criterion(module(inputs), labels).backward()
                optimizer.step()
                empty, seen = empty + (len(inputs) == 0), seen + len(inputs)
    assert empty > 0
    assert seen > 0
    assert engine.risk(dim=12, norm=2.0, psnr=20).steps == 10 * len(loader)
    assert torch.isfinite(flat(model)).all()
    assert not torch.equal(flat(model), before)


class Named(nn.Module):
    """Outputs with names, beside a whole number."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, images, scale=1.0):
        return {"scores": scale * self.inner(images), "classes": 3}


@pytest.mark.parametrize("mode", ["hooks", "ew"])
def test_outputs_of_any_form_and_evaluation(mode):
    _, _, module, optimizer, criterion, _ = private(mode, Named)
    (nobody, labels) = next(drawn([0]))
    found = module(nobody, scale=2.0)
    assert found["classes"] == 3
    assert found["scores"].shape == (0, 3)
    criterion(found["scores"], labels).backward()
    assert all(len(p.grad_sample) == 0 for p in module.parameters())
    optimizer.step()
    with torch.no_grad():
        assert not module(nobody)["scores"].requires_grad


def test_a_wrapped_module_is_taken_again_and_refused_for_another_mode():
    _, _, module, *_ = private("hooks")
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    given["data_loader"] = DataLoader(private("hooks")[-1].dataset, EXPECTED)
    given |= {"module": module, "optimizer": torch.optim.SGD(module.parameters(), lr=0.1)}
    again, optimizer, _ = RiskEngine().make_private(**given)
    assert again is module
    assert type(optimizer) is SecureDPOptimizer
    with pytest.raises(
        ValueError, match="module is already a Hooked, not one for grad_sample_mode 'ew'"
    ):
        RiskEngine().make_private(grad_sample_mode="ew", **given)
