"""Tables with integer codes: a model that takes its inputs for codes is refused, in words."""

import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import leakbound as lb
from leakbound import client
from leakbound.attacks import inverting_gradients
from leakbound.captured import load
from leakbound.captured.observe import task_of
from leakbound.cli import main
from leakbound.core import Batch, NotApplicable, Task
from leakbound.defenses import NoDefense
from leakbound.domains import Column, TableDomain, of_shape
from leakbound.randomness import stream
from leakbound.registry import Spec

from .captured.flat import attack_update

CODES = "integer codes cannot be searched as continuous inputs"


class Table(nn.Module):
    """Two columns of codes, five categories each, and three numbers."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(5, 3) for _ in range(2))
        self.layer = nn.Linear(9, 3)

    def forward(self, x):
        codes = [table(x[:, i].long()) for i, table in enumerate(self.tables)]
        return self.layer(torch.cat([*codes, x[:, 2:]], 1))


class OneHot(Table):
    def forward(self, x):
        codes = nn.functional.one_hot(x[:, 0].long(), 5).to(x)
        return self.layer(torch.cat([codes, x[:, 1:]], 1))


class Tokens(nn.Module):
    """Token ids, as language models take them: floats are refused by the table itself."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, ids):
        return self.layer(self.table(ids).mean(1))


class Places(nn.Module):
    """An embedding of places, which no input chooses."""

    def __init__(self):
        super().__init__()
        self.places, self.layer = nn.Embedding(5, 1), nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x + self.places(torch.arange(x.shape[1])).T)


def rows(count):
    source = stream(0, "rows")
    codes = torch.randint(5, (count, 2), generator=source).float()
    numbers = 8 * torch.rand((count, 3), generator=source) - 4
    return Batch(torch.cat([codes, numbers], 1), torch.arange(count) % 3)


@pytest.mark.parametrize("bounds", [(-4.0, 6.0), (0.0, 4.0), (0.0, 1.0)])
def test_the_default_attack_says_why_it_does_not_apply(bounds):
    task = Task.of(Table(), classes=3, input_range=bounds)
    batch = Batch(rows(1).inputs.clamp(*bounds), rows(1).labels)
    sources = [stream(0, "client"), stream(0, "cohort")]
    seen = lb.play(task, [batch], NoDefense(), sources).observation  # the client trains as ever
    assert bool(seen.update.rows.any())
    with pytest.raises(NotApplicable, match=CODES):
        inverting_gradients(steps=3, total_variation=0.0, noise_variation=0.0)(seen, stream(0))


def test_guesses_that_are_no_codes_are_not_applicable():
    task = Task.of(Table(), classes=3)
    with pytest.raises(NotApplicable, match=f"index out of range in self.*{CODES}"):
        client.gradient(task, torch.full((1, 5), 7.0), torch.tensor([0]))


@pytest.mark.parametrize("model", [Table, OneHot, Tokens])
def test_which_models_are_refused(model):
    task = Task.of(model(), classes=3)
    with pytest.raises(NotApplicable, match=CODES):
        client.refuse_codes(task, (5,))


@pytest.mark.parametrize("model", [Places, lambda: nn.Linear(5, 3)])
def test_which_are_not(model):
    client.refuse_codes(Task.of(model()), (5,))


def test_inputs_of_another_shape_are_not_called_codes():
    task = Task.of(nn.Linear(5, 3))
    client.refuse_codes(task, (7,))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        client.forward(task, torch.zeros(1, 7))


def test_captured_updates():
    model, batch = Table(), rows(4)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
    gradient = {name: p.grad for name, p in model.named_parameters()}
    given = {"input_shape": (5,), "input_range": (-4.0, 6.0)}
    with pytest.raises(ValueError, match=CODES):
        task_of(model, load(gradient, before, kind="gradient"), of_shape((5,), (-4.0, 6.0)))
    with pytest.raises(ValueError, match=CODES):
        attack_update(gradient, model, before=before, kind="gradient", labels=batch.labels, **given)


def test_captured_updates_of_known_columns():
    """The users' names, tensors and codes; the columns alone are new."""
    levels = tuple("abcde")
    codes = [Column(f"c{k}", "categorical", levels=levels, encoding="code") for k in range(2)]
    numbers = [Column(f"x{k}", low=-4, high=4, center=0, scale=1) for k in range(3)]
    domain = TableDomain((*codes, *numbers))
    torch.manual_seed(1)
    model, batch = Table(), rows(1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
    gradient = {name: p.grad for name, p in model.named_parameters()}
    task, _ = task_of(model, load(gradient, before, kind="gradient"), domain)
    stored = [nn.functional.one_hot(batch.inputs[:, k].long(), 5) for k in range(2)]
    x = torch.cat([*stored, batch.inputs[:, 2:]], 1)
    sent = torch.cat([gradient[name].flatten() for name, *_ in task.layout])
    torch.testing.assert_close(client.gradient(task, x, batch.labels), sent)
    given = {
        "before": before,
        "kind": "gradient",
        "labels": batch.labels,
        "truth": Batch(x, batch.labels),
    }
    attack = {"attacks": [Spec("gradient_matching", (("steps", 300), ("schedule", "cosine")))]}
    found = attack_update(gradient, model, domain=domain, examples=1, **given, **attack)
    (record,) = found.records
    assert record.data.domain == "table"
    assert record.scores[0] >= 40  # percent of the columns: both tables' rows are told


MODEL = """
import torch
from torch import nn


class Table(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table, self.layer = nn.Embedding(5, 3), nn.Linear(width + 2, 10)

    def forward(self, x):
        x = x.flatten(1)
        return self.layer(torch.cat([self.table(x[:, 0].long()), x[:, 1:]], 1))


def build(input_shape=(5,)):
    return Table(torch.Size(input_shape).numel())
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "coded_model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("coded_model", None)


def called(*words):
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return end.value.code


def test_the_command_line(place, capsys, wide):
    namespace = {}
    exec(compile(MODEL, "coded_model", "exec"), namespace)
    model, batch = namespace["build"](), rows(2)
    save_file(model.state_dict(), place / "before.safetensors")
    nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
    save_file({k: p.grad for k, p in model.named_parameters()}, place / "update.safetensors")
    given = ["--update", "update.safetensors", "--before", "before.safetensors"]
    given += ["--kind", "gradient", "--input-shape", "5", "--batch-size", "2"]
    assert called("attack", *given, "--model", "coded_model:build") == 2
    assert CODES in capsys.readouterr().err
    lines = ['[data]\nsource = "digits"', '[[models]]\nname = "coded_model:build"']
    lines += ['[[attacks]]\nname = "linear_inversion"', '[[defenses]]\nname = "none"']
    (place / "plan.toml").write_text("\n".join(lines), encoding="utf-8")
    assert called("audit", "plan.toml", "--out", "run") == 2
    assert CODES in capsys.readouterr().err
