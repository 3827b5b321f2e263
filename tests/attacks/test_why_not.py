"""Pairs of attack and defense that a plan leaves out: the attack refuses each of them."""

from __future__ import annotations

import tomllib
from importlib.resources import files

import pytest
import torch

import leakbound as lb
from leakbound import audit, registry
from leakbound.audit.plan import Spec, build_attack, build_defense
from leakbound.core import NotApplicable

STD = (("noise_std", 0.01),)
DEFENSES = ((), (Spec("gaussian_noise", STD),), (Spec("local_optimal_noise", STD),))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("defense", DEFENSES)
def test_an_attack_refuses_what_it_says_that_it_cannot_do(defense, size):
    model = lb.models.mlp(input_shape=(1, 4, 4), classes=3, generator=lb.stream(0, "model"))
    inputs = torch.rand(20, 1, 4, 4, generator=lb.stream(0, "known"))
    public = lb.Batch(inputs, torch.arange(20) % 3)
    batch = inputs[:size], torch.arange(size)
    chain = build_defense(defense)
    said = 0
    for name in registry.entries("attack"):
        attack = build_attack(Spec(name, ()))
        reason = attack.why_not(chain, size)
        if reason is not None:
            said += 1
            with pytest.raises((NotApplicable, ValueError), match=reason[:30]):
                lb.simulate(model, batch, defense=chain, attack=attack, public=public)
    assert (said > 0) == (defense != DEFENSES[2] or size > 1), name


def _plan(**changes):
    table = {
        "data": {"source": "digits"},
        "models": [{"name": "mlp"}],
        "attacks": [{"name": "variance_readout"}, {"name": "linear_inversion"}],
        "defenses": [{"name": "none"}, {"name": "local_optimal_noise", "noise_std": 0.01}],
        "batch_sizes": [1, 2],
    }
    return audit.parse(table | changes)


def test_a_plan_leaves_out_what_cannot_apply():
    kept = {
        (one.batch_size, audit.defense_name(one.defense), one.attack.name)
        for one in _plan().experiments()
    }
    readout = {one for one in kept if one[2] == "variance_readout"}
    assert readout == {(1, "local_optimal_noise", "variance_readout")}
    assert len(kept - readout) == 4


def test_a_plan_in_which_nothing_applies_runs_and_says_why():
    assert len(_plan(attacks=[{"name": "variance_readout"}], batch_sizes=[2]).experiments()) == 2


def test_the_demo_has_no_pair_that_is_known_to_be_idle():
    text = files("leakbound.audit").joinpath("plans/demo.toml").read_text("utf-8")
    own = audit.parse(tomllib.loads(text)).experiments()
    assert len(own) == 732
    for one in own:
        assert build_attack(one.attack).why_not(build_defense(one.defense), one.batch_size) is None
