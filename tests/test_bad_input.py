"""Whatever is wrong: exit code 2 and one line that names the thing, its value and the mend."""

from __future__ import annotations

import json
import re
import textwrap

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from leakbound.cli import main

PLAN = """
[data]
source = "digits"
[[models]]
name = "mlp"
[[attacks]]
name = "linear_inversion"
"""
MODELS = """
import math, os, torch
from torch import nn

def build(input_shape, classes, kind="good"):
    size = math.prod(input_shape)
    head = nn.Linear(size, classes)
    if kind == "few":
        head = nn.Linear(size, 3)
    if kind == "nan":
        nn.init.constant_(head.bias, math.nan)
    parts = {
        "dropout": [nn.Dropout(0.5), nn.Flatten(), head],
        "shape": [nn.Flatten(), nn.Linear(7, classes)],
        "images": [nn.Conv2d(input_shape[0], classes, 3)],
        "empty": [nn.Flatten()],
    }.get(kind, [nn.Flatten(), head])
    if kind == "raises":
        raise RuntimeError("no\\nway [bold]\\x1b[2J")
    if kind == "nothing":
        return None
    model = nn.Sequential(*parts)
    return model if kind == "dropout" else model.eval()
"""


@pytest.fixture
def complain(tmp_path, capsys):
    """Runs a command that has to fail, and returns its one line."""

    def call(*arguments: object) -> str:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        lines = [line for line in shown.err.splitlines() if not line.startswith("importing")]
        assert caught.value.code == 2, shown
        assert len(lines) == 1, lines
        assert lines[0].startswith("leakbound: ")
        assert "Traceback" not in shown.err + shown.out
        assert "\x1b" not in shown.err + shown.out
        return lines[0]

    return call


@pytest.fixture
def plan(tmp_path):
    def write(text: str = PLAN) -> list[object]:
        path = tmp_path / "plan.toml"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return ["audit", path, "--out", tmp_path / "run", "--workers", "1"]

    return write


@pytest.fixture
def models(tmp_path, monkeypatch):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "their_models.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    return "their_models:build"


def test_plans(complain, plan, tmp_path):
    line = complain(*plan(PLAN + "[utilty]\nrounds = 3"))
    assert "'utilty'" in line
    assert "did you mean 'utility'" in line
    line = complain(*plan(PLAN.replace("linear_inversion", "linear [bold]\\u001b[2J\\n[/]")))
    assert "[bold]\\x1b[2J\\n[/]" in line
    line = complain(*plan("batch_sizes = [1100]\n" + PLAN))
    assert "1100" in line
    assert "1078 private ones of 1797" in line
    line = complain(*plan(PLAN + "[utility]\nbatch_size = 300"))
    assert "utility trains 4 clients on 300 examples" in line
    line = complain(*plan('[data]\nsource = "digits"\nlimit = 8\n' + PLAN[25:] + "train_steps = 2"))
    assert "train_steps" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.linux
def test_arguments(complain, plan, tmp_path):
    command = plan()
    assert "workers is -1" in complain(*command[:-1], "-1")
    assert "--out DIR" in complain(*command[:2])
    assert "not both" in complain(*command, "--quick")
    assert "No such file" in complain("audit", tmp_path / "no.toml", "--out", tmp_path / "run")
    assert "no.toml" in complain("audit", tmp_path / "no.toml")
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file, file / "below", "/proc/nothing/here"):
        line = complain("audit", command[1], "--out", out)
        assert str(out) in line
        assert "cannot be written" in line
    assert file.read_text() == "mine"
    small = ["attack", "--data", "digits", "--attack", "linear_inversion"]
    assert "seed is -1; give a whole" in complain(*small, "--seed", "-1")
    assert "batch_size is 0" in complain(*small, "--batch-size", "0")
    assert "1100" in complain(*small, "--batch-size", "1100")
    assert "cannot be written" in complain(*small, "--out", file)
    line = complain("attack", "--attack", "idgl")
    assert "did you mean 'idlg'" in line
    assert "NAME,key=1.5" in complain("attack", "--attack", "idlg,steps=")
    assert "write the name first" in complain("attack", "--attack", 'idlg,name="x"')
    assert "2 experiments" in complain("attack", "--attack", "idlg,steps=[1, 2]")
    assert "finite" in complain("attack", "--defense", "gaussian_noise,noise_std=nan")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("attak",), "there is no command 'attak'; did you mean 'attack'"),
        (("reprot", "runs/demo"), "did you mean 'report'"),
        (("zzz",), "there is no command 'zzz'; `leakbound --help` shows all"),
        (("--seed", "1"), "--seed comes before the command"),
        (("attack", "--sed", "1"), "attack has no option --sed; did you mean '--seed'"),
        (("audit", "--wrkers=3"), "audit has no option --wrkers; did you mean '--workers'"),
        (("attack", "--seed", "x"), "--seed: invalid int value: 'x'; write --seed INT"),
        (("attack", "--seed"), "--seed: expected one argument; write --seed INT"),
        (("attack", "--json=1"), "--json: ignored explicit argument '1'; write --json"),
        (("attack", "stray"), "attack does not take 'stray'"),
        (
            ("attack", "--input-range", "1"),
            "--input-range: expected 2 arguments; write --input-range LOW",
        ),
        (("attack", "--error-bound", "ful"), "--error-bound: invalid choice: 'ful' (choose from"),
        (("calibrate", "--data", "digits"), "--target is not given; calibrate needs it"),
        (("compare", "x"), "RUN_B is not given; compare needs it"),
        (("list", "attakcs"), "there is no name 'attakcs'; did you mean 'attacks'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_names_the_word_and_the_mend(complain, arguments, words):
    assert words in complain(*arguments)


@pytest.mark.parametrize(
    ("option", "word", "near", "kind"),
    [
        ("--attack", "invert_gradients", "inverting_gradients", "attacks"),
        ("--attack", "xyz", "", "attacks"),
        ("--defense", "gausian_noise", "gaussian_noise", "defenses"),
        ("--model", "mlpp", "mlp", "models"),
        ("--data", "digts", "digits", "data"),
    ],
)
def test_an_unknown_name_gets_three_near_names_and_no_list(complain, option, word, near, kind):
    line = complain("attack", option, word)
    assert f"`leakbound list {kind}` shows all " in line
    assert f"did you mean '{near}'" in line or not near
    assert len(re.findall("'[a-z_0-9:]+'", line.partition("did you mean")[2])) <= 3
    assert len(line) < 250


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "nonsense"])
def test_a_device_that_is_not_there_is_told_before_anything_else(
    complain, plan, tmp_path, device, capsys, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = complain(*plan(), "--device", device)
    assert line.startswith(f"leakbound: device is '{device}'")
    assert 'give "cpu", or "cuda" on a machine with a GPU' in line
    assert "AssertionError" not in line
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "run").exists()


def test_reports(complain, tmp_path):
    assert "no-such" in complain("report", tmp_path / "no-such")
    (tmp_path / "file").write_text("mine")
    assert "file is no folder" in complain("report", tmp_path / "file")
    (tmp_path / "run.json").write_text("{}")
    assert str(tmp_path) in complain("report", tmp_path)
    hostile = tmp_path / "[bold]\x1b[2J\n[red]"
    hostile.mkdir()
    assert "[bold]\\x1b[2J [red]" in complain("report", hostile)


@pytest.mark.linux
def test_links_to_themselves(complain, plan, tmp_path):
    """A folder of images that holds one, and one in the place of every kind of file or folder."""
    loop, other = tmp_path / "loop", tmp_path / "other"
    for link in (loop, other):
        link.symlink_to(link)
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "data" / "a" / "0.png").symlink_to(tmp_path / "data" / "a" / "0.png")
    assert "'a/0.png' is a broken link" in complain(
        *plan(PLAN.replace('"digits"', json.dumps(f"folder:{tmp_path / 'data'}")))
    )
    for command in (
        ("compare", loop, other),
        ("evidence", loop, other, "--out", tmp_path / "out"),
        ("report", loop),
        ("audit", loop, "--out", tmp_path / "out"),
        (*plan()[:2], "--out", loop),
        ("attack", "--update", loop, "--model", "mlp", "--input-shape", "1,8,8"),
        *(("attack", "--data", f"{kind}:{loop}") for kind in ("folder", "npz", "zip", "idx")),
    ):
        assert re.search("symbolic links|loop", complain(*command))


def test_data(complain, plan, tmp_path):
    folder = tmp_path / "data"

    def tell(source: str, more: str = "") -> str:
        return complain(*plan(PLAN.replace('"digits"', json.dumps(source) + "\n" + more)))

    assert "digts" in tell("digts")
    assert "does not exist" in tell(f"folder:{folder}")
    folder.mkdir()
    assert str(folder) in tell(f"folder:{folder}")
    for name, mode in (("a", "L"), ("b", "RGB")):
        (folder / name).mkdir()
        Image.new(mode, (8, 8)).save(folder / name / "0.png")
    assert "channels" in tell(f"folder:{folder}")
    assert "channels is 2" in tell("digits", "channels = 2")
    assert "limit is 0" in tell("digits", "limit = 0")
    file = tmp_path / "data.npz"
    assert str(file) in tell(f"npz:{file}")
    images = np.zeros((20, 8, 8), np.float32)
    for labels in (np.arange(20) - 1, np.zeros(19, np.int64), np.zeros(20)):
        np.savez(file, inputs=images, labels=labels)
        assert "labels" in tell(f"npz:{file}")
    np.savez(file, inputs=images + np.nan, labels=np.zeros(20, np.int64))
    assert "finite" in tell(f"npz:{file}")
    assert "folder:a\\x00b" in tell("folder:a\0b")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("few", ["(1, 3)", "10 classes"]),
        ("nan", ["not finite"]),
        ("dropout", ["dropout", "model.eval()"]),
        ("shape", ["(1, 1, 8, 8)", "RuntimeError", "size and channels"]),
        ("images", ["(1, 10, 6, 6)"]),
        ("empty", ["no parameters"]),
        ("raises", ["RuntimeError: no way [bold]\\x1b[2J"]),
        ("nothing", ["NoneType"]),
    ],
)
def test_models(complain, plan, models, kind, words, tmp_path):
    line = complain(*plan(PLAN.replace('"mlp"', f'"{models}"\nkind = "{kind}"')))
    for word in (repr(models), *words):
        assert word in line
    assert not (tmp_path / "run").exists()


def test_model_paths_and_weights(complain, plan, models, tmp_path):
    for name, word in (
        ("their_models:biuld", "has no 'biuld'"),
        ("no_such_module:build", "no module 'no_such_module'"),
        ("../code/their_models:build", "write 'package.module:build'"),
        (":", "package.module:build"),
        ("<b>[bold]\\u001b[2J:x", "<b>[bold]\\x1b[2J"),
    ):
        assert word in complain(*plan(PLAN.replace('"mlp"', f'"{name}"')))
    assert "'siez'" in complain(*plan(PLAN.replace('"mlp"', f'"{models}"\nsiez = 3')))
    weights = tmp_path / "w.safetensors"
    for content in (None, b"not weights"):
        if content:
            weights.write_bytes(content)
        line = complain(*plan(PLAN.replace('"mlp"', f'"mlp"\nweights = "{weights}"')))
        assert str(weights) in line
    save_file({"x": torch.zeros(1)}, weights)
    line = complain(*plan(PLAN.replace('"mlp"', f'"mlp"\nweights = "{weights}"')))
    assert "do not fit" in line


def test_the_code_of_a_plan_is_announced_before_it_runs(plan, models, tmp_path, capsys):
    loud = tmp_path / "code" / "loud.py"
    loud.write_text('import sys\nprint("imported", file=sys.stderr)\n' + MODELS)
    name = "loud:build"
    with pytest.raises(SystemExit) as caught:
        main(f"attack --data digits --attack linear_inversion --json --model {name}".split())
    shown = capsys.readouterr()
    assert caught.value.code == 0
    assert shown.err.splitlines() == [
        "importing Python code that the plan names: loud:build",
        "imported",
    ]
    assert json.loads(shown.out)["model"]["name"] == "loud:build"


def test_hostile_names_stay_text(plan, tmp_path, capsys):
    """In a plan's name and class folders: no markup, no escapes, no HTML, no path."""
    name = "../../<script>alert(1)</script>[bold]x[/] \\u001b[2J\\nnew line"
    folder = tmp_path / "data"
    source = np.random.default_rng(0)
    for label in ("<b>[red]", "[/]", "\x1b[2J\n"):
        (folder / label).mkdir(parents=True)
        for i in range(5):
            pixels = source.integers(0, 255, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{i}.png")
    text = f'name = "{name}"\n' + PLAN.replace('"digits"', f'"folder:{folder}"')
    before = {p for p in tmp_path.rglob("*") if "run" not in p.parts}
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in plan(text)])
    shown = capsys.readouterr()
    assert caught.value.code == 0
    assert (
        "audit ../../<script>alert(1)</script>[bold]x[/] \\x1b[2J new line: 1 experiment"
        in shown.out
    )
    assert "\x1b" not in shown.out + shown.err
    after = {p for p in tmp_path.rglob("*") if tmp_path / "run" not in [p, *p.parents]}
    assert after - before == {tmp_path / "plan.toml"}
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert names == {
        ".lock",
        "pictures",
        "records.jsonl",
        "report.html",
        "run.json",
        "timings.jsonl",
    }
    assert "<script>alert(1)" not in (tmp_path / "run" / "report.html").read_text()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["own_data"]
