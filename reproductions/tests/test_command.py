"""`leakbound reproduce`: a tiny paper that is run, stopped, resumed, and refused."""

from __future__ import annotations

import json
import math
import os
import sys
import types
import typing
from dataclasses import replace
from pathlib import Path

import matplotlib.figure as mpl_figure
import pytest
from filelock import FileLock

from leakbound import cli
from leakbound_reproductions import kept
from leakbound_reproductions.claim import Claim, finding, student
from leakbound_reproductions.jobs import Jobs
from leakbound_reproductions.kept import Parts
from leakbound_reproductions.options import Reproduce
from leakbound_reproductions.outcome import SCALES, Figure, Outcome
from leakbound_reproductions.reproductions import REPRODUCTIONS

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360000002000001e221bc330000000049454e44ae426082"
)
NAME = "priprune"
MODULE = f"leakbound_reproductions.{NAME}.reproduce"


class Fake:
    """A reproduction of two parts, which notes what it was asked and what it did."""

    def __init__(self, values=(1.0, 1.1, 0.9), stop=False):
        self.values, self.stop, self.made, self.asked = values, stop, [], None

    def __call__(self, scale, folder, *, workers, color, tell):
        self.asked = (scale, workers, color)
        parts = Parts(folder / "parts")
        tell("first <b>", 0, 2)
        parts.once("first", lambda: self.made.append("first"))
        if self.stop:
            raise KeyboardInterrupt
        tell("first <b>", 1, 2)
        parts.once("second", lambda: self.made.append("second"))
        (folder / "figure.png").write_bytes(PIXEL)
        value, interval = student(self.values)
        found = finding("|a| > 0 <i>", value, interval, (0.0, math.inf), n=3, among=1)
        claims = (
            Claim("4-1", "a & b", "table 1", "tiny", (found,)),
            Claim("4-2", "c", "table 2", "tiny", (), "it needs <data>"),
        )
        return Outcome(claims, (Figure("figure.png", "a pixel"),), "Settings.")


@pytest.fixture
def fake(monkeypatch):
    made = Fake()
    put(monkeypatch, NAME, made)
    return made


def put(monkeypatch, name, function):
    module = types.ModuleType(name)
    module.reproduce = function
    monkeypatch.setitem(sys.modules, f"leakbound_reproductions.{name}.reproduce", module)


def ran(*arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["reproduce", *map(str, arguments)])
    return ended.value.code


def test_names_and_scales_are_those_of_the_registry():
    hints = typing.get_type_hints(Reproduce)
    assert set(typing.get_args(hints["name"])) == {*REPRODUCTIONS, "all"}
    assert typing.get_args(hints["scale"]) == SCALES


def test_a_run_writes_results_and_pages(fake, tmp_path, capsys):
    out = tmp_path / "run"
    assert ran(NAME, "--out", out, "--workers", 3, "--color", "mine") == 0
    assert fake.asked == ("minutes", 3, "mine")
    text = capsys.readouterr()
    assert "1 of 2 claims are decided" in text.out
    assert "cannot be tested here" in text.out
    assert "first <b>: 1 of 2" in text.err
    found = json.loads((out / "results.json").read_bytes())
    assert (found["schema"], found["name"], found["scale"]) == (1, NAME, "minutes")
    assert {"python", "torch"} <= set(found["versions"])
    assert {"processor", "threads"} <= set(found["machine"])
    first, second = found["claims"]
    assert first["verdict"] == first["findings"][0]["verdict"] == "holds"
    assert first["findings"][0]["region"] == [0.0, None]
    assert second["verdict"] == "cannot be tested here"
    page = (out / "results.html").read_text("utf-8")
    assert "a &amp; b" in page
    assert "it needs &lt;data&gt;" in page
    assert "data:image/png;base64," in page
    assert "http" not in page.replace("http-equiv", "")
    markdown = (out / "results.md").read_text("utf-8")
    assert r"\|a\| > 0" in markdown
    assert "![a pixel](figure.png)" in markdown


def test_a_stopped_run_goes_on_where_it_was(monkeypatch, tmp_path, capsys):
    stopped = Fake(stop=True)
    put(monkeypatch, NAME, stopped)
    out = tmp_path / "run"
    assert ran(NAME, "--out", out) == 130
    assert "run the same command again" in capsys.readouterr().err
    assert stopped.made == ["first"]
    assert not (out / "results.json").exists()
    resumed = Fake()
    put(monkeypatch, NAME, resumed)
    assert ran(NAME, "--out", out) == 0
    assert resumed.made == ["second"]
    again = Fake()
    put(monkeypatch, NAME, again)
    before = (out / "results.json").read_bytes()
    assert ran(NAME, "--out", out) == 0
    assert again.made == []
    assert (out / "results.json").read_bytes() == before


def test_a_choice_of_parts_is_for_the_papers_own_scale(fake, tmp_path, monkeypatch, capsys):
    """It reaches the reproduction, belongs to its folder, and is refused where it means nothing."""
    assert ran(NAME, "--scale", "paper", "--steps", "5", "--out", tmp_path / "a") != 0
    assert "steps is for systematic_evaluation with --scale paper" in capsys.readouterr().err
    about = replace(REPRODUCTIONS[NAME], by_parts=True)
    monkeypatch.setitem(REPRODUCTIONS, NAME, about)
    asked = []

    def chosen(scale, folder, *, jobs, **rest):
        asked.append(jobs)
        return fake(scale, folder, **rest)

    put(monkeypatch, NAME, chosen)
    out = ["--scale", "paper", "--out", tmp_path / "b"]
    choice = ["--parts", "one,two", "--hours", "2", "--device", "cpu", "--steps", "5"]
    assert ran(NAME, *out, *choice) == 0
    assert asked == [Jobs(("one", "two"), steps=5, hours=2.0, device="cpu")]
    assert ran(NAME, *out, "--steps", "5", "--parts", "three") == 0
    for wrong in ([*out, "--steps", "6"], [*out, "--steps", "0"], [*out, "--hours", "-1"]):
        assert ran(NAME, *wrong) != 0
    assert ran(NAME, "--steps", "5", "--out", tmp_path / "c") != 0
    assert len(asked) == 2


def test_a_folder_of_another_run_is_refused(fake, tmp_path, capsys):
    out = tmp_path / "run"
    assert ran(NAME, "--out", out) == 0
    assert ran(NAME, "--out", out, "--scale", "cpu") == 2
    assert 'plan.scale is "minutes" there and "cpu" now' in capsys.readouterr().err
    with FileLock(out / ".lock", timeout=0):
        assert ran(NAME, "--out", out) == 2
    assert "another run is active" in capsys.readouterr().err
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    assert ran(NAME, "--out", other) == 2
    assert "holds other files" in capsys.readouterr().err
    assert [path.name for path in other.iterdir() if path.name != ".lock"] == ["thesis.txt"]


def user_file(path):
    path.write_text("mine")


def user_json(path):
    path.write_text('{"schema": 1, "leakbound": "0.1", "written_by": "me"}\n')


def folder(path):
    path.mkdir()
    (path / "mine.txt").write_text("mine")


def link(path):
    target = path.parent.parent / "target"
    target.write_text("mine")
    path.symlink_to(target)


def dangling(path):
    path.symlink_to(path.parent.parent / "nowhere")


SPECIAL = [getattr(os, "mkfifo", None), link, dangling]
KINDS = [user_file, user_json, Path.touch, folder]
KINDS += [pytest.param(make, marks=pytest.mark.linux) for make in SPECIAL]


def snapshot(place):
    """All files and links of a folder, and what must not change of them."""
    found = {}
    for path in sorted(place.rglob("*")):
        about = path.lstat()
        content = path.read_bytes() if path.is_file() else None
        changed = None if path.is_dir() else about.st_mtime_ns
        found[path] = (about.st_ino, about.st_mode, changed, content)
    return found


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(
    "name",
    ["run.json", "results.json", "results.md", "results.html", "data.json", "timings.jsonl"],
)
def test_a_file_under_a_name_that_it_would_write(name, make, fake, tmp_path, capsys):
    """It ends with 2, names the path and a way out, runs nothing and changes nothing."""
    out = tmp_path / "run"
    out.mkdir()
    make(out / name)
    before = snapshot(tmp_path)
    assert ran(NAME, "--out", out) == 2
    error = capsys.readouterr().err
    assert name in error
    assert any(way in error for way in ("move it away", "another", "empty or new"))
    assert "Traceback" not in error
    assert snapshot(tmp_path) == before
    assert fake.asked is None


def test_a_file_where_the_folder_should_be(fake, tmp_path, capsys):
    (tmp_path / "run").write_text("")
    assert ran(NAME, "--out", tmp_path / "run") == 2
    assert "cannot be written" in capsys.readouterr().err


def test_all_run_one_after_the_other_and_a_missing_one_is_told(monkeypatch, tmp_path, capsys):
    for name in REPRODUCTIONS:
        put(monkeypatch, name, Fake())
    monkeypatch.setitem(sys.modules, MODULE, None)
    assert ran("all", "--out", tmp_path) == 1
    assert f"name is '{NAME}', which this version cannot reproduce yet" in capsys.readouterr().err
    done = {path.parent.name for path in tmp_path.glob("*/results.json")}
    assert done == set(REPRODUCTIONS) - {NAME}
    assert ran(NAME, "--out", tmp_path / "alone") == 2


@pytest.mark.parametrize(
    "wrong", [["nothing"], [NAME, "--scale", "large"], [NAME, "--workers", "-1"], []]
)
def test_bad_input_gives_no_traceback(fake, wrong, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ran(*wrong) == 2
    text = capsys.readouterr()
    assert "Traceback" not in text.out + text.err


def test_a_figure_of_the_paper_is_written_with_its_values(monkeypatch, tmp_path, capsys):
    def drawing(scale, folder, **_):
        figure = mpl_figure.Figure()
        axes = figure.subplots()
        axes.set_title("NMI")
        axes.plot([1, 2], [0.5, 0.25], label="SGI")
        kept.figure(figure, folder / "attacks.png", 50)
        return Outcome((), (Figure("attacks.png", "a line", "figures 3 and 4a"),), "Settings.")

    put(monkeypatch, NAME, drawing)
    out = tmp_path / "run"
    assert ran(NAME, "--out", out, "--figure", "4a") == 0
    said = "".join(capsys.readouterr().out.split())
    assert "figure4a:aline" in said
    assert f"{out}/attacks.png,valuesinattacks.values.csv" in said
    rows = (out / "attacks.values.csv").read_text("utf-8").splitlines()
    assert rows == ["panel,series,x,y,low,high,shade", "NMI,SGI,1.0,0.5,,,", "NMI,SGI,2.0,0.25,,,"]
    assert ran(NAME, "--out", out, "--figure", "9") == 0
    assert "figure 9 is not drawn at scale minutes" in capsys.readouterr().out
    assert ran(NAME, "--out", out, "--figure", "7") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "figure is '7'; of paper D, these figures are drawn: 2, 3, 4a, 4b, 5a" in said
    assert ran("all", "--out", out, "--figure", "3") == 2
    assert "name one paper" in capsys.readouterr().err
