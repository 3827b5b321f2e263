"""The linear trap against paper C's laws and gamma*, on real digits and on random directions."""

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from leakbound import data
from leakbound.attacks import ConstantImage, LinearTrap, MeanImage
from leakbound.attacks.trap import (
    TrapReading,
    bessel_ratio,
    max_success_estimate,
    shrinkage,
    sphere_mean,
)
from leakbound.bounds import from_scratch
from leakbound.client import example_gradients, gradient
from leakbound.core import (
    Batch,
    Gaussian,
    NotApplicable,
    Observation,
    Server,
    Task,
    ThreatModel,
    Unit,
    Update,
)
from leakbound.defenses import (
    ClipExamples,
    DpSgd,
    GaussianMechanism,
    GaussianNoise,
    GradientDropout,
    LocalAggregation,
    NoDefense,
    SecureAggregation,
    chain,
)
from leakbound.models import mlp
from leakbound.protocol import play
from leakbound.randomness import normal, stream
from leakbound.testing import check_attack
from leakbound.testing.common import small_batch, small_task
from leakbound_reproductions.mean_to_extreme.unbiased import unbiased_success

MALICIOUS = ThreatModel(server=Server.MALICIOUS)
WIDE = (-1000.0, 1000.0)


def task_of(shape, *, public=None, input_range=WIDE, dtype=torch.float32):
    model = mlp(input_shape=shape, classes=10, generator=stream(0, "model"), hidden=(8,))
    task = Task.of(model, classes=10, public=public, input_range=input_range)
    return task.to("cpu", dtype)


def seen_by(attack, task, batches, defense=None, seed=0, threat=MALICIOUS):
    batches = batches if isinstance(batches, list) else [batches]
    sources = [stream(seed, "trap", i) for i in range(len(batches) + 1)]
    return play(task, batches, defense or NoDefense(), sources, threat=threat, attack=attack)


def estimate(attack, task, batch, defense, seed=0):
    return attack.estimate(seen_by(attack, task, batch, defense, seed).observation)


def single(image):
    return Batch(image[None], torch.zeros(1, dtype=torch.long))


@pytest.fixture(scope="module")
def digits():
    images = data.load("mnist5k").inputs
    return images[torch.randperm(len(images), generator=stream(0, "digits"))[:300]]


@pytest.fixture(scope="module")
def task(digits):
    public = Batch(digits[150:], torch.zeros(150, dtype=torch.long))
    return task_of((1, 28, 28), public=public)


def errors(make, task, images, defense, norms=None):
    """Squared errors (n,) of one round for each image."""
    found = []
    for i, image in enumerate(images):
        attack = make(float(image.norm()))
        guess = estimate(attack, task, single(image), defense, seed=i)
        found.append(float((guess - image.flatten().double()).square().mean()))
    return np.array(found)


# what is planted


def test_every_row_of_the_gradient_is_the_input(task, digits):
    planted = LinearTrap(rows=5).plant(task)
    sent = gradient(planted, digits[:1], torch.tensor([3]))
    assert torch.equal(sent.view(5, 784), digits[0].flatten().expand(5, 784))
    assert [name for name, *_ in planted.layout] == ["layer.weight"]


def test_the_model_stays_beside_the_trap(task, digits):
    planted = LinearTrap(rows=3, inside=True, scale=2.0).plant(task)
    labels = torch.tensor([3, 1])
    sent = example_gradients(planted, digits[:2], labels)
    own = example_gradients(task, digits[:2], labels)
    torch.testing.assert_close(sent[:, 3 * 784 :], own)
    rows = sent[:, : 3 * 784].view(2, 3, 784)
    torch.testing.assert_close(rows, 2 * digits[:2].flatten(1)[:, None].expand(2, 3, 784))
    torch.testing.assert_close(gradient(planted, digits[:2], labels), sent.mean(0))


@pytest.mark.parametrize("estimator", ["optimal", "unbiased", "shrinkage", "division"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("steps", [None, 3])
def test_without_noise_the_answer_is_exact(task, digits, estimator, inside, steps):
    attack = LinearTrap(estimator, inside=inside, rows=4)
    defense = NoDefense() if steps is None else chain(LocalAggregation(steps, 0.1))
    seen = seen_by(attack, task, single(digits[0]), defense).observation
    answer = attack(seen, stream(0))
    torch.testing.assert_close(answer.inputs[0], digits[0], atol=1e-5, rtol=1e-5)
    assert answer.problem is None


# the laws


@pytest.mark.parametrize(
    ("clip_norm", "rows", "shrunk", "bias", "inside"),
    [
        (1.0, 1, 1.0, False, False),
        (1.0, 4, 1.0, False, False),
        (40.0, 4, 1.0, False, False),  # rows below (C / |X|)^2: no clipping, more noise
        (0.3, 4, 0.1, True, False),  # |X|^2 + 1
        (0.3, 4, 0.1, False, True),  # a norm sink
    ],
)
def test_the_unbiased_error_is_chi_square(task, digits, clip_norm, rows, shrunk, bias, inside):
    noise, images = 0.01, digits[:150] * shrunk
    found = errors(
        lambda r: LinearTrap("unbiased", rows=rows, bias=bias, inside=inside, norm=r),
        task,
        images,
        DpSgd(clip_norm, noise),
    )
    norms = images.flatten(1).double().norm(dim=1).numpy()
    rest = math.sqrt(rows) if bias else 0.0
    if inside:
        labels = torch.zeros(len(images), dtype=torch.long)
        rest = example_gradients(task, images, labels).double().norm(dim=1).numpy()
    level = from_scratch.effective_noise(
        noise, clip_norm=clip_norm, norm=norms, rows=rows, rest_norm=rest
    )
    assert np.all(level > 1.05 * noise) == (clip_norm == 40 or bias or inside)
    scores = found * 784 / (level * norms) ** 2
    assert stats.kstest(scores, stats.chi2(784).cdf).pvalue > 1e-3
    for wrong in (0.95, 1.05):
        assert stats.kstest(scores / wrong, stats.chi2(784).cdf).pvalue < 1e-6
    law = unbiased_success(level, dim=784, eta=found, norm=norms)
    assert stats.kstest(law, stats.uniform.cdf).pvalue > 1e-3


def test_where_nothing_is_clipped_the_scale_needs_no_norm(task, digits):
    images, noise, clip_norm, rows = digits[:100], 0.01, 40.0, 4
    found = errors(
        lambda r: LinearTrap("unbiased", rows=rows), task, images, DpSgd(clip_norm, noise)
    )
    scores = found * 784 / (clip_norm**2 * noise**2 / rows)
    assert stats.kstest(scores, stats.chi2(784).cdf).pvalue > 1e-3


def test_where_all_is_clipped_the_public_norms_stand_in(task, digits):
    usual = float(task.public.inputs.flatten(1).norm(dim=1).mean())
    image = digits[0]
    known = estimate(LinearTrap("unbiased", norm=usual), task, single(image), DpSgd(1.0, 0.01))
    guess = estimate(LinearTrap("unbiased"), task, single(image), DpSgd(1.0, 0.01))
    torch.testing.assert_close(guess, known, rtol=1e-2, atol=1e-3)
    direction = torch.nn.functional.cosine_similarity(guess[0], image.flatten().double(), 0)
    assert direction == pytest.approx(1 / math.sqrt(1 + 784 * 0.01**2), abs=0.01)


def spheres(dim, radius, count, seed=0):
    """Images of uniformly random direction, float64."""
    raw = normal((count, dim), stream(seed, "sphere"), like=torch.zeros((), dtype=torch.float64))
    return radius * raw / raw.norm(dim=1, keepdim=True)


def trials(estimator, truth, shape, noise, eta=None, rows=1):
    """MSE (n,) of every example of one round; each has its own clipped, noisy row."""
    radius = float(truth[0].norm())
    attack = LinearTrap(estimator, norm=radius, eta=eta, rows=rows, features=truth.shape[1])
    batch = Batch(truth.reshape(-1, *shape), torch.zeros(len(truth), dtype=torch.long))
    task = task_of(shape, dtype=torch.float64)
    defense = chain(ClipExamples(0.5 * radius), GaussianMechanism(noise))
    found = estimate(attack, task, batch, defense)
    return (found - truth).square().mean(1).numpy()


OTHERS = ("optimal", "unbiased", "shrinkage")


@pytest.mark.parametrize(
    ("shape", "noise", "share"),
    [
        ((1, 4, 4), 0.3, 0.6),
        ((1, 4, 4), 1.0, 0.9),
        ((1, 1, 1), 0.7, 0.5),
        ((1, 8, 8), 0.15, 0.5),
    ],
)
def test_gamma_is_reached_and_not_exceeded(shape, noise, share):
    dim, count, radius = math.prod(shape), 4000, 3.0
    eta = share * radius**2 / dim
    wanted = from_scratch.exact(noise, dim=dim, eta=eta, norm=radius)
    error = math.sqrt(wanted * (1 - wanted) / count)
    truth = spheres(dim, radius, count)
    reached = float((trials("gamma", truth, shape, noise, eta) <= eta).mean())
    assert reached == pytest.approx(wanted, abs=3 * error)
    for other in OTHERS:
        rate = float((trials(other, truth, shape, noise) <= eta).mean())
        assert rate <= wanted + 3 * error, other


@pytest.mark.parametrize(
    ("noise", "sphere", "shrunk", "plain"),
    [
        (0.005, 2.321e-5, 2.322e-5, 2.500e-5),
        (0.02, 1.794e-4, 1.795e-4, 4.000e-4),
        (0.1, 3.153e-4, 3.153e-4, 1.000e-2),
    ],
)
def test_mean_errors_in_a_color_image(noise, sphere, shrunk, plain):
    """Conventions, section 7; each mean of 200 trials has a relative standard error below 0.3 %."""
    shape, count = (3, 32, 32), 200
    truth = spheres(3072, 1.0, count)
    found = {name: trials(name, truth, shape, noise) for name in OTHERS}
    wanted = {"optimal": sphere, "shrinkage": shrunk, "unbiased": plain}
    for name, value in wanted.items():
        error = found[name].std() / math.sqrt(count)
        assert found[name].mean() == pytest.approx(value, abs=4 * error + 5e-4 * value), name
    assert shrunk == pytest.approx(noise**2 / (1 + 3072 * noise**2), rel=1e-3)


@pytest.mark.parametrize(("noise", "count"), [(0.1, 2000), (0.3, 10000), (1.0, 2000)])
def test_optimal_has_the_least_mean_error(noise, count):
    truth = spheres(16, 2.0, count)
    best = trials("optimal", truth, (1, 4, 4), noise)
    rest = [trials(name, truth, (1, 4, 4), noise) for name in ("unbiased", "shrinkage")]
    rest += [trials("gamma", truth, (1, 4, 4), noise, eta) for eta in (0.02, 0.1, 0.2)]
    for other in rest:
        gap = other - best
        assert gap.mean() > -3 * gap.std() / math.sqrt(len(gap))
    if noise == 0.3:  # where the two differ enough to tell
        assert (rest[1] - best).mean() > 3 * (rest[1] - best).std() / math.sqrt(len(best))


@pytest.mark.parametrize(("noise", "wins"), [(0.02, False), (0.06, True)])
def test_the_zero_image_beats_the_unbiased_estimate_under_much_noise(task, digits, noise, wins):
    """N noise^2 is 0.31 and 2.8."""
    images = digits[:10]
    plain = errors(lambda r: LinearTrap("unbiased", norm=r), task, images, DpSgd(1.0, noise))
    zero = []
    for image in images:
        seen = seen_by(ConstantImage(0.0), task, single(image), DpSgd(1.0, noise)).observation
        answer = ConstantImage(0.0)(seen, stream(0))
        zero.append(float((answer.inputs[0] - image).square().mean()))
    assert np.all((np.array(zero) < plain) == wins)


def test_division_has_heavy_tails(task, digits):
    noise, images = 0.02, digits[:40]
    ratio = errors(lambda r: LinearTrap("division"), task, images, DpSgd(1.0, noise))
    plain = errors(lambda r: LinearTrap("unbiased", norm=r), task, images, DpSgd(1.0, noise))
    assert np.median(ratio) > 2 * np.median(plain)
    assert ratio.max() > 20 * np.median(ratio)
    assert plain.max() < 2 * np.median(plain)


# what the attacker has to find out


def test_noise_of_an_unknown_defense_is_read_from_the_rows(task, digits):
    blind = ThreatModel(defense_known=False, server=Server.MALICIOUS)
    attack, noise = LinearTrap("shrinkage", rows=16, norm=float(digits[0].norm())), 2.0
    seen = seen_by(attack, task, single(digits[0]), GaussianNoise(noise), threat=blind)
    known = seen_by(attack, task, single(digits[0]), GaussianNoise(noise))
    torch.testing.assert_close(
        attack.estimate(seen.observation), attack.estimate(known.observation), rtol=0.05, atol=0
    )


def test_a_known_mask_and_unequal_rows_are_used(task, digits):
    attack = LinearTrap("unbiased", rows=16, norm=float(digits[0].norm()))
    seen = seen_by(attack, task, single(digits[0]), GradientDropout(0.3)).observation
    found = attack.estimate(seen)[0]
    assert int(seen.update.mask[0].view(16, 784).sum(0).min()) > 0
    cosine = torch.nn.functional.cosine_similarity(found, digits[0].flatten().double(), 0)
    assert cosine > 1 - 1e-6


def test_a_norm_that_shows_is_read_without_the_noise(task, digits):
    """Noise of 0.16 on each of 784 pixels adds 20 to |z|^2; |X|^2 is about 80."""
    found = []
    for seed, image in enumerate(digits[:10]):
        attack = LinearTrap("gamma", eta=1e-12, rows=1)
        guess = estimate(attack, task, single(image), GaussianNoise(0.16), seed)
        found.append(float(guess.norm() / image.norm()))
    assert np.mean(found) == pytest.approx(1.0, abs=0.02)


def test_unequal_noise_is_weighed(task, digits):
    """Row j has noise of variance v_j: the matched filter is left with 1 / sum(1 / v_j)."""
    attack, variances = LinearTrap("unbiased", rows=3, norm=1.0), torch.tensor([1.0, 0.04, 9.0])
    planted = attack.plant(task)
    clean = Update(gradient(planted, digits[:1], torch.tensor([0]))[None], Unit.CLIENT, (1,))
    found = []
    for seed in range(30):
        noisy = clean.noised(Gaussian(variances.repeat_interleave(784)), stream(seed, "unequal"))
        seen = Observation(
            noisy, planted, (1,), (1, 28, 28), MALICIOUS, defense=chain(GaussianNoise(1.0))
        )
        found.append(float((attack.estimate(seen)[0] - digits[0].flatten()).square().mean()))
    wanted = 1 / float((1 / variances).sum())
    assert np.mean(found) == pytest.approx(wanted, rel=4 * math.sqrt(2 / (30 * 784)))


def best_radius(noise, dim, eta, norms, count=20_000):
    """How often the best of many radii succeeds where the norm is one of these, by draws."""
    rng = np.random.default_rng(6)
    which, u = rng.choice(norms, count), rng.standard_normal((count, dim))
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    y = u + noise * rng.standard_normal((count, dim))
    y /= np.linalg.norm(y, axis=1, keepdims=True)
    radii, records = np.linspace(0, max(norms), 201), which[:, None] * u
    return max((((radius * y - records) ** 2).mean(1) <= eta).mean() for radius in radii)


def test_unknown_norms_cost_something_and_gain_nothing():
    count, noise, shape, eta = 2000, 0.3, (1, 4, 4), 0.225
    draw = torch.rand(count, generator=stream(0, "norms"), dtype=torch.float64)
    for spread in (0.02, 0.5):
        norms = 3 * (spread * (draw - 0.5)).exp()
        truth = spheres(16, 1.0, count) * norms[:, None]
        others = spheres(16, 1.0, 500, seed=1) * norms[:500, None]
        public = Batch(others.reshape(-1, *shape), torch.zeros(500, dtype=torch.long))
        task = task_of(shape, public=public, dtype=torch.float64)
        batch = Batch(truth.reshape(-1, *shape), torch.zeros(count, dtype=torch.long))
        defense = chain(ClipExamples(1.0), GaussianMechanism(noise))
        found = estimate(LinearTrap("gamma", eta=eta, rows=1), task, batch, defense)
        rate = float(((found - truth).square().mean(1) <= eta).double().mean())
        told = from_scratch.exact(noise, dim=16, eta=eta, norm=norms[:40].numpy()).mean()
        known = best_radius(noise, 16, eta, norms[:40].numpy())
        assert rate <= told + 3 * math.sqrt(told / count)
        assert known <= told + 0.01
        assert rate > 0.8 * known  # of the radius that succeeds most often


def test_several_examples_give_their_mean(task, digits):
    batch = Batch(digits[:3], torch.tensor([0, 1, 2]))
    attack = LinearTrap("optimal")
    answer = attack(seen_by(attack, task, batch).observation, stream(0))
    torch.testing.assert_close(answer.inputs, digits[:3].mean(0).expand(3, 1, 28, 28))
    assert answer.problem == "the answer is the mean of 3 inputs"
    clients = [single(image) for image in digits[:3]]
    seen = seen_by(attack, task, clients, SecureAggregation(3)).observation
    torch.testing.assert_close(attack(seen, stream(0)).inputs, answer.inputs)


def test_rows_of_single_examples_are_read_one_by_one(task, digits):
    batch = Batch(digits[:3], torch.tensor([0, 1, 2]))
    attack = LinearTrap("unbiased")
    seen = seen_by(attack, task, batch, chain(ClipExamples(1e4))).observation
    answer = attack(seen, stream(0))
    torch.testing.assert_close(answer.inputs, digits[:3])
    assert answer.problem is None


def test_who_it_is_not_for(task, digits):
    attack = LinearTrap()
    seen = seen_by(attack, task, single(digits[0]), threat=ThreatModel()).observation
    with pytest.raises(NotApplicable, match="server is honest"):
        attack(seen, stream(0))
    unknown = task_of((1, 28, 28))
    assert attack.plant(unknown) is unknown
    with pytest.raises(NotApplicable, match="give features"):
        attack(seen_by(attack, unknown, single(digits[0])).observation, stream(0))
    seen = seen_by(LinearTrap("unbiased"), task, single(digits[0])).observation
    with pytest.raises(NotApplicable, match="no bias"):
        LinearTrap("division")(seen, stream(0))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"estimator": "best"}, "estimator is 'best'"),
        ({"rows": 0}, "rows is 0"),
        ({"scale": -1.0}, "scale is -1"),
        ({"norm": 0.0}, "norm is 0"),
        ({"eta": 0.0}, "eta is 0"),
        ({"features": 0}, "features is 0"),
        ({"estimator": "gamma"}, "eta is None"),
    ],
)
def test_settings_are_checked(settings, words):
    with pytest.raises(ValueError, match=words):
        LinearTrap(**settings)


@pytest.mark.parametrize(
    ("estimator", "inside"),
    [("optimal", False), ("unbiased", True), ("shrinkage", False), ("gamma", True)],
)
def test_contract_on_a_single_image(estimator, inside):
    task = small_task()
    batch = small_batch(task)
    attack = LinearTrap(estimator, rows=2, eta=0.01, inside=inside)
    check_attack(attack, task=task, batch=Batch(batch.inputs[:1], batch.labels[:1]))


# the formulas


@pytest.mark.parametrize("dim", [1, 2, 3, 16, 784, 3072])
@pytest.mark.parametrize("concentration", [1e-8, 0.3, 100.0, 3e3])
def test_bessel_ratio(dim, concentration):
    with mpmath.workdps(40):
        order, k = mpmath.mpf(dim) / 2, mpmath.mpf(concentration)
        wanted = mpmath.besseli(order, k, maxterms=10**6) / mpmath.besseli(
            order - 1, k, maxterms=10**6
        )
    assert bessel_ratio(dim, concentration) == pytest.approx(float(wanted), rel=1e-9)


def test_bessel_ratio_limits():
    for k in (1e6, 1e9, 1e150, 1e300):
        assert bessel_ratio(1, k) == pytest.approx(1.0, rel=1e-9)
        assert 1 - bessel_ratio(3, k) == pytest.approx(1 / k, abs=1e-9)
    assert bessel_ratio(16, 1e-320) == pytest.approx(0.0, abs=1e-300)
    assert bessel_ratio(16, math.inf) == 1
    assert bessel_ratio(16, 0.0) == 0


@pytest.mark.parametrize("noise", [0.0, 1e-200, 1e200])
@pytest.mark.parametrize("norm", [0.0, 1e-160, 1.0, 1e160])
def test_extremes_give_the_right_limit(noise, norm):
    reading = TrapReading(torch.tensor([3.0, 4.0], dtype=torch.float64), 1.0, noise, norm)
    found = [shrinkage(reading), sphere_mean(reading), max_success_estimate(reading, 0.1)]
    assert all(bool(guess.isfinite().all()) for guess in found)
    nothing = norm == 0 or noise / norm > 1e30
    if nothing and noise:
        assert float(found[0].norm()) < 1e-20
        assert float(found[1].norm()) <= 1e-20 * norm
    elif norm:
        torch.testing.assert_close(found[1], norm * reading.mean / 5)


# guesses that see nothing


def test_blind_guesses(task, digits):
    seen = seen_by(MeanImage(), task, single(digits[0])).observation
    public = task.public.inputs
    mean = MeanImage()(seen, stream(0)).inputs[0]
    torch.testing.assert_close(mean, public.mean(0))
    flat = ConstantImage()(seen, stream(0)).inputs
    torch.testing.assert_close(flat, torch.full_like(flat, float(public.mean())))

    def error(guess):
        return float((guess - public).square().mean())

    for value in (float(public.mean()) - 0.01, float(public.mean()) + 0.01, 0.0):
        assert error(flat) < error(ConstantImage(value)(seen, stream(0)).inputs)
    assert error(mean) < error(flat)
    nobody = seen_by(MeanImage(), task_of((1, 28, 28)), single(digits[0])).observation
    for attack in (MeanImage(), ConstantImage()):
        with pytest.raises(NotApplicable, match="no public images"):
            attack(nobody, stream(0))
    with pytest.raises(ValueError, match="value is nan"):
        ConstantImage(math.nan)


def test_a_model_that_gives_no_logits_takes_no_trap_inside():
    model = nn.Sequential(nn.Conv2d(1, 2, 3))
    public = Batch(torch.rand(2, 1, 5, 5), torch.zeros(2, dtype=torch.long))
    planted = LinearTrap(inside=True).plant(Task.of(model, public=public))
    with pytest.raises(ValueError, match="inside=False"):
        gradient(planted, public.inputs, public.labels)
