"""The other signs of a likely guess: each against a form of its own."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import nn

from leakbound.attacks import GradientMatching
from leakbound.attacks.features.base import FoundFeatures
from leakbound.attacks.matching.terms import (
    Penalty,
    SameFeatures,
    SameStatistics,
    Smooth,
    statistics,
    terms_for,
)
from leakbound.client import batch_norms, batch_statistics, layer_inputs
from leakbound.core import NotApplicable, Task
from leakbound.randomness import normal, stream, uniform

IMAGES = uniform((3, 1, 8, 8), stream(0, "terms"))


def _found(vectors, *, signed=True):
    return FoundFeatures(vectors / vectors.norm(dim=1, keepdim=True), "fc", signed)


def test_size_and_smoothness(scene):
    seen = scene.play(scene.task("mlp", hidden=(8,)), scene.batch(0, 1)).observation
    (small,) = terms_for(GradientMatching(size=1.0), seen, seen.task, None, stream(0))
    assert float(small(IMAGES, {})) == pytest.approx(float(((IMAGES.numpy() - 0.5) ** 2).mean()))
    assert float(Smooth(1.0)(torch.full((1, 1, 4, 4), 0.3), {})) == 0


def test_statistics_are_those_of_pytorchs_own_batch_norm():
    norm = nn.BatchNorm2d(1, momentum=1.0)
    norm(IMAGES)
    task = Task.of(nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 2)).eval())
    assert batch_norms(task) == ("0",)
    mean, variance = batch_statistics(task, IMAGES)["0"]
    torch.testing.assert_close(mean, norm.running_mean)
    biased = norm.running_var * (IMAGES.numel() - 1) / IMAGES.numel()
    torch.testing.assert_close(variance, biased)


def test_the_statistics_term_is_zero_at_the_truth_alone_and_weighs_the_first_norm():
    known = {"a": (torch.zeros(2), torch.ones(2)), "b": (torch.zeros(2), torch.ones(2))}
    x = normal((50, 2, 3, 3), stream(1, "terms"), like=torch.zeros((), dtype=torch.float64))
    values = x.numpy()
    off = np.linalg.norm(values.mean((0, 2, 3))) + np.linalg.norm(values.var((0, 2, 3)) - 1)
    found = SameStatistics(1.0, known, first=10.0)(x, {"a": x, "b": x})
    assert float(found) == pytest.approx(11 * off)
    own = {"a": (x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False))}
    assert float(SameStatistics(1.0, own)(x, {"a": x})) < 1e-9


@pytest.mark.parametrize("signed", [True, False])
def test_features_in_any_order_match(signed):
    vectors = normal((3, 5), stream(2, "terms"))
    flip = 1.0 if signed else -1.0
    term = SameFeatures(1.0, _found(flip * vectors[[2, 0, 1]], signed=signed))
    assert float(term(IMAGES, {"fc": 4 * vectors})) == pytest.approx(0, abs=1e-6)
    other = normal((3, 5), stream(3, "terms"))
    cosines = torch.nn.functional.cosine_similarity(
        other[:, None], term.features.vectors[None], dim=2
    ).numpy()
    likeness = cosines if signed else cosines**2
    best = max(np.mean([likeness[i, p[i]] for i in range(3)]) for p in permutations(range(3)))
    assert float(term(IMAGES, {"fc": other})) == pytest.approx(1 - best, abs=1e-6)


def test_the_span_forgets_which_is_which():
    vectors = normal((2, 6), stream(4, "terms")).double()
    mixed = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64) @ vectors
    term = SameFeatures(1.0, _found(vectors), "span")
    assert float(term(IMAGES, {"fc": mixed})) == pytest.approx(0, abs=1e-9)
    beside = normal((2, 6), stream(5, "terms")).double()
    span = np.linalg.svd(vectors.numpy(), full_matrices=False)[2]
    left = [1 - np.sum((span @ v) ** 2) / np.sum(v**2) for v in beside.numpy()]
    assert float(term(IMAGES, {"fc": beside})) == pytest.approx(np.mean(left), abs=1e-9)


@pytest.mark.parametrize(
    ("form", "examples", "expected"),
    [("best", 8, "cosine"), ("best", 9, "span"), ("span", 1, "span"), ("cosine", 9, "cosine")],
)
def test_the_best_form_is_the_span_from_nine_examples_on(scene, form, examples, expected):
    seen = scene.play(scene.task("mlp", hidden=(8,)), scene.batch(0, examples)).observation
    settings = GradientMatching(features="cocktail_party", feature_form=form)
    found = _found(normal((examples, 9), stream(6, "terms")))
    (term,) = terms_for(settings, seen, seen.task, found, stream(0))
    assert term.form == expected
    assert terms_for(settings, seen, seen.task, None, stream(0)) == []


def test_a_prior_returns_one_number():
    assert float(Penalty(1.0, lambda x: x.mean()[None])(IMAGES, {})) == float(IMAGES.mean())
    with pytest.raises(ValueError, match="returned no single number"):
        Penalty(1.0, lambda x: x)(IMAGES, {})


def test_which_statistics_the_attacker_has(scene):
    task = scene.task("resnet18", width=4, norm="batch")
    batch = scene.batch(0, 4)
    told = scene.play(task, batch, statistics_known=True).observation
    known = statistics("exact", told, task)
    for name, (mean, variance) in batch_statistics(task, batch.inputs).items():
        torch.testing.assert_close(known[name], (mean, variance))
    held = scene.play(task, batch).observation
    assert held.statistics is None
    with pytest.raises(NotApplicable, match="statistics_known is false"):
        statistics("exact", held, task)
    with pytest.raises(NotApplicable, match="no public images"):
        statistics("proxy", held, task)
    with pytest.raises(NotApplicable, match="no data has passed"):
        statistics("running", held, task)
    assert statistics("best", held, task) == {}
    public = replace(held, auxiliary=scene.batch(7, 20))
    proxy = statistics("best", public, task)
    torch.testing.assert_close(
        dict(proxy), batch_statistics(task, public.auxiliary.inputs), rtol=0, atol=0
    )
    passed = replace(task, buffers={k: v + 1 for k, v in task.buffers.items()})
    running = statistics("best", held, passed)
    assert torch.equal(running["1"][0], passed.buffers["1.running_mean"])
    plain = scene.task("lenet")
    assert statistics("exact", scene.play(plain, batch).observation, plain) == {}


def test_layer_inputs_are_what_enters():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 2))
    task = Task.of(model)
    found = layer_inputs(task, IMAGES, ["3", "1"])
    torch.testing.assert_close(found["3"], model[:3](IMAGES))
    torch.testing.assert_close(found["1"], IMAGES.flatten(1))
    assert not task.model[3]._forward_pre_hooks
    with pytest.raises(ValueError, match="no layer 'fc'"):
        layer_inputs(task, IMAGES, ["fc"])


def test_layer_inputs_of_a_layer_that_is_called_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x):
            return self.fc(self.fc(x.flatten(1)))

    with pytest.raises(ValueError, match="'fc' 2 times"):
        layer_inputs(Task.of(Twice()), IMAGES, ["fc"])
