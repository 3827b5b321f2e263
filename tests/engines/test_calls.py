"""Models of users, read from the functions that they call, against autograd."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from leakbound import Batch, client, defenses, models, play
from leakbound.attacks import inverting_gradients
from leakbound.attacks.matching.engine import engine_for
from leakbound.core import LocalPlan, Task
from leakbound.engines import calls, single
from leakbound.engines.choose import choose
from leakbound.engines.reader import Kind

CLASSES = 5
IMAGE = (3, 8, 8)


class ConvNeXt(nn.Module):
    """Depthwise convolution, layer norm over channels, two linear layers, layer scale."""

    def __init__(self):
        super().__init__()
        self.stem, self.deep = nn.Conv2d(3, 8, 2, 2), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm, self.last = nn.LayerNorm(8), nn.LayerNorm(8)
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(0.5 + torch.rand(8, 1, 1))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        y = self.norm(self.deep(x).permute(0, 2, 3, 1))
        y = self.narrow(functional.gelu(self.wide(y))).permute(0, 3, 1, 2)
        x = x + self.scale * y
        return self.head(self.last(x.mean([-2, -1])))


class PreActivation(nn.Module):
    def __init__(self, training):
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(3))
        self.layers = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1, bias=False) for _ in range(2))
        self.head, self.flat = nn.Linear(6, CLASSES), nn.BatchNorm1d(6)
        self.train(training)

    def forward(self, x):
        x = self.first(x)
        y = self.layers[0](functional.relu(self.norms[0](x)))
        x = x + self.layers[1](functional.relu(self.norms[1](y)))
        x = functional.adaptive_avg_pool2d(functional.silu(self.norms[2](x)), 1)
        return self.head(self.flat(x.view(x.size(0), -1)))


class UNet(nn.Module):
    """Skips, a transposed convolution, bilinear values between, a max pool."""

    def __init__(self):
        super().__init__()
        self.down, self.mid = nn.Conv2d(3, 6, 3, padding="same"), nn.Conv2d(6, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.norm, self.last = nn.BatchNorm2d(12), nn.Conv2d(20, CLASSES, 1)

    def forward(self, x):
        one = functional.relu(self.down(x))
        low = functional.elu(self.mid(functional.max_pool2d(one, 2)))
        wide = functional.interpolate(low, scale_factor=2, mode="bilinear", align_corners=False)
        both = self.norm(torch.cat([self.up(low), one], dim=1))
        return self.last(torch.cat((both, wide), 1)).mean((2, 3))


class Attention(nn.Module):
    """A class token, learned positions, PyTorch's own attention, a mask, pooled positions."""

    def __init__(self, causal=False):
        super().__init__()
        self.causal, self.patches = causal, nn.Conv2d(3, 12, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 12))
        self.places = nn.Parameter(torch.randn(1, 5, 12))
        self.norm, self.all, self.out = nn.LayerNorm(12), nn.Linear(12, 36), nn.Linear(12, CLASSES)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.places
        query, key, value = self.all(self.norm(x)).chunk(3, -1)
        each = [v.view(len(x), 5, 3, 4).transpose(1, 2) for v in (query, key, value)]
        y = functional.scaled_dot_product_attention(*each, is_causal=self.causal)
        return self.out((x + y.transpose(1, 2).reshape(x.shape)).mean(1))


class Encoder(nn.Module):
    """PyTorch's own transformer layer."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 4, 4)
        layer = {"batch_first": True, "norm_first": True, "activation": "gelu"}
        self.layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.1, **layer)
        self.out = nn.Linear(12, CLASSES)

    def forward(self, x):
        return self.out(self.layer(self.patches(x).flatten(2).transpose(1, 2))[:, 0])


class Handmade(nn.Module):
    """Norms and activations in single functions, weights in odd places, some of them frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.act = nn.Linear(192, 12), nn.PReLU(12)
        self.weight, self.bias = nn.Parameter(torch.rand(12)), nn.Parameter(torch.rand(12))
        self.mix, self.last = nn.Parameter(torch.randn(12, 12)), nn.Linear(12, CLASSES)
        self.still = nn.Linear(12, 12).requires_grad_(False)
        self.unused = nn.Parameter(torch.rand(3))
        self.register_buffer("shift", torch.rand(12))
        self.power = torch.tensor([2.0] * 6 + [3.0] * 6, dtype=torch.float64)

    def forward(self, x):
        x = self.act(self.first(torch.flatten(x, 1)))
        x = (x - x.mean(1, keepdim=True)) / torch.sqrt(x.var(1, keepdim=True) + 1e-3)
        x = self.weight * x + self.bias - self.shift
        x = functional.hardswish(x) * 0.5 + (1 - torch.sigmoid(x)) ** 2
        x = torch.einsum("bi,ij->bj", x, self.mix) / 3 + self.still(x) * self.mix.sum()
        x = torch.where(x.detach() > 0.2, x, 2 * x) * x.amax(1, keepdim=True).detach()
        return self.last(x.abs().clamp_min(0.1) ** self.power.to(x))


class Twice(nn.Module):
    """Weights that several layers use."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(192, 12), nn.Linear(12, 12)
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(12, CLASSES))
        self.again = nn.Linear(12, 12)
        self.again.weight = self.second.weight

    def forward(self, x):
        x = torch.tanh(self.first(x.flatten(1)))
        return self.out(self.again(torch.tanh(self.second(torch.tanh(self.second(x))))))


class Series(nn.Module):
    """One-dimensional layers."""

    def __init__(self):
        super().__init__()
        self.first, self.back = nn.Conv1d(3, 6, 3, padding=1), nn.ConvTranspose1d(6, 6, 2, 2)
        self.norm, self.group = nn.BatchNorm1d(6), nn.GroupNorm(2, 6)
        self.inside, self.out = nn.InstanceNorm1d(6, affine=True), nn.Linear(6, CLASSES)

    def forward(self, x):
        x = self.group(self.norm(self.first(x.flatten(2))))
        x = functional.gelu(self.back(x), approximate="tanh")
        return self.out(functional.avg_pool1d(self.inside(x), 4).amax(2))


def _hooked():
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.Softmax(1), nn.Linear(6, CLASSES))
    model[1].register_forward_hook(lambda module, args, out: 2 * out.sin())
    return model.eval()


MODELS = {
    "convnext": lambda: ConvNeXt().eval(),
    "preactivation": lambda: PreActivation(False),
    "preactivation-training": lambda: PreActivation(True),
    "unet": lambda: UNet().eval(),
    "unet-training": lambda: UNet().train(),
    "attention": lambda: Attention().eval(),
    "attention-causal": lambda: Attention(causal=True).eval(),
    "encoder": lambda: Encoder().eval(),
    "handmade": lambda: Handmade().eval(),
    "twice": lambda: Twice().eval(),
    "series": lambda: Series().eval(),
    "hooked": _hooked,
    "reflect": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, 2, padding="same"),
        nn.PixelShuffle(2),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    ).eval(),
}
BUILT_IN = {
    "vit": (models.vit, {"width": 16, "layers": 2}),
    "resnet18": (models.resnet18, {"width": 4, "norm": "batch_training"}),
}
ALL = [*MODELS, *BUILT_IN]


def _task(name, dtype=torch.float64, **more):
    torch.manual_seed(0)
    if name in BUILT_IN:
        build, options = BUILT_IN[name]
        options = {**options, "generator": torch.Generator().manual_seed(0)}
        model = build(input_shape=IMAGE, classes=CLASSES, **options)
    else:
        model = MODELS[name]()
    with torch.no_grad():
        for module in model.modules():
            for part in ("weight", "bias", "running_mean", "running_var"):
                own = getattr(module, part, None)
                if "Norm" in type(module).__name__ and isinstance(own, torch.Tensor):
                    own.copy_(own + 0.3 * torch.rand_like(own))  # away from the identity
    return Task.of(model, **more).to("cpu", dtype)


def _plan(task, curved=False):
    plan = single.plan(task, (2, *IMAGE), curved)
    assert plan is not None
    return plan


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", ALL)
def test_it_is_autograds_double_backward(judge, name):
    task = _task(name)
    engine = single.Single(task, _plan(task))
    for size, soft in ((2, False), (3, True), (4, False)):
        given = judge.example(task, IMAGE, size, soft)
        judge.agree(engine, task, given)
        judge.agree(engine, task, given)  # nothing of a pull is left


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", ALL)
def test_float32_is_as_exact_as_autograd(judge, name):
    task = _task(name, torch.float32)
    given = judge.example(task, IMAGE, 3)
    wide = [part.double() if part.is_floating_point() else part for part in given]
    truths = judge.autograd(task.to("cpu", torch.float64), *wide)
    mine = judge.mine(single.Single(task, _plan(task)), *given)
    judge.as_exact(mine, truths, judge.autograd(task, *given))


@pytest.mark.parametrize("name", ALL)
def test_slopes_in_the_weights_are_autograds(judge, name):
    """Those of <gradient, v>, which several local steps need, at weights written over others."""
    task = _task(name)
    inputs, labels, cotangent = judge.example(task, IMAGE, 3)
    leaf = task.parameters.clone().requires_grad_()
    gradient = client.gradient(task, inputs, labels, leaf)
    (wanted,) = torch.autograd.grad(gradient, leaf, cotangent)
    row = torch.full_like(task.parameters, float("nan"))
    other = replace(task, parameters=torch.ones_like(row))
    engine = single.Single(other, _plan(task, curved=True), row)
    other.parameters.copy_(task.parameters)
    engine.gradient(inputs[None], labels[None])
    engine.pull(cotangent[None])
    assert judge.error(row, wanted) < 1e-10


@pytest.mark.parametrize("name", ["convnext", "preactivation-training", "attention"])
def test_local_steps(judge, name):
    task = replace(_task(name), plan=LocalPlan(3, 0.05, 2))
    engine = single.LocalSteps(task, _plan(task, curved=True))
    given = judge.example(task, IMAGE, 4)
    judge.agree(engine, task, given)


@pytest.mark.parametrize("name", ["vit", "convnext", "unet-training", "handmade"])
def test_nothing_waits_for_the_device(judge, name):
    task = _task(name, torch.float32)
    engine, given = single.Single(task, _plan(task)), judge.example(task, IMAGE, 2)
    with judge.NoSync():
        engine.gradient(given[0][None], given[1][None])
        engine.pull(given[2][None])


def test_scores_of_every_position(judge):
    source = torch.Generator().manual_seed(0)
    model = models.unet(input_shape=IMAGE, classes=CLASSES, generator=source)
    task = Task.of(model).to("cpu", torch.float64)
    engine, (inputs, _, cotangent) = single.Single(task, _plan(task)), judge.example(task, IMAGE, 2)
    labels = torch.randint(CLASSES, (2, 8, 8), generator=source)
    judge.agree(engine, task, (inputs, labels, cotangent))
    soft = torch.rand(2, CLASSES, 8, 8, generator=source, dtype=torch.float64)
    judge.agree(engine, task, (inputs, soft, cotangent))


def test_a_step_of_a_vision_transformer_is_seven_forwards(judge):
    """The products of attention, of two values, are nine."""
    task = _task("vit", torch.float32)
    engine, (inputs, labels, _) = single.Single(task, _plan(task)), judge.example(task, IMAGE, 2)
    with torch.no_grad():
        forward = judge.products(lambda: client.forward(task, inputs))
    whole = judge.products(lambda: engine.pull(engine.gradient(inputs[None], labels[None])))
    assert 6.5 * forward < whole <= 7.3 * forward


KNOWN = {
    "vit": {Kind.STRAIGHT},
    "convnext": set(),
    "encoder": {Kind.STRAIGHT},
    "preactivation-training": set(),
    "resnet18": set(),
}
"""Models, and kinds of those of their layers that PyTorch differentiates alone."""


@pytest.mark.parametrize("name", KNOWN)
def test_fast_models_have_rules_for_all_but_cheap_layers(name):
    found = {layer.kind for layer in calls.read(_task(name), IMAGE)}
    assert found & {Kind.STRAIGHT, Kind.CURVED} == KNOWN[name]


def test_autograd_is_chosen_where_it_is_faster():
    """Many calls that PyTorch differentiates alone took 1.1 to 3.7 of autograd's time."""
    source = torch.Generator()
    gru = Task.of(models.gru(input_shape=(2, 5), classes=CLASSES, generator=source))
    assert single.plan(gru, (1, 2, 5)) is not None
    assert choose(gru, 1, (1, 2, 5)) is None
    unet = Task.of(models.unet(input_shape=(3, 32, 32), classes=CLASSES, generator=source))
    assert choose(unet, 1, (1, 3, 32, 32)) is None
    assert choose(unet, 1, (4, 3, 32, 32)) is not None


class Counting(nn.Module):
    """Different for few examples."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(192, CLASSES)

    def forward(self, x):
        return self.layer(x.flatten(1)) * (1 if len(x) > 2 else 2)


class Branching(Counting):
    def forward(self, x):
        return self.layer(x.flatten(1)) if x.sum() > 0 else -self.layer(x.flatten(1))


class Ignoring(Counting):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x) + 0 * self.layer(x.flatten(1))


class Noisy(Counting):
    def forward(self, x):
        return self.layer(x.flatten(1) + torch.rand(192))


class Writing(Counting):
    def forward(self, x):
        y = x.flatten(1).clone()
        y[:, 0] = 0
        return self.layer(y)


class Foreign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, delta):
        return delta


class Calling(Counting):
    def forward(self, x):
        return self.layer(Foreign.apply(x.flatten(1)))


REFUSED = {
    "counting": Counting,
    "branching": Branching,
    "ignoring": Ignoring,
    "noisy": Noisy,
    "writing": Writing,
    "own function": Calling,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_repeated_is_autograds(name):
    assert single.plan(Task.of(REFUSED[name]().eval()), (1, *IMAGE)) is None


@pytest.mark.parametrize("clients", [1, 2])
def test_batch_statistics_are_of_one_client(clients):
    """Examples of several clients do not affect each other, so a row is not the whole batch's."""
    task, source = _task("preactivation-training", torch.float32), torch.Generator()
    batches = [Batch(torch.rand(2, *IMAGE), torch.tensor([0, 1])) for _ in range(clients)]
    sources = [torch.Generator() for _ in range(clients)]
    defense = defenses.NoDefense() if clients == 1 else defenses.SecureAggregation(clients=2)
    seen = play(task, batches, defense, [*sources, source]).observation
    found = engine_for(seen, task)
    assert (found is not None) == (clients == 1)
    attack = inverting_gradients(steps=2)
    assert attack(seen, torch.Generator().manual_seed(0)).inputs.isfinite().all()
