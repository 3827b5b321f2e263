"""One step of each optimizer against Opacus' own, the library's defenses, and by hand."""

import pytest
import torch
from opacus.grad_sample import GradSampleModule, prepare_module
from opacus.optimizers import DPOptimizer
from opacus.optimizers import optimizer as theirs
from scipy import stats
from torch import nn

import leakbound.randomness
from leakbound.client import example_gradients
from leakbound.core import Batch, NotApplicable
from leakbound.defenses import DpSgd
from leakbound.opacus import SecureDPOptimizer, SecureGhostOptimizer
from leakbound.opacus import optimizer as ours
from leakbound.protocol import resolve, step
from leakbound.randomness import normal, stream

from .conftest import net

close = torch.testing.assert_close
CLIP, SIGMA = 1.3, 0.9


def settings(batch, **more):
    given = {"noise_multiplier": SIGMA, "max_grad_norm": CLIP, "expected_batch_size": batch.size}
    return {**given, **more}


def backward(module, batch):
    nn.functional.cross_entropy(module(batch.inputs), batch.labels).backward()


def sgd(model, **more):
    return torch.optim.SGD(model.parameters(), lr=1.0, **more)


def sent(model, before):
    """What one SGD step of rate 1 took away: the released gradient."""
    return before - torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def one_step(kind, model, batch, mode="hooks", parts=1, **more):
    """The released gradient (P,) of one logical batch, given in `parts` physical ones."""
    before = flat(model)
    module = prepare_module(model, grad_sample_mode=mode)
    optimizer = kind(sgd(model), **settings(batch, **more))
    for at, inputs in enumerate(batch.inputs.chunk(parts)):
        optimizer.signal_skip_step(do_skip=at + 1 < parts)
        optimizer.zero_grad()
        start = at * len(inputs)
        backward(module, Batch(inputs, batch.labels[start : start + len(inputs)]))
        # Opacus takes a loss that is a mean over the physical batch
        optimizer.step()
    module.remove_hooks() if hasattr(module, "remove_hooks") else None
    return sent(model, before)


@pytest.fixture
def same_stream(monkeypatch):
    """Opacus' optimizer draws what the library draws: one flat vector, handed out in order."""

    def plant(seed):
        drawn = normal((1, 149), stream(seed), like=torch.zeros((), dtype=torch.float64))[0]
        at = [0]

        def noise(std, reference, generator=None, secure_mode=False):
            part = drawn[at[0] : at[0] + reference.numel()]
            at[0] += reference.numel()
            return std * part.view(reference.shape).to(reference)

        monkeypatch.setattr(theirs, "_generate_noise", noise)

    return plant


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("parts", [1, 3], ids=["whole", "parts"])
def test_the_update_is_that_of_opacus(dtype, parts, batch, same_stream):
    data = Batch(batch.inputs.to(dtype), batch.labels)
    same_stream(5)
    wanted = one_step(DPOptimizer, net(dtype), data, parts=parts)
    found = one_step(SecureDPOptimizer, net(dtype), data, parts=parts, generator=stream(5))
    close(found, wanted, rtol=1e-12 if dtype == torch.float64 else 2e-6, atol=1e-7)
    other = one_step(SecureDPOptimizer, net(dtype), data, parts=parts, generator=stream(6))
    assert float((other - wanted).norm()) > 0.1


def test_float64_agrees_with_opacus_to_the_last_bits(batch, same_stream):
    same_stream(5)
    wanted = one_step(DPOptimizer, net(), batch)
    found = one_step(SecureDPOptimizer, net(), batch, generator=stream(5))
    close(found, wanted, rtol=1e-12, atol=1e-15)


def by_hand(rows, factor):
    """The sum of the clipped gradients, example by example."""
    return sum(row * factor(float(row.norm())) for row in rows)


@pytest.mark.parametrize("parts", [1, 2], ids=["whole", "parts"])
def test_a_step_is_the_formula_by_hand(parts, model, task, batch):
    rows = example_gradients(task, batch.inputs, batch.labels)
    clip = float(rows.norm(dim=1).median())  # binds for some, not for all
    more = {"parts": parts, "max_grad_norm": clip, "generator": stream(3)}
    found = one_step(SecureDPOptimizer, model, batch, **more)
    noise = SIGMA * clip * normal((149,), stream(3), like=rows)
    clipped = by_hand(rows, lambda norm: min(1.0, clip / (norm + 1e-6)))
    close(found, (clipped + noise) / batch.size, rtol=1e-9, atol=1e-11)
    free = by_hand(rows, lambda norm: 1.0)
    assert not torch.allclose(found, (free + noise) / batch.size, rtol=1e-3)


def test_the_library_and_opacus_send_the_same(model, task, batch, monkeypatch):
    """`protocol.step` with dp_sgd against the optimizer; same stream, float64.

    They differ by Opacus' 1e-6 in the clip factor alone: without it the updates are equal.
    """
    ready = resolve(DpSgd(CLIP, SIGMA), task, batch.size)
    wanted = step(task, batch, ready, stream(9))[0].rows[0]
    monkeypatch.setattr(SecureDPOptimizer, "slack", 0.0)
    found = one_step(SecureDPOptimizer, model, batch, generator=stream(9))
    close(found, wanted, rtol=1e-10, atol=1e-13)


def test_opacus_slack_moves_an_update_by_a_millionth(model, task, batch):
    ready = resolve(DpSgd(0.1, SIGMA), task, batch.size)
    wanted = step(task, batch, ready, stream(9))[0].rows[0]
    found = one_step(SecureDPOptimizer, model, batch, max_grad_norm=0.1, generator=stream(9))
    gap = float((found - wanted).norm() / wanted.norm())
    assert 1e-9 < gap < 1e-5


def test_library_and_opacus_releases_have_one_law(task, batch):
    """500 releases through Opacus: mean and variance are those that the library declares."""
    ready = resolve(DpSgd(CLIP, SIGMA), task, batch.size)
    update = step(task, batch, ready, stream(0))[0]
    mean = ready.imitate(example_gradients(task, batch.inputs, batch.labels))[0]
    draws = []
    model = net()
    module = GradSampleModule(model)
    optimizer = SecureDPOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), **settings(batch))
    backward(module, batch)
    samples = [p.grad_sample for p in model.parameters()]  # the same in every step: the rate is 0
    for _ in range(500):
        optimizer.zero_grad()
        for p, sample in zip(model.parameters(), samples, strict=True):
            p.grad_sample = sample.clone()
        optimizer.step()
        draws.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    white = (torch.stack(draws) - mean) / update.law.variance**0.5
    assert stats.kstest(white.flatten().numpy(), "norm").pvalue > 1e-6
    total = float(white.square().sum())
    assert stats.chi2(white.numel()).sf(total) > 1e-6
    assert stats.chi2(white.numel()).cdf(total) > 1e-6
    assert stats.chi2(white.numel()).sf(total * 1.05**2) < 1e-6  # 5 % more noise is refused
    corr = torch.corrcoef(white.T).flatten()
    corr = corr[~torch.eye(149, dtype=torch.bool).flatten()]
    assert float(corr.abs().max()) < 6.5 / 500**0.5


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_the_modes_of_opacus_give_one_update(mode, batch):
    close(
        *(
            one_step(SecureDPOptimizer, net(), batch, mode=name, generator=stream(1))
            for name in ("hooks", mode)
        )
    )


def test_ghost_clipping_with_secure_noise_is_plain_dp_sgd(batch):
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    wanted = one_step(SecureDPOptimizer, net(), batch, generator=stream(2))
    model = net()
    before = flat(model)
    module = prepare_module(model, grad_sample_mode="ghost", max_grad_norm=CLIP)
    optimizer = SecureGhostOptimizer(sgd(model), **settings(batch, generator=stream(2)))
    loss = DPLossFastGradientClipping(module, optimizer, nn.CrossEntropyLoss(), "mean")
    optimizer.zero_grad()
    loss(module(batch.inputs), batch.labels).backward()
    optimizer.step()
    close(sent(model, before), wanted, rtol=1e-6, atol=1e-8)


def test_an_empty_poisson_batch_sends_noise_alone(model, batch):
    nothing = Batch.__new__(Batch)
    object.__setattr__(nothing, "inputs", batch.inputs[:0])
    object.__setattr__(nothing, "labels", batch.labels[:0])
    before = flat(model)
    module = GradSampleModule(model)
    optimizer = SecureDPOptimizer(sgd(model), **settings(batch, generator=stream(4)))
    optimizer.zero_grad()
    backward(module, nothing)
    optimizer.step()
    noise = SIGMA * CLIP / batch.size * normal((149,), stream(4), like=batch.inputs)
    close(sent(model, before), noise)


def test_groups_and_frozen_parameters(batch):
    """Two groups in another order than the model's, one tensor frozen."""
    model = net()
    model[3].weight.requires_grad_(False)
    held, before = model[3].weight.clone(), flat(model)
    module = GradSampleModule(model)
    late, early = list(model[5].parameters()), [model[1].weight, model[1].bias, model[3].bias]
    inner = torch.optim.SGD([{"params": late}, {"params": early, "lr": 0.5}], lr=1.0)
    optimizer = SecureDPOptimizer(inner, **settings(batch, generator=stream(8)))
    optimizer.zero_grad()
    backward(module, batch)
    rows = torch.cat([p.grad_sample.flatten(1) for p in (*late, *early)], 1)
    optimizer.step()
    assert torch.equal(model[3].weight, held)
    clipped = by_hand(rows, lambda norm: min(1.0, CLIP / (norm + 1e-6)))
    noise = SIGMA * CLIP * normal((114,), stream(8), like=rows)
    wanted = (clipped + noise) / batch.size
    wanted = torch.cat([0.5 * wanted[18:], wanted[:18]])
    index = torch.cat([torch.arange(0, 91), torch.arange(126, 149)])
    close(sent(model, before)[index], wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("parts", [1, 2], ids=["whole", "parts"])
def test_what_is_not_finite_is_left_out(parts, batch):
    """Else one example turns the release into NaN, and no noise hides that it was there."""
    model, bad = net(), batch.inputs.clone()
    bad[2], bad[4] = float("nan"), float("inf")
    found = one_step(
        SecureDPOptimizer, model, Batch(bad, batch.labels), parts=parts, generator=stream(4)
    )
    rest = [0, 1, 3, 5]
    kept = Batch(batch.inputs[rest], batch.labels[rest])
    wanted = one_step(
        SecureDPOptimizer, net(), kept, parts=parts, generator=stream(4), expected_batch_size=6
    )
    close(found, wanted, rtol=1e-9, atol=1e-12)


def test_one_weight_that_is_not_finite_drops_the_whole_example(batch):
    """All of its other parameters, too: each of them is finite and tells of the rest."""
    model = net()
    module = GradSampleModule(model)
    optimizer = SecureDPOptimizer(sgd(model), **settings(batch))
    backward(module, batch)
    model[5].bias.grad_sample[3, 0] = float("inf")
    optimizer.clip_and_accumulate()
    found = torch.cat([p.summed_grad.reshape(-1) for p in model.parameters()])
    rows = torch.cat([p.grad_sample.flatten(1) for p in model.parameters()], 1)
    wanted = by_hand(rows[[0, 1, 2, 4, 5]], lambda n: min(1, CLIP / n))
    close(found, wanted, rtol=1e-5, atol=1e-7)


def test_ghost_clipping_refuses_what_it_cannot_leave_out(batch):
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model = net()
    before = flat(model)
    module = prepare_module(model, grad_sample_mode="ghost", max_grad_norm=CLIP)
    optimizer = SecureGhostOptimizer(sgd(model), **settings(batch))
    loss = DPLossFastGradientClipping(module, optimizer, nn.CrossEntropyLoss(), "mean")
    inputs = batch.inputs.clone()
    inputs[2] = float("nan")
    loss(module(inputs), batch.labels).backward()
    with pytest.raises(NotApplicable, match=r"not finite.*'hooks'"):
        optimizer.step()
    assert torch.equal(flat(model), before)


def test_noise_is_fresh_unless_a_generator_was_asked_for(batch):
    updates, shown = [], []
    for generator in (None, None, stream(0), stream(0)):
        updates.append(one_step(SecureDPOptimizer, net(), batch, generator=generator))
        shown.append(repr(SecureDPOptimizer(sgd(net()), **settings(batch, generator=generator))))
    assert not torch.equal(updates[0], updates[1])
    assert torch.equal(updates[2], updates[3])
    assert ["EXPERIMENT ONLY" in text for text in shown] == [False, False, True, True]


def test_secure_noise_lies_on_a_grid_and_hides_its_sum(batch, monkeypatch):
    """The real path on a planted source: the seeded numbers, put on the grid."""
    plain = one_step(SecureDPOptimizer, net(), batch, generator=stream(3))
    monkeypatch.setattr(ours, "secure", lambda: stream(3))
    released = one_step(SecureDPOptimizer, net(), batch)
    cell = 2.0**-24  # SIGMA * CLIP = 1.17
    close(6 * released / cell, (6 * released / cell).round(), rtol=0, atol=1e-4)
    gap = 6 * (released - plain)
    assert 0.2 * cell < float(gap.abs().max()) < 0.501 * cell


def impossible(released, std):
    """Which numbers no draw of `secure()` gives, were the sum 0: the attack on float64."""
    uniform = torch.floor(torch.special.ndtr(released / std) * 2.0**52)
    missing = torch.ones(len(released), dtype=torch.bool)
    for offset in range(-12, 13):
        place = (uniform + offset).clamp(0, 2**52 - 1)
        missing &= torch.special.ndtri((place + 0.5) / 2.0**52) * std != released
    return missing


def test_the_grid_is_what_hides_a_float64_sum(monkeypatch):
    def release(value):
        weights = nn.Parameter(torch.zeros(2000, dtype=torch.float64))
        inner = torch.optim.SGD([weights], lr=1.0)
        level = {"noise_multiplier": 1.3, "max_grad_norm": 1.0, "expected_batch_size": 1}
        optimizer = SecureDPOptimizer(inner, **level)
        weights.summed_grad = torch.full((2000,), value, dtype=torch.float64)
        optimizer.add_noise()
        return weights.grad

    sent = release(0.3)
    assert torch.equal(sent * 2**24, (sent * 2**24).round())
    monkeypatch.setattr(leakbound.randomness, "GRID", -300)  # finer than any number: no grid
    assert float(impossible(release(0.3), 1.3).double().mean()) > 0.8
    assert not bool(impossible(release(0.0), 1.3).any())


def test_global_seeds_do_not_decide_the_noise(batch):
    updates = []
    for _ in range(2):
        torch.manual_seed(0)
        updates.append(one_step(SecureDPOptimizer, net(), batch))
    assert not torch.equal(*updates)


def test_what_cannot_be_true_is_refused(model, batch):
    with pytest.raises(ValueError, match="secure_mode is True"):
        SecureDPOptimizer(sgd(model), **settings(batch, secure_mode=True))
    with pytest.raises(TypeError):
        SecureDPOptimizer(sgd(model), **settings(batch, noise_generator=None))
    optimizer = SecureDPOptimizer(sgd(model), **settings(batch))
    backward(GradSampleModule(model), batch)
    optimizer.step()
    with pytest.raises(ValueError, match="zero_grad"):  # a gradient is not used twice
        optimizer.step()
