"""Rows, norm sinks, batches, steps and unknown norms, against the attacks themselves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from leakbound.bounds.from_scratch import (
    averaged,
    effective_noise,
    exact,
)
from leakbound_reproductions.mean_to_extreme.corrected import rows_needed


def trap_error(rng, *, clip_norm, rows, rest=0.0, bias=False, noise=0.1, dim=40, count=4000):
    """Mean squared length of the error of the mean over M noisy, clipped rows, |X| = 1."""
    record = rng.standard_normal(dim)
    record /= np.linalg.norm(record)
    gradient = np.tile(record, rows)
    others = np.full(rows, 1.0) if bias else np.array([rest])
    length = np.sqrt((gradient**2).sum() + (others**2).sum())
    beta = min(1.0, clip_norm / length)
    total = 0.0
    for _ in range(count // 100):
        sent = beta * gradient + clip_norm * noise * rng.standard_normal((100, rows * dim))
        guess = sent.reshape(100, rows, dim).mean(1) / beta
        total += ((guess - record) ** 2).sum()
    return total / count / dim


@pytest.mark.parametrize(
    ("rows", "rest", "bias", "ratio"),
    [(25, 0.0, False, 1.0), (5, 0.0, False, 5.0), (1, 0.0, False, 25.0), (30, 4.0, False, 46 / 30)],
)
def test_effective_noise_is_that_of_the_trap(rows, rest, bias, ratio):
    """conventions.md 0.2: 1.002, 4.985 and 24.85 times the floor at M = 25, 5 and 1, C = 5."""
    found = trap_error(np.random.default_rng(1), clip_norm=5.0, rows=rows, rest=rest, bias=bias)
    noise = effective_noise(0.1, clip_norm=5.0, norm=1.0, rows=rows, rest_norm=rest)
    assert noise**2 == pytest.approx(0.01 * ratio, rel=1e-12)
    assert found == pytest.approx(noise**2, rel=5 * np.sqrt(2 / 40 / 4000))


def test_a_bias_adds_the_record_s_norm():
    """conventions.md 0.2: noise^2 (|X|^2 + 1) with a trainable bias, 1.99 at |X| = 1."""
    found = trap_error(np.random.default_rng(2), clip_norm=0.5, rows=4, bias=True)
    noise = effective_noise(0.1, clip_norm=0.5, norm=1.0, rows=4, rest_norm=2.0)
    assert noise**2 == pytest.approx(0.02, rel=1e-12)
    assert found == pytest.approx(0.02, rel=5 * np.sqrt(2 / 40 / 4000))


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 10), st.floats(0.1, 100), st.floats(0.1, 10), st.integers(1, 500))
def test_rows_needed_are_just_enough(noise, clip_norm, norm, rows):
    needed = rows_needed(clip_norm, norm=norm)
    least = effective_noise(noise, clip_norm=clip_norm, norm=norm, rows=needed)
    assert least == pytest.approx(noise, rel=1e-12)
    some = effective_noise(noise, clip_norm=clip_norm, norm=norm, rows=rows)
    more = effective_noise(noise, clip_norm=clip_norm, norm=norm, rows=rows + 1)
    assert noise <= more <= some
    assert some == noise if rows >= needed else some >= noise
    sunk = effective_noise(noise, clip_norm=clip_norm, norm=norm, rows=rows, rest_norm=1.0, rho=2.0)
    assert sunk >= some


def test_effective_noise_limits():
    assert effective_noise(0.0, clip_norm=1e300, norm=1e-300) == 0.0
    assert effective_noise(0.1, clip_norm=1e300, norm=1e-300) == np.inf
    assert effective_noise(0.1, clip_norm=1e200, norm=1e200) == pytest.approx(0.1)
    assert effective_noise(np.inf, clip_norm=1, norm=1) == np.inf


# --- several steps ---


def attack_rate(rng, *, dim, error, noise, rate, steps, participation, count=40_000):
    """The attack itself on all observations: the angle between their sum and the record."""
    hits = 0
    for _ in range(count // 4000):
        there = rng.random((4000, steps)) < rate
        u = rng.standard_normal((4000, dim))
        u /= np.linalg.norm(u, axis=1, keepdims=True)
        seen = there[..., None] * u[:, None] + noise * rng.standard_normal((4000, steps, dim))
        if participation == "visible":
            total = (seen * there[..., None]).sum(1)
            none = ~there.any(1)
            total[none] = rng.standard_normal((none.sum(), dim))
        else:
            total = seen.sum(1)
        cosine = (total * u).sum(1) / np.linalg.norm(total, axis=1)
        hits += (cosine >= np.sqrt(1 - error)).sum()
    return hits / count


@pytest.mark.parametrize(
    ("dim", "error", "noise", "rate", "steps", "participation", "value"),
    [
        (2, 0.5, 0.4, 0.02, 20, "visible", 0.478),
        (2, 0.5, 0.4, 0.02, 20, "hidden", 0.321),
        (16, 0.6, 0.3, 0.05, 10, "hidden", 0.034),
    ],
)
def test_averaged_is_the_success_of_the_attack(
    dim, error, noise, rate, steps, participation, value
):
    """Values of beyond.md section 1."""
    found = averaged(
        noise,
        dim=dim,
        eta=error / dim,
        steps=steps,
        sampling_rate=rate,
        participation=participation,
    )
    assert found == pytest.approx(value, abs=6e-4)
    drawn = attack_rate(
        np.random.default_rng(5),
        dim=dim,
        error=error,
        noise=noise,
        rate=rate,
        steps=steps,
        participation=participation,
    )
    assert drawn == pytest.approx(found, abs=4 * np.sqrt(found * (1 - found) / 40_000))


def test_averaged_is_the_sum_over_sightings():
    rate, steps, noise, dim, eta = 0.3, 7, 0.6, 9, 0.05
    for participation in ("visible", "hidden"):
        total = stats.binom.pmf(0, steps, rate) * exact(np.inf, dim=dim, eta=eta)
        for k in range(1, steps + 1):
            less = 1 / np.sqrt(k) if participation == "visible" else np.sqrt(steps) / k
            total += stats.binom.pmf(k, steps, rate) * exact(noise * less, dim=dim, eta=eta)
        given = {"steps": steps, "sampling_rate": rate, "participation": participation}
        found = averaged(noise, dim=dim, eta=eta, **given)
        assert found == pytest.approx(total, rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(
    st.floats(0.05, 5),
    st.sampled_from([2, 16, 784]),
    st.floats(0.01, 0.9),
    st.integers(1, 300),
    st.floats(1e-3, 1.0),
)
def test_averaged_order(noise, dim, error, steps, rate):
    def at(noise=noise, steps=steps, rate=rate, participation="visible"):
        return averaged(
            noise,
            dim=dim,
            eta=error / dim,
            steps=steps,
            sampling_rate=rate,
            participation=participation,
        )

    slack = 1 + 1e-8
    assert at(noise=noise * 1.3) <= at() * slack
    assert at(steps=steps + 5) >= at() / slack
    assert at(rate=min(1.0, rate * 1.4)) >= at() / slack
    assert at(participation="hidden") <= at() * slack
    assert at(rate=min(1.0, rate * 1.4), participation="hidden") >= (
        at(participation="hidden") / slack
    )


def test_averaged_of_all_steps_and_many():
    assert averaged(0.5, dim=16, eta=0.03, steps=4) == pytest.approx(exact(0.25, dim=16, eta=0.03))
    many = averaged(9.0, dim=16, eta=[0.01, 0.03], steps=100_000, sampling_rate=0.01)
    assert many.shape == (2,)
    assert many[1] == pytest.approx(exact(9 / np.sqrt(1000), dim=16, eta=0.03), rel=0.02)
    assert averaged(0.0, dim=3, eta=0.1, steps=2, participation="hidden") == 1.0
    blind = exact(np.inf, dim=3, eta=0.1)
    assert averaged(np.inf, dim=3, eta=0.1, steps=9, sampling_rate=0.5) == pytest.approx(blind)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise_multiplier", np.nan),
        ("eta", 0.0),
        ("norm", 0.0),
        ("steps", 0),
        ("steps", 1.5),
        ("steps", [1, 0]),
        ("sampling_rate", 0.0),
        ("sampling_rate", 1.2),
        ("sampling_rate", "half"),
        ("participation", "seen"),
    ],
)
def test_averaged_names_bad_input(name, value):
    arguments = {"noise_multiplier": 0.1, "dim": 4, "eta": 0.1, "steps": 3, name: value}
    with pytest.raises(ValueError, match=name):
        averaged(arguments.pop("noise_multiplier"), **arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise_multiplier", -1),
        ("clip_norm", 0.0),
        ("norm", np.nan),
        ("rows", 0),
        ("rows", 2.5),
        ("rest_norm", -1.0),
        ("rho", 0.5),
    ],
)
def test_effective_noise_names_bad_input(name, value):
    arguments = {"noise_multiplier": 0.1, "clip_norm": 1.0, "norm": 1.0, name: value}
    with pytest.raises(ValueError, match=rf"^{name} is .*; "):
        effective_noise(arguments.pop("noise_multiplier"), **arguments)
