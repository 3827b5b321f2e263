"""What a search moves: pixels, a network's weights, a generator's latents."""

import pytest
import torch
from torch import nn

from leakbound.attacks import Gias, GradientMatching
from leakbound.attacks.gias import Generated, build
from leakbound.attacks.matching.images import DeepPrior, Pixels
from leakbound.core import NotApplicable, Task
from leakbound.randomness import normal, stream

LIKE = torch.zeros(())
TASK = Task.of(nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), input_range=(-1.0, 2.0))


class Disk(nn.Module):
    """A generator of the user's: one latent, the brightness."""

    latent = 1

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, latents):
        return (self.scale * latents).sigmoid()[:, :, None, None].expand(-1, 3, 8, 8)


def disk(input_shape):
    return Disk()


def wrong(input_shape):
    return nn.Identity()


def shade(input_shape):
    return lambda images: images.mean()


def test_pixels_are_clamped_in_place():
    images = Pixels(torch.tensor([[-1.0, 0.5, 3.0]]))
    images.settle((0.0, 1.0))
    assert images().tolist() == [[0.0, 0.5, 1.0]]
    assert images() is images.variables[0]


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 1, 28, 28), (2, 3, 33, 17)])
def test_a_deep_prior_draws_in_range_and_never_mixes_images(shape):
    prior = DeepPrior(shape, (-1.0, 2.0), 8, stream(0, "prior"), LIKE)
    images = prior()
    assert images.shape == shape
    assert bool(((images > -1) & (images < 2)).all())
    again = DeepPrior(shape, (-1.0, 2.0), 8, stream(0, "prior"), LIKE)
    assert torch.equal(again(), images)
    slopes = torch.autograd.grad(images[0].sum(), prior.variables)
    assert all(bool(torch.isfinite(s).all()) for s in slopes)
    assert sum(bool(s.any()) for s in slopes) == len(slopes)
    prior.noise[0] += 1
    assert torch.equal(prior()[1:], images[1:])
    assert not torch.equal(prior()[0], images[0])


def test_a_deep_prior_can_draw_a_photograph():
    """Its weights reach a real image by plain regression: 20 dB in 150 steps."""
    from skimage import data

    picture = torch.tensor(data.astronaut()[100:228:4, 160:288:4].copy()).float() / 255
    target = picture.permute(2, 0, 1)[None]
    prior = DeepPrior(tuple(target.shape), (0.0, 1.0), 32, stream(1, "prior"), LIKE)
    optimizer = torch.optim.Adam(prior.variables, lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        error = (prior() - target).square().mean()
        error.backward()
        optimizer.step()
    assert float(error.detach()) < 10**-2


def test_neither_touches_the_global_random_state():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    DeepPrior((1, 3, 8, 8), (0.0, 1.0), 8, stream(0, "prior"), LIKE)
    build("untrained", (3, 8, 8), TASK, stream(0, "prior"), 4)
    assert torch.equal(torch.get_rng_state(), before)


def test_small_images_and_records_take_no_prior():
    for shape in [(1, 10), (1, 3, 4, 4)]:
        with pytest.raises(NotApplicable, match="deep image prior needs images"):
            DeepPrior(shape, (0.0, 1.0), 8, stream(0, "prior"), LIKE)
    with pytest.raises(NotApplicable, match="generator of images needs"):
        build("untrained", (10,), TASK, stream(0, "prior"), 4)


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 28, 28), (3, 15, 10)])
def test_the_untrained_generator_fits_the_shape(shape):
    model = build("untrained", shape, TASK, stream(2, "prior"), 6)
    images = model(normal((2, 6), stream(3, "prior")))
    assert images.shape == (2, *shape)
    assert float(images.min()) > 0 < 1 > float(images.max())
    assert float(images.std()) > 0.01


def test_copies_of_the_weights_start_as_one_and_move_apart():
    model = build("untrained", (3, 8, 8), TASK, stream(4, "prior"), 6)
    latents = normal((2, 6), stream(5, "prior"))
    one = Generated(model, latents, (-1.0, 2.0), weights=False)
    each = Generated(model, latents, (-1.0, 2.0), weights=True)
    torch.testing.assert_close(one(), each())
    slopes = torch.autograd.grad(each()[0].sum(), each.variables)
    assert not any(bool(s[1].any()) for s in slopes)
    assert len(one.variables) == 1


def test_a_users_generator():
    name = f"{__name__}:disk"
    model = build(name, (3, 8, 8), TASK, stream(0, "prior"), 64)
    images = Generated(model, torch.zeros(2, 1), (-1.0, 2.0), weights=False)()
    assert torch.equal(images, torch.full((2, 3, 8, 8), 0.5))
    with pytest.raises(ValueError, match="returned Identity; return a torch"):
        build(f"{__name__}:wrong", (3, 8, 8), TASK, stream(0, "prior"), 4)
    with pytest.raises(ValueError, match="generator is 'nowhere:x', but there is no module"):
        build("nowhere:x", (3, 8, 8), TASK, stream(0, "prior"), 4)


def test_gias_finds_what_its_generator_can_draw(scene):
    """Uniformly gray images: the right generator finds them from the gradient alone."""
    task = Task.of(nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Sigmoid(), nn.Linear(8, 10)))
    batch = scene.batch(0)
    gray = torch.full((1, 3, 8, 8), 0.7)
    played = scene.play(task, type(batch)(gray, batch.labels))
    attack = Gias(f"{__name__}:disk", latent_steps=300, weight_steps=1, latent_rate=0.1)
    answer = attack(played.observation, stream(0, "gias"))
    assert float((answer.inputs - gray).abs().max()) < 1e-2
    assert answer.problem is None


def test_gias_keeps_the_start_of_lowest_objective_and_its_bits(scene):
    played = scene.play(scene.task("lenet"), scene.batch(0, 2))
    attack = Gias(latent_steps=3, weight_steps=3, restarts=2, latent=8)
    first, second = (attack(played.observation, stream(1, "gias")) for _ in range(2))
    assert torch.equal(first.inputs, second.inputs)
    assert first.inputs.shape == (2, 1, 28, 28)


def test_a_users_prior_moves_the_answer(scene):
    played = scene.play(scene.task("lenet"), scene.batch(0))
    plain = GradientMatching(steps=30)
    dark = GradientMatching(steps=30, prior=f"{__name__}:shade", prior_weight=10.0)
    answers = [float(a(played.observation, stream(0)).inputs.mean()) for a in (plain, dark)]
    assert answers[1] < answers[0] - 0.1


def test_later_settings_show_only_where_they_are_set():
    assert "image" not in repr(GradientMatching())
    assert "image='deep_prior'" in repr(GradientMatching(image="deep_prior"))
    assert repr(GradientMatching()) == (
        "GradientMatching(distance='cosine', total_variation=0.0, noise_variation=0.0, "
        "optimizer='adam', learning_rate=0.1, steps=1000, signed=True, schedule='step', "
        "initialization='normal', box=True, labels='told', enough=None)"
    )
