"""Nothing breaks macOS and Windows by carelessness: no code names what they lack, and an audit runs
in an imitation of Windows, which has none of its file systems."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import leakbound
from leakbound import audit

ROOT = Path(__file__).parent.parent
NAMES = {
    "os": "O_NOFOLLOW O_NONBLOCK O_CLOEXEC O_DIRECTORY pread pwrite fork killpg setsid uname nice "
    "getuid geteuid sched_getaffinity sysconf mkfifo mknod wait fchmod chown statvfs sendfile",
    "signal": "SIGKILL SIGALRM SIGHUP SIGQUIT SIGPIPE SIGCHLD SIGUSR1 SIGUSR2 SIGSTOP alarm pause "
    "setitimer pthread_kill pthread_sigmask SIG_BLOCK SIG_UNBLOCK SIG_SETMASK sigwait",
}
LACKING = {module: set(names.split()) for module, names in NAMES.items()}
"""What these modules lack on Windows."""
MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog"}
ALLOWED = {
    "_util/files.py": {"fcntl"},
    "_util/memory.py": {"/proc/self/status"},
    "audit/engine.py": {"signal.SIG_BLOCK", "signal.SIG_SETMASK", "signal.pthread_sigmask"},
    "cli/shared.py": {"os.sched_getaffinity"},
    "cluster/connection.py": {"/tmp"},
}
"""Each has its `hasattr`, its `except` or another name beside it."""
CARELESS = """import resource; from fcntl import flock; from signal import SIGKILL
os.killpg(1, 2); Path("/dev/shm"); path.write_text(text); path.open("w"); open(path)
"""


def careless(tree):
    """What Windows lacks, folders of Linux, and text files without an encoding."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name in MODULES)
            case ast.ImportFrom(module=module, names=names):
                yield from [module] * (module in MODULES)
                own = LACKING.get(module, ())
                yield from (f"{module}.{name.name}" for name in names if name.name in own)
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                yield from [f"{module}.{name}"] * (name in LACKING.get(module, ()))
            case ast.Constant(value=str(text)):
                yield from [text] * text.startswith(("/tmp", "/proc", "/dev", "/bin", "/usr"))
            case ast.Call(func=func, args=args, keywords=named):
                name = getattr(func, "attr", getattr(func, "id", ""))
                given = args[isinstance(func, ast.Name) :]
                mode = getattr(given[0], "value", "b") if given else "r"
                text = name == "open" and mode in ("r", "w", "a", "x")
                text |= {"read_text": 1, "write_text": 2}.get(name, 0) > len(args)
                if text and not any(word.arg == "encoding" for word in named):
                    yield f"{name} without an encoding"


def test_the_code_names_nothing_that_windows_lacks():
    found = {}
    for name in ("src/leakbound", "reproductions/src"):
        for path in (ROOT / name).rglob("*.py"):
            what = set(careless(ast.parse(path.read_text("utf-8"))))
            found |= {path.relative_to(ROOT / name).as_posix(): what} if what else {}
    assert found == ALLOWED


def test_careless_lines_are_found():
    found = [one for line in ast.parse(CARELESS).body for one in careless(line)]
    what = "resource fcntl signal.SIGKILL os.killpg /dev/shm write_text open open"
    assert [one.split()[0] for one in found] == what.split()


IMITATION = f"""
import builtins, glob, multiprocessing, os, signal, types
LACKING, MODULES, BINARY = {LACKING}, {MODULES}, 1 << 30
def target(link):
    try:
        return os.readlink(link)
    except OSError:
        return None
def refusing(real):
    def checked(*paths, **more):
        own = [] if more.get("dir_fd") is not None else map(os.path.abspath, paths)
        for path in (path for path in own if path.startswith(os.environ["IMITATED"])):
            with open("/proc/self/maps", encoding="utf-8") as maps:
                mapped = any(line.endswith(path + chr(10)) for line in maps)
            if mapped or path in map(target, glob.iglob("/proc/[0-9]*/fd/*")):
                raise PermissionError(13, "The process cannot access the file", path)
        if real.__name__ == "rename" and os.path.lexists(paths[1]):
            raise FileExistsError(17, "Cannot create a file when that file already exists")
        return real(*paths, **more)
    return checked
for name in ("unlink", "remove", "rename", "replace"):
    setattr(os, name, refusing(getattr(os, name)))
def opened(path, flags, *rest):
    assert flags & BINARY or path == os.devnull, f"line ends of {{path}} would be translated"
    return os.open(path, flags & ~BINARY, *rest)
ours, real = {{}}, builtins.__import__
for module in (os, signal):
    ours[module.__name__] = copy = types.ModuleType(module.__name__)
    copy.__dict__.update((k, v) for k, v in vars(module).items() if k not in LACKING[copy.__name__])
ours["os"].__dict__.update(name="nt", open=opened, O_BINARY=BINARY)
def imported(name, globals=None, *rest, **more):
    inside = str((globals or {{}}).get("__name__")).startswith("leakbound")
    if inside and name in MODULES:
        raise ModuleNotFoundError(f"No module named {{name!r}}")
    return ours[name] if inside and name in ours else real(name, globals, *rest, **more)
builtins.__import__ = imported
multiprocessing.get_all_start_methods = lambda: ["spawn"]
multiprocessing.set_start_method("spawn")
multiprocessing.context._concrete_contexts = {{"spawn": multiprocessing.get_context("spawn")}}
"""
"""In all processes: what Windows lacks, for our own modules; and no file that is open, here or
elsewhere, is renamed, replaced or removed.
"""
PLAN = """
data = {source = "digits"}
models = [{name = "mlp", hidden = [16]}]
attacks = [{name = "linear_inversion"}]
defenses = [{name = "none"}, {name = "gaussian_noise", noise_std = 0.01}]
utility = {rounds = 2, repeats = 1}
"""
WRITING = """
import os, pathlib, sys
from leakbound._util import files
place = pathlib.Path(sys.argv[1])
def lines():
    yield files.encode({"cell": "a", "schema": 1})
    (part,) = place.glob(".*.leakbound-part")
    os.utime(part, (0, 0))
    files.folder(place)
for _ in range(2):
    files.write(place / "x.jsonl", lines(), key="cell")
print(*[path.name for path in place.iterdir()])
"""


@pytest.fixture
def windows(tmp_path):
    """Runs Python in the imitation; returns what it printed."""
    (tmp_path / "sitecustomize.py").write_text(IMITATION, "utf-8")
    path = f"{tmp_path}:{Path(leakbound.__file__).parent.parent}"
    settings = {"PYTHONPATH": path, "PYTHONIOENCODING": "cp1252", "IMITATED": str(tmp_path)}

    def run(*words, cwd=tmp_path):
        given = {"cwd": cwd, "env": os.environ | settings, "capture_output": True}
        found = subprocess.run([sys.executable, *words], **given)
        assert found.returncode == 0, (found.stdout + found.stderr).decode("cp1252")
        return found.stdout.decode("cp1252")

    return run


def outcome(out):
    kept = [*(out / "pictures").iterdir(), out / "records.jsonl", out / "utility.jsonl"]
    return {path.name: path.read_bytes() for path in kept}


@pytest.mark.linux
def test_a_file_that_is_being_written_stays(windows, tmp_path):
    """Whatever its age; it gets its name, and nothing is left beside it."""
    (tmp_path / "place").mkdir()
    assert windows("-c", WRITING, tmp_path / "place") == "x.jsonl\n"


@pytest.mark.linux
def test_an_audit_a_report_and_bounds(windows, tmp_path):
    """With two workers; after a kill, the same bytes as an audit here that nobody stopped."""
    (tmp_path / "plan.toml").write_text(PLAN, "utf-8")
    audit.audit(audit.load(tmp_path / "plan.toml"), tmp_path / "here")
    wanted, out = outcome(tmp_path / "here"), tmp_path / "run"
    line = ("-m", "leakbound.cli", "audit", "plan.toml", "--out", "run")
    windows(*line, "--workers", "2")
    assert outcome(out) == wanted
    (out / "records.jsonl").write_bytes(wanted["records.jsonl"][:-9])
    old, new = (out / f".x.{digit * 16}.leakbound-part" for digit in "01")
    for part in (old, new):
        part.write_bytes(b"private")
    os.utime(old, (0, 0))
    windows(*line)
    assert outcome(out) == wanted
    assert (old.exists(), new.exists()) == (False, True)
    windows("-m", "leakbound.cli", "report", "run")
    target = ("--target", "psnr>=20 with probability<=0.01")
    for words in (("bound", "--noise-multiplier", "1"), ("calibrate", *target)):
        known = ("--dim", "64", "--norm", "3", "--prior", "sphere")
        assert "covers: all" in windows("-m", "leakbound.cli", *words, *known)


@pytest.mark.linux
def test_other_tests_of_files_pass(windows, tmp_path):
    options = ("-p", "no:cacheprovider", "-m", "not linux", f"--basetemp={tmp_path / 'base'}")
    windows("-m", "pytest", *options, ROOT / "tests" / "test_files.py", cwd=ROOT)
