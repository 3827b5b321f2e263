"""`leakbound audit-epsilon` as a user sees it: clients of one file, its claims, its exit codes."""

import json

import pytest

from leakbound.audit_epsilon import finding
from leakbound.cli import main

pytestmark = pytest.mark.usefixtures("wide")
CODE = """
import torch

def update(weights, batch, seed):
    draws = torch.Generator().manual_seed(seed)
    return {"count": batch.size + NOISE * torch.randn((), generator=draws)}

def train(model, dataset):
    with torch.no_grad():
        for value in model.parameters():
            value += len(dataset) + NOISE * torch.randn(value.shape)

class Flower:
    def __init__(self, batch):
        self.size = batch.size

    def fit(self, parameters, config):
        sent = [v + self.size + NOISE * torch.randn(v.shape).numpy() for v in parameters]
        return sent, self.size, {}

NOISE = 1.0
"""
FACTS = """
noise = {multiplier = 2.0, at = "optimizer", seeded = false}
claim = {epsilon = 1.5, delta = 1e-6, unit = "example"}
clip = {norm = 1.0, kind = "example"}
local = {steps = 1, rate = 1.0}
rounds = 1
"""


def call(*arguments):
    with pytest.raises(SystemExit) as caught:
        main(["audit-epsilon", *map(str, arguments)])
    return caught.value.code


@pytest.fixture
def client(tmp_path, monkeypatch, request):
    """A module of this test's own; its name."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"client_of_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(CODE)
    return name


def test_a_consistent_client(client, capsys):
    assert call(f"{client}:update", "--noise-multiplier", 1, "--runs", 200) == 0
    seen = capsys.readouterr()
    assert "importing Python code" in seen.err
    for words in ("bounded", "4.38", "Clopper-Pearson", "assumes: nothing", "95% confidence"):
        assert words in seen.out
    assert "consistent: epsilon is at least" in seen.out


def test_a_client_that_leaks_more_than_it_claims(client, capsys):
    assert call(f"{client}:update", "--declared", 0.5, "--runs", 200, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"].startswith("the program leaks more than it claims")
    assert found["claims"]["declared"] == 0.5
    assert found["bounded"] is None
    assert {one["method"] for one in found["lower"]} == {"Clopper-Pearson", "Gaussian"}
    assert found["runs"] == 401


def test_several_rounds(client, capsys):
    how = ("--noise-multiplier", 1, "--runs", 200, "--rounds", 4)
    assert call(f"{client}:update", *how) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "rounds: 4, steps: 1" in shown
    assert "the claim is 10." in shown  # of four releases: mu is 2
    assert call(f"{client}:update", *how, "--sampling-rate", 0.5, "--neighbors", "replace") != 1


def test_text_and_the_result_as_a_file(client, tmp_path, capsys):
    how = ("--data", "topics", "--model", "decoder", "--declared", 0.5, "--runs", 200)
    assert call(f"{client}:update", *how, "--json") == 1
    path = tmp_path / "found.json"
    path.write_text(capsys.readouterr().out)
    found = finding.read(path)
    assert (found.client, found.code) == (f"{client}:update", 1)


def test_without_a_claim_it_cannot_tell(client, capsys):
    assert call(f"{client}:update", "--runs", 40) == 2
    assert "cannot tell" in capsys.readouterr().out


def test_claims_from_a_deployment_file(client, capsys, tmp_path):
    path = tmp_path / "deployment.toml"
    path.write_text(FACTS)
    call(f"{client}:update", "--deployment", path, "--runs", 40, "--json")
    claims = json.loads(capsys.readouterr().out)["claims"]
    assert (claims["declared"], claims["delta"], claims["noise_multiplier"]) == (1.5, 1e-6, 2.0)
    call(f"{client}:update", "--deployment", path, "--declared", 3, "--runs", 40, "--json")
    assert json.loads(capsys.readouterr().out)["claims"]["declared"] == 3
    assert call(f"{client}:update", "--deployment", path, "--rounds", 2) == 2
    assert "covers 1; give at most as many" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("kind", "name"), [("training", "train"), ("flower", "Flower")])
def test_other_kinds_of_clients(client, kind, name):
    how = ("--client", kind, "--declared", 1, "--runs", 40)
    assert call(f"{client}:{name}", *how) == 1  # every weight shows the number of examples


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--runs", 10), "runs is 10"),
        (("--delta", 2), "delta"),
        (("--sampling-rate", 0.5), "give a noise multiplier"),
        (("--rounds", 0), "rounds is 0"),
        (("--data", "topics"), "which is text"),
        (("--one-run",), "does not hold the model's parameters"),
        (("--examples", 0), "examples is 0"),
    ],
)
def test_mistakes_are_named(client, capsys, arguments, words):
    assert call(f"{client}:update", *arguments) == 2
    assert words in capsys.readouterr().err.replace("\n", " ")


def test_a_function_that_is_not_there(capsys):
    assert call("no_such_module:update") == 2
    assert "there is no module 'no_such_module'" in capsys.readouterr().err


FEW = """
from torch import nn

def few():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

def quits(weights, batch, seed):
    raise SystemExit(1)

def breaks(weights, batch, seed):
    raise RuntimeError("broken")
"""


def test_a_model_with_fewer_outputs_than_classes_is_refused_by_name(client, tmp_path, capsys):
    """A traceback had exit code 1, which means "leaks more than it claims"."""
    (tmp_path / f"{client}_few.py").write_text(FEW)
    given = (f"{client}:update", "--model", f"{client}_few:few", "--data", "digits")
    assert call(*given, "--runs", 40) == finding.UNKNOWN
    assert "returns (1, 3) for one example; give a model that returns" in capsys.readouterr().err


def test_code_of_a_user_that_ends_is_no_verdict(client, tmp_path, capsys):
    (tmp_path / f"{client}_few.py").write_text(FEW)
    assert call(f"{client}_few:quits", "--data", "digits", "--runs", 40) == 70
    assert call(f"{client}_few:breaks", "--data", "digits", "--runs", 40) == finding.UNKNOWN
    assert "client raised RuntimeError on" in capsys.readouterr().err
