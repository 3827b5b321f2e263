"""Matching what a client sent in several rounds, if it trains on the same examples."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from leakbound import data, models
from leakbound.attacks import dlg, inverting_gradients
from leakbound.attacks.matching.objective import earlier_rounds
from leakbound.core import Batch, NotApplicable, Task
from leakbound.defenses import ClipExamples, GaussianMechanism, Mean, chain
from leakbound.protocol import play
from leakbound.randomness import stream

SHAPE = (1, 16, 16)
NOISE = chain(ClipExamples(1.0), Mean(), GaussianMechanism(0.02))


def model(seed, number):
    source = stream(seed, "model", number)
    return models.mlp(input_shape=SHAPE, classes=10, hidden=(32,), generator=source)


def rounds_of(seed, count=4, defense=NOISE, sizes=(1, 1, 1, 1)):
    """What a server saw of a client in rounds with the same examples, and these."""
    digits = data.load("mnist5k", limit=60)
    seen = []
    for number, size in zip(range(count), sizes, strict=False):
        batch = Batch(
            digits.inputs[seed : seed + size, :, 6:22, 6:22], digits.labels[seed : seed + size]
        )
        task = Task.of(model(seed, number), classes=10)
        sources = [stream(seed, "noise", number, one) for one in range(2)]
        seen.append(play(task, [batch], defense, sources).observation)
    return replace(seen[-1], history=tuple(seen[:-1])), batch


def test_noise_of_four_rounds_averages_out():
    errors = {"last": 0.0, "together": 0.0}
    for seed in range(2):
        observation, batch = rounds_of(seed)
        for rounds in errors:
            attack = replace(inverting_gradients(steps=60), rounds=rounds)
            answer = attack(observation, stream(seed, "attack"))
            errors[rounds] += float((answer.inputs - batch.inputs).square().mean())
    assert errors["together"] < errors["last"] / 2


def test_the_term_is_the_sum_of_the_distances_of_earlier_rounds():
    """By the plain gradients of each round's own model."""
    observation, batch = rounds_of(0, defense=chain())
    settings = inverting_gradients()
    (term,) = earlier_rounds(settings, observation, batch.labels)
    images = torch.rand(1, *SHAPE, requires_grad=True)
    wanted = torch.zeros(())
    for number, one in enumerate(observation.history):
        own = model(0, number)
        loss = functional.cross_entropy(own(images), batch.labels)
        slopes = torch.autograd.grad(loss, list(own.parameters()), create_graph=True)
        row = torch.cat([slope.flatten() for slope in slopes])
        wanted = wanted + 1 - functional.cosine_similarity(row, one.update.rows[0], dim=0)
    value = term(images, {})
    assert torch.allclose(value, wanted, atol=1e-5)
    assert torch.allclose(
        *(torch.autograd.grad(total, images)[0] for total in (value, wanted)), atol=1e-5
    )


def test_the_latest_rounds_count():
    observation, batch = rounds_of(0, 2, chain())
    many = replace(observation, history=observation.history * 20)
    (term,) = earlier_rounds(inverting_gradients(), many, batch.labels)
    assert len(term.objectives) == 7


@pytest.mark.parametrize(
    ("attack", "sizes", "reason"),
    [(dlg(), (1, 1), "needs fixed labels"), (inverting_gradients(), (2, 1), r"\[1, 2\] examples")],
)
def test_rounds_that_cannot_be_explained_together_are_refused(attack, sizes, reason):
    observation, _ = rounds_of(0, 2, chain(), sizes)
    single = getattr(attack, "attack", attack)
    with pytest.raises(NotApplicable, match=reason):
        replace(single, rounds="together", steps=1)(observation, stream(0))
