"""Small plans on the digits, and models written by a user."""

from __future__ import annotations

import copy
import textwrap
from typing import Any

import pytest

from leakbound import audit

TINY: dict[str, Any] = {
    "name": "tiny",
    "seeds": [0, 1],
    "data": {"source": "digits"},
    "models": [{"name": "mlp", "hidden": [16]}],
    "attacks": [{"name": "linear_inversion"}],
    "defenses": [{"name": "none"}, {"name": "gaussian_noise", "noise_std": [0.01]}],
    "utility": {"rounds": 2, "repeats": 1},
}


@pytest.fixture
def table():
    """A plan's tables, free to be changed: 4 cells and 2 trainings."""
    return copy.deepcopy(TINY)


@pytest.fixture
def tiny(table):
    return audit.parse(table)


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Writes a module and makes it importable, here and in worker processes."""
    folder = tmp_path / "code"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def write(name: str, text: str) -> str:
        (folder / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")
        return f"{name}:build"

    return write
