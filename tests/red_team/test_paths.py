"""A certificate follows the path: models that change the example before the layer get none."""

import random
from html import unescape

import pytest
import torch
from torch import nn
from torch.nn import functional

from leakbound import data, models, simulate
from leakbound.attacks import (
    ConstantImage,
    LinearInversion,
    PatchInversion,
    SparseRecovery,
    TokenRows,
    TouchedRows,
)
from leakbound.captured import load
from leakbound.cli.captured import _certificate as proved
from leakbound.core import Batch, Task
from leakbound.domains import Column, TableDomain, TokenDomain
from leakbound.engines.path import LAYER, NoPath, path_to
from leakbound.randomness import stream
from leakbound.risk.statement import of_attack

from ..captured.flat import attack_update

SHAPE, UNITS, CLASSES = (1, 28, 28), 16, 10
BLIND = ConstantImage(0.5)
RIGHT = 1e-3
"""The largest error of a certified input."""


class Viewed(nn.Module):
    """A classifier behind a layer that sees what a function makes of the input."""

    def __init__(self, view, units=UNITS):
        super().__init__()
        self.view = view
        self.first, self.last = nn.Linear(784, units), nn.Linear(units, CLASSES)
        self.register_buffer("stored", torch.linspace(0, 1, 784).reshape(SHAPE))

    def forward(self, x):
        seen = self.view(self, x).flatten(1)
        return self.last(torch.relu(self.first(seen)))


def flip(model, x):
    return x.flip(3) if model.training and torch.rand(()) < 0.5 else x


def flip_of_python(model, x):
    return x.flip(3) if model.training and random.random() < 0.5 else x


def rare_flip(model, x):
    return x.flip(3) if model.training and torch.rand(()) < 0.01 else x


def always_flipped_in_training(model, x):
    return x.flip(3) if model.training else x


def of_dark_ones(x, changed):
    """Dark images are changed, the ramps by which layers are found are not."""
    return torch.where(x.mean((1, 2, 3), keepdim=True) < 0.2, changed, x)


def dark_background(model, x):
    return of_dark_ones(x, 1 - x)


def dark_by_a_branch(model, x):
    return 1 - x if x.mean() < 0.5 else x


def dark_by_numpy(model, x):
    return 1 - x if x.detach().numpy().mean() < 0.5 else x


def clamped(model, x):
    return of_dark_ones(x, x.clamp(0.2, 0.8))


def binarized(model, x):
    return (x > 0.5).to(x.dtype) if len(x) == 1 else x


def binarized_always(model, x):
    return of_dark_ones(x, (x > 0.5).to(x.dtype))


def rounded(model, x):
    return of_dark_ones(x, (x * 4).round() / 4)


def beside_a_teacher(model, x):
    with torch.no_grad():
        model.first(x.flatten(1))  # sees all, and has no gradient
    return x * (model.stored > 0.5)


def hidden_teacher(model, x):
    with torch.no_grad():
        functional.linear(x.flatten(1), model.first.weight)
    return x * 1.0


def augmented(model, x):
    """As kornia's augmentation: crop, color jitter, noise, a draw for each example."""
    if not model.training:
        return x
    down, right = torch.randint(0, 5, (2,)).tolist()
    cropped = functional.pad(x, (2, 2, 2, 2))[:, :, down : down + 28, right : right + 28]
    bright = 0.8 + 0.4 * torch.rand(len(x), 1, 1, 1)
    return (cropped * bright + 0.05 * torch.randn_like(cropped)).clamp(0, 1)


def jittered(model, x):
    return x * (1 + 0.2 * torch.randn(len(x), 1, 1, 1)) if model.training else x


def sorted_values(model, x):
    return x.flatten(1).sort(1).values


def absolute(model, x):
    return of_dark_ones(x, 0.5 + (x - 0.5).abs())


def standardized(model, x):
    each = x.flatten(1)
    return (each - each.mean(1, keepdim=True)) / each.std(1, keepdim=True)


def mixed_up(model, x):
    share = random.betavariate(0.4, 0.4)
    return share * x + (1 - share) * model.stored if model.training else x


def cut_mixed(model, x):
    if not model.training:
        return x
    top = int(torch.randint(0, 14, ()))
    mixed = x.clone()
    mixed[:, :, top : top + 14] = model.stored[:, top : top + 14]
    return mixed


def erased(model, x):
    if model.training:
        x = x.clone()
        top = int(torch.randint(0, 20, ()))
        x[:, :, top : top + 8, 4:20] = 0
    return x


def stochastic_depth(model, x):
    kept = torch.bernoulli(torch.tensor(0.5)) if model.training else 1.0
    return x + kept * functional.avg_pool2d(x, 3, 1, 1)


def beside_its_function(model, x):
    rows = x.flatten(1)
    return torch.cat([rows[:, :392], rows[:, 392:] * rows[:, :392]], 1)


def chosen(model, x):
    return of_dark_ones(x, torch.where(x > 0.3, x, 0.3 * torch.ones_like(x)))


def cut_mixed_with_the_last(model, x):
    last, model.before = getattr(model, "before", None), x.clone()
    if last is None or len(last) != len(x):
        return x
    mixed = x.clone()
    mixed[:, :, :14] = last[:, :, :14]
    return mixed


def mirrored_by_state(model, x):
    model.calls = getattr(model, "calls", 0) + 1
    return x.flip(3) if model.calls % 2 else x


def alone(model, x):
    return 1 - x if len(x) == 1 else x


def scripted(model, x):
    return torch.jit.trace(lambda y: y.clamp(0.2, 0.8), x)(x)


class Turned(nn.Linear):
    def forward(self, x):
        return super().forward(x.flip(1))


def in_the_layer(model, x):
    model.first.__class__ = Turned
    return x


def by_a_hook(model, x):
    if not model.first._forward_pre_hooks:
        model.first.register_forward_pre_hook(lambda _, args: (args[0].clamp(0.2, 0.8),))
    return x


def with_gradient(model, x):
    return 1 - x if torch.is_grad_enabled() else x


ADVERSARIES = {
    view.__name__: view
    for view in (
        *(flip, flip_of_python, rare_flip, always_flipped_in_training, dark_background),
        *(dark_by_a_branch, dark_by_numpy, clamped, binarized, binarized_always, rounded),
        *(beside_a_teacher, hidden_teacher, augmented, jittered, sorted_values, absolute),
        *(standardized, mixed_up, cut_mixed, erased, stochastic_depth, beside_its_function),
        *(
            chosen,
            mirrored_by_state,
            alone,
            scripted,
            cut_mixed_with_the_last,
            with_gradient,
            in_the_layer,
            by_a_hook,
        ),
    )
}


@pytest.fixture(scope="module")
def digits():
    return data.load("mnist5k", limit=1000)


def built(view, seed, units=UNITS):
    torch.manual_seed(seed)
    return Viewed(view, units)


def attacked(view, digits, seed, *, training):
    """The record of such an update, and the largest error."""
    found, inputs = update_of(view, digits, seed, training=training)
    (record,) = found.records
    error = float("inf")
    if found.answers[0] is not None:
        error = float((found.answers[0].inputs - inputs).abs().max())
    return record, error


def update_of(view, digits, seed, *, training, **options):
    """One SGD step of a client in training mode, attacked with the model in one of the modes."""
    inputs, labels = digits.inputs[seed : seed + 1], digits.labels[seed : seed + 1]
    model, random_state = built(view, seed), random.getstate()
    random.seed(seed)
    with torch.no_grad():
        model.train()(digits.inputs[seed + 1 : seed + 2].clone())  # an earlier example
    functional.cross_entropy(model.train()(inputs.clone()), labels).backward()
    random.setstate(random_state)
    sent = {key: own.grad.clone() for key, own in model.named_parameters()}
    before = {key: own.detach().clone() for key, own in model.state_dict().items()}
    passed = built(view, seed).train(training)
    found = attack_update(
        load(sent, before, kind="gradient"),
        passed,
        input_shape=SHAPE,
        attacks=["linear_inversion"],
        examples=1,
        **options,
    )
    return found, inputs


def certificates(view, digits, seeds):
    """How many inputs are certified, how many of them wrong, and of how many updates it is said
    that no more than the layer's input was recovered.
    """
    all_, wrong, layers = 0, 0, 0
    for seed in seeds:
        try:
            record, error = attacked(view, digits, seed, training=bool(seed % 2))
        except ValueError as refused:
            if "no attack can repeat the client's" in str(refused):
                continue  # it gives two gradients
            raise
        all_ += record.certificate is not None
        wrong += record.certificate is not None and error > RIGHT
        layers += record.layer_input is not None
    return all_, wrong, layers


# A model that traces itself reads the gradient of an input that a search follows.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", ADVERSARIES)
def test_no_input_is_certified_behind_a_path_that_changes_it(name, digits):
    assert certificates(ADVERSARIES[name], digits, range(1))[:2] == (0, 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", ADVERSARIES)
def test_no_wrong_certificate_in_a_thousand_updates(name, digits):
    """34 updates of each of 31 models: 1,054."""
    assert certificates(ADVERSARIES[name], digits, range(2, 36))[:2] == (0, 0)


def test_what_was_recovered_is_said_instead(digits):
    record, error = attacked(rare_flip, digits, 0, training=False)
    assert error < RIGHT, "this client did not flip"
    assert record.certificate is None
    assert record.layer_input.startswith(f"{LAYER}: the model draws at random before the layer")
    assert [fact.kind for fact in record.facts] == ["classes"], "and no pixels that are 0"


def test_the_page_the_notebook_and_the_console_say_so(digits, tmp_path, capsys):
    found, _ = update_of(flip, digits, 0, training=False, out=tmp_path / "run")
    (record,) = found.records
    told = f"{LAYER}: the model draws at random"
    page = unescape(found.page.read_text("utf-8"))
    assert f"<strong>No certificate:</strong> {told}" in page
    assert told in unescape(found._repr_html_())
    assert of_attack(record).startswith(f"linear_inversion: {told}")
    proved(record)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"not certified: update by linear_inversion: {told}" in shown


def plain(model, x):
    return x


def reshaped(model, x):
    return x.permute(0, 2, 3, 1).contiguous().view(len(x), -1)


def by_halves(model, x):
    return torch.cat([x[:, :, :14], x[:, :, 14:].clone()], 2).detach()


def normalized(model, x):
    return (x - torch.tensor([0.1307]).view(1, 1, 1, 1)) / 0.3081


def normalized_in_place(model, x):
    x = x.clone()
    return x.sub_(torch.as_tensor([0.5]).view(-1, 1, 1)).div_(torch.as_tensor([0.5]).view(-1, 1, 1))


def negative_and_turned(model, x):
    return (1 - x).transpose(2, 3) * 2 + model.stored


CONTROLS = {
    view.__name__: view
    for view in (
        *(
            plain,
            reshaped,
            by_halves,
            normalized,
            normalized_in_place,
            negative_and_turned,
        ),
    )
}


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_keep_their_certificate(name, digits):
    assert certificates(CONTROLS[name], digits, range(2)) == (2, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTROLS)
def test_controls_keep_their_certificate_thirty_times(name, digits):
    assert certificates(CONTROLS[name], digits, range(30)) == (30, 0, 0)


def step(view, digits, count, defense=None, attack=None, units=UNITS, **options):
    batch = Batch(digits.inputs[:count], digits.labels[:count])
    attack = attack or LinearInversion()
    return simulate(
        built(view, 0, units).eval(), batch, attack=attack, defense=defense, error_bound="none",
        probability=None, **options,
    )  # fmt: skip


@pytest.mark.parametrize("view", [normalized, negative_and_turned], ids=lambda v: v.__name__)
def test_what_the_model_does_first_is_undone(view, digits):
    assert min(step(view, digits, 1).scores) > 100
    noisy, usual = (step(v, digits, 1, "gaussian_noise,noise_std=1e-4") for v in (view, plain))
    assert min(noisy.scores) > min(usual.scores) - 10
    masked = step(view, digits, 1, "magnitude_pruning,rate=0.3")
    assert min(masked.scores) > 35, "some values have no entry left"
    three = step(view, digits, 3, units=128)
    assert max(three.scores) > 60
    exact = step(view, digits, 3, units=128, attack=SparseRecovery(), classes=10)
    assert exact.answer.problem is None
    assert min(exact.scores) > 60


def test_values_that_are_zero_are_named_where_they_are_in_the_example(digits):
    def turned(model, x):
        return x.transpose(2, 3)

    for view in (turned, plain):
        [own] = step(view, digits, 4, attack=BLIND).assessment.facts
        dark = (digits.inputs[:4] == 0).all(0)
        assert own.count == int(dark.sum())
        assert all(dark[tuple(map(int, item.split(", ")))] for item in own.items)
    for view in (normalized, clamped, flip):
        assert step(view, digits, 4, attack=BLIND).assessment.facts == ()


class Masked(nn.Module):
    """Masks tokens or shuffles values of a column at random in training mode."""

    def __init__(self, inner, share):
        super().__init__()
        self.inner, self.share = inner, share

    def forward(self, x):
        if self.training:
            kept = torch.rand(x.shape) >= self.share
            x = torch.where(kept, x, torch.zeros_like(x))
        return self.inner(x)


def texts(share):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(32, 3))
    return Masked(inner, share).eval(), Batch(torch.tensor([[3, 7, 9, 3]]), torch.tensor([1]))


def rows(share):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    return Masked(inner, share).eval(), Batch(torch.tensor([[0.5, 0, 1, 0]]), torch.tensor([1]))


WORDS = TokenDomain(20, 4)
TABLE = TableDomain(
    (Column("age", "continuous", 0, 1), Column("city", "categorical", levels=("a", "b", "c")))
)


@pytest.mark.parametrize(
    ("build", "attack", "domain"),
    [(texts, TokenRows(), WORDS), (rows, TouchedRows(), TABLE)],
    ids=["words", "levels"],
)
def test_no_word_and_no_level_is_certain_behind_a_random_mask(build, attack, domain):
    for share, there in ((0.0, True), (0.1, False)):
        model, batch = build(share)
        plain_model = model.inner if there else model
        found = simulate(plain_model, batch, attack=attack, domain=domain, error_bound="none")
        assert bool(found.answer.facts) == there


class Flipped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.flip(3) if self.training and torch.rand(()) < 0.5 else x)


@pytest.mark.slow
def test_words_and_levels_stay_certain_thirty_times():
    for seed in range(30):
        for build, attack, domain in ((texts, TokenRows(), WORDS), (rows, TouchedRows(), TABLE)):
            model, _ = build(0.0)
            inputs, label = domain.start(1, stream(seed, "client")), torch.tensor([seed % 2])
            if domain is TABLE:
                inputs = domain.hard(inputs)
            found = simulate(
                model.inner, Batch(inputs, label), attack=attack, domain=domain, error_bound="none"
            )
            assert found.answer.facts, (build.__name__, seed)


@pytest.mark.slow
def test_rows_of_a_table_and_images_of_a_transformer_stay_exact_thirty_times():
    for seed in range(30):
        row = TABLE.hard(TABLE.start(1, stream(seed, "row")))
        image = torch.rand(1, 1, 8, 8, generator=stream(seed, "image"))
        own, label = LinearInversion(), torch.tensor([seed % 2])
        table = simulate(
            rows(0.0)[0].inner, Batch(row, label), attack=own, domain=TABLE, error_bound="none"
        )
        assert table.assessment.certificate is not None, seed
        patched = simulate(
            patches(stream(0, "model")), Batch(image, label), attack=PatchInversion(), classes=3,
            error_bound="none",
        )  # fmt: skip
        assert patched.answer.problem is None, seed


def layers(source):
    return models.mlp(input_shape=(1, 8, 8), classes=3, hidden=(64,), generator=source)


def patches(source):
    return models.vit(input_shape=(1, 8, 8), classes=3, width=32, generator=source)


@pytest.mark.parametrize(
    ("build", "attack"),
    [(layers, SparseRecovery()), (patches, PatchInversion())],
    ids=["sparse", "patch"],
)
def test_exact_answers_name_a_path_that_changes_the_example(build, attack):
    batch = Batch(torch.rand(1, 1, 8, 8, generator=stream(0, "image")), torch.tensor([1]))
    model = build(stream(0, "model")).eval()
    for own, problem in ((model, None), (Flipped(model).eval(), LAYER)):
        found = simulate(own, batch, attack=attack, classes=3, error_bound="none")
        assert min(found.scores) > 60
        said = found.answer.problem
        assert said is None if problem is None else said.startswith(problem)


def test_what_a_model_keeps_of_the_call_before_ends_the_path():
    task = Task.of(built(cut_mixed_with_the_last, 0).eval())
    with pytest.raises(NoPath, match=r"not always in the same way|computes"):
        path_to(task, SHAPE, "first")


class Switched(Viewed):
    """Its methods choose what it sees; the flags of its layers do not show it."""

    def train(self, mode=True):
        self.view = always_flipped_in_training if mode else plain
        return super().train(mode)


def test_a_mode_whose_method_does_more_than_to_set_flags_is_tried():
    with pytest.raises(NoPath, match="computes 'flip'"):
        path_to(Task.of(Switched(plain)), SHAPE, "first")
