"""What each registered name is: its settings, their meaning, its source and a command that runs it.

`leakbound list NAME` and the pages of the site both use this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from itertools import islice
from typing import Any

import torch

from leakbound import registry
from leakbound._util.docstrings import parts
from leakbound.core import Batch, Task
from leakbound.registry import Entry

_TEXT = "--data topics --model decoder"
NEEDS: Mapping[str, str] = {
    "attribute_filter": "--data german --known 'all but foreign_worker'",
    "adapter_pursuit": "--data topics --model decoder,adapters=4",
    "adapter_words": "--data topics --model decoder,adapters=4 "
    "--defense local_aggregation,optimizer=adam",
    "patch_inversion": "--model vit",
    "patch_span": "--model vit,patch=14,width=64 --batch-size 2",
    "sign_inversion": "--defense local_aggregation,optimizer=adam",
    "span_decoding": "--data german",
    "tab_leak": "--data german",
    "token_matching": _TEXT,
    "token_rows": _TEXT,
    "token_span": _TEXT,
    "touched_rows": "--data german",
    "law_evolution": "--defense local_optimal_noise",
    "law_matching": "--defense local_optimal_noise",
    "variance_readout": "--defense local_optimal_noise",
    "mixup": "--batch-size 2",
}
"""Options that the command of an entry needs; without them the attack would not apply."""
LINKS: Mapping[str, tuple[str, ...]] = {
    "correlated_noise": ("clip_examples", "mean", "correlated_noise"),
    "gaussian_mechanism": ("clip_examples", "mean", "gaussian_mechanism"),
    "whiten": ("whiten", "color"),
}
"""Defenses that work only as a link of a chain, and a chain that has one."""


def command(entry: Entry) -> str:
    """The command that runs an entry; for a link of a chain, that of a plan."""
    if entry.kind == "scheme":
        return f"leakbound attack --model 'lenet,scheme=\"{entry.name}\"'"
    if entry.name in LINKS:
        return f"leakbound audit plan.toml --out runs/{entry.name}"
    more = [f"--{entry.kind} {entry.name}"]
    if entry.kind == "defense":
        numbers = (p for p in entry.parameters if type(p.default) in (int, float))
        for setting in islice(numbers, 1):
            more[0] += f",{setting.name}={written(setting.default)}"
    if entry.kind == "attack" and is_malicious(entry):
        more.append("--malicious-server")
    return " ".join(["leakbound attack", *more, *filter(None, [NEEDS.get(entry.name)])])


def meanings(entry: Entry) -> dict[str, str]:
    """What each setting means: from its own docstring, from its bases', or from its parts'.

    A class documents the settings that it adds; a function those that its class does not.
    """
    build = entry.build
    if inspect.isclass(build):
        sources: list[Any] = list(inspect.getmro(build))
    else:
        near = [
            thing for thing in vars(inspect.getmodule(build)).values() if inspect.isclass(thing)
        ]
        sources = [build, *(thing for thing in near if thing in _classes())]
    known: dict[str, str] = {}
    for source in sources:
        known = parts(inspect.getdoc(source) or "").named("Args") | known
    return known


def required(entry: Entry) -> set[str]:
    """The settings that have no default."""
    signature = inspect.signature(entry.build).parameters
    return {name for name, p in signature.items() if p.default is inspect.Parameter.empty}


def written(default: Any) -> str:
    """A default as a plan writes it, as far as TOML has a word for it."""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, str):
        return f'"{default}"'
    return repr(list(default) if isinstance(default, tuple) else default)


def made(entry: Entry) -> Any:
    """The entry with its own defaults; None where a setting has none."""
    try:
        return entry.build()
    except TypeError:
        return None


@cache
def _classes() -> frozenset[type]:
    kinds = ("attack", "defense")
    built = [entry.build for kind in kinds for entry in registry.entries(kind).values()]
    return frozenset(build for build in built if inspect.isclass(build))


def is_malicious(entry: Entry) -> bool:
    """Whether an attack changes the model that the server sends; tried on a small one."""
    attack = made(entry)
    task = _small_task()
    return attack is not None and attack.plant(task) is not task


@cache
def _small_task() -> Task:
    images = torch.linspace(0, 1, 16).reshape(4, 1, 2, 2)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    return Task.of(model, public=Batch(images, torch.tensor([0, 1, 2, 0])))
