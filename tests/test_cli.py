"""The command line as a user sees it; each subprocess pays seconds for importing torch."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import types
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

import leakbound
from leakbound import cli, registry
from leakbound._util.text import printable
from leakbound.cli import audit as audit_command
from leakbound.cli import listing, main, options, parser, shared, terminal

ENTRIES = [e for kind in registry.PACKAGES for e in registry.entries(kind).values()]
PLAN = """
seeds = [0, 1]
[data]
source = "digits"
[[models]]
name = "mlp"
[[attacks]]
name = "linear_inversion"
[[attacks]]
name = "inverting_gradients"
steps = 2
"""


def call(*arguments):
    """The exit code of `leakbound ARGUMENTS`, run here."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN, encoding="utf-8")
    return path


def test_help_and_version_import_nothing_slow():
    code = (
        "import sys\n"
        "from leakbound.cli import main\n"
        "try: main([ARGUMENT])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert not {'torch', 'numpy', 'scipy', 'rich.progress'} & set(sys.modules)\n"
    )
    for argument, words in (
        ("--help", ["audit", "attack", "report", "list", "--version"]),
        ("--version", [f"leakbound {version('leakbound')}"]),
    ):
        run = subprocess.run(
            [sys.executable, "-c", code.replace("ARGUMENT", repr(argument))],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"COLUMNS": "80"},
        )
        for word in words:
            assert word in run.stdout
        assert run.stderr == ""
    assert leakbound.__version__ == version("leakbound")


COMMANDS = ("schema", "audit", "attack", "capture", "bound", "calibrate", "train", "reproduce",
            "report", "reidentify", "compare", "evidence", "check", "list")  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_fits_a_screen(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    known = parser.arguments(cli.verbs([command])[command][0])
    for page in ("--help", "--help-all"):
        assert call(command, page) == 0
        shown = capsys.readouterr().out
        assert "None" not in shown
        assert "default: )" not in shown
        assert f"usage: leakbound {command}" in shown
        lines = shown.splitlines()
        assert max(map(len, lines)) <= 80
        assert page == "--help-all" or len(lines) <= 40
    assert all(argument.option in shown for argument in known.values())
    assert all(argument.text for argument in known.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_groups_of_options_name_options(command):
    kind = cli.verbs([command])[command][0]
    groups = [name for text in getattr(kind, "GROUPS", {}).values() for name in text.split()]
    known = parser.arguments(kind)
    assert len(groups) == len(set(groups))
    assert {*groups, *getattr(kind, "RARE", "").split()} <= set(known)
    assert not groups or set(groups) == set(known)


def test_without_a_command_there_is_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert call("--help") == 0
    shown = capsys.readouterr().out
    assert call() == 2
    assert capsys.readouterr() == (shown, "")
    lines = shown.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert all(re.search(rf"^  {command} ", shown, re.MULTILINE) for command in options.VERBS)


def test_list(capsys, monkeypatch):
    assert call("list", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"attacks", "defenses", "models", "schemes", "metrics", "data"}
    names = {kind: {row["name"]: row for row in rows} for kind, rows in found.items()}
    assert {"dlg", "inverting_gradients", "linear_inversion"} <= set(names["attacks"])
    assert {"none", "gaussian_noise", "dp_sgd"} <= set(names["defenses"])
    assert {"psnr", "ssim"} <= set(names["metrics"])
    assert {"mnist5k", "folder:PATH"} <= set(names["data"])
    noise = names["defenses"]["gaussian_noise"]["parameters"]
    assert noise == [{"name": "noise_std", "type": "float", "default": 0.01}]
    assert names["models"]["mlp"]["parameters"][0]["default"] == [128]
    assert all(row["summary"] for rows in found.values() for row in rows)
    for width in (40, 80):
        monkeypatch.setattr(terminal.console, "width", width)
        for what in ((), ("attacks",), ("defense",), ("psnr",), ("data",)):
            assert call("list", *what) == 0
            lines = capsys.readouterr().out.splitlines()
            assert max(map(len, lines)) <= width, what
    assert call("list") == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 48
    assert all(name in shown.split() for rows in names.values() for name in rows)
    assert f"attacks ({len(names['attacks'])})\n" in shown
    assert call("list", "attacks", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"attacks": found["attacks"]}


def test_list_describes_a_name(capsys):
    assert call("list", "inverting_gradients") == 0
    shown = capsys.readouterr().out
    for words in (
        "inverting_gradients (attack)",
        "  steps = 1000\n      search steps.",
        "Source\n  Geiping et al. 2020.",
        "Example\n  leakbound attack --attack inverting_gradients\n",
    ):
        assert words in shown
    assert call("list", "gaussian_noise") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "in gradient units" in shown
    assert "leakbound attack --defense gaussian_noise,noise_std=0.01" in shown
    assert call("list", "snip") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("snip (scheme) Keep the weights")
    assert "rate = 0.3 the fraction of the prunable weights" in shown
    assert "Source Lee, Ajanthan and Torr 2019, SNIP." in shown
    assert call("list", "folder") == 0
    assert "--data folder:PATH" in capsys.readouterr().out
    for name in ("psnr", "mlp", "none"):
        assert call("list", name) == 0
        assert capsys.readouterr().out.startswith(f"{name} (")
    assert call("list", "invertin_gradients") == 2
    assert "did you mean 'inverting_gradients'" in capsys.readouterr().err


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_name_is_described_with_a_command_that_parses(entry, capsys):
    assert call("list", entry.name) == 0
    shown = capsys.readouterr().out
    verb, *words = shlex.split(shown.rstrip().splitlines()[-1])[1:]
    assert parser.parse(options.VERBS[verb][0], words, verb)
    for setting in entry.parameters:
        assert f"  {setting.name} = " in shown


@pytest.mark.parametrize(("kind", "name"), [("trace", "tight_trace"), ("full", "full")])
def test_a_bound_that_is_not_proved_says_nothing_of_attackers(capsys, kind, name, monkeypatch):
    monkeypatch.setattr(terminal.console, "width", 400)
    given = ["attack", "--data", "digits", "--attack", "linear_inversion", "--error-bound", kind]
    given += ["--defense", "gaussian_noise,noise_std=0.1", "--model"]
    assert call(*given, "mlp") == 0  # of ReLUs
    brief = capsys.readouterr().out
    assert call(*given, "mlp", "--explain") == 0
    kinked = capsys.readouterr().out
    said = f"estimate of a lower bound on the error ({name}), not proved: a mean squared error of"
    assert said in brief
    assert "bounds cover: nothing (an estimate); prior: one Gaussian per class" in brief
    assert "unit: one example in one update. Assumptions: --explain" in brief
    assert "(relu" not in brief
    assert said in kinked
    assert "--explain" not in kinked
    assert "is not known to be smooth in the inputs (ReLU" in kinked
    assert "no attacker" not in kinked
    assert call(*given, 'mlp,activation="tanh"') == 0
    smooth = capsys.readouterr().out
    assert said in smooth
    assert "no attacker" not in smooth


@pytest.mark.parametrize("model", ["mlp,hidden=[1000000000]", "conv,width=1000000000"])
def test_a_model_too_large_for_any_memory_is_told_in_a_line(capsys, model):
    assert call("attack", "--attack", "linear_inversion", "--model", model) == 2
    error = capsys.readouterr().err
    assert "there is not enough memory for what was asked; take a smaller model" in error
    assert "Traceback" not in error


def test_other_errors_of_torch_stay_errors(monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(listing, "listing", broken)
    assert call("list") == 70
    assert "RuntimeError: mat1 and mat2" in capsys.readouterr().err


def test_a_trap_names_the_server_that_it_needs(capsys):
    given = ("attack", "--data", "digits", "--attack", "linear_trap")
    assert call(*given) == 2
    assert "--malicious-server" in capsys.readouterr().out
    assert call(*given, "--malicious-server") == 0
    assert "--malicious-server" not in capsys.readouterr().out


def test_attack_is_the_cell_of_the_grid(plan, tmp_path, capsys):
    """The same record, alone or in an audit, and pictures only where they are asked for."""
    out = tmp_path / "run"
    assert call("audit", plan, "--out", out, "--workers", "1") == 0
    shown = capsys.readouterr()
    assert "audit plan: 4 experiments, 1 worker, into" in shown.out
    assert "1 configuration (model, batch size, defense): 1 exposed\n" in shown.out
    assert f"report: {out / 'report.html'}\n" in shown.out
    assert re.fullmatch(r"4 of 4 done after \d+ s", shown.err.splitlines()[-1])
    settings = ["--data", "digits", "--attack", "inverting_gradients,steps=2", "--seed", "1"]
    assert call("attack", *settings, "--json", "--out", tmp_path / "images") == 0
    record = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert record == rows[3]
    assert {p.name for p in (tmp_path / "images").iterdir()} == {"truth.png", "reconstruction.png"}
    page = re.sub("<[^>]+>", " ", (out / "report.html").read_text("utf-8"))
    assert "1 configuration of model, batch size and defense" in " ".join(page.split())
    (out / "report.html").unlink()
    assert call("report", out, "--no-examples") == 0
    assert "data:image/png" not in (out / "report.html").read_text()


def test_attack_in_words(capsys, tmp_path):
    assert (
        call("attack", "--data", "digits", "--attack", "linear_inversion", "--out", tmp_path) == 0
    )
    shown = capsys.readouterr().out
    assert "attack:  linear_inversion\n" in shown
    assert "model:   mlp on digits, batch size 1\n" in shown
    assert "LinearInversion(" not in shown
    assert "verdict: exposed (threshold 20 dB)" in shown
    assert {p.name for p in tmp_path.iterdir()} == {"truth.png", "reconstruction.png"}
    settings = ["--model", "lenet", "--attack", "linear_inversion", "--data", "digits"]
    assert call("attack", *settings) == 2
    assert "not applicable:" in capsys.readouterr().out


def test_attack_of_a_table_shows_its_columns(capsys, tmp_path):
    settings = ["--attack", "linear_inversion", "--data", "breast_cancer", "--out", tmp_path]
    assert call("attack", *settings) == 0
    shown = capsys.readouterr().out
    assert "mean radius" in shown
    assert "30 of 30" in shown
    assert "verdict: exposed (threshold 27 of 30 columns)" in shown
    assert list(tmp_path.iterdir()) == []


def test_a_malicious_server_is_asked_for(capsys):
    settings = ["--attack", "robbing_the_fed,bins=16", "--data", "digits", "--statistics-known"]
    assert call("attack", *settings) == 2
    assert "not applicable: the server is honest" in capsys.readouterr().out
    assert call("attack", *settings, "--malicious-server", "--json") == 0
    threat = json.loads(capsys.readouterr().out)["threat"]
    assert (threat["server"], threat["statistics_known"]) == ("malicious", True)


def test_failed_cells_make_the_exit_code_1(plan, tmp_path, capsys, monkeypatch):
    from leakbound.audit import experiment

    def broken(*_):
        raise RuntimeError("[bold]broken[/] \x1b[2J\n<b>")

    with monkeypatch.context() as patch:
        patch.setattr(experiment, "_judge", lambda *_: broken())
        assert call("audit", plan, "--out", tmp_path / "run", "--workers", "1") == 1
        shown = capsys.readouterr()
        assert "1 configuration (model, batch size, defense): 1 not run" in shown.out
        assert shown.err.endswith("leakbound: 4 experiments failed; the report gives the reasons\n")
        assert call("attack", "--data", "digits", "--attack", "linear_inversion") == 1
        shown = capsys.readouterr().out
        assert "failed: RuntimeError: [bold]broken[/] \\x1b[2J <b>" in shown
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<b>" not in page.replace("<body>", "")


def test_ctrl_c_and_a_reader_that_leaves(plan, tmp_path, capsys, monkeypatch):
    def stop(error):
        def raiser(*_, **__):
            raise error

        return raiser

    with monkeypatch.context() as patch:
        patch.setattr(audit_command.audits, "audit", stop(KeyboardInterrupt()))
        assert call("audit", plan, "--out", tmp_path / "run") == 130
    assert capsys.readouterr().err.endswith("run the same command again to go on\n")
    with monkeypatch.context() as patch:
        patch.setattr(listing, "listing", stop(KeyboardInterrupt()))
        assert call("list") == 130
    assert capsys.readouterr().err == "leakbound: stopped\n"


def test_a_termination_ends_as_ctrl_c_does(plan, tmp_path, capsys, monkeypatch):
    given = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        stop = lambda *_, **__: signal.raise_signal(signal.SIGTERM)  # noqa: E731
        monkeypatch.setattr(audit_command.audits, "audit", stop)
        assert call("audit", plan, "--out", tmp_path / "run") == 143
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, given)
    assert capsys.readouterr().err.endswith("run the same command again to go on\n")


@pytest.mark.linux
@pytest.mark.parametrize(
    ("arguments", "first"),
    [("list --json", "{"), ("bound --help", "u"), ("audit --help", "u")],
    ids=["list", "bound", "help"],
)
def test_output_into_a_pipe_that_closes_is_no_crash(arguments, first):
    run = subprocess.run(
        f"{sys.executable} -m leakbound.cli {arguments} | head -c 1; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
    )
    assert run.returncode in (0, 141), "all was in the pipe before it closed, or not"
    assert (run.stdout, run.stderr) == (first, "")


BOUND = ("bound", "--noise-multiplier", "1", "--dim", "64", "--norm", "3", "--prior", "sphere")
MISTAKES = (("audit", "missing.toml"), ("nonsense",))


@pytest.mark.linux
@pytest.mark.parametrize(
    "arguments",
    [
        *(("list",), ("audit", "--help"), ("--version",), (*BOUND, "--json"), *MISTAKES),
    ],
    ids=" ".join,
)
def test_a_reader_that_is_gone_is_not_taken_for_failed_cells(arguments):
    """Also where only Python's flush at the end meets the closed pipe, or a message on stderr."""
    ours, theirs = os.pipe()
    os.close(ours)
    line = [sys.executable, "-m", "leakbound.cli", *arguments]
    with os.fdopen(theirs, "w") as closed:
        stderr = closed if arguments in MISTAKES else subprocess.PIPE
        run = subprocess.run(line, stdout=closed, stderr=stderr)
    assert run.returncode == 141
    assert not run.stderr


@pytest.mark.linux
@pytest.mark.parametrize(
    "arguments", [("list",), ("audit", "--help"), ("--version",)], ids=" ".join
)
def test_a_full_disk_behind_the_output_is_said(arguments):
    line = [sys.executable, "-m", "leakbound.cli", *arguments]
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 2
    assert run.stderr == "leakbound: [Errno 28] No space left on device\n"


def test_printable():
    assert printable("a\tb\r\nc \x00\x1b]0;title\x07 \u202e\udc80 é") == (
        "a b c \\x00\\x1b]0;title\\x07 \\u202e\\udc80 é"
    )
    assert terminal.brief("[bold]x[/]" + "y" * 999).startswith("\\[bold]x\\[/]y")
    assert len(terminal.brief("y" * 999)) == terminal.LONGEST + 3


@pytest.mark.linux
@pytest.mark.parametrize("columns", [30, 80])
def test_progress_on_a_terminal(plan, tmp_path, columns):
    """A bar with the cells done, the time left and the current cell; it fits the screen."""
    text = on_terminal(
        ["audit", str(plan), "--out", str(tmp_path / "run"), "--workers", "1"], columns
    )
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "4/4" in plain
    assert "left" in plain
    if columns == 80:
        assert "linear_inversion · mlp · none" in plain
    bars = [line for line in re.split(r"[\r\n]+", plain) if re.search(r"\d/4", line)]
    assert bars
    assert max(map(len, bars)) <= columns
    assert "of 4 done" not in plain
    assert "1 configuration" in plain


def on_terminal(arguments: list[str], columns: int) -> str:
    import pty

    master, slave = pty.openpty()
    settings = {"COLUMNS": str(columns), "LINES": "24", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-m", "leakbound.cli", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=os.environ | settings,
    )
    os.close(slave)
    shown, limit = b"", time.monotonic() + 600
    while time.monotonic() < limit:
        try:
            part = os.read(master, 65536)
        except OSError:  # the terminal is closed
            break
        if not part:
            break
        shown += part
    os.close(master)
    assert process.wait(600) == 0, shown
    return shown.decode()


def test_workers():
    assert shared.workers_of(3) == 3
    assert shared.workers_of(0) >= 1
    with pytest.raises(ValueError, match="workers is -1"):
        shared.workers_of(-1)
    assert cli.USAGE == 2


def test_windows_gets_no_more_workers_than_it_waits_for(monkeypatch):
    for name, count in (("nt", 61), ("posix", 128)):
        system = types.SimpleNamespace(name=name, cpu_count=lambda: 128)
        monkeypatch.setattr(shared, "os", system)
        assert shared.workers_of(0) == count


def test_a_missing_report_library_is_told_before_any_cell_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(SystemExit) as ending:
        main(["audit", "--quick", "--out", str(tmp_path / "out")])
    assert ending.value.code == 2
    assert "pip install 'leakbound[report]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


class AddedVerb:
    """An entry point as `importlib.metadata` gives it."""

    def __init__(self, name, load):
        self.name, self.load = name, load


@dataclass(frozen=True)
class Greet:
    """Say hello."""

    name: str = "you"
    """Whom to greet."""


def greet(options):
    print(f"hello {options.name}")
    return 3


def added(monkeypatch, *points):
    monkeypatch.setattr(cli, "entry_points", lambda group: points)


def test_a_verb_of_another_distribution_runs(monkeypatch, capsys):
    module = types.ModuleType("greeting")
    module.greet = greet
    monkeypatch.setitem(sys.modules, "greeting", module)
    added(monkeypatch, AddedVerb("greet", lambda: (Greet, "greeting:greet")))
    assert call("greet", "--name", "Ada") == 3
    assert capsys.readouterr().out == "hello Ada\n"
    assert call("--help") == 0
    assert "greet" in capsys.readouterr().out


def test_a_verb_that_does_not_load_leaves_the_rest_alone(monkeypatch, capsys):
    def broken():
        raise ImportError("no such thing")

    added(monkeypatch, AddedVerb("greet", broken), AddedVerb("list", lambda: (Greet, "x:y")))
    assert call("--help") == 0
    shown = capsys.readouterr()
    assert "the command 'greet' does not load: no such thing; repair" in shown.err
    assert call("list", "--json") == 0


def test_the_reproductions_say_how_they_are_installed(monkeypatch, capsys):
    added(monkeypatch)
    assert call("reproduce", "priprune") == 2
    said = "reproduce is a separate package; install it: pip install ./reproductions"
    assert capsys.readouterr().err == f"leakbound: {said}\n"
