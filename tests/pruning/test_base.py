"""How many weights go, which ones may, and what is refused: the same for all schemes."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from leakbound import pruning
from leakbound.core import Batch, Task
from leakbound.pruning import (
    FedDST,
    Grasp,
    LayerCount,
    Magnitude,
    PruneFL,
    Random,
    Snip,
    Synflow,
    density,
    layer_counts,
    named_masks,
    prunable,
)
from leakbound.randomness import secure, stream

SIZES = {"a.weight": 72, "b.weight": 180, "c.weight": 270, "d.weight": 18}
ONE_SHOT = [Random, Magnitude, Snip, Grasp]
SCHEMES = [*ONE_SHOT, Synflow, PruneFL, FedDST]
RATES = [0.0, 0.001, 0.01, 0.1, 0.29, 0.3, 0.57, 0.7]


def _floor(rate, total):
    return math.floor(Fraction(str(rate)) * total)


def _fast(scheme, **settings):
    return scheme(**settings, **({"iterations": 7} if scheme is Synflow else {}))


def test_layers_only(small):
    names = {name for name, _, start, _ in small.layout if prunable(small)[start]}
    assert names == set(SIZES)
    assert int(prunable(small).sum()) == sum(SIZES.values())


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_exactly_so_many_go(scheme, rate, small, batch):
    mask = _fast(scheme, rate=rate).start(small, batch, stream(0))
    assert mask[~prunable(small)].all()
    each = scheme is PruneFL  # the largest of every layer
    gone = sum(_floor(rate, n) for n in SIZES.values()) if each else _floor(rate, 540)
    assert int((~mask).sum()) == gone
    assert density(small, mask) == pytest.approx(1 - gone / 540, abs=1e-12)


@pytest.mark.parametrize("rate", [0.29, 0.57, 0.58])  # floats put 0.29 * 100 below 29
def test_decimal_rates_of_a_hundred(rate):
    task = Task.of(nn.Linear(10, 10))
    assert int((~Random(rate=rate).start(task, None, stream(0))).sum()) == round(100 * rate)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("scheme", ONE_SHOT)
def test_exactly_so_many_of_every_layer(scheme, rate, small, batch):
    mask = scheme(rate=rate, scope="layer").start(small, batch, stream(0))
    want = tuple(LayerCount(name, n - _floor(rate, n), n) for name, n in SIZES.items())
    assert layer_counts(small, mask) == want
    assert want[0].density == want[0].kept / 72


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_model_is_not_touched(scheme, small, batch):
    before = [v.clone() for v in (*small.model.state_dict().values(), small.parameters)]
    buffers = {name: value.clone() for name, value in small.buffers.items()}
    _fast(scheme, rate=0.5).start(small, batch, stream(0))
    after = [*small.model.state_dict().values(), small.parameters]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(torch.equal(small.buffers[name], value) for name, value in buffers.items())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_same_draws_same_mask(scheme, small, batch):
    def draw(source):
        return _fast(scheme, rate=0.5).start(small, batch, source)

    assert torch.equal(draw(stream(3)), draw(stream(3)))
    differs = not torch.equal(draw(stream(3)), draw(stream(4)))
    assert differs == (scheme in (Random, FedDST))
    assert int((~draw(secure())).sum()) == 270


@pytest.mark.parametrize("scheme", [Magnitude, Snip])
def test_of_equal_scores_the_first_go(scheme):
    task = Task.of(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
    task = task.with_parameters(torch.ones(10))
    batch = Batch(torch.ones(2, 1, 2, 2), torch.tensor([0, 0]))
    mask = scheme(rate=0.5).start(task, batch, stream(0))
    assert mask.tolist() == [False] * 4 + [True] * 6


@pytest.mark.parametrize("scheme", [Random, Magnitude, Snip, Synflow])
def test_one_shot_masks_stay(scheme, small, batch):
    found = _fast(scheme, rate=0.5)
    task = small.pruned(found.start(small, batch, stream(0)))
    assert not any(found.adjusts(r) for r in range(1, 200))
    assert found.client_mask(task, batch, 10) is None
    assert found.report(task, batch, 10) is None
    assert torch.equal(found.server_mask(task, None, 10), task.kept)


def test_masks_serve_torch_own_pruning(small, batch):
    mask = Magnitude(rate=0.5).start(small, None, stream(0))
    masks = named_masks(small, mask)
    assert {name: kept.numel() for name, kept in masks.items()} == SIZES
    nn.utils.vector_to_parameters(small.parameters, small.model.parameters())
    for name, kept in masks.items():
        prune.custom_from_mask(small.model.get_submodule(name[:-7]), "weight", kept)
        prune.remove(small.model.get_submodule(name[:-7]), "weight")
    named = dict(small.model.named_parameters())
    flat = torch.cat([named[name].reshape(-1) for name, *_ in small.layout])
    assert torch.equal(flat, small.pruned(mask).parameters)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rate", [-0.1, 1.0, 1, 1.5, math.nan, math.inf, "0.3", True])
def test_rates_that_are_none(scheme, rate):
    with pytest.raises(ValueError, match="rate is"):
        scheme(rate=rate)


@pytest.mark.parametrize(
    ("scheme", "settings"),
    [
        (Random, {"scope": "tensor"}),
        (Snip, {"scope": None}),
        (Grasp, {"temperature": 0.0}),
        (Synflow, {"iterations": 0}),
        (PruneFL, {"every": 0}),
        (PruneFL, {"candidates": 1.1}),
        (PruneFL, {"half_life": 0}),
        (PruneFL, {"rule": "greedy"}),
        (PruneFL, {"times": (1.0, 0.0)}),
        (PruneFL, {"constant": 0.0}),
        (FedDST, {"every": -1}),
        (FedDST, {"alpha": -0.5}),
        (FedDST, {"end": 0}),
    ],
)
def test_settings_that_are_none(scheme, settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        scheme(**settings)


@pytest.mark.parametrize("scheme", [Snip, Grasp, Synflow])
def test_a_batch_is_needed(scheme, small):
    with pytest.raises(ValueError, match=f"batch is None; {scheme.__name__}"):
        scheme().start(small, None, stream(0))


@pytest.mark.parametrize("scheme", [Random, Magnitude, PruneFL, FedDST])
def test_no_batch_is_needed(scheme, small):
    assert scheme().start(small, None, stream(0)).shape == small.parameters.shape


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_pruned_model_is_refused(scheme, small, batch):
    task = small.pruned(prunable(small))
    with pytest.raises(ValueError, match=r"task is already pruned; give task.pruned\(None\)"):
        _fast(scheme).start(task, batch, stream(0))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_without_layers(scheme, batch):
    task = Task.of(nn.Sequential(nn.BatchNorm2d(2), nn.Flatten()).eval())
    with pytest.raises(ValueError, match="no weights of 2 or more dimensions"):
        _fast(scheme).start(task, batch, stream(0))


@pytest.mark.parametrize("scheme", [*ONE_SHOT, Synflow, FedDST])
def test_a_layer_that_vanishes_is_named(scheme, small, batch):
    with pytest.raises(ValueError, match=r"none of the \d+ weights of '\w.weight'.*lower rate"):
        _fast(scheme, rate=0.999).start(small, batch, stream(0))  # one weight for four layers


@pytest.mark.parametrize("use", [layer_counts, density, named_masks])
@pytest.mark.parametrize(
    "mask", [torch.ones(7).bool(), torch.ones(1, 2).bool(), torch.ones(600)], ids=str
)
def test_masks_of_another_model(use, mask, small):
    with pytest.raises(ValueError, match=r"mask has shape .* of torch.bool"):
        use(small, mask)


@pytest.mark.parametrize("scheme", [Magnitude, Snip, Grasp, Synflow, PruneFL])
def test_weights_that_are_not_finite(scheme, small, batch):
    broken = small.parameters.clone()
    broken[3] = math.nan
    with pytest.raises(ValueError, match="scores of the weights holds"):
        scheme().start(replace(small, parameters=broken), batch, stream(0))


@pytest.mark.parametrize("scheme", [Random, PruneFL, FedDST])
def test_rounds_count_from_one(scheme):
    with pytest.raises(ValueError, match="round_ is 0"):
        scheme().adjusts(0)


@pytest.mark.parametrize("scheme", [Random, PruneFL, FedDST])
def test_later_masks_need_an_earlier(scheme, small):
    with pytest.raises(ValueError, match="task is not pruned"):
        scheme().server_mask(small, torch.ones_like(small.parameters), 50)


def test_names():
    assert all(hasattr(pruning, name) for name in pruning.__all__)
