"""The strong attack: which of its searches runs, and what features do for it."""

import pytest
import torch

from leakbound.attacks import ByNoise, ConstantImage, GradientMatching, strong_matching
from leakbound.attacks.features.base import feature_errors, subspace_error
from leakbound.audit import parse, run
from leakbound.client import layer_inputs
from leakbound.core import NotApplicable
from leakbound.defenses import GaussianNoise, MagnitudePruning
from leakbound.randomness import stream

HEADED = {"backbone": "convnet", "features": 16, "width": 512}


@pytest.mark.parametrize(
    ("defense", "told", "wanted"),
    [
        (None, True, 0.25),
        (MagnitudePruning(0.5), True, 0.25),
        (GaussianNoise(1e-5), True, 0.25),
        (GaussianNoise(1.0), True, 0.75),
        (GaussianNoise(1.0), False, 0.25),
    ],
)
def test_the_declared_noise_chooses_the_search(scene, defense, told, wanted):
    attack = ByNoise(ConstantImage(0.25), ConstantImage(0.75))
    played = scene.play(scene.task("lenet"), scene.batch(0), defense, defense_known=told)
    answer = attack(played.observation, stream(0)).inputs
    assert bool((answer == wanted).all())


def test_settings_reach_both_searches():
    built = strong_matching(7, features="package:tensor", prior_rate=0.5, feature_weight=0.2)
    assert (built.clean.steps, built.noisy.steps) == (7, 7)
    assert (built.clean.features, built.noisy.features) == ("package:tensor", "none")
    assert built.noisy.learning_rate == 0.5
    with pytest.raises(ValueError, match=r"share is 2"):
        ByNoise(ConstantImage(), ConstantImage(), share=2.0)


def test_features_are_in_the_answer_and_in_the_record(scene):
    task, batch = scene.task("mlp", hidden=(64,)), scene.batch(0, 2)
    played = scene.play(task, batch)
    attack = GradientMatching(steps=2, features="cocktail_party")
    answer = attack(played.observation, stream(0))
    true = layer_inputs(task, batch.inputs, [answer.layer])[answer.layer].flatten(1)
    assert subspace_error(answer.features.T, true) < 1e-3
    plan = {
        "data": {"source": "mnist5k"},
        "models": [{"name": "mlp", "hidden": [64]}],
        "attacks": [{"name": "gradient_matching", "steps": 2, "features": "cocktail_party"}],
        "batch_sizes": [2],
    }
    (result,) = run(parse(plan), pictures=False)
    known = result.record.features
    assert known.layer == answer.layer
    assert known.span < 1e-3
    assert len(known.errors) == 2


def test_a_malicious_server_plants_the_head_that_the_tensor_method_reads(scene):
    attack = GradientMatching(steps=1, features="leakbound_reproductions.attacks.tensor:fitted")
    task, batch = scene.task("headed", **HEADED), scene.batch(0, 2)
    with pytest.raises(NotApplicable):
        attack(scene.play(task, batch).observation, stream(0))
    planted = attack.plant(task)
    assert not torch.equal(planted.parameters, task.parameters)
    answer = attack(scene.play(planted, batch).observation, stream(0))
    true = layer_inputs(planted, batch.inputs, [answer.layer])[answer.layer].flatten(1)
    assert float(feature_errors(answer.features, true, signed=False).max()) < 1e-3
