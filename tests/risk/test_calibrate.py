"""From a target to a setting: certified in 50 digits, sharp, and refused where nothing helps."""

from __future__ import annotations

import math
from dataclasses import replace

import mpmath as mp
import numpy as np
import pytest
from scipy import stats

from leakbound.bounds import composition
from leakbound.bounds.record_priors import GaussianImages
from leakbound.core import NotApplicable
from leakbound.defenses import DpSgd
from leakbound.risk import calibrate_setting as module
from leakbound.risk.calibrate import Calibration
from leakbound.risk.corridor import TrainingSetting
from leakbound.risk.kappa import BaselineMatches

from ..bounds.prior_attacks import KnownNorm


def calibrate_setting(*arguments, prior=None, **more):
    return module(*arguments, prior=prior, **more)


TARGET = "psnr>=20 with probability<=0.001"


def sampled(**changes):
    return TrainingSetting(
        **(
            {
                "noise_multiplier": 1.0,
                "dim": 16,
                "steps": 20,
                "sampling_rate": 0.05,
                "participation": "hidden",
            }
            | changes
        )
    )


def certified(noise: float, dim: int, error: float, steps: int) -> mp.mpf:
    """The upper edge in 50 digits: the cap by the beta function, Phi and its inverse, by mpmath."""
    kappa = mp.betainc(mp.mpf(dim - 1) / 2, mp.mpf(1) / 2, 0, mp.mpf(error), regularized=True) / 2
    return _phi(_quantile(kappa) + mp.sqrt(steps) / mp.mpf(noise))


def _phi(x):
    return mp.erfc(-x / mp.sqrt(2)) / 2


def _quantile(p):
    """Newton's method on log Phi, from the leading term of its tail."""
    x = -mp.sqrt(-2 * mp.log(p))
    for _ in range(60):
        step = (mp.log(_phi(x)) - mp.log(p)) * _phi(x) * mp.sqrt(2 * mp.pi) * mp.exp(x * x / 2)
        x -= step
        if abs(step) < mp.mpf(10) ** -45:
            return x
    raise AssertionError(f"no quantile of {p}")


def targets(count):
    rng = np.random.default_rng(5)
    for _ in range(count):
        dim = int(rng.choice([3, 4, 16, 64, 300, 784, 3072]))
        error = float(rng.uniform(0.02, 0.9))
        gamma = float(10 ** rng.uniform(-9, -0.2))
        cap = 0.5 * stats.beta.cdf(error, (dim - 1) / 2, 0.5)
        if cap < gamma * 0.999:
            yield dim, error, gamma, int(rng.choice([1, 1, 7, 1000]))


def test_certified_in_fifty_digits():
    with mp.workdps(50):
        cases = list(targets(64))
        assert len(cases) >= 40
        for dim, error, gamma, steps in cases:
            target = f"mse<={error / dim!r} with probability<={gamma!r}"
            noise = calibrate_setting(
                target, TrainingSetting(1.0, dim=dim, steps=steps)
            ).noise_multiplier
            assert certified(noise, dim, error, steps) <= gamma, (dim, error, gamma)
            assert certified(noise * 0.99, dim, error, steps) > gamma, (dim, error, gamma)
            assert certified(noise * 0.9995, dim, error, steps) > gamma, (dim, error, gamma)


def power(noise, steps, q, log_kappa, interval):
    """The upper edge by dp-accounting, on a grid of its own."""
    accounting = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    loss = accounting.from_gaussian_mechanism(
        noise, sampling_prob=q, value_discretization_interval=interval
    ).self_compose(steps)
    levels = np.linspace(-3, 15, 400)
    delta = np.asarray(loss._pmf_remove.get_delta_for_epsilon(levels))
    return float(np.min(delta + np.exp(levels + log_kappa)))


@pytest.mark.parametrize(("error", "gamma"), [(0.3, 0.01), (0.6, 0.2)])
def test_sampled_steps_against_dp_accounting(error, gamma):
    found = calibrate_setting(f"mse<={error / 16!r} with probability<={gamma}", sampled())
    noise, blind = found.noise_multiplier, float(found.corridor.log_kappa[0])
    assert power(noise, 20, 0.05, blind, 2e-4) <= gamma * (1 + 2e-3)  # it rounds upwards too
    assert power(noise * 0.99, 20, 0.05, blind, 2e-4) > gamma
    assert found.corridor.attained[0] <= found.corridor.bound[0] <= gamma
    seen = calibrate_setting(
        f"mse<={error / 16!r} with probability<={gamma}", sampled(participation="visible")
    )
    assert seen.noise_multiplier >= noise
    hits = stats.binom(20, 0.05)
    total = sum(
        hits.pmf(k)
        * stats.norm.cdf(stats.norm.ppf(math.exp(blind)) + math.sqrt(k) / seen.noise_multiplier)
        for k in range(21)
    )
    assert gamma * 0.995 < total <= gamma


@pytest.mark.parametrize("seen", ["hidden", "visible"])
def test_one_more_breaks_the_target(seen):
    gamma, setting = 0.05, sampled(noise_multiplier=0.8, participation=seen)
    target = f"mse<={0.4 / 16} with probability<={gamma}"
    law = composition.subsampled if seen == "hidden" else composition.visible

    def upper(found, **changes):
        known = {"sampling_rate": found.setting.sampling_rate, "steps": found.setting.steps}
        blind = found.corridor.log_kappa[0]
        return law(found.noise_multiplier, log_kappa=blind, **(known | changes))

    found = calibrate_setting(target, setting, solve="steps")
    assert found.setting.sampling_rate == 0.05
    assert found.setting.steps > 20
    assert upper(found) <= gamma < upper(found, steps=found.setting.steps + 1)
    found = calibrate_setting(target, setting, solve="sampling_rate")
    rate = found.setting.sampling_rate
    assert upper(found) <= gamma < upper(found, sampling_rate=rate * 1.01)


def test_clip_norm_is_the_multiplier_turned_round():
    plain = calibrate_setting(TARGET, TrainingSetting(1.0, dim=784, norm=9.0))
    found = calibrate_setting(
        TARGET, TrainingSetting(1.0, dim=784, norm=9.0), solve="clip_norm", noise_std=2.0
    )
    assert found.noise_multiplier >= plain.noise_multiplier
    assert found.clip_norm == pytest.approx(2 / plain.noise_multiplier, rel=1e-3)
    assert found.noise_std == pytest.approx(2.0, rel=1e-12)
    assert found.corridor.bound[0] <= 0.001


def test_all_is_accepted_at_full_rate():
    easy = sampled(noise_multiplier=50.0, steps=2)
    found = calibrate_setting(
        f"mse<={0.3 / 16} with probability<=0.01", easy, solve="sampling_rate"
    )
    assert found.setting.sampling_rate == 1.0
    most = calibrate_setting(
        f"mse<={0.3 / 16} with probability<=0.01",
        TrainingSetting(1e9, dim=16),
        solve="steps",
    )
    assert most.setting.steps == 2**30


def test_it_is_a_defense():
    found = calibrate_setting(
        TARGET, TrainingSetting(1.0, dim=784, norm=9.0), clip_norm=2.0, examples=5000
    )
    assert isinstance(found, Calibration)
    expected = DpSgd(clip_norm=2.0, noise_multiplier=found.noise_multiplier)
    assert repr(found.defense()) == repr(expected)
    assert found.noise_std == 2 * found.noise_multiplier
    alone = 1 / (stats.norm.ppf(0.001) - stats.norm.ppf(1 / 5000))
    assert found.identification_noise == pytest.approx(alone, rel=1e-4)
    assert found.less_noise == pytest.approx(1 - found.noise_multiplier / alone, rel=1e-4)
    few = calibrate_setting(TARGET, TrainingSetting(1.0, dim=784, norm=9.0), examples=900)
    assert few.identification_noise is None
    assert few.less_noise is None


def test_hidden_participation_is_no_dp_sgd_that_divides_by_the_batch():
    """The level of its noise would show how many take part, and so who does."""
    ask = {"dim": 784, "norm": 9.0, "steps": 10}
    hidden = TrainingSetting(1.0, sampling_rate=0.1, participation="hidden", **ask)
    with pytest.raises(NotApplicable, match=r"participation is 'hidden'.*use leakbound.opacus"):
        calibrate_setting(TARGET, hidden).defense()
    for open_ in (replace(hidden, participation="visible"), replace(hidden, sampling_rate=1.0)):
        assert calibrate_setting(TARGET, open_).defense().links


@pytest.mark.parametrize("rate", [0.001, 0.0005])
def test_rare_sampling_needs_little_noise(rate):
    """At a rate of the accepted probability: once a hang, and a division by zero."""
    setting = TrainingSetting(1.0, dim=784, norm=9.0, sampling_rate=rate)
    found = calibrate_setting(TARGET, setting, examples=5000)
    assert found.corridor.bound[0] <= 0.001
    assert (found.noise_multiplier == 0) == (rate < 0.001)
    if rate < 0.001:
        assert found.less_noise is None
        assert found.epsilon == math.inf
        with pytest.raises(ValueError, match=r"noise_multiplier is 0.*needs no noise"):
            found.defense()
        with pytest.raises(ValueError, match="clip_norm: any value meets"):
            calibrate_setting(TARGET, setting, solve="clip_norm", noise_std=1.0)


def test_a_prior():
    images = np.random.default_rng(0).normal(size=(400, 8)) * 0.1 + 0.5
    rung = GaussianImages.from_samples(images, components=3)
    setting = TrainingSetting(1.0, dim=8, norm=1.0)
    found = calibrate_setting("mse<=0.0005 with probability<=0.05", setting, prior=rung)
    plain = calibrate_setting("mse<=0.0005 with probability<=0.05", setting)
    assert found.prior == rung.name
    assert rung.name in found.corridor.bound_scope.prior
    assert found.noise_multiplier > plain.noise_multiplier  # a sharper prior costs noise
    assert found.corridor.bound[0] <= 0.05
    same = calibrate_setting("mse<=0.0005 with probability<=0.05", setting, prior=KnownNorm(8))
    assert same.noise_multiplier == pytest.approx(plain.noise_multiplier, rel=1e-4)
    with pytest.raises(ValueError, match="prior has 8 values per example, but dim is 9"):
        calibrate_setting(
            "mse<=0.0005 with probability<=0.05", TrainingSetting(1.0, dim=9), prior=rung
        )


@pytest.mark.parametrize(
    ("target", "changes", "more", "words"),
    [
        ("psnr>=5 with probability<=0.5", {}, {}, "zero image alone"),
        ("mse<=0.0625 with probability<=0.5", {}, {}, "zero image alone"),  # e = 1 exactly
        ("mse<=0.06 with probability<=0.0001", {}, {}, "guess that sees no update succeeds"),
        (
            "mse<=0.01 with probability<=0.001",
            {},
            {"matches": BaselineMatches(9, 0.2, 0.5, 0.1)},
            "constant",
        ),
        ("mse<=0.01 with probability<=0.001", {}, {"noise_std": 1.0}, "noise_std"),
        ("mse<=0.01 with probability<=0.001", {}, {"solve": "clip_norm"}, "noise_std"),
        (
            "mse<=0.01 with probability<=0.001",
            {},
            {"solve": "clip_norm", "noise_std": -1.0},
            "noise_std is -1",
        ),
        ("mse<=0.01 with probability<=0.001", {}, {"clip_norm": 0.0}, "clip_norm is 0"),
        ("mse<=0.01 with probability<=0.001", {}, {"delta": 1.0}, "delta is 1"),
        ("mse<=0.01 with probability<=0.001", {}, {"solve": "noise"}, "solve"),
        (
            "mse<=0.01 with probability<=0.001",
            {"noise_multiplier": 0.001},
            {"solve": "steps"},
            "not one step meets the target",
        ),
        ("much", {}, {}, "target is 'much'"),
    ],
)
def test_refusals(target, changes, more, words):
    with pytest.raises(ValueError, match=words) as caught:
        calibrate_setting(
            target, TrainingSetting(**({"noise_multiplier": 1.0, "dim": 16} | changes)), **more
        )
    assert "\n" not in str(caught.value)


def test_next_to_the_blind_success():
    """Noise grows without bound towards it, and the refusal begins where it ends."""
    blind = float(0.5 * stats.beta.cdf(0.5, 15 / 2, 0.5))
    for slack in (1e-3, 1e-6):
        target = f"mse<={0.5 / 16} with probability<={blind * (1 + slack)!r}"
        found = calibrate_setting(target, TrainingSetting(1.0, dim=16))
        assert found.corridor.bound[0] <= blind * (1 + slack)
        assert found.noise_multiplier > 0.1 / slack
    with pytest.raises(ValueError, match="no noise helps"):
        calibrate_setting(
            f"mse<={0.5 / 16} with probability<={blind!r}", TrainingSetting(1.0, dim=16)
        )


@pytest.mark.parametrize(
    ("solve", "method", "wrong"),
    [
        ("noise_multiplier", "noise_for", 0.97),
        ("sampling_rate", "rate_for", 1.05),
        ("steps", "steps_for", 1.5),
    ],
)
def test_an_inverse_that_errs_is_caught(monkeypatch, solve, method, wrong):
    """The answer is checked by the law itself, whatever the search says."""
    true = getattr(composition.Composed, method)

    def off(self, *given, **named):
        found = wrong * true(self, *given, **named)
        return int(found) if solve == "steps" else found

    monkeypatch.setattr(composition.Composed, method, off)
    target = f"mse<={0.4 / 16} with probability<=0.05"
    for seen in ("visible", "hidden"):
        setting = sampled(noise_multiplier=0.8, participation=seen)
        assert calibrate_setting(target, setting, solve=solve).corridor.bound[0] <= 0.05
