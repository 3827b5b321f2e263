"""Which seeded faults the tests find, before and after a change of the tests or of the code.

    python tests/mutation make faults.json --tree OLD --count 300 --seed 0
    python tests/mutation trace trace/ --tree OLD -- --ignore tests/experiments
    python tests/mutation run verdicts.json --faults faults.json --tree OLD --trace trace/
    python tests/mutation compare old.json new.json

`trace` runs the tests once and notes which lines each one executes (it needs `coverage`). `run`
puts one fault at a time into a copy of the tree and runs the tests that execute its line, cheap
ones first, in a fork of a process that has imported torch already.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from faults import Fault, Place, locate, put, sample

HEAVY = (
    *("torch", "torch.distributed", "torchmetrics.functional.image", "numpy", "scipy.stats"),
    *("scipy.optimize", "scipy.linalg", "scipy.special", "scipy.integrate", "scipy.signal"),
    *("matplotlib.pyplot", "hypothesis", "jinja2", "opacus", "sklearn.datasets", "mpmath"),
    *("dp_accounting", "flwr.app", "flwr.clientapp", "rich.console", "tyro", "PIL.Image"),
)
"""What every child would import anew."""
COMMON = (
    *("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=no"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)
FEW, MANY = 12.0, 60.0
"""Seconds of tests for a fault: at first, and where those found nothing."""


def _cpu_seconds() -> float:
    """Of this process and its children: other programs' load does not count."""
    return sum(os.times()[:4])


class Tracer:
    """A plugin that notes each test's CPU time, outcome and the lines it executes."""

    def __init__(self, folder: Path, source: Path) -> None:
        import coverage

        self.outcome, self.start = "passed", 0.0
        self.tests = (folder / "tests.jsonl").open("w", encoding="utf-8", buffering=1)
        self.coverage = coverage.Coverage(
            data_file=str(folder / "lines.sqlite"), source=[str(source)], config_file=False
        )
        self.coverage.set_option("run:core", "ctrace")
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid + "|setup")
        self.outcome, self.start = "passed", _cpu_seconds()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self.coverage.switch_context(item.nodeid + "|call")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self.outcome = report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        seconds = round(_cpu_seconds() - self.start, 3)
        row = {"test": nodeid, "seconds": seconds, "outcome": self.outcome}
        self.tests.write(json.dumps(row) + "\n")

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()


class Chosen:
    """A plugin that keeps the chosen tests, in the order of their files' cost."""

    def __init__(self, wanted: dict[str, float]) -> None:
        self.wanted, self.failed = wanted, []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        cost: Counter[str] = Counter()
        for name, seconds in self.wanted.items():
            cost[name.split("::")[0]] += seconds
        items[:] = [item for item in items if item.nodeid in self.wanted]
        items.sort(key=lambda item: (cost[item.nodeid.split("::")[0]], item.nodeid.split("::")[0]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


class Trace:
    """What `trace` wrote: the tests that execute a line."""

    def __init__(self, folder: Path, tree: Path) -> None:
        import coverage

        self.data = coverage.CoverageData(str(folder / "lines.sqlite"))
        self.data.read()
        self.files = {Path(file).as_posix(): file for file in self.data.measured_files()}
        rows = map(json.loads, (folder / "tests.jsonl").read_text("utf-8").splitlines())
        self.seconds = {row["test"]: row["seconds"] for row in rows if row["outcome"] == "passed"}
        self.in_file: dict[str, list[str]] = defaultdict(list)
        for name in self.seconds:
            self.in_file[name.split("::")[0]].append(name)
        self.tree = tree
        self.known: dict[str, dict[int, list[str]]] = {}

    def covering(self, file: str, lines: range) -> set[str]:
        """Tests that execute one of the lines, or share a fixture that does."""
        if file not in self.known:
            ends = [own for own in self.files if own.endswith(f"/src/leakbound/{file}")]
            self.known = {file: self.data.contexts_by_lineno(self.files[ends[0]]) if ends else {}}
        found = set()
        for line in lines:
            for context in self.known[file].get(line, ()):
                name, _, phase = context.rpartition("|")
                found |= {name} if phase == "call" else {name, *self.in_file[name.split("::")[0]]}
        return {name for name in found if name in self.seconds}

    def choose(self, names: set[str], file: str, budget: float) -> dict[str, float]:
        """Tests for a fault of this file: those about its module first, then the cheapest."""
        path = Path(file)
        own = {path.stem, path.parent.name} - {"", "__init__", "base"}

        def order(name: str) -> tuple[bool, float]:
            test = name.split("::")[0]
            return not (test.endswith(f"leakbound/{file}") or own & {Path(test).stem[5:]}), (
                self.seconds[name]
            )

        chosen: dict[str, float] = {}
        files: set[str] = set()
        for name in sorted(names, key=order):
            files.add(name.split("::")[0])
            if chosen and (sum(chosen.values()) + self.seconds[name] > budget or len(files) > 25):
                continue
            chosen[name] = self.seconds[name]
        return chosen


class Runner:
    """A copy of the tree into which faults are put, and the forks that test it."""

    def __init__(self, tree: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mutation-"))
        self.tree = self.folder / "tree"
        hidden = shutil.ignore_patterns(".*", "__pycache__", "site", "runs")
        shutil.copytree(tree, self.tree, ignore=hidden, symlinks=True)
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(self.folder / "hypothesis")
        os.environ["PYTHONPATH"] = os.pathsep.join(_sources(self.tree))
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode = False
        for name in HEAVY:
            try:
                importlib.import_module(name)
            except ImportError:
                print(f"{name} is missing: tests that need it are not run")

    def failures(self, wanted: dict[str, float], first: bool = True) -> list[str] | None:
        """The chosen tests that fail, None where they took too long."""
        out = self.folder / "failed.json"
        out.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            self._child(wanted, first, out)
        limit = time.monotonic() + 90 + 4 * sum(wanted.values())
        while time.monotonic() < limit:
            if os.waitpid(child, os.WNOHANG) != (0, 0):
                if out.exists():
                    return json.loads(out.read_text("utf-8"))
                return [f"(it crashed: {(self.folder / 'log').read_text('utf-8')[-300:]})"]
            time.sleep(0.02)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None

    def _child(self, wanted: dict[str, float], first: bool, out: Path) -> None:
        os.setsid()
        os.chdir(self.tree)
        quiet = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.path[:0] = _sources(self.tree)
        chosen = Chosen(wanted)
        files = sorted({name.split("::")[0] for name in wanted})
        basetemp = f"--basetemp={self.folder / 'pytest'}"
        pytest.main([*COMMON, *(["-x"] if first else []), basetemp, *files], plugins=[chosen])
        out.write_text(json.dumps(chosen.failed), "utf-8")
        os._exit(0)

    def with_fault(self, fault: Fault, place: Place, wanted: dict[str, float]) -> list[str] | None:
        """As `failures`, with the fault in the copy."""
        before, times = place.path.read_bytes(), place.path.stat()
        changed = put(fault, place)
        try:
            place.path.write_text(changed, "utf-8")
            return self.failures(wanted)
        finally:
            place.path.write_bytes(before)
            os.utime(place.path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _sources(tree: Path) -> list[str]:
    return [str(tree / "src"), str(tree / "reproductions" / "src")]


def make(options: argparse.Namespace) -> None:
    faults = sample(options.tree / "src" / "leakbound", options.count, options.seed)
    rows = ",\n".join(json.dumps(asdict(fault)) for fault in faults)
    options.out.write_text(f"[\n{rows}\n]\n", "utf-8")
    parts = Counter(fault.file.split("/")[0] for fault in faults)
    print(", ".join(f"{part} {count}" for part, count in parts.most_common()))


def trace(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    tracer = Tracer(options.out.resolve(), options.tree.resolve() / "src" / "leakbound")
    os.chdir(options.tree)
    sys.path[:0] = _sources(Path.cwd())
    os.environ["PYTHONPATH"] = os.pathsep.join(_sources(Path.cwd()))
    sys.exit(pytest.main([*COMMON, "-m", "not slow", *options.rest], plugins=[tracer]))


def run(options: argparse.Namespace) -> None:
    faults = [Fault(**row) for row in json.loads(options.faults.read_text("utf-8"))]
    known = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    runner = Runner(options.tree)
    tests = Trace(options.trace, options.tree)
    source = runner.tree / "src" / "leakbound"
    places = locate(source, faults)
    order = sorted(range(len(faults)), key=lambda at: faults[at].file)
    for at in order:
        if str(at) in known:
            continue
        fault, place = faults[at], places[at]
        start = time.monotonic()
        known[str(at)] = _verdict(runner, tests, fault, place) | {
            "file": fault.file,
            "function": fault.function,
            "took": round(time.monotonic() - start, 1),
        }
        options.out.write_text(json.dumps(known, indent=0), "utf-8")
        print(at, fault.file, fault.function, known[str(at)], flush=True)
    _confirm(runner, tests, known)
    options.out.write_text(json.dumps(known, indent=0), "utf-8")
    print(Counter(row["verdict"] for row in known.values()))
    shutil.rmtree(runner.folder)


def _verdict(runner: Runner, tests: Trace, fault: Fault, place: Place | None) -> dict[str, Any]:
    if place is None:
        return {"verdict": "not located"}
    file = place.path.relative_to(runner.tree / "src" / "leakbound").as_posix()
    names = tests.covering(file, place.lines)
    tried: dict[str, float] = {}
    for budget in (FEW, MANY):
        wanted = tests.choose(names - set(tried), file, budget)
        if not wanted:
            break
        failed = runner.with_fault(fault, place, wanted)
        if failed is None:
            return {"verdict": "killed", "test": "(it took too long)"}
        if failed:
            return {"verdict": "killed", "test": failed[0]}
        tried |= wanted
    return {"verdict": "survived" if tried else "not executed", "tests": len(names)}


def _confirm(runner: Runner, tests: Trace, known: dict[str, Any]) -> None:
    """A test that fails without any fault has killed nothing."""
    killers = {row["test"] for row in known.values() if row["verdict"] == "killed"}
    wanted = {name: tests.seconds[name] for name in killers if name in tests.seconds}
    broken = set(runner.failures(wanted, first=False) or ())
    for row in known.values():
        if row.get("test") in broken:
            row["verdict"] = "unreliable"


def compare(options: argparse.Namespace) -> None:
    old, new = (json.loads(path.read_text("utf-8")) for path in (options.out, options.other))
    pairs = Counter((old[at]["verdict"], new[at]["verdict"]) for at in old if at in new)
    for (before, after), count in pairs.most_common():
        print(f"{count:4} {before} -> {after}")
    for at in old:
        if old[at]["verdict"] == "killed" and new.get(at, {}).get("verdict") != "killed":
            print(at, old[at], new.get(at))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", choices=("make", "trace", "run", "compare"))
    parser.add_argument("out", type=Path, help="what is written; the old verdicts for compare")
    parser.add_argument("other", type=Path, nargs="?", help="the new verdicts, for compare")
    parser.add_argument("--tree", type=Path, default=Path.cwd(), help="the repository's root")
    parser.add_argument("--faults", type=Path, help="what make wrote")
    parser.add_argument("--trace", type=Path, help="the folder that trace wrote")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options, options.rest = parser.parse_known_args()
    options.rest = [word for word in options.rest if word != "--"]
    globals()[options.task](options)


if __name__ == "__main__":
    main()
