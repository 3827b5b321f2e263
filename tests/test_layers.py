"""The shape of the package: which way imports point, and how large things may grow."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import leakbound

ROOT = Path(leakbound.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
UTIL = "_util"
"""What any part may import, and what imports none."""
LAYERS = (
    {UTIL},
    {"assess"},
    {
        "options",
        "random",
        "check",
        "text",
        "covariance",
        "named_code",
        "pictures",
        "pools",
        "recent",
    },
    {"release", "task", "terminal"},
    {"types", "tensors"},
    {"client"},
    {"sensitivity", "r_operator"},
    {
        *("models", "data", "defenses", "pruning", "attacks"),
        *("pairing", "metrics", "bounds", "columns"),
    },
    {"protocol", "registry", "lpips", "information", "inspection"},
    {"audit", "testing", "federation", "meter"},
    {"captured", "opacus", "cluster"},
    {"flower", "progress"},
    {"commands", "experiments"},
    {"commands_risk", "commands_captured", "commands_train", "commands_reproduce"},
    {"commands_evidence", "commands_compare", "commands_report"},
    {"cli"},
)
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
ONLY_FROM = {
    "cli": set(),
    "testing": set(),
    "commands": {
        *("cli", "commands_risk", "commands_captured", "commands_train", "commands_reproduce"),
        *("commands_evidence", "commands_compare"),
    },
    "commands_risk": {"cli", "commands_evidence"},
    "commands_evidence": {"cli"},
    "commands_compare": {"cli"},
    "commands_report": {"cli"},
    "commands_captured": {"cli"},
    "commands_train": {"cli"},
    "commands_reproduce": {"cli"},
    "experiments": {"commands", "commands_reproduce"},
    "report": {
        *("captured", "commands", "commands_risk", "commands_captured", "commands_train"),
        *(
            "experiments",
            "commands_reproduce",
            "commands_evidence",
            "commands_compare",
            "commands_report",
        ),
    },
}
ONE_PLACE = {"flwr": "flower", "opacus": "opacus", "ray": "cluster"}


def _allowed(source, target):
    if target in (source, "", UTIL):
        return True
    if target == "assess":
        return True
    if source == "report" or target in ONLY_FROM:
        return source in ONLY_FROM.get(target, ())
    if (source, target) == ("metrics", "pairing"):
        return True
    return source in RANK and target in RANK and RANK[target] < RANK[source]


def _runtime_nodes(tree):
    """All nodes but those under `if TYPE_CHECKING`."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            todo += node.orelse
        else:
            todo += ast.iter_child_nodes(node)


def _modules(node, package):
    """The full dotted names that an import statement may mean."""
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom):
        near = package[: len(package) - node.level + 1] if node.level else []
        base = ".".join([*near, *([node.module] if node.module else [])])
        return [f"{base}.{name.name}" for name in node.names]
    return []


def _part(name, parts):
    """`leakbound.audit.plan` as `audit`; a name of the package itself as ''."""
    second = name.split(".")[1:2]
    return second[0] if second and second[0] in parts else ""


def _wrong_arrows(text, source, package, parts):
    found = []
    for node in _runtime_nodes(ast.parse(text)):
        for name in _modules(node, package):
            if name.split(".")[0] != "leakbound":
                continue
            target = _part(name, parts)
            if not _allowed(source, target):
                found.append(f"{source} -> {target} (line {node.lineno})")
    return found


def _parts():
    files = {path.stem for path in ROOT.glob("*.py")} - {"__init__"}
    return files | {path.parent.name for path in ROOT.glob("*/__init__.py")}


def test_every_part_has_its_layer():
    assert _parts() - {"report"} <= set(RANK)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    package = ["leakbound", *path.relative_to(ROOT).parts[:-1]]
    source = _part(".".join([*package, path.stem]), _parts())
    assert not _wrong_arrows(path.read_text(encoding="utf-8"), source, package, _parts())


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("types", "from leakbound import client"),
        ("types", "import leakbound.client"),
        ("attacks", "from leakbound.defenses.base import Chain"),
        ("attacks", "from ..defenses import Chain"),
        ("attacks", "def late():\n    from leakbound import data"),
        ("pairing", "from leakbound.metrics import evaluate"),
        ("metrics", "from leakbound import models"),
        ("random", "from leakbound import check"),
        ("_util", "from leakbound import text"),
        ("registry", "from leakbound.protocol import play"),
        ("audit", "from leakbound.report import tables"),
        ("audit", "from leakbound import experiments"),
        ("report", "from leakbound.audit.records import encode"),
        ("report", "from leakbound import check"),
        ("cli", "from leakbound.report import write"),
        ("commands", "from leakbound.cli import main"),
        ("commands", "import leakbound.testing"),
        ("audit", "if TYPE_CHECKING:\n    pass\nelse:\n    from leakbound import cli"),
    ],
)
def test_a_planted_violation_is_caught(source, text):
    assert len(_wrong_arrows(text, source, ["leakbound", source], _parts())) == 1


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("types", "from leakbound.release import Unit\nimport torch\nfrom math import pi"),
        ("attacks", "from . import base\nfrom leakbound.attacks import labels"),
        ("metrics", "from leakbound.pairing import pair"),
        ("report", "from leakbound._util import files"),
        ("registry", "from leakbound import attacks, check, defenses, models"),
        ("protocol", "from leakbound.attacks.base import Attack"),
        ("audit", "from leakbound import __version__, data, metrics, pairing, protocol"),
        ("commands", "from leakbound import audit, report, experiments"),
        ("commands", "if TYPE_CHECKING:\n    from leakbound import cli"),
        ("cli", "from leakbound import commands"),
    ],
)
def test_what_is_in_order_passes(source, text):
    assert not _wrong_arrows(text, source, ["leakbound", source], _parts())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_neighbors_library_is_imported_in_one_place(path):
    source = _part(".".join(["leakbound", *path.relative_to(ROOT).with_suffix("").parts]), _parts())
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {n.split(".")[0] for node in ast.walk(tree) for n in _modules(node, ["leakbound"])}
    assert all(ONE_PLACE[name] == source for name in names & set(ONE_PLACE))


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _public(body, kinds):
    return [n for n in body if isinstance(n, kinds) and not n.name.startswith("_")]


MOST_METHODS = {"Defense": 9, "Chain": 9, "Release": 9}  # docs/decisions/0010-pruned-models.md


def _over_budget(text):
    """What is too long, too wide or without a docstring in one file."""
    tree, found = ast.parse(text), []
    if not ast.get_docstring(tree):
        found.append("the module has no docstring")
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS) and _lines(node) > 60:
            found.append(f"{node.name} has more than 60 lines")
    classes = _public(tree.body, ast.ClassDef)
    methods = [m for c in classes for m in _public(c.body, FUNCTIONS)]
    for node in [*_public(tree.body, FUNCTIONS), *classes, *methods]:
        if not ast.get_docstring(node):
            found.append(f"{node.name} has no docstring")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            plain = [m for m in _public(node.body, FUNCTIONS) if not _is_property(m)]
            if len(plain) > MOST_METHODS.get(node.name, 8):
                found.append(f"{node.name} has {len(plain)} public methods")
    return found


def _lines(function):
    """Its lines without its docstring."""
    first = function.body[0]
    words = ast.get_docstring(function) is not None
    told = first.end_lineno - first.lineno + 1 if words else 0
    return function.end_lineno - function.lineno + 1 - told


def _is_property(method):
    return any(ast.unparse(d).endswith("property") for d in method.decorator_list)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_budgets(path):
    assert not _over_budget(path.read_text(encoding="utf-8"))


def _class(count, decorator):
    body = "".join(f"    {decorator}\n    def m{i}(self):\n        'd'\n" for i in range(count))
    return f"'d'\nclass A:\n    'd'\n{body}"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("'d'\ndef f():\n    'd'\n" + "    pass\n" * 59, 0),
        ("'d'\ndef _f():\n    'd'\n" + "    pass\n" * 60, 1),
        ("pass", 1),
        ("'d'\ndef f(): pass\nclass A:\n    def g(self): pass\n    def _h(self): pass", 3),
        (_class(8, "@staticmethod"), 0),
        (_class(9, "@staticmethod"), 1),
        (_class(9, "@cached_property"), 0),
    ],
)
def test_a_planted_excess_is_caught(text, count):
    assert len(_over_budget(text)) == count


def test_importing_the_command_line_does_not_import_torch():
    code = (
        "import sys, leakbound, leakbound.cli; print(sorted({'torch', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
