"""The core types: what they refuse, what they keep, and what an observation cannot hold."""

import copy
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from torch import nn

from leakbound import models
from leakbound.client import forward, gradient
from leakbound.core import (
    Batch,
    Exact,
    Gaussian,
    Laplace,
    LocalPlan,
    NotApplicable,
    Observation,
    Task,
    ThreatModel,
    Unit,
    Unknown,
    Update,
)
from leakbound.randomness import stream

INPUTS, LABELS = torch.rand(2, 1, 8, 8, generator=stream(0)), torch.tensor([1, 0])


def _task(build="simple_convnet"):
    given = {"input_shape": (1, 8, 8), "classes": 3, "generator": stream(0)}
    return Task.of(getattr(models, build)(**given), classes=3)


def _update(rows, law=None, mask=None, unit=Unit.CLIENT):
    rows = torch.as_tensor(rows)
    return Update(rows, unit, (1,) * len(rows), law or Exact(), mask)


# Batch and LocalPlan


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (torch.zeros(3), torch.zeros(3), r"inputs has shape \(3,\); give a batch of examples"),
        (torch.zeros(0, 1, 2, 2), torch.zeros(0), "inputs holds no example"),
        (torch.zeros(2, 1, 2, 2), torch.zeros(3), "2 examples and labels 3; give one label"),
    ],
)
def test_batch_refuses(inputs, labels, message):
    with pytest.raises(ValueError, match=message):
        Batch(inputs, labels)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps is 0; give at least 1 local step"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"learning_rate": float("inf")}, "learning_rate is inf"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"batch_size": 0}, "batch_size is 0; give at least 1"),
    ],
)
def test_local_plan_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        LocalPlan(**settings)


# Task


def _flat(*layers):
    return nn.Sequential(nn.Flatten(), *layers)


def _nan():
    model = nn.Linear(2, 2)
    nn.init.constant_(model.bias, float("nan"))
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.InstanceNorm2d(1, affine=True, track_running_stats=True), "InstanceNorm2d in training"),
        (_flat(nn.Linear(4, 4), nn.Dropout(0.5)), "dropout in training mode.*hidden_dropout"),
        (_flat(nn.Linear(4, 4), nn.AlphaDropout(0.5)), "dropout in training mode"),
        (_flat(nn.ReLU()), "model has no parameters"),
        (_nan(), "weights that are not finite"),
    ],
)
def test_task_refuses_models(model, message):
    with pytest.raises(ValueError, match=message):
        Task.of(model)


@pytest.mark.parametrize("bounds", [(1.0, 0.0), (0.0, 0.0), (float("nan"), 1.0)])
def test_task_refuses_an_empty_input_range(bounds):
    with pytest.raises(ValueError, match="give \\(low, high\\) with low < high"):
        Task.of(nn.Linear(2, 2), input_range=bounds)


def test_task_takes_eval_mode_and_dropout_of_rate_zero():
    Task.of(_flat(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval())
    Task.of(_flat(nn.Linear(4, 4), nn.Dropout(0.0), nn.InstanceNorm1d(4)))


@pytest.mark.parametrize("build", ["mlp", "lenet", "simple_convnet", "resnet18"])
def test_layout_and_unflatten_give_the_modules_tensors(build):
    given = {"input_shape": (1, 8, 8), "classes": 3, "generator": stream(0)}
    model = getattr(models, build)(**given)
    task = Task.of(model)
    named = dict(model.named_parameters())
    assert [name for name, *_ in task.layout] == list(named)
    parts = task.unflatten(task.parameters)
    assert all(torch.equal(parts[name], named[name]) for name in named)
    assert torch.equal(torch.cat([p.flatten() for p in parts.values()]), task.parameters)
    stops = [stop for *_, stop in task.layout]
    assert [start for *_, start, _ in task.layout] == [0, *stops[:-1]]
    assert stops[-1] == len(task.parameters)


def test_later_changes_of_the_module_do_not_matter():
    model = _flat(nn.Linear(64, 3), nn.BatchNorm1d(3)).eval()
    task = Task.of(model)
    before, weights = gradient(task, INPUTS, LABELS), task.parameters.clone()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    model.train()
    assert torch.equal(task.parameters, weights)
    assert torch.equal(gradient(task, INPUTS, LABELS), before)


def test_the_task_leaves_the_users_module_alone():
    model = _flat(nn.Linear(64, 3))
    Task.of(model)
    assert model.training
    assert all(p.requires_grad for p in model.parameters())


def test_with_parameters():
    task = _task()
    moved = task.with_parameters(task.parameters * 2)
    assert torch.equal(moved.parameters, 2 * task.parameters)
    assert not torch.equal(forward(moved, INPUTS), forward(task, INPUTS))
    with pytest.raises(ValueError, match=r"parameters has shape \(3,\); this model takes \("):
        task.with_parameters(torch.zeros(3))


def test_to_another_type():
    model = _flat(nn.Linear(64, 3), nn.BatchNorm1d(3)).eval()
    task = Task.of(model)
    wide = task.to("cpu", torch.float64)
    assert wide.parameters.dtype == torch.float64
    assert wide.buffers["2.running_var"].dtype == torch.float64
    assert wide.buffers["2.num_batches_tracked"].dtype == torch.int64
    assert task.parameters.dtype == torch.float32
    found = gradient(wide, INPUTS.double(), LABELS)
    torch.testing.assert_close(found.float(), gradient(task, INPUTS, LABELS))
    assert task.to("cpu").parameters.dtype == torch.float32


def test_batch_norm_in_training_mode_takes_the_statistics_of_the_batch():
    model = _flat(nn.Linear(64, 3), nn.BatchNorm1d(3))
    task, still = Task.of(model), Task.of(copy.deepcopy(model).eval())
    assert (task.coupled, still.coupled, sorted(task.buffers)) == (True, False, [])
    loss = nn.functional.cross_entropy(model(INPUTS), LABELS)
    loss.backward()
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(gradient(task, INPUTS, LABELS), wanted)
    assert not torch.allclose(gradient(still, INPUTS, LABELS), wanted)
    assert Task.of(model).buffers == {}
    assert model[2].running_mean is not None


# Update


def test_update_names_its_rows():
    with pytest.raises(ValueError, match=r"rows has shape \(2, 3\) and examples names 1 rows"):
        Update(torch.zeros(2, 3), Unit.CLIENT, (1,))
    with pytest.raises(FrozenInstanceError):
        _update([[1.0]]).unit = Unit.COHORT


def test_scaling_moves_law_and_bound():
    update = replace(_update([[2.0, 4.0]], Gaussian(9.0)), bound=6.0).scaled(-0.5)
    assert update.rows.tolist() == [[-1.0, -2.0]]
    assert (update.law.covariance, update.bound) == (2.25, 3.0)
    assert _update([[1.0]], Laplace(2.0)).scaled(-3.0).law.scale == 6.0


@pytest.mark.parametrize("noise", [Gaussian(0.25), Laplace(0.5), Gaussian(torch.tensor([1.0, 0]))])
def test_noise_has_its_declared_law(noise):
    plain = _update(torch.zeros(20_000, 2))
    update = plain.noised(noise, stream(0, "noise"))
    wanted = noise.covariance if isinstance(noise, Gaussian) else 2 * noise.scale**2
    found = update.rows.var(0)
    torch.testing.assert_close(found, torch.as_tensor(wanted).expand(2), rtol=0.05, atol=0)
    assert type(update.law) is type(noise)


def test_tiny_noise_is_not_lost():
    update = _update([[0.0] * 100]).noised(Gaussian(1e-48), stream(0))
    assert float(update.rows.std()) == pytest.approx(1e-24, rel=0.3)


def test_noise_over_a_mask_hides_it():
    mask = torch.tensor([[True, False]])
    update = _update([[1.0, 2.0]]).masked(mask, by_value=False)
    assert update.rows.tolist() == [[1.0, 0.0]]
    noisy = update.noised(Gaussian(1.0), stream(0))
    assert noisy.mask is None
    assert bool((noisy.rows != 0).all())


def test_masks_join_and_masks_by_value_are_private():
    first, second = torch.tensor([[True, True, False]]), torch.tensor([[True, False, True]])
    update = _update([[1.0, 2.0, 3.0]]).masked(first, by_value=False)
    assert not update.law.private
    update = update.masked(second, by_value=True)
    assert update.mask.tolist() == [[True, False, False]]
    assert update.law.private
    noisy = _update([[1.0, 2.0, 3.0]], Gaussian(1.0))
    assert isinstance(noisy.masked(first, by_value=True).law, Unknown)
    assert isinstance(noisy.masked(first, by_value=False).law, Gaussian)


def test_sums_add_variances_of_what_was_sent():
    mask = torch.tensor([[True, True], [True, False], [True, False]])
    rows = torch.arange(6.0).reshape(3, 2)
    total = _update(rows, Gaussian(2.0)).masked(mask, by_value=False).summed(Unit.COHORT)
    assert total.rows.tolist() == [[6.0, 1.0]]
    assert total.law.covariance.tolist() == [6.0, 2.0]
    assert (total.unit, total.examples) == (Unit.COHORT, (3,))
    assert isinstance(_update(rows, Laplace(1.0)).summed(Unit.COHORT).law, Unknown)
    assert isinstance(_update(rows[:1], Laplace(1.0)).summed(Unit.COHORT).law, Laplace)


def test_laws_add_up_or_become_unknown():
    source = stream(0)
    twice = _update([[0.0]]).noised(Gaussian(1.0), source).noised(Gaussian(2.0), source)
    assert twice.law.covariance == 3.0
    assert isinstance(twice.noised(Laplace(1.0), source).law, Unknown)
    private = _update([[0.0]], Exact(private=True)).noised(Gaussian(1.0), source)
    assert private.law.private


def test_other_functions_of_the_rows_end_a_noise_law():
    law = _update([[1.0]], Gaussian(1.0)).opaque(torch.ones(1, 1), "rounded").law
    assert (law.reason, law.private) == ("rounded", True)
    assert isinstance(_update([[1.0]]).opaque(torch.ones(1, 1), "rounded").law, Exact)


def test_stack():
    a, b = _update([[1.0, 2.0]], Gaussian(1.0)), _update([[3.0, 0.0]], Gaussian(1.0))
    b = replace(b, mask=torch.tensor([[True, False]]))
    both = Update.stack([a, b])
    assert both.rows.tolist() == [[1.0, 2.0], [3.0, 0.0]]
    assert both.mask.tolist() == [[True, True], [True, False]]
    assert both.law.covariance == 1.0
    assert isinstance(Update.stack([a, _update([[0.0, 0.0]], Laplace(1.0))]).law, Unknown)
    for other in (Gaussian(2.0), Gaussian(torch.tensor([2.0, 2.0]), private=True)):
        law = Update.stack([a, _update([[0.0, 0.0]], other)]).law
        assert law.covariance.tolist() == [[1.0, 1.0], [2.0, 2.0]]
        assert law.private is other.private
    assert Update.stack([a, a]).mask is None


# Observation


def _observation(update, **threat):
    task = Task.of(nn.Linear(1, 1))
    return Observation(update, task, (1,), (1,), ThreatModel(**threat))


def test_an_observation_has_no_field_for_the_truth():
    names = {field.name for field in fields(Observation)}
    told = {"update", "task", "cohort", "input_shape", "threat", "labels", "auxiliary", "defense"}
    assert names == told | {"statistics", "sent", "history", "known", "layer_rates"}
    assert {f.name for f in fields(Update)} == {
        "rows", "unit", "examples", "law", "mask", "bound", "drawn",
        "mask_private", "spread_public",
    }  # fmt: skip


@pytest.mark.parametrize("law", [Exact(), Gaussian(4.0), Laplace(2.0), Unknown("x")])
def test_equal_noise_needs_no_weights(law):
    assert _observation(_update([[1.0, 2.0]], law)).weights is None


@pytest.mark.parametrize("law", [Exact(), Gaussian(4.0), Unknown("x")])
def test_weights_of_a_mask(law):
    update = _update([[1.0, 0.0]], law, torch.tensor([[True, False]]))
    assert _observation(update).weights.tolist() == [[1.0, 0.0]]
    assert _observation(update, defense_known=False).weights is None


def test_weights_are_one_over_the_spread():
    update = _update([[1.0, 2.0]], Gaussian(torch.tensor([4.0, 16.0])))
    assert _observation(update).weights.tolist() == [[1.0, 0.5]]
    assert _observation(update, defense_known=False).weights is None
    laplace = _update([[1.0, 2.0]], Laplace(torch.tensor([4.0, 1.0])))
    assert _observation(laplace).weights.tolist() == [[0.25, 1.0]]
    rows = _update([[1.0, 2.0], [3.0, 4.0]], Gaussian(torch.tensor([4.0, 16.0])))
    assert _observation(rows).weights.tolist() == [[1.0, 0.5], [1.0, 0.5]]


def test_weights_of_coordinates_without_noise():
    weights = _observation(_update([[1.0, 2.0, 3.0]], Gaussian(torch.tensor([0.0, 4, 16])))).weights
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1e-3, 5e-4]]))
    none = _observation(_update([[1.0, 2.0]], Gaussian(torch.zeros(2)))).weights
    assert none.tolist() == [[1.0, 1.0]]


def test_a_withheld_coordinate_without_noise_does_not_shrink_the_others():
    update = _update(
        [[1.0, 0.0]], Gaussian(torch.tensor([4.0, 0.0])), torch.tensor([[True, False]])
    )
    assert _observation(update).weights.tolist() == [[1.0, 0.0]]
    nothing = replace(update, mask=torch.tensor([[False, False]]))
    assert _observation(nothing).weights.tolist() == [[0.0, 0.0]]


def test_noise_share():
    rows = [[3.0, 4.0]]
    assert _observation(_update(rows, Gaussian(1.0))).noise_share == pytest.approx(2 / 25)
    assert _observation(_update(rows, Laplace(1.0))).noise_share == pytest.approx(4 / 25)
    assert _observation(_update(rows, Gaussian(1e6))).noise_share == 1
    whitened = _update(rows, Gaussian(torch.tensor([1.0, 4.0])))
    assert _observation(whitened).noise_share == pytest.approx((1 + 1) / (9 + 4))
    masked = _update([[3.0, 0.0]], Gaussian(1.0), torch.tensor([[True, False]]))
    assert _observation(masked).noise_share == pytest.approx(1 / 9)
    for law in (Exact(), Unknown("x")):
        assert _observation(_update(rows, law)).noise_share == 0
    assert _observation(_update(rows, Gaussian(1.0)), defense_known=False).noise_share == 0
    assert _observation(_update([[0.0, 0.0]], Gaussian(1.0))).noise_share == 0


def test_sizes_of_the_reconstruction():
    seen = replace(_observation(_update([[1.0]])), cohort=(2, 3), input_shape=(1, 4, 5))
    assert seen.examples == 5
    assert seen.batch_shape == (5, 1, 4, 5)


def test_not_applicable_keeps_its_reason():
    assert NotApplicable("no linear layer").reason == "no linear layer"
    assert Unit.EXAMPLE.noun == "example"
