"""Floors against models whose best attacker is known, and against planted wrong floors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from leakbound.bounds import (
    FlatPrior,
    GaussianPrior,
    Prior,
    full_bound,
    full_bound_from_samples,
    tight_trace_bound,
    trace_bound,
    trace_bound_from_samples,
)


def spd(size, generator, spread=1.0):
    """A random positive definite matrix with eigenvalues over `spread` decades."""
    basis = np.linalg.qr(generator.standard_normal((size, size)))[0]
    return (basis * 10 ** generator.uniform(-spread / 2, spread / 2, size)) @ basis.T


class Linear:
    """y = A x + noise with independent noise, x Gaussian: the posterior is known."""

    def __init__(self, generator, m=None, d=None):
        self.m = m or int(generator.integers(1, 7))
        self.d = d or int(generator.integers(1, 16))
        self.a = generator.standard_normal((self.d, self.m)) * generator.uniform(0.2, 2)
        self.noise = generator.uniform(0.1, 3, self.d)
        self.covariance = spd(self.m, generator)
        self.prior = GaussianPrior(generator.standard_normal(self.m), self.covariance)
        self.fisher = self.a.T @ (self.a / self.noise[:, None])

    @property
    def error(self):
        """The posterior's covariance, by the gain form, without inverting J_B."""
        cross = self.covariance @ self.a.T
        observed = self.a @ cross + np.diag(self.noise)
        return self.covariance - cross @ np.linalg.solve(observed, cross.T)

    def attack(self, count, generator):
        """Mean squared error of the posterior mean in `count` simulated releases, each."""
        x = self.prior.draw(count, generator)
        y = x @ self.a.T + generator.standard_normal((count, self.d)) * np.sqrt(self.noise)
        cross = self.covariance @ self.a.T
        observed = self.a @ cross + np.diag(self.noise)
        guess = np.linalg.solve(observed, cross.T).T
        centred = y - self.prior.mean @ self.a.T
        return ((self.prior.mean + centred @ guess.T - x) ** 2).mean(1)

    def floors(self):
        trace = np.trace(self.fisher)
        return [
            full_bound(self.fisher, self.prior).value,
            tight_trace_bound(trace, self.prior).value,
            trace_bound(trace, self.prior).value,
        ]

    def literal(self):
        """Theorem 3.2 as printed, with d = number of observations for m."""
        largest = np.linalg.eigvalsh(self.prior.matrix)[-1]
        return self.d**2 / (np.trace(self.fisher) + self.d * largest) / self.m


@pytest.mark.parametrize("seed", range(20))
def test_full_floor_is_the_posterior_error_in_linear_models(seed):
    model = Linear(np.random.default_rng(seed))
    floor = full_bound(model.fisher, model.prior)
    assert floor.value == pytest.approx(np.trace(model.error) / model.m, rel=1e-9)
    assert floor.per_pixel == pytest.approx(np.diag(model.error), rel=1e-9)
    full, tight, trace = model.floors()
    assert full * (1 + 1e-9) >= tight
    assert tight * (1 + 1e-9) >= trace > 0


def test_simulated_optimal_attackers_never_beat_a_floor_and_the_printed_one_is_caught():
    generator = np.random.default_rng(2024)
    models = [Linear(generator) for _ in range(240)]
    scores, caught = [], 0
    for model in models:
        errors = model.attack(400, generator)
        mean, error = errors.mean(), errors.std(ddof=1) / 20
        full = model.floors()[0]
        scores.append([(mean - f) / error for f in (*model.floors(), 1.1 * full)])
        caught += (mean - model.literal()) / error < -3
    scores = np.array(scores)
    # the full floor is exact here, so its scores are standard normal: 240 looks at 1 % in all
    assert scores[:, :3].min() > stats.norm.ppf(0.01 / len(models))
    assert abs(scores[:, 0].mean()) < 4 / np.sqrt(len(models))
    assert caught > 60
    assert scores[:, 3].mean() < -1  # a floor 10 % too high is caught too


def test_the_sheets_numbers_fit_one_model():
    # m = 6, d = 15: .591 (m^2), 2.86 (literal d^2), .633 (tight) fix tr J_D, lambda_max, tr J_P
    largest = (225 / 2.86 - 36 / 0.591) / 9
    fisher = 36 / 0.591 - 6 * largest
    total = 36 / 0.633 - fisher
    prior = Prior("sheet", 6, np.array([largest] + [(total - largest) / 5] * 5), 100.0)
    assert trace_bound(fisher, prior).value * 6 == pytest.approx(0.591)
    assert tight_trace_bound(fisher, prior).value * 6 == pytest.approx(0.633)
    assert 225 / (fisher + 15 * largest) == pytest.approx(2.86)
    assert 2.86 > 0.994 > 0.633


def test_directions_handed_over_only_lower_the_floor():
    generator = np.random.default_rng(5)
    model = Linear(generator, m=6, d=9)
    whole = full_bound(model.fisher, model.prior).value
    values = [
        full_bound(
            model.fisher, GaussianPrior(model.prior.mean, model.covariance, components=k)
        ).value
        for k in range(1, 7)
    ]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(whole, rel=1e-9)


def test_a_singular_covariance_gives_the_exact_error():
    generator = np.random.default_rng(6)
    model = Linear(generator, m=5, d=4)
    low = generator.standard_normal((5, 2))
    model.covariance = low @ low.T
    prior = GaussianPrior(np.zeros(5), model.covariance)
    floor = full_bound(model.fisher, prior)
    assert prior.rank == 2
    assert floor.value == pytest.approx(np.trace(model.error) / 5, rel=1e-9)
    assert floor.per_pixel == pytest.approx(np.diag(model.error), rel=1e-7, abs=1e-9)
    small = prior.basis.T @ model.fisher @ prior.basis
    assert full_bound(small, prior).value == pytest.approx(floor.value, rel=1e-12)


def posterior_error(weights, means, stds, noise):
    """Error of the posterior mean for a 1-d mixture and Gaussian noise, by quadrature."""
    x = np.linspace(-12, 12, 1601)
    y = np.linspace(-14, 14, 1801)
    density = sum(w * stats.norm.pdf(x, c, s) for w, c, s in zip(weights, means, stds, strict=True))
    joint = density * stats.norm.pdf(y[:, None], x, noise)
    evidence = joint.sum(1)
    mean = joint @ x / np.maximum(evidence, 1e-300)
    second = density @ x**2 * (x[1] - x[0])
    return second - (evidence * mean**2).sum() * (x[1] - x[0]) * (y[1] - y[0])


@pytest.mark.parametrize("noise", [0.2, 0.7, 2.0, 6.0])
@pytest.mark.parametrize("stds", [(0.5, 0.5), (1.0, 0.3)])
def test_a_mixture_prior_is_never_beaten(noise, stds):
    weights, means, stds = np.array([0.4, 0.6]), np.array([-2.0, 1.0]), np.array(stds)
    variance = float(weights @ (stds**2 + (means - weights @ means) ** 2))
    x = np.linspace(-12, 12, 60_001)
    parts = weights * stats.norm.pdf(x[:, None], means, stds)
    slope = (parts * (means - x[:, None]) / stds**2).sum(1)
    exact = float((slope**2 / parts.sum(1)).sum() * (x[1] - x[0]))
    convex = float(weights @ stds**-2)  # an upper bound: Cohen 1968
    assert exact <= convex
    true = posterior_error(weights, means, stds, noise)
    for known in (convex, exact):
        floor = full_bound([[noise**-2]], Prior("mixture", 1, np.array([[known]]), variance))
        assert 0 < floor.value <= true * (1 + 1e-6)
    # wrong on purpose: the total variance as if the prior were one Gaussian
    if noise == 0.7:
        wrong = full_bound([[noise**-2]], GaussianPrior.isotropic([0.0], variance)).value
        assert wrong > true


def test_a_mixture_in_two_dimensions_is_never_beaten():
    generator = np.random.default_rng(3)
    means = np.array([[-1.5, 0.0], [1.0, 1.0]])
    spreads = np.array([[[1.0, 0.4], [0.4, 0.5]], [[0.3, 0.0], [0.0, 1.2]]])
    information = np.linalg.inv(spreads).mean(0)  # at least the mixture's: Cohen 1968
    variance = np.trace(spreads.mean(0)) + ((means - means.mean(0)) ** 2).sum(1).mean()
    prior = Prior("mixture", 2, information, variance)
    which = generator.choice(2, size=20_000)
    roots = np.linalg.cholesky(spreads)[which]
    x = means[which] + (roots @ generator.standard_normal((20_000, 2, 1)))[:, :, 0]
    y = x + generator.standard_normal(x.shape)
    # the evidence is a mixture too; Tweedie: E[x | y] = y + noise variance * score of y
    laws = [
        stats.multivariate_normal(m, s + np.eye(2)) for m, s in zip(means, spreads, strict=True)
    ]
    shares = np.stack([law.pdf(y) for law in laws], 1)
    shares /= shares.sum(1, keepdims=True)
    pulls = np.stack([(law.mean - y) @ np.linalg.inv(law.cov) for law in laws], 1)
    score = (shares[:, :, None] * pulls).sum(1)
    errors = ((y + score - x) ** 2).mean(1)
    assert full_bound(np.eye(2), prior).value < errors.mean() - 3 * errors.std() / 141


def test_a_uniform_prior_is_capped_and_covers_unbiased_attackers_only():
    floor = full_bound([[1.0]], FlatPrior(1, 1 / 12))
    assert floor.value == pytest.approx(1 / 12)
    assert (floor.covers, floor.rests_on_prior, floor.per_pixel) == ("unbiased", False, None)
    assert full_bound([[1.0]], FlatPrior(1, 100.0)).value == pytest.approx(1.0)
    # the cap is no proof: the posterior mean of U[0, 1] does better
    x, y = np.linspace(0, 1, 801), np.linspace(-7, 8, 1501)
    joint = stats.norm.pdf(y[:, None], x, 1) / 801
    best = (x**2).mean() - ((joint @ x) ** 2 / joint.sum(1)).sum() * (y[1] - y[0])
    assert best == pytest.approx(0.0771, abs=5e-4)
    assert best < floor.value


@pytest.mark.parametrize("make", [trace_bound, tight_trace_bound])
def test_the_ends_of_the_scale(make):
    prior = GaussianPrior.isotropic(np.zeros(3), 0.5)
    assert make(0.0, prior).value == pytest.approx(0.5)
    assert make(np.inf, prior).value == 0
    assert make(0.0, FlatPrior(3, 1.5)).value == 0.5
    assert full_bound(np.zeros((3, 3)), FlatPrior(3, 1.5)).value == 0.5
    assert full_bound(np.zeros((3, 3)), prior).value == pytest.approx(0.5)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 6),
    seed=st.integers(0, 10**6),
    decades=st.floats(0, 8),
    level=st.floats(-6, 9),
    batch=st.integers(1, 2),
)
def test_the_floors_are_ordered(size, seed, decades, level, batch):
    generator = np.random.default_rng(seed)
    prior = GaussianPrior(np.zeros(size), spd(size, generator, decades)).repeat(batch)
    fisher = spd(size * batch, generator, decades) * 10**level
    trace = np.trace(fisher)
    full, tight, low = full_bound(fisher, prior), tight_trace_bound(trace, prior), None
    low = trace_bound(trace, prior)
    assert full.value * (1 + 1e-7) >= tight.value
    assert tight.value * (1 + 1e-9) >= low.value > 0
    assert full.value <= prior.variance / prior.dimension * (1 + 1e-12)


def wishart(mean_root, rank, count, generator):
    """`count` matrices of low rank whose mean is root root^T."""
    draws = generator.standard_normal((count, len(mean_root), rank))
    factors = mean_root @ draws
    return factors @ factors.transpose(0, 2, 1) / rank


@pytest.mark.parametrize(("count", "rank"), [(8, 4), (24, 6)])
def test_sampled_floors_err_downwards_where_the_plug_in_does_not(count, rank):
    generator = np.random.default_rng(11)
    size, repeats = 8, 300
    fisher = spd(size, generator, 2.0)
    root = np.linalg.cholesky(fisher)
    prior = Prior("unit", size, np.full(size, 1.0), 10.0)
    true = full_bound(fisher, prior).value
    naive, values = 0, []
    for _ in range(repeats):
        samples = wishart(root, rank, count, generator)
        naive += full_bound(samples.mean(0), prior).value > true
        values.append(full_bound_from_samples(samples, prior).value)
    assert naive > 0.6 * repeats
    assert (0.8 if count == 8 else 0.9) * true < np.mean(values) < true


def test_a_flat_prior_can_be_sampled():
    generator = np.random.default_rng(12)
    prior, root = FlatPrior(6, 60.0), np.eye(6)
    values = [
        full_bound_from_samples(wishart(root, 3, 40, generator), prior).value for _ in range(20)
    ]
    assert 0.9 < np.mean(values) < 1.01


def test_equal_samples_give_the_exact_floor():
    generator = np.random.default_rng(13)
    prior, fisher = GaussianPrior(np.zeros(4), spd(4, generator)), spd(4, generator)
    floor = full_bound_from_samples(iter([fisher] * 5), prior)
    assert floor.value == pytest.approx(full_bound(fisher, prior).value, rel=1e-9)
    assert floor.standard_error == pytest.approx(0, abs=1e-12)
    assert floor.covers == "estimate"
    assert "5 sampled examples" in floor.assumptions[0]


@pytest.mark.parametrize("tight", [True, False])
def test_sampled_traces_are_near_and_prove_nothing(tight):
    generator = np.random.default_rng(14)
    prior = Prior("uneven", 2, np.array([1.0, 4.0]), 1.25)
    true = (tight_trace_bound if tight else trace_bound)(10.0, prior).value
    traces = generator.chisquare(10, (400, 30))
    floors = [trace_bound_from_samples(row, prior, tight=tight) for row in traces]
    assert {floor.covers for floor in floors} == {"estimate"}
    assert np.mean([floor.value for floor in floors]) == pytest.approx(true, rel=0.02)
    spread = np.std([floor.value for floor in floors])
    assert np.median([floor.standard_error for floor in floors]) == pytest.approx(spread, rel=0.3)


class Thresholds:
    """Gradients of sum_i tanh(gain (x - t_i)), one input, as the release; noise 0.1."""

    gain = 1e7

    def __init__(self, count):
        self.places = np.linspace(0, 1, count)

    def slopes(self, x):
        """tr J_F(x): each unit steps by 2 within 1e-7 of its threshold, and nowhere else."""
        angle = np.clip(self.gain * (x[:, None] - self.places), -300, 300)
        return ((self.gain / np.cosh(angle) ** 2) ** 2).sum(1) / 0.1**2


def test_a_sampled_trace_is_above_what_an_attacker_has_and_proves_nothing():
    """Hardly any of 16 draws lies at a threshold; the mean information is some 1e12 all the same.

    The attacker counts the units that are on, which noise of 0.1 hides from nobody.
    """
    release, prior = Thresholds(3000), GaussianPrior([0.5], [0.025])
    generator = np.random.default_rng(15)
    traces = release.slopes(prior.draw(1600, generator)[:, 0]).reshape(100, 16)
    estimates = [trace_bound_from_samples(row, prior) for row in traces]
    value = np.median([estimate.value for estimate in estimates])
    x = prior.draw(200, generator)[:, 0]
    seen = np.tanh(release.gain * (x[:, None] - release.places))
    noisy = seen + 0.1 * generator.standard_normal(seen.shape)
    found = ((noisy > 0).sum(1) - 0.5) / (len(release.places) - 1)
    inside = (x > 0) & (x < 1)
    errors = np.where(inside, (found - x) ** 2, (x - np.clip(x, 0, 1)) ** 2)
    assert value > 20 * errors.mean()
    assert {(estimate.covers, estimate.confidence) for estimate in estimates} == {
        ("estimate", None)
    }
    # the mean over the prior, by the density at each threshold times the integral of the peak
    density = np.exp(-((release.places - 0.5) ** 2) / 0.05) / np.sqrt(0.05 * np.pi)
    true = 4 / 3 * release.gain * density.sum() / 0.1**2
    assert tight_trace_bound(true, prior).value < 1e-8 < value


GAUSS = GaussianPrior.isotropic(np.zeros(2), 1.0)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: trace_bound(-1.0, GAUSS), "fisher_trace is -1.0"),
        (lambda: tight_trace_bound(float("nan"), GAUSS), "fisher_trace is nan"),
        (lambda: full_bound(np.eye(3), GAUSS), r"fisher has shape \(3, 3\)"),
        (lambda: full_bound([[1.0, 2.0], [0.0, 1.0]], GAUSS), "fisher is not symmetric"),
        (lambda: full_bound(np.diag([1.0, -1.0]), GAUSS), "fisher has the eigenvalue -1"),
        (lambda: full_bound(np.diag([1.0, np.nan]), GAUSS), "fisher holds 1 entries"),
        (lambda: full_bound("no", GAUSS), "fisher is no array"),
        (lambda: full_bound_from_samples([np.eye(2)] * 3, GAUSS), "fishers holds 3"),
        (lambda: full_bound_from_samples([-np.eye(2)] * 4, GAUSS), "fishers holds a negative"),
        (lambda: trace_bound_from_samples([1.0], GAUSS), "traces holds 1"),
        (lambda: trace_bound_from_samples([1.0, -1.0], GAUSS), "traces holds -1"),
    ],
)
def test_bad_input_is_named(call, word):
    with pytest.raises(ValueError, match=word):
        call()
