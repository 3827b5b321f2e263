"""The engine of examples: where it is used, and that it says what `torch.func` says."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from leakbound import client, models
from leakbound.core import Task
from leakbound.engines import directions as directions_of
from leakbound.engines import examples
from leakbound.engines.examples import ExampleRows
from leakbound.engines.reader import Kind
from leakbound.engines.sensitivity import sensitivity
from leakbound.randomness import normal, stream

close = torch.testing.assert_close
CHAINS = {
    "nested": lambda: nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.Sequential(nn.ELU(inplace=True), nn.Identity())),
        nn.Sequential(nn.Flatten(), nn.Linear(48, 3)),
    ),
    "pools": lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(3, stride=1, padding=1),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(3, 8, 2, bias=False),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 3),
    ),
    "many_channels": lambda: nn.Sequential(
        nn.Conv2d(1, 8, 3, dilation=(2, 1)),
        nn.Sigmoid(),
        nn.Conv2d(8, 4, (2, 3), stride=(1, 2), padding=(0, 1)),
        nn.AdaptiveAvgPool2d(2),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(16, 3),
        nn.Softplus(beta=2.0),
    ),
    "rows": lambda: nn.Sequential(
        nn.Flatten(1, 2), nn.Linear(6, 4), nn.GELU("tanh"), nn.Flatten(), nn.Linear(24, 3)
    ),
    "overlapping": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, 1, dilation=2), nn.Flatten(), nn.Linear(8, 3)
    ),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3)),
}


def _task(build, dtype=torch.float64, **settings):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Task.of(build().to(dtype).eval(), classes=3, **settings)


def _smoothed(output, labels):
    return nn.functional.cross_entropy(output, labels, label_smoothing=0.1)


def _cubed(output, labels):
    return (output - nn.functional.one_hot(labels, 3)).pow(3).sum(1).mean()


def _absolute(output, labels):
    return (output - nn.functional.one_hot(labels, 3)).abs().sum(1).mean()


def _agrees(small, task, x, y):
    passes = examples.plan(task, x)
    assert passes is not None
    drawn = normal((3, *x.shape), stream(6), like=x)
    rows = ExampleRows(task, passes, x, y, copies=3)
    jacobian = small.jacobian(task, x, y).flatten(2) * len(x)  # of each example's own loss
    moved = torch.einsum("pbn,kbn->kbp", jacobian, drawn.flatten(2))
    close(rows.squares(drawn.flatten(0, 1)), moved.square().sum((0, 1)))
    close(rows.along(drawn.flatten(0, 1), 3), moved.sum(1))
    close(rows.each(drawn.flatten(0, 1)), moved.flatten(0, 1))
    close(rows.gradient() / len(x), client.gradient(task, x, y))


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("size", [1, 3])
def test_powers_changes_and_gradient_are_what_the_jacobian_says(small, name, size):
    _agrees(small, _task(CHAINS[name]), *small.batch(size))


@pytest.mark.parametrize("loss", [_smoothed, _cubed, _absolute], ids=lambda loss: loss.__name__)
def test_any_loss_that_is_a_batch_mean(small, loss):
    _agrees(small, _task(CHAINS["pools"], loss=loss), *small.batch(3))


def test_soft_and_ignored_labels(small):
    x, _ = small.batch(3)
    soft = torch.softmax(normal((3, 3), stream(4), like=x), 1)
    _agrees(small, _task(CHAINS["pools"]), x, soft)
    task, ignored = _task(CHAINS["pools"]), torch.tensor([0, -100, 2])
    rows = ExampleRows(task, examples.plan(task, x), x, ignored)
    close(rows.gradient() / 3, client.gradient(task, x, ignored))


@pytest.mark.parametrize("grouped", [0, 2**30])
def test_weight_changes_of_pairs_by_groups_or_one_by_one(small, monkeypatch, grouped):
    monkeypatch.setattr(examples, "_GROUPED", grouped)
    monkeypatch.setattr(examples, "_TOGETHER", 2 * 8 * 4 * 6)
    _agrees(small, _task(CHAINS["many_channels"]), *small.batch(3))
    _agrees(small, _task(CHAINS["many_channels"]), *small.batch(1))


def _hooked():
    model = CHAINS["linear"]()
    model[1].register_forward_hook(lambda *_: None)
    return model


def _overridden():
    model = CHAINS["linear"]()
    model[1].forward = lambda x: nn.functional.linear(x, model[1].weight) / 2
    return model


def _twice():
    layer = nn.Linear(36, 36)
    return nn.Sequential(nn.Flatten(), layer, nn.Tanh(), layer, nn.Linear(36, 3))


def _tied():
    first, second = nn.Linear(36, 36), nn.Linear(36, 36)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, second, nn.Linear(36, 3))


def _noisy():
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.rand(())

    return nn.Sequential(nn.Flatten(), Noisy(36, 3))


def _mixing():
    class Mixing(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.flip(0))

    return nn.Sequential(nn.Flatten(), Mixing(36, 3))


def _branching():
    class Branching(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2 if x.sum() > 0 else 1)

    return nn.Sequential(nn.Flatten(), Branching(36, 3))


REFUSED = {
    "overridden": _overridden,
    "twice": _twice,
    "tied": _tied,
    "mixing": _mixing,
    "noisy": _noisy,
    "branching": _branching,
    "batch_dimension": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.Flatten(0, 1), nn.Flatten(), nn.Linear(36, 3), nn.Tanh()
    ),
}
READ = {
    "hooked": _hooked,
    "softmax": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3), nn.Softmax(1)),
    "falling": lambda: nn.Sequential(
        nn.Conv2d(1, 1, 3), nn.LeakyReLU(-0.5), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3)
    ),
    "turned": lambda: nn.Sequential(
        nn.ConvTranspose2d(1, 2, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(338, 3)
    ),
    "layer_norm": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.LayerNorm([4, 4]), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)
    ),
    "curved": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(36, 4), nn.Hardswish(), nn.LayerNorm(4), nn.Linear(4, 3)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused(name):
    assert examples.plan(_task(REFUSED[name]), torch.zeros(2, 1, 6, 6)) is None


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("size", [1, 3])
def test_any_model_that_can_be_read(small, name, size):
    _agrees(small, _task(READ[name]), *small.batch(size))


def test_images_that_a_convolution_would_take_for_channels_are_refused():
    task = _task(lambda: nn.Sequential(nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(32, 3)))
    assert examples.plan(task, torch.zeros(2, 6, 6)) is None
    assert examples.plan(task, torch.zeros(2, 2, 6, 6)) is not None


def test_pools_go_before_activations_only_where_these_keep_order():
    images = torch.zeros(1, 1, 6, 6)
    order = [layer.kind for layer, _ in examples.plan(_task(CHAINS["pools"]), images).layers]
    assert order[1:4] == [Kind.MAX_POOL, Kind.ACTIVATION, Kind.ACTIVATION]
    bent = nn.Sequential(
        nn.Conv2d(1, 1, 3), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3)
    )
    order = [layer.kind for layer, _ in examples.plan(_task(lambda: bent), images).layers]
    assert order[1:3] == [Kind.ACTIVATION, Kind.MAX_POOL]


def test_several_blocks_of_examples_and_directions(small):
    task, (x, y) = _task(CHAINS["pools"]), small.batch(5)
    want = sensitivity(task, x, y, stream(2), directions=4, chunk=100)
    for chunk in (1, 2, 3, 7, 11):
        found = sensitivity(task, x, y, stream(2), directions=4, chunk=chunk)
        close(found.values, want.values)
        close(found.gradient, want.gradient)


def test_directions_drawn_in_several_groups_give_the_gradient_once(small, monkeypatch):
    task, (x, y) = _task(CHAINS["pools"]), small.batch(5)
    want = sensitivity(task, x, y, stream(2), directions=4)
    monkeypatch.setattr(directions_of, "BYTES", 0)
    found = sensitivity(task, x, y, stream(2), directions=4, chunk=2)
    close(found.values, want.values)
    close(found.gradient, want.gradient)


@pytest.mark.parametrize(
    ("estimator", "directions"), [("per_sample", 1), ("per_sample", 3), ("batch", 2)]
)
def test_counted_operations_are_the_floor(monkeypatch, estimator, directions):
    monkeypatch.setattr(examples, "_GROUPED", 0)  # the counter takes groups for more than they are
    model = models.simple_convnet(input_shape=(1, 28, 28), classes=10, generator=stream(0, "model"))
    task, source = Task.of(model), stream(1)
    x, y = torch.rand(2, 1, 28, 28, generator=source), torch.tensor([1, 2])

    def count(run):
        with FlopCounterMode(display=False) as counted:
            run()
        return counted.get_total_flops()

    def run():
        sensitivity(task, x, y, source, estimator=estimator, directions=directions)

    run()  # plans once
    once = count(lambda: client.forward(task, x))
    # forward, back, and the gradient; four passes a direction
    due = 3 + 4 * directions
    assert 0.9 * due < count(run) / once < 1.04 * due


@pytest.mark.parametrize("kind", ["class weights", "ignored", "summed"])
@pytest.mark.parametrize("estimator", ["exact", "batch"])
def test_a_loss_that_is_no_mean_of_the_examples_own_takes_another_way(kind, estimator):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(12, 3)
    )
    weights = torch.tensor([0.1, 1.0, 5.0]).double()
    losses = {
        "class weights": lambda out, y: torch.nn.functional.cross_entropy(out, y, weight=weights),
        "ignored": torch.nn.functional.cross_entropy,
        "summed": lambda out, y: torch.nn.functional.cross_entropy(out, y, reduction="sum"),
    }
    task = Task.of(model, loss=losses[kind]).to("cpu", torch.float64)
    x = torch.rand(3, 1, 4, 4, dtype=torch.float64)
    labels = torch.tensor([0, -100, 2] if kind == "ignored" else [0, 1, 2])
    found = sensitivity(task, x, labels, stream(0), estimator=estimator, directions=4000)
    wanted = client.gradient(task, x, labels)
    assert torch.allclose(found.gradient, wanted, rtol=1e-9, atol=1e-12)
    if estimator == "batch" or kind == "ignored":
        return
    if kind == "summed":  # B times the mean, which the oracle takes for granted
        return
    jacobian = torch.autograd.functional.jacobian(
        lambda images: client.gradient(task, images, labels), x
    )
    assert torch.allclose(found.values, jacobian.flatten(1).square().sum(1), rtol=1e-8)
