"""Published rules for the labels of a batch, each against something without its code."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from leakbound.attacks.labels import LABEL_RULES, fill, infer, label_accuracy, last_layer, stand_ins
from leakbound.client import gradient
from leakbound.core import Batch, LocalPlan, NotApplicable, Task
from leakbound.defenses import GaussianNoise, GradientDropout, LocalAggregation, SecureAggregation
from leakbound.randomness import stream, uniform

HIDDEN = {"labels_known": False}


def _see(scene, task, batch, defense=None, seed=0):
    return scene.play(task, batch, defense, seed, **HIDDEN).observation


def _accuracy(scene, rule, task, size, seeds, defense=None, auxiliary=None):
    found = []
    for seed in seeds:
        batch = scene.batch(seed, size)
        seen = replace(_see(scene, task, batch, defense, seed), auxiliary=auxiliary)
        labels = infer(rule, seen, stream(seed, "labels"))
        assert labels.tolist() == sorted(labels.tolist())
        found.append(label_accuracy(labels, batch.labels))
    return sum(found) / len(found)


@pytest.fixture(scope="module")
def trained(scene):
    """An MLP after 150 steps of Adam on images of its own."""
    task = scene.task("mlp", hidden=(32,))
    weights = nn.Parameter(task.parameters.clone())
    optimizer = torch.optim.Adam([weights], lr=3e-3)
    for step in range(150):
        batch = scene.batch(1000 + step, 64)
        weights.grad = gradient(task, batch.inputs, batch.labels, weights.detach()).detach()
        optimizer.step()
    return task.with_parameters(weights.detach())


@pytest.mark.parametrize("rule", sorted(LABEL_RULES))
@pytest.mark.parametrize("build", ["mlp", "simple_convnet"])
def test_one_label_of_every_class_on_a_fresh_network(scene, rule, build):
    task = scene.task(build)
    for label in range(10):
        at = int((scene.data.labels == label).nonzero()[3])
        batch = Batch(scene.data.inputs[at : at + 1], scene.data.labels[at : at + 1])
        assert infer(rule, _see(scene, task, batch), stream(0)).tolist() == [label]


def test_idlg_on_a_trained_network_and_on_two_classes(scene, trained):
    for seed in range(30):
        batch = scene.batch(seed)
        seen = _see(scene, trained, batch)
        assert infer("idlg", seen, stream(0)).tolist() == batch.labels.tolist()
    two = nn.Sequential(nn.Flatten(), nn.Linear(784, 2))
    for label in (0, 1):
        batch = Batch(scene.batch(0).inputs, torch.tensor([label]))
        seen = _see(scene, Task.of(two, classes=2), batch)
        assert infer("idlg", seen, stream(0)).tolist() == [label]


def test_yin_is_right_on_distinct_labels_and_never_repeats_one(scene):
    task = scene.task("simple_convnet")
    for start in range(20):
        inputs, labels = scene.data.inputs[start * 7 :], scene.data.labels[start * 7 :]
        batch = Batch(inputs[:4], labels[:4])  # dealt out in turn: four digits in a row
        assert len(set(batch.labels.tolist())) == 4
        found = infer("yin", _see(scene, task, batch), stream(0))
        assert sorted(batch.labels.tolist()) == found.tolist()
    assert len(set(infer("yin", _see(scene, task, scene.batch(0, 8)), stream(0)).tolist())) == 8


def test_yin_takes_the_rows_with_the_least_entries(scene):
    """Tanh features of both signs: a row's least entry is not told by its greatest."""
    task = scene.task("mlp", activation="tanh")
    for seed in range(10):
        seen = _see(scene, task, scene.batch(seed, 4))
        rows = last_layer(seen).weight.tolist()
        least = sorted(range(10), key=lambda label: min(rows[label]))
        assert infer("yin", seen, stream(0)).tolist() == sorted(least[:4])


def _wainakh_by_gradients(seen, generator):
    """LLG*: impact and offset from the gradients of stand-in batches, one class each."""
    layer, examples = last_layer(seen), seen.examples
    images = stand_ins(seen, generator)
    sums = []
    for label in range(10):
        labels = torch.full((len(images),), label)
        flat = gradient(layer.task, images, labels).detach()
        sums.append(layer.task.unflatten(flat)[f"{layer.name}.weight"].sum(1))
    sums = torch.stack(sums)
    impact = sums.diagonal().mean() * 1.1 / examples
    offset = (sums.sum(0) - sums.diagonal()) / 9
    found, left = [], layer.weight.sum(1).clone()
    for label in range(10):
        if left[label] < 0:
            found.append(label)
            left[label] -= impact
    left -= offset
    while len(found) < examples:
        found.append(int(left.argmin()))
        left[found[-1]] -= impact
    return sorted(found)


@pytest.mark.parametrize("state", ["fresh", "trained"])
def test_wainakh_is_llg_with_gradients_of_stand_ins(scene, trained, state):
    task = trained if state == "trained" else scene.task("mlp")
    for seed in range(8):
        seen = _see(scene, task, scene.batch(seed, 40))
        expected = _wainakh_by_gradients(seen, stream(seed))
        assert infer("wainakh", seen, stream(seed)).tolist() == expected


@pytest.mark.parametrize("rule", ["wainakh", "geng", "dimitrov", "bias"])
def test_counts_are_exact_where_their_assumptions_hold(scene, rule):
    """Zero weights: every probability is 1/10; inputs with the sum of random ones."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    task = Task.of(model, classes=10)
    for seed in range(10):
        inputs = 0.1 + 0.8 * uniform((16, 1, 28, 28), stream(seed, "images"))
        inputs = inputs * 392 / inputs.flatten(1).sum(1).view(-1, 1, 1, 1)
        batch = Batch(inputs, torch.randint(10, (16,), generator=stream(seed)))
        found = infer(rule, _see(scene, task, batch), stream(seed, "labels"))
        assert found.tolist() == sorted(batch.labels.tolist())


def test_ma_is_exact_for_one_class_of_equal_images(scene, trained):
    for seed in range(10):
        one = scene.batch(seed)
        batch = Batch(one.inputs.repeat(5, 1, 1, 1), one.labels.repeat(5))
        found = infer("ma", _see(scene, trained, batch), stream(0))
        assert found.tolist() == batch.labels.tolist()


@pytest.mark.parametrize("rule", ["ma", "bias"])
def test_counts_of_many_on_a_fresh_network(scene, rule):
    found = _accuracy(scene, rule, scene.task("simple_convnet"), 64, range(5))
    print(f"\n{rule}: {found:.1%}")
    assert found >= 0.97


def test_ma_beats_random_stand_ins_on_a_trained_network(scene, trained):
    ours, theirs = (_accuracy(scene, rule, trained, 16, range(12)) for rule in ("ma", "geng"))
    print(f"\ntrained, batch 16: ma {ours:.1%}, geng {theirs:.1%}")
    assert ours >= theirs + 0.05


def _dimitrov_by_numpy(seen, images):
    """Counts from two forward passes: 784-32-10 ReLU network, weights by hand."""

    def look(flat):
        first, bias, last, shift = (
            part.double().numpy() for part in seen.task.unflatten(flat).values()
        )
        hidden = np.maximum(images @ first.T + bias, 0)
        scores = np.exp(hidden @ last.T + shift)
        return (scores / scores.sum(1, keepdims=True)).mean(0), hidden.sum(1).mean()

    row, plan = seen.update.rows[0], LocalPlan(30, 0.2)
    before = seen.task.parameters
    (p, s), (q, t) = look(before), look(before - plan.learning_rate * row)
    sums = row[784 * 32 + 32 : -10].view(10, 32).double().numpy().sum(1) / 30
    past = np.arange(30)[:, None] / 30
    return (16 * ((1 - past) * p + past * q - sums / ((1 - past) * s + past * t))).mean(0)


def test_dimitrov_is_geng_in_one_step_and_an_average_in_many(scene):
    task, many = scene.task("mlp", hidden=(32,)), LocalAggregation(30, 0.2)
    seen = _see(scene, task, scene.batch(0, 16))
    assert torch.equal(*(infer(rule, seen, stream(0)) for rule in ("geng", "dimitrov")))
    public = scene.batch(77, 128)
    images = public.inputs.flatten(1).double().numpy()
    for seed in range(8):
        seen = replace(_see(scene, task, scene.batch(seed, 16), many), auxiliary=public)
        left, expected = torch.from_numpy(_dimitrov_by_numpy(seen, images)), []
        for _ in range(16):
            expected.append(int(left.argmax()))
            left[expected[-1]] -= 1
        assert infer("dimitrov", seen, stream(0)).tolist() == sorted(expected)
    ours, theirs = (
        _accuracy(scene, rule, task, 16, range(12), many, public) for rule in ("dimitrov", "geng")
    )
    print(f"\n30 steps, batch 16: dimitrov {ours:.1%}, geng {theirs:.1%}")
    assert ours >= theirs


@pytest.mark.parametrize("rule", ["geng", "dimitrov", "ma", "bias"])
def test_counts_over_several_clients(scene, rule):
    found = _accuracy(scene, rule, scene.task("mlp"), 8, range(8), SecureAggregation(4))
    assert found >= 0.85


def test_a_negative_entry_is_a_certain_class(scene, trained):
    """The default keeps such classes, unless noise may have made the entry negative."""
    better = 0
    for seed in range(20):
        batch = scene.batch(seed, 4)
        seen = _see(scene, trained, batch)
        sure = (last_layer(seen).bias < 0).nonzero().flatten().tolist()
        found = infer("bias", seen, stream(seed)).tolist()
        assert set(sure) <= set(found)
        assert set(sure) <= set(batch.labels.tolist())
        better += label_accuracy(torch.tensor(found), batch.labels) > 0.5
        noisy = _see(scene, trained, batch, GaussianNoise(1.0), seed)
        assert len(infer("bias", noisy, stream(seed))) == 4
    assert better >= 10


def test_certain_classes_change_nothing_where_counts_are_right():
    """Greedy filling takes the largest units; those of certain classes are among the truth's."""
    for seed in range(200):
        expected = 4 * uniform((6,), stream(seed, "counts"))
        plain = fill(expected, 9)
        for label in set(plain.tolist()):
            certain = torch.arange(6) == label
            assert torch.equal(fill(expected, 9, certain=certain), plain)
    forced = fill(torch.tensor([5.0, 0.0, 0.1]), 2, certain=torch.tensor([False, True, True]))
    assert forced.tolist() == [1, 2]


def test_accuracy_is_that_of_multisets():
    for seed in range(50):
        generator = stream(seed)
        a, b = (torch.randint(4, (7,), generator=generator) for _ in range(2))
        left = Counter(b.tolist())
        left.subtract(a.tolist())
        missing = sum(v for v in left.values() if v > 0)
        assert label_accuracy(a, b) == pytest.approx(1 - missing / 7)
    with pytest.raises(ValueError, match="truth holds no label"):
        label_accuracy(torch.zeros(0), torch.zeros(0))


def test_not_applicable(scene):
    one, four = scene.batch(0), scene.batch(0, 4)
    with pytest.raises(ValueError, match="did you mean 'geng'"):
        infer("gengs", _see(scene, scene.task("mlp"), one), stream(0))
    with pytest.raises(NotApplicable, match="idlg infers one label, but 4"):
        infer("idlg", _see(scene, scene.task("mlp"), four), stream(0))
    with pytest.raises(NotApplicable, match="yin needs distinct labels: 12"):
        infer("yin", _see(scene, scene.task("mlp"), scene.batch(0, 12)), stream(0))
    bare = nn.Sequential(nn.Flatten(), nn.Linear(784, 10, bias=False))
    with pytest.raises(NotApplicable, match="ma needs the gradient of the last layer's bias"):
        infer("ma", _see(scene, Task.of(bare, classes=10), four), stream(0))
    dead = nn.Sequential(nn.Flatten(), nn.Linear(784, 5), nn.Tanh(), nn.Linear(5, 10))
    nn.init.zeros_(dead[1].weight)
    nn.init.constant_(dead[1].bias, -1.0)
    for rule in ("wainakh", "geng", "dimitrov"):
        with pytest.raises(NotApplicable, match="has no positive sum"):
            infer(rule, _see(scene, Task.of(dead, classes=10), four), stream(0))


@pytest.mark.parametrize("rule", sorted(set(LABEL_RULES) - {"bias"}))
def test_an_update_that_tells_nothing(scene, rule):
    task = scene.task("mlp")
    gone = _see(scene, task, scene.batch(0), GradientDropout(1.0))
    with pytest.raises(NotApplicable, match="is zero: it reveals no label"):
        infer(rule, gone, stream(0))
    seen = _see(scene, task, scene.batch(0))
    odd = replace(seen.update, rows=seen.update.rows * float("nan"))
    with pytest.raises(NotApplicable, match="is not finite"):
        infer(rule, replace(seen, update=odd), stream(0))
    none = Task.of(nn.Sequential(nn.Conv2d(1, 10, 28), nn.Flatten()), classes=10)
    with pytest.raises(NotApplicable, match="no linear layer"):
        infer(rule, _see(scene, none, scene.batch(0)), stream(0))
