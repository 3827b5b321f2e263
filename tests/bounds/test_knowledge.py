"""What an intruder knows already, and what an update adds: against closed forms and simulation."""

import math

import mpmath
import numpy as np
import pytest
import scipy.stats

from leakbound.bounds.composition import subsampled, visible
from leakbound.bounds.counting import PublicSample
from leakbound.bounds.distances import ColumnMisses
from leakbound.bounds.identification import gaussian
from leakbound.bounds.knowledge import (
    attribute_success,
    enclosing_radius,
    gain_of_step,
    informed,
    largest_gain,
    noise_for_gain,
)


@pytest.mark.parametrize(("gain", "noise"), [(0.05, 7.974), (0.1, 3.979), (0.2, 1.974)])
def test_the_noise_for_a_gain_is_that_of_the_closed_form(gain, noise):
    assert noise_for_gain(gain) == pytest.approx(noise, abs=5e-4)
    with mpmath.workdps(30):
        exact = 2 * mpmath.ncdf(1 / (2 * mpmath.mpf(noise_for_gain(gain)))) - 1
    assert float(exact) == pytest.approx(gain, rel=1e-12)
    assert gain_of_step(noise_for_gain(gain)) == pytest.approx(gain, rel=1e-12)


def test_an_intruder_who_completes_a_third_of_the_rows():
    """34 % without the update become at most 72 % at noise 1 and 42 % at noise 5."""
    assert gaussian([1.0, 5.0], kappa=0.34) == pytest.approx([0.72, 0.42], abs=0.005)


@pytest.mark.parametrize("noise", [0.2, 1.0, 5.0, 60.0])
def test_the_largest_gain_of_one_step_is_its_total_variation(noise):
    gain, place = largest_gain(noise)
    exact = gain_of_step(noise)
    assert exact <= gain <= exact + 1e-5
    assert gaussian(noise, kappa=place) - place == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("law", [visible, subsampled])
def test_the_largest_gain_of_a_training_covers_every_prior_success(law):
    def lift(log):
        return np.asarray(law(0.9, sampling_rate=0.05, steps=60, log_kappa=log))

    gain, place = largest_gain(lift)
    q = np.random.default_rng(0).random(5000)
    assert (lift(np.log(q)) - q).max() <= gain
    assert lift(np.log(place)) - place >= gain - 1e-5


def test_one_sampled_step_adds_its_share_of_a_full_one():
    def lift(log):
        return np.asarray(visible(1.0, sampling_rate=0.3, steps=1, log_kappa=log))

    assert largest_gain(lift)[0] == pytest.approx(0.3 * gain_of_step(1.0), abs=1e-6)


def test_without_noise_everything_may_be_gained():
    gain, place = largest_gain(0.0)
    assert gain == pytest.approx(1.0, abs=1e-5)
    assert place < 1e-5
    assert largest_gain(math.inf)[0] <= 1e-5


def test_the_attribute_bound_is_what_the_matched_filter_attains():
    """Two equally likely values, gradients at +-R: deciding by the sign is right with Phi(R/s)."""
    draw = np.random.default_rng(1)
    noise, radius, trials = 0.8, 0.6, 400_000
    truth = draw.integers(0, 2, trials) * 2 - 1
    seen = radius * truth + noise * draw.standard_normal(trials)
    attained = float((np.sign(seen) == truth).mean())
    bound = attribute_success(0.5, noise, radius=radius)
    assert bound == pytest.approx(scipy.stats.norm.cdf(radius / noise), rel=1e-12)
    assert abs(attained - bound) < 4 * math.sqrt(bound * (1 - bound) / trials)


@pytest.mark.parametrize("prior", [(0.6, 0.4), (0.9, 0.1), (0.5, 0.3, 0.2)])
def test_no_bayes_attacker_exceeds_the_attribute_bound(prior):
    draw = np.random.default_rng(2)
    points = draw.standard_normal((len(prior), 3))
    radius = enclosing_radius(points)
    points /= radius
    for noise in (0.3, 1.0, 3.0):
        truth = draw.choice(len(prior), 100_000, p=prior)
        seen = points[truth] + noise * draw.standard_normal((len(truth), 3))
        apart = np.square(seen[:, None] - points).sum(-1)
        posterior = np.log(prior) - apart / (2 * noise**2)
        attained = float((posterior.argmax(1) == truth).mean())
        bound = attribute_success(max(prior), noise)
        assert attained <= bound + 4 * math.sqrt(bound * (1 - bound) / len(truth))


def test_the_sheets_attribute_numbers():
    assert attribute_success(0.6, 0.454) == pytest.approx(0.993, abs=5e-4)
    assert attribute_success(0.5, 3.98) - 0.5 == pytest.approx(0.0992, abs=5e-4)
    # Values with one gradient stay unknown, even without noise.
    assert attribute_success(0.7, 0.0, radius=0.0) == pytest.approx(0.7)
    assert attribute_success(0.7, 0.0) == 1.0


@pytest.mark.parametrize("size", [2, 3, 7])
def test_the_enclosing_ball_holds_all_and_is_nearly_the_smallest(size):
    """Against Welzl's idea by brute force: the smallest ball is that of two or three points."""
    points = np.random.default_rng(size).standard_normal((size, 2))
    radius = enclosing_radius(points)

    def covers(center):
        return float(np.linalg.norm(points - center, axis=1).max())

    best = math.inf
    for a in range(size):
        for b in range(a):
            best = min(best, covers((points[a] + points[b]) / 2))
            for c in range(b):
                rows = points[[a, b]] - points[c]
                offset = np.linalg.solve(2 * rows, np.square(rows).sum(1))
                best = min(best, covers(points[c] + offset))
    assert best <= radius * (1 + 1e-9)
    assert radius <= 1.03 * best


def table(n, draw, levels=4, extra=0):
    """Rows whose second column is the first with probability .7; `extra` makes a key of A."""
    known = draw.integers(0, levels, n)
    hidden = np.where(draw.random(n) < 0.7, known, draw.integers(0, levels, n))
    keys = draw.integers(0, extra, n) if extra else np.zeros(n)
    return np.column_stack([known, keys, hidden]).astype(float)


def counted(columns):
    return ColumnMisses(lambda rows: 4 * rows, columns)


def test_coarse_knowledge_is_bounded_from_public_rows():
    """q = .7 + .3 / 4; the limit covers it in at least 95 % of samples, and is not far."""
    draw = np.random.default_rng(3)
    q = 0.7 + 0.3 / 4
    limits = []
    for _ in range(100):
        sample = PublicSample(table(200, draw), distance=counted(3))
        limits.append(math.exp(informed(sample, [0, 1], distance=counted(1)).log_kappa(0.0)))
    assert np.mean(np.array(limits) >= q) >= 0.95 - 2 * math.sqrt(0.05 * 0.95 / 100)
    assert np.median(limits) < 0.85
    # The stranger's limit is far below, so the test tells both apart.
    stranger = math.exp(sample.log_kappa(0.0))
    assert stranger < 0.35


def test_knowledge_that_names_every_row_bounds_nothing():
    sample = PublicSample(table(300, np.random.default_rng(4), extra=10**6), distance=counted(3))
    knows = informed(sample, [0, 1], distance=counted(1))
    assert knows.largest(0.0) == 300
    assert math.exp(knows.log_kappa(0.0)) == pytest.approx(1.0)


def test_the_success_of_an_intruder_is_bounded_with_the_update():
    """The Bayes attacker who knows A and sees the value's gradient with noise stays below."""
    draw = np.random.default_rng(5)
    rows = table(2000, draw)
    noise = 1.0
    knows = informed(PublicSample(rows, distance=counted(3)), [0, 1], distance=counted(1))
    bound = float(knows.success_bound(noise, 0.0)[0][0])
    fresh = table(100_000, draw)
    known, hidden = fresh[:, 0].astype(int), fresh[:, 2].astype(int)
    # Values at the corners of a simplex with edge 1: gradients in a ball of radius below 1.
    corners = np.eye(4) / math.sqrt(2)
    seen = corners[hidden] + noise * draw.standard_normal((len(fresh), 4))
    prior = np.full((4, 4), 0.3 / 4) + 0.7 * np.eye(4)
    posterior = np.log(prior[known]) - np.square(seen[:, None] - corners).sum(-1) / 2
    attained = float((posterior.argmax(1) == hidden).mean())
    assert 0.775 < attained < bound < 1


def test_known_labels_stay_known_and_columns_are_checked():
    draw = np.random.default_rng(6)
    rows = table(200, draw)
    labels = draw.integers(0, 2, 200)
    both = informed(PublicSample(rows, labels), [0])
    assert len(np.unique(both.labels)) == 8
    assert both.dim == 2
    with pytest.raises(ValueError, match="every column"):
        informed(PublicSample(rows), [0, 1, 2])
    with pytest.raises(ValueError, match="places from 0 to 2"):
        informed(PublicSample(rows), [3])


@pytest.mark.slow
def test_the_best_intruder_seldom_exceeds_the_bound_of_a_random_law():
    """300 laws of (known, hidden): E F(q(a)), which a Gaussian release allows, against the bound.

    The same count with the stranger's groups, as if nothing were known, must be exceeded often.
    """
    draw = np.random.default_rng(7)
    exceeded = unaware = 0
    for _ in range(300):
        levels, values = draw.integers(2, 6, 2)
        law = draw.dirichlet(np.full(levels * values, 10.0 ** draw.uniform(-1, 0.5)))
        table_law = law.reshape(levels, values)
        noise = 10.0 ** draw.uniform(-0.5, 0.7)
        known, hidden = np.divmod(draw.choice(levels * values, 150, p=law), values)
        rows = np.column_stack([known, hidden]).astype(float)
        mass = table_law.sum(1)
        best = table_law.max(1) / np.maximum(mass, 1e-300)
        attained = float(mass @ gaussian(noise, kappa=np.minimum(best, 1.0)))
        knows = informed(PublicSample(rows, distance=counted(2)), [0], distance=counted(1))
        exceeded += attained > knows.success_bound(noise, 0.0)[0][0] * (1 + 1e-9)
        alone = PublicSample(rows[:, 1:], distance=counted(1))
        unaware += attained > alone.success_bound(noise, 0.0)[0][0] * (1 + 1e-9)
    assert exceeded <= 300 * 0.05 + 2 * math.sqrt(300 * 0.05 * 0.95)
    assert unaware > 30
