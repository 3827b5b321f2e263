"""Inputs of linear layers by the cocktail-party attack, on digits and on vectors of known law."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from leakbound import data, models
from leakbound.attacks.features.cocktail_party import CocktailParty
from leakbound.core import Batch, NotApplicable, Task, ThreatModel
from leakbound.defenses import (
    Clip,
    GaussianNoise,
    GradientDropout,
    LocalAggregation,
    MagnitudePruning,
    SecureAggregation,
    chain,
)
from leakbound.protocol import play
from leakbound.randomness import laplace, stream


def digits(count, seed=0):
    drawn = data.load("mnist5k")
    order = torch.randperm(len(drawn.inputs), generator=stream(seed, "digits"))[:count]
    return Batch(drawn.inputs[order], drawn.labels[order])


def perceptron(hidden=(256, 128), seed=0, activation="relu"):
    shape = {"input_shape": (1, 28, 28), "classes": 10, "generator": stream(seed, "model")}
    return Task.of(models.mlp(hidden=hidden, activation=activation, **shape), classes=10)


def vectors(count, size=500, seed=0):
    inputs = laplace((count, size), stream(seed, "vectors"), like=torch.zeros(()))
    return Batch(inputs.clamp(-20, 20), torch.arange(count) % 10)


def plain(bias=True, size=500, rows=64, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(size, rows, bias), nn.ReLU(), nn.Linear(rows, 10))
    return Task.of(model, classes=10, input_range=(-20.0, 20.0))


def seen(task, batch, *defense, seed=0, **threat):
    sources = [stream(seed, "client", i) for i in range(2)]
    played = play(task, [batch], chain(*defense), sources, threat=ThreatModel(**threat))
    return played.observation


def embeddings(task, inputs, layer):
    caught = []
    weights = {**task.buffers, **task.unflatten(task.parameters)}
    handle = task.model.get_submodule(layer).register_forward_pre_hook(
        lambda _, args: caught.append(args[0])
    )
    torch.func.functional_call(task.model, weights, (inputs,))
    handle.remove()
    return caught[0]


def cosines(found, true, *, signed=True):
    """Of each true vector and the nearest found one."""
    between = nn.functional.normalize(true.double()) @ found.vectors.double().T
    return (between if signed else between.abs()).amax(1)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_relu_embeddings_are_exact(count):
    task, batch = perceptron(), digits(count)
    found = CocktailParty(layer="3").find(seen(task, batch), stream(0))
    assert found.vectors.shape == (count, 256)
    assert (found.layer, found.signed, found.problem) == ("3", True, None)
    torch.testing.assert_close(found.vectors.norm(dim=1), torch.ones(count))
    assert cosines(found, embeddings(task, batch.inputs, "3")).min() > 0.999


def test_the_contrast_alone_does_not_take_embeddings_apart():
    """Those of a new network share most of their values: uncorrelated they are not."""
    task, batch = perceptron(), digits(8)
    found = CocktailParty(layer="3", solver="contrast").find(seen(task, batch), stream(0))
    assert cosines(found, embeddings(task, batch.inputs, "3")).mean() < 0.8


def test_a_convolutional_network():
    shape = {"input_shape": (1, 28, 28), "classes": 10, "generator": stream(0, "model")}
    task = Task.of(models.simple_convnet(**shape), classes=10)
    batch = digits(4)
    found = CocktailParty().find(seen(task, batch), stream(0))
    assert cosines(found, embeddings(task, batch.inputs, found.layer)).min() > 0.99


@pytest.mark.parametrize(
    ("defense", "least"),
    [
        (Clip(0.01), 0.999),
        (LocalAggregation(3, 0.01), 0.99),
        (MagnitudePruning(0.7), 0.99),
        (GradientDropout(0.7), 0.99),
        (GaussianNoise(1e-4), 0.95),
        (SecureAggregation(1), 0.999),
    ],
    ids=repr,
)
def test_embeddings_behind_defenses(defense, least):
    task, batch = perceptron(), digits(8)
    found = CocktailParty(layer="3").find(seen(task, batch, defense), stream(0))
    reached = cosines(found, embeddings(task, batch.inputs, "3")).mean()
    print(f"\n{defense}: {reached:.4f}")
    assert reached > least


def test_a_known_mask_is_what_makes_pruning_harmless():
    task, batch = perceptron(), digits(8)
    true = embeddings(task, batch.inputs, "3")
    blind = seen(task, batch, MagnitudePruning(0.7), defense_known=False)
    assert cosines(CocktailParty(layer="3").find(blind, stream(0)), true).mean() < 0.97


def test_noise_that_drowns_the_embeddings_is_reported():
    task, batch = perceptron(), digits(8)
    found = CocktailParty(layer="3").find(seen(task, batch, GaussianNoise(0.1)), stream(0))
    assert "stand out from the noise" in found.problem


@pytest.mark.parametrize("seed", range(3))
def test_the_bias_gradient_tells_the_signs(seed):
    task, batch = plain(seed=seed), vectors(6, seed=seed)
    found = CocktailParty().find(seen(task, batch), stream(0))
    assert (found.layer, found.signed, found.problem) == ("0", True, None)
    assert cosines(found, batch.inputs).min() > 0.97


def test_without_a_bias_only_lines_are_known():
    task, batch = plain(bias=False), vectors(6)
    found = CocktailParty().find(seen(task, batch), stream(0))
    assert not found.signed
    assert cosines(found, batch.inputs, signed=False).min() > 0.97
    noisy = seen(plain(), batch, GaussianNoise(0.05))
    assert not CocktailParty().find(noisy, stream(0)).signed


def test_it_plants_nothing():
    task = plain()
    assert CocktailParty().plant(task) is task


class Tokens(nn.Module):
    """A linear layer on each of several tokens."""

    def __init__(self):
        super().__init__()
        self.each, self.head = nn.Linear(50, 20), nn.Linear(20, 10)

    def forward(self, inputs):
        return self.head(self.each(inputs.reshape(len(inputs), 10, 50)).mean(1))


class Twice(nn.Module):
    """A layer that runs twice."""

    def __init__(self):
        super().__init__()
        self.again, self.head = nn.Linear(500, 500), nn.Linear(500, 10)

    def forward(self, inputs):
        return self.head(self.again(self.again(inputs)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": Tokens()}, "more than one vector"),
        ({"model": Twice()}, "more than one vector"),
        ({"layer": "7"}, "no linear layer '7'"),
        ({"model": nn.Sequential(nn.Unflatten(1, (5, 100)), nn.Conv1d(5, 10, 100), nn.Flatten())},
         "no trained linear layer"),
        ({"rows": 4}, "4 mixtures"),
        ({"layer": "2"}, "rank below 10"),
        ({"same": True}, "rank below 10"),
        ({"zero": True}, "gradient is zero"),
        ({"nan": True}, "not finite"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)  # fmt: skip
def test_who_it_is_not_for(change, words):
    task, batch = plain(rows=change.get("rows", 64)), vectors(10)
    if "model" in change:
        task = Task.of(change["model"], classes=10, input_range=(-20.0, 20.0))
    if "same" in change:
        inputs = batch.inputs.clone()
        inputs[1], labels = inputs[0], batch.labels.clone()
        labels[1] = labels[0]
        batch = Batch(inputs, labels)
    observation = seen(task, batch)
    rows = observation.update.rows
    if "zero" in change:
        observation = replace(observation, update=replace(observation.update, rows=rows * 0))
    if "nan" in change:
        update = replace(observation.update, rows=rows * float("nan"))
        observation = replace(observation, update=update)
    with pytest.raises(NotApplicable, match=words):
        CocktailParty(layer=change.get("layer")).find(observation, stream(0))
