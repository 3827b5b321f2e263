"""Sampled steps: against dp_accounting, riskcal, Monte Carlo, mpmath and the closed forms."""

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from leakbound.bounds import identification
from leakbound.bounds.composition import subsampled, visible
from leakbound.bounds.identification import gaussian, kappa_sphere

FINDINGS = [
    (0.6, 0.01, 1000, 1e-3, 0.0334),
    (0.5, 0.001, 1000, 1e-4, 0.00084),
    (0.4, 0.001, 100, 1e-4, 0.0013),
    (1.0, 0.01, 1000, 1e-3, 0.00407),
]
"""noise, rate, steps, kappa, and gamma as the specification (F3) has it."""

noises = st.floats(0.3, 20)
rates = st.floats(1e-3, 0.9)
counts = st.integers(1, 200)
kappas = st.floats(1e-6, 0.99)


def by_hits(noise, q, steps, kappa, samples, push=1.0):
    """(estimate, standard error) of the Neyman-Pearson test's power, by sampling under P.

    The number of hits is spread evenly, the hits are pushed up by `push` standard deviations in
    all, and both weighted back. The threshold comes from the first half;
    for any threshold t the mean of (1 - e^(t - loss))+ plus e^t kappa is the power or more.
    """
    draw = np.random.default_rng(0)
    most = int(stats.binom.isf(1e-9, steps, q)) + 1
    each = samples // (most + 1)
    losses, weights = [], []
    for k in range(most + 1):
        total, weight = np.zeros(each), np.full(each, stats.binom.pmf(k, steps, q))
        for start in range(0, steps, 50):
            width = min(50, steps - start)
            x = draw.standard_normal((each, width))
            hits = x[:, : max(0, min(width, k - start))]
            lift = push / np.sqrt(max(k, 1))
            weight *= np.exp(-lift * hits.sum(1) - hits.shape[1] * lift**2 / 2)
            hits += 1 / noise + lift
            total += np.log1p(q * np.expm1(x / noise - 0.5 / noise**2)).sum(1)
        losses.append(total)
        weights.append(weight)
    loss, weight = np.array(losses), np.array(weights)
    pilot, rest = loss[:, ::2], loss[:, 1::2]
    grid = np.linspace(-5, np.quantile(loss, 0.999), 400)
    means = (weight[:, ::2, None] * np.maximum(0, 1 - np.exp(grid - pilot[..., None]))).mean(1)
    level = grid[np.argmin(np.exp(grid) * kappa + means.sum(0))]
    parts = weight[:, 1::2] * np.maximum(0, 1 - np.exp(level - rest))
    error = np.sqrt((parts.var(1) / parts.shape[1]).sum())
    return np.exp(level) * kappa + parts.mean(1).sum(), error


def by_dp_accounting(noise, q, steps, kappas, interval, pessimistic):
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    one = pld.from_gaussian_mechanism(
        noise,
        sampling_prob=q,
        value_discretization_interval=interval,
        use_connect_dots=pessimistic,
        pessimistic_estimate=pessimistic,
    )
    mass = one.self_compose(steps)._pmf_remove.to_dense_pmf()
    losses = (np.arange(mass.size) + mass._lower_loss) * mass._discretization
    delta = np.asarray(mass.get_delta_for_epsilon(losses))
    return [float(np.min(np.exp(losses) * k + delta)) for k in kappas]


@pytest.mark.parametrize(("noise", "q", "steps", "kappa", "stated"), FINDINGS)
def test_findings(noise, q, steps, kappa, stated):
    found = subsampled(noise, sampling_rate=q, steps=steps, kappa=kappa)
    assert found == pytest.approx(stated, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "q", "steps", "kappa", "stated"), FINDINGS)
def test_findings_against_monte_carlo(noise, q, steps, kappa, stated):
    found = subsampled(noise, sampling_rate=q, steps=steps, kappa=kappa)
    samples, push = 600_000 if steps == 100 else 120_000, 1.0 if kappa > 1e-4 else 2.0
    estimate, error = by_hits(noise, q, steps, kappa, samples, push)
    assert error < 0.02 * estimate
    assert estimate - 4 * error <= found <= 1.02 * estimate + 4 * error


@pytest.mark.parametrize(
    ("noise", "q", "steps", "kappa"), [(1.0, 0.1, 20, 0.01), (0.5, 0.02, 30, 1e-3)]
)
def test_against_monte_carlo(noise, q, steps, kappa):
    found = subsampled(noise, sampling_rate=q, steps=steps, kappa=kappa)
    estimate, error = by_hits(noise, q, steps, kappa, 60_000)
    assert estimate - 4 * error <= found <= 1.01 * estimate + 4 * error


@pytest.mark.parametrize(("noise", "q", "steps"), [(0.6, 0.01, 50), (3.0, 0.3, 9)])
def test_between_the_roundings_of_dp_accounting(noise, q, steps):
    levels = [1e-4, 1e-2, 0.1, 0.5]
    found = subsampled(noise, sampling_rate=q, steps=steps, kappa=levels)
    below = by_dp_accounting(noise, q, steps, levels, 5e-4, False)
    above = by_dp_accounting(noise, q, steps, levels, 5e-4, True)
    assert np.all(found >= np.array(below) - 1e-15)
    np.testing.assert_allclose(found, above, rtol=5e-4)


def test_against_riskcal():
    riskcal = pytest.importorskip("riskcal")
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    levels = np.array([0.001, 0.01, 0.1, 0.5])
    found = subsampled(1.0, sampling_rate=0.1, steps=100, kappa=levels)
    np.testing.assert_allclose(found, [0.0388, 0.1461, 0.4692, 0.8697], atol=6e-5)
    one = pld.from_gaussian_mechanism(1.0, sampling_prob=0.1, value_discretization_interval=1e-3)
    beta = riskcal.analysis.get_beta_from_pld(one.self_compose(100), alpha=levels)
    symmetric = 1 - np.asarray(beta)
    assert np.all(found <= symmetric + 1e-4)  # both directions, so no less
    np.testing.assert_allclose(found[:3], symmetric[:3], rtol=2e-3)
    assert symmetric[3] > found[3] + 0.01


@pytest.mark.parametrize("law", [visible, subsampled])
def test_full_batch_is_the_closed_form(law):
    levels = [0.0, 1e-9, 0.01, 0.5, 1.0]
    for noise in (0.1, 1.0, 30.0, np.inf):
        found = law(noise, sampling_rate=1.0, steps=7, kappa=levels)
        np.testing.assert_allclose(found, gaussian(noise, kappa=levels, steps=7), rtol=1e-12)


def test_one_step_is_exact():
    found = subsampled(0.7, sampling_rate=0.2, steps=1, kappa=0.03)
    assert found == pytest.approx(0.8 * 0.03 + 0.2 * gaussian(0.7, kappa=0.03), rel=1e-12)


def test_visible_far_below_floats():
    """kappa = exp(-1000), against 60 digits of mpmath."""
    with mpmath.workdps(60):
        edge = mpmath.findroot(lambda x: mpmath.log(mpmath.ncdf(x)) + 1000, -44.6)
        terms = [
            mpmath.binomial(3, k) / 8 * mpmath.ncdf(edge + mpmath.sqrt(k) / mpmath.mpf("0.02"))
            for k in range(4)
        ]
        truth = float(mpmath.fsum(terms))
    found = visible(0.02, sampling_rate=0.5, steps=3, log_kappa=-1000.0)
    assert found == pytest.approx(truth, rel=1e-10)
    assert subsampled(0.02, sampling_rate=0.5, steps=3, log_kappa=-1000.0) <= found


def test_many_steps_lose_no_mass():
    """Blind success 1 is 1, however the binomial sum is cut."""
    for steps in (10, 10**6, 10**9):
        assert visible(5.0, sampling_rate=0.01, steps=steps, kappa=1.0) == pytest.approx(
            1, abs=1e-9
        )
    normal = gaussian(100.0, kappa=0.01, steps=10**4)  # 10^4 +- 100 sightings of 10^6
    found = visible(100.0, sampling_rate=0.01, steps=10**6, kappa=0.01)
    assert found == pytest.approx(normal, rel=1e-3)


def test_limits():
    at = {"sampling_rate": 0.1, "steps": 10}
    hit = 1 - 0.9**10
    for law in (visible, subsampled):
        assert law(np.inf, kappa=0.3, **at) == pytest.approx(0.3, rel=1e-14)
        assert law(0.0, kappa=0.3, **at) == pytest.approx(hit + 0.3 * (1 - hit), rel=1e-12)
        assert law(0.0, kappa=0.0, **at) == pytest.approx(hit, rel=1e-12)
        assert law(1.0, kappa=1.0, **at) == 1
        assert law(1.0, kappa=0.0, **at) <= 1e-8
        assert law(2e-5, log_kappa=-1e6, **at) == pytest.approx(hit, rel=1e-6)  # epsilon 1e9
        assert law(1e-160, kappa=0.3, **at) == pytest.approx(hit + 0.3 * (1 - hit), rel=1e-6)
        assert law(1e160, kappa=0.3, **at) == pytest.approx(0.3, rel=1e-6)


def test_huge_noise_stays_tight():
    """The excess over kappa, against the normal limit of many small losses."""
    for noise, steps in ((100.0, 1000), (1e4, 100)):
        found = subsampled(noise, sampling_rate=0.1, steps=steps, kappa=0.1)
        limit = gaussian(noise / 0.1, kappa=0.1, steps=steps)
        assert found - 0.1 == pytest.approx(limit - 0.1, rel=0.02)
        assert found >= limit * (1 - 1e-6)


def test_corridor_figures():
    """The upper edges that the specification quotes."""
    blind = kappa_sphere(dim=2, eta=0.25)
    found = subsampled(0.4, sampling_rate=0.02, steps=20, kappa=blind)
    assert found == pytest.approx(0.418, abs=5e-4)
    assert visible(0.4, sampling_rate=0.02, steps=20, kappa=blind) > 0.478
    blind = kappa_sphere(dim=16, eta=0.6 / 16)
    assert subsampled(0.3, sampling_rate=0.05, steps=10, kappa=blind) == pytest.approx(
        0.22, abs=2e-3
    )


def test_arrays():
    noise, levels = np.array([[0.5], [1.0], [np.inf]]), np.array([0.01, 0.2])
    for law in (visible, subsampled):
        found = law(noise, sampling_rate=0.1, steps=20, kappa=levels)
        assert found.shape == (3, 2)
        alone = law(1.0, sampling_rate=0.1, steps=20, log_kappa=np.log(0.2))
        assert isinstance(alone, float)
        assert found[1, 1] == pytest.approx(alone, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(noises, rates, counts, kappas, st.floats(1.01, 3))
def test_monotone(noise, q, steps, kappa, more):
    """In all four, to the resolution of the grid; never below one step, never above visible."""
    at = subsampled(noise, sampling_rate=q, steps=steps, kappa=kappa)
    most = at * (1 + 1e-4) + 1e-9
    assert subsampled(noise * more, sampling_rate=q, steps=steps, kappa=kappa) <= most
    assert subsampled(noise, sampling_rate=q / more, steps=steps, kappa=kappa) <= most
    assert subsampled(noise, sampling_rate=q, steps=-int(-steps // more), kappa=kappa) <= most
    assert subsampled(noise, sampling_rate=q, steps=steps, kappa=kappa / more) <= most
    assert at >= subsampled(noise, sampling_rate=q, steps=1, kappa=kappa) * (1 - 1e-12)
    assert at <= visible(noise, sampling_rate=q, steps=steps, kappa=kappa)


@settings(max_examples=40, deadline=None)
@given(noises, rates, counts, kappas, st.floats(1.01, 3))
def test_visible_monotone(noise, q, steps, kappa, more):
    at = visible(noise, sampling_rate=q, steps=steps, kappa=kappa) * (1 + 1e-12)
    assert visible(noise * more, sampling_rate=q, steps=steps, kappa=kappa) <= at
    assert visible(noise, sampling_rate=q / more, steps=steps, kappa=kappa) <= at
    assert visible(noise, sampling_rate=q, steps=-int(-steps // more), kappa=kappa) <= at
    assert visible(noise, sampling_rate=q, steps=steps, kappa=kappa / more) <= at


@pytest.mark.parametrize("law", [visible, subsampled])
@pytest.mark.parametrize(
    ("gamma", "q", "steps", "kappa"),
    [(0.05, 0.01, 1000, 0.01 / 4), (0.3, 0.2, 50, 0.1), (0.02, 0.05, 10, 1e-6), (0.5, 1.0, 3, 0.1)],
)
def test_noise_for(law, gamma, q, steps, kappa):
    """Meets the target; a thousandth less noise does not."""
    at = {"sampling_rate": q, "steps": steps, "kappa": kappa}
    noise = law.noise_for(gamma, **at)
    assert law(noise, **at) <= gamma < law(noise * 0.999, **at)
    assert subsampled.noise_for(gamma, **at) <= visible.noise_for(gamma, **at) * (1 + 1e-5)


def test_noise_that_the_specification_found():
    """gamma(kappa = .01) <= .05 at q = .01, T = 1000: .7776 by riskcal and a root search."""
    noise = subsampled.noise_for(0.05, sampling_rate=0.01, steps=1000, kappa=0.01)
    assert noise == pytest.approx(0.7777, abs=3e-4)
    assert subsampled(noise, sampling_rate=0.01, steps=1000, kappa=0.01) <= 0.05


def test_no_noise_needed():
    for law in (visible, subsampled):
        assert law.noise_for(0.2, sampling_rate=0.01, steps=10, kappa=0.01) == 0


@pytest.mark.parametrize("law", [visible, subsampled])
def test_steps_for(law):
    at = {"sampling_rate": 0.05, "kappa": 0.01}
    count = law.steps_for(0.2, noise_multiplier=1.0, **at)
    assert isinstance(count, int)
    assert law(1.0, steps=count, **at) <= 0.2 < law(1.0, steps=count + 1, **at)
    assert law.steps_for(0.02, noise_multiplier=0.1, sampling_rate=0.5, kappa=0.01) == 0
    assert law.steps_for(0.2, noise_multiplier=np.inf, **at) == 2**30
    assert law.steps_for([0.02, 0.2], noise_multiplier=1.0, **at).tolist()[1] == count


@pytest.mark.parametrize("law", [visible, subsampled])
def test_rate_for(law):
    at = {"steps": 100, "kappa": 0.01}
    q = law.rate_for(0.2, noise_multiplier=1.0, **at)
    assert law(1.0, sampling_rate=q, **at) <= 0.2 < law(1.0, sampling_rate=q * 1.001, **at)
    assert law.rate_for(0.2, noise_multiplier=1e3, **at) == 1
    assert 0 < law.rate_for(0.2, noise_multiplier=0.0, **at) < 0.01
    assert law.rate_for(0.2, noise_multiplier=0.0, steps=1, kappa=0.0) == pytest.approx(0.2, 1e-5)


@pytest.mark.parametrize("law", [visible, subsampled])
def test_refusals(law):
    at = {"sampling_rate": 0.1, "steps": 10}
    with pytest.raises(ValueError, match="not above the prior-only success"):
        law.noise_for(0.1, kappa=0.1, **at)
    with pytest.raises(ValueError, match="not above the prior-only success"):
        law.steps_for([0.5, 0.1], kappa=0.2, noise_multiplier=1.0, sampling_rate=0.1)
    with pytest.raises(ValueError, match="not above the prior-only success"):
        law.rate_for(0.1, kappa=0.2, noise_multiplier=1.0, steps=10)
    for wrong in (
        {"sampling_rate": 0.0},
        {"steps": 0},
        {"steps": 1.5},
        {"sampling_rate": [0.1, 1.1]},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            law(1.0, kappa=0.1, **(at | wrong))
    with pytest.raises(ValueError, match="noise_multiplier"):
        law(-1.0, kappa=0.1, **at)
    with pytest.raises(ValueError, match="kappa"):
        law(1.0, kappa=1.1, **at)
    with pytest.raises(ValueError, match="exactly one"):
        law(1.0, **at)


def test_scope():
    assert visible.scope.covers == subsampled.scope.covers == identification.gaussian.scope.covers
    assert "visible" in subsampled.scope.not_said
