"""Searches in step: each as alone, to the bit; and steps by an engine as autograd has them."""

import statistics
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from leakbound import data, models
from leakbound.attacks import (
    Attack,
    BestOf,
    ByNoise,
    FedAvgMatching,
    GradientMatching,
    inverting_gradients,
    published_inverting_gradients,
    strong_matching,
)
from leakbound.attacks.across_rounds import AcrossRounds
from leakbound.attacks.matching import engine
from leakbound.attacks.matching.engine import Evaluator
from leakbound.attacks.matching.loop import TRACE_POINTS, WIDTH, Loop, solve
from leakbound.attacks.mixed_start import MixedStart
from leakbound.core import Batch, LocalPlan, NotApplicable, Task, ThreatModel
from leakbound.defenses import (
    Clip,
    ClipExamples,
    Defense,
    DpSgd,
    GaussianNoise,
    GradientDropout,
    LaplaceNoise,
    MagnitudePruning,
    Mean,
    NoDefense,
    OptimalNoise,
    Quantization,
    SecureAggregation,
    Sign,
    TopK,
    Withhold,
    chain,
)
from leakbound.protocol import play
from leakbound.randomness import stream

DIGITS = data.load("digits")
SHAPE = (1, 8, 8)
SHORT = GradientMatching(total_variation=1e-4, noise_variation=0.04, steps=6)


def _pooled(input_shape, classes, generator):
    """A chain with max pools and odd sides."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator.initial_seed() % 2**31)
        return nn.Sequential(
            nn.Conv2d(1, 5, 3, padding=1),
            nn.LeakyReLU(0.1),
            nn.MaxPool2d(2),
            nn.Conv2d(5, 7, 3, padding=1),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(7 * 4 * 4, classes),
        )


def _normed(input_shape, classes, generator):
    """A network with batch norms that saw something."""
    model = models.resnet18(
        input_shape=input_shape, classes=classes, generator=generator, width=4, norm="batch"
    )
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
    return model


MODELS = {
    "mlp": (models.mlp, {"hidden": (32,), "activation": "sigmoid"}),
    "pooled": (_pooled, {}),
    "normed": (models.headed, {"width": 16, "features": 8}),
    "batch_norm": (_normed, {}),
}


def _task(model="mlp", seed=0, dtype=torch.float32, **more):
    build, options = MODELS[model]
    built = build(input_shape=SHAPE, classes=10, generator=stream(seed, "model"), **options)
    return Task.of(built, classes=10, **more).to("cpu", dtype)


def _see(task, seed=0, size=1, defense=None, **threat):
    """A round of a task on digits."""
    defense = chain(defense) if defense else NoDefense()
    count = defense.cohort_size
    order = torch.randperm(1797, generator=stream(seed, "batch"))[: size * count]
    inputs = DIGITS.inputs.to(task.parameters.dtype)
    clients = [Batch(inputs[at], DIGITS.labels[at]) for at in order.split(size)]
    sources = [stream(seed, "defense", i) for i in range(count + 1)]
    return play(task, clients, defense, sources, threat=ThreatModel(**threat)).observation


def _public(task):
    inputs = DIGITS.inputs[-64:].to(task.parameters.dtype)
    return replace(task, public=Batch(inputs, DIGITS.labels[-64:]))


def _same(found, wanted):
    assert torch.equal(found.inputs, wanted.inputs)
    assert (found.labels is None) == (wanted.labels is None)
    assert found.labels is None or torch.equal(found.labels, wanted.labels)
    assert repr(found.objective) == repr(wanted.objective)
    assert list(map(repr, found.trace)) == list(map(repr, wanted.trace))
    assert (found.problem, found.layer) == (wanted.problem, wanted.layer)
    assert (found.features is None) == (wanted.features is None)
    assert found.features is None or torch.equal(found.features, wanted.features)


def _many_is_each_alone(attack, observations):
    sources = [stream(i, "attack") for i in range(len(observations))]
    together = attack.many(observations, sources)
    assert len(together) == len(observations)
    for i, (observation, answer) in enumerate(zip(observations, together, strict=True)):
        (alone,) = attack.many([observation], [stream(i, "attack")])
        _same(answer, alone)
    return together


ATTACKS = {
    "inverting_gradients": inverting_gradients(6),
    "geiping_cli": published_inverting_gradients(steps=6),
    "restarts": inverting_gradients(4, restarts=3),
    "enough": BestOf(GradientMatching(steps=4, enough=0.5), 3, enough=0.6),
    "strong": strong_matching(6),
    "unsigned": GradientMatching("euclidean", steps=5, signed=False, schedule="cosine", box=False),
    "layers": GradientMatching("cosine_layers", steps=5, initialization="uniform"),
    "joint": GradientMatching("euclidean", steps=5, labels="joint", signed=False),
    "size": GradientMatching(steps=5, size=0.1, total_variation=0.1),
    "deep_prior": GradientMatching(steps=3, image="deep_prior", width=4),
    "lbfgs": GradientMatching("euclidean", optimizer="lbfgs", steps=2, signed=False),
}


@pytest.mark.parametrize(
    ("name", "model"),
    [*((name, "pooled") for name in ATTACKS), *((name, "mlp") for name in ("strong", "joint"))],
)
def test_many_is_each_alone(name, model):
    """Different weights, images and noise."""
    defenses = [None, GaussianNoise(1.0), LaplaceNoise(0.01)]
    seen = [_see(_task(model, i), i, defense=defense) for i, defense in enumerate(defenses)]
    _many_is_each_alone(ATTACKS[name], seen)


@pytest.mark.parametrize("model", ["pooled", "normed"])
def test_many_of_different_kinds(model):
    """Whoever cannot go along goes alone, and all come back in order."""
    task = _task(model)
    seen = [
        _see(task, 0),
        _see(task, 1, defense=MagnitudePruning(0.5)),
        _see(task, 2, defense=GradientDropout(1.0)),
        _see(task, 3, size=2),
        _see(task, 4, size=2, defense=DpSgd(1.0, 0.1)),
        _see(task, 5, size=2, defense=DpSgd(1.0, 0.2)),
        _see(_task(model, plan=LocalPlan(2, 0.1)), 6),
        _see(task, 7, defense=SecureAggregation(2)),
        _see(task, 8, defense=SecureAggregation(2)),
        _see(task, 9, size=4, defense=DpSgd(1.0, 0.1)),
        _see(task, 9, size=2, defense=SecureAggregation(2)),
        _see(task, 9),
        _see(task.pruned(torch.arange(len(task.parameters)) % 3 > 0), 10),
        _see(_task(model, 3), 11, labels_known=False),
        _see(_task(model, 4), 12, defense=Withhold(rate=0.2)),
        _see(_task(model, 5, dtype=torch.float64), 13),
        _see(_task(model, 6, dtype=torch.float64), 14),
    ]
    answers = _many_is_each_alone(SHORT, seen)
    assert answers[2].problem == "gradient vanished: the update is zero everywhere"
    assert answers[0].problem != answers[2].problem


def test_more_than_go_together():
    task = _task()
    _many_is_each_alone(SHORT, [_see(task, i) for i in range(2 * WIDTH + 1)])


def test_some_stop_early():
    """Of those that stay, no bit changes."""
    task = _task()
    seen = [_see(task, i, defense=GaussianNoise(0.01 * i) if i else None) for i in range(6)]
    attack = GradientMatching(steps=40, enough=0.25)
    lengths = {len(answer.trace) for answer in _many_is_each_alone(attack, seen)}
    assert len(lengths) > 2


def test_one_that_is_not_finite():
    task = _task()
    wild = task.with_parameters(task.parameters * float("nan"))
    seen = [_see(task, 0), _see(task, 1), _see(task, 2)]
    seen[1] = replace(seen[1], task=wild)
    answers = _many_is_each_alone(GradientMatching("euclidean", steps=5), seen)
    assert "not finite" in answers[1].problem
    assert len(answers[0].trace) > len(answers[1].trace)


def test_hidden_units_that_are_dead():
    task = _task("pooled")
    dead = task.with_parameters(torch.zeros_like(task.parameters))
    seen = [_see(task, 0), replace(_see(task, 1), task=dead), _see(task, 2)]
    answers = _many_is_each_alone(GradientMatching(steps=5), seen)
    assert answers[1].problem.startswith("gradient vanished: the objective does not change")


def test_an_attack_that_throws_for_one_throws():
    task = _task()
    told, hidden = _see(task, 0), replace(_see(task, 1), task=replace(task, label_range=None))
    attack = GradientMatching(labels="joint", steps=2)
    with pytest.raises(NotApplicable, match="number of classes"):
        attack.many([told, hidden], [stream(0), stream(1)])


def test_restarts_keep_the_best_of_all_starts():
    seen = [_see(_task("pooled", i), i) for i in range(4)]
    found = BestOf(SHORT, 3).many(seen, [stream(i) for i in range(4)])
    for i, (observation, answer) in enumerate(zip(seen, found, strict=True)):
        source = stream(i)
        starts = [SHORT.many([observation], [source])[0] for _ in range(3)]
        _same(answer, min(starts, key=lambda own: (own.problem is not None, own.objective)))


def test_no_observations_no_answers():
    for attack in (SHORT, BestOf(SHORT, 2), strong_matching(2)):
        assert attack.many([], []) == []
    with pytest.raises(ValueError, match="zip"):
        SHORT.many([_see(_task())], [])


@dataclass(frozen=True, repr=False)
class _Twice(GradientMatching):
    """A user's own search."""

    def __call__(self, observation, generator):
        super().__call__(observation, generator)
        return super().__call__(observation, generator)


@pytest.mark.parametrize(
    "attack",
    [
        FedAvgMatching(steps=4, local_steps=2, trial=2, deals=1),
        AcrossRounds(steps=4),
        MixedStart(steps=4),
        _Twice(steps=4),
    ],
    ids=lambda attack: type(attack).__name__,
)
def test_searches_of_another_kind_go_alone(attack, monkeypatch):
    assert attack.at_once == 1
    monkeypatch.setattr("leakbound.attacks.matching.attack.batch_key", None)
    task = _task(plan=LocalPlan(2, 0.1)) if isinstance(attack, FedAvgMatching) else _task()
    _many_is_each_alone(attack, [_see(task, i) for i in range(3)])


def test_how_many_go_together():
    assert SHORT.at_once == WIDTH
    assert BestOf(SHORT, 2).at_once == WIDTH
    assert ATTACKS["lbfgs"].at_once == 1
    assert ByNoise(ATTACKS["lbfgs"], SHORT).at_once == WIDTH


# Exact steps against autograd's.

AGREE = {
    **{
        name: (GradientMatching(name, total_variation=1e-3), None, {})
        for name in (
            "cosine",
            "cosine_layers",
            "cosine_weighted",
            "euclidean",
            "manhattan",
        )
    },
    "noise": (SHORT, GaussianNoise(0.01), {}),
    "laplace": (GradientMatching("manhattan"), LaplaceNoise(0.01), {}),
    "pruning": (SHORT, MagnitudePruning(0.5), {}),
    "pruning-euclidean": (GradientMatching("euclidean"), MagnitudePruning(0.5), {}),
    "mask-unknown": (SHORT, MagnitudePruning(0.5), {"defense_known": False}),
    "top_k": (GradientMatching("cosine_weighted"), TopK(0.5), {}),
    "clip": (GradientMatching("euclidean"), Clip(0.1), {}),
    "sign": (GradientMatching("euclidean"), Sign(), {}),
    "quantization": (SHORT, Quantization(8), {}),
    "weighted-noise": (SHORT, OptimalNoise(0.01), {}),
    "weighted-euclidean": (GradientMatching("euclidean"), OptimalNoise(0.01), {}),
    "correlated": (
        GradientMatching("euclidean"),
        OptimalNoise(0.01, rule="energy", correlation="layers"),
        {},
    ),
    "dp_sgd": (SHORT, DpSgd(0.5, 0.1), {}),
    "dp_sgd-unknown": (SHORT, DpSgd(0.5, 0.1), {"defense_known": False}),
    "examples": (SHORT, ClipExamples(0.5), {}),
    "examples-euclidean": (GradientMatching("euclidean"), ClipExamples(0.5), {}),
    "examples-unknown": (SHORT, ClipExamples(0.5), {"defense_known": False}),
    "mean": (GradientMatching("euclidean"), chain(ClipExamples(1.0), Mean()), {}),
    "secure": (SHORT, SecureAggregation(3), {}),
    "secure-masked": (SHORT, chain(MagnitudePruning(0.3), SecureAggregation(2)), {}),
    "secure-unknown": (SHORT, SecureAggregation(2), {"defense_known": False}),
    "joint": (GradientMatching("euclidean", labels="joint"), None, {}),
    "joint-cosine": (GradientMatching(labels="joint", total_variation=0.1), None, {}),
    "joint-rows": (GradientMatching(labels="joint"), ClipExamples(0.5), {}),
    "ordered": (GradientMatching(ordered=0.1), Withhold(rate=0.3), {}),
    "ordered-euclidean": (
        GradientMatching("euclidean", ordered=0.5),
        chain(ClipExamples(9.0), Mean(), Withhold(rate=0.3)),
        {},
    ),
    "size": (GradientMatching(size=0.3, total_variation=0.01), None, {}),
    "features": (
        GradientMatching(features="cocktail_party", feature_weight=0.5, feature_form="span"),
        None,
        {},
    ),
    "deep_prior": (GradientMatching(image="deep_prior", width=4, total_variation=0.01), None, {}),
}


def _pair(settings, observation, seed=3):
    """The same search twice: by an engine, and by autograd."""
    mine, traced = (settings.search(observation, stream(seed, "attack")) for _ in range(2))
    assert mine.exact is not None
    traced.exact = None
    return mine, traced


def _agree(settings, observation, value=1e-10, slope=1e-10):
    """The same objective and slopes at the start, and at a second place.

    Slopes of float32 are judged against the largest of all: those that cancel have no digits.
    """
    mine, traced = _pair(settings, observation)
    for _ in range(2):
        for search in (mine, traced):
            Evaluator([search]).evaluate()
        for found, wanted in ((mine.total, traced.total), (mine.match, traced.match)):
            assert float((found - wanted).abs()) <= value * max(1.0, float(wanted.abs()))
        assert float((mine.best - traced.best).abs()) <= value * max(1.0, float(traced.best.abs()))
        slopes = [
            torch.cat([v.grad.flatten() for v in search.variables]) for search in (mine, traced)
        ]
        assert bool(slopes[1].any())
        assert float((slopes[0] - slopes[1]).norm()) <= slope * float(slopes[1].norm())
        step = 0.1 * slopes[1].abs().max() ** -1
        with torch.no_grad():
            for one, other in zip(mine.variables, traced.variables, strict=True):
                other.sub_(step * other.grad)
                one.copy_(other)
    assert len(mine.trace) == len(traced.trace) == 1


@pytest.mark.parametrize("name", AGREE)
def test_a_step_is_autograds(name):
    settings, defense, threat = AGREE[name]
    for model, size in (("pooled", 2), ("mlp", 1)):
        task = _public(_task(model, dtype=torch.float64))
        _agree(settings, _see(task, 0, size, defense, **threat))


@pytest.mark.parametrize("name", ["cosine", "euclidean", "noise", "pruning", "dp_sgd", "secure"])
def test_a_step_in_float32_is_autograds(name):
    settings, defense, threat = AGREE[name]
    for size in (1, 2):
        for model in ("pooled", "mlp"):
            observation = _see(_task(model), 0, size, defense, **threat)
            _agree(settings, observation, value=1e-6, slope=1e-5)


@pytest.mark.parametrize("model", ["normed", "batch_norm"])
def test_a_step_of_a_normed_model_is_autograds(model):
    """By the other engine, with statistics and what else a layer is told of."""
    task = _public(_task(model, dtype=torch.float64))
    known = {"statistics_known": True}
    settings = GradientMatching(total_variation=1e-3, batch_norm=0.1, first_norm=3.0)
    for size in (1, 2):
        _agree(settings, _see(task, 0, size, **known), slope=1e-9)
    _agree(replace(settings, labels="joint"), _see(task, 1, 2, **known), slope=1e-9)
    _agree(settings, _see(task, 1, 2, MagnitudePruning(0.5), **known), slope=1e-9)


@pytest.mark.parametrize("model", ["pooled", "mlp"])
def test_a_step_of_a_pruned_model_is_autograds(model):
    task = _task(model, dtype=torch.float64)
    task = task.pruned(torch.rand(len(task.parameters), generator=stream(0)) < 0.6)
    for name in ("cosine", "euclidean", "joint", "dp_sgd"):
        settings, defense, threat = AGREE[name]
        _agree(settings, _see(task, 0, 2, defense, **threat))


def test_what_autograd_is_needed_for():
    task = _task()
    plain = _see(task)
    assert SHORT.search(plain, stream(0)).exact is not None
    clients = [
        Batch(DIGITS.inputs[:1], DIGITS.labels[:1]),
        Batch(DIGITS.inputs[:2], DIGITS.labels[:2]),
    ]
    sources = [stream(0, "defense", i) for i in range(3)]
    others = [
        _see(_task(plan=LocalPlan(2, 0.1)), size=2, defense=SecureAggregation(2)),
        _see(_task(plan=LocalPlan(1, 0.1, 1)), size=2, defense=SecureAggregation(2)),
        play(task, clients, SecureAggregation(2), sources).observation,
    ]
    assert [SHORT.search(seen, stream(0)).exact for seen in others] == [None] * 3


def test_a_summand_from_without_moves_the_search_alone():
    observation = _see(_task(dtype=torch.float64))
    mine, traced = _pair(SHORT, observation)
    for search in (mine, traced):
        search.pull = lambda images: (images - 0.3).pow(4).sum()
        Evaluator([search]).evaluate()
    assert abs(float(mine.total - traced.total)) < 1e-12
    error = (mine.variables[0].grad - traced.variables[0].grad).norm()
    assert float(error) < 1e-10 * float(traced.variables[0].grad.norm())


WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item", "unique")


class _NoWait(TorchDispatchMode):
    """Refuses what waits for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in WAITS, name
        assert name != "_to_copy" or "device" not in (kwargs or {})
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_wait(monkeypatch):
    """A context that refuses it; reading a CPU tensor passes no dispatcher."""

    def refused(*_, **__):
        raise AssertionError("a number is read")

    def enter():
        for name in ("tolist", "item", "numpy", "cpu", "__bool__", "__float__", "__int__"):
            monkeypatch.setattr(torch.Tensor, name, refused)
        return _NoWait()

    return enter


@pytest.mark.parametrize(
    "defense", [None, MagnitudePruning(0.5), DpSgd(1.0, 0.1)], ids=["none", "pruning", "dp_sgd"]
)
@pytest.mark.parametrize(
    ("model", "together"),
    [("mlp", 1), ("pooled", 3), ("normed", 1)],
    ids=str,
)
def test_nothing_waits_between_points_of_the_trace(model, together, defense, no_wait):
    task, steps = _task(model), 3 * TRACE_POINTS
    settings = GradientMatching(steps=steps, total_variation=1e-3, size=0.1)
    seen = [_see(task, i, defense=defense) for i in range(together)]
    searches = [settings.search(o, stream(i), many=together > 1) for i, o in enumerate(seen)]
    loop = Loop(settings, searches)
    loop.step(0)
    with no_wait():
        loop.step(1)
        loop.step(2)
        with pytest.raises(AssertionError, match="a number is read"):
            loop.step(3)


# What it is worth.


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["alone", "among many"])
@pytest.mark.parametrize("model", ["lenet", "simple_convnet"])
def test_20_images_are_found_as_well_as_by_autograd(scene, model, batch, monkeypatch):
    """The paired difference's 95 % interval holds 0, or lies within 1 dB."""
    attack, seeds = inverting_gradients(150), range(20)
    mine = scene.attack(_AmongMany(attack) if batch == "among many" else attack, model, seeds)
    monkeypatch.setattr(engine, "engine_for", lambda observation, task, many: None)
    traced = scene.attack(attack, model, seeds)
    differences = [a - b for a, b in zip(mine, traced, strict=True)]
    middle = statistics.mean(differences)
    half = 2.093 * statistics.stdev(differences) / len(differences) ** 0.5
    print(f"{model}: {statistics.mean(mine):.2f} dB, {middle:+.2f} ± {half:.2f} dB")
    assert abs(middle) <= half or abs(middle) + half <= 1.0


@dataclass(frozen=True, repr=False)
class _AmongMany(Attack):
    """A call as an audit makes it."""

    attack: Attack

    def __call__(self, observation, generator):
        return self.attack.many([observation], [generator])[0]


class _Own(BestOf):
    """A user's restarts."""

    def __call__(self, observation, generator):
        return replace(super().__call__(observation, generator), problem="mine")


def test_restarts_of_a_users_own_kind_are_called():
    observations = [_see(_task(seed=seed), seed) for seed in range(3)]
    attack = _Own(GradientMatching(steps=2), 2)
    assert attack.at_once == 1
    answers = attack.many(observations, [stream(i) for i in range(3)])
    assert [answer.problem for answer in answers] == ["mine"] * 3


class _Guard(Defense):
    """Prunes small rows and leaves large ones: whether it changes rows depends on them."""

    def imitate(self, rows):
        return rows if float(rows.detach().norm()) > 1 else rows * 0.5


def test_a_defense_that_changes_some_rows_alone_is_simulated_for_each():
    task = _task()
    for scale in (1e-3, 1e3):
        seen = _see(task.with_parameters(scale * task.parameters), defense=_Guard())
        _agree(GradientMatching(distance="euclidean", total_variation=0.1), seen, 1e-5, 1e-4)


def test_labels_that_cross_entropy_ignores_go_by_autograd():
    observation = _see(_task(), size=2)
    ignored = replace(observation, labels=torch.tensor([-100, 3]))
    attack = GradientMatching(steps=2)
    search = attack.search(ignored, stream(0))
    assert search.exact is None
    assert solve(attack, [search])[0].inputs.isfinite().all()
