"""FedAvg updates whose local steps and minibatches the attacker is not told."""

import itertools
import statistics
from dataclasses import replace

import pytest
import torch

from leakbound import data, models, simulate
from leakbound.attacks import GradientMatching
from leakbound.attacks.fedavg import FedAvgMatching, LocalSearch, _Assumed
from leakbound.client import gradient
from leakbound.core import Batch, LocalPlan, NotApplicable, Task
from leakbound.defenses import (
    DpSgd,
    GradientDropout,
    LocalAggregation,
    NoDefense,
    SecureAggregation,
)
from leakbound.metrics import psnr
from leakbound.pairing import pair
from leakbound.protocol import play
from leakbound.randomness import stream

DIGITS = data.load("digits")
SHORT = {"steps": 120, "total_variation": 1e-4}


def _see(seed, plan, size, defense=None, clients=1, **settings):
    """A round on 8 x 8 digits; settings are the model's."""
    model = models.mlp(
        input_shape=(1, 8, 8), classes=10, generator=stream(seed, "model"), **settings
    )
    order = torch.randperm(1797, generator=stream(seed, "batch"))[: size * clients]
    batches = [Batch(DIGITS.inputs[at], DIGITS.labels[at]) for at in order.split(size)]
    sources = [stream(seed, "defense", i) for i in range(clients + 1)]
    return play(Task.of(model, classes=10, plan=plan), batches, defense or NoDefense(), sources)


def _decibels(played, answer):
    return statistics.mean(psnr(pair(played.truth, answer), data_range=1.0))


def _search(attack, observation, steps, copies, labels):
    plan = replace(observation.task.plan, steps=steps)
    return LocalSearch(attack, observation, stream(0), _Assumed(plan, copies, labels))


def _epochs_by_hand(task, epochs, labels, size):
    """Local SGD on images that differ from epoch to epoch, minibatch by minibatch."""
    weights, total = task.parameters, 0
    for images, named in zip(epochs, labels, strict=True):
        for at in range(0, len(images), size):
            own = gradient(task, images[at : at + size], named[at : at + size], weights)
            total, weights = total + own, weights - task.plan.learning_rate * own
    return total


def test_a_guess_with_images_of_their_own_is_trained_on_epoch_after_epoch():
    played = _see(0, LocalPlan(6, 0.1, 2), 4)
    labels = torch.tensor([1, 2, 3, 4, 4, 3, 2, 1, 1, 3, 2, 4])
    attack = FedAvgMatching(epochs="own", together_weight=0.0)
    search = _search(attack, played.observation, 6, 3, labels)
    images = search.search.images().detach()
    assert images.shape == (12, 1, 8, 8)
    expected = _epochs_by_hand(
        played.observation.task, images.view(3, 4, 1, 8, 8), labels.view(3, 4), 2
    )
    rows = search.search.objective.rows(images, labels)
    torch.testing.assert_close(rows[0], expected)


def test_the_truth_is_a_perfect_guess_in_every_mode():
    """With the client's order and plan nothing is left; with one step more, much is."""
    played = _see(1, LocalPlan(4, 0.1, 2), 4)
    truth = played.truth
    for epochs, copies in (("shared", 1), ("own", 2)):
        for steps, right in ((4, True), (3, False)):
            attack = FedAvgMatching(epochs=epochs)
            search = _search(attack, played.observation, steps, copies, truth.labels.repeat(copies))
            images = truth.inputs.repeat(copies, 1, 1, 1)
            search.search.variables[0].data.copy_(images)
            assert (search.misfit() < 1e-9) is right
            assert search.matched_apart(images) == 0
            assert search.moments_apart(images) == 0


def _apart_by_hand(images, labels):
    """Least mean squared distance of two epochs from their mean, over all orders."""
    first, second = images
    least = None
    for order in itertools.permutations(range(len(first))):
        if (labels[0] != labels[1][list(order)]).any():
            continue
        both = torch.stack([first, second[list(order)]])
        off = float((both - both.mean(0)).square().mean())
        least = off if least is None else min(least, off)
    return least


def test_epochs_are_matched_within_their_classes():
    played = _see(2, LocalPlan(4, 0.1, 2), 4)
    labels = torch.tensor([5, 5, 6, 6, 6, 5, 6, 5])
    search = _search(FedAvgMatching(epochs="own"), played.observation, 4, 2, labels)
    for seed in range(10):
        images = torch.rand(8, 1, 8, 8, generator=stream(seed))
        parts = images.view(2, 4, 1, 8, 8)
        expected = _apart_by_hand(parts, labels.view(2, 4))
        assert float(search.matched_apart(images)) == pytest.approx(expected, rel=1e-5)
        mixed = torch.cat([images[:4], images[:4].flip(0)])
        assert search.moments_apart(mixed) == pytest.approx(0, abs=1e-12)
        means = torch.stack([parts.mean(1), parts.amax(1)])
        expected = float(means.var(1, unbiased=False).mean())
        assert float(search.moments_apart(images)) == pytest.approx(expected, rel=1e-5)


def test_the_answer_averages_the_epochs_that_were_trained_on():
    """Three steps of two on four images: of the second epoch only the first half."""
    played = _see(3, LocalPlan(3, 0.1, 2), 4)
    labels = torch.tensor([1, 2, 3, 4, 4, 3, 2, 1])
    search = _search(FedAvgMatching(epochs="own"), played.observation, 3, 2, labels)
    search.search.trace = [1.0, 0.0]
    at = torch.arange(8.0).view(8, 1, 1, 1).expand(8, 1, 8, 8) / 10
    search.search.variables[0].data.copy_(at)
    answer = search.answer()
    assert answer.labels.tolist() == [1, 2, 3, 4]
    # classes 4 and 3 were trained on in epoch two, as images 4 and 5; 2 and 1 were not
    expected = torch.tensor([0.0, 0.1, (0.2 + 0.5) / 2, (0.3 + 0.4) / 2])
    torch.testing.assert_close(answer.inputs[:, 0, 0, 0], expected)


def test_the_number_of_steps_is_found():
    attack = FedAvgMatching(candidates=(1, 3, 9), trial=40, **SHORT)
    found = []
    for seed, steps in enumerate((1, 3, 9)):
        played = _see(seed, LocalPlan(steps, 0.1), 4, hidden=(32,))
        found.append(attack.find_plan(played.observation, stream(seed)).steps == steps)
    print(f"\nsteps found for {sum(found)} of {len(found)}")
    assert all(found)


RULES = {"sgd": {}, "momentum": {"momentum": 0.9}, "adam": {"optimizer": "adam"}}


@pytest.mark.parametrize("rule", RULES)
def test_steps_and_optimizer_are_found(rule):
    """From the update alone: the plan that it came with is not read."""
    plan = LocalPlan(3, 0.02, 2, **RULES[rule])
    seen = _see(0, plan, 4, hidden=(32,)).observation
    hidden = replace(seen, task=replace(seen.task, plan=LocalPlan(1, 0.02, 2)))
    attack = FedAvgMatching(candidates=(1, 3), optimizers=tuple(RULES), trial=30, **SHORT)
    assert attack.find_plan(hidden, stream(0)) == plan


@pytest.mark.parametrize("rule", ["momentum", "adam"])
def test_a_known_optimizer_is_simulated(rule):
    """Two epochs in minibatches: images are nearer than if SGD is assumed."""
    rate, gain = {"momentum": (0.3, 15), "adam": (0.003, 4)}[rule]
    played = _see(1, LocalPlan(4, rate, 2, **RULES[rule]), 4, hidden=(32,), activation="sigmoid")
    seen = played.observation
    wrong = replace(seen, task=replace(seen.task, plan=LocalPlan(4, rate, 2)))
    attack = GradientMatching(**SHORT)
    ours, theirs = (_decibels(played, attack(own, stream(1))) for own in (seen, wrong))
    assert ours > theirs + gain


def test_a_defense_names_the_optimizer_of_a_plan():
    defense = LocalAggregation(3, 0.1, optimizer="adam")
    seen = _see(0, None, 4, defense).observation
    found = FedAvgMatching(optimizers=("sgd",), trial=1).find_plan(seen, stream(0))
    assert found == LocalPlan(3, 0.1, optimizer="adam")


def test_steps_that_are_told_or_set_by_a_known_defense_are_not_sought():
    played = _see(0, LocalPlan(4, 0.1, 2), 4)
    assert FedAvgMatching(local_steps=7).find_plan(played.observation, stream(0)).steps == 7
    assert FedAvgMatching(candidates=(6,)).find_plan(played.observation, stream(0)).steps == 6
    played = _see(0, None, 4, LocalAggregation(3, 0.1))
    assert FedAvgMatching(trial=1).find_plan(played.observation, stream(0)).steps == 3


@pytest.mark.slow
def test_it_beats_a_matching_that_ignores_the_steps():
    ours, theirs = [], []
    for seed in range(5):
        played = _see(seed, LocalPlan(9, 0.3), 4, hidden=(32,))
        seen = played.observation
        attack = FedAvgMatching(candidates=(1, 3, 9), trial=30, **SHORT)
        ours.append(_decibels(played, attack(seen, stream(seed))))
        alone = replace(seen, task=replace(seen.task, plan=LocalPlan()))
        theirs.append(_decibels(played, GradientMatching(**SHORT)(alone, stream(seed))))
    print(f"\nours {statistics.mean(ours):.1f} dB, ignoring {statistics.mean(theirs):.1f} dB")
    assert statistics.mean(ours) > statistics.mean(theirs) + 2


def test_known_orders_do_not_help_it():
    """The labels' order is not told: a permuted telling gives the same bits."""
    played = _see(0, LocalPlan(4, 0.1, 2), 4)
    seen = played.observation
    mixed = replace(seen, labels=seen.labels.flip(0))
    attack = FedAvgMatching(local_steps=4, steps=5, trial=2, deals=2)
    first, second = (attack(o, stream(0)) for o in (seen, mixed))
    assert torch.equal(first.inputs, second.inputs)
    assert sorted(first.labels.tolist()) == sorted(seen.labels.tolist())


@pytest.mark.parametrize("labels", ["told", "inferred", "joint"])
@pytest.mark.parametrize("epochs", ["shared", "own"])
def test_several_clients_and_every_way_to_get_labels(labels, epochs):
    played = _see(0, LocalPlan(4, 0.1, 2), 4, SecureAggregation(2), clients=2)
    attack = FedAvgMatching(
        candidates=(2, 4), steps=3, trial=2, deals=2, labels=labels, epochs=epochs
    )
    answer = attack(played.observation, stream(0))
    assert answer.inputs.shape == (8, 1, 8, 8)
    assert answer.labels.shape == (8,)
    if labels == "told":
        assert sorted(answer.labels.tolist()) == sorted(played.truth.labels.tolist())


def test_odd_input():
    played = _see(0, LocalPlan(4, 0.1, 2), 4, GradientDropout(1.0))
    answer = FedAvgMatching()(played.observation, stream(0))
    assert answer.problem == "gradient vanished: the update is zero everywhere"
    played = _see(0, LocalPlan(4, 0.1, 3), 4)
    with pytest.raises(NotApplicable, match="minibatches of 3 do not divide"):
        FedAvgMatching(local_steps=4, epochs="own")(played.observation, stream(0))
    nowhere = replace(played.observation.update, rows=played.observation.update.rows * float("nan"))
    lost = replace(played.observation, update=nowhere)
    attack = FedAvgMatching(candidates=(1, 2), trial=1, steps=2)
    assert "not finite" in attack(lost, stream(0)).problem


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"local_steps": 0}, "local_steps is 0"),
        ({"candidates": ()}, "candidates is empty"),
        ({"candidates": (1, 0)}, "candidates is 0"),
        ({"optimizers": ("sgd", "lion")}, "optimizers is 'lion'"),
        ({"trial": 0}, "trial is 0"),
        ({"deals": 0}, "deals is 0"),
        ({"epochs": "mine"}, "epochs is 'mine'"),
        ({"together": "not"}, "together is 'not'"),
        ({"together_weight": -1.0}, "together_weight is -1.0"),
    ],
)
def test_settings_are_checked(settings, words):
    with pytest.raises(ValueError, match=words):
        FedAvgMatching(**settings)


def test_behind_a_defense_on_examples_there_was_one_step():
    """Such a defense goes with one local step, so no other number is tried."""
    given = {"input_shape": (1, 4, 4), "classes": 3, "generator": stream(0, "model")}
    rows = torch.rand(2, 1, 4, 4, generator=stream(0, "images"))
    batch = Batch(rows, torch.tensor([0, 2]))
    attack = FedAvgMatching(steps=3, trial=1)
    defense = DpSgd(1.0, 0.01)
    found = simulate(models.mlp(**given), batch, attack=attack, defense=defense)
    assert found.assessment.status == "ok"
    assert attack.find_plan(found.round.observation, stream(0, "attack")).steps == 1
