"""Near-copies in a batch, and several examples of one person: they count as one unit."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from leakbound import data, models, stream
from leakbound.assess.near_copies import crowding_of
from leakbound.audit.simulate import simulate
from leakbound.captured.run import Settings
from leakbound.cli import main
from leakbound.core import Batch
from leakbound.meter import Policy
from leakbound.risk.calibrate import calibrate_setting
from leakbound.risk.corridor import TrainingSetting, epsilon, success_bound
from leakbound.risk.deployment import laws_of, parse

SHAPE = (1, 28, 28)


@pytest.fixture(scope="module")
def digits():
    return data.load("mnist5k").batch(torch.arange(600))


def near(inputs, places):
    """Images 40 dB from the first one of the places, in each place."""
    found = inputs[places].clone()
    noise = torch.randn(found.shape, generator=stream(0, "near"))
    found[:] = (found[:1] + 0.01 * noise).clamp(0, 1)
    return found


def bounds_of(batch, public, defense="dp_sgd,noise_multiplier=2,clip_norm=1", people=1):
    model = models.mlp(input_shape=SHAPE, classes=10, generator=stream(0, "model"), hidden=(8,))
    found = simulate(
        model, batch, public=public, defense=defense, attack="linear_inversion", psnr=25.0,
        error_bound="none", probability=0.2, fresh=True, people=people,
    )  # fmt: skip
    return {bound.basis: bound for bound in found.assessment.bounds}


def test_a_batch_of_near_copies_counts_as_one_unit(digits):
    """A matched filter succeeds with .729 where .0862 was stated for each example by itself."""
    labels, public = digits.labels[:8], Batch(digits.inputs[8:], digits.labels[8:])
    alone = bounds_of(Batch(digits.inputs[:8], labels), public)
    copies = bounds_of(Batch(near(digits.inputs, range(8)), labels[:1].expand(8)), public)
    assert any(
        "none of the examples in this update is near" in words
        for words in alone["sample"].assumptions
    )
    assert any("up to 8 of the examples" in words for words in copies["sample"].assumptions)
    assert alone["sample"].probability < 0.4
    assert copies["sample"].probability > 0.729
    assert copies["sample"].epsilon == alone["sample"].epsilon  # the membership of one example
    assert "known model" not in copies


def test_two_near_examples_divide_the_noise_by_two(digits):
    labels, public = digits.labels[:8], Batch(digits.inputs[8:], digits.labels[8:])
    inputs = digits.inputs[:8].clone()
    inputs[3] = near(digits.inputs, [3, 3])[1]
    inputs[4] = digits.inputs[3]
    two = bounds_of(Batch(inputs, labels), public)["sample"]
    half = bounds_of(Batch(digits.inputs[:8], labels), public, "dp_sgd,noise_multiplier=1")[
        "sample"
    ]
    assert two.probability == half.probability
    assert any("the noise of one is divided by 2" in words for words in two.assumptions)


def test_people_are_declared(digits):
    """Two examples of one person count as one of twice the clip norm."""
    batch, public = (
        Batch(digits.inputs[part], digits.labels[part]) for part in (slice(8), slice(8, None))
    )
    two = bounds_of(batch, public, people=2)
    half = bounds_of(batch, public, "dp_sgd,noise_multiplier=1")
    assert two["sample"].probability == half["sample"].probability
    assert two["sample"].probability > bounds_of(batch, public)["sample"].probability
    assert "known model" not in two
    assert "one person with at most 2 examples in this update, as declared" in " ".join(
        two["sample"].assumptions
    )
    assert "one example in this update, as declared" in " ".join(half["sample"].assumptions)


def test_near_copies_of_other_people_count_beside_a_persons_own(digits):
    """Two examples of a person, each beside a near-copy of somebody else, are four."""
    labels, public = digits.labels[:8], Batch(digits.inputs[8:], digits.labels[8:])
    inputs = digits.inputs[:8].clone()
    inputs[3] = near(digits.inputs, [2, 2])[1]
    both = bounds_of(Batch(inputs, labels), public, people=2)["sample"]
    own = bounds_of(Batch(digits.inputs[:8], labels), public, people=4)["sample"]
    assert both.probability == own.probability
    assert "the noise of one is divided by 4" in " ".join(both.assumptions)


@pytest.mark.parametrize("participation", ["visible", "hidden"])
def test_a_persons_examples_are_no_less_than_a_simulated_attack(participation):
    """Three equal examples of one person, each sampled for itself: a threshold on the sum."""
    kept = {"dim": 4, "steps": 2, "sampling_rate": 0.3, "participation": participation}
    own = TrainingSetting(2.0, people=3, **kept)
    draw = np.random.default_rng(0)
    taken = draw.binomial(3, 0.3, (200_000, 2))
    seen = taken.sum(1) + 2.0 * np.sqrt(2) * draw.standard_normal(200_000)
    kappa = 0.01
    if participation == "visible":  # the attacker weighs the steps by what they hold
        weight = np.square(taken).sum(1) ** 0.5 / 2.0
        attained = stats.norm.cdf(stats.norm.ppf(kappa) + weight).mean()
    else:
        attained = (seen > 2.0 * np.sqrt(2) * stats.norm.isf(kappa)).mean()
    bound = success_bound(own, np.log(kappa))[()]
    assert attained < bound
    assert attained > success_bound(replace(own, people=1), np.log(kappa))[()]
    assert epsilon(own, 1e-5) > epsilon(replace(own, people=1), 1e-5)


@pytest.mark.parametrize("solve", ["noise_multiplier", "steps", "sampling_rate"])
def test_calibration_for_people_meets_the_target(solve):
    given = TrainingSetting(30.0, dim=64, steps=20, sampling_rate=0.2, people=3)
    found = calibrate_setting("mse<=0.001 with probability<=0.01", given, solve=solve, prior=None)
    assert found.setting.people == 3
    assert found.corridor.bound[0] <= 0.01
    alone = replace(given, people=1)
    other = calibrate_setting("mse<=0.001 with probability<=0.01", alone, solve=solve, prior=None)
    more = getattr(found.setting, solve), getattr(other.setting, solve)
    assert (more[0] > more[1]) is (solve == "noise_multiplier")


def test_a_deployment_states_a_person():
    table = {
        "clip": {"norm": 1.0, "kind": "example"}, "correlation": "none", "rounds": 1, "sends": [],
        "noise": {"multiplier": 4.0, "at": "optimizer", "seeded": False},
        "local": {"coupled": False, "batch": 10, "examples": 100, "sampler": "poisson",
                  "epochs": 1, "normalizer": "expected"},
    }  # fmt: skip
    assert "person" not in {law.unit for law in laws_of(parse(table))}
    with_people = laws_of(parse(table | {"record": {"people": 4, "sites": 1}, "unit": "example"}))
    laws = {law.unit: law for law in with_people if law.audience == "clients"}
    assert laws["person"].bound(np.log(1e-3)) > 2 * laws["example"].bound(np.log(1e-3))
    # the clip of a whole update bounds all of a person's examples at one client
    whole = {
        "clip": {"norm": 1.0, "kind": "l2", "at": "client"}, "correlation": "none", "rounds": 1,
        "noise": {"multiplier": 4.0, "at": "client", "seeded": False},
        "participation": {"law": "all"}, "record": {"people": 4, "sites": 1},
    }  # fmt: skip
    laws = {law.unit: law for law in laws_of(parse(whole)) if law.audience == "clients"}
    assert laws["person"].bound(np.log(1e-3)) == laws["client"].bound(np.log(1e-3))
    with pytest.raises(ValueError, match="no person has more examples"):
        parse({"record": {"people": 4, "examples_per_client": 3}})


def test_an_attack_of_the_command_line_takes_people(capsys):
    given = ["attack", "--attack", "linear_inversion", "--data", "digits", "--batch-size", "4"]
    given += ["--defense", "dp_sgd,noise_multiplier=2", "--error-bound", "none", "--json"]
    for people in (1, 3):
        with pytest.raises(SystemExit):
            main([*given, "--people", str(people)])
        (bound, *_) = json.loads(capsys.readouterr().out)["bounds"]
        said = "one example" if people == 1 else f"one person with at most {people} examples"
        assert f"unit: {said} in this update, as declared" in " ".join(bound["assumptions"])
    with pytest.raises(ValueError, match="people is 0"):
        Settings((1, 8, 8), people=0)
    with pytest.raises(ValueError, match="people is 0"):
        Policy(people=0)


def test_a_batch_that_is_alike_is_no_sample_of_the_public_law(digits):
    labels, public = digits.labels[:8], Batch(digits.inputs[8:], digits.labels[8:])
    doubts = []
    for inputs in (digits.inputs[:8], near(digits.inputs, range(8))):
        found = bounds_of(Batch(inputs, labels), public, "dp_sgd,noise_multiplier=50")["sample"]
        said = " ".join(found.assumptions)
        doubts.append("more examples of the update match each other" in said)
    assert doubts == [False, True]
    assert not found.excludes_threshold


@pytest.mark.parametrize("alike", [0.02, 0.4])
def test_the_count_of_alike_examples_has_its_level_and_power(alike):
    """Examples of which a share is one template: at most 1 % are doubted if the limit holds."""
    draw, doubted, trials = np.random.default_rng(3), 0, 400
    for _ in range(trials):
        doubted += crowding_of(max(1, draw.binomial(16, alike)), 16, 0.02) < 0.01
    assert doubted / trials <= 0.01 if alike == 0.02 else doubted / trials > 0.7
