"""What a step costs, counted: the same numbers on any machine, so that none may creep up."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import leakbound
from leakbound import client, data, models
from leakbound.attacks import GradientMatching
from leakbound.attacks.matching.engine import Evaluator
from leakbound.attacks.matching.loop import TRACE_POINTS, WIDTH, Loop
from leakbound.core import Batch, Task
from leakbound.defenses import NoDefense
from leakbound.protocol import play
from leakbound.randomness import stream

FOLDER = Path(leakbound.__file__).parents[2] / "benchmarks"
if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not part of this distribution", allow_module_level=True)


def _load(name):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", FOLDER / f"figures/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


counting = _load("counting")

# (model, its options, batch, most operations of a step / forward, most bytes alive / weights')
STEPS = {
    "simple_convnet": ("simple_convnet", {}, 1, 7.0, 4.0),
    "simple_convnet, 16": ("simple_convnet", {}, 16, 7.0, 26.0),
    "convnet64": ("convnet64", {"norm": "batch"}, 2, 7.0, 9.5),
    "resnet18, batch norm": ("resnet18", {"norm": "batch"}, 1, 7.0, 1.8),
    "resnet18, group norm": ("resnet18", {"norm": "group"}, 1, 7.0, 2.0),
}
PEER = {"simple_convnet": 7.8, "convnet64": 8.0}


def _observed(name, options, size, source="photos", classes=10):
    source = "mnist5k" if name == "simple_convnet" else source
    images = data.load(source, limit=max(64, size))
    batch = images.batch(torch.arange(size))
    shape = tuple(batch.inputs.shape[1:])
    build = getattr(models, name)
    model = build(input_shape=shape, classes=classes, generator=stream(0, "model"), **options)
    task = Task.of(model, classes=classes)
    return play(task, [batch], NoDefense(), [stream(0, i) for i in range(2)]).observation


def _search(case, many=False, **settings):
    name, options, size, *_ = STEPS[case]
    seen = _observed(name, options, size)
    return GradientMatching(**settings).search(seen, stream(0, "attack"), many=many)


def _forward(search):
    """Operations of one forward pass of its model."""
    guess, task = search.images().detach(), search.objective.task
    return counting.count(lambda: client.forward(task, guess)).operations


@pytest.mark.parametrize("case", list(STEPS))
def test_a_step_costs_at_most_seven_forwards(case):
    search = _search(case)
    step = counting.count(Evaluator([search]).evaluate).operations
    assert step / _forward(search) <= STEPS[case][3]


@pytest.mark.parametrize("case", list(STEPS)[:4])
def test_a_step_holds_few_bytes_at_once(case):
    search = _search(case)
    evaluate = Evaluator([search]).evaluate
    evaluate()
    taken = counting.peak(evaluate)
    assert taken / (4 * search.objective.task.parameters.numel()) <= STEPS[case][4]


def test_among_many_a_step_costs_each_search_what_it_costs_alone():
    searches = [_search("simple_convnet", many=True, steps=100) for _ in range(WIDTH)]
    together = Loop(GradientMatching(steps=100), searches)
    together.step(0)
    step = counting.count(lambda: together.step(1)).operations
    assert step / _forward(searches[0]) <= 7.0 * WIDTH


def _double_backward(search):
    """Inverting Gradients' own way, without leaf gradients: what the step is measured against."""
    guess = search.images().detach().clone().requires_grad_()
    own = client.gradient(search.objective.task, guess, search.labels)
    seen = search.objective.seen[0]
    value = 1 - (own * seen).sum() / (own.norm() * seen.norm())
    return torch.autograd.grad(value, guess)[0]


@pytest.mark.parametrize("case", ["simple_convnet", "convnet64"])
def test_double_backward_costs_what_is_said_of_the_peers(case):
    search = _search(case)
    used = counting.count(lambda: _double_backward(search)).operations / _forward(search)
    assert used == pytest.approx(PEER[STEPS[case][0]], abs=0.05)


CONVOLUTIONS = {
    "plain": {"stride": 1, "padding": 1},
    "strided": {"stride": 2, "padding": 1},
    "grouped": {"stride": 1, "groups": 2},
    "dilated": {"dilation": 2},
}


@pytest.mark.parametrize("kind", list(CONVOLUTIONS))
@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d], ids=["down", "up"])
def test_a_forward_convolution_is_counted_as_torch_counts_it(kind, layer):
    net = layer(4, 6, 3, **CONVOLUTIONS[kind])
    inputs = torch.zeros(2, 4, 9, 8)
    with FlopCounterMode(display=False) as theirs:
        net(inputs)
    assert counting.count(lambda: net(inputs)).operations == theirs.get_total_flops()


@pytest.mark.parametrize("kind", list(CONVOLUTIONS))
def test_a_convolutions_backward_costs_two_forwards(kind):
    net = nn.Conv2d(4, 6, 3, **CONVOLUTIONS[kind])
    inputs = torch.zeros(2, 4, 9, 8, requires_grad=True)
    forward = counting.count(lambda: net(inputs)).operations
    out = net(inputs).sum()
    assert counting.count(lambda: out.backward()).operations == 2 * forward


def test_products_of_matrices_are_counted_by_hand():
    a, b, v = torch.ones(3, 4), torch.ones(4, 5), torch.ones(4)
    assert counting.count(lambda: a @ b).operations == 2 * 3 * 4 * 5
    assert counting.count(lambda: torch.addmm(torch.ones(5), a, b)).operations == 120
    assert counting.count(lambda: a.expand(7, 3, 4) @ b.expand(7, 4, 5)).operations == 7 * 120
    assert counting.count(lambda: a @ v).operations == 2 * 3 * 4
    assert counting.count(lambda: torch.ones(3, 5).addmm_(a, b)).operations == 120
    assert counting.count(lambda: torch.mm(a, b, out=torch.empty(3, 5))).operations == 120
    assert counting.count(lambda: a[:, :1] * b[:1]).operations == 2 * 3 * 5
    assert counting.count(lambda: a * a + a * v + 2 * a).operations == 0
    assert counting.count(lambda: torch.func.vmap(lambda x: x @ b)(a)).operations == 120


def test_a_packed_convolution_is_counted_as_a_plain_one():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch packs no weights")
    net, inputs = nn.Conv2d(4, 6, 3, padding=1), torch.zeros(2, 4, 9, 8)
    how = ([1, 1], [1, 1], [1, 1], 1)  # padding, stride, dilation, groups
    packed = torch.ops.mkldnn._reorder_convolution_weight(net.weight.detach(), *how, None)

    def run():
        more = (None, *how, "none", [], "")
        return torch.ops.mkldnn._convolution_pointwise(inputs, packed, *more)

    plain = counting.count(lambda: net(inputs))
    assert counting.count(run).operations == plain.operations
    assert counting.peak(run) == 4 * 2 * 6 * 9 * 8


def test_an_unknown_product_is_an_error():
    with pytest.raises(RuntimeError, match="not counted"), counting.Products():
        torch.addr(torch.ones(3, 4), torch.ones(3), torch.ones(4))


def test_bytes_are_those_alive_at_once():
    start = torch.zeros(1000, requires_grad=True)

    def kept():
        value = start
        for _ in range(5):
            value = value.exp()
        return value.sum()

    def dropped():
        value = start.detach()
        for _ in range(5):
            value = value.exp()

    assert counting.peak(kept) == 5 * 4000 + 4
    assert counting.peak(dropped) == 2 * 4000
    assert counting.peak(lambda: start.detach().view(10, 100)[3]) == 0


class _Waits(TorchDispatchMode):
    """Every operation for whose value the processor waits."""

    NAMES = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "unique", "masked_select")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func.overloadpacket).partition(".")[2]
        if name in self.NAMES:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


SEARCHES = {
    "pixels": {},
    "total variation": {"total_variation": 1e-3},
    "squared distance": {"schedule": "constant", "distance": "euclidean"},
}


def _small(device="cpu"):
    """A model whose steps are quick, on real digits."""
    images = data.load("digits", limit=4)
    build = stream(0, "model")
    model = models.mlp(input_shape=(1, 8, 8), classes=10, hidden=(8,), generator=build)
    task = Task.of(model.to(device), classes=10)
    drawn = images.batch(torch.arange(2))
    batch = Batch(drawn.inputs.to(device), drawn.labels.to(device))
    return play(task, [batch], NoDefense(), [stream(0, i) for i in range(2)]).observation


@pytest.mark.parametrize("name", list(SEARCHES))
def test_between_points_of_the_trace_nothing_waits_for_the_device(name):
    steps = 8 * TRACE_POINTS
    attack, seen = GradientMatching(steps=steps, **SEARCHES[name]), _small()
    with _Waits() as waits:
        attack(seen, stream(0, "attack"))
    points = TRACE_POINTS + 1
    assert len(waits.found) <= 4 * points + 40 < steps


def test_among_many_nothing_waits_either():
    cells, steps = 4, 8 * TRACE_POINTS
    seen = [_small() for _ in range(cells)]
    with _Waits() as waits:
        GradientMatching(steps=steps).many(seen, [stream(i, "attack") for i in range(cells)])
    assert len(waits.found) <= cells * (4 * (TRACE_POINTS + 1) + 40) < cells * steps


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("name", list(SEARCHES))
def test_the_loop_on_a_gpu_never_waits_for_it(name):
    settings = GradientMatching(steps=1000, **SEARCHES[name])
    step = Loop(settings, [settings.search(_small("cuda"), stream(0, "attack"))]).step
    step(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(1, 20):
            step(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
