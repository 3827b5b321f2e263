"""Which seeded faults the tests find, before and after a change of the tests or of the code.

    python tests/mutation make faults.json --tree OLD --count 300 --seed 0
    python tests/mutation trace trace/ --tree OLD -- --ignore tests/experiments
    python tests/mutation run verdicts.json --faults faults.json --tree OLD --trace trace/
    python tests/mutation compare old.json new.json

`trace` runs the tests once, at most `--each` of a function's parameters, and notes which lines they
execute (it needs `coverage`); several traces may share the tests. `run` puts one fault at a time
into a copy of the tree and runs the test functions that execute its line, with all parameters,
cheap ones first, in a fork of a process that has imported torch already. What follows `--` is given
to pytest: `-m "not slow and not long"` asks what the short tests find.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
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
    *("torch", "torch.distributed", "numpy", "scipy.stats"),
    *("scipy.optimize", "scipy.linalg", "scipy.special", "scipy.integrate", "scipy.signal"),
    *("matplotlib.pyplot", "hypothesis", "jinja2", "opacus", "sklearn.datasets", "mpmath"),
    *("dp_accounting", "flwr.app", "flwr.clientapp", "rich.console", "PIL.Image"),
)
"""What every child would import anew."""
COMMON = (
    *("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=no"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)
FEW, MANY, LONGEST = 12.0, 60.0, 1800.0
"""CPU seconds of tests for a fault, at first and where those found nothing; seconds of a hang."""


def _cpu_seconds() -> float:
    """Of this process and its children: other programs' load does not count."""
    return sum(os.times()[:4])


def _function(test: str) -> str:
    return test.split("[")[0]


class Tracer:
    """A plugin that notes each test's CPU time, outcome and the lines it executes."""

    def __init__(self, folder: Path, source: Path, each: int) -> None:
        import coverage

        self.each, self.outcome, self.start = each, "passed", 0.0
        self.tests = (folder / "tests.jsonl").open("w", encoding="utf-8", buffering=1)
        self.coverage = coverage.Coverage(
            data_file=str(folder / "lines.sqlite"), source=[str(source)], config_file=False
        )
        self.coverage.set_option("run:core", "ctrace")
        self.coverage.start()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        of: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            of[_function(item.nodeid)].append(item)
        self.counts = {name: len(own) for name, own in of.items()}
        kept = set()
        for own in of.values():
            kept |= {id(item) for item in own[:: -(-len(own) // self.each)]}
        items[:] = [item for item in items if id(item) in kept]

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
        row["parameters"] = self.counts[_function(nodeid)]
        self.tests.write(json.dumps(row) + "\n")

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()


class Chosen:
    """A plugin that keeps the chosen functions, in the order of their files' cost."""

    def __init__(self, wanted: dict[str, float], broken: set[str]) -> None:
        self.wanted, self.broken, self.failed = wanted, broken, []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        cost: Counter[str] = Counter()
        for name, seconds in self.wanted.items():
            cost[name.split("::")[0]] += seconds
        items[:] = [
            item
            for item in items
            if _function(item.nodeid) in self.wanted and item.nodeid not in self.broken
        ]
        items.sort(key=lambda item: (cost[item.nodeid.split("::")[0]], item.nodeid.split("::")[0]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


class Trace:
    """What `trace` wrote: the test functions that execute a line."""

    def __init__(self, folders: list[Path]) -> None:
        import coverage

        self.data = [coverage.CoverageData(str(folder / "lines.sqlite")) for folder in folders]
        for data in self.data:
            data.read()
        lines = [(folder / "tests.jsonl").read_text("utf-8").splitlines() for folder in folders]
        rows = [json.loads(line) for own in lines for line in own]
        self.broken = {row["test"] for row in rows if row["outcome"] != "passed"}
        seconds: dict[str, list[float]] = defaultdict(list)
        self.seconds: dict[str, float] = {}
        self.in_file: dict[str, set[str]] = defaultdict(set)
        for row in rows:
            name = _function(row["test"])
            seconds[name].append(row["seconds"])
            self.seconds[name] = row["parameters"] * sum(seconds[name]) / len(seconds[name])
            self.in_file[name.split("::")[0]].add(name)
        self.known: dict[str, dict[int, set[str]]] = {}

    def covering(self, file: str, lines: range) -> set[str]:
        """Functions that execute one of the lines, or share a fixture that does."""
        if file not in self.known:
            of: dict[int, set[str]] = defaultdict(set)
            for data in self.data:
                for own in data.measured_files():
                    if own.endswith(f"/src/leakbound/{file}"):
                        for line, contexts in data.contexts_by_lineno(own).items():
                            of[line] |= set(contexts)
            self.known = {file: of}
        found = set()
        for line in lines:
            for context in self.known[file].get(line, ()):
                test, _, phase = context.rpartition("|")
                found |= {_function(test)} if phase == "call" else self.in_file[test.split("::")[0]]
        return found & set(self.seconds)

    def choose(self, names: set[str], file: str, budget: float) -> dict[str, float]:
        """Functions for a fault of this file: those about its module first, then the cheapest."""
        path = Path(file)
        own = {path.stem, path.parent.name} - {"", "__init__", "base"}

        def order(name: str) -> tuple[bool, float]:
            test = name.split("::")[0]
            near = (
                test.endswith(f"leakbound/{file}") or Path(test).stem.removeprefix("test_") in own
            )
            return not near, self.seconds[name]

        chosen: dict[str, float] = {}
        files: set[str] = set()
        for name in sorted(names, key=order):
            fits = sum(chosen.values()) + self.seconds[name] <= budget
            if not chosen or (fits and len(files | {name.split("::")[0]}) <= 25):
                chosen[name] = self.seconds[name]
                files.add(name.split("::")[0])
        return chosen


class Runner:
    """A copy of the tree into which faults are put, and the forks that test it."""

    def __init__(self, tree: Path, rest: list[str]) -> None:
        self.rest = rest
        self.broken: set[str] = set()
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
        limit = time.monotonic() + LONGEST
        while time.monotonic() < limit:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended and out.exists():
                return json.loads(out.read_text("utf-8"))
            if ended and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
                return None
            if ended:
                return [f"(it crashed: {(self.folder / 'log').read_text('utf-8')[-300:]})"]
            time.sleep(0.02)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None

    def _child(self, wanted: dict[str, float], first: bool, out: Path) -> None:
        os.setsid()
        seconds = int(sum(os.times()[:2]) + 40 + 4 * sum(wanted.values()))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 10))
        os.chdir(self.tree)
        quiet = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.path[:0] = _sources(self.tree)
        chosen = Chosen(wanted, self.broken)
        files = sorted({name.split("::")[0] for name in wanted})
        basetemp = f"--basetemp={self.folder / 'pytest'}"
        given = [*COMMON, *self.rest, *(["-x"] if first else []), basetemp, *files]
        pytest.main(given, plugins=[chosen])
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
    # Tests import `tools` from the root.
    return [str(tree / "src"), str(tree / "reproductions" / "src"), str(tree)]


def make(options: argparse.Namespace) -> None:
    faults = sample(options.tree / "src" / "leakbound", options.count, options.seed)
    rows = ",\n".join(json.dumps(asdict(fault)) for fault in faults)
    options.out.write_text(f"[\n{rows}\n]\n", "utf-8")
    parts = Counter(fault.file.split("/")[0] for fault in faults)
    print(", ".join(f"{part} {count}" for part, count in parts.most_common()))


def trace(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    tracer = Tracer(
        options.out.resolve(), options.tree.resolve() / "src" / "leakbound", options.each
    )
    os.chdir(options.tree)
    sys.path[:0] = _sources(Path.cwd())
    os.environ["PYTHONPATH"] = os.pathsep.join(_sources(Path.cwd()))
    sys.exit(pytest.main([*COMMON, "-m", "not slow", *options.rest], plugins=[tracer]))


def run(options: argparse.Namespace) -> None:
    faults = [Fault(**row) for row in json.loads(options.faults.read_text("utf-8"))]
    known = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    runner = Runner(options.tree, options.rest)
    tests = Trace(options.trace)
    runner.broken = tests.broken
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
    names = {_function(name) for name in killers} & set(tests.seconds)
    broken = set(runner.failures({name: tests.seconds[name] for name in names}, False) or ())
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
    parser.add_argument("--trace", type=Path, nargs="+", help="the folders that trace wrote")
    parser.add_argument("--each", type=int, default=4, help="parameters of a function in a trace")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:at])
    options.rest = sys.argv[at + 1 :]
    globals()[options.task](options)


if __name__ == "__main__":
    main()
