"""No attacker from public digits beats what a count of public digits states, on held-out digits.

One part of the data builds the statement and the attacks; the others are only counted. The old
rule, kappa from a model of images, is beaten by the same codebook (V1 and V2 of docs/errata.md).
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from leakbound import data
from leakbound._util.codewords import codewords
from leakbound.bounds import identification, record_priors
from leakbound.bounds.counting import PublicSample
from leakbound.risk import TrainingSetting, calibrate_setting
from leakbound.risk.limits import GRID

PSNR = (18.0, 20.0, 22.0, 25.5, 28.0, 32.0)
NOISES = (0.1, 0.3, 0.5, 1.0)
LEAST = 1e-4
"""An attack counts as above a statement if chance explains it less often than that."""


def eta(psnr):
    return 10 ** (-psnr / 10)


@pytest.fixture(scope="module")
def digits():
    """1,000 public digits and 4,000 held out, with labels, in an order of their own."""
    loaded = data.load("mnist5k")
    order = np.random.default_rng(7).permutation(5000)
    rows, labels = loaded.inputs.flatten(1).double().numpy()[order], loaded.labels.numpy()[order]
    return rows[:1000], labels[:1000], rows[1000:], labels[1000:]


@pytest.fixture(scope="module")
def sample(digits):
    return PublicSample(digits[0])


@pytest.fixture(scope="module")
def labeled(digits):
    return PublicSample(digits[0], labels=digits[1])


def within(guesses, private, psnr):
    return int((np.square(guesses - private).mean(1) <= eta(psnr)).sum())


def distances(a, b):
    return (np.square(a).sum(1)[:, None] + np.square(b).sum(1) - 2 * a @ b.T) / a.shape[1]


# --- attackers: (public, public labels, private, private labels, psnr, noise) -> guesses


def codebook(public, labels, private, known, psnr, noise, words=None):
    """A planted model whose clipped gradient names the nearest codeword; the best of five sizes."""
    best = None
    for most in (1, 10, 50, 200, 800) if words is None else (words,):
        book, shares = codewords(public, eta(psnr), most)
        draw = np.random.default_rng(3)
        seen = noise * draw.standard_normal((len(private), len(book)))
        seen[np.arange(len(private)), distances(private, book).argmin(1)] += 1
        guesses = book[(seen + noise**2 * np.log(shares)).argmax(1)]
        if best is None or within(guesses, private, psnr) > within(best, private, psnr):
            best = guesses
    return best


def linear(public, labels, private, known, psnr, noise):
    """The best linear estimator from the unit vectors that a trap with clipping answers."""
    mean = public.mean(0)
    _, spread, directions = np.linalg.svd(public - mean, full_matrices=False)
    layer = directions[:150].T / spread[:150] ** 0.5

    def sent(rows):
        answers = (rows - mean) @ layer
        return answers / np.linalg.norm(answers, axis=1, keepdims=True)

    own = sent(public)
    middle = own.mean(0)
    both = (public - mean).T @ (own - middle) / len(public)
    inner = (own - middle).T @ (own - middle) / len(public) + noise**2 * np.eye(150)
    seen = sent(private)
    seen = seen + noise * np.random.default_rng(4).standard_normal(seen.shape)
    return mean + (seen - middle) @ np.linalg.solve(inner, both.T)


def gallery(public, labels, private, known, psnr, noise, mean=False):
    """The most probable public digit, or the posterior's mean, from the linear trap's answer."""
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (public, private)]
    seen = unit[1] + noise * np.random.default_rng(5).standard_normal(unit[1].shape)
    log = seen @ unit[0].T / noise**2
    if not mean:
        return public[log.argmax(1)]
    weights = np.exp(log - log.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True) @ public


def posterior_mean(public, labels, private, known, psnr, noise):
    return gallery(public, labels, private, known, psnr, noise, mean=True)


def class_means(public, labels, private, known, psnr, noise):
    """No update at all: the mean of the class, where the label is known."""
    return np.stack([public[labels == y].mean(0) for y in range(10)])[known]


ATTACKERS = (codebook, linear, gallery, posterior_mean)


@pytest.mark.parametrize("attacker", ATTACKERS, ids=lambda attacker: attacker.__name__)
@pytest.mark.parametrize("psnr", PSNR)
def test_no_attack_is_above_the_count(digits, sample, psnr, attacker):
    for noise in NOISES:
        hits = within(attacker(*digits, psnr, noise), digits[2], psnr)
        least = stats.beta.ppf(LEAST, hits, 4000 - hits + 1) if hits else 0.0
        assert least <= sample.success_bound(noise, eta(psnr))[0][0], (noise, hits)


@pytest.mark.parametrize("psnr", [12.0, 15.0, *PSNR])
def test_class_means_are_not_above_the_count_by_class(digits, labeled, psnr):
    hits = within(class_means(*digits, psnr, 1.0), digits[2], psnr)
    least = stats.beta.ppf(LEAST, hits, 4000 - hits + 1) if hits else 0.0
    assert least <= labeled.success_bound(100.0, eta(psnr))[0][0]


def test_attacks_are_real(digits):
    """So that the test above is none of attacks that fail."""
    assert within(codebook(*digits, 20.0, 0.3), digits[2], 20.0) > 80
    assert within(linear(*digits, 20.0, 0.04), digits[2], 20.0) > 600
    assert within(gallery(*digits, 18.0, 0.1), digits[2], 18.0) > 100
    assert within(class_means(*digits, 12.0, 1.0), digits[2], 12.0) > 400


@pytest.mark.parametrize(("psnr", "noise"), [(22.0, 0.06), (24.0, 0.05)])
def test_a_model_of_images_is_beaten(digits, sample, psnr, noise):
    """The old rule: an attack is above what a fitted model states, and below what a count does."""
    model = record_priors.GaussianImages.from_samples(digits[0], components=32)
    stated = float(identification.gaussian(noise, log_kappa=model.log_kappa(eta(psnr))))
    hits = within(codebook(*digits, psnr, noise), digits[2], psnr)
    assert stated < 0.002
    assert stats.beta.ppf(LEAST, hits, 4000 - hits + 1) > stated
    assert hits / 4000 <= sample.success_bound(noise, eta(psnr))[0][0]


@pytest.mark.parametrize("attacker", ATTACKERS, ids=lambda attacker: attacker.__name__)
def test_no_mean_error_is_below_the_bound(digits, sample, attacker):
    for noise in (0.1, 0.3, 1.0):
        errors = np.square(attacker(*digits, 20.0, noise) - digits[2]).mean(1)
        upper = errors.mean() + 4 * errors.std() / np.sqrt(len(errors))
        assert sample.mean_error(noise, eta(np.array(GRID))) <= upper


def test_class_means_are_not_below_the_bound_by_class(digits, labeled):
    """V8 of the findings: the class mean was below a bound that took labels as unknown."""
    error = np.square(class_means(*digits, 20.0, 1.0) - digits[2]).mean()
    assert labeled.mean_error(1e9, eta(np.array(GRID))) <= error < 0.06


@pytest.mark.parametrize("gamma", [0.05, 0.02])
@pytest.mark.parametrize("psnr", [25.5, 28.0, 30.0, 32.0])
def test_no_attack_is_above_what_was_calibrated(digits, sample, psnr, gamma):
    """The least noise for a target, for DP-SGD as `calibrate` states it."""
    setting = TrainingSetting(1.0, 784, float(np.linalg.norm(digits[2], axis=1).min()))
    found = calibrate_setting(f"psnr>={psnr} with probability<={gamma}", setting, prior=sample)
    assert found.verdict == "protected"
    for attacker in ATTACKERS:
        hits = within(attacker(*digits, psnr, found.noise_multiplier), digits[2], psnr)
        least = stats.beta.ppf(LEAST, hits, 4000 - hits + 1) if hits else 0.0
        assert least <= gamma, (attacker.__name__, hits)
