"""The example's gate turns red for each seeded regression, and stays green for harmless changes.

Every case replaces text of the example's client, and runs the command's own code on the example's
policy. By `LEVEL`, a harmless case turns red with probability 1e-6 at most: 5e-5 for all of them.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from leakbound.gate import policy, rules

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "ci-gate"
FACTS = "def facts():"
SENT = "        sent[name] = factor * value + NOISE * CLIP * noise\n"
NOISE = "        noise = torch.randn(value.shape, generator=SOURCE)\n"
RETURN = "    return sent\n"
FACTOR = "    factor = min(1.0, CLIP / float(norm))\n"
NORM = "    norm = torch.stack([value.norm() for value in change.values()]).norm()\n"
LOOP = "    for name, value in change.items():\n"
STEP = "                value -= RATE * gradient\n"

REGRESSIONS = {
    "noise off": [(SENT, "        sent[name] = factor * value\n")],
    "clip off": [(FACTOR, "    factor = 1.0\n")],
    "clip norm of twice the size, the same noise": [
        (FACTOR, "    factor = min(1.0, 2 * CLIP / float(norm))\n")
    ],
    "each tensor clipped alone to four times the norm": [
        (SENT, SENT.replace("factor *", "min(1.0, 4 * CLIP / float(value.norm())) *"))
    ],
    "sensitivity left out of the noise": [(SENT, SENT.replace(" CLIP *", ""))],
    "noise of half the std": [(SENT, SENT.replace("NOISE *", "NOISE / 2 *"))],
    "noise of 90 % of the std": [(SENT, SENT.replace("NOISE *", "0.9 * NOISE *"))],
    "std taken for a variance": [(SENT, SENT.replace("NOISE * CLIP", "(NOISE * CLIP) ** 2"))],
    "noise shared among four clients": [(SENT, SENT.replace("NOISE *", "NOISE / 4**0.5 *"))],
    "noise of twice the std": [(SENT, SENT.replace("NOISE *", "2 * NOISE *"))],
    "seed fixed in every call": [(NOISE, "        SOURCE.manual_seed(7)\n" + NOISE)],
    "seed fixed in the module": [("SOURCE.seed()", "SOURCE.manual_seed(7)")],
    "seed of the model for the noise": [(NOISE, NOISE.replace(", generator=SOURCE", ""))],
    "one draw for all entries of a tensor": [(NOISE, NOISE.replace("value.shape", "1"))],
    "one seed for all tensors": [
        (LOOP, "    seed = SOURCE.seed()\n" + LOOP),
        (NOISE, "        SOURCE.manual_seed(seed)\n"
         "        draws = torch.randn(640, generator=SOURCE)\n"
         "        noise = draws[: value.numel()].view_as(value)\n"),
    ],
    "Laplace noise": [
        (NOISE, "        noise = torch.distributions.Laplace(0, 0.5**0.5).sample(value.shape)\n"),
        ("    torch.manual_seed(1)\n", "    with torch.random.fork_rng():\n"
         "        torch.manual_seed(1)\n        return net()\n\n\ndef net():\n"),
    ],
    "uniform noise": [
        (NOISE, "        noise = (torch.rand(value.shape, generator=SOURCE) - 0.5) * 12**0.5\n")
    ],
    "noise on the weights alone": [(SENT, SENT.replace("noise\n", "noise * (value.ndim > 1)\n"))],
    "noise on the bias alone": [(SENT, SENT.replace("noise\n", "noise * (value.ndim < 2)\n"))],
    "one row without noise": [(SENT, "        noise[-1] = 0\n" + SENT)],
    "clip after the noise": [
        (SENT, SENT.replace("factor * ", "")),
        (RETURN, "    norm = torch.stack([one.norm() for one in sent.values()]).norm()\n"
         "    return {name: one * min(1.0, CLIP / float(norm)) for name, one in sent.items()}\n"),
    ],
    "no clip for the bias": [
        (SENT, SENT.replace("factor *", "(factor if value.ndim > 1 else 1) *"))
    ],
    "norm of the bias left out": [(NORM, NORM.replace("change.values()", "[change['1.bias']]"))],
    "update times the learning rate": [
        (RETURN, "    return {name: RATE * one for name, one in sent.items()}\n")
    ],
    "weights in place of the update": [
        (RETURN, "    weights = dict(build().named_parameters())\n"
         "    return {name: weights[name] + one for name, one in sent.items()}\n")
    ],
    "labels sent": [(RETURN, "    return sent | {'labels': labels}\n")],
    "batch norm statistics sent": [
        (RETURN, "    return sent | {'norm.running_mean': inputs.mean(0).flatten()}\n")
    ],
    "loss sent": [(RETURN, "    return sent | {'loss': torch.tensor(0.3)}\n")],
    "a tensor not sent": [(RETURN, "    return {'1.weight': sent['1.weight']}\n")],
    "rounded to whole numbers": [(RETURN, "    return {n: v.round() for n, v in sent.items()}\n")],
    "NaN from large inputs": [(SENT, SENT + "        sent[name] += 0 * torch.exp(inputs.max())\n")],
    "more rounds": [("ROUNDS, BATCH, RATE = 5", "ROUNDS, BATCH, RATE = 50")],
    "larger batch": [("ROUNDS, BATCH, RATE = 5, 16", "ROUNDS, BATCH, RATE = 5, 64")],
    "smaller clip norm and noise, not stated": [("CLIP, NOISE = 0.25", "CLIP, NOISE = 0.2")],
}  # fmt: skip
"""What makes the protection smaller or another than stated."""


def _names(pairs):
    return [(rf"\b{old}\b", new) for old, new in pairs]


HARMLESS = {
    "as it is": [],
    "a message": [(LOOP, "    if inputs.max() > 9:\n        print('large inputs')\n" + LOOP)],
    "a log line": [
        ("import torch\n", "import logging\n\nimport torch\n"),
        (LOOP, "    logging.getLogger('client').warning('norm %s', norm)\n" + LOOP),
    ],
    "a comment": [(LOOP, "    # every tensor gets its own noise\n" + LOOP)],
    "a docstring": [('"""What leaves for the server."""', '"""The release."""')],
    "an unused function": [(FACTS, "def unused():\n    return 1\n\n\n" + FACTS)],
    "a helper for the norm": [
        (NORM, "    norm = length(change)\n"),
        (FACTS, "def length(change):\n    return torch.cat([v.ravel() for v in change.values()])"
         ".norm()\n\n\n" + FACTS),
    ],
    "a comprehension": [
        ("    sent = {}\n", ""), (LOOP, ""), (NOISE, ""),
        (SENT, "    def draw(like):\n        return torch.randn(like.shape, generator=SOURCE)\n\n"
         "    sent = {n: factor * v + NOISE * CLIP * draw(v) for n, v in change.items()}\n"),
    ],
    "noise in one vector": [
        (LOOP, "    count = sum(v.numel() for v in change.values())\n"
         "    whole = torch.randn(count, generator=SOURCE)\n" + LOOP),
        (NOISE, "        noise, whole = whole[: value.numel()].view_as(value), "
         "whole[value.numel() :]\n"),
    ],
    "noise by normal_": [
        (NOISE, "        noise = torch.empty_like(value).normal_(generator=SOURCE)\n")
    ],
    "noise by torch.normal": [
        (NOISE, "        noise = torch.normal(0.0, 1.0, value.shape, generator=SOURCE)\n")
    ],
    "noise of numpy": [
        ("import torch\n", "import numpy as np\nimport torch\n"),
        (NOISE, "        noise = torch.from_numpy(np.random.default_rng()"
         ".standard_normal(value.shape)).float()\n"),
    ],
    "noise of numpy's global state": [
        ("import torch\n", "import numpy as np\nimport torch\n"),
        (NOISE, "        noise = torch.from_numpy(np.random.standard_normal(value.shape))\n"),
    ],
    "noise of the operating system": [
        ("import torch\n", "import random\n\nimport torch\n"),
        (NOISE, "        draws = random.SystemRandom()\n        noise = torch.tensor("
         "[draws.gauss(0, 1) for _ in range(value.numel())]).view_as(value)\n"),
    ],
    "a new generator for every call": [
        (LOOP, "    source = torch.Generator()\n    source.seed()\n" + LOOP),
        (NOISE, NOISE.replace("SOURCE", "source")),
    ],
    "noise from two halves": [
        (SENT, "        more = torch.randn(value.shape, generator=SOURCE)\n"
         "        noise = (noise + more) / 2**0.5\n" + SENT)
    ],
    "double precision": [
        ("    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))",
         "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()"),
        ("model(inputs[half])", "model(inputs[half].double())"),
    ],
    "double precision of what is sent": [
        (RETURN, "    return {n: v.double() for n, v in sent.items()}\n")
    ],
    "arrays in place of tensors": [
        (RETURN, "    return {n: v.numpy() for n, v in sent.items()}\n")
    ],
    "lists in place of tensors": [
        (RETURN, "    return {n: v.tolist() for n, v in sent.items()}\n")
    ],
    "tensors in another order": [(RETURN, "    return dict(reversed(sent.items()))\n")],
    "a Parameter": [(RETURN, "    return {n: nn.Parameter(v) for n, v in sent.items()}\n")],
    "half as large a learning rate": [("= 5, 16, 0.5", "= 5, 16, 0.25")],
    "a larger learning rate": [("= 5, 16, 0.5", "= 5, 16, 5.0")],
    "a factor in place of min": [
        (FACTOR, "    factor = CLIP / max(CLIP, float(norm))\n")
    ],
    "a clip of torch's": [
        (NORM, ""), (FACTOR, "    norm = nn.utils.clip_grads_with_norm_\n    factor = 1.0\n"
         "    length = torch.cat([v.ravel() for v in change.values()]).norm()\n"
         "    factor = torch.clamp(CLIP / length, max=1.0)\n"),
    ],
    "a stricter clip": [(FACTOR, "    factor = min(1.0, 0.5 * CLIP / float(norm))\n")],
    "every update scaled to the norm": [(FACTOR, "    factor = CLIP / float(norm)\n")],
    "one local step": [
        ("for half in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):",
         "for half in [slice(BATCH)]:")
    ],
    "four local epochs": [
        ("for half in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):",
         "for half in [slice(BATCH)] * 4:")
    ],
    "the halves in the other order": [
        ("(slice(0, BATCH // 2), slice(BATCH // 2, BATCH))",
         "(slice(BATCH // 2, BATCH), slice(0, BATCH // 2))")
    ],
    "examples shuffled": [
        ("    change = train(build(), inputs, labels)\n",
         "    order = torch.randperm(len(inputs), generator=SOURCE)\n"
         "    change = train(build(), inputs[order], labels[order])\n")
    ],
    "dropout": [
        ("nn.Sequential(nn.Flatten(), ", "nn.Sequential(nn.Flatten(), nn.Dropout(0.5), "),
        ("    return nn.Sequential", "    torch.manual_seed(1)\n    return nn.Sequential"),
    ],
    "flipped images": [("model(inputs[half])", "model(inputs[half].flip(-1))")],
    "normalized inputs": [("model(inputs[half])", "model((inputs[half] - 0.5) / 0.25)")],
    "inputs held to their range": [("model(inputs[half])", "model(inputs[half].clamp(0, 1))")],
    "momentum": [(STEP, "                value -= RATE * (gradient + 0.9 * gradient)\n")],
    "weight decay": [(STEP, "                value -= RATE * (gradient + 0.01 * value)\n")],
    "signs of gradients": [(STEP, "                value -= RATE * gradient.sign()\n")],
    "label smoothing": [("labels[half])", "labels[half], label_smoothing=0.1)")],
    "another loss": [
        ("cross_entropy(model(inputs[half]), labels[half])",
         "(model(inputs[half]) ** 2).mean() + cross_entropy(model(inputs[half]), labels[half])")
    ],
    "labels counted, not sent": [(LOOP, "    seen = labels.bincount()\n    del seen\n" + LOOP)],
    "settings also say who takes part": [
        ('        "local": {"batch": BATCH},\n',
         '        "local": {"batch": BATCH},\n        "participation": {"law": "all"},\n')
    ],
    "gradients by backward": [
        ("        gradients = torch.autograd.grad(loss, list(model.parameters()))\n",
         "        model.zero_grad()\n        loss.backward()\n"
         "        gradients = [value.grad for value in model.parameters()]\n")
    ],
    "weights of another seed": [("manual_seed(1)", "manual_seed(5)")],
    "weights of a third seed": [("manual_seed(1)", "manual_seed(99)")],
    "a hidden layer": [
        ("nn.Linear(64, 10))", "nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))")
    ],
    "a wide hidden layer": [
        ("nn.Linear(64, 10))", "nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))")
    ],
    "no bias": [("nn.Linear(64, 10))", "nn.Linear(64, 10, bias=False))")],
    "a convolution": [
        ("nn.Sequential(nn.Flatten(), nn.Linear(64, 10))",
         "nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))")
    ],
    "names of variables": [("factor", "shrink"), ("change", "moved"), ("noise = ", "draw = "),
                           ("CLIP * noise", "CLIP * draw")],
    "names of constants": [("CLIP", "BOUND"), ("NOISE", "LEVEL")],
}  # fmt: skip
"""What changes neither what leaves in law, nor what is stated."""


def answers(folder, changes, repeats="repeats = 768"):
    """The requirements of the example with its client changed."""
    place = shutil.copytree(EXAMPLE, folder / "gate")
    text = (place / "client.py").read_text("utf-8")
    for old, new in changes:
        assert re.search(re.escape(old), text), old
        text = text.replace(old, new)
    (place / "client.py").write_text(text, "utf-8")
    stated = (place / "policy.toml").read_text("utf-8").replace("repeats = 768", repeats)
    (place / "policy.toml").write_text(stated, "utf-8")
    return rules.decide(policy.read(place / "policy.toml"))


@pytest.fixture
def client_of(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "gate"))
    return lambda *given: answers(tmp_path, *given)


@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_regression_turns_the_gate_red(client_of, name):
    found = client_of(REGRESSIONS[name])
    broken = [one.key for one in found if one.answer == policy.BROKEN]
    assert broken


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_change_leaves_the_gate_green(client_of, name):
    found = client_of(HARMLESS[name], "repeats = 256")
    assert [one for one in found if one.answer != policy.HOLDS] == []
