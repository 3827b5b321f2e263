"""The reports to Flower: their code prints what they say, and each fault has one."""

import logging
import re
from pathlib import Path

import numpy as np
import pytest

import leakbound.flower  # noqa: F401  first: flwr's dependencies warn where it is imported by itself

# isort: split

from leakbound.flower.facts import RULES

PAGES = sorted(
    path for path in (Path(__file__).parents[2] / "docs/upstream").glob("*.md")
    if path.stem != "index"
)  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_code_prints_what_the_report_says(page, capsys):
    text = page.read_text("utf-8")
    (code,), (shown,) = (
        re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for kind in ("python", "text")
    )
    state = np.random.get_state()  # noqa: NPY002  Flower draws from it
    logger = logging.getLogger("flwr")
    level = logger.level
    try:
        exec(compile(code, page.name, "exec"), {"__name__": "report"})
    finally:
        np.random.set_state(state)  # noqa: NPY002
        logger.setLevel(level)
    assert capsys.readouterr().out == shown
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert heads == ["Code that shows it", "Expected", "Consequence", "Suggested change"]


def test_every_fault_of_flower_has_a_report_and_a_line_in_the_docs():
    docs = Path(__file__).parents[2] / "docs"
    table = docs.joinpath("reference/flower_privacy.md").read_text("utf-8")
    assert len(PAGES) == 11
    for page in PAGES:
        assert f"(../upstream/{page.name})" in table, page
        assert page.name in (docs / "upstream/index.md").read_text("utf-8")
    for name in RULES:
        assert f"`{name}`" in table, name
