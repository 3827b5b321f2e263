"""Robbing the Fed on real digits: exact where an image is alone in its bin, by the exact law."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.optimize import linear_sum_assignment
from torch import nn

from leakbound import data, models
from leakbound.attacks.imprint import RobbingTheFed, _steps
from leakbound.attacks.planted import GAIN, in_front
from leakbound.client import example_gradients, forward
from leakbound.core import Batch, NotApplicable, Server, Task, ThreatModel
from leakbound.defenses import (
    Clip,
    ClipExamples,
    DpSgd,
    GaussianNoise,
    GradientDropout,
    LocalAggregation,
    MagnitudePruning,
    NoDefense,
    SecureAggregation,
    chain,
)
from leakbound.pairing import pair, squared_distances
from leakbound.protocol import play
from leakbound.randomness import normal, stream
from leakbound.testing import check_attack

MALICIOUS = ThreatModel(server=Server.MALICIOUS)
EXACT = 60


@pytest.fixture(scope="module")
def digits():
    """2000 public digits and 3000 private ones."""
    found = data.load("mnist5k")
    order = torch.randperm(5000, generator=stream(0, "imprint"))
    split = (order[:2000], order[2000:])
    return [Batch(found.inputs[part], found.labels[part]) for part in split]


def task_of(digits, seed=0, build="mlp", **settings):
    given = {"input_shape": (1, 28, 28), "classes": 10, "generator": stream(seed, "model")}
    model = getattr(models, build)(**given)
    return Task.of(model, classes=10, **{"public": digits[0], **settings})


def drawn(digits, seed, size):
    private = digits[1]
    order = torch.randperm(private.size, generator=stream(seed, "imprint batch"))[:size]
    return Batch(private.inputs[order], private.labels[order])


def played(task, batch, attack, defense=None, seed=0, threat=MALICIOUS):
    defense = chain(defense) if defense else NoDefense()
    share = batch.size // defense.cohort_size
    clients = [
        Batch(batch.inputs[a : a + share], batch.labels[a : a + share])
        for a in range(0, batch.size, share)
    ]
    sources = [stream(seed, "imprint defense", i) for i in range(len(clients) + 1)]
    return play(task, clients, defense, sources, threat=threat, attack=attack)


def nearest(truth, inputs):
    """PSNR (B,) of the nearest guess to each image."""
    return -10 * squared_distances(truth.inputs, inputs).amin(1).clamp_min(1e-14).log10()


def bins_of(images, public, count):
    """The bin of each image by its mean, with numpy."""
    of = public.inputs.flatten(1).double().mean(1).numpy()
    edges = np.quantile(of, np.arange(1, count) / count)
    return np.searchsorted(edges, images.flatten(1).double().mean(1).numpy())


# what is planted


def test_every_unit_below_an_image_holds_one_and_the_same_gradient(digits):
    task = RobbingTheFed(bins=32).plant(task_of(digits, build="simple_convnet"))
    batch = drawn(digits, 0, 6)
    rows = example_gradients(task, batch.inputs, batch.labels)
    weight, bias = rows[:, : 32 * 784].view(6, 32, 784), rows[:, 32 * 784 : 32 * 785]
    bins = bins_of(batch.inputs, digits[0], 32)
    for i, image in enumerate(batch.inputs):
        on = int(bins[i]) + 1
        assert not bool(bias[i, on:].any())
        assert not bool(weight[i, on:].any())
        assert bool((bias[i, :on] == bias[i, 0]).all())
        torch.testing.assert_close(weight[i, :on], bias[i, 0] * image.flatten().expand(on, 784))


def test_the_model_still_works(digits):
    own = task_of(digits, build="simple_convnet")
    task, batch = RobbingTheFed().plant(own), drawn(digits, 0, 100)
    before, after = forward(own, batch.inputs), forward(task, batch.inputs)
    assert float((before - after).norm() / before.norm()) < 0.2
    assert float((before.argmax(1) == after.argmax(1)).double().mean()) > 0.8


def test_thresholds_of_a_law(digits):
    for law, unit in (("normal", stats.norm()), ("laplace", stats.laplace(scale=0.5**0.5))):
        attack = RobbingTheFed(bins=8, law=law, features=784, mean=0.0, std=1.0)
        task = attack.plant(task_of(digits, public=None, input_range=(-50.0, 50.0)))
        parts = task.unflatten(task.parameters)
        scale = 8 * GAIN
        found = (-parts["layer.bias"] * scale).double().numpy()
        np.testing.assert_allclose(found[1:], unit.ppf(np.arange(1, 8) / 8), rtol=1e-5, atol=1e-6)
        assert found[0] < -50
        fitted = RobbingTheFed(bins=8, law=law).plant(task_of(digits))
        of = digits[0].inputs.flatten(1).double().mean(1)
        found = (-fitted.unflatten(fitted.parameters)["layer.bias"] * scale)[1:].double().numpy()
        wanted = float(of.mean()) + float(of.std()) * unit.ppf(np.arange(1, 8) / 8)
        np.testing.assert_allclose(found, wanted.clip(0, 1), rtol=1e-4, atol=1e-7)


# the laws


def all_apart(counts, size):
    """P(all of `size` draws without replacement fall in different bins), by polynomials."""
    ways = np.zeros(size + 1)
    ways[0] = 1
    for count in counts:
        ways[1:] = ways[1:] + count * ways[:-1]
    return ways[size] / math.comb(int(sum(counts)), size)


def test_the_law_of_uniform_bins():
    many = 1_000_000
    wanted = math.factorial(100) / math.factorial(96) / 100**4
    assert all_apart([many] * 100, 4) == pytest.approx(wanted, rel=1e-5)
    assert wanted == pytest.approx(0.9411, abs=1e-4)


@pytest.mark.parametrize(("count", "rounds"), [(16, 60), (100, 10)])
def test_four_images_are_exact_as_often_as_they_fall_apart(digits, count, rounds):
    task, attack = task_of(digits), RobbingTheFed(bins=count)
    whole = 0
    for seed in range(rounds):
        batch = drawn(digits, seed, 4)
        seen = played(task, batch, attack)
        answer = attack(seen.observation, stream(0))
        exact = bool((nearest(batch, answer.inputs) >= EXACT).all())
        apart = len(set(bins_of(batch.inputs, digits[0], count))) == 4
        assert exact == apart == (answer.problem is None)
        whole += exact
    law = all_apart(np.bincount(bins_of(digits[1].inputs, digits[0], count)), 4)
    print(f"\nk={count}: all 4 exact in {whole} of {rounds} rounds, law {law:.3f}")
    assert stats.binomtest(whole, rounds, law).pvalue > 0.01
    if count == 16:
        assert stats.binomtest(whole, rounds, law**2).pvalue < 0.01


def test_sixty_four_images_in_128_bins(digits):
    """Mean PSNR of isolated images at least 60 dB; their number within its law."""
    task, attack = task_of(digits, build="simple_convnet"), RobbingTheFed()
    alone, decibels, by_matching = [], [], []
    for seed in range(6):
        batch = drawn(digits, seed, 64)
        seen = played(task, batch, attack)
        answer = attack(seen.observation, stream(0))
        bins = bins_of(batch.inputs, digits[0], 128)
        single = np.bincount(bins, minlength=128)[bins] == 1
        found = nearest(batch, answer.inputs)
        assert not bool((found >= EXACT)[torch.from_numpy(~single)].any())
        alone.append(single.sum())
        decibels += found[torch.from_numpy(single)].tolist()
        matched = pair(batch, answer)
        errors = (matched.inputs.double() - batch.inputs).square().flatten(1).mean(1)
        by_matching.append(int((errors < 10 ** (-EXACT / 10)).sum()))
        assert int(answer.problem.split("at least ")[1].split()[0]) <= single.sum()
    counts = np.bincount(bins_of(digits[1].inputs, digits[0], 128), minlength=128)
    total = counts.sum()
    law = sum(c * math.comb(total - c, 63) / math.comb(total, 64) for c in counts.tolist())
    source = np.random.default_rng(0)
    private = np.repeat(np.arange(128), counts)
    simulated = [
        (np.bincount(source.choice(private, 64, replace=False), minlength=128) == 1).sum()
        for _ in range(2000)
    ]
    spread = np.std(simulated) / len(alone) ** 0.5
    print(
        f"\nisolated {np.mean(alone):.2f} of 64 (law {law:.2f} +- {spread:.2f}), by "
        f"matching {np.mean(by_matching):.2f}; PSNR mean {np.mean(decibels):.1f}, least "
        f"{min(decibels):.1f} dB, n = {len(decibels)}"
    )
    assert np.mean(simulated) == pytest.approx(law, abs=4 * np.std(simulated) / 2000**0.5)
    assert np.mean(alone) == pytest.approx(law, abs=3 * spread)
    assert np.mean(decibels) >= EXACT
    exact = np.mean(np.array(decibels) >= EXACT)
    assert exact > 0.99  # one image's derivative is 4000 times below the largest: float32 rounds it


def test_the_law_of_the_number_alone():
    """Mean and variance against a million throws of images into equal bins."""
    source, bins, images, throws = np.random.default_rng(0), 100, 16, 62_500
    counts = source.multinomial(images, [1 / bins] * bins, size=throws)
    alone = (counts == 1).sum(1)
    mean, variance = number_alone(bins, images)
    assert alone.mean() == pytest.approx(mean, abs=4 * (variance / throws) ** 0.5)
    assert alone.var() == pytest.approx(variance, rel=0.03)


def number_alone(bins, images):
    """As the docstring of `RobbingTheFed` states it."""
    mean = images * (1 - 1 / bins) ** (images - 1)
    both = images * (images - 1) * (1 - 1 / bins) * (1 - 2 / bins) ** (images - 2)
    return mean, mean + both - mean**2


def test_mean_and_deviation_are_enough(digits):
    """As many alone as the law of equal bins says; without the two numbers there is no layer."""
    measured = digits[0].inputs.flatten(1).double().mean(1)
    mean, std = float(measured.mean()), float(measured.std())
    attack = RobbingTheFed(law="normal", mean=mean, std=std, features=784)
    task, alone = task_of(digits, public=None), []
    edges = mean + std * stats.norm.ppf(np.arange(1, 128) / 128)
    for seed in range(6):
        batch = drawn(digits, seed, 64)
        found = nearest(batch, attack(played(task, batch, attack).observation, stream(0)).inputs)
        bins = np.searchsorted(edges, batch.inputs.flatten(1).double().mean(1).numpy())
        single = np.bincount(bins, minlength=128)[bins] == 1
        exact = (found >= EXACT).numpy()
        assert not exact[~single].any()
        assert exact[single].mean() > 0.95  # a tiny derivative rounds an image off now and then
        alone.append(int(exact.sum()))
    law, variance = number_alone(128, 64)
    print(f"\n{np.mean(alone):.2f} of 64 alone, law {law:.2f}")
    assert np.mean(alone) == pytest.approx(law, abs=3 * (variance / len(alone)) ** 0.5)
    assert replace(attack, mean=None, std=None).plant(task) is task
    for wrong in ({"std": None}, {"law": "public"}, {"mean": math.inf}, {"std": 0.0}):
        with pytest.raises(ValueError, match="std"):
            replace(attack, **wrong)


@pytest.mark.parametrize("measure", ["cosine", "random"])
def test_other_measurements(digits, measure):
    attack, batch = RobbingTheFed(measure=measure), drawn(digits, 1, 8)
    seen = played(task_of(digits, build="simple_convnet"), batch, attack)
    answer = attack(seen.observation, stream(0))
    layer = seen.observation.task.unflatten(seen.observation.task.parameters)
    on = batch.inputs.flatten(1) @ layer["layer.weight"].T + layer["layer.bias"] > 0
    single = torch.tensor([(on.sum(1) == n).sum() == 1 for n in on.sum(1)])
    assert int(single.sum()) >= 6
    assert bool(((nearest(batch, answer.inputs) >= EXACT) == single).all())


def test_two_images_in_one_bin_leave_their_mixture(digits):
    attack, pool = RobbingTheFed(bins=4), digits[1]
    bins = bins_of(pool.inputs, digits[0], 4)
    at = np.flatnonzero(bins == 2)[:2]
    batch = Batch(pool.inputs[at], pool.labels[at])
    seen = played(task_of(digits), batch, attack)
    answer = attack(seen.observation, stream(0))
    assert answer.problem.startswith("the update shows 1 clear steps for 2 inputs")
    assert "at least 0 were alone" in answer.problem
    rows = example_gradients(seen.observation.task, batch.inputs, batch.labels)
    a, b = rows[:, 4 * 784].double()  # the bias of the lowest unit, which both switch on
    mixture = (a * batch.inputs[0].double() + b * batch.inputs[1]) / (a + b)
    torch.testing.assert_close(answer.inputs[0].double(), mixture.clamp(0, 1), atol=1e-3, rtol=0)
    mean = digits[0].inputs.double().mean(0)
    torch.testing.assert_close(answer.inputs[1].double(), mean, atol=1e-6, rtol=0)


# defenses


def plain(seen):
    """The paper's decoder: differences of neighbors, dW / db, the largest B by |mean dW|."""
    count = seen.observation.examples
    parts = seen.observation.task.unflatten(seen.observation.update.rows.sum(0))
    weight, bias = parts["layer.weight"].double(), parts["layer.bias"].double()
    weight = torch.cat([weight[:-1] - weight[1:], weight[-1:]])
    bias = torch.cat([bias[:-1] - bias[1:], bias[-1:]])
    best = weight.mean(1).abs().topk(count).indices
    images = weight[best] / torch.where(bias == 0, 1, bias)[best, None]
    return images.clamp(0, 1).float().view(seen.observation.batch_shape)


def compared(digits, defense, rounds=3, **threat):
    """Mean PSNR of the nearest guess: this attack's, and the plain decoder's."""
    attack, own, other = RobbingTheFed(), [], []
    threat = ThreatModel(server=Server.MALICIOUS, **threat)
    for seed in range(rounds):
        task, batch = task_of(digits, seed, "simple_convnet"), drawn(digits, seed, 8)
        seen = played(task, batch, attack, defense, seed, threat)
        own += nearest(batch, attack(seen.observation, stream(0)).inputs).tolist()
        other += nearest(batch, plain(seen)).tolist()
    print(f"\n{defense!r} {threat.defense_known}: {np.mean(own):.1f}, plain {np.mean(other):.1f}")
    return np.mean(own), np.mean(other)


@pytest.mark.parametrize(
    ("defense", "at_least", "better_by"),
    [
        (GaussianNoise(0.001), 40, 5),
        (GaussianNoise(0.01), 28, 5),
        (GaussianNoise(0.1), 16, 5),
        (Clip(1e-3), 100, -1),
        (GradientDropout(0.3), 30, 15),
        (MagnitudePruning(0.3), 30, 15),
        (MagnitudePruning(0.7), 35, 15),
        (SecureAggregation(2), 100, -1),
    ],
    ids=repr,
)
def test_the_fit_beats_plain_differences_under_defenses(digits, defense, at_least, better_by):
    own, other = compared(digits, defense)
    assert own >= at_least
    assert own >= other + better_by


@pytest.mark.parametrize(
    ("defense", "at_most"),
    [(GradientDropout(0.3), 14), (MagnitudePruning(0.7), 23), (MagnitudePruning(0.99), 14)],
    ids=repr,
)
def test_holes_that_are_not_known_make_it_collapse(digits, defense, at_most):
    """Claim 2-10: strong under little noise, useless under dropout and heavy pruning."""
    own, other = compared(digits, defense, defense_known=False)
    assert own < at_most
    assert other < at_most


def test_noise_of_unknown_law_is_read_from_the_bins_that_are_empty(digits):
    known, _ = compared(digits, GaussianNoise(0.01))
    unknown, _ = compared(digits, GaussianNoise(0.01), defense_known=False)
    assert unknown == pytest.approx(known, abs=1)


def test_rows_of_single_examples_are_read_one_by_one(digits):
    """All in one bin, but each in a row of its own."""
    pool = digits[1]
    at = np.flatnonzero(bins_of(pool.inputs, digits[0], 4) == 2)[:5]
    batch, attack = Batch(pool.inputs[at], pool.labels[at]), RobbingTheFed(bins=4)
    seen = played(task_of(digits), batch, attack, ClipExamples(1.0))
    answer = attack(seen.observation, stream(0))
    assert len(seen.observation.update.rows) == 5
    assert answer.problem is None
    errors = (answer.inputs - batch.inputs).square().flatten(1).mean(1)
    assert float(errors.max()) < 1e-6


def test_noise_alone_is_called_so(digits):
    batch, attack = drawn(digits, 0, 8), RobbingTheFed()
    seen = played(task_of(digits), batch, attack, DpSgd(1.0, 10.0))
    answer = attack(seen.observation, stream(0))
    assert answer.problem.startswith("the update shows 0 clear steps for 8 inputs")


def test_local_steps_move_the_thresholds_unless_they_are_quiet(digits):
    found = {100.0: [], 1e-3: []}
    for seed in range(4):
        batch = drawn(digits, seed, 8)
        bins = bins_of(batch.inputs, digits[0], 128)
        single = torch.from_numpy(np.bincount(bins)[bins] == 1)
        for gain, decibels in found.items():
            attack, task = RobbingTheFed(gain=gain), task_of(digits, seed, "simple_convnet")
            seen = played(task, batch, attack, LocalAggregation(3, 0.1))
            answer = attack(seen.observation, stream(0))
            decibels += nearest(batch, answer.inputs)[single].tolist()
            moved = "passed over" in (answer.problem or "")
            assert moved == (gain > 1)
    print(f"\nexact: { ({g: f'{np.mean(np.array(d) >= EXACT):.2f}' for g, d in found.items()}) }")
    assert min(found[1e-3]) >= EXACT
    assert min(found[100.0]) < 30


def test_the_fit_is_the_best_of_all_partitions():
    """Against every partition of 9 rows, by brute force."""
    for seed in range(5):
        source = stream(seed, "steps")
        values = normal((9, 3), source).double() * 0.7
        values[4:] += 4
        values[6:] -= 3
        precision = (normal((9, 3), source).double().abs() + 0.1) * (
            normal((9, 3), source).double() > -1
        )
        price = stats.chi2.isf(1e-3 / 9, 3)
        best, at = math.inf, None
        for code in range(2**9):
            starts = [i for i in range(9) if code >> i & 1]
            cost = price * len(starts)
            for start, end in zip([0, *starts], [*starts, 9], strict=True):
                x, w = values[start:end].numpy(), precision[start:end].numpy()
                level = (w * x).sum(0) / np.maximum(w.sum(0), 1e-300) if start in starts else 0
                cost += (w * (x - level) ** 2).sum()
            if cost < best:
                best, at = cost, starts
        assert _steps(values, precision) == at


# where it does not apply


def test_where_it_does_not_apply(digits):
    attack, task, batch = RobbingTheFed(), task_of(digits), drawn(digits, 0, 2)
    with pytest.raises(NotApplicable, match="honest"):
        attack(played(task, batch, attack, threat=ThreatModel()).observation, stream(0))
    bare = task_of(digits, public=None)
    assert attack.plant(bare) is bare
    with pytest.raises(NotApplicable, match="holds no imprint"):
        attack(played(bare, batch, attack).observation, stream(0))
    seen = played(task, batch, attack).observation
    broken = replace(seen, update=replace(seen.update, rows=seen.update.rows * math.nan))
    with pytest.raises(NotApplicable, match="finite"):
        attack(broken, stream(0))
    other = in_front(task, torch.ones(3, 784), torch.zeros(3), 1.0, "trap")
    with pytest.raises(NotApplicable, match="holds no imprint"):
        attack(played(other, batch, None).observation, stream(0))


def test_other_models_types_and_settings(digits):
    conv = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(2 * 26 * 26, 10))
    task = Task.of(conv, classes=10, public=digits[0]).to("cpu", torch.float64)
    batch = drawn(digits, 0, 3)
    batch = Batch(batch.inputs.double(), batch.labels)
    answer = RobbingTheFed()(played(task, batch, RobbingTheFed()).observation, stream(0))
    assert answer.inputs.dtype == torch.float64
    assert float(nearest(batch, answer.inputs).min()) >= EXACT
    for settings in ({"bins": 0}, {"measure": "men"}, {"law": "x"}, {"gain": 0.0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            RobbingTheFed(**settings)


def test_matching_can_only_lose_recoveries(digits):
    """Sheet 3.10: nearest guess against the one-to-one matching with scipy's solver."""
    attack, batch = RobbingTheFed(bins=32), drawn(digits, 3, 32)
    answer = attack(played(task_of(digits), batch, attack).observation, stream(0))
    costs = squared_distances(batch.inputs, answer.inputs).numpy()
    rows, columns = linear_sum_assignment(costs)
    by_nearest = (costs.min(1) < 1e-6).sum()
    by_matching = (costs[rows, columns] < 1e-6).sum()
    print(f"\n{by_nearest} by nearest guess, {by_matching} by matching, of 32 in 32 bins")
    assert 0 < by_matching <= by_nearest


def test_contract_of_other_settings():
    check_attack(RobbingTheFed(measure="random", law="normal", bins=16))
