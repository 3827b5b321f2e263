"""A notebook with its stored outputs as a page of the site."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def page(text: str, name: str) -> str:
    """The Markdown of a notebook.

    Args:
        text: the notebook's file.
        name: of the file, which the page offers to open.

    Example:
        >>> cell = {"cell_type": "code", "source": "1 + 1", "outputs": [
        ...     {"output_type": "execute_result", "data": {"text/plain": "2"}}]}
        >>> print(page(json.dumps({"cells": [cell]}), "sum"))
        ```python
        1 + 1
        ```
        <BLANKLINE>
        ```text
        2
        ```
        <BLANKLINE>
        This page is the notebook `docs/notebooks/sum.ipynb` with its stored outputs.
        <BLANKLINE>
    """
    blocks = [block for cell in json.loads(text)["cells"] for block in _cell(cell)]
    end = f"This page is the notebook `docs/notebooks/{name}.ipynb` with its stored outputs."
    return "\n\n".join([*blocks, end]) + "\n"


def written(text: str) -> str:
    """The Markdown cells alone."""
    cells = json.loads(text)["cells"]
    return "\n\n".join(_joined(c["source"]) for c in cells if c["cell_type"] == "markdown")


def _cell(cell: Mapping[str, Any]) -> Iterator[str]:
    source = _joined(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "text/html" in data:
            # one line, so that Markdown finds no paragraph in it
            yield f'<div class="output">{" ".join(_joined(data["text/html"]).split())}</div>'
        elif "image/png" in data:
            code = _joined(data["image/png"]).replace("\n", "")
            described = html.escape(_joined(data.get("text/plain", "a plot")))
            yield f'<img alt="{described}" src="data:image/png;base64,{code}">'
        else:
            plain = _joined(output.get("text", data.get("text/plain", "")))
            yield f"```text\n{_ANSI.sub('', plain).rstrip()}\n```"


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)
