"""Store finished parts of a run, so that a stopped run continues where it was."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leakbound.cli import kit
from leakbound.data.sources import Dataset

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from leakbound_reproductions.figure_values import Value

DATA = "data.json"


@dataclass(frozen=True)
class Parts:
    """A folder of finished parts, a JSON file each."""

    folder: Path

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """The result of `make`, as read back from JSON; computed only if no file has it.

        Example:
            >>> from tempfile import mkdtemp
            >>> parts = Parts(Path(mkdtemp()))
            >>> parts.once("a", lambda: (1, 2.5)), parts.once("a", lambda: None)
            ([1, 2.5], [1, 2.5])
        """
        path = self.folder / f"{name}.json"
        if not self.has(name):
            made = json.dumps({"value": make()}, allow_nan=False).encode()
            kit.write(kit.folder(self.folder.parent, self.folder.name) / path.name, made)
        try:
            return json.loads(kit.read(path))["value"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path} is damaged; remove it and run again") from None

    def has(self, name: str) -> bool:
        """Whether a part is done."""
        return os.path.lexists(self.folder / f"{name}.json")


def note_data(folder: Path, name: str, dataset: Dataset) -> None:
    """Store the digest of a part's data, or compare it with the folder's.

    Raises:
        ValueError: the data differ from those of the run that began here.
    """
    known = data_of(folder)
    own = {"fingerprint": dataset.fingerprint, "examples": len(dataset.labels)}
    if known.get(name, own) != own:
        raise ValueError(
            f"out is {str(folder)!r}, which belongs to other data of {name!r}; restore the data, "
            "or choose another folder"
        )
    content = json.dumps({"data": known | {name: own}}, indent=1, sort_keys=True).encode()
    kit.write(folder / DATA, content)


def data_of(folder: Path) -> dict[str, Any]:
    """What `note_data` wrote into a folder."""
    path = folder / DATA
    found: dict[str, Any] = json.loads(kit.read(path))["data"] if path.exists() else {}
    return found


def page(path: Path, lines: Iterable[str]) -> None:
    """Write a page in Markdown, or a table."""
    kit.write(path, ("\n".join(lines) + "\n").encode())


def figure(
    drawn: Figure,
    path: Path,
    dpi: int,
    more: Iterable[Value] = (),
) -> None:
    """Write a figure as PNG, and its values, and more that it does not plot, as CSV beside it.

    The same figure gives the same bytes.
    """
    from leakbound_reproductions import figure_values

    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    kit.write(path, buffer.getvalue())
    kit.write(values_of(path), figure_values.table(drawn, more).encode())


def values_of(path: Path) -> Path:
    """The file of the values of a figure's file."""
    return path.with_suffix(".values.csv")
