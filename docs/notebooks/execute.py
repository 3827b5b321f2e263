"""Run the example notebooks and keep what they show: `python docs/notebooks/execute.py [NAME ...]`.

The notebooks are their own source: edit one in Jupyter, then run this. Each runs in a fresh kernel
and an empty folder, on one thread. `--check` runs them without writing anything.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECONDS = 900
"""Longest time of one cell."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}


def digest(notebook: Any) -> str:
    """A hash of what the cells say: outputs are those of this source, or they are stale."""
    found = hashlib.sha256()
    for cell in notebook["cells"]:
        source = cell["source"]
        text = source if isinstance(source, str) else "".join(source)
        found.update(f"{cell['cell_type']}\0{text}\0".encode())
    return found.hexdigest()


def executed(path: Path) -> Any:
    """The notebook with fresh outputs and without anything that differs from run to run.

    Raises:
        ValueError: a cell wrote to stderr, which is where warnings go.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=SECONDS,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            store_widget_state=False,
            coalesce_streams=True,
        )
        manager = client.create_kernel_manager()
        if os.name == "posix":  # sockets in a private folder in place of ports
            manager.transport, manager.ip = "ipc", f"{folder}/kernel"
        client.execute(env=os.environ | ENVIRONMENT | {"FLWR_HOME": f"{folder}/flwr"})
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
        for output in cell.get("outputs", ()):
            if output.output_type == "stream" and output.name == "stderr":
                raise ValueError(f"{path.name}, cell {number} wrote to stderr: {output.text}")
            output.get("metadata", {}).clear()
            if "text/html" in output.get("data", {}):
                output.data.pop("text/plain", None)  # the same once more, and much longer
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata = {
        "kernelspec": kernel,
        "language_info": {"name": "python"},
        "leakbound": {"source": digest(notebook)},
    }
    return notebook


def main() -> None:
    """Run the named notebooks, or all."""
    import nbformat

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="such as first_look; all by default")
    parser.add_argument("--check", action="store_true", help="run, write nothing")
    given = parser.parse_args()
    known = sorted(path.stem for path in HERE.glob("*.ipynb"))
    if unknown := sorted(set(given.names) - set(known)):
        sys.exit(f"no notebook {unknown[0]!r}; there are {', '.join(known)}")
    for name in given.names or known:
        path = HERE / f"{name}.ipynb"
        notebook = executed(path)
        if not given.check:
            path.write_text(nbformat.writes(notebook, indent=1) + "\n", "utf-8")
        print(f"{name}: {len(notebook.cells)} cells ran")


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)
    if sys.platform == "win32":
        asyncio.set_event_loop_policy(asyncio.WindowsSelectorEventLoopPolicy())
    main()
