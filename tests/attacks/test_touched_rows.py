"""Levels from the rows of embeddings that have a gradient, and rows from the layer behind them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from leakbound.attacks import LinearInversion, SpanDecoding, TouchedRows
from leakbound.core import Batch, LocalPlan, NotApplicable, Task
from leakbound.defenses import GaussianNoise, LaplaceNoise, NoDefense
from leakbound.domains import Column, TableDomain
from leakbound.protocol import play
from leakbound.randomness import stream
from leakbound.testing import check_attack

LEVELS = (9, 7, 5, 4, 3, 2, 8, 6)


def table(encoding="embedding", numbers=2):
    named = [
        Column(f"c{k}", "categorical", levels=tuple("abcdefghi"[:n]), encoding=encoding)
        for k, n in enumerate(LEVELS)
    ]
    return TableDomain((Column("age", "integer", 0, 90), *named, Column("b")))


def draw(domain, count, seed):
    rows = domain.hard(torch.rand((count, *domain.shape), generator=stream(seed, "rows")))
    return rows, torch.arange(count) % 2


class Each(nn.Module):
    """An embedding for each column; the layer behind them sees all, side by side."""

    def __init__(self, width=6, bag=False, padding=None):
        super().__init__()
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.tables = nn.ModuleList(kind(n, width, padding_idx=padding) for n in LEVELS)
        inside = 2 + len(LEVELS) * width
        self.head = nn.Sequential(nn.Linear(inside, 90), nn.ReLU(), nn.Linear(90, 2))

    def forward(self, numbers, codes):
        found = [
            table(codes[:, k : k + 1]).reshape(len(codes), -1)
            for k, table in enumerate(self.tables)
        ]
        return self.head(torch.cat([numbers, *found], 1))


class Summed(Each):
    """No layer sees the columns apart."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 2))

    def forward(self, numbers, codes):
        found = sum(table(codes[:, k]) for k, table in enumerate(self.tables))
        return self.head(torch.cat([numbers, found], 1))


class Offsets(nn.Module):
    """One table for all columns."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(sum(LEVELS), 5)
        self.register_buffer("starts", torch.tensor([0, *LEVELS[:-1]]).cumsum(0))
        self.head = nn.Sequential(nn.Linear(42, 60), nn.Tanh(), nn.Linear(60, 2))

    def forward(self, numbers, codes):
        return self.head(torch.cat([numbers, self.table(codes + self.starts).flatten(1)], 1))


def seen(model, batch, domain=None, defense=None, seed=0, plan=None):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        task = Task.of(model(), domain=domain or table(), classes=2, plan=plan)
    sources = [stream(0, "a"), stream(0, "b")]
    return play(task, [Batch(*batch)], defense or NoDefense(), sources).observation


def levels_in(domain, rows):
    columns = zip(*domain.rows(rows), strict=True)
    return {
        column.name: set(values)
        for column, values in zip(domain.columns, columns, strict=True)
        if column.categorical
    }


def wrong_categories(domain, rows, answer):
    named = [k for k, column in enumerate(domain.columns) if column.categorical]
    return int(domain.misses(rows, answer)[:, named].sum())


@pytest.mark.parametrize("model", [Each, Summed, Offsets, lambda: Each(bag=True)])
@pytest.mark.parametrize("size", [1, 8, 32])
def test_touched_levels_are_those_of_the_batch(model, size):
    domain = table()
    for seed in range(3):
        rows, labels = draw(domain, size, seed)
        found = TouchedRows().levels(seen(model, (rows, labels), seed=seed))
        assert {name: set(own) for name, own in found.items()} == levels_in(domain, rows)


@pytest.mark.parametrize("model", [Each, Offsets, lambda: Each(bag=True)])
@pytest.mark.parametrize("size", [1, 6, 12])
def test_whole_rows_behind_embeddings(model, size):
    domain = table()
    for seed in range(2):
        rows, labels = draw(domain, size, seed)
        observation = seen(model, (rows, labels), seed=seed)
        for attack in (TouchedRows(), SpanDecoding()):
            answer = attack(observation, stream(0))
            assert sorted(domain.rows(answer.inputs)) == sorted(domain.rows(rows))
            assert answer.problem is None


def test_columns_that_are_added_leave_all_categories_of_one_row():
    domain = table()
    for seed in range(4):
        rows, labels = draw(domain, 1, seed)
        observation = seen(Summed, (rows, labels), seed=seed)
        answer = TouchedRows()(observation, stream(0))
        assert wrong_categories(domain, rows, answer.inputs) == 0
        assert "not known" in answer.problem
        with pytest.raises(NotApplicable, match="no trained linear layer"):
            SpanDecoding()(observation, stream(0))


def test_of_several_rows_only_the_levels_are_known():
    domain = table()
    rows, labels = draw(domain, 6, 0)
    answer = TouchedRows()(seen(Summed, (rows, labels)), stream(0))
    assert levels_in(domain, answer.inputs) == levels_in(domain, rows)
    assert "not known" in answer.problem


def test_padding_is_never_claimed():
    domain = table()
    rows, labels = draw(domain, 8, 1)
    found = TouchedRows().levels(seen(lambda: Each(padding=1), (rows, labels)))
    expected = levels_in(domain, rows)
    assert {name: set(own) for name, own in found.items()} == {
        name: own - {"b"} for name, own in expected.items()
    }


def test_known_noise_touches_no_row():
    domain = table()
    wrong = 0
    for seed in range(5):
        rows, labels = draw(domain, 2, seed)
        observation = seen(Each, (rows, labels), defense=GaussianNoise(1e-4), seed=seed)
        found = TouchedRows().levels(observation)
        wrong += sum(set(found[k]) != own for k, own in levels_in(domain, rows).items())
    assert wrong <= 2
    loud = seen(Each, draw(domain, 2, 0), defense=GaussianNoise(10.0))
    assert sum(map(len, TouchedRows().levels(loud).values())) <= 1


def test_laplace_noise_touches_no_row():
    """Its tails are heavier than those of a Gaussian of the same variance."""
    domain = table()
    false = 0
    for seed in range(20):
        loud = seen(Each, draw(domain, 2, seed), defense=LaplaceNoise(10.0), seed=seed)
        false += sum(map(len, TouchedRows().levels(loud).values()))
    assert false <= 2  # 0.16 are expected


def test_weight_decay_touches_all_rows_and_is_a_problem():
    rows, labels = draw(table(), 3, 0)
    observation = seen(Summed, (rows, labels))
    decayed = observation.update.rows + 1e-3 * observation.task.parameters
    observation = replace(observation, update=replace(observation.update, rows=decayed))
    assert "more touched levels" in TouchedRows()(observation, stream(0)).problem


def scaled(width):
    """Standardized one-hot groups: each level changes every other one's coordinate."""
    norm = nn.BatchNorm1d(width, affine=False)
    norm.running_mean.fill_(0.3)
    return nn.Sequential(norm, nn.Linear(width, 90), nn.ReLU(), nn.Linear(90, 2)).eval()


PLANS = (
    LocalPlan(1, 0.01),
    LocalPlan(5, 0.01, 3),
    LocalPlan(6, 0.01, 4, momentum=0.9),
    LocalPlan(1, 0.01, optimizer="adam"),
    LocalPlan(7, 0.01, 4, optimizer="adam"),
)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("size", [1, 8, 40])
def test_levels_of_one_hot_groups_under_every_optimizer(plan, size):
    """Of the rows that the local steps train on."""
    domain = table("onehot")
    rows, labels = draw(domain, size, 3)
    build = lambda: nn.Sequential(nn.Linear(46, 90), nn.ReLU(), nn.Linear(90, 2))  # noqa: E731
    found = TouchedRows().levels(seen(build, (rows, labels), domain, plan=plan))
    trained = rows[: plan.steps * (plan.batch_size or size)]
    assert {name: set(own) for name, own in found.items()} == levels_in(domain, trained)


def test_one_row_under_adam_has_all_of_its_categories():
    domain, build = table("onehot"), lambda: nn.Sequential(nn.Linear(46, 90), nn.Linear(90, 2))
    plan = LocalPlan(3, 0.01, optimizer="adam")
    for seed in range(4):
        rows, labels = draw(domain, 1, seed)
        observation = seen(build, (rows, labels), domain, seed=seed, plan=plan)
        answer = TouchedRows()(observation, stream(0))
        assert wrong_categories(domain, rows, answer.inputs) == 0
        assert "Adam" in answer.problem
        for closed in (SpanDecoding(), LinearInversion()):
            with pytest.raises(NotApplicable, match="Adam"):
                closed(observation, stream(0))


def test_where_it_does_not_apply():
    domain = table("onehot")
    batch = draw(domain, 4, 0)
    with pytest.raises(NotApplicable, match="no trained layer takes the levels"):
        TouchedRows()(seen(lambda: scaled(domain.shape[0]), batch, domain), stream(0))
    with pytest.raises(ValueError, match="prefixes"):
        TouchedRows(prefixes=0)
    zero = seen(Each, draw(table(), 2, 0))
    zero = replace(zero, update=replace(zero.update, rows=torch.zeros_like(zero.update.rows)))
    assert "vanished" in TouchedRows()(zero, stream(0)).problem


def test_contract(monkeypatch):
    monkeypatch.setitem(globals(), "LEVELS", LEVELS[:3])  # each column costs a model's copies
    domain = table()
    task = Task.of(Each(), domain=domain, classes=2)
    check_attack(TouchedRows(), task=task, batch=Batch(*draw(domain, 2, 0)))
