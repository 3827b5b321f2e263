"""What a known model's updates show: against quadrature, brute force, known laws and an attack."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats
from torch import nn

from leakbound import data
from leakbound.bounds import codebook, known_model
from leakbound.bounds.counting import PublicSample
from leakbound.bounds.known_model import KnownModel
from leakbound.channel import clipped_gram
from leakbound.client import example_gradients
from leakbound.core import Batch, Task

PSNR = (20.0, 22.0, 25.5)
NOISES = (0.2, 0.3, 0.5, 1.0)
LEAST = 1e-4
"""An attack counts as above a bound if chance explains it less often than that."""


def bayes(model, noise, eta):
    """The best attacker's success on these very examples: attained, and an upper limit."""
    return model._bayes(noise, eta, (1 - model.confidence) / 2, 0)


def ball_counts(examples, eta):
    return PublicSample(examples).counts(eta)[0]


def eta(psnr):
    return 10 ** (-psnr / 10)


def apart(n, **given):
    """Examples in balls of their own, with orthogonal gradients of norm 1."""
    return KnownModel(np.arange(float(n))[:, None], np.eye(n), **given)


def on_a_line(gradients):
    found = np.asarray(gradients, float)
    return found[:, None] * found


# --- the success within the gallery


GRID = np.linspace(-9, 9, 200_001)
SHOWN = (-0.8, 0.1, 0.9)


@pytest.mark.parametrize("noise", [0.3, 1.0])
@pytest.mark.parametrize(
    ("places", "labels", "guesses"),
    [
        ((0.0, 2.0, 5.0), None, 1),
        ((0.0, 2.0, 5.0), (0, 1, 1), 1),
        ((0.0, 2.0, 5.0), None, 2),
        ((0.0, 2.0, 2.1), None, 1),
    ],
)
def test_three_examples_by_quadrature(places, labels, guesses, noise):
    """The integral of the largest sum of densities, on a grid."""
    held = KnownModel(
        np.array(places)[:, None], on_a_line(SHOWN), labels, guesses=guesses, draws=20_000
    )
    density = stats.norm.pdf((GRID - np.array(SHOWN)[:, None]) / noise) / noise
    if places[2] == 2.1:  # one ball holds both, and one guess of an example matches both
        density = np.stack([density[0], density[1] + density[2]])
    if labels is None:
        largest = np.sort(density, 0)[-guesses:].sum(0)
    else:
        largest = density[0] + density[1:].max(0)
    exact = float(largest.sum() * (GRID[1] - GRID[0]) / 3)
    low, high = held._values(noise, 0.01, 0)
    assert low == pytest.approx(high)
    assert low.mean() == pytest.approx(exact, abs=4 * low.std() / math.sqrt(len(low)) + 1e-9)
    found = bayes(held, noise, 0.01)
    assert found[0] == low.mean()
    assert exact < found[1] < exact + 0.02


@pytest.mark.parametrize("noise", [0.3, 0.5, 1.0])
def test_orthogonal_gradients_are_a_codebook(noise):
    low, high = apart(100)._values(noise, 0.01, 0)
    exact = codebook.identified(noise, codewords=100)
    assert low == pytest.approx(high)
    assert low.mean() == pytest.approx(exact, abs=4 * low.std() / math.sqrt(len(low)))


@pytest.mark.parametrize("labels", [None, np.arange(60) % 3])
def test_equal_gradients_show_nothing(labels):
    points = np.random.default_rng(0).random((60, 1))
    level = 0.02**2
    held = KnownModel(points, np.ones((60, 60)), labels)
    known = np.zeros(60) if labels is None else labels
    most = sum(ball_counts(points[known == y], level).most for y in np.unique(known)) / 60
    assert bayes(held, math.inf, level)[1] == pytest.approx(most)
    high = held._values(0.5, level, 0)[1]
    assert high.mean() == pytest.approx(most, abs=4 * high.std() / 64 + 1e-6)
    assert bayes(held, math.inf, level)[0] <= most


# --- the heaviest ball


def fitting(points, radius):
    """Masks of all sets that one disc holds: its smallest has two or three points on its edge."""
    centers = [*points, *((a + b) / 2 for a, b in combinations(points, 2))]
    for a, b, c in combinations(points, 3):
        matrix = 2 * np.array([b - a, c - a])
        if abs(np.linalg.det(matrix)) > 1e-12:
            centers.append(np.linalg.solve(matrix, [b @ b - a @ a, c @ c - a @ a]))
    far = np.linalg.norm(np.array(centers)[:, None] - points, axis=2)
    masks = [(np.arange(256) >> k) & 1 for k in range(len(points))]
    masks = np.stack(masks, 1)[1:].astype(bool)
    return [mask for mask in masks if far[:, mask].max(1).min() <= radius]


@pytest.mark.parametrize("seed", range(12))
def test_no_ball_is_heavier(monkeypatch, seed):
    """Against all subsets of eight points in the plane, and all pairs of them for two guesses."""
    draw = np.random.default_rng(seed)
    points, radius = draw.random((8, 2)), draw.uniform(0.1, 0.4)
    sets = fitting(points, radius)
    group = known_model._group(np.arange(8), points, np.eye(8), radius**2 / 2)
    weights = draw.dirichlet(np.full(8, 0.5), 200)
    exact = np.max([weights @ mask for mask in sets], axis=0)
    low, high = group.masses(weights, 1)
    assert (low <= exact + 1e-12).all()
    assert (high >= exact - 1e-12).all()
    assert (high <= 1.0 + 1e-12).all()
    assert high.mean() < exact.mean() + 0.12
    two = np.max([weights @ (a | b) for a, b in combinations([*sets, sets[0]], 2)], axis=0)
    low, both = group.masses(weights, 2)
    assert (low <= two + 1e-12).all()
    assert (both >= two - 1e-12).all()
    monkeypatch.setattr(known_model, "REFINED", 1)
    rough = group.masses(weights, 1)[1]
    assert (rough >= high - 1e-12).all()


def test_bounds_on_balls_of_digits_are_sharp(gallery):
    """Refined in few rounds: more of them change nothing that matters."""
    group = gallery._at(eta(20.0))[0]
    draw = np.random.default_rng(0)
    weights = group.posterior(draw.integers(0, 1500, 100), 0.3, draw)
    few = group.masses(weights, 1)[1]
    every = [
        group._sharp(np.pad(weights, ((0, 0), (0, 1))), np.arange(100), np.full(100, i))
        for i in range(1500)
    ]
    assert (few >= np.max(every, axis=0) - 1e-12).all()
    assert few.mean() <= 1.01 * np.max(every, axis=0).mean()


# --- the limit on a mean


LAWS = {
    "rare": lambda draw, size: draw.random(size) < 0.01,
    "common": lambda draw, size: draw.random(size) < 0.4,
    "skewed": lambda draw, size: draw.beta(0.1, 2.0, size),
    "narrow": lambda draw, size: draw.uniform(0.28, 0.32, size),
}
MEANS = {"rare": 0.01, "common": 0.4, "skewed": 0.1 / 2.1, "narrow": 0.3}


@pytest.mark.parametrize("law", LAWS)
def test_limits_on_means_cover(law):
    """At most 5 % are below the mean; all are below Hoeffding's, and reject 1.5 times the mean."""
    draw, size = np.random.default_rng(0), 500
    rows = [LAWS[law](draw, size).astype(float) for _ in range(600)]
    found = np.array([known_model._limit(row, 0.05) for row in rows])
    missed = (found < MEANS[law]).mean()
    assert missed <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 600)
    plain = np.array([row.mean() for row in rows])
    assert (found > plain).all()
    assert found.mean() < plain.mean() + 1.3 * math.sqrt(math.log(20) / (2 * size))
    assert (plain < MEANS[law]).mean() > 0.3
    if law != "rare":
        assert found.mean() < 1.5 * MEANS[law]


def test_a_limit_on_ones_is_one():
    assert known_model._limit(np.ones(100), 0.05) == 1.0
    best = -math.log(0.025) / 4096
    assert best < known_model._limit(np.zeros(4096), 0.025) < 1.6 * best


def test_limits_cover_the_success_and_reject_half_the_noise():
    """200 streams; the limit is one at a confidence of 97.5 %."""
    found = np.array([bayes(apart(10, draws=400, seed=k), 0.7, 0.01)[1] for k in range(200)])
    right, wrong = codebook.identified([0.7, 0.35], codewords=10)
    assert (found < right).mean() <= 0.025 + 3 * math.sqrt(0.025 / 200)
    assert found.max() < wrong


# --- fresh examples


@pytest.mark.parametrize("labels", [None, np.array([0, 0, 1, 1, 0, 1])])
def test_fresh_examples_of_a_known_law_are_covered(labels):
    """Six atoms, two pairs of them in one ball: their law's exact success is seldom above."""
    places = np.array([0.0, 0.01, 5.0, 5.01, 10.0, 15.0])
    shares = np.array([0.25, 0.15, 0.2, 0.1, 0.2, 0.1])
    shown = np.array([-0.9, 0.2, -0.1, 0.8, 0.5, -0.5])
    noise, level = 0.4, 0.006**2
    density = shares[:, None] * stats.norm.pdf((GRID - shown[:, None]) / noise) / noise
    balls = np.stack([density[:2].sum(0), density[2:4].sum(0), *density[4:]])
    classes = [[0, 1, 2, 3]] if labels is None else [[0, 2], [1, 3]]
    exact = float(sum(balls[own].max(0).sum() for own in classes) * (GRID[1] - GRID[0]))
    draw, limits, plain = np.random.default_rng(0), [], []
    for seed in range(200):
        index = draw.choice(6, 100, p=shares)
        known = None if labels is None else labels[index]
        public = KnownModel(
            places[index][:, None], on_a_line(shown[index]), known, draws=300, seed=seed
        )
        limits.append(public.success_bound(noise, level))
        plain.append(public._values(noise, level, 0)[1].mean())
    assert np.mean(np.array(limits) < exact) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)
    assert np.mean(np.array(plain) < exact) > 0.2
    assert np.mean(limits) < exact + 0.3


def test_the_bound_is_the_root_above_the_limit():
    public = apart(400)
    seen = 400 * bayes(public, 0.5, 0.01)[1]
    bound = 400 * public.success_bound(0.5, 0.01)
    assert bound > seen
    assert bound - seen - seen * math.log(bound / seen) == pytest.approx(math.log(40), rel=1e-9)


def test_noise_from_none_to_infinite():
    public = apart(300, draws=1000)
    found = [public.success_bound(s, 0.01) for s in (0.0, 1e-200, 0.1, 0.3, 1.0, 3.0, 1e3)]
    assert found[:2] == [1.0, 1.0]
    assert found == sorted(found, reverse=True)
    seen, half = 1.0, math.log(40)
    root = optimize.brentq(lambda v: v - seen - seen * math.log(v / seen) - half, seen, 50)
    assert public.success_bound(math.inf, 0.01) == pytest.approx(root / 300, rel=1e-6)
    assert bayes(public, 1e-200, 0.01) == (1.0, 1.0)
    same = KnownModel(np.arange(2.0)[:, None], np.ones((2, 2)))
    assert same.success_bound(0.0, 0.01) == 1.0


# --- the noise for a target


def exact_noise(n, gamma):
    """Where n orthogonal gradients meet gamma, without Monte Carlo."""

    def over(log):
        seen = n * codebook.identified(math.exp(log), codewords=n)
        bound = max(seen, n * gamma)
        return bound - seen - seen * math.log(bound / seen) - math.log(40)

    return math.exp(optimize.brentq(over, math.log(0.3), math.log(5.0)))


def test_the_noise_found_is_enough():
    """For 40 streams; none is far above what draws without end would give."""
    least = exact_noise(300, 0.1)
    found = np.array([apart(300, draws=512, seed=k).noise_for(0.1, 0.01) for k in range(40)])
    assert (found >= least).mean() >= 0.95
    assert found.mean() < 1.2 * least
    assert apart(300, draws=8192).noise_for(0.1, 0.01) < 1.05 * least
    assert apart(300, seed=1).success_bound(1.02 * found.max(), 0.01) <= 0.1


def test_noise_that_does_not_exist():
    with pytest.raises(ValueError, match=r"give at least 0\.02\d+ at a noise multiplier of 100"):
        apart(300).noise_for(0.01, 0.01)
    with pytest.raises(ValueError, match="gamma is 1"):
        apart(3).noise_for(1.0, 0.01)


# --- arguments


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gram": np.eye(4)}, r"gram has shape \(4, 4\)"),
        ({"gram": 1.1 * np.eye(5)}, "gram has 1.1 on its diagonal"),
        ({"gram": np.triu(np.full((5, 5), 0.5))}, "finite and symmetric"),
        ({"gram": np.full((5, 5), np.nan)}, "finite and symmetric"),
        ({"labels": np.zeros(3)}, "labels holds 3"),
        ({"guesses": 0}, "guesses is 0"),
        ({"confidence": 1.0}, "confidence is 1"),
        ({"draws": 1}, "draws is 1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_wrong_arguments(given, words):
    plain = {"examples": np.arange(5.0)[:, None], "gram": np.eye(5)}
    with pytest.raises(ValueError, match=words):
        KnownModel(**{**plain, **given})


def test_products_of_no_vectors():
    gram = np.eye(3)
    gram[0, 1] = gram[1, 0] = 1.5
    with pytest.raises(ValueError, match="eigenvalues below 0"):
        bayes(KnownModel(np.arange(3.0)[:, None], gram), 1.0, 0.01)
    for noise, level, words in ((-1.0, 0.1, "noise_multiplier is -1"), (1.0, 0.0, "eta is 0")):
        with pytest.raises(ValueError, match=words):
            apart(3).success_bound(noise, level)


def test_names():
    assert apart(5).name == (
        "5 public examples and this model's gradients, 95% confidence, labels not known"
    )
    assert apart(5, labels=np.arange(5)).name.endswith("labels known")


# --- digits


@pytest.fixture(scope="module")
def digits():
    """1,500 public digits, 3,000 private ones, 500 for the clip norm; and a small network."""
    loaded = data.load("mnist5k")
    order = torch.as_tensor(np.random.default_rng(0).permutation(5000))
    parts = [Batch(loaded.inputs[k], loaded.labels[k]) for k in order.split([1500, 3000, 500])]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        task = Task.of(
            nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.Tanh(), nn.Linear(16, 10))
        )
    last = parts[2]
    clip = float(example_gradients(task, last.inputs, last.labels).norm(dim=1).median())
    return task, *parts[:2], clip


@pytest.fixture(scope="module")
def gallery(digits):
    task, public, _, clip = digits
    return KnownModel(public.inputs.numpy(), clipped_gram(task, public, clip))


@pytest.mark.parametrize(
    ("noise", "low", "high", "limit"),
    [(0.3, 0.200, 0.209, 0.240), (0.5, 0.045, 0.049, 0.065), (1.0, 0.008, 0.013, 0.021)],
)
def test_digits_of_the_sheet(gallery, noise, low, high, limit):
    """The interval of a prototype with wider balls, and its limit without that of the draws."""
    found, most = gallery._values(noise, eta(25.5), 0)
    assert low - 0.006 < found.mean() < most.mean() < high + 0.006
    assert 0.8 * limit < gallery.success_bound(noise, eta(25.5)) < 1.05 * limit


def test_known_labels_of_digits(digits, gallery):
    told = KnownModel(gallery.examples, gallery.gram, digits[1].labels.numpy())
    low, high = told._values(0.5, eta(25.5), 0)
    assert 0.078 < low.mean() < high.mean() < 0.098
    assert told.success_bound(0.5, eta(25.5)) > gallery.success_bound(0.5, eta(25.5))


@pytest.fixture(scope="module")
def seen(digits):
    """Products of the gallery's clipped gradients with those of private digits, and with noise."""
    task, public, private, clip = digits
    source = torch.Generator().manual_seed(1)

    def sent(batch, start):
        part = slice(start, start + 500)
        found = example_gradients(task, batch.inputs[part], batch.labels[part]) / clip
        return found / found.norm(dim=1, keepdim=True).clamp(min=1)

    known = torch.cat([sent(public, k) for k in range(0, 1500, 500)])
    shown, noise = [], []
    for start in range(0, 3000, 500):
        own = sent(private, start)
        shown.append(own @ known.T)
        noise.append(torch.randn(own.shape, generator=source) @ known.T)
    squares = known.double().square().sum(1).numpy()
    return torch.cat(shown).double().numpy(), torch.cat(noise).double().numpy(), squares


def guessed(seen, noise, reached):
    """The most probable example, and the one whose ball holds most of the posterior."""
    shown, normals, squares = seen
    logs = (shown + noise * normals - squares / 2) / noise**2
    weights = special.softmax(logs, axis=1)
    return logs.argmax(1), (weights @ reached).argmax(1)


@pytest.mark.parametrize("psnr", PSNR)
def test_no_attack_on_held_out_digits_is_above(digits, gallery, seen, psnr):
    _, _, private, _ = digits
    public, own = gallery.examples, private.inputs.flatten(1).double().numpy()
    errors = np.square(own).sum(1)[:, None] + np.square(public).sum(1) - 2 * own @ public.T
    matched = errors / 784 <= eta(psnr)
    for noise in NOISES:
        bound = gallery.success_bound(noise, eta(psnr))
        for guesses in guessed(seen, noise, gallery._at(eta(psnr))[0].reached):
            hits = int(matched[np.arange(3000), guesses].sum())
            least = stats.beta.ppf(LEAST, hits, 3000 - hits + 1) if hits else 0.0
            assert least <= bound, (noise, hits)
            if psnr == 20.0 and noise == 0.2:
                assert hits > 15  # an attack that fails would test nothing
