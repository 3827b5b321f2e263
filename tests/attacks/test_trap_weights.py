"""Trap weights on real digits: what is alone in a row is found, as often as the law says."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from leakbound import data, models
from leakbound.attacks.analytic import LinearInversion
from leakbound.attacks.trap_weights import TrapWeights
from leakbound.client import example_gradients, forward
from leakbound.core import Batch, NotApplicable, Server, Task, ThreatModel
from leakbound.defenses import (
    Clip,
    GaussianNoise,
    GradientDropout,
    MagnitudePruning,
    NoDefense,
)
from leakbound.pairing import pair, squared_distances
from leakbound.protocol import play
from leakbound.randomness import permutation, stream, uniform
from leakbound.testing import check_attack

MALICIOUS = ThreatModel(server=Server.MALICIOUS)
EXACT = 60


@pytest.fixture(scope="module")
def digits():
    """2000 public digits and 3000 private ones."""
    found = data.load("mnist5k")
    order = torch.randperm(5000, generator=stream(0, "traps"))
    split = (order[:2000], order[2000:])
    return [Batch(found.inputs[part], found.labels[part]) for part in split]


def task_of(public, seed=0, build="mlp", **settings):
    given = {"input_shape": (1, 28, 28), "classes": 10, "generator": stream(seed, "model")}
    return Task.of(getattr(models, build)(**given), classes=10, **{"public": public, **settings})


def drawn(digits, seed, size):
    private = digits[1]
    order = torch.randperm(private.size, generator=stream(seed, "trap batch"))[:size]
    return Batch(private.inputs[order], private.labels[order])


def played(task, batch, attack, defense=None, seed=0, threat=MALICIOUS):
    sources = [stream(seed, "trap defense", i) for i in range(2)]
    return play(task, [batch], defense or NoDefense(), sources, threat=threat, attack=attack)


def nearest(truth, inputs):
    """PSNR (B,) of the nearest guess to each image."""
    return -10 * squared_distances(truth.inputs, inputs).amin(1).clamp_min(1e-14).log10()


def active(task, images):
    """(B, rows) which rows an image activates."""
    layer = task.unflatten(task.parameters)
    return images.flatten(1) @ layer["layer.weight"].T + layer["layer.bias"] > 0


def alone(on):
    """(B,) how many rows an image activates alone."""
    return on[:, on.sum(0) == 1].sum(1)


# what is planted


def test_half_of_each_row_is_negative_and_a_row_is_on_for_one_in_eight(digits):
    task = TrapWeights(rows=64).plant(task_of(digits[0]))
    weight = task.unflatten(task.parameters)["layer.weight"]
    assert bool(((weight < 0).sum(1) == 392).all())
    on = active(task, digits[0].inputs).double().mean(0)
    assert float((on - 1 / 8).abs().max()) < 0.005
    private = active(task, digits[1].inputs).double().mean()
    assert float(private) == pytest.approx(1 / 8, abs=0.01)


def test_a_given_scale_is_that_of_the_positive_weights():
    attack = TrapWeights(rows=256, scale=0.9, features=784)
    task = attack.plant(task_of(None))
    weight = task.unflatten(task.parameters)["layer.weight"].double()
    up, down = weight[weight > 0].mean(), -weight[weight < 0].mean()
    assert float(up / down) == pytest.approx(0.9, abs=0.02)


def test_inputs_of_another_range_are_moved(digits):
    """In the range (-1, 1) the rows are on for the same images as in (0, 1)."""
    low = Batch(digits[0].inputs * 2 - 1, digits[0].labels)
    attack, own = TrapWeights(rows=16), task_of(digits[0])
    moved = attack.plant(task_of(low, input_range=(-1.0, 1.0)))
    same = active(moved, digits[1].inputs * 2 - 1) == active(attack.plant(own), digits[1].inputs)
    assert float(same.double().mean()) > 0.9999


def test_every_row_holds_the_sum_over_its_images(digits):
    task = TrapWeights(rows=32).plant(task_of(digits[0], build="simple_convnet"))
    batch = drawn(digits, 0, 6)
    rows = example_gradients(task, batch.inputs, batch.labels)
    weight, bias = rows[:, : 32 * 784].view(6, 32, 784), rows[:, 32 * 784 : 32 * 785]
    on = active(task, batch.inputs)
    assert torch.equal(bias != 0, on)
    each = bias.sum(1) / on.sum(1)
    wanted = torch.einsum("b,br,bp->brp", each, on.float(), batch.inputs.flatten(1))
    torch.testing.assert_close(weight, wanted)


def test_the_model_still_works(digits):
    own = task_of(digits[0], build="simple_convnet")
    task, batch = TrapWeights().plant(own), drawn(digits, 0, 100)
    before, after = forward(own, batch.inputs), forward(task, batch.inputs)
    assert float((before - after).norm() / before.norm()) < 0.2
    assert float((before.argmax(1) == after.argmax(1)).double().mean()) > 0.8


# the laws


def blocks(name, rounds):
    """Images that light 98 pixels of 784 each, 8 at a time without a pixel in common."""
    images = torch.zeros(8 * rounds, 784)
    values = uniform((8 * rounds, 98), stream(0, name)) * 0.8 + 0.2
    for i in range(rounds):
        order = permutation(784, stream(i, name)).view(8, 98)
        images[8 * i : 8 * i + 8].scatter_(1, order, values[8 * i : 8 * i + 8])
    return Batch(images.view(-1, 1, 28, 28), torch.arange(8 * rounds) % 10)


def test_the_closed_form_where_activations_are_independent():
    """1 - (1 - p (1 - p)^(B - 1))^rows, p = 1 / 8, of images without a pixel in common."""
    rounds, rows = 40, 32
    private, task = blocks("private", rounds), task_of(blocks("public", 100))
    single, found, sure, taken = 0, 0, 0, 0
    for i in range(rounds):
        part = slice(8 * i, 8 * i + 8)
        batch = Batch(private.inputs[part], private.labels[part])
        attack = TrapWeights(rows=rows, seed=i)
        seen = played(task, batch, attack)
        count = alone(active(seen.observation.task, batch.inputs))
        exact = nearest(batch, attack(seen.observation, stream(0)).inputs) >= EXACT
        single, found = single + int((count > 0).sum()), found + int(exact.sum())
        sure, taken = sure + int((count > 1).sum()), taken + int(exact[count > 1].sum())
    p = 1 / 8
    law = 1 - (1 - p * (1 - p) ** 7) ** rows
    n = 8 * rounds
    error = math.sqrt(law * (1 - law) / n)
    print(
        f"\nalone in a row: {single / n:.3f} of {n} (law {law:.3f} +- {error:.3f}); exact "
        f"{found / n:.3f}; of those alone in two rows or more {taken} of {sure}"
    )
    assert single / n == pytest.approx(law, abs=3 * error)
    assert found / n > law - 3 * error
    assert taken >= 0.97 * sure


def test_the_law_on_digits_by_monte_carlo(digits):
    """Fresh rows, drawn and tuned with numpy, say how often an image is alone in one of 256."""
    rounds, size, rows = 4, 16, 256
    task, source = task_of(digits[0]), np.random.default_rng(0)
    public = digits[0].inputs.flatten(1).numpy().astype(float)
    draws = np.abs(source.normal(size=(4096, 784)))
    negative = np.argsort(source.random((4096, 784)), 1) < 392
    up, down = (draws * ~negative), (draws * negative)
    scale = np.quantile((public @ down.T) / (public @ up.T), 1 / size, axis=0)
    rows_drawn = scale[:, None] * up - down
    single, expected, spread, found, matched = [], [], 0.0, 0, 0
    for seed in range(rounds):
        batch, attack = drawn(digits, seed, size), TrapWeights(rows, expected=size, seed=seed)
        seen = played(task, batch, attack)
        count = alone(active(seen.observation.task, batch.inputs))
        answer = attack(seen.observation, stream(0))
        exact = nearest(batch, answer.inputs) >= EXACT
        assert bool(exact[count > 1].all())
        single.append(int((count > 0).sum()))
        on = torch.from_numpy(batch.inputs.flatten(1).numpy().astype(float) @ rows_drawn.T > 0)
        chance = 1 - (1 - alone(on).numpy() / 4096) ** rows
        expected.append(chance.sum())
        spread += (chance * (1 - chance)).sum()
        found += int(exact.sum())
        errors = (pair(batch, answer).inputs - batch.inputs).square().flatten(1).mean(1)
        matched += int((errors < 10 ** (-EXACT / 10)).sum())
    print(
        f"\nalone {sum(single)} of {rounds * size} (law {sum(expected):.1f} +- {spread**0.5:.1f});"
        f" exact by nearest guess {found}, by matching {matched}"
    )
    assert sum(single) == pytest.approx(sum(expected), abs=3 * spread**0.5 + 1)
    assert found >= sum(single)
    assert found >= matched >= found - 1


def test_eight_digits_are_exact_and_it_says_so(digits):
    task, attack = task_of(digits[0], build="simple_convnet"), TrapWeights()
    sure = 0
    for seed in range(6):
        batch = drawn(digits, seed, 8)
        answer = attack(played(task, batch, attack).observation, stream(0))
        exact = nearest(batch, answer.inputs) >= EXACT
        if answer.problem is None:
            assert bool(exact.all())
        sure += answer.problem is None
    print(f"\nall exact and known to be in {sure} of 6 rounds")
    assert sure >= 5


def test_what_is_never_alone_is_found_by_subtraction(digits):
    """Few rows: more images are exact than are alone in a row."""
    found = single = 0
    for seed in range(10):
        batch, attack = drawn(digits, seed, 8), TrapWeights(rows=96, seed=seed)
        seen = played(task_of(digits[0]), batch, attack)
        exact = nearest(batch, attack(seen.observation, stream(0)).inputs) >= EXACT
        found += int(exact.sum())
        single += int((alone(active(seen.observation.task, batch.inputs)) > 1).sum())
    print(f"\nexact {found}, alone in two rows or more {single}, of 80")
    assert found > single


# defenses


@pytest.mark.parametrize(
    ("defense", "at_least", "better_by"),
    [
        (None, 100, 5),
        (GaussianNoise(0.001), 40, 5),
        (GaussianNoise(0.01), 24, 5),
        (Clip(1e-3), 100, 5),
        (GradientDropout(0.3), 60, 20),
        (MagnitudePruning(0.3), 100, 5),
        (MagnitudePruning(0.7), 50, 20),
    ],
    ids=repr,
)
def test_sums_of_rows_tell_more_than_their_ratios(digits, defense, at_least, better_by):
    attack, own, other = TrapWeights(), [], []
    for seed in range(3):
        task, batch = task_of(digits[0], seed, "simple_convnet"), drawn(digits, seed, 8)
        seen = played(task, batch, attack, defense, seed)
        own += nearest(batch, attack(seen.observation, stream(0)).inputs).tolist()
        other += nearest(batch, LinearInversion()(seen.observation, stream(0)).inputs).tolist()
    print(f"\n{defense!r}: {np.mean(own):.1f}, linear inversion {np.mean(other):.1f}")
    assert np.mean(own) >= at_least
    assert np.mean(own) >= np.mean(other) + better_by


def test_noise_alone_is_called_so(digits):
    batch, attack = drawn(digits, 0, 8), TrapWeights(gain=1.0)
    seen = played(task_of(digits[0]), batch, attack, GaussianNoise(10.0))
    answer = attack(seen.observation, stream(0))
    assert answer.problem.startswith("rows agree on only 0 of 8 inputs")
    mean = digits[0].inputs.double().mean(0)
    assert float((answer.inputs.double() - mean).square().mean()) < 0.01


# where it does not apply


def test_where_it_does_not_apply(digits):
    attack, task, batch = TrapWeights(), task_of(digits[0]), drawn(digits, 0, 2)
    with pytest.raises(NotApplicable, match="honest"):
        attack(played(task, batch, attack, threat=ThreatModel()).observation, stream(0))
    bare = task_of(None)
    assert attack.plant(bare) is bare
    assert TrapWeights(features=784).plant(bare) is bare
    with pytest.raises(NotApplicable, match="holds no trap"):
        attack(played(bare, batch, attack).observation, stream(0))
    seen = played(task, batch, attack).observation
    broken = replace(seen, update=replace(seen.update, rows=seen.update.rows * math.inf))
    with pytest.raises(NotApplicable, match="finite"):
        attack(broken, stream(0))
    for settings in ({"rows": 0}, {"scale": -1.0}, {"expected": 0}, {"gain": 0.0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            TrapWeights(**settings)


def test_contract_of_other_settings():
    check_attack(TrapWeights(rows=16, scale=0.9))
