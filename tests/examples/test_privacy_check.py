"""The privacy check: the app describes itself, its facts hold in a run, and its server sees all."""

import math
import re
import tomllib
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from leakbound.captured import load
from leakbound.flower import capture_app, run
from leakbound.risk.deployment.file import read
from leakbound.risk.deployment.flower_app import read as read_config
from leakbound.risk.deployment.laws import laws_of

from ..captured.flat import attack_update

ROOT = Path(__file__).parent.parent.parent
APP = ROOT / "examples" / "flower-privacy-check"
CONFIG = tomllib.loads((APP / "pyproject.toml").read_text("utf-8"))["tool"]["flwr"]["app"]["config"]


@pytest.fixture
def app(imported, tmp_path, monkeypatch):
    """The app's package; it writes into an empty folder."""
    monkeypatch.chdir(tmp_path)
    return imported(APP, "privacy_check")


def test_a_run_trains_and_writes_its_facts(app, tmp_path, capsys):
    torch.manual_seed(0)
    config = CONFIG | {"num-server-rounds": 2}
    run(app.server_app.app, app.client_app.app, config["num-clients"], run_config=config)
    said = capsys.readouterr().out
    assert "nan-disables-clip (clip.norm)" in said
    assert "example-weights" not in said, "an accountant enforces equal weights"
    found, _ = read(tmp_path / "deployment.toml")
    assert (found.rounds, found.weights) == (2, "uniform")
    assert (found.clip.at, found.clip.norm, found.noise.at) == ("client", 0.5, "server")
    own = {(e.audience, e.unit): e for e in laws_of(found)}
    assert own["server", "client"].exact
    assert own["clients", "client"].mu == pytest.approx(2**0.5)


def test_the_readme_has_the_numbers_of_the_check(app, tmp_path, capsys):
    app.server_app.check  # noqa: B018  the server calls it, too
    from privacy_check import check

    (tmp_path / "pyproject.toml").write_bytes((APP / "pyproject.toml").read_bytes())
    check.main()
    found, _ = read(tmp_path / "deployment.toml")
    outside = next(e for e in laws_of(found) if (e.audience, e.unit) == ("clients", "client"))
    text = (APP / "README.md").read_text("utf-8")
    mu, epsilon = math.ceil(outside.mu * 1000) / 1000, math.ceil(outside.epsilon(1e-5) * 100) / 100
    assert f"mu {mu} over 5 rounds: epsilon {epsilon} at" in text, "rounded up, as printed"
    assert (tmp_path / "deployment.toml").read_text("utf-8").strip() in text


def test_the_run_configuration_alone_leaves_facts_open():
    found, mistakes = read_config(APP / "pyproject.toml")
    assert (found.noise.multiplier, found.noise.at, found.weights) == (1.0, None, None)
    assert mistakes == ()


def test_its_server_reconstructs_an_image(app, tmp_path):
    torch.manual_seed(0)
    files = capture_app(
        APP, tmp_path / "seen", clients=10, run_config={"batch-size": 100, "local-epochs": 1}
    )
    update = load(files[0])
    assert update.about["defense"] == '[{"name": "clip", "clip_norm": 0.5}]'
    assert "adds noise after it has the updates" in update.about["defense_note"]
    outcome = attack_update(
        update, app.task.Net(), input_shape=(1, 8, 8), learning_rate=0.1, steps=1,
        attacks=["linear_inversion"], truth=None,
    )  # fmt: skip
    assert outcome.records[0].status == "ok"
    assert outcome.records[0].release.noise_share in (None, 0)


def test_the_readme_names_what_is_there():
    text = (APP / "README.md").read_text("utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert "://" in target or (APP / target).exists(), target
