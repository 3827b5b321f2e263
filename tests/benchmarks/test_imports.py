"""Scripts beside the package import names that exist: no test runs all of them."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
)
OURS = ("leakbound", "leakbound_reproductions")


def missing(code):
    """Names of ours that a script imports and that are not there."""
    for node in ast.walk(ast.parse(code)):
        modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules, names = [node.module], [name.name for name in node.names]
        for module in modules:
            if module.partition(".")[0] not in OURS:
                continue
            try:
                there = importlib.import_module(module)
            except ImportError:
                yield module
                continue
            yield from (f"{module}.{name}" for name in names if not _in(there, name))


def _in(module, name):
    if hasattr(module, name):
        return True
    try:
        importlib.import_module(f"{module.__name__}.{name}")
    except ImportError:
        return False
    return True


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_script_imports_is_there(path):
    assert list(missing(path.read_text("utf-8"))) == []


def test_a_missing_name_is_seen():
    assert list(missing("from leakbound.audit import run, nothing\nimport leakbound.gone")) == [
        "leakbound.audit.nothing",
        "leakbound.gone",
    ]
