"""Models of numbers and codes: gradients are those of the user's own model on integer codes."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import leakbound as lb
from leakbound import client
from leakbound.attacks import GradientMatching, LinearInversion
from leakbound.audit import parse, run
from leakbound.core import Batch, NotApplicable, Task
from leakbound.data import Schema
from leakbound.domains import Column, TableDomain
from leakbound.domains.arguments import CLOSE, arguments
from leakbound.engines import examples
from leakbound.models import adapted
from leakbound.randomness import stream

LEVELS = (3, 2, 5)
cross_entropy = nn.functional.cross_entropy


def table(encoding="embedding", missing=False):
    """Two numbers, then three categories with a one-hot one between them."""
    names = [tuple("abcdefgh"[:count]) for count in LEVELS]
    named = [
        Column(f"c{k}", "categorical", levels=own, encoding=encoding, missing=missing)
        for k, own in enumerate(names)
    ]
    plain = Column("plain", "categorical", levels=("x", "y"))
    return TableDomain((Column("age", "integer", 0, 90), *named[:2], plain, named[2], Column("b")))


def rows(domain, count=6, seed=0):
    source = stream(seed, "rows")
    inputs = torch.rand((count, *domain.shape), generator=source, dtype=torch.float64)
    return domain.hard(inputs), torch.arange(count) % 3


class Each(nn.Module):
    """A table for each column; PyTorch gives the padding's row no gradient."""

    def __init__(self, padding=None, missing=0):
        super().__init__()
        sizes = [count + missing for count in LEVELS]
        self.tables = nn.ModuleList(nn.Embedding(n, 4, padding_idx=padding) for n in sizes)
        self.head = nn.Sequential(nn.Linear(4 + 12, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, numbers, codes):
        found = [table(codes[:, k]) for k, table in enumerate(self.tables)]
        return self.head(torch.cat([numbers, *found], 1))


class Offsets(Each):
    """One table for all columns, as in transformers of tables, with a token and positions."""

    def __init__(self):
        super().__init__()
        self.tables = nn.Embedding(sum(LEVELS) + 1, 4, padding_idx=2)
        self.places = nn.Embedding(3, 4)
        self.register_buffer("starts", torch.tensor([0, 3, 5]))

    def forward(self, numbers, codes):
        codes = torch.cat([codes + self.starts, torch.full_like(codes[:, :1], 10)], 1)
        found = self.tables(codes)
        found = found[:, :3] * found[:, 3:] + self.places(torch.arange(3))
        return self.head(torch.cat([numbers, found.flatten(1)], 1))


class Twice(Each):
    """One table that sees a column, then another, then one again, in another order."""

    def __init__(self):
        super().__init__()
        self.tables = nn.Embedding(5, 4)

    def forward(self, numbers, codes):
        found = [self.tables(codes[:, k]) for k in (2, 0)] + [self.tables(4 - codes[:, 2])]
        return self.head(torch.cat([numbers, *found], 1))


class Bag(Each):
    def __init__(self, mode, padding=None):
        super().__init__()
        self.tables = nn.EmbeddingBag(5, 12, mode=mode, padding_idx=padding)

    def forward(self, numbers, codes):
        return self.head(torch.cat([numbers, self.tables(codes)], 1))


class Weighted(Bag):
    def forward(self, numbers, codes):
        weights = numbers[:, :1].expand(-1, 3)
        found = self.tables(codes, per_sample_weights=weights)
        return self.head(torch.cat([numbers, found], 1))


class OneTensor(Each):
    """Numbers and codes in one tensor, the codes as floats."""

    def forward(self, x):
        found = [table(x[:, at].long()) for table, at in zip(self.tables, (1, 2, 5), strict=True)]
        return self.head(torch.cat([x[:, [0, 3, 4, 6]], *found], 1))


class Named(Each):
    def forward(self, *, x_cat, x_num):
        return super().forward(x_num, x_cat)


class ByName(Each):
    def forward(self, age, c0, c1, plain, c2, b):
        return super().forward(torch.cat([age, plain, b], 1), torch.stack([c0, c1, c2], 1))


class ByKey(ByName):
    def forward(self, columns):
        return super().forward(**columns)


MODELS = {
    "each": Each,
    "padding": lambda: Each(padding=1),
    "missing": lambda: Each(padding=-1, missing=1),
    "offsets": Offsets,
    "twice": Twice,
    "bag sum": lambda: Bag("sum"),
    "bag mean": lambda: Bag("mean", padding=0),
    "bag max": lambda: Bag("max"),
    "bag weights": lambda: Weighted("sum", padding=1),
    "one tensor": OneTensor,
    "names": Named,
    "keywords": ByName,
    "dictionary": ByKey,
}


def built(name):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    domain = table("code" if name == "one tensor" else "embedding", missing=name == "missing")
    with torch.no_grad():
        for parameter in model.parameters():  # padding rows are not zero, as after loading weights
            parameter.normal_()
    return model, domain


def as_user(name, model, domain, inputs):
    """The user's own call, on codes made without the package."""
    named = {}
    for column, start, stop in domain.placed:
        part = inputs[:, start:stop]
        named[column.name] = part.argmax(1) if column.name in ("c0", "c1", "c2") else part
    codes = torch.stack([named[f"c{k}"] for k in range(3)], 1)
    numbers = torch.cat([named["age"], named["plain"], named["b"]], 1)
    if name == "one tensor":
        x = [named[c.name].reshape(len(inputs), -1).double() for c in domain.columns]
        return model(torch.cat(x, 1))
    if name == "names":
        return model(x_cat=codes, x_num=numbers)
    if name in ("keywords", "dictionary"):
        return model(**named) if name == "keywords" else model(named)
    return model(numbers, codes)


def task_for(name):
    model, domain = built(name)
    given = model
    if name in ("names", "keywords", "dictionary"):
        form = "split" if name == "names" else name
        given = adapted(model, domain, form=form, names=("x_num", "x_cat") * (name == "names"))
    return model, Task.of(given, domain=domain, classes=3)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_users_model_on_codes(name):
    model, task = task_for(name)
    inputs, labels = rows(task.domain)
    wanted = torch.autograd.grad(
        cross_entropy(as_user(name, model, task.domain, inputs), labels), model.parameters()
    )
    found = task.unflatten(client.gradient(task, inputs, labels))
    assert list(found) == [key for key, _ in model.named_parameters()]
    for (key, own), right in zip(found.items(), wanted, strict=True):
        assert bool(right.any()), key
        torch.testing.assert_close(own, right, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_every_derivative_in_the_shares(name):
    _, task = task_for(name)
    inputs, labels = rows(task.domain, 2)
    client.refuse_codes(task, task.domain.shape)
    mixed = (inputs + 0.3 * torch.rand(inputs.shape, generator=stream(1))).requires_grad_()
    direction = torch.randn(len(task.parameters), generator=stream(2), dtype=torch.float64)
    tangent = torch.randn(inputs.shape, generator=stream(3), dtype=torch.float64)

    def value(x):
        return client.gradient(task, x, labels) @ direction

    slope = torch.autograd.grad(value(mixed), mixed)[0]
    ends = [value(mixed.detach() + h * tangent) for h in (1e-6, -1e-6)]
    torch.testing.assert_close((slope * tangent).sum(), (ends[0] - ends[1]) / 2e-6)
    ahead = client.input_jvp(task, mixed.detach(), labels, tangent) @ direction
    torch.testing.assert_close(ahead, (slope * tangent).sum())
    own = client.example_gradients(task, mixed.detach(), labels)
    alone = [client.gradient(task, mixed[k : k + 1].detach(), labels[k : k + 1]) for k in (0, 1)]
    torch.testing.assert_close(own, torch.stack(alone))


def test_what_the_model_is_given_by_default():
    for encoding, shapes in (("embedding", [(6, 4), (6, 3)]), ("code", [(6, 7)])):
        domain = table(encoding)
        parts = arguments(domain, rows(domain)[0])
        assert [tuple(part.shape) for part in parts] == shapes
        assert parts[-1].dtype == (torch.int64 if encoding == "embedding" else torch.float64)
    codes_only = TableDomain(table().columns[1:3])
    (codes,) = arguments(codes_only, torch.eye(5)[[1, 3]].double() + torch.eye(5)[[3, 1]])
    assert codes.tolist() == [[1, 0], [1, 0]]


def test_a_single_code_without_a_table_is_a_number():
    """sum of level times share: differentiable, and the model may use it as it likes."""
    domain = table("code")
    task = Task.of(nn.Linear(7, 3).double(), domain=domain)
    inputs, _ = rows(domain)
    found = client.forward(task, inputs)
    torch.testing.assert_close(
        found, nn.functional.linear(arguments(domain, inputs)[0], *task.tensors().values())
    )


class Frozen(Each):
    def __init__(self):
        super().__init__()
        self.tables.requires_grad_(False)


def test_frozen_tables_and_copies_and_threads():
    model, domain = Frozen().double(), table()
    inputs, labels = rows(domain)
    task = Task.of(model, domain=domain)
    assert task.names == {key for key, p in model.named_parameters() if p.requires_grad}
    wanted = client.gradient(task, inputs, labels)
    plain = cross_entropy(model(*arguments(domain, inputs)), labels)
    head = torch.autograd.grad(plain, model.head.parameters())
    torch.testing.assert_close(wanted, torch.cat([own.flatten() for own in head]))
    assert torch.equal(client.gradient(copy.deepcopy(task), inputs, labels), wanted)
    moved = client.gradient(task.to("cpu", torch.float32), inputs.float(), labels)
    torch.testing.assert_close(moved.double(), wanted, rtol=1e-4, atol=1e-6)
    own = [copy.deepcopy(task) for _ in range(4)]  # a module itself is of one thread at a time
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda one: client.gradient(one, inputs, labels), own)
        assert all(torch.equal(own, wanted) for own in found)
    assert type(model.tables[0]) is nn.Embedding  # the user's model is as it was


class Cross(Each):
    def forward(self, numbers, codes):
        self.tables[2](codes[:, 0] + 2 * codes[:, 1])
        return super().forward(numbers, codes)


class Bins(Each):
    def forward(self, numbers, codes):
        self.tables[2]((4 * numbers[:, 0]).long())
        return super().forward(numbers, codes)


class OneHot(Each):
    def forward(self, numbers, codes):
        return super().forward(numbers + nn.functional.one_hot(codes[:, 1], 2)[:, :1], codes)


class Scaled(Each):
    def __init__(self):
        super().__init__()
        self.tables[0].max_norm = 1.0


class Swapped(Each):
    def forward(self, codes, numbers):
        return super().forward(numbers, codes)


class Offset(Bag):
    def __init__(self):
        super().__init__("sum")

    def forward(self, numbers, codes):
        starts = torch.arange(0, codes.numel(), 3)
        found = self.tables(codes.flatten(), starts)
        return self.head(torch.cat([numbers, found], 1))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Cross, "'tables.2' looks up a mix of several columns"),
        (Bins, "'tables.2' looks up a mix of several columns, or a number"),
        (OneHot, "uses codes other than in nn.Embedding"),
        (Offset, "uses codes other than in nn.Embedding"),
        (Scaled, "'tables.0' has max_norm"),
        (Swapped, r"cannot be called with numbers \(N, a\).*names="),
        (lambda: Each(missing=-1), "codes from 0 to the number of levels minus 1.*out of range"),
    ],
)
def test_other_uses_of_codes_are_refused_by_name(model, words):
    with pytest.raises(ValueError, match=words):
        Task.of(model(), domain=table())


def test_other_calls_than_on_the_trial_rows_are_refused():
    class Often(Each):
        often = False

        def forward(self, numbers, codes):
            if self.often:
                self.tables[0](codes[:, 0])
            return super().forward(numbers, codes)

    task = Task.of(Often(), domain=table())
    task.model.often = True
    with pytest.raises(ValueError, match="makes the same calls"):
        client.forward(task, rows(table())[0].float())


@pytest.mark.parametrize(
    ("model", "words"),
    [(Each, "takes several inputs.*TableDomain"), (OneTensor, "integer codes.*TableDomain")],
)
def test_without_columns_the_error_says_what_to_give(model, words):
    task = Task.of(model().float())
    with pytest.raises(NotApplicable, match=words):
        client.refuse_codes(task, (7,))


def test_form_and_names_are_checked():
    with pytest.raises(ValueError, match="form is 'tuple'"):
        adapted(Each(), table(), form="tuple")
    with pytest.raises(ValueError, match="names is"):
        adapted(Each(), table(), names=("x",))


def test_no_engine_takes_such_a_model_for_one_of_plain_rows():
    """A table alone uses its weights once, as a linear layer does."""

    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(3, 4)

        def forward(self, codes):
            return self.table(codes).flatten(1)

    domain = TableDomain((table().columns[1],))
    task = Task.of(Alone(), domain=domain)
    assert examples.plan(task, torch.zeros(1, 3)) is None
    with pytest.raises(NotApplicable):
        LinearInversion()(_seen(task, torch.eye(3)[:1], torch.tensor([0])), stream(0))


def _seen(task, inputs, labels):
    sources = [stream(0, "defense", i) for i in range(2)]
    defense = lb.defenses.NoDefense()
    return lb.play(task, [Batch(inputs, labels)], defense, sources).observation


def test_matching_finds_a_row():
    """One row, all categories and numbers, from the shares' gradient matching alone."""
    _, task = task_for("each")
    task = task.to("cpu", torch.float32)
    attack = GradientMatching(
        image="mixed",
        distance="euclidean",
        optimizer="lbfgs",
        learning_rate=1.0,
        steps=15,
        signed=False,
        schedule="constant",
        box=False,
    )
    right = 0
    for seed in range(2):
        inputs, labels = (own[:1] for own in rows(task.domain, seed=seed))
        seen = _seen(task, inputs.float(), labels)
        found = attack(seen, stream(seed, "attack")).inputs
        right += float(task.domain.score(inputs, found)[0])
    assert right / 2 == 100


def test_a_model_that_agrees_only_roughly_is_refused():
    class Rough(Each):
        def forward(self, numbers, codes):
            out = super().forward(numbers, codes)
            return out + 3 * CLOSE * out.detach().abs().max() * (codes[:, :1] > 0)

    with pytest.raises(ValueError, match="uses codes other than"):
        Task.of(Rough(), domain=table())


MODEL = """
import torch
from torch import nn
from leakbound.models import adapted


class Net(nn.Module):
    def __init__(self, domain, classes):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(len(c.names), 4) for c in domain.columns[1:])
        self.out = nn.Sequential(nn.Linear(1 + 8, 8), nn.Tanh(), nn.Linear(8, classes))

    def forward(self, x_cat, x_num):
        found = [table(x_cat[:, k]) for k, table in enumerate(self.tables)]
        return self.out(torch.cat([x_num, *found], 1))


def build(classes, domain):
    return adapted(Net(domain, classes), domain, names=("x_num", "x_cat"))
"""


def test_an_audit_of_a_users_table_and_model(tmp_path, monkeypatch):
    kinds = [Column(n, "categorical", levels=tuple("abc"), encoding="embedding") for n in "uv"]
    schema = Schema(
        (Column("age", "integer", 0, 99), *kinds), "sick", ("no", "yes"), confirmed=True
    )
    (tmp_path / "t.toml").write_text(schema.text(), encoding="utf-8")
    source = torch.randint(99, (60, 4), generator=stream(0)).tolist()
    lines = [f"{a},{'abc'[u % 3]},{'abc'[v % 3]},{('no', 'yes')[y % 2]}" for a, u, v, y in source]
    (tmp_path / "t.csv").write_text("\n".join(["age,u,v,sick", *lines]), encoding="utf-8")
    (tmp_path / "own_table_model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = parse(
        {
            "data": {"source": f"table:{tmp_path / 't.csv'}"},
            "models": [{"name": "own_table_model:build"}],
            "attacks": [{"name": "gradient_matching", "steps": 200, "schedule": "cosine"}],
            "defenses": [{"name": "none"}],
            "seeds": [0],
        }
    )
    (result,) = run(plan, workers=1, pictures=False)
    assert result.record.data.domain == "table"
    assert result.record.scores[0] > 60  # both categories
