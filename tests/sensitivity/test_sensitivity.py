"""Every estimator against the full Jacobian, its law, its error, and the inputs it refuses."""

import pytest
import torch
from scipy import stats
from torch import nn

from leakbound import client, models
from leakbound.core import Task
from leakbound.data import load
from leakbound.engines import examples
from leakbound.engines.sensitivity import along, pair_changes, sensitivity
from leakbound.randomness import normal, secure, stream

close = torch.testing.assert_close
ESTIMATORS = ("exact", "batch", "per_sample")


@pytest.mark.parametrize("size", [1, 3])
def test_every_estimator_is_what_the_full_jacobian_says(small, every, size):
    task, (x, y) = small.build(every), small.batch(size)
    jacobian = small.jacobian(task, x, y)
    exact = sensitivity(task, x, y, stream(0), estimator="exact", directions=0)
    close(exact.values, jacobian.square().sum((1, 2)))
    per_sample, source = sensitivity(task, x, y, stream(5), directions=2), stream(5)
    drawn = torch.stack([normal(x.shape, source, like=x) for _ in range(2)])
    moved = torch.einsum("pbn,kbn->kbp", jacobian, drawn.flatten(2))
    close(per_sample.values, moved.square().sum((0, 1)) / 2)
    whole = sensitivity(task, x, y, stream(5), estimator="batch", directions=2)
    close(whole.values, moved.sum(1).square().mean(0))
    close(along(task, x, y, drawn), moved.sum(1))
    for found in (exact, per_sample, whole):
        close(found.gradient, client.gradient(task, x, y))


def test_the_fast_engine_is_used_exactly_where_it_is_right(small, every):
    task, (x, _) = small.build(every), small.batch(3)
    assert (examples.plan(task, x) is not None) == (every in small.fast)
    assert not any(m._forward_hooks for m in task.model.modules())


def test_a_model_that_turns_unlike_its_plan_takes_the_generic_path(small):
    class Fickle(nn.Module):
        twice = False

        def __init__(self):
            super().__init__()
            self.first = nn.Linear(36, 36)
            self.last = nn.Linear(36, 3)

        def forward(self, x):
            x = torch.tanh(self.first(x.flatten(1)))
            return self.last(torch.tanh(self.first(x)) if Fickle.twice else x)

    task = Task.of(Fickle().double().eval())
    x, y = small.batch(2)
    sensitivity(task, x, y, stream(0))
    assert examples.plan(task, x) is not None
    Fickle.twice = True
    assert examples.plan(task, x) is None
    found = sensitivity(task, x, y, stream(0), estimator="exact")
    close(found.values, small.jacobian(task, x, y).square().sum((1, 2)))
    close(sensitivity(task, x, y, stream(0)).gradient, client.gradient(task, x, y))


@pytest.mark.parametrize("estimator", ["batch", "per_sample"])
def test_unbiased(small, estimator):
    values, exact = small.draws(200, estimator=estimator, directions=1)
    assert small.worst_z(values, exact) < 4.5


def test_planted_wrong_estimators_are_rejected(small):
    values, exact = small.draws(400, estimator="per_sample", directions=1)
    assert small.worst_z(values * 9, exact) > 10  # 1/B^2 forgotten
    assert small.worst_z(values * 3, exact) > 10  # 1/B for 1/B^2
    task, (x, y) = small.build("pooled"), small.batch(3)
    jacobian = small.jacobian(task, x, y)
    crossed = []  # one direction for all examples: squares of sums have cross terms
    for i in range(400):
        same = normal(x[:1].shape, stream(i, "same"), like=x).flatten(1).expand(3, -1)
        crossed.append(torch.einsum("pbn,bn->p", jacobian, same).square())
    assert small.worst_z(torch.stack(crossed), exact) > 10


def test_per_sample_varies_less_than_batch(small):
    ours, exact = small.draws(300, estimator="per_sample", directions=1)
    paper, _ = small.draws(300, estimator="batch", directions=1)
    live = exact > 0
    ratio = (ours.var(0) / paper.var(0))[live].median()
    assert ratio < 0.75
    # by theory sum_b s_b^2 / (sum_b s_b)^2, at least 1/B
    task, (x, y) = small.build("pooled"), small.batch(3)
    each = small.jacobian(task, x, y).square().sum(2)[live]
    theory = (each.square().sum(1) / each.sum(1).square()).median()
    assert float(ratio) == pytest.approx(float(theory), rel=0.25)


def test_batch_follows_the_chi_square_law_and_the_papers_claim(small):
    values, exact = small.draws(400, estimator="batch", directions=10)
    at = int(exact.argmax())
    ratio = (values[:, at] / exact[at]).numpy()
    assert stats.kstest(10 * ratio, stats.chi2(10).cdf).pvalue > 0.01
    assert stats.kstest(5 * ratio, stats.chi2(5).cdf).pvalue < 0.01
    law = stats.chi2(10).cdf(5) + stats.chi2(10).sf(15)
    assert law == pytest.approx(0.2409, abs=1e-4)
    beyond = int((abs(ratio - 1) > 0.5).sum())
    assert stats.binomtest(beyond, len(ratio), law).pvalue > 0.01


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_dead_units_give_finite_zeros(estimator):
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).eval()
    with torch.no_grad():
        model[1].bias.fill_(-100.0)
        model[3].bias.zero_()
    x, y = torch.rand(2, 1, 2, 2, generator=stream(0)), torch.tensor([0, 1])
    found = sensitivity(Task.of(model), x, y, stream(0), estimator=estimator)
    assert not found.values.any()
    assert torch.isfinite(found.gradient).all()


@pytest.mark.parametrize("name", ["pooled", "reused"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_chunk_changes_nothing_but_rounding(small, estimator, name):
    task, (x, y) = small.build(name), small.batch(3)
    found = [
        sensitivity(task, x, y, stream(1), estimator=estimator, directions=5, chunk=chunk)
        for chunk in (None, 1, 2, 4, 7)
    ]
    for other in found[1:]:
        close(other.values, found[0].values)
        close(other.gradient, found[0].gradient)


@pytest.mark.parametrize("estimator", ["batch", "per_sample"])
def test_the_same_source_gives_the_same_bits(small, estimator):
    task, (x, y) = small.build("pooled"), small.batch(3)

    def run(seed):
        return sensitivity(task, x, y, stream(seed), estimator=estimator)

    a, b, other = run(1), run(1), run(2)
    assert torch.equal(a.values, b.values)
    assert not torch.equal(a.values, other.values)
    assert torch.isfinite(sensitivity(task, x, y, secure(), estimator=estimator).values).all()


def test_tiny_gradients_in_float32_keep_their_squares(small):
    task, (x, y) = small.build("pooled", torch.float32), small.batch(3, torch.float32)

    def tiny(output, labels):
        return 1e-8 * nn.functional.cross_entropy(output, labels)

    faint = Task(task.model, task.parameters, tiny, buffers=task.buffers)
    usual, scaled = (sensitivity(t, x, y, stream(0)) for t in (task, faint))
    close(scaled.values, usual.values * 1e-16, rtol=1e-3, atol=0)


def test_soft_labels(small):
    task, (x, _) = small.build("pooled"), small.batch(3)
    y = torch.softmax(normal((3, 3), stream(4), like=x), 1)
    found = sensitivity(task, x, y, stream(0), estimator="exact")
    close(found.values, small.jacobian(task, x, y).square().sum((1, 2)))


def test_nothing_given_is_changed_and_no_graph_is_kept(small):
    task, (x, y) = small.build("pooled"), small.batch(3)
    x.requires_grad_()
    before = x.detach().clone(), task.parameters.clone()
    with torch.no_grad():
        found = sensitivity(task, x, y, stream(0))
    assert not found.values.requires_grad
    assert not found.gradient.requires_grad
    assert torch.equal(x, before[0])
    assert x.grad is None
    assert torch.equal(task.parameters, before[1])


@pytest.mark.parametrize("name", ["pooled", "strided"])
def test_along_is_differentiable_in_the_inputs(small, name):
    task, (x, y) = small.build(name), small.batch(2)
    ways = normal((2, *x.shape), stream(8), like=x)

    def energy(inputs):
        return along(task, inputs, y, ways).square().sum()

    assert torch.autograd.gradcheck(energy, x.requires_grad_(), fast_mode=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"estimator": "per_sampel"}, r"estimator is 'per_sampel'; did you mean 'per_sample'"),
        ({"directions": 0}, r"directions is 0; give a whole number of at least 1"),
        ({"estimator": "batch", "directions": 1.5}, r"directions is 1.5; give a whole number"),
        ({"chunk": 0}, r"chunk is 0; give a whole number of at least 1"),
    ],
)
def test_bad_arguments_are_named(small, arguments, words):
    task, (x, y) = small.build("mlp"), small.batch(1)
    with pytest.raises(ValueError, match=words):
        sensitivity(task, x, y, stream(0), **arguments)


@pytest.mark.parametrize("size", [1, 4])
def test_the_default_ranks_coordinates_as_the_exact_one_does(size):
    """By s / g², as optimal noise and pruning do. Two directions at batch 1 do not."""
    digits = load("mnist5k")
    for seed in range(1):
        model = models.simple_convnet(
            input_shape=(1, 28, 28), classes=10, generator=stream(seed, "model")
        )
        at = torch.randperm(5000, generator=stream(seed, "batch"))[:size]
        given = Task.of(model), digits.inputs[at], digits.labels[at]
        exact = sensitivity(*given, stream(0), estimator="exact")
        live = exact.gradient != 0
        ranks = {}
        for directions in (None, 2):
            found = sensitivity(*given, stream(seed, "ways"), directions=directions).values
            parts = (part[live] / exact.gradient[live].square() for part in (found, exact.values))
            ranks[directions] = stats.spearmanr(*parts).statistic
        assert ranks[None] >= 0.95 > ranks[2]


def test_few_inputs_are_taken_one_by_one():
    task = Task.of(nn.Sequential(nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 3)))
    x, y = normal((3, 9), stream(1)), torch.tensor([0, 1, 2])
    names = [sensitivity(task, x[:size], y[:size], stream(0)).estimator for size in (1, 3)]
    assert names == ["exact", "per_sample"]


def test_both_engines_agree_on_a_real_network_and_real_digits():
    build = stream(0, "model")
    model = models.simple_convnet(input_shape=(1, 28, 28), classes=10, generator=build)
    task, digits = Task.of(model), load("mnist5k").batch(torch.arange(0, 5000, 625))
    x, y = digits.inputs, digits.labels
    assert examples.plan(task, x) is not None
    found = sensitivity(task, x, y, stream(2), directions=1)
    moved = pair_changes(task, x, y, normal(x.shape, stream(2), like=x))
    wanted = moved.square().sum(0) / len(x) ** 2
    assert float((found.values - wanted).norm() / wanted.norm()) < 1e-5
    close(found.gradient, client.gradient(task, x, y), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        ("mlp", {}),
        ("lenet", {}),
        ("simple_convnet", {}),
        ("resnet18", {"width": 4}),
        ("resnet18", {"width": 4, "norm": "batch"}),
    ],
)
def test_the_built_in_models_take_the_fast_engine(build, settings):
    model = getattr(models, build)(
        input_shape=(1, 8, 8), classes=3, generator=stream(0), **settings
    )
    task = Task.of(model, classes=3).to("cpu", torch.float64)
    x, y = normal((2, 1, 8, 8), stream(1), like=task.parameters), torch.tensor([0, 2])
    assert examples.plan(task, x) is not None
    found = sensitivity(task, x, y, stream(2), directions=1)
    moved = pair_changes(task, x, y, normal(x.shape, stream(2), like=x))
    close(found.values, moved.square().sum(0) / 4)
    close(found.gradient, client.gradient(task, x, y))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_of_a_pruned_model_every_estimator_is_what_the_jacobian_says(small, name):
    dense, (x, y) = small.build("pooled"), small.batch(3)
    kept = torch.rand(len(dense.parameters), generator=stream(0, "kept")) < 0.6
    task = dense.pruned(kept)
    jacobian = small.jacobian(task, x, y) * kept[:, None, None]
    found = sensitivity(task, x, y, stream(5), estimator=name, directions=3)
    drawn, source = [], stream(5)
    for _ in range(3):
        drawn.append(normal(x.shape, source, like=x).flatten(1))
    moved = torch.einsum("pbn,kbn->kbp", jacobian, torch.stack(drawn))
    want = {
        "exact": jacobian.square().sum((1, 2)),
        "batch": moved.sum(1).square().mean(0),
        "per_sample": moved.square().sum((0, 1)) / 3,
    }[name]
    close(found.values, want)
    close(found.gradient, client.gradient(task, x, y))
    for part in (found.values, found.gradient):
        assert (part[~kept] == 0).all()
