"""Searches through a client's several local steps: by the engine as by autograd."""

import statistics
from dataclasses import replace

import pytest
import torch
from torch import nn

from leakbound import data, models
from leakbound.attacks import FedAvgMatching, GradientMatching, GradInversion, inverting_gradients
from leakbound.attacks.fedavg import LocalSearch
from leakbound.attacks.matching import engine
from leakbound.attacks.matching.engine import Evaluator
from leakbound.attacks.matching.loop import solve
from leakbound.core import Batch, LocalPlan, Task
from leakbound.defenses import (
    Clip,
    GaussianNoise,
    HiddenDropout,
    LocalAggregation,
    MagnitudePruning,
    NoDefense,
    SecureAggregation,
    chain,
)
from leakbound.engines.single import LocalSteps
from leakbound.metrics import psnr
from leakbound.pairing import pair
from leakbound.protocol import play
from leakbound.randomness import stream

DIGITS = data.load("digits")
SHAPE = (1, 8, 8)
SHORT = GradientMatching(total_variation=1e-4, noise_variation=0.04, steps=6)
LOCAL = LocalAggregation(3, 0.1)


def _model(name, seed):
    if name == "mlp":
        settings = {"hidden": (32,), "activation": "sigmoid"}
        return models.mlp(
            input_shape=SHAPE, classes=10, generator=stream(seed, "model"), **settings
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 5, 3, padding=1),
            nn.GroupNorm(1, 5),
            nn.LeakyReLU(0.1),
            nn.MaxPool2d(2),
            nn.Conv2d(5, 7, 3, padding=1),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(7 * 4 * 4, 10),
        )


def _task(model="mlp", seed=0, dtype=torch.float32, plan=None):
    return Task.of(_model(model, seed), classes=10, plan=plan).to("cpu", dtype)


def _play(task, defense=None, size=2, seed=0):
    defense = chain(defense) if defense else NoDefense()
    count = defense.cohort_size
    order = torch.randperm(1797, generator=stream(seed, "batch"))[: size * count]
    inputs = DIGITS.inputs.to(task.parameters.dtype)
    clients = [Batch(inputs[at], DIGITS.labels[at]) for at in order.split(size)]
    return play(task, clients, defense, [stream(seed, "defense", i) for i in range(count + 1)])


def _agree(search):
    """The same objective and slopes as by autograd, at the start and at a second place."""
    mine, traced = search(), search()
    assert mine.exact is not None
    traced.exact = None
    evaluators = [Evaluator([own]) for own in (mine, traced)]
    assert isinstance(evaluators[0].engine, LocalSteps)
    for _ in range(2):
        for evaluator in evaluators:
            evaluator.evaluate()
        for found, wanted in ((mine.total, traced.total), (mine.match, traced.match)):
            assert float((found - wanted).abs()) <= 1e-10 * max(1.0, float(wanted.abs()))
        slopes = [torch.cat([v.grad.flatten() for v in s.variables]) for s in (mine, traced)]
        assert bool(slopes[1].any())
        assert float((slopes[0] - slopes[1]).norm()) <= 1e-9 * float(slopes[1].norm())
        step = 0.1 / float(slopes[1].abs().max())
        with torch.no_grad():
            for one, other in zip(mine.variables, traced.variables, strict=True):
                one.sub_(step * other.grad)
                other.sub_(step * other.grad)


AGREE = {
    "cosine": (SHORT, LOCAL, None),
    "euclidean": (GradientMatching("euclidean"), LOCAL, None),
    "joint": (GradientMatching(labels="joint", total_variation=0.1), LOCAL, None),
    "noise": (SHORT, chain(LOCAL, GaussianNoise(0.01)), None),
    "pruning": (SHORT, chain(LOCAL, MagnitudePruning(0.5)), None),
    "clip": (GradientMatching("euclidean"), chain(LOCAL, Clip(0.1)), None),
    "minibatches": (SHORT, None, LocalPlan(5, 0.1, 2)),
    "first": (SHORT, None, LocalPlan(1, 0.1, 2)),
    "both": (GradientMatching("euclidean", labels="joint"), LOCAL, LocalPlan(1, 0.5, 2)),
}


@pytest.mark.parametrize("model", ["mlp", "pooled"])
@pytest.mark.parametrize("name", AGREE)
def test_a_step_is_autograds(name, model):
    settings, defense, plan = AGREE[name]
    seen = _play(_task(model, dtype=torch.float64, plan=plan), defense, size=3).observation
    _agree(lambda: settings.search(seen, stream(3, "attack")))


@pytest.mark.parametrize("epochs", ["shared", "own"])
def test_a_step_of_a_search_for_the_local_plan_is_autograds(epochs):
    """Guessed steps, minibatches and epochs with images of their own."""
    task = _task("pooled", dtype=torch.float64, plan=LocalPlan(4, 0.1, 2))
    seen = _play(task, size=4).observation
    settings = FedAvgMatching(steps=4, epochs=epochs, distance="euclidean")

    def search():
        source = stream(0, "attack")
        assumed = settings._assumed(seen, source, task.plan)
        return LocalSearch(settings, seen, source, assumed).search

    _agree(search)


def test_a_pruned_model_is_autograds():
    task = _task("pooled", dtype=torch.float64)
    task = task.pruned(torch.rand(len(task.parameters), generator=stream(0)) < 0.6)
    seen = _play(task, LOCAL).observation
    _agree(lambda: SHORT.search(seen, stream(3, "attack")))


def test_where_autograd_is_needed():
    local = [chain(LOCAL, SecureAggregation(2)), chain(HiddenDropout(0.5), LOCAL)]
    for defense in local:
        search = SHORT.search(_play(_task(), defense).observation, stream(0))
        assert search.exact is None
        assert solve(SHORT, [search])[0].inputs.isfinite().all()


def test_a_searchs_bits_are_its_own():
    """Alone, among many, and again."""
    seen = [_play(_task("pooled", seed), LOCAL, seed=seed).observation for seed in range(3)]
    alone = [SHORT(own, stream(seed)) for seed, own in enumerate(seen)]
    together = SHORT.many(seen, [stream(seed) for seed in range(3)])
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert one.trace == other.trace


def test_starts_in_step_go_by_the_engine():
    seen = _play(_task("pooled"), LOCAL).observation
    answer = GradInversion(steps=4, seeds=2, batch_norm=0.0)(seen, stream(0))
    assert answer.inputs.isfinite().all()


def _decibels(attack, defense, model, seeds):
    found = []
    for seed in seeds:
        played = _play(_task(model, seed), defense, 1, seed)
        answer = attack(played.observation, stream(seed, "attack"))
        found.append(statistics.mean(psnr(pair(played.truth, answer), data_range=1.0)))
    return found


def _paired(attack, found, monkeypatch):
    """The mean difference to autograd's, and half of its 95 % interval."""
    mine = found(attack)
    real = engine.engine_for
    monkeypatch.setattr(
        engine,
        "engine_for",
        lambda seen, task, *more: None if task.plan.steps > 1 else real(seen, task, *more),
    )
    differences = [a - b for a, b in zip(mine, found(attack), strict=True)]
    middle = statistics.mean(differences)
    half = 2.093 * statistics.stdev(differences) / len(differences) ** 0.5
    print(f"{statistics.mean(mine):.2f} dB, {middle:+.2f} ± {half:.2f} dB")
    return middle, half


@pytest.mark.slow
def test_20_digits_are_found_as_well_as_by_autograd(monkeypatch):
    """The paired difference's 95 % interval holds 0, or lies within 1 dB."""
    attack = replace(SHORT, steps=100)
    middle, half = _paired(attack, lambda a: _decibels(a, LOCAL, "mlp", range(20)), monkeypatch)
    assert abs(middle) <= half or abs(middle) + half <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "simple_convnet"])
def test_20_images_are_found_as_well_as_by_autograd(scene, model, monkeypatch):
    """As above, as the built-in audit has them."""
    attack = inverting_gradients(150)
    middle, half = _paired(
        attack, lambda a: scene.attack(a, model, range(20), defense=LOCAL), monkeypatch
    )
    assert abs(middle) <= half or abs(middle) + half <= 1.0
