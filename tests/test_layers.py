"""The shape of the package: imports point one way without cycles; nothing grows too large."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import leakbound
import leakbound_reproductions

ROOT = Path(leakbound.__file__).parent
REPRODUCTIONS = Path(leakbound_reproductions.__file__).parent
UTIL = "_util"
"""What any part may import, and what imports none."""
LAYERS = (
    {UTIL},
    {"randomness", "check", "covariance"},
    {"losses", "domains", "correlation"},
    {"release", "task"},
    {"core", "tensors"},
    {"client"},
    {"engines"},
    {
        *("models", "data", "defenses", "attacks", "pruning"),
        *("pairing", "metrics", "bounds"),
    },
    {"protocol", "registry", "lpips", "inspection", "channel"},
    {"assess"},
    {"risk"},
    {"audit", "audit_epsilon", "testing", "meter", "ledger"},
    {"captured", "opacus", "cluster", "trees"},
    {"client_side"},
    {"flower", "nvflare", "gate"},
    {"loggers"},
    {"cli"},
)
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
ONLY_FROM = {
    "cli": set(),
    "testing": set(),
    "report": {"audit", "captured", "cli", "gate", "loggers", "risk"},
}
ONE_PLACE = {
    **{"flwr": "flower", "opacus": "opacus", "ray": "cluster", "nvflare": "nvflare"},
    **{"mlflow": "loggers", "wandb": "loggers"},
}


MOST_ROOT_MODULES = 14


@cache
def _texts():
    return {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}


@cache
def _trees():
    return {path: ast.parse(text) for path, text in _texts().items()}


def _allowed(source, target):
    if target in (source, "", UTIL):
        return True
    if source == "report" and target == "assess":
        return True
    if source == "report" or target in ONLY_FROM:
        return source in ONLY_FROM.get(target, ())
    if (source, target) == ("metrics", "pairing"):
        return True
    return source in RANK and target in RANK and RANK[target] < RANK[source]


def _statements(tree, runtime=False):
    """All statements; at run time those under `if TYPE_CHECKING` are left out."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        if runtime and isinstance(node, ast.If) and _is_type_checking(node.test):
            todo += node.orelse
        else:
            kinds = ast.stmt | ast.excepthandler | ast.match_case
            todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, kinds)]


def _is_type_checking(test):
    return ast.unparse(test).endswith("TYPE_CHECKING")


def _modules(node, package):
    """The full dotted names that an import statement may mean."""
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom):
        near = package[: len(package) - node.level + 1] if node.level else []
        base = ".".join([*near, *([node.module] if node.module else [])])
        return [f"{base}.{name.name}" for name in node.names]
    return []


def _package(path):
    package = REPRODUCTIONS if path.is_relative_to(REPRODUCTIONS) else ROOT
    return [package.name, *path.relative_to(package).parts[:-1]]


def _name(path):
    """`leakbound.audit.plan`, and a package's own name for its `__init__`."""
    return ".".join([*_package(path), path.stem]).removesuffix(".__init__")


def _part(name, parts):
    """`leakbound.audit.plan` as `audit`; a name of the package itself as ''."""
    second = name.split(".")[1:2]
    return second[0] if second and second[0] in parts else ""


def _wrong_arrows(tree, source, package, parts):
    for node in _statements(tree, runtime=True):
        for name in _modules(node, package):
            target = _part(name, parts)
            if name.split(".")[0] == "leakbound" and not _allowed(source, target):
                yield f"{source} -> {target} (line {node.lineno})"


def _parts():
    files = {path.stem for path in ROOT.glob("*.py")} - {"__init__"}
    return files | {path.parent.name for path in ROOT.glob("*/__init__.py")}


def test_every_part_has_its_layer():
    assert _parts() - {"report"} <= set(RANK)


def test_imports_point_one_way():
    parts = _parts()
    assert not [
        f"{path}: {arrow}"
        for path, tree in _trees().items()
        for arrow in _wrong_arrows(tree, _part(_name(path), parts), _package(path), parts)
    ]


def test_a_planted_violation_is_caught():
    for source, text in (
        ("core", "from leakbound import client"),
        ("core", "import leakbound.client"),
        ("attacks", "from leakbound.defenses.base import Chain"),
        ("attacks", "from ..defenses import Chain"),
        ("attacks", "def late():\n    from leakbound import data"),
        ("pairing", "from leakbound.metrics import evaluate"),
        ("metrics", "from leakbound import models"),
        ("randomness", "from leakbound import check"),
        ("_util", "from leakbound import check"),
        ("registry", "from leakbound.protocol import play"),
        ("meter", "from leakbound.report import tables"),
        ("audit", "from leakbound.cli import main"),
        ("report", "from leakbound.audit.journal import encode"),
        ("report", "from leakbound import check"),
        ("meter", "from leakbound.report import write"),
        ("captured", "from leakbound.cli import main"),
        ("cli", "import leakbound.testing"),
        ("audit", "if TYPE_CHECKING:\n    pass\nelse:\n    from leakbound import cli"),
    ):
        found = list(_wrong_arrows(ast.parse(text), source, ["leakbound", source], _parts()))
        assert len(found) == 1, (source, text)


def test_what_is_in_order_passes():
    for source, text in (
        ("core", "from leakbound.release import Unit\nimport torch\nfrom math import pi"),
        ("attacks", "from . import base\nfrom leakbound.attacks import labels"),
        ("metrics", "from leakbound.pairing import pair"),
        ("report", "from leakbound._util import files"),
        ("registry", "from leakbound import attacks, check, defenses, models"),
        ("protocol", "from leakbound.attacks.base import Attack"),
        ("audit", "from leakbound import __version__, data, metrics, pairing, protocol"),
        ("cli", "from leakbound import audit, report, risk"),
        ("audit", "if TYPE_CHECKING:\n    from leakbound import cli"),
        ("report", "from leakbound.assess import Assessment"),
    ):
        found = list(_wrong_arrows(ast.parse(text), source, ["leakbound", source], _parts()))
        assert not found, (source, text)


def test_a_neighbors_library_is_imported_in_one_place():
    for path, tree in _trees().items():
        source = _part(_name(path), _parts())
        names = {
            n.split(".")[0] for node in _statements(tree) for n in _modules(node, ["leakbound"])
        }
        assert all(ONE_PLACE[name] == source for name in names & set(ONE_PLACE)), path


def _graph(trees):
    """The modules that each module imports: at its top, in functions and for types alone."""
    known, graph = {_name(path) for path in trees}, {}
    for path, tree in trees.items():
        names = {name for node in _statements(tree) for name in _modules(node, _package(path))}
        modules = {name if name in known else name.rpartition(".")[0] for name in names}
        graph[_name(path)] = modules & known - {_name(path)}
    return graph


def _in_cycles(graph):
    """The modules from which a chain of imports leads back to them."""
    reached = {name: set() for name in graph}
    for name in graph:
        todo = [*graph[name]]
        while todo:
            other = todo.pop()
            if other not in reached[name]:
                reached[name].add(other)
                todo += graph[other]
    return {name for name in graph if name in reached[name]}


def test_imports_make_no_cycle():
    assert not _in_cycles(_graph(_trees()))


def test_imports_of_the_reproductions_make_no_cycle():
    paths = sorted(REPRODUCTIONS.rglob("*.py"))
    assert len(paths) > 50
    assert not _in_cycles(_graph({path: ast.parse(path.read_text("utf-8")) for path in paths}))


def test_reproductions_use_public_names_alone():
    """They are written as any user's code: nothing private of the package."""
    for path in sorted(REPRODUCTIONS.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        names = {name for node in _statements(tree) for name in _modules(node, _package(path))}
        private = {
            name
            for name in names
            if name.startswith("leakbound.") and any(p.startswith("_") for p in name.split("."))
        }
        assert not private, path


def test_a_planted_cycle_is_caught():
    texts = {
        "a.py": "from leakbound import b, free",
        "b.py": "def late():\n    from leakbound.pack.c import thing",
        "pack/c.py": "if TYPE_CHECKING:\n    from .. import a",
        "pack/__init__.py": "from leakbound.pack import c",
        "free.py": "import leakbound.lone",
        "lone.py": "from math import pi",
    }
    graph = _graph({ROOT / path: ast.parse(text) for path, text in texts.items()})
    assert _in_cycles(graph) == {"leakbound.a", "leakbound.b", "leakbound.pack.c"}


def _shared_names(trees):
    """Names of classes that stand at the top of several files."""
    places = defaultdict(set)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].add(_name(path))
    return {name: where for name, where in places.items() if len(where) > 1}


def test_a_class_name_stands_in_one_file():
    shared = _shared_names(_trees())
    assert not shared
    one, two = ast.parse("class A: pass\nclass B: pass"), ast.parse("class A: pass")
    assert set(_shared_names({ROOT / "one.py": one, ROOT / "two.py": two})) == {"A"}


def test_the_root_keeps_to_its_size():
    modules = [path for path in ROOT.glob("*.py") if path.stem not in ("__init__", "__main__")]
    assert len(modules) <= MOST_ROOT_MODULES


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _public(body, kinds):
    return [n for n in body if isinstance(n, kinds) and not n.name.startswith("_")]


MOST_METHODS = {
    "Defense": 10,  # docs/decisions/0023-which-round.md
    "Chain": 10,
    "DefenseProtocol": 9,  # docs/decisions/0010-pruned-models.md
    "Domain": 15,
    "NumberDomain": 15,
    "PartsDomain": 9,  # the half of `Domain` that follows from `coded`
    "TokenDomain": 9,
    "Survivors": 10,  # of one search: each is a test that a row has to pass
    "TableDomain": 11,  # docs/decisions/0018-rows-of-a-table.md
}


def _over_budget(tree):
    """What is too wide or not documented in one file."""
    if not ast.get_docstring(tree):
        yield "the module has no docstring"
    for node in _statements(tree):
        if isinstance(node, ast.ClassDef):
            plain = [m for m in _public(node.body, FUNCTIONS) if not _is_property(m)]
            if len(plain) > MOST_METHODS.get(node.name, 8):
                yield f"{node.name} has {len(plain)} public methods"


def _is_property(method):
    return any(ast.unparse(d).endswith("property") for d in method.decorator_list)


def test_budgets():
    assert not [
        f"{path}: {excess}" for path, tree in _trees().items() for excess in _over_budget(tree)
    ]


def _class(count, decorator):
    body = "".join(f"    {decorator}\n    def m{i}(self):\n        'd'\n" for i in range(count))
    return f"'d'\nclass A:\n    'd'\n{body}"


def test_a_planted_excess_is_caught():
    for text, count in (
        ("pass", 1),
        (_class(8, "@staticmethod"), 0),
        (_class(9, "@staticmethod"), 1),
        (_class(9, "@cached_property"), 0),
    ):
        assert len(list(_over_budget(ast.parse(text)))) == count, text[:60]


def test_importing_the_command_line_does_not_import_torch():
    code = (
        "import sys, leakbound, leakbound.cli; "
        "print(sorted({'torch', 'scipy', 'mlflow', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


KINDS = re.compile(
    r"len\(\w*\.?(?:input_)?shape\) *[!=]= *3|\.columns is (?:not )?None"
    r"|isinstance\([^)]*(?:Image|Number|Parts|Series|Table|Token)Domain"
    r"|(?:domain|form)\.name *[!=]=|\.metric *(?:[!=]=|(?:not )?in\b)"
    r"|\b(?:table|tokens)_of\("
)


def _asks_the_kind(text):
    return bool(KINDS.search(text))


def test_only_domains_ask_what_kind_of_data_it_is():
    templates = {path: path.read_text("utf-8") for path in ROOT.rglob("*.j2")}
    assert len(templates) > 5
    texts = {**_texts(), **templates}
    found = [str(path) for path, text in texts.items() if _asks_the_kind(text)]
    assert [path for path in found if "/domains/" not in path] == []


@pytest.mark.parametrize(
    "text",
    [
        "if len(observation.input_shape) == 3:",
        "if len(shape) != 3:",
        "isinstance(domain, TableDomain)",
        "isinstance(task.domain, TokenDomain)",
        'if domain.name == "images":',
        'if settings.form.metric == "tokens":',
        'if domain.metric in ("columns", "tokens"):',
        "table = table_of(task.domain)",
        "if dataset.columns is not None:",
    ],
)
def test_a_planted_question_is_caught(text):
    assert _asks_the_kind(text)
