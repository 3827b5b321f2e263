"""Optimal noise end to end: levels, laws, clamping, rounding, what is seen and what is refused."""

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import nn
from torch.func import functional_call, grad, jacrev

from leakbound.bounds import GaussianPrior, tight_trace_bound
from leakbound.core import (
    Batch,
    ClientContext,
    Exact,
    Gaussian,
    Guarantee,
    NotApplicable,
    Task,
    Unit,
    Unknown,
    Update,
)
from leakbound.defenses import (
    GaussianNoise,
    LocalOptimalNoise,
    OptimalDpSgd,
    OptimalNoise,
    OptimalPruning,
    chain,
)
from leakbound.defenses.optimal import rounded_to
from leakbound.defenses.public import expected
from leakbound.protocol import play, resolve, send, step
from leakbound.randomness import stream, uniform

close = torch.testing.assert_close
RULES = ("utility", "energy", "algorithm_1")


def _gradient(task, x, y):
    def loss(flat):
        return task.loss(functional_call(task.model, task.unflatten(flat), (x,)), y)

    return grad(loss)(task.parameters)


def _exact(task, batch):
    """(s, g): squared norms of the rows of the full Jacobian, and the gradient."""
    rows = jacrev(lambda x: _gradient(task, x, batch.labels))(batch.inputs).flatten(1)
    return rows.square().sum(1), _gradient(task, batch.inputs, batch.labels)


@pytest.fixture
def public(task):
    draw = uniform((9, 1, 3, 4), stream(0, "public"), like=task.parameters)
    return replace(task, public=Batch(draw, torch.arange(9) % 3))


def _variance(defense, task, size=6):
    return defense.resolve(task, size).covariance


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_the_public_levels_are_met(public, rule, layers):
    settings = {"rule": rule, "layers": layers}
    rms = _variance(OptimalNoise(noise_std=0.03, **settings), public)
    assert float(rms.mean().sqrt()) == pytest.approx(0.03, rel=1e-12)
    equal = _variance(OptimalNoise(utility_std=0.03, **settings), public)
    each = torch.stack(
        [_gradient(public, x[None], y[None]) for x, y in zip(*_pair(public), strict=True)]
    )
    pairs = (each.sum(0) ** 2 - (each**2).sum(0)) / (9 * 8)
    g2 = (each**2).mean(0) / 6 + pairs.clamp_min(0) * 5 / 6
    assert float((g2 * equal).sum()) == pytest.approx(0.03**2 * float(g2.sum()), rel=1e-9)
    assert float((g2 * rms).sum()) != pytest.approx(0.03**2 * float(g2.sum()), rel=1e-3)
    close(rms / rms.mean(), equal / equal.mean())  # one shape, two scales


def _pair(task):
    return task.public.inputs, task.public.labels


def test_the_error_floor_is_met(public):
    pixels = public.public.inputs.flatten(1)
    spread = float(((pixels - pixels.mean(0)) ** 2).mean())
    variance = _variance(OptimalNoise(error_floor=0.6 * spread), public, size=2)
    s = expected(public, 2, 64, None).s
    prior = GaussianPrior.isotropic([0.0] * 24, spread)
    found = tight_trace_bound(float((s / variance).sum()), prior).value
    assert found == pytest.approx(0.6 * spread, rel=1e-9)
    with pytest.raises(ValueError, match=f"above 0 and below {spread:.4g}"):
        OptimalNoise(error_floor=1.01 * spread).resolve(public, 2)


def test_the_noise_that_is_added_is_the_noise_that_is_declared(public):
    fixed = OptimalNoise(noise_std=0.2).resolve(public, 6)
    rows = torch.zeros(3000, len(public.parameters), dtype=torch.float64)
    sent, _ = fixed.transform(Update(rows, Unit.CLIENT, (6,) * 3000), None, None, stream(1))
    assert isinstance(sent.law, Gaussian)
    assert not sent.law.private
    _check_noise(sent.rows, sent.law.variance)
    assert fixed.guarantee is OptimalNoise().guarantee is Guarantee.KNOWN_NOISE


def _check_noise(draws, variance):
    """Independent normal draws (n, P) of these variances, and not of others."""
    live = variance > 0
    assert bool((draws[:, ~live] == 0).all())
    white = (draws[:, live] / variance[live].sqrt()).numpy()
    energy = (white**2).sum(0)
    law = stats.chi2(len(draws))
    assert stats.kstest(law.cdf(energy), "uniform").pvalue > 1e-4
    assert stats.kstest(white.ravel()[:20000], "norm").pvalue > 1e-4
    assert stats.kstest(law.cdf(energy * 1.05), "uniform").pvalue < 1e-6


def _by_hand(s, g, rule, noise_std):
    """Sheet F11: q_i = ||dg_i|| / max(|g_i|, 1e-8), at most 1e6, scaled to a mean of κ²."""
    slope = g.abs().clamp(min=1e-8)
    q = {"utility": s.sqrt() / slope, "energy": s.sqrt(), "algorithm_1": s / slope}[rule]
    q = q.clamp(max=1e6)
    return noise_std**2 * q / q.mean()


@pytest.mark.parametrize("rule", RULES)
def test_local_variances_are_the_sheets_formula(task, batch, rule):
    s, g = _exact(task, batch)
    defense = LocalOptimalNoise(noise_std=0.05, rule=rule, directions=3000)
    round_ = play(task, [batch], defense, [stream(0), stream(1)])
    law = round_.update.law
    assert law.private
    assert float(law.variance.mean().sqrt()) == pytest.approx(0.05, rel=1e-9)
    off = law.variance / _by_hand(s, g, rule, 0.05)
    limit = 6 * (2 / 3000) ** 0.5 * (1 if rule == "algorithm_1" else 0.5)
    # the normalizer, a mean of correlated estimates, moves as one of them at most
    assert float((off - 1).abs().max()) < 2 * limit
    others = {r: _by_hand(s, g, r, 0.05) for r in RULES if r != rule}
    assert all(float((law.variance / v - 1).abs().max()) > 4 * limit for v in others.values())


def test_the_local_utility_level_is_that_of_the_batch(task, batch):
    _, g = _exact(task, batch)
    for rule in RULES:
        defense = LocalOptimalNoise(utility_std=0.05, rule=rule)
        variance = play(task, [batch], defense, [stream(0), stream(1)]).update.law.variance
        cost = float((g**2 * variance).sum())
        assert cost == pytest.approx(0.05**2 * float((g**2).sum()), rel=1e-9)
        if rule == "utility":  # equal-U2 noise is worth it: less information than isotropic noise
            s = _exact(task, batch)[0]
            assert float((s / variance).sum()) < 0.9 * float(s.sum()) / 0.05**2


def _many(defense, task, batch, count=3000):
    """Many draws with the variances of one batch, by the state that a client keeps."""
    update = send(task, batch, replace(defense, refresh=9), stream(0))
    context = ClientContext(task, batch)
    rows = update.rows * 0
    _, state = replace(defense, refresh=9).transform(
        Update(rows, Unit.CLIENT, (batch.size,)), None, context, stream(0)
    )
    plain = _gradient(task, batch.inputs, batch.labels).expand(count, -1)
    many = Update(plain, Unit.CLIENT, (batch.size,) * count)
    sent, _ = replace(defense, refresh=9).transform(many, state, None, stream(2))
    return sent, plain, update.law.variance


def test_the_local_noise_drawn_is_that_of_the_law(task, batch):
    sent, plain, variance = _many(LocalOptimalNoise(noise_std=0.3), task, batch)
    close(sent.law.variance, variance)
    _check_noise(sent.rows - plain, variance)


def test_one_variance_a_tensor_has_the_ratio_of_the_norms(task, batch):
    s, g = _exact(task, batch)
    defense = LocalOptimalNoise(noise_std=0.05, layers=True, directions=2000)
    variance = play(task, [batch], defense, [stream(0), stream(1)]).update.law.variance
    q = torch.zeros_like(g)
    for _, _, a, b in task.layout:
        assert len(variance[a:b].unique()) == 1
        q[a:b] = float(s[a:b].sum()) ** 0.5 / float((g[a:b] ** 2).sum()) ** 0.5
    close(variance, 0.05**2 * q / q.mean(), rtol=0.03, atol=0)
    assert float(variance.max() / variance.min()) > 1.2
    fixed = OptimalNoise(layers=True).resolve(
        replace(task, public=batch), batch.size
    )  # the global form likewise
    assert len(fixed.covariance.unique()) == len(task.layout)


class Projection(nn.Module):
    """<w, x>: the gradient with respect to w is the (mean) input, the Jacobian the identity."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float64))

    def forward(self, x):
        return x.flatten(1) @ self.weight


def _projection(size):
    return Task.of(Projection(size), loss=lambda out, y: out.mean(), input_range=(-10, 10))


def test_clamped_coordinates_are_sent_without_noise():
    """F9 is not private: two inputs that saturate with opposite signs are told apart for certain.

    (ε, δ)-privacy would ask P(release > 0 | +) <= e^ε P(release > 0 | -) + δ, so 1 <= δ.
    """
    task, label = _projection(3), torch.zeros(1, dtype=torch.long)
    seen = {}
    for sign in (1, -1):
        image = torch.tensor([[[[5.0 * sign, 0.3, -0.2]]]], dtype=torch.float64)
        found = [
            send(task, Batch(image, label), OptimalDpSgd(1.0, 2.0), stream(i, "draw", sign))
            for i in range(60)
        ]
        rows = torch.cat([u.rows for u in found])
        assert bool((rows[:, 0] == sign).all())
        assert float(rows[:, 1].std()) > 1  # the others do get noise
        seen[sign] = rows[:, 0]
        assert all(float(u.law.variance[0]) == 0 for u in found)
        assert float(found[0].law.variance.mean().sqrt()) == pytest.approx(2.0)
    assert float(seen[1].min()) > 0 > float(seen[-1].max())
    assert OptimalDpSgd().guarantee is not Guarantee.DIFFERENTIAL_PRIVACY
    isotropic = [send(task, Batch(image, label), GaussianNoise(2.0), stream(i)) for i in range(60)]
    clamped = torch.cat([u.rows for u in isotropic])[:, 0] + 4  # as if -1 had been sent, not -5
    assert float(clamped.min()) < 0 < float(clamped.max())  # noise of that level would mix them


def test_clamping_bounds_what_is_sent_before_the_noise(task, batch):
    _, g = _exact(task, batch)
    clamp = float(g.abs().median())
    for defense in (LocalOptimalNoise(1e-9, clamp=clamp), OptimalNoise(1e-9, clamp=clamp)):
        sent = send(replace(task, public=batch), batch, defense, stream(0)).rows[0]
        close(sent, g.clamp(-clamp, clamp), rtol=0, atol=1e-6)
        close(defense.imitate(g[None])[0], g.clamp(-clamp, clamp))


def test_noise_before_a_clamp_is_no_longer_known(public, batch):
    late = chain(GaussianNoise(0.1), OptimalNoise(clamp=1.0))
    assert late.guarantee is Guarantee.NONE
    assert isinstance(send(public, batch, late, stream(0)).law, Unknown)


@pytest.mark.parametrize("local", [False, True])
def test_rounding_sends_multiples_of_the_step(public, batch, local):
    kind = LocalOptimalNoise if local else OptimalNoise
    defense = kind(noise_std=0.05, rounding=True)
    assert defense.guarantee is Guarantee.NONE
    ready = resolve(defense, public, batch.size)
    sent, state = step(public, batch, ready, stream(0))
    variance = state[0][1] if local else ready.links[0].covariance
    assert float(variance.mean().sqrt()) == pytest.approx(0.05, rel=1e-9)
    used = variance > 0
    count = sent.rows[0][used] / variance[used].sqrt()
    close(count, count.round(), rtol=0, atol=1e-9)
    g = _gradient(public, batch.inputs, batch.labels)
    assert bool(((sent.rows[0] - g).abs() <= 0.5001 * variance.sqrt()).all())
    assert len(count.round().unique()) > 2
    assert isinstance(sent.law, Unknown if local else Exact)
    if not local:
        close(ready.imitate(g[None]), sent.rows)


def test_rounding_to_no_step_changes_nothing_and_has_a_slope_of_one():
    rows = torch.tensor([[0.26, -0.9]], dtype=torch.float64, requires_grad=True)
    out = rounded_to(rows, torch.tensor([0.5, 0.0], dtype=torch.float64))
    close(out.detach(), torch.tensor([[0.5, -0.9]], dtype=torch.float64))
    close(torch.autograd.grad(out.sum(), rows)[0], torch.ones_like(rows))


def test_the_private_law_is_for_the_audit_alone(public, batch):
    local = play(public, [batch], LocalOptimalNoise(0.1), [stream(0), stream(1)])
    assert isinstance(local.update.law, Gaussian)
    assert local.update.law.private
    assert isinstance(local.observation.update.law, Unknown)
    assert local.observation.weights is None
    glob = play(public, [batch], OptimalNoise(0.1), [stream(0), stream(1)])
    assert isinstance(glob.observation.update.law, Gaussian)
    assert glob.observation.weights is not None
    assert chain(LocalOptimalNoise()).data_dependent_law
    assert not chain(OptimalNoise()).data_dependent_law


def test_noise_leaves_a_mask_alone(public, batch):
    for noise in (OptimalNoise(0.1), LocalOptimalNoise(0.1)):
        defense = chain(OptimalPruning(rate=0.4), noise)
        found = play(public, [batch], defense, [stream(0), stream(1)])
        mask = found.observation.update.mask
        gone = ~mask
        assert int(gone.sum()) == int(0.4 * mask.numel())
        assert bool((found.update.rows[gone] == 0).all())
        assert bool((torch.as_tensor(found.update.law.variance)[gone] == 0).all())
        assert float(found.update.rows[mask].std()) > 0.03
    covered = play(public, [batch], chain(OptimalPruning(), GaussianNoise(0.1)), [stream(0)] * 2)
    assert covered.update.mask is None  # other noise covers it


def test_variances_of_one_batch_are_used_for_some_rounds(task, batch):
    other = Batch(batch.inputs.flip(0) * 0.3, batch.labels)
    for refresh in (1, 2, 3):
        ready = resolve(LocalOptimalNoise(0.1, refresh=refresh), task, batch.size)
        state, found = None, []
        for i in range(7):
            now = batch if i % 2 == 0 else other
            update, state = step(task, now, ready, stream(i), state)
            found.append(update.law.variance)
        fresh = [i for i in range(1, 7) if not torch.equal(found[i], found[i - 1])]
        assert fresh == [i for i in range(1, 7) if i % refresh == 0]


def test_a_guess_gets_the_variances_that_it_would_have_had(task, batch):
    defense = LocalOptimalNoise(noise_std=0.1, directions=3000)
    inputs = batch.inputs.clone().requires_grad_()
    variance = defense.noise_variance(task, inputs, batch.labels)
    close(variance.mean().sqrt().item(), 0.1)
    s, g = _exact(task, batch)
    off = variance.detach() / _by_hand(s, g, "utility", 0.1) - 1
    assert float(off.abs().max()) < 6 * (2 / 3000) ** 0.5
    (slope,) = torch.autograd.grad(variance.log().sum(), inputs)
    assert float(slope.abs().max()) > 0
    assert OptimalNoise().noise_variance(task, inputs, batch.labels) is None


def test_a_server_cannot_run_what_needs_a_batch(task):
    row = Update(torch.zeros(1, 149), Unit.CLIENT, (1,))
    with pytest.raises(ValueError, match="runs on a client"):
        LocalOptimalNoise().transform(row, None, None, stream(0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise_std": 0.1, "utility_std": 0.1}, "noise_std and utility_std are both given"),
        ({"noise_std": 0.0}, "noise_std"),
        ({"utility_std": -1.0}, "utility_std"),
        ({"noise_std": math.nan}, "noise_std"),
        ({"clamp": 0.0}, "clamp"),
        ({"refresh": 0}, "refresh"),
        ({"rule": "utilty"}, "utility"),
    ],
)
def test_bad_levels_are_refused(arguments, message):
    for kind in (OptimalNoise, LocalOptimalNoise):
        with pytest.raises(ValueError, match=message):
            kind(**arguments)


def test_what_is_refused_of_one_form_alone():
    with pytest.raises(ValueError, match="directions"):
        LocalOptimalNoise(directions=0)
    with pytest.raises(ValueError, match="are both given"):
        OptimalNoise(utility_std=0.1, error_floor=0.1)
    with pytest.raises(ValueError, match="error_floor"):
        OptimalNoise(error_floor=-0.1)
    with pytest.raises(ValueError, match='give the rule "energy"'):
        OptimalNoise(correlation="layers", rule="utility")
    for more in ({"utility_std": 0.1}, {"error_floor": 0.01}, {"rounding": True}):
        with pytest.raises(ValueError, match="set by noise_std, and not rounded"):
            OptimalNoise(rule="energy", correlation="low_rank", **more)


def test_a_floor_needs_plain_noise_of_this_model_and_enough_images(public):
    for more in ({"refresh": 2}, {"rounding": True}):
        with pytest.raises(ValueError, match="refresh = 1 and no rounding"):
            OptimalNoise(error_floor=0.02, **more)
    with pytest.raises(NotApplicable, match="7 public images; give at least 8"):
        OptimalNoise(error_floor=0.02, images=7).resolve(public, 2)
    OptimalNoise(error_floor=0.02, images=8).resolve(public, 2)
