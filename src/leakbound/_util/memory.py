"""How much memory is free, where the system says so."""

from __future__ import annotations

from pathlib import Path


def free_bytes(source: Path = Path("/proc/meminfo")) -> int | None:
    r"""Bytes that can be allocated without swapping (Linux); None if the system does not say.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "meminfo"
        ...     _ = file.write_text("MemTotal: 9 kB\nMemAvailable: 4 kB\n")
        ...     free_bytes(file), free_bytes(Path(folder) / "none")
        (4096, None)
    """
    try:
        lines = source.read_text("ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    numbers = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return next((1024 * int(number) for number in numbers), None)
