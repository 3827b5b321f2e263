"""A Flower app's run configuration: what it states, what it does not, and where mistakes stand."""

import subprocess
import sys

import pytest

from leakbound.risk.deployment.flower_app import read


@pytest.fixture
def app(tmp_path):
    """A pyproject.toml with these lines of configuration."""

    def write(*lines, above="[tool.flwr.app.config]"):
        path = tmp_path / "pyproject.toml"
        path.write_text("\n".join(['[project]\nname = "own"', above, *lines]))
        return path

    return write


def test_flowers_own_names(app):
    path = app(
        "num-server-rounds = 50",
        "fraction-train = 0.1",
        "num-clients = 100",
        "min-train-nodes = 12",
        "noise-multiplier = 1.0",
        "clipping-norm = 0.5",
        "local_epochs = 2",
        "learning.rate = 0.1",
        "lr = 0.2",
    )
    found, mistakes = read(path)
    assert found.title == "Flower app own"
    assert (found.rounds, found.clip.norm, found.noise.multiplier) == (50, 0.5, 1.0)
    who = found.participation
    assert (who.law, who.cohort, who.population) == ("fixed-size", 12, 100)
    assert (found.local.epochs, found.local.learning_rate) == (2, 0.2)
    assert (found.noise.at, found.noise.seeded, found.weights, found.clip.at) == (None,) * 4
    assert mistakes == ()


def test_a_local_noise_and_its_mistakes_with_their_lines(app):
    path = app("epsilon = 10", "delta = 1e-5", "clip-norm = 1.0", "", "sensitivity = 1e-4")
    found, mistakes = read(path)
    assert (found.noise.at, found.clip.at, found.claim.rounds) == ("client", "client", 1)
    lines = {one.name: one.line for one in mistakes}
    assert lines == {"classical-formula": 4, "sensitivity-below-clip": 8}


def test_names_of_opacus_and_of_an_accountant(app):
    found, _ = read(app("max-grad-norm = 1.2", "noise-multiplier = 0.8", "target-delta = 1e-6"))
    assert (found.clip.kind, found.clip.norm, found.noise.at) == ("example", 1.2, "optimizer")
    found, _ = read(app("epsilon = 3.0", "delta = 1e-5"))
    assert (found.claim.epsilon, found.claim.delta, found.noise.epsilon) == (3.0, 1e-5, None)


def test_nested_tables(app):
    found, _ = read(app("[tool.flwr.app.config.privacy]", "clipping-norm = 0.5"))
    assert found.clip.norm == 0.5


def test_nothing_is_stated_by_an_empty_app(app):
    found, mistakes = read(app(above="[tool.flwr.app]"))
    assert (found.rounds, found.clip.kind, found.noise.at, mistakes) == (None, None, None, ())


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["clipping-norm = 'x'"], r"tool\.flwr\.app\.config\.clipping-norm is 'x'; give a number"),
        (["num-server-rounds = 2.5"], "give a whole number"),
        (["clipping-norm = -1"], r"clip\.norm is -1"),
        (["num-sampled-clients = 9", "num-clients = 3"], "more than the population"),
        (["noise-multiplier = nan"], "give a number"),
        (["not toml"], "not valid TOML"),
        (["x = '" + "y" * 2**20 + "'"], "give a smaller file"),
    ],
)
def test_what_cannot_be_read(app, lines, words):
    with pytest.raises(ValueError, match=words):
        read(app(*lines))


def test_what_is_no_app(app, tmp_path):
    with pytest.raises(ValueError, match=r"has no \[tool\.flwr\.app\]"):
        read(app(above="[tool.other]"))
    with pytest.raises(ValueError, match="cannot be read"):
        read(tmp_path / "missing.toml")


def test_flower_is_not_imported(app):
    code = (
        "import sys; from pathlib import Path; from leakbound.risk.deployment import flower_app; "
    )
    code += f"flower_app.read(Path({str(app('lr = 0.1'))!r})); assert 'flwr' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
