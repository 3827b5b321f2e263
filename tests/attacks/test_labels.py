"""Labels read from the last layer."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from leakbound.attacks import infer_labels
from leakbound.core import Batch, NotApplicable, Task
from leakbound.defenses import Clip, GradientDropout, LocalAggregation, SecureAggregation
from leakbound.randomness import stream

HIDDEN = {"labels_known": False}


def _infer(scene, task, batch, defense=None, seed=0):
    played = scene.play(task, batch, defense, seed, **HIDDEN)
    return infer_labels(played.observation, stream(seed, "labels"))


def _without_bias(scene, activation):
    generator = stream(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 32), activation, nn.Linear(32, 10, bias=False)
    )
    with torch.no_grad():
        for p in model.parameters():
            p.uniform_(-0.05, 0.05, generator=generator)
    return Task.of(model, classes=10)


@pytest.mark.parametrize("build", ["mlp", "lenet", "simple_convnet"])
@pytest.mark.parametrize("defense", [None, Clip(1e-3), LocalAggregation(3, 0.1)], ids=repr)
def test_the_label_of_one_example_is_exact_for_every_class(scene, build, defense):
    task = scene.task(build)
    for label in range(10):
        at = int((scene.data.labels == label).nonzero()[3])
        batch = Batch(scene.data.inputs[at : at + 1], scene.data.labels[at : at + 1])
        assert _infer(scene, task, batch, defense).tolist() == [label]


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh()], ids=repr)
def test_the_label_of_one_example_without_a_bias(scene, activation):
    task = _without_bias(scene, activation)
    for seed in range(20):
        batch = scene.batch(seed)
        assert torch.equal(_infer(scene, task, batch), batch.labels)


def _accuracy(scene, task_of, size, seeds, defense=None):
    right = 0
    for seed in seeds:
        batch = scene.batch(seed, size)
        found = _infer(scene, task_of(seed), batch, defense, seed)
        assert found.tolist() == sorted(found.tolist())
        right += (Counter(found.tolist()) & Counter(batch.labels.tolist())).total()
    return right / size / len(seeds)


@pytest.mark.parametrize(("build", "size"), [("mlp", 4), ("simple_convnet", 8), ("lenet", 16)])
def test_counts_of_several_examples(scene, build, size):
    found = _accuracy(scene, lambda seed: scene.task(build, seed), size, range(10))
    print(f"\n{build}, batch {size}: {found:.1%} of the labels")
    assert found >= 0.9 if build != "lenet" else found >= 0.6


def test_counts_under_secure_aggregation(scene):
    found = _accuracy(
        scene, lambda seed: scene.task("mlp", seed), 8, range(20), SecureAggregation(4)
    )
    assert found >= 0.9


def test_counts_without_a_bias(scene):
    found = _accuracy(scene, lambda seed: _without_bias(scene, nn.ReLU()), 8, range(20))
    print(f"\nwithout a bias: {found:.1%}")
    assert found >= 0.8


def test_public_images_stand_in_for_random_ones(scene):
    batch = scene.batch(0, 16)
    played = scene.play(scene.task("mlp"), batch, **HIDDEN)
    seen = replace(played.observation, auxiliary=scene.batch(1, 64))
    found = Counter(infer_labels(seen, stream(0)).tolist())
    assert (found & Counter(batch.labels.tolist())).total() >= 15


def test_not_applicable(scene):
    batch = scene.batch(0)
    task = Task.of(nn.Sequential(nn.Conv2d(1, 10, 28), nn.Flatten()), classes=10)
    with pytest.raises(NotApplicable, match="no linear layer"):
        _infer(scene, task, batch)
    with pytest.raises(NotApplicable, match="is zero: it reveals no label"):
        _infer(scene, scene.task("mlp"), batch, GradientDropout(1.0))
    odd = nn.Sequential(nn.Flatten(), nn.Linear(784, 20), nn.AvgPool1d(2))
    with pytest.raises(NotApplicable, match="does not have one row per class"):
        _infer(scene, Task.of(odd, classes=10), batch)
