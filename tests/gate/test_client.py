"""The check of a client whose examples are clipped, and of clients that cannot be checked."""

from __future__ import annotations

import re
import sys

import pytest

from leakbound.gate import policy, rules

CLIENT = '''
import os, sys, time
import torch
from torch import nn
from torch.nn.functional import one_hot

CLIP, NOISE = 0.5, 1.0


def build(input_shape, classes):
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], classes))


def update(inputs, labels):
    """One step of DP-SGD: the noisy mean of clipped gradients."""
    model = build(inputs.shape[1:], 4)
    errors = model(inputs).softmax(1).detach() - one_hot(labels, 4)
    each = {"1.weight": errors[:, :, None] * inputs[:, None], "1.bias": errors}
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
    factors = (CLIP / norms).clamp(max=1.0)
    sums = {n: torch.einsum("b,b...->...", factors, g) for n, g in each.items()}
    noise = torch.Generator()
    noise.seed()
    draw = {n: torch.randn(g.shape, generator=noise) for n, g in sums.items()}
    return {n: (g + NOISE * CLIP * draw[n]) / len(inputs) for n, g in sums.items()}
'''
DEPLOYMENT = """
rounds = 1
clip = {norm = 0.5, kind = "example"}
noise = {multiplier = 1.0, at = "optimizer", seeded = false}
local = {batch = 8, steps = 1}
"""
POLICY = """
[[client]]
update = "client:update"
deployment = "deployment.toml"
model = "client:build"
input_shape = [6]
classes = 4
repeats = 64
same_signal = true
"""


@pytest.fixture
def checked(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def check(*changes, deployment=DEPLOYMENT, more="", repeats=64):
        text = CLIENT
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        (tmp_path / "client.py").write_text(text)
        (tmp_path / "deployment.toml").write_text(deployment)
        (tmp_path / "policy.toml").write_text(POLICY.replace("64", str(repeats)) + more)
        found = rules.decide(policy.read(tmp_path / "policy.toml"))
        wrong = {one.key for one in found if one.answer == policy.BROKEN}
        return wrong, found

    return check


@pytest.mark.parametrize("system", [sys.platform, "darwin"])  # fork server or spawn
def test_a_step_of_dp_sgd_holds(checked, system, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    wrong, found = checked()
    assert wrong == set()
    assert [one.key for one in found] == ["sent", "noise", "clip", "clip", "sensitivity"]
    assert "noise of std 0.0625" in found[1].stated  # 1.0 * 0.5 / 8
    assert "at most 0.5" in found[2].stated  # eight examples of 0.5, over 8
    assert "at most 0.125" in found[4].stated


CLIPPED = "factors = (CLIP / norms).clamp(max=1.0)"
MEAN = """mean = torch.stack([g.mean(0).norm() for g in each.values()]).norm()
    factors = (CLIP / mean).clamp(max=1.0).expand(len(inputs))"""


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ([("NOISE * CLIP", "0 * CLIP")], {"noise"}),
        ([(CLIPPED, MEAN)], {"sensitivity"}),  # the mean is clipped, and not each example
        ([(CLIPPED, "factors = torch.ones(len(inputs))")], {"clip", "sensitivity"}),
        ([("/ len(inputs) for", "/ len(inputs) ** 2 for")], {"noise"}),
        ([("NOISE * CLIP * draw[n]", "NOISE * CLIP * draw[n] / 8")], {"noise"}),
        ([("noise.seed()", "noise.manual_seed(int(inputs.sum()))")], {"noise"}),
    ],
)
def test_mistakes_in_a_step(checked, changes, keys):
    wrong, _ = checked(*changes)
    assert keys <= wrong


def test_uniform_noise_is_not_gaussian(checked):
    draw = "torch.randn(g.shape, generator=noise)"
    wrong, _ = checked(
        (draw, "(torch.rand(g.shape, generator=noise) - 0.5) * 12 ** 0.5"), repeats=256
    )
    assert wrong == {"noise"}


def test_a_server_that_adds_the_noise(checked):
    central = DEPLOYMENT.replace('"optimizer"', '"server"').replace('"example"', '"l2"')
    exact = ("NOISE * CLIP", "0 * CLIP")
    wrong, found = checked(exact, (CLIPPED, MEAN), deployment=central, more="scale = 1.0\n")
    assert wrong == set()
    assert [one.key for one in found] == ["sent", "clip", "clip"]
    wrong, _ = checked(exact, (CLIPPED, "factors = torch.ones(8)"), deployment=central)
    assert wrong == {"clip"}


def test_reports(checked):
    said = ("CLIP, NOISE = 0.5, 1.0", "CLIP, NOISE = 0.5, 1.0\ndef facts():\n    return {}\n")
    more = 'facts = "client:facts"\nreports = ["rounds"]\n'

    def answer(facts):
        _, found = checked((said[0], said[1].format(facts)), more=more, repeats=8)
        (own,) = (one for one in found if one.key == "facts")
        return own.answer, own.found

    assert answer("{'rounds': 1}") == (policy.HOLDS, "1 settings agree")
    assert answer("{'rounds': 2}") == (policy.BROKEN, "rounds is 2, stated 1")
    _, found = checked((said[0], said[1].format("3")), more=more, repeats=8)
    assert "TypeError: 'int' object is not iterable" in found[0].found
    assert answer("{}") == (policy.UNSURE, "rounds is not reported")
    open_ = answer("{'rounds': 1, 'participation': {'law': 'all'}}")
    assert open_ == (policy.UNSURE, "participation.law is not stated in deployment.toml")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("errors = model", "raise OSError('no data')\n    errors = model", "OSError: no data"),
        ("errors = model", "return torch.ones(3)\n    errors = model", "has no attribute 'items'"),
        ("errors = model", "os._exit(3)\n    errors = model", "ended; call the function yourself"),
        ("errors = model", "time.sleep(99)\n    errors = model", "takes too long"),
        ("def update", "def other", "module 'client' has no 'update'"),
        ("import os, sys", "import nowhere, sys", "needs 'nowhere'"),
    ],
)
def test_code_that_cannot_be_called_says_why(checked, old, new, words):
    _, found = checked((old, new), more="seconds = 3\n" * ("sleep" in new), repeats=8)
    assert [one.answer for one in found] == [policy.UNSURE]
    assert words in found[0].found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("norm = 0.5, ", ""),
        ("multiplier = 1.0, ", ""),
        ("batch = 8, ", ""),
        ('at = "optimizer", ', ""),
        ('"optimizer"', '"share"'),
        ('"optimizer"', '"client"'),
    ],
)
def test_a_deployment_that_does_not_say_enough(checked, old, new):
    _, found = checked(deployment=DEPLOYMENT.replace(old, new))
    assert [one.answer for one in found] == [policy.UNSURE]
    assert re.search("state clip.norm, noise.multiplier", found[0].found)


def test_nothing_leaves(checked):
    wrong, found = checked(("return {n: (g", "return {'x' + n: (g"))
    assert wrong == {"sent", "update"}
    assert "1.bias is missing" in found[0].found
