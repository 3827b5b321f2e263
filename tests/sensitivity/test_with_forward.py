"""Directions that pass forward only: the formula, its law, its error, and where it does nothing."""

import pytest
import torch
from torch.func import jacrev

from leakbound import client, models
from leakbound.core import Task
from leakbound.data import load
from leakbound.engines import weight_changes
from leakbound.engines.plain_chain import ChainPasses
from leakbound.engines.sensitivity import sensitivity
from leakbound.engines.weight_changes import Forward
from leakbound.randomness import normal, stream

close = torch.testing.assert_close


def _inputs_jacobian(task, x, name):
    """(B, D, n): how the named layer's input moves with each image."""

    def inside(image):
        return client.layer_inputs(task, image[None], [name])[name][0]

    return torch.stack([jacrev(inside)(image).flatten(1) for image in x])


def _deltas(task, x, y, name, weight):
    """(B, O): the derivative of each example's own loss by the layer's output."""
    parts = []
    for image, label in zip(x, y, strict=True):
        grad = task.unflatten(client.gradient(task, image[None], label[None]))[weight]
        a = client.layer_inputs(task, image[None], [name])[name][0]
        parts.append(grad @ a / (a @ a))  # the gradient is d a^T
    return torch.stack(parts)


@pytest.mark.parametrize(("model", "name"), [("pooled", "6"), ("strided", "5"), ("mlp", "3")])
def test_the_values_are_the_formula_with_the_full_jacobian(small, model, name):
    task, (x, y), k, m = small.build(model), small.batch(3), 2, 5
    found = sensitivity(task, x, y, stream(5), estimator="with_forward", directions=k, forward=m)
    source = stream(5)
    drawn = torch.stack([normal(x.shape, source, like=x) for _ in range(m + k)]).flatten(2)
    weight = f"{name}.weight"
    shape, start, stop = next(row[1:] for row in task.layout if row[0] == weight)
    jacobian = small.jacobian(task, x, y)[start:stop] * len(x)
    full = torch.einsum("pbn,kbn->kbp", jacobian, drawn[m:]).square().mean(0)
    moved = torch.einsum("bdn,kbn->kbd", _inputs_jacobian(task, x, name), drawn).square()
    better = moved.mean(0) - moved[m:].mean(0)
    d2 = _deltas(task, x, y, name, weight).square()
    want = (full.view(-1, *shape) + d2[:, :, None] * better[:, None]).sum(0) / len(x) ** 2
    assert (want > 0).all()
    close(found.values[start:stop].view(shape), want)
    plain = sensitivity(task, x, y, source, directions=1).values
    assert found.estimator == "with_forward"
    assert plain.shape == found.values.shape
    close(found.gradient, client.gradient(task, x, y))


def test_the_first_linear_on_the_image_knows_how_its_input_moves(small):
    task, (x, y), k = small.build("mlp"), small.batch(3), 8
    found = sensitivity(task, x, y, stream(5), estimator="with_forward", directions=k, forward=3)
    source = stream(5)
    drawn = torch.stack([normal(x.shape, source, like=x) for _ in range(3 + k)]).flatten(2)[3:]
    jacobian = small.jacobian(task, x, y)[: 5 * 36] * len(x)
    full = torch.einsum("pbn,kbn->kbp", jacobian, drawn).square().mean(0).view(-1, 5, 36)
    d2 = _deltas(task, x, y, "1", "1.weight").square()
    want = (full + d2[:, :, None] * (1 - drawn.square().mean(0))[:, None]).sum(0) / len(x) ** 2
    live = want > 0
    close(found.values[: 5 * 36].view(5, 36)[live], want[live])


def test_no_value_falls_below_zero(small):
    task, (x, y) = small.build("mlp"), small.batch(3)
    settings = {"estimator": "with_forward", "directions": 1, "forward": 4}
    many = [sensitivity(task, x, y, stream(i), **settings) for i in range(10)]
    values, errors = (torch.stack([getattr(f, n) for f in many]) for n in ("values", "error"))
    assert (values >= 0).all()
    assert (values == 0).double().mean() < 0.02
    assert 0.01 < (values == errors).double().mean() < 0.1  # those that would have


def test_unbiased_and_its_error_is_the_empirical_one(small):
    values, errors, exact = small.draws(250, estimator="with_forward", directions=2, forward=4)
    assert small.worst_z(values, exact) < 4.5
    live = exact > 0
    ratio = errors.square().mean(0).sqrt()[live] / values.std(0)[live]
    assert 0.95 < float(ratio.median()) < 1.05
    assert float(ratio.min()) > 0.8
    assert float(ratio.max()) < 1.25
    assert small.worst_z(values * 1.2, exact) > 6


def test_a_wrong_share_is_rejected(small, monkeypatch):
    right = ChainPasses.forward_only

    def wrong(self, source, directions, forward):
        found = right(self, source, directions, forward)
        return {n: Forward(f.mean, 1.0, f.squares, f.fourths) for n, f in found.items()}

    monkeypatch.setattr(ChainPasses, "forward_only", wrong)
    values, _, exact = small.draws(250, estimator="with_forward", directions=2, forward=4)
    assert small.worst_z(values, exact) > 8


def test_it_varies_less_than_the_same_directions_alone(small):
    settings = {"name": "mlp", "estimator": "with_forward", "directions": 2, "forward": 8}
    values, _, exact = small.draws(200, **settings)
    task, (x, y) = small.build("mlp"), small.batch(3)
    plain = torch.stack(
        [sensitivity(task, x, y, stream(i), directions=2).values for i in range(200)]
    )
    live = exact > 0
    assert float((values.var(0) / plain.var(0))[live].median()) < 0.6


@pytest.mark.parametrize("name", ["reused", "group_norm"])
def test_other_models_get_per_sample_and_are_told(small, name):
    task, (x, y) = small.build(name), small.batch(3)
    found = sensitivity(task, x, y, stream(1), estimator="with_forward", directions=2)
    same = sensitivity(task, x, y, stream(1), directions=2)
    assert found.estimator == "per_sample"
    assert torch.equal(found.values, same.values)


def test_the_chunk_changes_nothing_but_rounding(small):
    task, (x, y) = small.build("pooled"), small.batch(3)
    found = [
        sensitivity(
            task, x, y, stream(1), estimator="with_forward", directions=3, forward=5, chunk=chunk
        )
        for chunk in (None, 1, 2, 4, 7)
    ]
    for other in found[1:]:
        close(other.values, found[0].values)
        close(other.gradient, found[0].gradient)
        # negative parts of a variance's estimate are cut block by block
        close(other.relative_error, found[0].relative_error, rtol=0.1, atol=0)


def test_pruned_weights_have_none_of_it(small):
    dense, (x, y) = small.build("pooled"), small.batch(3)
    kept = torch.rand(len(dense.parameters), generator=stream(0, "kept")) < 0.6
    found = sensitivity(dense.pruned(kept), x, y, stream(5), estimator="with_forward")
    for part in (found.values, found.error, found.gradient):
        assert not part[~kept].any()
    variance = found.error.square().sum()
    squares = found.values.square().sum() - variance
    assert found.relative_error == pytest.approx(float((variance / squares).sqrt()))


def test_a_count_below_one_is_refused(small):
    task, (x, y) = small.build("mlp"), small.batch(1)
    with pytest.raises(ValueError, match=r"forward is 0; give a whole number of at least 1"):
        sensitivity(task, x, y, stream(0), estimator="with_forward", forward=0)


def test_on_real_digits_one_direction_and_four_beat_three():
    model = models.simple_convnet(input_shape=(1, 28, 28), classes=10, generator=stream(0, "model"))
    task, digits = Task.of(model), load("mnist5k").batch(torch.arange(0, 5000, 312))
    x, y = digits.inputs, digits.labels
    truth = sensitivity(task, x, y, stream(9), directions=100).values

    def off(found):
        return float((found.values - truth).norm() / truth.norm())

    ours = sensitivity(task, x, y, stream(1), estimator="with_forward", directions=1)
    assert off(ours) < 0.95 * off(sensitivity(task, x, y, stream(1), directions=3))
    assert ours.relative_error == pytest.approx(off(ours), rel=0.15)


def test_the_error_is_the_variance_of_the_quadratic_forms():
    """One layer of a linear world, 40,000 times: its error squared against 2 |M|^2, exactly."""
    count, k, m, source = 40_000, 2, 3, stream(7, "linear world")
    like = torch.empty(0, dtype=torch.float64)
    a, d = normal((2,), source, like=like), normal((3,), source, like=like)
    moves_a, moves_d = normal((2, 4), source, like=like), normal((3, 4), source, like=like)
    ways = normal((k + m, count, 4), source, like=like)
    da, dd = ways @ moves_a.T, ways[:k] @ moves_d.T
    squares, share = da[k:].square(), k / (k + m)
    fourths = share**2 * squares.square().sum(0)
    forward = Forward(squares.mean(0), share, share * squares.sum(0), fourths)
    many = a.expand(count, 2), da[:k], d.expand(count, 3), dd
    power = weight_changes._outer_power(*many, forward).plus(forward.power(many[2]))
    z = moves_d[:, None] * a[None, :, None]  # (3, 2, 4): along v the change is (z + w) v
    w = d[:, None, None] * moves_a[None]

    def square(x):
        return x[..., :, None] * x[..., None, :]

    full = (square(z + w) - (1 - share) * square(w)) / k
    variance = 2 * (k * full.square().sum((2, 3)) + m * (square(w) / (k + m)).square().sum((2, 3)))
    close(power.norm.square() * (2 / 3) / k**2 / count, variance, rtol=0.04, atol=0)
    mean = square(z + w).diagonal(dim1=2, dim2=3).sum(-1)
    close(power.total / k / count, mean, rtol=0.04, atol=0)
