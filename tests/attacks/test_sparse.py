"""Exact recovery through a ReLU layer: exact where it says so, and it says so where it is not."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from leakbound import data, models
from leakbound.attacks.analytic import LinearInversion
from leakbound.attacks.span import independent
from leakbound.attacks.sparse import SAME, SparseRecovery, _descended, _Layer
from leakbound.client import example_gradients
from leakbound.core import Batch, NotApplicable, Task
from leakbound.defenses import (
    Clip,
    GaussianNoise,
    GradientDropout,
    HiddenDropout,
    LocalAggregation,
    MagnitudePruning,
    SecureAggregation,
    Sign,
    chain,
)
from leakbound.pairing import pair, squared_distances
from leakbound.randomness import normal, stream
from leakbound.testing import check_attack
from leakbound.testing.common import small_batch

EXACT = 60


def task_of(seed, width=256, activation="relu", hidden=None):
    model = models.mlp(
        input_shape=(1, 28, 28),
        classes=10,
        generator=stream(seed, "model"),
        hidden=hidden or (width,),
        activation=activation,
    )
    return Task.of(model, classes=10)


def decibels(batch, answer):
    errors = (pair(batch, answer).inputs.double() - batch.inputs).square().flatten(1).mean(1)
    return -10 * errors.clamp_min(1e-14).log10()


@pytest.mark.parametrize(
    ("size", "width", "rounds"), [(1, 64, 1), (2, 64, 2), (4, 128, 2), (8, 100, 3)]
)
def test_small_batches_are_exact(scene, size, width, rounds):
    """With the labels, in float32, and certified; linear inversion separates few of them."""
    found, other = [], []
    for seed in range(rounds):
        batch = scene.batch(seed, size)
        seen = scene.play(task_of(seed, width), batch)
        answer = SparseRecovery()(seen.observation, stream(seed, "attack"))
        assert answer.problem is None
        assert answer.objective < 1e-4
        matched = pair(batch, answer)
        assert torch.equal(matched.labels, batch.labels)
        found += decibels(batch, answer).tolist()
        rival = LinearInversion()(seen.observation, stream(0))
        other.append(float((decibels(batch, rival) >= EXACT).double().mean()))
    print(f"\nB={size}, width {width}: least {min(found):.0f} dB, others {sum(other) / rounds:.2f}")
    assert min(found) >= EXACT
    if size == 8:
        assert sum(other) / rounds < 0.9


@pytest.mark.parametrize(
    ("size", "width", "rounds"),
    [
        (16, 128, 4),
        (24, 256, 4),
        (32, 256, 4),
        (32, 512, 4),
        pytest.param(64, 1024, 4, marks=pytest.mark.slow),
        pytest.param(128, 1024, 1, marks=pytest.mark.slow),
    ],
)
def test_larger_batches_are_exact(scene, size, width, rounds):
    for seed in range(rounds):
        batch = scene.batch(seed, size)
        seen = scene.play(task_of(seed, width), batch, labels_known=False)
        answer = SparseRecovery()(seen.observation, stream(seed))
        assert answer.problem is None
        assert torch.equal(pair(batch, answer).labels, batch.labels)
        assert float(decibels(batch, answer).min()) >= EXACT


def trained(seed, hidden, shape, images, labels, steps):
    """A model after steps of SGD on random batches of these images."""
    given = {"input_shape": shape, "classes": 10, "generator": stream(seed, "model")}
    model = models.mlp(**given, hidden=hidden)
    descent = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        own = torch.randperm(len(images), generator=stream(seed, "train", step))[:64]
        descent.zero_grad()
        nn.functional.cross_entropy(model(images[own]), labels[own]).backward()
        descent.step()
    return Task.of(model, classes=10)


@pytest.mark.parametrize(("kind", "steps"), [("mnist5k", 50), ("photos", 0), ("photos", 50)])
def test_photographs_and_trained_weights(scene, kind, steps):
    """Of a trained model, some images send too little: those batches must not be certified."""
    images = data.load(kind).inputs
    labels = data.load(kind).labels if kind == "mnist5k" else torch.arange(len(images)) % 10
    whole = 0
    for seed in range(3):
        order = torch.randperm(len(images), generator=stream(seed, "batch"))
        own, rest = order[:24], order[500:]
        task = trained(seed, (256,), images.shape[1:], images[rest], labels[rest], steps)
        batch = Batch(images[own], labels[own])
        answer = SparseRecovery()(scene.play(task, batch).observation, stream(seed))
        assert answer.problem is not None or float(decibels(batch, answer).min()) >= EXACT
        whole += answer.problem is None
    print(f"\n{kind} after {steps} steps: {whole} of 3")
    assert whole == 3


@pytest.mark.parametrize(
    "hidden", [(100,), (100, 20), (100, 100, 30)], ids=lambda hidden: "-".join(map(str, hidden))
)
@pytest.mark.parametrize("defense", [None, HiddenDropout(0.3)], ids=repr)
def test_the_next_layer_spans_what_comes_from_behind(scene, hidden, defense):
    """Derivatives of single examples, by their own gradients, in the units that they switch on."""
    batch, task = scene.batch(0, 5), task_of(0, hidden=hidden)
    seen = scene.play(task, batch, defense).observation
    inside = seen.defense.infer(task, seen.update)
    layer = _Layer(inside, "1", None, seen)
    ahead = layer.ahead(seen, 5, stream(0))
    assert 0 < ahead.shape[1] <= 5
    for gradient in example_gradients(inside, batch.inputs, batch.labels).double():
        bias = inside.unflatten(gradient)["1.bias"]
        on = bias != 0
        assert 20 < int(on.sum()) < 80
        fit = torch.linalg.lstsq(ahead[on], bias[on][:, None]).solution
        assert float((ahead[on] @ fit - bias[on][:, None]).norm() / bias.norm()) < 1e-4


def test_a_descent_ends_where_the_product_is_zero():
    """Columns with random zeros, and no image: each end is one of them, up to rounding."""
    ahead = normal((200, 4), stream(0, "ahead")).double()
    parts = normal((12, 4), stream(0, "parts")).double()
    columns = (ahead @ parts.T) * (normal((200, 12), stream(0, "on")) > 0)
    left = torch.linalg.svd(columns, full_matrices=False)[0]
    norms = left.norm(dim=1, keepdim=True)
    rows, behind = left / norms, torch.linalg.qr(ahead).Q / norms
    found = _descended(rows, behind, left[:0, :12], 40, False, stream(0))
    assert len(found) > 20
    likeness = nn.functional.normalize(left @ found.T, dim=0).T @ nn.functional.normalize(
        columns, dim=0
    )
    assert float(likeness.abs().amax(1).min()) > 1 - 1e-9
    assert len(set(likeness.abs().argmax(1).tolist())) >= 8


def test_draws_find_small_batches_where_no_linear_layer_sees_the_units(scene):
    def model(*behind):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), *behind)

    task = Task.of(model(nn.LayerNorm(128), nn.Linear(128, 10)), classes=10)
    batch = scene.batch(0, 4)
    seen = scene.play(task, batch).observation
    assert _Layer(task, "1", None, seen).ahead(seen, 4, stream(0)).shape[1] == 0
    answer = SparseRecovery()(seen, stream(0))
    assert answer.problem is None
    assert float(decibels(batch, answer).min()) >= EXACT
    plain = scene.play(task_of(0), scene.batch(0, 17)).observation
    assert SparseRecovery(starts=0)(plain, stream(0)).problem is not None


def noisy(size):
    """Noise of this size, relative to the mean of the update's entries."""
    return lambda rows: rows + size * rows.abs().mean() * normal(rows.shape, stream(0, "noise"))


def pruned(rows):
    kept = rows.abs() >= rows.abs().flatten().sort().values[int(0.9 * rows.numel())]
    return rows * kept


CHANGES = {
    "noise 1e-1": noisy(1e-1),
    "noise 1e-3": noisy(1e-3),
    "noise 1e-4": noisy(1e-4),
    "half": lambda rows: rows.half().float(),
    "bfloat16": lambda rows: rows.bfloat16().float(),
    "pruned": pruned,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_update_that_is_changed_is_never_certified_wrongly(scene, change):
    """Random and trained weights; small noise may leave all images exact."""
    digits = data.load("mnist5k")
    for seed, size, steps in itertools.product(range(2), (4, 20), (0, 30)):
        batch = scene.batch(seed, size)
        given = (digits.inputs, digits.labels, steps)
        task = trained(seed, (200,), (1, 28, 28), *given)
        seen = scene.play(task, batch).observation
        sent = replace(seen.update, rows=change(seen.update.rows))
        answer = SparseRecovery(starts=2, samples=2048)(replace(seen, update=sent), stream(seed))
        assert answer.problem is not None or float(decibels(batch, answer).min()) >= EXACT


def test_too_few_units_are_a_problem_and_no_answer(scene):
    seen = scene.play(task_of(0, 40), scene.batch(0, 32)).observation
    assert SparseRecovery(starts=1)(seen, stream(0)).problem is not None


def test_labels_need_not_be_known_and_a_deeper_model_is_no_harder(scene):
    batch = scene.batch(0, 6)
    seen = scene.play(task_of(0, hidden=(128, 64)), batch, labels_known=False)
    answer = SparseRecovery()(seen.observation, stream(0))
    assert answer.problem is None
    assert torch.equal(pair(batch, answer).labels, batch.labels)
    assert float(decibels(batch, answer).min()) >= EXACT


@pytest.mark.parametrize(
    "defense",
    [
        Clip(1e-3),
        LocalAggregation(3, 0.1),
        HiddenDropout(0.3),
        SecureAggregation(2),
        chain(LocalAggregation(5, 0.01), Clip(0.1)),
    ],
    ids=repr,
)
def test_what_keeps_the_rank_does_not_help(scene, defense):
    for seed in range(3):
        batch = scene.batch(seed, 4)
        seen = scene.play(task_of(seed), batch, defense, seed)
        answer = SparseRecovery()(seen.observation, stream(0))
        assert answer.problem is None
        assert float(decibels(batch, answer).min()) >= EXACT


@pytest.mark.parametrize(
    "defense",
    [
        GaussianNoise(1e-3),
        GaussianNoise(1e-2),
        GradientDropout(0.3),
        MagnitudePruning(0.7),
        Sign(),
    ],
    ids=repr,
)
def test_what_breaks_the_rank_ends_it_and_it_says_so(scene, defense):
    for seed in range(2):
        batch = scene.batch(seed, 4)
        seen = scene.play(task_of(seed), batch, defense, seed)
        answer = SparseRecovery(samples=20_000)(seen.observation, stream(0))
        assert answer.problem is not None
        assert float(decibels(batch, answer).min()) < EXACT


@pytest.mark.parametrize("activation", ["tanh", "sigmoid", "leaky_relu"])
def test_without_zeros_there_is_nothing_to_find(scene, activation):
    batch = scene.batch(0, 4)
    seen = scene.play(task_of(0, activation=activation), batch)
    answer = SparseRecovery(samples=20_000)(seen.observation, stream(0))
    assert answer.problem is not None


def test_the_certificate_refuses_a_changed_update(scene):
    """A gradient of the right rank and zeros, but of other last layers: not what was sent."""
    batch, task = scene.batch(0, 4), task_of(0)
    seen = scene.play(task, batch).observation
    rows = seen.update.rows.clone()
    name, _, start, stop = task.layout[-2]
    assert name == "3.weight"
    rows[:, start:stop] *= 1.01
    answer = SparseRecovery()(replace(seen, update=replace(seen.update, rows=rows)), stream(0))
    assert answer.problem.startswith("objective did not fall: the answer's gradient is off by 0.00")
    assert float(decibels(batch, answer).min()) >= EXACT


def test_a_repeated_input_is_called_so(scene):
    batch = scene.batch(0, 3)
    twice = Batch(batch.inputs[[0, 1, 1]], batch.labels[[0, 1, 1]])
    answer = SparseRecovery()(scene.play(task_of(0), twice).observation, stream(0))
    assert "has rank 2, not 3" in answer.problem


def test_random_pixels_and_more_examples_than_classes_are_never_claimed_wrongly(scene):
    """Most units are on for all of such images, which leaves other sparse directions."""
    model = models.mlp(input_shape=(1, 6, 6), classes=3, generator=stream(0, "m"), hidden=(200,))
    task, exact = Task.of(model, classes=3), {3: 0, 4: 0}
    for size in exact:
        for seed in range(2):
            images = [small_batch(task, seed=10 * seed + i).inputs for i in range(2)]
            batch = Batch(torch.cat(images)[:size], torch.arange(size) % 3)
            answer = SparseRecovery(samples=20_000)(scene.play(task, batch).observation, stream(0))
            whole = bool((squared_distances(batch.inputs, answer.inputs).amin(1) < 1e-6).all())
            assert whole or answer.problem is not None
            exact[size] += answer.problem is None
    print(f"\nexact and certified, of 2, by batch size: {exact}")
    assert exact[3] >= 1


def test_the_sparsest_basis_is_the_best_of_all():
    """Greedy from the front: no other independent set comes earlier, by brute force."""
    vectors = normal((6, 3), stream(0, "greedy")).double()
    vectors[2] = vectors[0] + vectors[1]
    vectors[3] = vectors[0]
    assert independent(vectors, vectors.shape[1], SAME)[0] == [0, 1, 4]


def test_where_it_does_not_apply(scene):
    attack, batch = SparseRecovery(), scene.batch(0, 2)
    convolutional = models.simple_convnet(
        input_shape=(1, 28, 28), classes=10, generator=stream(0, "model")
    )
    with pytest.raises(NotApplicable, match="no linear layer"):
        attack(scene.play(Task.of(convolutional, classes=10), batch).observation, stream(0))
    with pytest.raises(NotApplicable, match="129 examples"):
        attack(scene.play(task_of(0), scene.batch(0, 129)).observation, stream(0))
    seen = scene.play(task_of(0), batch).observation
    broken = replace(seen, update=replace(seen.update, rows=seen.update.rows * math.nan))
    with pytest.raises(NotApplicable, match="finite"):
        attack(broken, stream(0))
    narrow = nn.Sequential(nn.Flatten(), nn.Linear(784, 3), nn.ReLU(), nn.Linear(3, 10))
    answer = attack(scene.play(Task.of(narrow, classes=10), batch).observation, stream(0))
    assert answer.problem is not None
    with pytest.raises(ValueError, match="samples"):
        SparseRecovery(samples=0)
    with pytest.raises(ValueError, match="starts"):
        SparseRecovery(starts=-1)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_contract(activation):
    model = models.mlp(
        input_shape=(1, 6, 6),
        classes=3,
        generator=stream(0, "m"),
        hidden=(60,),
        activation=activation,
    )
    task = Task.of(model, classes=3)
    check_attack(SparseRecovery(samples=2048), task=task, batch=small_batch(task))
