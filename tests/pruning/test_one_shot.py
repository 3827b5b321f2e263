"""The scores of the one-shot schemes against finite differences, Hessian and matrix products."""

from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from leakbound.core import Batch, Task
from leakbound.pruning import (
    Grasp,
    Magnitude,
    Random,
    Snip,
    Synflow,
    layer_counts,
    prunable,
)
from leakbound.randomness import normal, stream, uniform


def _drawn(task, seed=0, scale=1.0):
    draw = normal(task.parameters.shape, stream(seed, "weights"), like=task.parameters)
    return task.with_parameters(scale * draw)


def _tiny():
    """3 -> 4 -> 3 with tanh, in float64: 31 weights."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    return _drawn(Task.of(net, classes=3).to("cpu", torch.float64))


def _tiny_batch():
    inputs = normal((5, 3), stream(0, "inputs"), like=torch.zeros(1).double())
    return Batch(inputs, torch.tensor([0, 1, 2, 2, 1]))


def _loss(flat, batch, temperature=1.0):
    """The tiny net's mean cross-entropy, written out."""
    a, b, c, d = flat[:12].view(4, 3), flat[12:16], flat[16:28].view(3, 4), flat[28:]
    logits = (torch.tanh(batch.inputs @ a.T + b) @ c.T + d) / temperature
    right = logits[torch.arange(len(logits)), batch.labels]
    return (torch.logsumexp(logits, 1) - right).mean()


def _best(scores, count):
    return {int(i) for i in np.argsort(scores, kind="stable")[len(scores) - count :]}


def test_random_takes_all_sets_equally_often():
    task = Task.of(nn.Linear(3, 2, bias=False))
    seen = Counter(
        tuple(Random(rate=0.5).start(task, None, stream(seed)).nonzero().flatten().tolist())
        for seed in range(4000)
    )
    sets = list(combinations(range(6), 3))
    assert set(seen) <= set(sets)
    assert stats.chisquare([seen[s] for s in sets]).pvalue > 1e-4


def test_random_takes_all_weights_equally_often():
    task = Task.of(nn.Sequential(nn.Linear(9, 8), nn.Linear(8, 6)))
    among, draws, rate = prunable(task), 1500, 0.25
    kept = sum(Random(rate=rate).start(task, None, stream(s)).int() for s in range(draws))
    counts = kept[among].double().numpy()
    size = len(counts)
    part = int((1 - rate) * size) / size
    spread = ((counts - draws * part) ** 2).sum() / (draws * part * (1 - part))
    assert 1e-4 < stats.chi2.sf(spread * (size - 1) / size, size - 1) < 1 - 1e-4
    assert (kept[~among] == draws).all()


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_magnitude_by_hand(scope):
    task = _tiny()
    mask = Magnitude(rate=0.25, scope=scope).start(task, None, stream(0))
    sizes = task.parameters.abs().numpy()
    first, second = range(12), range(16, 28)
    groups = [first, second] if scope == "layer" else [[*first, *second]]
    want = {12, 13, 14, 15, 28, 29, 30}
    for group in groups:
        ranked = sorted(group, key=lambda i: sizes[i])
        want |= set(ranked[int(0.25 * len(ranked)) :])
    assert set(mask.nonzero().flatten().tolist()) == want


def test_snip_is_the_slope_of_a_gate():
    task, batch, step = _tiny(), _tiny_batch(), 1e-6
    slopes = []
    for j in range(31):
        gate = torch.zeros(31).double()
        gate[j] = step
        up, down = (_loss(task.parameters * (1 + s * gate), batch) for s in (1, -1))
        slopes.append(float(up - down) / (2 * step))
    scores = Snip().scores(task, batch, stream(0))
    np.testing.assert_allclose(scores.numpy(), np.abs(slopes), atol=1e-9)
    mask = Snip(rate=0.5).start(task, batch, stream(0))
    layers = [*range(12), *range(16, 28)]
    kept = {layers[i] for i in _best(np.abs(slopes)[layers], 12)}
    assert set(mask.nonzero().flatten().tolist()) - kept == {12, 13, 14, 15, 28, 29, 30}
    assert int(mask.sum()) == 19


@pytest.mark.parametrize("temperature", [1.0, 200.0])
def test_grasp_by_the_whole_hessian(temperature):
    task, batch = _tiny(), _tiny_batch()

    def loss(flat):
        return _loss(flat, batch, temperature)

    hessian = torch.autograd.functional.hessian(loss, task.parameters)
    slope = torch.autograd.functional.jacobian(loss, task.parameters)
    want = (task.parameters * (hessian @ slope)).numpy()
    scores = Grasp(temperature=temperature).scores(task, batch, stream(0)).numpy()
    np.testing.assert_allclose(scores, want, rtol=1e-9, atol=1e-12 * np.abs(want).max())
    mask = Grasp(rate=0.5, temperature=temperature).start(task, batch, stream(0))
    layers = [*range(12), *range(16, 28)]
    kept = {layers[i] for i in _best(want[layers], 12)}
    assert set(mask.nonzero().flatten().tolist()) - kept == {12, 13, 14, 15, 28, 29, 30}
    assert int(mask.sum()) == 19
    assert (want < 0).any()  # the sign of the scores matters here


def test_grasp_says_how_the_gradient_would_shrink():
    """w_j (H g)_j is the slope of |g|²/2 in a gate on w_j."""
    task, batch, step = _tiny(), _tiny_batch(), 1e-5

    def flow(flat):
        slope = torch.autograd.functional.jacobian(lambda f: _loss(f, batch, 200.0), flat)
        return float(slope @ slope) / 2

    scores = Grasp().scores(task, batch, stream(0))
    for j in (0, 7, 13, 20, 30):
        gate = torch.zeros(31).double()
        gate[j] = step
        up, down = (flow(task.parameters * (1 + s * gate)) for s in (1, -1))
        assert (up - down) / (2 * step) == pytest.approx(float(scores[j]), rel=1e-4, abs=1e-12)


def _plain_net():
    """Convolutions, a batch norm, pools and layers; of the biases, one would do harm."""
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1, bias=False),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(5, 3, 3, bias=False),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 40),
        nn.ReLU(),
        nn.Linear(40, 4, bias=False),
    ).eval()


def _images(seed=0):
    return Batch(uniform((3, 2, 8, 8), stream(seed, "images")), torch.tensor([0, 1, 2]))


def test_synflow_is_conserved_through_the_layers():
    task = _drawn(Task.of(_plain_net()))
    scores = Synflow().scores(task, _images(), stream(0))
    assert scores.dtype == torch.float64
    assert (scores >= 0).all()
    net = _plain_net().double()
    nn.utils.vector_to_parameters(task.parameters.double().abs(), net.parameters())
    nn.init.zeros_(net[1].bias)
    nn.init.zeros_(net[8].bias)
    with torch.no_grad():
        total = float(net(torch.ones(1, 2, 8, 8).double()).sum())
    weights = [(start, stop) for name, _, start, stop in task.layout if name.endswith("weight")]
    assert len(weights) == 5  # the batch norm's as well
    for start, stop in weights:
        assert float(scores[start:stop].sum()) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize(("rate", "iterations"), [(0.5, 1), (0.5, 5), (0.9, 5), (0.9, 100)])
def test_synflow_by_matrix_products(rate, iterations):
    net = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 4))
    task = _drawn(Task.of(net))
    named = {
        name: np.abs(v.double().numpy()) for name, v in task.unflatten(task.parameters).items()
    }
    weights = [named[f"{i}.weight"] for i in (0, 2, 4)]
    masks, size = [np.ones_like(w) for w in weights], 54 + 45 + 20
    for step in range(1, iterations + 1):
        w = [a * m for a, m in zip(weights, masks, strict=True)]
        into = [np.ones(6)]
        into += [w[0] @ into[0]]
        into += [w[1] @ into[1]]
        out = [np.ones(4) @ w[2] @ w[1], np.ones(4) @ w[2], np.ones(4)]
        scores = [a * np.outer(o, i) for a, o, i in zip(w, out, into, strict=True)]
        flat = np.concatenate([s.ravel() for s in scores])
        flat[np.concatenate([m.ravel() for m in masks]) == 0] = -1
        keep = size - int(size * (1 - (1 - rate) ** (step / iterations)) + 1e-9)
        new = np.zeros(size)
        new[np.argsort(flat, kind="stable")[size - keep :]] = 1
        masks = [m.reshape(w.shape) for m, w in zip(np.split(new, [54, 99]), weights, strict=True)]
    mask = Synflow(rate=rate, iterations=iterations).start(
        task, Batch(torch.zeros(1, 6), torch.tensor([0])), stream(0)
    )
    found = [task.unflatten(mask)[f"{i}.weight"].numpy() for i in (0, 2, 4)]
    assert all((a == b).all() for a, b in zip(masks, found, strict=True))


def test_synflow_reads_no_data():
    task = _drawn(Task.of(_plain_net()))
    masks = [Synflow(rate=0.8).start(task, _images(seed), stream(seed)) for seed in range(3)]
    assert all(torch.equal(masks[0], mask) for mask in masks)


def test_synflow_reads_no_signs_biases_and_means(small, batch):
    scheme = Synflow(rate=0.6, iterations=10)
    signs = torch.where(uniform(small.parameters.shape, stream(5)) < 0.5, -1.0, 1.0)
    changed = small.parameters * signs
    for name, _, start, stop in small.layout:
        if name.endswith("bias"):
            changed[start:stop] += 3.0
    moved = {n: v - 2 if n == "norm.running_mean" else v for n, v in small.buffers.items()}
    other = replace(small, parameters=changed, buffers=moved)
    assert torch.equal(scheme.start(small, batch, stream(0)), scheme.start(other, batch, stream(0)))
    wide = {n: v * (1 + torch.arange(4.0)) ** 4 if n == "norm.running_var" else v
            for n, v in small.buffers.items()}  # fmt: skip
    scaled = scheme.start(replace(small, buffers=wide), batch, stream(0))
    assert not torch.equal(scheme.start(small, batch, stream(0)), scaled)


def _wide_and_narrow():
    sizes = (64, 256, 4, 256, 10)
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    task = Task.of(nn.Sequential(*[x for layer in layers for x in (layer, nn.ReLU())][:-1]))
    parts = [  # as torch draws them: ±1/sqrt(inputs)
        (2 * uniform((stop - start,), stream(0, name)) - 1) * shape[-1] ** -0.5
        for name, shape, start, stop in task.layout
    ]
    return task.with_parameters(torch.cat(parts))


def test_synflow_never_cuts_a_layer_where_others_do():
    task = _wide_and_narrow()
    inputs = normal((32, 64), stream(0, "inputs"))
    batch = Batch(inputs, torch.arange(32) % 10)
    for scheme in (Magnitude(rate=0.99), Snip(rate=0.998)):
        with pytest.raises(ValueError, match="keeps none"):
            scheme.start(task, batch, stream(0))
    for rate in (0.99, 0.998):
        counts = layer_counts(task, Synflow(rate=rate).start(task, batch, stream(0)))
        assert all(layer.kept >= 5 for layer in counts)


def test_synflow_refuses_batch_norm_in_training(batch):
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 3))
    with pytest.raises(ValueError, match="batch norm in training mode"):
        Synflow().start(Task.of(net), batch, stream(0))
