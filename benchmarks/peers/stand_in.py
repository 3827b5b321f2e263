"""Import breaching without torchvision, which its attacks do not use.

The wheel of torchvision that fits this torch does not import with it (it is built for CUDA), and
torchmetrics fails if an installed torchvision does not import. So empty modules replace torchvision
while breaching is imported. They are removed afterwards, and later imports of torchvision find
none.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

PARTS = ("datasets", "datasets.utils", "models", "models.densenet", "transforms", "utils")


class _Absent:
    """A base class or annotation for breaching that an attack never calls."""

    def __init__(self, *_: object, **__: object) -> None:
        raise RuntimeError("this needs torchvision, for which an empty module stands in")


def import_breaching() -> Any:
    """The package `breaching`.

    Raises:
        ModuleNotFoundError: it is not installed; `make bench` makes an environment that has it.
    """
    if "breaching" in sys.modules:
        return sys.modules["breaching"]
    names = ["torchvision", *(f"torchvision.{part}" for part in PARTS)]
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = ModuleType(name)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, sys.modules[name])
    sys.modules["torchvision.datasets.utils"].download_and_extract_archive = _Absent  # type: ignore[attr-defined]
    sys.modules["torchvision.models.densenet"]._DenseLayer = _Absent  # type: ignore[attr-defined]
    try:
        import breaching
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    return breaching
