"""`leakbound compare` as a user sees it."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from leakbound.cli import main

SPEC = importlib.util.spec_from_file_location(
    "made_up_runs", Path(__file__).parent / "report" / "conftest.py"
)
made_up = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(made_up)
pytestmark = pytest.mark.usefixtures("wide")


def call(*arguments):
    """The exit code of `leakbound compare ARGUMENTS`, run here."""
    with pytest.raises(SystemExit) as caught:
        main(["compare", *map(str, arguments)])
    return caught.value.code


@pytest.fixture
def two(tmp_path):
    first = made_up.bounded(tmp_path / "one", seeds=3)
    return first, shutil.copytree(first, tmp_path / "two")


def test_identical_runs(capsys, two):
    assert call(*two) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "records.jsonl and utility.jsonl: byte-identical in both runs" in text
    assert "No verdict changed: 7 configurations in both runs." in text
    assert "14 settings in both; 14 with the same PSNR in every pair" in text
    assert (two[1] / "compare.html").exists()


def test_changes_and_warnings(capsys, two, tmp_path):
    def edit(a):
        psnr = tuple(v + 9 + 0.1 * a.seed for v in a.scores)
        found = {"threat": replace(a.threat, labels_known=False)}
        found["metrics"] = a.metrics | {"psnr": psnr}
        return found | {"verdict": "exposed"} if a.defense.name == "adaptive_noise" else found

    made_up.changed(two[1], edit)
    out = tmp_path / "a page.html"
    assert call(*two, "--out", out) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "not fair: The threat models differ: A honest server, labels known" in text
    assert "1 of 7 configurations changed verdict: 1 less safe in B." in text
    assert "adaptive_noise budget=1 │ mlp (hidden=[128]) │ 2 │ undecided │ exposed" in text
    assert "+9.1 dB" in text
    assert "2 more on the page" in text
    assert "a page.html" in text
    assert "not fair as it stands" in out.read_text()


def test_hostile_names_do_no_harm_on_a_terminal(capsys, two):
    def edit(a, more=0):
        name = a.defense.name.removesuffix("[bold]\x1b[2J") + "[bold]\x1b[2J"
        psnr = tuple(v + a.seed % 2 + more for v in a.scores)
        return {"defense": replace(a.defense, name=name), "metrics": a.metrics | {"psnr": psnr}}

    for folder in two:
        made_up.changed(folder, edit)
    made_up.changed(two[1], lambda a: edit(a, 5))
    assert call(*two) == 0
    text = capsys.readouterr().out
    assert "\x1b[2J" not in text
    assert "none[bold]" in text


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda two: (two[1] / "records.jsonl").unlink(), "holds no records.jsonl"),
        (lambda two: (two[0] / "run.json").write_text("{"), "run.json is damaged"),
    ],
)
def test_what_is_no_run_is_told_without_a_traceback(capsys, two, spoil, message):
    spoil(two)
    assert call(*two) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_one_run_is_not_compared_with_itself(capsys, two):
    """Byte-identical is what a repetition shows, and this is none."""
    for second in (two[0], two[1] / ".." / two[0].name):
        assert call(two[0], second) == 2
        assert "which shows nothing; give two runs" in capsys.readouterr().err
    assert not (two[0] / "compare.html").exists()


def test_empty_files_are_not_called_identical(capsys, two):
    for folder in two:
        (folder / "utility.jsonl").write_bytes(b"")
    assert call(*two) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "utility.jsonl" not in text
    assert "records.jsonl: byte-identical in both runs" in text


def test_where_the_page_cannot_go(capsys, two, tmp_path):
    assert call(*two, "--out", tmp_path) == 2
    assert "which is a folder; name a file, as in compare.html" in capsys.readouterr().err
    assert call(*two, "--out", two[0] / "run.json" / "x.html") == 2
    assert "cannot be written: Not a directory" in capsys.readouterr().err
    assert call(*two, "--out", tmp_path / "page.txt") == 2
    assert "name a file that ends in .html" in capsys.readouterr().err
    assert call(*two, "--out", tmp_path / "new" / "x.html") == 0
