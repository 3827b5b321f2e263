"""What public examples show without a model: against brute force, Monte Carlo and known numbers."""

from __future__ import annotations

import math
from functools import partial
from itertools import combinations

import mpmath
import numpy as np
import pytest
from scipy import optimize, special, stats

from leakbound import data
from leakbound.bounds import balls, counting
from leakbound.bounds.counting import PublicSample, count_limit
from leakbound.bounds.distances import SquaredError
from leakbound.risk.corridor import TrainingSetting, success_bound


def ball_counts(examples, eta):
    return PublicSample(examples).counts(eta)[0]


@pytest.fixture(scope="module")
def digits():
    loaded = data.load("mnist5k")
    return loaded.inputs.flatten(1).double().numpy(), loaded.labels.numpy()


@pytest.fixture(scope="module")
def sample(digits):
    return PublicSample(digits[0])


def eta(psnr):
    return 10 ** (-psnr / 10)


# --- limits on a share


@pytest.mark.parametrize(("count", "n"), [(0, 10), (1, 5000), (7, 5000), (3, 8), (262, 5000)])
def test_a_limit_solves_the_binomial_tail(count, n):
    """P(Bin(n, limit) <= count) = 5 %, summed in mpmath."""
    p = mpmath.mpf(count_limit(count, n))
    with mpmath.workdps(40):
        tail = sum(mpmath.binomial(n, k) * p**k * (1 - p) ** (n - k) for k in range(count + 1))
    assert float(tail) == pytest.approx(0.05, rel=1e-6)


def test_limits_of_the_sheet():
    found = [5000 * count_limit(k, 5000) for k in (0, 1, 2, 3, 5, 7, 10, 12)]
    assert found == pytest.approx([3.00, 4.74, 6.30, 7.75, 10.51, 13.15, 16.96, 19.44], abs=0.013)
    assert [counting.examples_needed(g) for g in (0.05, 0.01, 0.001)] == [93, 473, 4742]
    assert count_limit(5, 5) == 1.0


@pytest.mark.parametrize(("mass", "n"), [(4.8, 5000), (6.0, 5000), (9.0, 5000), (4.7, 1000)])
def test_coverage_of_one_atom(mass, n):
    """An atom of probability mass / n among examples that are all apart; k / n is no limit."""
    draws = np.random.default_rng(0).binomial(n, mass / n, 40_000)
    limits = {k: count_limit(max(1, k), n) for k in np.unique(draws).tolist()}
    missed = np.mean([limits[k] < mass / n for k in draws.tolist()])
    assert missed <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / len(draws))
    assert np.mean(draws / n < mass / n) > 0.3


# --- counts of balls


def most_on_a_line(points, radius):
    points = np.sort(points)
    spans = [(x - 1e-12, x + 2 * radius + 1e-12) for x in points]
    return max(int(((points >= low) & (points <= high)).sum()) for low, high in spans)


@pytest.mark.parametrize("seed", range(8))
def test_counts_on_a_line_are_exact(seed):
    draw = np.random.default_rng(seed)
    points = draw.random(60)
    radius = draw.uniform(0.005, 0.04)
    found = ball_counts(points[:, None], radius**2)
    assert (found.how, found.most) == ("exact", most_on_a_line(points, radius))
    for point, most in zip(points, found.each, strict=True):
        near = points[abs(points - point) <= 2 * radius]
        holding = [x for x in near if abs(x - point) <= 2 * radius]
        spans = [np.sum((near >= x) & (near <= x + 2 * radius)) for x in holding if x <= point]
        assert most >= min(found.most, max(spans))


def most_in_the_plane(points, radius):
    """Of discs whose edge holds two points, and of discs around one: brute force."""
    centers = list(points)
    for a, b in combinations(points, 2):
        half, apart = (a + b) / 2, np.linalg.norm(a - b)
        if 0 < apart <= 2 * radius:
            step = math.sqrt(radius**2 - (apart / 2) ** 2) / apart
            normal = np.array([b[1] - a[1], a[0] - b[0]])
            centers += [half + step * normal, half - step * normal]
    apart = np.linalg.norm(np.array(centers)[:, None] - points, axis=2)
    return int((apart <= radius * (1 + 1e-9)).sum(1).max())


@pytest.mark.parametrize("seed", range(6))
def test_counts_in_the_plane_are_exact(seed):
    draw = np.random.default_rng(seed)
    points, radius = draw.random((40, 2)), draw.uniform(0.05, 0.2)
    found = ball_counts(points, radius**2 / 2)
    assert (found.how, found.most) == ("exact", most_in_the_plane(points, radius))


def test_counts_of_digits(digits):
    """K* of 5,000 digits; the medoid's bound where the search takes too long."""
    found = {psnr: ball_counts(digits[0], eta(psnr)) for psnr in (22, 25.5, 30)}
    assert [(found[p].most, found[p].how) for p in found] == [
        *((103, "medoid"), (7, "exact"), (3, "exact"))
    ]
    near = balls.neighbors(SquaredError().among(digits[0]), 4 * eta(25.5)).near
    assert max(map(len, near)) == 36
    assert all(found[25.5].each <= 7)


def test_too_many_pairs_leave_the_count_of_neighbors(monkeypatch):
    points = np.random.default_rng(0).random((60, 2))
    sharp = ball_counts(points, 0.01)
    monkeypatch.setattr(balls, "MOST_PAIRS", 100)
    rough = ball_counts(points, 0.01)
    assert rough.how == "neighbors"
    assert rough.most >= sharp.most
    assert (rough.each >= sharp.each).all()


# --- the profile bound


def test_self_bounding_limits_of_the_sheet():
    for seen, wanted in ((1, 5.74), (2, 7.69), (3, 9.43), (5, 12.63), (10, 19.85)):
        assert counting.self_bounding_limit(seen) == pytest.approx(wanted, abs=0.006)


def profile_limit(each, lift, guesses=1, confidence=counting.CONFIDENCE):
    return counting._profile_limit(each, counting._envelope(lift), guesses, confidence)


def profiled(sample, **more):
    each = [found.each for found in sample.counts(eta(25.5))]
    return profile_limit(each, 1.0, guesses=sample.guesses, **more)


def test_the_profile_is_the_largest_mean():
    """Against a general solver on a few kinds of examples."""
    draw = np.random.default_rng(0)
    for noise in (0.4, 1.0, 3.0):
        each = draw.integers(1, 6, 30).astype(float)

        kinds, number = np.unique(each, return_counts=True)

        def lost(logits):
            q = np.minimum(1, special.softmax(logits) * kinds / number)  # noqa: B023
            return -(number * special.ndtr(special.ndtri(q) + 1 / noise)).sum()  # noqa: B023

        found = optimize.minimize(lost, np.zeros(len(kinds)), method="Nelder-Mead", tol=1e-10)
        most = counting._most_success(each, counting._envelope(noise), 1)
        assert -found.fun * (1 - 1e-9) <= most <= -found.fun * 1.004


@pytest.mark.parametrize(
    ("psnr", "noise", "gamma"),
    [(22, 1.10, 0.05), (25.5, 0.58, 0.05), (25.5, 1.30, 0.01), (30, 0.55, 0.05), (30, 0.94, 0.01)],
)
def test_profiles_of_the_sheet(sample, psnr, noise, gamma):
    each = [found.each for found in sample.counts(eta(psnr))]
    assert profile_limit(each, noise) == pytest.approx(gamma, rel=0.025)


@pytest.mark.parametrize(("psnr", "noise", "gamma"), [(25.5, 0.87, 0.05), (30, 1.58, 0.01)])
def test_limits_on_kappa_of_the_sheet(sample, psnr, noise, gamma):
    kappa = math.exp(sample.log_kappa(eta(psnr)))
    assert stats.norm.cdf(stats.norm.ppf(kappa) + 1 / noise) == pytest.approx(gamma, rel=0.02)


@pytest.mark.parametrize("participation", ["visible", "hidden"])
def test_the_profile_of_a_sampled_training(participation):
    """Isolated examples share one guess: each is matched with F(1 / n), F of the whole training."""
    setting = TrainingSetting(0.8, 10, steps=200, sampling_rate=0.02, participation=participation)
    lift = partial(success_bound, setting)
    ones, n = np.ones(3000), 3000
    exact = n * float(lift(np.log(1 / n)))
    most = counting._most_success(ones, counting._envelope(lift), 1)
    assert exact * (1 - 1e-9) <= most <= exact * 1.004
    clusters = np.full(3000, 10.0)
    exact = n * float(lift(np.log(10 / n)))
    most = counting._most_success(clusters, counting._envelope(lift), 1)
    assert exact * (1 - 1e-9) <= most <= exact * 1.004


def test_an_envelope_lies_above_its_law():
    for noise in (0.1, 0.5, 2.0, 50.0):
        q, above = counting._envelope(noise)
        places = np.exp(np.linspace(-40, 0, 2001))
        line = np.interp(places, q, above)
        assert (line >= stats.norm.cdf(stats.norm.ppf(places) + 1 / noise) * (1 - 1e-12)).all()
        assert (np.diff(np.diff(above) / np.diff(q)) <= 1e-9).all()


def test_isolated_examples():
    ones = np.ones(5000)
    assert profile_limit([ones], 0.55) == pytest.approx(0.05, rel=0.02)
    assert profile_limit([ones], 0.94) == pytest.approx(0.01, rel=0.02)
    assert profile_limit([ones], 0.0) == 1.0


# --- samples


def test_known_labels(digits):
    """One guess a class; ten classes of which no two are alike need 9.85 / n, not U(10; n)."""
    rows = np.arange(5000.0)[:, None]
    labels = np.arange(5000) % 10
    ten = PublicSample(rows, labels, classes=10)
    assert 5000 * math.exp(ten.log_kappa(1e-6)) == pytest.approx(9.85, abs=0.01)
    hundred = PublicSample(rows, np.arange(5000) % 100, classes=100)
    assert 5000 * math.exp(hundred.log_kappa(1e-6)) == pytest.approx(26.5, abs=0.1)
    known = PublicSample(*digits)
    assert known.largest(eta(25.5)) == 21
    assert known.largest(eta(30)) == 12
    assert known.log_kappa(eta(30)) > PublicSample(digits[0]).log_kappa(eta(30))


def test_the_birthday_limit_covers():
    """Ten classes with one atom each at the limit: all stay apart in 5 % of samples."""
    n, classes = 500, 10
    kappa = math.exp(
        PublicSample(np.arange(n)[:, None], np.arange(n) % 10, classes=10).log_kappa(1e-6)
    )
    counts = np.random.default_rng(0).multinomial(
        n, [*[kappa / classes] * classes, 1 - kappa], 40_000
    )
    apart = (counts[:, :classes] <= 1).all(1).mean()
    assert apart == pytest.approx(0.05, abs=0.005)


def test_classes_that_were_not_seen_count():
    """Each class one atom, of many classes: whoever knows the label knows the example."""
    rows, labels = np.arange(10.0)[:, None], np.arange(10)
    assert PublicSample(rows, labels).log_kappa(1e-6) == 0.0  # kappa is 1, and nothing less is said
    assert PublicSample(rows, labels, classes=10).log_kappa(1e-6) < 0
    assert PublicSample(rows, labels, classes=10**6).log_kappa(1e-6) == 0.0


def test_one_of_each_source_is_drawn_at_random():
    """Data sorted by class: the first of each writer would all be of one class."""
    labels = np.tile(np.arange(10), 200)
    found = PublicSample(labels[:, None], labels, sources=np.repeat(np.arange(200), 10))
    assert found.n == 200
    assert np.bincount(found.labels, minlength=10).min() > 5


def test_several_guesses(sample):
    many = PublicSample(sample.examples, guesses=64)
    assert math.exp(many.log_kappa(eta(25.5))) == pytest.approx(0.097, abs=0.001)
    assert profiled(many) > profiled(sample)


def test_tiles_of_one_photograph_are_one_example():
    loaded = data.load("photos", size=16)
    rows, origins = loaded.inputs.flatten(1).numpy(), loaded.origins.numpy()
    found = PublicSample(rows, sources=origins)
    assert found.n == 8
    assert math.exp(found.log_kappa(1e-9)) > 0.4
    assert data.load("mnist5k", limit=10).origins is None


def test_curves_hold_jointly(digits):
    """More thresholds cost confidence, and a limit never falls with the threshold."""
    sample = PublicSample(digits[0][:1000])
    levels = np.array([eta(p) for p in np.linspace(22, 30, 61)])
    found = sample.log_kappa(levels)
    assert (np.diff(found[::-1]) >= 0).all()
    singles = [sample.log_kappa(level) for level in levels[[0, 30, 60]]]
    assert (found[[0, 30, 60]] >= singles).all()


def test_the_better_of_two_bounds_costs_half(sample):
    bound, known = sample.success_bound(1.0, eta(25.5))
    assert known[0] == pytest.approx(math.log(count_limit(7, 5000, confidence=0.975)), rel=1e-12)
    assert bound[0] == pytest.approx(profiled(sample, confidence=0.975), rel=1e-9)
    loud = sample.success_bound(1e6, eta(25.5))[0]
    assert loud[0] == pytest.approx(count_limit(7, 5000, confidence=0.975), rel=1e-3)


def test_resampled_digits_are_covered(digits):
    """A distribution of 5,000 atoms whose kappa is at least 103 / 5000's exact count below."""
    draw = np.random.default_rng(0)
    kappa = 7 / 5000  # one ball holds 7 of the atoms
    limits = [
        math.exp(PublicSample(digits[0][draw.integers(0, 5000, 400)]).log_kappa(eta(25.5)))
        for _ in range(20)
    ]
    assert sum(limit < kappa for limit in limits) <= 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"labels": np.zeros(3)}, "labels holds 3"),
        ({"guesses": 0}, "guesses is 0"),
        ({"confidence": 1.0}, "confidence is 1"),
    ],
)
def test_wrong_samples(given, words):
    with pytest.raises(ValueError, match=words):
        PublicSample(np.zeros((5, 2)), **given)


# --- whether private examples are drawn like public ones


def test_the_same_law_passes(digits):
    order = np.random.default_rng(0).permutation(5000)
    own = [digits[0][order[a : a + 500]] for a in (0, 500)]
    assert counting.same_law(*own, np.random.default_rng(1)) > 0.05


def test_another_share_of_ones_is_found(digits):
    rows, labels = digits
    draw = np.random.default_rng(0)
    ones, others = (draw.permutation(np.flatnonzero(own)) for own in (labels == 1, labels != 1))
    mixed = rows[np.concatenate([ones[:300], others[:700]])]
    usual = rows[np.concatenate([ones[300:400], others[700:1600]])]
    assert counting.same_law(mixed, usual, np.random.default_rng(1)) < 0.01


def test_p_values_are_uniform_under_one_law():
    draw = np.random.default_rng(0)
    found = [counting.same_law(draw.random((40, 3)), draw.random((40, 3)), draw) for _ in range(60)]
    assert np.mean(np.array(found) <= 0.1) <= 0.1 + 3 * math.sqrt(0.09 / 60)


# --- the mean error


def test_the_mean_error_of_the_sheet(digits):
    """Without an update, and with known labels; the profile makes small noise tighter."""
    levels = eta(np.array([30, 28, 26, 24.5, 23, 21.5, 20, 18.5, 17, 15.5, 14, 12.0]))
    sample = PublicSample(digits[0][:2000])
    found = [sample.mean_error(noise, levels) for noise in (0.3, 1.0, 1e9)]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(0.0292, rel=0.03)
    known = PublicSample(digits[0][:2000], digits[1][:2000]).mean_error(1e9, levels)
    assert known == pytest.approx(0.0234, rel=0.06)


def test_the_mean_error_is_the_integral():
    """Against quadrature of what the success bounds leave, which a fine grid comes near."""
    sample = PublicSample(np.random.default_rng(0).random((300, 8)))
    grid = np.linspace(0.001, 0.02, 12)
    bound = sample.success_bound(2.0, grid)[0]
    by_hand = sum((b - a) * (1 - p) for a, b, p in zip([0.0, *grid], grid, bound, strict=False))
    assert sample.mean_error(2.0, grid[::-1]) == pytest.approx(by_hand, rel=1e-12)
    assert sample.mean_error(0.0, grid) == 0.0


# --- the examples themselves


def these(rows, noise, level):
    return float(counting.TheseExamples(rows).success_bound(noise, level)[0][0])


@pytest.mark.parametrize(
    ("psnr", "noise", "gamma"), [(25.5, 0.55, 0.05), (25.5, 1.01, 0.01), (30, 0.83, 0.01)]
)
def test_these_examples_of_the_sheet(digits, psnr, noise, gamma):
    found = these(digits[0], noise, eta(psnr))
    assert found == pytest.approx(gamma, rel=0.03)


def test_the_best_attack_on_atoms_is_not_above():
    """Equal atoms far apart, which a codebook of all of them names: the bound is that attack's."""
    atoms, noise = 10.0 * np.eye(200), 0.5
    found = these(atoms, noise, 0.01)
    draw = np.random.default_rng(0)
    seen = noise * draw.standard_normal((20_000, 200))
    target = draw.integers(0, 200, len(seen))
    seen[np.arange(len(seen)), target] += 1
    hits = (seen.argmax(1) == target).mean()
    assert 0.6 * found < hits <= found
    assert these(atoms, 0.0, 0.01) == 1.0
    assert these(atoms, 1e9, 0.01) == pytest.approx(1 / 200, rel=1e-6)
    assert np.exp(counting.TheseExamples(atoms).log_kappa(0.01)) == pytest.approx(1 / 200)
    with pytest.raises(ValueError, match="labels holds 3"):
        counting.TheseExamples(atoms, labels=[1, 2, 3])
    with pytest.raises(ValueError, match="sources is given"):
        counting.TheseExamples(atoms, sources=np.arange(200))
