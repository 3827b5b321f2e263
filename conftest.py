"""One torch thread, as the audit's workers: sums depend on the number of threads. Pages without
Python's internals. A browser.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    import torch

    torch.set_num_threads(1)


LONG = Path(__file__).parent / "tests" / "long.txt"
"""Files, test functions and single cases that take more than a second, a line each."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves to `make test-long`; skip elsewhere what needs Linux."""
    long = set(LONG.read_text("utf-8").splitlines())
    for item in items:
        function = item.nodeid.partition("[")[0]
        file = function.partition("::")[0]
        if long & {item.nodeid, function, file}:
            item.add_marker("long")
        if sys.platform != "linux" and item.get_closest_marker("linux"):
            item.add_marker(pytest.mark.skip(reason="needs Linux"))


def pytest_collection_finish() -> None:
    """What collecting has made stays: the garbage collector need not look at it in every test."""
    gc.collect()
    gc.freeze()


INTERNALS = ("built-in method", "object at 0x", "<bound method", "<function")


@pytest.fixture(autouse=True)
def _no_internals(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page that any test renders shows what only Python understands."""
    from jinja2 import Template

    render = Template.render

    def checked(self: Template, *given: Any, **named: Any) -> str:
        page = render(self, *given, **named)
        plain = page.replace("&lt;", "<")
        assert [words for words in INTERNALS if words in plain] == []
        return page

    monkeypatch.setattr(Template, "render", checked)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line a row, whatever the terminal."""
    from leakbound.cli import terminal

    for console in (terminal.console, terminal.errors):
        monkeypatch.setattr(console, "_width", 300)
        monkeypatch.setattr(console, "_height", 50)


def _missing(why: str) -> None:
    if os.environ.get("LEAKBOUND_REQUIRE_BROWSER") == "1":
        pytest.fail(f"a browser is required, but {why}")
    pytest.skip(why)


def _patient(make: Callable[..., Any]) -> Callable[..., Any]:
    """What is made waits ten minutes for everything: limits are for hangs."""

    def made(*arguments: Any, **settings: Any) -> Any:
        found = make(*arguments, **settings)
        found.set_default_timeout(600_000)
        return found

    return made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium; tests are skipped without one."""
    path = os.environ.get("LEAKBOUND_CHROMIUM") or next(
        filter(None, map(shutil.which, BROWSERS)), None
    )
    if path is None:
        _missing("no Chromium was found; set LEAKBOUND_CHROMIUM to its path")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("playwright is not installed")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        for name in ("new_context", "new_page"):
            setattr(chromium, name, _patient(getattr(chromium, name)))
        yield chromium
        chromium.close()
