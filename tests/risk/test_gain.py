"""Calibration for a gain: against closed forms, another accountant, and simulated attackers."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import optimize, stats

from leakbound.risk import (
    GainCalibration,
    GainTarget,
    TrainingSetting,
    calibrate,
    calibrate_gain,
    fixed_answer,
    three_attackers,
)
from leakbound.risk.deployment import laws_of, parse
from leakbound.risk.deployment.calibrate import gain_of, least_noise
from leakbound.risk.examples import Examples

COARSE = "foreign_worker,personal_status_and_sex"


def full(gain):
    """The noise multiplier of one full-batch step, from the normal quantile."""
    return 1 / (2 * stats.norm.ppf((1 + gain) / 2))


def added(q, noise, rate, steps):
    """F(q) - q if the steps that hold the example are seen, term by term."""
    k = np.arange(steps + 1)
    reached = stats.norm.cdf(stats.norm.ppf(q) + np.sqrt(k) / noise)
    return stats.binom.pmf(k, steps, rate) @ reached - q


def most_added(noise, rate, steps):
    found = optimize.minimize_scalar(
        lambda q: -added(q, noise, rate, steps), bounds=(0.05, 0.6), options={"xatol": 1e-9}
    )
    return -found.fun


@pytest.mark.parametrize(("gain", "noise"), [(0.05, 7.98), (0.1, 3.98), (0.2, 1.97)])
def test_one_full_batch_step(gain, noise):
    found = calibrate(f"gain<={gain}")
    assert isinstance(found, GainCalibration)
    assert found.noise_multiplier == pytest.approx(noise, abs=0.01)
    assert full(gain) <= found.noise_multiplier <= full(gain) * (1 + 1e-4)
    assert found.gain <= gain
    assert found.place == pytest.approx(stats.norm.cdf(-1 / (2 * full(gain))), abs=1e-3)


@pytest.mark.parametrize(("steps", "people"), [(7, 1), (1, 3), (400, 2)])
def test_steps_and_people_compose_as_normal_shifts(steps, people):
    found = calibrate("gain <= 10 %", steps=steps, people=people)
    exact = full(0.1) * math.sqrt(steps) * people
    assert exact <= found.noise_multiplier <= exact * (1 + 2e-4)


@pytest.mark.parametrize(("rate", "steps"), [(0.3, 1), (0.05, 60), (0.01, 1000)])
def test_sampled_steps_that_are_seen(rate, steps):
    found = calibrate("gain<=0.1", sampling_rate=rate, steps=steps)
    assert 0.1 * (1 - 5e-4) <= most_added(found.noise_multiplier, rate, steps) <= 0.1


@pytest.mark.parametrize("solve", ["steps", "sampling_rate", "clip_norm"])
def test_other_quantities(solve):
    given = {"steps": 60, "sampling_rate": 0.05}
    if solve == "clip_norm":
        given["noise_std"] = 3.0
    else:
        given["noise_multiplier"] = 4.0
        del given[solve]
    found = calibrate("gain<=0.1", solve=solve, **given)
    setting = found.setting
    noise, rate, steps = setting.noise_multiplier, setting.sampling_rate, setting.steps
    assert most_added(noise, rate, steps) <= 0.1
    if solve == "steps":
        assert most_added(noise, rate, steps + 1) > 0.1
    elif solve == "sampling_rate":
        assert most_added(noise, rate * (1 + 1e-3), steps) > 0.1
    else:
        assert found.noise_std == pytest.approx(3.0)
        assert most_added(noise * (1 - 1e-3), rate, steps) > 0.1


def test_hidden_sampled_steps_by_another_accountant():
    """The largest gain is the total variation: delta at epsilon 0."""
    pytest.importorskip("dp_accounting")
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant

    found = calibrate("gain<=0.1", sampling_rate=0.05, steps=60, participation="hidden")
    seen = calibrate("gain<=0.1", sampling_rate=0.05, steps=60)
    assert found.noise_multiplier < seen.noise_multiplier
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    step = dp_event.PoissonSampledDpEvent(0.05, dp_event.GaussianDpEvent(found.noise_multiplier))
    accountant.compose(dp_event.SelfComposedDpEvent(step, 60))
    assert accountant.get_delta(0.0) == pytest.approx(0.1, rel=2e-3)


def test_hidden_sampled_steps_by_simulation():
    """The likelihood ratio's best threshold, on 400,000 trainings of each kind."""
    found = calibrate("gain<=0.3", sampling_rate=0.3, steps=4, participation="hidden")
    draw = np.random.default_rng(0)
    noise = found.noise_multiplier
    without = noise * draw.standard_normal((400_000, 4))
    held = draw.random((400_000, 4)) < 0.3
    ratio = [
        np.log1p(0.3 * np.expm1((2 * own - 1) / (2 * noise**2))).sum(1) > 0
        for own in (without, without + held)
    ]
    gain = ratio[1].mean() - ratio[0].mean()
    assert 0.29 < gain < 0.3 + 3 * math.sqrt(0.5 / 400_000)


@pytest.mark.parametrize("radius", [1.0, 0.4])
def test_a_column_is_read_with_the_chance_of_the_matched_filter(radius):
    """Gradients at +-R from a center: the sign is right with Phi(R / s), close to the bound."""
    found = calibrate("gain<=0.1 for the label", radius=radius)
    assert radius * full(0.1) <= found.noise_multiplier <= radius * full(0.1) * (1 + 1e-4)
    draw = np.random.default_rng(2)
    truth = draw.integers(0, 2, 400_000) * 2 - 1
    seen = radius * truth + found.noise_multiplier * draw.standard_normal(len(truth))
    right = (np.sign(seen) == truth).mean()
    assert right == pytest.approx(stats.norm.cdf(1 / full(0.1)), abs=0.003)
    assert right <= dict(found.rises)[0.5] + 0.003


def test_a_rare_value_gets_as_much_noise_as_a_common_one():
    """On average, reading each of the few per cent would add only these per cent."""
    found = calibrate("gain<=0.1 for foreign_worker", data="german")
    assert 1 - found.share < 0.1
    assert found.noise_multiplier == calibrate("gain<=0.1").noise_multiplier


@pytest.mark.parametrize(
    ("column", "low", "high"),  # 963, 700 and at most 51 of 1,000 rows
    [("foreign_worker", 0.93, 0.963), ("the label", 0.6, 0.7), ("age_in_years", 0.01, 0.06)],
)
def test_the_best_fixed_answer(column, low, high):
    assert low < fixed_answer(Examples.of("german"), column) < high


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"target": "gain<=0.1", "dim": 8}, "dim is 8, which changes nothing"),
        ({"target": "gain<=0.1", "data": "german"}, "data is 'german'"),
        ({"target": "gain<=0.1", "radius": 0.5}, "radius is 0.5"),
        ({"target": "gain<=0.1 for sex", "data": "german"}, "the columns are status_of"),
        ({"target": "gain<=0.1 for region:top", "data": "digits"}, "one column of a table"),
        ({"target": "words<=0.005"}, "write it as"),
        ({"target": "words<=0.1 at fpr<=0.2"}, "more words than false ones"),
        ({"target": "words<=1.2.3"}, "write it as"),
        ({"target": "words<=0.1", "data": "german"}, "data is 'german'"),
        ({"target": "gain<=1e-5"}, "write a gain as"),
        ({"target": "gain>=0.1"}, "write a gain as"),
        ({"target": "gain<=0.1", "solve": "steps", "noise_multiplier": 1.0}, "not one step"),
        (
            {"target": "psnr>=30 with probability<=0.1", "data": "digits", "radius": 0.5},
            "radius is 0.5, which changes nothing",
        ),
    ],
)
def test_what_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        calibrate(**arguments)


def test_one_column_gains_nothing_from_hidden_steps():
    hidden = TrainingSetting(1.0, dim=1, steps=9, sampling_rate=0.1, participation="hidden")
    with pytest.raises(ValueError, match="no bound is known"):
        calibrate_gain(GainTarget(0.1, "x"), hidden)


def test_a_target_for_an_intruder_meets_the_bound_of_the_three_attackers():
    target = "columns>=0.9 with probability<=0.2"
    found = calibrate(target, data="german", known=COARSE)
    german = Examples.of("german")
    setting = replace(found.setting, dim=german.dim)
    assert three_attackers(setting, german, COARSE)[1].bound <= 0.2
    less = replace(setting, noise_multiplier=0.99 * setting.noise_multiplier)
    assert three_attackers(less, german, COARSE)[1].bound > 0.2
    assert found.noise_multiplier > calibrate(target, data="german").noise_multiplier
    assert found.target.goal == "17 of 18 columns"
    assert found.plain()["known"] == COARSE


def test_known_parts_that_may_determine_the_rest_are_refused():
    known = f"{COARSE},age_in_years,credit_amount"
    with pytest.raises(
        ValueError, match=r"without any update they may succeed .* \(--target \"gain"
    ):
        calibrate("columns>=0.9 with probability<=0.05", data="german", known=known)


def shift(most, falsely):
    """How far a normal statistic moves if a test of size `falsely` has the power `most`."""
    return stats.norm.ppf(most) - stats.norm.ppf(falsely)


@pytest.mark.parametrize(
    ("text", "most", "falsely"),
    [("words<=0.1", 0.1, 0.01), ("words <= 20 % at fpr <= 1e-6", 0.2, 1e-6)],
)
def test_noise_for_words_is_that_of_a_test_of_two_normal_laws(text, most, falsely):
    found = calibrate(text, steps=9)
    exact = 3 / shift(most, falsely)
    assert exact <= found.noise_multiplier <= exact * (1 + 2e-4)
    assert (found.gain, found.place) == (pytest.approx(most, rel=1e-3), falsely)
    assert dict(found.rises)[falsely] <= most
    assert found.scope.prior.startswith("whether a word occurs")


def test_words_of_sampled_steps_against_the_sum_over_their_number():
    found = calibrate("words<=0.2", sampling_rate=0.1, steps=30)
    exact = optimize.brentq(lambda s: added(0.01, s, 0.1, 30) + 0.01 - 0.2, 0.3, 30)
    assert exact <= found.noise_multiplier <= exact * 1.005


def test_no_attacker_on_words_is_above_the_target():
    """The likeliest test, of who knows where the word would lie."""
    found = calibrate("words<=0.3 at fpr<=0.02", steps=5)
    draws = np.random.default_rng(0).normal(size=(200_000, 5)) * found.noise_multiplier
    limit = np.quantile(draws.sum(1), 0.98)
    power = ((draws + 1).sum(1) > limit).mean()
    assert power == pytest.approx(0.3, abs=0.01)


def test_no_attacker_on_words_is_above_the_target_if_nobody_sees_who_took_part():
    """The likelihood ratio of mixtures, on draws of both."""
    rate, steps = 0.3, 4
    given = {"sampling_rate": rate, "steps": steps}
    found = calibrate("words<=0.3 at fpr<=0.02", participation="hidden", **given)
    noise = found.noise_multiplier
    assert noise < calibrate("words<=0.3 at fpr<=0.02", **given).noise_multiplier
    source = np.random.default_rng(0)
    without = noise * source.normal(size=(400_000, steps))
    with_it = noise * source.normal(size=(400_000, steps)) + (
        source.random((400_000, steps)) < rate
    )

    def evidence(seen):
        return np.log(1 - rate + rate * np.exp((2 * seen - 1) / (2 * noise**2))).sum(1)

    power = (evidence(with_it) > np.quantile(evidence(without), 0.98)).mean()
    assert 0.28 < power < 0.3 + 3 * math.sqrt(0.21 / 400_000) + 0.001


FACTS = {
    "clip": {"norm": 1.0, "kind": "l2", "at": "client"},
    "noise": {"multiplier": 1.0, "at": "client", "seeded": False},
    "rounds": 20,
    "unit": "example",
    "participation": {"law": "all"},
    "correlation": "none",
    "weights": "uniform",
}


def test_the_noise_of_a_deployment_for_a_gain():
    found = least_noise(parse(FACTS), GainTarget(0.1))
    exact = full(0.1) * math.sqrt(20)
    assert exact <= found.noise.multiplier <= exact * 1.0011
    gains = [gain_of(law) for law in laws_of(found) if law.unit == "example"]
    assert gains == [pytest.approx(0.1, abs=2e-4)] * 2


def test_the_noise_of_a_deployment_for_words():
    found = least_noise(parse(FACTS), GainTarget(0.1, at=0.01))
    exact = math.sqrt(20) / shift(0.1, 0.01)
    assert exact <= found.noise.multiplier <= exact * 1.0011


def test_one_column_gains_nothing_from_hidden_participation():
    hidden = {"law": "poisson", "rate": 0.1, "hidden": True}
    noise = {"multiplier": 1.0, "at": "server", "seeded": False, "on": "sum"}
    laws = laws_of(parse(FACTS | {"participation": hidden, "noise": noise}))
    law = next(law for law in laws if law.audience == "clients")
    assert gain_of(law) < gain_of(law, GainTarget(0.5, "x"))
    assert gain_of(law, GainTarget(0.5, "x")) == pytest.approx(most_added(1.0, 0.1, 20), abs=1e-5)


def test_a_server_that_sees_each_update_may_gain_everything():
    facts = parse(FACTS | {"noise": {**FACTS["noise"], "at": "server", "on": "sum"}})
    with pytest.raises(ValueError, match="sees every update"):
        least_noise(facts, GainTarget(0.1))
    assert least_noise(facts, GainTarget(0.1), audiences=["clients"]).noise.multiplier < 18


def test_any_example_of_a_client_that_is_clipped_as_a_whole_gains_what_the_client_does():
    facts = parse(FACTS | {"record": {"examples_per_client": 50}})
    by_unit = {law.unit: gain_of(law) for law in laws_of(facts)}
    assert by_unit["any example"] == by_unit["example"]
    unknown = {law.unit: gain_of(law) for law in laws_of(parse(FACTS))}
    assert unknown["any example"] == 1.0
