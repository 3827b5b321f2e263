"""The tensor method against paper B's claims, on unit vectors, digits and photographs."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from leakbound import data
from leakbound.attacks.base import Attack, seen_task
from leakbound.attacks.features.base import feature_errors, subspace_error
from leakbound.client import layer_inputs
from leakbound.core import Batch, NotApplicable, Observation, Server, Task, ThreatModel
from leakbound.defenses import (
    Clip,
    ClipExamples,
    GaussianNoise,
    GradientDropout,
    HiddenDropout,
    LocalAggregation,
    MagnitudePruning,
    NoDefense,
    SecureAggregation,
    chain,
)
from leakbound.models import headed
from leakbound.protocol import play
from leakbound.randomness import normal, stream
from leakbound.testing.common import small_batch, small_task
from leakbound_reproductions.attacks.fit import fit_features
from leakbound_reproductions.attacks.moments import Responses
from leakbound_reproductions.attacks.tensor import TensorMethod

WIDE = torch.zeros((), dtype=torch.float64)
MALICIOUS = ThreatModel(server=Server.MALICIOUS)
SEEDS = range(10)


class CubicQuadratic(nn.Module):
    def forward(self, z):
        return z**3 + z**2


ACTIVATIONS = {"cubic": CubicQuadratic, "relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


def summed_square(output, targets):
    return (output[:, 0] - targets).square().sum()


def unit_vectors(count, n, seed):
    raw = normal((count, n), stream(seed, "vectors", n), like=WIDE)
    return raw / raw.norm(dim=1, keepdim=True)


def theory(activation, n, width, seed):
    """Paper B's network: W ~ N(0, 1), a ~ N(0, 1 / M^2), the summed square loss."""
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(n, width, bias=False),
        ACTIVATIONS[activation](),
        nn.Linear(width, 1, bias=False),
    ).double()
    draw = stream(seed, "weights", n, width)
    weights = [normal((n * width,), draw, like=WIDE), normal((width,), draw, like=WIDE) / width]
    task = Task.of(model.eval(), loss=summed_square, input_range=(-10.0, 10.0))
    return task.with_parameters(torch.cat(weights))


def observe(vectors, activation, width, seed, defense=None):
    count, n = vectors.shape
    targets = normal((count,), stream(seed, "targets"), like=WIDE).sign()
    batch = Batch(vectors.view(count, 1, 1, n), targets)
    sources = [stream(seed, "round", i) for i in range(2)]
    return play(theory(activation, n, width, seed), [batch], defense or NoDefense(), sources)


def error(activation, n, width, count, seed, defense=None, method=TensorMethod()):  # noqa: B008
    vectors = unit_vectors(count, n, seed)
    seen = observe(vectors, activation, width, seed, defense).observation
    found = method.find(seen, stream(seed, "find"))
    assert found.signed == (activation != "tanh")
    return float(feature_errors(found.vectors, vectors, signed=found.signed).mean())


def errors(*args, seeds=SEEDS, **kwargs):
    return np.array([error(*args, seed, **kwargs) for seed in seeds])


def slope(activation, n, count, widths, seeds=SEEDS):
    """Log-log slope of the mean error in the width, and its 95 % bootstrap interval."""
    table = np.array([[error(activation, n, m, count, s) for m in widths] for s in seeds])
    rng = np.random.default_rng(0)
    draws = [table[rng.integers(0, len(table), len(table))].mean(0) for _ in range(500)]
    fits = [np.polyfit(np.log(widths), np.log(d), 1)[0] for d in [table.mean(0), *draws]]
    return fits[0], np.percentile(fits[1:], [2.5, 97.5])


# paper B's claims, one output and the square loss


@pytest.mark.slow
def test_the_error_falls_as_one_over_the_root_of_the_width():
    """Claim 2-1 on x^3 + x^2: n = 10, B = 2, M = 2k to 16k, 10 seeds."""
    found, (low, high) = slope("cubic", 10, 2, [2000, 5600, 16_000])
    assert -0.6 < found < -0.4
    assert low < -0.5 + 0.1
    assert high > -0.5 - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["cubic", "relu", "tanh"])
@pytest.mark.parametrize("n", [10, 40])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_slopes_in_the_width(activation, n, count):
    """M = 4k to 32k, 10 seeds. All intervals hold a slope in [-0.6, -0.4]."""
    found, (low, high) = slope(activation, n, count, [4000, 8000, 16_000, 32_000])
    assert low < -0.4
    assert high > -0.6
    assert -0.7 < found < -0.4


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
def test_more_units_tell_more(activation):
    few, many = (errors(activation, 12, width, 2, seeds=range(3)) for width in (1000, 8000))
    assert np.all(many < few)
    assert 2 < few.mean() / many.mean() < 4.5  # sqrt(8) = 2.8
    assert many.mean() < 0.1


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_more_examples_are_harder(activation):
    """Claim 2-1, n = 12, M = 4000, 3 seeds."""
    means = [errors(activation, 12, 4000, count, seeds=range(3)).mean() for count in (1, 2, 4)]
    assert means[0] < means[1] < means[2]


@pytest.mark.parametrize("activation", ["cubic", "relu", "tanh"])
def test_clipping_changes_nothing(activation):
    """Claim 2-2."""
    vectors, answers = unit_vectors(2, 12, 0), []
    for defense in (NoDefense(), Clip(1e-3)):
        seen = observe(vectors, activation, 2000, 0, defense).observation
        answers.append(TensorMethod().find(seen, stream(0, "find")).vectors)
    torch.testing.assert_close(answers[0], answers[1], atol=1e-6, rtol=0)


def test_noise_costs_nothing_until_it_is_as_large_as_the_signal():
    """Claim 2-3: (B + s0) sqrt(n / M). ReLU, B = 1, n = 12, M = 4000, 6 seeds."""
    levels = [0.0, 0.1, 3.0, 6.0]
    means = [
        errors("relu", 12, 4000, 1, seeds=range(6), defense=GaussianNoise(s) if s else None).mean()
        for s in levels
    ]
    assert means[1] == pytest.approx(means[0], rel=0.1)
    assert means[2] > 1.5 * means[0]
    assert means[3] / means[2] == pytest.approx(2, abs=0.5)


@pytest.mark.slow
def test_dropped_units_count_as_a_narrower_net():
    """Claim 2-4, entries of the gradient, x^3 + x^2, n = 10, B = 2, M = 8000: the means of 10
    seeds differ by less than 2.5 standard errors of their difference; undropped nets do differ."""
    rate = 0.75
    dropped = errors("cubic", 10, 8000, 2, defense=GradientDropout(rate))
    narrow = errors("cubic", 10, round(8000 * (1 - rate)), 2)
    spread = math.hypot(dropped.std(ddof=1), narrow.std(ddof=1)) / math.sqrt(len(SEEDS))
    assert abs(dropped.mean() - narrow.mean()) < 2.5 * spread
    assert dropped.mean() > 1.3 * errors("cubic", 10, 8000, 2).mean()


def test_pruning_leaves_the_span_but_not_the_features():
    """Claim 2-5 for the moments: survivors are no Gaussian sample. The fit needs
    none: it is exact, or reports a problem."""
    pruned, fits = MagnitudePruning(0.9), 0
    plain = errors("relu", 16, 4000, 2, seeds=range(2))
    moments = errors("relu", 16, 4000, 2, seeds=range(2), defense=pruned)
    assert moments.mean() > 3 * plain.mean()
    alone = errors("relu", 16, 4000, 1, seeds=range(2), defense=pruned)
    assert alone.max() < 0.3  # pruned entries count as the zeros that were sent
    for seed in range(2):
        vectors = unit_vectors(2, 16, seed)
        seen = observe(vectors, "relu", 4000, seed, pruned).observation
        found = TensorMethod(fit=40).find(seen, stream(seed, "find"))
        exact = bool(feature_errors(found.vectors, vectors).max() < 1e-8)
        assert exact is (found.problem is None)
        fits += exact
    assert fits >= 1


# the fit


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
def test_without_noise_the_fit_is_exact(activation):
    """The error of sqrt(n / M) is the moments', not the gradient's: n = 16, B = 3, M = 3000."""
    found = errors(activation, 16, 3000, 3, seeds=range(1), method=TensorMethod(fit=40))
    assert found.max() < 1e-9


def test_the_fit_is_as_good_as_any_unbiased_one():
    """Against the Cramer-Rao bound of g = r s(W z) + noise, from a Jacobian by autograd."""
    units, z = normal((2000, 6), stream(0, "u"), like=WIDE), unit_vectors(1, 6, 0)
    r, noise, squares = torch.tensor([[1.5]]).to(WIDE), 0.3, []

    def responses(flat):
        return torch.tanh(units @ flat[:6]) * flat[6]

    jacobian = torch.func.jacrev(responses)(torch.cat([z[0], r[0]]))
    bound = noise**2 * torch.linalg.inv(jacobian.T @ jacobian)[:6, :6].trace()
    clean = r @ torch.tanh(z @ units.T)
    for seed in range(60):
        noisy = clean + noise * normal(clean.shape, stream(seed, "noise"), like=WIDE)
        given = Responses.of(noisy, units, noise=torch.full_like(noisy, noise**2))
        found, left = fit_features(given, torch.tanh, z + 0.1, 20)
        squares.append(float((found - z).square().sum()))
        assert left < 1
    ratio = np.mean(squares) / float(bound)
    assert ratio == pytest.approx(1, abs=4 * np.std(squares) / np.mean(squares) / math.sqrt(60))
    assert ratio < 1.6


# cross-entropy and the planted head


@dataclass(frozen=True)
class Planting(Attack):
    """An attack whose server sends the model of a method; it is not run."""

    method: TensorMethod

    def plant(self, task):
        return self.method.plant(task)


@pytest.fixture(scope="module")
def digits():
    return data.load("mnist5k")


def round_of(digits, count, seed, *, defense=None, method=TensorMethod(), **settings):  # noqa: B008
    order = torch.randperm(len(digits.inputs), generator=stream(seed, "order"))
    if settings.pop("same", False):
        order = order[digits.labels[order] == digits.labels[order[0]]]
    order, clients = order[:count], (defense or NoDefense()).cohort_size
    given = {"features": 32, "width": 4096, **settings}
    model = headed(input_shape=(1, 28, 28), classes=10, generator=stream(seed, "model"), **given)
    batches = [Batch(digits.inputs[part], digits.labels[part]) for part in order.chunk(clients)]
    sources = [stream(seed, "round", i) for i in range(clients + 1)]
    task = Task.of(model, classes=10)
    seen = play(
        task, batches, defense or NoDefense(), sources, threat=MALICIOUS, attack=Planting(method)
    ).observation
    entered = layer_inputs(seen_task(seen), digits.inputs[order], ["inner"])["inner"].detach()
    return seen, entered


def found_error(digits, count, seed, method=TensorMethod(), **settings):  # noqa: B008
    seen, entered = round_of(digits, count, seed, method=method, **settings)
    found = method.find(seen, stream(seed, "find"))
    assert found.layer == "inner"
    assert found.vectors.dtype == entered.dtype
    torch.testing.assert_close(found.vectors.norm(dim=1), torch.ones(count))
    mean = feature_errors(found.vectors, entered, signed=found.signed).mean()
    return float(mean), subspace_error(found.basis, entered), found.problem


@pytest.mark.parametrize("count", [1, 8])
def test_features_of_digits_are_found(digits, count):
    """n = 32, M = 4096, ReLU, float32, 2 seeds; where a batch is too much, the method says so."""
    found = [found_error(digits, count, seed) for seed in range(2)]
    assert np.median([f[0] for f in found]) < 0.15
    assert np.median([f[1] for f in found]) < 0.12
    assert [f[0] > 0.3 for f in found] == [f[2] is not None for f in found]


def test_wider_heads_tell_more(digits):
    few, many = (
        np.mean([found_error(digits, 2, s, width=w)[0] for s in range(2)]) for w in (1024, 8192)
    )
    assert many < 0.6 * few


@pytest.mark.parametrize(("count", "same"), [(2, False), (4, True)])
def test_the_fit_finds_digits_features_to_rounding(digits, count, same):
    """Also of one class, whose coefficients are nearly equal."""
    method = TensorMethod(fit=40)
    mean, _, problem = found_error(digits, count, 0, method, same=same, width=2048)
    assert mean < 1e-5
    assert problem is None


@pytest.mark.parametrize(
    ("defense", "most", "fitted"),
    [
        (Clip(0.1), 0.2, 1e-5),
        (GaussianNoise(1e-3), 0.2, 0.01),
        (GaussianNoise(0.1), 0.25, 0.1),
        (GradientDropout(0.5), 0.6, 1e-5),
        (HiddenDropout(0.3), 0.35, 1e-4),
        (MagnitudePruning(0.7), 2.1, 1e-5),
        (LocalAggregation(3, 1e-4), 0.2, 0.1),
        (SecureAggregation(2), 0.2, 1e-5),
        (chain(ClipExamples(1.0)), 0.2, 1e-5),
    ],
    ids=repr,
)
def test_defenses(digits, defense, most, fitted):
    """Mean error at B = 2, by moments and after the fit."""
    assert found_error(digits, 2, 0, defense=defense)[0] < most
    assert found_error(digits, 2, 0, TensorMethod(fit=40), defense=defense)[0] < fitted


def test_part_of_the_head_may_be_random(digits):
    for method in (TensorMethod(random=3000), TensorMethod(random=3000, fit=30)):
        seen, entered = round_of(digits, 2, 0, method=method)
        before = TensorMethod().find(seen, stream(0)).vectors
        after = method.find(seen, stream(0)).vectors
        assert feature_errors(after, entered).mean() < 0.25
        torch.testing.assert_close(before, after, atol=0 if not method.fit else 0.4, rtol=0)


def test_photographs():
    """The whole image enters the head: 4 crops of 6 x 6 x 3 pixels, B = 4, M = 4096."""
    from skimage import data as photographs

    image = torch.from_numpy(photographs.astronaut()).double().permute(2, 0, 1) / 255
    crops = torch.stack(
        [image[:, y : y + 66 : 11, 200 : 200 + 66 : 11] for y in (0, 100, 250, 400)]
    )
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 4096), nn.ReLU(), nn.Linear(4096, 10))
    method = TensorMethod(fit=30)
    task = Task.of(model.double(), classes=10)
    batch = Batch(crops, torch.tensor([1, 3, 3, 7]))
    sources = [stream(0, "photographs", i) for i in range(2)]
    seen = play(
        task, [batch], NoDefense(), sources, threat=MALICIOUS, attack=Planting(method)
    ).observation
    found = method.find(seen, stream(0, "find"))
    assert feature_errors(found.vectors, crops.flatten(1)).max() < 1e-6


# contract


def test_an_honest_server_has_planted_nothing(digits):
    method = TensorMethod()
    task = small_task()
    batch = small_batch(task)
    sources = [stream(0, i) for i in range(2)]
    seen = play(task, [batch], NoDefense(), sources, attack=Planting(method)).observation
    with pytest.raises(NotApplicable, match=r"Gaussian|biases"):
        method.find(seen, stream(0))


def without(seen, **changes):
    return replace(seen, update=replace(seen.update, **changes))


def test_odd_updates_are_declined(digits):
    seen, _ = round_of(digits, 2, 0, width=512)
    method, rows = TensorMethod(), seen.update.rows
    for bad, reason in (
        (torch.zeros_like(rows), "zero"),
        (torch.full_like(rows, float("nan")), "not finite"),
    ):
        with pytest.raises(NotApplicable, match=reason):
            method.find(without(seen, rows=bad), stream(0))
    mask = torch.zeros_like(rows, dtype=torch.bool)
    with pytest.raises(NotApplicable, match="zero"):
        method.find(without(seen, mask=mask), stream(0))
    narrow, _ = round_of(digits, 2, 0, width=32)
    with pytest.raises(NotApplicable, match="32 random hidden units"):
        method.find(narrow, stream(0))
    many, _ = round_of(digits, 20, 0, width=512, features=16)
    with pytest.raises(NotApplicable, match="20 examples in 16"):
        method.find(many, stream(0))


def test_a_quadratic_head_tells_the_span_alone():
    class Square(nn.Module):
        def forward(self, z):
            return z * z

    ACTIVATIONS["square"] = Square
    vectors = unit_vectors(2, 8, 0)
    seen = observe(vectors, "square", 1000, 0).observation
    with pytest.raises(NotApplicable, match="order 3 or 4"):
        TensorMethod().find(seen, stream(0))


def test_problems_are_told(digits):
    seen, _ = round_of(digits, 4, 0, width=512)
    noise = normal(seen.update.rows.shape, stream(0, "noise"))
    assert TensorMethod().find(without(seen, rows=noise), stream(0)).problem
    vectors = unit_vectors(1, 40, 0).expand(2, 40)
    twins = observe(vectors, "relu", 4000, 0).observation
    assert "fewer than 2" in TensorMethod().find(twins, stream(0)).problem


def test_same_generator_same_answer(digits):
    seen, _ = round_of(digits, 3, 0, width=512)
    assert isinstance(seen, Observation)
    a, b = (TensorMethod(fit=5).find(seen, stream(0)).vectors for _ in range(2))
    assert torch.equal(a, b)


def test_a_task_without_a_head_is_left_alone():
    task = Task.of(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
    assert TensorMethod().plant(task) is task
    assert torch.equal(
        TensorMethod().plant(small_task()).parameters, TensorMethod().plant(small_task()).parameters
    )


@pytest.mark.parametrize("field", ["random", "restarts"])
def test_settings_are_checked(field):
    with pytest.raises(ValueError, match=f"{field} is 0"):
        TensorMethod(**{field: 0})
    with pytest.raises(ValueError, match="fit is -1"):
        TensorMethod(fit=-1)
