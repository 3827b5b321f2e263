"""The public interface: a name or an argument that is dropped, added or changed must be seen.

What is public stands in `public.txt`, a line a name with its arguments and their defaults.
`python tests/test_public.py` writes it anew; read the difference before it is committed.
"""

import importlib
import inspect
import re
from pathlib import Path

import leakbound

LISTED = Path(__file__).with_name("public.txt")
PACKAGES = (
    "leakbound",
    "leakbound.attacks",
    "leakbound.attacks.features",
    "leakbound.audit",
    "leakbound.bounds",
    "leakbound.bounds.from_scratch",
    "leakbound.bounds.ladder",
    "leakbound.captured",
    "leakbound.cluster",
    "leakbound.data",
    "leakbound.defenses",
    "leakbound.federation",
    "leakbound.flower",
    "leakbound.inspection",
    "leakbound.lpips",
    "leakbound.meter",
    "leakbound.models",
    "leakbound.opacus",
    "leakbound.pruning",
    "leakbound.sensitivity",
    "leakbound.tensors",
    "leakbound.testing",
)


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


def listing():
    """All public names, sorted in each package."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            value = getattr(module, name)
            own = f"{package}.{name}"
            if inspect.isclass(value):
                yield f"{own}{_arguments(value)}"
                yield from (f"{own}.{member}" for member in _members(value))
            elif inspect.ismodule(value):
                yield f"{own}: module"
            elif callable(value):
                yield f"{own}{_arguments(value)}"
            else:
                yield f"{own}: {type(value).__name__}"


def test_the_public_interface_is_the_listed_one():
    now, listed = set(listing()), set(LISTED.read_text("utf-8").splitlines())
    told = "see Stability in CONTRIBUTING.md; `python tests/test_public.py` writes public.txt anew"
    assert not listed - now, f"gone or changed: {sorted(listed - now)}; {told}"
    assert not now - listed, f"new: {sorted(now - listed)}; {told}"


def test_no_public_package_is_forgotten():
    root = Path(leakbound.__file__).parent
    found = {
        ".".join(("leakbound", *path.parent.relative_to(root).parts))
        for path in root.rglob("__init__.py")
        if "__all__" in path.read_text("utf-8")
    }
    private, modules = {"leakbound.report"}, {"leakbound.lpips"}
    assert found - private == set(PACKAGES) - modules


if __name__ == "__main__":
    LISTED.write_text("\n".join(listing()) + "\n", encoding="utf-8")
