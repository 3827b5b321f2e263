"""A Flower app's folder: what its pyproject.toml names, and its components, imported."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from leakbound._util import files, user_code

KINDS = {"serverapp": ServerApp, "clientapp": ClientApp}
Progress = Callable[[str], None]


def about(folder: Path) -> dict[str, Any]:
    """The table `tool.flwr.app` of a folder's pyproject.toml."""
    path = folder / "pyproject.toml"
    try:
        with files.opened(path) as file:
            table = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(
            f"folder is {str(folder)!r}, whose pyproject.toml cannot be read: {error}; give the "
            "folder of a Flower app"
        ) from error
    found = table.get("tool", {}).get("flwr", {}).get("app", {})
    if not isinstance(found, dict) or not isinstance(found.get("components"), dict):
        raise ValueError(
            f"{str(path)!r} has no [tool.flwr.app.components]; give the folder of a Flower app"
        )
    return found


def component(folder: Path, about: Mapping[str, Any], name: str, say: Progress) -> Any:
    """One app that the pyproject.toml names, imported from the folder; its kind is checked."""
    kind, path = KINDS[name], about["components"].get(name)
    if not isinstance(path, str):
        raise ValueError(
            f"[tool.flwr.app.components] names no {name}; add {name} = 'package.module:app'"
        )
    _refuse_namesake(folder, path.partition(":")[0].partition(".")[0])
    say(f"importing {path} (this runs the app's code)")
    app = user_code.find(name, path)
    if not isinstance(app, kind):
        raise ValueError(f"{name} is {path!r}, a {type(app).__name__}; give a {kind.__name__}")
    return app


def _refuse_namesake(folder: Path, package: str) -> None:
    """Python would take a package of that name that is imported already, and not the folder's."""
    other = getattr(sys.modules.get(package), "__file__", None)
    place = folder.resolve()
    own = (place / package).is_dir() or (place / f"{package}.py").is_file()
    if own and other is not None and not Path(other).resolve().is_relative_to(place):
        raise ValueError(
            f"folder is {str(folder)!r}, whose package {package!r} has the name of one that is "
            "imported from elsewhere; run this in a process of its own"
        )


@contextmanager
def importing(folder: Path) -> Iterator[None]:
    """The folder in front of the import path; its modules are forgotten afterwards."""
    place, known = str(folder.resolve()), set(sys.modules)
    sys.path.insert(0, place)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(place)
        for name in set(sys.modules) - known:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).is_relative_to(place):
                del sys.modules[name]


def flat(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested tables as one, with keys joined by dots, as Flower does."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        inner = isinstance(value, dict)
        found |= flat(value, f"{above}{key}.") if inner else {above + key: value}
    return found
