"""The guides for extensions: their code runs from top to bottom, and keeps the contracts."""

import ast
import re
import sys
import types
from pathlib import Path

import pytest

from leakbound.attacks import Attack
from leakbound.defenses import Defense
from leakbound.domains import Domain
from leakbound.testing import ContractError

from .domains import test_contract

ROOT = Path(__file__).parent.parent
GUIDES = ROOT / "docs" / "how_to"
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def made(name, old="", new=""):
    """What the code of a guide defines, with a change in it."""
    text = (GUIDES / f"{name}.md").read_text("utf-8")
    assert old in text
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses look their module up by name
    try:
        for code in CODE.findall(text.replace(old, new) if old else text):
            exec(compile(code, name, "exec"), module.__dict__)
    finally:
        del sys.modules[name]
    return module


def test_the_attack_of_the_guide_keeps_the_contract(capsys):
    attack = made("add_an_attack").Descent
    assert issubclass(attack, Attack)
    assert re.match(r"(exposed|undecided)", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("task = seen_task(observation)", "task = observation.task", "seen_task"),
        ("if labels is None:", "if False:", "infer_labels"),
    ],
)
def test_what_the_guide_warns_of_is_found(old, new, message):
    with pytest.raises(ContractError, match=message):
        made("add_an_attack", old, new)


def test_the_defense_of_the_guide_keeps_the_contract(capsys):
    defense = made("add_a_defense").Quantize
    assert issubclass(defense, Defense)
    assert capsys.readouterr().out
    with pytest.raises(ContractError):
        made("add_a_defense", "(update.rows / self.step).round() * self.step", "update.rows * 2")
    with pytest.raises(ContractError, match="jumps by"):
        made("add_a_defense", "continuous = False", "continuous = True")


def test_the_domain_of_the_guide_runs(capsys):
    assert isinstance(made("add_a_domain").domain, Domain)
    assert capsys.readouterr().out


@pytest.mark.parametrize("promise", [name for name in vars(test_contract) if name[:5] == "test_"])
def test_the_domain_of_the_guide_keeps(promise):
    getattr(test_contract, promise)(made("add_a_domain").domain)


def test_a_distance_that_breaks_the_triangle_is_found():
    """Its square is no metric."""
    bent = made("add_a_domain", ".abs().flatten(1)", ".square().flatten(1)").BandDomain((1, 6))
    with pytest.raises(AssertionError):
        test_contract.test_the_distance_is_what_bounds_need(bent)


def test_the_client_of_the_guide_sends_a_defended_update():
    assert made("add_a_framework").Guard
    with pytest.raises(AssertionError):
        made(
            "add_a_framework",
            "_, ready, weights = work.answer(trained, batches)",
            "_, ready, weights = work.answer(trained, batches); weights = trained",
        )


def test_every_stop_of_the_tour_exists():
    text = (ROOT / "docs" / "development" / "tour.md").read_text("utf-8")
    stops = re.findall(r"^\| +(\d+) \| \[`([\w.]+)`\]\(([^)#]+)#([\w.]+)\)", text, re.MULTILINE)
    assert [int(number) for number, *_ in stops] == list(range(1, 13))
    assert all(shown == name for _, shown, _, name in stops)


def links():
    """Every link of a page to a name in a file of code."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for target, name in re.findall(r"\]\(([^)\s#]+\.py)#([\w.]+)\)", page.read_text("utf-8")):
            yield pytest.param(page.parent / target, name, id=f"{page.stem}-{name}")


@pytest.mark.parametrize(("path", "name"), list(links()))
def test_what_a_page_names_in_the_code_is_there(path, name):
    body = ast.parse(path.read_text("utf-8")).body
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        found = [node for node in body if isinstance(node, kinds) and node.name == part]
        assert found, f"{path.name} does not define {name}: change the page's link"
        body = found[0].body
