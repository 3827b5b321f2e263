"""Closed-form inversion of the first linear layer, on real digits."""

from dataclasses import replace
from statistics import mean, median

import pytest
import torch
from torch import nn

from leakbound.attacks import LinearInversion
from leakbound.attacks.analytic import input_layer
from leakbound.core import Gaussian, NotApplicable, Reconstruction, Task, Update
from leakbound.defenses import (
    Clip,
    DpSgd,
    GaussianNoise,
    GradientDropout,
    LocalAggregation,
    MagnitudePruning,
    SecureAggregation,
    chain,
)
from leakbound.randomness import stream

ATTACK = LinearInversion()


@pytest.mark.parametrize(
    "defense",
    [
        None,
        Clip(1e-3),
        DpSgd(0.1, 1e-9),
        LocalAggregation(5, 0.1),
        MagnitudePruning(0.7),
        GradientDropout(0.5),
        GradientDropout(0.8),
        chain(LocalAggregation(3, 0.1), MagnitudePruning(0.5)),
        SecureAggregation(1),
    ],
    ids=repr,
)
@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
def test_batch_of_one_is_exact(scene, defense, activation):
    settings = {"activation": activation}
    found = scene.attack(ATTACK, "mlp", range(4), defense=defense, settings=settings)
    assert min(found) >= 60


def _first_layer(played):
    parts = played.observation.task.unflatten(played.observation.update.rows[0])
    return parts["1.weight"].double(), parts["1.bias"].double()


def _regression(weight, bias):
    return bias @ weight / bias.square().sum()


def _strongest_row(weight, bias):
    row = bias.abs().argmax()
    return weight[row] / bias[row]


@pytest.mark.parametrize("noise_std", [1e-3, 1e-2, 3e-2])
def test_all_rows_together_beat_simpler_readings_under_noise(scene, noise_std):
    found = {"rank one": [], "regression": [], "strongest row": []}
    for seed in range(20):
        task, batch = scene.task("mlp", seed), scene.batch(seed)
        played = scene.play(task, batch, GaussianNoise(noise_std), seed)
        answer = ATTACK(played.observation, stream(0))
        assert answer.problem is None
        found["rank one"] += scene.decibels(played, answer)
        for name, read in (("regression", _regression), ("strongest row", _strongest_row)):
            image = read(*_first_layer(played)).clamp(0, 1).float().reshape(1, 1, 28, 28)
            found[name] += scene.decibels(played, Reconstruction(image))
    print(f"\n{noise_std}: " + ", ".join(f"{k} {median(v):.1f} dB" for k, v in found.items()))
    best, regression, row = found.values()
    assert mean(best) > mean(regression) - 0.5
    assert mean(regression) > mean(row)
    assert sum(a > b for a, b in zip(best, row, strict=True)) == 20
    if noise_std >= 1e-2:
        assert mean(best) > mean(regression) + 2
        assert sum(a > b for a, b in zip(best, regression, strict=True)) >= 16


def test_noise_that_differs_between_coordinates_is_weighed(scene):
    task, batch = scene.task("mlp"), scene.batch(0)
    played = scene.play(task, batch)
    spread = torch.where(torch.rand(len(task.parameters), generator=stream(0)) < 0.5, 1e-4, 0.1)
    rows = Update(played.observation.update.rows, played.observation.update.unit, (1,))
    noisy = rows.noised(Gaussian(spread**2), stream(1))
    known = replace(played.observation, update=noisy)
    unknown = replace(known, update=replace(noisy, law=Gaussian(1.0)))
    aware, blind = (scene.decibels(played, ATTACK(seen, stream(0)))[0] for seen in (known, unknown))
    assert aware > blind + 20


def test_noise_alone_is_called_so(scene):
    played = scene.play(scene.task("mlp"), scene.batch(0), GaussianNoise(10.0))
    answer = ATTACK(played.observation, stream(0))
    assert "looks like noise alone" in answer.problem


def test_a_withheld_layer_is_called_so(scene):
    played = scene.play(scene.task("mlp"), scene.batch(0), GradientDropout(1.0))
    answer = ATTACK(played.observation, stream(0))
    assert answer.problem.startswith("gradient vanished")
    assert bool((answer.inputs == 0.5).all())


def test_rows_that_one_example_activates_give_it_up(scene):
    """Batch of four on the ReLU MLP: every image with a hidden unit of its own is exact."""
    alone = reached = 0
    for seed in range(10):
        task, batch = scene.task("mlp", seed, hidden=(512,)), scene.batch(seed, 4)
        played = scene.play(task, batch, seed=seed)
        parts = task.unflatten(task.parameters)
        active = batch.inputs.flatten(1) @ parts["1.weight"].T + parts["1.bias"] > 0
        own = [bool((active[i] & (active.sum(0) == 1)).any()) for i in range(4)]
        found = scene.decibels(played, ATTACK(played.observation, stream(0)))
        alone += sum(own)
        reached += sum(x >= 40 for x, single in zip(found, own, strict=True) if single)
    print(f"\n{alone} of 40 images have a unit of their own, {reached} of them are read")
    assert alone >= 20
    assert reached >= 0.9 * alone


@pytest.mark.parametrize(("noise_std", "least"), [(1e-4, 30), (1e-3, 17)])
def test_known_noise_decides_which_rows_agree(scene, noise_std, least):
    """Batch of four under noise: who knows the law separates what a fixed tolerance cannot."""
    knows, does_not = [], []
    for seed in range(8):
        task, batch = scene.task("mlp", seed), scene.batch(seed, 4)
        played = scene.play(task, batch, GaussianNoise(noise_std), seed)
        knows += scene.decibels(played, ATTACK(played.observation, stream(0)))
        naive = replace(played.observation, update=played.update.seen(defense_known=False))
        does_not += scene.decibels(played, ATTACK(naive, stream(0)))
    print(f"\n{noise_std}: {median(knows):.1f} dB known, {median(does_not):.1f} dB not known")
    assert median(knows) >= least
    assert median(knows) > median(does_not) + 3


def test_a_mixture_that_cannot_be_separated_is_called_so(scene):
    played = scene.play(scene.task("mlp", activation="sigmoid"), scene.batch(0, 4))
    answer = ATTACK(played.observation, stream(0))
    assert answer.problem == "no two rows agree on an input: all candidates may be mixtures"
    assert answer.inputs.shape == (4, 1, 28, 28)


def test_too_few_rows_are_called_so(scene):
    task = scene.task("mlp", hidden=(2,))
    answer = ATTACK(scene.play(task, scene.batch(0, 4)).observation, stream(0))
    assert answer.problem.endswith("of 4 inputs could be separated")


@pytest.mark.parametrize("build", ["simple_convnet", "lenet"])
def test_not_applicable_to_convolutions(scene, build):
    played = scene.play(scene.task(build), scene.batch(0))
    with pytest.raises(NotApplicable, match="no linear layer with a bias sees the input"):
        ATTACK(played.observation, stream(0))


class TwoPaths(nn.Module):
    """A convolution first; the linear layer that sees the input comes second."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 28)
        self.wide = nn.Linear(784, 16)
        self.last = nn.Linear(18, 10)

    def forward(self, x):
        joint = torch.cat([self.conv(x).flatten(1), self.wide(x.flatten(1))], 1)
        return self.last(joint.sigmoid())


def test_a_layer_that_sees_the_input_need_not_be_first(scene):
    torch.manual_seed(0)
    task, batch = Task.of(TwoPaths(), classes=10), scene.batch(0)
    assert input_layer(task, (1, 28, 28)) == "wide"
    played = scene.play(task, batch)
    assert scene.decibels(played, ATTACK(played.observation, stream(0)))[0] >= 60


def test_a_layer_over_the_rows_of_an_image_is_not_taken(scene):
    model = nn.Sequential(nn.Linear(28, 4), nn.Flatten(), nn.Linear(112, 10))
    with pytest.raises(NotApplicable):
        input_layer(Task.of(model), (1, 28, 28))
    assert input_layer(Task.of(nn.Linear(5, 2)), (5,)) == ""
