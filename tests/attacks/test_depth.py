"""How deep the gradient step lies below `leakbound attack`, on a real stack."""

import sys
from pathlib import Path

import pytest
import torch

import leakbound
from leakbound import cli
from leakbound.engines.base import VARIABLE
from leakbound.engines.bundle import Bundle
from leakbound.engines.single import Single

ROOT = str(Path(leakbound.__file__).parent)
MOST = 11


def _between():
    """Frames of the package above the caller, up to the command's own function."""
    frame, found = sys._getframe(2), []
    while frame is not None and frame.f_code.co_name != "attack":
        if frame.f_code.co_filename.startswith(ROOT):
            place = frame.f_code.co_filename.removeprefix(ROOT)
            found.append(f"{place} {frame.f_code.co_name}")
        frame = frame.f_back
    return found


@pytest.fixture
def stacks(monkeypatch):
    """The frames above every gradient step: of an exact engine, or of autograd."""
    found = []

    def watch(owner, name):
        real = getattr(owner, name)

        def step(*given, **more):
            found.append(_between())
            return real(*given, **more)

        monkeypatch.setattr(owner, name, step)

    for owner, name in ((Single, "gradient"), (Bundle, "gradient"), (torch.autograd, "grad")):
        watch(owner, name)
    return found


@pytest.mark.parametrize(
    ("attack", "defense", "engine"),
    [
        ("inverting_gradients,steps=2", "none", "plain"),
        ("inverting_gradients,steps=2,restarts=2", "secure_aggregation", "plain"),
        ("inverting_gradients,steps=2,restarts=2", "none", "autograd"),
        ("dlg,steps=1,restarts=2", "none", "plain"),
    ],
)
def test_few_frames_from_the_command_to_the_gradient_step(
    attack, defense, engine, stacks, monkeypatch, capsys
):
    monkeypatch.setenv(VARIABLE, engine)
    options = ["--model", "mlp,hidden=[8]", "--attack", attack, "--defense", defense]
    with pytest.raises(SystemExit, match="0"):
        cli.main(["attack", "--data", "digits", *options])
    assert "verdict" in capsys.readouterr().out
    last = "_by_autograd" if engine == "autograd" else "_by_engine"
    steps = [stack for stack in stacks if stack and stack[0].endswith(last)]
    assert len(steps) >= 3
    assert max(map(len, steps)) <= MOST, max(steps, key=len)
