"""Parts of a run that are kept: what a stopped run has done is not done again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leakbound.audit.records import write_atomically
from leakbound.data.sources import Dataset

DATA = "data.json"


@dataclass(frozen=True)
class Parts:
    """A folder of finished parts, a JSON file each."""

    folder: Path

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` gives, as JSON reads it again; made only where no file has it.

        Example:
            >>> from tempfile import mkdtemp
            >>> parts = Parts(Path(mkdtemp()))
            >>> parts.once("a", lambda: (1, 2.5)), parts.once("a", lambda: None)
            ([1, 2.5], [1, 2.5])
        """
        path = self.folder / f"{name}.json"
        if not path.exists():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(path, json.dumps(make(), allow_nan=False).encode())
        try:
            return json.loads(path.read_bytes())
        except ValueError:
            raise ValueError(f"{path} is damaged; remove it and run again") from None

    def has(self, name: str) -> bool:
        """Whether a part is done."""
        return (self.folder / f"{name}.json").exists()


def note_data(folder: Path, name: str, dataset: Dataset) -> None:
    """Write down what named a part's data, or compare it with what the folder's parts are of.

    Raises:
        ValueError: other data than in the run that began here.
    """
    known = data_of(folder)
    own = {"fingerprint": dataset.fingerprint, "examples": len(dataset.labels)}
    if known.get(name, own) != own:
        raise ValueError(
            f"out is {str(folder)!r}, which belongs to other data of {name!r}; put the data back, "
            "or take another folder"
        )
    content = json.dumps(known | {name: own}, indent=1, sort_keys=True).encode()
    write_atomically(folder / DATA, content)


def data_of(folder: Path) -> dict[str, Any]:
    """What `note_data` wrote into a folder."""
    path = folder / DATA
    found: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    return found
