"""What a command of another distribution needs: output, files, processes, provenance."""

from leakbound._util.files import append, check, claimed, decode, folder, read, write, writing
from leakbound.audit.run_file import claim, machine, versions
from leakbound.cli.shared import workers_of
from leakbound.cli.terminal import console, errors, safe

__all__ = [
    "append",
    "check",
    "claim",
    "claimed",
    "console",
    "decode",
    "errors",
    "folder",
    "machine",
    "read",
    "safe",
    "versions",
    "workers_of",
    "write",
    "writing",
]
