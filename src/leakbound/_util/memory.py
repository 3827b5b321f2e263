"""How much memory is free, where the system says so, and how much a computation takes."""

from __future__ import annotations

import ctypes
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GB = 10**9
CPU = torch.device("cpu")
PROGRAM = 5e8
"""Bytes that the process is taken to hold where the system does not say: Python with PyTorch."""


def free_bytes(root: Path = Path("/")) -> int | None:
    r"""Bytes that can be allocated without swapping, and within the limits of control groups.

    Linux; None if the system does not say.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     place = Path(folder) / "proc"
        ...     place.mkdir()
        ...     _ = (place / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 4 kB\n")
        ...     free_bytes(Path(folder)), free_bytes(place)
        (4096, None)
    """
    known = [_kilobytes(root / "proc/meminfo", "MemAvailable:"), *_left_in_groups(root)]
    return min((one for one in known if one is not None), default=None)


class _Files(NamedTuple):
    """Where the groups of a version are, and what they call limit, use and pages to give back."""

    top: str
    limit: str
    used: str
    cached: str


GROUPS = {
    "": _Files(
        "sys/fs/cgroup",
        "memory.max",
        "memory.current",
        "inactive_file ",
    ),
    "memory": _Files(
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file ",
    ),
}
"""Version 2, which names no controller in /proc/self/cgroup, and version 1."""


def _left_in_groups(root: Path) -> list[int]:
    """Bytes that each limited control group of the process leaves, and each group above it."""
    left = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            files = GROUPS.get(name)
            if files is None:
                continue
            top = root / files.top
            group = top / path.lstrip("/")
            # In a container the path may be that of the machine: then the top is its group.
            for place in (group, *group.parents):
                if not place.is_relative_to(top):
                    break
                limit = _first_number(place / files.limit)
                used = _first_number(place / files.used)
                if limit is not None and used is not None:
                    cached = _first_number(place / "memory.stat", files.cached) or 0
                    left.append(max(0, limit - used + cached))
    return left


def _first_number(source: Path, name: str = "") -> int | None:
    """The number of the line that begins with a name; None if there is none, as of "max"."""
    for line in _lines(source):
        if line.startswith(name):
            text = line.removeprefix(name)
            return int(text) if text.isdecimal() else None
    return None


def _lines(source: Path) -> list[str]:
    try:
        return source.read_text("ascii", "replace").splitlines()
    except OSError:
        return []


def held_bytes(source: Path = Path("/proc/self/status")) -> int | None:
    """Bytes of memory that this process holds now (Linux); None if the system does not say."""
    return _kilobytes(source, "VmRSS:")


def _kilobytes(source: Path, name: str) -> int | None:
    numbers = (line.split()[1] for line in _lines(source) if line.startswith(name))
    return next((1024 * int(number) for number in numbers), None)


def trim() -> None:
    """Give freed memory back to the system, which else counts it as held (glibc; else nothing)."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


@dataclass(frozen=True)
class Allowed:
    """The bytes that the process may hold, None if only what is free limits it, and its device."""

    memory: float | None = None
    device: torch.device = CPU

    @property
    def room(self) -> float:
        """Bytes that a computation may take now, beside what is held; infinite if unknown."""
        trim()
        if self.device.type == "cuda":
            left, total = torch.cuda.mem_get_info(self.device)
            free = float(left)
            held = float(total - left)
        else:
            known = free_bytes()
            free = float("inf") if known is None else float(known)
            held = float(held_bytes() or PROGRAM)
        return free if self.memory is None else min(free, max(0.0, self.memory - held))


def _storages(values: Any) -> list[torch.UntypedStorage]:
    tensors = (one for one in tree_leaves(values) if isinstance(one, Tensor))
    return [one.untyped_storage() for one in tensors if one.layout == torch.strided]


class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that are made and alive inside it, and keeps the most.

    Each storage counts once, whoever keeps it: variables, the graph, or a kernel on its way back.
    What kernels allocate and free within one call is not seen.

    Example:
        >>> with PeakBytes() as counted:
        ...     total = sum(torch.ones(1000) for _ in range(3))
        >>> counted.peak  # the next summand beside two sums
        12000
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else its first use imports PyTorch's compiler, which takes a second

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live = 0
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        new = [one for one in _storages(made) if one._cdata not in self._seen]
        if new:
            # A view, or a result in place, of what was there before.
            given = {one._cdata for one in _storages((args, kwargs))}
            for storage in new:
                if storage._cdata not in given:
                    self._count(storage)
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = storage.nbytes()

        def gone(_: object) -> None:
            del self._seen[key]
            self._live -= size

        # The Python object lives as long as the storage, also where only a graph keeps it.
        self._seen[key] = weakref.ref(storage, gone)
        self._live += size
        self.peak = max(self.peak, self._live)
