"""What is chosen from public data: against all batches by brute force, never from a client's."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch.func import functional_call, grad, jacrev
from torch.utils._python_dispatch import TorchDispatchMode

from leakbound.core import Batch, NotApplicable, Task
from leakbound.defenses import (
    Chain,
    GaussianNoise,
    LocalOptimalNoise,
    LocalOptimalPruning,
    OptimalDpSgd,
    OptimalNoise,
    OptimalPruning,
    WhitenedDpSgd,
    chain,
)
from leakbound.defenses import public as module
from leakbound.defenses.optimal import FixedNoise
from leakbound.defenses.public import PublicShape, expected, public_shape
from leakbound.engines.directions import BYTES
from leakbound.models import simple_convnet
from leakbound.protocol import play, resolve, send
from leakbound.randomness import normal, stream, uniform

close = torch.testing.assert_close


def _images(count, name="public"):
    draw = uniform((count, 1, 3, 4), stream(0, name), like=torch.zeros((), dtype=torch.float64))
    return Batch(draw, torch.arange(count) % 3)


def _repeated(few, times):
    return Batch(few.inputs.repeat(times, 1, 1, 1), few.labels.repeat(times))


def _gradient(task, x, y):
    def loss(flat):
        return task.loss(functional_call(task.model, task.unflatten(flat), (x,)), y)

    return grad(loss)(task.parameters)


def _jacobian(task, x, y):
    """(P, pixels of the whole batch)."""
    return jacrev(lambda images: _gradient(task, images, y))(x).flatten(1)


def _singles(task, few):
    """Exact sensitivity of every image's own gradient, (images, P)."""
    return torch.stack(
        [
            _jacobian(task, few.inputs[i : i + 1], few.labels[i : i + 1]).square().sum(1)
            for i in range(few.size)
        ]
    )


@pytest.fixture
def few():
    return _images(5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_expected_square_is_the_mean_over_all_batches(task, few, size):
    found = expected(replace(task, public=few), size, 64, None).g2
    subsets = [list(c) for c in itertools.combinations(range(5), size)]
    squares = [_gradient(task, few.inputs[c], few.labels[c]).square() for c in subsets]
    each = [_gradient(task, few.inputs[[i]], few.labels[[i]]).square() for i in range(5)]
    least = torch.stack(each).mean(0) / size  # what it is where gradients do not agree in sign
    wanted = torch.maximum(torch.stack(squares).mean(0), least)
    close(found, wanted)
    mean = _gradient(task, few.inputs, few.labels).square()
    assert not torch.allclose(found, mean, rtol=0.1)  # (E g)² is another quantity
    if size > 1:
        assert not torch.allclose(found, least, rtol=0.1)


def _worst(found, wanted, spread):
    live = wanted > 0
    assert bool((found[~live] == 0).all())
    return float(((found - wanted)[live] / spread[live]).abs().max())


@pytest.mark.parametrize("size", [1, 4])
def test_the_expected_sensitivity_is_the_mean_over_all_batches(task, few, size):
    """Each image stands there 400 times, for 400 random directions: the limit is known."""
    singles = _singles(task, few)
    subsets = [list(c) for c in itertools.combinations(range(5), size)]
    exact = torch.stack(
        [_jacobian(task, few.inputs[c], few.labels[c]).square().sum(1) for c in subsets]
    ).mean(0)
    public = _repeated(few, 400)
    found = expected(replace(task, public=public), size, public.size, None).s
    spread = (2 * singles.square().sum(0) / 400).sqrt() / (5 * size)  # of sums of w chi2_1
    assert _worst(found, exact, spread) < stats.norm.isf(1e-6)
    for wrong in (1.5 * found, found / 1.5, found * size / 5):
        assert _worst(wrong, exact, spread) > 6


def test_clamped_expectations_are_over_consecutive_batches(task, few):
    four, times, clamp = Batch(few.inputs[:4], few.labels[:4]), 150, 0.05
    pairs = [slice(0, 2), slice(2, 4)]
    gradients = [_gradient(task, four.inputs[p], four.labels[p]) for p in pairs]
    inside = [g.abs() < clamp for g in gradients]
    assert all(20 < int(i.sum()) < len(i) - 20 for i in inside)
    public = _repeated(four, times)
    found = expected(replace(task, public=public), 2, public.size, clamp)
    close(found.g2, torch.stack([g.clip(-clamp, clamp) ** 2 for g in gradients]).mean(0))
    moved = [
        _jacobian(task, four.inputs[p], four.labels[p]).square().sum(1) * i
        for p, i in zip(pairs, inside, strict=True)
    ]
    singles = _singles(task, four).reshape(2, 2, -1) / 4 * torch.stack(inside)[:, None]
    spread = (2 * singles.square().sum((0, 1)) / times).sqrt() / 2
    exact = torch.stack(moved).mean(0)
    assert _worst(found.s, exact, spread) < stats.norm.isf(1e-6)


def test_everyone_gets_the_same_numbers(task, few):
    one, two = (expected(replace(task, public=few), 2, 64, None) for _ in range(2))
    assert one is not two
    assert torch.equal(one.s, two.s)
    assert torch.equal(one.g2, two.g2)
    first = expected(replace(task, public=few), 2, 3, None)
    cut = expected(replace(task, public=Batch(few.inputs[:3], few.labels[:3])), 2, 64, None)
    assert torch.equal(first.s, cut.s)
    assert not torch.equal(first.s, one.s)


def test_a_task_without_public_data_is_not_applicable(task, batch):
    with pytest.raises(NotApplicable, match=r"Task\.of\(\.\.\., public="):
        expected(task, 2, 64, None)
    for correlation in ("layers", "low_rank"):
        with pytest.raises(NotApplicable):
            public_shape(PublicShape("energy", correlation=correlation), task, 2)
    with pytest.raises(NotApplicable):
        play(task, [batch], OptimalNoise(), [stream(0), stream(1)])


def _dense(covariance):
    return torch.diag(covariance) if isinstance(covariance, torch.Tensor) else covariance.dense()


SHAPES = [
    {},
    {"rule": "energy"},
    {"layers": True},
    {"clamp": 0.05},
    {"rule": "energy", "correlation": "layers"},
    {"rule": "energy", "correlation": "low_rank", "rank": 3},
]


@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_the_private_batch_does_not_change_the_covariance(task, few, settings):
    public = replace(task, public=few)
    laws = []
    for i, name in enumerate(("one", "two")):
        private = Batch((1 + 5 * i) * _images(3, name).inputs / 6, torch.tensor([i, i, 2]))
        sources = [stream(i, "client"), stream(i, "server")]
        laws.append(play(public, [private], OptimalNoise(noise_std=0.1, **settings), sources))
    first, second = (_dense(r.defense.links[0].covariance) for r in laws)
    assert torch.equal(first, second)
    assert float(first.diagonal().mean()) == pytest.approx(0.01, rel=1e-9)
    assert float(first.diagonal().std()) > 1e-4  # it is no plain noise
    another = OptimalNoise(noise_std=0.1, **settings).resolve(
        replace(task, public=_images(5, "other")), 3
    )
    assert not torch.allclose(_dense(another.covariance), first, rtol=0.01)


@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_every_shape_has_mean_variance_one_and_leaves_no_coordinate_bare(task, few, settings):
    flat = replace(task, public=Batch(0 * few.inputs, few.labels))  # no input weight has a gradient
    for public in (replace(task, public=few), flat):
        dense = _dense(public_shape(PublicShape(**settings), public, 2))
        assert float(dense.diagonal().mean()) == pytest.approx(1, rel=1e-9)
        assert float(torch.linalg.eigvalsh(dense).min()) > 0
        if "correlation" not in settings:
            assert float(dense.diagonal().min()) > 0.9e-4


def test_correlations_follow_the_public_moments(task):
    """At equal RMS, roots of E[J Jᵀ] as covariance leave less information than any diagonal."""
    few = _images(6)
    public = replace(task, public=_repeated(few, 60))
    jacobians = [
        _jacobian(task, few.inputs[i : i + 1], few.labels[i : i + 1]) for i in range(few.size)
    ]

    def trace(settings):
        dense = _dense(public_shape(PublicShape(**settings, images=360), public, 1))
        return sum(float((j * torch.linalg.solve(dense, j)).sum()) for j in jacobians) / 6

    diagonal, layers, low_rank = (trace(s) for s in (SHAPES[1], SHAPES[4], SHAPES[5]))
    moment = sum(j @ j.T for j in jacobians) / 6
    roots = torch.linalg.eigvalsh(moment).clamp_min(0).sqrt().sum()
    least = float(roots) ** 2 / len(moment)  # the optimum of all covariances of that trace
    assert least < layers < 0.65 * diagonal  # seen: .61
    assert least < low_rank < 0.55 * diagonal  # seen: .52; with A instead of its root .60
    assert diagonal < trace({"rule": "algorithm_1"})


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_one_or_two_public_images_are_enough_to_run(task, few, settings, images):
    public = replace(task, public=few)
    found = public_shape(PublicShape(**settings, images=images), public, 1)
    assert float(_dense(found).diagonal().mean()) == pytest.approx(1, rel=1e-6)


def _rounds(defense, task, count):
    """Resolve through rounds of a training whose weights move."""
    ready, found = None, []
    for i in range(count):
        step = 0.05 * i * normal(task.parameters.shape, stream(i, "step"), like=task.parameters)
        ready = resolve(defense, task.with_parameters(task.parameters + step), 2, ready)
        found.append(next(link for link in ready.links if isinstance(link, FixedNoise)).covariance)
    return found


@pytest.mark.parametrize("every", [1, 3])
def test_it_is_decided_anew_every_few_rounds(task, few, every, monkeypatch):
    calls = []
    real = module._expected

    def spy(*arguments):
        calls.append(arguments)
        return real(*arguments)

    for owner in ("leakbound.defenses.public", "leakbound.defenses.optimal"):
        monkeypatch.setattr(f"{owner}.expected", spy)
    public = replace(task, public=few)
    for defense in (
        OptimalNoise(refresh=every),
        chain(GaussianNoise(1e-3), OptimalNoise(refresh=every)),
    ):
        calls.clear()
        found = _rounds(defense, public, 7)
        assert len({id(a[0]) for a in calls}) == math.ceil(7 / every)
        changed = [not torch.equal(a, b) for a, b in itertools.pairwise(found)]
        assert changed == [i % every == 0 for i in range(1, 7)]


def _again(defense, task, of):
    """What `of` shows of the defense in seven rounds of a training whose weights move."""
    ready, found = None, []
    for i in range(7):
        moved = task.parameters * (1 + 0.2 * i)
        ready = resolve(defense, task.with_parameters(moved), 2, ready)
        found.append(of(ready))
    return [not torch.equal(a, b) for a, b in itertools.pairwise(found)]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_masks_and_whitening_are_kept_likewise(task, few, every):
    public, wanted = replace(task, public=few), [i % every == 0 for i in range(1, 7)]
    mask = _again(OptimalPruning(rate=0.5, refresh=every), public, lambda c: c.links[0].chosen.mask)
    assert mask == wanted

    def root(ready):
        whiten, *_, color = ready.links
        rows = normal((2, len(task.parameters)), stream(0), like=task.parameters)
        close(color.imitate(whiten.imitate(rows)), rows)  # both hold the same covariance
        return color.root.dense()

    assert _again(WhitenedDpSgd(correlation="layers", refresh=every), public, root) == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "enrgy"}, "energy"),
        ({"correlation": "layer"}, "layers"),
        ({"correlation": "layers"}, 'give the rule "energy"'),
        ({"rule": "energy", "correlation": "low_rank", "layers": True}, "without layers"),
        ({"rule": "energy", "correlation": "low_rank", "clamp": 1.0}, "and clamp"),
        ({"images": 0}, "images"),
        ({"rank": 0}, "rank"),
        ({"clamp": -1.0}, "clamp"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PublicShape(**arguments)
    with pytest.raises(ValueError, match=message):
        OptimalNoise(**arguments).resolve(Task.of(torch.nn.Linear(1, 1)), 1)


@pytest.mark.parametrize("factor", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("correlation", ["layers", "low_rank"])
def test_no_coordinate_gets_less_than_the_least_part(task, few, correlation, factor):
    """A small last layer makes the layers before it nearly, but not wholly, insensitive."""
    weights = task.parameters.clone()
    _, _, start, stop = task.layout[-2]
    weights[start:stop] *= factor
    public = replace(task.with_parameters(weights), public=few)
    found = public_shape(PublicShape("energy", correlation=correlation), public, 2)
    variance = found.diagonal
    assert float(variance.mean()) == pytest.approx(1, rel=1e-9)
    assert float(variance.min()) >= module.LEAST * (1 - 1e-9)
    if factor == 1e-9 and correlation == "layers":
        assert float(variance.min()) < 2 * module.LEAST  # the floor was needed


@pytest.mark.parametrize("defense", [OptimalNoise, OptimalPruning, WhitenedDpSgd])
def test_what_was_decided_for_another_batch_size_is_decided_anew(task, few, defense):
    public = replace(task, public=few)
    first = resolve(chain(defense(refresh=5)), public, 2).links
    for size, age in ((2, 1), (3, 0)):
        again = resolve(chain(defense(refresh=5)), public, size, Chain(first)).links
        assert (again[0].age, again[-1].age) == (age, age)
        assert again[0].examples == size


def test_clamped_batches_larger_than_the_public_data_are_refused(task, few):
    public = replace(task, public=few)
    expected(public, 5, 64, 0.1)
    expected(public, 6, 64, None)
    with pytest.raises(NotApplicable, match="give 6 public images and images=6, or no clamp"):
        expected(public, 6, 64, 0.1)


def test_moments_are_the_same_in_parts(task, few, monkeypatch):
    public, settings = replace(task, public=few), PublicShape("energy", correlation="layers")
    whole = public_shape(settings, public, 2)
    monkeypatch.setattr(module, "PART", 2)
    parts = module._public_shape(settings, public, 2)
    assert len(list(module._samples(settings, public))) == 3
    sample = torch.cat(list(module._samples(settings, public)))
    assert len(sample) == 5
    monkeypatch.setattr(module, "_samples", lambda *_: iter([sample]))
    close(parts.dense(), module._public_shape(settings, public, 2).dense())
    close(float(whole.diagonal.mean()), 1.0)


class _Largest(TorchDispatchMode):
    """Notes the most numbers of any tensor that is made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, torch.Tensor):
                # A view that repeats numbers holds no more than its storage.
                held = one.untyped_storage().nbytes() // one.element_size()
                self.most = max(self.most, held)
        return made


@pytest.mark.parametrize(
    "defense",
    [
        OptimalNoise(),
        OptimalNoise(error_floor=0.01),
        OptimalNoise(clamp=0.1),
        OptimalPruning(),
        LocalOptimalNoise(),
        OptimalDpSgd(),
        LocalOptimalPruning(),
    ],
)
def test_no_information_matrix_is_formed(defense):
    """No tensor holds more than the rows of one chunk: no J (P, m), and no J'J (m, m)."""
    size, side = 8, 24
    images = uniform((16, 3, side, side), stream(0, "color"))
    labels = torch.arange(16) % 3
    model = simple_convnet(input_shape=(3, side, side), classes=3, generator=stream(0, "model"))
    task = Task.of(model, public=Batch(images, labels))
    most = max(BYTES // 4, module.PART * len(task.parameters))
    inputs = images[:size].numel()
    assert inputs**2 > 10 * most
    assert inputs * len(task.parameters) > 10 * most
    with _Largest() as seen:
        ready = resolve(chain(defense), task, size)
        send(task, Batch(images[:size], labels[:size]), ready, stream(0))
    assert len(task.parameters) <= seen.most <= most


def test_it_is_decided_once_for_all_levels_and_attacks(task, few, monkeypatch):
    tasks = [replace(task, public=few, parameters=task.parameters + i) for i in range(5)]
    made, real = [], module._public_shape
    monkeypatch.setattr(module, "_public_shape", lambda *a: made.append(a) or real(*a))
    for level in (0.1, 0.2):
        for size in (1, 2):
            for own in tasks:
                OptimalNoise(level).resolve(own, size)
    assert len(made) == 2 * len(tasks)
