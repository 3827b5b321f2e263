"""One image behind a vision transformer, from its positions' gradients."""

import pytest
import torch
from torch import nn

import leakbound as lb
from leakbound import data, models
from leakbound.attacks import PatchInversion
from leakbound.core import Batch, LocalPlan, NotApplicable, Task
from leakbound.defenses import NoDefense
from leakbound.protocol import play
from leakbound.randomness import stream


def vit(seed=0, shape=(3, 16, 16), **more):
    return models.vit(input_shape=shape, classes=5, generator=stream(seed, "vit"), **more)


def image(seed, shape=(3, 16, 16)):
    draw = torch.rand((1, *shape), generator=torch.Generator().manual_seed(seed))
    return draw, torch.tensor([seed % 5])


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("heads", [1, 4])
def test_one_image_is_exact_at_any_depth(layers, heads):
    for seed in range(3):
        found = lb.simulate(
            vit(seed, layers=layers, heads=heads), image(seed), attack="patch_inversion"
        )
        assert found.scores[0] > 70
        assert found.assessment.problem is None


def test_fewer_patches_than_the_width():
    """Sixteen patches: 20 numbers for each suffice, 16 or 12 do not (norms take one direction)."""
    found = lb.simulate(vit(width=20), image(0), attack="patch_inversion")
    assert found.scores[0] > 50
    for width in (16, 12):
        mixed = lb.simulate(vit(width=width), image(0), attack="patch_inversion")
        assert f"have rank {width - 1}: patches are mixed" in mixed.assessment.problem
        assert mixed.scores[0] < 30


def test_the_patches_solve_the_layers_own_equations():
    """The gradient of the layer's weight is the slopes times the patches, cut by hand."""
    model, (x, y) = vit(), image(1)
    seen = {}
    model.patches.register_forward_hook(lambda _, args, out: seen.update(out=out))
    with torch.enable_grad():
        loss = nn.functional.cross_entropy(model(x), y)
        slope, weight = torch.autograd.grad(loss, [seen["out"], model.patches.weight])
    cut = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(16, -1)
    by_hand = slope.flatten(2)[0] @ cut
    torch.testing.assert_close(by_hand, weight.flatten(1), rtol=1e-4, atol=1e-6)


def test_local_steps_of_sgd_keep_it_exact():
    task = Task.of(vit(), classes=5, plan=LocalPlan(6, 0.5))
    x, y = image(2)
    sources = [stream(0, "a"), stream(0, "b")]
    seen = play(task, [Batch(x, y)], NoDefense(), sources).observation
    answer = PatchInversion()(seen, stream(0))
    assert float((answer.inputs - x).abs().max()) < 1e-2
    assert answer.problem is None


def test_noise_is_amplified_and_said():
    scores = [
        lb.simulate(
            vit(), image(3), attack="patch_inversion", defense=f"gaussian_noise,noise_std={noise}"
        )
        for noise in (1e-7, 1e-5, 1e-2)
    ]
    values = [found.scores[0] for found in scores]
    assert values[0] > values[1] > values[2]
    assert "noise" in scores[2].assessment.problem


@pytest.mark.parametrize(("size", "patch", "width"), [(32, 4, 192), (64, 16, 48)])
def test_models_of_transformers(size, patch, width):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        image_size=size, patch_size=patch, hidden_size=width, num_hidden_layers=3,
        num_attention_heads=4, intermediate_size=2 * width, num_labels=8,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.ViTForImageClassification(config).eval()
    batch = data.load("photos", size=size).batch(torch.tensor([5]))
    found = lb.simulate(model, batch, attack="patch_inversion", classes=8)
    assert found.scores[0] > 100


def test_pixels_of_eight_bits_are_exact_and_others_stay():
    """Rounded pixels replace the solution only where they explain the update as well."""
    pixels = data.load("photos", size=64).batch(torch.tensor([3])).inputs
    shifted = (pixels + 0.3 / 255).clamp(0, 1)
    model = vit(shape=(3, 64, 64), patch=8)
    for inputs, low, high in ((pixels, 140, 151), (shifted, 60, 120)):
        found = lb.simulate(model, (inputs, torch.tensor([1])), attack="patch_inversion")
        assert low < found.scores[0] < high
        assert found.assessment.problem is None


def test_where_it_does_not_apply():
    for model, batch, words in (
        (vit(), (torch.rand(2, 3, 16, 16), torch.tensor([0, 1])), "for one image"),
        (nn.Sequential(nn.Flatten(), nn.Linear(768, 5)), image(0), "cuts the image into patches"),
        (
            nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(), nn.Linear(128, 5)),
            image(0),
            "no trained positions",
        ),
    ):
        with pytest.raises(NotApplicable, match=words):
            lb.simulate(model, batch, attack="patch_inversion")
    with pytest.raises(ValueError, match="multiple of patch"):
        vit(patch=5)
