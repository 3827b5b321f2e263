"""The clamp of every coordinate, and what one example can change after it."""

import math

import pytest
import torch
from scipy import stats

from leakbound import simulate
from leakbound.audit.plan import build_defense
from leakbound.core import Batch, Gaussian, Guarantee, Task, Unit, Update
from leakbound.defenses import (
    Clip,
    ClipCoordinates,
    GaussianMechanism,
    GaussianNoise,
    Mean,
    OptimalDpSgd,
    chain,
)
from leakbound.protocol import resolve, send
from leakbound.randomness import stream
from leakbound.registry import Spec, build

close = torch.testing.assert_close


def _rows(rows, unit=Unit.CLIENT):
    rows = torch.tensor(rows, dtype=torch.float64)
    return Update(rows, unit, (1,) * len(rows))


def _sent(defense, update):
    return defense.transform(update, None, None, stream(0))[0]


def test_each_coordinate_by_hand():
    update = _rows([[0.2, -0.2, 3.0, -4.0, 0.5, math.inf, -math.inf, math.nan]])
    wanted = [[0.2, -0.2, 0.5, -0.5, 0.5, 0.5, -0.5, 0.0]]
    assert _sent(ClipCoordinates(0.5), update).rows.tolist() == wanted
    assert build("defense", "clip_coordinates", {"limit": 0.5}) == ClipCoordinates(0.5)


def test_it_is_not_a_clip_of_the_norm():
    update = _rows([[3.0, 1.0]])
    clamped, clipped = (_sent(one(1.0), update).rows[0] for one in (ClipCoordinates, Clip))
    close(clamped, torch.ones(2, dtype=torch.float64))
    close(clipped, update.rows[0] / 10**0.5)


@pytest.mark.parametrize(("unit", "factor"), [(Unit.EXAMPLE, 1), (Unit.CLIENT, 2)])
def test_the_bound_holds_and_is_attained(unit, factor):
    """A client's row may jump from one corner of the cube to the opposite one."""
    for d in (1, 9, 100):
        bound = _sent(ClipCoordinates(0.5), _rows([[1.0] * d], unit)).bound
        assert bound == pytest.approx(factor * 0.5 * d**0.5)
        other = -9.0 if factor == 2 else 0.0
        far, near = (
            _sent(ClipCoordinates(0.5), _rows([[value] * d], unit)).rows for value in (9.0, other)
        )
        assert float((far - near).norm()) == pytest.approx(bound)


def test_the_mechanism_after_it_has_noise_for_this_bound():
    example = chain(ClipCoordinates(0.5), Mean(), GaussianMechanism(2.0))
    assert example.guarantee is Guarantee.DIFFERENTIAL_PRIVACY
    update = _rows([[3.0] * 4, [1.0] * 4], Unit.EXAMPLE)
    law = _sent(example, update).law
    assert isinstance(law, Gaussian)
    assert law.covariance**0.5 == pytest.approx(2.0 * 0.5 * 4**0.5 / 2)


def test_the_comparator_of_optimal_dp_sgd():
    """Long version of paper A, section 3.4: the same clamp, with equal noise everywhere."""
    equal = chain(ClipCoordinates(0.01), GaussianNoise(0.1))
    assert equal.guarantee is Guarantee.KNOWN_NOISE
    layers = torch.nn.Flatten(), torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    model = torch.nn.Sequential(*layers)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.3, generator=stream(0, "weights"))
    batch = Batch(torch.rand(1, 1, 4, 4, generator=stream(0, "batch")), torch.tensor([2]))
    played = {}
    for name, one in {"equal": equal, "optimal": OptimalDpSgd(0.01, 0.1)}.items():
        played[name] = simulate(
            model, batch, defense=one, attack="inverting_gradients,steps=2"
        ).round.update
    variance = played["optimal"].law.variance
    assert played["equal"].law.variance == pytest.approx(0.01)
    assert float(variance.mean()) == pytest.approx(0.01, rel=1e-4)
    assert bool((variance == 0).any())  # a clamped coordinate gets none, so its sign is sent


def test_the_comparator_of_a_plan_sends_the_papers_formula():
    """Long version, section 3.4: y = clamp(g, -P, P) + N(0, e I), by autograd and 400 draws."""
    limit, std = 0.02, 0.05
    links = (
        Spec("clip_coordinates", (("limit", limit),)),
        Spec("gaussian_noise", (("noise_std", std),)),
    )
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.3, generator=stream(0, "weights"))
    inputs = torch.rand(2, 1, 4, 4, generator=stream(0, "batch"), dtype=torch.float64)
    labels = torch.tensor([2, 0])
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    slopes = torch.autograd.grad(loss, [*model.parameters()])
    plain = torch.cat([slope.flatten() for slope in slopes])
    wanted = torch.maximum(torch.minimum(plain, plain.new_tensor(limit)), -plain.new_tensor(limit))
    assert 0 < int((wanted != plain).sum()) < len(plain)
    task = Task.of(model)
    ready = resolve(build_defense(links), task, 2)
    batch = Batch(inputs, labels)
    sent = torch.cat([send(task, batch, ready, stream(i, "draw")).rows for i in range(400)])
    off = (sent - wanted) / std
    # The sum of squares of standard normal draws, and the means by coordinate.
    assert stats.chi2.cdf(float(off.square().sum()), off.numel()) == pytest.approx(0.5, abs=0.4999)
    means = off.mean(0) * len(off) ** 0.5
    assert stats.kstest(means.numpy(), "norm").pvalue > 1e-3
