"""`leakbound bound --deployment` as a user sees it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from leakbound.cli import main
from leakbound.risk.deployment import read

pytestmark = pytest.mark.usefixtures("wide")
PAGE = (Path(__file__).parent.parent / "docs/federated_privacy.md").read_text(encoding="utf-8")
EXAMPLE = re.search(r"```toml\n(.*?)```", PAGE, re.S)[1]
LOCAL = """
clip = {norm = 1.0, kind = "l2", at = "client"}
noise = {multiplier = 300.0, at = "client", seeded = false}
rounds = 4
participation = {law = "all"}
correlation = "none"
unit = "client"
"""


def call(*arguments):
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code


@pytest.fixture
def file(tmp_path):
    def written(text):
        path = tmp_path / "deployment.toml"
        path.write_text(text)
        return path

    return written


def test_the_page_shows_what_is_printed(file, capsys):
    assert call("bound", "--deployment", file(EXAMPLE)) == 1
    shown = capsys.readouterr().out
    assert shown.index("sees every update before any noise") < shown.index("epsilon")
    assert "let them add the noise" in shown
    rows = [line.split("│") for line in shown.splitlines() if "│" in line]
    stated = [line.split("│") for line in PAGE.splitlines() if " │ " in line][1:]
    found = {tuple(cell.strip() for cell in row) for row in rows}
    assert len(stated) == 4
    for row in stated:
        assert tuple(cell.strip() for cell in row) in found


def test_a_missing_fact_exits_with_3_and_its_key(file, capsys):
    path = file(EXAMPLE.replace("rounds = 50\n", ""))
    assert call("bound", "--deployment", path) == 3
    shown = capsys.readouterr().out
    assert "not stated, so the worst case counts: rounds" in shown
    assert "State rounds in the deployment file" in shown
    assert call("bound", "--deployment", file(LOCAL)) == 1
    assert "leakbound calibrate --deployment" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["rounds = 'x'", "clip = 3", "rouds = 3", "noise = {std = 1"])
def test_an_unreadable_file_exits_with_2(file, capsys, text):
    assert call("bound", "--deployment", file(text)) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_two_ways_to_say_it_are_refused(file, capsys):
    assert call("bound", "--deployment", file(LOCAL), "--noise-multiplier", 1) == 2
    assert "give one" in capsys.readouterr().err
    assert call("bound") == 2
    assert "--deployment" in capsys.readouterr().err


def test_an_unknown_part_is_refused_before_anything_is_counted(file, capsys, monkeypatch):
    monkeypatch.setattr("leakbound.cli.deployment.state", None)
    given = "bound", "--deployment", file(LOCAL), "--data", "german", "--known", "nosuch"
    assert call(*given) == 2
    assert "'nosuch'" in capsys.readouterr().err


def test_data_decide_and_protected_exits_with_0(file, capsys):
    given = ["bound", "--deployment", file(LOCAL), "--data", "digits", "--psnr", 30]
    assert call(*given, "--accept", 0.005) == 0
    assert "protected" in capsys.readouterr().out
    more = file(LOCAL + 'sends = ["metrics"]\n')  # which no row covers
    assert call(*given, "--accept", 0.005) == 1
    assert "metrics leave the client without noise" in " ".join(capsys.readouterr().out.split())
    more.write_text(LOCAL)
    served = file(LOCAL.replace('"client", seeded', '"server", on = "sum", seeded'))
    served.write_text(served.read_text() + 'weights = "uniform"\n')
    assert call(*given, "--accept", 0.005) == 1
    assert "recoverable in principle" in capsys.readouterr().out
    assert call(*given, "--accept", 0.005, "--audience", "clients") == 0


def test_a_uniform_direction_never_protects(file, capsys):
    text = LOCAL + "record = {dim = 784, norm = 9.2}\n"
    given = "bound", "--deployment", file(text), "--prior", "sphere", "--psnr", 20
    assert call(*given) == 1
    assert "knows nothing about the data" in capsys.readouterr().out


def test_mistakes_name_their_line(file, capsys):
    text = EXAMPLE.replace("multiplier = 1.0", "epsilon = 20.0, delta = 1e-5, sensitivity = 1.0")
    text = text.replace('at = "server", on = "mean"', 'at = "client"')
    assert call("bound", "--deployment", file(text)) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "line 2, noise.epsilon: the classical Gaussian formula" in shown
    assert "0.00153" in shown or "0.00154" in shown


def test_json_and_files(file, tmp_path, capsys):
    out = tmp_path / "out"
    assert call("bound", "--deployment", file(EXAMPLE), "--json", "--out", out) == 1
    found = json.loads(capsys.readouterr().out)
    written = json.loads((out / "deployment.json").read_text())
    assert written.pop("written_by")
    assert found == written
    assert len(found["rows"]) == 6
    assert read(out / "deployment.toml")[0] == read(file(EXAMPLE))[0]


FTRL = """
clip = {norm = 1.0, kind = "l2", at = "client"}
noise = {at = "server", on = "sum", seeded = false}
weights = "uniform"
rounds = 64
participation = {law = "server-picks", min_separation = 16}
correlation = "WORD"
unit = "example"
"""


def test_noise_is_calibrated_for_a_deployment(file, capsys):
    target = "psnr>=25 with probability<=0.02"
    given = ["calibrate", "--target", target, "--data", "digits", "--audience", "clients"]
    given.append("--deployment")
    found = {}
    for word in ("none", "band:4", "root"):
        assert call(*given, file(FTRL.replace("WORD", word)), "--json") == 0
        found[word] = json.loads(capsys.readouterr().out)["noise_multiplier"]
    assert found["band:4"] / found["none"] == pytest.approx(2.439903 / 2, rel=2e-3)
    assert found["root"] > found["band:4"]
    level = f"noise = {{multiplier = {found['band:4']}, "
    whole = file(FTRL.replace("WORD", "band:4").replace("noise = {", level) + "\n")
    shown = ["bound", "--deployment", whole, "--data", "digits", "--psnr", 25, "--json"]
    call(*shown, "--accept", 0.02)
    rows = {(r["audience"], r["unit"]): r for r in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["clients", "example"]["thresholds"][0]["bound"] == pytest.approx(0.02, rel=0.01)
    assert rows["clients", "example"]["protected"]


def test_no_noise_helps_against_a_server_that_adds_it(file, capsys):
    text = FTRL.replace("WORD", "none")
    given = ["calibrate", "--target", "psnr>=25 with probability<=0.02", "--data", "digits"]
    assert call(*given, "--deployment", file(text)) == 2
    assert "the server itself sees every update" in capsys.readouterr().err
    assert call(*given, "--deployment", file(text), "--audience", "clients") == 0
    assert call(*given[:3], "--deployment", file(text)) == 2
    assert "--data" in capsys.readouterr().err


def test_noise_for_a_gain_over_all_rounds(file, capsys):
    """2 Phi(sqrt(4) / (2 s)) - 1 = 0.1 at s = 7.96."""
    path = file(LOCAL)
    given = ["calibrate", "--deployment", path, "--unit", "client", "--target"]
    assert call(*given, "gain<=0.1") == 0
    shown = capsys.readouterr().out
    assert "noise multiplier 7.96" in shown
    assert "for anyone, whatever they know" in shown
    assert call(*given, "gain<=0.1 for sex") == 0
    assert call(*given, "gain<=0.1", "--known", "sex") == 2
    assert "changes nothing" in capsys.readouterr().err


def test_three_attackers_over_all_rounds(file, capsys):
    """Noise 300 over four rounds: 2 Phi(2 / 600) - 1 = .00266 for anyone."""
    path = file(LOCAL)
    given = ("bound", "--deployment", path, "--data", "german", "--share", "0.9", "--json")
    known = ("--known", "foreign_worker,personal_status_and_sex")
    assert call(*given, *known, "--accept", "0.05") == 0
    found = json.loads(capsys.readouterr().out)["attackers"]
    assert [(one["audience"], one["unit"]) for one in found] == [
        ("server", "client"),
        ("clients", "client"),
    ]
    for one in found:
        stranger, intruder, anyone = one["rows"]
        assert anyone["gain"] == pytest.approx(0.00266, abs=1e-5)
        assert stranger["bound"] < intruder["bound"] <= intruder["without"] + anyone["gain"] + 1e-9
    # The stranger's bound is .009 and the intruder's .018.
    assert call(*given, "--accept", "0.012") == 0
    capsys.readouterr()
    assert call(*given, *known, "--accept", "0.012") == 1
    assert call("bound", "--deployment", path, *known) == 2


def test_the_file_says_what_an_intruder_knows(file, capsys):
    text = file(LOCAL + 'record = {known = "housing"}\n')
    german = ["bound", "--deployment", text, "--data", "german"]
    call(*german, "--json")
    (one, *_) = json.loads(capsys.readouterr().out)["attackers"]
    assert [row["knows"] for row in one["rows"]] == ["", "housing", "anything"]
    call(*german, "--known", "none", "--json")
    assert json.loads(capsys.readouterr().out)["attackers"] == []
    call("bound", "--deployment", text, "--json")
    printed = capsys.readouterr()
    assert json.loads(printed.out)["attackers"] == []
    assert "record.known is not used" in printed.err


def test_a_correlation_counts_whole_images(capsys, tmp_path):
    path = tmp_path / "known.toml"
    ready = Path(__file__).parents[1] / "examples" / "ci-gate" / "deployment.toml"
    path.write_text(ready.read_text("utf-8") + '\n[record]\nknown = "region:top"\n', "utf-8")
    asked = ("bound", "--deployment", path, "--data", "digits", "--ncc", 0.9)
    assert call(*asked) == 2
    assert "ncc counts whole images, but known is 'region:top'" in capsys.readouterr().err
    assert call(*asked, "--known", "none") == 1  # undecided
    assert "NCC 0.9" in capsys.readouterr().out
