"""The algebra of release laws, against draws and by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from leakbound.core import (
    Batch,
    Exact,
    Gaussian,
    Guarantee,
    Laplace,
    Task,
    Unit,
    Unknown,
    Update,
)
from leakbound.covariance import Structured
from leakbound.defenses import (
    ClipExamples,
    GaussianMechanism,
    GaussianNoise,
    LocalOptimalNoise,
    Mean,
    OptimalNoise,
    SecureAggregation,
    chain,
)
from leakbound.protocol import play
from leakbound.randomness import stream

WIDTH = 60_000  # every coordinate of a row is one draw


def _update(rows=1, law=None):
    plain = torch.zeros(rows, WIDTH, dtype=torch.float64)
    return Update(plain, Unit.CLIENT, (1,) * rows, law or Exact(), bound=2.0)


def _accepts(draws, law):
    """Whether draws follow the declared law, and no law of a 10 % other spread."""
    gaussian = isinstance(law, Gaussian)
    name = "norm" if gaussian else "laplace"
    spread = np.broadcast_to(law.covariance**0.5 if gaussian else law.scale, draws.shape)
    right, *wrong = (
        stats.kstest(draws / spread / factor, name).pvalue for factor in (1.0, 0.9, 1.1)
    )
    return right > 1e-3 and max(wrong) < 1e-9


HALF = torch.cat([torch.full((WIDTH // 2,), 0.25), torch.full((WIDTH // 2,), 4.0)]).double()


@pytest.mark.parametrize("law", [Gaussian(0.5), Gaussian(HALF), Laplace(0.5), Laplace(HALF)])
@pytest.mark.parametrize("factor", [1.0, -0.1, 3.0])
def test_noise_and_scale(law, factor):
    update = _update().noised(law, stream(0)).scaled(factor)
    assert _accepts(update.rows[0].numpy(), update.law)
    assert update.bound == pytest.approx(2 * abs(factor))


def test_two_noises_and_a_sum():
    source = stream(1)
    update = _update(3).noised(Gaussian(0.5), source).scaled(2.0).noised(Gaussian(1.5), source)
    assert update.law.covariance == 3.5
    total = update.summed(Unit.COHORT)
    assert total.law.covariance == 10.5
    assert _accepts(total.rows[0].numpy(), total.law)
    assert (total.unit, total.examples, total.bound) == (Unit.COHORT, (3,), 4.0)


def test_a_sum_of_what_was_sent():
    mask = torch.zeros(3, WIDTH, dtype=torch.bool)
    mask[:, : WIDTH // 2] = True
    mask[0] = True
    noisy = _update(3).noised(Gaussian(0.5), stream(2))
    total = noisy.masked(mask, by_value=False).summed(Unit.COHORT)
    assert total.law.covariance.unique().tolist() == [0.5, 1.5]
    assert _accepts(total.rows[0].numpy(), total.law)
    assert total.mask.all()


def test_laplace_draws_do_not_add_up_to_laplace():
    total = _update(2).noised(Laplace(1.0), stream(3)).summed(Unit.COHORT)
    assert isinstance(total.law, Unknown)
    assert stats.kstest(total.rows[0].numpy() / 2**0.5, "laplace").pvalue < 1e-9


def test_noise_over_a_drawn_mask_is_a_mixture():
    plain = replace(_update(), rows=torch.full((1, WIDTH), 3.0, dtype=torch.float64))
    mask = (torch.rand(1, WIDTH, generator=stream(4)) < 0.5).bool()
    drawn = plain.masked(mask, by_value=False, drawn=True)
    assert isinstance(drawn.law, Exact)
    noisy = drawn.noised(Gaussian(1.0), stream(5))
    assert isinstance(noisy.law, Unknown)
    assert (noisy.mask, noisy.drawn) == (None, False)
    draws = noisy.rows[0].numpy()
    assert stats.kstest(draws, stats.norm(3.0, 1.0).cdf).pvalue < 1e-9
    assert stats.kstest(draws, stats.norm(draws.mean(), draws.std()).cdf).pvalue < 1e-9
    fixed = plain.masked(mask, by_value=False).noised(Gaussian(1.0), stream(5))
    assert isinstance(fixed.law, Gaussian)  # a mask that all know
    assert _accepts((fixed.rows - 3.0 * mask)[0].numpy(), fixed.law)


def test_a_drawn_mask_is_remembered():
    mask = torch.ones(1, WIDTH, dtype=torch.bool)
    drawn = _update().masked(mask, by_value=False, drawn=True)
    for later in (
        drawn.scaled(2.0),
        drawn.masked(mask, by_value=False),
        drawn.masked(mask, by_value=True),
        drawn.opaque(drawn.rows, "rounded"),
        Update.stack([_update(), drawn]),
        drawn.summed(Unit.COHORT),
    ):
        assert later.drawn
        assert isinstance(later.law, Exact)
        assert isinstance(later.noised(Gaussian(1.0), stream(0)).law, Unknown)
    assert isinstance(Update.stack([drawn, drawn]).summed(Unit.COHORT).law, Unknown)
    assert not drawn.seen(defense_known=False).drawn


def test_undeclared_shows_rows_alone():
    noisy = _update(2).noised(Gaussian(0.5), stream(6))
    mask = torch.ones(2, WIDTH, dtype=torch.bool)
    shown = noisy.masked(mask, by_value=False).seen(defense_known=False)
    assert torch.equal(shown.rows, noisy.rows)
    assert isinstance(shown.law, Unknown)
    assert (shown.mask, shown.bound, shown.examples) == (None, None, (1, 1))


def test_a_stack_has_the_clients_law():
    single = [_update().noised(Gaussian(0.5), stream(7, i)) for i in range(2)]
    both = Update.stack(single)
    assert _accepts(both.rows.flatten().numpy(), both.law)
    assert torch.equal(both.rows[1], single[1].rows[0])
    assert (both.examples, both.bound) == ((1, 1), 2.0)


def _sent(size, *links):
    batch = Batch(torch.rand(size, 1, 4, 4, generator=stream(size)), torch.arange(size) % 3)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    return Task.of(model, classes=3), batch, chain(*links)


@pytest.mark.parametrize("sizes", [(8, 1), (1, 8)])
def test_the_bound_of_a_cohort_is_that_of_its_smallest_client(sizes):
    """An example of a client with one image moves the mean most: noise must cover that one."""
    links = (ClipExamples(1.0), Mean(), SecureAggregation(2), GaussianMechanism(1.0))
    task, _, defense = _sent(1, *links)
    clients = [_sent(size, *links)[1] for size in sizes]
    update = play(task, clients, defense, [stream(i) for i in range(3)]).update
    assert update.bound == pytest.approx(1.0)
    assert update.law.covariance == pytest.approx(1.0)


@pytest.mark.parametrize("sizes", [(8, 1), (1, 2)])
def test_gaussian_laws_of_unequal_clients_add_up(sizes):
    links = (GaussianNoise(0.3), Mean(), SecureAggregation(2))
    task, _, defense = _sent(1, *links)
    clients = [_sent(size, *links)[1] for size in sizes]
    assert defense.guarantee is Guarantee.KNOWN_NOISE
    rows = []
    for seed in range(200):
        update = play(task, clients, defense, [stream(seed, i) for i in range(3)]).update
        rows.append(update.rows)
    declared = torch.as_tensor(update.law.covariance).double().mean()
    assert float(declared) == pytest.approx(0.09 * (1 / sizes[0] + 1 / sizes[1]))
    measured = torch.cat(rows).double().var(0).mean()
    assert float(measured / declared) == pytest.approx(1.0, abs=0.05)


def test_a_mask_chosen_by_value_bounds_nothing():
    update = Update(torch.rand(1, 6), Unit.CLIENT, (2,), bound=1.0)
    mask = torch.tensor([[True, False, True, True, False, True]])
    assert update.masked(mask, by_value=True).bound is None
    assert update.masked(mask, by_value=False, drawn=True).bound == 1.0


HALF_MASK = torch.arange(WIDTH)[None] % 2 == 0


def test_noise_on_what_a_private_mask_leaves_has_public_variances():
    kept = _update().masked(HALF_MASK, by_value=True)
    assert kept.mask_private
    assert kept.law.private
    noisy = kept.noised(Gaussian(HALF), stream(0), keep_mask=True)
    assert noisy.mask_private
    assert not noisy.law.private
    assert isinstance(noisy.seen().law, Gaussian)
    assert torch.equal(noisy.law.covariance, HALF * HALF_MASK)
    local = kept.noised(Gaussian(HALF, private=True), stream(0), keep_mask=True)
    assert local.law.private
    assert isinstance(local.seen().law, Unknown)


@pytest.mark.parametrize("noise", [Gaussian(0.5), Gaussian(HALF), Laplace(HALF)])
def test_noise_over_a_private_mask_has_a_private_law_of_public_variances(noise):
    kept = _update().masked(HALF_MASK, by_value=True)
    covered = kept.noised(noise, stream(0))
    assert (covered.mask, covered.mask_private, covered.law.private) == (None, False, True)
    assert type(covered.scaled(2.0).seen().law) is type(noise)
    hidden = kept.noised(replace(noise, private=True), stream(0)).seen().law
    number = not isinstance(getattr(noise, "covariance", HALF), torch.Tensor)
    assert isinstance(hidden, Unknown) is not number


def test_a_private_mask_is_remembered_until_it_is_covered():
    kept = _update().masked(HALF_MASK, by_value=True)
    plain = Structured(torch.ones(WIDTH, dtype=torch.float64))
    for later in (
        kept.scaled(2.0),
        kept.opaque(kept.rows, "rounded"),
        kept.mapped(plain),
        kept.masked(HALF_MASK, by_value=False),
        kept.summed(Unit.COHORT),
        Update.stack([kept, kept]),
        Update.stack([_update(), kept]),
    ):
        assert later.mask_private
    assert not _update().masked(HALF_MASK, by_value=False).mask_private
    assert not kept.seen(defense_known=False).mask_private


def test_a_sum_over_private_masks_has_a_private_law():
    """Only the union is seen, so what each client withheld is not known any more."""
    noisy = [
        _update().masked(mask, by_value=True).noised(Gaussian(0.5), stream(i), keep_mask=True)
        for i, mask in enumerate([HALF_MASK, HALF_MASK.flip(1)])
    ]
    total = Update.stack([*noisy, noisy[0]]).summed(Unit.COHORT)
    assert total.law.covariance.unique().tolist() == [0.5, 1.0]
    assert total.law.private
    assert isinstance(total.seen().law, Unknown)
    exact = Update.stack([_update().masked(HALF_MASK, by_value=True)] * 2).summed(Unit.COHORT)
    for later in (exact, exact.masked(HALF_MASK, by_value=True)):
        assert not later.mask_private
        assert later.noised(Gaussian(0.5), stream(0), keep_mask=True).law.private


@pytest.mark.parametrize(
    ("noise", "value"),
    [
        (Gaussian(1e-100), "1e-100"),
        (Gaussian(1e100), r"1e\+100"),
        (Gaussian(0.0), "variance of 0"),
        (Laplace(1e-60), "scale of 1e-60"),
        (Gaussian(torch.tensor([1.0, 1e-60], dtype=torch.float64)), "1e-60"),
        (Gaussian(Structured(torch.tensor([1.0, 1e-30], dtype=torch.float64))), "1e-60"),
    ],
)
def test_noise_that_the_type_cannot_hold_is_refused(noise, value):
    small = Update(torch.zeros(1, 2), Unit.CLIENT, (1,))
    with pytest.raises(ValueError, match=rf"{value}.*float32"):
        small.noised(noise, stream(0))
    held = Gaussian(torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert float(small.noised(held, stream(0)).rows[0, 1]) == 0


@pytest.mark.parametrize("level", [1e-30, 1e30, 1e-200, 1e200])
def test_levels_that_the_type_cannot_hold_are_refused(level):
    task, batch, _ = _sent(2)
    public = replace(task, public=batch)
    links = [OptimalNoise(level), LocalOptimalNoise(level)]
    if not 1e-38 < level < 1e38:  # of a number, the root is cast
        links.append(GaussianNoise(level))
    for link in links:
        with pytest.raises(ValueError, match="float32"):
            play(public, [batch], link, [stream(0), stream(1)])
