"""Marks of planted models: found where they are, silent on ordinary ones, at known odds."""

import math

import pytest
import torch
from scipy import stats
from torch import nn

from leakbound import client, data, models
from leakbound.attacks import Codebook, Fishing, LinearTrap, Loki, RobbingTheFed, TrapWeights
from leakbound.core import Batch, Task
from leakbound.inspection import evened, inspect, parallel, statistics
from leakbound.pruning import Magnitude, Random
from leakbound.randomness import normal, stream, uniform
from leakbound_reproductions.attacks.head import special_head


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


@pytest.fixture(scope="module")
def mnist():
    return data.load("mnist5k", limit=600)


def fresh(own, build="mlp", seed=0, *, public=True, **settings):
    shape = tuple(own.inputs.shape[1:])
    net = getattr(models, build)(
        input_shape=shape, classes=10, generator=stream(seed, "model"), **settings
    )
    images = Batch(own.inputs[:300], own.labels[:300]) if public else None
    return Task.of(net, classes=10, public=images)


def trained(own, task, steps=100, kind="sgd"):
    weights = nn.Parameter(task.parameters.clone())
    optimizer = torch.optim.SGD([weights], lr=0.05, momentum=0.9)
    if kind == "adam":
        optimizer = torch.optim.Adam([weights], lr=1e-3)
    source = stream(0, "training")
    for _ in range(steps):
        index = torch.randint(len(own.labels), (32,), generator=source)
        slope = client.gradient(task, own.inputs[index], own.labels[index], weights.detach())
        weights.grad = slope.detach()
        optimizer.step()
    return task.with_parameters(weights.detach())


def changed(task, name, change):
    """The task after `change(weight, bias)` wrote into a layer's tensors."""
    flat = task.parameters.clone()
    parts = task.unflatten(flat)
    change(parts[f"{name}.weight"], parts.get(f"{name}.bias"))
    return task.with_parameters(flat)


def disguised(task, name="layer", noise=0.01, seed=0):
    def change(weight, bias):
        source = stream(seed, "disguise")
        order = torch.randperm(len(weight), generator=source)
        factor = 8 ** (2 * uniform((len(weight),), source) - 1)
        weight.copy_(weight[order] * factor[:, None])
        bias.copy_(bias[order] * factor)
        size = weight.square().mean(1, keepdim=True).sqrt()
        weight.add_(noise * size * normal(weight.shape, source))
        bias.add_(noise * bias.abs() * normal(bias.shape, source))

    return changed(task, name, change)


def kinds(task, *probes):
    return {finding.kind for finding in inspect(task, *probes)}


PLANTS = {
    "mean": RobbingTheFed(bins=32),
    "cosine": RobbingTheFed(bins=200, measure="cosine"),
    "random": RobbingTheFed(bins=32, measure="random"),
    "tuned-trap": TrapWeights(rows=64),
    "trap-0.9": TrapWeights(rows=64, scale=0.9),
    "trap-1": TrapWeights(rows=64, scale=1.0),
}


@pytest.mark.parametrize("public", [True, False], ids=["probes", "no-probes"])
@pytest.mark.parametrize("name", list(PLANTS))
def test_planted_layers_are_found(name, public, mnist):
    task = PLANTS[name].plant(fresh(mnist, "simple_convnet"))
    task = task if public else Task(**{**vars_of(task), "public": None})
    expected = "trap weights" if "trap" in name else "imprint"
    assert expected in kinds(task)
    assert expected in kinds(disguised(task))


def vars_of(task):
    names = ("model", "parameters", "loss", "plan", "input_range", "label_range", "buffers")
    return {name: getattr(task, name) for name in names}


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "beside"])
def test_a_linear_trap_is_found_by_its_loss(inside, digits):
    task = LinearTrap(inside=inside).plant(fresh(digits))
    (finding,) = (f for f in inspect(task) if f.kind == "linear trap")
    assert finding.strength == 16
    assert finding.layer == "loss"


def test_a_special_head_is_found_by_its_columns(digits):
    task = special_head(fresh(digits, hidden=(64,)), 32, stream(0, "head"))
    assert kinds(task) == {"equal columns"}


@pytest.mark.parametrize("target", ["class", "feature", "direction"])
@pytest.mark.parametrize("build", ["mlp", "lenet"])
def test_a_fishing_output_layer_is_found(target, build, digits):
    task = Fishing(target=target).plant(fresh(digits, build))
    name = [n for n in task.unflatten(task.parameters) if n.endswith("weight")][-1]
    assert {"lone classes", "zeroed paths"} <= kinds(task)

    def noise(weight, bias):
        size = 0.01 * weight.norm() / weight.shape[1] ** 0.5
        weight.add_(size * normal(weight.shape, stream(0, "noise")))

    hidden = changed(task, name.removesuffix(".weight"), noise)
    for one in (hidden, Task(**{**vars_of(hidden), "public": None})):
        (finding,) = (f for f in inspect(one) if f.kind == "lone classes")
        assert len(finding.rows) == 1
        assert finding.strength > 30


def test_the_middle_of_a_fresh_or_trained_output_layer_is_no_class(digits):
    for task in (
        fresh(digits),
        trained(digits, fresh(digits)),
        Fishing().plant_each(fresh(digits), 2)[1],
    ):
        (found,) = (f for f in statistics(task) if f.kind == "lone classes")
        assert found.strength < 3


def test_every_client_finds_loki_s_layer(digits):
    """Also if the other clients' kernels are no zeros: its thresholds are in constant inputs."""
    for task in Loki().plant_each(fresh(digits), 3):
        assert kinds(task) == {"near-duplicate rows", "zeroed paths"}

        def noise(weight, bias):
            weight.add_(0.01 * normal(weight.shape, stream(0, "noise")))

        assert "near-duplicate rows" in kinds(changed(task, "routes", noise))


def test_a_codebook_is_found_by_its_loss(digits):
    assert kinds(Codebook(codewords=8).plant(fresh(digits))) == {"linear trap"}


ORDINARY = {
    "mlp": ("digits", "mlp", {}),
    "mlp-deep": ("mnist", "mlp", {"hidden": (128, 64)}),
    "convnet": ("mnist", "simple_convnet", {}),
    "lenet": ("digits", "lenet", {}),
    "resnet": ("digits", "resnet18", {"width": 8}),
}


@pytest.mark.parametrize("name", list(ORDINARY))
def test_ordinary_models_are_not_flagged(name, digits, mnist):
    source, build, settings = ORDINARY[name]
    own = {"digits": digits, "mnist": mnist}[source]
    for seed in range(3):
        assert inspect(fresh(own, build, seed, **settings)) == ()
    if name in ("mlp", "mlp-deep"):
        task = fresh(own, build, **settings)
        assert inspect(trained(own, task)) == ()
        assert inspect(trained(own, task, kind="adam")) == ()


@pytest.mark.parametrize("scheme", [Magnitude(rate=0.9, scope="layer"), Random(rate=0.5)], ids=repr)
def test_pruned_models_are_not_flagged(scheme, digits):
    task = fresh(digits, hidden=(64,))
    task = task.pruned(scheme.start(task, None, stream(0, "pruning")))
    assert inspect(task) == ()
    assert inspect(trained(digits, task)) == ()


def test_paths_that_pruning_did_not_cut_are_found(digits):
    task = changed(fresh(digits), "1", lambda weight, bias: weight[3:5].zero_())
    (finding,) = inspect(task)
    assert (finding.kind, finding.strength) == ("zeroed paths", 2)


def test_the_chance_of_balanced_signs_is_as_stated():
    """Under independent random signs the strength exceeds s with probability 10^-s at most."""
    found = []
    for seed in range(200):
        weight = normal((40, 101), stream(seed, "signs"))
        net = nn.Sequential(nn.Flatten(), nn.Linear(101, 40), nn.Linear(40, 2))
        task = changed(Task.of(net), "1", lambda w, _, weight=weight: w.copy_(weight))
        found.append(next(f.strength for f in statistics(task) if f.kind == "trap weights"))
    for level in (0.5, 1.0, 2.0):
        count = sum(value >= level for value in found)
        assert stats.binom.sf(count - 1, len(found), 10**-level) > 1e-3
    # and it is no empty bound: half of the draws reach what they should up to discreteness
    assert sum(value >= 0.15 for value in found) > 0.4 * len(found)


def test_a_few_balanced_rows_among_many_are_found(digits):
    """32 trap rows written into a layer of 128 random ones."""
    trap = TrapWeights(rows=48, scale=0.9).plant(fresh(digits))
    rows = trap.unflatten(trap.parameters)["layer.weight"] * 48 * 100

    def change(weight, bias):
        weight[:48] = rows

    assert "trap weights" in kinds(changed(fresh(digits), "1", change))


def test_rows_that_differ_only_where_images_are_empty_are_found_with_probes(mnist):
    """The weights give nothing away, the answers to real images do."""
    task = RobbingTheFed(bins=64).plant(fresh(mnist, "simple_convnet"))
    still = mnist.inputs[:300].flatten(1).var(0) < 1e-6
    assert int(still.sum()) > 50

    def change(weight, bias):
        size = weight.norm(dim=1, keepdim=True)
        draw = normal(weight.shape, stream(0, "hidden")) * still
        weight.add_(3 * size * draw / draw.norm(dim=1, keepdim=True))

    hidden = changed(task, "layer", change)
    assert "imprint" not in kinds(hidden)
    assert "imprint on probes" in kinds(hidden)
    bare = Task(**{**vars_of(hidden), "public": None})
    assert "imprint on probes" not in kinds(bare)  # the blind spot, as stated
    assert "imprint on probes" in kinds(bare, Batch(mnist.inputs[300:], mnist.labels[300:]))


def test_copies_without_levels_are_named_as_such(digits):
    def change(weight, bias):
        weight[:6] = weight[:1].clone()
        bias[:6] = bias[:1].clone()

    (finding,) = inspect(changed(fresh(digits), "1", change))
    assert (finding.kind, finding.strength) == ("near-duplicate rows", 6)
    assert finding.rows == (0, 1, 2, 3, 4, 5)


def test_a_huge_gain_is_found(digits):
    task = changed(fresh(digits), "3", lambda weight, bias: weight.mul_(1e5))
    assert "huge gain" in kinds(task)


def test_the_planted_rows_are_named(digits):
    task = RobbingTheFed(bins=16).plant(fresh(digits, "simple_convnet"))
    (finding,) = (f for f in inspect(task) if f.kind == "imprint")
    assert finding.rows == tuple(range(16))
    assert "16 of 16 units" in finding.words


def test_parallel_rows_of_few_weights_are_left_out():
    rows = torch.zeros(6, 20)
    rows[:, 0] = 1.0
    assert parallel(rows) == []
    assert len(parallel(torch.ones(6, 20))) == 6


def test_the_chance_of_parallel_rows_is_as_stated():
    """The cosine of two random directions in 8 dimensions exceeds c as the Beta law says."""
    source = stream(0, "cosine")
    a, b = normal((200_000, 8), source), normal((200_000, 8), source)
    cosine = torch.nn.functional.cosine_similarity(a, b)
    for level in (0.5, 0.8):
        law = 0.5 * stats.beta.sf(level**2, 0.5, 3.5)
        count = int((cosine >= level).sum())
        assert abs(count - 200_000 * law) < 4 * math.sqrt(200_000 * law)
    assert 0.5 * stats.beta.sf(0.99**2, 0.5, 3.5) == pytest.approx(2e-7, rel=0.5)


def test_without_images_and_shape_the_weights_are_judged_alone(digits):
    task = fresh(digits, public=False)
    assert inspect(task) == ()
    assert inspect(task, input_shape=(1, 8, 8)) == ()
    assert {f.kind for f in statistics(task)} == {
        "near-duplicate rows",
        "trap weights",
        "equal columns",
        "lone classes",
        "zeroed paths",
    }
    # probes of another shape than the model's are no crash: they are not used
    assert inspect(task, Batch(torch.rand(70, 3, 5, 5), torch.zeros(70).long())) == ()


SCALES = [1e-30, 1e-16, 1e-9, 1.0, 1e9, 1e16, 1e30]


def inside(task, attack):
    """The planted layer as the first of the agreed perceptron, with equal outgoing weights."""
    front = attack.plant(task)
    parts = front.unflatten(front.parameters)
    flat = task.parameters.clone()
    own = task.unflatten(flat)
    units = len(own["1.weight"])
    own["1.weight"].copy_(parts["layer.weight"] * front.model.gain * units)
    own["1.bias"].copy_(parts["layer.bias"] * front.model.gain * units)
    own["3.weight"].copy_(own["3.weight"][:, :1].expand_as(own["3.weight"]))
    return task.with_parameters(flat)


def rescaled(task, factor, dtype=torch.float32):
    """The same function of a ReLU net: units times a factor, what leaves them divided by it."""
    task = task.to("cpu", dtype)
    flat = task.parameters.clone()
    parts = task.unflatten(flat)
    factor = torch.as_tensor(factor, dtype=torch.float64).expand(len(parts["1.weight"]))
    parts["1.weight"].copy_(parts["1.weight"].double() * factor[:, None])
    parts["1.bias"].copy_(parts["1.bias"].double() * factor)
    parts["3.weight"].copy_(parts["3.weight"].double() / factor)
    return task.with_parameters(flat)


def each_its_own(units=64, seed=0):
    """Factors between 1e-30 and 1e30."""
    return 10 ** (60 * uniform((units,), stream(seed, "factor")).double() - 30)


FACTORS = {f"{scale:g}": scale for scale in SCALES} | {"each-its-own": each_its_own()}
HIDDEN = {
    "imprint": (lambda task: inside(task, RobbingTheFed(bins=64)), "imprint"),
    "trap": (lambda task: inside(task, TrapWeights(rows=64, scale=0.9)), "trap weights"),
    "fishing": (lambda task: Fishing().plant(task), "lone classes"),
    "head": (lambda task: special_head(task, 32, stream(0, "head")), "equal columns"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("factor", list(FACTORS))
@pytest.mark.parametrize("name", list(HIDDEN))
def test_the_size_of_a_units_weights_hides_nothing(name, factor, dtype, digits):
    plant, expected = HIDDEN[name]
    planted = plant(fresh(digits, hidden=(64,)))
    hidden = rescaled(planted, FACTORS[factor], dtype)
    plain = client.forward(planted, digits.inputs[:8])
    same = client.forward(hidden, digits.inputs[:8].to(dtype)).float()
    assert torch.allclose(same, plain, rtol=1e-2, atol=1e-3)
    assert expected in kinds(hidden)
    assert expected in kinds(Task(**{**vars_of(hidden), "public": None}))


@pytest.mark.parametrize("factor", list(FACTORS))
def test_every_statistic_but_the_gain_is_that_of_the_unscaled_model(factor, digits):
    """Of planted and of ordinary models, in float64: equal to the number."""
    deep = trained(digits, fresh(digits, hidden=(64, 32)), 30)
    imprinted = inside(fresh(digits, hidden=(64,)), RobbingTheFed(bins=64))
    for task in (deep, imprinted):
        before = statistics(rescaled(task, 1.0, torch.float64))
        after = statistics(rescaled(task, FACTORS[factor], torch.float64))
        assert [f.kind for f in before] == [f.kind for f in after]
        for one, other in zip(before, after, strict=True):
            assert one.kind == "huge gain" or one.strength == pytest.approx(other.strength)


def test_the_size_of_hidden_units_hides_no_imprint_behind_them(digits):
    """Parallel rows of a second layer, with the units that enter scaled each by its own factor."""
    task = fresh(digits, hidden=(64, 32))

    def change(weight, bias):
        weight.copy_(weight[:1] * (1 + torch.arange(32.0))[:, None])
        bias.copy_(torch.linspace(-2, -0.1, 32) * (1 + torch.arange(32.0)))

    planted = changed(task, "3", change)
    for at in (1.0, each_its_own(seed=1)):
        found = {(f.layer, f.kind) for f in inspect(rescaled(planted, at, torch.float64))}
        assert ("3", "imprint") in found


def test_the_size_of_the_units_behind_hides_no_equal_columns(digits):
    """Half of the columns of the second layer alike; its rows scaled each by its own factor."""

    def change(weight, bias):
        weight[:, :32] = weight[:, :1].clone()

    task = changed(fresh(digits, hidden=(64, 32)), "3", change).to("cpu", torch.float64)
    flat = task.parameters.clone()
    parts = task.unflatten(flat)
    factor = each_its_own(32, seed=2)
    parts["3.weight"].mul_(factor[:, None])
    parts["3.bias"].mul_(factor)
    parts["5.weight"].div_(factor)
    for planted in (task, task.with_parameters(flat)):
        found = {f.layer: f.strength for f in statistics(planted) if f.kind == "equal columns"}
        assert found["3"] == 32


def test_probes_see_through_any_size_of_weights(mnist):
    """Rows that differ where images are empty, each times its own factor."""
    task = inside(fresh(mnist, hidden=(64,)), RobbingTheFed(bins=64))
    still = mnist.inputs[:300].flatten(1).var(0) < 1e-6

    def change(weight, bias):
        draw = normal(weight.shape, stream(0, "hidden")) * still
        size = weight.norm(dim=1, keepdim=True)
        weight.add_(3 * size * draw / draw.norm(dim=1, keepdim=True))

    hidden = changed(task, "1", change)
    for factor in FACTORS.values():
        assert "imprint on probes" in {
            f.kind for f in statistics(rescaled(hidden, factor)) if f.marked
        }


def test_gains_are_seen_where_the_loss_is_saturated_and_where_it_overflows(digits):
    task = changed(fresh(digits, public=False), "3", lambda weight, bias: weight.mul_(1e5))

    def flat_loss(output, labels):
        return (output.sum() * 0).exp()

    silent = Task(**{**vars_of(task), "loss": flat_loss})
    assert "huge gain" in {f.kind for f in inspect(silent, input_shape=(1, 8, 8))}
    loud = changed(fresh(digits), "1", lambda weight, bias: weight.fill_(3e38))
    assert "huge gain" in kinds(loud)


def test_rows_are_evened_wherever_numbers_end():
    for dtype in (torch.float32, torch.float64):
        for power in (-44, -30, 0, 30, 38):
            rows = torch.tensor([[1.0, -0.5, 0.25]], dtype=torch.float64) * 10.0**power
            even, most = evened(rows.to(dtype))
            assert even.dtype == torch.float64
            assert even[0, 0] == 1.0
            assert most[0] == pytest.approx(10.0**power, rel=0.1)
    assert parallel(torch.cat([torch.ones(5, 20) * 1e-38, torch.zeros(2, 20)])) == [0, 1, 2, 3, 4]
