"""The page as text: what it holds, what it refuses, and that it never varies."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from leakbound.report import write


def test_same_inputs_same_bytes(tmp_path, make_grid):
    one, two = make_grid(tmp_path / "one", seeds=2), make_grid(tmp_path / "two", seeds=2)
    first = write(one).read_bytes()
    assert write(two).read_bytes() == first
    assert write(one).read_bytes() == first


def test_the_page_is_private_and_leaves_no_temporary_file(tmp_path, make_grid):
    folder = make_grid(tmp_path / "run", seeds=1)
    before = {path.name for path in folder.iterdir()}
    path = write(folder)
    assert path == folder / "report.html"
    assert path.stat().st_mode & 0o777 == 0o600
    assert {path.name for path in folder.iterdir()} == before | {"report.html"}


def test_without_images_there_is_no_picture(tmp_path, make_grid):
    folder = make_grid(tmp_path / "run", seeds=1)
    assert "data:image/png" in write(folder).read_text()
    text = write(folder, images=False).read_text()
    assert "data:image" not in text
    assert "<img" not in text
    assert "written without pictures" in text


def test_own_data_is_said_where_pictures_are(tmp_path, make_assessment, make_pictures, make_run):
    folder = tmp_path / "run"
    folder.mkdir()
    files = make_pictures(folder, 0, 2, 0.1, 0)
    make_run(folder, [make_assessment(pictures=files)], own_data=True)
    warning = "pictures of your private data"
    assert warning in write(folder).read_text()
    assert warning not in write(folder, images=False).read_text()
    make_run(folder, [make_assessment(pictures=files)], own_data=False)
    assert warning not in write(folder).read_text()


def test_failed_and_missing_experiments_are_said_on_top(tmp_path, make_assessment, make_run):
    own = [make_assessment(seed=s) for s in range(3)]
    own.append(make_assessment(seed=3, status="failed", reason="RuntimeError: <b>"))
    text = write(make_run(tmp_path / "run", own, experiments=6)).read_text()
    assert "1 of 4 experiments failed;" in text
    assert "2 experiments of 6 are still missing" in text
    assert "RuntimeError: &lt;b&gt;" in text


def test_problem_is_shown_with_its_picture(tmp_path, make_assessment, make_run):
    own = [make_assessment(problem="objective did not fall", psnr=[5.0, 6.0])]
    text = write(make_run(tmp_path / "run", own)).read_text()
    assert "The attack reports a problem:</strong> objective did not fall" in text
    assert "no evidence of safety" in text


def test_hostile_text_is_escaped_everywhere(tmp_path, make_grid, hostile):
    text = write(make_grid(tmp_path / "run", seeds=1)).read_text()
    assert hostile not in text
    assert "<img src=x" not in text
    assert text.count("<script") == 1
    assert "&lt;script&gt;alert(2)" in text
    assert "$x_$ &lt;b&gt;" in text  # a parameter name, as an axis label of a plot


@pytest.mark.parametrize(
    "name", ["_hidden", "$", "$\\frac{1}$", "名前", "a\nb", "", "{{ 7 * 7 }}", "\x00"]
)
def test_odd_names_do_no_harm(tmp_path, make_assessment, make_defense, make_run, name):
    own = [
        make_assessment(attack=name, defense=make_defense(name, **{name: std}))
        for std in (0.1, 0.2, 5.0)
    ]
    text = write(make_run(tmp_path / "run", own, plan={"name": name})).read_text()
    assert f"<h1>{name or 'audit'}</h1>" in text


def test_ids_are_unique_and_references_resolve(tmp_path, make_grid):
    text = write(make_grid(tmp_path / "run", seeds=1)).read_text()
    ids = re.findall(r'<[^>]*? id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(|href=")#([^")]+)', text)) <= set(ids)


def test_nothing_but_failures_still_makes_a_page(tmp_path, make_assessment, make_run):
    own = [
        make_assessment(status="failed", reason="x"),
        make_assessment(status="not_applicable", reason="y"),
    ]
    text = write(make_run(tmp_path / "run", own)).read_text()
    assert "1 not run" in text


def test_mixed_and_missing_strengths(tmp_path, make_assessment, make_defense, make_run):
    given = [
        make_defense("two", a=1, b=0.5),
        make_defense("two", a=2, b=0.7),
        make_defense("word", mode="x"),
        make_defense("word", mode="y"),
        make_defense("zero", std=0.0),
        make_defense("zero", std=100.0),
        make_defense("zero", std=0.1),
    ]
    own = [make_assessment(defense=d, seed=s) for d in given for s in range(2)]
    text = write(make_run(tmp_path / "run", own)).read_text()
    for label in ("two a=1 b=0.5", "two a=2 b=0.7", "word mode=x", "zero std=0.1"):
        assert f"</span>{label}</th>" in text


def test_a_missing_picture_is_said(tmp_path, make_assessment, make_run, make_pictures):
    folder = tmp_path / "run"
    folder.mkdir()
    files = make_pictures(folder, 0, 2, 0.1, 0)
    (folder / "pictures" / files["reconstruction"]).unlink()
    text = write(make_run(folder, [make_assessment(pictures=files)])).read_text()
    assert text.count("<img ") == 1
    assert "no picture was kept" in text


def _spoil(folder, name, change):
    path = folder / name
    path.write_text(change(path.read_text()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-9], r"records\.jsonl, line 2 is damaged: Input data was truncated"),
        (
            lambda text: "[1]\n" + text,
            r"records\.jsonl, line 1 is damaged: Expected `object`, got `array`",
        ),
        (lambda text: text.replace("31.0", "NaN"), "line 1 is damaged: JSON is malformed"),
        (
            lambda text: text.replace("31.0", "1e999"),
            r"line 1 is damaged: Number out of range - at `\$\.metrics",
        ),
        (
            lambda text: text.replace('"ok"', '"fine"'),
            r"Invalid enum value 'fine' - at `\$\.status`",
        ),
        (lambda text: text.replace("mlp", "\\ud800"), "utf-16 surrogate pair"),
        (
            lambda text: text.replace('"server":"honest"', '"x":1'),
            r"unknown field `x` - at `\$\.threat`",
        ),
        (lambda text: text.replace('"batch_size":2', '"batch_size":"2"'), r"`\$\.batch_size`"),
        (
            lambda text: text.replace('"schema":1', '"schema":9'),
            r"line 1 is damaged: Invalid enum value 9 - at `\$\.schema`",
        ),
        (
            lambda text: text.replace('"pictures":{}', '"pictures":{"truth":"../run.json"}'),
            r"Expected `str` matching regex .* - at `\$\.pictures",
        ),
        (lambda text: "", "holds no record"),
    ],
)
def test_damaged_records_are_refused_with_their_line(
    tmp_path, make_assessment, make_run, change, message
):
    folder = make_run(tmp_path / "run", [make_assessment(seed=0), make_assessment(seed=1)])
    _spoil(folder, "records.jsonl", change)
    with pytest.raises(ValueError, match=message):
        write(folder)
    assert not (folder / "report.html").exists()


def test_missing_files(tmp_path, make_assessment, make_run):
    with pytest.raises(ValueError, match=r"holds no run\.json; give the folder of a run"):
        write(tmp_path)
    folder = make_run(tmp_path / "run", [make_assessment()])
    _spoil(folder, "run.json", lambda text: text.replace('"schema": 1', '"schema": 2'))
    with pytest.raises(
        ValueError, match=r"run\.json is damaged: Invalid enum value 2 - at `\$\.schema`"
    ):
        write(folder)
    _spoil(folder, "run.json", lambda text: "{")
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        write(folder)
    (folder / "records.jsonl").unlink()
    make_run(folder, [make_assessment()])
    (folder / "records.jsonl").unlink()
    with pytest.raises(ValueError, match=r"holds no records\.jsonl"):
        write(folder)


def test_damaged_utility_is_named(tmp_path, make_assessment, make_run):
    folder = make_run(tmp_path / "run", [make_assessment()])
    (folder / "utility.jsonl").write_text('{"schema": 1}\n')
    with pytest.raises(
        ValueError, match=r"utility\.jsonl, line 1 is damaged: .* missing required field `training`"
    ):
        write(folder)
    (folder / "utility.jsonl").write_text("")
    assert "Privacy and utility" not in write(folder).read_text()


@pytest.mark.parametrize("name", ["jinja2", "matplotlib"])
def test_missing_library_says_what_to_install(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=rf"needs {name}; pip install 'leakbound\[report\]'"):
        write(tmp_path)


def test_of_records_of_one_experiment_the_last_stands(tmp_path, make_assessment, make_run):
    one = make_assessment(psnr=[12.0, 12.0])
    two = make_assessment(psnr=[30.0, 12.0], experiment=one.experiment)
    text = write(make_run(tmp_path / "run", [one, two])).read_text()
    assert "This report holds 1 experiment:" in text
    assert "1 exposed" in text


def test_the_report_needs_no_torch(tmp_path, make_assessment, make_run):
    folder = make_run(tmp_path / "run", [make_assessment()])
    code = (
        "import sys; from pathlib import Path; from leakbound.report import write\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"write(Path({str(folder)!r}))\n"
        "assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_content_policy_forbids_the_network(tmp_path, make_assessment, make_run):
    text = write(make_run(tmp_path / "run", [make_assessment()])).read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy
    assert policy.group(1).startswith(
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    )
    links = re.findall(r'(?:src|href)="([^"]+)"', text)
    assert all(link.startswith(("#", "data:")) for link in links)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["plan_hash"] in text


def test_a_plan_without_a_name_is_an_audit(tmp_path, make_assessment, make_run):
    text = write(make_run(tmp_path / "run", [make_assessment()], plan={})).read_text()
    assert "<h1>audit</h1>" in text
