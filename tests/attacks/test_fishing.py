"""Fishing on real digits: what remains in the sum is exact, and counted right."""

import pytest
import torch
from torch import nn

from leakbound import data, models
from leakbound.attacks import Fishing, GaussNewton, LinearInversion
from leakbound.attacks.fishing import _label
from leakbound.client import forward
from leakbound.core import Batch, LocalPlan, NotApplicable, Server, Task, ThreatModel
from leakbound.defenses import DpSgd, GaussianNoise, NoDefense, SecureAggregation, chain
from leakbound.pairing import squared_distances
from leakbound.protocol import play
from leakbound.randomness import stream

MALICIOUS = ThreatModel(server=Server.MALICIOUS)
SUM, UNITS = SecureAggregation(3), 256


@pytest.fixture(scope="module")
def digits():
    found = data.load("digits")
    order = torch.randperm(len(found.labels), generator=stream(0, "fishing"))
    return found, order[:600], order[600:]


def task_of(digits, build="mlp", public=True, **plan):
    found, part, _ = digits
    settings = {"hidden": (UNITS,)} if build == "mlp" else {}
    net = getattr(models, build)(
        input_shape=(1, 8, 8), classes=10, generator=stream(0, "model"), **settings
    )
    known = found.batch(part) if public else None
    return Task.of(net, classes=10, public=known, plan=LocalPlan(**plan))


def clients(digits, seed, count, each):
    found, _, part = digits
    order = part[torch.randperm(len(part), generator=stream(seed, "clients"))[: count * each]]
    return [found.batch(own) for own in order.split(each)]


def played(task, batches, attack, defense, threat=MALICIOUS):
    sources = [stream(0, "noise", i) for i in range(len(batches) + 1)]
    return play(task, batches, defense, sources, threat=threat, attack=attack)


def best(truth, answer):
    error = squared_distances(truth, answer).amin(1)
    return -10 * error.clamp_min(1e-15).log10()


@pytest.mark.parametrize("known", [True, False], ids=["labels", "no-labels"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "all"])
def test_the_examples_of_a_class_are_exact(digits, alone, known):
    task, attack = task_of(digits), Fishing("sparse_recovery", "class", label=3, alone=alone)
    batches = clients(digits, 2, 3, 16)
    threat = ThreatModel(labels_known=known, server=Server.MALICIOUS)
    seen = played(task, batches, attack, SUM, threat)
    answer = attack(seen.observation, stream(0))
    wanted = seen.truth.labels == 3
    if alone:
        wanted &= torch.arange(48) < 16
    assert 1 <= int(wanted.sum()) <= 8
    if known or not alone:  # otherwise the other clients' labels are guessed by their shares
        assert answer.problem == f"at most {int(wanted.sum())} of 48 examples are answered"
        assert torch.equal(best(seen.truth.inputs, answer.inputs[: int(wanted.sum())]) > 60, wanted)
    assert answer.inputs.shape == seen.truth.inputs.shape


@pytest.mark.parametrize("inner", ["linear_inversion", LinearInversion()])
def test_one_example_remains_by_the_direction(digits, inner):
    task, attack = task_of(digits), Fishing(inner, expected=16)
    read = 0
    for seed in range(10):
        batches = clients(digits, seed, 2, 16)
        seen = played(task, batches, attack, SecureAggregation(2))
        planted = seen.observation.task
        label = _label(planted)
        chance = forward(planted, batches[0].inputs).softmax(1)[:, label]
        remains = (chance - (batches[0].labels == label).to(chance)).abs() > 1e-3
        answer = attack(seen.observation, stream(0))
        exact = best(batches[0].inputs, answer.inputs[:1]) > 60
        if int(remains.sum()) == 1:
            assert torch.equal(exact, remains)
        read += bool(exact.any())
    assert read >= 3


def test_convolutions_are_attacked_by_gauss_newton(digits):
    task = task_of(digits, "lenet")
    attack = Fishing(GaussNewton(steps=20, restarts=1, matching=50), "class", label=0)
    found, _, part = digits
    zero = part[found.labels[part] == 0][:1]
    others = part[found.labels[part] != 0]
    batches = [found.batch(torch.cat([zero, others[:15]])), found.batch(others[15:31])]
    seen = played(task, batches, attack, SecureAggregation(2))
    answer = attack(seen.observation, stream(0))
    assert float(best(found.inputs[zero], answer.inputs[:1])[0]) > 25


def test_noise_reaches_the_inner_attack(digits):
    task, attack = task_of(digits), Fishing("linear_inversion", "class", label=3)
    found, _, part = digits
    own, others = (part[(found.labels[part] == 3) == is_own] for is_own in (True, False))
    batches = [found.batch(torch.cat([own[:1], others[:15]])), found.batch(others[15:31])]
    levels = []
    for std in (1e-4, 1e-3, 1e-1):
        seen = played(task, batches, attack, chain(GaussianNoise(std), SecureAggregation(2)))
        inputs = attack(seen.observation, stream(0)).inputs
        levels.append(float(best(batches[0].inputs[:1], inputs[:1])[0]))
    assert levels[0] > 30
    assert levels == sorted(levels, reverse=True)
    seen = played(task, batches[:1], attack, DpSgd(1.0, 0.1))
    assert attack(seen.observation, stream(0)).inputs.isfinite().all()


@pytest.mark.parametrize("target", ["class", "feature", "direction"])
def test_only_the_output_layer_changes(digits, target):
    task, attack = task_of(digits), Fishing(target=target)
    planted, other = attack.plant_each(task, 2)
    for name, value in task.unflatten(task.parameters).items():
        same = torch.equal(value, planted.unflatten(planted.parameters)[name])
        assert same == (not name.startswith("3."))
    assert not other.unflatten(other.parameters)["3.weight"].any()
    assert len({id(one) for one in Fishing(alone=False).plant_each(task, 2)}) == 1


def test_where_it_does_not_apply(digits):
    attack, batches = Fishing("linear_inversion"), clients(digits, 0, 1, 8)
    two = Task.of(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2)), classes=2
    )
    for task in (task_of(digits, public=False), two):
        assert attack.plant(task) is task
    cases = [
        (task_of(digits, public=False), MALICIOUS, "no fishing"),
        (task_of(digits), ThreatModel(), "honest"),
        (task_of(digits, optimizer="lion", learning_rate=0.1), MALICIOUS, "step of Lion"),
    ]
    for task, threat, words in cases:
        seen = played(task, batches, attack, NoDefense(), threat)
        with pytest.raises(NotApplicable, match=words):
            attack(seen.observation, stream(0))
    with pytest.raises(ValueError, match="label is 10"):
        Fishing(label=10).plant(task_of(digits))
    with pytest.raises(ValueError, match="attack is"):
        Fishing("none")
    assert isinstance(batches[0], Batch)
