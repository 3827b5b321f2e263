"""The rules of form that ruff does not have."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "tools" / "lint.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("lint", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "source",
    [
        "a, b = 1, 2",
        "self.a, b = x, f(y)",
        "a = 1 if b else (2 if c else 3)",
        "(a, b), c = f(), g()",
        "f(*(a, b), c)",
        "x = [*(a, b), *c]",
    ],
)
def test_what_is_packed_is_named(tool, source):
    assert len(list(tool.findings(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "a, b = b, a",
        "low, high = high, low + high",
        "a, b = f(x)",
        "a, *b = 1, *c",
        "x = 1 if a else 2",
        "f(*(a for a in b))",
    ],
)
def test_what_reads_well_passes(tool, source):
    assert not list(tool.findings(source))
