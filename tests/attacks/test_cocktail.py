"""Images by the cocktail-party attack: through a perceptron's gradient, alone and defended."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from skimage import data
from skimage.transform import resize
from torch import nn

from leakbound import models
from leakbound.attacks import LinearInversion
from leakbound.attacks.features.cocktail_party import CocktailPartyImages
from leakbound.core import Batch, NotApplicable, Task, ThreatModel
from leakbound.defenses import Clip, GaussianNoise, MagnitudePruning, chain
from leakbound.metrics import psnr
from leakbound.pairing import pair
from leakbound.protocol import play
from leakbound.randomness import normal, stream
from leakbound.testing.common import small_task

COLOR = (3, 32, 32)


@pytest.fixture(scope="module")
def photographs():
    pictures = [data.astronaut(), data.coffee(), data.chelsea(), data.rocket()]
    pictures += [data.hubble_deep_field(), data.immunohistochemistry(), data.retina()]
    pictures += [data.stereo_motorcycle()[0]]
    small = []
    for picture in pictures:
        side = min(picture.shape[:2])
        square = picture[:side, :side]
        small.append(resize(square, (32, 32), anti_aliasing=True).transpose(2, 0, 1))
    return Batch(torch.from_numpy(np.stack(small)).float(), torch.arange(8))


def perceptron(shape=COLOR, seed=0, hidden=256):
    generator = stream(seed, "model")
    model = models.mlp(input_shape=shape, classes=10, generator=generator, hidden=(hidden,))
    return Task.of(model, classes=10)


def played_on(task, batch, *defense, seed=0, **threat):
    sources = [stream(seed, "client", i) for i in range(2)]
    return play(task, [batch], chain(*defense), sources, threat=ThreatModel(**threat))


def correlations(found, true):
    size = len(true)
    between = np.abs(np.corrcoef(found.flatten(1), true.flatten(1))[:size, size:])
    return between[linear_sum_assignment(-between)]


def decibels(played, answer):
    return statistics.mean(psnr(pair(played.truth, answer), data_range=1.0))


@pytest.mark.parametrize("seed", range(1))
def test_eight_color_photographs_of_one_gradient(photographs, seed):
    played = played_on(perceptron(seed=seed), photographs)
    answer = CocktailPartyImages()(played.observation, stream(seed, "attack"))
    reached = correlations(answer.inputs, photographs.inputs).mean()
    print(f"\n{reached:.4f}, {decibels(played, answer):.1f} dB, {answer.problem}")
    assert reached >= 0.97
    assert decibels(played, answer) > 25
    assert answer.layer == "1"
    torch.testing.assert_close(answer.features.norm(dim=1), torch.ones(8))


@pytest.mark.parametrize("count", [1, 2, 8])
def test_digits(scene, count):
    task, batch = scene.task("mlp"), scene.batch(3, count)
    played = scene.play(task, batch)
    answer = CocktailPartyImages()(played.observation, stream(0))
    assert answer.problem is None
    assert decibels(played, answer) > 35
    assert float(answer.inputs.min()) >= 0
    assert float(answer.inputs.max()) <= 1


@pytest.mark.parametrize(
    ("defense", "least"),
    [(Clip(0.01), 0.97), (MagnitudePruning(0.7), 0.97), (GaussianNoise(1e-3), 0.9)],
    ids=repr,
)
def test_photographs_behind_defenses(photographs, defense, least):
    played = played_on(perceptron(), photographs, defense)
    answer = CocktailPartyImages()(played.observation, stream(0))
    assert correlations(answer.inputs, photographs.inputs).mean() > least
    rival = LinearInversion()(played.observation, stream(0))
    if not isinstance(defense, Clip):
        assert decibels(played, answer) > decibels(played, rival) + 3


def test_noise_that_drowns_the_images_is_reported(photographs):
    played = played_on(perceptron(), photographs, GaussianNoise(0.05))
    answer = CocktailPartyImages()(played.observation, stream(0))
    assert "stand out from the noise" in answer.problem
    assert bool(answer.inputs.isfinite().all())


def without_bias():
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(784, 128, bias=False), nn.ReLU(), nn.Linear(128, 10)]
    return Task.of(nn.Sequential(*layers), classes=10)


def test_without_a_bias_the_input_range_gives_the_scale(scene):
    batch = scene.batch(0, 4)
    played = played_on(without_bias(), batch)
    answer = CocktailPartyImages()(played.observation, stream(0))
    assert correlations(answer.inputs, batch.inputs).min() > 0.98
    assert decibels(played, answer) > 20


def test_inputs_of_both_signs(scene):
    """The mean tells no sign where the range has both: the bias gradient does."""
    batch = scene.batch(0, 4)
    task = scene.task("mlp")
    shifted = Batch(2 * batch.inputs - 1, batch.labels)
    task = replace(task, input_range=(-1.0, 1.0), public=None)
    played = played_on(task, shifted)
    answer = CocktailPartyImages()(played.observation, stream(0))
    paired = pair(played.truth, answer)
    assert statistics.mean(psnr(paired, data_range=2.0)) > 35


def test_what_cannot_be_separated_is_a_problem(scene):
    batch = scene.batch(0, 4)
    twice = Batch(batch.inputs[[0, 1, 2, 2]], batch.labels[[0, 1, 2, 2]])
    answer = CocktailPartyImages()(played_on(scene.task("mlp"), twice).observation, stream(0))
    assert "rank below 4" in answer.problem
    few = played_on(perceptron((1, 28, 28), hidden=3), batch)
    answer = CocktailPartyImages()(few.observation, stream(0))
    assert "4 sources need" in answer.problem
    assert float((answer.inputs - 0.5).abs().max()) == 0


def test_flat_noise_is_a_problem():
    noise = normal((4, *COLOR), stream(0, "flat")) * 0.1 + 0.5
    played = played_on(perceptron(), Batch(noise, torch.arange(4)))
    answer = CocktailPartyImages()(played.observation, stream(0))
    assert "look Gaussian" in answer.problem


def test_it_is_for_layers_that_see_the_image(scene):
    played = scene.play(scene.task("simple_convnet"), scene.batch(0, 4))
    with pytest.raises(NotApplicable, match="does not see the image"):
        CocktailPartyImages()(played.observation, stream(0))
    played = scene.play(scene.task("mlp", hidden=(64, 64)), scene.batch(0, 4))
    with pytest.raises(NotApplicable, match="'3' does not see the image"):
        CocktailPartyImages(layer="3")(played.observation, stream(0))


def test_it_plants_nothing():
    task = small_task()
    assert CocktailPartyImages().plant(task) is task


def test_settings_are_checked():
    with pytest.raises(ValueError, match="slope is inf"):
        CocktailPartyImages(slope=math.inf)
    assert "solver='contrast'" in repr(CocktailPartyImages(solver="contrast"))
