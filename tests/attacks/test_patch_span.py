"""Several images behind a vision transformer, from spaces that hold their patches."""

import pytest
import torch
from torch import nn

import leakbound as lb
from leakbound import data, models
from leakbound.attacks import PatchSpan, patches
from leakbound.attacks.pace import Pace, noted
from leakbound.attacks.patches import _space
from leakbound.core import Batch, LocalPlan, NotApplicable, Task
from leakbound.randomness import stream
from leakbound.testing import check_attack

SIDE, SHAPE = 16, (3, 16, 16)


def vit(seed=0, **more):
    given = {"patch": 8, "width": 48, "layers": 2, **more}
    return models.vit(input_shape=SHAPE, classes=5, generator=stream(seed, "vit"), **given)


def photos(*indices):
    images = data.load("photos", size=SIDE).batch(torch.tensor(indices)).inputs
    return images, torch.arange(len(indices)) % 5


@pytest.mark.parametrize("count", [2, 3])
def test_photographs_are_exact(count):
    for seed in range(2):
        batch = photos(*range(seed, seed + count))
        found = lb.simulate(vit(seed), batch, attack="patch_span")
        assert min(found.scores) > 60
        assert found.assessment.problem is None


def test_labels_are_inferred_and_may_be_equal():
    images, _ = photos(2, 5)
    hidden = lb.ThreatModel(labels_known=False)
    found = lb.simulate(
        vit(), (images, torch.tensor([3, 3])), attack="patch_span", threat=hidden, classes=5
    )
    assert min(found.scores) > 60


@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_the_patches_lie_in_their_spaces(shift):
    model = vit()
    with torch.no_grad():
        model.blocks[0].before.bias += shift * torch.randn(48, generator=stream(0, "shift"))
        model.blocks[0].before.weight *= 1 + torch.rand(48, generator=stream(0, "scale"))
    images, labels = photos(1, 4)
    seen = lb.simulate(model, (images, labels), attack="patch_span", classes=5).round.observation
    task = seen.task.to("cpu", torch.float64)
    space = _space(task, seen.update.rows[0].double(), SHAPE, 2)
    assert space.basis.shape == (192, 4)
    cut = nn.functional.unfold(images.double(), 8, stride=8).transpose(1, 2) - space.base
    assert float((cut - cut @ space.basis @ space.basis.T).abs().max()) < 1e-3
    assert float(cut.abs().max()) > 0.1


def test_contract():
    given = {"input_shape": (1, 8, 8), "classes": 3, "width": 16, "layers": 1}
    task = Task.of(models.vit(generator=stream(0, "vit"), **given), classes=3)
    batch = Batch(torch.rand(2, 1, 8, 8, generator=stream(0, "pixels")), torch.tensor([0, 2]))
    check_attack(PatchSpan(steps=2, starts=1), task=task, batch=batch)


def test_noise_is_said():
    noise = "gaussian_noise,noise_std=1e-3"
    found = lb.simulate(vit(), photos(0, 1), attack=PatchSpan(starts=1), defense=noise)
    assert "of the update" in found.assessment.problem
    assert max(found.scores) < 30


def test_models_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        image_size=SIDE, patch_size=8, hidden_size=48, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=96, num_labels=5,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.ViTForImageClassification(config).eval()
    found = lb.simulate(model, photos(0, 3), attack="patch_span", classes=5)
    assert min(found.scores) > 60


def test_where_it_does_not_apply():
    plain = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.Flatten(), nn.Linear(32, 5))
    steps = {"plan": LocalPlan(3, 0.1)}
    for model, batch, more, words in (
        (vit(), photos(0), {}, "patch_inversion solves for one"),
        (vit(), photos(0, 1), steps, "not one gradient"),
        (vit(width=8), photos(0, 1), {}, "no small part of 8"),
        (plain, photos(0, 1), {}, "no trained linear layers see a norm"),
    ):
        with pytest.raises(NotApplicable, match=words):
            lb.simulate(model, batch, attack="patch_span", **more)
    with pytest.raises(NotApplicable, match="32 numbers are unknown"):
        lb.simulate(vit(), photos(0, 1), attack=PatchSpan(most=31))


def test_a_search_whose_time_is_over_computes_no_jacobian(monkeypatch):
    """It takes as many derivatives as numbers are unknown: the time is asked between its parts."""
    seen = lb.simulate(vit(), photos(0, 1), attack="patch_span,steps=1").round.observation
    monkeypatch.setattr(patches, "jvp", None)  # a call would fail
    with Pace(0.0):
        found = noted(PatchSpan()(seen, stream(0, "attack")))
    assert found.problem.startswith("stopped early")
    assert "of the update" in found.problem
