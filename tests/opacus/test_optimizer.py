"""One step of each optimizer against Opacus' own, the library's defenses, and by hand."""

import warnings

import pytest
import torch
from opacus.grad_sample import GradSampleModule, prepare_module
from opacus.optimizers import DPOptimizer
from opacus.optimizers import optimizer as theirs
from scipy import stats
from torch import nn

import leakbound.random
from leakbound.client import example_gradients
from leakbound.covariance import Structured
from leakbound.defenses import DpSgd, WhitenedDpSgd
from leakbound.defenses.whitening import Whiten
from leakbound.opacus import (
    PublicRoot,
    SecureDPOptimizer,
    SecureGhostOptimizer,
    WhitenedDPOptimizer,
)
from leakbound.opacus import optimizer as ours
from leakbound.opacus.optimizer import restricted
from leakbound.protocol import resolve, step
from leakbound.random import normal, stream
from leakbound.types import Batch, NotApplicable

from .conftest import net

close = torch.testing.assert_close
CLIP, SIGMA = 1.3, 0.9
KINDS = {
    "utility": {"rule": "utility"},
    "energy": {"rule": "energy"},
    "layers": {"correlation": "layers"},
    "low_rank": {"correlation": "low_rank", "rank": 4},
}


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


def whitened(model, public, examples, **rule):
    shape = PublicRoot.of(model, public, Whiten(**rule), examples=examples)
    return lambda inner, **more: WhitenedDPOptimizer(inner, shape=shape, **more)


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


class _Isotropic(PublicRoot):
    def now(self, trained):
        return Structured.of(torch.ones(149, dtype=torch.float64))


def isotropic(model, public):
    made = PublicRoot.of(model, public, examples=6)
    shape = _Isotropic(made.settings, made.task, made.examples, made.parameters)
    return lambda inner, **more: WhitenedDPOptimizer(inner, shape=shape, **more)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("kind", ["secure", "whitened"])
@pytest.mark.parametrize("parts", [1, 3], ids=["whole", "parts"])
def test_isotropic_noise_gives_the_update_of_opacus(dtype, kind, parts, public, batch, same_stream):
    data = Batch(batch.inputs.to(dtype), batch.labels)
    same_stream(5)
    wanted = one_step(DPOptimizer, net(dtype), data, parts=parts)
    model = net(dtype)
    shown = Batch(public.inputs.to(dtype), public.labels)
    make = SecureDPOptimizer if kind == "secure" else isotropic(model, shown)
    found = one_step(make, model, data, parts=parts, generator=stream(5))
    close(found, wanted, rtol=1e-12 if dtype == torch.float64 else 2e-6, atol=1e-7)
    other = one_step(SecureDPOptimizer, net(dtype), data, parts=parts, generator=stream(6))
    assert float((other - wanted).norm()) > 0.1


def test_float64_agrees_with_opacus_to_the_last_bits(public, batch, same_stream):
    same_stream(5)
    wanted = one_step(DPOptimizer, net(), batch)
    model = net()
    found = one_step(isotropic(model, public), model, batch, generator=stream(5))
    close(found, wanted, rtol=1e-12, atol=1e-15)


def by_hand(rows, root, factor):
    """S · sum of the clipped S⁻¹ g, example by example, with the dense root."""
    total = torch.zeros_like(rows[0])
    for row in rows:
        white = torch.linalg.solve(root, row)
        total += white * factor(float(white.norm()))
    return root @ total


@pytest.mark.parametrize("rule", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("parts", [1, 2], ids=["whole", "parts"])
def test_a_whitened_step_is_the_formula_by_hand(rule, parts, model, task, public, batch):
    shape = PublicRoot.of(model, public, Whiten(**rule), examples=batch.size)
    root = shape.now([True] * 6).color(torch.eye(149, dtype=torch.float64)).T
    rows = example_gradients(task, batch.inputs, batch.labels)
    norms = torch.linalg.solve(root, rows.T).norm(dim=0)
    clip = float(norms.median())  # binds for some, not for all
    make = whitened(model, public, batch.size, **rule)
    found = one_step(make, model, batch, parts=parts, max_grad_norm=clip, generator=stream(3))
    noise = SIGMA * clip * normal((149,), stream(3), like=rows)
    clipped = by_hand(rows, root, lambda norm: min(1.0, clip / (norm + 1e-6)))
    close(found, (clipped + root @ noise) / batch.size, rtol=1e-9, atol=1e-11)
    free = by_hand(rows, root, lambda norm: 1.0)
    assert not torch.allclose(found, (free + root @ noise) / batch.size, rtol=1e-3)


@pytest.mark.parametrize("rule", [None, *KINDS.values()], ids=["plain", *KINDS])
def test_the_library_and_opacus_send_the_same(rule, model, task, public, batch, monkeypatch):
    """`protocol.step` with dp_sgd or whitened_dp_sgd against the optimizer; same stream, float64.

    They differ by Opacus' 1e-6 in the clip factor alone: without it the updates are equal.
    """
    chain = DpSgd(CLIP, SIGMA) if rule is None else WhitenedDpSgd(CLIP, SIGMA, **rule)
    ready = resolve(chain, task, batch.size)
    wanted = step(task, batch, ready, stream(9))[0].rows[0]
    kind = isotropic(model, public) if rule is None else whitened(model, public, 6, **rule)
    monkeypatch.setattr(WhitenedDPOptimizer, "slack", 0.0)
    found = one_step(kind, model, batch, generator=stream(9))
    close(found, wanted, rtol=1e-10, atol=1e-13)


def test_opacus_slack_moves_an_update_by_a_millionth(model, task, public, batch):
    ready = resolve(WhitenedDpSgd(0.1, SIGMA), task, batch.size)
    wanted = step(task, batch, ready, stream(9))[0].rows[0]
    make = whitened(model, public, 6)
    found = one_step(make, model, batch, max_grad_norm=0.1, generator=stream(9))
    gap = float((found - wanted).norm() / wanted.norm())
    assert 1e-9 < gap < 1e-5


@pytest.mark.parametrize("rule", [KINDS["energy"], KINDS["layers"]], ids=["energy", "layers"])
def test_library_and_opacus_releases_have_one_law(rule, task, public, batch):
    """500 releases through Opacus: mean and covariance are those that the library declares."""
    ready = resolve(WhitenedDpSgd(CLIP, SIGMA, **rule), task, batch.size)
    update = step(task, batch, ready, stream(0))[0]
    mean = ready.imitate(example_gradients(task, batch.inputs, batch.labels))[0]
    law = update.law.covariance
    draws = []
    model = net()
    module = GradSampleModule(model)
    shape = PublicRoot.of(net(), public, Whiten(**rule, refresh=10**6), examples=6)
    shape = PublicRoot(shape.settings, shape.task, 6, tuple(model.parameters()))
    optimizer = WhitenedDPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), shape=shape, **settings(batch)
    )
    backward(module, batch)
    samples = [p.grad_sample for p in model.parameters()]  # the same in every step: the rate is 0
    for _ in range(500):
        optimizer.zero_grad()
        for p, sample in zip(model.parameters(), samples, strict=True):
            p.grad_sample = sample.clone()
        optimizer.step()
        draws.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    white = law.whiten(torch.stack(draws) - mean)  # standard normal under the declared law
    assert stats.kstest(white.flatten().numpy(), "norm").pvalue > 1e-6
    total = float(white.square().sum())
    assert stats.chi2(white.numel()).sf(total) > 1e-6
    assert stats.chi2(white.numel()).cdf(total) > 1e-6
    flat_law = (torch.stack(draws) - mean) / float(law.diagonal.mean().sqrt())
    assert stats.kstest(flat_law.flatten().numpy(), "norm").pvalue < 1e-6  # isotropic: refused
    assert stats.chi2(white.numel()).sf(total * 1.05**2) < 1e-6  # and 5 % more noise
    corr = torch.corrcoef(white.T).flatten()
    corr = corr[~torch.eye(149, dtype=torch.bool).flatten()]
    assert float(corr.abs().max()) < 6.5 / 500**0.5


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_the_modes_of_opacus_give_one_update(mode, public, batch):
    updates = []
    for name in ("hooks", mode):
        model = net()
        updates.append(
            one_step(whitened(model, public, 6), model, batch, mode=name, generator=stream(1))
        )
    close(*updates)


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


@pytest.mark.parametrize("kind", ["secure", "whitened"])
def test_an_empty_poisson_batch_sends_noise_alone(kind, model, public, batch):
    make = SecureDPOptimizer if kind == "secure" else whitened(model, public, 6)
    nothing = Batch.__new__(Batch)
    object.__setattr__(nothing, "inputs", batch.inputs[:0])
    object.__setattr__(nothing, "labels", batch.labels[:0])
    before = flat(model)
    module = GradSampleModule(model)
    optimizer = make(sgd(model), **settings(batch, generator=stream(4)))
    optimizer.zero_grad()
    backward(module, nothing)
    optimizer.step()
    noise = SIGMA * CLIP / batch.size * normal((149,), stream(4), like=batch.inputs)
    wanted = noise if kind == "secure" else optimizer.root.color(noise[None])[0]
    close(sent(model, before), wanted)


@pytest.mark.parametrize("rule", KINDS.values(), ids=KINDS)
def test_groups_and_frozen_parameters(rule, public, batch):
    """Two groups in another order than the model's, one tensor frozen."""
    model = net()
    model[3].weight.requires_grad_(False)
    held = model[3].weight.clone()
    before = flat(model)
    module = GradSampleModule(model)
    late, early = list(model[5].parameters()), [model[1].weight, model[1].bias, model[3].bias]
    inner = torch.optim.SGD([{"params": late}, {"params": early, "lr": 0.5}], lr=1.0)
    shape = PublicRoot.of(net(), public, Whiten(**rule), examples=6)
    shape = PublicRoot(shape.settings, shape.task, 6, tuple(model.parameters()))
    optimizer = WhitenedDPOptimizer(inner, shape=shape, **settings(batch, generator=stream(8)))
    optimizer.zero_grad()
    backward(module, batch)
    grads = [p.grad_sample.flatten(1) for p in model.parameters() if p.requires_grad]
    rows = torch.cat(grads, 1)
    whole = shape.now([True] * 6).dense()
    optimizer.step()
    assert torch.equal(model[3].weight, held)
    spans = [(0, 91), (126, 149)]
    index = torch.cat([torch.arange(*span) for span in spans])
    part = whole[index][:, index]
    close(optimizer.root.dense(), part / part.diagonal().mean(), rtol=1e-6, atol=1e-9)
    root = optimizer.root.color(torch.eye(len(index), dtype=torch.float64)).T
    clipped = by_hand(rows, root, lambda norm: min(1.0, CLIP / (norm + 1e-6)))
    noise = SIGMA * CLIP * normal((len(index),), stream(8), like=rows)
    wanted = (clipped + root @ noise) / batch.size
    rates = torch.cat([torch.full((96,), 0.5), torch.full((18,), 1.0)]).double()
    close(sent(model, before)[index], rates * wanted, rtol=1e-9, atol=1e-12)


def test_a_restricted_covariance_is_the_block_of_the_whole():
    factor = torch.randn(5, 2, generator=stream(0), dtype=torch.float64)
    whole = Structured.of(torch.arange(1.0, 6.0).double(), [(0, 5, factor)])
    part = restricted(whole, [(1, 3), (4, 5)])
    dense = whole.dense()[[1, 2, 4]][:, [1, 2, 4]]
    close(part.dense(), dense / dense.diagonal().mean())
    assert restricted(whole, [(0, 5)]) is whole
    with pytest.raises(ValueError, match="no parameter is trained"):
        restricted(whole, [])


def test_an_example_that_is_not_finite_adds_nothing(public, batch):
    model = net()
    before = flat(model)
    optimizer = whitened(model, public, 6)(sgd(model), **settings(batch, generator=stream(4)))
    module = GradSampleModule(model)
    optimizer.zero_grad()
    backward(module, batch)
    for p in model.parameters():
        p.grad_sample[2] = float("nan")
        p.grad_sample[4] = float("inf")
    rest = torch.cat([p.grad_sample.flatten(1) for p in model.parameters()], 1)[[0, 1, 3, 5]]
    root = optimizer.root
    optimizer.step()
    dense = root.color(torch.eye(149, dtype=torch.float64)).T
    clipped = by_hand(rest, dense, lambda norm: min(1.0, CLIP / (norm + 1e-6)))
    noise = SIGMA * CLIP * normal((149,), stream(4), like=rest)
    close(sent(model, before), (clipped + dense @ noise) / 6, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("parts", [1, 2], ids=["whole", "parts"])
def test_isotropic_noise_leaves_out_what_is_not_finite(parts, batch):
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
    wanted = by_hand(rows[[0, 1, 2, 4, 5]], torch.eye(149).double(), lambda n: min(1, CLIP / n))
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


def test_chunks_change_nothing(public, batch, monkeypatch):
    found = []
    for chunk in (2**24, 149 * 2, 1):
        monkeypatch.setattr(ours, "CHUNK", chunk)
        model = net()
        found.append(one_step(whitened(model, public, 6), model, batch, generator=stream(1)))
    close(found[1], found[0])
    close(found[2], found[0])


def test_the_shape_is_refreshed_between_batches_and_never_inside_one(model, public, batch):
    optimizer = whitened(model, public, 6, refresh=2)(sgd(model), **settings(batch))
    module = GradSampleModule(model)
    roots = []
    for at in range(8):  # four batches of two parts
        optimizer.signal_skip_step(do_skip=at % 2 == 0)
        optimizer.zero_grad()
        backward(module, batch)
        optimizer.step()
        roots.append(optimizer.root)
    assert roots[0] is roots[1] is roots[2] is roots[3]
    assert roots[4] is roots[5] is roots[6] is roots[7]
    assert not roots[4].equals(roots[3])
    moved = PublicRoot(
        optimizer.shape.settings, optimizer.shape.task, 6, tuple(model.parameters())
    ).now([True] * 6)
    assert not moved.equals(roots[4])  # the weights have moved on since


def test_noise_is_fresh_unless_a_generator_was_asked_for(public, batch):
    updates, shown = [], []
    for generator in (None, None, stream(0), stream(0)):
        model = net()
        make = whitened(model, public, 6)
        updates.append(one_step(make, model, batch, generator=generator))
        shown.append(repr(make(sgd(model), **settings(batch, generator=generator))))
    assert not torch.equal(updates[0], updates[1])
    assert torch.equal(updates[2], updates[3])
    assert ["EXPERIMENT ONLY" in text for text in shown] == [False, False, True, True]


def test_secure_noise_lies_on_a_grid_and_hides_its_sum(public, batch, monkeypatch):
    """The real path on a planted source: the seeded numbers, put on the grid, then colored."""
    plain = one_step(whitened(m := net(), public, 6), m, batch, generator=stream(3))
    monkeypatch.setattr(ours, "secure", lambda: stream(3))
    model = net()
    make = whitened(model, public, 6)
    optimizer = make(sgd(model), **settings(batch))
    released = one_step(make, model, batch)
    cell = 2.0**-24  # SIGMA * CLIP = 1.17
    white = optimizer.root.whiten(6 * released[None])[0] / cell
    close(white, white.round(), rtol=0, atol=1e-4)
    gap = optimizer.root.whiten(6 * (released - plain)[None])[0]
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
    monkeypatch.setattr(leakbound.random, "GRID", -300)  # finer than any number: no grid
    assert float(impossible(release(0.3), 1.3).double().mean()) > 0.8
    assert not bool(impossible(release(0.0), 1.3).any())


def test_global_seeds_do_not_decide_the_noise(batch):
    updates = []
    for _ in range(2):
        torch.manual_seed(0)
        updates.append(one_step(SecureDPOptimizer, net(), batch))
    assert not torch.equal(*updates)


def test_what_cannot_be_true_is_refused(model, public, batch):
    with pytest.raises(ValueError, match="secure_mode is True"):
        SecureDPOptimizer(sgd(model), **settings(batch, secure_mode=True))
    with pytest.raises(TypeError):
        SecureDPOptimizer(sgd(model), **settings(batch, noise_generator=None))
    shape = PublicRoot.of(net(), public, examples=6)
    with pytest.raises(NotApplicable, match="for which the shape was not made"):
        WhitenedDPOptimizer(sgd(model), shape=shape, **settings(batch))
    optimizer = whitened(model, public, 6)(sgd(model), **settings(batch))
    module = GradSampleModule(model)
    with pytest.raises(NotApplicable, match="plain module"):
        PublicRoot.of(module, public, examples=6)
    backward(module, batch)
    optimizer.step()
    with pytest.raises(ValueError, match="zero_grad"):  # a gradient is not used twice
        optimizer.step()
    optimizer.zero_grad()
    backward(module, batch)
    model[1].weight.requires_grad_(False)
    with pytest.raises(NotApplicable, match="has changed"):
        optimizer.step()
    with warnings.catch_warnings(), pytest.raises(NotApplicable, match="no public data"):
        PublicRoot.of(net(), None, examples=6).now([True] * 6)


@pytest.mark.parametrize("rule", KINDS.values(), ids=KINDS)
def test_what_is_frozen_from_the_start_is_a_constant(rule, public, batch):
    """The shape is that of the trained parameters; unfreezing later is refused."""
    model = net()
    model[1].requires_grad_(False)
    module = GradSampleModule(model)
    shape = PublicRoot.of(net_frozen(), public, Whiten(**rule), examples=6)
    assert len(shape.parameters) == 4
    shape = PublicRoot(shape.settings, shape.task, 6, tuple(model.parameters())[2:])
    optimizer = WhitenedDPOptimizer(sgd(model), shape=shape, **settings(batch, generator=stream(8)))
    size = sum(p.numel() for p in shape.parameters)
    assert optimizer.root.dense().shape == (size, size)
    before = flat(model)
    optimizer.zero_grad()
    backward(module, batch)
    optimizer.step()
    moved = sent(model, before)
    assert not bool(moved[:-size].any())
    assert bool((moved[-size:] != 0).all())
    model[1].requires_grad_(True)
    with pytest.raises(NotApplicable, match="for which the shape was not made"):
        WhitenedDPOptimizer(sgd(model), shape=shape, **settings(batch))


def net_frozen():
    model = net()
    model[1].requires_grad_(False)
    return model
