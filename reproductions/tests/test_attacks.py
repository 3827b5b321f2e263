"""The attacks of this distribution keep the contract of built-in ones, and have names."""

import importlib
import tomllib
from pathlib import Path

import pytest

from leakbound import registry
from leakbound.testing import check_attack
from leakbound_reproductions.attacks.across_rounds import AcrossRounds
from leakbound_reproductions.attacks.mixed_start import MixedStart

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


@pytest.mark.parametrize("attack", [AcrossRounds(steps=10), MixedStart(steps=5)], ids=repr)
def test_the_contract_holds(attack):
    check_attack(attack)


def test_every_attack_has_an_entry_point_under_its_name():
    points = tomllib.loads(PROJECT.read_text("utf-8"))["project"]["entry-points"]
    for name, path in points["leakbound.attacks"].items():
        module, _, attribute = path.partition(":")
        built = getattr(importlib.import_module(module), attribute)
        assert registry.snake(attribute) == name
        assert registry.Entry("attack", name, built).summary.endswith(".")
