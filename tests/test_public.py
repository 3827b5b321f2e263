"""The public interface: a name or an argument that is dropped, added or changed must be seen.

What is public stands in `public.txt`, a line a name with its arguments and their defaults, and in
`public_forms.txt`: commands with their options, plans with their keys, records and `report.json`
with their fields. `python tests/test_public.py` writes both anew; read the difference before it is
committed.
"""

import ast
import dataclasses
import enum
import importlib
import inspect
import json
import re
import typing
from pathlib import Path

import msgspec
import pytest

import leakbound
from leakbound import assess, audit, check, registry
from leakbound.audit import plan_file
from leakbound.cli.options import VERBS
from leakbound.gate import policy
from leakbound.report import evidence

ROOT = Path(__file__).parent.parent
LISTED = Path(__file__).with_name("public.txt")
FORMS = Path(__file__).with_name("public_forms.txt")
PACKAGES = (
    "leakbound",
    "leakbound.assess",
    "leakbound.assess.imputers",
    "leakbound.attacks.imputers",
    "leakbound.attacks",
    "leakbound.attacks.attribute",
    "leakbound.attacks.base",
    "leakbound.attacks.features",
    "leakbound.attacks.features.separation",
    "leakbound.attacks.data_dependent_law",
    "leakbound.attacks.matching.loop",
    "leakbound.attacks.matching.objective",
    "leakbound.attacks.matching.settings",
    "leakbound.attacks.pace",
    "leakbound.attacks.sparse_inversion",
    "leakbound.attacks.trap",
    "leakbound.audit",
    "leakbound.audit_epsilon",
    "leakbound.bounds",
    "leakbound.bounds.clients",
    "leakbound.bounds.codebook",
    "leakbound.bounds.composition",
    "leakbound.bounds.conversions",
    "leakbound.bounds.correlated",
    "leakbound.bounds.counting",
    "leakbound.bounds.distances",
    "leakbound.bounds.from_scratch",
    "leakbound.bounds.identification",
    "leakbound.bounds.attainable",
    "leakbound.bounds.balls",
    "leakbound.bounds.known_model",
    "leakbound.bounds.knowledge",
    "leakbound.bounds.language",
    "leakbound.bounds.record_priors",
    "leakbound.captured",
    "leakbound.channel",
    "leakbound.check",
    "leakbound.cli.kit",
    "leakbound.cli.parser",
    "leakbound.client",
    "leakbound.cluster",
    "leakbound.data",
    "leakbound.data.federated",
    "leakbound.defenses",
    "leakbound.defenses.allocation",
    "leakbound.defenses.withhold",
    "leakbound.domains",
    "leakbound.domains.known",
    "leakbound.ledger",
    "leakbound.engines.choose",
    "leakbound.engines.sensitivity",
    "leakbound.flower",
    "leakbound.gate",
    "leakbound.inspection",
    "leakbound.loggers",
    "leakbound.losses",
    "leakbound.lpips",
    "leakbound.meter",
    "leakbound.metrics",
    "leakbound.models",
    "leakbound.nvflare",
    "leakbound.opacus",
    "leakbound.pairing",
    "leakbound.protocol",
    "leakbound.pruning",
    "leakbound.randomness",
    "leakbound.registry",
    "leakbound.report",
    "leakbound.report.best_attack",
    "leakbound.report.equal_loss",
    "leakbound.report.equal_utility",
    "leakbound.risk",
    "leakbound.risk.deployment",
    "leakbound.tensors",
    "leakbound.testing",
    "leakbound.trees",
    "leakbound.client_side",
    "leakbound.core",
)
SCHEMAS = {
    ROOT / "docs" / "reference" / "records.schema.json": assess.schema,
    ROOT / "docs" / "reference" / "report.schema.json": lambda: json.loads(evidence.schema()),
}
"""JSON schemas that are published, and what they are made from."""
ALONE = ("leakbound.report.evidence.schema",)
"""Public names of modules that are private otherwise."""
PRIVATE = {"leakbound.report.evidence", "leakbound.flower.compat"}
"""Modules whose `__all__` is for the package itself."""


def _arguments(value):
    """Names, order and defaults of what is called; annotations are mypy's to watch."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    text = str(inspect.Signature(plain))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _members(kind):
    for name, value in sorted(vars(kind).items()):
        if name.startswith("_"):
            continue
        if inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod)):
            yield f"{name}{_arguments(getattr(kind, name))}"
        elif isinstance(value, property) or type(value).__name__ == "cached_property":
            yield f"{name}: property"


def _lines(own, value):
    if inspect.isclass(value):
        if issubclass(value, enum.Enum):
            yield f"{own}: {', '.join(member.name for member in value)}"
        else:
            yield f"{own}{_arguments(value)}"
        yield from (f"{own}.{member}" for member in _members(value))
    elif inspect.ismodule(value):
        yield f"{own}: module"
    elif typing.get_origin(value) is not None:  # an alias of types, as in annotations
        yield own
    elif callable(value):
        yield f"{own}{_arguments(value)}"
        if type(value).__module__.startswith("leakbound."):  # a law: called, and asked in reverse
            yield from (f"{own}.{member}" for member in _members(type(value)))
    else:
        yield f"{own}: {type(value).__name__}"


def listing():
    """All public names, sorted in each package."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            yield from _lines(f"{package}.{name}", getattr(module, name))
    for own in ALONE:
        package, _, name = own.rpartition(".")
        yield from _lines(own, getattr(importlib.import_module(package), name))


def _commands():
    """Every command, with its options and what they are by default."""
    for verb, (command, _) in VERBS.items():
        hints = typing.get_type_hints(command)
        for field in dataclasses.fields(command):
            given = field.default is not dataclasses.MISSING
            text = repr(field.default) if given else "required"
            if typing.get_origin(hints[field.name]) is typing.Literal:
                text += f", of {', '.join(map(str, typing.get_args(hints[field.name])))}"
            name = f"--{field.name.replace('_', '-')}"
            if "Positional" in field.type:
                name = field.name.upper()
            yield f"leakbound {verb} {name} = {text}"


def _undocumented(own, value):
    """The public classes, functions, methods and properties that no docstring describes."""
    if inspect.isclass(value) or inspect.isfunction(value):
        made = f"{value.__name__}("  # what `dataclass` writes in place of a docstring
        if (inspect.getdoc(value) or made).startswith(made):
            yield own
        if inspect.isclass(value):
            names = {line.partition("(")[0].partition(":")[0] for line in _members(value)}
            for name in sorted(names):
                inherited = any(name in vars(base) for base in value.__mro__[1:])
                if not inherited and not inspect.getdoc(getattr(value, name)):
                    yield f"{own}.{name}"


def test_public_names_have_docstrings():
    modules = [importlib.import_module(package) for package in PACKAGES]
    assert not [
        missing
        for module in modules
        for name in module.__all__
        for missing in _undocumented(f"{module.__name__}.{name}", getattr(module, name))
    ]

    class Planted:
        def method(self):
            pass

    assert list(_undocumented("P", Planted)) == ["P", "P.method"]


EVERY_TABLE = {
    "models": [{"name": "mlp"}],
    "attacks": [{"name": "linear_inversion"}],
    "defenses": [{"name": "none"}, {"links": [{"name": "sign"}]}],
    **{key: {} for key in ("data", "threat", "criterion", "utility", "risk", "metrics")},
    "error_bound": {},
}


def _plan_keys():
    """Every key that reading a plan knows, what a plan is by default, and what its names take."""
    known = []
    with pytest.MonkeyPatch.context() as patch:
        refuse = check.known_keys
        patch.setattr(check, "known_keys", lambda *a: (known.append(a), refuse(*a)))
        read = plan_file._dataclass
        patch.setattr(plan_file, "_dataclass", lambda *a: (known.append(a), read(*a))[1])
        plan = audit.parse(EVERY_TABLE)
    for first, second, third in known:
        if isinstance(first, type):
            fields = dataclasses.fields(first)
            yield from (f"plan: [{second}] {f.name} = {f.default!r}" for f in fields)
        else:
            yield from (f"plan: {first}: {key}" for key in third)
    rows = [f for f in dataclasses.fields(type(plan.models[0])) if f.name != "settings"]
    yield from (f"plan: [[models]] {field.name}" for field in rows)
    for name in ("batch_sizes", "seeds", "threat", "psnr", "lpips_weights"):
        yield f"plan by default: {name} = {getattr(plan, name)!r}"
    bare = audit.parse({name: EVERY_TABLE[name] for name in ("models", "attacks")})
    yield f"plan by default: utility.rounds = {bare.utility.rounds}, without [utility]"
    for kind in ("model", "defense", "attack"):
        for entry in registry.entries(kind).values():
            if not entry.build.__module__.startswith("leakbound."):
                continue  # of another distribution
            settings = ", ".join(f"{one.name} = {one.default!r}" for one in entry.parameters)
            yield f"plan: {kind} {entry.name}({settings})"


def _policy_keys():
    for kind, table in policy.KINDS.items():
        for field in msgspec.structs.fields(table):
            given = "required" if field.required else repr(field.default)
            yield f"policy: [[{kind}]] {field.name} = {given}"


def test_the_page_names_every_key_of_a_policy():
    page = (ROOT / "docs" / "reference" / "policy.md").read_text("utf-8")
    keys = [line.split()[2] for line in _policy_keys()]
    assert [key for key in keys if f"| `{key}` |" not in page] == []


def _fields(node, own):
    """Every field of a JSON schema with its type, and which may not be missing."""
    if isinstance(node, list):
        for one in node:
            yield from _fields(one, own)
    if not isinstance(node, dict):
        return
    for name, field in node.get("properties", {}).items():
        must = "" if name in node.get("required", ()) else ", may be missing"
        yield f"{own} {name}: {_kind(field)}{must}"
        yield from _fields(field, f"{own} {name}.")
    for name, part in node.get("$defs", {}).items():
        yield from _fields(part, f"{own} {name}:")
    for key in ("items", "anyOf", "oneOf", "allOf"):
        yield from _fields(node.get(key), own)


def _kind(field):
    words = {k: v for k, v in field.items() if k not in ("description", "properties", "required")}
    return re.sub(r'["{}]', "", json.dumps(words))


def forms():
    """What is public and is no name in Python, sorted in each part."""
    for part in (_commands, _plan_keys, _policy_keys):
        yield from sorted(set(part()))
    yield from sorted(_fields(assess.schema(), "record"))
    yield from sorted(_fields(json.loads(evidence.schema()), "report.json"))


@pytest.mark.parametrize(("written", "found"), [(LISTED, listing), (FORMS, forms)])
def test_the_public_interface_is_the_listed_one(written, found):
    now, listed = list(found()), written.read_text("utf-8").splitlines()
    told = "see Stability in CONTRIBUTING.md; `python tests/test_public.py` writes the lists anew"
    gone, new = sorted({*listed} - {*now}), sorted({*now} - {*listed})
    assert not gone, f"gone or changed: {gone}; {told}"
    assert not new, f"new: {new}; {told}"
    assert now == listed, told


def _published(schema):
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.name)
def test_the_published_schema_is_the_one_that_is_read_by(path):
    assert path.read_text("utf-8") == _published(SCHEMAS[path]())


def test_no_public_module_is_forgotten():
    root = Path(leakbound.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        if "\n__all__ =" in path.read_text("utf-8"):
            parts = path.relative_to(root).with_suffix("").parts
            found.add(".".join(("leakbound", *parts)).removesuffix(".__init__"))
    assert found - PRIVATE == set(PACKAGES)
    named = {line.removesuffix(": module") for line in listing() if line.endswith(": module")}
    assert named <= set(PACKAGES), "a public name is a module whose own names are not listed"


def _used(code):
    """Full dotted names of leakbound that a piece of Python uses."""
    tree, known = ast.parse(code), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                bound = (name.asname, name.name) if name.asname else (name.name.split(".")[0],) * 2
                known |= dict([bound])
        elif isinstance(node, ast.ImportFrom):
            found = {n.asname or n.name: f"{node.module}.{n.name}" for n in node.names}
            known |= found
            yield from found.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", ast.unparse(node)):
            first, _, rest = ast.unparse(node).partition(".")
            if first in known:
                yield f"{known[first]}.{rest}"


def _is_public(name, listed):
    """Whether the first thing in a dotted name that is no module is listed, under this path or as
    the same object in a package above it."""
    value, parts = leakbound, name.split(".")[1:]
    own = "leakbound"
    while parts and inspect.ismodule(value):
        own += f".{parts[0]}"
        try:
            value = getattr(value, parts[0])
        except AttributeError:
            value = importlib.import_module(own)
        parts.pop(0)
    last, above = own.rpartition(".")[2], own.rpartition(".")[0]
    while not inspect.ismodule(value) and above and own not in listed:
        above = above.rpartition(".")[0]
        own = f"{above}.{last}"
        if above and getattr(importlib.import_module(above), last, None) is not value:
            own = ""
    return inspect.ismodule(value) or own in listed


def _pages():
    folders = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*/README.md")]
    return [ROOT / "README.md", *sorted(folders)]


@pytest.mark.parametrize("page", _pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_uses_is_public(page):
    listed = {re.split(r"[(:]", line)[0] for line in LISTED.read_text("utf-8").splitlines()}
    text = page.read_text("utf-8")
    used = set(re.findall(r"`(leakbound\.\w+(?:\.\w+)+)", text))
    for indent, code in re.findall(r"^( *)```py(?:thon)?\n(.*?)^ *```", text, re.M | re.S):
        used |= {*_used(re.sub(rf"^{indent}", "", code, flags=re.M))}
    names = {name for name in used if name.startswith("leakbound.")}
    assert not [name for name in sorted(names) if not _is_public(name, listed)]


def test_the_reproductions_use_what_is_public():
    listed = {re.split(r"[(:]", line)[0] for line in LISTED.read_text("utf-8").splitlines()}
    used = set()
    for path in (ROOT / "reproductions" / "src").rglob("*.py"):
        used |= {name for name in _used(path.read_text("utf-8")) if name.startswith("leakbound.")}
    assert len(used) > 100
    assert [name for name in sorted(used) if not _is_public(name, listed)] == []


@pytest.mark.parametrize(
    ("code", "public"),
    [
        ("import leakbound as lb\nlb.data.load('digits')", True),
        ("from leakbound.defenses.base import Defense", True),
        ("from leakbound.bounds import composition as c\nc.subsampled.log(1)", True),
        ("from leakbound.audit.experiment import judged", False),
        ("from leakbound import bounds\nbounds.identification.log_blind(None, 0)", False),
        ("import leakbound.report.evidence\nleakbound.report.evidence.page({})", False),
    ],
)
def test_a_planted_private_name_is_caught(code, public):
    listed = {re.split(r"[(:]", line)[0] for line in LISTED.read_text("utf-8").splitlines()}
    names = [name for name in _used(code) if name.startswith("leakbound.")]
    assert all(_is_public(name, listed) for name in names) == public


if __name__ == "__main__":
    for path, found in ((LISTED, listing), (FORMS, forms)):
        path.write_text("\n".join(found()) + "\n", encoding="utf-8")
    for path, schema in SCHEMAS.items():
        path.write_text(_published(schema()), encoding="utf-8")
