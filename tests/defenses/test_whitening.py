"""Whitened DP-SGD: its sensitivity, its release, its law, and its privacy by dp-accounting."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from leakbound.client import example_gradients
from leakbound.core import Batch, Gaussian, Guarantee, NotApplicable, Unit, Unknown, Update
from leakbound.defenses import (
    Clip,
    ClipExamples,
    Color,
    DpSgd,
    GaussianMechanism,
    GaussianNoise,
    LocalOptimalNoise,
    LocalOptimalPruning,
    Mean,
    OptimalNoise,
    SecureAggregation,
    Whiten,
    WhitenedDpSgd,
    chain,
)
from leakbound.protocol import play, resolve, send
from leakbound.randomness import normal, stream, uniform

close = torch.testing.assert_close
CLIP, SIGMA = 1.3, 0.9
KINDS = [
    {"rule": "utility"},
    {"rule": "energy"},
    {"correlation": "layers"},
    {"correlation": "low_rank", "rank": 4},
]


@pytest.fixture
def public(task):
    draw = uniform((10, 1, 3, 4), stream(0, "public"), like=task.parameters)
    return replace(task, public=Batch(draw, torch.arange(10) % 3))


@pytest.fixture(params=KINDS, ids=str)
def ready(request, public):
    """The chain for this model, and its public root S as a dense matrix."""
    whole = resolve(WhitenedDpSgd(CLIP, SIGMA, **request.param), public, 6)
    size = len(public.parameters)
    root = whole.links[0].root.color(torch.eye(size, dtype=torch.float64)).T
    assert float(torch.linalg.svdvals(root).min()) > 0
    assert not torch.allclose(root, torch.eye(size, dtype=torch.float64), atol=0.1)
    return whole, root


def _rows(public, batch, factor=1.0):
    return factor * example_gradients(public, batch.inputs, batch.labels)


def _by_hand(rows, root):
    """S · mean of the clipped S⁻¹ g, example by example."""
    total = torch.zeros_like(rows[0])
    for row in rows:
        white = torch.linalg.solve(root, row)
        total += white * min(1.0, CLIP / max(float(white.norm()), 1e-300))
    return root @ (total / len(rows))


def test_the_release_is_the_clipped_mean_and_noise_by_hand(public, batch, ready):
    whole, root = ready
    rows = _rows(public, batch)
    norms = torch.linalg.solve(root, rows.T).norm(dim=0)
    assert float(norms.min()) < CLIP < float(norms.max())  # the clip binds for some, not for all
    close(whole.imitate(rows)[0], _by_hand(rows, root))
    assert not torch.allclose(DpSgd(CLIP).imitate(rows)[0], _by_hand(rows, root), rtol=1e-2)
    sent = send(public, batch, whole, stream(1))
    noise = SIGMA * CLIP / batch.size * normal((1, len(root)), stream(1), like=rows)[0]
    close(sent.rows[0], _by_hand(rows, root) + root @ noise)


def test_the_law_is_the_public_covariance_times_the_level(public, batch, ready):
    whole, root = ready
    law = play(public, [batch], whole, [stream(0), stream(1)]).observation.update.law
    assert isinstance(law, Gaussian)
    assert not law.private
    close(law.covariance.dense(), (SIGMA * CLIP / batch.size) ** 2 * root @ root.T)
    rms = float(law.variance.mean().sqrt())
    assert rms == pytest.approx(SIGMA * CLIP / batch.size, rel=1e-6)  # S Sᵀ has mean variance 1


def _adversarial(rows, root):
    """Rows meant to move the sum far: along S's axes, against the sum, huge, tiny."""
    left, _, right = torch.linalg.svd(root)
    spikes = torch.eye(len(root), dtype=torch.float64)[[0, -1]]
    for direction in (left[:, 0], left[:, -1], right[0], right[-1], *spikes, -rows.sum(0), rows[0]):
        for scale in (1e-3, 1.0, 1e3, 1e8):
            yield scale * direction


def test_one_example_moves_the_whitened_sum_by_at_most_the_clip(public, batch, ready):
    whole, root = ready
    rows, count = _rows(public, batch, 3), batch.size
    without = rows.clone()
    without[-1] = 0
    largest = 0.0
    for row in _adversarial(rows[:-1], root):
        full = torch.cat([rows[:-1], row[None]])
        moved = whole.imitate(full)[0] - whole.imitate(without)[0]
        change = float(torch.linalg.solve(root, moved).norm()) * count
        assert change <= CLIP * (1 + 1e-6)
        largest = max(largest, change)
    assert largest > 0.999 * CLIP  # tight where the clip binds
    replaced = [torch.cat([rows[:-1], sign * 1e6 * rows[:1]]) for sign in (1, -1)]
    moved = whole.imitate(replaced[0])[0] - whole.imitate(replaced[1])[0]
    assert float(torch.linalg.solve(root, moved).norm()) * count == pytest.approx(2 * CLIP)


def test_clipping_outside_the_whitened_space_would_not_bound_it(public, batch, ready):
    """The wrong order, clip and then whiten: the test above would see it."""
    _, root = ready
    worst = torch.linalg.svd(root)[0][:, -1] * CLIP  # of norm C in plain coordinates
    assert float(torch.linalg.solve(root, worst).norm()) > 1.5 * CLIP


def _delta(epsilon, mu):
    """Balle and Wang (2018): δ of the Gaussian mechanism of sensitivity over noise μ."""
    phi = stats.norm.cdf
    return phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)


def _z(losses, epsilon, claimed):
    """How far the empirical δ(ε) = E max(0, 1 - e^(ε - L)) is from the claimed one."""
    gains = np.maximum(0, 1 - np.exp(epsilon - losses))
    return (gains.mean() - claimed) / (gains.std() / math.sqrt(len(gains)))


def test_the_privacy_is_that_of_the_gaussian_mechanism(public, batch, ready):
    """Draws of the actual links for a worst pair; densities by scipy, with the full covariance."""
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting import pld

    whole, _ = ready
    rows = _rows(public, batch, 1e3)  # every clip binds
    without = rows.clone()
    without[-1] = 0
    laws, draws, count = [], [], 4000
    for own, name in ((rows, "with"), (without, "without")):
        update = Update(own, Unit.EXAMPLE, (1,) * batch.size)
        for link in whole.links[:3]:  # whiten, clip, mean
            update, _ = link.transform(update, None, None, stream(0))
        many = replace(update, rows=update.rows.expand(count, -1), examples=(batch.size,) * count)
        for link in whole.links[3:]:  # noise, color
            many, _ = link.transform(many, None, None, stream(0, name))
        quiet = whole.imitate(own)[0].numpy()
        laws.append(stats.multivariate_normal(quiet, many.law.covariance.dense().numpy()))
        draws.append(many.rows.numpy())
    accountant = pld.PLDAccountant(accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(accounting.GaussianDpEvent(SIGMA))
    for one, other in ((0, 1), (1, 0)):  # removed, and added
        losses = laws[one].logpdf(draws[one]) - laws[other].logpdf(draws[one])
        law = stats.norm(0.5 / SIGMA**2, 1 / SIGMA)
        assert stats.kstest(losses, law.cdf).pvalue > 1e-4
        for epsilon in (0.1, 0.5, 1.5):
            claimed = _delta(epsilon, 1 / SIGMA)
            assert accountant.get_delta(epsilon) == pytest.approx(claimed, rel=1e-3)
            assert abs(_z(losses, epsilon, claimed)) < 4
            assert _z(losses, epsilon, _delta(epsilon, 0.8 / SIGMA)) > 8  # noise is not more
            assert _z(losses, epsilon, _delta(epsilon, 1 / (0.8 * SIGMA))) < -8  # nor less


def test_the_covariance_does_not_depend_on_the_private_batch(public):
    found = []
    for i in range(2):
        images = uniform((3, 1, 3, 4), stream(i, "private"), like=public.parameters)
        private = Batch(images, torch.tensor([i, 0, 2]))
        whole = WhitenedDpSgd(correlation="layers")
        played = play(public, [private], whole, [stream(i), stream(i, "server")])
        found.append((played.update.law.covariance.dense(), played.update.rows))
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][1], found[1][1])


DP, LAW, NONE = Guarantee.DIFFERENTIAL_PRIVACY, Guarantee.KNOWN_NOISE, Guarantee.NONE


def test_what_is_promised(public):
    whole = WhitenedDpSgd()
    assert whole.guarantee is resolve(whole, public, 6).guarantee is DP
    links = whole.links
    assert chain(*links, Clip(1.0)).guarantee is DP  # post-processing
    assert chain(*links, OptimalNoise()).guarantee is DP  # its covariance is public
    for private in (LocalOptimalNoise(), LocalOptimalPruning()):
        assert chain(*links, private).guarantee is not DP
        assert resolve(chain(*links, private), public, 6).guarantee is not DP
        assert chain(*links[:4], private, links[4]).guarantee is not DP
        with pytest.raises(ValueError, match="bounded amount"):
            chain(*links[:3], private, *links[3:])
    without_clip = (links[0], Mean(), GaussianMechanism(1.0), links[-1])
    with pytest.raises(ValueError, match="put ClipExamples before it"):
        chain(*without_clip)
    with pytest.raises(ValueError, match="put ClipExamples before it"):  # whitened after the clip
        chain(ClipExamples(1.0), Whiten(), Mean(), GaussianMechanism(1.0))
    with pytest.raises(ValueError, match="put ClipExamples before it"):  # the batch's norm alone
        chain(Whiten(), Mean(), Clip(1.0), GaussianMechanism(1.0))
    with pytest.raises(ValueError, match=r"GaussianMechanism.*Color\(.*bounds nothing"):
        chain(ClipExamples(1.0), Color(), Mean(), GaussianMechanism(1.0))
    assert chain(Whiten(), Color()).guarantee is NONE
    assert chain(GaussianNoise(), Color()).guarantee is LAW


def test_it_runs_under_secure_aggregation(public, batch):
    """Each client whitens and clips; noise and color come on the sum."""
    links = WhitenedDpSgd(CLIP, SIGMA).links
    whole = chain(*links[:3], SecureAggregation(2), *links[3:])
    assert whole.guarantee is DP
    other = Batch(batch.inputs.flip(0) / 2, batch.labels)
    sources = [stream(i) for i in range(3)]
    found = play(public, [batch, other], whole, sources)
    root = found.defense.links[0].root.color(torch.eye(149, dtype=torch.float64)).T
    quiet = sum(_by_hand(_rows(public, b), root) for b in (batch, other))
    noise = torch.linalg.solve(root, found.update.rows[0] - quiet)
    scale = float(
        (torch.linalg.inv(root) @ found.update.law.covariance.dense() @ torch.linalg.inv(root).T)
        .diagonal()
        .mean()
    )
    assert math.sqrt(scale) >= SIGMA * CLIP / batch.size * (1 - 1e-9)
    assert 1e-4 < stats.chi2.cdf(float((noise**2).sum()) / scale, 149) < 1 - 1e-4


def test_noise_after_the_whitening_has_no_law_in_plain_coordinates(public, batch):
    whole = chain(OptimalNoise(0.1), Whiten(), Color())
    assert whole.guarantee is NONE
    assert isinstance(send(public, batch, whole, stream(0)).law, Unknown)


def test_what_is_refused(task, batch):
    with pytest.raises(NotApplicable, match="public data"):
        send(task, batch, WhitenedDpSgd(), stream(0))
    for bad, message in [
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"rule": "utilty"}, "utility"),
        ({"correlation": "layer"}, "layers"),
        ({"rule": "utility", "correlation": "layers"}, 'give the rule "energy"'),
        ({"images": 0}, "images"),
    ]:
        with pytest.raises(ValueError, match=message):
            WhitenedDpSgd(**bad)


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ([Whiten()], r"Whiten\(.*nothing undoes it"),
        ([Color(), Whiten()], r"Whiten\(.*nothing undoes it"),
        ([Whiten(), Whiten(), Color()], "nothing undoes it"),
        ([Whiten(), Color(rule="utility")], r"Color\(rule='utility'.*does not undo Whiten"),
        ([Whiten(images=3), Color()], "the same settings"),
    ],
)
def test_what_is_whitened_is_colored_again(public, links, message):
    with pytest.raises(ValueError, match=message):
        chain(*links)
    nested = chain(Whiten(), Whiten(images=3), Color(images=3), Color())
    assert resolve(nested, public, 2).links[0].maps_basis == nested.links[0].maps_basis


@pytest.mark.parametrize("correlation", ["none", "layers", "low_rank"])
def test_a_sum_of_clients_has_the_sum_of_their_equal_laws(public, batch, correlation):
    one = WhitenedDpSgd(CLIP, SIGMA, correlation=correlation)
    single = play(public, [batch], one, [stream(0), stream(1)]).update.law
    three = play(public, [batch] * 3, chain(one, SecureAggregation(3)), [stream(0)] * 4).update.law
    assert isinstance(three, Gaussian)
    close(three.covariance.dense(), 3 * single.covariance.dense())
    assert not three.covariance.equals(single.covariance)
