"""Weiss-Weinstein floors against best attackers by quadrature, and against planted wrong ones."""

import numpy as np
import pytest
from scipy import stats

from leakbound.bounds import (
    FlatPrior,
    GaussianPrior,
    Prior,
    full_bound_from_samples,
    tight_trace_bound,
)
from leakbound.bounds.weiss_weinstein import (
    _values,
    default_steps,
    least_informed,
    weiss_weinstein_bound,
)


def shares(release, x, directions, steps, eighth=1 / 8):
    """(n, r, S) overlaps of a release (n, m) -> (n, d) whose noise has variance 1."""
    found = np.empty((len(x), *steps.shape))
    for j, at in np.ndindex(*steps.shape):
        half = directions[:, j] * steps[j, at] / 2
        found[:, j, at] = np.exp(-((release(x + half) - release(x - half)) ** 2).sum(1) * eighth)
    return found


def direction_bounds(means, steps, information):
    """The bound on E (u^T e)^2 for each direction from exact mean overlaps: its best step's."""
    return _values(np.asarray(means), steps, np.asarray(information))[0].max(1)


def normal_grid(mean, deviation, count):
    """Points and weights of N(mean, deviation^2), 7 deviations wide."""
    x = mean + deviation * np.linspace(-7, 7, count)
    weights = np.exp(-((x - mean) ** 2) / (2 * deviation**2))
    return x, weights / weights.sum()


def best_error(x, weights, seen, outputs):
    """The posterior mean's total error for x (n, m), a release (n,) and noise of variance 1."""
    likely = np.exp(-((seen[:, None] - outputs) ** 2) / 2) / np.sqrt(2 * np.pi)
    mass = weights @ likely
    moments = (weights[:, None] * x).T @ likely
    told = np.where(mass > 1e-200, (moments**2).sum(0) / np.maximum(mass, 1e-200), 0)
    return float(weights @ (x**2).sum(1) - told.sum() * (outputs[1] - outputs[0]))


def exact(release, mean, deviation, steps, eighth=1 / 8, two=1.0):
    """The best attacker's error in one dimension, and the bound, both by quadrature."""
    x, weights = normal_grid(mean, deviation, 4001)
    seen = release(x[:, None])[:, 0]
    outputs = np.linspace(seen.min() - 8, seen.max() + 8, 1200)
    error = best_error(x[:, None], weights, seen, outputs)
    mu = weights @ shares(release, x[:, None], np.eye(1), steps, eighth)[:, 0]
    bound = two * direction_bounds(mu[None], steps, [1 / deviation**2]).sum()
    return error, bound


class Jumps:
    """A step function with a slope: random thresholds, random heights."""

    def __init__(self, generator, mean, deviation):
        count = int(generator.integers(1, 30))
        self.places = np.sort(mean + deviation * generator.standard_normal(count))
        self.heights = generator.standard_normal(count + 1) * 10 ** generator.uniform(-1, 1)
        self.slope = generator.choice([0.0, generator.standard_normal() / deviation])

    def __call__(self, x):
        return self.heights[np.searchsorted(self.places, x)] + self.slope * x


class Slope:
    def __init__(self, slope):
        self.slope = slope

    def __call__(self, x):
        return self.slope * x


@pytest.mark.parametrize("seed", range(20))
def test_no_attacker_on_jumps_beats_the_floor(seed):
    generator = np.random.default_rng(seed)
    mean, deviation = generator.standard_normal(), 10 ** generator.uniform(-1, 1)
    prior = GaussianPrior([mean], [deviation**2])
    release = Jumps(generator, mean, deviation)
    error, bound = exact(release, mean, deviation, default_steps(prior, 9))
    assert 0 < bound <= error * (1 + 1e-3)
    assert bound <= prior.variance


def test_planted_wrong_formulas_are_above_the_best_attacker():
    caught = {"half the exponent": 0, "no factor 2": 0}
    for seed in range(12):
        generator = np.random.default_rng(seed)
        steps = default_steps(GaussianPrior([0.0], [1.0]), 9)
        release = Slope(generator.uniform(0.1, 5)) if seed % 2 else Jumps(generator, 0.0, 1.0)
        error, bound = exact(release, 0.0, 1.0, steps, eighth=1 / 16)
        caught["half the exponent"] += bound > error * 1.001
        error, bound = exact(release, 0.0, 1.0, steps, two=2.0)
        caught["no factor 2"] += bound > error * 1.001
    assert min(caught.values()) >= 6


@pytest.mark.parametrize("seed", range(4))
def test_two_dimensional_cells(seed):
    """A height for each cell of the plane: the sum over both directions against quadrature."""
    generator = np.random.default_rng(seed)
    places = [np.sort(generator.standard_normal(4)) for _ in range(2)]
    heights = generator.standard_normal((5, 5)) * generator.choice([0.5, 2.0, 10.0])

    def release(x):
        cell = tuple(np.searchsorted(p, x[:, i]) for i, p in enumerate(places))
        return heights[cell][:, None]

    line, weight = normal_grid(0.0, 1.0, 141)
    x = np.stack(np.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
    weights = np.outer(weight, weight).ravel()
    seen = release(x)[:, 0]
    levels, which = np.unique(seen, return_inverse=True)
    outputs = np.linspace(levels[0] - 8, levels[-1] + 8, 3000)
    mass = np.bincount(which, weights)
    centers = np.stack([np.bincount(which, weights * x[:, i]) for i in range(2)], 1)
    spread = weights @ (x**2).sum(1) - (centers**2 / mass[:, None]).sum()
    error = spread + best_error(centers / mass[:, None], mass, levels, outputs)
    turn = np.linalg.qr(generator.standard_normal((2, 2)))[0]
    prior = GaussianPrior.isotropic([0, 0], 1.0)
    steps = default_steps(prior, 7)
    for directions in (np.eye(2), turn):
        mu = np.einsum("n,nrs->rs", weights, shares(release, x, directions, steps))
        assert 0 < direction_bounds(mu, steps, [1, 1]).sum() <= error * 1.001


@pytest.mark.parametrize("step", [0.3, 1.0, 2.0])
def test_mu_is_the_mean_root_of_the_likelihood_ratio(step):
    """E sqrt(p(y, x + h) / p(y, x)) by brute force over (x, y), and the moments of psi."""
    mean, deviation = 0.4, 0.8
    release = Jumps(np.random.default_rng(3), mean, deviation)
    x = np.linspace(mean - 9 * deviation, mean + 9 * deviation, 3001)
    weights = np.full(len(x), x[1] - x[0])
    seen = release(x[:, None])[:, 0]
    y = np.linspace(seen.min() - 9, seen.max() + 9, 500)

    def root(at):
        law = stats.norm.logpdf(at, mean, deviation)[:, None]
        heights = release(at[:, None])
        return np.exp((law + stats.norm.logpdf(y, heights, 1)) / 2)

    def integral(values):
        return float((weights @ values).sum() * (y[1] - y[0]))

    here, ahead, behind = root(x), root(x + step), root(x - step)

    def mu(h):
        middle = np.exp(-((release(x + h / 2) - release(x - h / 2)) ** 2) / 8)
        prior = stats.norm.pdf(x, mean, deviation)
        return np.exp(-(h**2) / (8 * deviation**2)) * float(weights @ (prior * middle))

    assert integral(here * ahead) == pytest.approx(mu(step), rel=5e-3)
    spread = integral((ahead - behind) ** 2)
    assert spread == pytest.approx(2 * (1 - mu(2 * step)), rel=5e-3)
    guess = np.tanh(y)
    product = integral((guess - x[:, None]) * here * (ahead - behind))
    assert product == pytest.approx(step * mu(step), rel=2e-2)


def linear(generator, m):
    a = generator.standard_normal((2 * m, m)) * generator.uniform(0.3, 2)
    covariance = 10 ** generator.uniform(-1, 1, m)
    prior = GaussianPrior(np.zeros(m), covariance)
    return a, prior, a.T @ a, np.trace(np.linalg.inv(a.T @ a + prior.matrix))


@pytest.mark.parametrize("seed", range(8))
def test_linear_models(seed):
    generator = np.random.default_rng(seed)
    a, prior, fisher, error = linear(generator, 4)
    scalar = (1 / np.diag(fisher + prior.matrix)).sum()
    x = prior.draw(2, generator)

    def release(points):
        return points @ a.T

    steps = default_steps(prior, 2, largest=0.02, information=np.diag(fisher + prior.matrix))
    mu = shares(release, x, np.eye(4), steps)[0]
    bounds = direction_bounds(mu, steps, np.diag(prior.matrix))
    assert bounds.sum() == pytest.approx(scalar, rel=1e-3)
    assert bounds.sum() <= error * (1 + 1e-9)
    wrong = direction_bounds(mu**2, steps, np.diag(prior.matrix)).sum()  # 1/4 for 1/8
    assert wrong < 0.99 * scalar
    directions, information = least_informed(fisher, prior, 4)
    steps = default_steps(prior, 4, directions=directions, information=information)
    x = prior.draw(400, generator)
    seen = shares(release, x, directions, steps)
    floor = weiss_weinstein_bound(seen, steps, prior, directions=directions)
    assert 0.9 * error < 4 * floor.value <= error
    for count, share in ((64, 0.65), (96, 0.75), (128, 0.8)):
        few = weiss_weinstein_bound(seen[:count], steps, prior, directions=directions)
        assert share * error < 4 * few.value <= 4 * floor.value
    assert tight_trace_bound(np.trace(fisher), prior).value <= error / 4
    part = directions[:, :2]
    less = weiss_weinstein_bound(seen[:, :2], steps[:2], prior, directions=part)
    assert 0 < less.value < floor.value


def test_without_information_the_floor_is_the_priors_variance():
    prior = GaussianPrior([0, 0, 0], [4.0, 1.0, 0.0])
    steps = default_steps(prior, 9)
    ones = np.ones((4000, 2, 9))
    assert direction_bounds(ones[0], steps, prior.information).sum() == pytest.approx(5, rel=1e-3)
    floor = weiss_weinstein_bound(ones, steps, prior)
    assert 0.97 * 5 < 3 * floor.value <= 5
    assert floor.name == "weiss_weinstein"
    assert floor.covers == "all"
    assert floor.rests_on_prior
    assert "1985" in floor.equation
    assert not any("smooth in x" in line for line in floor.assumptions)
    joint = prior.repeat(2)
    twice = weiss_weinstein_bound(np.ones((4000, 4, 9)), default_steps(joint, 9), joint)
    assert twice.value == pytest.approx(floor.value, rel=1e-6)
    assert weiss_weinstein_bound(0 * ones, steps, prior).value == 0


class Kinks:
    """Gradients of sum_i relu(x - t_i): one input, N thresholds; noise 0.1 taken to 1."""

    def __init__(self, count):
        self.places = np.linspace(0, 1, count)

    def __call__(self, x):
        on = (x > self.places).astype(float)
        return np.concatenate([on * (x - self.places), on * x, on], 1) / 0.1

    def slope(self, x):
        return 2 * (x > self.places).sum(1) / 0.1**2


def posterior_errors(release, prior, count, generator):
    """Squared errors of the posterior mean, on a window of 20 gaps around the truth."""
    gap, errors = release.places[1] - release.places[0], []
    for x in prior.draw(count, generator):
        near = x + gap * np.linspace(-10, 10, 401)[:, None]
        seen = release(x[None]) + generator.standard_normal((1, 3 * len(release.places)))
        log = -((seen - release(near)) ** 2).sum(1) / 2
        log -= (near[:, 0] - prior.mean[0]) ** 2 / (2 * prior.variance)
        weights = np.exp(log - log.max())
        errors.append((weights @ near[:, 0] / weights.sum() - x[0]) ** 2)
    return np.array(errors)


def test_kinks_break_cramer_rao_and_not_this_floor():
    generator = np.random.default_rng(0)
    release, prior = Kinks(2000), GaussianPrior([0.5], [0.01])
    errors = posterior_errors(release, prior, 60, generator)
    attacked = errors.mean()
    upper = attacked + 3 * errors.std() / 60**0.5
    x = prior.draw(200, generator)
    cramer_rao = full_bound_from_samples([np.array([[s]]) for s in release.slope(x)], prior)
    assert cramer_rao.value > 10 * upper, "what the reviewer saw"
    steps = default_steps(prior, 14)
    floor = weiss_weinstein_bound(shares(release, x, np.eye(1), steps), steps, prior)
    assert 0.1 * attacked < floor.value < attacked


@pytest.mark.parametrize("count", [1, 5, 40])
def test_the_sampled_floor_covers(count):
    """16 images: above the exact bound in 1 % of cases at most, and never above the attacker."""
    prior = GaussianPrior([0.0], [1.0])
    steps = default_steps(prior, 8)
    x, weights = normal_grid(0.0, 1.0, 20001)
    generator = np.random.default_rng(1)
    places = np.linspace(-1.2, 1.3, count)

    def release(points):
        return 6.0 * np.searchsorted(places, points) + 0.3 * points

    def sampled(number):
        seen = shares(release, prior.draw(number, generator), np.eye(1), steps)
        return weiss_weinstein_bound(seen, steps, prior).value

    mu = weights @ shares(release, x[:, None], np.eye(1), steps)[:, 0]
    best = direction_bounds(mu[None], steps, [1.0])[0]
    values = np.array([sampled(16) for _ in range(200)])
    assert stats.binom.sf((values > best).sum() - 1, 200, 0.01) > 1e-3
    assert values.max() < exact(release, 0.0, 1.0, steps)[0]
    assert 0.4 * best < sampled(4000) <= best


@pytest.mark.parametrize("threshold", [0.0, 1.5, 2.5])
def test_jumps_that_few_images_show(threshold):
    """All eight directions jump at once, up to as seldom as one image in 160; 96 images."""
    generator = np.random.default_rng(5)
    prior = GaussianPrior.isotropic(np.zeros(8), 1.0)
    steps = default_steps(prior, 6)

    def release(z):
        jump = 20 * (z.sum(1, keepdims=True) / 8**0.5 > threshold)
        return np.concatenate([jump, 0.2 * z], 1)

    many = shares(release, prior.draw(10000, generator), np.eye(8), steps).mean(0)
    best = direction_bounds(many, steps, np.ones(8)).sum() / 8
    values = []
    for _ in range(100):
        seen = shares(release, prior.draw(96, generator), np.eye(8), steps)
        values.append(weiss_weinstein_bound(seen, steps, prior).value)
    assert stats.binom.sf((np.array(values) > best).sum() - 1, 100, 0.01) > 1e-3
    assert np.mean(values) > 0.5 * best


def test_confidence_and_the_number_of_images():
    generator = np.random.default_rng(2)
    prior = GaussianPrior([0.0], [1.0])
    steps = default_steps(prior, 5)
    release = Jumps(generator, 0.0, 1.0)
    seen = shares(release, prior.draw(300, generator), np.eye(1), steps)
    sure = weiss_weinstein_bound(seen, steps, prior, confidence=0.999)
    likely = weiss_weinstein_bound(seen, steps, prior, confidence=0.9)
    assert sure.value < likely.value
    assert (sure.confidence, likely.confidence) == (0.999, 0.9)


PRIOR = GaussianPrior([0.0, 0.0], [1.0, 2.0])
STEPS = default_steps(PRIOR, 3)
SEEN = np.ones((4, 2, 3))


@pytest.mark.parametrize(
    ("match", "call"),
    [
        ("at least 4", lambda: weiss_weinstein_bound(SEEN[:3], STEPS, PRIOR)),
        ("overlaps has", lambda: weiss_weinstein_bound(SEEN * 1.1, STEPS, PRIOR)),
        ("do not fit", lambda: weiss_weinstein_bound(SEEN[:, :1], STEPS, PRIOR)),
        ("NaN", lambda: weiss_weinstein_bound(SEEN * np.nan, STEPS, PRIOR)),
        ("twice", lambda: weiss_weinstein_bound(SEEN, np.ones((2, 3)), PRIOR)),
        ("steps has shape", lambda: weiss_weinstein_bound(SEEN, STEPS[:1], PRIOR)),
        ("confidence", lambda: weiss_weinstein_bound(SEEN, STEPS, PRIOR, confidence=1.0)),
        ("not Gaussian", lambda: weiss_weinstein_bound(SEEN, STEPS, FlatPrior(2, 1.0))),
        ("not Gaussian", lambda: default_steps(Prior("wide", 2, np.ones(2), 3.0), 3)),
        ("not Gaussian", lambda: default_steps(Prior("mixture", 1, np.eye(1), 2.0), 3)),
        (
            "directions",
            lambda: weiss_weinstein_bound(SEEN, STEPS, PRIOR, directions=np.ones((2, 2))),
        ),
        ("count is 1", lambda: default_steps(PRIOR, 1)),
        ("information is wrong", lambda: default_steps(PRIOR, 2, information=[1.0])),
        ("give one above 0", lambda: least_informed(-9 * np.eye(2), PRIOR, 1)),
    ],
)
def test_wrong_arguments(match, call):
    with pytest.raises(ValueError, match=match):
        call()
