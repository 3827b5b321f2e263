"""Every rule that was replaced is beaten by an adversary of this suite; the present one is not.

The statements that did not hold are listed in docs/errata.md, section "Ours". That `calibrate()`
under a uniform direction is beaten, and that no entry point calls anything protected under it, is
in test_uniform_direction.py; that a sampled trace bound is, in tests/bounds/test_cramer_rao.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from leakbound import audit
from leakbound._util.codewords import codewords
from leakbound.assess.limits import GRID
from leakbound.bounds import identification, record_priors
from leakbound.bounds.cramer_rao import tight_trace_bound
from leakbound.bounds.priors import GaussianPrior
from leakbound.opacus import risk
from leakbound.risk import TrainingSetting
from leakbound.risk.corridor import success_bound

from ..bounds.prior_attacks import KnownNorm
from . import domains
from .adversaries import Book, Codebook, by_class, errors, lmmse, mean
from .matrix import LEAST, eta_of


def least(hits, count):
    return stats.beta.ppf(LEAST, hits, count - hits + 1) if hits else 0.0


def hits(guesses, domain, psnr):
    return int((errors(guesses, domain.held_rows) <= eta_of(psnr)).sum())


def named(domain, psnr, noise, size):
    """How many held-out examples a codebook of the public ones reaches."""
    book = Book(*codewords(domain.rows, 1.15**2 * eta_of(psnr), size))
    fitted = Codebook(book, len(book.words), noise)
    return hits(fitted.answers(domain.held[False], np.random.default_rng(5)), domain, psnr)


def test_a_mixture_fitted_to_images_is_beaten():
    """Stated 1e-5 at 25.5 dB; a codebook reaches 60 times that, over four splits of the digits.

    The splits are the first whose 1,000 public digits hold no pair within the radius: with a pair,
    the rule took at least its share. At a statement of 1e-3, where 4,000 trials had shown 0.0025,
    codebooks reach 0.0010 in 28,000 trials over seven splits: as much as was stated. What is wrong
    with the model shows where it promises more.
    """
    psnr, found, count = 25.5, 0, 0
    for seed in (1, 2, 3, 4):
        domain = domains.mnist(1000, seed)
        prior = record_priors.from_images(domain.rows, "mixture")
        log_kappa = float(prior.log_kappa(eta_of(psnr)))
        assert log_kappa < np.log(1e-6)
        noise = float(identification.gaussian.noise_for(1e-5, log_kappa=log_kappa))
        reached = named(domain, psnr, noise, 100)
        found, count = found + reached, count + len(domain.held_rows)
        now = domain.stated[False].success_bound(noise, eta_of(psnr))[0][0]
        assert least(reached, len(domain.held_rows)) <= now
    assert least(found, count) > 10 * 1e-5, (found, count)


@pytest.mark.parametrize(("psnr", "noise"), [(22.0, 0.06), (24.0, 0.05)])
def test_one_gaussian_fitted_to_images_is_beaten(psnr, noise):
    domain = domains.mnist()
    model = record_priors.GaussianImages.from_samples(domain.rows, components=32)
    stated = float(identification.gaussian(noise, log_kappa=model.log_kappa(eta_of(psnr))))
    found = named(domain, psnr, noise, 800)
    assert stated < 0.002
    assert least(found, 4000) > stated
    assert found / 4000 <= domain.stated[False].success_bound(noise, eta_of(psnr))[0][0]


def smallest_norm(domain):
    return float(np.linalg.norm(domain.rows, axis=1).min())


def test_a_uniform_direction_is_beaten():
    domain, noise = domains.mnist(), 0.04
    blind = identification.log_kappa_sphere(dim=784, eta=0.01, norm=smallest_norm(domain))
    stated = float(identification.gaussian(noise, log_kappa=blind))
    fitted = lmmse(0.5)(domain.public[False], noise, 0.01, np.random.default_rng(0))
    found = hits(fitted.answers(domain.held[False], np.random.default_rng(1)), domain, 20.0)
    assert stated < 1e-3
    assert least(found, 4000) > 0.13
    assert domain.stated[False].success_bound(noise, 0.01)[0][0] > found / 4000


def test_several_steps_under_a_uniform_direction_are_beaten():
    """The sentence for an Opacus training; which steps hold the example is read from their norm."""
    domain, noise, rate, steps = domains.mnist(), 0.08925, 0.1, 20
    norm = smallest_norm(domain)
    setting = TrainingSetting(
        noise, 784, norm, steps=steps, sampling_rate=rate, participation="hidden"
    )
    blind = identification.log_kappa_sphere(dim=784, eta=0.01, norm=norm)
    stated = float(success_bound(setting, blind))
    source = np.random.default_rng(2)
    fitted = lmmse(0.5)(domain.public[False], noise, 0.01, source)
    sent = fitted.trap.sent(domain.held_rows)
    taken = source.random((steps, len(sent))) < rate
    total, seen = np.zeros_like(sent), np.zeros(len(sent))
    for own in taken:
        update = own[:, None] * sent + noise * source.standard_normal(sent.shape)
        present = np.square(update).sum(1) > 0.5 + noise**2 * sent.shape[1]
        total, seen = total + present[:, None] * update, seen + present
    guesses = np.broadcast_to(fitted.trap.mean, domain.held_rows.shape).copy()
    for count in np.unique(seen[seen > 0]):
        own, at = seen == count, noise / count**0.5
        better = lmmse(0.5)(domain.public[False], at, 0.01, source)
        guesses[own] += (total[own] / count - better.middle) @ better.weights
    found = hits(guesses, domain, 20.0)
    assert stated < 0.003
    assert least(found, 4000) > 10 * stated
    prior = KnownNorm(784, norm)
    assert risk([(noise, rate, steps)], dim=784, norm=norm, psnr=20, prior=prior).bound is None
    counted = risk([(noise, rate, steps)], dim=784, norm=norm, psnr=20, prior=domain.stated[False])
    assert counted.bound > found / 4000


def test_a_bound_on_the_error_for_one_model_is_beaten_by_another():
    """A malicious server sends the model that the bound is not for."""
    plan = {
        "seeds": list(range(40)),
        "data": {"source": "mnist5k"},
        "models": [{"name": "mlp", "hidden": [16], "activation": "tanh"}],
        "attacks": [{"name": "linear_trap"}],
        "defenses": [{"name": "gaussian_noise", "noise_std": 0.45}],
        "error_bound": {"kind": "trace"},
    }
    honest = plan | {"seeds": [0], "attacks": [{"name": "mean_image"}]}
    ((old,),) = (one.record.bounds for one in audit.run(audit.parse(honest), pictures=False))
    malicious = audit.parse(plan | {"threat": {"server": "malicious"}})
    records = [one.record for one in audit.run(malicious, pictures=False)]
    reached = 10 ** (-np.array([record.scores[0] for record in records]) / 10)
    assert old.value > 0.01
    assert reached.mean() + 4 * reached.std() / np.sqrt(len(reached)) < old.value
    assert all(record.bounds == () for record in records)
    assert all(record.verdict != "protected on average" for record in records)


def test_a_prior_that_ignores_known_labels_is_beaten():
    """With much noise a bound on the error is the prior's variance; the class means do better."""
    domain = domains.mnist()
    fitted = by_class(mean)(domain.public[True], 1.0, 0.01, np.random.default_rng(0))
    error = errors(fitted.answers(domain.held[True], np.random.default_rng(0)), domain.held_rows)
    variance = domain.rows.var(0, ddof=1).mean()
    old = tight_trace_bound(1e-9, GaussianPrior.isotropic(domain.rows.mean(0), variance))
    assert error.mean() + 4 * error.std() / np.sqrt(len(error)) < old.value
    levels = 10 ** (-np.array(GRID) / 10)
    assert domain.stated[True].mean_error(1e9, levels) <= error.mean() < 0.06
