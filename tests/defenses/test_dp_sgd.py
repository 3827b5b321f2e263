"""DP-SGD against Opacus, and its bound and noise."""

import copy
import math

import pytest
import torch
from scipy import stats
from torch import nn

from leakbound.client import example_gradients
from leakbound.core import Batch, Gaussian, Guarantee, Unit, Update
from leakbound.defenses import ClipExamples, DpSgd, Mean, SecureAggregation, chain
from leakbound.protocol import play, send
from leakbound.randomness import stream

opacus = pytest.importorskip("opacus")
CLIP = 2.0


def _opacus(model, batch, noise_multiplier):
    """The batch gradient as Opacus' own optimizer leaves it before its step."""
    module = opacus.GradSampleModule(copy.deepcopy(model))
    optimizer = opacus.optimizers.DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=1.0),
        noise_multiplier=noise_multiplier,
        max_grad_norm=CLIP,
        expected_batch_size=batch.size,
        generator=stream(0, "opacus"),
    )
    nn.functional.cross_entropy(module(batch.inputs), batch.labels).backward()
    optimizer.pre_step()
    return torch.cat([p.grad.reshape(-1) for p in module.parameters()])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_noise_free_part_is_opacus(mlp, task, batch):
    plain = example_gradients(task, batch.inputs, batch.labels)
    norms = plain.norm(dim=1)
    assert bool((norms > CLIP).any())
    assert bool((norms < CLIP).any())
    defense = DpSgd(CLIP, 1.0)
    wanted = _opacus(mlp, batch, 0.0)
    # Opacus divides by norm + 1e-6.
    torch.testing.assert_close(defense.imitate(plain)[0], wanted, rtol=2e-6, atol=1e-6)
    assert not torch.allclose(DpSgd(1.02 * CLIP, 1.0).imitate(plain)[0], wanted, rtol=1e-3)
    quiet = send(task, batch, DpSgd(CLIP, 1e-9), stream(0)).rows[0]
    torch.testing.assert_close(quiet, wanted, rtol=2e-6, atol=1e-6)


def _noise_energy(draws, std):
    law = stats.chi2(len(draws))
    energy = float((draws**2).sum()) / std**2
    return 2 * min(law.cdf(energy), law.sf(energy))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_noise_is_multiplier_times_clip_over_the_batch_size(mlp, task, batch):
    defense, std = DpSgd(CLIP, 0.7), 0.7 * CLIP / batch.size
    center = defense.imitate(example_gradients(task, batch.inputs, batch.labels))[0]
    sent = [send(task, batch, defense, stream(0, "noise", i)) for i in range(50)]
    draws = torch.cat([update.rows[0] - center for update in sent])
    theirs = (_opacus(mlp, batch, 0.7) - center).numpy()
    assert _noise_energy(theirs, std) > 1e-3
    assert _noise_energy(draws.numpy(), std) > 1e-3
    for wrong in (0.9, 1.1):
        assert _noise_energy(draws.numpy(), wrong * std) < 1e-9
    assert stats.kstest(draws.numpy(), stats.norm(0, std).cdf).pvalue > 1e-3
    assert isinstance(sent[0].law, Gaussian)
    assert math.isclose(sent[0].law.covariance, std**2)


def test_one_example_moves_the_sum_by_at_most_the_bound(task, batch):
    clipped = ClipExamples(CLIP).imitate(
        example_gradients(task, 30 * batch.inputs - 15, batch.labels)
    )
    total = clipped.sum(0)
    for i in range(batch.size):
        others = torch.cat([clipped[:i], clipped[i + 1 :]])
        assert float((total - others.sum(0)).norm()) <= CLIP * (1 + 1e-12)
    assert float(clipped.norm(dim=1).max()) == pytest.approx(CLIP)  # the bound is reached


def test_the_bound_follows_the_mean(task, batch):
    plain = example_gradients(task, 30 * batch.inputs - 15, batch.labels)
    update = Update(plain, Unit.EXAMPLE, (1,) * batch.size)
    without = plain.clone()
    without[plain.norm(dim=1).argmax()] = (
        0  # the batch size is public: a removed example counts as zero
    )
    links = chain(ClipExamples(CLIP), Mean())
    with_all, _ = links.transform(update, None, None, stream(0))
    moved = float((with_all.rows - links.imitate(without)).norm())
    assert with_all.bound == pytest.approx(CLIP / batch.size)
    assert moved <= with_all.bound * (1 + 1e-12)
    assert moved == pytest.approx(with_all.bound)


def test_secure_aggregation_adds_the_clients_noise(task, batch):
    parts = [Batch(batch.inputs[i : i + 2], batch.labels[i : i + 2]) for i in (0, 2, 4)]
    defense = chain(DpSgd(CLIP, 0.7), SecureAggregation(3))
    sources = [stream(0, "client", i) for i in range(4)]
    update = play(task, parts, defense, sources).update
    assert defense.guarantee is Guarantee.DIFFERENTIAL_PRIVACY
    assert update.law.covariance == pytest.approx(3 * (0.7 * CLIP / 2) ** 2)
    plain = [example_gradients(task, p.inputs, p.labels) for p in parts]
    by_hand = sum(
        (g * (CLIP / g.norm(dim=1, keepdim=True)).clamp_max(1)).mean(0, keepdim=True) for g in plain
    )
    alone, together = defense.sides
    guess = together.imitate(torch.cat([alone.imitate(p) for p in plain]))
    torch.testing.assert_close(guess, by_hand)
