"""PruneFL and FedDST against hand computations and searches over all choices."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from leakbound.core import Batch, Task
from leakbound.pruning import FedDST, PruneFL, layer_counts, prunable
from leakbound.pruning.adaptive import erk, worth_their_time
from leakbound.randomness import normal, stream, uniform

LAYERS = ("a.weight", "b.weight", "c.weight", "d.weight")


def _draw(task, *name):
    return normal(task.parameters.shape, stream(0, *name), like=task.parameters)


def _spans(task):
    return [(start, stop) for name, _, start, stop in task.layout if name in LAYERS]


def _smallest(values, among, count):
    return set(sorted(among, key=lambda i: (values[i], i))[:count])


def _slope_of_softmax(weights, bias, batch):
    """The gradient of a linear model's mean cross-entropy, by hand."""
    logits = batch.inputs.flatten(1).double() @ weights.T + bias
    error = torch.softmax(logits, 1) - nn.functional.one_hot(batch.labels, 3)
    error = error / len(batch.labels)
    return torch.cat([(error.T @ batch.inputs.flatten(1).double()).flatten(), error.sum(0)])


def _linear():
    task = Task.of(nn.Sequential(nn.Flatten(), nn.Linear(72, 3)), classes=3)
    return task.with_parameters(_draw(task, "linear"))


def _half(task):
    return (uniform(task.parameters.shape, stream(0, "half")) < 0.5) | ~prunable(task)


def test_prune_fl_reports_the_squares_of_all_weights(batch):
    task = _linear().pruned(_half(_linear()))
    named = task.unflatten(task.parameters.double())
    want = _slope_of_softmax(named["1.weight"], named["1.bias"], batch).square()
    report = PruneFL(every=5).report(task, batch, 10)
    torch.testing.assert_close(report.double(), want, rtol=1e-4, atol=1e-8)
    assert (report[~task.kept] > 0).all()
    assert PruneFL(every=5).report(task, batch, 11) is None


def test_prune_fl_adjusts_on_time(small):
    scheme = PruneFL(rate=0.5, every=7)
    assert [r for r in range(1, 30) if scheme.adjusts(r)] == [7, 14, 21, 28]
    task = small.pruned(scheme.start(small, None, stream(0)))
    assert torch.equal(scheme.server_mask(task, None, 6), task.kept)


def _prune_fl_by_hand(task, report, rate, candidates, seconds=(1, 1, 1, 1)):
    kept, weights = task.kept.tolist(), task.parameters.abs().tolist()
    stay, value = set(range(len(kept))), {}
    for (start, stop), time in zip(_spans(task), seconds, strict=True):
        used = [i for i in range(start, stop) if kept[i]]
        stay -= set(range(start, stop)) - set(used)
        stay -= _smallest(weights, used, int(candidates * len(used) + 1e-9))
        value |= {i: float(report[i]) / time for i in range(start, stop)}
    rest = [i for i in value if i not in stay]
    size = len(kept) - int(rate * len(value) + 1e-9)
    return stay | set(sorted(rest, key=lambda i: -value[i])[: size - len(stay)])


@pytest.mark.parametrize("rate", [0.29, 0.5, 0.8])
@pytest.mark.parametrize("seconds", [None, (1.0, 7.0, 0.2, 3.0)])
def test_prune_fl_at_a_fixed_rate(rate, seconds, small):
    scheme = PruneFL(rate=rate, times=seconds)
    task = small.pruned(scheme.start(small, None, stream(0)))
    gone = int((~task.kept).sum())
    fixed = (gone + 0.5) / 540  # by layer, fewer go than floor(rate * n)
    scheme = replace(scheme, rate=fixed)
    report = _draw(task, "report").square()
    mask = scheme.server_mask(task, report, 50)
    want = _prune_fl_by_hand(task, report, fixed, 0.3, seconds or (1, 1, 1, 1))
    assert set(mask.nonzero().flatten().tolist()) == want
    assert int((~mask).sum()) == gone
    assert (mask & ~task.kept).any()
    assert (task.kept & ~mask).any()


def test_prune_fl_brings_back_a_weight_of_large_gradient(small):
    scheme = PruneFL(rate=0.5)
    task = small.pruned(scheme.start(small, None, stream(0)))
    lost = int((~task.kept).nonzero()[17])
    report = torch.full_like(task.parameters, 1e-3)
    report[lost] = 1.0
    mask = scheme.server_mask(task, report, 50)
    assert mask[lost]
    assert task.pruned(mask).parameters[lost] == 0
    assert int(mask.sum()) == int(prunable(task).sum()) - 270 + int((~prunable(task)).sum())


def test_prune_fl_candidates_halve(small):
    scheme = PruneFL(rate=0.5, candidates=0.4, half_life=50)
    task = small.pruned(scheme.start(small, None, stream(0)))
    report = (~task.kept).float()  # all that is out is worth more than all that is in
    for round_, part in ((50, 0.2), (100, 0.1), (150, 0.05)):
        lost = int((task.kept & ~scheme.server_mask(task, report, round_)).sum())
        used = [layer.kept for layer in layer_counts(task, task.kept)]
        assert lost == sum(int(part * n + 1e-9) for n in used)


@pytest.mark.parametrize("seed", range(20))
def test_the_time_rule_is_the_best_of_all_prefixes(seed):
    drawn = uniform((2, 40), stream(seed), like=torch.zeros(1).double())
    gains, times = drawn[0] ** 3, drawn[1] + 0.01
    stay = torch.arange(40) < 5
    constant = [0.1, 1.0, 10.0][seed % 3]
    mask = worth_their_time(gains, times, stay, constant)
    order = sorted(range(5, 40), key=lambda i: -float(gains[i] / times[i]))
    ratios = []
    for k in range(36):
        chosen = [*range(5), *order[:k]]
        ratios.append(float(gains[chosen].sum() / (constant + times[chosen].sum())))
    best = int(np.argmax(ratios))
    assert set(mask.nonzero().flatten().tolist()) == {*range(5), *order[:best]}
    assert 0 < best < 35


def test_the_time_rule_beats_all_sets():
    drawn = uniform((2, 10), stream(3), like=torch.zeros(1).double())
    gains, times, stay = drawn[0] ** 2, drawn[1] + 0.05, torch.arange(10) < 2
    mask = worth_their_time(gains, times, stay, 0.7)

    def ratio(chosen):
        return float(gains[chosen].sum() / (0.7 + times[chosen].sum()))

    sets = [[0, 1] + [j for j in range(2, 10) if bits >> (j - 2) & 1] for bits in range(256)]
    assert ratio(mask.nonzero().flatten().tolist()) == max(map(ratio, sets))


def test_prune_fl_by_time(small):
    seconds, constant = (0.1, 1.0, 0.02, 0.5), 30.0
    scheme = PruneFL(rate=0.5, rule="time", times=seconds, constant=constant)
    task = small.pruned(scheme.start(small, None, stream(0)))
    report = _draw(task, "report").square()
    mask = scheme.server_mask(task, report, 50)
    stay = _prune_fl_by_hand(task, report, 0.9999, 0.3)
    rest, cost = [], dict.fromkeys(range(len(mask)), 0.0)
    for (start, stop), time in zip(_spans(task), seconds, strict=True):
        cost |= dict.fromkeys(range(start, stop), time)
        used = [i for i in range(start, stop) if task.kept[i]]
        low = _smallest(task.parameters.abs().tolist(), used, int(0.3 * len(used) + 1e-9))
        stay -= set(range(start, stop)) - (set(used) - low)
        rest += [i for i in range(start, stop) if i not in used or i in low]
    stay |= set(range(len(mask))) - set(rest)
    order, value = sorted(rest, key=lambda i: -float(report[i]) / cost[i]), report.double()
    ratios = []
    for k in range(len(order) + 1):
        chosen = [*stay, *order[:k]]
        ratios.append(float(value[chosen].sum()) / (constant + sum(cost[i] for i in chosen)))
    best = int(np.argmax(ratios))
    assert set(mask.nonzero().flatten().tolist()) == stay | set(order[:best])
    assert 0 < best < len(order)


def test_prune_fl_refuses(small):
    scheme = PruneFL(rate=0.5)
    task = small.pruned(scheme.start(small, None, stream(0)))
    for report in (None, torch.ones(3)):
        with pytest.raises(ValueError, match="report has shape"):
            scheme.server_mask(task, report, 50)
    broken = torch.ones_like(task.parameters)
    broken[2] = math.nan
    with pytest.raises(ValueError, match="report holds 1 of"):
        scheme.server_mask(task, broken, 50)
    with pytest.raises(ValueError, match=r"times has 2 entries; .* 4 prunable tensors: a.weight"):
        replace(scheme, times=(1.0, 1.0)).server_mask(task, torch.ones_like(task.parameters), 50)
    with pytest.raises(ValueError, match=r"more weights than rate 0.9 allows"):
        replace(scheme, rate=0.9).server_mask(task, torch.ones_like(task.parameters), 50)


def test_prune_fl_cuts_no_layer(small):
    scheme = PruneFL(rate=0.9, candidates=1.0)
    task = small.pruned(scheme.start(small, None, stream(0)))
    report = torch.zeros_like(task.parameters)
    report[slice(*_spans(task)[1])] = 1.0
    with pytest.raises(ValueError, match=r"none of the 72 weights of 'a.weight'"):
        scheme.server_mask(task, report, 50)


def test_erk_by_hand(small):
    """Shapes (4,2,3,3), (5,4,3,3), (6,45), (3,6): sums 12, 15, 51, 9; 540 weights in all.

    At rate 0.5, 270 weights are kept: 270 / 87 * (12, 15, 51, 9) is (37.2, 46.6, 158.3, 27.9), the
    last above its 18. So it is full, and 252 / 78 * (12, 15, 51) is (38.77, 48.46, 164.77), which
    rounds to (39, 48, 165). At 0.9 nothing is full: 54 / 87 * sums is (7.45, 9.31, 31.66, 5.59).
    """
    assert erk(small, 0.5) == (39, 48, 165, 18)
    assert erk(small, 0.9) == (7, 9, 32, 6)
    assert erk(small, 0.0) == (72, 180, 270, 18)


def test_erk_is_exact_at_every_rate(small):
    for thousandth in range(1000):
        rate = thousandth / 1000
        counts = erk(small, rate)
        assert sum(counts) == 540 - 540 * thousandth // 1000
        assert all(0 <= c <= n for c, n in zip(counts, (72, 180, 270, 18), strict=True))
        spare = [c / s for c, n, s in zip(counts, (72, 180, 270, 18), (12, 15, 51, 9), strict=True)
                 if c < n]  # fmt: skip
        assert max(spare, default=0) - min(spare, default=0) < 1 / 12 + 1 / 9 + 1e-9


def test_fed_dst_starts_at_those_counts_at_random(small):
    masks = [FedDST(rate=0.5).start(small, None, stream(s)) for s in range(300)]
    for mask in masks[:20]:
        assert tuple(c.kept for c in layer_counts(small, mask)) == (39, 48, 165, 18)
    often = sum(mask.double() for mask in masks)[slice(*_spans(small)[1])] / 300
    assert float((often - 48 / 180).abs().max()) < 5 * math.sqrt(48 / 180 * 132 / 180 / 300)


@pytest.mark.parametrize("round_", [10, 40, 90])
def test_fed_dst_moves_the_smallest_to_the_steepest(round_, small, batch):
    scheme = FedDST(rate=0.5, alpha=0.6, end=100)
    task = small.pruned(scheme.start(small, None, stream(0)))
    mask = scheme.client_mask(task, batch, round_)
    leaf = task.parameters.clone().requires_grad_()  # the gradient without the library
    outputs = torch.func.functional_call(
        task.model, {**task.buffers, **task.unflatten(leaf)}, (batch.inputs,)
    )
    slopes = torch.autograd.grad(nn.functional.cross_entropy(outputs, batch.labels), leaf)[0].abs()
    assert (slopes[~task.kept] > 0).any()
    part = 0.3 * (1 + math.cos(math.pi * round_ / 100))
    for start, stop in _spans(task):
        used = [i for i in range(start, stop) if task.kept[i]]
        moved = int(part * len(used) + 1e-9)
        stays = set(used) - _smallest(task.parameters.abs().tolist(), used, moved)
        out = [i for i in range(start, stop) if i not in stays]
        grown = set(sorted(out, key=lambda i: (float(slopes[i]), i))[len(out) - moved :])
        found = {i for i in range(start, stop) if mask[i]}
        assert found == stays | grown
        assert stays <= found
        assert len(found) == len(used)
    assert (mask & ~task.kept).any()
    assert (task.pruned(mask).parameters[mask & ~task.kept] == 0).all()
    assert mask[~prunable(task)].all()


def test_fed_dst_keeps_the_largest_averages(small):
    scheme = FedDST(rate=0.5)
    task = small.pruned(scheme.start(small, None, stream(0)))
    task = replace(task, parameters=_draw(task, "averaged"))  # also where the old mask has none
    mask = scheme.server_mask(task, None, 20)
    want = set(range(len(mask)))
    for (start, stop), kept in zip(_spans(task), (39, 48, 165, 18), strict=True):
        span = range(start, stop)
        want -= _smallest(task.parameters.abs().tolist(), span, len(span) - kept)
    assert set(mask.nonzero().flatten().tolist()) == want
    assert (mask & ~task.kept).any()


def test_fed_dst_rests_between_and_at_the_end(small, batch):
    scheme = FedDST(rate=0.5, every=10, end=40)
    assert [r for r in range(1, 100) if scheme.adjusts(r)] == [10, 20, 30]
    task = small.pruned(scheme.start(small, None, stream(0)))
    for round_ in (9, 40, 50):
        assert scheme.client_mask(task, batch, round_) is None
        assert torch.equal(scheme.server_mask(task, None, round_), task.kept)
    assert scheme.report(task, batch, 10) is None
    with pytest.raises(ValueError, match="task is not pruned"):
        scheme.client_mask(small, batch, 10)


def test_fed_dst_refuses_a_gradient_that_is_not_finite(small, batch):
    task = small.pruned(FedDST(rate=0.5).start(small, None, stream(0)))
    broken = Batch(batch.inputs * math.inf, batch.labels)
    with pytest.raises(ValueError, match="gradient holds"):
        FedDST(rate=0.5).client_mask(task, broken, 10)
