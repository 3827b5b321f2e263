"""Statistics told beside the release: what they void, and whose they are."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from leakbound.attacks import Gias, GradientMatching
from leakbound.attacks.matching.terms import SameStatistics
from leakbound.audit import parse, run
from leakbound.client import clients_layer_inputs
from leakbound.core import Batch, NotApplicable, Task
from leakbound.defenses import (
    Clip,
    Mixup,
    NoisyCopy,
    Quantization,
    SecureAggregation,
    chain,
)
from leakbound.randomness import stream


def _normed():
    layers = nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)
    return Task.of(nn.Sequential(nn.Flatten(), *layers).eval(), classes=10)


@pytest.mark.parametrize("known", [False, True])
def test_no_bound_covers_an_attacker_who_is_told_them(known):
    plan = {
        "data": {"source": "digits", "size": 9},
        "models": [{"name": "resnet18", "width": 2, "norm": "batch", "activation": "tanh"}],
        "attacks": [{"name": "constant_image"}],
        "defenses": [{"name": "dp_sgd", "clip_norm": 1.0, "noise_multiplier": 20.0}],
        "threat": {"statistics_known": known},
        "error_bound": {"images": 1, "components": 2},
    }
    (result,) = run(parse(plan), pictures=False)
    assert result.record.status == "ok", result.record.reason
    assert bool(result.record.bounds) is not known
    assert ("no bound covers" in (result.record.bounds_note or "")) is known


@pytest.mark.parametrize("defense", [Mixup(), NoisyCopy(1.0)])
def test_defenses_that_change_what_is_trained_on_are_refused(scene, defense):
    with pytest.raises(NotApplicable, match="changes what the client trains on"):
        scene.play(_normed(), scene.batch(0, 4), defense, statistics_known=True)


def test_of_several_clients_the_truth_has_no_penalty(scene):
    batch = scene.batch(0, 6)
    played = scene.play(_normed(), batch, SecureAggregation(3), statistics_known=True)
    seen = played.observation
    term = SameStatistics(1.0, seen.statistics, 1.0, seen.cohort)
    inside = clients_layer_inputs(seen.task, played.truth.inputs, term.layers, seen.cohort)
    assert float(term(played.truth.inputs, inside)) < 1e-5


def test_public_statistics_follow_the_tasks_type(scene):
    task = _normed().to("cpu", torch.float64)
    batch = scene.batch(0)
    seen = scene.play(task, Batch(batch.inputs.double(), batch.labels))
    observation = replace(seen.observation, auxiliary=scene.batch(3, 8))
    GradientMatching(steps=1, batch_norm=0.1)(observation, stream(0))


def test_a_step_after_other_links_is_not_known():
    ready = chain(Clip(0.01), Quantization(4, stochastic=True)).resolve(_normed(), 1)
    inputs, labels = torch.rand(1, 1, 28, 28), torch.tensor([3])
    assert ready.noise_variance(_normed(), inputs, labels) is None
    alone = chain(Quantization(4, stochastic=True)).resolve(_normed(), 1)
    assert alone.noise_variance(_normed(), inputs, labels) is not None


class Rough(nn.Module):
    latent = 2

    def __init__(self, count):
        super().__init__()
        self.layer = nn.Linear(2, count)

    def forward(self, latents):
        return self.layer(latents).sigmoid().view(-1, 1, 28, 28)


def rough(input_shape):
    return Rough(784)


def test_a_plan_may_name_a_generator_and_its_weights_are_named_by_the_stream(scene):
    plan = {
        "data": {"source": "mnist5k"},
        "models": [{"name": "mlp"}],
        "attacks": [{"name": "gias", "generator": f"{__name__}:rough"}],
    }
    assert parse(plan).attacks[0].parameters["generator"].endswith(":rough")
    seen = scene.play(scene.task("lenet"), scene.batch(0)).observation
    attack = Gias(f"{__name__}:rough", latent_steps=2, weight_steps=2, restarts=1)
    first, second = (attack(seen, stream(4)).inputs for _ in range(2))
    assert torch.equal(first, second)
