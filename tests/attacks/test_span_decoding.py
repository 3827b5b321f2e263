"""Rows from the span of a gradient: against enumeration, many clients, and mixtures."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import leakbound as lb
from leakbound import data
from leakbound.attacks import SpanDecoding
from leakbound.attacks.base import SentRow
from leakbound.attacks.table.decoding import Survivors, decode, layer_span, rows_span
from leakbound.attacks.table.view import joint, view
from leakbound.client import gradient
from leakbound.core import Batch, LocalPlan, NotApplicable, Task
from leakbound.defenses import Clip, GaussianNoise, NoDefense, Quantization, SecureAggregation
from leakbound.domains import Column, TableDomain
from leakbound.protocol import play
from leakbound.randomness import stream
from leakbound.testing import check_attack

LEVELS = (4, 3, 3, 2)


def small(levels=LEVELS, numbers=2):
    named = [
        Column(f"c{k}", "categorical", levels=tuple("abcdefgh"[:n])) for k, n in enumerate(levels)
    ]
    return TableDomain((*named, *(Column(f"n{k}", "continuous") for k in range(numbers))))


def draw(domain, count, seed, distinct=True):
    """Valid rows; with distinct categories if asked."""
    source, found = stream(seed, "rows"), []
    while len(found) < count:
        row = domain.hard(torch.rand((1, *domain.shape), generator=source))[0]
        names = domain.rows(row[None])[0][: len(domain.groups)]
        if not distinct or all(names != other for other, _ in found):
            found.append((names, row))
    return torch.stack([row for _, row in found]), torch.arange(count) % 2


def mlp(inputs, width=40, seed=0, activation=nn.ReLU, depth=2, outputs=2, bias=True):
    sizes = [inputs, *[width] * depth, outputs]
    layers = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for a, b in itertools.pairwise(sizes):
            layers += [nn.Linear(a, b, bias=bias), activation()]
    return nn.Sequential(*layers[:-1])


def seen(task, *batches, defense=None, **more):
    sources = [stream(k, "defense") for k in range(len(batches) + 1)]
    return play(task, [Batch(*b) for b in batches], defense or NoDefense(), sources, **more)


def attack(played):
    return SpanDecoding()(played.observation, stream(0, "attack"))


def names(domain, rows):
    return sorted(domain.rows(rows))


def categories(domain, rows):
    kept = [k for k, column in enumerate(domain.columns) if column.categorical]
    return sorted(tuple(row[k] for k in kept) for row in domain.rows(rows))


@pytest.fixture(scope="module")
def german():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    table = data.load("german")
    order = torch.randperm(1000, generator=stream(0, "split"))
    public = Batch(table.inputs[order[:300]], table.labels[order[:300]])
    domain = TableDomain(table.columns).fitted(public.inputs)
    yield domain, table.inputs[order[300:]], table.labels[order[300:]], public
    torch.set_num_threads(threads)


def scene(german, size, seed, defense=None, **settings):
    domain, inputs, labels, public = german
    at = torch.randperm(700, generator=stream(seed, "batch"))[:size]
    kinds = {key: settings.pop(key) for key in ("loss", "plan") if key in settings}
    given = {"width": 100, **settings}
    task = Task.of(mlp(domain.shape[0], seed=seed, **given), domain=domain, classes=2, **kinds)
    batch = inputs[at], labels[at]
    return seen(task, batch, defense=defense, auxiliary=public), batch[0]


# What lies in the span


def enumerated(domain, rows):
    """All categories whose one-hot vector, with a 1, is a combination of the rows'."""
    stop = domain.groups[-1][1]
    basis = np.concatenate([rows[:, :stop].double().numpy(), np.ones((len(rows), 1))], 1)
    found = set()
    for levels in itertools.product(*(range(b - a) for a, b in domain.groups)):
        point = np.zeros(stop + 1)
        point[[a + k for (a, _), k in zip(domain.groups, levels, strict=True)]] = 1
        point[-1] = 1
        weights = np.linalg.lstsq(basis.T, point, rcond=None)[0]
        if np.abs(basis.T @ weights - point).max() < 1e-6:
            found.add(levels)
    return found


@pytest.mark.parametrize("size", [2, 4, 6, 8])
def test_survivors_are_those_of_an_enumeration(size):
    domain = small()
    for seed in range(4):
        rows, labels = draw(domain, size, seed)
        task = Task.of(mlp(domain.shape[0], seed=seed), domain=domain)
        own = view(task, domain)
        row = gradient(task, rows, labels)
        span = rows_span(joint(task, own.name, row), size, 0.0, 1e-6)
        assert span.rank == size
        order = [
            domain.groups.index((b.start, b.start + b.options.shape[1])) for b in own.levels[1:]
        ]
        chosen = decode(span, own.levels, 10_000)[:, 1:]
        back = chosen[:, torch.tensor(order).argsort()]
        assert {tuple(levels) for levels in back.tolist()} == enumerated(domain, rows)


def mixed():
    """Three rows of which x1 - x2 + x3 is a row of the table, too, and two others."""
    domain = small((3, 3, 3, 3), numbers=1)
    levels = [(0, 0, 1, 2), (1, 0, 1, 2), (1, 1, 1, 2), (2, 0, 2, 1), (0, 2, 0, 0)]
    rows = torch.zeros(5, 13)
    for i, chosen in enumerate(levels):
        rows[i, [3 * k + at for k, at in enumerate(chosen)]] = 1
    rows[:, 12] = torch.tensor([0.3, 0.4, 0.6, 0.9, 0.1])
    return domain, rows, rows[0] - rows[1] + rows[2]


@pytest.mark.parametrize(
    ("activation", "depth", "plan"),
    [
        (nn.ReLU, 1, LocalPlan()),  # the units that are off alone
        (nn.ReLU, 2, LocalPlan(3, 0.1, 2)),
        (nn.Tanh, 2, LocalPlan()),  # the later layers alone
    ],
)
def test_a_mixture_is_in_the_span_and_is_rejected(activation, depth, plan):
    domain, rows, mixture = mixed()
    assert enumerated(domain, rows) >= {(0, 1, 1, 2)}
    model = mlp(13, 60, activation=activation, depth=depth)
    played = seen(Task.of(model, domain=domain, plan=plan), (rows, torch.arange(5) % 2))
    answer = attack(played)
    assert names(domain, answer.inputs) == names(domain, rows)
    assert domain.rows(mixture[None])[0] not in domain.rows(answer.inputs)
    assert (answer.problem is None) == (plan.steps == 1)  # local steps may mislead a test


def test_mixtures_that_no_test_can_reject_are_a_problem():
    domain, rows, _ = mixed()
    model = mlp(13, 60, activation=nn.Tanh)  # no unit is off, and later layers move
    played = seen(
        Task.of(model, domain=domain, plan=LocalPlan(3, 0.1, 2)), (rows, rows.new_zeros(5).long())
    )
    assert "mixtures" in attack(played).problem


def test_a_mixture_in_place_of_a_row_is_noticed():
    domain, rows, mixture = mixed()
    played = seen(Task.of(mlp(13, 60), domain=domain), (rows, torch.arange(5) % 2))
    own = view(played.observation.task, domain)
    row = SentRow(played.observation, own.task, 0, 5)
    span, _ = layer_span(row, own.name)
    chosen = decode(span, own.levels, 1000)
    all_rows = Survivors.of(row, span, [(own, chosen, 0)])
    place = {row: at for at, row in enumerate(domain.rows(all_rows.rows))}

    def problem(batch):
        taken = chosen[[place[row] for row in domain.rows(batch)]]
        found = Survivors.of(row, span, [(own, taken, 0)])
        return found.answer(5, 5, torch.zeros(5, 13).double()).problem

    assert problem(rows) is None
    for k in range(3):
        others = rows.clone()
        others[k] = mixture
        assert "leave off" in problem(others)


def test_what_no_problem_says_is_true():
    """Small tables and narrow layers: an answer without a problem is the batch."""
    claims = 0
    for seed in range(60):
        levels = [(2, 2, 2), (3, 3), (2, 3, 4), (3, 3, 3)][seed % 4]
        domain, size = small(levels, seed % 3), 2 + seed % 4
        rows, labels = draw(domain, size, seed, distinct=seed % 2 == 0)
        model = mlp(domain.shape[0], (6, 10, 30)[seed % 3], seed, depth=1 + seed % 2)
        plan = LocalPlan(1 + seed % 3, 0.1)
        try:
            answer = attack(seen(Task.of(model, domain=domain, plan=plan), (rows, labels)))
        except NotApplicable:
            continue
        if answer.problem is None:
            claims += 1
            assert int(domain.distances(rows, answer.inputs).amin(1).max()) == 0, seed
    assert claims > 10


# Real rows


@pytest.mark.parametrize("size", [1, 8, 16, 24])
def test_every_column_of_every_row(german, size):
    for seed in range(3):
        played, rows = scene(german, size, seed)
        answer = attack(played)
        assert names(german[0], answer.inputs) == names(german[0], rows)
        assert answer.problem is None
        assert answer.objective < 1e-3


def mse(output, labels):
    return functional.mse_loss(output[:, 0], labels.float())


def bce(output, labels):
    return functional.binary_cross_entropy_with_logits(output[:, 0], labels.float())


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": mse, "outputs": 1},
        {"loss": bce, "outputs": 1},
        {"activation": nn.Tanh},
        {"activation": nn.GELU, "bias": False},
        {"depth": 1},
        {"depth": 3},
        {"width": 32},
        {"plan": LocalPlan(5, 0.05)},
        {"plan": LocalPlan(4, 0.05, 4)},
        {"defense": Clip(0.01)},
    ],
    ids=lambda own: ",".join(own),
)
def test_losses_layers_and_local_steps(german, settings):
    played, rows = scene(german, 16, 1, **settings)
    assert names(german[0], attack(played).inputs) == names(german[0], rows)


def test_local_steps_reach_all_rows_that_they_touch(german):
    for seed in range(4):
        played, rows = scene(german, 16, seed, plan=LocalPlan(10, 0.05, 4))
        assert names(german[0], attack(played).inputs) == names(german[0], rows)


def trained(german, make, steps=4, size=12):
    """The update of a client with a PyTorch optimizer, in gradient units."""
    played, rows = scene(german, size, 0)
    observation = played.observation
    model = mlp(german[0].shape[0], 100)
    before = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
    assert torch.equal(before, observation.task.parameters)
    optimizer = make(model.parameters())
    for step in range(steps):
        part = slice(4 * (step % 3), 4 * (step % 3) + 4)
        optimizer.zero_grad()
        functional.cross_entropy(model(rows[part]), played.truth.labels[part]).backward()
        optimizer.step()
    after = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    task = replace(observation.task, plan=LocalPlan(steps, 0.05, 4))
    update = replace(observation.update, rows=((before - after) / 0.05)[None])
    return replace(observation, task=task, update=update), rows


@pytest.mark.parametrize("more", [{}, {"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 1e-3}])
def test_momentum_and_weight_decay(german, more):
    observation, rows = trained(german, lambda p: torch.optim.SGD(p, lr=0.05, **more))
    answer = SpanDecoding()(observation, stream(0))
    assert names(german[0], answer.inputs) == names(german[0], rows)


def test_adam_leaves_no_span_and_it_says_so(german):
    observation, rows = trained(german, lambda p: torch.optim.Adam(p, lr=0.01))
    answer = SpanDecoding()(observation, stream(0))
    assert "Adam" in answer.problem
    assert not set(german[0].rows(answer.inputs)) & set(german[0].rows(rows))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_the_categories(german, kind):
    for size in (4, 8):
        played, rows = scene(german, size, 2)
        update = played.observation.update
        rounded = replace(update, rows=update.rows.to(kind).float())
        answer = SpanDecoding()(replace(played.observation, update=rounded), stream(0))
        assert categories(german[0], answer.inputs) == categories(german[0], rows)


def test_noise_is_weighed_and_named(german):
    played, rows = scene(german, 8, 0, GaussianNoise(1e-5))
    answer = attack(played)
    assert categories(german[0], answer.inputs) == categories(german[0], rows)
    assert "credit_amount" in answer.problem
    played, rows = scene(german, 8, 0, GaussianNoise(1.0))
    assert attack(played).problem is not None
    played, rows = scene(german, 4, 0, Quantization(8))
    assert categories(german[0], attack(played).inputs) == categories(german[0], rows)


def test_sums_of_clients_and_their_single_rows(german):
    domain, inputs, labels, public = german
    task = Task.of(mlp(61, 100), domain=domain, classes=2)
    parts = [(inputs[a : a + 5], labels[a : a + 5]) for a in (0, 5, 10)]
    answer = attack(seen(task, *parts, defense=SecureAggregation(3), auxiliary=public))
    assert names(domain, answer.inputs) == names(domain, inputs[:15])


def test_repeated_rows_fill_the_answer_and_are_a_problem(german):
    domain, inputs, labels, _public = german
    rows = inputs[[0, 1, 2, 3, 4, 0]]
    played = seen(Task.of(mlp(61, 100), domain=domain), (rows, labels[[0, 1, 2, 3, 4, 0]]))
    answer = attack(played)
    assert set(domain.rows(answer.inputs)) == set(domain.rows(rows))
    assert "repeat" in answer.problem


def test_equal_categories_are_a_problem(german):
    domain, inputs, labels, _public = german
    rows = inputs[:6].clone()
    rows[5] = rows[0]
    rows[5, domain.placed[12][1]] += 0.25  # the age
    played = seen(Task.of(mlp(61, 100), domain=domain), (rows, labels[:6]))
    answer = attack(played)
    assert "not determined" in answer.problem
    assert answer.objective > 1e-3


def test_zero_updates_and_wrong_counts_are_problems(german):
    played, rows = scene(german, 8, 0)
    observation, update = played.observation, played.observation.update
    zero = replace(observation, update=replace(update, rows=torch.zeros_like(update.rows)))
    assert "vanished" in SpanDecoding()(zero, stream(0)).problem
    few = replace(observation, cohort=(6,), update=replace(update, examples=(6,)))
    answer = SpanDecoding()(few, stream(0))
    assert answer.problem is not None
    assert answer.inputs.shape == (6, 61)
    many = replace(observation, cohort=(9,), update=replace(update, examples=(9,)))
    answer = SpanDecoding()(many, stream(0))
    assert answer.problem is not None
    assert set(german[0].rows(answer.inputs)) == set(german[0].rows(rows))


# Columns


def test_the_order_of_columns_does_not_matter(german):
    domain, inputs, labels, _ = german
    turned = TableDomain(domain.columns[::-1])
    pieces = [inputs[:8, a:z] for _, a, z in domain.placed]
    rows = torch.cat(pieces[::-1], 1)
    answer = attack(seen(Task.of(mlp(61, 100), domain=turned), (rows, labels[:8])))
    assert names(turned, answer.inputs) == names(turned, rows)


def test_other_columns_than_the_clients_are_a_problem(german):
    played, _rows = scene(german, 8, 0)
    task = replace(played.observation.task, domain=TableDomain(german[0].columns[::-1]))
    answer = SpanDecoding()(replace(played.observation, task=task), stream(0))
    assert "other columns" in answer.problem


class Scaled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 2, width))
        self.inner = mlp(width, 60)

    def forward(self, x):
        return self.inner((x - 0.3) * self.scale)


def test_scaled_columns_and_missing_values():
    domain = small((4, 5, 3, 4, 5, 3))
    rows, labels = draw(domain, 8, 0)
    norm = nn.BatchNorm1d(domain.shape[0])
    norm.running_mean, norm.running_var = rows.mean(0), rows.var(0) + 0.1
    for model in (Scaled(domain.shape[0]), nn.Sequential(norm, mlp(domain.shape[0], 60)).eval()):
        answer = attack(seen(Task.of(model, domain=domain), (rows, labels)))
        assert names(domain, answer.inputs) == names(domain, rows)
    levels = tuple("abcdef")
    named = [Column(f"c{k}", "categorical", levels=levels, missing=True) for k in range(4)]
    domain = TableDomain((*named, Column("age", "integer", 0, 90, missing=True)))
    rows, labels = draw(domain, 6, 1)
    assert 0 < float(rows[:, -1].sum()) < 6
    answer = attack(seen(Task.of(mlp(domain.shape[0], 60), domain=domain), (rows, labels)))
    assert names(domain, answer.inputs) == names(domain, rows)


def test_codes_as_numbers():
    named = [
        Column(f"c{k}", "categorical", levels=tuple("abcdefgh"), encoding="code") for k in range(6)
    ]
    domain = TableDomain((*named, Column("n", "continuous")))
    rows, labels = draw(domain, 4, 0)
    answer = attack(seen(Task.of(mlp(7, 60), domain=domain), (rows, labels)))
    assert names(domain, answer.inputs) == names(domain, rows)


# Where it does not apply


def refused(task, batch, words, **more):
    with pytest.raises(NotApplicable, match=words):
        attack(seen(task, batch, **more))


def test_where_it_does_not_apply(german):
    domain, inputs, labels, _ = german
    batch, model = (inputs[:8], labels[:8]), mlp(61, 100)
    refused(Task.of(model), batch, "not rows of a table")
    normed = nn.Sequential(nn.BatchNorm1d(61), model)
    refused(Task.of(normed, domain=domain), batch, "mixes the rows")
    refused(Task.of(mlp(61, 6), domain=domain), batch, "6 units")
    bent = nn.Sequential(nn.Tanh(), nn.Linear(61, 100))
    refused(Task.of(bent, domain=domain), batch, "no trained linear layer")
    frozen = mlp(61, 100)
    frozen[0].requires_grad_(False)
    refused(Task.of(frozen, domain=domain), batch, "no trained linear layer")
    many = inputs[:60], labels[:60]
    refused(Task.of(mlp(61, 200), domain=domain), many, "fix at most 42")
    withheld = lb.defenses.GradientDropout(0.5)
    refused(Task.of(model, domain=domain), batch, "withheld", defense=withheld)


def test_numbers_alone_are_found_for_one_row_only():
    table = data.load("breast_cancer")
    domain = TableDomain(table.columns)
    task = Task.of(mlp(30, 50), domain=domain)
    answer = attack(seen(task, (table.inputs[:1], table.labels[:1])))
    assert int(domain.distances(table.inputs[:1], answer.inputs)) == 0
    refused(task, (table.inputs[:4], table.labels[:4]), "fix at most 1")


def test_the_cap_is_a_problem(german):
    played, _ = scene(german, 24, 0)
    answer = SpanDecoding(prefixes=100)(played.observation, stream(0))
    assert "100 prefixes" in answer.problem
    with pytest.raises(ValueError, match="prefixes"):
        SpanDecoding(prefixes=0)


def test_contract():
    domain = small()
    task = Task.of(mlp(domain.shape[0]), domain=domain, classes=2)
    check_attack(SpanDecoding(), task=task, batch=Batch(*draw(domain, 3, 0)))
