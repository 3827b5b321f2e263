"""Find Python code that settings name as "package.module:build", with errors that name it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch


def find(kind: str, path: str) -> Callable[..., Any]:
    """Import the module, which runs its code; `kind` names the expected callable in errors."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name) or module_name.startswith("."):
        raise ValueError(f"{kind} is {path!r}; write 'package.module:build'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The named module itself is missing, and not one that it imports.
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise ValueError(
                f"{kind} is {path!r}, but there is no module {error.name!r}; "
                "install it or add its folder to PYTHONPATH"
            ) from error
        raise ValueError(f"{kind} {path!r}: its module needs {error.name!r}; install it") from error
    except Exception as error:  # it runs the user's code
        raise ValueError(
            f"{kind} {path!r}: importing its module raised {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, name):
        raise ValueError(f"{kind} is {path!r}, but module {module_name!r} has no {name!r}")
    build = getattr(module, name)
    if not callable(build):
        raise ValueError(
            f"{kind} is {path!r}, which is a {type(build).__name__}; name a function that builds it"
        )
    return cast(Callable[..., Any], build)


@contextmanager
def seeded(generator: torch.Generator | None) -> Iterator[None]:
    """Seed PyTorch's global random state from a generator for a while; None leaves it unchanged."""
    if generator is None:
        yield
        return
    # No devices: to save a GPU's state would start CUDA, and only the CPU's generator is seeded.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(generator.initial_seed())
        yield
