"""Optimal pruning end to end: how much is withheld, what, and how often."""

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import nn
from torch.func import functional_call, grad, jacrev

from leakbound.core import Batch, Exact, Guarantee, NotApplicable, Task, Unit, Unknown, Update
from leakbound.defenses import GaussianNoise, LocalOptimalPruning, OptimalPruning, chain
from leakbound.defenses.public import expected
from leakbound.protocol import play, resolve, send, step
from leakbound.randomness import stream, uniform

close = torch.testing.assert_close
P = 149


@pytest.fixture
def public(task):
    draw = uniform((9, 1, 3, 4), stream(0, "public"), like=task.parameters)
    return replace(task, public=Batch(draw, torch.arange(9) % 3))


def _gradient(task, batch, inputs=None):
    inputs = batch.inputs if inputs is None else inputs

    def loss(flat):
        return task.loss(functional_call(task.model, task.unflatten(flat), (inputs,)), batch.labels)

    return grad(loss)(task.parameters)


def _ratio(task, batch):
    """||dg_i/dx|| / |g_i| by the full Jacobian."""
    rows = jacrev(lambda x: _gradient(task, batch, x))(batch.inputs).flatten(1)
    return rows.norm(dim=1) / _gradient(task, batch).abs()


def _round(task, batch, defense, seed=0):
    return play(task, [batch], defense, [stream(seed), stream(seed, "server")])


@pytest.mark.parametrize("rate", [0.0, 0.29, 0.5, 0.7, 0.999, 1.0])
@pytest.mark.parametrize("kind", [OptimalPruning, LocalOptimalPruning])
def test_exactly_the_rate_is_withheld(public, batch, kind, rate):
    update = _round(public, batch, kind(rate=rate)).update
    assert int((~update.mask).sum()) == math.floor(round(rate * P, 6))
    g = _gradient(public, batch)
    close(update.rows[0], g * update.mask[0])


def test_the_local_form_withholds_the_largest_ratio(task, batch):
    """k' of the exact Jacobian: what is kept is below what is withheld, but for estimation."""
    k = _ratio(task, batch)
    keep = _round(task, batch, LocalOptimalPruning(rate=0.6, directions=3000)).update.mask[0]
    assert float(k[keep].max()) < 1.1 * float(k[~keep].min())
    by_magnitude = _gradient(task, batch).abs()
    assert float(by_magnitude[keep].min()) < float(by_magnitude[~keep].max())  # not by |g| alone
    assert float(k[keep].mean()) < 0.5 * float(k[~keep].mean())


def test_the_global_form_withholds_the_largest_expected_ratio(public, batch):
    known = expected(public, batch.size, 64, None)
    k = known.s / known.g2
    keep = _round(public, batch, OptimalPruning(rate=0.6)).update.mask[0]
    assert float(k[keep].max()) <= float(k[~keep].min())


def test_the_global_mask_is_independent_of_the_batch(public, batch):
    other = Batch(1 - batch.inputs, batch.labels.flip(0))
    masks = [_round(public, b, OptimalPruning(rate=0.5)).update.mask for b in (batch, other)]
    assert torch.equal(*masks)
    own = [_round(public, b, LocalOptimalPruning(rate=0.5)) for b in (batch, other)]
    assert not torch.equal(own[0].update.mask, own[1].update.mask)
    assert all(r.update.law.private for r in own)
    assert isinstance(own[0].update.law, Exact)
    assert OptimalPruning().guarantee is LocalOptimalPruning().guarantee is Guarantee.NONE


def test_a_share_of_the_expected_utility_is_kept_on_average(public, batch):
    g2 = expected(public, batch.size, 64, None).g2
    fixed = OptimalPruning(utility_share=0.8).resolve(public, batch.size)
    count = 4000
    rows = torch.ones(count, P, dtype=torch.float64)
    update = Update(rows, Unit.CLIENT, (batch.size,) * count)
    sent, _ = fixed.transform(update, None, None, stream(5))
    often = sent.mask.double().mean(0)
    between = ((often > 0) & (often < 1)).nonzero().flatten()
    assert len(between) == 1
    kept, own, total = (float(v) for v in (g2[often == 1].sum(), g2[between], g2.sum()))
    chance = (0.8 * total - kept) / own  # U1 = C exactly, theorem 3.6
    assert 0.02 < chance < 0.98
    seen = int(sent.mask[:, between].sum())
    assert stats.binomtest(seen, count, chance).pvalue > 1e-4
    assert stats.binomtest(seen, count, chance * 0.85).pvalue < 1e-3
    mean = float((often * g2).sum()) / total
    assert abs(mean - 0.8) < 4 * own / total * math.sqrt(chance * (1 - chance) / count)
    assert sent.drawn
    imitated = fixed.imitate(rows[:1])
    assert bool((imitated[0] > 0).equal(often > 0))  # whatever may be sent


def test_a_draw_that_is_covered_leaves_no_law(public, batch):
    whole = chain(OptimalPruning(utility_share=0.8), GaussianNoise(0.1))
    assert whole.guarantee is Guarantee.NONE
    assert isinstance(_round(public, batch, whole).update.law, Unknown)
    fixed = chain(OptimalPruning(rate=0.8), GaussianNoise(0.1))
    assert fixed.guarantee is Guarantee.KNOWN_NOISE


@pytest.mark.parametrize("kind", [OptimalPruning, LocalOptimalPruning])
def test_all_or_nothing_of_the_utility(public, batch, kind):
    everything = _round(public, batch, kind(utility_share=1.0)).update
    close(everything.rows[0], _gradient(public, batch))
    nothing = _round(public, batch, kind(utility_share=0.0)).update
    assert not bool(nothing.rows.any())
    assert not bool(nothing.mask.any())


def test_the_local_share_is_that_of_the_batch(task, batch):
    g2 = _gradient(task, batch).square()
    target, most = 0.7 * float(g2.sum()), float(g2.max())
    sent = [
        send(task, batch, LocalOptimalPruning(utility_share=0.7), stream(i)) for i in range(100)
    ]
    kept = torch.stack([u.rows.square().sum() for u in sent])
    assert float((kept - target).abs().max()) <= most  # one coordinate alone is in between
    assert abs(float(kept.mean()) - target) < 4 * most / 2 / 10
    assert len({float(k) for k in kept}) > 2


def test_the_mask_of_one_batch_is_used_for_some_rounds(task, batch):
    other = Batch(batch.inputs.flip(0) * 0.3, batch.labels)
    for refresh in (1, 2, 3):
        ready = resolve(LocalOptimalPruning(refresh=refresh), task, batch.size)
        state, found = None, []
        for i in range(7):
            update, state = step(task, (batch, other)[i % 2], ready, stream(i), state)
            found.append(update.mask)
        fresh = [i for i in range(1, 7) if not torch.equal(found[i], found[i - 1])]
        assert fresh == [i for i in range(1, 7) if i % refresh == 0]


def test_the_threshold_is_that_of_the_squared_ratio(public, batch):
    known = expected(public, batch.size, 64, None)
    k = known.s / known.g2
    keep = _round(public, batch, OptimalPruning(threshold=float(k.median()))).update.mask[0]
    assert torch.equal(keep, k <= k.median())
    local = _round(public, batch, LocalOptimalPruning(threshold=40.0, directions=3000)).update.mask
    sure = (_ratio(public, batch) ** 2 / 40).log().abs() > 0.25
    assert torch.equal(local[0][sure], (_ratio(public, batch) ** 2 < 40)[sure])
    assert 10 < int(local.sum()) < P - 10


class Still(nn.Module):
    """A gradient of zero for every input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(12, dtype=torch.float64))

    def forward(self, x):
        return (x.flatten(1) @ self.weight) * 0


@pytest.mark.parametrize("kind", [OptimalPruning, LocalOptimalPruning])
@pytest.mark.parametrize("level", [{"rate": 0.5}, {"utility_share": 0.5}, {"threshold": 1.0}])
def test_a_gradient_of_zero_is_withheld_without_harm(batch, kind, level):
    task = Task.of(Still(), loss=lambda out, y: out.mean(), public=batch)
    update = _round(task, batch, kind(**level)).update
    assert bool((update.rows == 0).all())
    if "rate" in level:  # all ratios are equal (infinite): ties must not withhold more
        assert int((~update.mask).sum()) == 6


def test_what_is_refused(task, batch):
    for kind in (OptimalPruning, LocalOptimalPruning):
        assert kind().rate == 0.7
        with pytest.raises(ValueError, match="rate and threshold are both given"):
            kind(rate=0.1, threshold=1.0)
        for bad in ({"rate": 1.1}, {"rate": -0.1}, {"utility_share": 2.0}, {"threshold": 0.0}):
            with pytest.raises(ValueError, match=next(iter(bad))):
                kind(**bad)
    with pytest.raises(ValueError, match="directions"):
        LocalOptimalPruning(directions=0)
    row = Update(torch.zeros(1, P), Unit.CLIENT, (1,))
    with pytest.raises(ValueError, match="runs on a client"):
        LocalOptimalPruning().transform(row, None, None, stream(0))
    with pytest.raises(NotApplicable):
        _round(task, batch, OptimalPruning())
