"""One torch thread, as the audit's workers: sums depend on the number of threads. Pages without
Python's internals. A browser.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from collections import Counter
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


DURATIONS = Path(__file__).parent / "tests" / "durations.json"
"""Seconds of what is long, by test, or by file where it is a fixture that takes them."""
LONG = 1.0
STAYS_LONG = 0.7
"""Below this a long test is long no more: without a gap, tests of one second would come and go."""
SHORT = 0.1
"""What the other tests take, nearly."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="write what takes more than a second into tests/durations.json (an idle machine)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-durations"):
        config.pluginmanager.register(_Durations())


class _Durations:
    """Measures each test's call, and each file's slowest fixture."""

    def __init__(self) -> None:
        self.seconds = dict[str, float]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.seconds[report.nodeid] = report.duration
        if report.when == "setup" and report.passed:
            file = report.nodeid.partition("::")[0]
            self.seconds[file] = max(report.duration, self.seconds.get(file, 0))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return  # a worker of xdist: the process that started it has all reports
        before = json.loads(DURATIONS.read_text("utf-8"))
        kept = {
            name: value
            for name, value in before.items()
            if name not in self.seconds and _exists(name)
        }
        for name, value in self.seconds.items():
            if value > (STAYS_LONG if name in before else LONG):
                kept[name] = round(value, 1)
        DURATIONS.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n", "utf-8")


def _exists(name: str) -> bool:
    return (DURATIONS.parents[1] / name.partition("::")[0]).exists()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves to `make test-long`; skip elsewhere what needs Linux. Several
    processes begin with the files that take longest, so that none is left alone with one at the
    end.
    """
    long = json.loads(DURATIONS.read_text("utf-8"))
    for item in items:
        if item.nodeid in long or item.nodeid.partition("::")[0] in long:
            item.add_marker("long")
        if sys.platform != "linux" and item.get_closest_marker("linux"):
            item.add_marker(pytest.mark.skip(reason="needs Linux"))
    if hasattr(config, "workerinput"):
        items.sort(key=_file_seconds(long, items), reverse=True)


def _file_seconds(
    long: dict[str, float],
    items: list[pytest.Item],
) -> Callable[[pytest.Item], float]:
    """The seconds of an item's file: of its long tests, and a guess for each of the others."""
    seconds = Counter({name: value for name, value in long.items() if "::" not in name})
    for item in items:
        if not item.get_closest_marker("slow"):
            seconds[item.nodeid.partition("::")[0]] += long.get(item.nodeid, SHORT)
    return lambda item: seconds[item.nodeid.partition("::")[0]]


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Any:
    """Examples in docstrings are the package's: a search through every test file costs a second."""
    collectors = yield
    if "tests" not in file_path.relative_to(Path(__file__).parent).parts:
        return collectors
    return [found for found in collectors if type(found).__name__ != "DoctestModule"]


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
