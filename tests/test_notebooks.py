"""The example notebooks hold the outputs of their own source, and they still run."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LARGEST = 300_000


def execute():
    spec = importlib.util.spec_from_file_location("execute_notebooks", FOLDER / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problems(notebook):
    """What is wrong with the outputs of a notebook."""
    found = []
    if notebook["metadata"].get("leakbound", {}).get("source") != execute().digest(notebook):
        found.append("stale: run docs/notebooks/execute.py")
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    if [cell["execution_count"] for cell in code] != [*range(1, len(code) + 1)]:
        found.append("not run from top to bottom")
    outputs = [output for cell in code for output in cell["outputs"]]
    if not outputs:
        found.append("no output")
    for output in outputs:
        if output["output_type"] == "error":
            found.append("an error")
        if output.get("name") == "stderr" or "Warning" in json.dumps(output):
            found.append("a warning")
        if re.search(r"(?<![\w.])/(home|root|work|tmp|usr|opt|var)/", json.dumps(output)):
            found.append("a path of a machine")
    if any(set(cell["metadata"]) for cell in code):
        found.append("times or other metadata of a run")
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_outputs_are_those_of_the_source(path):
    assert path.stat().st_size < LARGEST
    assert problems(json.loads(path.read_text("utf-8"))) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "markdown":
            for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", "".join(cell["source"])):
                assert "://" in target or (path.parent / target).exists(), target


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"text": ["in /home/me/x"]}, "path"),
        ({"name": "stderr"}, "warning"),
        ({"text": ["x.py:1: UserWarning: y"]}, "warning"),
        ({"output_type": "error"}, "error"),
    ],
    ids=["path", "stderr", "warning", "error"],
)
def test_a_planted_fault_is_found(change, word):
    output = {"output_type": "stream", "name": "stdout", "text": ["fine"]}
    cell = {"cell_type": "code", "source": "1", "execution_count": 1, "metadata": {}}
    book = {"metadata": {}, "cells": [cell | {"outputs": [output]}]}
    book["metadata"]["leakbound"] = {"source": execute().digest(book)}
    assert problems(book) == []
    book["cells"][0]["outputs"] = [output | change]
    assert any(word in found for found in problems(book))
    book["cells"][0] |= {"outputs": [output], "source": "2"}
    assert problems(book) == ["stale: run docs/notebooks/execute.py"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path):
    command = [sys.executable, str(FOLDER / "execute.py"), "--check", path.stem]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "cells ran" in done.stdout
